"""Arena: the mapped segments of a cache, all in one range of addresses.

The range is cut into equal cells; each mapped segment's file lies in one, from a huge page on.
`place` tells the engine where the buffers of some segments are.

Guarantees: mapped implies leased, by whoever called `acquire`; a mapped file's structure was
checked; all arenas of a process together use at most half of vm.max_map_count. A segment that
finds no cell is read through an arena of one cell: slower, same result.
"""

from __future__ import annotations

import heapq
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.segment import Layout
from arrowcache.arrow.template import KnownLayouts
from arrowcache.native.rows import Rows
from arrowcache.reading.gather import Gatherer as Placement
from arrowcache.storage.layout import SegmentInfo, Settings
from arrowcache.storage.locks import file_identity
from arrowcache.storage.mapping import HUGE_PAGE, PAGE_BYTES, AddressRange, most_mappings, open_file
from arrowcache.storage.store import Store
from arrowcache.storage.verification import check_file, unfit

NO_CELL = -1
_LEAST_CELLS = 4096  # a small cache may hold many short segments
_MAX_RANGE_BYTES = 1 << 42  # 4 TiB of a 128 TiB address space
_MOST_LAYOUTS = 64  # of those that several segments may share
_MAPPINGS_A_CELL = 2  # a segment and the hole behind it


