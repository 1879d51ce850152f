"""History: what observations of one cache, one after another, tell: rates, and what became of segments.

Pure: values in, values out. Memory is bounded: of the past it keeps numbers, and segments of the last
observation only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from arrowcache.explore.observation import HeldLease, Observation, SeenLoader
from arrowcache.reading.stats import STAGES, bottleneck_of
from arrowcache.storage.overview import CacheStats

_MOST_MOMENTS = 3600


@dataclass(frozen=True, slots=True)
class LoaderRate:
    """What a loader did between two observations.

    `stall_share`, 0 to 1, is how much of that time its consumer waited; `bottleneck` what held it up.
    """

    key: int
    pid: int
    command: str
    bytes_per_second: float
    rows_per_second: float
    stall_share: float
    bottleneck: str


@dataclass(frozen=True, slots=True)
class Moment:
    """An observation, in numbers; `published_*` and `evicted_*` count since the one before.

    Bytes are allocated ones. What was published and evicted in between was never seen: it is counted, with
    as many bytes as the mean of those that were. Of `evicted_known` it is known whether anybody leased
    them, as far as observations show, since they came after the first: `evicted_unread` were not.
    """

    time: float
    seconds: float
    stats: CacheStats
    leases: int
    published_segments: int
    published_bytes: float
    evicted_segments: int
    evicted_bytes: float
    evicted_known: int
    evicted_unread: int
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


@dataclass(slots=True)
class _Seen:
    """Segments since the first observation, by seq: how many leases on each were seen."""

    first_seq: int  # what was published before may have been leased before
    leases: Counter[int] = field(default_factory=Counter)
    known: Counter[tuple[int | None, int, float]] = field(default_factory=Counter)


class History:
    """Observations of one cache, with what happened between them. Another cache begins it anew.

    Args:
        limit: moments that are kept; the oldest go.

    `reuse` counts segments by how many leases on them were seen, those there and those evicted since.
    """

    def __init__(self, limit: int = _MOST_MOMENTS) -> None:
        self.moments: deque[Moment] = deque(maxlen=limit)
        self.last: Observation | None = None
        self.reuse_of_evicted: Counter[int] = Counter()
        self._seen = _Seen(0)

    def __len__(self) -> int:
        return len(self.moments)

    def __iter__(self) -> Iterator[Moment]:
        return iter(self.moments)

    def __bool__(self) -> bool:
        return bool(self.moments)

    def add(self, observation: Observation) -> Moment:
        """Take in the next observation; returns what happened since the last one."""
        before = self.last
        if before is None or before.cache != observation.cache or _is_anew(before, observation):
            self.moments.clear()
            self.reuse_of_evicted.clear()
            self._seen, before = _Seen(observation.stats.next_seq), None
        moment = self._moment(before, observation)
        self._count_leases(observation, before)
        self.last = observation
        self.moments.append(moment)
        return moment

    @property
    def reuse(self) -> Counter[int]:
        """Number of leases seen on a segment -> how many segments, there or evicted."""
        listed = self.last.segments if self.last is not None else ()
        return self.reuse_of_evicted + Counter(self._seen.leases[segment.seq] for segment in listed)

    @property
    def unread_share(self) -> float | None:
        """Of what was published and evicted while it was observed, the share that no lease was seen on."""
        known = sum(moment.evicted_known for moment in self.moments)
        unread = sum(moment.evicted_unread for moment in self.moments)
        return unread / known if known else None

    def _moment(self, before: Observation | None, now: Observation) -> Moment:
        published_segments = evicted_segments = evicted_known = evicted_unread = 0
        published_bytes = evicted_bytes = 0.0
        if before is not None:
            listed = {segment.seq for segment in now.segments}
            new = [s for s in now.segments if s.seq >= before.stats.next_seq]
            gone = [s for s in before.segments if s.seq not in listed]
            known = [*new, *gone] or [*now.segments]
            mean = sum(s.allocated_bytes for s in known) / len(known) if known else 0.0
            published_segments = now.stats.next_seq - before.stats.next_seq
            passed = max(0, published_segments - len(new))  # came and went unseen
            published_bytes = sum(s.allocated_bytes for s in new) + passed * mean
            evicted_segments = len(gone) + passed
            evicted_bytes = sum(s.allocated_bytes for s in gone) + passed * mean
            of_known = [s.seq for s in gone if s.seq >= self._seen.first_seq]
            leases = self._seen.leases
            evicted_known = len(of_known) + passed
            evicted_unread = sum(not leases[seq] for seq in of_known) + passed
            self.reuse_of_evicted.update(leases[s.seq] for s in gone)
            if passed:
                self.reuse_of_evicted[0] += passed
            for segment in gone:
                leases.pop(segment.seq, None)
        return Moment(
            time=now.time,
            seconds=0.0 if before is None else now.clock - before.clock,
            stats=now.stats,
            leases=len(now.leases),
            published_segments=published_segments,
            published_bytes=published_bytes,
            evicted_segments=evicted_segments,
            evicted_bytes=evicted_bytes,
            evicted_known=evicted_known,
            evicted_unread=evicted_unread,
            loaders=() if before is None else _loader_rates(before, now),
        )

    def _count_leases(self, now: Observation, before: Observation | None) -> None:
        known: Counter[tuple[int | None, int, float]] = Counter()
        epochs = _epochs_begun(before, now)
        for lease in sorted(now.leases, key=lambda lease: self._seen.known[_name(lease)] > 0):
            name = _name(lease)
            known[name] += 1
            begun = epochs.pop(lease.pid, 0)  # the leases of epochs over the same segments look like one
            is_new = known[name] > self._seen.known[name]
            for _ in range(max(begun, is_new)):
                self._seen.leases.update(
                    s.seq for s in now.segments if lease.first_seq <= s.seq <= lease.last_seq
                )
        self._seen.known = known


def _epochs_begun(before: Observation | None, now: Observation) -> dict[int | None, int]:
    """How many epochs the loaders of each process began since the last observation."""
    if before is None:
        return {}
    earlier = {loader.key: loader.epochs for loader in before.loaders}
    begun: Counter[int | None] = Counter()
    for loader in now.loaders:
        begun[loader.pid] += max(0, loader.epochs - earlier.get(loader.key, 0))
    return dict(begun)


def _is_anew(before: Observation, now: Observation) -> bool:
    """Whether another cache took the place of one, in a folder of the same identity."""
    return now.stats.next_seq < before.stats.next_seq


def _name(lease: HeldLease) -> tuple[int | None, int, float]:
    """What stays of a lease from one observation to the next."""
    return lease.pid, lease.last_seq, lease.since


def _loader_rates(before: Observation, now: Observation) -> tuple[LoaderRate, ...]:
    earlier = {loader.key: loader for loader in before.loaders}
    seconds = now.clock - before.clock
    return tuple(_loader_rate(earlier.get(loader.key), loader, seconds) for loader in now.loaders)


def _loader_rate(before: SeenLoader | None, now: SeenLoader, seconds: float) -> LoaderRate:
    """Since the last look, or since it was made, which was later."""

    def more(count: float, name: str) -> float:
        return max(0.0, count - (getattr(before, name) if before is not None else 0))

    stages = {
        name: max(0.0, now.stage_seconds[name] - (before.stage_seconds[name] if before is not None else 0.0))
        for name in STAGES
    }
    stall_seconds = more(now.stall_seconds, "stall_seconds")
    stalls = int(more(now.stalls, "stalls")) + now.is_waiting
    is_inside = more(now.seconds, "seconds") > 0  # an epoch
    return LoaderRate(
        key=now.key,
        pid=now.pid,
        command=now.command,
        bytes_per_second=more(now.bytes, "bytes") / seconds if seconds else 0.0,
        rows_per_second=more(now.rows, "rows") / seconds if seconds else 0.0,
        stall_share=min(1.0, stall_seconds / seconds) if seconds else 0.0,
        bottleneck=bottleneck_of(now.batches, stalls, more(now.seconds, "seconds"), stall_seconds, stages)
        if is_inside
        else "none",
    )
