"""SamplerPool: keeps samplers drawing, one segment a task, on any executor.

`Pool` is the user's face of such work, on this host or on many: figures, waiting, the end. It owns
one thread, the dispatcher's. The engine runs and numbers tasks. Guarantees:
a task number is never given out twice for a (name, seed), by this pool, a concurrent or a later one, unless
samples are divided among tasks: then each is drawn until it is published; a task that keeps failing is given
up with its traceback while the others go on; `stop()` closes the samplers' generators, and ends in bounded
time; when the pool's process dies, in whatever way, its workers do the same by themselves. No sample crosses
the parent process.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from arrowcache.arguments import face
from arrowcache.display import Card, Facts, Shown
from arrowcache.errors import LoaderTimeoutError, SamplerError
from arrowcache.lifetimes import finalizer
from arrowcache.os_errors import start
from arrowcache.sampling.dispatcher import Dispatcher, Engine, PoolOptions, PoolState, drop, shut_down
from arrowcache.sampling.executors import ExecutorEngine
from arrowcache.sampling.reads import Sampler, seconds_of
from arrowcache.sampling.task import fitted
from arrowcache.storage.counters import ReadCounts
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.units import format_bytes, format_count, format_seconds, parse_count, parse_seconds

if TYPE_CHECKING:
    from typing import Self

#: Set by torchrun, Accelerate and Lightning; by srun; by mpirun of Open MPI; by that of Intel MPI and MPICH.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_SEEN_SECONDS = 1.0  # between two looks at the samplers' progress


@dataclass(frozen=True, slots=True)
class PoolStats(Shown):
    """Counts of a pool since it was started.

    `bytes` are of published segments' files, `seconds` since the start. `waiting_seconds` is the time that
    all workers waited for room, or for training as the cache's pace says. `retries` counts repeated attempts,
    `failures` tasks given up. `skipped` samples were left out of the tasks that are done, with
    on_error="skip". `drawn_rows` are in no published segment yet, counted at most a second ago, and
    `reads_at_work` are in threads then; those on other machines, as of Ray, are not counted: 0.

    The others are of tasks that are done. `usual_read_seconds` is the median of a read that a sampler yields
    or a source plans, `slow_read_seconds` the 99th percentile, both to some 5 %; 0.0 if there was none.
    `reads_done` gave something; `read_retries` are further attempts at reads, `hedges` reads begun once more
    as they took long.
    `fetched_bytes` came from the store: decoded chunks, row groups and ranges of ready sources, else what
    reads returned. All workers together drew for `drawing_seconds`, and waited for reads for
    `reading_seconds` of these, and had a processor for `cpu_seconds`; `advice` is drawn from them.
    """

    segments: int
    rows: int
    bytes: int
    seconds: float
    waiting_seconds: float
    retries: int
    failures: int
    drawn_rows: int = 0
    skipped: int = 0
    reads_at_work: int = 0
    usual_read_seconds: float = 0.0
    slow_read_seconds: float = 0.0
    read_retries: int = 0
    hedges: int = 0
    fetched_bytes: int = 0
    drawing_seconds: float = 0.0
    reading_seconds: float = 0.0
    cpu_seconds: float = 0.0
    reads_done: int = 0

    @property
    def advice(self) -> str:
        """Advice on how to draw faster. Empty: there is none, or the samplers wait for room."""
        return self._reads().advice

    def _card(self) -> Card:
        return Card("PoolStats", "", [Facts(self.facts())])

    def facts(self) -> list[tuple[str, str]]:
        """The counts of published segments first, then their cost, for display."""
        rate = ""
        if self.seconds:
            rate = f" ({format_bytes(self.bytes / self.seconds)}/s, {self.rows / self.seconds:,.1f} rows/s)"
        return [
            (
                "published",
                (
                    f"{format_count(self.segments, 'segment')}, {format_count(self.rows, 'row')}, "
                    f"{format_bytes(self.bytes)} in {format_seconds(self.seconds)}{rate}"
                ),
            ),
            *([("drawn, not published", format_count(self.drawn_rows, "row"))] if self.drawn_rows else []),
            *([("left out", format_count(self.skipped, "sample"))] if self.skipped else []),
            *([("reads", reads)] if (reads := self._reads().text) else []),
            ("waited to publish", f"{format_seconds(self.waiting_seconds)}, all workers together"),
            (
                "tasks",
                (
                    f"{format_count(self.retries, 'retry', 'retries')}, "
                    f"{format_count(self.failures, 'task')} given up"
                ),
            ),
            *([("advice", self.advice)] if self.advice else []),
        ]

    def _reads(self) -> ReadCounts:
        return ReadCounts(
            self.reads_at_work,
            self.usual_read_seconds,
            self.slow_read_seconds,
            self.read_retries,
            self.hedges,
            self.fetched_bytes / self.bytes if self.bytes else 0.0,
            self.drawing_seconds,
            self.reading_seconds,
            self.cpu_seconds,
            self.waiting_seconds,
            self.reads_done,
        )


class Pool:
    """Samplers at work, from construction until `stop()`. A context manager.

    Args:
        engine: runs the tasks; the pool ends it.
    """

    def __init__(self, engine: Engine, options: PoolOptions) -> None:
        self._state = PoolState()
        self._started = time.monotonic()
        self._segments = options.segments
        self._engine_at_work = engine.at_work
        self._seen, self._seen_at = (0, 0), 0.0
        self._reported = 0  # failures that were raised already
        thread: threading.Thread | None = None
        try:
            dispatcher = Dispatcher(self._state, engine, options)
            self._thread = thread = threading.Thread(
                target=dispatcher.run, name="arrowcache-pool", daemon=True
            )
            finalizer(self, drop, self._state, thread)
            start(thread)
        except BaseException:
            if thread is None or thread.ident is None:
                self._state.stopping = True
                engine.end()
            else:  # Ctrl-C: it may run already
                self._shut_down()
            raise

    def stats(self) -> PoolStats:
        """Return counts of published segments, and their cost; in a forked child, up to the fork."""
        if not self._state.origin.is_here:  # the lock may be held for ever
            return self._counted(0, 0)
        at_work = (0, 0) if self._state.finished else self._at_work()
        with self._state.lock:
            return self._counted(*at_work)

    def _at_work(self) -> tuple[int, int]:
        """Read progress in /proc at most once a second, since that takes milliseconds."""
        now = time.monotonic()
        if not self._seen_at or now - self._seen_at > _SEEN_SECONDS:
            with suppress(OSError):  # the folder is gone
                self._seen = self._engine_at_work()
            self._seen_at = now
        return self._seen

    def _counted(self, drawn_rows: int, reads_at_work: int) -> PoolStats:
        state = self._state
        counts = dict(state.counts)
        return PoolStats(
            segments=state.segments,
            rows=state.rows,
            bytes=state.nbytes,
            seconds=time.monotonic() - self._started,
            waiting_seconds=state.waiting_seconds,
            retries=state.retries,
            failures=state.failures,
            drawn_rows=drawn_rows,
            skipped=state.skipped,
            reads_at_work=reads_at_work,
            usual_read_seconds=seconds_of(counts, 0.5),
            slow_read_seconds=seconds_of(counts, 0.99),
            read_retries=int(counts.get("retries", 0)),
            hedges=int(counts.get("hedges", 0)),
            fetched_bytes=int(counts.get("fetched_bytes", 0)),
            drawing_seconds=counts.get("drawing_seconds", 0.0),
            reading_seconds=counts.get("reading_seconds", 0.0),
            cpu_seconds=counts.get("cpu_seconds", 0.0),
            reads_done=int(counts.get("reads", 0)),
        )

    def wait(
        self, segments: int | None = None, rows: int | None = None, timeout: float | None = None
    ) -> None:
        """Wait until this many segments and rows are published; without either, until all tasks are done.

        Early segments are small (see `SamplerPool`): pass `rows` for a number of rows.
        Blocks: at most `timeout` seconds. None means no limit.
        Raises: TimeoutError: not in time. SamplerError: tasks failed, so that the number cannot be reached.
            ValueError, TypeError: an argument that does not fit; neither is given, and the pool has no end;
            or this process was forked from its own.
        """
        segments = None if segments is None else parse_count(segments, "segments")
        rows = None if rows is None else parse_count(rows, "rows")
        timeout = parse_seconds(timeout, "timeout")
        self._state.origin.require("the pool", "make a new one here")
        asked = [
            format_count(count, name)
            for count, name in ((segments, "segment"), (rows, "row"))
            if count is not None
        ]
        if not asked and self._segments is None:
            raise ValueError(
                "this pool has no end: say wait(segments=...) or wait(rows=...), or make it with segments=..."
            )
        state = self._state

        def reached() -> bool:
            return bool(asked) and state.segments >= (segments or 0) and state.rows >= (rows or 0)

        with state.lock:
            in_time = state.changed.wait_for(lambda: state.finished or reached(), timeout)
            published = (
                f"{format_count(state.segments, 'segment')} and {format_count(state.rows, 'row')} published"
            )
            if not in_time:
                raise TimeoutError(
                    f"waited {timeout} s for {' and '.join(asked) or 'all tasks'}: {published}, "
                    f"{format_count(state.failures, 'task')} given up, "
                    f"{format_count(state.retries, 'retry', 'retries')}"
                )
            if not reached():
                self._raise_failures()
                if asked:
                    raise SamplerError(f"the pool ended with {published}, {' and '.join(asked)} waited for")

    def stop(self) -> None:
        """End the samplers, and discard their unpublished rows: no segment is published half. Idempotent.

        Where a task takes long, smaller segments (`Cache.create(segment_rows=...)`) lose fewer rows.
        Each sampler's generator is closed between two samples, in its own thread: its `finally` and `with`
        run, and so do the `atexit` functions of the pool's own processes. A process whose sampler gives no
        sample within 3 s has a SystemExit raised in the sampler; it is killed some 5 s after the stop. In a
        forked child this does nothing: the samplers are the parent's.
        Blocks: until the workers are gone, at most about 5 s; a task of a user's executor that
            does not yield within that time is left to end by itself, and publishes nothing.
        Raises: SamplerError: tasks were given up, and no `wait` raised that before.
        """
        if not self._state.origin.is_here:
            return
        self._shut_down()
        with self._state.lock:
            self._raise_failures()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, as `stop()`. An exception in the block goes on, as a rule.

        Raises: SamplerError: as `stop()`, after a block without exception, or with a LoaderTimeoutError as
            cause.
        """
        if kind is None:
            self.stop()
        elif not isinstance(error, LoaderTimeoutError):
            self._shut_down()  # the exception of the block tells more
        else:
            try:
                self.stop()
            except BaseException as failed:
                raise failed from error  # rows did not come since samplers failed

    def __repr__(self) -> str:
        _, published = self.stats().facts()[0]
        return f"<{type(self).__name__} published {published}>"

    def _shut_down(self) -> None:
        shut_down(self._state, self._thread)

    def _raise_failures(self) -> None:
        state = self._state
        if state.error is not None:
            error, state.error = state.error, None
            raise error
        if state.failures > self._reported:
            self._reported = state.failures
            retries = format_count(state.retries, "retry", "retries")
            raise SamplerError(
                f"{format_count(state.failures, 'task')} given up after "
                f"{retries if state.failures == 1 else f'{retries} of all tasks'}; the first:\n"
                f"{state.first_failure}"
            )


