"""Segment arrays: numbers, rows, sizes and times of all segments of a snapshot, as arrays.

A snapshot shares most segments with the one before it: only new ones are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.storage.layout import SegmentInfo


class SegmentArrays(NamedTuple):
    """Segments, oldest first, and an array (n,) of each fact; read-only."""

    segments: tuple[SegmentInfo, ...]
    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    published: NDArray[np.float64]

    @classmethod
    def of(cls, segments: Sequence[SegmentInfo], before: SegmentArrays | None = None) -> SegmentArrays:
        """Return the arrays of some segments.

        Args:
            before: arrays of an earlier list; reused where its newest segments are the oldest of this one.
        """
        segments = tuple(segments)
        if before is not None and segments:
            first = int(before.seqs.searchsorted(segments[0].seq))
            count = len(before.seqs) - first
            if segments[:count] == before.segments[first:]:
                pairs = zip(before[1:], cls.of(segments[count:])[1:], strict=True)
                return cls(segments, *[np.concatenate((kept[first:], new)) for kept, new in pairs])
        seqs, rows, nbytes = [_array(segments, name, np.int64) for name in ("seq", "rows", "nbytes")]
        return cls(segments, seqs, rows, nbytes, _array(segments, "published", np.float64))


def are_among(seqs: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True for each number (n,) that is among others, which rise. `np.isin` would import numpy.ma: 30 ms."""
    if not len(others):
        return np.zeros(len(seqs), np.bool_)
    found: NDArray[np.bool_] = others.take(others.searchsorted(seqs), mode="clip") == seqs
    return found


def _array(segments: Sequence[SegmentInfo], name: str, dtype: type[Any]) -> NDArray[Any]:
    return np.fromiter(map(attrgetter(name), segments), dtype, len(segments))
