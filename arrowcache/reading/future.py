"""Future: the result of another thread's work, for a thread that waits and may be interrupted.

It is like that of concurrent.futures, but Ctrl-C in any line of a wait, a cancel or a set leaves it usable.
There a KeyboardInterrupt within `Condition.__enter__` or `__exit__`, which are Python, leaves the lock taken,
and the thread that sets the future waits for ever. Here no lock is held: a raw lock is released when the
future ends, and each thread that gets it releases it at once.
"""

from __future__ import annotations

import _thread
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class CancelledError(Exception):
    """The future was cancelled before its work began."""


class Future(Generic[T]):
    """Pending, then running or cancelled, then ended with a result or an exception."""

    def __init__(self) -> None:
        self._is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._claim = _thread.allocate_lock()  # taken by the thread that runs it, or cancels it
        self._pending = _thread.allocate_lock()
        self._pending.acquire()

    def begin(self) -> bool:
        """Claim the work. Returns: False: the work was begun or cancelled before."""
        return self._claim.acquire(blocking=False)

    def cancel(self) -> bool:
        """Keep the work from beginning. Returns: False: the work was begun or cancelled before."""
        if not self._claim.acquire(blocking=False):
            return False
        self.set_exception(CancelledError())
        return True

    def set_result(self, result: T) -> None:
        """End the future with a result."""
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """End the future with an error, which `result` raises."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._is_done = True
        with suppress(RuntimeError):  # somebody who waited was faster
            self._pending.release()

    def done(self) -> bool:
        """True if the future has ended. Never blocks."""
        return self._is_done

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most this many seconds. Returns: True if the future has ended."""
        if not self._is_done and self._pending.acquire(timeout=max(0.0, seconds)):
            self._end()  # for others who wait
        return self._is_done

    def result(self, seconds: float = _thread.TIMEOUT_MAX) -> T:
        """The result of the work.

        Blocks: until the future has ended, at most `seconds`.
        Raises: the exception of the work; CancelledError; TimeoutError: the future has not ended.
        """
        if not self.wait(seconds):
            raise TimeoutError(f"it has not ended within {seconds:g} s")
        try:
            if self._error is not None:
                raise self._error
            return self._result  # type: ignore[return-value]  # it has one
        finally:
            del self  # the error's traceback has this frame: a cycle