class SamplerPool(Pool):
    """Samplers at work on a cache, from construction until `stop()`. A context manager.

        def read(key):  # in one of `reads` threads of each worker
            return {"image": fetch(key)}

        def sample(rng):
            while True:
                yield partial(read, int(rng.integers(1_000_000)))

    So that a slow source gives its first rows in seconds, early tasks fill small segments. Task k ends at
    `full_rows >> max(0, 10 - k)` rows or `segment_bytes >> max(0, 10 - k)` bytes, whichever is first, with at
    least one row, where a full segment has `full_rows` rows. So ten segments are few rows: `wait(rows=...)`.

    Args:
        cache: a Cache, or the path of one.
        sample: `sample(rng) -> iterable of reads or samples`, a function or callable object that cloudpickle
            can pickle. It is unpickled once a worker. Task k's samples are a pure function of (sample, seed,
            k). Reads of a task begin while those of the one before end, unless `sample` sets attributes of
            its own as it draws. Lists, dicts and variables elsewhere that it changes are shared by both: keep
            what is of one task in the generator's variables.
            A sampler whose attribute `ramp` is False fills full segments from the start, as sources do
            that read whole groups of samples; one whose attribute `chunk_rows` is n fills small ones with a
            multiple of n rows, such as of what is read at once. Of one whose attribute `hedge` is True, as
            that of ParquetRows, a read that takes longer than 50 ms and four times the usual is begun once
            more in another thread, at most one in ten, and the first success counts: reads that change
            nothing may run twice.
        workers: number of tasks drawn at a time.
        seed: seed of the random streams.
        name: name of this pool's task numbers; a pool of the same name and seed goes on at the next, and
            draws before it what earlier pools of `Items`, or of `passes`, left undone. It has no part in the
            random streams: pools of other names draw the same samples, unless their seeds differ.
        executor: any concurrent.futures.Executor whose workers run on this host: a ThreadPoolExecutor or
            ProcessPoolExecutor, `loky.get_reusable_executor()`, Dask's `client.get_executor()`, an
            `mpi4py.futures.MPIPoolExecutor`. The pool does not shut it down, and ends if it breaks. None:
            processes of its own, which survive notebooks and kills.
        segments: number of tasks after which the pool stops by itself. None means no limit.
        retries: number of further attempts at a failing task, with backoff, before it is given up. After a
            failure that cannot pass there are none, and the pool ends at once: a sample that does not fit the
            schema or is no mapping, a sampler that yields nothing, takes no generator, or whose module is not
            found, a PermissionError.
        progress: show a bar. None shows one if stderr is a terminal.
        every_rank: allow a pool on each local rank of a distributed job. False allows it on the first only.
        reads: number of reads that a worker has at a time, in threads, where the sampler yields callables
            without arguments in place of samples: `yield partial(read, key)`. Each returns a mapping or
            `Rows`. A task has the same rows, in the order of yielding, whatever `reads` is.
        on_error: "raise"; or "skip": a sample that cannot be had is left out, and counted: in `stats`, and in
            the metadata of its segment. So is one whose read, or function of a `Map`, or item of `Items`,
            raises what will not pass, such as a file that is not found or bytes that do not decode, and one
            that is None or larger than a segment. What may pass fails the task, as do a refusal, a sample
            that does not fit the schema, a lack of memory, and what a generator itself raises, since it
            cannot go on. The pool ends once more than 1 % of its samples are left out, of 1,000 at least, or
            the first 100. A task's rows are then a function of (sample, seed, k) and of which samples fail.
    Raises: ValueError, TypeError: an argument that does not fit, a sampler that cannot be pickled, samples
        that earlier pools of this name and seed divided otherwise.
        ValueError: LOCAL_RANK, as torchrun, Accelerate and Lightning set it, says that this is not the first
        rank of its node: there it would be one pool a rank.
    """

    @face("SamplerPool")
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
        every_rank: bool = False,
        reads: int = 16,
        on_error: str = "raise",
    ) -> None:
        if not every_rank:
            _require_first_rank(workers)
        store = store_of(cache)
        if executor is not None and not isinstance(executor, Executor):
            raise TypeError(f"executor must be a concurrent.futures.Executor or None, not {executor!r}")
        sample = fitted(sample, store.settings.form)
        options = PoolOptions(sample, workers, seed, name, segments, retries, progress, reads, on_error)
        super().__init__(ExecutorEngine(store, options, executor), options)


def _require_first_rank(workers: int) -> None:
    """Raise ValueError in a script that would start a pool on each rank of a node."""
    name = next((name for name in _LOCAL_RANKS if os.environ.get(name, "").isdecimal()), "")
    if name and int(os.environ[name]) > 0:
        raise ValueError(
            f"this is local rank {os.environ[name]}, and the script runs once a rank: a pool on each would "
            f"have {format_count(workers, 'worker')} for every rank. Make one where "
            f"int(os.environ['{name}']) == 0, and "
            "contextlib.nullcontext() in its place on the other ranks, whose loaders read what it publishes; "
            "or pass every_rank=True"
        )
