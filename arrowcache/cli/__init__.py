"""Command line: the `arrowcache` command. What it can do is in commands.py, for the extra "explore".

Exit codes: 0 all is well; 1 something was wrong with the cache, such as that it is none, or an operation on
it, or writing the output, failed; 2 wrong usage: an argument, a path where nothing is, a query, an extra
that is not installed; 130 Ctrl-C.
Errors are one sentence on stderr. The library names arguments and methods of Python, and `of_shell` options
and commands instead.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import TextIO

from arrowcache import __version__
from arrowcache.display import printable

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130
_OPTIONS = "capacity|segment_bytes|segment_rows|headroom|durable|schema|interval|again|columns|rows"
_APART = r"(?<![\w/.'\"=-])"  # no part of a path, of a name or of a text in quotes
_SHELL = (
    (r"\b(arrowcache\.)?Cache\.create\b(\(\))?", "arrowcache create"),
    (r": raise capacity to ", ": raise --capacity to "),
    (r"\bcache\.(resize|evict|verify|thaw)\(\)", r"arrowcache \1"),
    (r"\bcache\.verify\(repair=False\)", "arrowcache verify --report-only"),
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
"""Pairs of a pattern in the library's sentences and its replacement for a shell."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    warnings.showwarning = _show_warning
    try:
        if given == ["--version"]:
            sys.stdout.write(f"arrowcache {__version__}\n")
            code = OK
        else:
            from arrowcache.cli.commands import run

            code = run(given)
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "arrowcache":
            raise
        complain(f"the command needs {error.name}, which is not installed: pip install 'arrowcache[explore]'")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        _write_nowhere(sys.stdout)
        return OK
    except OSError as error:
        _write_nowhere(sys.stdout)
        complain(f"the output: {error.strerror}")
        return WRONG
    return code


def of_shell(sentence: str, known: Collection[str] | None = None) -> str:
    """Return a sentence of the library with options for arguments, and commands for methods.

    Args:
        known: options and arguments of the command, such as "--capacity" and "CACHE". Only these become
            options. None: all.
    """

    def option(found: re.Match[str]) -> str:
        name = "column" if found[1] == "columns" else found[1].replace("_", "-")
        if known is None or f"--{name}" in known:
            return f"--{name}"
        return name.upper() if name.upper() in known else name.replace("-", " ")

    for python, shell in _SHELL:
        sentence = re.sub(python, shell, sentence)
    return re.sub(rf"--({_OPTIONS})\b", option, sentence)


def complain(sentence: str) -> None:
    """Write to stderr why a command fails, or what else is to be known, if anybody reads it."""
    try:
        sys.stderr.write(f"arrowcache: {printable(sentence)}\n")
        sys.stderr.flush()
    except (AttributeError, ValueError):  # it is closed, or has `write` alone
        pass
    except OSError:  # the exit code says it, too
        _write_nowhere(sys.stderr)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning, of whichever package, in one line."""
    complain(of_shell(f"warning: {' '.join(str(message).split())}"))


def _open_closed_streams() -> None:
    """Replace standard streams that a shell closed, as by `>&-`: libraries write without asking."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # open until the process ends
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", closefd=False))


def _write_nowhere(stream: TextIO) -> None:
    """Discard unwritten output: the interpreter would fail to flush it, with exit code 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
