"""Slots: reusable memory for batches, one buffer a column: plain, pinned, or shared with other processes.

A buffer is lent for one batch, and comes back when the last array or tensor over it dies. So a batch that a
user keeps is never overwritten, and keeping every label does not keep every image. The buffer that came back
last is lent first: it is still in the processor's cache.

A buffer that is lent has a fresh ctypes array as its owner, under the NumPy arrays: NumPy collapses `.base`
chains to it, and no further. A weak reference tells of the owner's death by one append to a deque. That needs
no lock, since the garbage collector may run it anywhere, and no line of Python, in which a Ctrl-C would be
lost. Nobody ever waits for a buffer: a consumer that keeps everything (`list(loader)`) makes the pool grow.

Slots get memory from an allocator, one buffer, (nbytes,) uint8, at a time; all else is the same.
`page_aligned` gives plain memory. `SharedBuffers` gives a part of an anonymous file, which another process
finds by its offset. Memory that a device reads by itself comes from torch/pinned_memory.py, which also
registers parts of such files. `output_arrays` are a user's own arrays in the place of a slot, or new ones.

Guarantee: a buffer of a file has its memory before anybody writes. Otherwise a full disk or memory would be a
SIGBUS, not an error.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import resource
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from arrowcache import linux
from arrowcache.lifetimes import forgets_in_child, until_exit
from arrowcache.linux import PAGE_BYTES
from arrowcache.native.library import address_of
from arrowcache.os_errors import out_of_memory
from arrowcache.units import format_bytes

if TYPE_CHECKING:
    from typing import Self

_SPARE_BUFFERS = 3  # being filled, being delivered, being let go
_MANY_BUFFERS = 6  # plus two for each slot in flight; prefetching and the batch in hand need fewer
_GROWTH = 1.25  # a buffer larger than all before leaves room for further growth
_MAX_BYTES, _MIN_BYTES = 1 << 40, 1 << 28  # of addresses, not of memory
_MIN_LIMITED_BYTES = 1 << 20  # where addresses are limited
_FEWER = "keep fewer or smaller batches, or lower prefetch or workers"

# arrays


class BatchMemory(Protocol):
    """Arrays of a batch that rows are gathered into. `addresses` are where the rows go, by column."""

    addresses: dict[str, int]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays: name -> (rows, *shape)."""


class GivenArrays:
    """A caller's arrays, in the place of a slot."""

    __slots__ = ("_arrays", "addresses")

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._arrays = arrays
        self.addresses = {name: address_of(array) for name, array in arrays.items()}

    def arrays(self) -> dict[str, NDArray[Any]]:
        return self._arrays


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return memory that starts at a page, like the columns of a segment's file.

    In memory that starts a little after a page, as large NumPy arrays do (16 bytes), each load of a copy from
    page-aligned memory seems to depend on the store before it, whose address has the same low 12
    bits: 1.7 instead of 10 GB/s, on the machine of benchmarks/RESULTS.md.

    Raises: MemoryError: names the limits of this process.
    """
    try:
        memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    except MemoryError:
        raise MemoryError(f"no {format_bytes(nbytes)} for a batch: {out_of_memory()}") from None
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + nbytes]


def output_arrays(
    memory: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    rows: int,
    out: Mapping[str, NDArray[Any]] | None,
) -> dict[str, NDArray[Any]]:
    """Return an array of `rows` rows for each column: a user's own, where given, else a new one.

    Args:
        memory: name -> (shape of a row, dtype), as `Columns.memory`.

    Raises: TypeError: `out` is no mapping. ValueError: an array in it is of a column not asked for, or
        cannot be filled; two arrays overlap.
    """
    out = {} if out is None else out
    if not isinstance(out, Mapping):
        raise TypeError(f"out must be a dict of arrays by column, not {type(out).__name__}")
    for name in out:
        if name not in memory:
            raise ValueError(f"out has {name!r}, which is not a fixed-width column asked for")
    arrays = {}
    for name, (row_shape, dtype) in memory.items():
        shape = (rows, *row_shape)
        array = out[name] if name in out else _new_array(shape, dtype)
        if not (
            isinstance(array, np.ndarray)
            and array.shape == shape
            and array.dtype == dtype
            and array.flags.c_contiguous
            and array.flags.writeable
        ):
            raise ValueError(
                f"out[{name!r}] must be a writeable, C-contiguous {dtype} array of shape {shape}, "
                f"not {getattr(array, 'dtype', type(array))} of {getattr(array, 'shape', '?')}"
            )
        arrays[name] = array
    places = sorted((array.ctypes.data, array.nbytes, name) for name, array in out.items() if array.nbytes)
    for (start, nbytes, name), (following, _, other) in itertools.pairwise(places):
        if start + nbytes > following:
            raise ValueError(
                f"out[{name!r}] and out[{other!r}] overlap: give each column an array of its own, since the "
                "rows of one would overwrite those of the other"
            )
    return arrays


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Return memory for a copy: `page_aligned` where alignment matters."""
    return np.empty(nbytes, np.uint8) if nbytes < PAGE_BYTES else page_aligned(nbytes)


def _new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return aligned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


# lending


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


# memory shared with other processes


def mapped_memory(nbytes: int) -> mmap.mmap:
    """Return memory of whole pages. Forked children share it: no write moves it to other pages."""
    return mmap.mmap(-1, in_pages(nbytes))


