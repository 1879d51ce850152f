"""Worker threads: run functions side by side, in the order in which they were given.

The consumer gets a `Future` for each; workers/pool.py has futures of worker processes. Guarantees: a result
or an error arrives once; Ctrl-C in a wait loses nothing; an idle thread keeps no batch.
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from arrowcache.limits import Limits
from arrowcache.os_errors import start

T = TypeVar("T")


class CancelledError(Exception):
    """The future was cancelled before its work began."""


class Future(Generic[T]):
    """The result of another thread's work, for a thread that waits and may be interrupted.

    It is pending, then running or cancelled, then ended with a result or an exception. It is like that of
    concurrent.futures, but Ctrl-C in any line of a wait, a cancel or a set leaves it usable. There a
    KeyboardInterrupt within `Condition.__enter__` or `__exit__`, which are Python, leaves the lock taken, and
    the thread that sets the future waits for ever. Here no lock is held: a raw lock is released when the
    future ends, and each thread that gets it releases it at once.
    """

    def __init__(self) -> None:
        self._is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._start = _thread.allocate_lock()  # taken by the thread that runs it, or cancels it
        self._pending = _thread.allocate_lock()
        self._pending.acquire()

    def begin(self) -> bool:
        """Begin the work. Returns: False: the work was begun or cancelled before."""
        return self._start.acquire(blocking=False)

    def cancel(self) -> bool:
        """Keep the work from beginning. Returns: False: the work was begun or cancelled before."""
        if not self._start.acquire(blocking=False):
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


class WorkerThreads:
    """A fixed number of threads, started by the first function."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._todo: queue.SimpleQueue[tuple[Future[Any], Callable[[], object]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[[], object]) -> Future[Any]:
        """Queue a function. Raises: WorkerError: a thread cannot be started."""
        for number in range(self._size):
            if number == len(self._threads):
                self._threads.append(self._new_thread(number))
            elif self._threads[number].ident is None:  # refused, or cut short by Ctrl-C, and begins yet
                self._threads[number] = self._new_thread(number)
            if self._threads[number].ident is None:
                start(self._threads[number])
        future: Future[Any] = Future()
        self._todo.put((future, function))
        return future

    def close(self) -> None:
        """End each thread after its current function; cancel the others. Blocks: at most 5 s. Idempotent."""
        with suppress(queue.Empty):
            while (todo := self._todo.get_nowait()) is not None:
                todo[0].cancel()
        self._todo.put(None)  # each thread hands it on to the next
        deadline = time.monotonic() + Limits.current.join_seconds
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _new_thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._run, name=f"arrowcache-worker-{number}", daemon=True)

    def _run(self) -> None:
        _wait_for_a_processor()
        while (todo := self._todo.get()) is not None:
            future, function = todo
            if future.begin():
                try:
                    result = function()
                except BaseException as error:  # noqa: BLE001  # whoever waits for it gets it
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del todo, future, function  # or an idle thread would keep a batch's memory
        self._todo.put(None)


def _wait_for_a_processor() -> None:
    """Make this thread wait for a free processor when it is woken.

    The consumer wakes it with each batch that it takes. Where samplers keep all processors busy, the kernel
    would often give this thread the consumer's own processor.
    """
    with suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
