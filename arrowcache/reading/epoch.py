"""Epoch: one pass over a snapshot, with all that it owns, and how the next one begins.

An `EpochSource` begins the epochs of any loader, one after another. It knows the next one, the one in
progress, and their states. An `EpochProgress` is one of its epochs. `Epochs` and `Epoch` are those of a
cache; torch/cached_epochs.py has those of a dataset.

An `Epoch` owns all that it takes: the lease on its segments, its part in the ranks' shared plan, its counts
in the cache. Its owner ends it by `end`, or by `with`: at any point, in any thread. `Epochs` decides when
there are enough rows, takes the snapshot (alone, or with the other ranks), and goes on from a loaded state.
Guarantees: epochs are numbered 0, 1, 2, ...; none is empty but the rest of a resumed one; nothing is leased
while waiting for rows; the count of rows that an epoch did not serve is given back, unless its process was
killed.
"""

from __future__ import annotations

import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import (
    ArrowCacheError,
    CacheFrozenError,
    CorruptSegmentError,
    MissingSegmentsError,
    warn,
)
from arrowcache.lifetimes import Origin, at_exit, call_all
from arrowcache.limits import Limits
from arrowcache.os_errors import explaining
from arrowcache.reading.available_rows import AvailableRows, RowsWait, Wait
from arrowcache.reading.budget import BudgetOrder, bucket_count
from arrowcache.reading.options import LoaderOptions, RankInfo
from arrowcache.reading.order import EvenOrder, Order, Shard
from arrowcache.reading.packing import Within
from arrowcache.reading.per_segment import Lengths
from arrowcache.reading.plan import Plan
from arrowcache.reading.ranks import SharedPlan
from arrowcache.reading.row_filter import ALL
from arrowcache.reading.row_weights import read_weights, write_weights
from arrowcache.reading.shuffle import ORDER_VERSION
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.locks import once_unlocked
from arrowcache.storage.store import Store
from arrowcache.units import format_count

if TYPE_CHECKING:
    from typing import Self


_AHEAD_STEPS = 64  # before the end of an epoch, at most half of it: functions choose the rows of the next one


# of any loader


class EpochProgress(ABC):
    """An epoch, as its loader knows it: plan, order, and how many of its steps were delivered.

    Args:
        planned: the plan as it was before the epoch began: the rest of an epoch, or a number and no more.
    """

    plan: Plan
    order: Order
    _is_in_order = False

    def __init__(self, planned: Plan) -> None:
        self.planned, self.number = planned, planned.epoch
        self.delivered = 0  # steps
        self.within: Within | None = planned.within  # the bundle at its position

    def remaining(self) -> Plan:
        """Return the part that was not delivered yet."""
        rest = self.order.remaining(self.delivered)
        return rest if self.within is None else rest.at(rest.position, within=self.within)

    @property
    def is_large(self) -> bool:
        """True if the work between it and the next one takes long, and is done in slices."""
        return False

    @property
    def is_delivered(self) -> bool:
        return self.delivered >= self.order.steps

    def deliver(self, count: int = 1, step: int | None = None, within: Within | None = None) -> bool:
        """Count delivered steps. An epoch in order also releases segments that no later batch needs.

        Args:
            step: all batches before this step were delivered. None: they are delivered in order.
            within: how far the epoch is after them, within a bundle of documents.
        Returns: True if all are delivered now.
        """
        self.delivered, self.within = self.delivered + count, within
        if self._is_in_order:
            self._release_before(self.delivered if step is None else step)
        return self.delivered >= self.order.steps

    def _release_before(self, step: int) -> None:  # noqa: B027  # nothing to release is usual
        """Release what no batch of this step or a later one needs."""

    @property
    def left_out(self) -> tuple[int, int]:
        """The rows that its snapshot leaves to samplers, and those of its segments that it does not read."""
        return 0, 0

    @abstractmethod
    def end(
        self, leave_to: Callable[[Snapshot], None] = Snapshot.close, *, may_deliver: bool = False
    ) -> None:
        """End it: no more batches are made, and its segments are unleased. Idempotent; never fails.

        Args:
            leave_to: closes the snapshot, perhaps later.
            may_deliver: batches that are made may still be delivered, until a call without this.
        """


