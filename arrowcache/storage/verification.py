"""Verification: checking segments, and moving what fails out of sight.

Structure is checked whenever a segment is first mapped, bytes by `verify`, by check="bytes" and
after a restart of the machine. What fails moves to quarantine/, under its exclusive lock byte
like an eviction, with the reason beside it; it is reported, and never read. So does one whose bytes were to
be checked, and the disk does not give them. Where only its headers cannot be read, it is reported and stays:
it may be sound. What this user may not read is neither: the cache is not used at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from arrowcache.arrow import segment as segment_file
from arrowcache.arrow.segment import structure_spans
from arrowcache.errors import CacheFrozenError, CorruptSegmentError, warn
from arrowcache.storage import layout
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.locks import LockFile
from arrowcache.storage.mapping import FileMapping, is_readable
from arrowcache.storage.notes_log import MARKS
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes

_OUT_OF_RESOURCES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_NOT_GIVEN = "the disk does not give its bytes (an I/O error: see dmesg)"
_NO_RIGHT = (errno.EACCES, errno.EPERM)
_NO_SEGMENT = (  # the name is that of nothing, a link, a socket, a folder, an empty file, a pipe
    errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EINVAL, errno.ESPIPE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """Something `verify` found: which file of the cache, and what is wrong with it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class UnreadableSegmentError(CorruptSegmentError):
    """A segment that cannot be read now, for a reason that is not in its file: it stays where it is."""


def unfit(error: BaseException) -> CorruptSegmentError | None:
    """The damage that a failure to map a segment's file shows.

    Returns: None if it shows none: this process lacks memory, descriptors or the right to read it.
    """
    code = getattr(error, "errno", None)
    if isinstance(error, ValueError) or code in _NO_SEGMENT:
        return CorruptSegmentError(f"cannot be mapped: {error}")
    if not isinstance(error, OSError) or code in (*_OUT_OF_RESOURCES, *_NO_RIGHT):
        return None
    return UnreadableSegmentError(f"its file cannot be read now: {error}")


def check_file(
    file: pa.Buffer, store: Store, segment: SegmentInfo, *, check_bytes: bool
) -> segment_file.Layout:
    """Check a mapped segment's structure, and its bytes if asked; the caller holds a lease on it.

    It is no longer than a segment may be: `open_file` and `FileMapping` see to that before they map it.

    Raises: CorruptSegmentError: what is wrong; as an UnreadableSegmentError where only the disk is.
    """
    if check_bytes and not is_readable(file.address, file.size):
        raise CorruptSegmentError(_NOT_GIVEN)
    for start, nbytes in () if check_bytes else structure_spans(memoryview(file), segment.rows):
        if not is_readable(file.address + start, nbytes):
            raise UnreadableSegmentError(_NOT_GIVEN)
    layout_of_file = segment_file.read_structure(file, store.settings.schema, segment.rows)
    if check_bytes:
        segment_file.check_bytes(file, store.settings.schema)
    return layout_of_file


def quarantine(store: Store, segment: SegmentInfo, error: CorruptSegmentError) -> bool:
    """Move a damaged segment out of sight, unless another reader still leases it; warns.

    One of a frozen cache stays, without a warning: its error ends the epoch.

    Nothing of it may be mapped here, and no lease of this process may cover it any more. One that
    is only unreadable is warned of.
    Returns: True if it moved. Otherwise a later reader or `verify` finds it again.
    """
    moved, action = False, "left out"
    if store.is_frozen:
        return False
    if not isinstance(error, UnreadableSegmentError):
        try:
            moved, action = _isolate(store, segment, str(error))
        except FileNotFoundError:
            raise  # there is no cache any more
        except (OSError, CacheFrozenError) as why:  # such as a read-only disk: others can be read
            action = f"left out, since it could not be quarantined ({why})"
    warn(f"segment {segment.name} {action}: {error}")
    return moved


def _isolate(store: Store, segment: SegmentInfo, reason: str) -> tuple[bool, str]:
    folder = store.folder
    with store.locked(), LockFile(folder.lease_lock) as file:
        if not file.try_range(segment.seq, 1, exclusive=True):
            return False, "left out, still leased by another reader"
        if folder.segment_info(segment.name) is not None:
            folder.isolate(segment.name, reason)
            try:
                if store.settings.durable:  # nobody checks its bytes again after a power cut
                    folder.sync_isolated()
                store.drop_quarantined()
            except OSError as why:
                return True, f"quarantined in part ({why})"
        elif os.path.lexists(folder.segments / segment.name):
            store.look_anew()
            return False, "left out, since it is no plain file"
    return True, "quarantined"


