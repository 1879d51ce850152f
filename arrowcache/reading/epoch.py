"""Epoch: one pass over a snapshot, with all that it owns, and how the next one begins.

An `Epoch` owns all that it takes: the lease on its segments, its part in the ranks' agreement, what the cache
counted for it. Whoever has one ends it by `end`, or by `with`: at any point, in any thread. `Epochs` decides
when there is enough to begin, takes the snapshot (alone, or with the other ranks), and goes on where a loaded
state says.
Guarantees: epochs are numbered 0, 1, 2, ...; none is empty but the rest of one that was resumed; nothing is
leased while it waits for rows; rows that an epoch did not serve, because it was ended early, are given back,
unless its process was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, CorruptSegmentError, MissingSegmentsError, warn
from arrowcache.lifetimes import Origin
from arrowcache.reading.membership import Membership
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.order import EpochOrder, Order, ResumedOrder, Shard, order_of
from arrowcache.reading.patience import Patience, Wait
from arrowcache.reading.plan import Plan
from arrowcache.reading.ranks import Agreement
from arrowcache.reading.shuffle import ORDER_VERSION
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.supply import Supply
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store, once_unlocked

if TYPE_CHECKING:
    from typing import Self

_ALL = slice(None)  # steps of an epoch


class Epoch:
    """One pass: what it reads, in which order, how far its delivery is, and what the cache counts for it.

    It owns its snapshot, its part in the ranks' agreement, and the rows and passes that were counted. It is
    there before it has any of them, so that ending it lets go of all, wherever its beginning failed. A forked
    child gives nothing back.
    """

    snapshot: Snapshot  # of its own: this and the next two are there once it has begun
    plan: Plan
    order: Order

    def __init__(
        self,
        number: int,
        supply: Supply,
        agreement: Agreement | None,
        meter: Meter,
        batch_size: int,
        *,
        was_resumed: bool,
    ) -> None:
        self.number, self.was_resumed = number, was_resumed  # it is the rest of one that was planned
        self.delivered = 0  # steps, of those that are made here
        self._supply, self._agreement, self._meter = supply, agreement, meter
        self._batch_size, self._is_in_order = batch_size, False
        self._rows = 0  # that count as served
        self._passes: tuple[NDArray[np.int64], int] | None = None  # over segments of these numbers
        self._origin = Origin()
        self._began = time.time()
        self._held_up_seconds = 0.0  # that writers waited for its lease, as counted so far
        self._is_let_go = False

    def begin(self, plan: Plan, order: Order) -> None:
        """It has all that it needs."""
        self.plan, self.order, self._is_in_order = plan, order, plan.is_in_order

    # what the cache counts

    def count(self, snapshot: Snapshot) -> bool:
        """Count its passes over a snapshot; False: others did, of some of it, meanwhile: take another."""
        supply, store, most = self._supply, self._supply.store, self._supply.most_passes()
        if not supply.is_paced:
            return True
        seqs, passes = snapshot.seqs, supply.passes_of(len(snapshot))
        with store.locked():
            if most is not None and (store.usage.served(seqs) >= most).any():
                return False
            store.usage.count_epoch(seqs, passes)
            self._passes = seqs, passes
        supply.pace_says = ""
        return True

    def keep_passes(self) -> None:
        """Other ranks may read it: its passes count, whatever becomes of it here."""
        self._passes = None

    def serve(self, rows: int) -> None:
        """Count rows that it serves."""
        if self._supply.is_paced:
            with self._supply.store.locked():
                self._supply.store.usage.add_served(rows)
                self._rows = rows

    def give_back(self) -> None:
        """What it has not served does not count any more. Idempotent.

        Never fails: it is called as things end, perhaps by the garbage collector, in a thread that has
        cache.lock.
        """
        served = self.delivered * self._batch_size
        rest, self._rows = self._rows - served, served
        passes, self._passes = None if served else self._passes, None
        if (rest > 0 or passes) and self._origin.is_here:
            once_unlocked(partial(self._supply.give_back, max(0, rest), passes))

    # how far it is

    def rest(self) -> Plan:
        """The part that was not delivered yet."""
        return self.plan.at(self.order.position_after(self.delivered))

    @property
    def is_delivered(self) -> bool:
        return self.delivered >= self.order.steps

    def deliver(self) -> None:
        """The consumer gets a batch: segments whose rows were all delivered are let go, if it is in order."""
        self.delivered += 1
        if self._is_in_order:
            self.release_oldest(self.order.segments_span(self.delivered).start)

    def release_oldest(self, count: int) -> None:
        """Let go of the first `count` segments: so may the ranks' agreement, if all have joined."""
        if self.snapshot.release_oldest(count) and self._agreement is not None:
            self._agreement.settle()

    def note_held_up(self) -> None:
        """Count how long writers have waited for its lease, before it goes, or now. Never fails."""
        with suppress(OSError, ArrowCacheError):
            held_up_seconds = self._supply.store.held_up_seconds(self.snapshot.covers)
            waited = min(held_up_seconds, time.time() - self._began)
            more = max(0.0, waited - self._held_up_seconds)  # a wait that goes on counts once
            self._held_up_seconds += more
            self._meter.hold_up(more)

    def let_go(self, leave_to: Callable[[Snapshot], None] = Snapshot.close) -> None:
        """All of its batches are made: unlease its segments. Idempotent; never fails.

        Args:
            leave_to: closes the snapshot, perhaps later.
        """
        snapshot = getattr(self, "snapshot", None)  # else nothing was taken
        if snapshot is not None and not self._is_let_go:
            self.note_held_up()
            leave_to(snapshot)
            if self._agreement is not None:
                self._agreement.release(self.number)
            self._is_let_go = True  # last: what Ctrl-C cut short is done by the next call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """No more of its batches are delivered: let go of all that it has. Idempotent; never fails."""
        self.let_go()
        self.give_back()  # last: it may wait for cache.lock


