"""Available rows: the rows of a cache that an epoch of one loader may read now, and the wait for them.

`AvailableRows`: `where` and the cache's pace choose the rows. Where a cache is nearly full and somebody
writes, an epoch leaves out the oldest rows, so that writers go on while it runs (Store.lease decides). The
first such epoch gives a warning. If warnings are errors this is logged: a cache is full only hours into
training.

`RowsWait`: a wait holds neither cache.lock nor a lease. It asks the folder for changes, some twenty times a
second, and tries again only after a change. As long as some sampler of the cache draws, it does not give
up, unless published segments bring it no rows. Where nobody writes it gives up after a second, of several
ranks once all of the node have waited so long together: until then one may start samplers.

Guarantees: asking leases nothing; no segment is read by more epochs than `max_reuse`, whatever several
loaders ask at once. A loader that is not paced neither waits nor counts.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WHERE, ArrowCacheError, LoaderTimeoutError, called, log, warn
from arrowcache.limits import Limits
from arrowcache.os_errors import explaining
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.per_segment import PerSegmentCache, PythonFunction, ReadColumns
from arrowcache.reading.plan import Plan
from arrowcache.reading.ranks import SharedPlan
from arrowcache.reading.row_filter import RowFilter
from arrowcache.reading.row_weights import Weighting, Weights
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.storage.counters import SamplerCounts, SamplerState, seen_samplers
from arrowcache.storage.layout import CACHE_JSON, SegmentInfo
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes, format_count, format_seconds

_LEFT_SHARE = 0.75  # of the rows at least, once weights have the two eighths that they may take
_GIVE_BACK_SECONDS = 1.0  # longest wait for cache.lock at the end of an epoch


class AvailableRows:
    """The rows that one loader finds in its cache, and those it leaves to writers."""

    _read: ReadColumns | None = None  # by expressions, for the next one

    def __init__(self, store: Store, options: LoaderOptions, meter: Meter) -> None:
        self.store, self._where, self._meter = store, options.where, meter
        expect = options.expect
        self._filter = RowFilter(store, options.rows, expect, self._read)
        self._weighting = None if options.weights is None else Weighting(store, options.weights, expect)
        functions = [self._filter.function, None if self._weighting is None else self._weighting.function]
        self._functions = [function for function in functions if function is not None]
        #: True if a Python function is asked in each epoch: one rank of the node does.
        self.asks = any(isinstance(function, PythonFunction) for function in self._functions)
        given = {"`where`": options.where is not None, "`rows`": self._filter.chooses}
        self._choose = [name for name, is_given in given.items() if is_given]
        self._has_excluded = False  # the last snapshot
        self._epoch_rows, self._is_paced = options.epoch_rows, options.paced
        #: True if each process chooses the same rows, and weighs them alike, at any time.
        self.is_repeatable = all(function.is_repeatable for function in self._functions)
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
    def is_paced(self) -> bool:
        """True if it keeps the cache's pace, and counts. A frozen cache has none."""
        return self._is_paced and not self.store.is_frozen

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
        if self._weighting is not None:
            return "weights= draws"
        if self._filter.chooses:
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

    def weigh(self, plan: Plan) -> Weights | None:
        """Return the weights of a plan's rows, made now. None: this loader has none."""
        if self._weighting is None:
            return None
        with self.retake(plan) as snapshot:
            return self._weighting.of(snapshot)

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
            snapshot.bitmaps = self._filter.of(snapshot)
        self._has_excluded = bool(snapshot.bitmaps)
        return snapshot.selected.size

    def _reserve(self) -> None:
        """Have room made for what weights need, unless too few rows would be left for an epoch."""
        weighting = self._weighting
        if weighting is None or self._least_rows > self.rows * _LEFT_SHARE:
            return
        with self._meter.choosing():
            if weighting.reads_notes is None and weighting.function is not None:
                self._ask_of_one_segment(weighting.function)
            weighting.reserve(self.rows, of_ranks=self.has_ranks)

    def _ask_of_one_segment(self, function: PerSegmentCache[Any]) -> None:
        """Ask a function of the oldest segment, which shows whether it reads annotations.

        Raises: whatever it raises.
        """
        listed = self.store.segments()
        first = next((each for each in listed if self._where is None or self._asked(each)), None)
        if first is not None:
            with Snapshot.take(self.store, lambda segment: segment.seq == first.seq) as snapshot:
                snapshot.map_all()
                for _ in function.ahead(snapshot):  # an epoch asks for all of them next
                    pass

    def _weigh(self, snapshot: Snapshot) -> None:
        if self._weighting is not None:
            with self._meter.choosing():
                snapshot.weights = self._weighting.of(snapshot)

    def warn(self, snapshot: Snapshot) -> None:
        """Warn of rows that an epoch of this snapshot leaves out, the first time."""
        if not snapshot.left_out_rows or not self.warns:
            return
        self.warns, settings = False, self.store.settings
        rows = len(snapshot) + snapshot.left_out_rows
        message = (
            f"an epoch leaves out the oldest {snapshot.left_out_rows:,} of {format_count(rows, 'row')}: the "
            "cache is nearly full, and somebody writes to it, so samplers may replace them while the epoch "
            "runs. For every row stop the pool or close the writer first. To leave out fewer, create the "
            f"cache with more capacity, a smaller headroom than {settings.headroom:g}, or smaller segments: "
            f"two of {format_bytes(settings.segment_bytes)} are the least. With headroom=0 samplers wait "
            "while an epoch runs, least with shuffle='window'. stats().left_out_rows tells of each epoch; "
            "this is said once"
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
            return bool(called(WHERE, self._where, segment))


def _seqs(segments: Sequence[SegmentInfo]) -> NDArray[np.int64]:
    return np.array([segment.seq for segment in segments], np.int64)


_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.005, 0.04
# after a change: another one at the same tick of the file system's clock looks the same
_SETTLING_SECONDS = 0.1
_TRY_SECONDS = 1.0  # tried without a change: `where` may depend on the time, and freed bytes change no name
_LOOK_SECONDS = 0.25  # between two looks for a writer


class Wait(NamedTuple):
    """Calls during a wait: `before` releases leases before the wait begins."""

    is_cancelled: Callable[[], bool] = lambda: False
    before: Callable[[], None] = lambda: None


class RowsWait:
    """One wait. It ends after the timeout without rows, and without a sampler that draws some.

    Args:
        shared_plan: with other ranks of the job. It also tries again after they changed something.
    """

    _lower = "lower wait_rows or batch_size"

    def __init__(
        self,
        available_rows: AvailableRows,
        options: LoaderOptions,
        world_size: int,
        meter: Meter,
        shared_plan: SharedPlan | None,
    ) -> None:
        self._available_rows, self._store, self._meter = available_rows, available_rows.store, meter
        self._options, self._world_size, self._shared_plan = options, world_size, shared_plan
        self._timeout_seconds = options.timeout
        folder = self._store.folder
        self._watched = [folder.segments, folder.usage, folder.notes, folder.path / CACHE_JSON]
        if shared_plan is not None:
            self._watched.append(folder.ranks)
        self._began = self._tried = self._changed = time.monotonic()
        self._seen: list[int] | None = None
        self._pause = _MIN_PAUSE_SECONDS
        self._looked = self._unwritten_since = 0.0
        self._ranks_looked, self._all_waited_since = 0.0, math.inf
        self._samplers: list[SamplerCounts] = []
        self._most_rows = -1  # no try yet: rows of the first try were not published meanwhile
        self._ends = self._ends_then = (-1, -1)  # oldest and newest segment: now, and when rows last grew
        self._vain_since = 0.0  # since when segments are published without new rows

    def wait(self, take: Callable[[], Snapshot | None], wait: Wait) -> Snapshot | None:
        """Call `take`, which leases nothing while it returns None, until a snapshot comes. Ctrl-C ends it.

        Returns: the snapshot, or None if the wait was cancelled.
        Raises: LoaderTimeoutError: the wait is over; or no more rows come, and no other rank is there that
            may be about to start the samplers. The message says why.
        """
        snapshot = self._try(take, wait) if self._is_due() else None
        if snapshot is not None:
            return snapshot
        if self._store.is_frozen:
            raise LoaderTimeoutError(self._why_frozen())
        with ExitStack() as shown:
            shown.enter_context(self._store.usage.show_waiting())  # samplers do not wait for training now
            if self._shared_plan is not None:
                shown.enter_context(self._shared_plan.show_waiting())
            while snapshot is None and not wait.is_cancelled():
                if self._is_over():
                    raise LoaderTimeoutError(self._why_late())
                no_rank_starts, why = self._no_rank_starts(), self._why_never()  # both always: they look
                if why and no_rank_starts:
                    raise self._never(why)
                with self._meter.stage(self._stage()), self._choosing():
                    time.sleep(self._pause)
                self._pause = min(1.5 * self._pause, _MAX_PAUSE_SECONDS)
                if self._is_due():
                    snapshot = self._try(take, wait)
        return snapshot

    def _choosing(self) -> AbstractContextManager[None]:
        return self._meter.choosing() if self._available_rows.is_asked_elsewhere else nullcontext()

    def _stage(self) -> str:
        """The stage, as of the stats, to which the wait belongs."""
        if self._available_rows.is_asked_elsewhere:  # another rank chooses the rows, as the epoch begins
            return "start"
        return "pace" if self._available_rows.pace_says else "samplers"

    def _try(self, take: Callable[[], Snapshot | None], wait: Wait) -> Snapshot | None:
        with self._meter.stage("start"):
            snapshot = take()
        if snapshot is not None:
            return snapshot
        found = self._available_rows
        if not (found.pace_says or found.is_asked_elsewhere):  # else not all rows were counted
            self._ends = (found.listed[0].seq, found.listed[-1].seq) if found.listed else (-1, -1)
            if found.rows > self._most_rows:
                self._most_rows, self._ends_then, self._vain_since = found.rows, self._ends, 0.0
            elif self._ends[1] != self._ends_then[1] and not self._vain_since:
                self._vain_since = time.monotonic()
        wait.before()
        return None

    def _is_due(self) -> bool:
        """True if something may have changed since the last True; the first call is True."""
        now, times = time.monotonic(), self._times()
        if times != self._seen:
            self._seen, self._changed, self._pause = times, now, _MIN_PAUSE_SECONDS
        is_due = now - self._changed < _SETTLING_SECONDS or now - self._tried >= _TRY_SECONDS
        if is_due:
            self._tried = now
        return is_due

    def _times(self) -> list[int]:
        times = []
        for path in self._watched:
            try:
                times.append(os.stat(path).st_mtime_ns)
            except OSError:  # the folder is gone; the next try says so
                times.append(-1)
        return times

    # whether it is over

    def _is_over(self) -> bool:
        """True if the timeout has passed since the wait began, and since a sampler of the cache drew a row.

        Also true if the wait is in vain, even while samplers draw.
        """
        timeout = self._timeout_seconds
        if self._available_rows.is_asked_elsewhere:
            self._began = time.monotonic()
        if timeout is None or self._available_rows.is_asked_elsewhere:
            return False
        since = max(self._began, self._last_row())
        if time.monotonic() - since > timeout:
            self._look()
        return self._is_in_vain() or time.monotonic() - max(since, self._last_row()) > timeout

    def _is_in_vain(self) -> bool:
        """True if segments were published for the timeout by now, without more rows for the epoch."""
        if self._timeout_seconds is None or not self._vain_since:
            return False
        return time.monotonic() - self._vain_since > self._timeout_seconds

    def _nobody_writes(self) -> bool:
        """True if for a second no writer was open, no pool had tasks left, and no sampler was seen."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if self._store.usage.somebody_writes():
                self._unwritten_since = 0.0
            elif not self._unwritten_since:
                self._unwritten_since = now
        if not self._unwritten_since or now - self._unwritten_since < Limits.current.grace_seconds:
            return False
        self._look()
        return not self._at_work()

    def _no_rank_starts(self) -> bool:
        """True if there is no other rank that may be about to start samplers: for a second all have waited.

        It stays true: who was seen to wait may have given up first.
        """
        if self._world_size == 1 or self._shared_plan is None:
            return True
        now = time.monotonic()
        if now - self._ranks_looked > _LOOK_SECONDS:
            self._ranks_looked = now
            if self._all_waited_since > now and self._shared_plan.all_wait():
                self._all_waited_since = now
        return now - self._all_waited_since >= Limits.current.grace_seconds

    def _look(self) -> None:
        with suppress(OSError):
            self._samplers = seen_samplers(self._store.folder.path)

    def _at_work(self) -> Sequence[SamplerCounts]:
        return [each for each in self._samplers if each.state != SamplerState.IDLE]

    def _last_row(self) -> float:
        return max((each.last_row or 0.0 for each in self._samplers), default=0.0)

    # what to say then

    def _why_late(self) -> str:
        found, path = self._available_rows, self._store.folder.path
        waited = f"waited {self._timeout_seconds:g} s"
        if found.pace_says:
            return (
                f"{waited} for the pace of {path}: {found.pace_says}{self._why_spent()}. "
                "Is a sampler running? set another pace with cache.set_pace(), or raise timeout"
            )
        if never := self._why_never():
            return f"{waited}: {never}"
        if self._is_in_vain():
            published = f"for {self._timeout_seconds:g} s segments were published in {path}"
            return f"{published}, and {self._why_vain()}"
        fact = (
            f"{waited} for {format_count(self._needed_rows, 'row')} in {path}, which has "
            f"{found.rows}{found.accepted}: {self._why_no_sampler_helped()}"
        )
        if not found.rows:
            return fact
        return f"{fact}; or have it be content with what is there: {self._lower}"

    def _why_spent(self) -> str:
        """The words on the rows of all segments, where `max_reuse` leaves out some that an epoch began."""
        found, record, others = self._available_rows, self._store.usage.record(), ""
        if found.unspent_rows is None:
            return ""
        if found.unspent_rows and found.rows < self._needed_rows:
            rows = format_count(found.rows, "row")
            others = f", and the others have {rows}{found.accepted} of the {self._needed_rows} waited for"
        counts = "max_reuse counts a segment as read once an epoch of it has begun"
        if found.chosen_rows:
            return f"{others}; {counts}, whichever of its rows {found.chosen_rows}"
        never = record.inserted_rows - record.unread_rows - found.unspent_rows - record.served_rows
        if never <= 0:
            return others
        return (
            f"{others}; of {format_count(record.inserted_rows, 'row')} published so far at least {never:,} "
            f"were never served, since {counts}. Loader(once=name) counts rows; else let epochs end, without "
            "epoch_rows and with drop_last=False"
        )

    def _never(self, why: str) -> Exception:
        """Return the error of a wait whose rows will not come."""
        return LoaderTimeoutError(why)

    def _why_never(self) -> str:
        """Return why the rows are not enough, where nobody writes more, or "" if more may come."""
        found, options = self._available_rows, self._options
        step_rows = options.step_rows(self._world_size)
        is_short = options.drop_last and options.wait_rows <= found.rows < step_rows
        refuses, way_out = found.refused  # nothing does where all segments prove to be damaged
        is_refused = (
            bool(refuses) and not (found.rows or options.expect) and options.wait_rows <= self._rows_listed
        )
        if found.pace_says:
            is_short = is_refused = False
        is_empty = not self._rows_listed and options.wait_rows == 1 and not self._store.segments()
        if found.is_asked_elsewhere or not (is_short or is_refused or is_empty) or not self._nobody_writes():
            return ""
        path = self._store.folder.path
        if is_empty:
            damaged = len(self._store.folder.quarantined_names())
            but = f" but for {format_count(damaged, 'damaged segment')} in quarantine" if damaged else ""
            return (
                f"{path} is empty{but}, and nobody writes to it: first start samplers, or write rows by "
                f"cache.writer(); or pass wait_rows={max(2, step_rows)} to wait for them"
            )
        if is_refused:
            return (
                f"{refuses} all {format_count(self._rows_listed, 'row')} of {path}, and nobody writes to it: "
                f"{way_out}, or start samplers"
            )
        ranks = f" of {format_count(self._world_size, 'rank')}" if self._world_size > 1 else ""
        smaller = found.rows // self._world_size  # number of rows that have a step; 0: none has
        lower = f", or lower batch_size to {smaller}" if smaller else ""
        return (
            f"{path} has {format_count(found.rows, 'row')}{found.accepted}, one step{ranks} takes "
            f"{step_rows}, and nobody writes to it: pass drop_last=False (in TensorFlow "
            f"drop_remainder=False) for a batch of what is there{lower}; or start samplers, and pass "
            f"wait_rows={step_rows} to wait for them"
        )

    def _why_frozen(self) -> str:
        found = self._available_rows
        held = f"{format_count(found.rows, 'row')}{found.accepted}"
        return (
            f"{self._store.folder.path} is frozen with {held}, and an epoch here needs {self._needed_rows}: "
            "lower batch_size or wait_rows, or pass drop_last=False (in TensorFlow drop_remainder=False)"
        )

    def _why_vain(self) -> str:
        found = self._available_rows
        refuses, way_out = found.refused
        if not found.rows and refuses:
            return f"{refuses} all {format_count(self._rows_listed, 'row')} that are there: {way_out}"
        fact = f"its rows{found.accepted} stay at {found.rows}, where {self._needed_rows} are waited for: "
        if self._ends[0] > self._ends_then[0] >= 0:  # segments have left since the rows last grew
            capacity = format_bytes(self._store.settings.capacity_bytes)
            return (
                f"{fact}it is full, with a capacity of {capacity}, and evicts as much as comes: "
                f"{self._lower}, or raise the capacity"
            )
        return f"{fact}{self._lower}{', or ' if way_out else ''}{way_out}"

    def _why_no_sampler_helped(self) -> str:
        self._look()
        at_work = self._at_work()
        if not at_work and self._store.usage.somebody_writes():
            return (
                "somebody writes to it, but no sampler is seen at work on this machine, as those of Ray "
                "on other nodes never are: raise timeout"
            )
        if not at_work:
            return "is a sampler running? None is seen on this machine: start one"
        drawn, wanted = sum(each.rows for each in at_work), sum(each.full_rows for each in at_work)
        which = f"{'next' if self._rows_listed else 'first'} segment{'s' if len(at_work) > 1 else ''}"
        last = self._last_row()
        since = f"the last {format_seconds(time.monotonic() - last)} ago" if last else "none so far"
        fact = f"samplers have drawn {drawn} of {format_count(wanted, 'row')} of their {which}, {since}"
        if all(each.state == SamplerState.WAITS for each in at_work):
            return (
                f"{fact}; all {len(at_work)} wait for room, or for training: end epochs and close snapshots "
                "that lease the oldest segments, or raise the capacity"
            )
        return (
            f"{fact}: raise timeout above what the source takes for a row, or look at why it does not answer"
        )

    @property
    def _needed_rows(self) -> int:
        return self._options.needed_rows(self._world_size)

    @property
    def _rows_listed(self) -> int:
        return sum(segment.rows for segment in self._available_rows.listed)
