"""Snapshots by name: how a process reads rows of a snapshot that another process took.

The process that begins an epoch (EpochBatchSampler, in the main process) owns it here, as an `OwnedEpoch`:
its snapshot is leased until every batch was delivered, or the epoch was given up. The messages to workers
and back are `DrawnRows` of its `SnapshotName`: the cache's path, the segments, and a unique key.
A process that gets such rows reads them

- through the epoch itself, in the process that owns it;
- else through a lease of its own on just those segments, which is available while the main process
  still has its own. A worker keeps one snapshot mapped, and releases it after its last batch of the
  epoch, or after a second without requests: an idle worker holds no lease for long.

Guarantees: row ids are never read in another snapshot than the one they were drawn for; rows whose
segments are gone are an error, not other rows; nothing here waits for another process (but for
cache.lock). It must never raise where a result is unpickled: lazy_batch.py ensures that.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from arrowcache.errors import ArrowCacheError, MissingSegmentsError, WorkerError
from arrowcache.lifetimes import Origin, at_exit, forgets_in_child
from arrowcache.os_errors import start
from arrowcache.reading.columns import Columns
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.gather import PendingRead, batches_ahead
from arrowcache.reading.plan import Plan, runs_of, segments_of
from arrowcache.reading.slots import Slot, Slots
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import store_of
from arrowcache.storage.store import Store
from arrowcache.units import format_count

_IDLE_SECONDS = 1.0
_REMEMBERED = 64  # of epochs that were given up, whose batches may still arrive

Arrival = tuple[str, int]  # a snapshot's key, and a step
ColumnArrays = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotName:
    """The identity of a snapshot in any process of this machine.

    `runs` are its segments, as of `runs_of`.
    """

    key: str
    path: str
    runs: NDArray[np.int64]


class DrawnRows(list[int]):
    """The rows of one batch, and their snapshot: the items of EpochBatchSampler.

    A list of row ids in that snapshot's numbering, which only CacheDataset can read.

    Args:
        ids: (rows,) int64.
        oldest: number of the oldest segment that this batch or a later one needs.
        left: batches of the epoch after this one.
    """

    __slots__ = ("ids", "left", "oldest", "snapshot", "step")

    def __init__(
        self, snapshot: SnapshotName, step: int, ids: NDArray[np.int64], oldest: int, left: int
    ) -> None:
        super().__init__(ids.tolist())
        self.snapshot, self.step, self.ids, self.oldest, self.left = snapshot, step, ids, oldest, left

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., DrawnRows], tuple[Any, ...]]:
        return DrawnRows, (self.snapshot, self.step, self.ids, self.oldest, self.left)

    def __repr__(self) -> str:
        return f"<DrawnRows: {len(self)} of step {self.step}>"

    @property
    def arrival(self) -> Arrival:
        return self.snapshot.key, self.step

    def read(self, columns: tuple[str, ...], store: Store) -> ColumnArrays:
        """Return the rows, copied into NumPy arrays, in any process.

        Args:
            store: of the snapshot's cache, in this process.
        Raises: MissingSegmentsError: the epoch has ended and segments are gone. ArrowCacheError: the epoch
            was given up for a newer one. CorruptSegmentError: a damaged segment.
        """
        own = _owned_by(self.snapshot.key)
        if own is not None:
            return own.read(self.step, self.ids, columns)
        if self.snapshot.key in _stale:
            raise ArrowCacheError("this batch is of an epoch that was left for a newer one: drop it")
        worker = get_worker_info()
        if worker is not None:
            try:
                return _reader.read(self, store, columns)
            finally:
                if self.left < worker.num_workers:  # they take turns
                    _reader.close()  # the last batch of this worker
        with closing(_ReopenedSnapshot(self, store)) as snapshot:
            return snapshot.read(self.ids, columns)

    def store(self) -> Store:
        """Return the store of their cache; opened, unless this process drew them."""
        own = _owned_by(self.snapshot.key)
        return store_of(self.snapshot.path) if own is None else own.store


class OwnedEpoch:
    """An epoch whose batches are drawn here and read anywhere. It ends when the last has arrived.

    One thread draws; any thread that receives batches calls `read` and `delivered`; any calls `close`.

    Args:
        store, epoch: their store and epoch; this object ends the epoch.
        slots: memory for batches, by columns: kept by the caller for later epochs.
    """

    def __init__(
        self,
        store: Store,
        epoch: Epoch,
        batch_size: int,
        slots: dict[tuple[str, ...], Slots],
    ) -> None:
        runs = runs_of(epoch.snapshot.seqs, epoch.snapshot.segment_rows)
        self.name = SnapshotName(uuid.uuid4().hex, str(store.folder.path), runs)
        self.origin = Origin()
        self.store, self._epoch = store, epoch
        self._batch_size, self._slots = batch_size, slots
        self._pending: set[int] = set()  # steps that were drawn, and have not arrived
        self._drawn: dict[int, NDArray[np.int64]] = {}  # step -> rows that may be read here
        self._begun: dict[int, PendingRead] = {}  # reads of the next batches, by step
        self._sent = 0
        self._is_closed = False
        _owned[self.name.key] = self

    @property
    def plan(self) -> Plan | None:
        return None if self._is_closed else self._epoch.plan

    @property
    def is_drawn(self) -> bool:
        """True if all batches are drawn; some may be on their way."""
        return self._sent == self._epoch.order.steps

    def remaining(self) -> Plan:
        return self._epoch.order.remaining(self._sent)

    def draw(self) -> DrawnRows | None:
        """Draw the next batch, or return None after the last one."""
        order, step, rows = self._epoch.order, self._sent, None
        if step < order.steps:
            oldest = order.segments_span(step).start if self._epoch.plan.shuffle.is_in_order else 0
            rows = DrawnRows(self.name, step, order.batches(step, step + 1), oldest, order.steps - step - 1)
            self._pending.add(step)
            self._drawn[step] = rows.ids
            self._sent += 1
        elif not self._pending:
            self.close()
        return rows

    def read(self, step: int, ids: NDArray[np.int64], names: tuple[str, ...]) -> ColumnArrays:
        """Gather rows into a slot: name -> array, which returns its memory when it dies.

        If rows come from the disk it begins to read those of the next batches, too.
        """
        snapshot, begun = self._epoch.snapshot, self._begun.pop(step, None)
        self._drawn.pop(step, None)
        if begun is None or begun.columns is None or begun.columns.names != names:
            columns = snapshot.gather(ids, names, out=self._lend(ids, names).arrays())
        else:
            columns = begun.result()
        if snapshot.read_mode.is_cold:
            most = batches_ahead(self._batch_size, self._batch_size * snapshot.row_bytes)
            for each in [*self._drawn][: max(0, most - len(self._begun))]:
                with suppress(Exception):  # the read of that batch raises it again
                    self._begun[each] = self._begin(self._drawn.pop(each), names)
        return {name: columns[name] for name in names}

    def _begin(self, ids: NDArray[np.int64], names: tuple[str, ...]) -> PendingRead:
        snapshot = self._epoch.snapshot
        return snapshot.read(ids, snapshot.columns_of(names), self._lend(ids, names))

    def _lend(self, ids: NDArray[np.int64], names: tuple[str, ...]) -> Slot:
        slots = self._slots.get(names)
        if slots is None:
            memory = Columns.of(self.store.settings.schema, names).memory
            slots = self._slots.setdefault(names, Slots(memory, self._batch_size))
        return slots.lend(len(ids))

    def delivered(self, step: int) -> None:
        """Count a batch as arrived, even a failed one: release segments that no other batch needs."""
        self._drawn.pop(step, None)
        if step in self._pending:
            self._pending.discard(step)
            self._epoch.deliver(step=min(list(self._pending), default=step))
        if self.is_drawn and not self._pending:
            self.close()

    def close(self, *, is_stale: bool = False) -> None:
        """Unlease. A batch that arrives later is read anew, or refused if `is_stale`. Idempotent."""
        if not self.origin.is_here:
            return  # a forked child has no part in it
        if is_stale:
            _stale.append(self.name.key)
        if _owned.pop(self.name.key, None) is None:
            return
        self._is_closed = True
        self._begun.clear()
        self._epoch.end()


# Single operations, without a lock that a fork could find held.
_owned: dict[str, OwnedEpoch] = {}
_stale: deque[str] = deque(maxlen=_REMEMBERED)


def _owned_by(key: str) -> OwnedEpoch | None:
    """Return the epoch of a key, if this process draws its batches, else None."""
    found = _owned.get(key)
    return found if found is not None and found.origin.is_here else None


def delivered(key: str, step: int) -> None:
    """Count a batch as arrived, perhaps in the process that drew it."""
    if (found := _owned_by(key)) is not None:
        found.delivered(step)


class _ReopenedSnapshot:
    """The snapshot of some rows, leased by its name: the segments that these and later rows need."""

    def __init__(self, rows: DrawnRows, store: Store) -> None:
        name, self._oldest = rows.snapshot, rows.oldest
        seqs, segment_rows = segments_of(name.runs)
        wanted = set(seqs[self._oldest :].tolist())
        self._rows_before = int(segment_rows[: self._oldest].sum())
        self._snapshot = Snapshot.take(store, lambda s: s.seq in wanted)
        missing = len(wanted) - len(self._snapshot.segments)
        if missing:
            self._snapshot.close()
            raise MissingSegmentsError(
                f"{missing:,} of {format_count(len(wanted), 'segment')} of an epoch have left {name.path}: "
                "its lease ended before this batch was read; keep the DataLoader's iterator until its "
                "batches are used"
            )

    def read(self, ids: NDArray[np.int64], columns: tuple[str, ...]) -> ColumnArrays:
        return dict(self._snapshot.gather(ids - self._rows_before, columns))

    def release_oldest(self, oldest: int) -> None:
        self._snapshot.release_oldest(oldest - self._oldest)

    def close(self) -> None:
        self._snapshot.close()


class _LastSnapshot:
    """A worker's last used snapshot, until it was idle for a while."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # taken by `with`: Ctrl-C can leave a condition's own locked
        self._condition = threading.Condition(self._lock)
        self._key = ""
        self._snapshot: _ReopenedSnapshot | None = None
        self._used = 0.0
        self._watcher: threading.Thread | None = None
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Begin anew: a thread that stayed behind may hold the lock."""
        self.__init__()  # type: ignore[misc]

    def read(self, rows: DrawnRows, store: Store, columns: tuple[str, ...]) -> ColumnArrays:
        with self._lock:
            if self._snapshot is None or self._key != rows.snapshot.key:
                self.close()
                self._snapshot, self._key = _ReopenedSnapshot(rows, store), rows.snapshot.key
            self._snapshot.release_oldest(rows.oldest)
            try:
                return self._snapshot.read(rows.ids, columns)
            finally:
                self._used = time.monotonic()
                if self._watcher is None:
                    watcher = threading.Thread(target=self._watch, name="arrowcache-idle", daemon=True)
                    with suppress(WorkerError):  # the next read tries again
                        start(watcher)
                        self._watcher = watcher

    def close(self) -> None:
        with self._lock:
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is not None:
                snapshot.close()

    def _watch(self) -> None:
        with self._lock:
            while self._snapshot is not None:
                left = self._used + _IDLE_SECONDS - time.monotonic()
                if left > 0:
                    self._condition.wait(left)
                else:
                    self.close()
            self._watcher = None


_reader = _LastSnapshot()


def _at_exit() -> None:
    for each in list(_owned.values()):
        each.close()
    _reader.close()


at_exit(_at_exit)