E = TypeVar("E", bound=EpochProgress)


WorkAhead = tuple[Iterator[None], Iterator[None], int]
"""Work for the next epoch: looks; all slices, these first; the number of last steps that each do one."""


class EpochSource(ABC, Generic[E]):
    """Begins the epochs of a loader, one after another.

    `planned` is the next epoch: the rest of one, if its plan has segments, else a number and no more.
    `progress` is the epoch whose batches are delivered, or were last.
    """

    parks = True  # an ended epoch's snapshot may serve the next one
    begins_when_asked = False  # an epoch has one batch, and begins as that is asked for, not ahead

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.planned = self.plan_of(0)
        self.progress: E | None = None

    @abstractmethod
    def plan_of(self, number: int) -> Plan:
        """Return the plan of an epoch that has not begun."""

    @property
    def next_number(self) -> int:
        """The number of the next epoch. Who sets it drops the rest of a planned one."""
        return self.planned.epoch

    @next_number.setter
    def next_number(self, number: int) -> None:
        self.planned = self.plan_of(number)

    def join(self, rank_info: RankInfo | None) -> None:
        """Be this rank of this job from the next epoch on. No epoch is in progress.

        Raises: ValueError: the options do not fit so many ranks.
        """

    def begin(self, wait: Wait = Wait()) -> E | None:  # noqa: B008  # it is a value
        """Begin the next epoch: take its snapshot.

        Blocks: until enough rows are published.
        Returns: the epoch, or None: the wait was cancelled.
        Raises: LoaderTimeoutError: too few rows came in time. MissingSegmentsError: see `resume`.
        """
        epoch = self._begin(self.planned, wait)
        if epoch is not None:
            try:
                self._begin_delivery(epoch)
            except BaseException:
                self.take_back(epoch)
                epoch.end()
                raise
        return epoch

    def begin_after(self, previous: E, wait: Wait | None = None) -> E | None:
        """Begin the epoch after one whose batches are all under way, before they are delivered.

        This object does not change: an epoch of which no batch is delivered was never begun.

        Args:
            wait: None begins it only if there are enough rows now, else returns None.
        Blocks, Returns, Raises: as `begin`.
        """
        return self._begin(self.plan_of(previous.number + 1), wait, ahead=True)

    @abstractmethod
    def _begin(self, planned: Plan, wait: Wait | None, *, ahead: bool = False) -> E | None:
        """Begin an epoch that owns all that was taken for it; a failure releases all."""

    def ahead_of(self, epoch: E) -> WorkAhead:  # noqa: ARG002
        """Return the work that the epoch after one needs."""
        return iter(()), iter(()), 0

    def drop_ahead(self) -> None:
        """Release what was done ahead. Idempotent."""

    def begin_delivery(self, epoch: E) -> None:
        """Record that the first batch of an epoch begun ahead is delivered."""
        self._begin_delivery(epoch)

    def _begin_delivery(self, epoch: E) -> None:
        self.meter.begin_epoch(*epoch.left_out)
        self.progress = epoch  # first: see `take_back`
        self.next_number = epoch.number + 1

    def take_back(self, epoch: E) -> None:
        """Let the next epoch be this one, which was begun and of which no batch was asked for."""
        if epoch is self.progress:
            self.planned = epoch.planned
            self.meter.take_back_epoch()

    def skip_failed(self) -> None:
        """Record that the consumer got an error, perhaps that of an epoch begun ahead."""

    def to_state(self, plan: Plan) -> dict[str, Any]:
        """Return a plan as a state that any process resumes."""
        return plan.to_state()

    @abstractmethod
    def from_state(self, state: dict[str, Any]) -> Plan:
        """Return the plan of a state. Raises: ValueError: it is none, or does not fit this source."""

    def require(self, plan: Plan) -> None:
        """Check that all rows of the rest of a planned epoch are present.

        Raises: MissingSegmentsError: some have left the cache.
        """

    def to_resume(self, state: dict[str, Any], missing: str) -> Plan:
        """Return the plan of a state, for `resume`. Nothing changes.

        Raises: ValueError: as `from_state`, or `missing` is unknown. MissingSegmentsError: see `require`.
        """
        if missing not in ("skip", "raise"):
            raise ValueError(f"missing={missing!r} must be 'skip' or 'raise'")
        plan = self.from_state(state)
        if missing == "raise":
            self.require(plan)
        return plan

    def resume(self, plan: Plan, missing: str) -> None:  # noqa: ARG002
        """Let the next epoch be the rest of a planned one, or one of its number if nothing is planned.

        Args:
            missing: treatment of rows whose segments have left the cache: "skip" them, with a warning, or
                "raise".
        """
        self.planned, self.progress = plan if len(plan.seqs) else self.plan_of(plan.epoch), None

    def note_held_up(self) -> None:
        """Count how long writers have waited for the lease of the epoch in progress. Never fails."""

    def release_joined(self) -> bool:
        """Release the shared plan's segments of epochs that all ranks have joined.

        Returns: True if the shared plan still holds some.
        """
        return False

    def after_fork(self) -> None:
        """Begin anew in a forked child: whatever works for this one is the parent's."""

    def settle(self) -> None:
        """Count what was delivered as used: the loader is closed, and no error is in progress."""

    def close(self) -> None:
        """Release what belongs to no epoch. Idempotent."""


