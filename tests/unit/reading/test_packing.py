"""What of a batch can lie in a slot, and how a slot becomes a batch again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from arrowcache import Values
from arrowcache.reading.workers.packing import Described, Pattern, pack, unpack

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


def described(batch: Any) -> list[Described]:
    """What a batch's columns are, as it comes out of a message."""
    text = json.loads(json.dumps([Described.of(column) for column in pack(batch)]))
    return [Described.from_message(column) for column in text]


def fits(columns: list[Described], sizes: dict[str, list[int]]) -> bool:
    """Whether a batch has room in a slot of these sizes."""
    return all(
        have >= need
        for column in columns
        for have, need in zip(sizes[column.name], column.nbytes(), strict=True)
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
    (told,) = described({"x": value})
    arrays = []
    for array, (dtype, shape), nbytes in zip(column.arrays, told.arrays, told.nbytes(), strict=True):
        assert array.nbytes == nbytes
        arrays.append(
            np.frombuffer(array.tobytes(), dtype).reshape(shape) if nbytes else np.empty(shape, dtype)
        )
    assert_same(unpack(told.kind, arrays), value)


@given(COLUMNS)
def test_a_slot_made_for_a_batch_has_room_for_it(value):
    columns = described({"x": value})
    pattern = Pattern(columns, rows=3, batch_size=8)
    for rows in (1, 3, 8):
        assert fits(columns, pattern.sizes_for(columns, rows))
    assert fits(columns, pattern.sizes(3))


def test_a_short_first_batch_leaves_room_for_full_ones():
    pattern = Pattern(described({"x": np.zeros((6, 2))}), rows=3, batch_size=8)
    pattern.check(described({"x": np.zeros((16, 2))}), rows=8)
    with pytest.raises(ValueError, match="17 rows, the first batch left room for 16"):
        pattern.check(described({"x": np.zeros((17, 2))}), rows=8)


def test_a_group_of_batches_may_have_the_rows_of_all():
    pattern = Pattern(described({"x": np.zeros((8, 2))}), rows=8, batch_size=8)
    assert pattern.sizes(32) == {"x": [32 * 2 * 8]}
    pattern.check(described({"x": np.zeros((32, 2))}), rows=32)


def test_fewer_rows_and_another_order_of_columns_are_the_same_pattern():
    pattern = Pattern(described({"x": np.zeros(8), "y": 3}), rows=8, batch_size=8)
    pattern.check(described({"y": 4, "x": np.zeros(0)}), rows=8)


def test_what_varies_gets_room_for_the_largest_so_far():
    small, large = described({"x": ["a"] * 8}), described({"x": ["a" * 999] * 8})
    pattern = Pattern(small, rows=8, batch_size=8)
    assert not fits(large, pattern.sizes(8))
    pattern.check(large, rows=8)
    pattern.note(large, rows=8)
    assert fits(large, pattern.sizes(8))
    pattern.note(small, rows=8)
    assert fits(large, pattern.sizes(8))


def test_an_empty_list_is_a_list_of_either_kind():
    pattern = Pattern(described({"x": []}), rows=8, batch_size=8)
    pattern.check(described({"x": ["a"]}), rows=8)
    before = pattern.version
    pattern.note(described({"x": ["a"]}), rows=8)
    assert pattern.version > before
    pattern.check(described({"x": []}), rows=8)
    with pytest.raises(ValueError, match="a list of str the first time, and is a list of bytes"):
        pattern.check(described({"x": [b"a"]}), rows=8)


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
