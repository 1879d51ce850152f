"""Remote assembly: has worker processes make the batches of an epoch.

It is the counterpart of assembly.py. It cuts an epoch into jobs, in step order; each is one request to the
pool. The pool starts as soon as an epoch is wanted, and ends when this is closed or dropped, or when the
interpreter ends. With a transform a job is one batch, so that transforms run side by side. Without one, if
all columns have a fixed width, a job is a group of batches, which a worker gathers at once.

A process takes longer to import NumPy and Arrow than many an epoch takes. So batches without a transform are
made in this process until the first worker is ready.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema
from arrowcache.errors import WorkerError
from arrowcache.pickling import pickled
from arrowcache.reading.assembly import Assembly, Batch, mean_published
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.pipeline import Elsewhere, Job, Made
from arrowcache.reading.stats import Meter
from arrowcache.reading.workers.handle import Finished
from arrowcache.reading.workers.pool import DEPTH, Pool
from arrowcache.reading.workers.segment_list import pack_segments
from arrowcache.shortage import explaining
from arrowcache.storage.store import Store

_PREFETCHED = 4
_MANY_BATCHES = 8  # and two for each usual one: more than prefetching and one in hand need
_USUAL_GROUP_BYTES = 32 << 20  # each group is a few hand-overs between three threads of this process


class RemoteAssembly:
    """Makes jobs of epochs for worker processes, whose pool it owns.

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
        prefetch = _PREFETCHED if prefetch is None else prefetch
        in_flight = DEPTH * workers
        self._usual = in_flight + prefetch + 3  # slots that are in use at a time
        self._settings = {
            "cache": os.path.abspath(store.folder.path),
            "names": list(names),
            "in_flight": -(-self._usual // workers),
            "with_ids": with_ids,
            "views": views,
            "keeps": False,
        }
        self._transform = b""
        if transform is not None:
            self._transform = pickled(transform, "the transform {!r}", "pass worker_type='thread'")
        row_bytes = sum(schema.fixed[name].row_bytes for name in names if name in schema.fixed)
        can_group = transform is None and all(name in schema.fixed for name in names)
        self._group = max(1, _USUAL_GROUP_BYTES // max(1, row_bytes * batch_size)) if can_group else 1
        self._wanted = prefetch + in_flight * self._group
        self._workers = workers
        self._new_here = partial(
            Assembly, store, names, batch_size, None,
            with_ids=with_ids, views=False, workers=0, prefetch=None, meter=meter,
        )  # fmt: skip
        self._here = self._new_here() if transform is None else None  # until a process is ready
        self._lock = threading.Lock()  # of the start
        self._pool: Pool | None = None
        self._end_pool: Callable[[], object] = _nothing
        self._is_closed = False
        self._epoch: tuple[Epoch, int] | None = None  # and its number for the pool

    def gather_into(self, allocate: Callable[[int], NDArray[np.uint8]]) -> None:  # noqa: ARG002
        """Have batches lie in memory that a device may register, before any is made."""
        self._settings["keeps"] = True

    def prepare(self) -> None:
        """An epoch is wanted soon: start the processes; returns at once.

        Raises: WorkerError, OSError: no thread, or no descriptor, can be had.
        """
        self._started()

    def wanted(self) -> int:
        """The number of batches that are to be under way or ready."""
        return self._wanted if self._here is None else self._here.wanted()

    def jobs(self, epoch: Epoch, *, awaited: bool) -> Iterator[Job]:
        """An epoch's batches, cut into jobs; `awaited`: somebody waits for the first."""
        pool = self._started()
        number = pool.begin(pack_segments(epoch.snapshot.segments))
        self._epoch = epoch, number
        step = 0
        for job in self._jobs_here(pool, epoch, awaited=awaited):
            yield job
            step = job.step + job.batches
        size = 1 if awaited and not step else self._group
        while step < epoch.order.steps:
            is_hoarded = pool.is_hoarded(_MANY_BATCHES + 2 * self._usual)
            last = min(step + (1 if is_hoarded else size), epoch.order.steps)
            yield self._job(pool, epoch, number, step, epoch.order.batches(step, last), last - step)
            step, size = last, min(2 * size, self._group)

    def end(self, epoch: Epoch) -> None:
        """Have nothing more made of an epoch; call it before its snapshot is closed."""
        if self._pool is not None and self._epoch is not None and self._epoch[0] is epoch:
            self._pool.end(self._epoch[1])
            self._epoch = None

    def drop(self) -> None:
        """Have workers let go of what they lease of epochs that ended."""
        if self._pool is not None:
            self._pool.drop()

    def close(self) -> None:
        """End the processes. Idempotent. Blocks: at most some seconds."""
        self._is_closed = True
        self._end_pool()

    def after_fork(self) -> None:
        """In a child: the pool starts anew; the lock may be held for ever."""
        self._here = None if self._transform else self._new_here()
        self._lock, self._pool, self._end_pool, self._epoch = threading.Lock(), None, _nothing, None

    def require_views(self) -> None:
        """Raises: ValueError: workers copy every batch."""
        raise ValueError(
            "worker processes copy every batch into shared memory: pass worker_type='thread' or workers=0"
        )

    def ring_stats(self) -> tuple[int, int]:
        """Bytes of memory for batches, and how often some was added."""
        here, pool = self._here, self._pool
        parts = (here.ring_stats() if here else (0, 0), pool.memory if pool else (0, 0))
        return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]

    def in_progress(self) -> list[tuple[str, float]]:
        """The stages that workers are at, and since when."""
        return [] if self._pool is None else self._pool.in_progress()

    def _jobs_here(self, pool: Pool, epoch: Epoch, *, awaited: bool) -> Iterator[Job]:
        """The first jobs, while no process is ready."""
        if self._here is not None:
            for job in self._here.jobs(epoch, awaited=awaited):
                if not pool.is_starting:
                    self._here = None  # with its memory
                    return
                yield job

    def _started(self) -> Pool:
        with self._lock:
            if self._is_closed:
                raise ValueError("the loader is closed: make a new one")
            if self._pool is None:
                with explaining():
                    pool = Pool(self._workers, self._settings, self._transform)
                end = weakref.finalize(self, Pool.close, pool)
                try:
                    pool.start()
                except WorkerError:  # another call tries anew
                    end.detach()
                    raise
                self._pool, self._end_pool = pool, end
            return self._pool

    def _job(
        self, pool: Pool, epoch: Epoch, number: int, step: int, ids: NDArray[np.int64], batches: int
    ) -> Job:
        oldest = epoch.order.segments_span(epoch.delivered).start
        published = mean_published(epoch, ids)

        def begin() -> Elsewhere:
            return Elsewhere(pool.make(number, step, ids, oldest))

        return Job(step, batches, begin, partial(self._finish, epoch, len(ids), batches, published))

    def _finish(
        self, epoch: Epoch, rows: int, batches: int, published: float, done: Elsewhere
    ) -> Iterator[Made]:
        finished: Finished = done.result()
        if self._pool is not None:
            self._meter.add("start", self._pool.take_start_seconds())
        self._meter.leave(finished.seconds)
        for number in range(batches):
            of_batch = slice(number * self._batch_size, min(rows, (number + 1) * self._batch_size))
            count = of_batch.stop - of_batch.start
            nbytes = finished.nbytes * count // rows
            batch = finished.batch(of_batch if batches > 1 else None)
            yield Made(batch, count, nbytes, nbytes, published, epoch)
            del batch


def _nothing() -> None:
    pass