# of a cache


class Epoch(EpochProgress):
    """One pass: its snapshot and order, the progress of its delivery, and its counts in the cache.

    It owns its snapshot, its part in the ranks' shared plan, and its counts of rows and passes. The object
    exists before it owns any of them, so that ending it releases all, wherever its beginning failed. A forked
    child gives nothing back.
    """

    snapshot: Snapshot  # owned; set by `begin`, with plan and order

    def __init__(
        self,
        planned: Plan,
        available_rows: AvailableRows,
        shared_plan: SharedPlan | None,
        meter: Meter,
        shard: Shard,
        share: float = 1.0,
    ) -> None:
        super().__init__(planned)
        self.shard = shard
        self.steps: int | None = None  # batches of sequences, once their number is known
        self._available_rows, self._shared_plan, self._meter = available_rows, shared_plan, meter
        self._share, self._is_in_order = share, False
        self._rows = 0  # rows that count as served
        self._passes: tuple[NDArray[np.int64], int] | None = None  # passes over segments with these numbers
        self._origin = Origin()
        self._began = time.time()
        self._held_up_seconds = 0.0  # seconds that writers waited for its lease, counted so far
        self._is_unleased = False
        self.on_end: Callable[[], object] | None = None  # has others make no more batches of it
        self._sign = ExitStack()  # shows that it draws by weights
        _living.add(self)

    def begin(self, plan: Plan, order: Order) -> None:
        """Set what it reads, and count its rows as served."""
        if self._available_rows.is_paced:
            rows = round(order.rows_of(range(order.steps)) * self._share)
            with suppress(CacheFrozenError), self._available_rows.store.locked():
                self._available_rows.store.usage.add_served(rows)
                self._rows = rows
        if plan.weights is not None:
            self._sign = self._available_rows.store.usage.show_weighing()
        self.plan, self.order, self._is_in_order = plan, order, plan.shuffle.is_in_order

    # what the cache counts

    def count(self, snapshot: Snapshot) -> bool:
        """Count its passes over a snapshot. Returns: False: others counted some; take another one."""
        available_rows, store, most = (
            self._available_rows,
            self._available_rows.store,
            self._available_rows.most_passes(),
        )
        if not available_rows.is_paced:
            return True
        seqs, passes = snapshot.seqs, available_rows.passes_of(snapshot.selected.size)
        with suppress(CacheFrozenError), store.locked():  # frozen just now, it counts no more
            if most is not None and (store.usage.served(seqs) >= most).any():
                return False
            store.usage.count_epoch(seqs, passes)
            self._passes = seqs, passes
        available_rows.pace_says = ""
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
            once_unlocked(partial(self._available_rows.give_back, max(0, rest), passes))

    # how far it is

    @property
    def is_large(self) -> bool:
        return len(self.snapshot.seqs) >= Limits.current.slow_segments

    def _release_before(self, step: int) -> None:
        oldest = self.order.segments_span(step).start
        if self.snapshot.release_oldest(oldest) and self._shared_plan is not None:
            self._shared_plan.release_joined()

    @property
    def left_out(self) -> tuple[int, int]:
        return self.snapshot.left_out_rows, len(self.snapshot) - self.snapshot.selected.size

    def note_held_up(self) -> None:
        """Count how long writers have waited for its lease. Call it before the lease ends. Never fails."""
        with suppress(OSError, ArrowCacheError):
            held_up_seconds = self._available_rows.store.held_up_seconds(self.snapshot.covers)
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
        snapshot = getattr(self, "snapshot", None)  # missing if nothing was taken
        if snapshot is not None and not self._is_unleased:
            if self.on_end is not None:
                self.on_end()
            self.note_held_up()
            leave_to(snapshot)
            self._sign.close()
            if self._shared_plan is not None:
                self._shared_plan.release(self.number)
            self._is_unleased = True  # last: the next call completes one that Ctrl-C cut short
        if not may_deliver:
            self.give_back()  # last: it may wait for cache.lock


