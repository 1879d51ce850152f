"""Snapshots by name: how a process reads rows that another process chose.

The process that begins an epoch (EpochBatchSampler, in the main process) holds its snapshot here
as a `Sending`: leased until every batch was delivered, or the epoch was given up. What travels to
workers and back is the snapshot's `SnapshotName`: the cache's path, the segments, and a key that
no other epoch has. A process that gets rows of a name reads them

- through the Sending itself, in the process that has it;
- else through a lease of its own on just those segments, which it can have while the main process
  still has its own. A worker keeps one snapshot mapped, and lets go after its last batch of the
  epoch, or when nothing was asked of it for a second: a worker that waits holds no lease for long.

Guarantees: row ids are never read in another snapshot than the one they were drawn for; rows whose
segments are gone are an error, not other rows; nothing here waits for another process (but for
cache.lock). It must never raise where a result is unpickled: that is descriptor.py's to see to.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from arrowcache.errors import ArrowCacheError, MissingSegmentsError, WorkerError
from arrowcache.lifetimes import Origin, at_exit, forgets_in_child
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.gather import Gather
from arrowcache.reading.plan import runs_of, segments_of
from arrowcache.reading.slots import Slot, Slots
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.temperature import batches_ahead
from arrowcache.shortage import start
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import store_of
from arrowcache.storage.store import Store

_IDLE_SECONDS = 1.0
_REMEMBERED = 64  # epochs that were given up, whose batches may still arrive

Columns = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotName:
    """What identifies a snapshot in any process of this machine.

    `runs` are its segments, as of `runs_of`.
    """

    key: str
    path: str
    runs: NDArray[np.int64]

    @classmethod
    def of(cls, path: str, segments: Sequence[SegmentInfo]) -> SnapshotName:
        """A new name, for one epoch."""
        seqs = np.array([segment.seq for segment in segments], np.int64)
        rows = np.array([segment.rows for segment in segments], np.int64)
        return cls(uuid.uuid4().hex, path, runs_of(seqs, rows))


class Sending:
    """Batches of an epoch, which it owns until the last has arrived.

    `sent` and `complete` are called by whoever draws the batches, `read` and `delivered` by any
    thread that receives them, `close` by any.

    Args:
        store, epoch: what is read; the epoch is ended by this.
        batch_size: rows of a batch, at most.
        slots: memory for batches, by columns: kept by the caller for the epochs after this one.
    """

    def __init__(
        self,
        store: Store,
        epoch: Epoch,
        batch_size: int,
        slots: dict[tuple[str, ...], Slots],
    ) -> None:
        self.name = SnapshotName.of(str(store.folder.path), epoch.snapshot.segments)
        self.origin = Origin()
        self.store, self._epoch = store, epoch
        self._batch_size, self._slots = batch_size, slots
        self._pending: dict[int, int] = {}  # step -> the oldest segment in use from then on
        self._drawn: dict[int, NDArray[np.int64]] = {}  # step -> rows that are to be read here, perhaps
        self._begun: dict[int, _Begun] = {}  # by step: of those that come next
        self._sent = 0
        self._complete = False
        self._oldest = 0
        self.is_closed = False
        _sending[self.name.key] = self

    def sent(self, step: int, ids: NDArray[np.int64], oldest: int) -> None:
        """A batch is on its way; no later one reads a segment before number `oldest`."""
        self._pending[step], self._drawn[step] = oldest, ids
        self._sent += 1

    def complete(self) -> None:
        """That was the last batch."""
        self._complete = True
        if not self._pending:
            self.close()

    def read(self, step: int, ids: NDArray[np.int64], names: tuple[str, ...]) -> Columns:
        """Gather rows into a slot: name -> array, which returns its memory when it dies.

        Where rows come from the disk it begins to read those of the next batches, too.
        """
        snapshot, begun = self._epoch.snapshot, self._begun.pop(step, None)
        self._drawn.pop(step, None)
        if begun is None or begun.names != names:
            columns = snapshot.gather(ids, names, out=self._lend(ids, names).arrays())
        else:
            gather = begun.gather.wait()
            snapshot.temperature.note(len(ids), gather.missed)
            columns = begun.slot.arrays() | gather.values()
        if snapshot.temperature.is_cold:
            most = batches_ahead(self._batch_size, self._batch_size * snapshot.row_bytes)
            for each in [*self._drawn][: max(0, most - len(self._begun))]:
                with suppress(Exception):  # it comes again as that batch is read
                    self._begun[each] = self._begin(self._drawn.pop(each), names)
        return {name: columns[name] for name in names}

    def _begin(self, ids: NDArray[np.int64], names: tuple[str, ...]) -> _Begun:
        slot = self._lend(ids, names)
        return _Begun(names, slot, self._epoch.snapshot.begin_gather(ids, names, slot))

    def _lend(self, ids: NDArray[np.int64], names: tuple[str, ...]) -> Slot:
        fixed = self.store.settings.schema.fixed
        slots = self._slots.get(names)
        if slots is None:
            columns = {name: (fixed[name].shape, fixed[name].numpy_dtype) for name in names if name in fixed}
            slots = self._slots.setdefault(names, Slots(columns, self._batch_size))
        return slots.lend(len(ids))

    def delivered(self, step: int) -> None:
        """A batch has arrived, whatever came of it: let go of what no other one needs."""
        oldest = self._pending.pop(step, 0)
        self._drawn.pop(step, None)
        if self._complete and not self._pending:
            self.close()
            return
        oldest = min(list(self._pending.values()), default=oldest)
        if oldest > self._oldest:
            self._oldest = oldest
            self._epoch.release_oldest(oldest)

    def close(self, *, is_stale: bool = False) -> None:
        """Unlease. A batch that arrives later is read anew, or refused if `is_stale`. Idempotent."""
        if not self.origin.is_here:
            return  # a forked child has no part in it
        if is_stale:
            _stale.append(self.name.key)
        if _sending.pop(self.name.key, None) is None:
            return
        self.is_closed = True
        self._begun.clear()
        self._epoch.delivered = self._sent - len(self._pending)
        self._epoch.end()


class _Begun(NamedTuple):
    """Columns of a batch on their way into a slot."""

    names: tuple[str, ...]
    slot: Slot
    gather: Gather


# Single operations, without a lock that a fork could find held.
_sending: dict[str, Sending] = {}
_stale: deque[str] = deque(maxlen=_REMEMBERED)


def sending_of(name: SnapshotName) -> Sending | None:
    """The epoch of that name, if this very process sends its batches."""
    found = _sending.get(name.key)
    return found if found is not None and found.origin.is_here else None


def delivered(key: str, step: int) -> None:
    """A batch that a worker made has arrived."""
    found = _sending.get(key)
    if found is not None and found.origin.is_here:
        found.delivered(step)


def read(
    name: SnapshotName,
    store: Store,
    oldest: int,
    ids: NDArray[np.int64],
    columns: tuple[str, ...],
    step: int,
    left: int,
) -> Columns:
    """Rows of a snapshot, in whatever process: copies, in NumPy arrays.

    Args:
        store: of the snapshot's cache, in this process.
        oldest: no segment before this number is needed now or later.
        step: of the epoch.
        left: batches of the epoch after this one: the workers take turns.
    Raises: MissingSegmentsError: the epoch has ended and segments are gone. ArrowCacheError: it was
        given up for a newer one. CorruptSegmentError: a damaged segment.
    """
    own = sending_of(name)
    if own is not None:
        return own.read(step, ids, columns)
    if name.key in _stale:
        raise ArrowCacheError("this batch is of an epoch that was left for a newer one: drop it")
    worker = get_worker_info()
    if worker is not None:
        try:
            return _reader.read(name, store, oldest, ids, columns)
        finally:
            if left < worker.num_workers:
                _reader.close()  # that was this one's last
    with closing(_Retaken(name, store, oldest)) as taken:
        return taken.read(ids, columns)


def store_of_name(name: SnapshotName) -> Store:
    """The cache of a snapshot; opened, unless this very process sends its batches."""
    own = sending_of(name)
    return store_of(name.path) if own is None else own.store


class _Retaken:
    """A snapshot leased by its name: from segment `oldest` on."""

    def __init__(self, name: SnapshotName, store: Store, oldest: int) -> None:
        seqs, rows = segments_of(name.runs)
        wanted = set(seqs[oldest:].tolist())
        self._rows_before, self._oldest = int(rows[:oldest].sum()), oldest
        self._snapshot = Snapshot.take(store, lambda s: s.seq in wanted)
        missing = len(wanted) - len(self._snapshot.segments)
        if missing:
            self._snapshot.close()
            raise MissingSegmentsError(
                f"{missing} of {len(wanted)} segments of an epoch have left {name.path}: its lease ended "
                "before this batch was read; keep the DataLoader's iterator until its batches are used"
            )

    def read(self, ids: NDArray[np.int64], columns: tuple[str, ...]) -> Columns:
        return dict(self._snapshot.gather(ids - self._rows_before, columns))

    def release_oldest(self, oldest: int) -> None:
        self._snapshot.release_oldest(oldest - self._oldest)

    def close(self) -> None:
        self._snapshot.close()


class _Reader:
    """A worker's snapshot: the one that it was last asked for, until it was idle for a while."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # taken by `with`: Ctrl-C can leave a condition's own locked
        self._condition = threading.Condition(self._lock)
        self._key = ""
        self._taken: _Retaken | None = None
        self._used = 0.0
        self._watcher: threading.Thread | None = None
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Begin anew: the lock may be held by a thread that stayed behind."""
        self.__init__()  # type: ignore[misc]

    def read(
        self,
        name: SnapshotName,
        store: Store,
        oldest: int,
        ids: NDArray[np.int64],
        columns: tuple[str, ...],
    ) -> Columns:
        with self._lock:
            if self._taken is None or self._key != name.key:
                self.close()
                self._taken, self._key = _Retaken(name, store, oldest), name.key
            self._taken.release_oldest(oldest)
            try:
                return self._taken.read(ids, columns)
            finally:
                self._used = time.monotonic()
                if self._watcher is None:
                    watcher = threading.Thread(target=self._watch, name="arrowcache-idle", daemon=True)
                    with suppress(WorkerError):  # the next read tries again
                        start(watcher)
                        self._watcher = watcher

    def close(self) -> None:
        with self._lock:
            taken, self._taken = self._taken, None
            if taken is not None:
                taken.close()

    def _watch(self) -> None:
        with self._lock:
            while self._taken is not None:
                left = self._used + _IDLE_SECONDS - time.monotonic()
                if left > 0:
                    self._condition.wait(left)
                else:
                    self.close()
            self._watcher = None


_reader = _Reader()


def _at_exit() -> None:
    for each in list(_sending.values()):
        each.close()
    _reader.close()


at_exit(_at_exit)