class SharedMemory(mmap.mmap):
    """An anonymous file, mapped by several processes; it lives as long as any array over it.

    It is sparse and far larger than the part in use, so it is mapped once, and nothing in it moves.
    `words` are its first page, int64; buffers follow. It owns its descriptor.

    A forked child may write into arrays that it inherits: its parent does not see that. But the parent reuses
    their memory for other batches, so the child must copy a batch that it keeps.
    """

    fd = -1
    parts: dict[int, int]  # offset -> bytes in use, of parts that another process gives

    def __new__(cls, fd: int) -> Self:
        self = super().__new__(cls, fd, os.fstat(fd).st_size)
        forgets_in_child(self)
        _living.add(self)
        self.fd = fd
        self.parts = {}
        return self

    @classmethod
    def create(cls, parts: int = 1) -> Self:
        """Make one. `parts` of them share the addresses that this process may use.

        Raises: OSError: neither a memfd nor a temporary file is available.
        """
        fd = linux.anonymous_file()
        try:
            _stretch(fd, parts)
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            return cls(fd)
        except BaseException:  # one that Ctrl-C cut short may own it: its frame keeps it until now
            if all(memory.fd != fd for memory in [*_living]):
                os.close(fd)
            raise

    @property
    def words(self) -> NDArray[np.int64]:
        """Return the first page, (512,) on most machines; its memory is allocated before the first write."""
        return np.frombuffer(self, np.int64, PAGE_BYTES // 8)

    def forget_in_child(self) -> None:
        """Map the memory privately in a forked child: its parent does not see its writes."""
        flags = mmap.MAP_PRIVATE | linux.MAP_FIXED | linux.MAP_NORESERVE
        linux.map_memory(self.words.ctypes.data, len(self), mmap.PROT_READ | mmap.PROT_WRITE, flags, self.fd)

    @until_exit
    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class SharedBuffers:
    """Gives parts of a `SharedMemory`, as its only allocator. Not thread-safe.

    Sizes of parts are powers of two, so that each is used again. Only the used bytes of a part have memory.

    Args:
        keeps: memory is never given back to the system: a device of another process may have registered it.
    """

    def __init__(self, memory: SharedMemory, *, keeps: bool = False) -> None:
        self._memory, self._keeps = memory, keeps
        self._start = memory.words.ctypes.data
        self._end = PAGE_BYTES
        self._bare: dict[int, list[int]] = {}  # offsets of parts without memory, by size
        self._allocated_bytes = 0

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Return (nbytes,) uint8 that start at a page.

        Raises: MemoryError: memory or address space is exhausted.
        """
        size, bare = size_class(nbytes), self._bare.setdefault(size_class(nbytes), [])
        if not bare:
            if self._end + size > len(self._memory):
                raise MemoryError(
                    f"a batch needs {format_bytes(nbytes)} beside those that are kept or under way, and this "
                    f"worker has {format_bytes(len(self._memory))} of addresses: raise the limit on them "
                    f"(ulimit -v), {_FEWER}"
                )
            bare.append(self._end)
            self._end += size
        offset, backed = bare.pop(), in_pages(nbytes)
        try:
            os.posix_fallocate(self._memory.fd, offset, backed)
        except OSError as error:
            self._release(offset, size)  # a failed reserve keeps what it got
            raise MemoryError(
                f"a batch needs {format_bytes(nbytes)} of shared memory beside "
                f"{format_bytes(self._allocated_bytes)} in use, and got none ({error.strerror}): {_FEWER}"
            ) from error
        self._allocated_bytes += backed
        return np.frombuffer(self._memory, np.uint8, nbytes, offset)

    def free(self, memory: NDArray[np.uint8]) -> None:
        self._allocated_bytes -= in_pages(memory.nbytes)
        self._release(self.offset(memory.ctypes.data), size_class(memory.nbytes))

    def offset(self, address: int) -> int:
        """Return the offset of an address in the file, by which other processes find it."""
        return address - self._start

    def _release(self, offset: int, size: int) -> None:
        if not self._keeps:
            with suppress(OSError):  # a file system without hole punching: the memory stays
                self._memory.madvise(mmap.MADV_REMOVE, offset, size)
        self._bare[size].append(offset)


def address_of_map(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


def shared_part(address: int, nbytes: int) -> tuple[SharedMemory, int, int] | None:
    """Return the memory, address and bytes of the part that contains some bytes, or None."""
    for memory in [*_living]:
        start = address_of_map(memory)
        if memory.parts and 0 <= address - start < len(memory):
            offsets = sorted(memory.parts)
            offset = offsets[max(0, bisect_right(offsets, address - start) - 1)]
            size = memory.parts[offset]
            if start + offset <= address and address + nbytes <= start + offset + size:
                return memory, start + offset, size
    return None


def size_class(nbytes: int) -> int:
    """Return the least bytes of addresses of a part for this number of bytes."""
    return max(PAGE_BYTES, 1 << (max(1, nbytes) - 1).bit_length())


def in_pages(nbytes: int) -> int:
    """Return the bytes of whole pages for this number of bytes, at least one page."""
    return -(-max(1, nbytes) // PAGE_BYTES) * PAGE_BYTES


def _stretch(fd: int, parts: int) -> None:
    """Make a file as long as the limits of this process allow: a quarter of the addresses that are left."""
    left = linux.left_bytes(resource.RLIMIT_AS)
    nbytes = _MAX_BYTES if left is None else min(_MAX_BYTES, max(0, left) // 4)
    least = _MIN_BYTES if left is None else _MIN_LIMITED_BYTES
    nbytes = max(least, nbytes // parts // PAGE_BYTES * PAGE_BYTES)
    while True:
        try:
            os.ftruncate(fd, nbytes)
            return
        except OSError:  # RLIMIT_FSIZE, or the file system's largest file
            if nbytes // 2 < _MIN_BYTES:
                raise
            nbytes //= 2


_living: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
