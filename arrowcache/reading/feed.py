"""Feed: gives one iterator its jobs: those of one epoch, or of one epoch after another.

It owns the epochs that are under way, and their snapshots, until all their batches are made or the stream
ends. The next epoch begins when the last batch of one is under way, so that there is no seam. Runs in the
consumer's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from arrowcache.reading.assembly import Assembly
from arrowcache.reading.epoch import Epoch, Epochs
from arrowcache.reading.parking import Parking
from arrowcache.reading.patience import Wait
from arrowcache.reading.pipeline import LATER, Job, Made, Pending, Pipeline, Stream
from arrowcache.reading.snapshot import Snapshot

if TYPE_CHECKING:
    from arrowcache.reading.workers.remote import RemoteAssembly

_MOST_AHEAD = 8  # epochs, where they are short
_LOOKS = 2  # slices of `Epochs.look_ahead`
_MANY_SEGMENTS = 1000  # so many are listed, leased and mapped in some 2 ms


class Feed:
    """Jobs for one stream.

    Args:
        parking: keeps the last epoch's snapshot for a second.
        epoch: the first one, begun already.
        endless: the next epoch follows when the last batch of one is under way.
    """

    def __init__(
        self,
        epochs: Epochs,
        assembly: Assembly | RemoteAssembly,
        pipeline: Pipeline,
        parking: Parking,
        epoch: Epoch,
        *,
        endless: bool,
    ) -> None:
        self._epochs, self._assembly = epochs, assembly
        self._pipeline, self._parking = pipeline, parking
        self._making = [epoch]  # of which batches are to be made, or under way; the newest comes last
        self._undelivered = [epoch]  # with batches that nobody may have got
        self._endless = endless
        self.stream = Stream(self._jobs, self._let_go)

    def _jobs(self) -> Iterator[Job]:
        epoch: Epoch | None = self._making[0]
        is_awaited = True
        while epoch is not None:
            ahead = itertools.chain(self._epochs.look_ahead(), self._epochs.take_ahead())
            yield from self._jobs_of(epoch, itertools.islice(ahead, _LOOKS), is_awaited=is_awaited)
            if not self._endless:
                return
            is_awaited = False
            while self._is_busy and sum(not each.is_delivered for each in self._undelivered) > _MOST_AHEAD:
                yield LATER  # what begins later sees more rows
            try:
                yield from self._in_slices(epoch, ahead)
                following = self._epochs.begin_after(epoch)
            finally:
                self._epochs.drop_ahead()
            if following is None:
                while self._is_busy:
                    yield LATER  # first all is delivered: the next epoch has to wait
                retire = partial(self._retire, epoch)
                following = self._epochs.begin_after(epoch, Wait(lambda: self.stream.ended, retire))
            epoch = self._keep(following)

    def _in_slices(self, epoch: Epoch, work: Iterator[None]) -> Iterator[Job]:
        """Do what comes before the next epoch, a slice in a step, where that is much."""
        is_over = len(epoch.snapshot.seqs) < _MANY_SEGMENTS
        while not is_over:
            while self._is_busy and not self.stream.ready:
                yield LATER  # in the same step: it has a batch then
            is_over = next(work, self) is self
            if self._is_busy and not is_over:
                yield LATER

    @property
    def _is_busy(self) -> bool:
        return bool(self.stream.begun or self.stream.ready)

    def _jobs_of(self, epoch: Epoch, looks: Iterator[None], *, is_awaited: bool) -> Iterator[Job]:
        is_many = len(epoch.snapshot.seqs) >= _MANY_SEGMENTS
        for job in self._assembly.jobs(epoch, awaited=is_awaited):
            if self._endless and is_many and job.step + 3 * job.batches >= epoch.order.steps:
                next(looks, None)
            is_last = job.step + job.batches >= epoch.order.steps
            if self._endless and is_last:
                yield job._replace(finish=partial(self._finish_last, job.finish, epoch))
            else:
                yield job

    def _finish_last(
        self, finish: Callable[[Pending], Iterator[Made]], epoch: Epoch, pending: Pending
    ) -> Iterator[Made]:
        """Make the last batches of an epoch; then let go of it, if the next one has mapped what both read."""
        made = finish(pending)
        yield from made
        if epoch is not self._making[-1]:
            is_many = len(epoch.snapshot.seqs) >= _MANY_SEGMENTS
            self._retire(epoch, self._parking.leave if is_many else Snapshot.close)

    def _keep(self, epoch: Epoch | None) -> Epoch | None:
        """Have an epoch under way from now on. Returns: None: there is none, or the stream has ended."""
        if epoch is None:
            return None

        def keep() -> None:
            self._making.append(epoch)
            self._undelivered = [each for each in self._undelivered if not each.is_delivered] + [epoch]

        if self._pipeline.unless_ended(self.stream, keep):
            for each in self._making[:-1]:
                if not self.stream.begun:  # else the last of its jobs does that
                    self._retire(each)
            return epoch
        if epoch not in self._making:  # else whoever ended the stream ended it
            epoch.end()
        return None

    def _retire(self, epoch: Epoch, leave_to: Callable[[Snapshot], None] = Snapshot.close) -> None:
        """Let go of an epoch whose batches are all made. Idempotent."""
        self._assembly.end(epoch)
        self._parking.drop()
        epoch.let_go(leave_to)
        self._making = [each for each in self._making if each is not epoch or each is self._making[-1]]

    def _let_go(self) -> None:
        *older, newest = self._making
        for epoch in older:
            self._retire(epoch)
        self._assembly.end(newest)
        # After a failure it is not parked: the next epoch checks its segments anew.
        newest.let_go(Snapshot.close if self.stream.has_failed else self._parking.park)
        for each in self._undelivered:
            each.end()
