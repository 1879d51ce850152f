"""Merging: many small segments of a dataset's cache become few full ones, while others read and write it.

Parts that follow one another are read, and published once more as one segment, which comes onto the disk
before they leave it; its name says which they are. They leave once nobody leases them: until then they serve,
since of two copies the older does, so no reader sees a change. Whoever finds a merged segment beside its
parts goes on with their removal. One process at a time merges.

Guarantees: who is killed at any step, or loses power, loses no item; the capacity holds, so parts are merged
where there is room for both copies; a merged segment is merged again only once its parts have left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.arrow.segment import Column, VariableColumn
from arrowcache.errors import CacheFullError, CorruptSegmentError
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.claims import only_merger
from arrowcache.storage.layout import CLAIMS_LOCK, SegmentInfo
from arrowcache.storage.sizing import room_of_one
from arrowcache.storage.store import RoomPolicy, Store

_LEAST_PARTS = 8  # of a merge that does not fill a segment: so an item is copied few times
_TASK = re.compile(r"parts\.(\d{1,19})-(\d{1,19})", re.ASCII)


def parts_of(segment: SegmentInfo) -> range:
    """Return the numbers of the segments that one was merged of. Empty if it was not."""
    match = _TASK.fullmatch(segment.task)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def superseded(segments: Sequence[SegmentInfo]) -> list[SegmentInfo]:
    """Return the parts that are there beside the segment that they were merged into. Pure."""
    merged = [(segment.seq, parts) for segment in segments if (parts := parts_of(segment))]
    return [each for each in segments if any(each.seq in parts and each.seq < seq for seq, parts in merged)]


def choose_parts(
    segments: Sequence[SegmentInfo], segment_bytes: int, full_rows: int, room_bytes: int
) -> list[SegmentInfo]:
    """Return small segments, one after another, that are worth a merge: the oldest such. Pure.

    Small is under half a segment. They fill a segment, or the room, together, or are at least eight.

    Args:
        segments: all of a cache, oldest first.
        room_bytes: bytes that are free.
    """
    leaving = {each.seq for each in superseded(segments)}
    most_bytes = min(segment_bytes, room_bytes - room_of_one(0))
    run: list[SegmentInfo] = []
    nbytes = rows = 0
    for each in segments:
        is_whole = each.nbytes >= segment_bytes // 2
        if is_whole or each.seq in leaving or not leaving.isdisjoint(parts_of(each)):
            if len(run) >= _LEAST_PARTS:
                return run
            run, nbytes, rows = [], 0, 0
            continue
        nbytes, rows = nbytes + each.nbytes, rows + each.rows
        if nbytes > most_bytes or rows > full_rows:
            if len(run) > 1:
                return run
            run, nbytes, rows = [], each.nbytes, each.rows
        run.append(each)
    return run if len(run) >= _LEAST_PARTS else []


def merge(store: Store, let_go: Callable[[], None]) -> None:
    """Merge small segments, as many as are worth it now, and remove parts that nobody leases.

    Does nothing where another process, or thread, is at it.

    Args:
        let_go: ends this process' own lease.
    Blocks: while segments are copied; not for other processes.
    Raises: OSError, LockTimeoutError: the folder or its disk fails; nothing is lost.
    """
    if not superseded(store.segments()) and not _parts_now(store):
        return
    with only_merger(store.folder.path / CLAIMS_LOCK, store.folder.rights().file_mode) as is_alone:
        goes_on = is_alone
        while goes_on:
            if superseded(store.segments()):
                let_go()
                store.take_back(superseded)
            parts = _parts_now(store)
            goes_on = len(parts) > 1 and _merge(store, parts)


def _parts_now(store: Store) -> list[SegmentInfo]:
    listed, settings = store.segments(), store.settings
    room = settings.capacity_bytes - store.allocated_bytes(listed)
    return choose_parts(listed, settings.segment_bytes, settings.form.full_rows, room)


def _merge(store: Store, parts: Sequence[SegmentInfo]) -> bool:
    """Publish parts as one segment. Returns: False: it cannot be, now."""
    seqs = {part.seq for part in parts}
    try:
        with Snapshot.take(store, lambda segment: segment.seq in seqs) as snapshot:
            if len(snapshot.segments) < len(parts):
                return False
            encoded = store.settings.form.encode(_columns(snapshot, store.settings.schema))
            task = f"parts.{parts[0].seq}-{parts[-1].seq}"
            store.publish(encoded, task, RoomPolicy("raise"), syncs=True)
    except (CacheFullError, CorruptSegmentError):  # the latter is quarantined by now
        return False
    return True


def _columns(snapshot: Snapshot, schema: Schema) -> dict[str, Column]:
    """Return all rows of a snapshot, oldest first, as columns of a segment: copies."""
    fixed = snapshot.gather(np.arange(len(snapshot)), [*schema.fixed])
    columns: dict[str, Column] = {name: np.asarray(values) for name, values in fixed.items()}
    for name, kind in schema.variable.items():
        values = snapshot.table([name]).column(0).combine_chunks()
        if isinstance(kind, Ragged):
            offsets, data = values.offsets.to_numpy(), values.values.buffers()[1]
        else:
            offsets, data = np.frombuffer(values.buffers()[1], np.int32), values.buffers()[2]
        offsets = np.array(offsets[: len(snapshot) + 1], np.int32)
        columns[name] = VariableColumn(offsets, bytearray(b"" if data is None else memoryview(data)))
    return columns
