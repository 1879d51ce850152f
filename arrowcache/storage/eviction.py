"""Eviction: which segments leave, are left alone by a snapshot, or are merged. Pure decisions over values.

Strictly oldest first: a sample never leaves before one that came earlier, so eviction stops at
the first leased segment. (Skipping leased ones threw away 60-90% of new samples in simulation.)

A dataset's cache evicts nothing to make room, and merges small segments instead. While the merged segment and
its parts are both there, the parts are superseded: they leave, wherever they are in the order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from arrowcache.storage.layout import SegmentInfo, parts_of
from arrowcache.storage.settings import room_of_one

_MIN_PARTS = 8  # of a merge that does not fill a segment: so an item is copied few times


def choose_victims(
    segments: Sequence[SegmentInfo], is_leased: Callable[[SegmentInfo], bool], excess_bytes: int
) -> list[SegmentInfo]:
    """The oldest segments whose removal frees `excess_bytes`, or all up to the first leased one.

    Args:
        is_leased: asked in order, never beyond the first leased segment.
        excess_bytes: allocated bytes to free; nothing goes if it is not positive.
    """
    victims: list[SegmentInfo] = []
    for segment in segments:
        if excess_bytes <= 0 or is_leased(segment):
            break
        victims.append(segment)
        excess_bytes -= segment.allocated_bytes
    return victims


def skip_for_headroom(segments: Sequence[SegmentInfo], free_bytes: int, headroom_bytes: int) -> int:
    """Count the oldest segments that a new snapshot leaves unleased.

    As few as make free and skipped bytes reach the headroom; the newest segment is always read.
    """
    skipped = 0
    while skipped < len(segments) - 1 and free_bytes < headroom_bytes:
        free_bytes += segments[skipped].allocated_bytes
        skipped += 1
    return skipped


def superseded(segments: Sequence[SegmentInfo]) -> list[SegmentInfo]:
    """Return the parts that are there beside the segment that they were merged into: of segments by seq."""
    seqs = [each.seq for each in segments]
    leaving: set[int] = set()
    for segment in segments:
        if parts := parts_of(segment):
            stop = min(parts.stop, segment.seq)
            leaving.update(seqs[bisect_left(seqs, parts.start) : bisect_left(seqs, stop)])
    return [each for each in segments if each.seq in leaving]


def each_once(segments: Sequence[SegmentInfo]) -> list[SegmentInfo]:
    """Return the segments without parts beside the segment that they were merged into."""
    leaving = {part.seq for part in superseded(segments)}
    return [each for each in segments if each.seq not in leaving]


def choose_parts(
    segments: Sequence[SegmentInfo], segment_bytes: int, full_rows: int, room_bytes: int
) -> list[SegmentInfo]:
    """Return small segments, one after another, that are worth a merge: the oldest such.

    Small is under half a segment. They fill a segment, or the room, together, or are at least eight.

    Args:
        segments: all of a cache, oldest first.
        room_bytes: bytes that are free.
    """
    leaving = {each.seq for each in superseded(segments)}
    max_bytes = min(segment_bytes, room_bytes - room_of_one(0))
    run: list[SegmentInfo] = []
    nbytes = rows = 0
    for each in segments:
        is_whole = each.nbytes >= segment_bytes // 2
        if is_whole or each.seq in leaving or not leaving.isdisjoint(parts_of(each)):
            if len(run) >= _MIN_PARTS:
                return run
            run, nbytes, rows = [], 0, 0
            continue
        nbytes, rows = nbytes + each.nbytes, rows + each.rows
        if nbytes > max_bytes or rows > full_rows:
            if len(run) > 1:
                return run
            run, nbytes, rows = [], each.nbytes, each.rows
        run.append(each)
    return run if len(run) >= _MIN_PARTS else []
