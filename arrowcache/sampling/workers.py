"""Workers: the processes of a pool without a user's executor. Each publishes one task at a time.

`Workers` has a thread for each process of its group: it starts the process, sends it tasks, waits for their
results, and starts another process if one has died. A process whose reads are all begun asks for one task
more, so that it reads on while it waits for them. `main` runs in such a process. Guarantees: a process
that dies fails its own task and no other; all are gone when `shutdown` returns. A process outlives the pool's
by some seconds at most, in which it closes its generator. So does one that gets a SIGTERM or SIGHUP.
"""

from __future__ import annotations

import dataclasses
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Any

from arrowcache import linux
from arrowcache.errors import WorkerError
from arrowcache.lifetimes import at_fork, exit_beside_threads
from arrowcache.os_errors import explained, start
from arrowcache.pickling import pickled, unpickled
from arrowcache.process import Channel, Message, WorkerGroup, WorkerProcess
from arrowcache.sampling.samples import is_closing
from arrowcache.sampling.task import Done, Task, are_reading, close_ahead, failure, run

_CLOSING_SECONDS = 3.0  # for a sampler to give its next sample, and its generator to close
_INTERRUPTED_SECONDS = 1.5  # for one that was interrupted; then its process is killed
_ONE_MORE: Message = {"asks": "one more"}
_ENDING_SECONDS = 5.0  # for both: a process that failed to kill itself by then is killed from here

_TasksAtWork = deque[tuple[Future[Any], Task]]
"""The tasks of a process at work: one that it draws, and perhaps one more, which it asked for."""


