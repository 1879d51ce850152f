"""Feed: what one iterator is fed with: the jobs of an epoch, or of one epoch after another.

It owns the epoch that is being made, and its snapshot until the stream ends, and tells the read-ahead
what comes next. Runs in the consumer's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from arrowcache.reading.assembly import Assembly
from arrowcache.reading.epoch import Epoch, Epochs
from arrowcache.reading.pipeline import BARRIER, LATER, Job, Made, Pending, Pipeline, Stream
from arrowcache.reading.readahead import ReadAhead
from arrowcache.reading.stats import Meter

if TYPE_CHECKING:
    from arrowcache.reading.workers.remote import RemoteAssembly

_AHEAD_BYTES = 256 << 20  # of a pass in order
_LEAD_SECONDS, _LEAD_SHARE = 2.0, 0.1  # how long before an epoch is made the next one may begin
_POLL_SECONDS = 0.02


class Feed:
    """Jobs for one stream.

    Args:
        epoch: the first one, begun already.
        endless: whether the next follows when the last batch of one is made.
    """

    def __init__(
        self,
        epochs: Epochs,
        assembly: Assembly | RemoteAssembly,
        pipeline: Pipeline,
        readahead: ReadAhead,
        meter: Meter,
        epoch: Epoch,
        *,
        endless: bool,
    ) -> None:
        self._epochs, self._assembly = epochs, assembly
        self._pipeline, self._readahead, self._meter = pipeline, readahead, meter
        self._epoch = epoch  # the one being made
        self._upcoming: Epoch | None = None  # begun ahead
        self._undelivered = [epoch]  # with batches that nobody may have got; those made so far
        self._endless = endless
        self.stream = Stream(self._jobs, self._let_go)

    def _jobs(self) -> Iterator[Job]:
        awaited = True
        while True:
            ahead: Future[None] = Future()
            yield from self._jobs_of(self._epoch, awaited, ahead)
            awaited = False
            if not self._endless:
                return
            yield BARRIER
            if not ahead.running() and self._upcoming is None and self.stream.ready:
                self._begin_ahead(ahead)
            while self.stream.ready and self._upcoming is None:
                yield LATER  # first they are delivered: the next epoch may have to wait
            if not self._go_on(ahead):
                return

    def _jobs_of(self, epoch: Epoch, awaited: bool, ahead: Future[None]) -> Iterator[Job]:
        shuffle, order, snapshot = epoch.plan.shuffle, epoch.order, epoch.snapshot
        in_order = epoch.plan.is_in_order
        self._readahead.follow(epoch, in_order=in_order)
        ahead_rows = (
            epoch.plan.window_rows // 2 if shuffle == "window" else _AHEAD_BYTES // snapshot.row_bytes
        )
        ahead_steps = max(1, ahead_rows // self._epochs.step_rows)
        started, is_asked = time.perf_counter(), not self._endless
        for job in self._assembly.jobs(epoch, awaited=awaited):
            if in_order:
                self._epochs.settle()
                last = min(job.step + ahead_steps, order.steps - 1)
                here = order.segments_span(job.step)
                self._readahead.reach(range(here.start, max(here.stop, order.segments_span(last).stop)))
                if epoch.is_cold:
                    with self._meter.stage("store"):
                        self._readahead.wait_for(here, lambda: self.stream.ended)
            if not is_asked and job.step:
                left = (time.perf_counter() - started) / job.step * (order.steps - job.step)
                share = 1 - job.step / order.steps
                if left < _LEAD_SECONDS and share < _LEAD_SHARE:
                    is_asked = ahead.set_running_or_notify_cancel()
                    self._readahead.soon(partial(self._begin_ahead, ahead))
            yield job if job.step else job._replace(finish=partial(self._finish_first, job, epoch))

    def _finish_first(self, job: Job, epoch: Epoch, pending: Pending) -> Iterator[Made]:
        """Its batches, and what is not to be done beside an epoch's first one, for which somebody waits."""
        if not epoch.plan.is_in_order:
            self._readahead.reach_everything()
        return job.finish(pending)  # not a generator: an error's traceback would keep all of this

    def _begin_ahead(self, done: Future[None]) -> None:
        """Begin the next epoch, if there are rows enough: in the read-ahead's thread, if there is time.

        Beside a consumer that never lets go of the GIL, listing a folder takes far longer than the
        batches last that are ready by then.
        """
        try:
            epoch = self._epochs.try_begin_after(self._epoch)
            if epoch is not None:
                keep = partial(setattr, self, "_upcoming", epoch)
                if not self._pipeline.unless_ended(self.stream, keep):
                    self._drop(epoch)
                elif epoch.plan.is_in_order:  # it begins where this one gave up what it read
                    self._readahead.soon(partial(self._warm_first, epoch))
        finally:
            if not done.done():
                done.set_result(None)

    def _warm_first(self, epoch: Epoch) -> None:
        for index in epoch.order.segments_span(0):
            epoch.snapshot.warm(index, lambda: not self.stream.ended)

    def _go_on(self, ahead: Future[None]) -> bool:
        """Make the next epoch the one being made; False: the stream has ended."""
        while ahead.running():
            wait([ahead], timeout=_POLL_SECONDS)
            if not self._pipeline.unless_ended(self.stream, _nothing):
                return False
        previous, upcoming = self._epoch, self._upcoming
        if upcoming is None:
            stop_leasing = partial(self._stop_leasing, previous)
            upcoming = self._epochs.begin_after(previous, lambda: self.stream.ended, stop_leasing)
        if upcoming is None:
            return False

        def switch() -> None:
            self._epoch, self._upcoming = upcoming, None
            self._undelivered = [each for each in self._undelivered if not each.is_delivered] + [upcoming]

        if not self._pipeline.unless_ended(self.stream, switch):
            if self._upcoming is not upcoming:  # else whoever ended the stream dropped it
                self._drop(upcoming)
            return False
        self._assembly.end(previous)
        self._epochs.note_held_up(previous)
        self._readahead.retire([previous.snapshot])  # after the new one: what both read stays mapped
        self._readahead.soon(partial(self._epochs.ended, previous))
        return True

    def _stop_leasing(self, epoch: Epoch) -> None:
        self._assembly.end(epoch)
        self._epochs.note_held_up(epoch)
        epoch.snapshot.close()
        self._readahead.drop()

    def _drop(self, epoch: Epoch) -> None:
        self._assembly.end(epoch)
        self._epochs.drop(epoch)

    def _let_go(self) -> None:
        epoch, upcoming = self._epoch, self._upcoming
        if upcoming is not None:
            self._drop(upcoming)
        self._assembly.end(epoch)
        self._epochs.note_held_up(epoch)
        self._readahead.park(epoch.snapshot)
        self._epochs.ended(epoch)
        for each in self._undelivered:
            self._epochs.give_back(each)


def _nothing() -> None:
    pass
