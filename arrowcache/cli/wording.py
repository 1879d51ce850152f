"""Wording: the library's sentences, which name Python's arguments and methods, in words of a shell. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

_OPTIONS = "capacity|segment_bytes|segment_rows|headroom|durable|schema|interval|again|columns|rows"
_APART = r"(?<![\w/.'\"=-])"  # no part of a path, of a name or of a text in quotes

_RULES = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\b(arrowcache\.)?Cache\.create\b(\(\))?", "arrowcache create"),
        (r": raise capacity to ", ": raise --capacity to "),
        (r"\bcache\.(resize|evict|verify)\(\)", r"arrowcache \1"),
        (r"with cache\.set_pace\(\)", "in Python"),
        (r",? or pass on_full='wait'", ""),
        (r"; cache\.tag\(ids, '.*'\) gives it to rows, and a Loader takes .* expect='.*'", ""),
        (r"raise capacity, or raise headroom", "or raise the capacity by `arrowcache resize`"),
        (r"\bsql and to_pandas have\b", "`arrowcache sql` has"),
        (r": open it, or pass exist_ok=True", ": take another path, or `arrowcache resize` to change it"),
        (r" with compression=(None|'\w+')", ""),  # the command knows it by the file's name
        (r", or say which of \([^)]*\) it has", ", or call it .gz if it is compressed by gzip"),
        (rf"{_APART}again=True\b", "--again"),
        (rf"{_APART}({_OPTIONS})=('[^']*'|[\w.+-]+)", r"--\1 \2"),
        (rf"{_APART}({_OPTIONS})=(?!\S)", r"--\1"),
        (rf"{_APART}(segment_bytes|segment_rows)(?![\w'\"=])", r"--\1"),
    )
]
_OPTION = re.compile(rf"--({_OPTIONS})\b")
_NAMES = {"columns": "column"}  # of options that are not called like the argument


def of_shell(sentence: str, known: Collection[str] | None = None) -> str:
    """A sentence of the library with options for arguments, and commands for methods.

    Args:
        known: the options and arguments of the command that says it, such as "--capacity" and "CACHE": others
            are not named as options. None: all.
    """

    def of_command(found: re.Match[str]) -> str:
        name = _NAMES.get(found[1], found[1]).replace("_", "-")
        if known is None or f"--{name}" in known:
            return f"--{name}"
        return name.upper() if name.upper() in known else name.replace("-", " ")

    for pattern, words in _RULES:
        sentence = pattern.sub(words, sentence)
    return _OPTION.sub(of_command, sentence)