def _end_all() -> None:
    call_all([epoch.end for epoch in _living if epoch._origin.is_here])


_living: weakref.WeakSet[Epoch] = weakref.WeakSet()
at_exit(_end_all)


class Epochs(EpochSource[Epoch]):
    """Begins one epoch of a cache after another."""

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter) -> None:
        self._store, self._options = store, options
        super().__init__(meter)
        self._rank_info: RankInfo | None = None
        self._shared_plan: SharedPlan | None = None
        self._shard, self._has_joined = Shard(), False
        self.available_rows = AvailableRows(store, options, meter)
        budget = options.budget
        self._lengths = None if budget is None else Lengths(budget.column, budget.tokens)
        self._missing = "skip"
        self._lost_ahead: int | None = None  # the number of a ranks' epoch that this rank cannot read

    def join(self, rank_info: RankInfo | None) -> None:
        """As `EpochSource.join`. None keeps the rank, at first a single process."""
        if self._has_joined and rank_info in (None, self._rank_info):
            return
        shard = Shard(rank_info.rank, rank_info.world_size) if rank_info else Shard()
        self._options.require_fit(self._store, shard.world_size)
        self.close()
        self._rank_info, self._shard, self._has_joined = rank_info, shard, True
        agrees = rank_info is not None and not self._store.is_frozen
        self._shared_plan = SharedPlan(self._store, rank_info) if rank_info is not None and agrees else None
        self.available_rows.has_ranks = agrees
        if rank_info is not None and rank_info.rank % rank_info.local_world_size:
            self.available_rows.warns = False  # the first rank of this node warns

    def require(self, plan: Plan) -> None:
        with self._store.looking():
            listed = [segment for segment in self._store.segments() if plan.includes(segment)]
        self._order(plan, listed, "raise")

    def resume(self, plan: Plan, missing: str) -> None:
        super().resume(plan, missing)
        self._missing, self._lost_ahead = missing, None

    def to_state(self, plan: Plan) -> dict[str, Any]:
        """Return a plan as a state that any process resumes: the file of its weights is written.

        Blocks: for cache.lock and the disk, if it has weights.
        Raises: CacheFullError: as of `write_weights`. ValueError: of a frozen cache, it cannot be repeated.
        """
        if (frozen := self._store.settings.frozen) is not None:
            if not self.available_rows.is_repeatable:
                raise ValueError(
                    "a Python function, or _age_seconds, chooses or weighs rows of a frozen cache, which no "
                    "state can repeat elsewhere: give an expression of columns, a tag, ids or an annotation"
                )
            return plan.to_state() | {"frozen": frozen.digest}
        if plan.weights is not None:
            with self._store.locked():
                write_weights(self._store, plan.weights)
        return plan.to_state()

    def from_state(self, state: dict[str, Any]) -> Plan:
        """Return the plan of a state, with the weights that it names, for epochs of these options.

        Raises: as `Plan.from_state` and `read_weights`. ValueError: it is of a frozen cache of other content,
            or of other weights.
        """
        options, settings = self._options, self._store.settings
        read = partial(
            Plan.from_state,
            most_rows=settings.full_rows,
            has_buckets=options.budget is not None,
            packing=options.packing,
        )
        digest, name = None, None
        if isinstance(state, dict):
            digest, name = state.get("frozen"), state.get("weights") if state.get("segments") else None
        if digest is not None:
            here = "it is not frozen" if settings.frozen is None else f"that is {settings.frozen.digest}"
            if settings.frozen is None or settings.frozen.digest != digest:
                raise ValueError(
                    f"the state is of a frozen cache whose content has the digest {digest}, and here {here}: "
                    "load it over that cache or a copy, or begin the next epoch: state | {'epoch': "
                    "state['epoch'] + 1, 'position': 0, 'segments': [], 'weights': None, 'frozen': None}"
                )
        if not name:
            return read(state)
        if digest is None:
            return read(state, weights=read_weights(self._store, name))
        weights = self.available_rows.weigh(read(state | {"weights": None}))
        if weights is None or weights.name != name:
            raise ValueError(
                "the state is of an epoch by weights, and a frozen cache has no copy of them: give the "
                "loader the same weights= as there"
            )
        return read(state, weights=weights)

    def expected_steps(self) -> int:
        """Return the number of batches of the next epoch, if it began now; at least one.

        Leases for a moment, maps nothing, and does not ask other ranks.
        """
        plan = self.planned
        if not len(plan.seqs):
            with self.available_rows.look() as snapshot:
                plan = self.plan_of(plan.epoch, snapshot)
        return max(1, self.steps_of(plan))

    def steps_of(self, plan: Plan) -> int:
        """Return the number of batches of a whole epoch, wherever its plan goes on, if no segment is gone."""
        return self._whole_order(plan.at(0)).steps

    def pass_over(self, plan: Plan) -> bool:
        """Let the next epoch be the one after a planned epoch, if no step of the planned one is left."""
        if not len(plan.seqs) or self._whole_order(plan).steps:
            return False
        self.next_number, self.progress = plan.epoch + 1, None
        return True

    def ahead_of(self, epoch: Epoch) -> WorkAhead:
        rows = self.available_rows
        chooses = bool(self.meter.chosen_by) and rows.has_functions
        if not epoch.is_large and not chooses:
            return super().ahead_of(epoch)
        steps = min(_AHEAD_STEPS, epoch.order.steps // 2) if chooses else 0
        looks = rows.store.look_ahead()
        return looks, itertools.chain(looks, rows.take_ahead(max(1, steps // 2))), steps

    def drop_ahead(self) -> None:
        self.available_rows.drop()

    def begin_delivery(self, epoch: Epoch) -> None:
        if self._shared_plan is not None:
            self._shared_plan.begin_delivery(epoch.number)
        self._begin_delivery(epoch)

    def skip_failed(self) -> None:
        if self._lost_ahead == self.next_number:
            self.next_number += 1

    def note_held_up(self) -> None:
        if self.progress is not None:
            self.progress.note_held_up()

    def release_joined(self) -> bool:
        return self._shared_plan is not None and self._shared_plan.release_joined()

    def close(self) -> None:
        if self._shared_plan is not None:
            self._shared_plan.close()

    def _begin_delivery(self, epoch: Epoch) -> None:
        super()._begin_delivery(epoch)
        self.available_rows.warn(epoch.snapshot)

    def _begin(self, planned: Plan, wait: Wait | None, *, ahead: bool = False) -> Epoch | None:
        if not ahead:
            self._lost_ahead = None
        self._leave_plan_if_frozen()
        options, is_rest = self._options, len(planned.seqs) > 0
        share = 1 / self._shard.world_size if options.packing else 1.0
        epoch = Epoch(planned, self.available_rows, self._shared_plan, self.meter, self._shard, share)
        with ExitStack() as undo:  # Ctrl-C may come anywhere
            undo.enter_context(epoch)
            if is_rest:
                retake = partial(self.available_rows.retake, planned)
                with self.meter.stage("start"):
                    snapshot = self._agreed(epoch, planned.position, retake)
            elif wait is not None:
                patience = RowsWait(
                    self.available_rows, options, self._shard.world_size, self.meter, self._shared_plan
                )
                snapshot = patience.wait(partial(self._take, epoch, ahead=ahead), wait)
            else:
                with self.meter.stage("start"):
                    snapshot = self._take(epoch, ahead=ahead)
            if snapshot is None:
                return None
            with self.meter.stage("start"):
                lengths = None
                if self._lengths is not None:
                    with self.meter.choosing():
                        # an empty row counts as 1
                        lengths = np.maximum(self._lengths.of_selected(snapshot), 1)
                plan = planned if is_rest else self.plan_of(planned.epoch, snapshot, lengths)
                order = self._order(plan, snapshot.segments, self._missing, lengths)
                epoch.begin(plan.among(snapshot.segments), order)
            # The next epoch counts segments published after this one.
            self.available_rows.known = snapshot.next_seq
            undo.pop_all()
        return epoch

    def _leave_plan_if_frozen(self) -> None:
        """Agree on nothing from now on, if the cache was frozen meanwhile."""
        if self._shared_plan is not None:
            with explaining(self._store.folder.path):
                self._store.refresh_settings()
            if self._store.is_frozen:
                self._shared_plan.close()
                self._shared_plan, self.available_rows.has_ranks = None, False

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
            shuffle=options.shuffling,
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
            order = EvenOrder(plan, options.most_rows, self._order_shard, options.drop_last, present)
        gone = len(plan.seqs) - len(present)
        if order.missing or (gone and plan.weights is not None):
            which, are = "draws from some segments", "are"
            if plan.weights is None:
                which, are = format_count(order.missing, "row"), "is" if order.missing == 1 else "are"
            fact = (
                f"{which} of epoch {plan.epoch} {are} lost to it: {gone:,} of its "
                f"{format_count(len(plan.seqs), 'segment')} have left the cache since the state was saved"
            )
            if missing == "raise":
                raise MissingSegmentsError(f"{fact}; pass missing='skip' to go on without them")
            warn(f"{fact}; the others are delivered")
        return order

    def _whole_order(self, plan: Plan) -> Order:
        return EvenOrder(plan, self._options.most_rows, self._order_shard, self._options.drop_last)

    @property
    def _order_shard(self) -> Shard:
        """Return this rank's part of each step of the order: all of it, where it is made into sequences."""
        return Shard() if self._options.packing else self._shard

    def _take(self, epoch: Epoch, *, ahead: bool) -> Snapshot | None:
        """Take the snapshot of a new epoch, counted once for all ranks, or return None: too few rows."""
        own: Snapshot | None = None

        def take() -> Snapshot | None:
            nonlocal own
            own = self.available_rows.take(self._options.needed_rows(self._shard.world_size), epoch.count)
            return own

        agreed = None
        try:
            agreed = self._agreed(epoch, 0, take, ahead=ahead, alone=self.available_rows.asks)
        finally:
            if agreed is None or agreed is not own:
                epoch.give_back()  # nothing was taken, or another rank was first
            elif self._shared_plan is not None:
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
        if self._shared_plan is None:
            snapshot = take()
        else:
            terms = self._options.terms() | {"position": position, "order_version": ORDER_VERSION}
            try:
                snapshot = self._shared_plan.snapshot(epoch.number, terms, take, ahead=ahead, alone=alone)
                self.available_rows.is_asked_elsewhere = snapshot is None and self._shared_plan.others_take
            except CorruptSegmentError:  # the other ranks can read it, and go on to the next one
                if ahead:
                    self._lost_ahead = epoch.number
                else:
                    self.next_number = epoch.number + 1
                raise
        if snapshot is not None:
            epoch.snapshot = snapshot
        return snapshot
