"""Dispatcher: a pool's options, and its thread, which begins tasks, collects their results, and retries.

It decides when and how often a task is tried. An engine numbers and runs
tasks: executors.py has the engine of one host. A task that fails is tried again with backoff, then given
up while the others go on. The pool ends when no task succeeds any more, and at once at a failure that cannot
pass: see `task.is_permanent`.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import threading
import time
from collections import Counter
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Protocol

from arrowcache.errors import log
from arrowcache.lifetimes import Origin, before_threads_are_joined
from arrowcache.limits import Limits
from arrowcache.os_errors import explained
from arrowcache.pickling import pickled
from arrowcache.progress import progress_bar
from arrowcache.sampling.reads import Sampler
from arrowcache.sampling.task import Done, Task, failure, require_few, require_policy
from arrowcache.storage.layout import TASK_NAME
from arrowcache.storage.locks import once_unlocked
from arrowcache.units import format_count, parse_count

_POLL_SECONDS = 0.1
_BACKOFF_SECONDS = 0.2  # doubled with each retry, with jitter
_MAX_BACKOFF_SECONDS = 30.0
_jitter = random.SystemRandom()  # the generators with a state are the user's

_MAX_SEED_BITS = 128
MAX_READS = 1024  # threads of a worker


_SAYS = {  # attributes of samplers
    "ramp": "False has it fill full segments from the start",
    "hedge": "True has reads that take unusually long begun again, while they are at work",
}


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The arguments of `SamplerPool`. `sampler` is pickled; `ramp`, `chunk_rows`: as its attributes.

    Raises: ValueError, TypeError: an argument does not fit, or the sampler cannot be pickled.
    """

    sample: InitVar[Sampler]
    workers: int
    seed: int
    name: str
    segments: int | None
    retries: int
    progress: bool | None
    reads: int
    on_error: str
    sampler: bytes = field(init=False)
    ramp: bool = field(init=False)
    chunk_rows: int = field(init=False)
    digest: bytes = field(init=False)  # tells pickled samplers apart
    tasks: int | None = field(init=False)  # numbers from this one on have nothing to draw
    division: str = field(init=False)  # of the samples among tasks; empty: each task draws from all

    def __post_init__(self, sample: Sampler) -> None:
        if not callable(sample):
            raise TypeError(f"sample must be a function of a random generator, not {sample!r}")
        keep = partial(object.__setattr__, self)
        keep("workers", parse_count(self.workers, "workers"))
        keep("reads", parse_count(self.reads, "reads", most=MAX_READS))
        keep("seed", parse_count(self.seed, "seed", least=0, most=None))
        if self.seed.bit_length() > _MAX_SEED_BITS:
            raise ValueError(
                f"seed={self.seed} must be below 2**{_MAX_SEED_BITS}: segments carry it in their names"
            )
        if not isinstance(self.name, str) or not TASK_NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r} must be letters, digits, '_', '.' or '-', at most 100")
        keep("tasks", getattr(sample, "tasks", None))
        keep("division", getattr(sample, "division", ""))
        if self.segments is not None:
            keep("segments", parse_count(self.segments, "segments"))
        elif self.tasks is not None:
            keep("segments", self.tasks)
        keep("retries", parse_count(self.retries, "retries", least=0))
        require_policy(self.on_error)
        keep("ramp", getattr(sample, "ramp", True))
        keep("chunk_rows", parse_count(getattr(sample, "chunk_rows", 1), "the sampler's chunk_rows"))
        for name, says in _SAYS.items():
            if not isinstance(given := getattr(sample, name, True), bool):
                raise TypeError(f"the sampler's {name} must be True or False, not {given!r}: {says}")
        keep("sampler", pickled(sample, "the sampler {!r}"))
        keep("digest", hashlib.blake2b(self.sampler, digest_size=16).digest())

    @property
    def pool(self) -> str:
        """The name of the pool's file in pools/."""
        return f"{self.name}.{self.seed}"

    def task(self, number: int, cache: str = "", token: int = 0) -> Task:
        """Return task `number`, without the sampler. `cache`, `token`: as of `Task`."""
        return Task(
            cache,
            b"",
            self.pool,
            self.seed,
            number,
            token,
            ramp=self.ramp,
            chunk_rows=self.chunk_rows,
            digest=self.digest,
            reads=self.reads,
            skips=self.on_error == "skip",
        )


