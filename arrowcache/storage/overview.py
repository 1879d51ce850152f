"""Overview: a cache at one moment, as people see it: fill, ages, samplers, rates. Pure.

What was evicted is counted on the disk, and two looks at a cache tell a rate. Sequence numbers are no counts:
after a restart of the machine they leap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from arrowcache import html, text
from arrowcache.storage import timeline
from arrowcache.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from arrowcache.storage.layout import SegmentInfo

_WINDOWS = ((60.0, "last minute"), (3600.0, "last hour"), (86400.0, "last day"))
_FILL = {"published": "█", "leased": "▓", "incoming": "▒", "quarantine and bookkeeping": "░", "free": " "}
_REMEMBERED_SECONDS = 60.0
_LEAST_SECONDS_APART = 1.0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A cache at one moment. Bytes are allocated bytes, as `du` counts them.

    What was ever published, served and evicted counts from when the cache was made: `served_rows` are those
    of all loaders' epochs, a row of two epochs twice; `unread_rows` those evicted before any epoch read them.
    `times_served` is how many epochs read a row that is here now, on average, and `most_times_served` how
    many read the segment that was read most. `paced` says why the cache's pace keeps writers
    waiting; where it is empty, they wait for room.
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

    @property
    def unread_share(self) -> float:
        """Share of the evicted rows that no epoch read, in [0, 1]."""
        return self.unread_rows / self.evicted_rows if self.evicted_rows else 0.0

    def __str__(self) -> str:
        return f"{contents(self)}\n{capacity_line(self)}\n{reuse(self)}"

    def _repr_html_(self) -> str:
        notes = [html.note(contents(self)), html.note(reuse(self))]
        return html.card("CacheStats", "", capacity_bar(self), *notes)


class Survey(NamedTuple):
    """The counts of one moment, what they are of, and which of that somebody leased; oldest first."""

    stats: CacheStats
    segments: list[SegmentInfo]
    leased: list[SegmentInfo]


class Rate(NamedTuple):
    """How fast segments come or go; `when` says over which time that is."""

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
    """How many segments were evicted by when: what an object remembers of earlier looks at a cache.

    Of the last minute, and the one before; single operations, which no thread can tear.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()

    def add(self, now: float, evicted: int) -> tuple[float, int] | None:
        """Remember this look; returns the seconds since an earlier one and what was evicted since.

        Args:
            now: seconds of a clock that only goes on.
            evicted: how many segments ever.
        """
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - _REMEMBERED_SECONDS:
            looks.popleft()
        earlier = [look for look in list(looks) if look[0] <= now - _LEAST_SECONDS_APART]
        if not looks or looks[-1][0] <= now - _LEAST_SECONDS_APART:
            looks.append((now, evicted))
        return (now - earlier[0][0], evicted - earlier[0][1]) if earlier else None


@dataclass(frozen=True, slots=True)
class Overview:
    """What a cache holds, and how that changes.

    `ingest` is None while too few segments tell it, `eviction` at the first look.
    """

    stats: CacheStats
    segments: Sequence[SegmentInfo]
    now: float
    ingest: Rate | None
    eviction: Rate | None

    @classmethod
    def of(cls, stats: CacheStats, segments: Sequence[SegmentInfo], looks: Looks) -> Overview:
        """Take a look now, which `looks` remembers."""
        now = time.time()
        since = looks.add(time.monotonic(), stats.evicted_segments)
        eviction = None
        if since is not None:
            seconds, count = since
            mean = max(1, len(segments))
            eviction = Rate(
                count / seconds,
                count * stats.rows / mean / seconds,
                count * stats.published_bytes / mean / seconds,
                f"last {format_seconds(seconds)}",
            )
        return cls(stats, segments, now, ingest_rate(segments, now), eviction)

    def as_text(self) -> str:
        """Few lines: the capacity, the segments, the rates."""
        lines = [contents(self.stats), capacity_line(self.stats)]
        if self.segments:
            lines += [timeline.span(self.segments, self.now), timeline.as_text(self.segments)]
        lines += [f"{name:<9} {value}" for name, value in self._rates()]
        return "\n".join(lines)

    def as_html(self) -> html.Markup:
        """Bars, the timeline and the rates."""
        parts = [capacity_bar(self.stats), html.note(contents(self.stats))]
        if self.segments:
            parts += [
                timeline.as_html(self.segments, self.now),
                html.note(timeline.span(self.segments, self.now)),
            ]
        return html.join([*parts, html.facts(self._rates())])

    def _rates(self) -> list[tuple[str, str]]:
        comes = "nothing to tell it by" if self.ingest is None else str(self.ingest)
        if self.ingest is None and self.segments:
            age = self.now - max(segment.published for segment in self.segments)
            comes = f"no rate yet, the newest segment came {format_seconds(max(0.0, age))} ago"
        goes = f"{format_count(self.stats.evicted_segments, 'segment')} so far"
        if self.eviction is not None and self.eviction.segments:
            goes += f"; about {self.eviction}"  # as large as those that are here
        elif self.eviction is not None:
            goes += f"; none in the {self.eviction.when}"
        elif self.stats.evicted_segments:
            goes += "; the next look tells the rate"
        return [("ingest", comes), ("eviction", goes)]


