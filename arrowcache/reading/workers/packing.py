"""Packing: what of a batch can lie in a slot, and how a slot becomes a batch again.

    ndarray                 one array; no objects, no fields
    a number                one array of no dimension; also NumPy's scalars
    Values(data, offsets)   two
    list of str, of bytes   two: all their bytes side by side, and where each ends

Everything else is refused: it would have to be pickled. The first batch decides the columns, their
kinds, dtypes and row shapes, and how many rows an array may have; later ones must be like it, so
that slots can be had before a batch is made. What varies in length goes as Values or as a list: its
slots grow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.convert import is_masked
from arrowcache.reading.values import Values

ARRAY, VALUES, STR, BYTES, NOTHING = "array", "values", "str", "bytes", "nothing"
SCALAR, NUMBER = "scalar", "number"  # NumPy's, Python's
_FIXED = (ARRAY, SCALAR, NUMBER)
_HEADROOM = 1.25  # of what varies in length
_WAY_OUT = (
    "a worker process hands over ndarrays, numbers, Values(data, offsets), lists of str and lists of bytes: "
    "return one of these, or pass worker_type='thread'"
)


class Packed(NamedTuple):
    """One column of a batch as arrays."""

    name: str
    kind: str
    arrays: list[NDArray[Any]]


class Described(NamedTuple):
    """What is said of a column between processes: (dtype, shape) of each of its arrays."""

    name: str
    kind: str
    arrays: list[tuple[str, list[int]]]

    @classmethod
    def of(cls, column: Packed) -> Described:
        return cls(column.name, column.kind, [(a.dtype.str, list(a.shape)) for a in column.arrays])

    @classmethod
    def from_message(cls, text: Sequence[Any]) -> Described:
        name, kind, arrays = text
        return cls(name, kind, [(dtype, shape) for dtype, shape in arrays])

    def nbytes(self) -> list[int]:
        """Of each array."""
        return [np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.arrays]

    def __str__(self) -> str:
        if self.kind not in _FIXED:
            return {VALUES: "Values", STR: "a list of str", BYTES: "a list of bytes"}.get(
                self.kind, "an empty list"
            )
        dtype, shape = self.arrays[0]
        rows = ["n", *map(str, shape[1:])] if shape else []
        return f"{np.dtype(dtype)} of shape ({', '.join(rows)})"


def pack(batch: object) -> list[Packed]:
    """A batch's columns as arrays; those of ndarrays are the arrays themselves.

    Raises: TypeError: what cannot travel, and what to do.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a transform must return a dict of columns in a worker process, not {_name(batch)}: {_WAY_OUT}"
        )
    if not batch:
        raise TypeError("a transform must return at least one column in a worker process, not an empty dict")
    return [_pack_column(name, value) for name, value in batch.items()]


def _pack_column(name: object, value: object) -> Packed:
    if not isinstance(name, str):
        raise TypeError(f"a transform's columns need names that are str, not {name!r}")
    if isinstance(value, Values):
        return Packed(name, VALUES, [_plain(name, np.asarray(value.data)), _plain(name, value.offsets)])
    if isinstance(value, np.ndarray):
        return Packed(name, ARRAY, [_plain(name, value)])
    if isinstance(value, np.generic):
        return Packed(name, SCALAR, [_plain(name, np.asarray(value))])
    if type(value) in (bool, int, float):
        return Packed(name, NUMBER, [_plain(name, np.asarray(value))])
    if isinstance(value, list):
        if not value:
            return Packed(name, NOTHING, [np.empty(0, np.uint8), np.zeros(1, np.int64)])
        if all(isinstance(item, str) for item in value):
            return _pack_items(name, STR, [item.encode(errors="surrogatepass") for item in value])
        if all(isinstance(item, bytes) for item in value):
            return _pack_items(name, BYTES, value)
        first = str if isinstance(value[0], str) else bytes
        odd = next(item for item in value if not isinstance(item, first))
        raise TypeError(f"column {name!r} is a list with {_name(odd)} in it: {_WAY_OUT}")
    raise TypeError(f"column {name!r} is {_name(value)}: {_WAY_OUT}")


def _pack_items(name: str, kind: str, items: Sequence[bytes]) -> Packed:
    lengths = np.fromiter(map(len, items), np.int64, len(items))
    return Packed(
        name, kind, [np.frombuffer(b"".join(items), np.uint8), np.concatenate(([0], np.cumsum(lengths)))]
    )


