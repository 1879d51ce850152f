"""Assembly: how the batches of an epoch are made: into which memory, by which calls.

It cuts an epoch into jobs, in step order; the pipeline decides when they run. A batch that is one run of
rows of one segment is a zero-copy view, where the order has such runs; every other is gathered into the
ring by the engine's threads, a job each. Where there is a transform, threads of a crew gather and transform.
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
from arrowcache.reading.pieces import pieces
from arrowcache.reading.pipeline import Done, Elsewhere, Job, Made
from arrowcache.reading.ring import Group, Ring
from arrowcache.reading.snapshot import Gathering, Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.values import Column, Values, column_bytes
from arrowcache.reading.view import Viewer
from arrowcache.storage.store import Store

Batch = dict[str, Any]

_VIEWS = 8  # a group of batches that take no memory
_AGE_ROWS = 64  # of each batch, whose age is looked up
_DRAWN_ROWS = 4096  # of the order, at once
_WARM_BYTES = 8 << 20  # under way: more slots leave the processor's cache
_MOST_UNDER_WAY = 8


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
        self._workers = workers
        self._meter = meter
        self._views_required = False
        columns = {n: (schema.fixed[n].shape, schema.fixed[n].numpy_dtype) for n in self._fixed}
        self._row_bytes = sum(schema.fixed[name].row_bytes for name in self._fixed)
        self._crew = None if transform is None else Crew(max(1, workers))
        batch_bytes = max(1, self._row_bytes * batch_size)
        usual = max(2, min(_MOST_UNDER_WAY, _WARM_BYTES // batch_bytes))
        self.wanted = (usual if prefetch is None else prefetch) + workers
        self._new_ring = partial(Ring, columns, batch_size, self.wanted, group_bytes=0)
        self.ring = self._new_ring()
        self._group = 1 if self._viewer is None else _VIEWS  # batches of a job

    def gather_into(
        self, allocate: Callable[[int], NDArray[np.uint8]], group_bytes: int = 0, most: int = 1
    ) -> None:
        """Have batches gathered into memory that this gives, as of `Ring`, before any is made.

        Args:
            group_bytes: of batches that lie side by side, a job.
            most: of them.
        """
        self._new_ring = partial(self._new_ring, allocate=allocate, group_bytes=group_bytes)
        self.ring = self._new_ring()
        if self._viewer is None:
            self._group = max(1, min(self.ring.largest_group, most))

    def after_fork(self) -> None:
        """In a child: another thread may have been at the ring, and will never be done."""
        self.ring = self._new_ring()

    def jobs(self, epoch: Epoch, *, awaited: bool) -> Iterator[Job]:
        """An epoch's batches, cut into jobs; `awaited`: somebody waits for the first."""
        step, steps = 0, epoch.order.steps
        ids, drawn_from, drawn_to = np.empty(0, np.int64), 0, 0  # of several jobs at once
        while step < steps:
            size = 1 if (awaited and not step) or self.ring.is_hoarded else self._group
            if step == drawn_to:
                drawn = size if not step else max(size, _DRAWN_ROWS // self._batch_size)
                drawn_from, drawn_to = step, min(step + drawn, steps)
                ids = epoch.order.batches(drawn_from, drawn_to)
            last = min(step + size, drawn_to)
            first_row = (step - drawn_from) * self._batch_size
            yield self._job(epoch, step, ids[first_row : (last - drawn_from) * self._batch_size], last - step)
            step = last

    def end(self, epoch: Epoch) -> None:
        """Nothing more is made of an epoch; call it before its snapshot is closed."""

    def drop(self) -> None:
        """Let go of what is leased of epochs that ended: nothing here."""

    def close(self) -> None:
        """End the threads of a transform."""
        if self._crew is not None:
            self._crew.stop()

    def require_views(self) -> None:
        """Have a batch that cannot be a view raise ValueError."""
        self._views_required = True

    def ring_stats(self) -> tuple[int, int]:
        """Bytes of memory for batches, and how often some was added."""
        return self.ring.allocated_bytes, self.ring.growths

    def in_progress(self) -> list[tuple[str, float]]:
        """What other processes are at: the stage, and since when."""
        return []

    def _job(self, epoch: Epoch, step: int, ids: NDArray[np.int64], batches: int) -> Job:
        if self._transform is not None:
            return Job(step, batches, partial(self._begin_crew, epoch, ids, batches), _of_crew)
        if self._viewer is not None:
            return Job(step, batches, Done, lambda _: self._plain(epoch, ids, batches))
        return Job(
            step, batches, partial(self._begin, epoch, ids), partial(self._finish, epoch, ids, batches)
        )

    def _begin(self, epoch: Epoch, ids: NDArray[np.int64]) -> Gathered:
        memory = self.ring.take(len(ids))
        return Gathered(memory, epoch.snapshot.begin_gather(ids, memory.arrays()), self._meter)

    def _finish(
        self, epoch: Epoch, ids: NDArray[np.int64], batches: int, gathered: Gathered
    ) -> Iterator[list[Made]]:
        self._note(epoch, was_on_disk=gathered.was_on_disk)
        yield self._hand_out(epoch, ids, batches, gathered.memory, mean_published(epoch, ids))

    def _begin_crew(self, epoch: Epoch, ids: NDArray[np.int64], batches: int) -> Elsewhere:
        transform, crew = self._transform, self._crew
        assert transform is not None
        assert crew is not None

        def make() -> list[Made]:
            made = next(self._plain(epoch, ids, batches))
            with self._meter.stage("transform"):
                return [plain._replace(batch=transform(plain.batch)) for plain in made]

        return Elsewhere(crew.submit(make))

    def _plain(self, epoch: Epoch, ids: NDArray[np.int64], batches: int) -> Iterator[list[Made]]:
        """Batches without a transform, made here and now; those before one that fails come first."""
        made: list[Made] = []
        failure: BaseException | None = None
        published = mean_published(epoch, ids)
        with self._meter.reading() as reading:
            try:
                if self._viewer is not None:
                    self._views(self._viewer, epoch, ids, published, made)
                else:
                    memory = self.ring.take(len(ids))
                    self._gather(epoch.snapshot, ids, memory)
                    made += self._hand_out(epoch, ids, batches, memory, published)
            except BaseException as error:  # noqa: BLE001
                failure = error
        self._note(epoch, was_on_disk=reading.was_on_disk)
        try:
            if made:
                yield [made.pop(0) for _ in range(len(made))]
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback has this frame

    def _note(self, epoch: Epoch, *, was_on_disk: bool) -> None:
        epoch.snapshot.asks_ahead = was_on_disk
        epoch.is_cold |= was_on_disk

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


class Gathered:
    """Rows on their way into a group, as of `Pending`; waiting for them counts as "gather" or "store"."""

    def __init__(self, memory: Group, gathering: Gathering, meter: Meter) -> None:
        self.memory, self._gathering, self._meter = memory, gathering, meter
        self._seconds = 0.0

    def take(self, seconds: float) -> bool:
        started = self._meter.enter("gather")
        has_ended = False
        try:
            has_ended = self._gathering.take(seconds)
        finally:
            self._seconds += time.perf_counter() - started
            self._meter.leave({"store" if self.was_on_disk else "gather": self._seconds} if has_ended else {})
        return has_ended

    def cancel(self) -> None:
        self._gathering.cancel()
        self.memory.close()

    @property
    def was_on_disk(self) -> bool:
        return self._gathering.was_on_disk


def _of_crew(done: Elsewhere) -> Iterator[list[Made]]:
    made = done.future.result()
    yield [made.pop(0) for _ in range(len(made))]


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
