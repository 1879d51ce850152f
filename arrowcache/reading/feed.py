"""Feed: what one iterator is fed with: the jobs of an epoch, or of one epoch after another.

It owns the epoch that is being made, and its snapshot until the stream ends, and tells the read-ahead
what comes next. Runs in the pipeline's thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from arrowcache.reading.assembly import Assembly
from arrowcache.reading.epoch import Epoch, Epochs
from arrowcache.reading.pipeline import BARRIER, Job, Pipeline, Stream
from arrowcache.reading.readahead import ReadAhead

_AHEAD_BYTES = 256 << 20  # of a pass in order


class Feed:
    """Jobs for one stream.

    Args:
        epoch: the first one, begun already.
        endless: whether the next follows when the last batch of one is made.
    """

    def __init__(
        self,
        epochs: Epochs,
        assembly: Assembly,
        pipeline: Pipeline,
        readahead: ReadAhead,
        epoch: Epoch,
        *,
        endless: bool,
    ) -> None:
        self._epochs, self._assembly = epochs, assembly
        self._pipeline, self._readahead = pipeline, readahead
        self._epoch = epoch  # the one being made
        self._endless = endless
        self.stream = Stream(self._jobs, self._let_go)

    def begin(self) -> None:
        self._pipeline.begin(self.stream)

    def _jobs(self) -> Iterator[Job]:
        awaited = True
        while True:
            yield from self._jobs_of(self._epoch, awaited)
            awaited = False
            yield BARRIER
            if not self._endless:
                return
            previous = self._epoch

            def stop_leasing(epoch: Epoch = previous) -> None:
                epoch.snapshot.close()
                self._readahead.drop()

            upcoming = self._epochs.begin_after(previous, lambda: self.stream.ended, stop_leasing)
            if upcoming is None:
                return
            if not self._pipeline.unless_ended(self.stream, partial(setattr, self, "_epoch", upcoming)):
                upcoming.snapshot.close()
                self._epochs.ended(upcoming)
                return
            previous.snapshot.close()  # after the new one: what both read stays mapped
            self._epochs.ended(previous)
            del previous, stop_leasing

    def _jobs_of(self, epoch: Epoch, awaited: bool) -> Iterator[Job]:
        shuffle, order, snapshot = epoch.plan.shuffle, epoch.order, epoch.snapshot
        in_order = shuffle in ("window", None)
        following = partial(self._epochs.prepare, epoch.plan.epoch + 1, snapshot.segments)
        self._readahead.follow(epoch, in_order=in_order, prepare=following)
        row_bytes = max(1, snapshot.nbytes // max(1, len(snapshot)))
        ahead_rows = epoch.plan.window_rows // 2 if shuffle == "window" else _AHEAD_BYTES // row_bytes
        ahead_steps = max(1, ahead_rows // self._epochs.step_rows)
        for job in self._assembly.jobs(epoch, awaited=awaited):
            if in_order:
                self._epochs.settle()
                last = min(job.step + ahead_steps, order.steps - 1)
                here = order.segments_span(job.step)
                self._readahead.reach(range(here.start, max(here.stop, order.segments_span(last).stop)))
            yield job

    def _let_go(self) -> None:
        epoch = self._epoch
        self._readahead.park(epoch.snapshot)
        self._epochs.ended(epoch)
