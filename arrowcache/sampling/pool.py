"""SamplerPool: keeps samplers drawing, one segment a task, on any executor.

It owns the task numbers it claimed, the executor if it made it, and one thread that submits,
collects and retries. Guarantees: a task number is never given out twice for a (name, seed), by
this pool, a concurrent or a later one; a task that keeps failing is given up with its traceback
while the others go on; `stop()` ends in bounded time; when the pool's process dies, in whatever
way, its workers stop by themselves. No sample crosses the parent process.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
import os
import random
import signal
import threading
import time
import traceback
import weakref
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from arrowcache.errors import SamplerError
from arrowcache.pickling import pickled
from arrowcache.sampling.task import Done, Sampler, Task, run
from arrowcache.storage.layout import TASK_NAME
from arrowcache.storage.locks import LockFile
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.storage.store import Store
from arrowcache.units import parse_count, parse_seconds

if TYPE_CHECKING:
    from typing import Self

_log = logging.getLogger("arrowcache")

_PR_SET_PDEATHSIG = 1
_MOST_SEED_BITS = 128
_POLL_SECONDS = 0.1
_STOP_SECONDS = 5.0
_BACKOFF_SECONDS = 0.2  # doubled with each retry, with jitter
_MOST_BACKOFF_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool since it was started.

    `bytes` are of published segments' files, `seconds` since the start, `waiting_seconds` what its
    workers together waited for room; `retries` counts repeated attempts, `failures` tasks given up.
    """

    segments: int
    rows: int
    bytes: int
    seconds: float
    waiting_seconds: float
    retries: int
    failures: int


