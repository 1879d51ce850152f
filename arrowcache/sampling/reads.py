"""Reads: samples that are read many at a time, in threads, and come in the order in which they were yielded.

    def sample(rng):
        for key in rng.permutation(keys):
            yield partial(read, key)  # read(key) runs in one of `reads` threads

`Samples` gives the samples of one task, from a `Stream` of its sampler's, or from several: see mixture.py.
`Threads` runs the reads of one worker's tasks, or whatever calls somebody has to make many of.
Guarantees: the sampler alone draws from `rng`, in the task's thread, in which it is closed, too. Samples
come in the order of yielding: a task has the same rows whatever `reads` is, and whichever read is slow, fails
or is tried again. Results that wait take about the bytes of a segment, of all tasks of a process together,
beside those of `reads` reads. A sampler that yields no callable costs none of this.
It must never have more threads than `reads`: a read that was given up keeps its thread until it returns.
Of samplers with `hedge = True` a read that takes unusually long is begun once more, in another thread, and
the first success is taken (Dean and Barroso, "The Tail at Scale", CACM 56(2), 2013: "hedged requests").
What users' functions make of it is made once.

`Counts` are of a worker, by name, and added up for a pool:

    reads, retries, hedges  numbers of reads that gave something, of further attempts, of those begun again
    fetched_bytes           of the store, as far as it can be told, else of what reads returned
    reading_seconds         that tasks waited for a read
    drawing_seconds         of tasks, but for those that they waited for room
    waiting_seconds         for room
    cpu_seconds             of tasks and reads, in their own threads
    drawn_bytes             of segments
    took N                  reads that took about that long: see `seconds_of`
"""

from __future__ import annotations

import dis
import gc
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import islice
from queue import Empty, SimpleQueue
from types import BuiltinMethodType, CellType, CodeType, FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from arrowcache.errors import SamplerError
from arrowcache.lifetimes import Origin, forgets_in_child
from arrowcache.limits import Limits
from arrowcache.os_errors import start
from arrowcache.sampling.retries import Retries, is_fault, mark_permanent, tally

Values = Mapping[str, Any]
Read = Callable[[], Values]
"""A callable that a sampler yields in place of a sample; it is called in a thread."""
Sampler = Callable[["np.random.Generator"], Iterable[Values | Read]]

T = TypeVar("T")
S = TypeVar("S")

MAX_EMPTY_CALLS = 3  # of a sampler in a row
_MAX_FAULTS = 100  # of samples that are tried for a schema
_LOOK_SECONDS = 0.2  # between two looks at the pool, while a sample is read
_QUEUE_SECONDS = 0.01  # between two looks at a queue that has as many reads as there are threads
_AT_ONCE = 16  # calls of `at_once`, each of which waits for a store
_ESTIMATE_READS = 8  # results of about so many reads tell of the next ones
_LATE_TIMES = 4  # the usual time, after which a read is late
_READS_PER_HEDGE = 10  # begun, at least, for each that is begun again
_STEP = 1.05  # of the running median: up where a read took longer, else down
_MAX_PARTS = 200  # of a read, that are looked at
_MAX_DEPTH = 8  # of lists within a sample, whose bytes are counted
_SETS = ("STORE_DEREF", "DELETE_DEREF")
_FUNCTIONS = (FunctionType, MethodType, partial)
_WAY_OUT = "write `yield partial(read, key)`, with functools.partial, which keeps the values of this moment"

_STEPS_A_DOUBLING = 8  # of the time that a read took: they tell it to 5 %
_MIN_TOOK_SECONDS = 1e-5
_TOOK = "took "


class Rows(dict[str, Any]):
    """Many samples: each field has a leading axis of the same length.

    `yield Rows(image=images, label=labels)` in a sampler is the same as yielding each row by itself, and
    takes a fraction of the time. Numbers are arrays `(n, *shape)`; text, bytes and ragged fields are lists of
    n values. A segment that has room for some of them takes the first ones and drops the rest, as it
    drops a single sample that no longer fits: the next task draws anew.
    """

    def split(self) -> Iterator[dict[str, Any]]:
        """Yield each sample by itself, with views of the arrays."""
        names = list(self)
        for values in zip(*self.values(), strict=True):
            yield dict(zip(names, values, strict=True))


