"""Patience: how a loader waits for rows: when it looks again, and when it gives up, and why.

It waits without cache.lock and without a lease: it asks the folder when it changed, some twenty times a
second, and only what changed is a reason to try again. As long as some sampler of the cache draws, it does
not give up, unless what they publish brings it no rows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from arrowcache.storage.layout import CACHE_JSON, SegmentInfo
from arrowcache.storage.progress import SeenSampler, State, seen_samplers
from arrowcache.storage.store import Store
from arrowcache.units import format_count, format_seconds

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.005, 0.04
_SETTLING_SECONDS = (
    0.1  # after a change: another one at the same tick of the file system's clock looks like it
)
_TRY_SECONDS = 1.0  # whatever changed: a `where` may go by the time, and bytes that were freed are in no name
_LOOK_SECONDS = 0.25  # between two looks for somebody who writes
_GRACE_SECONDS = 1.0  # for a writer between two of its segments, or a sampler that is just starting


class Patience:
    """That of one wait.

    Args:
        timeout_seconds: without rows, and without a sampler that draws some; None: for ever.
        with_ranks: what other ranks of the job do is a reason to try again, too.
    """

    def __init__(self, store: Store, timeout_seconds: float | None, *, with_ranks: bool) -> None:
        self._store, self._timeout_seconds = store, timeout_seconds
        folder = store.folder
        self._watched = [folder.segments, folder.usage, folder.path / CACHE_JSON]
        if with_ranks:
            self._watched.append(folder.ranks)
        self._began = self._tried = self._changed = time.monotonic()
        self._seen: list[int] | None = None
        self._pause = _LEAST_PAUSE_SECONDS
        self._looked = self._unwritten_since = 0.0
        self._samplers: list[SeenSampler] = []
        self._most_rows = -1  # no try yet: what is there by then was not published meanwhile
        self._ends = self._ends_then = (-1, -1)  # the oldest and the newest segment: now, as rows last grew
        self._vain_since = 0.0  # segments are published, and the rows do not grow

    def found(self, rows: int, listed: Sequence[SegmentInfo]) -> None:
        """A try found so many rows for the epoch in what is published."""
        self._ends = (listed[0].seq, listed[-1].seq) if listed else (-1, -1)
        if rows > self._most_rows:
            self._most_rows, self._ends_then, self._vain_since = rows, self._ends, 0.0
        elif self._ends[1] != self._ends_then[1] and not self._vain_since:
            self._vain_since = time.monotonic()

    def is_in_vain(self) -> bool:
        """For the timeout by now segments were published, and the rows for the epoch did not grow."""
        if self._timeout_seconds is None or not self._vain_since:
            return False
        return time.monotonic() - self._vain_since > self._timeout_seconds

    def has_evicted(self) -> bool:
        """Segments have left the cache since the rows last grew."""
        return self._ends[0] > self._ends_then[0] >= 0

    def is_due(self) -> bool:
        """Something may have changed since the last time that this was true; the first time it is."""
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
            except OSError:  # of a folder that is gone; who tries again says so
                times.append(-1)
        return times

    def pause(self) -> None:
        """Wait a moment, longer each time, at most 40 ms. Ctrl-C ends it at once."""
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _MOST_PAUSE_SECONDS)

    def is_over(self) -> bool:
        """The timeout has passed since this wait began, and since a sampler of the cache drew a row.

        Or it is in vain, however much samplers draw.
        """
        if self._timeout_seconds is None:
            return False
        if self.is_in_vain():
            return True
        now, since = time.monotonic(), max(self._began, self._last_row())
        if now - since > self._timeout_seconds:
            self._look()
        return now - max(since, self._last_row()) > self._timeout_seconds

    def nobody_writes(self) -> bool:
        """For a second by now no writer was open, no pool had tasks left, and no sampler was seen."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if self._store.usage.somebody_writes():
                self._unwritten_since = 0.0
            elif not self._unwritten_since:
                self._unwritten_since = now
        is_so = bool(self._unwritten_since) and now - self._unwritten_since >= _GRACE_SECONDS
        if is_so:
            self._look()
            is_so = not self._at_work()
        return is_so

    def samplers(self) -> str:
        """How far samplers are, and which way out helps then: the end of a message."""
        self._look()
        at_work = self._at_work()
        if not at_work:
            if self._store.usage.somebody_writes():
                return (
                    "somebody writes to it, but no sampler is seen at work on this machine, as those of Ray "
                    "on other nodes never are: raise timeout"
                )
            return "is a sampler running? None is seen on this machine: start one"
        drawn, wanted = sum(each.rows for each in at_work), sum(each.full_rows for each in at_work)
        which = "next" if self._rows_there() else "first"
        fact = f"samplers have drawn {drawn} of {wanted} rows of their {which} segment"
        fact += "s" if len(at_work) > 1 else ""
        if last := self._last_row():
            fact += f", the last {format_seconds(time.monotonic() - last)} ago"
        else:
            fact += ", none so far"
        waiting = sum(each.state == State.WAITS for each in at_work)
        if waiting == len(at_work):
            return (
                f"{fact}; all {waiting} wait for room, or for training: end epochs and close snapshots that "
                "lease the oldest segments, or raise the capacity"
            )
        return (
            f"{fact}: raise timeout above what the source takes for a row, or look at why it does not answer"
        )

    def _look(self) -> None:
        with suppress(OSError):
            self._samplers = seen_samplers(self._store.folder.path)

    def _at_work(self) -> Sequence[SeenSampler]:
        return [each for each in self._samplers if each.state != State.IDLE]

    def _last_row(self) -> float:
        return max((each.last_row or 0.0 for each in self._samplers), default=0.0)

    def _rows_there(self) -> int:
        with suppress(OSError):
            return sum(segment.rows for segment in self._store.segments())
        return 0


def too_few(path: os.PathLike[str], rows: int, accepted: str, batch_size: int, step_rows: int) -> str:
    """Why no epoch can begin over a cache to which nobody writes."""
    ranks = f" of {format_count(step_rows // batch_size, 'rank')}" if step_rows > batch_size else ""
    smaller = rows * batch_size // step_rows  # of which a step is there; 0: of none
    ways = "pass drop_last=False for a batch of what is there"
    ways += f", or lower batch_size to {smaller}" if smaller else ""
    return (
        f"{os.fspath(path)} has {format_count(rows, 'row')}{accepted}, one step{ranks} takes {step_rows}, "
        f"and nobody writes to it: {ways}; or start samplers, and pass wait_rows={step_rows} to wait for them"
    )


def refused(path: os.PathLike[str], rows: int) -> str:
    """Why no epoch can begin over a cache to which nobody writes, and of which `where` accepts nothing."""
    return (
        f"`where` refuses all {format_count(rows, 'row')} of {os.fspath(path)}, and nobody writes to it: "
        "look at what `where` accepts, or start samplers"
    )
