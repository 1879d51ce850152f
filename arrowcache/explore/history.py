"""History: what observations of one cache, one after another, tell: rates.

Pure: values in, values out. Memory is bounded: of the past it keeps numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arrowcache.explore.observation import Observation, SeenLoader
from arrowcache.reading.stats import STAGES, bottleneck_of
from arrowcache.storage.overview import CacheStats

_MOST_MOMENTS = 3600


@dataclass(frozen=True, slots=True)
class LoaderRate:
    """What a loader did between two observations.

    `stall_share`, 0 to 1, is how much of that time its consumer waited; `bottleneck` what held it up.
    """

    key: int
    bytes_per_second: float
    stall_share: float
    bottleneck: str


@dataclass(frozen=True, slots=True)
class Moment:
    """An observation, in numbers; `published_bytes` and `evicted_bytes` count since the one before.

    The cache counts the rows that come and go; each is taken to have as many bytes as those that are there
    have on average.
    """

    time: float
    seconds: float
    stats: CacheStats
    published_bytes: float
    evicted_bytes: float
    loaders: tuple[LoaderRate, ...]

    @property
    def published_bytes_per_second(self) -> float:
        return self.published_bytes / self.seconds if self.seconds else 0.0

    @property
    def evicted_bytes_per_second(self) -> float:
        return self.evicted_bytes / self.seconds if self.seconds else 0.0

    @property
    def delivered_bytes_per_second(self) -> float:
        """Of all loaders together."""
        return sum(loader.bytes_per_second for loader in self.loaders)


class History:
    """Observations of one cache, with what happened between them. Another cache begins it anew.

    Args:
        limit: moments that are kept; the oldest go.
    """

    def __init__(self, limit: int = _MOST_MOMENTS) -> None:
        self._limit = limit
        self.moments: tuple[Moment, ...] = ()  # replaced as a whole: another thread may read them meanwhile
        self.last: Observation | None = None

    def __len__(self) -> int:
        return len(self.moments)

    def __iter__(self) -> Iterator[Moment]:
        return iter(self.moments)

    def add(self, observation: Observation) -> Moment:
        """Take in the next observation; returns what happened since the last one."""
        before = self.last
        if before is not None and _is_another(before, observation):
            self.moments = ()
            before = None
        self.last = observation
        moment = _moment(before or observation, observation)
        self.moments = (*self.moments, moment)[-self._limit :]
        return moment


def _is_another(before: Observation, now: Observation) -> bool:
    """Whether another cache took the place of one, perhaps in a folder of the same identity."""
    return before.cache != now.cache or now.stats.next_seq < before.stats.next_seq


def _moment(before: Observation, now: Observation) -> Moment:
    stats = now.stats if now.stats.rows else before.stats
    row_bytes = stats.published_bytes / max(1, stats.rows)
    return Moment(
        time=now.time,
        seconds=now.clock - before.clock,
        stats=now.stats,
        published_bytes=max(0, now.stats.inserted_rows - before.stats.inserted_rows) * row_bytes,
        evicted_bytes=max(0, now.stats.evicted_rows - before.stats.evicted_rows) * row_bytes,
        loaders=() if before is now else _loader_rates(before, now),
    )


def _loader_rates(before: Observation, now: Observation) -> tuple[LoaderRate, ...]:
    earlier = {loader.key: loader for loader in before.loaders}
    seconds = now.clock - before.clock
    return tuple(_loader_rate(earlier.get(loader.key), loader, seconds) for loader in now.loaders)


def _loader_rate(before: SeenLoader | None, now: SeenLoader, seconds: float) -> LoaderRate:
    """Since the last look, or since it was made, which was later."""

    def more(name: str) -> float:
        return float(max(0, getattr(now, name) - getattr(before, name, 0)))

    earlier = {} if before is None else before.stage_seconds
    stages = {name: max(0.0, now.stage_seconds[name] - earlier.get(name, 0.0)) for name in STAGES}
    stalls, stalled = int(more("stalls")) + now.is_waiting, more("stall_seconds")
    inside = more("seconds")  # an epoch
    return LoaderRate(
        key=now.key,
        bytes_per_second=more("bytes") / seconds if seconds else 0.0,
        stall_share=min(1.0, stalled / seconds) if seconds else 0.0,
        bottleneck=bottleneck_of(now.batches, stalls, inside, stalled, stages) if inside else "none",
    )