class _Pending:
    """A call on its way. `is_over`: no further attempt is of use."""

    __slots__ = (
        "began", "drawn", "ended", "error", "has_ended", "held_bytes", "is_over", "may_repeat", "more_bytes",
        "read", "read_seconds", "runs", "sole", "values", "variables",
    )  # fmt: skip

    def __init__(
        self, read: Callable[[], Any], drawn: str = "", held_bytes: int = 0, *, may_repeat: bool = False
    ) -> None:
        self.read, self.drawn, self.held_bytes, self.may_repeat = read, drawn, held_bytes, may_repeat
        self.more_bytes = 0  # of its result, than held_bytes, which were guessed
        self.variables: Sequence[_Variable] = ()  # see `require_bound`
        self.values: Any = None
        self.error: BaseException | None = None
        self.began = self.read_seconds = 0.0
        self.runs = 1  # that have not ended; 2 where it was begun again
        self.sole: int | None = None  # the thread whose run alone goes on: see `go_on_alone`
        self.is_over = self.has_ended = False
        self.ended = threading.Lock()  # locked until then
        self.ended.acquire()

    def wait(self, seconds: float) -> None:
        """Wait a moment for its end."""
        if self.ended.acquire(timeout=seconds):
            self.ended.release()


class _Ready(NamedTuple):
    """A sample that was yielded as such, or an exception of the sampler, or of a sample that it cannot give.

    `drawn` is None of a sample that does not wait: it is behind no reads, and alone.
    """

    values: Values | None
    drawn: str | None
    held_bytes: int = 0
    error: Exception | None = None
    is_of_sample: bool = False


class Fault:
    """A read that raises. A sampler that goes on yields it in place of a sample that it cannot give."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self) -> NoReturn:
        raise self.error


class _Held:
    """The bytes that results of reads take in this process, begun or waiting, as far as they can be told."""

    def __init__(self) -> None:
        self.forget_in_child()
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Begin with none: the parent's reads do not go on there."""
        self.nbytes, self._lock = 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


held = _Held()


def held_bytes() -> int:
    """The bytes that results of reads are taken to have in this process, of those begun and not taken."""
    return held.nbytes


class Mean:
    """The mean of what the last reads of a sampler gave. What the next ones will give is guessed from it."""

    def __init__(self) -> None:
        self.rows, self.nbytes = 1.0, 0.0

    def learn(self, rows: int, nbytes: int) -> None:
        """Note what a read gave."""
        share = 1 / _ESTIMATE_READS if self.nbytes else 1.0
        self.rows += (rows - self.rows) * share
        self.nbytes += (max(1, nbytes) - self.nbytes) * share


