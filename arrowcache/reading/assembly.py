"""Assembly: makes the batches of an epoch, group by group, in slots that it lends.

A `BatchGroup` is some batches that are begun together, and a `ReadyBatch` one of them once it is made, with
its counts. An epoch is cut into groups, in step order; stream.py decides when they are begun, waits for
them, or ends them. A batch that is one run of rows of one segment is a zero-copy view, where the order has
such runs. Every other batch is gathered into a slot by the engine's threads; small batches of a group share
one. Where there is a transform, `WorkerThreads` gather and transform. workers/pool.py has worker
processes do it.

Rows that may be on the disk are asked for before they are needed: some hundred rows ahead where they come
in any order, some megabytes ahead where they come in order.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.columns import Columns, RowMemory, column_bytes, rows_of
from arrowcache.reading.gather import PendingRead, ReadMode
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.shuffle import Shuffle
from arrowcache.reading.slots import GivenArrays, Slots, page_aligned
from arrowcache.reading.stats import Meter
from arrowcache.reading.worker_threads import Future, WorkerThreads
from arrowcache.storage.store import Store

if TYPE_CHECKING:
    from arrowcache.reading.epoch import Epoch
    from arrowcache.reading.packing import Within


class ReadyBatch(NamedTuple):
    """A batch ready for delivery, with its counts.

    `batch` is a dict of columns, or the result of a transform. `published` is the mean time at which its
    rows were published, in seconds since 1970. `epoch` made it. `steps` of its
    order are over with it: one, but for sequences of sequences.py, which also say how far the epoch is
    `within` a bundle.
    """

    batch: Any
    rows: int
    nbytes: int
    copied: int
    published: float
    epoch: Any
    steps: int = 1
    within: Within | None = None


class BatchGroup:
    """Batches that were begun. One thread at a time calls its methods.

    In this base class nothing is under way: `made` makes the batches.
    """

    is_in_parts = False  # it has a second part, which `advance` begins
    is_made_by_consumer = False  # nobody else makes it, however long that takes: it counts as ready

    def __init__(self, epoch: Any, batches: int) -> None:
        self.epoch, self.batches = epoch, batches

    def take(self, seconds: float) -> bool:  # noqa: ARG002
        """Wait for its end, at most this many seconds. Returns: True if it has ended."""
        return True

    def advance(self) -> None:
        """Begin its second part, if the first has ended; returns at once."""

    def made(self) -> Iterable[ReadyBatch]:
        """Yield the batches, once it has ended. Raises: an error of their making, after earlier batches."""
        return ()

    def cancel(self, seconds: float | None = None) -> bool:  # noqa: ARG002
        """End it as `PendingRead.cancel`. Idempotent. 0 seconds: begin no more."""
        return True


class RemoteBatches(BatchGroup):
    """Batches that a worker thread or process makes.

    Args:
        finish: makes the batches of the result.
        keep: object kept alive until then.
    """

    def __init__(
        self,
        epoch: Epoch,
        batches: int,
        future: Future[Any],
        finish: Callable[[Any], Iterable[ReadyBatch]],
        keep: object = None,
    ) -> None:
        super().__init__(epoch, batches)
        self.future, self._finish, self._keep = future, finish, keep

    def take(self, seconds: float) -> bool:
        return self.future.wait(seconds)

    def made(self) -> Iterable[ReadyBatch]:
        future, self.future = self.future, _NOTHING  # an error's traceback has this frame: a cycle
        try:
            return self._finish(future.result())
        finally:
            del future

    def cancel(self, seconds: float | None = None) -> bool:  # noqa: ARG002
        self.future.cancel()
        return True


_NOTHING: Future[Any] = Future()
_NOTHING.set_result(None)


Batch = dict[str, Any]

_VIEWS = 8  # batches over one mapping
_AGE_ROWS = 64  # rows drawn at once whose age is looked up
_DRAWN_ROWS = 4096  # rows of the order drawn at once
_MAX_FETCHED = 64  # batches
_MAX_BATCHES = 256  # of a group
_ELEMENTS_UNDER_GIL = 500
_GROUP_BYTES = 512 << 10  # of small batches: a slot and a job cost as much as copying this
_READ_AHEAD_BYTES = 8 << 20  # asked of the disk before a reader in order comes there
_READ_AHEAD_SHARE = 1.25  # of the rows up to a group's end, while the window's next segments are read


class Memory(NamedTuple):
    """The memory for batches: an allocator of `Slots`, and the size of small batches side by side."""

    allocate: Callable[[int], NDArray[np.uint8]] = page_aligned
    group_bytes: int = _GROUP_BYTES


MEMORY = Memory()


class Assembly(ABC):
    """Makes the batches of a loader's epochs, in slots of its own. By itself it runs and leases nothing."""

    slots: Slots
    _new_slots: Callable[[], Slots]

    def prepare(self) -> None:  # noqa: B027  # nothing to do is usual
        """Start what makes them, as an epoch is wanted soon; returns at once."""

    @abstractmethod
    def wanted(self) -> int:
        """Return the number of batches to keep under way or ready."""

    @abstractmethod
    def groups(self, epoch: Any, *, awaited: bool) -> Iterator[BatchGroup]:
        """Yield an epoch's batches, cut into groups; each `next` begins one.

        Args:
            awaited: True if somebody waits for the first.
        """

    @abstractmethod
    def require_views(self) -> None:
        """Raise ValueError for each batch from now on that cannot be a view, or here if none can."""

    def slot_stats(self) -> tuple[int, int]:
        """Return the bytes of memory for batches, and how often some was added."""
        return self.slots.allocated_bytes, self.slots.growths

    def in_progress(self) -> list[tuple[str, float]]:
        """Return the stages of other processes and their starts."""
        return []

    def drop(self) -> None:  # noqa: B027  # nothing to do is usual
        """Release leases on epochs that ended."""

    def after_fork(self) -> None:
        """Begin anew in a forked child: another thread may have held the old slots."""
        self.slots = self._new_slots()

    def close(self) -> None:  # noqa: B027  # nothing to do is usual
        """End threads and processes. Idempotent. Blocks: at most some seconds."""

    def _lend_slots(
        self,
        columns: Mapping[str, RowMemory],
        rows: int,
        ahead: int,
        allocate: Callable[[int], NDArray[np.uint8]],
    ) -> None:
        """Have slots as of `Slots`."""
        self._new_slots = partial(Slots, columns, rows, ahead, allocate)
        self.slots = self._new_slots()


