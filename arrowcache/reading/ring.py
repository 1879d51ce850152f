"""Ring: reusable host memory for batches, one buffer a column.

A buffer holds a group of batches side by side, mostly one. Each batch of a column is handed out by itself
and comes back when the last array or tensor over it dies: what a user keeps is never overwritten, and
keeping every label does not keep every image.

The owner of a hand-out is a fresh ctypes array under the NumPy arrays, because NumPy collapses
`.base` chains to it, and no further. A weak reference tells of its death by one append to a deque:
without a lock, since the garbage collector may run it anywhere, and without a line of Python, in
which a Ctrl-C would be lost. Nobody ever waits for a buffer: a consumer that keeps everything
(`list(loader)`) makes the ring grow.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.output import page_aligned

_SPARE_BUFFERS = 3  # being filled, being delivered, being let go
_MANY_BUFFERS = 6  # and two for each group in flight: more than prefetching and one in hand need


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: NDArray[np.uint8]
    loans: int = 0


class _Loan(weakref.ref[object]):
    """Part of a buffer, for as long as its owner lives; equal to itself alone, also when that is dead."""

    __slots__ = ("buffer",)
    buffer: _Buffer
    __eq__, __hash__ = object.__eq__, object.__hash__


class _Hold:
    """What a group itself borrows, until it is closed."""


@dataclass(slots=True, eq=False)
class _Column:
    """One column's buffers. `returned` is the only thing that the end of an owner touches."""

    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    free: list[_Buffer] = field(default_factory=list)
    lent: set[_Loan] = field(default_factory=set)
    returned: deque[_Loan] = field(default_factory=deque)
    in_use: int = 0
    spare: int = _SPARE_BUFFERS  # that may lie free: as many as were in use at a time

    def lend(self, buffer: _Buffer, owner: object) -> None:
        """Keep a buffer in use until an object has died."""
        loan = _Loan(owner, self.returned.append)
        loan.buffer = buffer
        buffer.loans += 1
        self.lent.add(loan)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize


class Ring:
    """Buffers for groups of batches of the same columns. Thread-safe.

    Args:
        columns: name -> (shape of a row, dtype).
        batch_size: rows of a batch.
        in_flight: groups that are begun before the first of them is delivered.
        group_bytes: of the largest group; it has at least one batch.
        allocate: gives (nbytes,) uint8, such as memory that a device reads by itself.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        batch_size: int,
        in_flight: int = 1,
        group_bytes: int = 0,
        allocate: Callable[[int], NDArray[np.uint8]] = page_aligned,
    ) -> None:
        self._columns = {name: _Column(shape, dtype) for name, (shape, dtype) in columns.items()}
        self._batch_size = batch_size
        self._batch_bytes = max(1, batch_size * sum(column.row_bytes for column in self._columns.values()))
        self.largest_group = max(1, group_bytes // self._batch_bytes)
        self._allocate = allocate
        self._many_buffers = _MANY_BUFFERS + 2 * in_flight
        self.allocated_bytes = 0
        self.growths = 0  # buffers that were allocated
        self._lock = threading.Lock()

    def batches_of(self, nbytes: int) -> int:
        """How many batches make a group of about so many bytes."""
        return min(max(1, nbytes // self._batch_bytes), self.largest_group)

    def take(self, rows: int) -> Group:
        """Memory for `rows` rows, at most `largest_group` batches."""
        taken, hold = {}, _Hold()
        with self._lock:
            for name, column in self._columns.items():
                self._collect(column)
                buffer = self._find(column, rows * column.row_bytes)
                column.in_use += 1
                is_usual = column.in_use <= self._many_buffers
                column.spare = max(column.spare, column.in_use) if is_usual else _SPARE_BUFFERS
                column.lend(buffer, hold)
                taken[name] = (column, buffer)
        return Group(taken, hold, rows, self._batch_size)

    def _find(self, column: _Column, nbytes: int) -> _Buffer:
        while column.free:
            buffer = column.free.pop()
            if buffer.memory.nbytes >= nbytes:
                return buffer
            self.allocated_bytes -= buffer.memory.nbytes
        if not self.is_hoarded:
            nbytes = self.largest_group * self._batch_size * column.row_bytes
        buffer = _Buffer(self._allocate(nbytes))
        self.allocated_bytes += nbytes
        self.growths += 1
        return buffer

    @property
    def is_hoarded(self) -> bool:
        """Whether the consumer keeps so much that groups should be small."""
        return any(column.in_use > self._many_buffers for column in self._columns.values())

    def _collect(self, column: _Column) -> None:
        while column.returned:
            loan = column.returned.popleft()
            column.lent.discard(loan)
            buffer = loan.buffer
            buffer.loans -= 1
            if not buffer.loans:
                column.in_use -= 1
                if len(column.free) < column.spare:
                    column.free.append(buffer)
                else:
                    self.allocated_bytes -= buffer.memory.nbytes


class Group:
    """A few batches' worth of rows on their way to the consumer.

    All its batches are handed out before the first of them can come back.
    """

    def __init__(
        self, columns: Mapping[str, tuple[_Column, _Buffer]], hold: _Hold, rows: int, batch_size: int
    ) -> None:
        self._columns = columns
        self._hold: _Hold | None = hold
        self._rows = rows
        self._batch_size = batch_size

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The group's columns, (rows, *shape), to be filled; valid until `close`."""
        filled = {}
        for name, (column, buffer) in self._columns.items():
            flat = buffer.memory[: self._rows * column.row_bytes].view(column.dtype)
            filled[name] = flat.reshape(self._rows, *column.row_shape)
        return filled

    def hand_out(self, batch: int) -> dict[str, NDArray[Any]]:
        """Batch number `batch` of the group: arrays that return their memory when they die."""
        first = batch * self._batch_size
        rows = min(self._batch_size, self._rows - first)
        arrays = {}
        for name, (column, buffer) in self._columns.items():
            row_bytes = column.row_bytes
            memory: Any = buffer.memory
            owner: Any = (ctypes.c_char * (rows * row_bytes)).from_buffer(memory, first * row_bytes)
            column.lend(buffer, owner)
            arrays[name] = np.frombuffer(owner, column.dtype).reshape(rows, *column.row_shape)
        return arrays

    def close(self) -> None:
        """Every batch was handed out; the memory is free once they all have come back. Idempotent."""
        self._columns, self._hold = {}, None