class Threads:
    """The threads that run the reads of one worker. They start with its first ones, and end once idle.

    Args:
        count: of reads at a time. 0: each runs in the thread that asks for it, which waits.
        retries: of each read whose error may pass.
    """

    def __init__(self, count: int, retries: Retries | None = None) -> None:
        self.count, self.retries = count, Retries() if retries is None else retries
        self.origin = Origin()
        self._means: dict[tuple[int, ...], Mean] = {}
        self.usual_seconds = 0.0  # of a read: a running median
        self.counts = Counts()
        self._asked: deque[_Pending] = deque()
        self._ask: SimpleQueue[None] = SimpleQueue()  # one for each that is asked
        self._lock = threading.Lock()
        self._at_work: dict[_Pending, None] = {}  # that may be begun again, the oldest first
        self._begun = self._hedges = 0  # of these
        self._running = 0  # threads
        self._open = 0  # reads that were submitted, and have not ended

    @property
    def backlog(self) -> int:
        """The number of reads that wait for a thread; below zero, of threads that could read at once."""
        return self._open - self.count

    @property
    def at_work(self) -> int:
        """The number of reads in threads."""
        return min(self._open, self._running)

    @property
    def are_reading(self) -> bool:
        return self._open > 0

    def submit(self, pending: _Pending) -> None:
        """Run a read soon, in the order of submission; at once if it is begun again.

        Raises: WorkerError: no thread can be started.
        """
        with self._lock:
            self._open += 1
            is_enough = self._running >= min(self.count, self._open)
            self._running += not is_enough
        if not self.count:
            self._run(pending)
            return
        if not is_enough:
            try:
                start(threading.Thread(target=self._work, name="arrowcache-read", daemon=True))
            except BaseException:
                with self._lock:
                    self._running -= 1
                    if not self._running:
                        self._open -= 1
                        raise
        (self._asked.appendleft if pending.began else self._asked.append)(pending)
        self._ask.put(None)

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Make a call soon. Returns: its result to come. Raises: WorkerError: no thread can be started."""
        future: Future[T] = Future()

        def make() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  # who waits for the future is told
                    future.set_exception(error)

        self.submit(_Pending(make))
        return future

    def hedge(self) -> float:
        """Begin late reads once more, those that may be, and at most a tenth.

        Returns: seconds after which it is to be called again, if a read is still waited for.
        """
        while True:
            with self._lock:
                late = next(iter(self._at_work), None)
                if late is None:
                    return _LOOK_SECONDS
                patience = max(Limits.current.late_read_seconds, _LATE_TIMES * self.usual_seconds)
                left = late.began + patience - time.monotonic()
                if is_waited_for := not late.is_over:
                    if left > 0:
                        return min(left, _LOOK_SECONDS)
                    if self._begun < _READS_PER_HEDGE * (self._hedges + 1):
                        return _LOOK_SECONDS
                    self._hedges += 1
                    late.runs += 1
                    held.add(late.held_bytes)
                del self._at_work[late]
            if is_waited_for:
                self.counts.add(hedges=1)
                self.submit(late)

    def results(self, calls: Iterable[Callable[[], T]], look: Callable[[], None]) -> Generator[T, None, None]:
        """Yield what calls return, in their order. Some that are done wait for those before them.

        Args:
            look: called a few times a second while one is waited for. May raise.
        Raises: what a call raises, in its turn. Those behind it are given up, and so they are at `close`.
        """
        begun: deque[_Pending] = deque()
        left = iter(calls)
        try:
            while True:
                for call in islice(left, 2 * self.count - len(begun)):
                    begun.append(_Pending(call))
                    self.submit(begun[-1])
                if not begun:
                    return
                while not begun[0].has_ended:
                    look()
                    begun[0].wait(_LOOK_SECONDS)
                ended = begun.popleft()
                self.give_up(ended)
                if ended.error is not None:
                    raise ended.error
                yield ended.values
        finally:
            for pending in begun:
                self.give_up(pending)

    def close(self) -> None:
        """End the threads as soon as none has a call to make. Idempotent; further calls start them again."""
        for _ in range(self.count):
            self._ask.put(None)

    def give_up(self, pending: _Pending) -> None:
        """Note that nobody waits for a read any more, or that its result was taken."""
        with self._lock:
            pending.is_over = True
            held.add(-pending.held_bytes - pending.more_bytes)
            pending.more_bytes = 0

    def mean_of(self, place: tuple[int, ...]) -> Mean:
        """Return what reads gave so far, of all tasks: those of the sampler, or of one at a place in it."""
        return self._means.setdefault(place, Mean())

    def _work(self) -> None:
        while True:
            try:
                self._ask.get(timeout=Limits.current.idle_read_seconds)
            except Empty:
                if self._may_end():
                    return
                continue
            try:
                pending = self._asked.popleft()
            except IndexError:  # `close` asks for nothing
                if self._may_end():
                    return
                continue
            self._run(pending)

    def _may_end(self) -> bool:
        """Count a thread as ended, unless a read is about to be put for it."""
        with self._lock:
            may_end = self._running > self._open
            self._running -= may_end
        return may_end

    def _run(self, pending: _Pending) -> None:
        values, error = None, None
        tally.fetched_bytes = tally.retries = 0
        of_cpu = time.thread_time()
        _of_thread.goes_on = partial(self._goes_on, pending)
        with self._lock:
            _of_thread.is_hedge = pending.began > 0
            if not pending.began:
                pending.began = time.monotonic()
                if pending.may_repeat:
                    self._at_work[pending] = None
                    self._begun += 1
        try:
            if not pending.is_over:
                values = self.retries.call(pending.read, lambda: pending.is_over)
        except BaseException as raised:  # noqa: BLE001  # the task raises it in its turn
            error = raised
        nbytes = nbytes_of(values)
        fetched_bytes = tally.fetched_bytes or nbytes
        of_cpu = time.thread_time() - of_cpu
        self.counts.add(fetched_bytes=fetched_bytes, retries=tally.retries, cpu_seconds=of_cpu)
        with self._lock:
            self._open -= 1
            self._at_work.pop(pending, None)
            pending.runs -= 1
            if pending.has_ended or (error is not None and pending.runs):  # the other run is what counts
                held.add(-pending.held_bytes)
                return
            if error is None:
                seconds = time.monotonic() - pending.began
                of_read = pending.read_seconds or seconds
                is_more = of_read > self.usual_seconds
                self.usual_seconds = self.usual_seconds * (_STEP if is_more else 1 / _STEP) or of_read
                self.counts.add(seconds)
                if not pending.is_over:
                    pending.more_bytes = nbytes - pending.held_bytes
                    held.add(pending.more_bytes)
            pending.values, pending.error, pending.is_over, pending.has_ended = values, error, True, True
            pending.ended.release()

    def _goes_on(self, pending: _Pending) -> bool:
        """True in the run of a read that is the first to ask, whenever it does. It is not begun again."""
        with self._lock:
            if pending.sole is None:
                self._at_work.pop(pending, None)
                pending.sole, pending.read_seconds = threading.get_ident(), time.monotonic() - pending.began
            return pending.sole == threading.get_ident()


def at_once(function: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Call a function for each item, several at the same time: each call mostly waits for a store.

    The main thread calls none itself: Ctrl-C does not end a call in C.
    Raises: the error of the first failed call, or KeyboardInterrupt, at once: calls that had not begun never
        do, and those at work are left behind, in daemon threads.
    """
    if len(items) < 2 and threading.current_thread() is not threading.main_thread():
        return [function(item) for item in items]
    threads = Threads(min(_AT_ONCE, len(items)), Retries(0))
    try:
        return [*threads.results((partial(function, item) for item in items), lambda: None)]
    finally:
        threads.close()


