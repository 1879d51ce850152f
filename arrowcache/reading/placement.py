"""Placement: where the rows of some mapped segments are, and how to copy them.

A segment's column is an array at some byte position of the arena, so a row's position is

    (where its segment's column starts) + row * width

and any batch of any rows of any segments is one NumPy call a column. Two ways lead there:

- dense: of the segments whose column starts at the same multiple of the row's width, plus a
  constant, all rows are items of one array over the whole arena, and `take(..., out)` copies
  them at memcpy speed. The arena maps segments so that their widest column is like that, and
  others in lanes of their own; scalars always are, since Arrow aligns buffers to 8 bytes.
- anywhere: the arena viewed as overlapping items of one row each, starting at every 8th byte (or
  less: gcd(8, width)), and indexed by position: a copy in two passes, without a condition.

Rows of up to 128 KiB are bound by latency: one byte of each is read first, since those misses
overlap and those of the copies hardly do (7.3 to 9.3 GB/s at 1 KiB, 7.7 to 10.7 at 4 KiB, 24.5 to
25.6 at 64 KiB). What is too small to be worth a hand-over of the GIL is copied without one, if it is in
memory, as far as is known: while a disk is read nobody waits for the GIL.

Variable-length columns: the same arithmetic gives (start, length) of each value, which are a
list-view array over the arena, and Arrow's flatten of it is the copy.

Must never hand out an array over the arena (printing one is a segmentation fault in its holes),
nor be asked for a row that its caller has not checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.reading.pieces import pieces, without_gil
from arrowcache.reading.values import Values
from arrowcache.storage.mapping import PAGE_BYTES, AddressRange, populate, will_need_all

_TOUCHED_WIDTHS = range(512, 128 * 1024)
_LEAST_ASKED_BYTES, _FEW_ROWS = 16 * 1024, 1024  # a disk reads pages, each for a microsecond of its own
_SMALL_BYTES = 128 * 1024  # not worth handing the GIL over, which may take 5 ms to come back


class Placement:
    """The rows of a list of mapped segments, numbered one after another.

    A plan a column is made when it is first asked for, and is then a few NumPy calls a batch.

    Args:
        source: the arena's addresses.
        schema: the segments'.
        starts: (n + 1,) the number of each segment's first row, and the number of rows.
        fixed_at: (n, fixed columns) byte of the arena where each segment's column starts.
        variable_at: (n, variable columns, 2) likewise of its offsets and its data.
        lanes: of columns that are mapped elsewhere, too: name -> those addresses, and (n,) the byte
            of them where each segment's column starts; -1: it is not there.
    """

    def __init__(
        self,
        source: AddressRange,
        schema: Schema,
        starts: NDArray[np.int64],
        fixed_at: NDArray[np.int64],
        variable_at: NDArray[np.int64],
        lanes: Mapping[str, tuple[AddressRange, NDArray[np.int64]]],
    ) -> None:
        self._source = source
        self._schema = schema
        self._starts = starts
        self._fixed_at, self._variable_at = fixed_at, variable_at
        self._lanes = lanes
        self._number_of = {name: i for i, name in enumerate(schema.fixed)}
        self._number_of |= {name: i for i, name in enumerate(schema.variable)}
        self._dense: dict[str, _Dense] = {}
        self._anywhere: dict[str, _Anywhere] = {}
        rows = np.diff(starts)
        alike = len(rows) and bool((rows[:-1] == rows[0]).all()) and rows[-1] <= rows[0]
        self._rows_each = int(rows[0]) if alike else 0

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of each row's segment."""
        if self._rows_each:  # all segments have equally many rows, but for a shorter last one
            segments = np.empty_like(ids)
            for piece in pieces(len(ids)):
                segments[piece] = ids[piece] // self._rows_each
            return segments
        return self._starts.searchsorted(ids, side="right") - 1

    def gather(
        self,
        name: str,
        ids: NDArray[np.int64],
        segments: NDArray[np.int64],
        out: NDArray[Any],
        *,
        is_warm: bool,
        ask_ahead: bool,
    ) -> None:
        """Copy one fixed-width column of some rows.

        Args:
            name: the column.
            ids: (n,) row numbers; `segments` is `segments_of(ids)`.
            out: (n, *shape), C-contiguous, of the column's numpy_dtype: filled.
            is_warm: their pages are in memory, as far as is known; else they are read without the GIL.
            ask_ahead: have the disk read what is not in memory side by side, and not row after row.
        """
        if not len(ids):
            return
        dense = self._dense.get(name) or self._plan_dense(name)
        width, flat = dense.items.itemsize, out.reshape(-1).view(np.uint8)
        if is_warm and flat.nbytes <= _SMALL_BYTES:
            for piece in pieces(len(ids)):
                picked = self._pick(name, ids[piece], segments[piece], is_warm=True)
                flat[piece.start * width : piece.stop * width] = picked.view(np.uint8)
            return
        elsewhere = _NONE
        if dense.elsewhere is not None:
            elsewhere = dense.elsewhere[segments].nonzero()[0]
            if 2 * len(elsewhere) > len(ids):
                flat[:] = self._pick(name, ids, segments, is_warm=is_warm).view(np.uint8)
                return
        target = flat.view(dense.items.dtype)
        positions = np.empty_like(ids)
        for piece in pieces(len(ids)):
            positions[piece] = ids[piece] + dense.offsets[segments[piece]]
        if len(elsewhere):
            positions[elsewhere] = dense.some_item
        is_worth_it = ask_ahead and not is_warm and (len(ids) <= _FEW_ROWS or width >= _LEAST_ASKED_BYTES)
        if not (is_worth_it and will_need_all(_address(dense.items) + positions * width, width)):
            _touch(dense.heads, positions, is_warm=is_warm)
        dense.items.take(positions, 0, target, "clip")  # without the GIL
        if len(elsewhere):
            target[elsewhere] = self._pick(name, ids[elsewhere], segments[elsewhere], is_warm=is_warm)

    def gather_values(
        self, name: str, ids: NDArray[np.int64], segments: NDArray[np.int64], *, is_warm: bool
    ) -> Values:
        """Copy one variable-length column of some rows (ids, segments, is_warm: as `gather`)."""
        kind = self._schema.variable[name]
        element = kind.arrow_type.value_type if isinstance(kind, Ragged) else pa.uint8()
        width = element.bit_width // 8
        places = self._variable_at[segments, self._number_of[name]]
        offsets = _items(self._source, 4, 0, 4).view(np.int32)
        first = places[:, 0] // 4 + ids - self._starts[segments]
        if not is_warm:
            offsets.take(np.concatenate((first, first + 1)), mode="clip")  # without the GIL
        starts = offsets[first].astype(np.int64)
        lengths = offsets[first + 1] - starts
        starts += places[:, 1] // width
        memory = pa.foreign_buffer(self._source.address, self._source.nbytes, base=self._source)
        arena = pa.Array.from_buffers(element, self._source.nbytes // width, [None, memory], null_count=0)
        views = pa.LargeListViewArray.from_arrays(pa.array(starts), pa.array(lengths), arena)
        data = _writable(views.flatten())
        if 0 <= data.ctypes.data - self._source.address < self._source.nbytes:
            if not is_warm:
                populate(data.ctypes.data, data.nbytes)  # without the GIL
            data = data.copy()  # of one contiguous run Arrow makes a view
        ends = np.concatenate(([0], np.cumsum(lengths)))
        if not isinstance(kind, Ragged):
            return Values(data, ends)
        items = data.view(kind.numpy_dtype).reshape(-1, *kind.inner_shape)
        return Values(items, ends // kind.elements)

    def _plan_dense(self, name: str) -> _Dense:
        """Make one array of the rows of as many segments as possible."""
        width = self._schema.fixed[name].row_bytes
        source, column = self._source, self._fixed_at[:, self._number_of[name]]
        if name in self._lanes and (self._lanes[name][1] >= 0).any():
            source, column = self._lanes[name]
        phases, counts = np.unique(column[column >= 0] % width, return_counts=True)
        phase = int(phases[counts.argmax()])
        items = _items(source, width, phase, width)
        elsewhere = (column < 0) | (column % width != phase)
        offsets = (column - phase) // width - self._starts[:-1]
        newest = len(column) - 1 - int(elsewhere[::-1].argmin())  # it stays mapped longest
        self._dense[name] = _Dense(
            items,
            _heads(source, items),
            offsets,
            elsewhere if elsewhere.any() else None,
            int(offsets[newest] + self._starts[newest]),
        )
        return self._dense[name]

    def _pick(
        self, name: str, ids: NDArray[np.int64], segments: NDArray[np.int64], *, is_warm: bool
    ) -> NDArray[Any]:
        """Rows of any segments, in memory of their own: the first of two passes."""
        plan = self._anywhere.get(name)
        if plan is None:
            width = self._schema.fixed[name].row_bytes
            step = math.gcd(8, width)
            column = self._fixed_at[:, self._number_of[name]]
            items = _items(self._source, width, 0, step)
            offsets = (column - self._starts[:-1] * width) // step
            plan = self._anywhere[name] = _Anywhere(
                items, _heads(self._source, items), width // step, offsets
            )
        positions = ids * plan.factor + plan.offsets[segments]
        if is_warm:
            _touch(plan.heads, positions, is_warm=True)
        else:  # every page of each row
            step, width = plan.items.strides[0], plan.items.itemsize
            within = np.append(np.arange(0, width, PAGE_BYTES), width - 1)
            memory = _items(self._source, 1, 0, 1).view(np.uint8)
            memory[without_gil((positions[:, None] * step + within).reshape(-1))]
        picked: NDArray[Any] = plan.items[positions]
        return picked


class _Dense(NamedTuple):
    """A column as one array: row i of segment s is items[i + offsets[s]], but for those elsewhere."""

    items: NDArray[Any]
    heads: NDArray[np.uint8] | None
    offsets: NDArray[np.int64]
    elsewhere: NDArray[np.bool_] | None  # by segment
    some_item: int  # that may be read in place of one elsewhere


class _Anywhere(NamedTuple):
    """A column as overlapping items: row i of segment s is items[i * factor + offsets[s]]."""

    items: NDArray[Any]
    heads: NDArray[np.uint8] | None
    factor: int
    offsets: NDArray[np.int64]


_NONE: NDArray[np.intp] = np.empty(0, np.intp)


def _heads(source: AddressRange, items: NDArray[Any]) -> NDArray[np.uint8] | None:
    """The first byte of each item, where reading it ahead of the copy pays."""
    if items.itemsize not in _TOUCHED_WIDTHS:
        return None
    return as_array(source, _address(items), len(items), "|u1", (items.strides[0],))


def _address(items: NDArray[Any]) -> int:
    return int(items.__array_interface__["data"][0])


def _items(source: AddressRange, width: int, start: int, step: int) -> NDArray[Any]:
    """A range from byte `start` on as items of `width` bytes at every `step` bytes."""
    count = (source.nbytes - start - width) // step + 1
    strides = None if step == width else (step,)
    return as_array(source, source.address + start, count, f"|V{width}", strides)


def _touch(heads: NDArray[np.uint8] | None, positions: NDArray[np.int64], *, is_warm: bool) -> None:
    if heads is None:
        return
    if not is_warm:
        heads[without_gil(positions)]
        return
    for piece in pieces(len(positions)):
        heads[positions[piece]]


class _Memory:
    """NumPy's array interface over memory that `owner` keeps."""

    def __init__(self, owner: object, interface: Mapping[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = interface


def as_array(
    owner: object,
    address: int,
    count: int,
    typestr: str,
    strides: tuple[int] | None = None,
    *,
    writable: bool = False,
) -> NDArray[Any]:
    """An array of `count` items at an address, which `owner` keeps valid for as long as the array lives."""
    interface = {
        "version": 3,
        "shape": (count,),
        "typestr": typestr,
        "data": (address, not writable),
        "strides": strides,
    }
    return np.asarray(_Memory(owner, interface))


def _writable(array: pa.Array) -> NDArray[Any]:
    """An Arrow array that nobody else has, as a NumPy array that may be written."""
    values: NDArray[Any] = array.to_numpy(zero_copy_only=True)
    if not len(values):
        return values.copy()
    return as_array(array, values.ctypes.data, len(values), values.dtype.str, writable=True)
