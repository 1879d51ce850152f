"""Patience: how a loader waits for rows: when it looks again, when it gives up, and why.

A wait holds neither cache.lock nor a lease. It asks the folder for changes, some twenty times a
second, and tries again only after a change. As long as some sampler of the cache draws, it does
not give up, unless published segments bring it no rows. Where nobody writes it gives up after a second, of
several ranks once all of the node have waited so long together: until then one may start samplers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import NamedTuple

from arrowcache.errors import LoaderTimeoutError
from arrowcache.reading.options import LoaderOptions
from arrowcache.reading.ranks import Agreement
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.reading.supply import Supply
from arrowcache.storage.layout import CACHE_JSON
from arrowcache.storage.progress import SeenSampler, State, seen_samplers
from arrowcache.units import format_bytes, format_count, format_seconds

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.005, 0.04
# after a change: another one at the same tick of the file system's clock looks the same
_SETTLING_SECONDS = 0.1
_TRY_SECONDS = 1.0  # tried without a change: `where` may depend on the time, and freed bytes change no name
_LOOK_SECONDS = 0.25  # between two looks for a writer
_GRACE_SECONDS = 1.0  # for a writer between two of its segments, or a sampler that is just starting


class Wait(NamedTuple):
    """Calls during a wait: `before` releases leases before the wait begins."""

    is_cancelled: Callable[[], bool] = lambda: False
    before: Callable[[], None] = lambda: None


class Patience:
    """One wait. It ends after the timeout without rows, and without a sampler that draws some.

    Args:
        agreement: with other ranks of the job. It also tries again after they changed something.
    """

    def __init__(
        self,
        supply: Supply,
        options: LoaderOptions,
        world_size: int,
        meter: Meter,
        agreement: Agreement | None,
    ) -> None:
        self._supply, self._store, self._meter = supply, supply.store, meter
        self._options, self._world_size, self._agreement = options, world_size, agreement
        self._timeout_seconds = options.timeout
        folder = self._store.folder
        self._watched = [folder.segments, folder.usage, folder.notes, folder.path / CACHE_JSON]
        if agreement is not None:
            self._watched.append(folder.ranks)
        self._began = self._tried = self._changed = time.monotonic()
        self._seen: list[int] | None = None
        self._pause = _LEAST_PAUSE_SECONDS
        self._looked = self._unwritten_since = 0.0
        self._ranks_looked, self._all_waited_since = 0.0, math.inf
        self._samplers: list[SeenSampler] = []
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
        with ExitStack() as shown:
            shown.enter_context(self._store.usage.show_waiting())  # samplers do not wait for training now
            if self._agreement is not None:
                shown.enter_context(self._agreement.show_waiting())
            while snapshot is None and not wait.is_cancelled():
                if self._is_over():
                    raise LoaderTimeoutError(self._why_late())
                no_rank_starts, why = self._no_rank_starts(), self._why_never()  # both always: they look
                if why and no_rank_starts:
                    raise LoaderTimeoutError(why)
                with self._meter.stage(self._stage()), self._choosing():
                    time.sleep(self._pause)
                self._pause = min(1.5 * self._pause, _MOST_PAUSE_SECONDS)
                if self._is_due():
                    snapshot = self._try(take, wait)
        return snapshot

    def _choosing(self) -> AbstractContextManager[None]:
        return self._meter.choosing() if self._supply.is_asked_elsewhere else nullcontext()

    def _stage(self) -> str:
        """The stage, as of the stats, to which the wait belongs."""
        if self._supply.is_asked_elsewhere:  # another rank chooses the rows, as the beginning of the epoch
            return "start"
        return "pace" if self._supply.pace_says else "samplers"

    def _try(self, take: Callable[[], Snapshot | None], wait: Wait) -> Snapshot | None:
        with self._meter.stage("start"):
            snapshot = take()
        if snapshot is not None:
            return snapshot
        supply = self._supply
        if not (supply.pace_says or supply.is_asked_elsewhere):  # else the supply did not count all rows
            self._ends = (supply.listed[0].seq, supply.listed[-1].seq) if supply.listed else (-1, -1)
            if supply.rows > self._most_rows:
                self._most_rows, self._ends_then, self._vain_since = supply.rows, self._ends, 0.0
            elif self._ends[1] != self._ends_then[1] and not self._vain_since:
                self._vain_since = time.monotonic()
        wait.before()
        return None

    def _is_due(self) -> bool:
        """True if something may have changed since the last True; the first call is True."""
        now, times = time.monotonic(), self._times()
        if times != self._seen:
            self._seen, self._changed, self._pause = times, now, _LEAST_PAUSE_SECONDS
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
        if self._supply.is_asked_elsewhere:
            self._began = time.monotonic()
        if timeout is None or self._supply.is_asked_elsewhere:
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
        if not self._unwritten_since or now - self._unwritten_since < _GRACE_SECONDS:
            return False
        self._look()
        return not self._at_work()

    def _no_rank_starts(self) -> bool:
        """True if there is no other rank that may be about to start samplers: for a second all have waited.

        It stays true: who was seen to wait may have given up first.
        """
        if self._world_size == 1 or self._agreement is None:
            return True
        now = time.monotonic()
        if now - self._ranks_looked > _LOOK_SECONDS:
            self._ranks_looked = now
            if self._all_waited_since > now and self._agreement.all_wait():
                self._all_waited_since = now
        return now - self._all_waited_since >= _GRACE_SECONDS

    def _look(self) -> None:
        with suppress(OSError):
            self._samplers = seen_samplers(self._store.folder.path)

    def _at_work(self) -> Sequence[SeenSampler]:
        return [each for each in self._samplers if each.state != State.IDLE]

    def _last_row(self) -> float:
        return max((each.last_row or 0.0 for each in self._samplers), default=0.0)

    # what to say then

    def _why_late(self) -> str:
        supply, path = self._supply, self._store.folder.path
        waited = f"waited {self._timeout_seconds:g} s"
        if supply.pace_says:
            return (
                f"{waited} for the pace of {path}: {supply.pace_says}{self._why_spent()}. "
                "Is a sampler running? set another pace with cache.set_pace(), or raise timeout"
            )
        if never := self._why_never():
            return f"{waited}: {never}"
        if self._is_in_vain():
            published = f"for {self._timeout_seconds:g} s segments were published in {path}"
            return f"{published}, and {self._why_vain()}"
        fact = (
            f"{waited} for {self._needed_rows} rows in {path}, which has "
            f"{supply.rows}{supply.accepted}: {self._why_no_sampler_helped()}"
        )
        if not supply.rows:
            return fact
        return f"{fact}; or have it be content with what is there: lower wait_rows or batch_size"

    def _why_spent(self) -> str:
        """The words on the rows of all segments, where `max_reuse` leaves out some that an epoch began."""
        supply, record, others = self._supply, self._store.usage.record(), ""
        if supply.unspent_rows is None:
            return ""
        if supply.unspent_rows and supply.rows < self._needed_rows:
            rows = format_count(supply.rows, "row")
            others = f", and the others have {rows}{supply.accepted} of the {self._needed_rows} waited for"
        counts = "max_reuse counts a segment as read once an epoch of it has begun"
        if supply.chosen_rows:
            return f"{others}; {counts}, whichever of its rows {supply.chosen_rows}"
        never = record.inserted_rows - record.unread_rows - supply.unspent_rows - record.served_rows
        if never <= 0:
            return others
        return (
            f"{others}; of {format_count(record.inserted_rows, 'row')} published so far at least {never:,} "
            f"were never served, since {counts}. A later release has Loader(once=...), which counts rows; "
            "until then let epochs end, without epoch_rows and with drop_last=False"
        )

    def _why_never(self) -> str:
        """Return why the rows are not enough, where nobody writes more, or "" if more may come."""
        supply, options = self._supply, self._options
        step_rows = options.step_rows(self._world_size)
        is_short = options.drop_last and options.wait_rows <= supply.rows < step_rows
        is_refused = not (supply.rows or options.expect) and options.wait_rows <= self._rows_listed
        if supply.pace_says:
            is_short = is_refused = False
        is_empty = not self._rows_listed and options.wait_rows == 1 and not self._store.segments()
        if supply.is_asked_elsewhere or not (is_short or is_refused or is_empty) or not self._nobody_writes():
            return ""
        path = self._store.folder.path
        if is_empty:
            return (
                f"{path} is empty, and nobody writes to it: first start samplers, or write rows by "
                f"cache.writer(); or pass wait_rows={max(2, step_rows)} to wait for them"
            )
        if is_refused:
            refuses, way_out = supply.refused
            return (
                f"{refuses} all {format_count(self._rows_listed, 'row')} of {path}, and nobody writes to it: "
                f"{way_out}, or start samplers"
            )
        ranks = f" of {format_count(self._world_size, 'rank')}" if self._world_size > 1 else ""
        smaller = supply.rows // self._world_size  # number of rows that have a step; 0: none has
        lower = f", or lower batch_size to {smaller}" if smaller else ""
        return (
            f"{path} has {format_count(supply.rows, 'row')}{supply.accepted}, one step{ranks} takes "
            f"{step_rows}, and nobody writes to it: pass drop_last=False (in TensorFlow "
            f"drop_remainder=False) for a batch of what is there{lower}; or start samplers, and pass "
            f"wait_rows={step_rows} to wait for them"
        )

    def _why_vain(self) -> str:
        supply = self._supply
        refuses, way_out = supply.refused
        if not supply.rows and refuses:
            return f"{refuses} all {self._rows_listed} rows that are there: {way_out}"
        fact = f"its rows{supply.accepted} stay at {supply.rows}, where {self._needed_rows} are waited for: "
        if self._ends[0] > self._ends_then[0] >= 0:  # segments have left since the rows last grew
            capacity = format_bytes(self._store.settings.capacity_bytes)
            return (
                f"{fact}it is full, with a capacity of {capacity}, and evicts as much as comes: "
                "lower wait_rows or batch_size, or raise the capacity"
            )
        return f"{fact}lower wait_rows or batch_size{', or ' if way_out else ''}{way_out}"

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
        fact = f"samplers have drawn {drawn} of {wanted} rows of their {which}, {since}"
        if all(each.state == State.WAITS for each in at_work):
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
        return sum(segment.rows for segment in self._supply.listed)
