"""Workers: the processes of a pool without a user's executor. Each draws one task at a time.

`Workers` owns the processes, and a thread for each: it starts the process, sends it tasks, waits for their
results, and starts another process if one has died. `main` runs in such a process. Guarantees: a process
that dies fails its own task and no other; all are gone when `shutdown` returns. A process outlives the pool's
by some seconds at most, in which it closes its generator. So does one that gets a SIGTERM or SIGHUP.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any

from arrowcache import linux
from arrowcache.errors import WorkerError
from arrowcache.lifetimes import at_fork
from arrowcache.limits import Limits
from arrowcache.os_errors import explained, start
from arrowcache.pickling import pickled, unpickled
from arrowcache.process import Channel, WorkerProcess
from arrowcache.sampling.task import Done, Task, failure, is_closing, run

_CLOSING_SECONDS = 3.0  # for a sampler to give its next sample, and its generator to close
_INTERRUPTED_SECONDS = 1.5  # for one that was interrupted; then its process is killed
_ENDING_SECONDS = 5.0  # for both: a process that failed to kill itself by then is killed from here


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
        """End the processes, and fail all tasks that they do not end, begun or not. Idempotent.

        Blocks: until they have ended, at most about 5 s: see `_end_with_the_pool`.
        """
        self._is_over = True
        for process in self._processes.copy():
            process.channel.say_no_more()
        for _ in self._threads:
            self._asked.put(None)
        self._join(_ENDING_SECONDS)
        for process in self._processes.copy():
            process.kill()
        self._join(Limits.current.join_seconds)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
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
                    if process is not None:
                        process.kill()
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
            process.channel.say_no_more()
        return process

    def _end(self, process: WorkerProcess | None) -> None:
        """See a process to its end. Blocks: some seconds, if it was told to end or killed."""
        if process is not None:
            process.wait(_ENDING_SECONDS)
            process.end()
            process.close()
            self._processes.discard(process)


def _drawn(process: WorkerProcess, task: Task) -> Done:
    """Send a task to a process. Raises: WorkerError: it has died. OSError: the task cannot be sent."""
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died: `hear` says so
        process.channel.send({}, pickled(task, "the task {!r}"))
    said = process.hear()
    if said is None:
        process.wait(_ENDING_SECONDS)  # it may have hung up first, and call its functions of `atexit` now
        process.end()
        raise WorkerError(f"process {process.pid}, which drew it, {process.how_it_ended()}")
    return Done(**said)


def main(channel: Channel) -> None:
    """Draw one task after another, until the pool's process hangs up or is gone."""
    signal.signal(signal.SIGTERM, _end_now)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _end_now)
    at_fork(in_child=_forget_signals)
    start(threading.Thread(target=_end_with_the_pool, args=[channel], name="arrowcache-end", daemon=True))
    linux.die_after_parent()
    with closing(channel), suppress(BrokenPipeError, ConnectionResetError):
        while not _ending and (asked := channel.receive()) is not None:
            channel.send(dataclasses.asdict(_told(unpickled(asked["data"]))))
    _ending.append(0)  # nothing interrupts the functions of `atexit`


def _end_with_the_pool(channel: Channel) -> None:
    """End this process some seconds after its pool, whatever its sampler does.

    A task sees the end of its pool between two samples, and closes its generator; then `main` returns, and
    the functions of `atexit` are called. A sampler that keeps its task waiting is interrupted, then killed.
    """
    channel.await_end()
    time.sleep(_CLOSING_SECONDS)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(_INTERRUPTED_SECONDS)
    signal.raise_signal(signal.SIGKILL)


_ending: list[int] = []  # not empty once this process ends


def _end_now(number: int, _: object) -> None:
    """Raise SystemExit in the sampler, once, unless its generator is being closed already."""
    if not _ending:
        _ending.append(number)
        if not is_closing():
            sys.exit(128 + number)


def _forget_signals() -> None:
    """Let the processes that a sampler forks die from these signals, as usual."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _end_now:
            signal.signal(number, signal.SIG_DFL)


def _told(task: Task) -> Done:
    try:
        return run(task)
    except BaseException as error:  # a sampler may raise anything
        if _ending:
            raise
        return failure(task, error)
