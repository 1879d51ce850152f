"""Parts: small segments that are merged into one, whose name tells which they were. Pure.

    parts.<first seq>-<last seq>

is the task's name of a segment that has all rows of those that were there in this range. Where both are there
the parts are to leave: publishing, which refuses a task that is listed, refuses a second copy.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.sizing import room_of_one

_LEAST_PARTS = 8  # of a merge that does not fill a segment: so an item is copied few times
_TASK = re.compile(r"parts\.(\d{1,19})-(\d{1,19})", re.ASCII)


def parts_of(segment: SegmentInfo) -> range:
    """Return the numbers of the segments that one was merged of. Empty if it was not."""
    match = _TASK.fullmatch(segment.task)
    return range(int(match[1]), int(match[2]) + 1) if match else range(0)


def task_of(parts: Sequence[SegmentInfo]) -> str:
    """Return the task's name of the segment that is merged of parts, oldest first."""
    return f"parts.{parts[0].seq}-{parts[-1].seq}"


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
