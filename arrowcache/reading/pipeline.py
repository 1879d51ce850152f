"""Pipeline: background threads that make batches ahead of their consumer.

It owns one thread that runs an epoch's jobs, or (with workers) has them run by a crew of threads,
and the queue between those and the consumer. The threads live as long as the loader, over all
epochs. Guarantees: batches arrive in step order, whichever thread made them; no batch is made
before its epoch was begun, and none is begun after it was ended; an exception of a job arrives
where its batch would have; every wait has a deadline or an end; at interpreter exit nobody waits
for a job that does not end.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from arrowcache.errors import LoaderTimeoutError
from arrowcache.shortage import start

if TYPE_CHECKING:
    from arrowcache.reading.epoch import Epoch

_JOIN_SECONDS = 5.0
_GRACE_SECONDS = 0.25  # for a job that itself waits so long, and then says better what for
_LOOK_SECONDS = 0.25  # between two calls of `while_waiting`
_STOP = object()


class Made(NamedTuple):
    """A batch ready for delivery, and what is counted then.

    `published` is the mean of its rows, in seconds since 1970; `epoch` the one it belongs to.
    """

    batch: dict[str, Any]
    rows: int
    nbytes: int
    copied: int
    published: float
    epoch: Epoch


class Job(NamedTuple):
    """Some batches to be made: `parts` may run side by side, then `finish` gives the batches.

    A part that others do in the background returns its future.

    `finish` yields lists, each delivered at once. Jobs are begun in step order; `step` is the first
    that a job makes.
    """

    step: int
    parts: Sequence[Callable[[], Future[Any] | None]]
    finish: Callable[[], Iterator[list[Made]]]


#: Has every job before it finished before the stream asks for another.
BARRIER = Job(0, [], lambda: iter(()))


@dataclass(slots=True, eq=False)
class Stream:
    """What one iterator consumes: the batches of an epoch, or of one epoch after another.

    `jobs` is run by the pipeline's thread alone; `let_go`, which is idempotent, by whoever ends the
    stream.
    """

    jobs: Callable[[], Iterator[Job]]
    let_go: Callable[[], None] = lambda: None
    ready: deque[Made] = field(default_factory=deque)
    wanted: int = 1  # jobs are begun while fewer batches are ready
    last: int = 0  # batches delivered at once; the rest of an epoch may be few, and the next ones many
    error: BaseException | None = None
    exhausted: bool = False
    ended: bool = False


class Pipeline:
    """The threads and their queue.

    Args:
        prefetch: jobs are begun while fewer than so many batches are ready, not counting what is made
            at once: a large group takes longer.
        workers: threads that run jobs; 0: the one that begins them does.
        in_flight: jobs that may be begun before the first of them is finished, if no thread here runs them.
        while_waiting: called now and then by who waits for a batch.
    """

    def __init__(
        self,
        prefetch: int,
        workers: int = 0,
        in_flight: int = 0,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._prefetch, self._in_flight = prefetch, workers or in_flight
        self._while_waiting = while_waiting
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a stream anywhere;
        # taken by `with` itself: Ctrl-C can leave a condition's own locked
        self._changed = threading.Condition(self._lock)
        self._streams: queue.SimpleQueue[Stream | object] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._closed = False
        self._crew = _Crew(workers) if workers else None
        self._thread = threading.Thread(target=self._run, name="arrowcache-loader", daemon=True)

    def start(self) -> None:
        """Start the threads; who does has this object at hand already, to close it. Idempotent."""
        threads = [self._thread] if self._crew is None else [self._thread, *self._crew.threads]
        for thread in threads:
            if thread.ident is None:
                start(thread)

    def begin(self, stream: Stream) -> None:
        """Start making a stream's batches."""
        self._streams.put(stream)

    def next(self, stream: Stream, timeout_seconds: float | None) -> Made | None:
        """The next batch; None at the end.

        Raises: LoaderTimeoutError: none came in time. Whatever a job raised. ValueError: this
            process was forked from the one that makes them.
        """
        if self.is_inherited():
            raise ValueError("this epoch belongs to the process that forked this one: iterate anew here")
        patience = math.inf if timeout_seconds is None else timeout_seconds + _GRACE_SECONDS
        deadline = time.monotonic() + patience
        while True:
            with self._lock:
                if self._changed.wait_for(
                    lambda: bool(stream.ready) or stream.exhausted or stream.ended,
                    min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())),
                ):
                    if stream.ready:
                        made = stream.ready.popleft()
                        if len(stream.ready) == stream.wanted - 1:
                            self._changed.notify_all()
                        return made
                    error, stream.error = stream.error, None
                    break
            if time.monotonic() >= deadline:
                raise too_late(timeout_seconds)
            self._while_waiting()  # without the lock: whoever waits for it may hold what this needs
        try:
            if error is not None:
                raise error
            return None
        finally:
            del error  # its traceback has this frame

    def end(self, stream: Stream) -> None:
        """Begin no more jobs of a stream, drop the batches that nobody took, let go of what it reads.

        Idempotent; an interrupted call is finished by the next one.
        """
        if self.is_inherited():
            stream.ended = True
            return
        with self._lock:
            stream.ended, stream.error = True, None
            stream.ready.clear()
            self._changed.notify_all()
        stream.let_go()
        stream.let_go, stream.jobs = _nothing, _no_jobs  # they know the stream: a cycle

    def unless_ended(self, stream: Stream, action: Callable[[], None]) -> bool:
        """Do something that `stream.let_go` must not miss; False if the stream has ended."""
        with self._lock:
            if not self._is_over(stream):
                action()
                return True
            return False

    def close(self) -> None:
        """End the threads, waiting for their current calls at most 5 s. Idempotent."""
        if self.is_inherited():
            return
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._streams.put(_STOP)
        if self._crew is not None:
            self._crew.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)  # unless it drops the last reference itself

    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has the threads; locks may be held for ever."""
        return self._pid != os.getpid()

    def _run(self) -> None:
        _wait_for_a_processor()
        while True:
            stream = self._streams.get()
            if not isinstance(stream, Stream):
                return
            failure: BaseException | None = None
            try:
                self._produce(stream)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the consumer gets it
                failure = error
            with self._lock:
                stream.exhausted = True
                if not stream.ended:  # else its traceback would keep what was being made, views perhaps
                    stream.error = failure
                self._changed.notify_all()
            del stream, failure

    def _is_over(self, stream: Stream) -> bool:
        return stream.ended or self._closed

    def _produce(self, stream: Stream) -> None:
        begun: deque[tuple[list[Future[Any]], Job]] = deque()
        most = self._in_flight
        jobs, failure = stream.jobs(), None
        try:
            while True:
                try:
                    job = next(jobs, None)
                except BaseException as error:  # noqa: BLE001  # it arrives after the jobs before it
                    failure = error
                    break
                if job is None or self._is_over(stream):
                    break
                begun.append(([self._start(part) for part in job.parts], job))
                kept = 0 if job is BARRIER else most
                del job
                while len(begun) > kept:
                    if not self._finish(stream, *begun.popleft()):
                        return
            while begun:
                if not self._finish(stream, *begun.popleft()):
                    return
            if failure is not None:
                raise failure
        finally:
            _cancel(begun)
            del failure, jobs  # a traceback has this frame, and each job may have the error

    def _start(self, part: Callable[[], Future[Any] | None]) -> Future[Any]:
        if self._crew is not None:
            return self._crew.submit(part)
        elsewhere = part()
        if isinstance(elsewhere, Future):
            return elsewhere
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _finish(self, stream: Stream, futures: list[Future[Any]], job: Job) -> bool:
        """Deliver a job's batches, as there is room; whether to go on."""
        for future in futures:
            if not future.done():
                future.add_done_callback(self._notify)
        with self._lock:
            self._changed.wait_for(lambda: self._is_over(stream) or all(f.done() for f in futures))
            if self._is_over(stream):
                return False
        try:
            for future in futures:
                future.result()
        except BaseException:
            del future, futures, job  # they have the error, whose traceback has this frame
            raise
        for batches in job.finish():
            with self._lock:
                if self._is_over(stream):
                    return False
                stream.ready.extend(batches)
                stream.wanted = max(1, self._prefetch + max(len(batches), stream.last) - 1)
                stream.last = len(batches)
                self._changed.notify_all()
                del batches
                self._changed.wait_for(lambda: self._is_over(stream) or len(stream.ready) < stream.wanted)
                if self._is_over(stream):
                    return False
        return True

    def _notify(self, _: Future[Any]) -> None:
        with self._lock:
            self._changed.notify_all()