class RowAssembly(Assembly):
    """Makes batches of a cache's rows."""

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter, memory: Memory = MEMORY) -> None:
        self.columns, self.meter = Columns.of(store.settings.schema, options.names), meter
        self._options, self._batch_size = options, options.most_rows
        self._makes_views = options.views and bool(self.columns.viewed.names)
        self._views_required = False
        # of the last batch made
        self._batch_rows = self._batch_size
        self._batch_bytes = max(1, self.columns.row_bytes * self._batch_size)
        self._threads = self._new_threads()
        self.read_mode = ReadMode()
        most = 1
        if self._threads is None and self._makes_views:
            most = min(_VIEWS, _READ_AHEAD_BYTES // self._batch_bytes)
        elif self._threads is None and self.columns.are_fixed and options.budget is None:
            most = min(_MAX_BATCHES, memory.group_bytes // self._batch_bytes)
        self._most_batches = max(1, most)  # batches of a group; copied ones lie side by side
        rows = self._batch_size * (1 if self._makes_views else self._most_batches)
        rows = rows if options.budget is None else 0  # 0: any number
        self._lend_slots(self.columns.memory, rows, self.wanted(), memory.allocate)

    def _new_threads(self) -> WorkerThreads | None:
        return None if self._options.transform is None else WorkerThreads(max(1, self._options.workers))

    def wanted(self) -> int:
        workers, prefetch = self._options.workers, self._options.prefetch
        if prefetch is not None:
            return prefetch + max(1, workers)
        usual = self.read_mode.batches_ahead(self._batch_rows, self._batch_bytes)
        if self._makes_views:  # which cost no memory ahead
            usual = max(usual, self._most_batches + min(_MAX_FETCHED, _READ_AHEAD_BYTES // self._batch_bytes))
        return usual + workers

    def after_fork(self) -> None:
        super().after_fork()
        self._threads = self._new_threads()

    def groups(self, epoch: Epoch, *, awaited: bool) -> Iterator[BatchGroup]:
        epoch.snapshot.read_mode = self.read_mode
        order, step, size = epoch.order, 0, 1 if awaited else self._most_batches
        read_ahead = ReadAhead(epoch, self.columns.names)
        while step < order.steps:  # small groups first; then many batches' ids at once
            batches = size if size < self._most_batches else max(size, _DRAWN_ROWS // self._batch_size)
            end, first = min(step + batches, order.steps), 0
            drawn = order.batches(step, end)
            published = mean_published(epoch, drawn)
            while step < end:
                last = min(step + size, end)
                count = order.rows_of(range(step, last))
                rows = BatchRows(epoch, drawn[first : first + count], published)
                yield self._begin(rows, last - step, read_ahead.before(step, rows.ids))
                step, first = last, first + count
            size = min(2 * size, self._most_batches)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def require_views(self) -> None:
        self._views_required = True

    def _begin(self, rows: BatchRows, batches: int, fetched: Sequence[PendingRead]) -> BatchGroup:
        if self._threads is not None:
            made = self._threads.submit(partial(self._transformed, rows))
            return RemoteBatches(rows.epoch, batches, made, iter, fetched)
        if self._makes_views:
            return _Viewed(self, rows, batches, fetched)
        ids = rows.ids
        read = rows.epoch.snapshot.read(ids, self.columns, self.slots.lend(len(ids)))
        return Gathered(self, rows, batches, fetched, read)

    def _transformed(self, rows: BatchRows) -> list[ReadyBatch]:
        (made,) = self.made(rows)
        assert self._options.transform is not None
        with self.meter.stage("transform"):
            return [made._replace(batch=self._options.transform(made.batch))]

    def made(self, rows: BatchRows) -> Iterator[ReadyBatch]:
        """Yield batches without a transform, made by this thread; those before a failed one come first."""
        if not self._makes_views:
            yield self._copied(rows)
            return
        for some, is_run in self._runs(rows.ids):
            part = rows._replace(ids=some)
            if is_run:
                yield from self._viewed(part)
            else:
                yield self._copied(part)

    def _copied(self, rows: BatchRows) -> ReadyBatch:
        if self._views_required:
            raise ValueError(
                "assert_zero_copy() was called, and this batch needs a copy: its rows lie in several "
                "segments, or too many views are alive; choose batch_size to divide the segments' rows"
            )
        slot = self.slots.lend(len(rows.ids))
        with self.meter.reading(self.read_mode):
            columns = rows.epoch.snapshot.gather_into(rows.ids, self.columns, slot)
            return self._complete(rows, columns, is_copied=True)

    def _runs(self, ids: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """Yield successive rows of several batches together, else the rows of one batch."""
        size, breaks, first = self._batch_size, _breaks(ids), 0
        while first < len(ids):
            following = bisect_right(breaks, first)
            end = breaks[following] if following < len(breaks) else len(ids)
            stop = end if end == len(ids) else end - (end - first) % size
            is_run = stop > first
            if not is_run:
                stop = min(first + size, len(ids))
            yield ids[first:stop], is_run
            first = stop

    def _viewed(self, rows: BatchRows) -> Iterator[ReadyBatch]:
        """Yield batches of one run of rows: views where they are of one segment, else copies."""
        ids, size = rows.ids, self._batch_size
        with self.meter.reading(self.read_mode):
            view = rows.epoch.snapshot.view(int(ids[0]), len(ids), self.columns, is_fetched=True)
        if view is not None:
            yield from self.cut(rows, view, is_copied=False)
        elif len(ids) > size:
            middle = -(-len(ids) // size) // 2 * size
            yield from self._viewed(rows._replace(ids=ids[:middle]))
            yield from self._viewed(rows._replace(ids=ids[middle:]))
        else:
            yield self._copied(rows)

    def cut(self, rows: BatchRows, whole: dict[str, Any], *, is_copied: bool) -> Iterable[ReadyBatch]:
        """Return batches that lie side by side."""
        size, count = self._batch_size, len(rows.ids)
        if count <= size:
            return (self._complete(rows, whole, is_copied=is_copied),)
        if self._options.with_ids or not self.columns.are_fixed or len(whole) < len(self.columns.names):
            return self._cut_each(rows, whole, is_copied=is_copied)
        row_bytes, copied = self.columns.row_bytes, self.columns.row_bytes if is_copied else 0
        self._batch_rows, self._batch_bytes = size, max(1, size * row_bytes)
        starts = range(0, count, size)
        cuts = [[array[at : at + size] for at in starts] for array in whole.values()]  # few calls for all
        return [
            ReadyBatch(
                dict(zip(whole, arrays, strict=True)),
                n,
                n * row_bytes,
                n * copied,
                rows.published,
                rows.epoch,
            )
            for *arrays, n in zip(*cuts, [min(size, count - at) for at in starts], strict=True)
        ]

    def _cut_each(self, rows: BatchRows, whole: dict[str, Any], *, is_copied: bool) -> Iterator[ReadyBatch]:
        size = self._batch_size
        for first in range(0, len(rows.ids), size):
            of_batch = slice(first, first + size)
            columns = {name: rows_of(column, of_batch) for name, column in whole.items()}
            yield self._complete(rows._replace(ids=rows.ids[of_batch]), columns, is_copied=is_copied)

    def _complete(self, rows: BatchRows, columns: dict[str, Any], *, is_copied: bool) -> ReadyBatch:
        """Add the columns that cannot be views, and the origin of the rows."""
        epoch, ids, published = rows
        batch: Batch = columns
        if self.columns.are_fixed:
            nbytes = len(ids) * self.columns.row_bytes
        else:
            nbytes = sum(map(column_bytes, columns.values()))
        copied_bytes = nbytes if is_copied else 0
        if len(columns) < len(self.columns.names):
            others = self.columns.copied
            slot = GivenArrays({}) if not others.memory else self.slots.lend(len(ids))
            values = epoch.snapshot.gather_into(ids, others, slot)
            more = sum(map(column_bytes, values.values()))
            nbytes, copied_bytes = nbytes + more, copied_bytes + more
            batch = {name: columns[name] if name in columns else values[name] for name in self.columns.names}
        self._batch_rows, self._batch_bytes = max(1, len(ids)), max(1, nbytes)
        if self._options.with_ids:
            batch |= epoch.snapshot.locate(ids)
        return ReadyBatch(batch, len(ids), nbytes, copied_bytes, published, epoch)


class BatchRows(NamedTuple):
    epoch: Epoch
    ids: NDArray[np.int64]
    published: float


class _Viewed(BatchGroup):
    """Batches that are made, as views if possible, after the disk was asked for their rows."""

    def __init__(
        self, assembly: RowAssembly, rows: BatchRows, batches: int, fetched: Sequence[PendingRead]
    ) -> None:
        self.epoch, self.batches = rows.epoch, batches
        self._assembly, self._rows, self._fetched = assembly, rows, fetched

    def take(self, seconds: float) -> bool:
        return all(fetch.take(seconds) for fetch in self._fetched)

    def made(self) -> Iterable[ReadyBatch]:
        return self._assembly.made(self._rows)

    def cancel(self, seconds: float | None = None) -> bool:
        has_ended = True
        for fetch in self._fetched:
            has_ended &= fetch.cancel(seconds)
        return has_ended


class Gathered(_Viewed):
    """Rows that are being read into a slot. The wait for them counts as "gather" or "store"."""

    def __init__(
        self,
        assembly: RowAssembly,
        rows: BatchRows,
        batches: int,
        fetched: Sequence[PendingRead],
        read: PendingRead,
    ) -> None:
        super().__init__(assembly, rows, batches, fetched)
        self._read = read
        self.is_in_parts = read.is_in_parts
        self._seconds = 0.0

    def take(self, seconds: float) -> bool:
        meter, started = self._assembly.meter, time.perf_counter()
        has_ended = self._read.take(0)
        if not has_ended:
            meter.enter("gather")  # it takes long enough to be seen
            try:
                has_ended = self._read.take(seconds)
            finally:
                meter.leave({})
        self._seconds += time.perf_counter() - started
        if has_ended:
            meter.leave({"store" if self._read.missed else "gather": self._seconds})
        return has_ended

    def advance(self) -> None:
        self._read.advance()

    def made(self) -> Iterable[ReadyBatch]:
        return self._assembly.cut(self._rows, self._read.result(), is_copied=True)

    def cancel(self, seconds: float | None = None) -> bool:
        return self._read.cancel(seconds) & super().cancel(seconds)


class ReadAhead:
    """Has the disk read some megabytes ahead of an epoch in order, or of runs of rows.

    It asks in the order of the files and in large pieces: so the disk reads in order, whatever the order of
    the rows within a window. It does so in either mode, since asking for rows in memory costs little.
    """

    def __init__(self, epoch: Epoch, names: Sequence[str]) -> None:
        self._epoch, self._names = epoch, names
        self._is_window = epoch.plan.shuffle is Shuffle.WINDOW
        self._fetched_rows = 0  # rows of a window that are fetched, or were passed
        self._ahead_steps = 0
        self._share = _READ_AHEAD_SHARE * len(epoch.snapshot) / max(1, epoch.order.selected.size)
        if self._is_window and epoch.order.steps:
            rows_a_step = max(1, len(epoch.snapshot) // epoch.order.steps)
            ahead_rows = epoch.plan.window_rows // 2 + _READ_AHEAD_BYTES // epoch.snapshot.row_bytes
            self._ahead_steps = -(-ahead_rows // rows_a_step)
            self._fetched_rows = epoch.snapshot.rows_before(epoch.order.segments_span(0).start)

    def before(self, step: int, ids: NDArray[np.int64]) -> Sequence[PendingRead]:
        """Begin to read ahead as a group of these rows begins; keep the result until the group ends."""
        if self._is_window:
            return self._fetch_window(step, len(ids))
        if self._epoch.plan.shuffle.is_uniform or not len(ids):
            return ()
        size = len(ids) if self._is_run(ids) else self._epoch.plan.block_rows
        runs = [ids[start : start + size] for start in range(0, len(ids), size)]
        fetch = self._epoch.snapshot.fetch
        return [fetch(int(run[0]), int(run[-1]) + 1, self._names) for run in runs if self._is_run(run)]

    def _is_run(self, ids: NDArray[np.int64]) -> bool:
        return bool(int(ids[-1]) - int(ids[0]) == len(ids) - 1)

    def _fetch_window(self, step: int, rows: int) -> Sequence[PendingRead]:
        """Ask for the first step's whole window, then ahead at an even rate, so that rows arrive in time."""
        order, snapshot = self._epoch.order, self._epoch.snapshot
        first = self._fetched_rows
        here = snapshot.rows_before(order.segments_span(step).stop)
        last_step = min(step + self._ahead_steps, order.steps - 1)
        stop = snapshot.rows_before(order.segments_span(last_step).stop)
        self._fetched_rows = max(first, min(stop, max(here, first + int(rows * self._share))))
        return [snapshot.fetch(first, self._fetched_rows, self._names)] if self._fetched_rows > first else ()


def _breaks(ids: NDArray[np.int64]) -> list[int]:
    """Return the places of rows that do not follow the row before them.

    Works in pieces: for more elements NumPy lets go of the GIL, and a busy thread gives it back after 5 ms.
    """
    breaks: list[int] = []
    for first in range(0, len(ids) - 1, _ELEMENTS_UNDER_GIL):
        piece = ids[first : first + _ELEMENTS_UNDER_GIL + 1]
        breaks += ((piece[1:] - piece[:-1] != 1).nonzero()[0] + first + 1).tolist()
    return breaks


def mean_published(epoch: Epoch, ids: NDArray[np.int64]) -> float:
    """Return the mean publication time of rows, estimated from some of them."""
    return epoch.snapshot.published(ids[:: -(-len(ids) // _AGE_ROWS)])
