"""A snapshot's segments on their way to a worker, and a worker's columns on their way back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.columns import Values
from arrowcache.reading.workers.messages import pack_batch, pack_segments, unpack_segments
from arrowcache.storage.layout import SegmentInfo


@given(
    st.lists(
        st.builds(
            SegmentInfo,
            seq=st.integers(0, 2**62),
            rows=st.integers(1, 2**31),
            task=st.sampled_from(["", "default.0.7", "a-b.3.99"]),
            nbytes=st.integers(1, 2**40),
            allocated_bytes=st.integers(1, 2**40),
            published=st.floats(0, 2e9),
        ),
        max_size=5,
        unique_by=lambda segment: segment.seq,
    )
)
def test_a_list_is_its_segments_and_makes_no_known_one_anew(segments):
    known = {segment.seq: segment for segment in segments[:2]}
    unpacked = unpack_segments(pack_segments(segments), known)
    assert unpacked == segments
    assert all(unpacked[number] is known[segment.seq] for number, segment in enumerate(segments[:2]))


MASKED = np.ma.array([1, 2], mask=[False, True])


@pytest.mark.parametrize("column", [MASKED, np.ma.masked, Values(MASKED, np.array([0, 1, 2]))])
def test_a_masked_column_is_refused_as_such(column):
    """That of `Values` came without its mask; the others were called fields or objects."""
    with pytest.raises(TypeError, match=r"column 'x' is a masked array, whose mask .*\.filled\(0\)"):
        pack_batch({"x": column})
