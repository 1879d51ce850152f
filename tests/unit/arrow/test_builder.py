"""The builder: what fits into one segment, and that a bad sample changes nothing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from helpers import limit
from hypothesis import given, settings
from hypothesis import strategies as st
from interruptions import files, interruptions
from quick import first_is_quick

import arrowcache as ac
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form

MIXED = ac.Schema(
    {"text": ac.String(), "x": ac.Tensor("int16", (2,)), "r": ac.Ragged("float32", (2,)), "raw": ac.Binary()}
)


def rows_of(builder: SegmentBuilder) -> list[dict[str, object]]:
    """What the builder's file holds, by Arrow's own reader."""
    data = b"".join(builder.encode().pieces)
    rows: list[dict[str, object]] = pa.ipc.open_file(pa.py_buffer(data)).read_all().to_pylist()
    return rows


def add(builder: SegmentBuilder, sample: dict[str, object], *, many: bool = False) -> int:
    return builder.take(builder.convert(sample, many=many), 0)


def mixed(number: int, width: int = 3) -> dict[str, object]:
    return {
        "x": np.full(2, number, np.int16),
        "text": f"n{number}",
        "r": np.full((width, 2), number, np.float32),
        "raw": bytes([number % 256]) * width,
    }


def test_rows_come_back_in_the_order_they_were_taken():
    builder = SegmentBuilder(Form(MIXED, 5, 10_000))
    for number in range(5):
        assert add(builder, mixed(number, width=number)) == 1
    assert builder.is_full
    rows = rows_of(builder)
    assert [row["text"] for row in rows] == [f"n{number}" for number in range(5)]
    assert [row["x"] for row in rows] == [[number] * 2 for number in range(5)]
    assert [row["r"] for row in rows] == [[number] * 2 * number for number in range(5)]
    assert [row["raw"] for row in rows] == [bytes([number]) * number for number in range(5)]


def test_a_full_builder_takes_nothing_and_an_emptied_one_starts_anew():
    builder = SegmentBuilder(Form(MIXED, 2, 10_000))
    rows = builder.convert({name: [value, value, value] for name, value in mixed(1).items()}, many=True)
    assert builder.take(rows, 0) == 2
    assert builder.take(rows, 2) == 0
    builder.clear()
    assert builder.rows == 0
    assert builder.take(rows, 2) == 1
    assert [row["text"] for row in rows_of(builder)] == ["n1"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"text": None}, ["'text'"]),
        ({"x": np.zeros(3, np.int16)}, ["'x'", "(2,)", "(3,)"]),
        ({"x": np.zeros(2, np.int32)}, ["'x'", "int16", "int32", ".astype('int16')"]),
        ({"r": np.zeros((1, 3), np.float32)}, ["'r'", "(any, 2)", "(1, 3)"]),
        ({"other": 1, "second": 2}, ["'other'", "'second'", "text, x, r, raw"]),
    ],
)
def test_a_bad_sample_changes_nothing(change, parts):
    builder = SegmentBuilder(Form(MIXED, 5, 10_000))
    add(builder, mixed(1))
    before = rows_of(builder)
    with pytest.raises(ac.SchemaError) as caught:
        builder.convert(mixed(2) | change, many=False)
    assert all(part in str(caught.value) for part in parts)
    assert rows_of(builder) == before
    assert add(builder, mixed(2)) == 1


def test_a_missing_field_is_named():
    sample = mixed(1)
    del sample["r"], sample["raw"]
    with pytest.raises(ac.SchemaError, match=r"'r', 'raw'.*x, text"):
        SegmentBuilder(Form(MIXED, 5, 10_000)).convert(sample, many=False)


def test_fields_with_different_numbers_of_samples_are_refused_with_the_numbers():
    many = {name: [value] * 3 for name, value in mixed(1).items()}
    with pytest.raises(ac.SchemaError, match=r"'text': 2"):
        SegmentBuilder(Form(MIXED, 5, 10_000)).convert(many | {"text": ["a", "b"]}, many=True)


def test_one_bad_sample_among_many_is_found_before_any_is_taken():
    builder = SegmentBuilder(Form(MIXED, 5, 10_000))
    many = {name: [value] * 3 for name, value in mixed(1).items()}
    many["r"][2] = np.zeros((1, 9), np.float32)
    with pytest.raises(ac.SchemaError, match="'r'"):
        builder.convert(many, many=True)
    assert builder.rows == 0


def test_no_samples_at_all_are_no_error():
    builder = SegmentBuilder(Form(ac.Schema({"x": ac.Tensor("int16", (2,))}), 5, 10_000))
    assert add(builder, {"x": np.zeros((0, 2), np.int16)}, many=True) == 0


def test_a_row_above_the_segments_bytes_is_refused_with_both_sizes():
    builder = SegmentBuilder(Form(MIXED, 5, 4096))
    with pytest.raises(ValueError, match=r"4\.0 KiB.*larger segment_bytes"):
        builder.convert(mixed(1) | {"raw": bytes(4096)}, many=False)
    assert add(builder, mixed(1)) == 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=40), st.integers(5000, 9000), st.integers(1, 30))
def test_no_segment_is_larger_than_its_bound_and_no_row_is_lost(widths, segment_bytes, full_rows):
    schema = ac.Schema({"id": ac.Tensor("int32"), "raw": ac.Binary(), "r": ac.Ragged("int16")})
    builder = SegmentBuilder(Form(schema, full_rows, segment_bytes))
    samples = {
        "id": np.arange(len(widths), dtype=np.int32),
        "raw": [bytes(width) for width in widths],
        "r": [np.zeros(width, np.int16) for width in widths],
    }
    rows = builder.convert(samples, many=True)
    seen: list[object] = []
    start = 0
    while start < rows.count:
        taken = builder.take(rows, start)
        assert taken or builder.rows, "a row that was accepted must fit into an empty segment"
        start += taken
        if taken == 0 or start == rows.count:
            assert builder.encode().nbytes <= segment_bytes
            assert builder.rows <= full_rows
            content = rows_of(builder)
            seen += [row["id"] for row in content]
            assert [len(row["raw"]) for row in content] == [widths[row["id"]] for row in content]  # type: ignore[arg-type, index]
            builder.clear()
    assert seen == list(range(len(widths)))


def test_variable_data_stays_under_arrows_offsets_over_many_appends(monkeypatch):
    limit(monkeypatch, list_elements=1000)
    builder = SegmentBuilder(Form(ac.Schema({"raw": ac.Binary()}), 50, 1 << 20))
    taken = [add(builder, {"raw": bytes(300)}) for _ in range(4)]
    assert taken == [1, 1, 1, 0]


def test_a_row_beyond_arrows_offsets_is_refused(monkeypatch):
    limit(monkeypatch, list_elements=1000)
    builder = SegmentBuilder(Form(ac.Schema({"raw": ac.Binary()}), 50, 1 << 20))
    assert add(builder, {"raw": bytes(1000)}) == 1
    with pytest.raises(ValueError, match="offsets"):
        builder.convert({"raw": bytes(1001)}, many=False)


def test_a_wide_row_beside_a_small_value_is_taken(monkeypatch):
    limit(monkeypatch, list_elements=1000)
    builder = SegmentBuilder(Form(ac.Schema({"x": ac.Tensor("int64", (900,)), "t": ac.String()}), 1, 1 << 20))
    assert add(builder, {"x": np.zeros(900, np.int64), "t": "a"}) == 1


STEPS = (files("arrow/builder.py"), ("opcode",))


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("count", first_is_quick([1, 3]))
@pytest.mark.parametrize("goes_on", [False, True])
def test_what_a_failed_take_left_is_in_no_row(error, count, goes_on):
    builder = SegmentBuilder(Form(MIXED, 9, 10_000))
    first = builder.convert(mixed(1), many=False)
    lost = builder.convert({name: [value] * count for name, value in mixed(2).items()}, many=True)
    last = builder.convert(mixed(3, width=5), many=False)
    for failure in interruptions(50, *STEPS, error):
        builder.clear()
        builder.take(first, 0)
        with failure:
            builder.take(lost, 0)
        expected = [mixed(1)] + [mixed(2)] * (builder.rows - 1)
        assert builder.rows in (1, 1 + count)
        if goes_on:
            builder.take(last, 0)
            expected.append(mixed(3, width=5))
        rows = rows_of(builder)
        assert [row["text"] for row in rows] == [row["text"] for row in expected], failure.where
        assert [row["raw"] for row in rows] == [row["raw"] for row in expected], failure.where
        assert [row["r"] for row in rows] == [np.ravel(row["r"]).tolist() for row in expected], failure.where


@pytest.mark.parametrize("clears", [False, True])
def test_a_failure_at_any_step_leaves_room_for_as_much_as_before(clears):
    builder = SegmentBuilder(Form(ac.Schema({"raw": ac.Binary(), "r": ac.Ragged("int64")}), 9, 10_000))
    wide = builder.convert({"raw": bytes(4000), "r": np.zeros(400, np.int64)}, many=False)
    for failure in interruptions(5, *STEPS):
        builder.clear()
        if clears:
            builder.take(wide, 0)
        with failure:
            if clears:
                builder.clear()
            else:
                builder.take(wide, 0)
        if builder.rows == 0:
            assert builder.take(wide, 0) == 1, failure.where
        assert len(rows_of(builder)) == 1
        assert builder.encode().nbytes <= 10_000


def test_rows_are_taken_though_somebody_has_the_encoded_segment_still():
    """As an error has that was raised while it was published, and that was kept."""
    builder = SegmentBuilder(Form(MIXED, 5, 10_000))
    add(builder, mixed(1))
    encoded = builder.encode()
    before = b"".join(encoded.pieces)
    add(builder, mixed(2))
    assert [row["text"] for row in rows_of(builder)] == ["n1", "n2"]
    assert b"".join(encoded.pieces) == before
