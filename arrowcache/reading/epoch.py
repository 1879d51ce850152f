"""Epoch: one pass over a snapshot, and how the next one begins.

`Epochs` decides when there is enough to begin, takes the snapshot (alone, or with the other ranks),
and goes on where a loaded state says. Guarantees: epochs are numbered 0, 1, 2, ...; none is empty
but the rest of one that was resumed; nothing is leased while it waits for rows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from arrowcache.errors import (
    ArrowCacheError,
    CorruptSegmentError,
    LoaderTimeoutError,
    MissingSegmentsError,
)
from arrowcache.reading.headroom import Headroom
from arrowcache.reading.membership import Membership
from arrowcache.reading.order import Share
from arrowcache.reading.pacing import Pacing
from arrowcache.reading.patience import Patience, refused, too_few
from arrowcache.reading.plan import Order, Plan, Survivors
from arrowcache.reading.ranks import Agreement
from arrowcache.reading.shuffle import ORDER_VERSION
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes

_ALL = slice(None)  # steps of an epoch


@dataclass(frozen=True, slots=True)
class Terms:
    """The user's arguments that hold for every epoch; the same on all ranks."""

    batch_size: int
    shuffle: str | None
    seed: int
    epoch_rows: int | None
    drop_last: bool
    window_bytes: int
    wait_rows: int
    paced: bool


@dataclass(slots=True, eq=False)
class Epoch:
    """One pass: what it reads, in which order, and how far its delivery is."""

    plan: Plan
    snapshot: Snapshot
    order: Order
    delivered: int = 0  # steps, of those that are made here
    was_resumed: bool = False
    claimed_rows: int = 0  # of this rank: the pace counts them as served
    began: float = field(default_factory=time.time)
    held_up_seconds: float = 0.0  # that writers waited for its lease, as counted so far

    def rest(self) -> Plan:
        """The part that was not delivered yet."""
        return self.plan.at(self.order.position_after(self.delivered))

    @property
    def is_delivered(self) -> bool:
        return self.delivered >= self.order.steps

    def give_up_passed(self) -> bool:
        """Unlease segments whose rows were all delivered, if it is in order. Returns: whether it did."""
        passed = self.order.segments_span(self.delivered).start if self.plan.is_in_order else 0
        return passed > 0 and self.snapshot.release_oldest(passed)


