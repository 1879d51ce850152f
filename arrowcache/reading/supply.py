"""Supply: the rows that an epoch of one loader may have now, and what the cache is told of those it serves.

`where` and the cache's pace say which rows. Where a cache is nearly full and somebody writes, an epoch leaves
out the oldest rows, so that writers go on while it runs (Store.lease decides). The first epoch that does is
said in a warning. It ends nothing: where a filter makes errors of warnings it is logged, since a cache is
full only hours after a training began.

Guarantees: nothing is leased while it asks; no segment is read by more epochs than `max_reuse`, whatever
several loaders ask at once; rows that an epoch did not serve, because it was ended early, are given back,
unless its process was killed. A loader that is not paced neither waits nor counts.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, warn
from arrowcache.lifetimes import Origin
from arrowcache.reading.options import EpochOptions
from arrowcache.reading.snapshot import Snapshot
from arrowcache.shortage import explaining
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store, once_unlocked
from arrowcache.units import format_bytes, format_count

_log = logging.getLogger("arrowcache")

_GIVE_BACK_SECONDS = 1.0  # that the end of an epoch waits for cache.lock


class Supply:
    """What one loader finds in its cache, and leaves to writers."""

    def __init__(self, store: Store, options: EpochOptions) -> None:
        self.store, self._where = store, options.where
        self._epoch_rows, self.is_paced = options.epoch_rows, options.paced
        #: Segments of this number and higher ones came after this loader's last snapshot; inf: it took none.
        self.known: float = math.inf
        self.warns = True  # of rows that are left out; False: it has, or another rank on this node does
        # as the last `take` found it
        self.listed: Sequence[SegmentInfo] = ()
        self.rows = 0  # of the listed, that an epoch may have
        self.pace_says = ""  # why no epoch may begin; empty: it is not the pace
        self._ahead: Snapshot | None = None  # for the next `take`

    @property
    def accepted(self) -> str:
        """What a message says of `rows`, behind their number."""
        return " that `where` accepts" if self._where else ""

    def take_ahead(self) -> Iterator[None]:
        """Take a snapshot for the next `take`; the work is done in slices, between what is given.

        Nothing stays leased if this is closed before it ends, nor after `drop`.
        """
        self.drop()
        with ExitStack() as undo:
            leased = self.store.lease(self._fresh(), yields_since=self.known)
            if leased.lease is not None:
                undo.callback(leased.lease.close)
            yield
            snapshot = Snapshot.of(self.store, leased)
            undo.callback(snapshot.close)
            yield
            snapshot.map_all()
            self._ahead = snapshot
            undo.pop_all()
        yield

    def drop(self) -> None:
        """Let go of what was taken ahead. Idempotent."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def take(self, least_rows: int, usage: EpochUsage) -> Snapshot | None:
        """An open snapshot of so many rows, all of them mapped, as the pace allows; None: there is none yet.

        Args:
            usage: counts the epoch.
        Raises: OSError: the folder is gone, or its disk failed; says what to do.
        """
        if not self._may_begin():
            self.drop()
            return None
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return self._counted(ahead, least_rows, usage)
        where = self._fresh()
        if self.rows < least_rows:  # last time: so who waits never takes cache.lock
            self.listed = self.store.segments()
            self.rows = sum(segment.rows for segment in self.listed if where is None or where(segment))
        if self.rows < least_rows:
            return None
        return self._counted(Snapshot.take(self.store, where, yields_since=self.known), least_rows, usage)

    def _counted(self, snapshot: Snapshot, least_rows: int, usage: EpochUsage) -> Snapshot | None:
        with ExitStack() as undo:  # Ctrl-C while it maps, too, leaves nothing leased
            undo.enter_context(snapshot)
            self.rows = len(snapshot)
            if self.rows >= least_rows:
                self.rows = snapshot.map_all()
            if self.rows < least_rows or not usage.count(snapshot):
                self.listed = self.store.segments()
                return None
            undo.pop_all()
        return snapshot

    def retake(self, includes: Callable[[SegmentInfo], bool]) -> Snapshot:
        """What is there of the segments of an epoch that has begun, the oldest too, all of it mapped."""
        with ExitStack() as undo:
            snapshot = undo.enter_context(Snapshot.take(self.store, includes))
            snapshot.map_all()
            undo.pop_all()
        return snapshot

    def look(self) -> Snapshot:
        """A snapshot of what an epoch would have, if it began now: not mapped, and not counted."""
        return Snapshot.take(self.store, self._fresh(), yields_since=self.known)

    def warn(self, snapshot: Snapshot) -> None:
        """An epoch of this snapshot begins: warn, the first time that it leaves rows out."""
        if not snapshot.left_out_rows or not self.warns:
            return
        self.warns, settings = False, self.store.settings
        rows = len(snapshot) + snapshot.left_out_rows
        message = (
            f"an epoch leaves out the oldest {snapshot.left_out_rows} of {rows} rows: the cache is nearly "
            "full, and somebody writes to it, so samplers may replace them while the epoch runs. For every "
            "row stop the pool or close the writer first. To leave out fewer, create the cache with more "
            f"capacity, a smaller headroom than {settings.headroom:g}, or smaller segments: two of "
            f"{format_bytes(settings.segment_bytes)} are the least. With headroom=0 samplers wait while an "
            "epoch runs, least with shuffle='window'. stats().left_out_rows tells of each epoch; this is "
            "said once"
        )
        try:
            warn(message)
        except RuntimeWarning:
            _log.warning(message)

    def most_passes(self) -> int | None:
        """How many epochs may read a segment; None: any number."""
        pace = self.store.settings.pace
        return pace.max_reuse if self.is_paced and pace is not None else None

    def passes_of(self, rows: int) -> int:
        """How often an epoch over so many rows reads each of them."""
        return 1 if self._epoch_rows is None else max(1, -(-self._epoch_rows // max(1, rows)))

    def _may_begin(self) -> bool:
        """Whether an epoch may begin now, whatever it reads."""
        self.pace_says = ""
        if self.is_paced:
            with explaining(self.store.folder.path):
                os.stat(self.store.folder.segments)  # first: of a folder that is gone it says so
                self.store.refresh_settings()
            if (pace := self.store.settings.pace) is not None:
                flow = self.store.flow(self.store.segments())
                self.pace_says = pace.keeps_loader(flow, self._epoch_rows)
        return not self.pace_says

    def _fresh(self) -> Callable[[SegmentInfo], bool] | None:
        """Which segments the next epoch may read: those that were not served `max_reuse` times; None: all."""
        most, given = self.most_passes(), self._where
        if most is None:
            return given
        listed = self.store.segments()
        seqs = _seqs(listed)
        spent = set(seqs[self.store.usage.served(seqs) >= most].tolist())
        if spent:
            self.pace_says = (
                f"of {format_count(len(listed), 'segment')} {len(spent)} were served max_reuse={most} times"
            )
        return lambda segment: segment.seq not in spent and (given is None or given(segment))


class EpochUsage:
    """What the cache's usage counts for one epoch: rows that it serves, passes over its segments."""

    def __init__(self, supply: Supply) -> None:
        self._supply, self.store = supply, supply.store
        self._origin = Origin()
        self._rows = 0
        self._passes: tuple[NDArray[np.int64], int] | None = None  # over segments of these numbers

    def count(self, snapshot: Snapshot) -> bool:
        """Count an epoch over a snapshot; False: others did, of some of it, meanwhile: take another."""
        supply, most = self._supply, self._supply.most_passes()
        if not supply.is_paced:
            return True
        seqs, passes = snapshot.seqs, supply.passes_of(len(snapshot))
        with self.store.locked():
            if most is not None and (self.store.usage.served(seqs) >= most).any():
                return False
            self.store.usage.count_epoch(seqs, passes)
            self._passes = seqs, passes
        supply.pace_says = ""
        return True

    def keep_passes(self) -> None:
        """Other ranks may read the epoch: it counts, whatever becomes of it here."""
        self._passes = None

    def serve(self, rows: int) -> None:
        """The epoch serves so many rows."""
        if self._supply.is_paced:
            with self.store.locked():
                self.store.usage.add_served(rows)
                self._rows = rows

    def give_back(self, served_rows: int = 0) -> None:
        """The epoch ended, and has served so many rows: the rest does not count. Idempotent.

        Never fails: it is called as things end, perhaps by the garbage collector, in a thread that has
        cache.lock. In a forked child it does nothing.
        """
        rest, self._rows = self._rows - served_rows, served_rows
        passes, self._passes = None if served_rows else self._passes, None
        if (rest > 0 or passes) and self._origin.is_here:
            once_unlocked(partial(self._give_back, max(0, rest), passes))

    def _give_back(self, rows: int, passes: tuple[NDArray[np.int64], int] | None) -> None:
        with suppress(OSError, ArrowCacheError), self.store.locked(_GIVE_BACK_SECONDS):
            self.store.usage.add_served(-rows)
            if passes is not None:
                self.store.usage.count_epoch(passes[0], -passes[1])


def _seqs(segments: Sequence[SegmentInfo]) -> NDArray[np.int64]:
    return np.array([segment.seq for segment in segments], np.int64)