class Epochs:
    """Begins one epoch after another.

    Args:
        store: of the cache.
        options: of every epoch.
        meter: told what the waiting took.
    """

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter) -> None:
        self._store, self._options, self._meter = store, options, meter
        self._membership: Membership | None = None
        self._agreement: Agreement | None = None
        self._shard, self._has_joined = Shard(), False
        self.supply = Supply(store, options)
        self._resumed: Plan | None = None
        self._missing = "skip"
        self._lost_ahead: int | None = None  # an epoch of the ranks that this one cannot read
        self.next = 0  # the number of the next epoch
        self.progress: Epoch | None = None  # the one of which batches are delivered, or were last

    def join(self, membership: Membership | None, shard: Shard | None = None) -> None:
        """Be this rank of this job from the next epoch on; None: what it was, at first alone.

        No epoch is in progress.

        Args:
            shard: the part of each step that is this one's, where the membership does not say it.
        Raises: ValueError: the options do not fit so many ranks.
        """
        if self._has_joined and membership in (None, self._membership):
            return
        if shard is None:
            shard = Shard(membership.rank, membership.world_size) if membership else Shard()
        self._options.require_fit(self._store, shard.world_size)
        self.close()
        self._membership, self._shard, self._has_joined = membership, shard, True
        self._agreement = None if membership is None else Agreement(self._store, membership)
        if membership is not None and membership.rank % membership.local_world_size:
            self.supply.warns = False  # the first rank of this node does

    def require(self, plan: Plan) -> None:
        """Make sure that all is there of what remains of a planned epoch.

        Raises: MissingSegmentsError: segments of it have left the cache.
        """
        with self._store.locked():
            listed = [segment for segment in self._store.segments() if plan.includes(segment)]
        self._order(plan, listed, "raise")

    def resume(self, plan: Plan, missing: str) -> None:
        """Have the next epoch be the rest of a planned one, or one of its number if nothing is planned.

        Args:
            missing: rows whose segments have left the cache: "skip" them, with a warning; "raise"; or "keep"
                the steps that they were in, as of `ResumedSteps`.
        """
        self.next = plan.epoch
        self._resumed = plan if len(plan.seqs) else None
        self._missing = missing
        self.progress = None

    def planned(self) -> Plan:
        """The next epoch, as a state: what was loaded, or nothing but its number."""
        return self.unplanned(self.next) if self._resumed is None else self._resumed

    def unplanned(self, number: int) -> Plan:
        """An epoch of which nothing is known but its number."""
        return self._plan(number, None)

    def expected_steps(self) -> int:
        """Batches of the next epoch, if it began now: at least one, since an epoch waits for that.

        Leases for a moment, maps nothing; other ranks are not asked.
        """
        plan = self._resumed
        if plan is None:
            with self.supply.look() as snapshot:
                plan = self._plan(self.next, snapshot)
        return max(1, self._whole_order(plan).steps)

    def pass_over(self, plan: Plan) -> bool:
        """Have the next epoch be the one after a planned epoch, if no step is left of that."""
        if not len(plan.seqs) or self._whole_order(plan).steps:
            return False
        self.next, self._resumed, self.progress = plan.epoch + 1, None, None
        return True

    def begin(self, wait: Wait = Wait(), made: slice = _ALL) -> Epoch | None:  # noqa: B008 - it is a value
        """Begin the next epoch: take its snapshot.

        Args:
            made: the range of steps that this process makes.
        Blocks: until enough rows are published.
        Returns: None: it was cancelled while it waited.
        Raises: LoaderTimeoutError: they were not in time. MissingSegmentsError: see `resume`.
        """
        self._lost_ahead = None
        epoch = self._begin(self.planned().epoch, self._resumed, wait, made=made)
        if epoch is not None:
            try:
                self._come_to(epoch)
            except BaseException:
                self.take_back(epoch)
                epoch.end()
                raise
            self._resumed = None
        return epoch

    def begin_after(self, previous: Epoch, wait: Wait | None = None) -> Epoch | None:
        """Begin the epoch after one whose batches are all under way, before they are delivered.

        It changes nothing here: an epoch of which no batch is delivered was never begun.
        Args:
            wait: None: begin it if there is enough for it now, else return None.
        Blocks, Returns, Raises: as `begin`.
        """
        return self._begin(previous.number + 1, None, wait, ahead=True)

    def look_ahead(self) -> Iterator[None]:
        """Look what is published: the next epoch then begins the sooner. In slices, between what is given."""
        yield from self._store.look_ahead()

    def take_ahead(self) -> Iterator[None]:
        """Take the snapshot for `begin_after`, in slices; `drop_ahead` lets go of it."""
        yield from self.supply.take_ahead()

    def drop_ahead(self) -> None:
        self.supply.drop()

    def take_back(self, epoch: Epoch) -> None:
        """Nobody asked for a batch of an epoch that was begun: so the next one is that epoch."""
        if epoch is self.progress:
            self.next = epoch.number
            self._resumed = epoch.plan if epoch.was_resumed else None
            self._meter.take_back_epoch()

    def came_to(self, epoch: Epoch) -> None:
        """The first batch of an epoch that was begun ahead is delivered."""
        if self._agreement is not None:
            self._agreement.came_to(epoch.number)
        self._come_to(epoch)

    def came_to_error(self) -> None:
        """The consumer got an error in place of a batch: perhaps that of an epoch begun ahead."""
        if self._lost_ahead == self.next:
            self.next += 1

    def settle(self) -> bool:
        """Let go of what the ranks' agreement holds of epochs that all have joined.

        Returns: whether it holds any still.
        """
        return self._agreement is not None and self._agreement.settle()

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()

    def _come_to(self, epoch: Epoch) -> None:
        self._meter.begin_epoch(epoch.snapshot.left_out_rows)
        self.next = epoch.number + 1
        self.progress = epoch
        self.supply.warn(epoch.snapshot)

    def _begin(
        self, number: int, resumed: Plan | None, wait: Wait | None, *, made: slice = _ALL, ahead: bool = False
    ) -> Epoch | None:
        """An epoch that owns all that was taken for it; where this fails, all was let go."""
        options, was_resumed = self._options, resumed is not None
        epoch = Epoch(
            number, self.supply, self._agreement, self._meter, options.batch_size, was_resumed=was_resumed
        )
        with ExitStack() as undo:  # Ctrl-C may come anywhere
            undo.enter_context(epoch)
            if resumed is not None:
                retake = partial(self.supply.retake, resumed.includes)
                snapshot = self._agreed(epoch, resumed.position, retake)
            elif wait is not None:
                patience = Patience(
                    self.supply,
                    options,
                    self._shard.world_size,
                    self._meter,
                    with_ranks=self._agreement is not None,
                )
                snapshot = patience.wait(partial(self._take, epoch, ahead=ahead), wait)
            else:
                snapshot = self._take(epoch, ahead=ahead)
            if snapshot is None:
                return None
            plan = resumed or self._plan(number, snapshot)
            order = self._order(plan, snapshot.segments, self._missing)
            steps = range(order.steps)[made]
            rows = len(steps) * options.batch_size
            if self._shard.world_size == 1 and order.steps - 1 in steps:  # the last batch may be short
                rows -= max(0, order.steps * options.batch_size - (plan.stream_rows - plan.position))
            epoch.serve(rows)
            epoch.begin(plan, order)
            self.supply.known = snapshot.next_seq  # the next one goes by what is published after it
            undo.pop_all()
        return epoch

    def _plan(self, number: int, snapshot: Snapshot | None) -> Plan:
        options, seqs, rows, window_rows = self._options, np.empty(0, np.int64), np.empty(0, np.int64), 1
        if snapshot is not None:
            seqs, rows = snapshot.seqs, snapshot.segment_rows
            window_rows = max(1, options.window_nbytes * len(snapshot) // max(1, snapshot.nbytes))
        return Plan(
            epoch=number,
            seed=options.seed,
            shuffle=options.shuffle,
            epoch_rows=options.epoch_rows,
            window_rows=window_rows,
            block_rows=options.batch_size,
            seqs=seqs,
            rows=rows,
        )

    def _order(self, plan: Plan, present: Sequence[SegmentInfo], missing: str) -> Order:
        """The order of a plan over what is there of it.

        Raises: MissingSegmentsError: not all is, and that is not accepted; nothing has changed.
        """
        options = self._options
        order = order_of(
            plan, present, options.batch_size, self._shard, options.drop_last, keeps_steps=missing == "keep"
        )
        if isinstance(order, ResumedOrder) and order.missing:
            gone = len(plan.seqs) - len(present)
            fact = (
                f"{order.missing} rows of epoch {plan.epoch} are lost to it: {gone} of its {len(plan.seqs)} "
                "segments have left the cache since the state was saved"
            )
            if missing == "raise":
                raise MissingSegmentsError(f"{fact}; pass missing='skip' to go on without them")
            warn(f"{fact}; the others are delivered")
        return order

    def _whole_order(self, plan: Plan) -> Order:
        return EpochOrder(plan, self._options.batch_size, self._shard, self._options.drop_last)

    def _take(self, epoch: Epoch, *, ahead: bool) -> Snapshot | None:
        """The snapshot of a new epoch, if there is enough for one; it counts once, for all ranks."""
        own: Snapshot | None = None

        def take() -> Snapshot | None:
            nonlocal own
            own = self.supply.take(self._options.needed_rows(self._shard.world_size), epoch.count)
            return own

        agreed = None
        try:
            agreed = self._agreed(epoch, 0, take, ahead=ahead)
        finally:
            if agreed is None or agreed is not own:
                epoch.give_back()  # nothing was taken, or another rank was first
            elif self._agreement is not None:
                epoch.keep_passes()
        return agreed

    def _agreed(
        self, epoch: Epoch, position: int, take: Callable[[], Snapshot | None], *, ahead: bool = False
    ) -> Snapshot | None:
        """The snapshot of `take`, or the one that another rank of the same job has taken already."""
        if self._agreement is None:
            snapshot = take()
        else:
            terms = self._options.terms() | {"position": position, "order_version": ORDER_VERSION}
            try:
                snapshot = self._agreement.snapshot(epoch.number, terms, take, ahead=ahead)
            except CorruptSegmentError:  # the other ranks, which read it, go on to the next one
                if ahead:
                    self._lost_ahead = epoch.number
                else:
                    self.next = epoch.number + 1
                raise
        if snapshot is not None:
            epoch.snapshot = snapshot
        return snapshot
