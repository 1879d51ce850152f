"""Worker threads: daemon threads that run functions, in the order in which they are given: transforms.

Not a ThreadPoolExecutor: at exit the interpreter waits for the functions of its threads.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from arrowcache.limits import Limits
from arrowcache.os_errors import start
from arrowcache.reading.future import Future


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
