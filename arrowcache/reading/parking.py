"""Parking: keeps an ended epoch's segments mapped for a second, so that the next epoch finds them mapped.

It owns snapshots of epochs that ended. It releases them after a second, or sooner: when a writer of this
process waits for them, when the next epoch has mapped its segments, or when the loader is closed. A thread
waits for that second, and sleeps while an epoch runs. It closes snapshots of `leave` at once. Where ranks
agreed on an epoch, it goes on looking until all have joined it.

Guarantees: a loader that nobody iterates leases nothing for longer than that second.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from arrowcache.errors import WorkerError
from arrowcache.lifetimes import Origin, is_exiting
from arrowcache.limits import Limits
from arrowcache.os_errors import start
from arrowcache.reading.snapshot import Snapshot

_log = logging.getLogger("arrowcache")

_PARK, _STAY, _DROP, _END = "park", "stay", "drop", "end"  # messages to the thread


class Parking:
    """Thread-safe; the garbage collector may call it anywhere.

    Args:
        settle: called after an epoch until it returns False, when nothing is left to release.
        also_drop: has others, such as worker processes, release epochs that ended.
    """

    def __init__(self, settle: Callable[[], bool], also_drop: Callable[[], None]) -> None:
        self._settle, self._also_drop = settle, also_drop
        self._lock = threading.RLock()
        self._parked: list[Snapshot] = []
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()  # safe to use in a finalizer
        self._thread = self._new_thread()
        self._is_one = threading.Lock()  # held by the thread that runs
        self._is_closed = False
        self._origin = Origin()

    def begin(self) -> None:
        """Keep parked snapshots until `drop`, as an epoch begins.

        If no thread can be started, nothing is parked afterwards.
        """
        if self._thread.ident is None:
            self._thread = self._new_thread()  # the last one may have been started before Ctrl-C
            try:
                start(self._thread)
            except WorkerError:
                _log.debug("nothing is parked", exc_info=True)
        self._said.put(_STAY)

    def park(self, snapshot: Snapshot) -> None:
        """Keep a snapshot for the next epoch, for a second after this one ended."""
        self._leave(snapshot, _PARK)

    def leave(self, snapshot: Snapshot) -> None:
        """Let the thread close a snapshot: unmapping evicted files takes the disk's time.

        The last one is closed here if the thread has not: there are never more than two.
        """
        self.drop()
        self._leave(snapshot, _DROP)

    def _leave(self, snapshot: Snapshot, said: str) -> None:
        if not self._origin.is_here or is_exiting():
            return
        snapshot.on_contention(self.drop)
        with self._lock:
            if snapshot not in self._parked:
                self._parked.append(snapshot)
            is_kept = self._thread.ident is not None and not self._is_closed
        self._said.put(said)
        if not is_kept:
            self.drop()

    def drop(self, ended: Snapshot | None = None) -> None:
        """Release every lease but the running epoch's, and close the snapshot of one that ended."""
        with self._lock:
            parked = self._parked.copy()
        for snapshot in parked if ended is None else [*parked, ended]:
            snapshot.close()
        with self._lock:  # after they are closed: Ctrl-C loses none
            self._parked = [snapshot for snapshot in self._parked if snapshot not in parked]
        self._also_drop()

    def close(self) -> None:
        """Release everything. Idempotent. Blocks: while its thread closes a snapshot, at most 5 s."""
        if not self._origin.is_here or is_exiting():  # no thread ends any more; the kernel releases all
            return
        with self._lock:
            self._is_closed = True
        try:
            self._said.put(_END)
            if self._thread.ident is not None and self._thread is not threading.current_thread():
                # a snapshot is leased until the thread has closed it
                self._thread.join(Limits.current.join_seconds)
        finally:
            self.drop()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="arrowcache-parking", daemon=True)

    def _run(self) -> None:
        if not self._is_one.acquire(blocking=False):
            return
        seconds: float | None = None
        while True:
            try:
                said = self._said.get(timeout=seconds)
            except queue.Empty:
                seconds = self._let_go()
                continue
            if said is _END:
                return
            if said is _DROP:
                self._let_go()
            else:
                seconds = Limits.current.parked_seconds if said is _PARK else None

    def _let_go(self) -> float | None:
        """Release all after the second. Returns: seconds to the next look. None means none is due."""
        try:
            self.drop()
            return Limits.current.joined_look_seconds if self._settle() else None
        except Exception:  # noqa: BLE001  # it is let go by the next epoch, or the loader's end
            _log.debug("parking failed", exc_info=True)
            return None
