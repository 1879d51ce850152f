"""Slots: reusable memory for batches, one buffer a column: plain, pinned, or shared with other processes.

An allocator (memory.py, torch/backend.py) gives the memory; all else is the same. A buffer is lent for one
batch, and comes back when the last array or tensor over it dies. So a batch that a user keeps is never
overwritten, and keeping every label does not keep every image. The buffer that came back last is lent first:
it is still in the processor's cache.

A buffer that is lent has a fresh ctypes array as its owner, under the NumPy arrays: NumPy collapses `.base`
chains to it, and no further. A weak reference tells of the owner's death by one append to a deque. That needs
no lock, since the garbage collector may run it anywhere, and no line of Python, in which a Ctrl-C would be
lost. Nobody ever waits for a buffer: a consumer that keeps everything (`list(loader)`) makes the pool grow.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.memory import page_aligned

_SPARE_BUFFERS = 3  # being filled, being delivered, being let go
_MANY_BUFFERS = 6  # plus two for each slot in flight; prefetching and the batch in hand need fewer
_GROWTH = 1.25  # a buffer larger than all before leaves room for further growth


class _Buffer:
    __slots__ = ("address", "memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory, self.address = memory, int(memory.ctypes.data)


class Loan(weakref.ref[object]):
    """One loan of a buffer, until its owner dies; equal to itself alone, also when it is dead."""

    __slots__ = ("buffer",)
    buffer: Any
    __eq__, __hash__ = object.__eq__, object.__hash__


def lent(
    memory: Any, start: int, nbytes: int, buffer: object, returned: Callable[[Loan], None]
) -> tuple[Any, Loan]:
    """Return a fresh owner of a part of writeable memory, and the loan.

    Args:
        buffer: the buffer that this memory belongs to.
        returned: gets the loan when the owner has died; the lender keeps the loan until then.
    """
    owner = (ctypes.c_char * nbytes).from_buffer(memory, start)
    loan = Loan(owner, returned)
    loan.buffer = buffer
    return owner, loan


def array_over(owner: Any, dtype: Any, shape: Sequence[int]) -> NDArray[Any]:
    """Return a new array over an owner's memory; the array keeps the owner alive."""
    return np.ndarray(tuple(shape), dtype, owner)


class _SlotColumn:
    """One column's buffers. The end of an owner touches `returned` alone."""

    def __init__(self, name: str, row_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.row_shape, self.dtype = name, row_shape, dtype
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self.free: list[_Buffer] = []
        self.lent: set[Loan] = set()
        self.returned: deque[Loan] = deque()
        self.spare = _SPARE_BUFFERS  # most free buffers: as many as were lent at a time
        self.largest_bytes = 0  # of a buffer of any size


class Slot:
    """Memory for one batch, with one owner a column. An owner, or an array over it, keeps its memory.

    `addresses` are where the rows go, by column. Dropping the slot gives the memory back.
    """

    __slots__ = ("_owned", "_rows", "addresses")

    def __init__(self, rows: int, owned: list[tuple[_SlotColumn, Any]], addresses: dict[str, int]) -> None:
        self._rows, self._owned, self.addresses = rows, owned, addresses

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return new arrays over the memory: name -> (rows, *shape)."""
        rows = self._rows
        return {
            column.name: array_over(owner, column.dtype, (rows, *column.row_shape))
            for column, owner in self._owned
        }


class Slots:
    """Lends memory for batches of the same columns. Thread-safe.

    Args:
        columns: name -> (shape of a row, dtype).
        rows: usual rows of a batch; 0 if they differ.
        in_flight: batches that are under way before the first of them is delivered.
        allocate: gives (nbytes,) uint8, such as memory that a device can read directly.
        free: gets memory that is given up.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        rows: int,
        in_flight: int = 1,
        allocate: Callable[[int], NDArray[np.uint8]] = page_aligned,
        free: Callable[[NDArray[np.uint8]], object] = lambda memory: None,  # noqa: ARG005
    ) -> None:
        self._columns = [_SlotColumn(name, shape, dtype) for name, (shape, dtype) in columns.items()]
        self._of_any_size: dict[Hashable, _SlotColumn] = {}
        self._rows = rows
        self._allocate, self._free = allocate, free
        self._many_buffers = _MANY_BUFFERS + 2 * in_flight
        self.allocated_bytes = 0
        self.growths = 0  # buffers that were allocated
        self._lock = threading.Lock()

    def lend(self, rows: int) -> Slot:
        """Lend a slot for so many rows. Its buffers are allocated if none is free. Thread-safe."""
        owned: list[tuple[_SlotColumn, Any]] = []
        addresses: dict[str, int] = {}
        with self._lock:
            for column in self._columns:
                nbytes = rows * column.row_bytes
                most_bytes = max(nbytes, self._rows * column.row_bytes) if self._rows else None
                owner, buffer = self._lend(column, nbytes, most_bytes)
                owned.append((column, owner))
                addresses[column.name] = buffer.address
        return Slot(rows, owned, addresses)

    def lend_bytes(self, kind: Hashable, nbytes: int) -> tuple[Any, int]:
        """Lend memory for an array of any size until its owner dies. Returns the owner and the address.

        Args:
            kind: arrays of the same kind use one another's memory.
        """
        with self._lock:
            column = self._of_any_size.setdefault(kind, _SlotColumn("", (), np.dtype(np.uint8)))
            owner, buffer = self._lend(column, nbytes)
            return owner, buffer.address

    def _lend(self, column: _SlotColumn, nbytes: int, most_bytes: int | None = None) -> tuple[Any, _Buffer]:
        """Lend a buffer; a new one has `most_bytes`. None means as many as any had."""
        if most_bytes is None:
            if nbytes > column.largest_bytes:
                column.largest_bytes = int(nbytes * _GROWTH) if column.largest_bytes else nbytes
            most_bytes = column.largest_bytes
        while column.returned:
            back = column.returned.popleft()
            column.lent.discard(back)
            if len(column.free) < column.spare:
                column.free.append(back.buffer)
            else:
                self._give_up(back.buffer)
        while column.free and column.free[-1].memory.nbytes < nbytes:
            self._give_up(column.free.pop())
        buffer = column.free.pop() if column.free else self._new(most_bytes)
        owner, loan = lent(buffer.memory, 0, nbytes, buffer, column.returned.append)
        column.lent.add(loan)
        count = len(column.lent)
        column.spare = _SPARE_BUFFERS if count > self._many_buffers else max(column.spare, count)
        return owner, buffer

    def _new(self, nbytes: int) -> _Buffer:
        buffer = _Buffer(self._allocate(nbytes))
        self.allocated_bytes += buffer.memory.nbytes
        self.growths += 1
        return buffer

    def _give_up(self, buffer: _Buffer) -> None:
        self.allocated_bytes -= buffer.memory.nbytes
        self._free(buffer.memory)
