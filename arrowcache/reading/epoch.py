"""Epoch: one pass over a snapshot, with all that it owns, and how the next one begins.

An `Epoch` owns all that it takes: the lease on its segments, its part in the ranks' agreement, its counts in
the cache. Its owner ends it by `end`, or by `with`: at any point, in any thread. `Epochs` decides
when there are enough rows, takes the snapshot (alone, or with the other ranks), and goes on from a loaded
state.
Guarantees: epochs are numbered 0, 1, 2, ...; none is empty but the rest of a resumed one; nothing is
leased while waiting for rows; the count of rows that an epoch did not serve is given back,
unless its process was killed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, CorruptSegmentError, MissingSegmentsError, warn
from arrowcache.lifetimes import Origin, at_exit, call_all
from arrowcache.reading.budget import BudgetOrder, bucket_count
from arrowcache.reading.lengths import Lengths
from arrowcache.reading.membership import Membership
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.order import EpochOrder, Order, Shard, order_of
from arrowcache.reading.packing import Within
from arrowcache.reading.patience import Patience, Wait
from arrowcache.reading.plan import Plan
from arrowcache.reading.ranks import Agreement
from arrowcache.reading.selected import ALL
from arrowcache.reading.shuffle import ORDER_VERSION
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.supply import Supply
from arrowcache.storage.cache_lock import once_unlocked
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store

if TYPE_CHECKING:
    from typing import Self


class Epoch:
    """One pass: its snapshot and order, the progress of its delivery, and its counts in the cache.

    It owns its snapshot, its part in the ranks' agreement, and its counts of rows and passes. The object
    exists before it owns any of them, so that ending it releases all, wherever its beginning failed. A forked
    child gives nothing back.
    """

    snapshot: Snapshot  # owned; set by `begin`, with the next two
    plan: Plan
    order: Order

    def __init__(
        self,
        planned: Plan,
        supply: Supply,
        agreement: Agreement | None,
        meter: Meter,
        shard: Shard,
        share: float = 1.0,
    ) -> None:
        self.shard = shard
        self.planned, self.number = planned, planned.epoch  # as of `Epochs.planned`
        self.delivered = 0  # steps
        self.within: Within | None = planned.within  # the bundle at its position
        self.steps: int | None = None  # batches of sequences, once their number is known
        self._supply, self._agreement, self._meter = supply, agreement, meter
        self._share, self._is_in_order = share, False
        self._rows = 0  # rows that count as served
        self._passes: tuple[NDArray[np.int64], int] | None = None  # passes over segments with these numbers
        self._origin = Origin()
        self._began = time.time()
        self._held_up_seconds = 0.0  # seconds that writers waited for its lease, counted so far
        self._is_unleased = False
        self.on_end: Callable[[], object] | None = None  # has others make no more batches of it
        _living.add(self)

    def begin(self, plan: Plan, order: Order) -> None:
        """Set what it reads, and count its rows as served."""
        if self._supply.is_paced:
            rows = round(order.rows_of(range(order.steps)) * self._share)
            with self._supply.store.locked():
                self._supply.store.usage.add_served(rows)
                self._rows = rows
        self.plan, self.order, self._is_in_order = plan, order, plan.is_in_order

    # what the cache counts

    def count(self, snapshot: Snapshot) -> bool:
        """Count its passes over a snapshot. Returns: False: others counted some; take another one."""
        supply, store, most = self._supply, self._supply.store, self._supply.most_passes()
        if not supply.is_paced:
            return True
        seqs, passes = snapshot.seqs, supply.passes_of(snapshot.selected.size)
        with store.locked():
            if most is not None and (store.usage.served(seqs) >= most).any():
                return False
            store.usage.count_epoch(seqs, passes)
            self._passes = seqs, passes
        supply.pace_says = ""
        return True

    def keep_passes(self) -> None:
        """Keep the count of its passes: other ranks may read the snapshot."""
        self._passes = None

    def give_back(self) -> None:
        """Take back the count of rows that were not served. Idempotent.

        Never fails: it may be called by the garbage collector, in a thread that has
        cache.lock.
        """
        served = round(self.order.rows_of(range(self.delivered)) * self._share) if self.delivered else 0
        rest, self._rows = self._rows - served, served
        passes, self._passes = None if served else self._passes, None
        if (rest > 0 or passes) and self._origin.is_here:
            once_unlocked(partial(self._supply.give_back, max(0, rest), passes))

    # how far it is

    def rest(self) -> Plan:
        """Return the part that was not delivered yet."""
        rest = self.order.rest(self.delivered)
        return rest if self.within is None else rest.at(rest.position, within=self.within)

    @property
    def is_delivered(self) -> bool:
        return self.delivered >= self.order.steps

    def deliver(self, count: int = 1, step: int | None = None, within: Within | None = None) -> None:
        """Count delivered steps. An epoch in order also releases segments that no later batch needs.

        Args:
            step: all batches before this step were delivered. None: they are delivered in order.
            within: how far the epoch is after them, within a bundle of documents.
        """
        self.delivered, self.within = self.delivered + count, within
        if self._is_in_order:
            oldest = self.order.segments_span(self.delivered if step is None else step).start
            if self.snapshot.release_oldest(oldest) and self._agreement is not None:
                self._agreement.settle()

    def note_held_up(self) -> None:
        """Count how long writers have waited for its lease. Call it before the lease ends. Never fails."""
        with suppress(OSError, ArrowCacheError):
            held_up_seconds = self._supply.store.held_up_seconds(self.snapshot.covers)
            waited = min(held_up_seconds, time.time() - self._began)
            more = max(0.0, waited - self._held_up_seconds)  # a wait that goes on counts once
            self._held_up_seconds += more
            self._meter.hold_up(more)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(
        self, leave_to: Callable[[Snapshot], None] = Snapshot.close, *, may_deliver: bool = False
    ) -> None:
        """End it: no more batches are made, and its segments are unleased. Idempotent; never fails.

        Args:
            leave_to: closes the snapshot, perhaps later.
            may_deliver: batches that are made may still be delivered, until a call without this.
        """
        snapshot = getattr(self, "snapshot", None)  # missing if nothing was taken
        if snapshot is not None and not self._is_unleased:
            if self.on_end is not None:
                self.on_end()
            self.note_held_up()
            leave_to(snapshot)
            if self._agreement is not None:
                self._agreement.release(self.number)
            self._is_unleased = True  # last: the next call completes one that Ctrl-C cut short
        if not may_deliver:
            self.give_back()  # last: it may wait for cache.lock


def _end_all() -> None:
    call_all([epoch.end for epoch in _living if epoch._origin.is_here])


_living: weakref.WeakSet[Epoch] = weakref.WeakSet()
at_exit(_end_all)


class Epochs:
    """Begins one epoch after another."""

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter) -> None:
        self._store, self._options, self._meter = store, options, meter
        self._membership: Membership | None = None
        self._agreement: Agreement | None = None
        self._shard, self._has_joined = Shard(), False
        self.supply = Supply(store, options, meter)
        self._lengths = None if options.budget is None else Lengths(options.budget)
        #: The next epoch: the rest of one, if its plan has segments, else a number and no more.
        self.planned = self.plan_of(0)
        self._missing = "skip"
        self._lost_ahead: int | None = None  # the number of a ranks' epoch that this rank cannot read
        self.progress: Epoch | None = None  # the epoch whose batches are delivered, or were last

    @property
    def next_number(self) -> int:
        """The number of the next epoch. Who sets it drops the rest of a planned one."""
        return self.planned.epoch

    @next_number.setter
    def next_number(self, number: int) -> None:
        self.planned = self.plan_of(number)

    def join(self, membership: Membership | None) -> None:
        """Be this rank of this job from the next epoch on. None keeps the rank, at first a single process.

        No epoch is in progress.

        Raises: ValueError: the options do not fit so many ranks.
        """
        if self._has_joined and membership in (None, self._membership):
            return
        shard = Shard(membership.rank, membership.world_size) if membership else Shard()
        self._options.require_fit(self._store, shard.world_size)
        self.close()
        self._membership, self._shard, self._has_joined = membership, shard, True
        self._agreement = None if membership is None else Agreement(self._store, membership)
        self.supply.has_ranks = membership is not None
        if membership is not None and membership.rank % membership.local_world_size:
            self.supply.warns = False  # the first rank of this node warns

    def require(self, plan: Plan) -> None:
        """Check that all segments of the rest of a planned epoch are present.

        Raises: MissingSegmentsError: some have left the cache.
        """
        with self._store.locked():
            listed = [segment for segment in self._store.segments() if plan.includes(segment)]
        self._order(plan, listed, "raise")

    def resume(self, plan: Plan, missing: str) -> None:
        """Let the next epoch be the rest of a planned one, or one of its number if nothing is planned.

        Args:
            missing: treatment of rows whose segments have left the cache: "skip" them, with a warning, or
                "raise".
        """
        self.planned = plan if len(plan.seqs) else self.plan_of(plan.epoch)
        self._missing, self.progress, self._lost_ahead = missing, None, None

    def expected_steps(self) -> int:
        """Return the number of batches of the next epoch, if it began now; at least one.

        Leases for a moment, maps nothing, and does not ask other ranks.
        """
        plan = self.planned
        if not len(plan.seqs):
            with self.supply.look() as snapshot:
                plan = self.plan_of(plan.epoch, snapshot)
        return max(1, self._whole_order(plan).steps)

    def pass_over(self, plan: Plan) -> bool:
        """Let the next epoch be the one after a planned epoch, if no step of the planned one is left."""
        if not len(plan.seqs) or self._whole_order(plan).steps:
            return False
        self.next_number, self.progress = plan.epoch + 1, None
        return True

    def begin(self, wait: Wait = Wait()) -> Epoch | None:  # noqa: B008 - it is a value
        """Begin the next epoch: take its snapshot.

        Blocks: until enough rows are published.
        Returns: the epoch, or None: the wait was cancelled.
        Raises: LoaderTimeoutError: too few rows came in time. MissingSegmentsError: see `resume`.
        """
        self._lost_ahead = None
        epoch = self._begin(self.planned, wait)
        if epoch is not None:
            try:
                self._come_to(epoch)
            except BaseException:
                self.take_back(epoch)
                epoch.end()
                raise
        return epoch

    def begin_after(self, previous: Epoch, wait: Wait | None = None) -> Epoch | None:
        """Begin the epoch after one whose batches are all under way, before they are delivered.

        This object does not change: an epoch of which no batch is delivered was never begun.
        Args:
            wait: None begins it only if there are enough rows now, else returns None.
        Blocks, Returns, Raises: as `begin`.
        """
        return self._begin(self.plan_of(previous.number + 1), wait, ahead=True)

    def take_back(self, epoch: Epoch) -> None:
        """Let the next epoch be this one, which was begun and of which no batch was asked for."""
        if epoch is self.progress:
            self.planned = epoch.planned
            self._meter.take_back_epoch()

    def came_to(self, epoch: Epoch) -> None:
        """Record that the first batch of an epoch begun ahead is delivered."""
        if self._agreement is not None:
            self._agreement.came_to(epoch.number)
        self._come_to(epoch)

    def came_to_error(self) -> None:
        """Record that the consumer got an error, perhaps that of an epoch begun ahead."""
        if self._lost_ahead == self.next_number:
            self.next_number += 1

    def settle(self) -> bool:
        """Release the agreement's segments of epochs that all ranks have joined.

        Returns: True if the agreement still holds some.
        """
        return self._agreement is not None and self._agreement.settle()

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()

    def _come_to(self, epoch: Epoch) -> None:
        snapshot = epoch.snapshot
        self._meter.begin_epoch(snapshot.left_out_rows, len(snapshot) - snapshot.selected.size)
        self.progress = epoch  # first: see `take_back`
        self.next_number = epoch.number + 1
        self.supply.warn(snapshot)

    def _begin(self, planned: Plan, wait: Wait | None, *, ahead: bool = False) -> Epoch | None:
        """Return an epoch that owns all that was taken for it; a failure releases all."""
        options, is_rest = self._options, len(planned.seqs) > 0
        share = 1 / self._shard.world_size if options.packing else 1.0
        epoch = Epoch(planned, self.supply, self._agreement, self._meter, self._shard, share)
        with ExitStack() as undo:  # Ctrl-C may come anywhere
            undo.enter_context(epoch)
            if is_rest:
                retake = partial(self.supply.retake, planned)
                with self._meter.stage("start"):
                    snapshot = self._agreed(epoch, planned.position, retake)
            elif wait is not None:
                patience = Patience(
                    self.supply, options, self._shard.world_size, self._meter, self._agreement
                )
                snapshot = patience.wait(partial(self._take, epoch, ahead=ahead), wait)
            else:
                with self._meter.stage("start"):
                    snapshot = self._take(epoch, ahead=ahead)
            if snapshot is None:
                return None
            with self._meter.stage("start"):
                lengths = None
                if self._lengths is not None:
                    with self._meter.choosing():
                        lengths = self._lengths.of(snapshot)
                plan = planned if is_rest else self.plan_of(planned.epoch, snapshot, lengths)
                order = self._order(plan, snapshot.segments, self._missing, lengths)
                epoch.begin(plan.among(snapshot.segments), order)
            self.supply.known = snapshot.next_seq  # the next epoch counts segments published after this one
            undo.pop_all()
        return epoch

    def plan_of(
        self, number: int, snapshot: Snapshot | None = None, lengths: NDArray[np.int32] | None = None
    ) -> Plan:
        """Return the plan of an epoch: over a snapshot, or the number alone.

        Args:
            lengths: of the snapshot's selected rows, where batches are made by them.
        """
        options, seqs, rows, window_rows = self._options, np.empty(0, np.int64), np.empty(0, np.int64), 1
        bitmaps, weights = ALL, None
        if snapshot is not None:
            seqs, rows = snapshot.seqs, snapshot.segment_rows
            bitmaps, weights = snapshot.bitmaps, snapshot.weights
            window_rows = max(1, options.window_nbytes * len(snapshot) // max(1, snapshot.nbytes))
        plan = Plan(
            epoch=number,
            seed=options.seed,
            shuffle=options.shuffle,
            epoch_rows=options.epoch_rows,
            window_rows=window_rows,
            block_rows=options.most_rows,
            seqs=seqs,
            rows=rows,
            bitmaps=bitmaps,
            weights=weights,
        )
        if lengths is None or options.budget is None:
            return plan
        return replace(plan, buckets=bucket_count(plan.stream_rows, lengths, options.budget.tokens))

    def _order(
        self,
        plan: Plan,
        present: Sequence[SegmentInfo],
        missing: str,
        lengths: NDArray[np.int32] | None = None,
    ) -> Order:
        """Return the order of a plan over its present segments.

        Args:
            lengths: of their selected rows, where batches are made by them. None means any: enough to see
                what is missing.
        Raises: MissingSegmentsError: some are missing, and that is not accepted; nothing has changed.
        """
        options = self._options
        order: Order
        if options.budget is not None:
            if lengths is None:
                lengths = np.ones(sum(segment.rows for segment in present), np.int32)
            order = BudgetOrder(plan, present, lengths, options.budget.tokens, self._shard, options.drop_last)
        else:
            order = order_of(plan, present, options.most_rows, self._order_shard, options.drop_last)
        gone = len(plan.seqs) - len(present)
        if order.missing or (gone and plan.weights is not None):
            which = f"{order.missing} rows" if plan.weights is None else "draws from some segments"
            fact = (
                f"{which} of epoch {plan.epoch} are lost to it: {gone} of its {len(plan.seqs)} "
                "segments have left the cache since the state was saved"
            )
            if missing == "raise":
                raise MissingSegmentsError(f"{fact}; pass missing='skip' to go on without them")
            warn(f"{fact}; the others are delivered")
        return order

    def _whole_order(self, plan: Plan) -> Order:
        return EpochOrder(plan, self._options.most_rows, self._order_shard, self._options.drop_last)

    @property
    def _order_shard(self) -> Shard:
        """Return this rank's part of each step of the order: all of it, where it is made into sequences."""
        return Shard() if self._options.packing else self._shard

    def _take(self, epoch: Epoch, *, ahead: bool) -> Snapshot | None:
        """Take the snapshot of a new epoch, counted once for all ranks, or return None: too few rows."""
        own: Snapshot | None = None

        def take() -> Snapshot | None:
            nonlocal own
            own = self.supply.take(self._options.needed_rows(self._shard.world_size), epoch.count)
            return own

        agreed = None
        try:
            agreed = self._agreed(epoch, 0, take, ahead=ahead, alone=self.supply.asks)
        finally:
            if agreed is None or agreed is not own:
                epoch.give_back()  # nothing was taken, or another rank was first
            elif self._agreement is not None:
                epoch.keep_passes()
        return agreed

    def _agreed(
        self,
        epoch: Epoch,
        position: int,
        take: Callable[[], Snapshot | None],
        *,
        ahead: bool = False,
        alone: bool = False,
    ) -> Snapshot | None:
        """Return the snapshot of `take`, or the one that another rank of the same job has taken already."""
        if self._agreement is None:
            snapshot = take()
        else:
            terms = self._options.terms() | {"position": position, "order_version": ORDER_VERSION}
            try:
                snapshot = self._agreement.snapshot(epoch.number, terms, take, ahead=ahead, alone=alone)
                self.supply.is_asked_elsewhere = snapshot is None and self._agreement.others_take
            except CorruptSegmentError:  # the other ranks can read it, and go on to the next one
                if ahead:
                    self._lost_ahead = epoch.number
                else:
                    self.next_number = epoch.number + 1
                raise
        if snapshot is not None:
            epoch.snapshot = snapshot
        return snapshot
