"""Assembly: makes the batches of an epoch.

It cuts an epoch into jobs, in step order; the pipeline decides when they run. A batch that is one run of
rows of one segment is a zero-copy view, where the order has such runs. Every other batch is gathered into a
slot by the engine's threads; small batches share a slot and a job. Where there is a transform, threads of a
crew gather and transform.

Rows that may be on the disk are asked for before they are needed: some hundred rows ahead where they come in
any order, some megabytes ahead where they come in order.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.crew import Crew
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.fetching import FETCHED_BYTES, Fetched, Fetching
from arrowcache.reading.gather import Fetch, Gather
from arrowcache.reading.memory import page_aligned
from arrowcache.reading.pipeline import Elsewhere, Job, Made
from arrowcache.reading.slots import Slot, Slots
from arrowcache.reading.stats import Meter
from arrowcache.reading.temperature import Temperature
from arrowcache.reading.values import Column, Values, column_bytes
from arrowcache.reading.view import Viewer
from arrowcache.storage.store import Store

Batch = dict[str, Any]

_VIEWS = 8  # batches over one mapping
_AGE_ROWS = 64  # of those that are drawn at once, whose age is looked up
_DRAWN_ROWS = 4096  # of the order, at once
_WARM_BYTES = 8 << 20  # under way: more slots leave the processor's cache
_MOST_UNDER_WAY, _MOST_FETCHED = 8, 64
_MOST_GROUPED = 256
_COLD_ROWS, _COLD_BYTES = 256, 64 << 20  # asked of the disk ahead, so that it can choose their order
_ELEMENTS_UNDER_GIL = 500
_GROUP_BYTES = 512 << 10  # small batches share a slot and a job, which cost as much as copying so much


class Assembly:
    """Makes jobs of epochs.

    Args:
        store, names: of the cache, and which columns.
        batch_size: rows of a batch.
        transform: called with each batch; None: none.
        with_ids: add `_seq`, `_row` and `_age_seconds`.
        views: whether batches may be zero-copy views.
        workers: threads that run a transform; 0: one.
        prefetch: batches that are begun ahead; None: as many as the processor's cache holds, or, of rows on
            the disk, as many as let it choose their order.
    """

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        batch_size: int,
        transform: Callable[[Batch], Batch] | None,
        *,
        with_ids: bool,
        views: bool,
        workers: int,
        prefetch: int | None,
        meter: Meter,
    ) -> None:
        schema = store.settings.schema
        self._names = tuple(names)
        self._fixed = tuple(name for name in names if name in schema.fixed)
        viewer = Viewer(schema, names)
        self._viewer = viewer if views and viewer.names else None
        self._batch_size = batch_size
        self._transform = transform
        self._with_ids = with_ids
        self._meter = meter
        self._views_required = False
        self._row_bytes = sum(schema.fixed[name].row_bytes for name in self._fixed)
        self._crew = None if transform is None else Crew(max(1, workers))
        self._batch_bytes = max(1, self._row_bytes * batch_size)  # of the last one that was made
        self._prefetch, self._workers = prefetch, workers
        self.temperature = Temperature()
        self._columns = {n: (schema.fixed[n].shape, schema.fixed[n].numpy_dtype) for n in self._fixed}
        self.gather_into(page_aligned)

    def gather_into(
        self, allocate: Callable[[int], NDArray[np.uint8]], group_bytes: int = _GROUP_BYTES
    ) -> None:
        """Have batches gathered into memory that this gives, before any is made.

        Args:
            allocate: as of `Slots`.
            group_bytes: of batches that lie side by side.
        """
        grouped = 1  # batches of a job that lie side by side
        if self._transform is None and len(self._fixed) == len(self._names):
            grouped = max(1, min(_MOST_GROUPED, group_bytes // self._batch_bytes))
        views = max(1, min(_VIEWS, FETCHED_BYTES // self._batch_bytes)) if self._transform is None else 1
        self._group = grouped if self._viewer is None else views
        rows = self._batch_size * (grouped if self._viewer is None else 1)
        self._new_slots = partial(Slots, self._columns, rows, self.wanted(), allocate)
        self.slots = self._new_slots()

    def prepare(self) -> None:
        """An epoch is wanted soon: nothing has to start."""

    def wanted(self) -> int:
        """The number of batches that are to be under way or ready."""
        if self._prefetch is not None:
            return self._prefetch + self._workers
        if self.temperature.is_cold:
            usual = max(2, min(-(-_COLD_ROWS // self._batch_size), _COLD_BYTES // self._batch_bytes))
        else:
            usual = max(2, min(_MOST_UNDER_WAY, _WARM_BYTES // self._batch_bytes))
        if self._viewer is not None:  # which costs no memory before it is made
            usual = max(usual, self._group + min(_MOST_FETCHED, FETCHED_BYTES // self._batch_bytes))
        return usual + self._workers

    def after_fork(self) -> None:
        """In a child: another thread may have been at the slots, and will never be done."""
        self.slots = self._new_slots()
        if self._crew is not None:
            self._crew = Crew(max(1, self._workers))

    def jobs(self, epoch: Epoch, *, awaited: bool) -> Iterator[Job]:
        """An epoch's batches, cut into jobs; `awaited`: somebody waits for the first."""
        epoch.snapshot.temperature = self.temperature
        step, steps, size = 0, epoch.order.steps, 1 if awaited else self._group
        fetching = Fetching(epoch, self._names)
        while step < steps:  # small jobs first; then many batches' ids at once
            batches = size if size < self._group else max(size, _DRAWN_ROWS // self._batch_size)
            end = min(step + batches, steps)
            drawn = epoch.order.batches(step, end)
            published = mean_published(epoch, drawn)
            for first in range(0, len(drawn), size * self._batch_size):
                ids = drawn[first : first + size * self._batch_size]
                batches = min(size, end - step)
                yield self._job(epoch, step, ids, batches, published, fetching.before(step, ids))
                step += batches
            size = min(2 * size, self._group)

    def end(self, epoch: Epoch) -> None:
        """Nothing more is made of an epoch; call it before its snapshot is closed."""

    def drop(self) -> None:
        """Let go of what is leased of epochs that ended: nothing here."""

    def close(self) -> None:
        """End the threads of a transform."""
        if self._crew is not None:
            self._crew.close()

    def require_views(self) -> None:
        """Have a batch that cannot be a view raise ValueError."""
        self._views_required = True

    def ring_stats(self) -> tuple[int, int]:
        """Bytes of memory for batches, and how often some was added."""
        return self.slots.allocated_bytes, self.slots.growths

    def in_progress(self) -> list[tuple[str, float]]:
        """The stages that other processes are at, and since when: none here."""
        return []

    def _job(
        self,
        epoch: Epoch,
        step: int,
        ids: NDArray[np.int64],
        batches: int,
        published: float,
        fetched: Sequence[Fetch],
    ) -> Job:
        if self._transform is not None:
            make = partial(self._transformed, self._transform, epoch, ids, published)
            return Job(step, batches, partial(self._begin_crew, make, fetched), _of_crew)
        if self._viewer is not None:
            return Job(
                step,
                batches,
                partial(Fetched, fetched),
                lambda _: self._made_here(epoch, ids, published),
            )
        return Job(
            step,
            batches,
            partial(self._begin, epoch, ids, fetched),
            partial(self._finish, epoch, ids, published),
        )

    def _begin(self, epoch: Epoch, ids: NDArray[np.int64], fetched: Sequence[Fetch]) -> Gathered:
        slot = self.slots.lend(len(ids))
        gather = epoch.snapshot.begin_gather(ids, self._names, slot)
        return Gathered(slot, gather, self._meter, fetched)

    def _finish(
        self, epoch: Epoch, ids: NDArray[np.int64], published: float, gathered: Gathered
    ) -> Iterator[Made]:
        self.temperature.note(len(ids), gathered.gather.missed)
        columns: dict[str, Any] = gathered.slot.arrays()
        if len(columns) < len(self._names):
            found = columns | gathered.gather.values()
            columns = {name: found[name] for name in self._names}
        if len(ids) <= self._batch_size:
            return iter((self._complete(epoch, ids, columns, published, copied=True),))
        return self._cut(epoch, ids, columns, published, copied=True)

    def _begin_crew(self, make: Callable[[], Made], fetched: Sequence[Fetch]) -> Elsewhere:
        assert self._crew is not None
        return Elsewhere(self._crew.submit(make), fetched)

    def _transformed(
        self, transform: Callable[[Batch], Batch], epoch: Epoch, ids: NDArray[np.int64], published: float
    ) -> Made:
        (made,) = self._made_here(epoch, ids, published)
        with self._meter.stage("transform"):
            return made._replace(batch=transform(made.batch))

    def _made_here(self, epoch: Epoch, ids: NDArray[np.int64], published: float) -> Iterator[Made]:
        """Batches without a transform, made by this thread; those before one that fails come first."""
        if self._viewer is None:
            yield self._copied(epoch, ids, published)
            return
        for some, is_run in self._runs(ids):
            if is_run:
                yield from self._viewed(self._viewer, epoch, some, published)
            else:
                yield self._copied(epoch, some, published)

    def _copied(self, epoch: Epoch, ids: NDArray[np.int64], published: float) -> Made:
        if self._views_required:
            raise ValueError(
                "assert_zero_copy() was called, and this batch needs a copy: its rows lie in several "
                "segments, or too many views are alive; choose batch_size to divide the segments' rows"
            )
        arrays = self.slots.lend(len(ids)).arrays()
        with self._meter.reading(self.temperature):
            columns = epoch.snapshot.gather_into(ids, self._names, arrays)
            return self._complete(epoch, ids, columns, published, copied=True)

    def _runs(self, ids: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """Rows of some batches that follow one another, all together; or of one batch that do not."""
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

    def _viewed(
        self, viewer: Viewer, epoch: Epoch, ids: NDArray[np.int64], published: float
    ) -> Iterator[Made]:
        """Batches of one run of rows: views of them, as far as they are of one segment, else copies."""
        size = self._batch_size
        with self._meter.reading(self.temperature):
            view = epoch.snapshot.view(int(ids[0]), len(ids), viewer, is_fetched=True)
        if view is not None:
            yield from self._cut(epoch, ids, view, published, copied=False)
        elif len(ids) > size:
            middle = -(-len(ids) // size) // 2 * size
            yield from self._viewed(viewer, epoch, ids[:middle], published)
            yield from self._viewed(viewer, epoch, ids[middle:], published)
        else:
            yield self._copied(epoch, ids, published)

    def _cut(
        self, epoch: Epoch, ids: NDArray[np.int64], whole: dict[str, Any], published: float, *, copied: bool
    ) -> Iterator[Made]:
        """Batches that lie side by side."""
        size = self._batch_size
        for start in range(0, len(ids), size):
            rows = slice(start, start + size)
            columns = {name: _rows_of(column, rows) for name, column in whole.items()}
            yield self._complete(epoch, ids[rows], columns, published, copied=copied)

    def _complete(
        self,
        epoch: Epoch,
        ids: NDArray[np.int64],
        columns: dict[str, Any],
        published: float,
        *,
        copied: bool,
    ) -> Made:
        """Add the columns that cannot be views, and where rows come from."""
        batch: Batch = columns
        if len(self._fixed) == len(self._names):
            nbytes = len(ids) * self._row_bytes
        else:
            nbytes = sum(map(column_bytes, columns.values()))
        copied_bytes = nbytes if copied else 0
        if len(columns) < len(self._names):
            others = tuple(name for name in self._names if name not in columns)
            values = epoch.snapshot.gather_into(ids, others, {})
            more = sum(map(column_bytes, values.values()))
            nbytes, copied_bytes = nbytes + more, copied_bytes + more
            batch = {name: columns[name] if name in columns else values[name] for name in self._names}
        self._batch_bytes = max(1, nbytes)
        if self._with_ids:
            batch |= epoch.snapshot.locate(ids)
        return Made(batch, len(ids), nbytes, copied_bytes, published, epoch)


class Gathered:
    """Rows on their way into a slot: a `Pending`. Waiting for them counts as "gather" or "store"."""

    def __init__(self, slot: Slot, gather: Gather, meter: Meter, fetched: Sequence[Fetch]) -> None:
        self.slot, self.gather, self._meter, self._fetched = slot, gather, meter, fetched
        self._seconds = 0.0

    def take(self, seconds: float) -> bool:
        started = time.perf_counter()
        has_ended = self.gather.take(0)
        if not has_ended:
            self._meter.enter("gather")  # it takes long enough to be seen
            try:
                has_ended = self.gather.take(seconds)
            finally:
                self._meter.leave({})
        self._seconds += time.perf_counter() - started
        if has_ended:
            self._meter.add("store" if self.gather.missed else "gather", self._seconds)
        return has_ended

    def withdraw(self) -> None:
        self.gather.withdraw()
        for fetch in self._fetched:
            fetch.withdraw()

    def cancel(self) -> None:
        self.gather.cancel()

    def abandon(self) -> None:
        self.gather.abandon()
        for fetch in self._fetched:
            fetch.abandon()

    def go_on(self) -> None:
        self.gather.go_on()


def _of_crew(done: Elsewhere) -> Iterator[Made]:
    return iter((done.result(),))


def _breaks(ids: NDArray[np.int64]) -> list[int]:
    """The places of rows that do not follow the row before them.

    In pieces: NumPy lets go of the GIL for more elements, and a busy thread gives it back after 5 ms.
    """
    breaks: list[int] = []
    for start in range(0, len(ids) - 1, _ELEMENTS_UNDER_GIL):
        piece = ids[start : start + _ELEMENTS_UNDER_GIL + 1]
        breaks += ((piece[1:] - piece[:-1] != 1).nonzero()[0] + start + 1).tolist()
    return breaks


def mean_published(epoch: Epoch, ids: NDArray[np.int64]) -> float:
    """The mean time at which rows were published, of some of them."""
    return epoch.snapshot.published(ids[:: -(-len(ids) // _AGE_ROWS)])


def _rows_of(column: Column, rows: slice) -> Column:
    """Some rows of a view, as a view."""
    if not isinstance(column, Values):
        return column[rows]
    ends = column.offsets[rows.start : rows.stop + 1]
    return Values(column.data[ends[0] : ends[-1]], ends - ends[0])
