"""What of a batch can lie in a slot, and how a slot becomes a batch again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from arrowcache import Values
from arrowcache.reading.workers.packing import pack, unpack

TEXTS = st.text(st.characters(exclude_categories=[]), max_size=5)  # surrogates, too
COLUMNS = st.one_of(
    hnp.arrays(
        st.one_of(hnp.scalar_dtypes(), hnp.byte_string_dtypes(), hnp.unicode_string_dtypes()),
        hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
    ),
    st.lists(TEXTS, max_size=5),
    st.lists(st.binary(max_size=5), max_size=5),
    st.booleans(),
    st.floats(),
    st.integers(-(2**63), 2**63 - 1),
    st.builds(np.float32, st.integers(0, 10)),
    st.builds(
        lambda n, inner: Values(np.zeros((n, *inner), np.int16), np.array([0, n])),
        st.integers(0, 4),
        st.sampled_from([(), (2,)]),
    ),
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(other, tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_same(mine, its)
    elif isinstance(other, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    elif isinstance(other, float):
        assert np.float64(one).tobytes() == np.float64(other).tobytes()
    else:
        assert one == other


@given(COLUMNS)
def test_what_was_packed_is_unpacked_from_copies_of_its_arrays(value):
    (column,) = pack({"x": value})
    arrays = [
        np.frombuffer(array.tobytes(), array.dtype.str).reshape(array.shape)
        if array.nbytes
        else np.empty(array.shape, array.dtype.str)
        for array in column.arrays
    ]
    assert_same(unpack(column.kind, arrays), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        b"bytes",
        3j,
        2**70,
        [1],
        ["a", b"b"],
        [b"a", "b"],
        ("a",),
        {"a": 1},
        {1},
        object(),
        np.array([None]),
        np.zeros(2, "i4,f8"),
        np.ma.masked_array([1.0], [True]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_refused_with_a_way_out(value):
    with pytest.raises(TypeError, match=r"column 'x' .*worker_type='thread'"):
        pack({"x": value})
