"""Engine: this process' native threads, which copy rows of mapped segments into arrays. The face of engine.h.

Rows of segments are numbered one after another (`native.rows`). A call names rows by their numbers and says
where they go: `copy_rows` for columns of fixed width, `find_values` and then `copy_values` for those of
variable width. The calling thread helps the threads, so it needs none of them.

Owns: the engine of this process and its threads. They are started by the first call with work for more than
one, end before a fork and at exit, and are started again by the next call.

Guarantees: numbers are checked before a byte is copied. Once a call has ended, in whatever way, nothing
touches what it was given. Ctrl-C ends a call within milliseconds, or with the page that comes from a slow
disk. A forked child has an engine of its own; a call that a child inherits in the middle raises there.

Must never: be asked to copy from a segment that is not mapped any more.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import warnings
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from arrowcache.native.rows import Rows

VERSION = 3  # ENGINE_VERSION of the header that this face is for
_FIXED, _LENGTHS, _VALUES = range(3)
_DONE = -1  # no number was out of range
_STEP_SECONDS = 0.05  # between two looks for Ctrl-C, in a long copy
_STOP_NANOSECONDS = 5_000_000_000
_INLINE_BYTES = 64 << 10  # less is not worth waking a thread
_HELD_GIL_CHUNKS = 4  # 1 MiB, copied in 0.1 ms; beside a busy thread the GIL takes 5 ms to come back
_COLUMN_WORDS = 3
_UNUSED = 0, 0
_BEGUN = (0,) * 8  # of `engine_job`, which the engine fills in
_DAMAGED, _FAULTS = 13, 14


class Column(NamedTuple):
    """A column of fixed width on its way.

    Args:
        buffer: which of a segment's buffers it is.
        row_bytes: of a row.
        out: address of memory for all rows, one after another.
    """

    buffer: int
    row_bytes: int
    out: int


def copy_rows(rows: Rows, ids: NDArray[np.int64], columns: Sequence[Column], keep: object = None) -> Copy:
    """Have the threads copy columns of fixed width of some rows; returns at once.

    Args:
        ids: (n,) int64 numbers of rows.
        columns: of a width above 0.
        keep: what keeps their memory where it is.
    """
    ids, table = np.ascontiguousarray(ids, np.int64), _table(columns)
    nbytes = len(ids) * sum(table[1::_COLUMN_WORDS])
    return Copy(_job_of_rows(rows, ids, table), nbytes, (rows, ids, table, keep))


def find_values(rows: Rows, ids: NDArray[np.int64], buffer: int, element_bytes: int) -> Found:
    """Have the values of a variable-length column of some rows found; returns at once.

    Args:
        ids: as of `copy_rows`.
        buffer: which of a segment's buffers has the offsets; the one after it has the values.
        element_bytes: of what the offsets count.
    """
    ids, table = np.ascontiguousarray(ids, np.int64), _table([Column(buffer, element_bytes, 0)])
    return Found(rows, ids, table)


def copy_values(found: Found, out: NDArray[np.uint8]) -> Copy:
    """Have the values copied that were found; returns at once.

    Args:
        found: it has ended; its rows are still mapped.
        out: (found.offsets[-1],) bytes.
    """
    table = _table([Column(0, 0, _address(out))])
    words = _VALUES, 0, 0, len(found.source), table.buffer_info()[0], 1
    job = array("q", (*words, _address(found.source), _address(found.offsets), *_BEGUN))
    return Copy(job, out.nbytes, (found, table, out), is_warm=found.is_warm)


def ask_for_rows(rows: Rows, ids: NDArray[np.int64], columns: Sequence[Column]) -> None:
    """Have the disk begin to read these rows, side by side.

    Args: as of `copy_rows`; a number that is out of range is left out.
    Blocks: while the disk's queue is full.
    """
    ids, table = np.ascontiguousarray(ids, np.int64), _table(columns)
    job = _job_of_rows(rows, ids, table)
    _library.engine_ask(job.buffer_info()[0])


class Copy:
    """Rows on their way. Whoever has it calls `take` until that is True, or `cancel`; one thread at a time.

    `refused`: once it has ended, -1, or the index of a number that is out of range or whose segment is not
    mapped; nothing was copied then. It holds what it touches, and ends before it lets go of that.

    Args:
        job: an `engine_job`.
        nbytes: to be copied, about.
        keep: what it points to.
        is_warm: its pages are in memory, as far as is known; None: the segments tell. What is warm is copied
            by whoever takes it, too, who keeps the GIL; what is small as well, by nobody else.
    """

    refused = _DONE

    def __init__(self, job: array[int], nbytes: int, keep: object, *, is_warm: bool | None = None) -> None:
        self._job, self._keep, self._address = job, keep, job.buffer_info()[0]
        self._handle = _engine.handle
        self.is_warm = bool(_quick.engine_is_warm(self._address)) if is_warm is None else is_warm
        self._is_late = self.is_warm and nbytes <= _INLINE_BYTES
        self._has_ended = False
        if not self._is_late:
            self.refused = _engine.submit(self._handle, self._address)
            self._has_ended = self.refused != _DONE

    def take(self, seconds: float) -> bool:
        """Help, then wait. Returns: whether it has ended.

        Blocks: so long, and as long as one chunk takes; Ctrl-C is seen at its end.
        Raises: RuntimeError: this process was forked from the one that copies.
        """
        if self._has_ended:
            return True
        if _engine.handle != self._handle:
            raise RuntimeError("the process that forked this one copies these rows: ask again")
        if self._is_late:
            self.refused, self._has_ended = _quick.engine_copy(self._address), True
            return True
        is_under_way = _quick.engine_help(self._handle, self._address, self.is_warm and _HELD_GIL_CHUNKS)
        if is_under_way and seconds > 0:
            is_under_way = _library.engine_take(self._handle, self._address, int(seconds * 1e9))
        self._has_ended = not is_under_way
        return self._has_ended

    def wait(self) -> Copy:
        """Wait for its end. Returns: itself. Blocks, raises: as `take`; Ctrl-C ends it."""
        try:
            while not self.take(_STEP_SECONDS):
                pass
        finally:
            self.cancel()
        return self

    def cancel(self) -> None:
        """End it. Blocks: for what was begun. Idempotent; no Ctrl-C keeps it from its end."""
        while not self._has_ended:
            try:
                if _engine.handle == self._handle and not self._is_late:
                    _library.engine_cancel(self._handle, self._address)
                self._has_ended = True
            except BaseException:  # noqa: BLE001  # whoever comes next may unmap what it touches
                pass

    def has_ended(self) -> bool:
        """Whether it has, by now and by others."""
        if not self._has_ended and not self._is_late:
            self._has_ended = not _quick.engine_help(self._handle, self._address, 0)
        return self._has_ended

    @property
    def was_on_disk(self) -> bool:
        """Once it has ended: whether a thread had to wait for the disk."""
        return self._job[_FAULTS] > 0

    def __del__(self) -> None:
        if not getattr(self, "_has_ended", True):
            self.cancel()


class Found(Copy):
    """Where the values of some rows are, and where they go; once it has ended.

    `source` (n,) are addresses; `offsets` (n + 1,) count bytes. `damaged` is the index of a row whose offsets
    point out of its file, or -1.
    """

    def __init__(self, rows: Rows, ids: NDArray[np.int64], table: array[int]) -> None:
        self.source, self.offsets = np.empty(len(ids), np.int64), np.zeros(len(ids) + 1, np.int64)
        places = _address(self.source), _address(self.offsets)
        job = _job_of_rows(rows, ids, table, _LENGTHS, places)
        super().__init__(job, self.source.nbytes, (rows, ids, table))
        if self._is_late:
            self.take(0)  # the values can be on their way the sooner

    @property
    def damaged(self) -> int:
        return self._job[_DAMAGED] - 1


def _table(columns: Sequence[Column]) -> array[int]:
    return array("q", [word for column in columns for word in column])


def _job_of_rows(
    rows: Rows,
    ids: NDArray[np.int64],
    table: array[int],
    kind: int = _FIXED,
    places: tuple[int, int] = _UNUSED,
) -> array[int]:
    """An `engine_job`; what it points to is the caller's to keep."""
    columns = table.buffer_info()[0], len(table) // _COLUMN_WORDS
    return array("q", (kind, rows.address, _address(ids), len(ids), *columns, *places, *_BEGUN))


