"""Threads: this process' native threads, which run the jobs of engine.py.

Owns: the engine of this process and its threads. The first job with work for more than one thread starts
them. They end before a fork and at exit, and the next job starts them again.

Guarantees: a thread that the kernel holds for more than 5 s, as on a dead disk, is left behind, with a
ResourceWarning, and another one takes its place. A forked child has an engine of its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from contextlib import suppress

from arrowcache.lifetimes import at_exit, at_fork
from arrowcache.limits import Limits
from arrowcache.native.library import declare, library


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
