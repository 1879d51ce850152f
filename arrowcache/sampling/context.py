"""Context: how the pool's own processes are started, and what they count and exclude each other with.

loky's semaphores are named files in /dev/shm, which stay there when a whole job is killed at once, and
cannot be made where /dev/shm is full. An eventfd is a kernel object that goes with the last process that
has it. And Ctrl-C, which a terminal sends to all processes, would end a worker that is just starting,
before it can say that it does not care: so it starts with that signal blocked.
"""

from __future__ import annotations

import os
import select
import signal
import time
from multiprocessing import resource_tracker
from multiprocessing.reduction import DupFd
from typing import Any

from loky.backend import resource_tracker as loky_tracker
from loky.backend.context import LokyContext
from loky.backend.process import LokyProcess

from arrowcache import linux


class NamelessSemaphore:
    """As `multiprocessing.Semaphore`; it travels to a process that is being started, as all of those do."""

    _fd = -1  # none could be had

    def __init__(self, value: int = 1) -> None:
        self._fd = linux.event(value, semaphore=True)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Count down by one, waiting while it is zero; whether it was done in time."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                linux.take_event(self._fd)
                return True
            except BlockingIOError:  # it is zero
                left = None if deadline is None else deadline - time.monotonic()
                if not block or (left is not None and left <= 0):
                    return False
                self._poll(left)

    def release(self) -> None:
        """Count up by one."""
        linux.add_event(self._fd)

    @property
    def _semlock(self) -> NamelessSemaphore:
        return self  # where multiprocessing's queues ask whether they are full

    def _is_zero(self) -> bool:
        return not self._poll(0)

    def _poll(self, seconds: float | None) -> bool:
        """Wait until it may be above zero; whether it was."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getstate__(self) -> Any:
        return DupFd(self._fd)

    def __setstate__(self, descriptor: Any) -> None:
        self._fd = descriptor.detach()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class DeafProcess(LokyProcess):  # type: ignore[misc]  # it has no types
    """A process to which SIGINT never comes."""

    def start(self) -> None:
        """Start it; its mask of signals is that of the calling thread."""
        loky_tracker.ensure_running()  # both unblock SIGINT when they start theirs
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class NamelessContext(LokyContext):  # type: ignore[misc]  # it has no types
    """loky's way to start processes, with what is above."""

    Process = DeafProcess

    def Semaphore(self, value: int = 1) -> NamelessSemaphore:  # noqa: N802  # as multiprocessing calls it
        return NamelessSemaphore(value)

    def BoundedSemaphore(self, value: int = 1) -> NamelessSemaphore:  # noqa: N802  # likewise; nobody exceeds it
        return NamelessSemaphore(value)

    def Lock(self) -> NamelessSemaphore:  # noqa: N802  # likewise
        return NamelessSemaphore(1)