class Epochs:
    """Begins one epoch after another.

    Args:
        store: of the cache.
        where: which segments; None: all.
        terms: of every epoch.
        timeout_seconds: how long an epoch waits for rows; None: for ever.
        membership: this rank among those of its job; None: it is alone.
        meter: told what the waiting took.
        share: which part of each step is this one's, where it isn't the membership that says so.
    """

    def __init__(
        self,
        store: Store,
        where: Callable[[SegmentInfo], bool] | None,
        terms: Terms,
        timeout_seconds: float | None,
        membership: Membership | None,
        meter: Meter,
        share: Share | None = None,
    ) -> None:
        self._store, self._where, self._terms = store, where, terms
        self._timeout_seconds = timeout_seconds
        self._agreement: Agreement | None = None
        self.headroom = Headroom()
        self.join(membership, share)
        self._meter = meter
        self._pacing = Pacing(store, where, terms.epoch_rows, paced=terms.paced)
        self._resumed: Plan | None = None
        self._missing = "skip"
        self._lost_ahead: int | None = None  # an epoch of the ranks that this one cannot read
        self._listed: Sequence[SegmentInfo] = ()  # as the last try found it
        self._rows_seen = 0  # of it, that `where` accepts
        self.next = 0  # the number of the next epoch
        self.progress: Epoch | None = None  # the one of which batches are delivered, or were last

    def join(self, membership: Membership | None, share: Share | None = None) -> None:
        """Be this rank, as of the constructor, from the next epoch on; none is in progress."""
        self.close()
        self._agreement = None if membership is None else Agreement(self._store, membership)
        if membership is not None and membership.rank % membership.local_world_size:
            self.headroom.warns = False  # the first rank of this node does
        alone = Share(membership.rank, membership.world_size) if membership else Share()
        self._share = share or alone
        self.step_rows = self._terms.batch_size * self._share.world_size  # of all ranks
        self._needed_rows = max(self._terms.wait_rows, self.step_rows if self._terms.drop_last else 1)

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
                them in the order, for who sees to them step by step.
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
        terms, nothing = self._terms, np.empty(0, np.int64)
        return Plan(
            number, terms.seed, terms.shuffle, terms.epoch_rows, 1, terms.batch_size, nothing, nothing
        )

    def expected_steps(self) -> int:
        """Batches of the next epoch, if it began now: at least one, since an epoch waits for that.

        Leases for a moment, maps nothing; other ranks are not asked.
        """
        terms, plan = self._terms, self._resumed
        if plan is None:
            where, known = self._pacing.where(), self.headroom.known
            with Snapshot.take(self._store, where, yields_since=known) as snapshot:
                plan = self._plan(self.next, snapshot)
        return max(1, plan.order(terms.batch_size, self._share, terms.drop_last).steps)

    def pass_over(self, plan: Plan) -> bool:
        """Have the next epoch be the one after a planned epoch, if no step is left of that."""
        terms = self._terms
        if not len(plan.seqs) or plan.order(terms.batch_size, self._share, terms.drop_last).steps:
            return False
        self.next, self._resumed, self.progress = plan.epoch + 1, None, None
        return True

    def begin(
        self,
        is_cancelled: Callable[[], bool] = lambda: False,
        before_waiting: Callable[[], None] = lambda: None,
        made: slice = _ALL,
    ) -> Epoch | None:
        """Begin the next epoch: take its snapshot.

        Args:
            before_waiting: called when there is too little, so that nothing is leased meanwhile.
            made: the range of steps that this process makes.
        Blocks: until enough rows are published.
        Returns: None: it was cancelled while it waited.
        Raises: LoaderTimeoutError: they were not in time. MissingSegmentsError: see `resume`.
        """
        self._lost_ahead = None
        with ExitStack() as undo:
            epoch = self._begin(self.next, self._resumed, undo, is_cancelled, before_waiting, made)
            if epoch is not None:
                undo.callback(self.take_back, epoch)
                self._come_to(epoch)
                self._resumed = None
            undo.pop_all()
        return epoch

    def look(self) -> None:
        """Have what is new in the cache be known: the next epoch begins the sooner, at another moment.

        Never fails: who begins that epoch says what is wrong.
        """
        with suppress(OSError, ArrowCacheError):
            self._store.segments()

    def begin_after(
        self, previous: Epoch, is_cancelled: Callable[[], bool], before_waiting: Callable[[], None]
    ) -> Epoch | None:
        """Begin the epoch after one whose batches are all under way, before they are delivered.

        It changes nothing here: an epoch of which no batch is delivered was never begun.
        Blocks, Returns, Raises: as `begin`.
        """
        number = previous.plan.epoch + 1
        with ExitStack() as undo:
            epoch = self._begin(number, None, undo, is_cancelled, before_waiting, ahead=True)
            undo.pop_all()
        return epoch

    def try_begin_after(self, previous: Epoch) -> Epoch | None:
        """As `begin_after`, if there is enough for it now."""
        number = previous.plan.epoch + 1
        with ExitStack() as undo:
            snapshot = self._take(number, undo, ahead=True)
            epoch = None if snapshot is None else self._epoch(number, snapshot, None, undo)
            undo.pop_all()
        return epoch

    def take_back(self, epoch: Epoch) -> None:
        """Nobody asked for a batch of an epoch that was begun: so the next one is that epoch."""
        if epoch is self.progress:
            self.next = epoch.plan.epoch
            self._resumed = epoch.plan if epoch.was_resumed else None
            self._meter.take_back_epoch()

    def came_to(self, epoch: Epoch) -> None:
        """The first batch of an epoch that was begun ahead is delivered."""
        if self._agreement is not None:
            self._agreement.came_to(epoch.plan.epoch)
        self._come_to(epoch)

    def came_to_error(self) -> None:
        """The consumer got an error in place of a batch: perhaps that of an epoch begun ahead."""
        if self._lost_ahead == self.next:
            self.next += 1

    def _come_to(self, epoch: Epoch) -> None:
        self._meter.begin_epoch(epoch.snapshot.left_out_rows)
        self.next = epoch.plan.epoch + 1
        self.progress = epoch
        self.headroom.warn(epoch.snapshot, self._store.settings)

    def _begin(
        self,
        number: int,
        resumed: Plan | None,
        undo: ExitStack,
        is_cancelled: Callable[[], bool],
        before_waiting: Callable[[], None],
        made: slice = _ALL,
        *,
        ahead: bool = False,
    ) -> Epoch | None:
        """Puts on `undo` what an error, or Ctrl-C, must undo before the epoch is handed out."""
        if resumed is None:
            snapshot = self._wait_for_rows(number, undo, is_cancelled, before_waiting, ahead=ahead)
        else:
            snapshot = self._agreed(number, resumed.position, lambda: self._retake(resumed), undo)
        return None if snapshot is None else self._epoch(number, snapshot, resumed, undo, made)

    def _epoch(
        self, number: int, snapshot: Snapshot, resumed: Plan | None, undo: ExitStack, made: slice = _ALL
    ) -> Epoch:
        plan = resumed or self._plan(number, snapshot)
        order = self._order(plan, snapshot.segments, self._missing)
        steps, batch_size = range(order.steps)[made], self._terms.batch_size
        rows = len(steps) * batch_size
        if self._share.world_size == 1 and order.steps - 1 in steps:  # the last batch may be short
            rows -= max(0, order.steps * batch_size - (plan.stream_rows - plan.position))
        self._pacing.add_served(rows, undo)
        self.headroom.took(snapshot)
        return Epoch(plan, snapshot, order, was_resumed=resumed is not None, claimed_rows=rows)

    def give_back(self, epoch: Epoch) -> None:
        """Count rows that an epoch will not deliver any more as not served. Idempotent; never fails."""
        rest = epoch.claimed_rows - epoch.delivered * self._terms.batch_size
        if rest > 0:
            epoch.claimed_rows -= rest
            unread = not epoch.delivered and not epoch.was_resumed and self._agreement is None
            self._pacing.give_back(rest, epoch.snapshot if unread else None)

    def note_held_up(self, epoch: Epoch) -> None:
        """Count how long writers have waited for an epoch's lease, before it goes, or now. Never fails."""
        with suppress(OSError, ArrowCacheError):
            waited = min(self._store.held_up_seconds(epoch.snapshot.covers), time.time() - epoch.began)
            more = max(0.0, waited - epoch.held_up_seconds)  # a wait that goes on counts once
            epoch.held_up_seconds += more
            self._meter.hold_up(more)

    def deliver(self, epoch: Epoch) -> None:
        """The consumer gets a batch of an epoch: what was passed is let go."""
        epoch.delivered += 1
        if epoch.give_up_passed():
            self.settle()

    def settle(self) -> bool:
        """An epoch gave up segments: so may the ranks' agreement on it, if all have joined.

        Returns: whether the agreement holds any still.
        """
        return self._agreement is not None and self._agreement.settle()

    def ended(self, epoch: Epoch) -> None:
        """An epoch's snapshot was let go: so may the ranks' agreement on it."""
        if self._agreement is not None:
            self._agreement.release(epoch.plan.epoch)

    def drop(self, epoch: Epoch) -> None:
        """An epoch was begun, and nobody reads it: let go of all that it has. Never fails."""
        epoch.snapshot.close()
        self.ended(epoch)
        self.give_back(epoch)  # last: it may wait for cache.lock, and the process may be ending

    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()

    def _agreed(
        self,
        number: int,
        position: int,
        take: Callable[[], Snapshot | None],
        undo: ExitStack,
        *,
        ahead: bool = False,
    ) -> Snapshot | None:
        """The snapshot of `take`, or the one that another rank of the same job has taken already."""
        if self._agreement is None:
            snapshot = take()
            if snapshot is not None:
                undo.callback(snapshot.close)
            return snapshot
        terms = {
            "batch_size": self._terms.batch_size,
            "shuffle": self._terms.shuffle,
            "seed": self._terms.seed,
            "epoch_rows": self._terms.epoch_rows,
            "drop_last": self._terms.drop_last,
            "window_bytes": self._terms.window_bytes,
            "position": position,
            "order_version": ORDER_VERSION,  # 0.1.0 has none
        }
        try:
            snapshot = self._agreement.snapshot(number, terms, take, ahead=ahead)
        except CorruptSegmentError:  # the other ranks, which read it, go on to the next one
            if ahead:
                self._lost_ahead = number
            else:
                self.next = number + 1
            raise
        if snapshot is not None:
            undo.callback(self._agreement.release, number)
            undo.callback(snapshot.close)
        return snapshot

    def _plan(self, number: int, snapshot: Snapshot) -> Plan:
        terms, rows = self._terms, snapshot.segment_rows
        window_rows = self._window_rows(len(snapshot), snapshot.nbytes)
        return Plan(
            number,
            terms.seed,
            terms.shuffle,
            terms.epoch_rows,
            window_rows,
            terms.batch_size,
            snapshot.seqs,
            rows,
        )

    def _window_rows(self, rows: int, nbytes: int) -> int:
        return max(1, self._terms.window_bytes * rows // max(1, nbytes))

    def _order(self, plan: Plan, present: list[SegmentInfo] | tuple[SegmentInfo, ...], missing: str) -> Order:
        """The order of a plan over what is there of it.

        Raises: MissingSegmentsError: not all is, and that is not accepted; nothing has changed.
        """
        if missing == "keep":
            return plan.order(self._terms.batch_size, self._share, self._terms.drop_last)
        order = plan.order_of(present, self._terms.batch_size, self._share, self._terms.drop_last)
        if isinstance(order, Survivors) and order.missing:
            gone = len(plan.seqs) - len(present)
            fact = (
                f"{order.missing} rows of epoch {plan.epoch} are lost to it: {gone} of its {len(plan.seqs)} "
                "segments have left the cache since the state was saved"
            )
            if missing == "raise":
                raise MissingSegmentsError(f"{fact}; pass missing='skip' to go on without them")
            warnings.warn(f"{fact}; the others are delivered", RuntimeWarning, stacklevel=7)
        return order

    def _retake(self, plan: Plan) -> Snapshot:
        """Lease what is there of a planned epoch, the oldest segments too."""
        snapshot = Snapshot.take(self._store, plan.includes)
        try:
            snapshot.map_all()
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def _wait_for_rows(
        self,
        number: int,
        undo: ExitStack,
        is_cancelled: Callable[[], bool],
        before_waiting: Callable[[], None],
        *,
        ahead: bool,
    ) -> Snapshot | None:
        """Take a snapshot of enough rows; leases nothing while there are too few."""
        patience = Patience(self._store, self._timeout_seconds, with_ranks=self._agreement is not None)
        signed = False
        with ExitStack() as waiting:
            while True:
                if patience.is_due():
                    with self._meter.stage("store"):
                        snapshot = self._take(number, undo, ahead=ahead)
                    if snapshot is not None:
                        return snapshot
                    if not self._pacing.reason:  # else it did not look, or at what the pace leaves it
                        patience.found(self._rows_seen, self._listed)
                    before_waiting()
                if patience.is_over():
                    raise LoaderTimeoutError(self._why_late(patience))
                if is_cancelled():
                    return None
                if not signed:  # samplers, which may wait for training, see that it waits for them
                    signed = True
                    waiting.enter_context(self._store.usage.waiting())
                self._require_more(patience)
                with self._meter.stage("pace" if self._pacing.reason else "samplers"):
                    patience.pause()

    def _require_more(self, patience: Patience) -> None:
        """Raises: LoaderTimeoutError: rows are there, too few for a step, and nobody writes.

        It is the error that would come later: who handles that one, handles this one. Where there are other
        ranks it comes later: one of them may be about to start the samplers.
        """
        why = self._why_never(patience)
        if why and self._share.world_size == 1:
            raise LoaderTimeoutError(why)

    def _why_never(self, patience: Patience) -> str:
        """Why what is there is not enough, where nobody writes more; empty: more may come."""
        terms, rows, listed = self._terms, self._rows_seen, self._rows_listed
        is_short = terms.drop_last and terms.wait_rows <= rows < self.step_rows
        is_refused = not rows and terms.wait_rows <= listed
        if self._pacing.reason or not (is_short or is_refused) or not patience.nobody_writes():
            return ""
        path = self._store.folder.path
        if is_refused:
            return refused(path, listed)
        return too_few(path, rows, self._accepted, terms.batch_size, self.step_rows)

    @property
    def _rows_listed(self) -> int:
        return sum(segment.rows for segment in self._listed)

    @property
    def _accepted(self) -> str:
        return " that `where` accepts" if self._where else ""

    def _why_late(self, patience: Patience) -> str:
        waited = f"waited {self._timeout_seconds:g} s for"
        if self._pacing.reason:
            return (
                f"{waited} the pace of {self._store.folder.path}: {self._pacing.reason}. "
                "Is a sampler running? set another pace with cache.set_pace(), or raise timeout"
            )
        if never := self._why_never(patience):
            return f"waited {self._timeout_seconds:g} s: {never}"
        if patience.is_in_vain():
            return self._why_in_vain(patience)
        fact = (
            f"{waited} {self._needed_rows} rows in {self._store.folder.path}, which has "
            f"{self._rows_seen}{self._accepted}: {patience.samplers()}"
        )
        if not self._rows_seen:
            return fact
        return f"{fact}; or have it be content with what is there: lower wait_rows or batch_size"

    def _why_in_vain(self, patience: Patience) -> str:
        path, listed = self._store.folder.path, self._rows_listed
        fact = f"for {self._timeout_seconds:g} s segments were published in {path}, and "
        if not self._rows_seen and self._where:
            return f"{fact}`where` refuses all {listed} rows that are there: look at what it accepts"
        fact += (
            f"its rows{self._accepted} stay at {self._rows_seen}, where {self._needed_rows} are waited for: "
        )
        if patience.has_evicted():
            capacity = format_bytes(self._store.settings.capacity_bytes)
            fact += f"it is full, with a capacity of {capacity}, and evicts as much as comes: "
            return f"{fact}lower wait_rows or batch_size, or raise the capacity"
        return f"{fact}lower wait_rows or batch_size, or look at what `where` accepts"

    def _take(self, number: int, undo: ExitStack, *, ahead: bool) -> Snapshot | None:
        """The snapshot of a new epoch, if there is enough for one; it counts once, for all ranks."""
        own: Snapshot | None = None
        with ExitStack() as claim:

            def take() -> Snapshot | None:
                nonlocal own
                own = self._try_take(claim)
                return own

            agreed = self._agreed(number, 0, take, undo, ahead=ahead)
            if agreed is own:  # else another rank was first
                kept = claim.pop_all()
                if self._agreement is None:  # else others may read it, whatever becomes of this rank
                    undo.enter_context(kept)
        return agreed

    def _try_take(self, claim: ExitStack) -> Snapshot | None:
        """An open snapshot of enough rows, mapped, as the pace allows; what it counts goes on the stack."""
        if not self._pacing.may_begin():
            return None
        where = self._pacing.where()
        if self._rows_seen < self._needed_rows:  # last time: so who waits never takes cache.lock
            self._listed = self._store.segments()
            self._rows_seen = sum(segment.rows for segment in self._listed if where is None or where(segment))
        if self._rows_seen < self._needed_rows:
            return None
        snapshot = Snapshot.take(self._store, where, yields_since=self.headroom.known)
        enough = False
        try:
            self._rows_seen = len(snapshot)
            if self._rows_seen >= self._needed_rows:
                self._rows_seen = snapshot.map_all()
            enough = self._rows_seen >= self._needed_rows and self._pacing.claim(snapshot, claim)
        finally:  # Ctrl-C while it maps, too, leaves nothing leased
            if not enough:
                snapshot.close()
        if not enough:
            self._listed = self._store.segments()
            return None
        return snapshot
