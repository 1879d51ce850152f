"""Engine: jobs that copy rows of segments into arrays, and the threads that run them. The face of engine.h.

`SegmentRows` numbers the rows of several segments one after another. It is a table of segments, filled in
place, segment by segment, as their files are mapped. Meanwhile threads copy rows of other segments.

`threads` are the native threads of this process. The first job with work for more than one thread starts
them. They end before a fork and at exit, and the next job starts them again.

A call begins a job and returns. Rows are given by their numbers (`SegmentRows`). Rows that are in memory are
copied from mapped files (`copy_rows`); rows that may be on the disk are asked for, then read (`read_rows`).
Columns of variable width take two jobs: `find_values`, then `copy_values` or `read_values`. `fetch_rows` and
`fetch_values` have the disk begin to read rows that follow one another. The thread that waits for a copy
helps, so a copy ends also where there are no other threads.

Guarantees: numbers are checked before a byte is copied. An ended job, in whatever way it ended, touches none
of its arguments. Ctrl-C ends a wait within milliseconds. A job that the kernel holds for more than
5 s, as on a dead disk, is left behind with all that it touches, and a ResourceWarning; another thread takes
the place of the one that waits. A forked child has an engine of its own; a job that it inherits raises there.

Must never: have the address of a segment that is unmapped while its rows may still be asked for. The caller
keeps all memory whose addresses are in the table.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arrowcache.lifetimes import at_exit, at_fork, until_exit
from arrowcache.limits import Limits
from arrowcache.native import maps
from arrowcache.native.library import address_of, declare, library, quick

PIECE_BYTES = 128 << 10  # ENGINE_PIECE_BYTES of the header
FIXED, LENGTHS, VALUES = range(3)
COPY, ASK, READ, FETCH = range(4)
_DONE = -1  # no number was out of range
_NOTHING = (0,) * 4  # of `engine_job`: there are no values, nothing is read
_BEGUN = (0,) * 9  # of `engine_job`, which the engine fills in
_WAY, _DAMAGED, _FAILED, _ERROR, _MISSED = 1, *range(15, 19)

CopiedColumn = tuple[int, int, int]
"""A column of fixed width to be copied: the index of its buffer in a segment, the bytes of a row, and the
address of memory for all rows, one after another: 0, if it has none yet."""

_SEGMENT_WORDS = 7  # of `engine_segment`
_BASE, _NBYTES, _AT, _FIRST_ROW, _PATH, _DEVICE, _INODE = range(_SEGMENT_WORDS)
_FROM_WORDS = [_BASE, _NBYTES, _PATH, _DEVICE, _INODE]
_WORDS = [maps.ADDRESS, maps.NBYTES, maps.PATH, maps.DEVICE, maps.INODE]  # in the same order
_FIRST = 3  # of `engine_rows`
_BLOCKS_A_SEGMENT = 4


def entries_of(words: NDArray[np.int64], layouts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the entries of some files for `SegmentRows.put`: (n, words of an `engine_segment`).

    Args:
        words: (n, words of one) of `maps.Files`. Files without an address are read, not copied.
        layouts: (n,) addresses of int64 arrays with the begin of each buffer, in bytes of the file.
    """
    told = np.zeros((len(words), _SEGMENT_WORDS), np.int64)
    told[:, _FROM_WORDS] = words[:, _WORDS]
    told[:, _AT] = layouts
    return told


