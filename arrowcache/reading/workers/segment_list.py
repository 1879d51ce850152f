"""Segment list: a snapshot's segments as compact arrays, sent to a worker once an epoch.

int64       number of segments
int64 each  seqs, rows, bytes, allocated bytes
float64     when they were published
text        tasks, one a line
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from arrowcache.storage.layout import SegmentInfo

_NUMBERS = ("seq", "rows", "nbytes", "allocated_bytes")


def pack_segments(segments: Sequence[SegmentInfo]) -> bytes:
    """Return segments as bytes, for `unpack_segments`."""
    count = len(segments)
    numbers = [np.fromiter((getattr(s, name) for s in segments), np.int64, count) for name in _NUMBERS]
    published = np.fromiter((s.published for s in segments), np.float64, count)
    arrays = [np.array([count], np.int64), *numbers, published]
    return b"".join(array.tobytes() for array in arrays) + "\n".join(s.task for s in segments).encode()


def unpack_segments(data: bytes, known: Mapping[int, SegmentInfo]) -> list[SegmentInfo]:
    """Return segments from such bytes. Segments in `known`, by seq, are reused."""
    count = int(np.frombuffer(data, np.int64, 1)[0])
    columns = np.frombuffer(data, np.int64, 4 * count, 8).reshape(4, count).tolist()
    published = np.frombuffer(data, np.float64, count, 8 + 32 * count).tolist()
    tasks = data[8 + 40 * count :].decode().split("\n")
    return [
        known.get(seq) or SegmentInfo(seq, rows, task, nbytes, allocated, when)
        for seq, rows, nbytes, allocated, when, task in zip(*columns, published, tasks[:count], strict=True)
    ]
