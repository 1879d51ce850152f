"""Engine: this process' native threads, which bring rows of segments into arrays. The face of engine.h.

A call begins a job and returns. Rows are named by their numbers (`Rows`). Rows that are in memory are copied
from mapped files (`copy_rows`); rows that may be on the disk are asked for, then read (`read_rows`). Columns
of variable width take two jobs: `find_values`, then `copy_values` or `read_values`. `fetch_rows` and
`fetch_values` have the disk begin to read rows that follow one another. The thread that waits for a copy
helps, so a copy ends also where there are no other threads.

Owns: the engine of this process and its threads. They are started by the first job with work for more than
one, end before a fork and at exit, and are started again by the next job.

Guarantees: numbers are checked before a byte is copied. Once a job has ended, in whatever way, nothing
touches what it was given. Ctrl-C ends a wait within milliseconds. A job that the kernel holds for more than
5 s, as on a dead disk, is left behind with all that it touches, and a ResourceWarning; another thread takes
the place of the one that is held. A forked child has an engine of its own; a job that a child inherits raises
there.

Must never: be asked to copy from a segment that is not mapped any more.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import warnings
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.native.library import address_of, declare, library, quick
from arrowcache.native.rows import Rows

PIECE_BYTES = 128 << 10  # ENGINE_PIECE_BYTES of the header
_FIXED, _LENGTHS, _VALUES = range(3)
_COPY, _ASK, _READ, _FETCH = range(4)
_DONE = -1  # no number was out of range
_STOP_NANOSECONDS = 5_000_000_000
_INLINE_BYTES = 64 << 10  # less is not worth waking a thread
_HELD_GIL_CHUNKS = 4  # 1 MiB, copied in 0.1 ms; beside a busy thread the GIL takes 5 ms to come back
_NOTHING = (0,) * 4  # of `engine_job`: there are no values, nothing is read
_BEGUN = (0,) * 9  # of `engine_job`, which the engine fills in
_DAMAGED, _FAILED, _ERROR, _MISSED = range(15, 19)


class Column(NamedTuple):
    """A column of fixed width on its way.

    Args:
        buffer: which of a segment's buffers it is.
        row_bytes: of a row, at least 1.
        out: address of memory for all rows, one after another.
    """

    buffer: int
    row_bytes: int
    out: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that could not be read: its index among the job's, and errno; 0: its file ends before it."""

    index: int
    error: int


