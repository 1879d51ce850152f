"""Overview: a cache at one moment, as people see it: fill, ages, samplers, rates.

What was evicted is counted on the disk, and two looks at a cache tell a rate. Sequence numbers are no counts:
after a restart of the machine they leap.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from arrowcache.display import Bar, Card, Cell, Facts, Part, Shown, Timeline
from arrowcache.storage.layout import SegmentInfo, publisher_of
from arrowcache.units import format_bytes, format_count, format_seconds, format_share

_WINDOWS = ((60.0, "last minute"), (3600.0, "last hour"), (86400.0, "last day"))
_MIN_SECONDS_APART = 1.0
_MAX_CELLS = 100


@dataclass(frozen=True, slots=True)
class CacheStats(Shown):
    """A cache at one moment. Bytes are allocated bytes, as `du` counts them.

    What was ever published, served and evicted counts from when the cache was made: `served_rows` are those
    of all loaders' epochs, a row of two epochs twice; `unread_rows` those evicted before any epoch read them.
    `times_served` is how many epochs read a row that is here now, on average, and `most_times_served` how
    many read the segment that was read most. `paced` says why the cache's pace keeps writers
    waiting; where it is empty, they wait for room.

    `items` is how many a dataset has whose cache this is (see `arrowcache.torch.cached`), and `cached_items`
    how many of them are in; both are 0 in a rolling cache. An item that two processes made at once counts
    twice.
    """

    capacity_bytes: int
    allocated_bytes: int
    published_bytes: int
    incoming_bytes: int
    leased_bytes: int
    segments: int
    rows: int
    oldest_seq: int | None
    next_seq: int
    quarantined: int
    waiting_writers: int
    inserted_rows: int = 0
    served_rows: int = 0
    evicted_segments: int = 0
    evicted_rows: int = 0
    unread_rows: int = 0
    times_served: float = 0.0
    most_times_served: int = 0
    paced: str = ""
    items: int = 0
    cached_items: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of a dataset's items that an epoch finds here, in [0, 1]. 0.0 in a rolling cache."""
        return self.cached_items / self.items if self.items else 0.0

    @property
    def hits(self) -> str:
        """The hit rate as text, such as "cached 4,000 of 5,000 items (80 %)". Empty in a rolling cache."""
        if not self.items:
            return ""
        share = format_share(self.cached_items, self.items)
        return f"cached {self.cached_items:,} of {format_count(self.items, 'item')} ({share})"

    @property
    def unread_share(self) -> float:
        """Share of the evicted rows that no epoch read, in [0, 1]."""
        return self.unread_rows / self.evicted_rows if self.evicted_rows else 0.0

    def _card(self) -> Card:
        return Card("CacheStats", "", self.parts())

    def parts(self) -> list[Part]:
        """Describe the segments, the use of the capacity, and how often present rows were served."""
        other = self.allocated_bytes - self.published_bytes - self.incoming_bytes
        capacity = [
            ("published", self.published_bytes - self.leased_bytes),
            ("leased", self.leased_bytes),
            ("incoming", self.incoming_bytes),
            ("quarantine and bookkeeping", other),
        ]
        return [self._contents(), Bar(capacity, format_bytes, self.capacity_bytes, "free"), self._reuse()]

    def _contents(self) -> str:
        words = [
            f"{format_count(self.segments, 'segment')}, {format_count(self.rows, 'row')}",
            (
                f"{format_bytes(self.allocated_bytes)} of {format_bytes(self.capacity_bytes)} "
                f"({format_share(self.allocated_bytes, self.capacity_bytes)})"
            ),
        ]
        if self.items:
            words.insert(0, self.hits)
        if self.rows:
            words.append(f"{format_bytes(self.published_bytes / self.rows)} a row on the disk")
        if self.quarantined:
            words.append(f"{format_count(self.quarantined, 'segment')} in quarantine")
        if self.waiting_writers:
            why = f"as {self.paced}" if self.paced else "for room"
            words.append(f"{format_count(self.waiting_writers, 'writer')} waiting {why}")
        return ", ".join(words)

    def _reuse(self) -> str:
        unread = f", {format_share(self.unread_rows, self.evicted_rows)} of them unread"
        return (
            f"{format_count(self.inserted_rows, 'row')} published, {format_count(self.served_rows, 'row')} "
            f"served, what is here {self.times_served:.1f} times (at most {self.most_times_served}); "
            f"{format_count(self.evicted_rows, 'row')} evicted{unread if self.evicted_rows else ''}"
        )