class Streams(ABC):
    """Samples in an order that is fixed, whatever has been read: of one sampler, or of several in turn."""

    drawn: str = ""
    """The name of the sample that was taken last, if the sampler's attribute `drawn` tells it."""

    @property
    @abstractmethod
    def due(self) -> Stream | None:
        """The stream from which the next sample comes. None: it has been taken from there already."""

    @property
    @abstractmethod
    def covered(self) -> float:
        """About the number of rows that were read, or will be by what has begun."""

    @property
    @abstractmethod
    def reads(self) -> int:
        """The number of reads that were begun and not taken."""

    @property
    @abstractmethod
    def has_reads(self) -> bool | None:
        """True if a sampler has yielded one. None: some has not yielded yet."""

    @abstractmethod
    def behind(self, wanted_rows: float, *, is_due: bool = True) -> Stream | None:
        """Return the stream whose sampler is to yield something more now, for about so many rows in all.

        Args:
            is_due: the next sample comes from here.
        """

    @abstractmethod
    def taken(self, most_rows: int | None = None) -> Values | Exception | None:
        """Take the next sample, which is there, or its fault, or None where a call of the sampler has ended.

        Args:
            most_rows: what a mixture may give at a time.
        Returns: NOTHING: the next one is to be waited for.
        Raises: what the sampler or its read raised.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what was not taken, and close the samplers."""


NOTHING = Rows()
"""Stands for no sample, where the next one is to be waited for."""


