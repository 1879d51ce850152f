"""Schema: what a sample holds, and which Arrow column holds it.

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
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
            return f"{wanted}, and this is a {what} of {len(sample)} dicts: give one of them"
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