def limit_threads(count: int) -> None:
    """Have no more threads than this: for a process that works beside others like it."""
    _engine.most_threads = count


class _Engine:
    """The process' engine and its threads."""

    def __init__(self) -> None:
        self.handle = _library.engine_new()
        if not self.handle:
            raise MemoryError("no memory is left for the engine")
        self._lock = threading.RLock()  # a signal handler may copy rows, too
        self._has_threads = self._is_closed = False
        self.most_threads = _thread_count()

    def submit(self, handle: int, address: int) -> int:
        """Queue a job. Returns: as `engine_submit`."""
        if not self._has_threads:
            self._start()
        return int(_library.engine_submit(handle, address))

    def _start(self) -> None:
        with self._lock:
            if not self._has_threads and not self._is_closed:
                _library.engine_start(self.handle, self.most_threads)
                self._has_threads = True

    def stop(self) -> bool:
        """End the threads, until the next call needs them. Returns: whether all have ended."""
        if not self._has_threads:
            return True
        try:
            return not _library.engine_stop(self.handle, _STOP_NANOSECONDS)
        finally:
            self._has_threads = False

    def close(self) -> None:
        """End the threads for good."""
        self._is_closed = True
        if not self.stop():
            words = "a thread that copies rows waits for a disk, and is left behind"
            warnings.warn(words, ResourceWarning, stacklevel=1)

    def after_fork_in_child(self) -> None:
        """Anew: the lock may be another thread's, and the threads are the parent's."""
        self.__init__()  # type: ignore[misc]


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _thread_count() -> int:
    """One for two processors, two for eight, four for 64; the machine's ranks share them."""
    ranks = 1
    with suppress(ValueError):
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return (max(1, len(os.sched_getaffinity(0)) // ranks).bit_length() + 1) // 2


def _load(path: Path, kind: type[ctypes.CDLL]) -> Any:
    try:
        library = kind(os.fspath(path))
    except OSError as error:
        raise ImportError(
            f"arrowcache's engine cannot be loaded ({error}): install arrowcache with pip, which compiles it"
        ) from None
    for name in ("version", "new", "start", "stop", "submit", "copy", "take", "help", "is_warm", "segments"):
        function = getattr(library, f"engine_{name}")
        function.restype = ctypes.c_void_p if name == "new" else ctypes.c_int64
    words = ctypes.c_void_p, ctypes.c_int64
    library.engine_start.argtypes = library.engine_stop.argtypes = words
    library.engine_submit.argtypes = library.engine_cancel.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.engine_copy.argtypes = library.engine_is_warm.argtypes = (ctypes.c_void_p,)
    library.engine_ask.argtypes = (ctypes.c_void_p,)
    library.engine_take.argtypes = library.engine_help.argtypes = (ctypes.c_void_p, *words)
    library.engine_segments.argtypes = (ctypes.c_void_p, *words, ctypes.c_void_p)
    library.engine_cancel.restype = library.engine_ask.restype = None
    if library.engine_version() != VERSION:
        raise ImportError(
            f"arrowcache's engine is of version {library.engine_version()}, and {VERSION} is needed: install "
            "arrowcache again, which compiles it"
        )
    return library


LIBRARY = Path(__file__).with_name("libengine.so")
_library = _load(LIBRARY, ctypes.CDLL)
_quick = _load(LIBRARY, ctypes.PyDLL)  # keeps the GIL
_engine = _Engine()
os.register_at_fork(before=_engine.stop, after_in_child=_engine.after_fork_in_child)
atexit.register(_engine.close)