class Engine(Protocol):
    """Numbers and runs tasks. Made in any thread, then used by one."""

    def idle(self) -> int:
        """Return the number of tasks that may begin now. 0 if all workers have one."""
        ...

    def take(self, count: int) -> list[Task]:
        """Take up to `count` tasks, with numbers that nobody else gets. Empty: there are no more."""
        ...

    def begin(self, task: Task) -> None:
        """Run a task. Raises: SamplerError: no task can be begun any more."""
        ...

    def collect(self, timeout_seconds: float) -> list[tuple[Task, Done]]:
        """Return the tasks that ended, or failed (as `Done.error` tells), since the last call.

        Blocks: until there is one, at most this long.
        Raises: SamplerError: no task will end any more.
        """
        ...

    def at_work(self) -> tuple[int, int]:
        """Return the numbers of rows drawn and not published, and of reads at work, as far as is known here.

        In any thread. Raises: OSError: the cache's folder is gone.
        """
        ...

    def end(self) -> list[Done]:
        """Stop all tasks, and the workers if the engine owns them. Returns the tasks that ended meanwhile.

        Blocks: at most about 5 s. Idempotent.
        """
        ...


@dataclass(slots=True)
class PoolState:
    """State shared by the dispatching thread and the pool, under `lock`."""

    lock: threading.RLock = field(default_factory=threading.RLock)  # taken by `with` itself:
    # Ctrl-C can leave a condition's own locked
    changed: threading.Condition = field(init=False)
    origin: Origin = field(default_factory=Origin)
    stopping: bool = False  # set without the lock: finalizers set it, and never wait for the lock
    finished: bool = False  # the thread has ended
    segments: int = 0
    rows: int = 0
    nbytes: int = 0
    waiting_seconds: float = 0.0
    retries: int = 0
    failures: int = 0
    drawn: int = 0
    skipped: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # see reads.py
    fault: str = ""  # of the last sample that was left out
    first_failure: str = ""
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)