class Stream(Streams):
    """The samples of one sampler, in the order of yielding. Used in one thread.

    Args:
        sampler: called with `rng`, and called again whenever it ends. A source that plans is asked for a plan
            in its place: see `Source.plan_reads`.
        most_bytes: of results that wait.
        rows: that a source plans. None: it does not.
        skips: faults of single samples are given in their places, not raised.
        place: of the sampler in others.
    """

    def __init__(
        self,
        sampler: Sampler,
        rng: np.random.Generator,
        threads: Threads,
        most_bytes: int,
        rows: int | None = None,
        *,
        skips: bool = False,
        place: tuple[int, ...] = (),
    ) -> None:
        self._sampler, self._rng, self._threads, self._most_bytes = sampler, rng, threads, most_bytes
        self._skips, self._hedges = skips, hedge_of(sampler)
        self._mean, self._waits = threads.mean_of(place), bool(place)  # a sample, for those of others
        self.is_divided = getattr(sampler, "is_divided", False)
        plan = None if rows is None else getattr(sampler, "plan_reads", None)
        self._begun: Sampler = sampler if plan is None else lambda rng: plan(rng, rows)
        self._is_whole = self.is_divided or plan is not None  # a call yields all that the task has room for
        self._yielded: Iterator[Any] | None = None  # of the call at work
        self.entries: deque[_Pending | _Ready | None] = deque()  # None: the end of a call
        self._reads = self._ready = 0  # of these, in the queue
        self._is_stuck = False  # the queue ends in what has to be taken first
        self._drawn: str | None = None
        self._has_reads: bool | None = None
        self._left: Mapping[str, Any] | None = None  # the state of `rng` since it yielded last, from then on
        self._is_drawn_from = False  # by a read

    @property
    def drawn(self) -> str:  # type: ignore[override]  # never set here
        return getattr(self._sampler, "drawn", "") if self._drawn is None else self._drawn

    @property
    def due(self) -> Stream:
        return self

    @property
    def covered(self) -> float:
        return self._ready + self._reads * max(1.0, self._mean.rows)

    @property
    def reads(self) -> int:
        return self._reads

    @property
    def has_reads(self) -> bool | None:
        return self._has_reads

    def behind(self, wanted_rows: float, *, is_due: bool = True) -> Stream | None:
        return self if self._may_go_on(wanted_rows, is_due=is_due) else None

    def taken(self, most_rows: int | None = None) -> Values | Exception | None:  # noqa: ARG002  # all at once
        entry = self.entries.popleft()
        self._drawn = None
        if entry is None:
            return None
        self._drawn = entry.drawn
        if isinstance(entry, _Pending):
            self._reads -= 1
            if entry.error is None:
                self._mean.learn(rows_in(entry.values), entry.held_bytes + entry.more_bytes)
            self._threads.give_up(entry)
            self._look_at_rng()
            _require_unchanged(entry.variables)
            is_of_sample = True
        else:
            self._ready -= entry.error is None
            held.add(-entry.held_bytes)
            is_of_sample = entry.is_of_sample
        error = entry.error
        if error is None:
            return entry.values
        if is_of_sample and self._skips and isinstance(error, Exception) and is_fault(error):
            return error
        raise error

    def close(self) -> None:
        """Give up what was not taken, and close the sampler. Reads that run already go on by themselves."""
        while self.entries:
            entry = self.entries.popleft()
            if isinstance(entry, _Pending):
                self._threads.give_up(entry)
            elif isinstance(entry, _Ready):
                held.add(-entry.held_bytes)
        self._reads = self._ready = 0
        yielded, self._yielded = self._yielded, None
        with _closing():
            _close(yielded)

    def advance(self) -> None:
        """Take one thing more from the sampler, into the queue."""
        skipped, _of_thread.skips = leaves_out(), self._skips
        try:
            sample = self._next()
            if isinstance(sample, Mapping):
                ready = _Ready(sample, self._named() if self._waits else None)
                if self.entries:
                    ready = _Ready(sample, self._named(), nbytes_of(sample))
                    held.add(ready.held_bytes)
                self.entries.append(ready)
                self._ready += 1
            elif isinstance(sample, Fault):
                self.entries.append(_Ready(None, self._named(), error=sample.error, is_of_sample=True))
            elif is_read(sample):
                assert self._yielded is not None
                self._begin(sample, require_bound(sample, self._yielded, self._rng))
            else:
                wrong = SamplerError(
                    "a sampler must yield mappings of field names to values, or callables that return "
                    f"such, not {type(sample).__name__}"
                )
                if sample is not None:
                    raise mark_permanent(wrong)
                fault = mark_permanent(wrong, is_fault=True)
                self.entries.append(_Ready(None, self._named(), error=fault, is_of_sample=True))
            self._is_stuck = False
        except StopIteration:
            self._yielded = None
            self.entries.append(None)
            self._is_stuck |= self._is_whole  # a call that yielded nothing leaves it as it was: stuck
        except Exception as error:  # noqa: BLE001  # a sampler may raise anything; it comes in its turn
            self.entries.append(_Ready(None, self._named(), error=error))
            self._is_stuck = True
        finally:
            _of_thread.skips = skipped
            self._has_reads = bool(self._has_reads)

    def _may_go_on(self, wanted_rows: float, *, is_due: bool) -> bool:
        """True if the sampler is to yield something more now."""
        if not self.entries and (is_due or self._has_reads is False):
            return is_due
        if self.entries and (not self._reads or self._is_stuck):  # what can be taken is taken first
            return False
        mean, count = self._mean, self._threads.count
        if not mean.nbytes and self._reads >= count:  # nothing is known of what they give
            return False
        return self.covered < wanted_rows and held.nbytes <= self._most_bytes + (count - 1) * mean.nbytes

    def _next(self) -> Any:
        self._look_at_rng()
        try:
            if self._yielded is None:
                self._yielded, self._is_stuck = _called(self._begun, self._rng), True
            return next(self._yielded)
        finally:
            if self._has_reads:
                self._left = self._rng.bit_generator.state

    def _look_at_rng(self) -> None:
        """Raise SamplerError if a read has drawn from the task's generator, now or since the last sample."""
        if not self._is_drawn_from and self._left is not None:
            self._is_drawn_from = self._left != self._rng.bit_generator.state
        if self._is_drawn_from:
            raise _draws("a read")

    def _named(self) -> str:
        return getattr(self._sampler, "drawn", "")

    def _begin(self, read: Read, variables: Sequence[_Variable]) -> None:
        if not self._has_reads:
            self._has_reads, self._left = True, self._rng.bit_generator.state
        nbytes, may_repeat = int(self._mean.nbytes), self._hedges and self._threads.count > 1
        pending = _Pending(partial(values_of, read), self._named(), nbytes, may_repeat=may_repeat)
        pending.variables = variables
        self._threads.submit(pending)
        held.add(pending.held_bytes)
        self.entries.append(pending)
        self._reads += 1