def _plain(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if np.dtype(array.dtype.str) != array.dtype or array.dtype.hasobject or is_masked(array):
        raise TypeError(
            f"column {name!r} has dtype {array.dtype}, whose items are objects, fields or foreign: {_WAY_OUT}"
        )
    return array


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def unpack(kind: str, arrays: Sequence[NDArray[Any]]) -> Any:
    """What a batch has of a column, from its arrays."""
    if kind == ARRAY:
        return arrays[0]
    if kind == SCALAR:
        return arrays[0][()]
    if kind == NUMBER:
        return arrays[0].item()
    if kind == VALUES:
        return Values(arrays[0], arrays[1])
    data, ends = arrays[0].tobytes(), arrays[1].tolist()
    items = [data[start:stop] for start, stop in itertools.pairwise(ends)]
    return [item.decode(errors="surrogatepass") for item in items] if kind == STR else items


class Pattern:
    """What every batch is like, as the first one told.

    Args:
        columns: of the first batch.
        rows: how many rows it was made of.
        batch_size: how many rows others are made of.
    """

    def __init__(self, columns: Sequence[Described], rows: int, batch_size: int) -> None:
        self._first = {column.name: column for column in columns}
        self._most_rows: dict[str, int] = {}  # of an array, of batch_size rows made
        self._most_bytes: dict[str, list[float]] = {}  # of a column that varies, for each row made
        self._batch_size = batch_size
        self.version = 1
        for name, kind, arrays in columns:
            if kind == ARRAY and arrays[0][1]:
                scaled = -(-arrays[0][1][0] * batch_size // rows)  # the first batch may be a short one
                self._most_rows[name] = max(batch_size, scaled)
        self.note(columns, rows)

    def check(self, columns: Sequence[Described], rows: int) -> None:
        """Make sure that a batch is like the first one.

        Raises: ValueError: says how it is not.
        """
        names, expected = [column.name for column in columns], list(self._first)
        if set(names) != set(expected):
            raise ValueError(
                f"a transform must return the same columns for every batch in worker processes: {expected} "
                f"the first time, {names} now; return all of them always, or pass worker_type='thread'"
            )
        for column in columns:
            first = self._first[column.name]
            if NOTHING in (column.kind, first.kind) and {column.kind, first.kind} <= {NOTHING, STR, BYTES}:
                continue
            if _form(column) != _form(first):
                raise ValueError(
                    f"a transform must return the same dtypes and row shapes for every batch in worker "
                    f"processes: column {column.name!r} was {first} the first time, and is {column} now; "
                    "what varies in length can be Values(data, offsets), or pass worker_type='thread'"
                )
            most = self._rows_of(column.name, rows)
            if column.kind == ARRAY and column.arrays[0][1] and column.arrays[0][1][0] > most:
                raise ValueError(
                    f"a batch does not fit its slot: column {column.name!r} has {column.arrays[0][1][0]} "
                    f"rows, the first batch left room for {most}; a transform must not make more rows of "
                    "some batches than of others: return Values(data, offsets), or pass worker_type='thread'"
                )

    def note(self, columns: Sequence[Described], rows: int) -> None:
        """Have later slots be as large as this batch, where that varies."""
        for column in columns:
            if self._first[column.name].kind == NOTHING:
                self._first[column.name] = column
                self.version += column.kind != NOTHING
            if column.kind not in _FIXED:
                now = [nbytes / rows for nbytes in column.nbytes()]
                before = self._most_bytes.get(column.name, [0.0, 0.0])
                self._most_bytes[column.name] = [max(pair) for pair in zip(now, before, strict=True)]

    def sizes(self, rows: int) -> dict[str, list[int]]:
        """Bytes of each array of a slot for what is made of so many rows."""
        return {name: self._sizes_of(column, rows) for name, column in self._first.items()}

    @property
    def arrays(self) -> int:
        """How many arrays a batch has."""
        return sum(len(column.arrays) for column in self._first.values())

    def message(self) -> list[tuple[str, str, list[tuple[str, list[int] | None]]]]:
        """What a worker must know of it: (name, kind, (dtype, row shape) of each array)."""
        return [
            (name, kind, [(dtype, shape[1:] if shape else None) for dtype, shape in arrays])
            for name, kind, arrays in self._first.values()
        ]

    def nbytes(self) -> int:
        """Bytes of a usual slot."""
        return sum(map(sum, self.sizes(self._batch_size).values()))

    def sizes_for(self, columns: Sequence[Described], rows: int) -> dict[str, list[int]]:
        """Bytes of each array of a slot that has room for this batch, too."""
        sizes = self.sizes(rows)
        for column in columns:
            sizes[column.name] = [max(p) for p in zip(sizes[column.name], column.nbytes(), strict=True)]
        return sizes

    def _rows_of(self, name: str, rows: int) -> int:
        return max(
            rows, -(-self._most_rows.get(name, 0) * rows // self._batch_size), self._most_rows.get(name, 0)
        )

    def _sizes_of(self, column: Described, rows: int) -> list[int]:
        if column.kind not in _FIXED:
            return [int(_HEADROOM * most * rows) + 64 for most in self._most_bytes[column.name]]
        dtype, shape = column.arrays[0]
        row_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
        return [row_bytes * (self._rows_of(column.name, rows) if shape else 1)]


def _form(column: Described) -> tuple[str, list[tuple[str, int, list[int]]]]:
    """What must be the same in every batch: all but the number of rows."""
    return column.kind, [(dtype, len(shape), shape[1:]) for dtype, shape in column.arrays]
