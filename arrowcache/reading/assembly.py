"""Assembly: how the batches of an epoch are made: into which memory, by which calls, in which pieces.

It cuts an epoch into jobs, in step order; the pipeline decides when and on which thread they run.
A batch that is one run of rows of one segment is a zero-copy view, where the order has such runs;
every other is gathered into the ring. A job gathers a group of batches in one call a column; the
first batch of an epoch is a job of its own, for its latency. Each batch of a loader with a transform
and threads is a job, so that transforms run side by side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.epoch import Epoch
from arrowcache.reading.pieces import pieces
from arrowcache.reading.pipeline import Job, Made
from arrowcache.reading.ring import USUAL_GROUP_BYTES, Group, GroupSize, Ring
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.values import Column, Values, column_bytes
from arrowcache.reading.view import Viewer
from arrowcache.storage.store import Store

Batch = dict[str, Any]

_VIEWS = 8  # a group of batches that take no memory
_AGE_ROWS = 64  # of each batch, whose age is looked up


class Assembly:
    """Makes jobs of epochs.

    Args:
        store, names: of the cache, and which columns.
        batch_size: rows of a batch.
        transform: called with each batch; None: none.
        with_ids: add `_seq`, `_row` and `_age_seconds`.
        views: whether batches may be zero-copy views.
        workers: threads that run the jobs; 0: the one that asks for them.
        prefetch: batches that are kept ready.
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
        prefetch: int,
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
        self._workers = workers
        self._meter = meter
        self._views_required = False
        self.threads, self.in_flight = workers, workers
        columns = {n: (schema.fixed[n].shape, schema.fixed[n].numpy_dtype) for n in self._fixed}
        in_flight = prefetch + workers
        if self._viewer is None:
            self._new_ring = partial(Ring, columns, batch_size, in_flight)
        else:  # only a batch that is no run is copied, by itself
            self._new_ring = partial(Ring, columns, batch_size, _VIEWS * in_flight, group_bytes=0)
        self.ring = self._new_ring()
        usual, largest = self.ring.batches_of(USUAL_GROUP_BYTES), self.ring.largest_group
        self._group = GroupSize(usual, largest) if self._viewer is None else GroupSize(_VIEWS, _VIEWS)

    def gather_into(
        self,
        allocate: Callable[[int], NDArray[np.uint8]],
        group_bytes: int = USUAL_GROUP_BYTES,
        most: int | None = None,
    ) -> None:
        """Have batches gathered into memory that this gives, as of `Ring`, before any is made.

        Args:
            group_bytes: of a usual group.
            most: batches of a group; None: as many as are of use.
        """
        self._new_ring = partial(self._new_ring, allocate=allocate)
        self.ring = self._new_ring()
        if self._viewer is None:
            largest = min(self.ring.largest_group, most or self.ring.largest_group)
            self._group = GroupSize(min(self.ring.batches_of(group_bytes), largest), largest)

    def after_fork(self) -> None:
        """In a child: another thread may have been at the ring, and will never be done."""
        self.ring = self._new_ring()

    def jobs(self, epoch: Epoch, *, awaited: bool) -> Iterator[Job]:
        """An epoch's batches, cut into jobs; `awaited`: somebody waits for the first."""
        step, group = 0, self._group
        if awaited:
            group.restart()
        alone = self._transform is not None and self._workers > 0
        most = self._most_batches(epoch.snapshot)
        while step < epoch.order.steps:
            one_by_one = alone or self.ring.is_hoarded  # what is kept keeps its whole group
            size = 1 if one_by_one else min(group.now, most)
            last = min(step + size, epoch.order.steps)
            ids = epoch.order.batches(step, last)
            yield self._job(epoch, step, ids, last - step)
            step = last

    def end(self, epoch: Epoch) -> None:
        """Nothing more is made of an epoch; call it before its snapshot is closed."""

    def drop(self) -> None:
        """Let go of what is leased of epochs that ended: nothing here."""

    def close(self) -> None:
        """End what makes batches, beside the pipeline's threads: nothing here."""

    def require_views(self) -> None:
        """Have a batch that cannot be a view raise ValueError."""
        self._views_required = True

    def ring_stats(self) -> tuple[int, int]:
        """Bytes of memory for batches, and how often some was added."""
        return self.ring.allocated_bytes, self.ring.growths

    def in_progress(self) -> list[tuple[str, float]]:
        """What other processes are at: the stage, and since when."""
        return []

    def _most_batches(self, snapshot: Snapshot) -> int:
        """How many batches to make at once, as far as values of no fixed width limit it."""
        if len(self._fixed) == len(self._names):
            return self._group.largest
        return max(1, USUAL_GROUP_BYTES // (snapshot.row_bytes * self._batch_size))

    def _job(self, epoch: Epoch, step: int, ids: NDArray[np.int64], batches: int) -> Job:
        made: list[Made] = []
        failures: list[BaseException] = []

        def make() -> None:
            try:
                self._make(epoch, ids, batches, made)
            except BaseException as error:  # noqa: BLE001  # the batches before it are delivered first
                failures.append(error)

        if self._transform is None:
            return Job(step, [make], lambda: _all_of(made, failures))
        transform = self._transform
        if self._workers == 0:
            return Job(step, [make], lambda: self._transformed(transform, made, failures))

        def make_and_transform() -> None:
            self._make(epoch, ids, batches, made)
            with self._meter.stage("transform"):
                made[:] = [plain._replace(batch=transform(plain.batch)) for plain in made]

        return Job(step, [make_and_transform], lambda: _all_of(made, failures))

    def _make(self, epoch: Epoch, ids: NDArray[np.int64], batches: int, made: list[Made]) -> None:
        """Add batches to `made`: those before one that fails are in it then."""
        published = mean_published(epoch, ids)
        with self._meter.reading() as reading:
            if self._viewer is not None:
                self._views(self._viewer, epoch, ids, published, made)
            else:
                memory = self.ring.take(len(ids))
                self._gather(epoch.snapshot, ids, memory)
                made += self._hand_out(epoch, ids, batches, memory, published)
        self._group.note(has_waited=reading.has_waited)
        epoch.snapshot.asks_ahead = reading.was_on_disk
        epoch.is_cold |= reading.was_on_disk

    def _gather(self, snapshot: Snapshot, ids: NDArray[np.int64], memory: Group) -> None:
        """Copy the fixed-width columns of some rows."""
        snapshot.gather_into(ids, self._fixed, memory.arrays())

    def _hand_out(
        self, epoch: Epoch, ids: NDArray[np.int64], batches: int, memory: Group, published: float
    ) -> list[Made]:
        made = []
        for number in range(batches):
            arrays = memory.hand_out(number)
            chosen = ids[self._rows_of(number)]
            made.append(self._complete(epoch, chosen, arrays, published, copied=True))
        memory.close()
        return made

    def _views(
        self, viewer: Viewer, epoch: Epoch, ids: NDArray[np.int64], published: float, made: list[Made]
    ) -> None:
        """Views of the batches that are one run of rows, one mapping for as many as are; copies of others."""
        size, breaks, first = self._batch_size, _breaks(ids), 0
        while first < len(ids):
            following = bisect_right(breaks, first)
            end = breaks[following] if following < len(breaks) else len(ids)
            stop = end if end == len(ids) else end - (end - first) % size
            if stop > first:
                self._view_run(viewer, epoch, ids[first:stop], published, made)
            else:
                stop = min(first + size, len(ids))
                made += self._gather_one(epoch, ids[first:stop], published)
            first = stop

    def _view_run(
        self, viewer: Viewer, epoch: Epoch, ids: NDArray[np.int64], published: float, made: list[Made]
    ) -> None:
        """Views of batches that are one run of rows together, though perhaps of several segments."""
        size = self._batch_size
        view = epoch.snapshot.view(int(ids[0]), len(ids), viewer)
        if view is None and len(ids) > size:
            middle = -(-len(ids) // size) // 2 * size
            self._view_run(viewer, epoch, ids[:middle], published, made)
            self._view_run(viewer, epoch, ids[middle:], published, made)
        elif view is None:
            made += self._gather_one(epoch, ids, published)
        elif len(ids) <= size:
            made.append(self._complete(epoch, ids, view, published, copied=False))
        else:
            for start in range(0, len(ids), size):
                rows = slice(start, start + size)
                columns = {name: _rows_of(column, rows) for name, column in view.items()}
                made.append(self._complete(epoch, ids[rows], columns, published, copied=False))

    def _gather_one(self, epoch: Epoch, ids: NDArray[np.int64], published: float) -> list[Made]:
        if self._views_required:
            raise ValueError(
                "assert_zero_copy() was called, and this batch needs a copy: its rows lie in several "
                "segments, or too many views are alive; choose batch_size to divide the segments' rows"
            )
        memory = self.ring.take(len(ids))
        self._gather(epoch.snapshot, ids, memory)
        return self._hand_out(epoch, ids, 1, memory, published)

    def _rows_of(self, batch: int) -> slice:
        return slice(batch * self._batch_size, (batch + 1) * self._batch_size)

    def _complete(
        self,
        epoch: Epoch,
        ids: NDArray[np.int64],
        columns: dict[str, Any],
        published: float,
        *,
        copied: bool,
    ) -> Made:
        """Add the columns that are gathered batch by batch, and where rows come from."""
        batch: Batch = columns
        nbytes = sum(map(column_bytes, columns.values()))
        copied_bytes = nbytes if copied else 0
        if len(columns) < len(self._names):
            others = tuple(name for name in self._names if name not in columns)
            values = epoch.snapshot.gather_into(ids, others, {})
            more = sum(map(column_bytes, values.values()))
            nbytes, copied_bytes = nbytes + more, copied_bytes + more
            batch = {name: columns[name] if name in columns else values[name] for name in self._names}
        if self._with_ids:
            batch |= epoch.snapshot.locate(ids)
        return Made(batch, len(ids), nbytes, copied_bytes, published, epoch)

    def _transformed(
        self, transform: Callable[[Batch], Batch], made: list[Made], failures: list[BaseException]
    ) -> Iterator[list[Made]]:
        """One batch at a time: a transform that is slow or fails holds up no batch before its own."""
        made.reverse()
        while made:
            with self._meter.stage("transform"):
                plain = made.pop()
                ready = [plain._replace(batch=transform(plain.batch))]
                del plain
            yield ready
        if failures:
            raise failures.pop()


def _all_of(made: list[Made], failures: list[BaseException]) -> Iterator[list[Made]]:
    """All at once; keeps nothing, or what the consumer drops would stay alive until the next job."""
    if made:
        yield [made.pop(0) for _ in range(len(made))]
    if failures:
        raise failures.pop()


def _breaks(ids: NDArray[np.int64]) -> list[int]:
    """Where a row does not follow the one before it."""
    breaks: list[int] = []
    for piece in pieces(len(ids) - 1):
        steps = ids[piece.start + 1 : piece.stop + 1] - ids[piece]
        breaks += ((steps != 1).nonzero()[0] + piece.start + 1).tolist()
    return breaks


def mean_published(epoch: Epoch, ids: NDArray[np.int64]) -> float:
    """When rows were published, on average, as some of them tell."""
    return epoch.snapshot.published(ids[:: -(-len(ids) // _AGE_ROWS)])


def _rows_of(column: Column, rows: slice) -> Column:
    """Some rows of a view, as a view."""
    if not isinstance(column, Values):
        return column[rows]
    ends = column.offsets[rows.start : rows.stop + 1]
    return Values(column.data[ends[0] : ends[-1]], ends - ends[0])
