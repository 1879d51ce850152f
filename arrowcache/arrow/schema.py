"""Schema: what a sample holds, which Arrow column holds it, and its notation as text. Pure.

A schema maps field names to logical types. Each type knows its physical Arrow type, and a
schema orders the columns as they lie in a segment: fixed-width ones first, so that their
buffers start at the same offset in every segment of equally many rows.

    logical                     physical                           read as
    Tensor(dtype, ())           T                                  (batch,)
    Tensor(dtype, shape)        list<T>, uniform offsets           (batch, *shape)
    Ragged(dtype, inner_shape)  list<T>                            values and offsets
    String(), Binary()          utf8, binary                       list of str, of bytes
    Timestamp()                 timestamp[us]                      datetime64[us]

T is the primitive type of the dtype; bool is stored as uint8, bfloat16 as uint16, complex64
and complex128 as float32 and float64 with a trailing 2. NumPy has no bfloat16, so its readers
see the bits as uint16; PyTorch and TensorFlow see bfloat16. Every column is non-null.
`list<T>` and not `fixed_size_list`: tensorflow-io 0.37.1 refuses the latter.

Notation, one line of text, which people write and read:

    image: float32[64, 64], label: int64, tokens: ragged int32, boxes: ragged float32[4], "a name": string

Fields are divided by commas, or each has a line. A type is a dtype, with a shape in brackets unless it is a
scalar; `ragged` before it where the first axis differs from row to row, and the brackets then have the rest
of the shape; or `string`, `binary`, `timestamp`. A name of other characters than letters, digits and
`_ . - /` stands in double quotes, as in JSON. What follows a `#` up to the end of the line is left out.
`format_schema` and `parse_schema` are each other's inverse.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa

from arrowcache.arrow.dtype import DTYPES, dtype_name, dtype_of
from arrowcache.display import Card, Shown, Table
from arrowcache.errors import SchemaError
from arrowcache.lifetimes import cached_property
from arrowcache.units import as_int, did_you_mean, format_bytes, format_count

RESERVED_NAMES = ("_seq", "_row", "_age_seconds")
METADATA_KEY = b"arrowcache"


def _shape(shape: object, what: str) -> tuple[int, ...]:
    try:
        if isinstance(shape, str):
            raise TypeError
        sizes = tuple(as_int(n) for n in shape)  # type: ignore[attr-defined]  # see the try
    except TypeError:
        raise ValueError(f"{what} {shape!r} must be a tuple of positive sizes") from None
    if any(n <= 0 for n in sizes):
        raise ValueError(f"{what} {sizes} has a size that is not positive")
    return sizes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the same dtype and shape in every sample; shape () is a scalar."""

    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "shape", _shape(self.shape, "shape"))

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype that NumPy readers see."""
        return dtype_of(self.dtype).numpy

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def elements(self) -> int:
        """Stored elements of one row: a complex number is two."""
        return math.prod(self.shape) * dtype_of(self.dtype).elements

    @property
    def is_list(self) -> bool:
        """True if a row is a list in Arrow, with an offset. Else it is one value."""
        return self.shape != () or self.elements > 1

    @property
    def arrow_type(self) -> pa.DataType:
        value_type = dtype_of(self.dtype).arrow_type
        return _list_of(value_type) if self.is_list else value_type


@dataclass(frozen=True, slots=True)
class Ragged:
    """A tensor whose first axis differs from sample to sample; the inner shape is fixed."""

    dtype: str
    inner_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "inner_shape", _shape(self.inner_shape, "inner_shape"))

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype that NumPy readers see."""
        return dtype_of(self.dtype).numpy

    @property
    def item_bytes(self) -> int:
        """Bytes of one entry along the ragged axis."""
        return math.prod(self.inner_shape) * self.numpy_dtype.itemsize

    @property
    def elements(self) -> int:
        """Stored elements of one entry along the ragged axis: a complex number is two."""
        return math.prod(self.inner_shape) * dtype_of(self.dtype).elements

    @property
    def arrow_type(self) -> pa.DataType:
        return _list_of(dtype_of(self.dtype).arrow_type)


@dataclass(frozen=True, slots=True)
class String:
    """A text, stored as UTF-8."""

    arrow_type: ClassVar[pa.DataType] = pa.utf8()


@dataclass(frozen=True, slots=True)
class Binary:
    """Bytes of any length."""

    arrow_type: ClassVar[pa.DataType] = pa.binary()


