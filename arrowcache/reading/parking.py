"""Parking: keeps an ended epoch's segments mapped for a second, so that the next epoch finds them mapped.

It owns snapshots of epochs that ended. It lets go of them after a second, or sooner: when a writer of this
process waits for them, when the next epoch has mapped its segments, or when the loader is closed. A thread
waits for that second, between two epochs only. Where ranks agreed on an epoch, the thread goes on looking
until all have joined it.

Guarantees: a loader that nobody iterates leases nothing for longer than that second.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
from collections.abc import Callable

from arrowcache.reading.future import Future
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.mapping import is_exiting

_log = logging.getLogger("arrowcache")

_PARKED_SECONDS = 1.0
_LOOK_SECONDS = 0.25  # between two looks whether the other ranks have joined
_JOIN_SECONDS = 5.0


class Parking:
    """Thread-safe; the garbage collector may call it anywhere.

    Args:
        settle: called after an epoch until it returns False: nothing is left to be let go.
        also_drop: has others, such as worker processes, let go of epochs that ended.
    """

    def __init__(self, settle: Callable[[], bool], also_drop: Callable[[], None]) -> None:
        self._settle, self._also_drop = settle, also_drop
        self._lock = threading.RLock()
        self._parked: list[Snapshot] = []
        self._over: Future[None] = Future()  # the second that runs: it is not waited for
        self._ended: Future[None] = Future()  # the thread that waits for it
        self._ended.set_result(None)
        self._is_closed = False
        self._pid = os.getpid()

    def park(self, snapshot: Snapshot) -> None:
        """An epoch ended: keep its snapshot for a second."""
        if self._pid != os.getpid() or is_exiting():
            return
        snapshot.on_contention(self.drop)
        with self._lock:
            if snapshot not in self._parked:
                self._parked.append(snapshot)
            is_closed = self._is_closed
            self.stay()
            over: Future[None] = Future()
            ended: Future[None] = Future()
            self._over = over
        try:
            # A thread of `threading` waits for its own start, and here the garbage collector may be at work.
            _thread.start_new_thread(self._wait, (over, ended))
            self._ended = ended  # last: Ctrl-C leaves none that is never set
        except RuntimeError:  # no thread can be started
            is_closed = True
        if is_closed:
            self.drop()

    def stay(self) -> None:
        """The next epoch begins: keep the parked snapshots until `drop`."""
        self._over.set_result(None)

    def drop(self) -> None:
        """Let go of every lease that is not the running epoch's."""
        with self._lock:
            parked = self._parked.copy()
        for snapshot in parked:
            snapshot.close()
        with self._lock:  # after they are closed: Ctrl-C loses none
            self._parked = [snapshot for snapshot in self._parked if snapshot not in parked]
        self._also_drop()

    def close(self) -> None:
        """Let go of everything. Idempotent. Blocks: while its thread closes a snapshot, at most 5 s."""
        if self._pid != os.getpid() or is_exiting():  # no thread ends any more; the kernel lets go of all
            return
        with self._lock:
            self._is_closed = True
        try:
            self._over.set_result(None)
            self._ended.wait(_JOIN_SECONDS)  # what it is closing is leased until it is done
        finally:
            self.drop()

    def _wait(self, over: Future[None], ended: Future[None]) -> None:
        try:
            if not over.wait(_PARKED_SECONDS):
                self.drop()
            while self._settle() and not over.wait(_LOOK_SECONDS):
                pass
        except Exception:  # noqa: BLE001  # it is let go by the next epoch, or the loader's end
            _log.debug("parking failed", exc_info=True)
        finally:
            ended.set_result(None)
