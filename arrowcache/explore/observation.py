"""Observation: what one sees of a cache from outside, whoever uses it, and rates between two such looks.

The folder says what is published, the kernel's locks who leases and who waits, /proc which processes those
are, and their counters (storage/counters.py) what loaders and samplers do. Nothing is
leased, and nobody has to cooperate: cache.lock is held for as long as a listing takes. Processes of other
users hold leases that are counted, but not named; their loaders and samplers are not seen.

A `History` is pure: observations in, rates out. It keeps a bounded number of numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arrowcache.explore.columns import AnyCache
from arrowcache.proc import OpenFile, command, open_files, started
from arrowcache.reading.stats import STAGES, bottleneck_of
from arrowcache.storage.counters import (
    LOADER_LINK,
    NO_READS,
    SAMPLER_LINK,
    LoaderCounts,
    ReadCounts,
    SamplerState,
    seen_loaders,
    seen_samplers,
)
from arrowcache.storage.layout import WAIT, SegmentInfo
from arrowcache.storage.locks import (
    LOCK_TIMEOUT_SECONDS,
    UNSEEN,
    Holder,
    file_identity,
    flock_holders,
    range_holders,
)
from arrowcache.storage.overview import CacheStats
from arrowcache.storage.recovery import store_of
from arrowcache.storage.store import Store

_MAX_MOMENTS = 3600
FIRST_SEEN, PROCESS_START = "first seen", "process start"


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease, and the process that holds it.

    It is on `segments` segments, of `nbytes` allocated bytes, from `first_seq` to `last_seq`. `pid` is None
    where only that somebody leases them is known, such as another user's process. `since` is in seconds
    since 1970, and `since_is` says of what: "first seen", between two observations, or "process start":
    the lease was there at the first observation, and is younger than its process.
    """

    pid: int | None
    command: str
    first_seq: int
    last_seq: int
    segments: int
    nbytes: int
    since: float
    since_is: str


@dataclass(frozen=True, slots=True)
class WaitingWriter:
    """A writer that finds no room, since when (in seconds since 1970), and why."""

    pid: int
    command: str
    since: float
    why: str


@dataclass(frozen=True, slots=True)
class SeenLoader:
    """A loader since it was made, as its `LoaderStats` say it; with what is in progress.

    `key` tells it from others. `is_waiting`: its consumer waits at this moment. `bytes_per_second` is of the
    time inside epochs. `stage_seconds` is behind `bottleneck`. `waited` is how many of its consumer's waits
    were shorter than each of `storage.counters.WAITS` and no shorter than the one before, then longer ones.
    """

    key: int
    pid: int
    command: str
    workers: int
    shuffle: str | None
    epochs: int
    batches: int
    rows: int
    bytes: int
    seconds: float
    stall_seconds: float
    stalls: int
    is_waiting: bool
    bottleneck: str
    bytes_per_second: float
    stage_seconds: Mapping[str, float]
    waited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplerAtWork:
    """A sampler that is at a task, of which it has drawn `rows` of about `full_rows`, none of them published.

    `last_row_seconds` is since it drew its last row; None: it has drawn none. `is_waiting`: the segment is
    full, and waits for room, or for training. `skipped` samples were left out, of all its tasks; `reads` are
    those that it yields, or its source plans. Samplers of other machines, as Ray's, are not seen.
    """

    pid: int
    command: str
    pool: str
    task: int
    rows: int
    full_rows: int
    last_row_seconds: float | None
    is_waiting: bool
    skipped: int = 0
    reads: ReadCounts = NO_READS


@dataclass(frozen=True, slots=True)
class Observation:
    """A cache at one moment, `time` in seconds since 1970, `clock` by `time.monotonic`.

    `cache` is its folder's device and inode; `segments` are oldest first.
    """

    time: float
    clock: float
    path: Path
    cache: tuple[int, int]
    stats: CacheStats
    segments: tuple[SegmentInfo, ...]
    leases: tuple[HeldLease, ...]
    waiting: tuple[WaitingWriter, ...]
    loaders: tuple[SeenLoader, ...]
    samplers: tuple[SamplerAtWork, ...] = ()


def observe(
    cache: AnyCache,
    previous: Observation | None = None,
    *,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
) -> Observation:
    """Look at a cache, and at the processes that use it.

    Args:
        previous: an earlier observation, from which it is known since when leases are held.
        lock_timeout: seconds to wait for cache.lock.
    Blocks: while cache.lock is held by another; some milliseconds to look through /proc.
    Raises: FileNotFoundError: no such cache, or not any more. LockTimeoutError: names the holder.
    """
    store = store_of(cache)
    identity = file_identity(os.stat(store.folder.path))
    survey = store.survey(lock_timeout)
    now, clock = time.time(), time.monotonic()
    mine = {store.folder.lease_lock.name, *(link.rpartition("/")[2] for link in (LOADER_LINK, SAMPLER_LINK))}
    files = [file for file in open_files() if file.link.rpartition("/")[2] in mine]
    holders = range_holders(store.folder.lease_lock, files)
    still_leased = store.leased(survey.segments)
    known = None if previous is None or previous.cache != identity else previous.leases
    leases = [
        _held(holder.pid, holder.command, covered, known, now)
        for holder in holders  # but an evictor's, for a moment, is on nothing that is there
        if (covered := [segment for segment in survey.segments if segment.seq in holder.locked])
    ]
    held = [segment for segment in survey.leased if segment in still_leased]
    if unseen := [s for s in held if not any(s.seq in holder.locked for holder in holders)]:
        leases.append(_held(None, UNSEEN, unseen, known, now))  # that somebody leased all the time
    return Observation(
        time=now,
        clock=clock,
        path=store.folder.path,
        cache=identity,
        stats=survey.stats,
        segments=tuple(survey.segments),
        leases=tuple(sorted(leases, key=lambda lease: (lease.first_seq, lease.last_seq, lease.pid or 0))),
        waiting=_waiting(store, survey.segments, holders),
        loaders=tuple(map(_loader, seen_loaders(store.folder.path, files))),
        samplers=_samplers(files, store.folder.path),
    )