def verify(store: Store, *, repair: bool) -> list[Problem]:
    """Check everything: each segment's structure and bytes, names, tasks, capacity, debris.

    Blocks: reads the whole cache, leasing one segment at a time, so nobody waits for it.
    Returns: the problems, empty when all is well; damaged segments are quarantined if `repair`, those
        that cannot be read for another reason stay.
    Raises: OSError: this process has too little memory, too many files open, or no right to read one; that is
        no damage. CacheFrozenError: `repair`, of a frozen cache.
    """
    folder = store.folder
    problems = []
    if repair and store.is_frozen:
        raise CacheFrozenError(
            f"{folder.path} is frozen, and is not repaired: check it by cache.verify(repair=False), or call "
            "cache.thaw() first"
        )
    store.look_anew()
    store.segments()  # each file, without keeping anybody waiting
    with store.locked() if repair else store.looking():
        if repair:
            folder.sweep()
        listed = store.segments()
        names = {segment.name for segment in listed}
        capacity, record = store.settings.capacity_bytes, layout.LockRecord(layout.MAX_SEQ)
        allocated = 0
        if not store.is_frozen:
            allocated, record = store.allocated_bytes(listed), folder.read_record()
        is_behind = bool(listed) and listed[-1].seq >= record.next_seq
        if is_behind and repair:
            folder.write_record(replace(record, next_seq=listed[-1].seq + 1))
        foreign = sorted(set(os.listdir(folder.segments)) - names)
    problems += [
        Problem(f"{layout.SEGMENTS}/{layout.shown(name)}", "not a segment's name or file") for name in foreign
    ]
    if allocated > capacity:
        excess = format_bytes(allocated - capacity)
        problems.append(Problem(".", f"allocated bytes exceed the capacity by {excess}"))
    if is_behind:
        problems.append(Problem(layout.CACHE_LOCK, f"next seq {record.next_seq} is taken already"))
    problems += _verify_notes(store, repair=repair)
    tasks: dict[str, str] = {}
    for segment in listed:
        if segment.task and tasks.setdefault(segment.task, segment.name) != segment.name:
            problems.append(Problem(segment.name, f"repeats the task of {tasks[segment.task]}"))
    return [*problems, *verify_segments(store, listed, repair=repair)]


def verify_segments(store: Store, segments: Sequence[SegmentInfo], *, repair: bool = True) -> list[Problem]:
    """Check the structure and bytes of segments. Blocks, returns, raises: as `verify`."""
    problems = []
    for segment in segments:
        if (error := _verify_segment(store, segment)) is not None:
            problems.append(Problem(segment.name, str(error)))
            if repair:
                quarantine(store, segment, error)
    return problems


def _verify_notes(store: Store, *, repair: bool) -> list[Problem]:
    problems = []
    with store.locked() if repair else store.looking():
        for file in store.folder.note_files():
            if not file.fits(store.folder.read_note(file)):
                what = "which rows are excluded and tagged" if file.kind == MARKS else "annotations"
                problems.append(Problem(f"{layout.NOTES}/{file.name}", f"it is damaged: {what} are lost"))
                if repair:
                    store.folder.isolate_note(file)
    return problems


def _verify_segment(store: Store, segment: SegmentInfo) -> CorruptSegmentError | None:
    with store.looking():
        if store.folder.segment_info(segment.name) is None:
            return None  # evicted meanwhile
        lease = store.lease_on([segment])
    try:
        return _check_mapped(store, segment)  # has unmapped it when it returns
    finally:
        lease.close()


def _check_mapped(store: Store, segment: SegmentInfo) -> CorruptSegmentError | None:
    try:
        file = FileMapping(store.path_of(segment), limit=store.settings.segment_bytes).buffer()
        check_file(file, store, segment, check_bytes=True)
    except CorruptSegmentError as error:
        return error.with_traceback(None)  # which has the mapping
    except (OSError, ValueError) as error:
        what = unfit(error)
        if what is None:
            raise
        return what
    return None
