"""Observation: what one sees of a cache at one moment from outside, whichever processes use it.

The folder says what is published, the kernel's locks who leases and who waits, /proc which processes those
are, and their pages how loaders (storage/counters.py) and samplers (storage/progress.py) do. Nothing is
leased, and nobody has to cooperate: cache.lock is held for as long as a listing takes. Processes of other
users hold leases that are counted, but not named; their loaders and samplers are not seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arrowcache.explore.walk import AnyCache
from arrowcache.reading.stats import STAGES, bottleneck_of
from arrowcache.storage.cache_lock import LOCK_TIMEOUT_SECONDS
from arrowcache.storage.counters import COUNTERS, Readout, parse_counters
from arrowcache.storage.layout import WAIT, SegmentInfo
from arrowcache.storage.locks import Holder, file_identity, flock_holders, range_holders
from arrowcache.storage.overview import CacheStats
from arrowcache.storage.page import seen_pages
from arrowcache.storage.proc import OpenFile, command, open_files, started
from arrowcache.storage.progress import NO_READS, PROGRESS, SeenReads, State, seen_samplers
from arrowcache.storage.recovery import store_of
from arrowcache.storage.store import Store

FIRST_SEEN, PROCESS_START = "first seen", "process start"
UNSEEN = "an unseen process"


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
    time inside epochs. `stage_seconds` is behind `bottleneck`.
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
    reads: SeenReads = NO_READS


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
    mine = {store.folder.lease_lock.name, *(kind.link.rpartition("/")[2] for kind in (COUNTERS, PROGRESS))}
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
        loaders=tuple(
            _loader(page.key, page.pid, shown)
            for page in seen_pages(COUNTERS, identity, files)
            if (shown := parse_counters(page.data, time.perf_counter())) is not None
        ),
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
    for name in os.listdir(store.folder.incoming):
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
            is_waiting=seen.state == State.WAITS,
            skipped=seen.skipped,
            reads=seen.reads,
        )
        for seen in seen_samplers(folder, files)
        if seen.state != State.IDLE
    )


def _loader(key: int, pid: int, shown: Readout) -> SeenLoader:
    seconds, stall_seconds = shown.took["seconds"], shown.took["stall"]
    stages = {name: shown.took[name] for name in STAGES}
    stalls = shown.stalls + shown.waits
    return SeenLoader(
        key=key,
        pid=pid,
        command=command(pid),
        workers=shown.workers,
        shuffle=shown.shuffle,
        epochs=shown.epochs,
        batches=shown.batches,
        rows=shown.rows,
        bytes=shown.bytes,
        seconds=seconds,
        stall_seconds=stall_seconds,
        stalls=shown.stalls,
        is_waiting=shown.waits > 0,
        bottleneck=bottleneck_of(shown.batches, stalls, seconds, stall_seconds, stages),
        bytes_per_second=shown.bytes / seconds if seconds else 0.0,
        stage_seconds=stages,
    )
