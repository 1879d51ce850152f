"""Reads: calls that wait for a store, many at a time, in threads.

`Threads` runs the reads of one worker's tasks, or whatever calls somebody has to make many of.
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

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from arrowcache.errors import SamplerError
from arrowcache.lifetimes import Origin, forgets_in_child
from arrowcache.limits import Limits
from arrowcache.os_errors import start
from arrowcache.sampling.retries import Retries, mark_permanent, tally

Values = Mapping[str, Any]
Read = Callable[[], Values]
"""A callable that a sampler yields in place of a sample; it is called in a thread."""
Sampler = Callable[["np.random.Generator"], Iterable[Values | Read]]

T = TypeVar("T")
S = TypeVar("S")

_LOOK_SECONDS = 0.2  # between two looks at the pool, while a sample is read
_AT_ONCE = 16  # calls of `at_once`, each of which waits for a store
_ESTIMATE_READS = 8  # results of about so many reads tell of the next ones
_LATE_TIMES = 4  # the usual time, after which a read is late
_READS_PER_HEDGE = 10  # begun, at least, for each that is begun again
_STEP = 1.05  # of the running median: up where a read took longer, else down
_MAX_DEPTH = 8  # of lists within a sample, whose bytes are counted

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


class Pending:
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
        self.variables: Sequence[Any] = ()  # of its functions: see `require_bound`
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
        self._asked: deque[Pending] = deque()
        self._ask: SimpleQueue[None] = SimpleQueue()  # one for each that is asked
        self._lock = threading.Lock()
        self._at_work: dict[Pending, None] = {}  # that may be begun again, the oldest first
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

    def submit(self, pending: Pending) -> None:
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

        self.submit(Pending(make))
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
        begun: deque[Pending] = deque()
        left = iter(calls)
        try:
            while True:
                for call in islice(left, 2 * self.count - len(begun)):
                    begun.append(Pending(call))
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

    def give_up(self, pending: Pending) -> None:
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

    def _run(self, pending: Pending) -> None:
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

    def _goes_on(self, pending: Pending) -> bool:
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
