"""Task: draws one segment and publishes it. Runs in a worker process of any executor.

The content of task k is a pure function of (sampler, seed, k): its generator is
`default_rng(SeedSequence(seed, spawn_key=(k,)))`. Early tasks fill small segments, so that a slow source
gives its first rows in seconds: see `size_of`. A sampler that ends early is called again with
the same generator. A task that fails or is told to stop publishes nothing; a task that ran twice is published
once, because publishing drops a segment whose task is listed already. A pool may leave out samples that
cannot be had: then the content also depends on which these are, and the segment says how many.

A task stops when its pool does. The pool holds a lock on one byte of its file in pools/, which the kernel
drops in whatever way the pool ends; the task looks at the lock a few times a second, between two samples.
However a task ends, it closes its generator first, in the thread that drew from it: `finally` and `with` run.
"""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form
from arrowcache.errors import CacheFormatError, SamplerError, SchemaError, sentence_of
from arrowcache.lifetimes import at_fork
from arrowcache.os_errors import explaining
from arrowcache.pickling import CANNOT_UNPICKLE, unpickled
from arrowcache.sampling.mixture import streams_of
from arrowcache.sampling.reads import (
    Counts,
    Rows,
    Sampler,
    Threads,
    seconds_of,
)
from arrowcache.sampling.retries import is_marked, is_refusal, mark_permanent
from arrowcache.sampling.samples import MAX_EMPTY_CALLS, Samples, yielded_nothing
from arrowcache.storage.counters import ReadCounts, SamplerPage
from arrowcache.storage.layout import alive_byte
from arrowcache.storage.locks import LockFile
from arrowcache.storage.recovery import open_store
from arrowcache.storage.store import Cancelled, RoomPolicy, Store
from arrowcache.units import format_count

ON_ERROR = ("raise", "skip")  # ways to go on after an error of one sample
_LOOK_SECONDS = 0.2
_SOURCES = "arrowcache.sampling.sources."  # modules of classes that keep nothing of a task
_EMPTY_ROWS = 10_000  # of a call in a row, before the task fails
_RAMP_TASKS = 10  # tasks with less than a full segment, each with at most half of the next one's rows
_JUDGED_DRAWS = 1000  # of a pool, from which on one in a hundred may be left out
_MAX_IN_VAIN = 100  # left out before any was had


class Size(NamedTuple):
    """The end of a segment: this number of rows or of bytes, whichever comes first; at least one row."""

    rows: int
    nbytes: int