class SegmentRows:
    """Rows of segments, none of which is mapped at first.

    Args:
        starts: (n + 1,) int64 numbers of the segments' first rows, then the number of all rows.
    """

    def __init__(self, starts: NDArray[np.int64]) -> None:
        count, rows = len(starts) - 1, int(starts[-1])
        self._table = np.zeros((count + 1, _SEGMENT_WORDS), np.int64)
        self._table[:, _FIRST_ROW] = starts
        self._is_known = np.zeros(count, np.bool_)
        each = np.diff(starts)
        alike = count > 0 and bool((each[:-1] == each[0]).all()) and each[-1] <= each[0]
        rows_each, shift, self._blocks = int(each[0]) if alike else 0, 0, np.zeros(0, np.int64)
        if count and not alike:
            shift = max(0, (rows // (_BLOCKS_A_SEGMENT * count)).bit_length() - 1)
            firsts = np.arange(0, rows + (1 << shift), 1 << shift)
            self._blocks = starts.searchsorted(np.minimum(firsts, rows - 1), side="right") - 1
        words = (address_of(self._table), address_of(self._blocks), count, 0, rows, rows_each, shift)
        self._words = np.array(words, np.int64)
        self.address = address_of(self._words)

    def put(self, indices: ArrayLike, entries: ArrayLike) -> None:
        """Set the places of segments, from their files' `entries_of`. The indices rise."""
        at: Any = np.asarray(indices, np.int64)
        if len(at) and at[-1] - at[0] + 1 == len(at):
            at = slice(at[0], at[-1] + 1)  # a slice is faster
        told = np.asarray(entries, np.int64).reshape(-1, _SEGMENT_WORDS)
        self._table[at, _NBYTES:_FIRST_ROW] = told[:, _NBYTES:_FIRST_ROW]
        self._table[at, _PATH:] = told[:, _PATH:]
        self._table[at, _BASE] = told[:, _BASE]  # last, in one piece: threads may read it by now
        self._is_known[at] = True

    def release(self, first: int) -> None:
        """Refuse rows before this one from now on."""
        self._words[_FIRST] = first

    def segments_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """Return the segment of each row (n,), or the index of a number that is out of range."""
        segments = np.empty(len(ids), np.int64)
        ids = np.ascontiguousarray(ids, np.int64)
        bad = quick.engine_segments(self.address, address_of(ids), len(ids), address_of(segments))
        return segments if bad < 0 else int(bad)

    @property
    def is_known(self) -> bool:
        """True if all segments were put."""
        return bool(self._is_known.all())

    def knows(self, segment: int) -> bool:
        """True if a segment was put, by its number."""
        return bool(self._is_known[segment])

    def unknown(self, segments: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Return the segments that were not put yet, each once and in order: of these, or of all."""
        is_unknown = ~self._is_known
        if segments is not None:
            is_asked = np.zeros(len(is_unknown), np.bool_)
            is_asked[segments] = True
            is_unknown &= is_asked
        return is_unknown.nonzero()[0]  # np.unique would import numpy.ma: 30 ms


declare("engine_segments", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)


class Threads:
    """The process' engine and its threads.

    `handle` is the engine: another one in a forked child. `most` is the number of threads to start: fewer
    in a process that works beside others like it.
    """

    def __init__(self) -> None:
        self.handle = library.engine_new()
        if not self.handle:
            raise MemoryError("no memory is left for the engine")
        self.most = thread_count()
        self.are_started = self._is_closed = False
        self._lock = threading.RLock()  # a signal handler may copy rows, too
        self._held = 0  # threads that the kernel holds, replaced by others

    def start(self) -> None:
        """Start them, unless they run, or the process ends."""
        with self._lock:
            if not self.are_started and not self._is_closed:
                self._held = library.engine_stop(self.handle, 0)  # only these run
                library.engine_start(self.handle, self.most + self._held)
                self.are_started = True

    def leave_behind(self) -> None:
        """Warn of a thread that the kernel holds, perhaps for ever, and start another in its place."""
        with self._lock:
            if self.are_started:
                self._held += 1
                library.engine_start(self.handle, self.most + self._held)
        _warn()

    def stop(self) -> bool:
        """End them until the next job. Returns: True if all have ended. Blocks: at most 5 s."""
        if not self.are_started:
            return True
        try:
            return not library.engine_stop(self.handle, int(Limits.current.stuck_seconds * 1e9))
        finally:
            self.are_started = False

    def close(self) -> None:
        self._is_closed = True
        if not self.stop():
            _warn()

    def forget_in_child(self) -> None:
        """Begin anew: another thread may hold the lock, and the threads are the parent's."""
        self.__init__()  # type: ignore[misc]


def _warn() -> None:
    words = "a thread that reads rows waits for a disk, and is left behind with what it touches"
    with suppress(ValueError, OSError):  # nobody reads stderr
        warnings.warn(words, ResourceWarning, stacklevel=2)


def thread_count() -> int:
    """Return one for two processors, two for eight, four for 64; the machine's ranks share them."""
    ranks = 1
    with suppress(ValueError):
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return (max(1, len(os.sched_getaffinity(0)) // ranks).bit_length() + 1) // 2


declare("engine_new", ctypes.c_void_p)
declare("engine_start", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
declare("engine_stop", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
threads = Threads()
at_fork(before=threads.stop, in_child=threads.forget_in_child)
at_exit(threads.close)


class CopiedColumns:
    """Columns of fixed width to be copied, as of `CopiedColumn`: a table, made once and moved for each job.

    `row_bytes` are those of a row of all columns.
    """

    __slots__ = ("_table", "address", "count", "row_bytes")

    def __init__(self, columns: Iterable[CopiedColumn]) -> None:
        self._table = array("q", chain.from_iterable(columns))
        self.address, words = self._table.buffer_info()
        self.count, self.row_bytes = words // 3, sum(self._table[1::3])

    def at(self, addresses: Iterable[int]) -> CopiedColumns:
        """Return the same columns with other memory: for each an address."""
        moved = object.__new__(CopiedColumns)
        moved._table = self._table[:]
        moved._table[2::3] = array("q", addresses)
        moved.address = moved._table.buffer_info()[0]
        moved.count, moved.row_bytes = self.count, self.row_bytes
        return moved

    @property
    def pieces(self) -> int:
        return sum(-(-width // PIECE_BYTES) for width in self._table[1::3])


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that could not be read: its index among the job's, and errno, or 0 if its file ends before it."""

    index: int
    error: int


class Job:
    """Rows being copied. Its owner calls `take` until that returns True, or `cancel`; one thread at a time.

    All its arguments stay alive until its end was seen, even if the job object dies before.

    `refused` is -1, or the index of a row number that is out of range or whose segment is not known; no row
    was copied then. Valid once the job has ended.
    """

    refused = _DONE
    _is_left_behind = False
    _cancelled = 0  # by time.monotonic_ns

    def __init__(
        self,
        kind: int,
        way: int,
        rows: SegmentRows,
        ids: NDArray[np.int64],
        columns: CopiedColumns,
        keep: object,
        *,
        nbytes: int = 0,
        values: tuple[int, int] = (0, 0),
        pieces: int = 0,
        drops: bool = False,
    ) -> None:
        got = np.zeros(pieces, np.uint8) if pieces else None  # True for copied pieces
        places = kind, way, rows.address, address_of(ids), len(ids), columns.address, columns.count, *values
        self._job = array("q", (*places, 0 if got is None else address_of(got), drops, *_BEGUN))
        self._keep, self._address = (rows, ids, columns, got, keep), self._job.buffer_info()[0]
        self._handle = threads.handle
        self._has_ended = False
        self._is_late = way == COPY and nbytes <= Limits.current.inline_bytes
        if not self._is_late:
            self._submit()

    def _submit(self) -> None:
        self._is_late = False
        _release_lost()
        known = _UnderWay(self, _lost.append)
        known.address, known.handle, known.kept = self._address, self._handle, (self._job, self._keep)
        _under_way[self._address] = known
        try:
            if not threads.are_started:
                threads.start()
            self.refused = quick.engine_submit(self._handle, self._address)
        except BaseException:  # Ctrl-C: threads may be at it by now
            Job.cancel(self)
            raise
        if self.refused != _DONE:
            self._note_end()

    def _note_end(self) -> None:
        self._has_ended = True
        _under_way.pop(self._address, None)

    def take(self, seconds: float) -> bool:
        """Help with a copy, then wait for the job. Returns: True if it has ended.

        Blocks: at most so long, and the time of one chunk more; Ctrl-C is seen at a chunk's end.
        Raises: RuntimeError: this process was forked from the one that copies.
        """
        if self._has_ended:
            return True
        if threads.handle != self._handle:
            raise RuntimeError("the process that forked this one copies these rows: ask again")
        if self._is_late:
            refused = quick.engine_copy(self._address)
            if refused >= _DONE:
                self.refused, self._has_ended = refused, True
                return True
            self._submit()  # they are not all mapped
        is_under_way = quick.engine_help(self._handle, self._address, Limits.current.held_gil_chunks)
        if is_under_way and seconds > 0:
            is_under_way = library.engine_take(self._handle, self._address, int(seconds * 1e9))
        if not is_under_way:
            self._note_end()
        return self._has_ended

    def advance(self) -> None:
        """Begin the second part, if there is one and the first has ended: a plain job has none."""

    def cancel(self, seconds: float | None = None) -> bool:
        """End it. Returns: False: the kernel holds a thread that copies, and its memory must stay.

        Args:
            seconds: longest wait for work in progress. None means 5 s from the first call; then the job is
                left behind.
        Idempotent. Ctrl-C does not prevent the end: one that came in those 5 s is raised after it.
        """
        interrupt: BaseException | None = None
        while not (self._has_ended or threads is None):  # as it is once the interpreter has ended so far
            try:
                if threads.handle == self._handle and not self._is_late:
                    self._cancelled = self._cancelled or time.monotonic_ns()
                    most = self._cancelled + _patience() - time.monotonic_ns()
                    most = max(0, most) if seconds is None else int(seconds * 1e9)
                    one = library if most else quick  # which does not wait, and keeps the GIL
                    if one.engine_cancel(self._handle, self._address, most):
                        if seconds is None:
                            self._leave_behind()
                        break
                self._note_end()
            except Warning:  # where that is an error
                pass
            except BaseException as error:  # noqa: BLE001  # whoever comes next may unmap what it touches
                interrupt = error.with_traceback(None)
        try:
            if interrupt is not None and seconds is None:
                raise interrupt
            return self._has_ended
        finally:
            del interrupt  # its traceback has this frame: a cycle

    def _leave_behind(self) -> None:
        """Keep the job and all that it touches until the process ends."""
        if not self._is_left_behind:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            self._is_left_behind = True
            threads.leave_behind()

    def has_ended(self) -> bool:
        """True if the job has ended. Does not help, does not wait."""
        if not (self._has_ended or self._is_late or quick.engine_help(self._handle, self._address, 0)):
            self._note_end()
        return self._has_ended

    @property
    def missed(self) -> int:
        """Pages of a copy, or pieces of a read, that were not in memory. Valid once the job has ended."""
        return self._job[_MISSED]

    @property
    def failure(self) -> Failure | None:
        """A row that could not be read, or None. Valid once the job has ended."""
        index = self._job[_FAILED] - 1
        return None if index < 0 else Failure(index, self._job[_ERROR])

    @until_exit
    def __del__(self) -> None:
        if not getattr(self, "_has_ended", True):
            try:
                self.cancel()
            except BaseException:  # noqa: BLE001  # nobody would get it
                pass


class _UnderWay(weakref.ref[Job]):
    """The arguments of a job, from its beginning until its end was seen; and the job, if it lives."""

    __slots__ = ("address", "handle", "kept")
    address: int
    handle: int
    kept: object


def _patience() -> int:
    """Nanoseconds for threads that the kernel holds."""
    return int(Limits.current.stuck_seconds * 1e9)


def _release_lost() -> None:
    """End the jobs that died before they had ended: Ctrl-C came as a finalizer began."""
    while _lost:
        lost = _lost.popleft()
        if _under_way.get(lost.address) is lost:
            is_ours = lost.handle == threads.handle  # else a forked child has inherited it
            if not (is_ours and library.engine_cancel(lost.handle, lost.address, _patience())):
                del _under_way[lost.address]


_under_way: dict[int, _UnderWay] = {}  # by address
_lost: deque[_UnderWay] = deque()  # told without a line of Python, in which a Ctrl-C could be lost


class Read(Job):
    """Rows that may be on the disk: they are asked for, then the missing ones are read.

    Ctrl-C in any line does no harm: at worst rows are read once more.
    """

    _is_asking = True  # a read may have to follow
    _missed = 0

    def advance(self) -> None:
        """Begin to read the rows that were not in memory, if all have been asked for."""
        if self._is_asking and super().has_ended():
            self._missed = self._missed or self._job[_MISSED]  # the read sets it anew
            if self._missed:
                self._job[_WAY] = READ
                self._has_ended = False
                self._submit()
            self._is_asking = False

    def take(self, seconds: float) -> bool:
        if self._is_asking:
            if not super().take(seconds):
                return False
            self.advance()
        return super().take(seconds)

    def has_ended(self) -> bool:
        self.advance()
        return not self._is_asking and super().has_ended()

    def cancel(self, seconds: float | None = None) -> bool:
        self._is_asking = False
        return super().cancel(seconds)

    @property
    def missed(self) -> int:
        return self._missed


class Found(Job):
    """A job that finds the places of some rows' values, and the places to copy them to.

    Once it has ended, `source` (n,) are places in the files, `offsets` (n + 1,) are those of the copied
    values, in bytes, and `damaged` is the index of a row whose offsets point out of its file, or -1.
    """

    def __init__(
        self, way: int, rows: SegmentRows, ids: NDArray[np.int64], columns: CopiedColumns, keep: object
    ) -> None:
        self.source, self.offsets = np.empty(len(ids), np.int64), np.zeros(len(ids) + 1, np.int64)
        self.rows, self.ids = rows, ids
        self.places = address_of(self.source), address_of(self.offsets)
        nbytes = self.source.nbytes
        super().__init__(LENGTHS, way, rows, ids, columns, keep, nbytes=nbytes, values=self.places)
        if self._is_late:
            self.take(0)  # so that the values can be begun sooner

    @property
    def damaged(self) -> int:
        return self._job[_DAMAGED] - 1


class PartCopies:
    """Parts of values that an ended `Found` has found, to be copied one behind another.

    Args:
        rows, ids: as of `copy_rows`: the row of each part.
        source: (n,) int64 places in the files, in bytes, within the found values.
        offsets: (n + 1,) int64 places among the copied parts, in bytes: the first is 0.
    """

    def __init__(
        self,
        rows: SegmentRows,
        ids: NDArray[np.int64],
        source: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> None:
        self.rows, self.ids, self.source, self.offsets = rows, ids, source, offsets
        self.places = address_of(source), address_of(offsets)


def copy_now(rows: SegmentRows, ids: NDArray[np.int64], columns: CopiedColumns) -> tuple[int, int] | None:
    """Copy columns of a few rows from memory, here and now; keeps the GIL.

    Args:
        ids: (n,) int64, C-contiguous.
        columns: columns of fixed width.
    Returns: `refused` and `missed` of a `Job`, or None if nothing was done: rows are too many, or some are
        not mapped.
    """
    if len(ids) * columns.row_bytes > Limits.current.inline_bytes:
        return None
    words = FIXED, COPY, rows.address, address_of(ids), len(ids), columns.address, columns.count
    job = array("q", (*words, *_NOTHING, *_BEGUN))
    refused = quick.engine_copy(job.buffer_info()[0])
    return (refused, job[_MISSED]) if refused >= _DONE else None


def copy_rows(
    rows: SegmentRows,
    ids: NDArray[np.int64],
    columns: CopiedColumns | Sequence[CopiedColumn],
    keep: object = None,
) -> Job:
    """Begin to copy columns of some rows from memory; returns at once.

    Rows of segments that are not mapped are read from their files.

    Args:
        ids: (n,) int64 numbers of rows.
        columns: columns of fixed width; `CopiedColumns` cost less.
        keep: owner of their memory and of the mappings; kept until the job has ended.
    """
    ids, columns = np.ascontiguousarray(ids, np.int64), _table(columns)
    return Job(FIXED, COPY, rows, ids, columns, keep, nbytes=len(ids) * columns.row_bytes)


def read_rows(
    rows: SegmentRows,
    ids: NDArray[np.int64],
    columns: CopiedColumns | Sequence[CopiedColumn],
    keep: object = None,
    *,
    drops: bool = False,
) -> Read:
    """Begin to read columns of some rows from their files, side by side; returns at once.

    Args:
        rows, ids, columns, keep: as of `copy_rows`.
        drops: rows that come from the disk leave the page cache again, so that others stay there.
    """
    ids, columns = np.ascontiguousarray(ids, np.int64), _table(columns)
    return Read(FIXED, ASK, rows, ids, columns, keep, pieces=len(ids) * columns.pieces, drops=drops)


def find_values(
    rows: SegmentRows,
    ids: NDArray[np.int64],
    buffer: int,
    element_bytes: int,
    keep: object = None,
    *,
    on_disk: bool = False,
) -> Found:
    """Begin to find the values of a variable-length column of some rows; returns at once.

    Args:
        ids: as of `copy_rows`.
        buffer: index of the segments' buffer of offsets; the next buffer has the values.
        element_bytes: bytes of the unit of the offsets.
        keep: as of `copy_rows`; kept until the values are copied, too.
        on_disk: True if the offsets may be on the disk.
    """
    column = CopiedColumns([(buffer, element_bytes, 0)])
    return Found(READ if on_disk else COPY, rows, np.ascontiguousarray(ids, np.int64), column, keep)


def copy_values(found: Found | PartCopies, out: NDArray[np.uint8], keep: object = None) -> Job:
    """Begin to copy what an ended job found, whose rows are still mapped, from memory; returns at once.

    Args:
        keep: owner of the mappings, where `found` has not.
    """
    kept, column = (found, out, keep), CopiedColumns([(0, 1, address_of(out))])
    return Job(VALUES, COPY, found.rows, found.ids, column, kept, nbytes=out.nbytes, values=found.places)


def read_values(
    found: Found | PartCopies, out: NDArray[np.uint8], keep: object = None, *, drops: bool = False
) -> Read:
    """Begin to read found values from their files; returns at once.

    Args: as of `copy_values` and `read_rows`.
    """
    kept, column = (found, out, keep), CopiedColumns([(0, 1, address_of(out))])
    where = VALUES, ASK, found.rows, found.ids, column, kept
    return Read(*where, values=found.places, pieces=len(found.ids) + out.nbytes // PIECE_BYTES, drops=drops)


def fetch_rows(
    rows: SegmentRows,
    first: int,
    last: int,
    columns: CopiedColumns | Sequence[CopiedColumn],
    keep: object = None,
) -> Job:
    """Ask the disk for rows first..last-1. Returns at once. Rows out of range are left out."""
    return Job(FIXED, FETCH, rows, np.array([first, last], np.int64), _table(columns), keep)


def fetch_values(
    rows: SegmentRows, first: int, last: int, buffer: int, element_bytes: int, keep: object = None
) -> Job:
    """Do as `fetch_rows` for the values of a variable-length column, which is named as in `find_values`."""
    column = CopiedColumns([(buffer, element_bytes, 0)])
    return Job(LENGTHS, FETCH, rows, np.array([first, last], np.int64), column, keep)


def _table(columns: CopiedColumns | Sequence[CopiedColumn]) -> CopiedColumns:
    return columns if isinstance(columns, CopiedColumns) else CopiedColumns(columns)


_pointer, _word = ctypes.c_void_p, ctypes.c_int64
declare("engine_submit", _word, _pointer, _pointer)
declare("engine_copy", _word, _pointer)
declare("engine_take", _word, _pointer, _pointer, _word)
declare("engine_help", _word, _pointer, _pointer, _word)
declare("engine_cancel", _word, _pointer, _pointer, _word)
