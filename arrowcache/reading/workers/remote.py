"""Remote assembly: has worker processes make the batches of an epoch.

It is the counterpart of assembly.py. It cuts an epoch into portions, in step order; each is one request to
the pool. The pool starts as soon as an epoch is wanted, and ends when the assembly is closed or dropped, or
when the interpreter ends. With a transform a portion is one batch, so that transforms run side by side.
Without one, if all columns have a fixed width, a portion has many batches, which a worker gathers at once.

A process takes longer to import NumPy and Arrow than many an epoch takes. So batches without a transform are
made in this process until the first worker is ready.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema
from arrowcache.lifetimes import finalizer
from arrowcache.pickling import pickled
from arrowcache.reading.assembly import MEMORY, Assembly, Memory, mean_published
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.portion import Elsewhere, Portion, ReadyBatch
from arrowcache.reading.stats import Meter
from arrowcache.reading.workers.handle import Finished
from arrowcache.reading.workers.pool import DEPTH, WorkerPool
from arrowcache.reading.workers.segment_list import pack_segments
from arrowcache.storage.store import Store

_PREFETCHED = 4
_MANY_BATCHES = 8  # plus two for each usual batch; prefetching and the batch in hand need fewer
_PORTION_BYTES = 32 << 20  # each portion is a few hand-overs between three threads of this process


class RemoteAssembly:
    """Makes portions of epochs for worker processes, whose pool it owns.

    Args: as Assembly's. If `memory` is not the usual, batches lie in memory that a device may register.
    Raises: TypeError: the transform cannot be pickled.
    """

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter, memory: Memory = MEMORY) -> None:
        schema: Schema = store.settings.schema
        names, transform = options.names, options.transform
        self._batch_size = options.most_rows
        self._meter = meter
        prefetch = _PREFETCHED if options.prefetch is None else options.prefetch
        in_flight = DEPTH * options.workers
        self._usual = in_flight + prefetch + 3  # slots in use at a time
        self._settings = {
            "cache": os.path.abspath(store.folder.path),
            "names": list(names),
            "in_flight": -(-self._usual // options.workers),
            "with_ids": options.with_ids,
            "views": options.views,
            "keeps": memory is not MEMORY,
        }
        packed = b""
        if transform is not None:
            packed = pickled(transform, "the transform {!r}", "pass worker_type='thread'")
        row_bytes = sum(schema.fixed[name].row_bytes for name in names if name in schema.fixed)
        are_alike = all(name in schema.fixed for name in names) and options.budget is None
        are_together = transform is None and are_alike
        batch_bytes = max(1, row_bytes * self._batch_size)
        self._most_batches = max(1, _PORTION_BYTES // batch_bytes) if are_together else 1  # of a portion
        self._wanted = prefetch + in_flight * self._most_batches
        here = replace(options, settings=store.settings, workers=0, prefetch=None, may_view=False)
        self._new_here = partial(Assembly, store, here, meter)
        self._new_pool = partial(WorkerPool, options.workers, self._settings, packed)
        self._has_transform = transform is not None
        self.after_fork()

    def prepare(self) -> None:
        """Start the processes, as an epoch is wanted soon; returns at once.

        Raises: WorkerError: no thread can be started.
        """
        self._pool.start()

    def wanted(self) -> int:
        return self._wanted if self._here is None else self._here.wanted()

    def portions(self, epoch: Epoch, *, awaited: bool) -> Iterator[Portion]:
        pool = self._pool
        pool.start()
        number = pool.begin(pack_segments(epoch.snapshot.segments))
        epoch.on_end = partial(pool.end, number)
        step = 0
        for portion in self._portions_here(pool, epoch, awaited=awaited):
            yield portion
            step += portion.batches
        size = 1 if awaited and not step else self._most_batches
        while step < epoch.order.steps:
            is_hoarded = pool.is_hoarded(_MANY_BATCHES + 2 * self._usual)
            last = min(step + (1 if is_hoarded else size), epoch.order.steps)
            yield self._portion(pool, epoch, number, step, epoch.order.batches(step, last), last - step)
            step, size = last, min(2 * size, self._most_batches)

    def drop(self) -> None:
        self._pool.drop()

    def close(self) -> None:
        """End the processes. Idempotent. Blocks: at most some seconds."""
        self._pool.close()

    def after_fork(self) -> None:
        """Begin anew, in a forked child and at first: no process is started."""
        self._here = None if self._has_transform else self._new_here()  # until a process is ready
        self._pool = self._new_pool()
        finalizer(self, WorkerPool.close, self._pool)

    def require_views(self) -> None:
        """Raises: ValueError: workers copy every batch."""
        raise ValueError(
            "worker processes copy every batch into shared memory: pass worker_type='thread' or workers=0"
        )

    def slot_stats(self) -> tuple[int, int]:
        here = (0, 0) if self._here is None else self._here.slot_stats()
        nbytes, growths = self._pool.memory
        return here[0] + nbytes, here[1] + growths

    def in_progress(self) -> list[tuple[str, float]]:
        return self._pool.in_progress()

    def _portions_here(self, pool: WorkerPool, epoch: Epoch, *, awaited: bool) -> Iterator[Portion]:
        """Make the first portions in this process, while no worker is ready."""
        if self._here is not None:
            portions = self._here.portions(epoch, awaited=awaited)
            while pool.is_starting and (portion := next(portions, None)) is not None:
                yield portion
            if not pool.is_starting:
                self._here = None  # frees its memory

    def _portion(
        self, pool: WorkerPool, epoch: Epoch, number: int, step: int, ids: NDArray[np.int64], batches: int
    ) -> Portion:
        oldest = epoch.order.segments_span(epoch.delivered).start
        published = mean_published(epoch, ids)

        made = pool.make(number, step, ids, oldest)
        return Elsewhere(epoch, batches, made, partial(self._finish, epoch, len(ids), batches, published))

    def _finish(
        self, epoch: Epoch, rows: int, batches: int, published: float, finished: Finished
    ) -> Iterator[ReadyBatch]:
        self._meter.leave({"start": self._pool.take_start_seconds()})
        self._meter.leave(finished.seconds)
        for number in range(batches):
            of_batch = slice(number * self._batch_size, min(rows, (number + 1) * self._batch_size))
            count = of_batch.stop - of_batch.start
            nbytes = finished.nbytes * count // rows
            batch = finished.batch(of_batch if batches > 1 else None)
            yield ReadyBatch(batch, count, nbytes, nbytes, published, epoch)
            del batch
