"""Supply: the rows available now to an epoch of one loader.

`where` and the cache's pace choose them. Where a cache is nearly full and somebody writes, an epoch leaves
out the oldest rows, so that writers go on while it runs (Store.lease decides). The first such epoch gives a
warning. A filter that turns warnings into errors only gets it logged, since a cache is
full only hours after a training began.

Guarantees: asking leases nothing; no segment is read by more epochs than `max_reuse`, whatever
several loaders ask at once. A loader that is not paced neither waits nor counts.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, log, warn
from arrowcache.os_errors import explaining
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.plan import Plan
from arrowcache.reading.row_functions import PythonFunction
from arrowcache.reading.selection import Selection
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.weighing import Weighing
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes, format_count

_LEFT_SHARE = 0.75  # of the rows at least, once weights have the two eighths that they may take
_GIVE_BACK_SECONDS = 1.0  # longest wait for cache.lock at the end of an epoch


class Supply:
    """The rows that one loader finds in its cache, and those it leaves to writers."""

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter) -> None:
        self.store, self._where, self._meter = store, options.where, meter
        expect = options.expect
        self._selection = Selection(store, options.rows, expect)
        self._weighing = None if options.weights is None else Weighing(store, options.weights, expect)
        functions = [self._selection.function, None if self._weighing is None else self._weighing.function]
        self._functions = [function for function in functions if function is not None]
        #: True if a Python function is asked in each epoch: one rank of the node does.
        self.asks = any(isinstance(function, PythonFunction) for function in self._functions)
        given = {"`where`": options.where is not None, "`rows`": self._selection.chooses}
        self._choose = [name for name, is_given in given.items() if is_given]
        self._has_excluded = False  # the last snapshot
        self._epoch_rows, self.is_paced = options.epoch_rows, options.paced
        #: Segments from this number on came after this loader's last snapshot; inf before the first one.
        self.known: float = math.inf
        self.warns = True  # of rows left out; False once warned, or if another rank on this node warns
        self.has_ranks = False  # who share its snapshots
        self._least_rows = 1  # of the last `take`
        # results of the last `take`
        self.listed: Sequence[SegmentInfo] = ()
        self.rows = 0  # rows of the listed segments that an epoch may have
        self.pace_says = ""  # why the pace allows no epoch now, or ""
        #: Rows of the segments that `max_reuse` still allows. None: it allows all.
        self.unspent_rows: int | None = None
        self.is_asked_elsewhere = False  # another rank asks the functions for this epoch now
        self._ahead: Snapshot | None = None  # for the next `take`

    @property
    def accepted(self) -> str:
        """The words in messages behind the number `rows`."""
        if not self._choose:
            return " that are not excluded" if self._has_excluded else ""
        return f" that {self._chosen_by('accept')}"

    @property
    def refused(self) -> tuple[str, str]:
        """The subject and verb of a refusal of rows, and the way out; empty where nothing refuses any."""
        if self._choose:
            return self._chosen_by("refuse"), f"look at what {self._chosen_by('accept')}"
        return ("cache.exclude() refuses", "cache.include() some") if self._has_excluded else ("", "")

    @property
    def chosen_rows(self) -> str:
        """The clause on which rows of a segment an epoch serves. Empty: all."""
        if self._weighing is not None:
            return "weights= draws"
        if self._selection.chooses:
            return "`rows` accepts"
        return "are not excluded" if self._has_excluded else ""

    def _chosen_by(self, verb: str) -> str:
        return f"{' and '.join(self._choose)} {verb}{'s' * (len(self._choose) == 1)}"

    @property
    def has_functions(self) -> bool:
        """True if functions or expressions look at all rows as an epoch begins."""
        return bool(self._functions)

    def take_ahead(self, slices: int) -> Iterator[None]:
        """Take a snapshot for the next `take`, one slice of the work a `next`.

        Functions are asked, too. With ranks they are not, since only the first rank to begin asks them; nor
        are expressions of annotations, which may change until then.
        Nothing stays leased if the generator is closed before it ends, nor after `drop`.

        Args:
            slices: about so many for the segments that a function is asked of.
        """
        self.drop()
        self._reserve()
        with ExitStack() as undo:
            leased = self.store.lease(self._fresh(), yields_since=self.known)
            if leased.lease is not None:
                undo.callback(leased.lease.close)
            yield
            snapshot = Snapshot.of(self.store, leased)
            undo.callback(snapshot.close)
            yield
            snapshot.map_all()
            for function in self._functions:
                is_python = isinstance(function, PythonFunction)
                if self.has_ranks if is_python else function.reads_notes:
                    continue
                at_once = -(-len(snapshot.segments) // slices) if is_python else 1
                steps, is_over = function.ahead(snapshot), False
                while not is_over:
                    with self._meter.choosing():
                        is_over = not [*itertools.islice(steps, at_once)]
                    yield
            self._ahead = snapshot
            undo.pop_all()
        yield

    def drop(self) -> None:
        """Release the snapshot that was taken ahead, and what functions said of it. Idempotent."""
        ahead, self._ahead = self._ahead, None
        for function in self._functions:
            function.forget()
        if ahead is not None:
            ahead.close()

    def take(self, least_rows: int, count: Callable[[Snapshot], bool]) -> Snapshot | None:
        """Return an open snapshot of enough rows, all mapped, as the pace allows, or None: too few rows.

        Args:
            count: counts the epoch. Returns False if others have read too much of the snapshot meanwhile.
        Raises: OSError: the folder is gone, or its disk failed. The message says what to do.
        """
        if not self._may_begin():
            self.drop()
            return None
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return self._counted(ahead, least_rows, count)
        self.drop()
        where = self._fresh()
        if self.rows < least_rows:  # by the last count: a loader that waits never takes cache.lock
            self.listed = self.store.segments()
            self.rows = sum(segment.rows for segment in self.listed if where is None or where(segment))
        if self.rows < least_rows:
            return None
        self._least_rows = least_rows
        self._reserve()
        return self._counted(Snapshot.take(self.store, where, yields_since=self.known), least_rows, count)

    def _counted(
        self, snapshot: Snapshot, least_rows: int, count: Callable[[Snapshot], bool]
    ) -> Snapshot | None:
        with ExitStack() as undo:  # Ctrl-C in the mapping leaves nothing leased, too
            undo.enter_context(snapshot)
            self.rows = len(snapshot)
            if self.rows >= least_rows:
                snapshot.map_all()
                self.rows = self._select(snapshot)
            if self.rows < least_rows or not count(snapshot):
                self.listed = self.store.segments()
                return None
            self._weigh(snapshot)
            undo.pop_all()
        return snapshot

    def retake(self, plan: Plan) -> Snapshot:
        """Return a mapped snapshot of the remaining segments of an epoch in progress, even the oldest."""
        with ExitStack() as undo:
            snapshot = undo.enter_context(Snapshot.take(self.store, plan.includes))
            snapshot.bitmaps, snapshot.weights = plan.bitmaps, plan.weights
            snapshot.map_all()
            undo.pop_all()
        return snapshot

    def look(self) -> Snapshot:
        """Return the snapshot that an epoch would have now: not counted, and mapped only to select rows."""
        with ExitStack() as undo:
            snapshot = Snapshot.take(self.store, self._fresh(), yields_since=self.known)
            undo.enter_context(snapshot)
            self._select(snapshot)
            undo.pop_all()
        return snapshot

    def _select(self, snapshot: Snapshot) -> int:
        """Decide which rows of a snapshot an epoch reads. Returns: their number."""
        with self._meter.choosing():
            snapshot.bitmaps = self._selection.of(snapshot)
        self._has_excluded = bool(snapshot.bitmaps)
        return snapshot.selected.size

    def _reserve(self) -> None:
        """Have room made for what weights need, unless too few rows would be left for an epoch."""
        if self._weighing is not None and self._least_rows <= self.rows * _LEFT_SHARE:
            with self._meter.choosing():
                self._weighing.reserve(self.rows, self._where, of_ranks=self.has_ranks)

    def _weigh(self, snapshot: Snapshot) -> None:
        if self._weighing is not None:
            with self._meter.choosing():
                snapshot.weights = self._weighing.of(snapshot)

    def warn(self, snapshot: Snapshot) -> None:
        """Warn of rows that an epoch of this snapshot leaves out, the first time."""
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
            log(message)

    def most_passes(self) -> int | None:
        """Return the number of epochs that may read a segment. None means any number."""
        pace = self.store.settings.pace
        return pace.max_reuse if self.is_paced and pace is not None else None

    def passes_of(self, rows: int) -> int:
        """Return how often an epoch over this number of rows reads each of them."""
        return 1 if self._epoch_rows is None else max(1, -(-self._epoch_rows // max(1, rows)))

    def give_back(self, rows: int, passes: tuple[NDArray[np.int64], int] | None) -> None:
        """Take rows, and passes over segments of these numbers, off the counts. Never fails."""
        with suppress(OSError, ArrowCacheError), self.store.locked(_GIVE_BACK_SECONDS):
            self.store.usage.add_served(-rows)
            if passes is not None:
                self.store.usage.count_epoch(passes[0], -passes[1])

    def _may_begin(self) -> bool:
        """True if the pace allows an epoch now, whatever rows it reads."""
        self.pace_says, self.unspent_rows = "", None
        if self.is_paced:
            with explaining(self.store.folder.path):
                os.stat(self.store.folder.segments)  # first: it reports a folder that is gone
                self.store.refresh_settings()
            if (pace := self.store.settings.pace) is not None:
                flow = self.store.flow(self.store.segments())
                self.pace_says = pace.keeps_loader(flow, self._epoch_rows)
        return not self.pace_says

    def _fresh(self) -> Callable[[SegmentInfo], bool] | None:
        """Return the filter for segments served less than `max_reuse` times, or None: all pass."""
        most, given = self.most_passes(), None if self._where is None else self._asked
        if most is None:
            return given
        listed = self.store.segments()
        seqs = _seqs(listed)
        spent = set(seqs[self.store.usage.served(seqs) >= most].tolist())
        if spent:
            self.unspent_rows = sum(segment.rows for segment in listed if segment.seq not in spent)
            self.pace_says = (
                f"of {format_count(len(listed), 'segment')} {len(spent)} were served max_reuse={most} times"
            )
        return lambda segment: segment.seq not in spent and (given is None or given(segment))

    def _asked(self, segment: SegmentInfo) -> bool:
        assert self._where is not None
        with self._meter.choosing():
            return bool(self._where(segment))


def _seqs(segments: Sequence[SegmentInfo]) -> NDArray[np.int64]:
    return np.array([segment.seq for segment in segments], np.int64)