class _Budget:
    """Cells that may still be mapped."""

    def __init__(self, cells: int) -> None:
        self.total = self._left = cells
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls) -> _Budget:
        """Half of the mappings that the kernel allows this process."""
        return cls(most_mappings() // 2 // _MAPPINGS_A_CELL)

    def take(self) -> bool:
        with self._lock:
            self._left -= 1
            if self._left >= 0:
                return True
            self._left = 0
            return False

    def give_back(self, cells: int) -> None:
        with self._lock:
            self._left += cells


class Claim:
    """Segments that a reader needs mapped, oldest first, and gives up from the oldest on.

    `released`: so many of the oldest are not, or no longer, claimed; all of them until `acquire`.
    """

    def __init__(self, segments: Sequence[SegmentInfo]) -> None:
        self.segments = tuple(segments)
        self.released = len(self.segments)


_budget = _Budget.of_process()
_arenas: weakref.WeakKeyDictionary[Store, Arena] = weakref.WeakKeyDictionary()
_arena_of: weakref.WeakValueDictionary[tuple[int, int], Arena] = weakref.WeakValueDictionary()
_arenas_lock = threading.Lock()


class Arena:
    """The mapped segments of one cache in this process. Thread-safe.

    Args:
        settings: of the cache.
        budget: how many segments may be mapped at once; fewer if the address space is limited.
    """

    def __init__(self, settings: Settings, budget: _Budget) -> None:
        self._settings = settings
        self._schema = settings.schema
        self._segment_bytes = settings.segment_bytes
        step = HUGE_PAGE if self._segment_bytes >= HUGE_PAGE else PAGE_BYTES
        self._stride = -(-self._segment_bytes // step) * step
        self._known = KnownLayouts(self._schema)
        self._lock = threading.Lock()
        self._cells: dict[int, int] = {}  # by seq: the number of its cell
        self._users: dict[int, int] = {}  # by seq: snapshots that may read it
        self._proved: set[int] = set()  # seqs of mapped segments whose bytes were checked
        self._released: deque[tuple[Claim, int, Callable[[], None]]] = deque()
        self._range: AddressRange | None = None
        self._budget = budget
        wanted = max(_LEAST_CELLS, 4 * settings.capacity_bytes // self._segment_bytes)
        cells = max(1, min(budget.total, wanted, _most_range_bytes() // self._stride))
        while self._range is None and cells:
            try:
                self._range = AddressRange(cells * self._stride)
            except OSError:  # RLIMIT_AS, or a crowded address space
                cells //= 2
        self._free: list[int] = []
        self._dirty: list[int] = []  # to be emptied before they are free
        self._unused = iter(range(cells))
        self._file_at = np.zeros(cells, np.int64)
        self._warm = np.zeros(cells, np.bool_)  # all pages were brought to memory
        self._layout_at = np.zeros(cells, np.int64)  # the address of its array in `_layouts`
        self._layouts: dict[int, NDArray[np.int64]] = {}  # by cell: where its buffers begin in the file
        self._shared: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._nbytes = np.zeros(cells, np.int64)
        self._path_at = np.zeros(cells, np.int64)
        self._device = np.zeros(cells, np.int64)
        self._inode = np.zeros(cells, np.int64)
        self._paths = {}

    @classmethod
    def of(cls, store: Store) -> Arena:
        """The arena that all readers of a cache share in this process, however often it was opened.

        A cache is known by its lease.lock, not by its path. Whatever is mapped is leased, which keeps that
        file open: while anything is mapped, no other cache can get its identity.
        """
        try:
            identity = file_identity(os.stat(store.folder.lease_lock))
        except OSError:  # the folder is gone: what is mapped of it can be read still
            identity = None
        with _arenas_lock:
            arena = _arenas.get(store) if identity is None else _arena_of.get(identity)
            if arena is None or arena._range is None or not arena._fits(store.settings):
                arena = cls(store.settings, _budget)  # where there were no addresses, there may be some now
                if identity is not None:
                    _arena_of[identity] = arena
            if _arenas.get(store) is not arena:
                _arenas[store] = arena  # it lives as long as a store of it
            return arena

    def _fits(self, settings: Settings) -> bool:
        """Whether segments of such a cache fit into its cells."""
        return (self._schema, self._segment_bytes) == (settings.schema, settings.segment_bytes)

    def acquire(self, claim: Claim) -> None:
        """Keep its segments mapped, once they are; the caller leases them until it released them.

        All of them or none, also when Ctrl-C comes in between: counts are replaced as a whole.
        """
        with self._lock:
            users = self._users.copy()
            for segment in claim.segments:
                users[segment.seq] = users.get(segment.seq, 0) + 1
            self._users, claim.released = users, 0
        self._let_go()

    def release(self, claim: Claim, count: int, then: Callable[[], None] = lambda: None) -> None:
        """Unmap the `count` oldest segments of a claim that no other one has; then call `then`.

        `then` ends their lease, and may be called twice: what Ctrl-C cuts short is done anew, by whatever
        is asked of the arena next. The garbage collector may call this at any point of any thread,
        also of one that is just working on the arena: that thread does it then, as soon as it is done.
        """
        self._released.append((claim, count, then))
        self._let_go()

    def _let_go(self) -> None:
        while self._released and not self._lock.locked():
            with self._lock:  # not a try to acquire it: Ctrl-C would come between that and its try block
                while self._released:
                    claim, count, then = self._released[0]
                    if count > claim.released:
                        users, unused = self._without(claim.segments[claim.released : count])
                        before = self._users, claim.released
                        self._users, claim.released = users, count
                        try:
                            self._unmap(unused)
                        except OSError:  # the process has too many mappings even to end one
                            self._users, claim.released = before  # mapped implies leased: later, then
                            return
                    then()
                    self._released.popleft()
                self._clean()

    def _without(self, segments: Sequence[SegmentInfo]) -> tuple[dict[int, int], list[int]]:
        """Who uses what without one user of these segments, and which of them nobody uses then."""
        users, unused = self._users.copy(), []
        for segment in segments:
            users[segment.seq] -= 1
            if not users[segment.seq]:
                del users[segment.seq]
                unused.append(segment.seq)
        return users, unused

    def map(self, segment: SegmentInfo, store: Store, *, check_bytes: bool) -> int:
        """Map and check an acquired segment, if it is not yet.

        Args:
            store: who asks: its folder has the file.
            check_bytes: check its bytes too, also where another reader has mapped it without.
        Returns: its cell; NO_CELL if none is free: use `alone`.
        Raises: CorruptSegmentError: what is wrong; it is not mapped then, but for others who read it.
            OSError: the process has too little memory or too many files open.
        """
        with self._lock:
            number = self._map(segment, store, check_bytes)
        self._let_go()
        return number

    def place(self, cells: NDArray[np.int64], starts: NDArray[np.int64], first: int = 0) -> Placement:
        """The rows of a list of segments, numbered one after another.

        Args:
            cells: (n,) each segment's cell; negative for one whose rows are refused.
            starts: (n + 1,) the number of each segment's first row, and the number of rows.
            first: the lowest number that may be asked for.
        """
        if self._range is None:
            raise MemoryError("no address space is left to map a segment: raise ulimit -v")
        known = np.maximum(cells, 0)
        rows = Rows(starts)
        rows._keep = self._range, list(self._layouts.values()), self._paths.copy()
        table = rows._table[:-1]
        table[:, 1], table[:, 2] = self._nbytes[known], np.where(cells < 0, 0, self._layout_at[known])
        table[:, 4], table[:, 5], table[:, 6] = self._path_at[known], self._device[known], self._inode[known]
        table[:, 0] = np.where(cells < 0, 0, self._range.address + self._file_at[known])
        rows.release(first)
        return Placement(self._schema, rows)

    @contextmanager
    def alone(self, segment: SegmentInfo, store: Store, *, check_bytes: bool) -> Iterator[Placement]:
        """Map one segment, which finds no cell here, in an arena of its own while the context lasts.

        Args, Raises: as `map`; MemoryError: there is no address space for even one.
        """
        arena, claim = Arena(self._settings, _Budget(1)), Claim([segment])
        arena.acquire(claim)
        try:
            cell = arena.map(segment, store, check_bytes=check_bytes)
            if cell == NO_CELL:
                raise MemoryError("no address space is left to map one segment: raise ulimit -v")
            yield arena.place(np.array([cell]), np.array([0, segment.rows]))
        finally:
            arena.release(claim, 1)

    def columns_of(self, segment: SegmentInfo) -> tuple[list[int], list[list[int]]] | None:
        """Where the columns of a mapped segment's file lie: bytes from the file's start.

        Returns: of fixed columns, and (offsets, values) of variable ones; None: it has no cell.
        """
        number = self._cells.get(segment.seq)
        if number is None:
            return None
        at, count = self._layouts[number].tolist(), len(self._schema.fixed)
        return at[:count], [at[place : place + 2] for place in range(count, len(at), 2)]

    def memory_of(self, segment: SegmentInfo) -> tuple[int, int]:
        """(address, bytes) of a mapped segment's file, while it is mapped; (0, 0): it has no cell."""
        number = self._cells.get(segment.seq)
        if number is None or self._range is None:
            return 0, 0
        return self._range.address + int(self._file_at[number]), segment.nbytes

    def note_warm(self, segment: SegmentInfo, *, is_warm: bool) -> None:
        """A mapped segment's pages were brought to memory, or were read for the last time.

        The kernel may take some back.
        """
        number = self._cells.get(segment.seq)
        if number is not None:
            self._warm[number] = is_warm

    def mapped(self) -> int:
        """How many segments are mapped."""
        return len(self._cells)

    def _map(self, segment: SegmentInfo, store: Store, check_bytes: bool) -> int:
        number = self._cells.get(segment.seq)
        if number is not None:
            if check_bytes and segment.seq not in self._proved:
                assert self._range is not None
                file = self._range.buffer(int(self._file_at[number]), segment.nbytes)
                check_file(file, store, segment, check_bytes=True)
                self._proved.add(segment.seq)
            return number
        number = self._take_cell()
        if number == NO_CELL:
            return NO_CELL
        self._cells[segment.seq] = number
        self._proved.discard(segment.seq)
        try:
            self._fill(number, segment, store, check_bytes)
            if check_bytes:
                self._proved.add(segment.seq)
        except BaseException as error:
            self._dirty.append(self._cells.pop(segment.seq))
            self._clean()
            if (reason := unfit(error)) is not None:
                raise reason from None
            raise
        return number

    def _fill(self, number: int, segment: SegmentInfo, store: Store, check_bytes: bool) -> None:
        """Map a segment into its cell, checked: by comparison where its layout is known."""
        assert self._range is not None
        start = number * self._stride
        fd, nbytes = open_file(f"{store.folder.segments}/{segment.name}", self._segment_bytes)
        try:
            status = os.fstat(fd)
            self._device[number], self._inode[number] = status.st_dev, status.st_ino
            path = f"{store.folder.segments}/{segment.name}".encode() + b"\0"
            self._paths[number] = kept = np.frombuffer(path, np.uint8)
            self._path_at[number] = kept.ctypes.data
            layout = None if check_bytes else self._known.find(partial(os.pread, fd), nbytes, segment.rows)
            is_new = layout is None
            if layout is None:
                self._range.map_file(fd, start, nbytes)
                file = self._range.buffer(start, nbytes)
                layout = check_file(file, store, segment, check_bytes=check_bytes)
                self._known.learn(file, layout)
            if not is_new:
                self._range.map_file(fd, start, nbytes)
        finally:
            os.close(fd)
        self._file_at[number], self._nbytes[number], self._warm[number] = start, nbytes, False
        self._layouts[number] = array = self._array_of(layout)
        self._layout_at[number] = array.ctypes.data

    def _array_of(self, layout: Layout) -> NDArray[np.int64]:
        """Where buffers are: one array for all segments that are alike."""
        at = (*layout.fixed, *(place for pair in layout.variable for place in pair))
        array = self._shared.pop(at, None)
        self._shared[at] = array = np.array(at, np.int64) if array is None else array  # last used last
        if len(self._shared) > _MOST_LAYOUTS:
            del self._shared[next(iter(self._shared))]
        return array

    def _take_cell(self) -> int:
        if self._range is None or not self._budget.take():
            return NO_CELL
        number = heapq.heappop(self._free) if self._free else next(self._unused, NO_CELL)
        if number == NO_CELL:
            self._budget.give_back(1)
        return number

    def _unmap(self, seqs: Iterable[int]) -> None:
        """Unmap what is mapped of these; neighbouring cells in one go.

        Raises: OSError: not all; the rest is as it was.
        """
        seq_of = {self._cells.pop(seq): seq for seq in seqs if seq in self._cells}
        self._proved.difference_update(seq_of.values())
        numbers = sorted(seq_of)
        first = 0
        try:
            for last, number in enumerate(numbers, 1):
                if last == len(numbers) or numbers[last] != number + 1:
                    self._empty(numbers[first], last - first)
                    first = last
        except OSError:
            self._cells |= {seq_of[number]: number for number in numbers[first:]}
            raise

    def _empty(self, first: int, count: int) -> None:
        assert self._range is not None
        self._range.unmap(first * self._stride, count * self._stride)
        for number in range(first, first + count):
            self._layouts.pop(number, None)
            heapq.heappush(self._free, number)
        self._budget.give_back(count)

    def _clean(self) -> None:
        """Empty cells in which mapping a segment failed."""
        while self._dirty:
            number = self._dirty.pop()
            try:
                self._empty(number, 1)
            except OSError:
                self._dirty.append(number)
                return

    def _forget_in_child(self) -> None:
        """A forked child inherits no mapping and no lease."""
        self.__init__(self._settings, _budget)  # type: ignore[misc]  # anew, at the same place

    def __del__(self) -> None:
        if hasattr(self, "_nbytes"):
            self._budget.give_back(len(self._cells) + len(self._dirty))


def _most_range_bytes() -> int:
    """How many addresses one arena may reserve: a small part of what the process may have."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return _MAX_RANGE_BYTES if limit == resource.RLIM_INFINITY else min(_MAX_RANGE_BYTES, limit // 8)


def _after_fork_in_child() -> None:
    global _budget, _arenas_lock
    _budget, _arenas_lock = _Budget.of_process(), threading.Lock()
    for arena in {id(arena): arena for arena in [*_arenas.values(), *_arena_of.values()]}.values():
        arena._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
