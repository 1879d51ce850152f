"""Pacing: what an epoch asks the cache's pace before it begins, and what it tells the cache it serves.

Guarantees: nothing is leased while it asks; no segment is read by more epochs than `max_reuse`, whatever
several loaders ask at once; rows that an epoch did not serve, because it was ended early, are given back,
unless its process was killed. A loader that is not paced neither waits nor counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from arrowcache.errors import ArrowCacheError
from arrowcache.reading.snapshot import Snapshot
from arrowcache.shortage import explaining
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store, once_unlocked
from arrowcache.units import format_count

_GIVE_BACK_SECONDS = 1.0  # that the end of an epoch waits for cache.lock


class Pacing:
    """The pace of one loader.

    Args:
        where: which segments it reads; None: all.
        epoch_rows: rows of each epoch; None: what there is.
        paced: False: it waits for no pace, and does not count.
    """

    def __init__(
        self,
        store: Store,
        where: Callable[[SegmentInfo], bool] | None,
        epoch_rows: int | None,
        *,
        paced: bool,
    ) -> None:
        self._store, self._where, self._epoch_rows = store, where, epoch_rows
        self._paced = paced
        self._pid = os.getpid()  # of who counted last
        self.reason = ""  # why the epoch that was asked for last may not begin; empty: it is not the pace

    def may_begin(self) -> bool:
        """Whether an epoch may begin now, whatever it reads.

        Raises: OSError: the folder is gone, or its disk failed; says what to do.
        """
        self.reason = ""
        if self._paced:
            with explaining(self._store.folder.path):
                os.stat(self._store.folder.segments)  # first: of a folder that is gone it says so
                self._store.refresh_settings()
            pace = self._store.settings.pace
            if pace is not None:
                flow = self._store.flow(self._store.segments())
                self.reason = pace.keeps_loader(flow, self._epoch_rows)
        return not self.reason

    def where(self) -> Callable[[SegmentInfo], bool] | None:
        """Which segments the next epoch may read; None: all."""
        most = self._most_passes()
        if most is None:
            return self._where
        listed = self._store.segments()
        seqs = np.array([segment.seq for segment in listed], np.int64)
        spent = set(seqs[self._store.usage.served(seqs) >= most].tolist())
        if spent:
            self.reason = (
                f"of {format_count(len(listed), 'segment')} {len(spent)} were served max_reuse={most} times"
            )
        given = self._where
        return lambda segment: segment.seq not in spent and (given is None or given(segment))

    def claim(self, snapshot: Snapshot, undo: ExitStack) -> bool:
        """Count an epoch over a snapshot; False: others did, of some of it, meanwhile: take another."""
        if not self._paced:
            return True
        self._pid = os.getpid()
        seqs, most = snapshot.seqs, self._most_passes()
        with self._store.locked():
            if most is not None and (self._store.usage.served(seqs) >= most).any():
                return False
            self._store.usage.count_epoch(seqs, self._passes(len(snapshot)))
            undo.callback(self.give_back, 0, snapshot)
        self.reason = ""
        return True

    def add_served(self, rows: int, undo: ExitStack) -> None:
        """An epoch that begins serves so many rows."""
        if self._paced:
            self._pid = os.getpid()
            with self._store.locked():
                self._store.usage.add_served(rows)
                undo.callback(self.give_back, rows, None)

    def give_back(self, rows: int, snapshot: Snapshot | None) -> None:
        """An epoch ended before it served so many rows; with the snapshot that it claimed, before any.

        Never fails: it is called as things end, perhaps by the garbage collector, in a thread that has
        cache.lock. In a forked child it does nothing.
        """
        if self._paced and self._pid == os.getpid():
            once_unlocked(partial(self._give_back, rows, snapshot))

    def _give_back(self, rows: int, snapshot: Snapshot | None) -> None:
        with suppress(OSError, ArrowCacheError), self._store.locked(_GIVE_BACK_SECONDS):
            self._store.usage.add_served(-rows)
            if snapshot is not None:
                self._store.usage.count_epoch(snapshot.seqs, -self._passes(len(snapshot)))

    def _most_passes(self) -> int | None:
        pace = self._store.settings.pace
        return pace.max_reuse if self._paced and pace is not None else None

    def _passes(self, rows: int) -> int:
        return 1 if self._epoch_rows is None else max(1, -(-self._epoch_rows // max(1, rows)))