class Survey(NamedTuple):
    """The counts of one moment, what they are of, and which of that somebody leased; oldest first."""

    stats: CacheStats
    segments: list[SegmentInfo]
    leased: list[SegmentInfo]


class Rate(NamedTuple):
    """Segments, rows and bytes a second that come or go, in the time that `when` names."""

    segments: float
    rows: float
    nbytes: float
    when: str

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.nbytes)}/s, {_number(self.rows)} rows/s, "
            f"{_number(self.segments)} segments/s ({self.when})"
        )


class Looks:
    """The last looks at a cache, (seconds of a clock that only goes on, segments evicted so far): two tell a
    rate, if they are a second apart.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None

    def add(self, now: float, evicted: int) -> tuple[float, int] | None:
        """Remember this look; returns the seconds since an earlier one and what was evicted since."""
        if self._last is None or now - self._last[0] >= _MIN_SECONDS_APART:
            self._before, self._last = self._last, (now, evicted)
        before = self._before
        return before and (now - before[0], evicted - before[1])


def overview(
    stats: CacheStats, segments: Sequence[SegmentInfo], looks: Looks, now: float | None = None
) -> list[Part]:
    """A cache now, which `looks` remembers: its contents, its segments, and how fast they come and go."""
    now = time.time() if now is None else now
    rates = Facts([("ingest", _ingest(segments, now)), ("eviction", _eviction(stats, looks))])
    return [*stats.parts(), *timeline(segments, now), rates]


def timeline(segments: Sequence[SegmentInfo], now: float) -> list[Timeline]:
    """Segments side by side; of many, neighbours share a cell. Nothing where there are none."""
    count = min(len(segments), _MAX_CELLS)
    ends = [len(segments) * cell // count for cell in range(count + 1)] if count else []
    cells = [_cell(segments[start:stop], now) for start, stop in itertools.pairwise(ends)]
    return [Timeline(cells)] if cells else []


def _cell(segments: Sequence[SegmentInfo], now: float) -> Cell:
    rows: Counter[str] = Counter()
    nbytes = 0
    for segment in segments:
        rows[publisher_of(segment.task)] += segment.rows
        nbytes += segment.nbytes
    first, last = segments[0], segments[-1]
    ends = (first.seq, now - first.published), (last.seq, now - last.published)
    return Cell(*ends, len(segments), nbytes, rows, first.task)


def _ingest(segments: Sequence[SegmentInfo], now: float) -> str:
    if rate := ingest_rate(segments, now):
        return str(rate)
    if not segments:
        return "nothing to tell it by"
    age = now - max(segment.published for segment in segments)
    return f"no rate yet, the newest segment came {format_seconds(max(0.0, age))} ago"


def _eviction(stats: CacheStats, looks: Looks) -> str:
    since = looks.add(time.monotonic(), stats.evicted_segments)
    goes = f"{format_count(stats.evicted_segments, 'segment')} so far"
    if since is None:
        return f"{goes}; the next look tells the rate" if stats.evicted_segments else goes
    seconds, count = since
    when = f"last {format_seconds(seconds)}"
    if not count:
        return f"{goes}; none in the {when}"
    rate, mean = count / seconds, max(1, stats.segments)  # as large as those that are here
    return f"{goes}; about {Rate(rate, rate * stats.rows / mean, rate * stats.published_bytes / mean, when)}"


def ingest_rate(segments: Sequence[SegmentInfo], now: float) -> Rate | None:
    """The rate at which segments were published of late. None if fewer than two tell it.

    Where all that is there is younger, the time begins with the oldest, which then does not count.
    """
    if len(segments) < 2:
        return None
    oldest = min(segments, key=lambda segment: segment.published)
    for seconds, when in _WINDOWS:
        recent = [segment for segment in segments if segment.published > now - seconds]
        if len(recent) == len(segments):
            recent = [segment for segment in segments if segment is not oldest]
            seconds = now - oldest.published
            when = f"last {format_seconds(seconds)}"
        if recent and seconds > 0:
            rows, nbytes = sum(s.rows for s in recent), sum(s.allocated_bytes for s in recent)
            return Rate(len(recent) / seconds, rows / seconds, nbytes / seconds, when)
    return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