class Job:
    """Rows on their way. Its owner calls `take` until that returns True, or `cancel`; one thread at a time.

    It keeps alive all that it touches, until it has ended.

    `refused` is -1, or the index of a row number that is out of range or whose segment is not known; nothing
    was copied then. Valid once the job has ended.
    """

    refused = _DONE
    _is_left_behind = False

    def __init__(
        self,
        kind: int,
        way: int,
        rows: Rows,
        ids: NDArray[np.int64],
        columns: array[int],
        *,
        values: tuple[int, int] = (0, 0),
        got: NDArray[np.uint8] | None = None,
        drops: bool = False,
        nbytes: int = 0,
        keep: object = None,
    ) -> None:
        table, words = columns.buffer_info()
        self._job = array(
            "q",
            (
                *(kind, way, rows.address, address_of(ids), len(ids), table, words // 3, *values),
                *(0 if got is None else address_of(got), drops, *_BEGUN),
            ),
        )
        self._keep, self._address = (rows, ids, columns, got, keep), self._job.buffer_info()[0]
        self._handle = _engine.handle
        self._held_chunks = _HELD_GIL_CHUNKS if way == _COPY else 0
        self._is_late = way == _COPY and nbytes <= _INLINE_BYTES
        self._has_ended = False
        if not self._is_late:
            self._submit()

    def _submit(self) -> None:
        self._is_late = False
        try:
            self.refused = _engine.submit(self._handle, self._address)
        except BaseException:  # Ctrl-C: threads may be at it by now
            self.cancel()
            raise
        self._has_ended = self.refused != _DONE

    def take(self, seconds: float) -> bool:
        """Help with a copy, then wait for the job. Returns: True: it has ended.

        Blocks: at most so long, and the time of one chunk more; Ctrl-C is seen at a chunk's end.
        Raises: RuntimeError: this process was forked from the one that copies.
        """
        if self._has_ended:
            return True
        if _engine.handle != self._handle:
            raise RuntimeError("the process that forked this one copies these rows: ask again")
        if self._is_late:
            refused = quick.engine_copy(self._address)
            if refused >= _DONE:
                self.refused, self._has_ended = refused, True
                return True
            self._submit()  # they are not all mapped
        is_under_way = quick.engine_help(self._handle, self._address, self._held_chunks)
        if is_under_way and seconds > 0:
            is_under_way = library.engine_take(self._handle, self._address, int(seconds * 1e9))
        self._has_ended = not is_under_way
        return self._has_ended

    def go_on(self) -> None:
        """Begin the second part, if there is one and the first has ended: not here."""

    def cancel(self, seconds: float | None = None) -> bool:
        """End it. Returns: False: the kernel holds a thread that copies, and what it touches must stay.

        Args:
            seconds: how long to wait for what was begun; None: 5 s, once, and then it is left behind.
        Idempotent; no Ctrl-C keeps it from its end.
        """
        while not (self._has_ended or _engine is None):  # as it is once the interpreter has ended so far
            try:
                if _engine.handle == self._handle and not self._is_late:
                    most = _STOP_NANOSECONDS if seconds is None else int(seconds * 1e9)
                    most = 0 if self._is_left_behind else most
                    if library.engine_cancel(self._handle, self._address, most):
                        if seconds is None:
                            self._leave_behind()
                        return False
                self._has_ended = True
            except BaseException:  # noqa: BLE001  # whoever comes next may unmap what it touches
                pass
        return self._has_ended

    def _leave_behind(self) -> None:
        """Keep the job and all that it touches until the process ends."""
        if not self._is_left_behind:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            self._is_left_behind = True
            _engine.note_held()
            _warn()

    def has_ended(self) -> bool:
        """True if the job has ended. Does not help, does not wait."""
        if not self._has_ended and not self._is_late:
            self._has_ended = not quick.engine_help(self._handle, self._address, 0)
        return self._has_ended

    @property
    def missed(self) -> int:
        """Pages of a copy, or pieces of a read, that were not in memory. Valid once it has ended."""
        return self._job[_MISSED]

    @property
    def failure(self) -> Failure | None:
        """A row that could not be read; None: all were. Valid once it has ended."""
        index = self._job[_FAILED] - 1
        return None if index < 0 else Failure(index, self._job[_ERROR])

    def __del__(self) -> None:
        if not getattr(self, "_has_ended", True):
            self.cancel()


class Read:
    """Rows that may be on the disk: asked for, then read. It has the methods of a `Job`."""

    _read: Job | None = None
    _is_over = False

    def __init__(self, begin: Callable[[int], Job]) -> None:
        self._begin = begin
        self._ask = begin(_ASK)

    def go_on(self) -> None:
        """Begin to read the rows that were not in memory, if all have been asked for."""
        if self._read is None and not self._is_over and self._ask.has_ended() and self._ask.missed:
            self._read = self._begin(_READ)

    def take(self, seconds: float) -> bool:
        """See `Job`."""
        if self._read is None and not self._is_over:
            if not self._ask.take(seconds):
                return False
            self.go_on()
        return self._read is None or self._read.take(seconds)

    def cancel(self, seconds: float | None = None) -> bool:
        """As of a `Job`."""
        self._is_over = True
        while True:
            try:
                return self._ask.cancel(seconds) & (self._read is None or self._read.cancel(seconds))
            except BaseException:  # noqa: BLE001  # as there
                pass

    @property
    def refused(self) -> int:
        """See `Job`."""
        return self._ask.refused

    @property
    def missed(self) -> int:
        """See `Job`."""
        return self._ask.missed

    @property
    def failure(self) -> Failure | None:
        """See `Job`."""
        return None if self._read is None else self._read.failure


class Found(Job):
    """A job that finds where the values of some rows are, and where they go.

    Once it has ended, `source` (n,) are places in their files, `offsets` (n + 1,) are those of the copied
    values, in bytes, and `damaged` is the index of a row whose offsets point out of its file, or -1.
    """

    def __init__(self, rows: Rows, ids: NDArray[np.int64], table: array[int], way: int, keep: object) -> None:
        self.source, self.offsets = np.empty(len(ids), np.int64), np.zeros(len(ids) + 1, np.int64)
        self.rows, self.ids = rows, ids
        places = address_of(self.source), address_of(self.offsets)
        super().__init__(_LENGTHS, way, rows, ids, table, values=places, nbytes=self.source.nbytes, keep=keep)
        if self._is_late:
            self.take(0)  # the values can be on their way the sooner

    @property
    def damaged(self) -> int:
        return self._job[_DAMAGED] - 1


def copy_now(rows: Rows, ids: NDArray[np.int64], columns: Sequence[Column]) -> tuple[int, int] | None:
    """Copy columns of a few rows from memory, here and now; the GIL is kept.

    Args:
        ids: (n,) int64, C-contiguous.
        columns: of fixed width.
    Returns: as of a `Job`: `refused` and `missed`. None: there are too many rows, or some are not mapped;
        nothing was done.
    """
    table = _table(columns)
    if len(ids) * sum(table[1::3]) > _INLINE_BYTES:
        return None
    words = _FIXED, _COPY, rows.address, address_of(ids), len(ids), table.buffer_info()[0], len(columns)
    job = array("q", (*words, *_NOTHING, *_BEGUN))
    refused = quick.engine_copy(job.buffer_info()[0])
    return (refused, job[_MISSED]) if refused >= _DONE else None


def copy_rows(rows: Rows, ids: NDArray[np.int64], columns: Sequence[Column], keep: object = None) -> Job:
    """Have columns of some rows copied from memory; returns at once.

    Rows of segments that are not mapped are read from their files.

    Args:
        ids: (n,) int64 numbers of rows.
        columns: of fixed width.
        keep: what keeps their memory where it is, and the files mapped; it is kept until the job has ended.
    """
    ids, table = np.ascontiguousarray(ids, np.int64), _table(columns)
    nbytes = len(ids) * sum(table[1::3])
    return Job(_FIXED, _COPY, rows, ids, table, nbytes=nbytes, keep=keep)


def read_rows(
    rows: Rows, ids: NDArray[np.int64], columns: Sequence[Column], keep: object = None, *, drops: bool = False
) -> Read:
    """Have columns of some rows read from their files, side by side; returns at once.

    Args:
        rows, ids, columns, keep: as of `copy_rows`.
        drops: rows that come from the disk leave the page cache again, so that others stay there.
    """
    ids, table = np.ascontiguousarray(ids, np.int64), _table(columns)
    got = np.zeros(len(ids) * sum(-(-width // PIECE_BYTES) for width in table[1::3]), np.uint8)
    return Read(lambda way: Job(_FIXED, way, rows, ids, table, got=got, drops=drops, keep=keep))


def find_values(
    rows: Rows,
    ids: NDArray[np.int64],
    buffer: int,
    element_bytes: int,
    keep: object = None,
    *,
    on_disk: bool = False,
) -> Found:
    """Have the values of a variable-length column of some rows found; returns at once.

    Args:
        ids: as of `copy_rows`.
        buffer: which of a segment's buffers has the offsets; the one after it has the values.
        element_bytes: of what the offsets count.
        keep: as of `copy_rows`; until the values are brought, too.
        on_disk: the offsets may be there.
    """
    ids, table = np.ascontiguousarray(ids, np.int64), _table([Column(buffer, element_bytes)])
    return Found(rows, ids, table, _READ if on_disk else _COPY, keep)


def copy_values(found: Found, out: NDArray[np.uint8]) -> Job:
    """Have the values copied that were found, from memory; returns at once.

    Args:
        found: it has ended; its rows are still mapped.
        out: (found.offsets[-1],) bytes.
    """
    return _begin_values(found, out, _COPY)


def read_values(found: Found, out: NDArray[np.uint8], *, drops: bool = False) -> Read:
    """Have the values read that were found, from their files; returns at once.

    Args: as of `copy_values` and `read_rows`.
    """
    got = np.zeros(len(found.ids) + out.nbytes // PIECE_BYTES, np.uint8)
    return Read(lambda way: _begin_values(found, out, way, got, drops=drops))


def _begin_values(
    found: Found,
    out: NDArray[np.uint8],
    way: int,
    got: NDArray[np.uint8] | None = None,
    *,
    drops: bool = False,
) -> Job:
    table = _table([Column(0, 1, address_of(out))])
    places = address_of(found.source), address_of(found.offsets)
    kept = found, out
    return Job(
        _VALUES,
        way,
        found.rows,
        found.ids,
        table,
        values=places,
        got=got,
        drops=drops,
        nbytes=out.nbytes,
        keep=kept,
    )


def fetch_rows(rows: Rows, first: int, last: int, columns: Sequence[Column], keep: object = None) -> Job:
    """Have the disk begin to read rows first..last-1; returns at once. What is out of range is left out.

    Args:
        columns: of fixed width; `out` is unused.
        keep: as of `copy_rows`.
    """
    return Job(_FIXED, _FETCH, rows, np.array([first, last], np.int64), _table(columns), keep=keep)


def fetch_values(
    rows: Rows, first: int, last: int, buffer: int, element_bytes: int, keep: object = None
) -> Job:
    """As `fetch_rows`, the values of a variable-length column, which is named as in `find_values`."""
    table = _table([Column(buffer, element_bytes)])
    return Job(_LENGTHS, _FETCH, rows, np.array([first, last], np.int64), table, keep=keep)


def _table(columns: Sequence[Column]) -> array[int]:
    return array("q", [word for column in columns for word in column])


def limit_threads(count: int) -> None:
    """Have at most so many threads. For a process that works beside others like it."""
    _engine.most_threads = count


class _Engine:
    """The process' engine and its threads."""

    def __init__(self) -> None:
        self.handle = library.engine_new()
        if not self.handle:
            raise MemoryError("no memory is left for the engine")
        self._lock = threading.RLock()  # a signal handler may copy rows, too
        self._has_threads = self._is_closed = False
        self._held = 0  # of the threads: those that the kernel holds, for which there are others
        self.most_threads = _thread_count()

    def submit(self, handle: int, address: int) -> int:
        """Queue a job. Returns: as `engine_submit`."""
        if not self._has_threads:
            self._start()
        return int(quick.engine_submit(handle, address))

    def _start(self) -> None:
        with self._lock:
            if not self._has_threads and not self._is_closed:
                self._held = library.engine_stop(self.handle, 0)  # none but these run
                library.engine_start(self.handle, self.most_threads + self._held)
                self._has_threads = True

    def note_held(self) -> None:
        """The kernel holds a thread, perhaps for ever: start another one in its place."""
        with self._lock:
            if self._has_threads:
                self._held += 1
                library.engine_start(self.handle, self.most_threads + self._held)

    def stop(self) -> bool:
        """End the threads, until the next call needs them. Returns: whether all have ended."""
        if not self._has_threads:
            return True
        try:
            return not library.engine_stop(self.handle, _STOP_NANOSECONDS)
        finally:
            self._has_threads = False

    def close(self) -> None:
        """End the threads for good."""
        self._is_closed = True
        if not self.stop():
            _warn()

    def after_fork_in_child(self) -> None:
        """Anew: the lock may be another thread's, and the threads are the parent's."""
        self.__init__()  # type: ignore[misc]


def _warn() -> None:
    words = "a thread that reads rows waits for a disk, and is left behind with what it touches"
    warnings.warn(words, ResourceWarning, stacklevel=2)


def _thread_count() -> int:
    """One for two processors, two for eight, four for 64; the machine's ranks share them."""
    ranks = 1
    with suppress(ValueError):
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return (max(1, len(os.sched_getaffinity(0)) // ranks).bit_length() + 1) // 2


_pointer, _word = ctypes.c_void_p, ctypes.c_int64
declare("engine_new", _pointer)
declare("engine_start", _word, _pointer, _word)
declare("engine_stop", _word, _pointer, _word)
declare("engine_submit", _word, _pointer, _pointer)
declare("engine_copy", _word, _pointer)
declare("engine_take", _word, _pointer, _pointer, _word)
declare("engine_help", _word, _pointer, _pointer, _word)
declare("engine_cancel", _word, _pointer, _pointer, _word)
_engine = _Engine()
os.register_at_fork(before=_engine.stop, after_in_child=_engine.after_fork_in_child)
atexit.register(_engine.close)