class Dispatcher:
    """The work of a pool's thread: `run`."""

    def __init__(self, state: PoolState, engine: Engine, options: PoolOptions) -> None:
        self._state, self._engine, self._retries = state, engine, options.retries
        self._left = options.segments  # tasks still to be taken; None: no limit
        self._at_work = 0
        self._is_known = False  # to the interpreter, which ends a forgotten pool as it exits
        self._waiting: list[tuple[float, int, Task]] = []  # heap: when to try again, number, task
        self._failed_in_a_row = 0
        self._is_permanent = False  # a task failed in a way that cannot pass
        self._most_in_a_row = max(options.retries, engine.idle())
        self._bar = progress_bar(
            options.progress, desc=f"sampling {options.name}", unit="seg", total=options.segments
        )

    def run(self) -> None:
        state = self._state
        try:
            while not state.stopping and (self._refill() or self._at_work or self._waiting):
                self._collect()
                if self._is_permanent or self._failed_in_a_row > self._most_in_a_row:
                    break  # going on would fail for ever
        except BaseException as error:  # noqa: BLE001  # wait() and stop() raise it
            state.error = explained(error) if isinstance(error, OSError) else error
        finally:
            self._finish()

    def _finish(self) -> None:
        state = self._state
        try:
            self.close()
        except BaseException as error:  # noqa: BLE001  # likewise
            state.error = state.error or error
        finally:
            with state.lock:
                state.finished = True
                state.changed.notify_all()

    def close(self) -> None:
        """End, after the thread has ended, or never ran."""
        try:
            for done in self._engine.end():
                self._succeed(done)
        finally:
            self._bar.close()

    def _refill(self) -> bool:
        """Begin due tasks, as long as workers are idle. Returns: True if more tasks may come."""
        idle = self._engine.idle()
        while idle and self._waiting and self._waiting[0][0] <= time.monotonic():
            self._begin(heapq.heappop(self._waiting)[2])
            idle -= 1
        while idle > 0 and (self._left is None or self._left > 0):
            tasks = self._engine.take(idle if self._left is None else min(idle, self._left))
            idle -= len(tasks)
            if self._left is not None:
                self._left -= len(tasks)
            for task in tasks:
                self._begin(task)
            if not tasks:
                self._left = 0  # other pools have drawn the rest, or draw it
        return self._left is None or self._left > 0

    def _begin(self, task: Task) -> None:
        self._engine.begin(replace(task, drawn=self._state.drawn, skipped=self._state.skipped))
        self._at_work += 1
        if not self._is_known:  # an executor has begun by now, at the latest
            before_threads_are_joined(partial(shut_down, self._state, threading.current_thread()))
            self._is_known = True

    def _collect(self) -> None:
        if not self._at_work:
            time.sleep(_POLL_SECONDS)  # for a retry to be due
        for task, done in self._engine.collect(_POLL_SECONDS):
            self._at_work -= 1
            if done.error:
                self._fail(task, done)
            else:
                self._failed_in_a_row = 0
                self._succeed(done)
                require_few(self._state.drawn, self._state.skipped, self._state.fault)

    def _succeed(self, done: Done) -> None:
        state = self._state
        with state.lock:
            state.waiting_seconds += done.waiting_seconds
            state.drawn += done.drawn
            state.skipped += done.skipped
            state.counts.update(done.counts)
            state.fault = done.fault or state.fault
            if done.rows:
                state.segments += 1
                state.rows += done.rows
                state.nbytes += done.nbytes
            state.changed.notify_all()
        self._bar.update(done.rows > 0)

    def _fail(self, task: Task, done: Done) -> None:
        state = self._state
        if state.stopping:
            return
        self._is_permanent |= done.permanent
        if task.tries < self._retries and not done.permanent:
            backoff = min(_BACKOFF_SECONDS * 2**task.tries, _MAX_BACKOFF_SECONDS)
            due = time.monotonic() + backoff * _jitter.uniform(0.5, 1.0)
            heapq.heappush(self._waiting, (due, task.number, replace(task, tries=task.tries + 1)))
            with state.lock:
                state.retries += 1
            return
        self._failed_in_a_row += 1
        reason = done.error.rstrip().rpartition("\n")[2]
        tried = format_count(task.tries, "retry", "retries")
        message = f"sampler task {task.task_name} was given up after {tried}: {reason}"
        with state.lock:
            state.failures += 1
            state.first_failure = state.first_failure or done.error
            state.changed.notify_all()
        log(message)


def failed(task: Task, error: BaseException) -> tuple[Task, Done]:
    """Return the entry of `collect` for a task that its engine lost."""
    return task, failure(task, error)


def shut_down(state: PoolState, thread: threading.Thread) -> None:
    """End a pool's thread, and wait for it. Idempotent; the next call finishes an interrupted one.

    In a forked child it does nothing: the thread is the parent's.
    """
    if not state.origin.is_here:
        return
    state.stopping = True
    is_here = thread is threading.current_thread()  # the garbage collector may run in any thread
    if thread.ident is None or is_here:
        return
    seconds = Limits.current.stop_seconds
    with state.lock:  # `join` alone forgets, after a Ctrl-C, that the thread runs: CPython below 3.13
        has_ended = state.changed.wait_for(lambda: state.finished, 2 * seconds)
    if has_ended:
        thread.join(seconds)


def drop(state: PoolState, thread: threading.Thread) -> None:
    """As `shut_down`, for a finalizer: if this thread has cache.lock, the wait begins after its release."""
    state.stopping = True
    once_unlocked(partial(shut_down, state, thread))
