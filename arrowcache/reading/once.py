"""Once: a loader whose rows are each used once, by a name: `Loader(cache, 16, once="learner")`.

It has no epochs. Each `next` chooses a batch: the oldest rows then that `rows=` accepts and that the name has
not had. Nothing is begun ahead, so `set_rows` holds from the next `next` on. To the loop in stream.py each
batch is an epoch of one step, which begins as it is asked for.

A row is left, or handed out, or used. It is handed out as its batch is chosen, and left again if that batch
is dropped before its consumer has it. It is used, which storage/used_rows.py keeps, at the next choice or as
the loader is closed without an error, or with `acknowledge` by `done`.

Guarantees: a row that is used is never chosen again; a process that dies leaves at most the rows of one batch
unused that its consumer had, or those that it did not acknowledge. Nothing is leased but the segments of a
batch that is being made: rows may leave the cache before they are chosen, which is counted.
Must never: choose excluded rows, or mark them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError
from arrowcache.reading.available_rows import AvailableRows, RowsWait, Wait
from arrowcache.reading.epoch import EpochProgress, EpochSource
from arrowcache.reading.options import LoaderOptions, RankInfo
from arrowcache.reading.order import Order
from arrowcache.reading.per_segment import ReadColumns
from arrowcache.reading.plan import Plan
from arrowcache.reading.row_filter import RowFilter, chosen_of, require_rows
from arrowcache.reading.shuffle import Shuffle
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.storage.layout import MAX_SEQ, SegmentInfo
from arrowcache.storage.store import Leased, Store
from arrowcache.storage.used_rows import RowsOf, UsedRows

_FIRST_ROWS, _MOST_ROWS = 1 << 12, 1 << 17  # looked at together, of segments whose rows are not known
_NO_STATE = (
    "a Loader(once={!r}) has no state to save or load: the cache keeps which rows its name has had. An older "
    "checkpoint goes on with the rows that are left; a new name has all of them"
)
_NONE = np.empty(0, np.int64)
_Mask = NDArray[np.bool_]


class _Patience(RowsWait):
    """A wait that is over, without an error, once nobody writes any more."""

    _lower = "lower batch_size"

    def _why_never(self) -> str:
        return "nobody writes" if self._may_end() and self._nobody_writes() else ""

    def _is_over(self) -> bool:
        """As of any wait; where nobody writes now, it ends without an error once that is so for a while."""
        if not super()._is_over():
            return False
        self._nobody_writes()  # it looks
        return not (self._unwritten_since and self._may_end())

    def _may_end(self) -> bool:
        if self._available_rows.pace_says:
            return False
        return self._store.folder.read_record().next_seq > 0  # else whoever is to write may still be starting

    def _never(self, why: str) -> Exception:  # noqa: ARG002
        return _NobodyWrites()


class _NobodyWrites(Exception):
    """No more rows come."""


class _OneStep(Order):
    """The order of a batch: given rows of a snapshot, or no step at all."""

    def __init__(self, plan: Plan, snapshot: Snapshot, ids: NDArray[np.int64] | None) -> None:
        self.selected, self.steps = snapshot.selected, int(ids is not None)
        self._plan, self._segments = plan, len(snapshot.segments)
        self._ids = np.empty(0, np.int64) if ids is None else ids

    def batches(self, first: int, last: int) -> NDArray[np.int64]:
        return self._ids if last > first else self._ids[:0]

    def numbers(self, first: int, last: int) -> NDArray[np.int64]:
        return self.batches(first, last)

    def rows_of(self, steps: range) -> int:
        return len(self._ids) if len(steps) else 0

    def remaining(self, steps: int) -> Plan:  # noqa: ARG002
        return self._plan

    def segments_span(self, step: int) -> range:  # noqa: ARG002
        return range(self._segments)


class _Batch(EpochProgress):
    """A batch: its rows, handed out, and their snapshot until it is made."""

    snapshot: Snapshot | None = None

    def __init__(self, planned: Plan, rows: UnusedRows) -> None:
        super().__init__(planned)
        self.plan, self._rows = planned, rows
        self.parts: Sequence[RowsOf] = ()  # handed out

    def choose(self, least: int, most: int) -> Snapshot | None:
        """Have some rows handed out, and leased. None: there are too few."""
        self.snapshot = self._rows.hand_out(self, least, most)
        return self.snapshot

    def choose_none(self, store: Store) -> None:
        """Have no rows, and no step."""
        self.snapshot = Snapshot.of(store, Leased([], None, 0, 0))

    def begin(self) -> None:
        """Have the order of what was chosen."""
        assert self.snapshot is not None
        ids = None
        if self.parts:
            index_of = {segment.seq: index for index, segment in enumerate(self.snapshot.segments)}
            before = self.snapshot.rows_before
            ids = np.concatenate([before(index_of[part.segment.seq]) + part.rows for part in self.parts])
        self.order = _OneStep(self.plan, self.snapshot, ids)

    def deliver(self, count: int = 1, step: int | None = None, within: Any = None) -> bool:
        self._rows.note_delivered(self.parts)
        is_over = super().deliver(count, step, within)
        self.end()  # its batch is made: nothing stays leased while it is used
        return is_over

    def end(
        self,
        leave_to: Callable[[Snapshot], None] = Snapshot.close,  # noqa: ARG002
        *,
        may_deliver: bool = False,
    ) -> None:
        if self.snapshot is not None:
            self.snapshot.close()
        if not may_deliver and not self.delivered:
            parts, self.parts = self.parts, ()
            self._rows.take_back(parts)


class UnusedRows(AvailableRows):
    """The rows of a cache that a name has not had."""

    _read: ReadColumns

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter) -> None:
        self._read = ReadColumns()
        super().__init__(store, options, meter)
        assert options.once is not None
        self._epoch_rows = options.most_rows
        self._acknowledges = options.acknowledge
        self._expect = options.expect
        self._used = UsedRows(store, options.once)
        self._segments: dict[int, SegmentInfo] = {}  # all that are listed and asked for, oldest first
        #: By segment, oldest first: the rows that are left. None: not looked at. Missing: none is.
        self._left: dict[int, NDArray[np.int64] | None] = {}
        self._out: dict[int, NDArray[np.bool_]] = {}  # masks of the rows that are handed out
        self._delivered: list[RowsOf] = []  # used at the next choice
        self._returned: deque[RowsOf] = deque()  # of batches that were dropped
        self._newest = -1  # segment that was seen
        self._inserted: int | None = None  # rows that were ever published, then
        self._choosing = threading.RLock()  # another thread may call `done`
        self._version: object = None  # of what `_left` says
        self._over: set[int] = set()  # segments all of whose rows were handed out or used
        self._served: set[int] = set()  # segments that count as read
        self._uncounted: list[RowsOf] = []  # used, and not counted as served
        self._list()

    # the choice

    def set_rows(self, rows: object) -> None:
        """Choose by other rows from now on. Raises: as the argument of a Loader."""
        self._used.require_open()
        rows_filter = RowFilter(self.store, require_rows(rows), self._expect, self._read)
        with self._choosing:
            self._filter, self._version = rows_filter, None

    def hand_out(self, batch: _Batch, least: int, most: int) -> Snapshot | None:
        """Hand the oldest rows out to a batch, and lease them. What was delivered before is used.

        Returns: the snapshot of their segments, all mapped. None: fewer than `least` are left.
        Raises: CacheFullError, LockTimeoutError, OSError: what was delivered could not be noted; nothing is
            handed out, and the next call tries again.
        """
        with self._choosing:
            return self._handed_out(batch, least, most)

    def _handed_out(self, batch: _Batch, least: int, most: int) -> Snapshot | None:
        self._used.require_open()
        self._use_delivered()
        if self.store.settings.pace is not None:
            self._count_now()
        if not self._may_begin():
            return None
        self._forget_outdated()
        is_new, at_once = False, _FIRST_ROWS
        while True:
            parts, unknown = self._oldest(most, at_once)
            self.rows = sum(len(part.rows) for part in parts)
            if unknown:
                self._look_at(unknown)
                at_once = min(2 * at_once, _MOST_ROWS)
            elif self.rows < most and not is_new:
                self._list()
                is_new = True
            elif self.rows < least:
                self._count_now()
                self.listed = [*self._segments.values()]
                return None
            elif (snapshot := self._leased(batch, parts)) is not None:
                return snapshot

    def _leased(self, batch: _Batch, parts: Sequence[RowsOf]) -> Snapshot | None:
        """Hand rows out to a batch, and lease them. None: some left just now, or are damaged."""
        segments = [part.segment for part in parts]
        with ExitStack() as undo:
            snapshot = undo.enter_context(self._snapshot_of(segments))
            if len(snapshot.segments) < len(segments):
                self._drop({segment.seq for segment in segments}.difference(snapshot.seqs.tolist()))
                return None
            batch.parts = parts
            for part in parts:
                self._mask_of(part.segment)[part.rows] = True
                self._take_from_left(part)
            undo.pop_all()
        return snapshot

    def _oldest(self, most: int, at_once: int) -> tuple[list[RowsOf], list[SegmentInfo]]:
        """The oldest rows that are left, at most so many; and segments to look at before they are known.

        Args:
            at_once: rows of segments to look at.
        """
        parts: list[RowsOf] = []
        unknown: list[SegmentInfo] = []
        for seq, rows in self._left.items():
            if rows is None:
                unknown.append(self._segments[seq])
                at_once -= self._segments[seq].rows
                if at_once <= 0:
                    break
            elif unknown:
                break
            else:
                parts.append(RowsOf(self._segments[seq], rows[:most]))
                most -= len(rows)
                if most <= 0:
                    break
        return parts, unknown

    def _forget_outdated(self) -> None:
        """Forget what is left of segments, where that may have changed."""
        while self._returned:
            self._return(self._returned.popleft())
        version = self._filter.version()
        if version is None or version != self._version:
            self._version = version
            if version is None and self._filter.function is not None:
                self._filter.function.forget()
            self._left = {seq: None for seq in self._segments if seq not in self._over}

    def _list(self) -> None:
        """Learn of segments that came or left; of some that came and left only by the count of their rows."""
        with self.store.locked():
            listed, inserted = self.store.segments(), self.store.usage.record().inserted_rows
        oldest = listed[0].seq if listed else MAX_SEQ
        self._drop([*takewhile(lambda seq: seq < oldest, self._segments)])
        self._read.keep([*self._segments])
        new = [*takewhile(lambda segment: segment.seq > self._newest, reversed(listed))]
        if self._where is None and self._inserted is not None:
            self._meter.miss(max(0, inserted - self._inserted - sum(segment.rows for segment in new)))
        self._inserted = inserted
        for segment in reversed(new):
            self._newest = segment.seq
            if self._where is None or self._asked(segment):
                self._segments[segment.seq], self._left[segment.seq] = segment, None

    def _look_at(self, segments: Sequence[SegmentInfo]) -> None:
        """Find which rows of segments are left."""
        seqs = {segment.seq for segment in segments}
        with self._snapshot_of(segments, self._filter.reads(segments)) as snapshot:
            self._select(snapshot)
            for segment in snapshot.segments:
                seqs.discard(segment.seq)
                left = self._not_had(segment, chosen_of(snapshot, segment), self._out.get(segment.seq))
                if len(left):
                    self._left[segment.seq] = left
                else:
                    del self._left[segment.seq]
        self._drop(seqs)  # they left just now, or are damaged

    def _not_had(self, segment: SegmentInfo, chosen: _Mask | None, out: _Mask | None) -> NDArray[np.int64]:
        """The rows of a segment, of those chosen, that were neither used nor handed out: (n,)."""
        mask = np.ones(segment.rows, np.bool_) if chosen is None else chosen.copy()
        for had in (self._used.of(segment), out):
            if had is not None:
                mask &= ~had
        return mask.nonzero()[0]

    def _snapshot_of(self, segments: Sequence[SegmentInfo], reads: bool = True) -> Snapshot:
        """Lease and map segments, without those that left just now or are damaged; or neither."""
        if not reads:
            return Snapshot.of(self.store, Leased([*segments], None, 0, 0))
        with ExitStack() as undo:
            snapshot = undo.enter_context(
                Snapshot.of(self.store, self.store.lease_again(segments, self._count_served))
            )
            snapshot.map_all()
            undo.pop_all()
        return snapshot

    def _take_from_left(self, part: RowsOf) -> None:
        seq = part.segment.seq
        left = self._left[seq]
        assert left is not None
        if len(left) > len(part.rows):
            self._left[seq] = left[len(part.rows) :]
            return
        del self._left[seq]
        if not len(self._not_had(part.segment, None, self._out[seq])):
            self._over.add(seq)  # whatever is asked for

    def _drop(self, seqs: Iterable[int]) -> None:
        """Forget segments that have left, and count the rows that the name had not had, wanted or not."""
        for seq in seqs:
            segment, out = self._segments.pop(seq), self._out.pop(seq, None)
            self._left.pop(seq, None)
            self._meter.miss(len(self._not_had(segment, None, out)))
            self._used.forget(seq)
            self._served.discard(seq)
            self._over.discard(seq)

    def _mask_of(self, segment: SegmentInfo) -> NDArray[np.bool_]:
        mask = self._out.get(segment.seq)
        if mask is None:
            mask = self._out[segment.seq] = np.zeros(segment.rows, np.bool_)
        return mask

    # what becomes of a batch

    def note_delivered(self, parts: Sequence[RowsOf]) -> None:
        """Let rows be used at the next choice: their consumer has them."""
        if not self._acknowledges:
            self._delivered += parts

    def take_back(self, parts: Sequence[RowsOf]) -> None:
        """Let rows be left again: their batch was dropped. Any thread, and the garbage collector, may."""
        self._returned.extend(parts)

    def _return(self, part: RowsOf) -> None:
        if part.segment.seq in self._segments:
            self._mask_of(part.segment)[part.rows] = False
            self._over.discard(part.segment.seq)
            self._left[part.segment.seq] = None
            self._left = {seq: self._left[seq] for seq in self._segments if seq in self._left}

    def done(self, ids: NDArray[np.int64]) -> None:
        """Take rows (n, 2) for used. Those that left the cache are passed over.

        Raises: ValueError: rows that were not handed out. As `UsedRows.add`.
        """
        with self._choosing:
            self._used.require_open()
            self._use(self._out_of(ids))
            self._count_now()

    def _out_of(self, ids: NDArray[np.int64]) -> list[RowsOf]:
        parts = []
        for seq in np.unique(ids[:, 0]).tolist():
            segment = self._segments.get(seq)
            if segment is None and seq <= self._newest:
                continue  # it has left
            rows, out = np.unique(ids[ids[:, 0] == seq, 1]), self._out.get(seq)
            if segment is None or out is None or rows[-1] >= segment.rows or not out[rows].all():
                raise ValueError(
                    f"rows of segment {seq} were not handed out by this loader: give done() the batch that "
                    "`next` gave, or its rows"
                )
            used = self._used.of(segment)
            parts.append(RowsOf(segment, rows if used is None else rows[~used[rows]]))
        return [part for part in parts if len(part.rows)]

    def _use_delivered(self) -> None:
        self._use([part for part in self._delivered if part.segment.seq in self._segments])
        self._delivered = []

    def _use(self, parts: Sequence[RowsOf]) -> None:
        if parts:
            self._used.add(parts)
            self._uncounted += parts

    def _count_served(self) -> None:
        """Count the rows that were used since the last call; under cache.lock, and never fails."""
        parts, self._uncounted = self._uncounted, []
        if parts and self.is_paced:
            new = sorted({part.segment.seq for part in parts} - self._served)
            self.store.usage.add_served(sum(len(part.rows) for part in parts))
            self.store.usage.count_epoch(np.array(new, np.int64), 1)
            self._served.update(new)

    def _count_now(self) -> None:
        if self._uncounted:
            with suppress(OSError, ArrowCacheError), self.store.locked():  # no batch fails for a count
                self._count_served()

    def settle(self) -> None:
        """Let what was delivered be used: its consumer is done. Never fails: else it comes again."""
        with suppress(OSError, ArrowCacheError, ValueError), self._choosing:
            self._used.require_open()
            self._use_delivered()
            self._count_now()

    def close(self) -> None:
        """Let go of the name. Idempotent."""
        self._used.close()


class OnceEpochs(EpochSource[_Batch]):
    """Begins one batch after another; the first one, as an iterator begins, is none."""

    parks, begins_when_asked = False, True

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter) -> None:
        self._store, self._options = store, options
        super().__init__(meter)
        options.require_fit(store, 1)
        self.rows = UnusedRows(store, options, meter)

    def plan_of(self, number: int) -> Plan:
        # its rows are asked of the disk as they are read, and not ahead
        return Plan(number, 0, Shuffle.named("rows"), None, 1, self._options.most_rows, _NONE, _NONE)

    def join(self, rank_info: RankInfo | None) -> None:
        """Ranks have names of their own."""

    def _begin(self, planned: Plan, wait: Wait | None, *, ahead: bool = False) -> _Batch | None:
        batch, most = _Batch(planned, self.rows), self._options.most_rows
        with ExitStack() as undo:
            undo.callback(batch.end)
            if not ahead:
                batch.choose_none(self._store)
            elif self._chosen(batch, most, wait) is None:
                return None
            batch.begin()
            undo.pop_all()
        return batch

    def _chosen(self, batch: _Batch, most: int, wait: Wait | None) -> Snapshot | None:
        take = partial(batch.choose, most, most)
        if wait is None:
            with self.meter.stage("start"):
                return take()
        try:
            return _Patience(self.rows, self._options, 1, self.meter, None).wait(take, wait)
        except _NobodyWrites:
            return batch.choose(most if self._options.drop_last else 1, most)

    def _begin_delivery(self, epoch: _Batch) -> None:
        """Nothing is to be remembered: the cache does."""

    def to_state(self, plan: Plan) -> NoReturn:  # noqa: ARG002
        raise ValueError(_NO_STATE.format(self._options.once))

    def from_state(self, state: dict[str, Any]) -> NoReturn:  # noqa: ARG002
        raise ValueError(_NO_STATE.format(self._options.once))

    def settle(self) -> None:
        self.rows.settle()

    def close(self) -> None:
        self.rows.close()
