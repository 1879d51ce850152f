"""Assembly: makes the batches of an epoch, portion by portion, in slots that it lends.

It cuts an epoch into portions, in step order; stream.py decides when they are begun. A batch that is one run
of rows of one segment is a zero-copy view, where the order has such runs. Every other batch is gathered into
a slot by the engine's threads; small batches of a portion share one. Where there is a transform, worker
threads gather and transform.

Rows that may be on the disk are asked for before they are needed: some hundred rows ahead where they come in
any order, some megabytes ahead where they come in order.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.epoch import Epoch
from arrowcache.reading.fetching import FETCHED_BYTES, Fetching
from arrowcache.reading.gather import Gather
from arrowcache.reading.memory import page_aligned
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.portion import Elsewhere, Portion, ReadyBatch
from arrowcache.reading.slots import Slot, Slots
from arrowcache.reading.stats import Meter
from arrowcache.reading.temperature import Temperature
from arrowcache.reading.values import ColumnData, Values, column_bytes
from arrowcache.reading.view import Viewer
from arrowcache.reading.worker_threads import WorkerThreads
from arrowcache.storage.store import Store

Batch = dict[str, Any]

_VIEWS = 8  # batches over one mapping
_AGE_ROWS = 64  # rows drawn at once whose age is looked up
_DRAWN_ROWS = 4096  # rows of the order drawn at once
_MOST_FETCHED = 64  # batches
_MOST_BATCHES = 256  # of a portion
_ELEMENTS_UNDER_GIL = 500
_PORTION_BYTES = 512 << 10  # of small batches: a slot and a job cost as much as copying this


class Memory(NamedTuple):
    """The memory for batches: an allocator of `Slots`, and the size of small batches side by side."""

    allocate: Callable[[int], NDArray[np.uint8]] = page_aligned
    portion_bytes: int = _PORTION_BYTES


MEMORY = Memory()


class Assembly:
    """Makes portions of epochs."""

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter, memory: Memory = MEMORY) -> None:
        schema, self.names, self.meter = store.settings.schema, options.names, meter
        self._options, self._batch_size = options, options.most_rows
        self._fixed = tuple(name for name in self.names if name in schema.fixed)
        viewer = Viewer(schema, self.names)
        self._viewer = viewer if options.views and viewer.names else None
        self._views_required = False
        self._row_bytes = sum(schema.fixed[name].row_bytes for name in self._fixed)
        # of the last batch made
        self._batch_rows, self._batch_bytes = self._batch_size, max(1, self._row_bytes * self._batch_size)
        self._threads = self._new_threads()
        self.temperature = Temperature()
        self._columns = {n: (schema.fixed[n].shape, schema.fixed[n].numpy_dtype) for n in self._fixed}
        most = 1
        if self._threads is None and self._viewer is not None:
            most = min(_VIEWS, FETCHED_BYTES // self._batch_bytes)
        elif self._threads is None and len(self._fixed) == len(self.names) and options.budget is None:
            most = min(_MOST_BATCHES, memory.portion_bytes // self._batch_bytes)
        self._most_batches = max(1, most)  # batches of a portion; copied ones lie side by side
        rows = self._batch_size * (self._most_batches if self._viewer is None else 1)
        self._lend_rows(rows if options.budget is None else 0, memory)

    def _lend_rows(self, rows: int, memory: Memory) -> None:
        """Have slots of so many rows; 0: of any number."""
        self._new_slots = partial(Slots, self._columns, rows, self.wanted(), memory.allocate)
        self.slots = self._new_slots()

    def _new_threads(self) -> WorkerThreads | None:
        return None if self._options.transform is None else WorkerThreads(max(1, self._options.workers))

    def prepare(self) -> None:
        """Nothing has to start."""

    def wanted(self) -> int:
        """Return the number of batches to keep under way or ready."""
        workers, prefetch = self._options.workers, self._options.prefetch
        if prefetch is not None:
            return prefetch + workers
        usual = self.temperature.batches_ahead(self._batch_rows, self._batch_bytes)
        if self._viewer is not None:  # views cost no memory ahead
            usual = max(usual, self._most_batches + min(_MOST_FETCHED, FETCHED_BYTES // self._batch_bytes))
        return usual + workers

    def after_fork(self) -> None:
        """Make new slots and threads in a child: another thread may have held the old ones."""
        self.slots, self._threads = self._new_slots(), self._new_threads()

    def portions(self, epoch: Epoch, *, awaited: bool) -> Iterator[Portion]:
        """Yield an epoch's batches, cut into portions; each `next` begins one.

        Args:
            awaited: True if somebody waits for the first.
        """
        epoch.snapshot.temperature = self.temperature
        order, step, size = epoch.order, 0, 1 if awaited else self._most_batches
        fetching = Fetching(epoch, self.names)
        while step < order.steps:  # small portions first; then many batches' ids at once
            batches = size if size < self._most_batches else max(size, _DRAWN_ROWS // self._batch_size)
            end, first = min(step + batches, order.steps), 0
            drawn = order.batches(step, end)
            published = mean_published(epoch, drawn)
            while step < end:
                last = min(step + size, end)
                count = order.rows_of(range(step, last))
                rows = BatchRows(epoch, drawn[first : first + count], published)
                yield self._begin(rows, last - step, fetching.before(step, rows.ids))
                step, first = last, first + count
            size = min(2 * size, self._most_batches)

    def drop(self) -> None:
        """Release leases on epochs that ended: none here."""

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def require_views(self) -> None:
        """Raise ValueError for each batch from now on that cannot be a view."""
        self._views_required = True

    def slot_stats(self) -> tuple[int, int]:
        """Return the bytes of memory for batches, and how often some was added."""
        return self.slots.allocated_bytes, self.slots.growths

    def in_progress(self) -> list[tuple[str, float]]:
        """Return the stages of other processes and their starts: none here."""
        return []

    def _begin(self, rows: BatchRows, batches: int, fetched: Sequence[Gather]) -> Portion:
        if self._threads is not None:
            made = self._threads.submit(partial(self._transformed, rows))
            return Elsewhere(rows.epoch, batches, made, iter, fetched)
        if self._viewer is not None:
            return _Viewed(self, rows, batches, fetched)
        return Gathered(self, rows, batches, fetched, self.names, self.slots.lend(len(rows.ids)))

    def _transformed(self, rows: BatchRows) -> list[ReadyBatch]:
        (made,) = self.made(rows)
        assert self._options.transform is not None
        with self.meter.stage("transform"):
            return [made._replace(batch=self._options.transform(made.batch))]

    def made(self, rows: BatchRows) -> Iterator[ReadyBatch]:
        """Yield batches without a transform, made by this thread; those before a failed one come first."""
        if self._viewer is None:
            yield self._copied(rows)
            return
        for some, is_run in self._runs(rows.ids):
            part = rows._replace(ids=some)
            if is_run:
                yield from self._viewed(self._viewer, part)
            else:
                yield self._copied(part)

    def _copied(self, rows: BatchRows) -> ReadyBatch:
        if self._views_required:
            raise ValueError(
                "assert_zero_copy() was called, and this batch needs a copy: its rows lie in several "
                "segments, or too many views are alive; choose batch_size to divide the segments' rows"
            )
        arrays = self.slots.lend(len(rows.ids)).arrays()
        with self.meter.reading(self.temperature):
            columns = rows.epoch.snapshot.gather_into(rows.ids, self.names, arrays)
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

    def _viewed(self, viewer: Viewer, rows: BatchRows) -> Iterator[ReadyBatch]:
        """Yield batches of one run of rows: views where they are of one segment, else copies."""
        ids, size = rows.ids, self._batch_size
        with self.meter.reading(self.temperature):
            view = rows.epoch.snapshot.view(int(ids[0]), len(ids), viewer, is_fetched=True)
        if view is not None:
            yield from self.cut(rows, view, is_copied=False)
        elif len(ids) > size:
            middle = -(-len(ids) // size) // 2 * size
            yield from self._viewed(viewer, rows._replace(ids=ids[:middle]))
            yield from self._viewed(viewer, rows._replace(ids=ids[middle:]))
        else:
            yield self._copied(rows)

    def cut(self, rows: BatchRows, whole: dict[str, Any], *, is_copied: bool) -> Iterator[ReadyBatch]:
        """Yield batches that lie side by side."""
        size, count = self._batch_size, len(rows.ids)
        if count <= size:
            yield self._complete(rows, whole, is_copied=is_copied)
            return
        for start in range(0, count, size):
            of_batch = slice(start, start + size)
            columns = {name: _rows_of(column, of_batch) for name, column in whole.items()}
            yield self._complete(rows._replace(ids=rows.ids[of_batch]), columns, is_copied=is_copied)

    def _complete(self, rows: BatchRows, columns: dict[str, Any], *, is_copied: bool) -> ReadyBatch:
        """Add the columns that cannot be views, and the origin of the rows."""
        epoch, ids, published = rows
        batch: Batch = columns
        if len(self._fixed) == len(self.names):
            nbytes = len(ids) * self._row_bytes
        else:
            nbytes = sum(map(column_bytes, columns.values()))
        copied_bytes = nbytes if is_copied else 0
        if len(columns) < len(self.names):
            others = tuple(name for name in self.names if name not in columns)
            values = epoch.snapshot.gather_into(ids, others, {})
            more = sum(map(column_bytes, values.values()))
            nbytes, copied_bytes = nbytes + more, copied_bytes + more
            batch = {name: columns[name] if name in columns else values[name] for name in self.names}
        self._batch_rows, self._batch_bytes = max(1, len(ids)), max(1, nbytes)
        if self._options.with_ids:
            batch |= epoch.snapshot.locate(ids)
        return ReadyBatch(batch, len(ids), nbytes, copied_bytes, published, epoch)


class BatchRows(NamedTuple):
    epoch: Epoch
    ids: NDArray[np.int64]
    published: float


class _Viewed(Portion):
    """Batches that are made, as views if possible, after the disk was asked for their rows."""

    def __init__(self, assembly: Assembly, rows: BatchRows, batches: int, fetched: Sequence[Gather]) -> None:
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
    """Columns of rows that are being gathered, those of fixed width into a slot.

    The wait for them counts as "gather" or "store".

    Args:
        gather: the gather, if it has begun.
    """

    def __init__(
        self,
        assembly: Assembly,
        rows: BatchRows,
        batches: int,
        fetched: Sequence[Gather],
        names: Sequence[str],
        slot: Slot,
        gather: Gather | None = None,
    ) -> None:
        super().__init__(assembly, rows, batches, fetched)
        self._names, self._slot = names, slot
        self._gather = gather or rows.epoch.snapshot.begin_gather(rows.ids, names, slot)
        self.is_in_parts = self._gather.is_in_parts
        self._seconds = 0.0

    def take(self, seconds: float) -> bool:
        meter, started = self._assembly.meter, time.perf_counter()
        has_ended = self._gather.take(0)
        if not has_ended:
            meter.enter("gather")  # it takes long enough to be seen
            try:
                has_ended = self._gather.take(seconds)
            finally:
                meter.leave({})
        self._seconds += time.perf_counter() - started
        if has_ended:
            meter.leave({"store" if self._gather.missed else "gather": self._seconds})
        return has_ended

    def go_on(self) -> None:
        self._gather.go_on()

    def columns(self) -> dict[str, Any]:
        self._assembly.temperature.note(len(self._rows.ids), self._gather.missed)
        columns: dict[str, Any] = self._slot.arrays()
        if len(columns) < len(self._names):
            found = columns | self._gather.values()
            columns = {name: found[name] for name in self._names}
        return columns

    def made(self) -> Iterable[ReadyBatch]:
        return self._assembly.cut(self._rows, self.columns(), is_copied=True)

    def cancel(self, seconds: float | None = None) -> bool:
        return self._gather.cancel(seconds) & super().cancel(seconds)


def _breaks(ids: NDArray[np.int64]) -> list[int]:
    """Return the places of rows that do not follow the row before them.

    Works in pieces: for more elements NumPy lets go of the GIL, and a busy thread gives it back after 5 ms.
    """
    breaks: list[int] = []
    for start in range(0, len(ids) - 1, _ELEMENTS_UNDER_GIL):
        piece = ids[start : start + _ELEMENTS_UNDER_GIL + 1]
        breaks += ((piece[1:] - piece[:-1] != 1).nonzero()[0] + start + 1).tolist()
    return breaks


def mean_published(epoch: Epoch, ids: NDArray[np.int64]) -> float:
    """Return the mean publication time of rows, estimated from some of them."""
    return epoch.snapshot.published(ids[:: -(-len(ids) // _AGE_ROWS)])


def _rows_of(column: ColumnData, rows: slice) -> ColumnData:
    if not isinstance(column, Values):
        return column[rows]
    ends = column.offsets[rows.start : rows.stop + 1]
    return Values(column.data[ends[0] : ends[-1]], ends - ends[0])