def too_late(timeout_seconds: float | None) -> LoaderTimeoutError:
    """The error of a step whose batch did not come in time."""
    return LoaderTimeoutError(
        f"no batch came in {timeout_seconds:g} s: a slow transform or disk? "
        "raise timeout, or look at loader.stats().advice"
    )


def _wait_for_a_processor() -> None:
    """Have this thread, when it is woken, wait until a processor is free.

    The consumer wakes it with each batch that it takes, and where samplers keep all processors busy the
    kernel would often let it have the consumer's own, for a whole gather. What it starts, such as worker
    processes or a transform's threads, does the same.
    """
    with suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _cancel(begun: deque[tuple[list[Future[Any]], Job]]) -> None:
    while begun:
        for future in begun.popleft()[0]:
            future.cancel()


def _nothing() -> None:
    pass


def _no_jobs() -> Iterator[Job]:
    return iter(())


class _Crew:
    """Daemon threads that run functions in the order they are given.

    Not a ThreadPoolExecutor: the interpreter waits at its exit for what those run.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._todo: queue.SimpleQueue[tuple[Future[None], Callable[[], object]] | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._run, name=f"arrowcache-worker-{number}", daemon=True)
            for number in range(size)
        ]

    def submit(self, function: Callable[[], object]) -> Future[None]:
        future: Future[None] = Future()
        self._todo.put((future, function))
        return future

    def stop(self) -> None:
        """Have each thread end after its current function."""
        for _ in range(self.size):
            self._todo.put(None)

    def _run(self) -> None:
        _wait_for_a_processor()
        while (todo := self._todo.get()) is not None:
            future, function = todo
            if future.set_running_or_notify_cancel():
                try:
                    function()
                except BaseException as error:  # noqa: BLE001  # whoever waits for it gets it
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del todo, future, function  # or an idle thread would keep a batch's memory
