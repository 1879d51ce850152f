"""Workers: the processes of a pool without a user's executor. Each draws one task at a time.

`Workers` owns the processes, and a thread for each: it starts the process, sends it tasks, waits for their
results, and starts another process if one has died. `main` runs in such a process. Guarantees: a process
that dies fails its own task and no other; all are gone when `shutdown` returns.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any

from arrowcache.errors import WorkerError
from arrowcache.os_errors import explained, start
from arrowcache.pickling import pickled, unpickled
from arrowcache.process import Channel, WorkerProcess
from arrowcache.sampling.task import Done, Task, failure, run

_GRACE_SECONDS = 1.0  # for a process that ends by itself to be seen to
_JOIN_SECONDS = 5.0


class Workers(Executor):
    """Runs tasks in processes of its own, a fixed number at a time. `submit` takes `task.run` and a Task."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked: SimpleQueue[tuple[Future[Any], Task] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._processes: set[WorkerProcess] = set()  # those that may be alive
        self._is_over = False

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        """Run a task, soon.

        Raises: WorkerError: no thread can be started.
        """
        assert function is run
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name="arrowcache-sampler", daemon=True)
            start(thread)
            self._threads.append(thread)
        future: Future[Any] = Future()
        self._asked.put((future, arguments[0]))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:  # noqa: ARG002
        """End the processes, and fail all tasks, begun or not. Idempotent. Blocks: at most some seconds."""
        self._is_over = True
        for process in self._processes.copy():
            process.kill()
        deadline = time.monotonic() + _JOIN_SECONDS
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        process: WorkerProcess | None = None
        try:
            while (asked := self._asked.get()) is not None:
                future, task = asked
                try:
                    if process is None:
                        process = self._begun()
                    future.set_result(_drawn(process, task))
                except BaseException as error:  # noqa: BLE001  # who waits for the future is told
                    future.set_exception(explained(error) if isinstance(error, OSError) else error)
                    self._end(process)
                    process = None
        finally:
            self._end(process)

    def _begun(self) -> WorkerProcess:
        if self._is_over:
            raise WorkerError("the pool ended before a process drew it")
        process = WorkerProcess(__name__)
        self._processes.add(process)
        if self._is_over:  # shut down meanwhile
            process.kill()
        return process

    def _end(self, process: WorkerProcess | None) -> None:
        if process is not None:
            process.end()
            process.close()
            self._processes.discard(process)


def _drawn(process: WorkerProcess, task: Task) -> Done:
    """Send a task to a process. Raises: WorkerError: it has died. OSError: the task cannot be sent."""
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died: `hear` says so
        process.channel.send({}, pickled(task, "the task {!r}"))
    said = process.hear()
    if said is None:
        process.wait(_GRACE_SECONDS)
        process.end()
        raise WorkerError(f"process {process.pid}, which drew it, {process.how_it_ended()}")
    return Done(**said)


def main(channel: Channel) -> None:
    """Draw one task after another, until the pool's process hangs up."""
    with closing(channel), suppress(BrokenPipeError, ConnectionResetError):
        while (asked := channel.receive()) is not None:
            channel.send(dataclasses.asdict(_told(unpickled(asked["data"]))))


def _told(task: Task) -> Done:
    try:
        return run(task)
    except BaseException as error:  # noqa: BLE001  # a sampler may raise anything
        return failure(task, error)