def _held(
    pid: int | None,
    its_command: str,
    covered: Sequence[SegmentInfo],
    known: Sequence[HeldLease] | None,
    now: float,
) -> HeldLease:
    since, since_is = now, FIRST_SEEN
    if known is None:
        start = None if pid is None else started(pid)
        since, since_is = (now, FIRST_SEEN) if start is None else (start, PROCESS_START)
    for lease in known or ():  # a lease gives up its oldest segments as it moves on
        if (lease.pid, lease.last_seq) == (pid, covered[-1].seq) and lease.first_seq <= covered[0].seq:
            since, since_is = lease.since, lease.since_is
    return HeldLease(
        pid=pid,
        command=its_command,
        first_seq=covered[0].seq,
        last_seq=covered[-1].seq,
        segments=len(covered),
        nbytes=sum(segment.allocated_bytes for segment in covered),
        since=since,
        since_is=since_is,
    )


def _waiting(
    store: Store, listed: Sequence[SegmentInfo], holders: Sequence[Holder]
) -> tuple[WaitingWriter, ...]:
    found = []
    for name in () if store.is_frozen else os.listdir(store.folder.incoming):
        path = store.folder.incoming / name
        if name.endswith(WAIT):
            try:
                since = os.stat(path).st_mtime
            except FileNotFoundError:  # it found room
                continue
            why = _why(listed, holders)
            found += [WaitingWriter(writer.pid, writer.command, since, why) for writer in flock_holders(path)]
    return tuple(sorted(found, key=lambda writer: (writer.since, writer.pid)))


def _why(listed: Sequence[SegmentInfo], holders: Sequence[Holder]) -> str:
    if not listed:
        return "the cache is full of what is being written"
    oldest = listed[0].seq
    names = list(dict.fromkeys(str(holder) for holder in holders if oldest in holder.locked))
    if not names:
        return f"the oldest segment, {oldest}, was leased, or is by {UNSEEN}"
    return f"the oldest segment, {oldest}, is leased by {' and '.join(names)}"


def _samplers(files: Sequence[OpenFile], folder: Path) -> tuple[SamplerAtWork, ...]:
    now = time.monotonic()
    return tuple(
        SamplerAtWork(
            pid=seen.pid,
            command=command(seen.pid),
            pool=seen.pool,
            task=seen.task,
            rows=seen.rows,
            full_rows=seen.full_rows,
            last_row_seconds=None if seen.last_row is None else max(0.0, now - seen.last_row),
            is_waiting=seen.state == SamplerState.WAITS,
            skipped=seen.skipped,
            reads=seen.reads,
        )
        for seen in seen_samplers(folder, files)
        if seen.state != SamplerState.IDLE
    )


def _loader(seen: LoaderCounts) -> SeenLoader:
    seconds, stall_seconds = seen.took["seconds"], seen.took["stall"]
    stages = {name: seen.took[name] for name in STAGES}
    stalls = seen.stalls + seen.waits
    return SeenLoader(
        key=seen.key,
        pid=seen.pid,
        command=command(seen.pid),
        workers=seen.workers,
        shuffle=seen.shuffle,
        epochs=seen.epochs,
        batches=seen.batches,
        rows=seen.rows,
        bytes=seen.bytes,
        seconds=seconds,
        stall_seconds=stall_seconds,
        stalls=seen.stalls,
        is_waiting=seen.waits > 0,
        bottleneck=bottleneck_of(seen.batches, stalls, seconds, stall_seconds, stages),
        bytes_per_second=seen.bytes / seconds if seconds else 0.0,
        stage_seconds=stages,
        waited=seen.waited,
    )


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

    def __init__(self, limit: int = _MAX_MOMENTS) -> None:
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
        if before is not None and (
            before.cache != observation.cache or observation.stats.next_seq < before.stats.next_seq
        ):  # another cache took the place of one, perhaps in a folder of the same identity
            self.moments, before = (), None
        self.last = observation
        moment = _moment(before or observation, observation)
        self.moments = (*self.moments, moment)[-self._limit :]
        return moment


def _moment(before: Observation, now: Observation) -> Moment:
    stats = now.stats if now.stats.rows else before.stats
    row_bytes = stats.published_bytes / max(1, stats.rows)
    seconds, earlier = now.clock - before.clock, {loader.key: loader for loader in before.loaders}
    loaders = () if before is now else now.loaders
    return Moment(
        time=now.time,
        seconds=seconds,
        stats=now.stats,
        published_bytes=max(0, now.stats.inserted_rows - before.stats.inserted_rows) * row_bytes,
        evicted_bytes=max(0, now.stats.evicted_rows - before.stats.evicted_rows) * row_bytes,
        loaders=tuple(_loader_rate(earlier.get(loader.key), loader, seconds) for loader in loaders),
    )


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