def size_of(
    number: int, full_rows: int, segment_bytes: int, *, ramp: bool = True, chunk_rows: int = 1
) -> Size:
    """Return the size of task `number`'s segment, in a cache with full segments of these rows and bytes.

    Args:
        ramp: False means a full segment, as for a sampler whose attribute `ramp` is False.
        chunk_rows: as the sampler's attribute: a smaller segment has a multiple of so many rows.
    """
    halvings = max(0, _RAMP_TASKS - number) if ramp else 0
    rows, nbytes = max(1, full_rows >> halvings), max(1, segment_bytes >> halvings)
    if not rows % chunk_rows:
        return Size(rows, nbytes)
    whole = min(full_rows, rows + -rows % chunk_rows)
    return Size(whole, max(nbytes, -(-segment_bytes * whole // full_rows)))


@dataclass(frozen=True, slots=True)
class Task:
    """The description of a task for a worker: plain values, pickled small.

    `sampler` is the pickled sampler, or empty for a worker that has it. A worker knows it by `digest`; if it
    lacks it, it says so, and is sent the task again. So the sampler is sent about once a worker.
    `pool` is "<name>.<seed>", the file in pools/; `token` the byte of it that the pool locks; `tries`
    attempts that failed before: Dask answers a call equal to an earlier one with that one's result.
    `ramp`: early tasks fill small segments, of a multiple of `chunk_rows`. `reads`: of a worker at a time.
    `skips`: samples that cannot be had are left out; `drawn` and `skipped` are the pool's, of tasks that were
    done before this one began.
    """

    cache: str
    sampler: bytes
    pool: str
    seed: int
    number: int
    token: int
    tries: int = 0
    ramp: bool = True
    chunk_rows: int = 1
    digest: bytes = b""
    reads: int = 16
    skips: bool = False
    drawn: int = 0
    skipped: int = 0

    @property
    def task_name(self) -> str:
        """The name of the task, which is part of its segment's name."""
        return f"{self.pool}.{self.number}"

    def size(self, form: Form) -> Size:
        """Return the size of its segment."""
        full = form.full_rows, form.segment_bytes
        return size_of(self.number, *full, ramp=self.ramp, chunk_rows=self.chunk_rows)


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a task.

    `rows` is 0 if it was stopped or failed, or has none. `error` is the traceback of its exception: as text,
    because not every exception survives the way back to the pool's process. `permanent`: trying again would
    end in the same way; a store that refuses may even lock the account in the end.
    `lacks_sampler`: nothing was done, as the worker lacks the sampler. Of `drawn` samples `skipped` were left
    out, the last for `fault`. `counts`: see reads.py.
    """

    number: int
    rows: int = 0
    nbytes: int = 0
    waiting_seconds: float = 0.0
    stopped: bool = False
    error: str = ""
    permanent: bool = False
    lacks_sampler: bool = False
    drawn: int = 0
    skipped: int = 0
    fault: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)


_samplers: OrderedDict[bytes, bytes] = OrderedDict()  # digest -> pickled sampler, of the process
_samplers_lock = threading.Lock()
_MAX_SAMPLERS = 8


def _renew_lock() -> None:
    global _samplers_lock
    _samplers_lock = threading.Lock()


at_fork(in_child=_renew_lock)


def _pickled_sampler(task: Task) -> bytes | None:
    """Return the sampler of a task, or of an earlier one with its digest, or None."""
    if task.sampler and not task.digest:
        return task.sampler
    with _samplers_lock:
        if task.sampler:
            _samplers[task.digest] = task.sampler
        if task.digest not in _samplers:
            return None
        _samplers.move_to_end(task.digest)
        while len(_samplers) > _MAX_SAMPLERS:
            _samplers.popitem(last=False)
        return _samplers[task.digest]


def failure(task: Task, error: BaseException) -> Done:
    """Return an error as the result of a task, with its traceback."""
    text = "".join(traceback.format_exception(error))
    return Done(task.number, error=text, permanent=is_permanent(error))


#: Errors of which another try would only be one more, whoever raised them.
_PERMANENT = (SchemaError, CacheFormatError, PermissionError, ImportError)
_CANNOT_TAKE = (SamplerError, TypeError, ValueError)


def is_permanent(error: BaseException) -> bool:
    """True if trying again would end in the same way. A sampler's own errors may pass, but for refusals."""
    return isinstance(error, _PERMANENT) or is_marked(error) or is_refusal(error)


def require_policy(on_error: object) -> None:
    """Raise ValueError: it is no way to go on after an error."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r} is unknown: use {' or '.join(map(repr, ON_ERROR))}")


def fitted(sample: Sampler, form: Form) -> Sampler:
    """Return a sampler for segments of a form: a source that is divided among tasks asks for that."""
    fit = getattr(sample, "fitted", None)
    return sample if fit is None else fit(form)


def sampler_of(data: bytes) -> Sampler:
    """Unpickle a sampler. Raises: any Exception, those of a sampler that does not fit here as permanent."""
    try:
        sampler: Sampler = unpickled(data)
    except CANNOT_UNPICKLE as error:
        mark_permanent(error)
        raise
    return sampler


class _Worker:
    """State that a worker keeps between tasks: the unpickled sampler, the open cache, the builder."""

    def __init__(self, task: Task, sampler: bytes) -> None:
        self._key = (task.cache, sampler)
        self.sampler = sampler_of(sampler)
        self.store: Store = open_store(Path(task.cache), check="structure")
        self._identity, self._form = self.store.identity, self.store.settings.form
        self.builder = SegmentBuilder(self._form)
        self._threads = Threads(task.reads)
        self._ahead: tuple[Task, Samples] | None = None
        self._attributes: dict[tuple[int, str], object] = {}
        self._shown: tuple[str, int] | None = None
        self._page: SamplerPage | None = None
        self._looked, self._has_pool_ended = 0.0, False  # at the pool of the task that it draws

    def show_reads(self) -> None:
        """Show what its reads do, to `pool.stats()` and the monitors."""
        if self._page is not None:
            numbers, of_done = self._threads.counts.copy()
            drawn = of_done["drawn_bytes"]
            self._page.show_reads(
                ReadCounts(
                    self._threads.at_work,
                    seconds_of(numbers, 0.5),
                    seconds_of(numbers, 0.99),
                    numbers["retries"],
                    numbers["hedges"],
                    of_done["fetched_bytes"] / drawn if drawn else 0.0,
                    of_done["drawing_seconds"],
                    of_done["reading_seconds"],
                    of_done["cpu_seconds"],
                    of_done["waiting_seconds"],
                    int(numbers["reads"]),
                )
            )

    def has_pool_ended(self, task: Task) -> bool:
        """True if the pool of a task has ended. It looks a few times a second, and shows its reads then."""
        now = time.monotonic()
        if not self._has_pool_ended and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self.show_reads()
            with explaining(self.store.folder.path):
                self._has_pool_ended = not self._is_alive(task)
        return self._has_pool_ended

    def _is_alive(self, task: Task) -> bool:
        """True if the pool of a task holds its lock."""
        try:
            file = LockFile(self.store.folder.pools / task.pool)
        except FileNotFoundError:  # the cache is gone
            return False
        with file:
            return file.conflict(alive_byte(task.token), 1) is not None

    def page_of(self, task: Task) -> SamplerPage:
        pool = task.pool, task.token
        if self._page is None or self._shown != pool:
            self._page = SamplerPage.open(self.store.folder.path, *pool)
            self._shown = pool
        return self._page

    def begun(self, task: Task) -> Samples:
        """Return the samples of a task, which may have begun ahead."""
        self._looked, self._has_pool_ended = 0.0, False
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0].number == task.number:
                return ahead[1]
            ahead[1].close()
        self._attributes = attributes_of(self.sampler)
        return samples_of(self.sampler, task, self._threads, self._form)

    def begin_ahead(self, ask: Callable[[], Task | None]) -> None:
        """Begin reads of the next task, if there is one and threads for them.

        Not if the sampler has set attributes since the last task that was not begun ahead: the next call of
        the sampler would set them anew, and this task would go on with those.
        """
        if self._ahead is None:
            before, now = self._attributes, attributes_of(self.sampler)
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in now):
                return
            task = ask()
            if task is None:
                return
            self._ahead = task, samples_of(self.sampler, task, self._threads, self._form)
        task, samples = self._ahead
        samples.begin(task.size(self._form).rows)

    @property
    def are_reading(self) -> bool:
        return self._threads.are_reading

    def close_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].close()

    def is_for(self, task: Task, sampler: bytes) -> bool:
        """True if a task's cache is still the open one: another cache may have its path by now."""
        if (task.cache, sampler) != self._key or task.reads != self._threads.count:
            return False
        if not self._threads.origin.is_here:  # its threads are the parent's
            return False
        try:
            with explaining(self.store.folder.path):
                self.store.refresh_settings()
                return self.store.identity == self._identity and self.store.settings.form == self._form
        except (FileNotFoundError, CacheFormatError):  # opening it anew repairs it, or says why not
            return False


def attributes_of(sampler: object) -> dict[tuple[int, str], object]:
    """Return the attributes of a sampler, and of samplers and functions that it holds, by object and name.

    Equal objects are told apart by `is`; no array is kept alive. Left out are attributes of this library's
    sources, which are of no task, and `drawn`, noted with each sample.
    """
    found: dict[tuple[int, str], object] = {}
    left: list[Any] = [sampler]
    seen: set[int] = set()
    while left:
        thing = left.pop()
        if isinstance(thing, MethodType):
            left.append(thing.__self__)
        elif isinstance(thing, partial):
            left += [thing.func, *thing.args, *thing.keywords.values()]
        elif id(thing) not in seen and hasattr(thing, "__dict__") and not isinstance(thing, type):
            seen.add(id(thing))
            is_ours = type(thing).__module__.startswith(_SOURCES)
            for name, value in dict(vars(thing)).items():
                if not is_ours and name != "drawn":
                    found[id(thing), name] = value
                    with suppress(TypeError):  # of a type without weak references
                        found[id(thing), name] = weakref.ref(value)  # one object has one
                inner = value if isinstance(value, list | tuple) else [value]
                if inner and callable(inner[0]):
                    left += inner
    return found


_of_thread = threading.local()  # .worker: one a thread, since an executor may run tasks in threads


def run(task: Task, ask: Callable[[], Task | None] | None = None) -> Done:
    """Draw and publish one segment; an error of the sampler, or of a sample, is returned in the result.

    Args:
        ask: returns the task that this thread runs next, if there is one now. Its reads begin once none of
            this one's is left to begin.
    """
    try:
        return _run(task, ask)
    except Exception as error:  # noqa: BLE001  # a sampler may raise anything
        return failure(task, error)


def close_ahead() -> None:
    """Close the sampler of a task that `run` has begun ahead and that will not run."""
    worker: _Worker | None = getattr(_of_thread, "worker", None)
    if worker is not None:
        worker.close_ahead()


def are_reading() -> bool:
    """True if reads of this thread's tasks are at work, given up or not."""
    worker: _Worker | None = getattr(_of_thread, "worker", None)
    return worker is not None and worker.are_reading


def _run(task: Task, ask: Callable[[], Task | None] | None) -> Done:
    sampler = _pickled_sampler(task)
    if sampler is None:
        return Done(task.number, lacks_sampler=True)
    worker: _Worker | None = getattr(_of_thread, "worker", None)
    if worker is None or not worker.is_for(task, sampler):
        close_ahead()
        worker = _of_thread.worker = _Worker(task, sampler)
    page = worker.page_of(task)
    samples = worker.begun(task)

    def check() -> None:
        if worker.has_pool_ended(task):
            raise Cancelled

    def go_on() -> None:
        check()
        if ask is not None and samples.has_reads:
            worker.begin_ahead(ask)

    try:
        drawn = draw(samples, task, worker.builder, check, go_on, page)
        if not worker.builder.rows:
            with worker.store.locked():
                worker.store.folder.end_task(task.pool, task.number)
            return drawn.done(0, 0)
        encoded = worker.builder.encode(drawn.skipped)
        go_on()

        def is_cancelled() -> bool:  # called while there is no room
            page.wait()
            return worker.has_pool_ended(task)

        policy = RoomPolicy("wait", is_cancelled=is_cancelled, in_background=True)
        published = worker.store.publish(encoded, task.task_name, policy)
    except Cancelled:
        return Done(task.number, stopped=True)
    finally:
        page.end()
    # Also if `published` has no segment: then a worker died between publishing it and its answer.
    return drawn.done(encoded.rows, encoded.nbytes, published.waiting_seconds)


def samples_of(sampler: Sampler, task: Task, threads: Threads, form: Form) -> Samples:
    """Return task k's samples, of which none is drawn yet. Gives pyarrow as many I/O threads as reads."""
    pa.set_io_thread_count(max(threads.count, pa.io_thread_count()))
    rng = np.random.default_rng(np.random.SeedSequence(task.seed, spawn_key=(task.number,)))
    rows = task.size(form).rows
    return Samples(streams_of(sampler, rng, threads, form.segment_bytes, rows, skips=task.skips), threads)


def require_few(drawn: int, skipped: int, fault: str) -> None:
    """Make sure that few of a pool's samples are left out.

    Args:
        drawn: samples, `Rows` and reads; those that were left out, too.
        fault: why the last one was.
    Raises: SamplerError: too many were.
    """
    if 100 * skipped > drawn if drawn >= _JUDGED_DRAWS else skipped == drawn >= _MAX_IN_VAIN:
        raise mark_permanent(
            SamplerError(
                f"{skipped:,} of {format_count(drawn, 'sample')} cannot be had, and on_error='skip' leaves "
                "out at most 1 %: "
                f"find out what is wrong, or have the sampler draw from what is there. The last: {fault}"
            )
        )


class TaskCounts:
    """Counts of what a task has drawn, in this thread."""

    def __init__(self, task: Task, counts: Counts) -> None:
        self._task, self._counts = task, counts
        self._began = time.monotonic(), time.thread_time()
        self.count = self.skipped = 0
        self._fault = ""

    def leave_out(self, error: Exception, name: str) -> None:
        """Count a sample that cannot be had. Raises: SamplerError: there are too many."""
        self.count += 1
        self.skipped += 1
        self._fault = f"{name and f'{name}: '}{type(error).__name__}: {sentence_of(error)}"
        try:
            require_few(self._task.drawn + self.count, self._task.skipped + self.skipped, self._fault)
        except SamplerError as too_many:
            raise too_many from error

    def done(self, rows: int, nbytes: int, waiting_seconds: float = 0.0) -> Done:
        """Return the result of the task, of whose segment these are."""
        wall, of_cpu = self._began
        seconds = time.monotonic() - wall - waiting_seconds
        self._counts.add(drawing_seconds=seconds, waiting_seconds=waiting_seconds, drawn_bytes=nbytes)
        self._counts.add(cpu_seconds=time.thread_time() - of_cpu)
        return Done(
            self._task.number,
            rows,
            nbytes,
            waiting_seconds,
            drawn=self.count,
            skipped=self.skipped,
            fault=self._fault,
            counts=self._counts.taken(),
        )


def draw(
    samples: Samples,
    task: Task,
    builder: SegmentBuilder,
    check: Callable[[], None],
    go_on: Callable[[], None],
    page: SamplerPage | None = None,
) -> TaskCounts:
    """Fill a builder with task k's samples, from the first on, and close these.

    Args:
        check: called before each sample, and may raise.
        go_on: called in its place while a sample is read, and none is left to begin: see `Samples.take`.
        page: counts each row.
    Returns: the counts. The builder is empty if a divided task has no sample, such as after a filter.
    Raises: SamplerError: the sampler yields nothing, or no mapping. SchemaError: a sample does not fit; it is
        named, if the sampler's attribute `drawn` does. What the sampler and its reads raise.
    """
    form = builder.form
    builder.clear(*task.size(form))
    if page is not None:
        page.begin(task.number, builder.expected_rows)
    empty_calls, empty_rows, has_rows, drawn = 0, 0, False, TaskCounts(task, samples.counts)

    def leave_out(fault: Exception) -> None:
        drawn.leave_out(fault, samples.drawn)
        if page is not None:
            page.skip()

    try:
        while empty_calls < MAX_EMPTY_CALLS:
            check()
            sample = samples.take(builder.expected_rows - builder.rows, go_on)
            if sample is None:  # a call has ended
                if samples.are_divided:
                    return drawn
                empty_calls, has_rows = (0 if has_rows else empty_calls + 1), False
                continue
            if isinstance(sample, Exception):
                leave_out(sample)
                has_rows = True
                continue
            taken = builder.rows
            try:
                rows = builder.convert(sample, many=isinstance(sample, Rows))
            except (TypeError, ValueError) as error:  # such as a text that has no bytes
                mark_permanent(error, is_fault=True)
                if not task.skips:
                    raise
                leave_out(error)
                has_rows = True
                continue
            try:
                has_rows |= rows.count > 0
                drawn.count += rows.count > 0
                empty_rows = 0 if rows.count else empty_rows + 1
                if empty_rows == _EMPTY_ROWS and not samples.are_divided:
                    raise SamplerError(f"the sampler yielded Rows without a row {_EMPTY_ROWS} times in a row")
                is_full = builder.take(rows, 0) < rows.count or builder.is_full
            except _CANNOT_TAKE as error:
                mark_permanent(error)
                raise
            if page is not None and rows.count:
                page.count(builder.rows, builder.expected_rows)
            if is_full and samples.are_divided and (builder.rows < taken + rows.count or samples.has_more()):
                raise mark_permanent(
                    SamplerError(
                        f"task {task.number}'s samples do not fit a segment, which has {builder.rows} of "
                        "them: create the cache with fewer segment_rows; Items also takes fewer segment_items"
                    )
                )
            if is_full:
                return drawn  # samples that no longer fit are dropped: the next task draws anew
    except SchemaError as error:
        if not samples.drawn:
            raise
        raise SchemaError(f"{samples.drawn}: {error}") from None
    finally:
        samples.close()
    raise yielded_nothing("the sampler")
