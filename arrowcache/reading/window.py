"""Window: an epoch for a device that shuffles by itself: runs of rows, and each step's places in its ring.

Rows are copied in the order of their files, some megabytes at a time, into a ring of rows on the device
(filling.py says which). A step is then a list of its rows' places in the ring. So the host copies runs of
rows, and the order is the epoch's, whatever it is. Columns without a fixed width are gathered here, step by
step. So is every step with padding, or whose rows lie too far apart for the ring, such as where a segment is
larger than the window.

Guarantee: `number` counts runs and steps, over all epochs of a stream. Once all runs before a step have
arrived, the ring has all rows that the step refers to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.segment import row_bytes
from arrowcache.reading.assembly import Assembly, Batch, BatchRows, Gathered, Memory, mean_published
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.fetching import FETCHED_BYTES
from arrowcache.reading.filling import Filling
from arrowcache.reading.gather import Gather
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.order import EvenOrder
from arrowcache.reading.portion import Portion, ReadyBatch
from arrowcache.reading.slots import Slot
from arrowcache.reading.stats import Meter
from arrowcache.reading.values import column_bytes
from arrowcache.storage.store import Store

_RUN_BYTES = 4 << 20  # bytes copied at a time: a longer copy is not quicker
_LEAST_RUNS = 8  # least number of runs that a ring holds
_UNDER_WAY = 8  # number of runs and steps under way


class Run(NamedTuple):
    """Rows on their way into the ring: columns of fixed width, (rows, *shape) each, from a place on."""

    number: int
    columns: dict[str, Any]
    place: int


class Step(NamedTuple):
    """A batch: (rows,) int64 places in the ring, and its other columns. places is None if these are all."""

    number: int
    places: Any
    others: Batch


class WindowAssembly(Assembly):
    """Makes portions of epochs: runs, whose `ReadyBatch` has no rows, and steps.

    The ring holds two windows: one in use, and room for the next rows.
    """

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter, memory: Memory) -> None:
        settings = store.settings
        window_bytes = min(options.window_nbytes, settings.capacity_bytes)
        self.ring_rows = max(1, 2 * window_bytes // row_bytes(settings.schema))
        self._numbers: Iterator[int] = itertools.count()
        super().__init__(store, options, meter, memory)
        self._run_rows = max(1, min(_RUN_BYTES // self._row_bytes, self.ring_rows // _LEAST_RUNS))
        self._lend_rows(self._run_rows, memory)
        self._others = tuple(name for name in self.names if name not in self._fixed)

    def wanted(self) -> int:
        return self._options.prefetch or _UNDER_WAY

    def portions(self, epoch: Epoch, *, awaited: bool) -> Iterator[Portion]:
        """Yield an epoch's runs and steps, in order; each `next` begins one.

        Args:
            awaited: True for the first epoch of its stream.
        """
        snapshot, order = epoch.snapshot, epoch.order
        assert isinstance(order, EvenOrder)  # batches by tokens are not of shuffle="window"
        pass_rows, ids_of = order.selected.size, order.selected.ids
        snapshot.temperature = self.temperature
        if awaited:
            self._numbers = itertools.count()
        filling = Filling(order, pass_rows, self.ring_rows, self._run_rows)
        ahead_rows, fetched = FETCHED_BYTES // snapshot.row_bytes, 0  # asked of the disk, by the line
        for step in range(order.steps):
            line = order.in_line(step)
            runs = None if line is None else filling.before(step)
            for run in runs or ():
                first = run.start % pass_rows
                last = min(first + len(run) + ahead_rows, pass_rows)
                ahead = range(max(fetched, run.start), run.start - first + last)
                fetched = max(fetched, ahead.stop)
                fetches = []
                if ahead:
                    begin, end = ids_of(np.array([ahead[0] % pass_rows, last - 1])).tolist()
                    fetches.append(snapshot.fetch(begin, end + 1, self.names))
                ids = ids_of(np.arange(first, first + len(run)))
                yield _GatheredRun(self, BatchRows(epoch, ids, 0.0), fetches, run.start % self.ring_rows)
            if line is None or runs is None:
                yield self._step(epoch, order.batches(step, step + 1), None)
            else:
                yield self._step(epoch, ids_of(line % pass_rows), line % self.ring_rows)

    def run(self, columns: Batch, place: int, epoch: Epoch) -> ReadyBatch:
        """Return a run as a `ReadyBatch` without rows: only steps count."""
        return ReadyBatch(Run(next(self._numbers), columns, place), 0, 0, 0, 0.0, epoch)

    def step(self, rows: BatchRows, places: NDArray[np.int64] | None, columns: Batch) -> ReadyBatch:
        """Return a step as a `ReadyBatch`. `places` is None if `columns` are the whole batch."""
        count = len(rows.ids)
        nbytes = sum(map(column_bytes, columns.values()))
        if places is not None:
            nbytes += count * self._row_bytes
        if self._options.with_ids:
            columns |= rows.epoch.snapshot.locate(rows.ids)
        made = Step(next(self._numbers), places, columns)
        return ReadyBatch(made, count, nbytes, nbytes, rows.published, rows.epoch)

    def _step(self, epoch: Epoch, ids: NDArray[np.int64], places: NDArray[np.int64] | None) -> Portion:
        rows = BatchRows(epoch, ids, mean_published(epoch, ids))
        if places is None:
            return _GatheredStep(self, rows, self.names, self.slots.lend(len(ids)), None)
        if self._others:
            return _GatheredStep(self, rows, self._others, Slot(len(ids), [], {}), places)
        return _PlacedStep(self, rows, places)

    @property
    def fixed(self) -> tuple[str, ...]:
        """The names of the columns that go through the ring."""
        return self._fixed


class _GatheredRun(Gathered):
    def __init__(
        self, window: WindowAssembly, rows: BatchRows, fetches: Sequence[Gather], place: int
    ) -> None:
        super().__init__(window, rows, 1, fetches, window.fixed, window.slots.lend(len(rows.ids)))
        self._window, self._place = window, place

    def made(self) -> Iterable[ReadyBatch]:
        return [self._window.run(self.columns(), self._place, self.epoch)]


class _GatheredStep(Gathered):
    def __init__(
        self,
        window: WindowAssembly,
        rows: BatchRows,
        names: Sequence[str],
        slot: Slot,
        places: NDArray[np.int64] | None,
    ) -> None:
        super().__init__(window, rows, 1, (), names, slot)
        self._window, self._places = window, places

    def made(self) -> Iterable[ReadyBatch]:
        return [self._window.step(self._rows, self._places, self.columns())]


class _PlacedStep(Portion):
    """A step all of whose rows are in the ring."""

    def __init__(self, window: WindowAssembly, rows: BatchRows, places: NDArray[np.int64]) -> None:
        super().__init__(rows.epoch, 1)
        self._window, self._rows, self._places = window, rows, places

    def made(self) -> Iterable[ReadyBatch]:
        return [self._window.step(self._rows, self._places, {})]