@dataclass(frozen=True, slots=True)
class Timestamp:
    """A moment in microseconds, without a time zone (UTC by convention)."""

    numpy_dtype: ClassVar[np.dtype[Any]] = np.dtype("datetime64[us]")
    shape: ClassVar[tuple[int, ...]] = ()
    row_bytes: ClassVar[int] = 8
    elements: ClassVar[int] = 1
    is_list: ClassVar[bool] = False
    arrow_type: ClassVar[pa.DataType] = pa.timestamp("us")


FixedType = Tensor | Timestamp
VariableType = Ragged | String | Binary
FieldType = FixedType | VariableType
_TYPES = {kind.__name__.lower(): kind for kind in (Tensor, Ragged, String, Binary, Timestamp)}


def _list_of(value_type: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", value_type, nullable=False))


_NAMES = ("x", "y", "z", "w")  # that are proposed for the first values of a sample without names


class Schema(Shown, Mapping[str, FieldType]):
    """The fields of a sample, in the order given. Immutable, hashable, comparable.

    Args:
        fields: name -> Tensor, Ragged, String, Binary or Timestamp.
    Raises: ValueError: no field, or a name that is empty or reserved. TypeError: not a type.
    """

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        if not isinstance(fields, Mapping):
            raise TypeError(f"a schema is a mapping of field names to types, not {fields!r}")
        self._fields = dict(fields)
        if not self._fields:
            raise ValueError("a schema needs at least one field")
        for name, kind in self._fields.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"field name {name!r} must be a non-empty text")
            if name in RESERVED_NAMES:
                raise ValueError(f"field name {name!r} is reserved: loaders say there which row it is")
            if not isinstance(kind, tuple(_TYPES.values())):
                raise TypeError(
                    f"field {name!r}: expected one of {', '.join(t.__name__ for t in _TYPES.values())}"
                    f" such as Tensor('float32', (3, 4)), got {kind!r}"
                )
        _ = self.arrow  # a name that Arrow cannot hold fails here

    def __getitem__(self, name: str) -> FieldType:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        return list(self._fields.items()) == list(other._fields.items())

    def __hash__(self) -> int:
        return hash(tuple(self._fields.items()))

    def __repr__(self) -> str:
        return f"Schema({self._fields!r})"

    def _card(self) -> Card:
        return Card("Schema", "", [self.table])

    @property
    def table(self) -> Table:
        """The columns and what a row takes, to be shown."""
        fixed = sum(kind.row_bytes for kind in self.fixed.values())
        variable = format_count(len(self.variable), "column")
        more = f", and what {variable} of any length hold" if self.variable else ""
        total = f"{format_count(len(self), 'column')}, {format_bytes(fixed)} a row{more}"
        rows = [(name, type(kind).__name__, *_shown(kind)) for name, kind in self.items()]
        return Table(("column", "type", "dtype", "shape", "bytes a row"), rows, total, ("bytes a row",))

    @classmethod
    def infer(cls, sample: Mapping[str, Any]) -> Schema:
        """Derive the schema of one sample: arrays and tensors, numbers, str, bytes, datetimes.

        Python int becomes int64, float float64, bool bool, complex complex128. A ragged field
        cannot be told from one sample: declare it.

        Raises: SchemaError: a value that no type holds. TypeError: a sample whose values have no names.
        """
        from arrowcache.arrow.convert import infer_type

        if not hasattr(sample, "items"):
            raise TypeError(_without_names(sample))
        return cls({name: infer_type(name, value) for name, value in sample.items()})

    @cached_property
    def fixed(self) -> dict[str, FixedType]:
        """The fixed-width fields, in physical order."""
        return {n: t for n, t in self._fields.items() if isinstance(t, Tensor | Timestamp)}

    @cached_property
    def variable(self) -> dict[str, VariableType]:
        """The variable-length fields, in physical order; they follow the fixed ones."""
        return {n: t for n, t in self._fields.items() if isinstance(t, Ragged | String | Binary)}

    @cached_property
    def arrow(self) -> pa.Schema:
        """The physical Arrow schema; each field's metadata holds its logical type as JSON."""
        return pa.schema(
            [
                pa.field(
                    name,
                    kind.arrow_type,
                    nullable=False,
                    metadata={METADATA_KEY: json.dumps(_describe(kind)).encode()},
                )
                for name, kind in [*self.fixed.items(), *self.variable.items()]
            ]
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Describe the schema in JSON values, for the package's own use; `from_json` is the inverse."""
        return [{"name": name, **_describe(kind)} for name, kind in self._fields.items()]

    @classmethod
    def from_json(cls, described: object) -> Schema:
        """Rebuild a schema from `to_json`, for the package's own use.

        Raises: SchemaError: not such a description.
        """
        try:
            fields = {}
            for entry in described:  # type: ignore[attr-defined]  # any JSON: checked by the try
                kind, name, arguments = entry["type"], entry["name"], dict(entry)
                del arguments["type"], arguments["name"]
                if name in fields or arguments.get("dtype", "bool") not in DTYPES:
                    raise ValueError(f"{name!r} is there twice, or of an unknown dtype")
                fields[name] = _TYPES[kind](**arguments)
            return cls(fields)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise SchemaError(f"not a schema description: {error!r} in {described!r}") from error

    def select(self, columns: object, least: int = 0) -> tuple[str, ...]:
        """Check a column choice: None for all, else known names without repeats.

        Raises: ValueError: an unknown or repeated name, fewer than `least`. TypeError: a plain text.
        """
        if columns is None:
            return tuple(self._fields)
        if isinstance(columns, str) or not hasattr(columns, "__iter__"):
            raise TypeError(f"columns must be a list of names, such as columns=[{next(iter(self))!r}]")
        functions = columns if isinstance(columns, Mapping) and not isinstance(columns, Schema) else {}
        if any(function is not None for function in functions.values()):
            raise TypeError(
                f"columns must be a list of names here, such as columns={[*columns]}: a Loader "
                "calls functions of columns"
            )
        names: tuple[str, ...] = tuple(columns)
        for name in names:
            if name not in self._fields:
                hint = did_you_mean(name, self._fields)
                raise ValueError(f"unknown column {name!r}: {hint}the cache has {', '.join(self._fields)}")
        if len(set(names)) != len(names):
            raise ValueError(f"columns {names} names a column twice")
        if len(names) < least:
            raise ValueError("columns is empty: name at least one, or None for all")
        return names


def _without_names(sample: object) -> str:
    """Return the message for a sample that is no dict, with the types of its values, and the way out."""
    from arrowcache.arrow.convert import infer_type

    what, given = type(sample).__name__, [sample]
    wanted = "a schema is inferred from one sample, a dict that names its values"
    if isinstance(sample, list | tuple):
        if sample and all(isinstance(value, Mapping) for value in sample):
            return f"{wanted}, and this is a {what} of {format_count(len(sample), 'dict')}: give one of them"
        if hasattr(sample, "_asdict"):
            return f"{wanted}, and this is a {what}: write Schema.infer(sample._asdict())"
        what, given = f"{what} of {len(sample)}", list(sample)
    kinds = []
    for value in given[: len(_NAMES)]:
        try:
            kinds.append(repr(infer_type("value", value)))
        except SchemaError:
            kinds.append(f"a {type(value).__name__}, which no type holds")
    example = ", ".join(f'"{name}": {name}' for name in _NAMES[: len(given)])
    more = ", ..." if len(given) > len(_NAMES) else ""
    return (
        f"{wanted}, and this is a {what} ({', '.join(kinds)}{more}): write "
        f"Schema.infer({{{example}{more}}}), and have samplers yield such dicts"
    )


def _shown(kind: FieldType) -> tuple[str, str, str]:
    """The dtype, the shape and the bytes of a row, as text."""
    if isinstance(kind, Ragged):
        shape = ", ".join(["any", *map(str, kind.inner_shape)])
        return kind.dtype, f"({shape})", f"{format_bytes(kind.item_bytes)} each"
    if isinstance(kind, String | Binary):
        return "", "", "any"
    dtype = kind.dtype if isinstance(kind, Tensor) else kind.numpy_dtype.name
    return dtype, str(kind.shape), format_bytes(kind.row_bytes)


def _describe(kind: FieldType) -> dict[str, Any]:
    described: dict[str, Any] = {"type": type(kind).__name__.lower()}
    if isinstance(kind, Tensor):
        described |= {"dtype": kind.dtype, "shape": list(kind.shape)}
    elif isinstance(kind, Ragged):
        described |= {"dtype": kind.dtype, "inner_shape": list(kind.inner_shape)}
    return described


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
        return f"its end, after {_quoted(text.rstrip()[-_SHOWN:])}" if text.strip() else "its end"
    line = text.count("\n", 0, at)
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    where = f"line {line + 1}, character {column}" if "\n" in text.strip() else f"character {column}"
    return f"{where}, {_quoted(text[at : at + _SHOWN].splitlines()[0])}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
