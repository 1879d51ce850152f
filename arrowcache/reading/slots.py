"""Slots: reusable host memory for batches, one buffer a column.

A buffer is lent for one batch, and comes back when the last array or tensor over it dies: what a user keeps
is never overwritten, and keeping every label does not keep every image. The one that came back last is lent
first: it is still in the processor's cache.

The owner of what is lent is a fresh ctypes array under the NumPy arrays, because NumPy collapses
`.base` chains to it, and no further. A weak reference tells of its death by one append to a deque:
without a lock, since the garbage collector may run it anywhere, and without a line of Python, in
which a Ctrl-C would be lost. Nobody ever waits for a buffer: a consumer that keeps everything
(`list(loader)`) makes the pool grow.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.output import page_aligned

_SPARE_BUFFERS = 3  # being filled, being delivered, being let go
_MANY_BUFFERS = 6  # and two for each slot in flight: more than prefetching and one in hand need


class _Buffer:
    """One column's memory for a batch."""

    __slots__ = ("address", "memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.address = memory, int(memory.ctypes.data)


class _Loan(weakref.ref[object]):
    """A buffer, for as long as its owner lives; equal to itself alone, also when that is dead."""

    __slots__ = ("buffer",)
    buffer: _Buffer
    __eq__, __hash__ = object.__eq__, object.__hash__


class _Column:
    """One column's buffers. `returned` is the only thing that the end of an owner touches."""

    def __init__(self, name: str, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.row_shape, self.dtype = name, row_shape, dtype
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self.free: list[_Buffer] = []
        self.lent: set[_Loan] = set()
        self.returned: deque[_Loan] = deque()
        self.spare = _SPARE_BUFFERS  # that may lie free: as many as were lent at a time


class Slot:
    """Memory for one batch, one owner a column. Who has an owner, or an array over it, has the memory.

    `addresses` are where its rows go, by column. It is given back by being dropped.
    """

    __slots__ = ("_owned", "_rows", "addresses")

    def __init__(self, rows: int, owned: list[tuple[_Column, Any]], addresses: dict[str, int]) -> None:
        self._rows, self._owned, self.addresses = rows, owned, addresses

    def arrays(self) -> dict[str, NDArray[Any]]:
        """name -> (rows, *shape), new arrays over the memory."""
        rows = self._rows
        return {
            column.name: np.ndarray((rows, *column.row_shape), column.dtype, owner)
            for column, owner in self._owned
        }


class Slots:
    """Lends memory for batches of the same columns. Thread-safe.

    Args:
        columns: name -> (shape of a row, dtype).
        rows: of a batch.
        in_flight: batches that are begun before the first of them is delivered.
        allocate: gives (nbytes,) uint8, such as memory that a device reads by itself.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        rows: int,
        in_flight: int = 1,
        allocate: Callable[[int], NDArray[np.uint8]] = page_aligned,
    ) -> None:
        self._columns = [_Column(name, shape, dtype) for name, (shape, dtype) in columns.items()]
        self._rows = rows
        self._allocate = allocate
        self._many_buffers = _MANY_BUFFERS + 2 * in_flight
        self.allocated_bytes = 0
        self.growths = 0  # buffers that were allocated
        self._lock = threading.Lock()

    def lend(self, rows: int) -> Slot:
        """Memory for so many rows."""
        owned: list[tuple[_Column, Any]] = []
        addresses: dict[str, int] = {}
        with self._lock:
            for column in self._columns:
                if column.returned:
                    self._collect(column)
                nbytes = rows * column.row_bytes
                buffer = self._find(column, nbytes)
                owner = (ctypes.c_char * nbytes).from_buffer(buffer.memory)  # type: ignore[arg-type]
                loan = _Loan(owner, column.returned.append)
                loan.buffer = buffer
                column.lent.add(loan)
                count = len(column.lent)
                column.spare = _SPARE_BUFFERS if count > self._many_buffers else max(column.spare, count)
                owned.append((column, owner))
                addresses[column.name] = buffer.address
        return Slot(rows, owned, addresses)

    def _find(self, column: _Column, nbytes: int) -> _Buffer:
        while column.free:
            buffer = column.free.pop()
            if buffer.memory.nbytes >= nbytes:
                return buffer
            self.allocated_bytes -= buffer.memory.nbytes
        buffer = _Buffer(self._allocate(max(nbytes, self._rows * column.row_bytes)))
        self.allocated_bytes += buffer.memory.nbytes
        self.growths += 1
        return buffer

    def _collect(self, column: _Column) -> None:
        while column.returned:
            loan = column.returned.popleft()
            column.lent.discard(loan)
            if len(column.free) < column.spare:
                column.free.append(loan.buffer)
            else:
                self.allocated_bytes -= loan.buffer.memory.nbytes