class Samples:
    """The samples of one task, in their order. Used in one thread."""

    def __init__(self, streams: Streams, threads: Threads) -> None:
        self._streams, self._threads = streams, threads
        self.counts = threads.counts
        self.are_divided = isinstance(streams, Stream) and streams.is_divided

    @property
    def drawn(self) -> str:
        """The name of the sample that was taken last, if the sampler's attribute `drawn` tells it."""
        return self._streams.drawn

    @property
    def has_reads(self) -> bool:
        """True if the sampler has yielded one."""
        return bool(self._streams.has_reads)

    def take(self, wanted_rows: int, go_on: Callable[[], None]) -> Values | Exception | None:
        """Return the next sample, or its fault, or None once a call of the sampler has ended.

        Args:
            wanted_rows: rows that the task has room for. Reads are begun for about so many.
            go_on: called where threads are free and no read is left to begin, and a few times a second while
                a read is waited for. May raise.
        Blocks: until it is read.
        Raises: what the sampler or the read raised, or `go_on`. SamplerError: neither a sample nor a read.
        """
        while True:
            self._await(wanted_rows, go_on)
            if self._streams.reads and self._threads.backlog < 0:
                go_on()
            taken = self._streams.taken()
            if taken is not NOTHING:
                return taken

    def begin(self, wanted_rows: int) -> None:
        """Begin reads for about so many rows, and wait for none."""
        while self._threads.backlog < self._threads.count:
            stream = self._streams.behind(wanted_rows)
            if stream is None:
                return
            stream.advance()

    def has_more(self) -> bool:
        """True if this call of the sampler yields something more. Blocks: as the sampler does."""
        due = self._streams.due
        assert due is not None
        while not due.entries:
            due.advance()
        return due.entries[0] is not None

    def close(self) -> None:
        """Give up what was not taken, and close the samplers. Reads that run already go on by themselves."""
        with _closing():
            self._streams.close()

    def _await(self, wanted_rows: int, go_on: Callable[[], None]) -> None:
        """Wait until the next sample can be taken."""
        while True:
            due = self._streams.due
            head = due.entries[0] if due is not None and due.entries else None
            pending = head if isinstance(head, _Pending) and not head.has_ended else None
            is_empty = due is not None and not due.entries
            is_enough = not is_empty and self._threads.backlog >= self._threads.count
            behind = None
            if (is_empty or pending is not None or self._threads.backlog < 0) and not is_enough:
                behind = self._streams.behind(wanted_rows)
            if behind is not None:
                behind.advance()
            elif pending is None:
                return
            else:
                go_on()
                began = time.monotonic()
                seconds = self._threads.hedge()
                pending.wait(min(seconds, _QUEUE_SECONDS) if is_enough else seconds)
                self.counts.add(reading_seconds=time.monotonic() - began)


def single(samples: Iterable[Any], rng: np.random.Generator) -> Generator[Any, None, None]:
    """Yield what a sampler yields, samples of `Rows` one at a time; closes the sampler when it is closed.

    Raises: SamplerError: a read that `require_bound` refuses.
    """
    iterator = iter(samples)
    try:
        for sample in iterator:
            if isinstance(sample, Rows):
                yield from sample.split()
                continue
            if is_read(sample):
                require_bound(sample, iterator, rng)
            yield sample
    finally:
        _close(iterator)


@contextmanager
def _closing() -> Iterator[None]:
    was_closing, _of_thread.is_closing = is_closing(), True
    try:
        yield
    finally:
        _of_thread.is_closing = was_closing


def _close(yielded: object) -> None:
    """Close what a sampler returned, if it can be."""
    close = getattr(yielded, "close", None)
    if close is not None:
        close()


def yielded_nothing(what: str) -> SamplerError:
    """Return the error of a sampler that yields nothing in MAX_EMPTY_CALLS. Trying again would not help."""
    return mark_permanent(
        SamplerError(
            f"{what} yielded nothing in {MAX_EMPTY_CALLS} calls: it must yield at least one sample a call"
        )
    )


def is_read(sample: object) -> bool:
    """True for what is to be read; a mapping that can be called is a sample."""
    return callable(sample) and not isinstance(sample, Mapping)


