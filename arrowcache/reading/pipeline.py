"""Pipeline: batches begun ahead of their consumer, who drives it: nothing here has a thread.

`next` begins jobs until enough batches are under way, and waits for the oldest; native threads, a crew of
Python threads or worker processes make them meanwhile. Guarantees: batches arrive in step order, whoever made
them; no batch is made before its epoch was begun, and none is begun after it was ended; an exception of a job
arrives where its batch would have; every wait has a deadline or an end.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from arrowcache.errors import LoaderTimeoutError
from arrowcache.reading.future import Future

if TYPE_CHECKING:
    from arrowcache.reading.epoch import Epoch

_GRACE_SECONDS = 0.25  # for a job that itself waits so long, and then says better what for
_LOOK_SECONDS = 0.05  # between two looks for the end, and two calls of `while_waiting`


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


class Pending(Protocol):
    """Batches under way. One thread at a time calls its methods."""

    def take(self, seconds: float) -> bool:
        """Wait for its end, at most so long. Returns: True: it has ended."""

    def go_on(self) -> None:
        """Begin its second part, if the first has ended; returns at once."""

    def cancel(self) -> None:
        """Have it touch nothing any more. Idempotent. Blocks: for what was begun, at most some seconds."""

    def abandon(self) -> None:
        """The same for one who cannot wait; nothing is asked of it any more. Blocks: for a moment."""


class Done:
    """Nothing is under way: `finish` makes the batches."""

    def take(self, seconds: float) -> bool:  # noqa: ARG002
        return True

    def go_on(self) -> None:
        pass

    def cancel(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class Elsewhere:
    """Batches that a worker thread or process makes; `keep` is kept until then."""

    def __init__(self, future: Future[Any], keep: object = None) -> None:
        self.future, self._keep = future, keep

    def take(self, seconds: float) -> bool:
        return self.future.wait(seconds)

    def go_on(self) -> None:
        pass

    def result(self) -> Any:
        """The result, once it has ended. Raises: the error of its making."""
        future, self.future = self.future, _NOTHING  # an error's traceback has this frame: a cycle
        try:
            return future.result()
        finally:
            del future

    def cancel(self) -> None:
        self.future.cancel()

    def abandon(self) -> None:
        self.future.cancel()


_NOTHING: Future[Any] = Future()
_NOTHING.set_result(None)


class Job(NamedTuple):
    """Some batches to be made, in step order: `step` is the first of them.

    `begin` returns a `Pending` at once; once that has ended, `finish` gives the batches.
    """

    step: int
    batches: int
    begin: Callable[[], Pending]
    finish: Callable[[Any], Iterator[Made]]


#: No job: the next one is asked for in a later step. Some batch is ready, or under way.
LATER = Job(0, 0, Done, lambda _: iter(()))


@dataclass(slots=True, eq=False)
class Stream:
    """The batches that one iterator consumes: those of an epoch, or of one epoch after another.

    `jobs` is run by its consumer alone. `let_go` is idempotent, and run by the thread that ends the stream.
    """

    jobs: Callable[[], Iterator[Job]]
    let_go: Callable[[], None] = lambda: None
    running: Iterator[Job] | None = None
    begun: deque[tuple[Pending, Job]] = field(default_factory=deque)
    ready: deque[Made] = field(default_factory=deque)
    under_way: int = 0  # batches of the jobs that were begun
    error: BaseException | None = None  # of `jobs`: it comes after the batches before it
    exhausted: bool = False
    ended: bool = False
    has_failed: bool = False  # `error` came, or comes
    was_interrupted: bool = False  # its consumer, who must not wait for the disk now
    consumer: int = 0  # the thread that is in `next`
    is_asked: bool = False  # whether it is ready: `jobs` must not wait for rows


class Pipeline:
    """Consumes streams. Thread-safe: one thread at a time takes batches of a stream, any may end it.

    Args:
        wanted: gives a number; jobs are begun while fewer batches are under way or ready.
        while_waiting: called now and then while the consumer waits for a batch.
    """

    def __init__(self, wanted: Callable[[], int], while_waiting: Callable[[], None] = lambda: None) -> None:
        self._wanted, self._while_waiting = wanted, while_waiting
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a stream anywhere
        self._pid = os.getpid()

    def begin(self, stream: Stream) -> None:
        """Begin the first jobs: the consumer will ask for their batches."""
        if self._enter(stream):
            try:
                self._begin_jobs(stream)
            finally:
                self._leave(stream)

    def next(self, stream: Stream, timeout_seconds: float | None) -> Made | None:
        """The next batch; None at the end.

        Raises: LoaderTimeoutError: none came in time. Whatever a job raised. ValueError: this
            process was forked from the one that makes them.
        """
        if self.is_inherited():
            raise ValueError("this epoch belongs to the process that forked this one: iterate anew here")
        patience = math.inf if timeout_seconds is None else timeout_seconds + _GRACE_SECONDS
        deadline = time.monotonic() + patience
        if not self._enter(stream):
            return None
        stream.was_interrupted = False
        try:
            while not stream.ended:
                self._begin_jobs(stream)
                if stream.ready:
                    return stream.ready.popleft()
                if not stream.begun:
                    break
                if not self._take(stream, min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        raise too_late(timeout_seconds)
                    self._while_waiting()
        except KeyboardInterrupt:
            stream.was_interrupted = True
            raise
        finally:
            self._leave(stream)
        error, stream.error = stream.error, None
        try:
            if error is not None:
                raise error
            return None
        finally:
            del error  # its traceback has this frame

    def is_ready(self, stream: Stream) -> bool:
        """Whether `next` would return at once. Begins jobs; waits for nothing, also not for rows."""
        if self.is_inherited() or not self._enter(stream):
            return True
        try:
            stream.is_asked = True
            self._begin_jobs(stream)
            while not stream.ready and stream.begun and self._take(stream, 0.0):
                pass
            return bool(stream.ready) or stream.ended or (stream.exhausted and not stream.begun)
        except KeyboardInterrupt:
            stream.was_interrupted = True
            raise
        finally:
            stream.is_asked = False
            self._leave(stream)

    def _enter(self, stream: Stream) -> bool:
        """Make this thread the consumer: it ends the jobs if another thread ends the stream. Returns: False:
        the stream has ended."""
        with self._lock:
            if not stream.ended:
                stream.consumer = threading.get_ident()
            return not stream.ended

    def _leave(self, stream: Stream) -> None:
        with self._lock:
            stream.consumer = 0
            is_over = stream.ended
        if is_over:
            _cancel(stream)

    def _begin_jobs(self, stream: Stream) -> None:
        """Begin jobs until enough batches are under way."""
        for pending, _ in list(stream.begun):  # a handler of this thread may end the stream
            pending.go_on()
        while not stream.exhausted and stream.under_way + len(stream.ready) < self._wanted():
            try:
                stream.running = stream.running or stream.jobs()
                job = next(stream.running, None)
                if job is None or stream.ended:
                    stream.exhausted = True
                elif job is LATER:
                    return
                else:
                    stream.begun.append((job.begin(), job))
                    stream.under_way += job.batches
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # it arrives after the jobs before it
                _fail(stream, error)

    def _take(self, stream: Stream, seconds: float) -> bool:
        """Have the batches of the oldest job ready. Returns: False: it has not ended so soon."""
        pending, job = stream.begun[0]
        try:
            if not pending.take(seconds) or stream.ended:
                return False
            stream.begun.popleft()
            stream.under_way -= job.batches
            for made in job.finish(pending):
                stream.ready.append(made)
                del made
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # it arrives after the batches before it
            _cancel_begun(stream)
            _fail(stream, error)
        finally:
            del pending, job
        return True

    def end(self, stream: Stream) -> None:
        """Begin no more jobs of a stream, drop the batches that nobody took, let go of its epochs.

        Idempotent; an interrupted call is finished by the next one.
        """
        if self.is_inherited():
            stream.ended = True
            return
        with self._lock:
            stream.ended, stream.error = True, None
            mine = stream.consumer in (0, threading.get_ident())
        if mine:  # else its consumer does, within _LOOK_SECONDS
            _cancel(stream)
        stream.let_go()
        stream.let_go, stream.jobs = _nothing, _no_jobs  # they know the stream: a cycle

    def unless_ended(self, stream: Stream, action: Callable[[], None]) -> bool:
        """Do something that `stream.let_go` must not miss. Returns: False: the stream has ended."""
        with self._lock:
            if not stream.ended:
                action()
                return True
            return False

    def is_inherited(self) -> bool:
        """True in a forked child of the process that has the threads: locks may be held for ever here."""
        return self._pid != os.getpid()


def too_late(timeout_seconds: float | None) -> LoaderTimeoutError:
    """The error of a step whose batch did not come in time."""
    return LoaderTimeoutError(
        f"no batch came in {timeout_seconds:g} s: a slow transform or disk? "
        "raise timeout, or look at loader.stats().advice"
    )


def _fail(stream: Stream, error: BaseException) -> None:
    stream.exhausted = stream.has_failed = True
    if not stream.ended:  # else nobody asks why
        stream.error = error


def _cancel(stream: Stream) -> None:
    stream.ready.clear()
    _cancel_begun(stream)
    stream.running = stream.error = None


def _cancel_begun(stream: Stream) -> None:
    with suppress(IndexError):  # a handler of this thread ended the stream meanwhile
        while stream.begun:
            pending = stream.begun[0][0]
            pending.abandon() if stream.was_interrupted else pending.cancel()
            stream.begun.popleft()  # now: Ctrl-C loses none
    stream.under_way = 0


def _nothing() -> None:
    pass


def _no_jobs() -> Iterator[Job]:
    return iter(())
