"""Store: the cache folder's protocol, one object a process and cache.

It owns the order of things: list, decide (eviction.py), lock, effect (folder.py). Guarantees:
- allocated bytes of the folder never exceed the capacity, half-written files included: room is
  made before a part is created, and the part counts in full from its creation under cache.lock;
- a segment appears whole, under a seq that no segment had before, or not at all;
- a leased segment is not evicted, and no segment before an older one;
- every wait has a deadline and names what it waits for;
- nothing of a frozen cache changes: `locked` and `show_writing`, which all changes begin with, refuse it. Who
  looks at one, or leases its segments, takes no lock: `looking` and `lease_on` see to that.
cache.lock is held for decisions, renames and the sweeping of debris, never while data is written. Victims are
unlinked under it only where room must be there when a call returns, as for `resize`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arrowcache.arrow.segment import EncodedSegment
from arrowcache.errors import CacheFormatError, CacheFrozenError, CacheFullError, warn
from arrowcache.limits import Limits
from arrowcache.os_errors import MORE_ROOM, explained, explaining
from arrowcache.storage.eviction import choose_victims, each_once, skip_for_headroom, superseded
from arrowcache.storage.folder import Folder, PartFile
from arrowcache.storage.layout import (
    CACHE_LOCK,
    FREED,
    MAX_SEQ,
    PART,
    WAIT,
    SegmentInfo,
    listing_digest,
    parse_segment_name,
    parse_task_name,
    segment_name,
)
from arrowcache.storage.lease import FrozenLease, Lease, own_leases
from arrowcache.storage.locks import LOCK_TIMEOUT_SECONDS, LockFile, file_identity, held, holder_names
from arrowcache.storage.overview import CacheStats, Survey
from arrowcache.storage.pace import Flow, Pace
from arrowcache.storage.settings import (
    BOOKKEEPING_BYTES,
    PART_SLACK_BYTES,
    Settings,
    beyond_disk,
    require_capacity,
    room_of_one,
    room_of_two,
)
from arrowcache.storage.usage import Usage
from arrowcache.units import format_bytes, format_count

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class RoomPolicy:
    """The policy of a writer whose segment finds no room.

    `timeout_seconds` bounds the wait (None means no bound); `is_cancelled` ends it early. Readers of
    this very process are waited for only if `in_background`: then another thread can end them.
    """

    on_full: str = "wait"
    timeout_seconds: float | None = None
    is_cancelled: Callable[[], bool] = lambda: False
    in_background: bool = False


class Published(NamedTuple):
    """The result of a publish. `segment` is None if one of the same task is listed already."""

    segment: SegmentInfo | None
    waiting_seconds: float


class Leased(NamedTuple):
    """Segments, oldest first, and the lease on them, which is None where there are none.

    `next_seq` is the number of the next segment. `left_out_rows` is how many rows were left to writers.
    """

    segments: list[SegmentInfo]
    lease: Lease | None
    next_seq: int
    left_out_rows: int


class _Listing(NamedTuple):
    """The content of segments/ when it was last listed. Segments never change: one stat a name."""

    names: list[str]  # as the folder gave them
    segments: dict[str, SegmentInfo]  # by name, oldest first
    foreign: list[str]  # names that are no segment's


def _in_order(
    segments: dict[str, SegmentInfo], known: dict[str, SegmentInfo]
) -> tuple[dict[str, SegmentInfo], list[str]]:
    """Oldest first, and the names of those whose number another one has.

    Only one is a segment, or their rows would be mixed up: the one that was there before.
    """
    by_seq: dict[int, SegmentInfo] = {}
    doubles = []
    for name in sorted(segments):
        info = segments[name]
        other = by_seq.get(info.seq)
        if other is None or name in known:
            by_seq[info.seq] = info
        if other is not None:
            doubles.append(other.name if name in known else name)
    return {info.name: info for info in by_seq.values()}, doubles


class Cancelled(Exception):
    """A wait for room was ended by its RoomPolicy; nothing was published."""


class _Blocked(Enum):
    """The reason why a segment gets no room."""

    LEASED = "leased by other processes, or by a reader here that is ending: waiting may help"
    PACE = "training is behind the cache's pace: waiting helps once it goes on"
    OWN_LEASE = "leased by this very process, whose reader goes on"
    DISK_FULL = "the disk is full, whatever is evicted"
    KEPT = "the cache of a dataset keeps what it has"
    TOO_LARGE = "larger than the capacity"


_WORTH_WAITING = (_Blocked.LEASED, _Blocked.PACE)


class Store:
    """The protocol over one cache folder. Thread-safe; usable after fork and by many processes."""

    def __init__(self, folder: Folder, settings: Settings, *, check_bytes: bool = False) -> None:
        self.folder = folder
        self.settings = settings
        self.check_bytes = check_bytes
        self._usages = Usage(folder), Usage(folder, is_frozen=True)
        self._listing = _Listing([], {}, [])  # replaced as a whole

    @property
    def check(self) -> str:
        """The checks when a segment is first mapped, as `open_store` takes them."""
        return "bytes" if self.check_bytes else "structure"

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that no other cache has, nor one that has its path later. Raises: OSError: it is gone."""
        if self.settings.frozen is not None:  # a copy of it may have no lock files
            return file_identity(os.stat(self.folder.segments)), self.settings.frozen.id
        status = os.stat(self.folder.lease_lock)  # never written to: its time tells reused inodes apart
        return file_identity(status), status.st_mtime_ns

    @property
    def usage(self) -> Usage:
        """The counts and signs of the cache."""
        return self._usages[self.is_frozen]

    @property
    def is_frozen(self) -> bool:
        """True if the cache was frozen when its settings were last read."""
        return self.settings.frozen is not None

    def require_thawed(self) -> None:
        """Check that the cache was not frozen when its settings were last read.

        Raises: CacheFrozenError: it was, and still is. CacheFormatError, OSError: as `refresh_settings`.
        """
        if self.is_frozen:
            self.refresh_settings()
            raise CacheFrozenError(
                f"{self.folder.path} is frozen, and does not change: write to another cache, or call "
                "cache.thaw() first, once nobody reads it elsewhere"
            )

    @contextmanager
    def locked(self, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
        """Hold cache.lock, polled until the deadline, to change what is there. The settings are read anew.

        Raises: CacheFrozenError: it is frozen. LockTimeoutError: names the holder. CacheFormatError: another
            cache has its place. OSError: the folder is gone or read-only; the message says what to do, also
            for an OSError of the `with` block.
        """
        self.require_thawed()
        with self._held(timeout_seconds):
            self.require_thawed()
            yield

    @contextmanager
    def looking(self, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Iterator[None]:
        """As `locked`, to look at what is there; of a cache that is known to be frozen, without the lock."""
        if not self.is_frozen:
            with self._held(timeout_seconds):
                yield
            return
        with explaining(self.folder.path):
            self.refresh_settings()
            yield

    @contextmanager
    def _held(self, timeout_seconds: float) -> Iterator[None]:
        with explaining(self.folder.path), held(self.folder.cache_lock, timeout_seconds):
            self.refresh_settings()
            yield

    def show_writing(self, *, of_notes: bool = False) -> ExitStack:
        """Show that somebody writes, as `Usage.show_writing`; or has notes to be written, as `show_noting`.

        Raises: CacheFrozenError: the cache is frozen. Whoever freezes it sees the sign, or is seen here.
        """
        self.require_thawed()
        sign = self.usage.show_noting() if of_notes else self.usage.show_writing()
        try:
            with suppress(OSError, CacheFormatError):  # there is no cache now: a publish says so
                self.refresh_settings()
            self.require_thawed()
        except BaseException:
            sign.close()
            raise
        return sign

    def segments(self) -> list[SegmentInfo]:
        """The published segments, oldest first. Without cache.lock they may be evicted at once.

        Raises: OSError: the folder is gone, or its disk failed; says what to do.
        """
        with explaining(self.folder.path):
            return list(self._list().segments.values())

    def look_ahead(self) -> Iterator[None]:
        """Do a part of the work of a call of `segments` that comes soon, one slice a step.

        Raises: OSError: as `segments`.
        """
        with explaining(self.folder.path):
            names = self.folder.names_in_segments()
        yield
        with explaining(self.folder.path):
            self._list(names)
        yield

    def _list(self, names: list[str] | None = None) -> _Listing:
        known = self._listing
        if names is None:
            names = self.folder.names_in_segments()
        if names == known.names:
            return known
        segments = known.segments.copy()
        others = set(names) ^ segments.keys()
        for name in others & segments.keys():
            del segments[name]
        last = next(reversed(segments.values()), None)
        foreign, passing, rises = [], False, True
        for name in sorted(others.difference(known.segments)):
            info = self.folder.segment_info(name)
            if info is not None:
                rises = rises and (last is None or info.seq > last.seq)
                segments[name] = last = info
            elif parse_segment_name(name) is None:
                foreign.append(name)
            else:
                passing = True  # gone by now, or no file: look again next time
        if not rises:
            segments, doubles = _in_order(segments, known.segments)
            foreign += doubles
        if self.settings.frozen is not None and self.digest(segments.values()) != self.settings.frozen.digest:
            self.refresh_settings()  # it may be thawed
            raise CacheFormatError(
                f"{self.folder.path} is an incomplete copy: its {format_count(len(segments), 'segment')} and "
                "its notes are not those of the cache that was frozen. Copy it again, with cache.json last"
            )
        self._listing = _Listing([] if passing else names, segments, foreign)
        return self._listing

    def digest(self, segments: Iterable[SegmentInfo]) -> str:
        """The digest of these segments and the notes that are there, which a frozen cache has."""
        notes = [(file.name, self.folder.note_bytes(file)) for file in self.folder.note_files()]
        return listing_digest([*((segment.name, segment.nbytes) for segment in segments), *notes])

    def look_anew(self) -> None:
        """Forget what was listed: something else may have the name of a segment by now."""
        self._listing = _Listing([], {}, [])

    def files_of(self, segments: Sequence[SegmentInfo]) -> tuple[str, list[str]]:
        """The folder, and the names there, of files in which the segments' buffers lie as plain bytes.

        Whoever reads rows of a segment asks here where, and reads at the places of its `Layout`.
        """
        return os.fspath(self.folder.segments), [segment.name for segment in segments]

    def path_of(self, segment: SegmentInfo) -> Path:
        """The path of a segment's file in `files_of`."""
        folder, names = self.files_of([segment])
        return Path(folder, *names)

    # publishing

    def publish(
        self,
        segment: EncodedSegment,
        task: str = "",
        policy: RoomPolicy | None = None,
        on_visible: Callable[[], None] = lambda: None,
        *,
        syncs: bool = False,
    ) -> Published:
        """Write a segment and make it visible.

        Args:
            on_visible: called as soon as it is: what is raised after that, as by Ctrl-C, is no reason to
                publish its rows again. Quick; raises nothing, and is called again where Ctrl-C cuts it short.
            syncs: have it on the disk before this returns, also where the cache is not durable.
        Blocks: while the segment is written, and as `policy` says while there is no room. Where the disk is
            full before the cache is, up to three of the oldest segments leave for room, with each call.
        Raises: CacheFullError, LockTimeoutError, Cancelled, OSError; nothing is left behind.
        """
        policy = policy or RoomPolicy()
        with self.show_writing():
            for left in reversed(range(_DISK_FULL_ATTEMPTS)):
                started = time.monotonic()
                part: PartFile | None = None
                try:
                    part = self._make_room(segment.nbytes, policy)
                    waited = time.monotonic() - started
                    part.allocate(segment.nbytes)
                    part.write(segment.pieces)
                    if self.settings.durable or syncs:
                        part.sync()
                    info = self._link(part, segment.rows, task, on_visible)
                    if self.settings.durable or syncs:
                        self._sync_names()  # after the bytes: a name that outlasts a power cut has them
                    return Published(info, waited)
                except OSError as error:
                    if error.errno not in _DISK_FULL:
                        raise explained(error, self.folder.path) from None
                finally:
                    if part is not None:
                        part.discard()
                if not left or self.settings.dataset is not None:
                    break
                self._evict(segment.nbytes)  # not the last time: it would go in vain
        raise CacheFullError(self._why(segment.nbytes, _Blocked.DISK_FULL, policy))

    def _link(
        self, part: PartFile, rows: int, task: str, on_visible: Callable[[], None]
    ) -> SegmentInfo | None:
        with self.locked():
            if task and any(segment.task == task for segment in self.segments()):
                self._end_task(task)
                return None
            record = self.folder.read_record()
            if record.next_seq >= MAX_SEQ:
                raise CacheFormatError(
                    f"{self.folder.segments} has a segment of the last number there is, "
                    f"{record.next_seq - 1}: remove it, and {CACHE_LOCK}"
                )
            name = segment_name(record.next_seq, rows, task)
            info = part.info(name)  # before readers see it: what fails later has its rows published again
            self.folder.write_record(replace(record, next_seq=record.next_seq + 1))
            try:
                self.folder.link(part, name)
                on_visible()
            except OSError:
                raise
            except BaseException:  # Ctrl-C, before either call, in it or after it
                if os.path.lexists(self.folder.segments / name):
                    on_visible()
                raise
            part.discard()
            self.usage.add_inserted(record.next_seq, rows)
            self._end_task(task)
        return info

    def _end_task(self, task: str) -> None:
        """Note that a task is published, if it is to be drawn until it is. Under cache.lock."""
        if (parsed := parse_task_name(task)) is not None:
            with suppress(OSError):  # its segment tells it as well, as long as it is there
                self.folder.end_task(*parsed)

    def _sync_names(self) -> None:
        try:
            self.folder.sync_segments()
        except OSError as error:  # raising would have its rows published again: readers see them already
            warn(f"a segment was published, but may be lost if the machine stops now: {error}")

    def _make_room(self, nbytes: int, policy: RoomPolicy) -> PartFile:
        """Make room, and reserve it: a locked part that counts as `nbytes` from now on."""
        started = time.monotonic()
        warned, pause = False, 0.005
        sign: PartFile | None = None
        before: PartFile | list[Path] | _Blocked | None = None
        try:
            while True:
                with self.locked():
                    outcome = self._try_reserve(nbytes)
                    if outcome is _Blocked.OWN_LEASE and policy.in_background:
                        outcome = _Blocked.LEASED
                    if sign is None and outcome in _WORTH_WAITING and policy.on_full == "wait":
                        sign = self.folder.new_wait()
                    if sign is not None and before is _Blocked.PACE and outcome is _Blocked.LEASED:
                        sign.begin_anew()  # no lease was in the way until now
                before = outcome
                if isinstance(outcome, PartFile):
                    return outcome
                if isinstance(outcome, list):
                    for path in outcome:
                        self.folder.remove_unlocked(path)
                    continue
                if policy.is_cancelled():
                    raise Cancelled(f"a wait for {format_bytes(nbytes)} was cancelled")
                waited = time.monotonic() - started
                for_room = "" if outcome is _Blocked.PACE else " for room"
                if policy.on_full == "raise" or outcome not in _WORTH_WAITING:
                    raise CacheFullError(self._why(nbytes, outcome, policy))
                if policy.timeout_seconds is not None and waited >= policy.timeout_seconds:
                    raise CacheFullError(
                        f"waited {waited:.1f} s{for_room}: {self._why(nbytes, outcome, policy)}"
                    )
                if waited > Limits.current.lock_warning_seconds and not warned:
                    warned = True
                    why = self._why(nbytes, outcome, policy)
                    warn(f"a writer has been waiting {waited:.0f} s{for_room}: {why}")
                time.sleep(pause)
                pause = min(2 * pause, 0.2)
        finally:
            if sign is not None:
                sign.discard()

    def _try_reserve(self, nbytes: int) -> PartFile | list[Path] | _Blocked:
        """One attempt, under cache.lock.

        Returns: the part; or what was retired, to be unlinked before the next attempt; or what
            is in the way.
        """
        folder = self.folder
        listed = self.segments()
        if self._why_paced(listed):
            return _Blocked.PACE
        block = os.statvfs(folder.path).f_frsize
        needed = -(-nbytes // block) * block + PART_SLACK_BYTES + BOOKKEEPING_BYTES
        excess = self.allocated_bytes(listed) + needed - self.settings.capacity_bytes
        if excess <= 0:
            part = folder.new_part()
            try:
                part.reserve(nbytes)
            except BaseException:
                part.discard()
                raise
            return part
        if folder.sweep():
            return []
        if self.settings.dataset is not None and (gone := self._retire_unleased(superseded(listed))[0]):
            return [path for path, _ in gone]
        if quarantined := folder.quarantined_names():
            folder.drop_quarantined(quarantined[0])
            return []
        if self.settings.dataset is not None:
            return _Blocked.KEPT
        if self._evictable_bytes(listed) >= excess:  # else samples would go in vain
            return [path for path, _ in self._retire(listed, excess)]
        if listed and own_leases(folder.lease_lock, listed[0].seq):
            self._end_idle_leases(listed)
            left = own_leases(folder.lease_lock, listed[0].seq)
            if any(lease.stays(listed[0].seq) for lease in left):
                return _Blocked.OWN_LEASE
            return _Blocked.LEASED if left else []
        nothing_will_leave = not listed and not any(map(folder.locked_incoming, (PART, FREED)))
        return _Blocked.TOO_LARGE if nothing_will_leave else _Blocked.LEASED

    def _end_idle_leases(self, listed: list[SegmentInfo]) -> None:
        """End leases on the oldest segment of readers of this process that are between two epochs."""
        for lease in own_leases(self.folder.lease_lock, listed[0].seq) if listed else ():
            release = lease.on_contention
            if release is not None:
                release()

    def _retire(self, listed: list[SegmentInfo], excess: int) -> list[tuple[Path, SegmentInfo]]:
        """Move victims out of segments/, each under its exclusive lock byte; under cache.lock.

        Returns: their new paths, to be unlinked once cache.lock is released.
        """
        with LockFile(self.folder.lease_lock) as file:
            victims = choose_victims(
                listed, lambda segment: not file.try_range(segment.seq, 1, exclusive=True), excess
            )
            retired = [(self.folder.retire(victim.name), victim) for victim in victims]
        if victims:
            self.folder.drop_notes_before(victims[-1].seq + 1)
        self.usage.add_evicted(victims)
        return retired

    def allocated_bytes(self, listed: list[SegmentInfo]) -> int:
        """Bytes that the whole folder takes on the disk, half-written files included."""
        published = sum(segment.allocated_bytes for segment in listed)
        return published + self.folder.incoming_bytes() + self.folder.other_bytes(self._listing.foreign)

    def refresh_settings(self) -> None:
        """Read the settings anew: another process may have resized the cache.

        Raises: CacheFormatError: another cache has its place by now, or it was frozen and is no more.
            OSError: none has.
        """
        found = self.folder.read_settings(self.settings)
        if found is self.settings:
            return
        if found.dataset != self.settings.dataset or found.schema != self.settings.schema:
            holds = found.dataset or "other columns"
            raise CacheFormatError(
                f"{self.folder.path} was removed, and is another cache now, of {holds}: open that one"
            )
        if self.settings.frozen != found.frozen:
            if self.settings.frozen is not None:  # a job's readers may have begun different epochs
                raise CacheFormatError(
                    f"{self.folder.path} was frozen as it was opened here, and thawed since: open it anew"
                )
            self.look_anew()
        self.settings = found

    def _why(self, nbytes: int, blocked: _Blocked, policy: RoomPolicy) -> str:
        """The fact, the numbers and the way out; asks /proc, so never under cache.lock."""
        listed = self.segments()
        if blocked is _Blocked.PACE:
            wait = "" if policy.on_full == "wait" else ", or pass on_full='wait'"
            return (
                f"{self._why_paced(listed) or 'training has just caught up'}: train on, or set another pace "
                f"with cache.set_pace(){wait}"
            )
        leased = self.leased(listed)
        text = (
            f"segment needs {format_bytes(nbytes)}, {format_bytes(self._evictable_bytes(listed))} of "
            f"{format_bytes(self.settings.capacity_bytes)} can be freed"
        )
        if blocked is _Blocked.DISK_FULL:
            return f"{text}, and the disk is full: {MORE_ROOM}"
        if blocked is _Blocked.TOO_LARGE:
            return f"{text}, and it never can be enough: raise the capacity with cache.resize()"
        if blocked is _Blocked.KEPT:
            return (
                f"segment needs {format_bytes(nbytes)}, and the cache of a dataset keeps what it has in a "
                f"capacity of {format_bytes(self.settings.capacity_bytes)}: raise that with cache.resize()"
            )
        if leased:
            oldest = leased[0].seq
            names = holder_names(self.folder.lease_lock, oldest)
            text += f" ({format_count(len(leased), 'segment')} leased, the oldest of them by {names})"
        if blocked is _Blocked.OWN_LEASE:
            return (
                f"{text}; this very process reads them, so waiting would not end: close its "
                "snapshots or end its epoch, open the writer before an epoch, which then leaves the headroom "
                "to it, raise capacity, or raise headroom"
            )
        wait = ", or pass on_full='wait'" if policy.on_full == "raise" else ""
        return f"{text}; raise capacity, or raise headroom{wait}"

    # pace

    def flow(self, listed: list[SegmentInfo]) -> Flow:
        """Return the rows inserted and served since the pace was set, and those that are listed."""
        usage = self.usage.record()
        return Flow(
            max(0, usage.inserted_rows - usage.paced_inserted_rows),
            usage.served_rows - usage.paced_served_rows,
            sum(segment.rows for segment in listed),
        )

    def set_pace(self, pace: Pace | None) -> None:
        """Write the pace to the settings, and begin its counts anew. Blocks: for cache.lock."""
        with self.locked():
            self.usage.begin_pace()  # first: who is killed in between leaves the pace that was
            self.settings = replace(self.settings, pace=pace)
            self.folder.write_settings(self.settings)

    def _why_paced(self, listed: list[SegmentInfo]) -> str:
        """Return the reason why writers wait for training. Empty if they do not, as while a loader waits."""
        pace, why = self.settings.pace, ""
        if pace is not None and not self.is_frozen:
            flow = self.flow(listed)
            why = pace.keeps_sampler(flow)
            if why and self._fills(listed):  # asked last: it looks at the disk
                why = pace.keeps_sampler(flow._replace(fills=True))
        return "" if why and self.usage.a_loader_waits() else why

    def _fills(self, listed: list[SegmentInfo]) -> bool:
        """True if a full segment finds room without an eviction."""
        holds, allocated = self._holds_and_allocated_bytes(listed)
        return holds - allocated >= room_of_one(self.settings.segment_bytes)

    def has_room(self) -> bool:
        """True if a full segment finds room without an eviction. Reads the folder and its settings.

        Parts that were merged, and that nobody leases, count as free: who needs room takes them back.
        Raises: OSError, CacheFormatError: as `refresh_settings`.
        """
        self.refresh_settings()
        if self.is_frozen:
            return False
        listed, needed = self.segments(), room_of_one(self.settings.segment_bytes)
        room = self.settings.capacity_bytes - self.allocated_bytes(listed)
        if room < needed and self.settings.dataset is not None and (leaving := superseded(listed)):
            leased = {segment.seq for segment in self.leased(leaving)}
            room += sum(segment.allocated_bytes for segment in leaving if segment.seq not in leased)
        return room >= needed

    # leasing and reading

    def lease(
        self, where: Callable[[SegmentInfo], bool] | None = None, *, yields_since: float | None = None
    ) -> Leased:
        """Lease the published segments that `where` accepts, without parts beside what they were merged into.

        Args:
            yields_since: None leases all. A number leaves the headroom's oldest segments to writers if
                somebody writes, or if a segment of this number or a higher one was published;
                `math.inf`: if somebody writes.
        """
        with self.looking():
            listed = self.segments()
            next_seq = self._next_seq(listed)
            left_out: list[SegmentInfo] = []
            may_yield = yields_since is not None and not self.is_frozen
            if may_yield and (next_seq > (yields_since or 0) or self.usage.somebody_writes()):
                count = self._headroom_segments(listed)
                listed, left_out = listed[count:], listed[:count]
            if not listed:
                return Leased([], None, next_seq, 0)
            lease = self.lease_on(listed)
        if where is not None:
            try:
                listed = [segment for segment in listed if where(segment)]
                left_out = [segment for segment in left_out if where(segment)]
            except BaseException:
                lease.close()
                raise
        if self.settings.dataset is not None:  # one copy of each item; parts alone, where `where` wants these
            listed, leaving = each_once(listed), listed
            for segment in {*leaving}.difference(listed):
                lease.give_up(segment.seq)
        left_out_rows = sum(segment.rows for segment in left_out)
        if not listed:
            lease.close()
            return Leased([], None, next_seq, left_out_rows)
        lease.narrow(listed[0].seq, listed[-1].seq)
        return Leased(listed, lease, next_seq, left_out_rows)

    def lease_again(self, listed: Sequence[SegmentInfo], also: Callable[[], None]) -> Leased:
        """Lease segments that were listed before, oldest first, without those that left. Lists nothing.

        For a moment: a writer of this process waits for its end, and does not raise.

        Args:
            also: called under cache.lock.
        """
        with self.locked():
            also()
            next_seq = self.folder.read_record().next_seq
            there = [segment for segment in listed if self.folder.segment_info(segment.name) is not None]
            if not there:
                return Leased([], None, next_seq, 0)
            lease = Lease(self.folder.lease_lock, there[0].seq, there[-1].seq)
            lease.is_ending = True
            return Leased(there, lease, next_seq, 0)

    def lease_on(self, segments: Sequence[SegmentInfo]) -> Lease:
        """Lease from the first of some segments to the last; without a lock, if the cache is frozen.

        Raises: OSError: as `Lease`.
        """
        kind = FrozenLease if self.is_frozen else Lease
        return kind(self.folder.lease_lock, segments[0].seq, segments[-1].seq)

    def _next_seq(self, listed: Sequence[SegmentInfo]) -> int:
        if not self.is_frozen:
            return self.folder.read_record().next_seq
        return listed[-1].seq + 1 if listed else 0

    def _headroom_segments(self, listed: list[SegmentInfo]) -> int:
        if not self.settings.headroom_bytes:
            return 0
        holds, allocated = self._holds_and_allocated_bytes(listed)
        headroom = self.settings.with_capacity(holds).headroom_bytes
        wanted = max(headroom, room_of_two(self.settings.segment_bytes))
        return skip_for_headroom(listed, holds - allocated, wanted)

    def _holds_and_allocated_bytes(self, listed: list[SegmentInfo]) -> tuple[int, int]:
        """The most that the folder may hold, and what it holds; a disk may hold less than the capacity."""
        allocated, status = self.allocated_bytes(listed), os.statvfs(self.folder.path)
        return min(self.settings.capacity_bytes, allocated + status.f_bavail * status.f_frsize), allocated

    def held_up_seconds(self, covers: Callable[[int], bool]) -> float:
        """Seconds that a writer has waited for room that a lease takes. 0.0 if none waits for this lease.

        Args:
            covers: tells whether the lease is on the segment of a number.
        Takes no lock. Raises: OSError: the folder is gone.
        """
        since = None if self.is_frozen else self.folder.waiting_since()
        if since is None:
            return 0.0
        listed = self.segments()
        leased = self.leased(listed)
        if not leased or not covers(leased[0].seq) or self._why_paced(listed):
            return 0.0
        return max(0.0, time.time() - since)

    # looking after it

    def evict_beyond_capacity(self) -> None:
        """Shrink the folder to the capacity, after a power cut brought files back; under cache.lock."""
        self._fit(self.settings.capacity_bytes, 0, "")

    def drop_quarantined(self, limit_bytes: int | None = None) -> int:
        """Drop the oldest quarantined segments until the folder fits its limit; under cache.lock.

        Args:
            limit_bytes: None means the capacity, with room for the reasons beside quarantined segments.
        Returns: the bytes by which the folder is still above the limit. Negative if it is below.
        """
        if limit_bytes is None:
            limit_bytes = self.settings.capacity_bytes - BOOKKEEPING_BYTES // 2
        listed = self.segments()
        while (excess := self.allocated_bytes(listed) - limit_bytes) > 0:
            if not (names := self.folder.quarantined_names()):
                break
            self.folder.drop_quarantined(names[0])
        return excess

    def _fit(self, capacity_bytes: int, needed_bytes: int, what: str) -> list[SegmentInfo]:
        """Shrink the folder to a capacity, less `needed_bytes`, now; under cache.lock.

        Quarantined segments leave first, then the oldest segments, which are unlinked under the lock: when it
        is released, the capacity holds.

        Args:
            what: the subject of the error. Empty means no error: as much leaves as can.
        Returns: the segments that left.
        Raises: CacheFullError: what is leased does not let it; nothing left then.
        """
        limit, listed = capacity_bytes - needed_bytes, self.segments()
        excess = self.allocated_bytes(listed) - limit
        if excess <= 0:
            return []
        evictable = self._evictable_bytes(listed) + self.folder.quarantined_bytes()
        if what and excess > evictable:
            raise CacheFullError(
                f"{what} needs {format_bytes(excess)} to be freed, and {format_bytes(evictable)} of "
                f"{format_bytes(self.settings.capacity_bytes)} can be, since the rest is leased: end "
                "the epochs and close the snapshots that read it, raise capacity, or raise headroom"
            )
        retired = self._retire(listed, self.drop_quarantined(limit))
        for path, _ in retired:
            self.folder.remove(path)
        return [segment for _, segment in retired]

    def require_room(self, nbytes: int) -> None:
        """Evict as much as a small file needs that is no segment; under cache.lock.

        Raises: CacheFullError: what is leased leaves no room; nothing was evicted then.
        """
        block = os.statvfs(self.folder.path).f_frsize
        needed = -(-nbytes // block) * block + block  # its folder may grow
        self._fit(self.settings.capacity_bytes, needed, f"a file of {format_bytes(nbytes)}")

    def evict(self, nbytes: int) -> list[SegmentInfo]:
        """Evict the oldest unleased segments until `nbytes` are freed; returns those that went.

        The pace counts anew: what left so cannot be served any more.
        """
        gone = self._evict(nbytes)
        if gone:
            with self.locked():
                self.usage.begin_pace()
        return gone

    def _evict(self, nbytes: int) -> list[SegmentInfo]:
        with self.locked():
            listed = self.segments()
            self._end_idle_leases(listed)
            retired = self._retire(listed, nbytes)
        for path, _ in retired:
            self.folder.remove_unlocked(path)
        return [segment for _, segment in retired]

    def take_back(
        self, choose: Callable[[list[SegmentInfo]], Sequence[SegmentInfo]]
    ) -> tuple[list[SegmentInfo], list[SegmentInfo]]:
        """Remove segments wherever they are in the order, which count as never published.

        For an import whose file turns out to be bad, and for segments that were merged into another one. The
        newest go first, so that who is killed meanwhile leaves the file's first rows.

        Args:
            choose: returns them, of all that are listed; under cache.lock.
        Returns: those that went, and those that stay, since somebody leases them.
        """
        with self.locked():
            listed = self.segments()
            self._end_idle_leases(listed)
            retired, leased = self._retire_unleased(choose(listed))
        for path, _ in retired:
            self.folder.remove_unlocked(path)
        return [segment for _, segment in retired], leased

    def _retire_unleased(
        self, segments: Sequence[SegmentInfo]
    ) -> tuple[list[tuple[Path, SegmentInfo]], list[SegmentInfo]]:
        """Move segments out of segments/, the newest first, as `_retire` does; under cache.lock.

        Returns: those that went, with their new paths, and those that somebody leases.
        """
        retired, leased = [], []
        with LockFile(self.folder.lease_lock) as file:
            for segment in reversed(segments):
                if file.try_range(segment.seq, 1, exclusive=True):
                    retired.append((self.folder.retire(segment.name), segment))
                else:
                    leased.append(segment)
        self.usage.take_back(sum(segment.rows for _, segment in retired))
        return retired, leased

    def resize(self, capacity_bytes: int) -> list[SegmentInfo]:
        """Change the capacity, evicting what no longer fits; returns the segments that went.

        Raises: ValueError: it does not fit the other sizes. CacheFullError: leased segments do not fit.
            Nothing is changed then. Warns where it is raised to more than the disk holds.
        """
        allocated = self.allocated_bytes(self.segments())
        why = beyond_disk(capacity_bytes, allocated, self.folder.free_bytes())
        if why and capacity_bytes > self.settings.capacity_bytes:
            warn(why)  # first: as an error it changes nothing
        with self.locked():
            settings = self.settings.with_capacity(capacity_bytes)
            require_capacity(settings, is_new=False)
            self._end_idle_leases(self.segments())
            self.folder.sweep()
            shrinks = capacity_bytes < self.settings.capacity_bytes
            what = f"a capacity of {format_bytes(capacity_bytes)}" if shrinks else ""
            gone = self._fit(capacity_bytes, 2 * PART_SLACK_BYTES, what)
            if gone:
                self.usage.begin_pace()  # what left so cannot be served any more
            self.settings = settings
            self.folder.write_settings(self.settings)
        return gone

    def have_capacity(self, capacity_bytes: int) -> None:
        """Resize to the capacity that the cache is opened with, with a warning of rows that leave for it.

        Raises: as `resize`.
        """
        before = self.settings.capacity_bytes
        if before == capacity_bytes:
            return
        if gone := self.resize(capacity_bytes):
            rows = format_count(sum(segment.rows for segment in gone), "row")
            warn(
                f"{self.folder.path} was opened with a capacity of {format_bytes(capacity_bytes)}, and had "
                f"{format_bytes(before)}: the oldest {rows} left. To keep all, give the capacity that it has"
            )

    def _evictable_bytes(self, listed: list[SegmentInfo]) -> int:
        leased = self.leased(listed)
        oldest_leased = leased[0].seq if leased else listed[-1].seq + 1 if listed else 0
        return sum(segment.allocated_bytes for segment in listed if segment.seq < oldest_leased)

    def stats(self) -> CacheStats:
        """Count; takes cache.lock as `survey` does."""
        return self.survey().stats

    def survey(self, timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Survey:
        """Counts and segments of one moment. Takes cache.lock, but not while it asks about new files.

        Raises: LockTimeoutError, OSError: as `locked`.
        """
        self.segments()  # known before the lock is taken: who only looks keeps nobody waiting
        with self.looking(timeout_seconds):
            listed = self.segments()
            leased = self.leased(listed)
            usage = self.usage.record()
            rows = np.array([segment.rows for segment in listed], np.int64)
            served = self.usage.served(np.array([segment.seq for segment in listed], np.int64))
            items = cached_items = 0
            if self.settings.dataset is not None:
                items = self.settings.dataset.length
                cached_items = min(items, sum(segment.rows for segment in each_once(listed)))
            published_bytes = sum(segment.allocated_bytes for segment in listed)
            allocated_bytes, incoming_bytes, quarantined, waiting_writers = published_bytes, 0, 0, 0
            if not self.is_frozen:  # a copy may lack the folders
                allocated_bytes, incoming_bytes = self.allocated_bytes(listed), self.folder.incoming_bytes()
                quarantined = len(self.folder.quarantined_names())
                waiting_writers = self.folder.locked_incoming(WAIT)
            stats = CacheStats(
                capacity_bytes=self.settings.capacity_bytes,
                allocated_bytes=allocated_bytes,
                published_bytes=published_bytes,
                incoming_bytes=incoming_bytes,
                leased_bytes=sum(segment.allocated_bytes for segment in leased),
                segments=len(listed),
                rows=int(rows.sum()),
                oldest_seq=listed[0].seq if listed else None,
                next_seq=self._next_seq(listed),
                quarantined=quarantined,
                waiting_writers=waiting_writers,
                inserted_rows=usage.inserted_rows,
                served_rows=usage.served_rows,
                evicted_segments=usage.evicted_segments,
                evicted_rows=usage.evicted_rows,
                unread_rows=usage.unread_rows,
                times_served=float(served @ rows / rows.sum()) if rows.size else 0.0,
                most_times_served=int(served.max(initial=0)),
                paced=self._why_paced(listed),
                items=items,
                cached_items=cached_items,
            )
        return Survey(stats, listed, leased)

    def suspect_below(self) -> int:
        """Segments of a lower seq may have lost their bytes: check them before their first use."""
        if self.check_bytes:
            return 2**63 - 1
        if self.settings.durable or self.is_frozen:
            return 0
        return self.folder.read_record().suspect_below

    def leased(self, listed: list[SegmentInfo]) -> list[SegmentInfo]:
        """Listed segments that anybody leases. Asks the kernel a few times, not once for each."""
        if not listed or self.is_frozen:
            return []
        todo, locked = [range(listed[0].seq, listed[-1].seq + 1)], []
        with LockFile(self.folder.lease_lock) as file:
            while todo:
                span = todo.pop()
                found = file.conflict(span.start, len(span)) if span else None
                if found is not None:
                    locked.append(found)
                    todo += [range(span.start, found.start), range(found.stop, span.stop)]
        return [segment for segment in listed if any(segment.seq in span for span in locked)]