def values_of(read: Read) -> Values:
    """Return what a read returns. Raises: SamplerError: neither a mapping nor `Rows`. What it raises."""
    values: Any = read()
    if isinstance(values, Mapping):
        return values
    what = "another callable" if callable(values) else type(values).__name__
    raise mark_permanent(
        SamplerError(f"{read!r} must return a mapping of field names to values, or Rows, not {what}"),
        is_fault=values is None,
    )


def rows_in(values: Values) -> int:
    """The number of samples in what a sampler gave. 1 where it cannot be told: who appends them says why."""
    if not isinstance(values, Rows):
        return 1
    counts: set[int] = set()
    with suppress(Exception):  # of anybody's class
        counts = {len(column) for column in values.values()}
    return counts.pop() if len(counts) == 1 else 1


def nbytes_of(values: object, depth: int = 0) -> int:
    """About the bytes of a sample, of its arrays and texts, also in lists.

    Never raises, since a read would have no end: what cannot tell its bytes, such as a dataset of a closed
    file, counts as nothing, and fails when it is appended.
    """
    try:
        if isinstance(values, bytes | str):
            return len(values)
        if isinstance(values, Mapping):
            values = [*values.values()]
        if isinstance(values, list | tuple):  # which may hold itself
            return sum(nbytes_of(each, depth + 1) for each in values) if depth < _MAX_DEPTH else 0
        return max(0, int(getattr(values, "nbytes", 0)))
    except Exception:  # noqa: BLE001  # the code of anybody's class
        return 0


def leaves_out() -> bool:
    """True in a sampler whose task leaves out samples that cannot be had."""
    return getattr(_of_thread, "skips", False)


def made_or_fault(make: Callable[[], T]) -> T | Fault:
    """Return a sample that a source makes, or in a task that leaves it out, its fault: the source goes on.

    Raises: what `make` raises.
    """
    try:
        return make()
    except Exception as error:
        if leaves_out() and is_fault(error):
            return Fault(error)
        raise


def first_whole(reads: Iterable[Callable[[], T | None]]) -> T | None:
    """Return the result of the first read that gives one, and does not end in a fault of its sample.

    Raises: the first fault, where none of the first _MAX_FAULTS gives one; whatever else a read raises.
    """
    fault = None
    skipped, _of_thread.skips = leaves_out(), True
    try:
        for read in islice(reads, _MAX_FAULTS):
            try:
                found = read()
            except Exception as error:
                if not is_fault(error):
                    raise
                fault = fault or error
            else:
                if found is not None:
                    return found
    finally:
        _of_thread.skips = skipped
    if fault is not None:
        raise fault
    return None


def _called(sampler: Sampler, rng: np.random.Generator) -> Iterator[Any]:
    try:
        return iter(sampler(rng))
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # from within the sampler
        mark_permanent(error)  # it takes no generator, or returned nothing to iterate over
        raise


class _Variable(NamedTuple):
    """A variable that a function of a read takes from around it, and its value as the read was yielded."""

    function: FunctionType
    name: str
    cell: CellType
    value: object


def require_bound(read: Read, yielded: Iterator[Any], rng: np.random.Generator) -> list[_Variable]:
    """Raise SamplerError for a read that would see what changes as its sampler goes on.

    That is one with a function that refers to variables of the sampler's generator, and one that draws from
    `rng`, as far as either can be told from its parts.

    Returns: variables from around its functions, but for those that it sets itself: if one has another value
        once the read is done, the read may have seen that: see `_require_unchanged`.
    """
    functions, values = _parts(read)
    if any(value is rng or value is rng.bit_generator for value in values):
        raise _draws(repr(read))
    variables = [
        _Variable(function, name, cell, _value_of(cell))
        for function in functions
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    ]
    if variables:
        own = _own_cells(yielded)
        _require_none(each for each in variables if (each.name, id(each.cell)) in own)
        set_here = {id(each.cell) for each in variables if each.name in _names_set(each.function.__code__)}
        variables = [each for each in variables if id(each.cell) not in set_here]
    return variables


def _require_unchanged(variables: Iterable[_Variable]) -> None:
    """Raise SamplerError if a variable has another value than as its read was yielded."""
    _require_none(each for each in variables if _value_of(each.cell) is not each.value)


def _require_none(late: Iterable[_Variable]) -> None:
    found = list(late)
    if found:
        names = ", ".join(dict.fromkeys(each.name for each in found))
        raise mark_permanent(
            SamplerError(
                f"the sampler yields {found[0].function.__qualname__}, which reads {names} when it is "
                f"called, and the sampler has gone on by then: {_WAY_OUT}"
            )
        )


def _draws(read: str) -> SamplerError:
    return mark_permanent(
        SamplerError(
            f"the sampler yields {read}, which draws from rng in another thread, in any order: draw "
            "first, and yield what reads it, as in `yield partial(read, rng.integers(n))`"
        )
    )


