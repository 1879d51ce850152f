"""Remote assembly: how the batches of an epoch are made by worker processes.

The counterpart of assembly.py: it cuts an epoch into jobs, in step order, each of them one request
to the crew. With a transform a job is one batch, so that transforms run side by side; without one,
and if all columns have a fixed width, a job gathers a group of batches in one call a column.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema
from arrowcache.reading.assembly import Batch, mean_published
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.pipeline import Elsewhere, Job, Made
from arrowcache.reading.stats import Meter
from arrowcache.reading.workers.crew import Crew
from arrowcache.reading.workers.parcel import pack_transform
from arrowcache.reading.workers.request import Finished
from arrowcache.storage.store import Store

_PREFETCHED = 4
_USUAL_GROUP_BYTES = 32 << 20  # each group is a few hand-overs between three threads of this process


class RemoteAssembly:
    """Makes jobs of epochs for a crew, which it owns.

    Args: as Assembly's.
    Raises: TypeError: the transform cannot be pickled.
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
        schema: Schema = store.settings.schema
        self._batch_size = batch_size
        self._meter = meter
        settings = {
            "cache": os.path.abspath(store.folder.path),
            "names": list(names),
            "batch_size": batch_size,
            "with_ids": with_ids,
            "views": views,
        }
        packed = b"" if transform is None else pack_transform(transform)
        prefetch = _PREFETCHED if prefetch is None else prefetch
        self.crew = Crew(workers, settings, packed, batch_size, prefetch)
        row_bytes = sum(schema.fixed[name].row_bytes for name in names if name in schema.fixed)
        can_group = transform is None and all(name in schema.fixed for name in names)
        usual = max(1, _USUAL_GROUP_BYTES // max(1, row_bytes * batch_size)) if can_group else 1
        self._group = usual
        self._wanted = prefetch + self.crew.in_flight * usual
        self._epoch: tuple[Epoch, int] | None = None  # and its number for the crew

    def wanted(self) -> int:
        """How many batches are to be under way or ready."""
        return self._wanted

    def jobs(self, epoch: Epoch, *, awaited: bool) -> Iterator[Job]:
        """An epoch's batches, cut into jobs; `awaited`: somebody waits for the first."""
        number = self.crew.begin(epoch.snapshot.segments)
        self._epoch = epoch, number
        step, size = 0, 1 if awaited else self._group
        while step < epoch.order.steps:
            last = min(step + (1 if self.crew.is_hoarded else size), epoch.order.steps)
            yield self._job(epoch, number, step, epoch.order.batches(step, last), last - step)
            step, size = last, min(2 * size, self._group)

    def end(self, epoch: Epoch) -> None:
        """Have nothing more made of an epoch; call it before its snapshot is closed."""
        if self._epoch is not None and self._epoch[0] is epoch:
            self.crew.end(self._epoch[1])
            self._epoch = None

    def drop(self) -> None:
        """Have workers let go of what they lease of epochs that ended."""
        self.crew.drop()

    def close(self) -> None:
        """End the processes."""
        self.crew.close()

    def after_fork(self) -> None:
        """In a child: the crew starts anew by itself."""

    def require_views(self) -> None:
        """Refuse: it is what workers cannot do."""
        raise ValueError(
            "worker processes copy every batch into shared memory: pass worker_type='thread' or workers=0"
        )

    def ring_stats(self) -> tuple[int, int]:
        """Bytes of shared memory for batches, and how often some was added."""
        return self.crew.allocated_bytes, self.crew.growths

    def in_progress(self) -> list[tuple[str, float]]:
        """What workers are at: the stage, and since when."""
        return self.crew.in_progress()

    def _job(self, epoch: Epoch, number: int, step: int, ids: NDArray[np.int64], batches: int) -> Job:
        oldest = epoch.order.segments_span(epoch.delivered).start
        published = mean_published(epoch, ids)

        def begin() -> Elsewhere:
            return Elsewhere(self.crew.make(number, step, ids, oldest))

        return Job(step, batches, begin, partial(self._finish, epoch, len(ids), batches, published))

    def _finish(
        self, epoch: Epoch, rows: int, batches: int, published: float, done: Elsewhere
    ) -> Iterator[Made]:
        finished: Finished = done.result()
        self._meter.leave(finished.seconds)
        for number in range(batches):
            of_batch = slice(number * self._batch_size, min(rows, (number + 1) * self._batch_size))
            count = of_batch.stop - of_batch.start
            nbytes = finished.nbytes * count // rows
            batch = finished.batch(of_batch if batches > 1 else slice(None))
            yield Made(batch, count, nbytes, nbytes, published, epoch)
            del batch
        finished.close()
