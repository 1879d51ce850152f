"""Memory: allocates the memory that rows are gathered into: arrays, and the buffers of slots.

`output_arrays` are a user's own, or new ones. Slots get memory from an allocator, one buffer, (nbytes,)
uint8, at a time. `page_aligned` gives plain memory. `SharedBuffers` gives a part of an anonymous file, which
another process finds by its offset. Memory that a device reads by itself comes from torch/registered.py,
which also registers parts of such files.

Guarantee: a buffer of a file has its memory before anybody writes. Otherwise a full disk or memory would be a
SIGBUS, not an error.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import resource
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from arrowcache import linux
from arrowcache.arrow.schema import Schema
from arrowcache.lifetimes import forgets_in_child, until_exit
from arrowcache.linux import PAGE_BYTES
from arrowcache.os_errors import out_of_memory
from arrowcache.units import format_bytes

if TYPE_CHECKING:
    from typing import Self

_MOST_BYTES, _LEAST_BYTES = 1 << 40, 1 << 28  # of addresses, not of memory
_LEAST_LIMITED_BYTES = 1 << 20  # where addresses are limited
_FEWER = "keep fewer or smaller batches, or lower prefetch or workers"


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
    schema: Schema, names: Sequence[str], rows: int, out: Mapping[str, NDArray[Any]] | None
) -> dict[str, NDArray[Any]]:
    """Return an array of `rows` rows for each fixed-width column: a user's own, where given, else a new one.

    Raises: TypeError: `out` is no mapping. ValueError: an array in it is of a column not asked for, or
        cannot be filled; two arrays overlap.
    """
    out = {} if out is None else out
    if not isinstance(out, Mapping):
        raise TypeError(f"out must be a dict of arrays by column, not {type(out).__name__}")
    for name in out:
        if name not in names or name not in schema.fixed:
            raise ValueError(f"out has {name!r}, which is not a fixed-width column asked for")
    arrays = {}
    for name in names:
        if name not in schema.fixed:
            continue
        kind = schema.fixed[name]
        shape, dtype = (rows, *kind.shape), kind.numpy_dtype
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


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


def shared_part(address: int, nbytes: int) -> tuple[SharedMemory, int, int] | None:
    """Return the memory, address and bytes of the part that contains some bytes, or None."""
    for memory in [*_living]:
        start = address_of(memory)
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
    nbytes = _MOST_BYTES if left is None else min(_MOST_BYTES, max(0, left) // 4)
    least = _LEAST_BYTES if left is None else _LEAST_LIMITED_BYTES
    nbytes = max(least, nbytes // parts // PAGE_BYTES * PAGE_BYTES)
    while True:
        try:
            os.ftruncate(fd, nbytes)
            return
        except OSError:  # RLIMIT_FSIZE, or the file system's largest file
            if nbytes // 2 < _LEAST_BYTES:
                raise
            nbytes //= 2


_living: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