def _parts(read: Read) -> tuple[list[FunctionType], list[object]]:
    """The functions that a read is made of, and the values that it holds."""
    functions: list[FunctionType] = []
    values: list[object] = [read]
    for part in values:
        if len(values) > _MAX_PARTS:
            break
        if isinstance(part, partial):
            more = [part.func, *part.args, *part.keywords.values()]
        elif isinstance(part, FunctionType):
            if part in functions:
                continue
            functions.append(part)
            more = [*map(_value_of, part.__closure__ or ()), *(part.__defaults__ or ())]
            more += (part.__kwdefaults__ or {}).values()
        elif isinstance(part, MethodType | BuiltinMethodType):
            more = [getattr(part, "__func__", None), part.__self__, *_called_by(part.__self__)]
        else:
            more = _called_by(part) if callable(part) else []
        values += more
    return functions, values


def _called_by(thing: object) -> list[object]:
    """The functions among the attributes of an object, which it may call."""
    if isinstance(thing, type):
        return []
    return [each for each in getattr(thing, "__dict__", {}).values() if isinstance(each, _FUNCTIONS)]


def _value_of(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return _value_of


@lru_cache(maxsize=256)
def _names_set(code: CodeType) -> frozenset[str]:
    """The variables from around it that a function sets, or one within it."""
    within = [_names_set(each) for each in code.co_consts if isinstance(each, CodeType)]
    own = [each.argval for each in dis.get_instructions(code) if each.opname in _SETS]
    return frozenset(own).union(*within).intersection(code.co_freevars)


def _own_cells(yielded: Any) -> set[tuple[str, int]]:
    """The variables that a running generator sets and that functions refer to, by name and identity."""
    cells: set[tuple[str, int]] = set()
    while isinstance(yielded, GeneratorType):
        if names := _names_set(yielded.gi_code).union(yielded.gi_code.co_cellvars):
            # The variables are the frame's up to Python 3.10, and the generator's from 3.11 on.
            held = gc.get_referents(yielded, yielded.gi_frame)
            cells |= {(name, id(each)) for name in names for each in held if isinstance(each, CellType)}
        yielded = yielded.gi_yieldfrom
    return cells


_of_thread = threading.local()


def hedge_of(sampler: object) -> bool:
    """True if a read of a sampler may be begun again while it is at work."""
    return getattr(sampler, "hedge", False) is True


def is_hedge() -> bool:
    """True in a read that was begun again: it is not to wait for what the first one is at."""
    return getattr(_of_thread, "is_hedge", False)


def go_on_alone() -> None:
    """Go on in one run of a read alone, the first that has come so far: others end, and are not needed.

    A function of a user, of what was read, is called behind this.
    """
    goes_on = getattr(_of_thread, "goes_on", None)
    if goes_on is not None and not goes_on():
        raise mark_permanent(SamplerError("the other run of this read is the one that goes on"))


def is_closing() -> bool:
    """True while this thread closes a sampler's generator: nothing is to interrupt its `finally`."""
    return getattr(_of_thread, "is_closing", False)


class Counts:
    """The counts of a worker. Any thread adds."""

    def __init__(self) -> None:
        self._lock, self._numbers, self._told = threading.Lock(), Counter[str](), Counter[str]()

    def add(self, took_seconds: float | None = None, **numbers: float) -> None:
        if took_seconds is not None:
            step = round(_STEPS_A_DOUBLING * math.log2(max(1.0, took_seconds / _MIN_TOOK_SECONDS)))
            numbers |= {f"{_TOOK}{step}": 1, "reads": 1}
        with self._lock:
            self._numbers.update(numbers)

    def taken(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        with self._lock:
            more = self._numbers - self._told
            self._told = self._numbers.copy()
        return dict(more)

    def copy(self) -> tuple[Counter[str], Counter[str]]:
        """Return all numbers, and those that `taken` has returned."""
        with self._lock:
            return self._numbers.copy(), self._told


def seconds_of(numbers: Mapping[str, float], share: float) -> float:
    """Return the time within which this share of the reads ended, to some 5 %. 0 if there were none."""
    left = share * numbers.get("reads", 0)
    steps = sorted(int(name[len(_TOOK) :]) for name in numbers if name.startswith(_TOOK))
    for step in steps:
        left -= numbers[f"{_TOOK}{step}"]
        if left <= 0:
            return float(_MIN_TOOK_SECONDS * 2 ** (step / _STEPS_A_DOUBLING))
    return 0.0
