"""Engine: jobs that copy rows of segments into arrays. The face of engine.h; threads.py has the threads.

A call begins a job and returns. Rows are given by their numbers (`SegmentRows`). Rows that are in memory are
copied from mapped files (`copy_rows`); rows that may be on the disk are asked for, then read (`read_rows`).
Columns of variable width take two jobs: `find_values`, then `copy_values` or `read_values`. `fetch_rows` and
`fetch_values` have the disk begin to read rows that follow one another. The thread that waits for a copy
helps, so a copy ends also where there are no other threads.

Guarantees: numbers are checked before a byte is copied. An ended job, in whatever way it ended, touches none
of its arguments. Ctrl-C ends a wait within milliseconds. A job that the kernel holds for more than
5 s, as on a dead disk, is left behind with all that it touches, and a ResourceWarning. A job that a forked
child inherits raises there.

Must never: be asked to copy from a segment that is not mapped any more.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.lifetimes import until_exit
from arrowcache.limits import Limits
from arrowcache.native.library import address_of, declare, library, quick
from arrowcache.native.rows import SegmentRows
from arrowcache.native.threads import threads

PIECE_BYTES = 128 << 10  # ENGINE_PIECE_BYTES of the header
FIXED, LENGTHS, VALUES = range(3)
COPY, ASK, READ, FETCH = range(4)
_DONE = -1  # no number was out of range
_NOTHING = (0,) * 4  # of `engine_job`: there are no values, nothing is read
_BEGUN = (0,) * 9  # of `engine_job`, which the engine fills in
_WAY, _DAMAGED, _FAILED, _ERROR, _MISSED = 1, *range(15, 19)


class CopiedColumn(NamedTuple):
    """A column of fixed width to be copied.

    Args:
        buffer: index of its buffer in a segment.
        row_bytes: bytes of a row, at least 1.
        out: address of memory for all rows, one after another.
    """

    buffer: int
    row_bytes: int
    out: int = 0


class CopiedColumns:
    """Columns of fixed width to be copied, as of `CopiedColumn`: a table, made once and moved for each job.

    `row_bytes` are those of a row of all columns.
    """

    __slots__ = ("_table", "address", "count", "row_bytes")

    def __init__(self, columns: Iterable[tuple[int, int, int]]) -> None:
        self._table = array("q", chain.from_iterable(columns))
        self.address, words = self._table.buffer_info()
        self.count, self.row_bytes = words // 3, sum(self._table[1::3])

    def at(self, addresses: Iterable[int]) -> CopiedColumns:
        """Return the same columns with other memory: for each an address, as `CopiedColumn.out`."""
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
        _let_go_of_lost()
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

    def go_on(self) -> None:
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


def _let_go_of_lost() -> None:
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

    def go_on(self) -> None:
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
            self.go_on()
        return super().take(seconds)

    def has_ended(self) -> bool:
        self.go_on()
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


class Parts:
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
    columns: CopiedColumns | Sequence[tuple[int, int, int]],
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
    columns: CopiedColumns | Sequence[tuple[int, int, int]],
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
    column = CopiedColumns([CopiedColumn(buffer, element_bytes)])
    return Found(READ if on_disk else COPY, rows, np.ascontiguousarray(ids, np.int64), column, keep)


def copy_values(found: Found | Parts, out: NDArray[np.uint8], keep: object = None) -> Job:
    """Begin to copy what an ended job found, whose rows are still mapped, from memory; returns at once.

    Args:
        keep: owner of the mappings, where `found` has not.
    """
    kept, column = (found, out, keep), CopiedColumns([CopiedColumn(0, 1, address_of(out))])
    return Job(VALUES, COPY, found.rows, found.ids, column, kept, nbytes=out.nbytes, values=found.places)


def read_values(
    found: Found | Parts, out: NDArray[np.uint8], keep: object = None, *, drops: bool = False
) -> Read:
    """Begin to read found values from their files; returns at once.

    Args: as of `copy_values` and `read_rows`.
    """
    kept, column = (found, out, keep), CopiedColumns([CopiedColumn(0, 1, address_of(out))])
    where = VALUES, ASK, found.rows, found.ids, column, kept
    return Read(*where, values=found.places, pieces=len(found.ids) + out.nbytes // PIECE_BYTES, drops=drops)


def fetch_rows(
    rows: SegmentRows,
    first: int,
    last: int,
    columns: CopiedColumns | Sequence[tuple[int, int, int]],
    keep: object = None,
) -> Job:
    """Ask the disk for rows first..last-1. Returns at once. Rows out of range are left out."""
    return Job(FIXED, FETCH, rows, np.array([first, last], np.int64), _table(columns), keep)


def fetch_values(
    rows: SegmentRows, first: int, last: int, buffer: int, element_bytes: int, keep: object = None
) -> Job:
    """Do as `fetch_rows` for the values of a variable-length column, which is named as in `find_values`."""
    column = CopiedColumns([CopiedColumn(buffer, element_bytes)])
    return Job(LENGTHS, FETCH, rows, np.array([first, last], np.int64), column, keep)


def _table(columns: CopiedColumns | Sequence[tuple[int, int, int]]) -> CopiedColumns:
    return columns if isinstance(columns, CopiedColumns) else CopiedColumns(columns)


_pointer, _word = ctypes.c_void_p, ctypes.c_int64
declare("engine_submit", _word, _pointer, _pointer)
declare("engine_copy", _word, _pointer)
declare("engine_take", _word, _pointer, _pointer, _word)
declare("engine_help", _word, _pointer, _pointer, _word)
declare("engine_cancel", _word, _pointer, _pointer, _word)
