"""Verification: checking segments, and moving what fails out of sight.

Structure is checked whenever a segment is first mapped, bytes by `verify`, by check="bytes" and
after a restart of the machine. What fails moves to quarantine/, under its exclusive lock byte
like an eviction, with the reason beside it; it is reported, and never read.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace

import pyarrow as pa

from arrowcache.arrow import segment as segment_file
from arrowcache.errors import CorruptSegmentError
from arrowcache.storage import layout
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.lease import Lease
from arrowcache.storage.locks import LockFile
from arrowcache.storage.mapping import FileMapping
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes


@dataclass(frozen=True, slots=True)
class Problem:
    """Something `verify` found: which file of the cache, and what is wrong with it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def check_file(
    file: pa.Buffer, store: Store, segment: SegmentInfo, *, check_bytes: bool
) -> segment_file.Layout:
    """Check a mapped segment's structure, and its bytes if asked; the caller holds a lease on it.

    Raises: CorruptSegmentError: what is wrong.
    """
    layout_of_file = segment_file.read_structure(file, store.settings.schema, segment.rows)
    if check_bytes:
        segment_file.check_bytes(file, store.settings.schema)
    return layout_of_file


def quarantine(store: Store, segment: SegmentInfo, reason: str) -> bool:
    """Move a damaged segment out of sight, unless another reader still leases it; warns.

    Nothing of it may be mapped here, and no lease of this process may cover it any more.
    Returns: whether it moved; if not, a later reader or `verify` finds it again.
    """
    with store.locked():
        file = LockFile(store.folder.lease_lock)
        try:
            free = file.try_range(segment.seq, 1, exclusive=True)
            if free and os.path.lexists(store.path_of(segment)):
                store.folder.isolate(segment.name, reason)
                store.drop_quarantined_beyond_capacity()
        finally:
            file.close()
    action = "quarantined" if free else "left out, still leased by another reader"
    warnings.warn(f"segment {segment.name} {action}: {reason}", RuntimeWarning, stacklevel=2)
    return free


def verify(store: Store, *, repair: bool) -> list[Problem]:
    """Check everything: each segment's structure and bytes, names, tasks, capacity, debris.

    Blocks: reads the whole cache, leasing one segment at a time, so nobody waits for it.
    Returns: the problems, empty when all is well; damaged segments are quarantined if `repair`.
    """
    folder = store.folder
    problems = []
    with store.locked():
        store.refresh_settings()
        if repair:
            folder.sweep()
        listed = store.segments()
        names = {segment.name for segment in listed}
        allocated = store.allocated_bytes(listed)
        capacity = store.settings.capacity_bytes
        record = folder.read_record()
        foreign = sorted(set(os.listdir(folder.segments)) - names)
    problems += [Problem(f"{layout.SEGMENTS}/{name}", "not a segment's name or file") for name in foreign]
    if allocated > capacity:
        excess = format_bytes(allocated - capacity)
        problems.append(Problem(".", f"allocated bytes exceed the capacity by {excess}"))
    if listed and listed[-1].seq >= record.next_seq:
        problems.append(Problem(layout.CACHE_LOCK, f"next seq {record.next_seq} is taken already"))
        if repair:
            with store.locked():
                folder.write_record(replace(folder.read_record(), next_seq=listed[-1].seq + 1))
    tasks: dict[str, str] = {}
    for segment in listed:
        if segment.task and tasks.setdefault(segment.task, segment.name) != segment.name:
            problems.append(Problem(segment.name, f"repeats the task of {tasks[segment.task]}"))
        if (problem := _verify_segment(store, segment)) is not None:
            problems.append(problem)
            if repair:
                quarantine(store, segment, problem.reason)
    return problems


def _verify_segment(store: Store, segment: SegmentInfo) -> Problem | None:
    with store.locked():
        if not os.path.lexists(store.path_of(segment)):
            return None  # evicted meanwhile
        lease = Lease(store.folder.lease_lock, segment.seq, segment.seq)
    try:
        return _check_mapped(store, segment)  # has unmapped it when it returns
    finally:
        lease.close()


def _check_mapped(store: Store, segment: SegmentInfo) -> Problem | None:
    try:
        file = FileMapping(store.path_of(segment)).buffer()
        check_file(file, store, segment, check_bytes=True)
    except (CorruptSegmentError, OSError) as error:
        return Problem(segment.name, str(error))
    return None