@dataclass(slots=True)
class _State:
    """What the dispatching thread and the pool share, under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    stopping: bool = False
    finished: bool = False  # the thread has ended
    segments: int = 0
    rows: int = 0
    nbytes: int = 0
    waiting_seconds: float = 0.0
    retries: int = 0
    failures: int = 0
    first_failure: str = ""
    error: BaseException | None = None


class SamplerPool:
    """Samplers at work on a cache, from construction until `stop()`. A context manager.

    Args:
        cache: a Cache, or the path of one.
        sample: `sample(rng) -> iterable of samples`, a function or callable object that
            cloudpickle can pickle. It is unpickled once a worker. Task k's samples are a pure
            function of (sample, seed, k).
        workers: tasks at work at a time.
        seed: of the random streams.
        name: of this pool's task numbers; a pool of the same name and seed goes on at the next.
        executor: any concurrent.futures.Executor whose workers run on this host; the pool does not
            shut it down. None: processes of its own (loky), which survive notebooks and kills.
        segments: stop by itself after so many tasks; None: until stopped.
        retries: how often a failing task is tried again, with backoff, before it is given up.
        progress: show a bar; None: if stderr is a terminal.
    Raises: ValueError, TypeError: an argument that does not fit, a sampler that cannot be pickled.
    """

    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        sample: Sampler,
        workers: int = 4,
        seed: int = 0,
        name: str = "default",
        executor: Executor | None = None,
        segments: int | None = None,
        retries: int = 3,
        progress: bool | None = None,
    ) -> None:
        store = store_of(cache)
        if executor is not None and not isinstance(executor, Executor):
            raise TypeError(f"executor must be a concurrent.futures.Executor or None, not {executor!r}")
        if not callable(sample):
            raise TypeError(f"sample must be a function of a random generator, not {sample!r}")
        workers = parse_count(workers, "workers")
        seed = parse_count(seed, "seed", least=0, most=None)
        if seed.bit_length() > _MOST_SEED_BITS:
            raise ValueError(
                f"seed={seed} must be below 2**{_MOST_SEED_BITS}: segments carry it in their names"
            )
        if not isinstance(name, str) or not TASK_NAME.fullmatch(name):
            raise ValueError(f"name={name!r} must be letters, digits, '_', '.' or '-', at most 100")
        segments = None if segments is None else parse_count(segments, "segments")
        retries = parse_count(retries, "retries", least=0)
        packed = pickled(sample, "the sampler {!r}")
        self._state = _State()
        self._started = time.monotonic()
        self._segments = segments
        self._reported = 0  # failures that were raised already
        dispatcher = _Dispatcher(
            self._state, store, packed, workers, seed, name, executor, segments, retries, progress
        )
        self._thread = threading.Thread(target=dispatcher.run, name="arrowcache-pool", daemon=True)
        self._shut_down = weakref.finalize(self, _shut_down, self._state, self._thread)
        self._thread.start()

    def stats(self) -> PoolStats:
        """What was published so far, and at which cost."""
        state = self._state
        with state.changed:
            return PoolStats(
                segments=state.segments,
                rows=state.rows,
                bytes=state.nbytes,
                seconds=time.monotonic() - self._started,
                waiting_seconds=state.waiting_seconds,
                retries=state.retries,
                failures=state.failures,
            )

    def wait(self, segments: int | None = None, timeout: float | None = None) -> None:
        """Wait until this pool has published so many segments, or (None) has done all its tasks.

        Blocks: at most `timeout` seconds; None: no bound.
        Raises: TimeoutError: not in time. SamplerError: tasks failed, so that it cannot be reached.
            ValueError: segments=None, and the pool has no end.
        """
        if segments is None and self._segments is None:
            raise ValueError("this pool has no end: say wait(segments=...) or make it with segments=...")
        timeout = parse_seconds(timeout, "timeout")
        state = self._state

        def reached() -> bool:
            return segments is not None and state.segments >= segments

        with state.changed:
            in_time = state.changed.wait_for(lambda: state.finished or reached(), timeout)
            if not in_time:
                wanted = "all tasks" if segments is None else f"{segments} segments"
                raise TimeoutError(
                    f"{wanted} were not done in {timeout} s: {state.segments} segments published, "
                    f"{state.failures} tasks given up, {state.retries} retries"
                )
            if not reached():
                self._raise_failures()
                if segments is not None:
                    raise SamplerError(
                        f"the pool ended with {state.segments} segments published, {segments} were waited for"
                    )

    def stop(self) -> None:
        """End the samplers; what they had not published is discarded. Idempotent.

        Blocks: until the workers are gone, at most about 5 s; a task of a foreign executor that
        does not yield within that time is left to end by itself, publishing nothing.
        Raises: SamplerError: tasks were given up, and no `wait` raised it before.
        """
        self._shut_down()
        with self._state.changed:
            self._raise_failures()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self._shut_down()  # the exception that passes tells more

    def __repr__(self) -> str:
        return f"<SamplerPool {self.stats()}>"

    def _raise_failures(self) -> None:
        state = self._state
        if state.error is not None:
            error, state.error = state.error, None
            raise error
        if state.failures > self._reported:
            self._reported = state.failures
            raise SamplerError(
                f"{state.failures} tasks were given up after {state.retries} retries; the first:\n"
                f"{state.first_failure}"
            )


@dataclass(slots=True, order=True)
class _Attempt:
    """A task to be submitted at a time; `tries` so far failed."""

    due: float
    task: Task = field(compare=False)
    tries: int = field(compare=False, default=0)
    executor: Executor | None = field(compare=False, default=None)  # where it runs


class _Dispatcher:
    """The pool's thread: submits tasks, collects results, retries."""

    def __init__(
        self,
        state: _State,
        store: Store,
        sampler: bytes,
        workers: int,
        seed: int,
        name: str,
        executor: Executor | None,
        segments: int | None,
        retries: int,
        progress: bool | None,
    ) -> None:
        self._state, self._store = state, store
        self._workers, self._retries = workers, retries
        self._sampler, self._seed = sampler, seed
        self._pool = f"{name}.{seed}"
        self._left = segments  # tasks still to be claimed; None: no end
        self._foreign = executor
        self._executor: Executor | None = executor
        self._running: dict[Future[Done], _Attempt] = {}
        self._waiting: list[_Attempt] = []  # heap by due time
        self._failed_in_a_row = 0
        self._claimed: range = range(0)
        self._watch, self._token = self._lock_token()
        import tqdm  # 20 ms that `import arrowcache` need not take

        self._bar = tqdm.tqdm(
            desc=f"sampling {name}",
            unit="seg",
            total=segments,
            disable=None if progress is None else not progress,
        )

    def run(self) -> None:
        state = self._state
        try:
            while not state.stopping and (self._refill() or self._running or self._waiting):
                self._collect()
                if self._failed_in_a_row > max(self._retries, self._workers):
                    break  # nothing succeeds: going on would fail for ever
        except BaseException as error:  # noqa: BLE001  # wait() and stop() raise it
            state.error = error
        finally:
            self._watch.close()  # tells the tasks at work to stop
            self._shut_down_executor()
            self._bar.close()
            with state.changed:
                state.finished = True
                state.changed.notify_all()

    def _lock_token(self) -> tuple[LockFile, int]:
        """Lock the byte that tells this pool's tasks that it lives: its first task's number."""
        with self._store.locked():
            first = self._store.folder.claim_tasks(self._pool, 1)
            watch = LockFile(self._store.folder.pools / self._pool)
            watch.try_range(first, 1, exclusive=True)
        self._claimed = range(first, first + 1)
        return watch, first

    def _refill(self) -> bool:
        """Submit what is due, as long as workers are idle; whether anything may still come."""
        now = time.monotonic()
        while len(self._running) < self._workers:
            if self._waiting and self._waiting[0].due <= now:
                attempt = heapq.heappop(self._waiting)
            elif self._left is None or self._left > 0:
                attempt = _Attempt(now, self._next_task())
            else:
                break
            self._submit(attempt)
        return self._left is None or self._left > 0

    def _next_task(self) -> Task:
        if not self._claimed:
            with self._store.locked():
                first = self._store.folder.claim_tasks(self._pool, 1)
            self._claimed = range(first, first + 1)
        number, self._claimed = self._claimed[0], self._claimed[1:]
        if self._left is not None:
            self._left -= 1
        path = str(self._store.folder.path)
        return Task(path, self._sampler, self._pool, self._seed, number, self._token)

    def _submit(self, attempt: _Attempt) -> None:
        try:
            if self._executor is None:
                import loky  # as above

                self._executor = loky.ProcessPoolExecutor(
                    self._workers, initializer=_begin_worker, initargs=(os.getpid(),)
                )
            attempt.executor = self._executor
            self._running[self._executor.submit(run, attempt.task)] = attempt
            _shut_down_at_exit(self._state, threading.current_thread())
        except BrokenExecutor as error:
            self._lose(attempt, error)

    def _collect(self) -> None:
        done, _ = wait(self._running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        if not self._running:
            time.sleep(_POLL_SECONDS)
        for future in done:
            attempt = self._running.pop(future)
            try:
                result = future.result()
            except BrokenExecutor as error:
                self._lose(attempt, error)
            except BaseException as error:  # noqa: BLE001  # an executor may raise anything
                self._fail(attempt, _text(error))
            else:
                if result.error:
                    self._fail(attempt, result.error)
                else:
                    self._succeed(result)

    def _succeed(self, done: Done) -> None:
        self._failed_in_a_row = 0
        state = self._state
        with state.changed:
            state.waiting_seconds += done.waiting_seconds
            if done.rows:
                state.segments += 1
                state.rows += done.rows
                state.nbytes += done.nbytes
            state.changed.notify_all()
        self._bar.update(done.rows > 0)

    def _fail(self, attempt: _Attempt, text: str) -> None:
        """Try again later, or give up; `text` is the traceback."""
        state = self._state
        if state.stopping:
            return
        if attempt.tries < self._retries:
            backoff = min(_BACKOFF_SECONDS * 2**attempt.tries, _MOST_BACKOFF_SECONDS)
            due = time.monotonic() + backoff * random.uniform(0.5, 1.0)
            heapq.heappush(self._waiting, _Attempt(due, attempt.task, attempt.tries + 1))
            with state.changed:
                state.retries += 1
            return
        self._failed_in_a_row += 1
        reason = text.rstrip().rpartition("\n")[2]
        message = (
            f"sampler task {attempt.task.task_name} was given up after {attempt.tries} retries: {reason}"
        )
        with state.changed:
            state.failures += 1
            state.first_failure = state.first_failure or text
            state.changed.notify_all()
        _log.warning(message)  # a warning turned into an error would end this thread

    def _lose(self, attempt: _Attempt, error: BrokenExecutor) -> None:
        """A worker was killed: processes of our own are started anew, a foreign executor is lost.

        All tasks of the broken executor come here, one after another; only the first ends it.
        """
        if self._foreign is None and attempt.executor is self._executor:
            _kill(self._executor)
            self._executor = None
        self._fail(attempt, _text(error))

    def _shut_down_executor(self) -> None:
        if self._foreign is None:
            if self._executor is not None:
                _kill(self._executor)  # ends the futures too: loky stumbles over those it finds cancelled
        else:
            for future in self._running:
                future.cancel()
            wait(self._running, timeout=_STOP_SECONDS)


def _shut_down(state: _State, thread: threading.Thread) -> None:
    with state.changed:
        state.stopping = True
        state.changed.notify_all()
    if thread is not threading.current_thread():  # the garbage collector may run in any
        thread.join(2 * _STOP_SECONDS)


def _kill(executor: Any) -> None:
    executor.shutdown(wait=True, kill_workers=True)


def _begin_worker(parent: int) -> None:
    """Tie a worker process to the pool's, which ends its workers in order; if it is killed, they are too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to be told
        os._exit(1)


_at_exit: weakref.WeakKeyDictionary[threading.Thread, _State] = weakref.WeakKeyDictionary()


def _shut_down_at_exit(state: _State, thread: threading.Thread) -> None:
    """Have a forgotten pool stopped before its executor waits, at exit, for tasks that have no end.

    Executors wait in `threading._register_atexit`, which runs long before `atexit`, last one first:
    so ours is registered after theirs, which happened at the latest when a task was submitted.
    """
    if thread not in _at_exit:
        _at_exit[thread] = state
        threading._register_atexit(_shut_down_all)  # type: ignore[attr-defined]


def _shut_down_all() -> None:
    for thread, state in list(_at_exit.items()):
        _shut_down(state, thread)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