def ingest_rate(segments: Sequence[SegmentInfo], now: float) -> Rate | None:
    """How fast segments were published of late; None: fewer than two tell it.

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


def contents(stats: CacheStats) -> str:
    """One sentence of what there is."""
    words = [
        f"{format_count(stats.segments, 'segment')}, {format_count(stats.rows, 'row')}",
        (
            f"{format_bytes(stats.allocated_bytes)} of {format_bytes(stats.capacity_bytes)} "
            f"({format_share(stats.allocated_bytes, stats.capacity_bytes)})"
        ),
    ]
    if stats.segments and stats.rows:
        words.append(f"{format_bytes(stats.published_bytes / stats.rows)} a row on the disk")
    if stats.quarantined:
        words.append(f"{format_count(stats.quarantined, 'segment')} in quarantine")
    if stats.waiting_writers:
        why = f"as {stats.paced}" if stats.paced else "for room"
        words.append(f"{format_count(stats.waiting_writers, 'writer')} waiting {why}")
    return ", ".join(words)


def reuse(stats: CacheStats) -> str:
    """One sentence of how often what is here was served, and what left unread."""
    unread = f", {format_share(stats.unread_rows, stats.evicted_rows)} of them unread"
    return (
        f"{format_count(stats.inserted_rows, 'row')} published, {format_count(stats.served_rows, 'row')} "
        f"served, what is here {stats.times_served:.1f} times (at most {stats.most_times_served}); "
        f"{format_count(stats.evicted_rows, 'row')} evicted{unread if stats.evicted_rows else ''}"
    )


def capacity_parts(stats: CacheStats) -> list[tuple[str, float, str, str]]:
    """What the capacity goes to: (name, bytes, as text, color); what is nothing is left out."""
    unleased = stats.published_bytes - stats.leased_bytes
    other = stats.allocated_bytes - stats.published_bytes - stats.incoming_bytes
    parts = (
        ("published", unleased, html.BLUE),
        ("leased", stats.leased_bytes, html.ORANGE),
        ("incoming", stats.incoming_bytes, html.PURPLE),
        ("quarantine and bookkeeping", other, html.GREY),
        ("free", stats.capacity_bytes - stats.allocated_bytes, "transparent"),
    )
    return [(name, nbytes, format_bytes(nbytes), color) for name, nbytes, color in parts if nbytes > 0]


def capacity_bar(stats: CacheStats) -> html.Markup:
    return html.bar(capacity_parts(stats), stats.capacity_bytes)


def capacity_line(stats: CacheStats) -> str:
    """The bar of a terminal, and what its parts are."""
    parts = capacity_parts(stats)
    drawn = text.stacked([(nbytes, _FILL[name]) for name, nbytes, _, _ in parts], stats.capacity_bytes, 40)
    return f"[{drawn}] " + ", ".join(f"{_FILL[name]} {name} {size}".lstrip() for name, _, size, _ in parts)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
