"""ReadAhead: keeps warm what will be read next, and gives up what was read. One thread a loader.

While an epoch runs it brings segments into memory and into the page tables before the epoch
needs them: the next part of a window or of a pass in order; the whole snapshot, where that fits
into memory; segments published meanwhile, which the next epoch will have. Of an epoch that reads
segments in order it unleases those whose rows were all delivered, so that samplers can replace them
while it runs. Between two epochs it keeps the finished snapshot for a moment, so that its mappings
are there when the next one begins.

Everything it does is a hint: it changes no batch, and an error in it ends nothing. What it leases
beside the epoch it lets go a second after the last epoch ended, and at once when a writer of this process is
waiting for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from arrowcache.cgroup import memory_bytes
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.snapshot import Snapshot
from arrowcache.shortage import start
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store

_log = logging.getLogger("arrowcache")

_PARKED_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_LOOK_SECONDS = 0.25  # between two looks for new segments, and for delivered ones


class ReadAhead:
    """The thread. Thread-safe.

    Args:
        store, where: which segments a next epoch will have.
        settle: called between epochs until it says that nothing is left to be let go.
        also_drop: has others let go of what they lease of epochs that ended.
    """

    def __init__(
        self,
        store: Store,
        where: Callable[[SegmentInfo], bool] | None,
        settle: Callable[[], bool] = lambda: False,
        also_drop: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._where = store, where
        self._lock = threading.RLock()  # taken by `with`: Ctrl-C can leave a condition's own locked
        self._changed = threading.Condition(self._lock)
        self._epoch: Epoch | None = None
        self._wanted = range(0)  # segments of the epoch's snapshot
        self._todo: deque[int] = deque()  # those of them that are not warm
        self._in_order = False
        self._touched: set[int] = set()  # seqs whose pages are in the page tables
        self._kept: list[Snapshot] = []  # of finished epochs, and of new segments
        self._kept_until: float | None = None  # None: while the epoch runs
        self._newest = self._looked_below = -1
        self._passed = 0  # segments of an epoch in order that were given up
        self._errands: deque[Callable[[], None]] = deque()
        self._settle, self._is_settled = settle, True
        self._also_drop = also_drop
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="arrowcache-readahead", daemon=True)

    def start(self) -> None:
        """Start the thread; who does has this object at hand already, to close it. Idempotent."""
        if self._thread.ident is None:
            start(self._thread)

    def follow(self, epoch: Epoch, *, in_order: bool) -> None:
        """An epoch begins. `in_order`: it reads segments one after another, as `reach` will tell."""
        with self._lock:
            rest, self._kept_until = self._kept.copy(), None
            segments = epoch.snapshot.segments
            self._touched &= {segment.seq for segment in segments}
            self._epoch, self._in_order, self._passed = epoch, in_order, 0
            self._newest = segments[-1].seq if segments else -1
            self._want(range(0))
        self.retire(rest)  # after the new one was mapped: what both read stays mapped

    def retire(self, snapshots: list[Snapshot]) -> None:
        """Close snapshots soon, in this thread: each of a dozen system calls may cost who asks 5 ms."""
        with self._lock:
            self._kept += [snapshot for snapshot in snapshots if snapshot not in self._kept]
        self.soon(partial(self._close_all, snapshots))

    def _close_all(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            snapshot.close()
        with self._lock:  # after they are closed: Ctrl-C loses none
            self._kept = [snapshot for snapshot in self._kept if snapshot not in snapshots]

    def soon(self, errand: Callable[[], None]) -> None:
        """Do something else ahead, before all that is only to be warm."""
        with self._lock:
            if not self._closed:
                self._errands.append(errand)
                self._changed.notify_all()

    def reach(self, segments: range) -> None:
        """The epoch in progress will read these segments of its snapshot next."""
        with self._lock:
            if self._epoch is not None and segments != self._wanted:
                self._want(segments)

    def reach_everything(self) -> None:
        """The epoch in progress reads all segments at once: have all warm, if they fit into memory.

        Not before its first batch is made: that would wait for the disk behind all of them.
        """
        epoch = self._epoch
        if epoch is not None and epoch.snapshot.nbytes <= memory_bytes() // 2:
            self.reach(range(len(epoch.snapshot.segments)))

    def wait_for(self, segments: range, is_over: Callable[[], bool]) -> None:
        """Wait until these segments are warm: reading them sooner would be slower, off a cold disk."""
        with self._lock:
            epoch = self._epoch
            if epoch is None:
                return
            seqs = {epoch.snapshot.segments[index].seq for index in segments}
            while self._epoch is epoch and not self._closed and not is_over() and not seqs <= self._touched:
                self._changed.wait(_LOOK_SECONDS)

    def _want(self, wanted: range) -> None:
        """Choose what to warm; under `_changed`."""
        assert self._epoch is not None
        segments = self._epoch.snapshot.segments
        self._wanted = wanted
        self._todo = deque(i for i in wanted if segments[i].seq not in self._touched)
        self._changed.notify_all()

    def park(self, snapshot: Snapshot) -> None:
        """An epoch ended: keep its snapshot for a moment."""
        if self._pid != os.getpid():
            return
        snapshot.on_contention(self.drop)
        with self._lock:
            if snapshot in self._kept:
                return
            self._epoch, self._wanted = None, range(0)
            self._todo.clear()
            self._kept.append(snapshot)
            self._kept_until = time.monotonic() + _PARKED_SECONDS
            self._is_settled = False
            self._changed.notify_all()
            is_closed = self._closed
        if is_closed:
            self.drop()

    def drop(self) -> None:
        """Let go of every lease that is not the running epoch's."""
        with self._lock:
            rest = self._kept.copy()
        self._close_all(rest)
        self._also_drop()

    def close(self) -> None:
        """End the thread, waiting for what it does at most 5 s, and let go of everything. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            self._epoch, self._wanted = None, range(0)
            self._todo.clear()
            self._errands.clear()  # some know this object: a cycle
            self._changed.notify_all()
        try:
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join(_JOIN_SECONDS)  # what it is closing is leased until it is done
        finally:
            self.drop()

    def _run(self) -> None:
        next_look = 0.0
        while True:
            with self._lock:
                if not self._todo and not self._errands and not self._closed:
                    is_idle = not self._epoch and not self._kept and self._is_settled
                    self._changed.wait(None if is_idle else _LOOK_SECONDS)
                if self._closed:
                    return
                epoch = self._epoch
                errand = self._errands.popleft() if self._errands else None
                index = self._todo.popleft() if self._todo and errand is None else None
                expired = self._kept_until is not None and time.monotonic() > self._kept_until
            started = time.monotonic()
            try:
                if expired:
                    self.drop()
                if epoch is None and not self._is_settled:
                    self._is_settled = True  # first: an epoch that ends meanwhile says otherwise
                    if self._settle():
                        self._is_settled = False
                if errand is not None:
                    errand()
                elif epoch is not None:
                    self._give_up(epoch)
                    if index is not None:
                        self._warm(epoch.snapshot, index)
                    elif started > next_look:
                        self._look_for_new(epoch)
                        took = time.monotonic() - started
                        next_look = started + max(_LOOK_SECONDS, 20 * took)  # a small share of the time
            except Exception:  # noqa: BLE001  # a hint failed: reading itself will say what is wrong
                _log.debug("read-ahead failed", exc_info=True)
            del epoch, errand

    def _give_up(self, epoch: Epoch) -> None:
        """Unlease what an epoch in order was read of."""
        if self._in_order:
            passed = epoch.order.segments_span(epoch.delivered).start
            epoch.snapshot.release_oldest(passed)
            with self._lock:
                self._touched -= {segment.seq for segment in epoch.snapshot.segments[self._passed : passed]}
                self._passed = max(passed, self._passed)

    def _warm(self, snapshot: Snapshot, index: int) -> None:
        if index + 1 in self._wanted:
            snapshot.announce(index + 1)
        if snapshot.warm(index, lambda: index in self._wanted):
            with self._lock:
                self._touched.add(snapshot.segments[index].seq)
                self._changed.notify_all()

    def _look_for_new(self, epoch: Epoch) -> None:
        """Map and touch what was published since the epoch began, for the next one."""
        newest, where = self._newest, self._where
        next_seq = self._store.folder.read_record().next_seq
        if next_seq <= max(newest + 1, self._looked_below):  # also if `where` refused all since
            return

        def is_new(segment: SegmentInfo) -> bool:
            return segment.seq > newest and (where is None or where(segment))

        snapshot = Snapshot.take(self._store, is_new, yields_since=newest + 1)
        if not len(snapshot):
            self._looked_below = next_seq
            snapshot.close()
            return
        snapshot.on_contention(self.drop)
        with self._lock:
            mine = self._epoch is epoch and not self._closed
            if mine:
                self._kept.append(snapshot)
                self._newest = snapshot.segments[-1].seq
        if not mine:
            snapshot.close()
            return
        snapshot.map_all()
        if not self._in_order and epoch.snapshot.nbytes + snapshot.nbytes <= memory_bytes() // 2:
            for index, segment in enumerate(snapshot.segments):
                if snapshot.warm(index, lambda: self._epoch is epoch):
                    self._touched.add(segment.seq)