class Workers(Executor):
    """Runs tasks in processes of its own, a fixed number at a time. `submit` takes `task.run` and a Task."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._group = WorkerGroup(__name__)
        self._asked: SimpleQueue[tuple[Future[Any], Task] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._busy = 0  # threads that have a task, or will have one of the queue
        self._wishes: dict[WorkerProcess, _TasksAtWork] = {}  # processes that ask for one task more, in order
        self._wish: Future[Any] = Future()

    def idle(self) -> int:
        """Return the number of tasks that may begin now, in free processes and in those that ask for one."""
        with self._lock:
            return self._count - self._busy + len(self._wishes)

    def next_wish(self) -> Future[Any]:
        """Return a future that ends once a process asks for one task more."""
        with self._lock:
            if self._wish.done():
                self._wish = Future()
            return self._wish

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        """Run a task, soon: in a process that has none, or after the one of a process that asks for it.

        Raises: WorkerError: no thread can be started.
        """
        assert function is run
        (task,) = arguments
        future: Future[Any] = Future()
        with self._lock:
            if self._busy >= self._count and self._wishes:
                process = next(iter(self._wishes))
                _send(process, self._wishes.pop(process), future, task)
                return future
        self._group.supervise(self._work, min(self._group.threads + 1, self._count))
        self._queue(future, task)
        return future

    def _queue(self, future: Future[Any], task: Task) -> None:
        with self._lock:
            self._busy += 1
        self._asked.put((future, task))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:  # noqa: ARG002
        """End the processes, and fail all tasks that they do not end, begun or not. Idempotent.

        Blocks: until they have ended, at most about 5 s: see `_end_with_the_pool`.
        """
        for _ in range(self._group.threads):
            self._asked.put(None)
        self._group.close(_ENDING_SECONDS, hears=True)

    def _work(self) -> None:
        process: WorkerProcess | None = None
        while (asked := self._asked.get()) is not None:
            try:
                process = process or self._group.start()
                self._draw(process, *asked)
            except BaseException as error:  # noqa: BLE001  # who waits for the future is told
                if not asked[0].done():  # there is no process
                    _fail(asked[0], error)
                if process is not None:
                    self._group.end(process)
                    process = None
            with self._lock:
                self._busy -= 1
        if process is not None:
            self._group.end(process, _ENDING_SECONDS)

    def _draw(self, process: WorkerProcess, future: Future[Any], task: Task) -> None:
        """Have a process draw a task, and all that it asks for before it has ended.

        Raises: WorkerError: it has died. OSError: the task cannot be sent.
        """
        drawn: _TasksAtWork = deque()
        try:
            _send(process, drawn, future, task)
            while self._goes_on(process, drawn):
                message = process.hear()
                if message is None:  # it may have hung up first, and call its functions of `atexit` now
                    how = self._group.end(process, _ENDING_SECONDS)
                    raise WorkerError(f"process {process.pid}, which drew it, {how}")
                if message == _ONE_MORE:
                    with self._lock:
                        self._wishes[process] = drawn
                        if not self._wish.done():  # several may ask at once
                            self._wish.set_result(None)
                else:
                    drawn.popleft()[0].set_result(Done(**message))
        except BaseException as error:
            self._give_up(process, drawn, error)
            raise

    def _goes_on(self, process: WorkerProcess, drawn: _TasksAtWork) -> bool:
        with self._lock:
            if drawn:
                return True
            self._wishes.pop(process, None)
        return False

    def _give_up(self, process: WorkerProcess, drawn: _TasksAtWork, error: BaseException) -> None:
        """Fail the task that a process drew. Another one draws the one behind it, of which it is no fault."""
        with self._lock:
            self._wishes.pop(process, None)
        if drawn:
            future, _ = drawn.popleft()
            _fail(future, error)
        for future, task in drawn:
            if self._group.is_closed:
                future.set_exception(WorkerError("the pool ended before a process drew it"))
            else:
                self._queue(future, task)


def _send(process: WorkerProcess, drawn: _TasksAtWork, future: Future[Any], task: Task) -> None:
    drawn.append((future, task))
    process.send({}, pickled(task, "the task {!r}"))


def _fail(future: Future[Any], error: BaseException) -> None:
    future.set_exception(explained(error) if isinstance(error, OSError) else error)


class _Tasks:
    """A process' tasks, one after another, until the pool's process hangs up or is gone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ahead: Task | None = None
        self._has_asked = self._is_over = False

    def next(self) -> Task | None:
        """Return the next task, or None after the last one. Blocks: until it comes."""
        ahead, self._ahead, self._has_asked = self._ahead, None, False
        return ahead if ahead is not None or self._is_over else self._received()

    def ask(self) -> Task | None:
        """Return the next task if it is there, and ask for it."""
        if self._ahead is None and not self._is_over:
            if not self._has_asked:
                self._has_asked = True
                self._channel.send(_ONE_MORE)
            if select.select([self._channel], [], [], 0)[0]:
                self._ahead = self._received()
        return self._ahead

    def _received(self) -> Task | None:
        message = self._channel.receive()
        self._is_over = message is None
        task: Task | None = None if message is None else unpickled(message["data"])
        return task


def main(channel: Channel) -> None:
    """Draw one task after another, until the pool's process hangs up or is gone."""
    signal.signal(signal.SIGTERM, _end_now)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _end_now)
    at_fork(in_child=_forget_signals)
    start(threading.Thread(target=_end_with_the_pool, args=[channel], name="arrowcache-end", daemon=True))
    linux.die_after_parent()
    tasks = _Tasks(channel)
    with closing(channel), suppress(BrokenPipeError, ConnectionResetError):
        try:
            while not _ending and (task := tasks.next()) is not None:
                channel.send(dataclasses.asdict(_result_of(task, tasks)))
        finally:
            close_ahead()
    _ending.append(0)  # nothing interrupts the functions of `atexit`
    if are_reading():
        exit_beside_threads()


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


def _result_of(task: Task, tasks: _Tasks) -> Done:
    try:
        return run(task, tasks.ask)
    except BaseException as error:  # a sampler may raise anything
        if _ending:
            raise
        return failure(task, error)
