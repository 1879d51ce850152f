"""Shared memory for batches: one anonymous file, mapped by the main process and by its workers.

It owns the file (a memfd, or an unlinked one), the main process' mapping of it, and which parts
of it are in use: blocks, one for each array of a step's batches. The file is sparse and far larger
than what is ever used of it, so it is mapped once and blocks never move; only those in use, and a
few kept ready, have memory.

    byte 0      the number of the last epoch that ended, int64: workers make nothing for it any more
    byte 8      what each worker is at, int64: nanoseconds of the monotonic clock when it began, times 4,
                plus its stage's number; 0: nothing
    PAGE_BYTES  blocks; sizes are powers of two, and only what is used of a block has memory

Guarantees: the file has no name, so that a kill leaves nothing behind, and it is not in /dev/shm; a
block has its memory before anybody writes (else a full disk or memory would be a SIGBUS, not an
error); a block is used again only when the last array over it has died (as in ring.py: a weak
reference to its owner appends itself to a deque, nothing else) and whoever wrote into it has said so
or is dead. Nobody waits for a block: a consumer that keeps everything makes more of the file be used,
and the memory of what it lets go later is given back.

A forked child may write into arrays that it inherits: its parent does not see that. But as the parent
goes on, it uses their memory again: what the child keeps of a batch it must copy.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache import linux
from arrowcache.reading.workers.memory import anonymous_file, array_over, map_all
from arrowcache.storage.mapping import PAGE_BYTES
from arrowcache.units import format_bytes

STAGES_OF_WORKERS = ("", "gather", "transform")
_MOST_BYTES, _LEAST_BYTES = 1 << 40, 1 << 28  # of addresses, not of memory


@dataclass(slots=True, eq=False)
class Block:
    """A part of the shared file. `backed_bytes` of it have memory."""

    offset: int
    nbytes: int
    backed_bytes: int = 0
    users: int = 0


class _Loan(weakref.ref[object]):
    """Part of a block, for as long as its owner lives; equal to itself alone, also when that is dead."""

    __slots__ = ("block",)
    block: Block
    __eq__, __hash__ = object.__eq__, object.__hash__


class SharedRing:
    """Blocks of shared memory for batches. Thread-safe.

    Args:
        keep_bytes: how much memory may lie ready, in use by nobody; see `keep`.
    Raises: OSError: neither a memfd nor a temporary file can be had.
    """

    def __init__(self, keep_bytes: int = 0) -> None:
        self.fd = anonymous_file()
        self._nbytes = _stretch(self.fd)
        self._memory = map_all(self.fd)
        _rings.add(self)
        self._words = array_over(self._memory, 0, np.int64, (PAGE_BYTES // 8,))
        self._lock = threading.Lock()
        self._lent: set[_Loan] = set()
        self._returned: deque[Block | _Loan] = deque()  # the only thing that the end of an array touches
        self._ready: dict[int, list[Block]] = {}  # by size, with memory
        self._bare: dict[int, list[Block]] = {}  # by size, without
        self._end = PAGE_BYTES
        self._ready_bytes = 0
        self._keep_bytes = keep_bytes
        self._blocks_in_use = 0
        self.allocated_bytes = 0
        self.growths = 0  # blocks that got memory

    @property
    def ended(self) -> int:
        """The last epoch for which nothing is to be made any more; workers see it at once."""
        return int(self._words[0])

    @ended.setter
    def ended(self, epoch: int) -> None:
        self._words[0] = epoch

    def progress(self, worker: int) -> int:
        """What a worker is at, as the module docstring says."""
        return int(self._words[1 + worker])

    def set_progress(self, worker: int, word: int) -> None:
        """Instead of a worker that is not there."""
        self._words[1 + worker] = word

    @property
    def in_use(self) -> int:
        """Blocks in use, as the last `take` found."""
        return self._blocks_in_use

    def keep(self, nbytes: int) -> None:
        """Let at least so much memory lie ready: what is used steadily is never given back."""
        self._keep_bytes = max(self._keep_bytes, nbytes)

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, in use by the caller until `give`.

        Raises: MemoryError: there is no memory, or no address space, for it.
        """
        size = max(PAGE_BYTES, 1 << (max(1, nbytes) - 1).bit_length())
        with self._lock:
            self._collect()
            block = self._find(size)
            missing = -(-nbytes // PAGE_BYTES) * PAGE_BYTES - block.backed_bytes
            if missing > 0:
                try:
                    os.posix_fallocate(self.fd, block.offset + block.backed_bytes, missing)
                except OSError as error:
                    self._bare.setdefault(size, []).append(block)
                    raise MemoryError(
                        f"a batch needs {format_bytes(nbytes)} of shared memory beside "
                        f"{format_bytes(self.allocated_bytes)} in use, and got none ({error.strerror}): "
                        "keep fewer batches, or lower batch_size, prefetch or workers"
                    ) from error
                block.backed_bytes += missing
                self.allocated_bytes += missing
                self.growths += 1
            self._blocks_in_use += 1
            block.users = 1
            return block

    def give(self, block: Block) -> None:
        """One of those that use a block does no more."""
        self._returned.append(block)

    def hand_out(
        self, block: Block, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> NDArray[Any]:
        """An array over a part of a block, which returns it when the last view of the array dies.

        All arrays over a block are handed out before the first of them can die.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return np.empty(shape, dtype)
        owner: Any = (ctypes.c_char * nbytes).from_buffer(self._memory, block.offset + start)
        loan = _Loan(owner, self._returned.append)
        loan.block = block
        block.users += 1
        self._lent.add(loan)
        return np.frombuffer(owner, dtype).reshape(shape)

    def array(self, block: Block, dtype: Any, shape: Sequence[int]) -> NDArray[Any]:
        """An array over a block of the caller's, gone before the block is given back."""
        return array_over(self._memory, block.offset, dtype, shape)

    def forget_in_child(self) -> None:
        """See module docstring."""
        if self.fd >= 0:
            flags = mmap.MAP_PRIVATE | linux.MAP_FIXED | linux.MAP_NORESERVE
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            linux.map_memory(self._words.ctypes.data, self._nbytes, protection, flags, self.fd)
        self._lock = threading.Lock()  # another thread may have held it, in the middle of anything
        self._returned, self._ready = deque(), {}

    def close(self) -> None:
        """Give nothing out any more, keep no memory ready. What was handed out stays valid. Idempotent."""
        if self.fd >= 0:
            with self._lock:
                self._keep_bytes = 0
                self._collect()
                for block in [block for ready in self._ready.values() for block in ready]:
                    self._strip(block)
                self._ready = {}
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()

    def _find(self, size: int) -> Block:
        if ready := self._ready.get(size):
            block = ready.pop()
            self._ready_bytes -= block.backed_bytes
            return block
        if bare := self._bare.get(size):
            return bare.pop()
        if self._end + size > self._nbytes:
            raise MemoryError(
                f"the batches in use fill {format_bytes(self._nbytes)} of addresses: keep fewer of them"
            )
        block = Block(self._end, size)
        self._end += size
        return block

    def _collect(self) -> None:
        """Take back what nobody uses any more; give back the memory of what is too much."""
        while self._returned:
            returned = self._returned.popleft()
            if isinstance(returned, _Loan):
                self._lent.discard(returned)
            block = returned.block if isinstance(returned, _Loan) else returned
            block.users -= 1
            if block.users:
                continue
            self._blocks_in_use -= 1
            if self._ready_bytes + block.backed_bytes > self._keep_bytes:
                self._strip(block)
            if block.backed_bytes:
                self._ready_bytes += block.backed_bytes
                self._ready.setdefault(block.nbytes, []).append(block)
            else:
                self._bare.setdefault(block.nbytes, []).append(block)

    def _strip(self, block: Block) -> None:
        with suppress(OSError):  # a file system that cannot: the memory stays
            self._memory.madvise(mmap.MADV_REMOVE, block.offset, block.backed_bytes)
            self.allocated_bytes -= block.backed_bytes
            block.backed_bytes = 0


_rings: weakref.WeakSet[SharedRing] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for ring in list(_rings):
        ring.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Slot:
    """The blocks of one step: a few for each column, in the order of its arrays.

    In use by whoever made it until `close`, and by each array it handed out.
    """

    def __init__(self, ring: SharedRing, sizes: Mapping[str, Sequence[int]]) -> None:
        self._ring = ring
        self._blocks: dict[str, list[Block]] = {}
        try:
            for name, of_arrays in sizes.items():
                blocks = self._blocks[name] = []
                for nbytes in of_arrays:
                    blocks.append(ring.take(nbytes))  # noqa: PERF401  # what fails midway is given back
        except BaseException:
            self.close()
            raise
        self.sizes = {name: list(of_arrays) for name, of_arrays in sizes.items()}
        self.nbytes = sum(map(sum, self.sizes.values()))

    def places(self) -> dict[str, list[tuple[int, int]]]:
        """name -> (offset, bytes) of each of its arrays."""
        return {
            name: [(block.offset, nbytes) for block, nbytes in zip(blocks, self.sizes[name], strict=True)]
            for name, blocks in self._blocks.items()
        }

    def array(self, name: str, number: int, dtype: str, shape: Sequence[int], rows: slice) -> NDArray[Any]:
        """Some rows of one array of a column, to be handed out."""
        kind, block = np.dtype(dtype), self._blocks[name][number]
        if not shape:
            return self._ring.hand_out(block, 0, kind, ())
        start, stop, _ = rows.indices(shape[0])
        row_bytes = kind.itemsize * math.prod(shape[1:])
        return self._ring.hand_out(block, start * row_bytes, kind, (stop - start, *shape[1:]))

    def close(self) -> None:
        """Everything was handed out; the blocks are free once that has died. Idempotent."""
        blocks, self._blocks = self._blocks, {}
        for of_column in blocks.values():
            for block in of_column:
                self._ring.give(block)

    def abandon(self) -> None:
        """Somebody may go on to use this memory for ever: it is never used again."""
        self._blocks = {}

    def __del__(self) -> None:
        if hasattr(self, "_blocks"):
            self.close()


def _stretch(fd: int) -> int:
    """Make a file as long as addresses allow; returns its length."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    nbytes = _MOST_BYTES if limit == resource.RLIM_INFINITY else min(_MOST_BYTES, limit // 8)
    while True:
        try:
            os.ftruncate(fd, nbytes)
            return nbytes
        except OSError:  # RLIMIT_FSIZE, or the file system's largest file
            if nbytes // 2 < _LEAST_BYTES:
                raise
            nbytes //= 2
