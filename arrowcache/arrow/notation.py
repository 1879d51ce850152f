"""Notation: a schema as one line of text, which people write and read. Pure.

    image: float32[64, 64], label: int64, tokens: ragged int32, boxes: ragged float32[4], "a name": string

Fields are divided by commas, or each has a line. A type is a dtype, with a shape in brackets unless it is a
scalar; `ragged` before it where the first axis differs from row to row, and the brackets then have the rest
of the shape; or `string`, `binary`, `timestamp`. A name of other characters than letters, digits and
`_ . - /` stands in double quotes, as in JSON. What follows a `#` up to the end of the line is left out.
`format_schema` and `parse_schema` are each other's inverse.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from arrowcache.arrow.dtype import DTYPES
from arrowcache.arrow.schema import (
    Binary,
    FieldType,
    Ragged,
    Schema,
    String,
    Tensor,
    Timestamp,
)
from arrowcache.errors import SchemaError

_EXAMPLE = "'image: float32[64, 64], label: int64, name: string'"
_WORDS: dict[str, FieldType] = {"string": String(), "binary": Binary(), "timestamp": Timestamp()}
_OTHER_NAMES = {
    "str": "string", "text": "string", "utf8": "string", "bytes": "binary", "datetime64": "timestamp",
    "float": "float64", "double": "float64", "half": "float16", "int": "int64", "complex": "complex128",
}  # fmt: skip
_PLAIN_NAME = re.compile(r"[\w./-]+")
_SPACE = re.compile(r"(?:\s|#[^\n]*)+")
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[\w./-]+|.', re.DOTALL)
_SHOWN = 20  # characters of a text around a mistake


def type_name(kind: FieldType) -> str:
    """A type as one writes it: float32[64, 1024], ragged int8[3], string."""
    if isinstance(kind, Tensor):
        return f"{kind.dtype}{list(kind.shape)}" if kind.shape else kind.dtype
    if isinstance(kind, Ragged):
        return f"ragged {kind.dtype}{list(kind.inner_shape)}" if kind.inner_shape else f"ragged {kind.dtype}"
    return type(kind).__name__.lower()


def format_schema(schema: Schema) -> str:
    """Return the columns and types of a schema on one line."""
    return ", ".join(f"{_format_name(name)}: {type_name(kind)}" for name, kind in schema.items())


def _format_name(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def difference(one: Schema, other: Schema) -> str:
    """Return the fields in which two schemas differ, as a sentence's end: "label is int64, not int8"."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if not names:
        return f"its fields are in the order {', '.join(one)}, not {', '.join(other)}"
    return ", ".join(
        f"{_format_name(name)} is {type_name(one[name]) if name in one else 'not in it'}, "
        + (f"not {type_name(other[name])}" if name in other and name in one else "")
        + (f"asked for as {type_name(other[name])}" if name not in one else "")
        + ("and not asked for" if name not in other else "")
        for name in names
    )


def parse_schema(text: str) -> Schema:
    """The schema that a text describes.

    Raises: SchemaError: it describes none; says where, and what is expected there.
    """
    return _Parser(text).schema()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._skip_space()

    def schema(self) -> Schema:
        fields: dict[str, FieldType] = {}
        while self._at < len(self._text):
            start = self._at
            name = self._name()
            if name in fields:
                self._fail(start, f"the field {name!r} is there twice")
            self._expect(":", f"a colon and the type of {name!r}")
            fields[name] = self._type()
            has_ended = self._at == len(self._text) or "\n" in self._text[self._end : self._at]
            if not self._accept(",") and not has_ended:
                self._fail(self._at, f"a comma is expected after the type of {name!r}")
        if not fields:
            raise SchemaError(f"the schema is empty: write it such as {_EXAMPLE}")
        try:
            return Schema(fields)
        except (TypeError, ValueError) as error:
            raise SchemaError(str(error)) from None

    def _name(self) -> str:
        start, token = self._at, self._take()
        if token.startswith('"') and len(token) > 1:
            try:
                return str(json.loads(token))
            except ValueError:
                self._fail(start, "the name in quotes is no text of JSON")
        if not _PLAIN_NAME.fullmatch(token):
            self._fail(
                start, 'a field\'s name is expected, in double quotes ("a name") if it has such characters'
            )
        return token

    def _type(self) -> FieldType:
        start, word = self._at, self._take()
        is_ragged = word == "ragged"
        if is_ragged:
            start, word = self._at, self._take()
        if word in _WORDS and not is_ragged:
            if self._next() == "[":
                self._fail(self._at, f"a {word} has no shape")
            return _WORDS[word]
        if word not in DTYPES:
            self._fail(start, _unknown(word, is_ragged))
        shape = self._shape()
        return Ragged(word, shape) if is_ragged else Tensor(word, shape)

    def _shape(self) -> tuple[int, ...]:
        if self._next() == "(":
            self._fail(self._at, "a shape stands in square brackets, such as [64, 64]")
        sizes: list[int] = []
        if not self._accept("["):
            return ()
        while not self._accept("]"):
            start, token = self._at, self._take()
            if not re.fullmatch(r"[0-9]{1,18}", token) or int(token) == 0:
                self._fail(start, "a shape has sizes of at least 1, such as [64, 64]")
            sizes.append(int(token))
            if self._next() != "]":
                self._expect(",", "a comma or the closing bracket of the shape")
        return tuple(sizes)

    # tokens

    def _next(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        return found[0] if found else ""

    def _take(self) -> str:
        token = self._next()
        self._at += len(token)
        self._end = self._at
        self._skip_space()
        return token

    def _accept(self, token: str) -> bool:
        return self._next() == token and bool(self._take())

    def _expect(self, token: str, what: str) -> None:
        if not self._accept(token):
            self._fail(self._at, f"{what} is expected")

    def _skip_space(self) -> None:
        if space := _SPACE.match(self._text, self._at):
            self._at = space.end()

    def _fail(self, at: int, why: str) -> NoReturn:
        raise SchemaError(f"the schema at {_place(self._text, at)}: {why}")


def _unknown(word: str, is_ragged: bool) -> str:
    import difflib  # 4 ms that only an error takes

    known = [*DTYPES, *([] if is_ragged else [*_WORDS, "ragged"])]
    near = [_OTHER_NAMES[word]] if word in _OTHER_NAMES else difflib.get_close_matches(word, known, 2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    found = f"{word!r} is no {'dtype' if is_ragged else 'type'}" if word else "a type is expected"
    return f"{found}: {hint}there are {', '.join(known)}"


def _place(text: str, at: int) -> str:
    """Return the place and the text of a character, for messages."""
    if at >= len(text):
        return f"its end, after {_shown(text.rstrip()[-_SHOWN:])}" if text.strip() else "its end"
    line = text.count("\n", 0, at)
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    where = f"line {line + 1}, character {column}" if "\n" in text.strip() else f"character {column}"
    return f"{where}, {_shown(text[at : at + _SHOWN].splitlines()[0])}"


def _shown(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
