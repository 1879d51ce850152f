"""What is told of a snapshot's segments, as arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.segment_arrays import SegmentArrays, are_among
from arrowcache.storage.layout import SegmentInfo


def listed(seqs, salt=0):
    return [SegmentInfo(seq, 1 + (seq + salt) % 7, "", 100 + seq, 4096, seq / 8) for seq in sorted(seqs)]


def told(arrays):
    return [[*arrays.segments], *[column.tolist() for column in arrays[1:]]]


seqs = st.sets(st.integers(0, 12))


@given(seqs, seqs, st.booleans())
def test_what_was_known_before_makes_no_difference(before, after, is_other):
    """Also of segments of the same numbers that are others."""
    known = SegmentArrays.of(listed(before))
    segments = listed(after, salt=is_other)
    arrays = SegmentArrays.of(segments, known)
    assert told(arrays) == told(SegmentArrays.of(segments))
    assert [*zip(*told(arrays)[1:], strict=True)] == [
        (s.seq, s.rows, s.nbytes, s.published) for s in segments
    ]
    assert [column.dtype for column in arrays[1:]] == [np.int64] * 3 + [np.float64]


def test_segments_that_were_known_are_not_looked_at_again():
    segments = listed(range(100))
    known = SegmentArrays.of(segments)

    class Untouched:
        seq = 60

        def __getattr__(self, name):
            raise AssertionError(name)

    unseen = [Untouched() for _ in range(40)]
    mixed = SegmentArrays((*segments[:60], *unseen), *known[1:])
    arrays = SegmentArrays.of([*unseen, *listed([100])], mixed)
    assert arrays.seqs.tolist() == [*range(60, 101)]


@given(st.sets(st.integers(-5, 40)), st.lists(st.integers(-9, 50)))
def test_numbers_are_among_others_as_of_a_set(others, some):
    found = are_among(np.array(some, np.int64), np.array(sorted(others), np.int64))
    assert found.tolist() == [number in others for number in some]
