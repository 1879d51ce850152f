"""Which sizes fit together, to the last byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

import arrowcache as ac
from arrowcache.arrow.segment import encoded_bytes_bound, max_rows, row_bytes
from arrowcache.storage.sizing import beyond_disk, require_capacity, require_pace, room_of_two, settings_of

SCHEMA = ac.Schema({"x": ac.Tensor("uint8", (1000,))})
WIDE = ac.Schema({name: ac.Tensor("float32", (64, 64)) for name in "ab"})
TEXT = ac.Schema({"text": ac.String()})
KIB, MIB = 1024, 1 << 20


def sized(schema=SCHEMA, capacity=100 * MIB, segment_bytes=MIB, segment_rows=None, headroom=0.1):
    return settings_of(schema, capacity, segment_bytes, segment_rows, headroom, True)


@pytest.mark.parametrize("schema", [SCHEMA, WIDE])
def test_a_segment_holds_one_row_at_least(schema):
    one = encoded_bytes_bound(schema, 1)
    settings = sized(schema, segment_bytes=one)
    assert (settings.full_rows, settings.segment_bytes) == (1, one)
    with pytest.raises(ValueError, match=r"a row needs a segment of .*raise segment_bytes"):
        sized(schema, segment_bytes=one - 1)


@pytest.mark.parametrize("schema", [SCHEMA, WIDE, TEXT])
def test_as_many_rows_as_fit_or_fewer_make_a_full_segment(schema):
    most = max_rows(schema, MIB)
    assert (sized(schema).full_rows, sized(schema).segment_bytes) == (most, MIB)
    for rows in (most, 3):
        bound = encoded_bytes_bound(schema, rows) if schema is not TEXT else MIB
        settings = sized(schema, segment_rows=rows)
        assert (settings.full_rows, settings.segment_bytes) == (rows, bound)
    with pytest.raises(ValueError, match=f"or lower segment_rows to {most}"):
        sized(schema, segment_rows=most + 1)


@pytest.mark.parametrize(
    ("capacity", "segment_bytes"),
    [
        ("200GB", 64 * MIB), ("1GiB", 64 * MIB), (1024 * MIB - 16, 64 * MIB - 1),
        ("100MB", 100_000_000 // 16), ("64MB", 4_000_000), ("10MB", 625_000), ("1MiB", 64 * KIB),
        ("256KiB", 16 * KIB),
    ],
)  # fmt: skip
@pytest.mark.parametrize("schema", [SCHEMA, TEXT])
def test_a_default_segment_is_64_MiB_or_a_sixteenth_of_the_capacity(schema, capacity, segment_bytes):
    assert sized(schema, capacity, segment_bytes=None).segment_bytes == segment_bytes


@pytest.mark.parametrize(
    "schema", [{"x": ac.Tensor("uint8", (size,))} for size in (7 * MIB, 20 * MIB, 24 * MIB)] + [WIDE]
)
def test_a_default_segment_holds_one_row_at_least_and_is_a_quarter_at_most(schema):
    settings = sized(ac.Schema(schema), segment_bytes=None)
    assert settings.full_rows >= 1
    assert 100 * MIB // 16 <= settings.segment_bytes <= 100 * MIB // 4
    require_capacity(settings)


@pytest.mark.parametrize(
    ("size", "capacity"),
    [(26 * MIB, 100 * MIB), (200 * MIB, "100MB"), (MIB, 2 * MIB), (10, 192 * KIB), (10, 1)],
)
def test_a_row_that_is_more_than_a_quarter_of_the_capacity_is_refused_with_a_capacity_that_holds_it(
    size, capacity
):
    schema = ac.Schema({"x": ac.Tensor("uint8", (size,))})
    with pytest.raises(ValueError, match=r"a row needs a segment of .*: raise capacity to (.*)$") as refused:
        sized(schema, capacity, segment_bytes=None)
    enough = str(refused.value).rpartition(" to ")[2].replace(" ", "")
    assert sized(schema, enough, segment_bytes=None).full_rows >= 1


def test_a_default_segment_holds_the_rows_that_are_asked_for():
    assert sized(segment_bytes=None, segment_rows=20_000).full_rows == 20_000  # some 19 MiB
    assert sized(TEXT, segment_bytes=None, segment_rows=5 * MIB).full_rows == 5 * MIB
    most = max_rows(SCHEMA, 25 * MIB)
    with pytest.raises(ValueError, match=f"30000 rows need a segment of .*or lower segment_rows to {most}"):
        sized(segment_bytes=None, segment_rows=30_000)


@pytest.mark.parametrize("headroom", [0, 0.999, 0.0])
def test_a_headroom_is_a_share(headroom):
    assert sized(headroom=headroom).headroom == headroom


@pytest.mark.parametrize("headroom", [1, -0.001, 1.5, float("nan"), "0.1"])
def test_another_headroom_is_refused(headroom):
    with pytest.raises(ValueError, match="0 <= headroom < 1"):
        sized(headroom=headroom)


@pytest.mark.parametrize(
    ("segment_bytes", "least"), [(MIB, 4 * MIB), (8 * KIB, 2 * (8 + 64) * KIB + 64 * KIB)]
)
def test_the_capacity_holds_four_segments_and_room_for_two_writers(segment_bytes, least):
    settings = replace(sized(), segment_bytes=segment_bytes, capacity_bytes=least)
    assert room_of_two(segment_bytes) == 2 * (segment_bytes + 64 * KIB) + 64 * KIB
    require_capacity(settings)
    with pytest.raises(ValueError, match="raise capacity to"):
        require_capacity(settings.with_capacity(least - 1))
    with pytest.raises(ValueError, match="raise capacity to"):
        sized(capacity=4 * MIB - 1)


def test_the_capacity_holds_the_rows_that_a_pace_waits_for():
    settings = sized()
    rows = settings.capacity_bytes // row_bytes(SCHEMA)
    for pace in (None, ac.Pace(), ac.Pace(min_rows=rows)):
        require_pace(pace, settings)
        require_capacity(replace(settings, pace=pace))
    exact = settings.with_capacity(rows * row_bytes(SCHEMA))
    require_pace(ac.Pace(min_rows=rows), exact)
    for check in (
        lambda pace: require_pace(pace, exact), lambda pace: require_capacity(replace(exact, pace=pace))
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"min_rows={rows + 1} take .*raise the capacity"):
            check(ac.Pace(min_rows=rows + 1))
    with pytest.raises(TypeError, match="pace must be"):
        require_pace("fast", settings)


def test_a_capacity_beyond_the_disk_is_told_by_what_it_has():
    assert beyond_disk(100, 60, 40) == ""
    assert "has 99 B for the cache (39 B free)" in beyond_disk(100, 60, 39)
