"""Merging: many small segments of a dataset's cache become few full ones, while others read and write it.

Parts that follow one another are read, and published once more as one segment, which comes onto the disk
before they leave it; its name says which they are. New snapshots read the merged segment. Parts leave once no
older snapshot leases them: every process that reads or writes items tries that again while there are some,
and so does one that needs room. Small segments that others left, as who was killed, are merged by who reads,
too. One process at a time merges.

Guarantees: who is killed at any step, or loses power, loses no item; the capacity holds, so parts are merged
where there is room for both copies; a merged segment is merged again only once its parts have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from arrowcache.arrow.schema import Ragged, Schema
from arrowcache.arrow.segment import Column, VariableColumn
from arrowcache.errors import CacheFullError, CorruptSegmentError
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.claims import MERGING, the_only_one
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.parts import choose_parts, superseded, task_of
from arrowcache.storage.store import RoomPolicy, Store


def merge(store: Store, let_go: Callable[[], None]) -> bool:
    """Merge small segments into one, if that is worth it now, and remove parts that nobody leases.

    Does nothing where another process, or thread, is at it.

    Args:
        let_go: ends this process' own lease.
    Blocks: while one segment is copied; not for other processes.
    Returns: True: one was merged, and more may be worth it.
    Raises: OSError, LockTimeoutError: the folder or its disk fails; nothing is lost.
    """
    if not superseded(store.segments()) and not is_worth_it(store):
        return False
    with the_only_one(store.folder, MERGING) as is_alone:
        if not is_alone:
            return False
        _remove(store, let_go)
        parts = _parts_now(store)
        if len(parts) < 2 or not _merge(store, parts):
            return False
        _remove(store, let_go)
        return True


def is_worth_it(store: Store) -> bool:
    """True if there are small segments that are worth a merge now. Raises: OSError: the folder fails."""
    return bool(_parts_now(store))


def _remove(store: Store, let_go: Callable[[], None]) -> None:
    """Remove parts that were merged and are not leased by others."""
    if superseded(store.segments()) and store.take_back(superseded)[1]:
        let_go()
        store.take_back(superseded)


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
            store.publish(encoded, task_of(parts), RoomPolicy("raise"), syncs=True)
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
