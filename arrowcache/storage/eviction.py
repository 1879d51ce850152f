"""Eviction: which segments go, and which a snapshot leaves alone. Pure decisions over values.

Strictly oldest first: a sample never leaves before one that came earlier, so eviction stops at
the first leased segment. (Skipping leased ones threw away 60-90% of new samples in simulation.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from arrowcache.storage.layout import SegmentInfo


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
