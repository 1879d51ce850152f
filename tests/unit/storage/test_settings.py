"""Settings, as values and as text; which sizes fit together, to the last byte."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import xxhash

import arrowcache as ac
from arrowcache.arrow.segment import encoded_bytes_bound, max_rows, row_bytes
from arrowcache.storage.settings import (
    OPTIONS,
    Settings,
    beyond_disk,
    require_capacity,
    require_pace,
    room_of_two,
    settings_of,
)

SCHEMA = ac.Schema({"x": ac.Tensor("uint8", (1000,))})
WIDE = ac.Schema({name: ac.Tensor("float32", (64, 64)) for name in "ab"})
TEXT = ac.Schema({"text": ac.String()})
KIB, MIB = 1024, 1 << 20


def sized(schema=SCHEMA, capacity=100 * MIB, segment_bytes=MIB, segment_rows=None, headroom=0.1):
    return settings_of(schema, capacity, segment_bytes, segment_rows, headroom=headroom, durable=True)


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


SETTINGS = Settings(ac.Schema({"x": ac.Tensor("int64")}), 10_000_000, 1_000_000, 50, 0.1, durable=True)


def test_settings_survive_their_text():
    assert Settings.from_json(SETTINGS.text) == SETTINGS
    assert Settings.from_json(SETTINGS.with_capacity(7).text).capacity_bytes == 7


def test_no_headroom_is_none():
    assert replace(SETTINGS, headroom=0.0).headroom_bytes == 0
    assert replace(SETTINGS, headroom=1e-9).headroom_bytes == 2_000_000


def test_headroom_is_a_share_of_the_capacity_but_at_least_two_segments():
    assert SETTINGS.headroom_bytes == 2_000_000
    assert SETTINGS.with_capacity(50_000_000).headroom_bytes == 5_000_000


@pytest.mark.parametrize("version", [1, 2, 3, 5, "4", None])
def test_another_format_version_is_refused_with_both(version):
    record = json.loads(SETTINGS.text) | {"version": version}
    with pytest.raises(ac.CacheFormatError, match=f"version {version}, and this arrowcache reads 4"):
        Settings.from_json(json.dumps(record))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "3", '"text"', "{", "\0" * 100, '{"format": "other"}', "[" * 100_000]
)
def test_text_that_is_not_ours_is_refused(text):
    with pytest.raises(ac.CacheFormatError):
        Settings.from_json(text)


RECORD = {key: value for key, value in json.loads(SETTINGS.text).items() if key != "checksum"}


def with_checksum(record) -> str:
    """cache.json of these values."""
    record = {key: value for key, value in record.items() if key != "checksum"}
    return json.dumps(record | {"checksum": xxhash.xxh3_64_hexdigest(json.dumps(record).encode())})


@pytest.mark.parametrize("field", ["schema", "capacity_bytes", "segment_bytes", "full_rows", "headroom"])
@pytest.mark.parametrize("value", [None, "x", [], {}])
def test_a_damaged_field_is_refused(field, value):
    with pytest.raises(ac.CacheFormatError):
        Settings.from_json(with_checksum(RECORD | {field: value}))


@pytest.mark.parametrize("field", ["capacity_bytes", "segment_bytes", "full_rows"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_that_is_not_positive_is_refused(field, value):
    with pytest.raises(ac.CacheFormatError, match="not positive"):
        Settings.from_json(with_checksum(RECORD | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity_bytes", float("inf")), ("capacity_bytes", 1e9), ("capacity_bytes", True),
        ("capacity_bytes", "10000000"), ("segment_bytes", 2**62 + 1), ("full_rows", 2**31),
        ("full_rows", 125_001), ("capacity_bytes", 2**62 + 1), ("headroom", 1),
        ("headroom", float("nan")), ("headroom", float("inf")), ("headroom", -1), ("durable", 1),
        ("durable", "no"),
        ("schema", [{"name": "x", "type": "tensor", "dtype": "O", "shape": []}]),
        ("schema", [{"name": "x", "type": "tensor", "dtype": "i8", "shape": []}]),
        ("schema", 2 * [{"name": "x", "type": "tensor", "dtype": "int64", "shape": []}]),
        ("schema", [{"name": "x", "type": "tensor", "dtype": "int64", "shape": [2**62]}]),
    ],
)  # fmt: skip
def test_a_value_that_no_cache_has_is_refused(field, value):
    assert Settings.from_json(with_checksum(RECORD)) == SETTINGS
    with pytest.raises(ac.CacheFormatError, match="a value: "):
        Settings.from_json(with_checksum(RECORD | {field: value}))


def test_the_largest_and_smallest_values_that_a_cache_has_are_read():
    for more in (
        {"capacity_bytes": 2**62, "segment_bytes": 2**62, "full_rows": 2**31 - 1}, {"full_rows": 125_000},
        {"headroom": 0.0}, {"headroom": 0.999, "durable": False}, {"capacity_bytes": 1, "full_rows": 1},
    ):  # fmt: skip
        assert Settings.from_json(with_checksum(RECORD | more)) == replace(SETTINGS, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"evict": "never"},
        {"evict": "never", "headroom": None},
        {"pace": {"min_rows": 1, "samples_per_second": 3}},
        {"schema": [{"name": "x", "type": "jagged", "dtype": "int64"}]},
        {"schema": [{"name": "x", "type": "tensor", "dtype": "float8", "shape": []}]},
        {"schema": [{"name": "x", "type": "string", "encoding": "utf-16"}]},
        {"headroom": {"rows": 7}},
    ],
)
def test_what_a_later_release_wrote_is_a_newer_format_and_no_damage(more):
    """It was called damaged, with the advice to remove the folder."""
    with pytest.raises(
        ac.CacheFormatError, match=r"newer one made or changed.*Nothing was touched"
    ) as caught:
        Settings.from_json(with_checksum(json.loads(SETTINGS.text) | more))
    assert "damage" not in str(caught.value)
    assert "remove" not in str(caught.value)


def test_a_key_that_is_gone_and_one_of_the_pace_are_named():
    record = json.loads(SETTINGS.text)
    with pytest.raises(ac.CacheFormatError, match="a form without 'durable', which this arrowcache does not"):
        Settings.from_json(with_checksum({name: record[name] for name in record if name != "durable"}))
    with pytest.raises(ac.CacheFormatError, match="a value: a pace with 'burst', which this arrowcache does"):
        Settings.from_json(with_checksum(record | {"pace": {"min_rows": 1, "burst": 2}}))


@pytest.mark.parametrize("text", [SETTINGS.text, json.dumps(RECORD)])
def test_an_unknown_key_is_a_newer_format_whatever_the_checksum_says(text):
    """A later one may be made in another way."""
    with pytest.raises(ac.CacheFormatError, match=r"cache\.json has 'evict', 'more', which this arrowcache"):
        Settings.from_json(json.dumps(json.loads(text) | {"more": 1, "evict": "never"}))


def test_no_advice_about_a_damaged_cache_json_removes_anything():
    with pytest.raises(ac.CacheFormatError, match=r"damaged.*put back a copy") as caught:
        Settings.from_json(SETTINGS.text.replace("10000000", "10000001"))
    assert "remove" not in str(caught.value)
    assert "delete" not in str(caught.value)


def test_a_flipped_bit_in_the_settings_is_found_or_changes_nothing():
    data, refused = SETTINGS.text.encode(), 0
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            try:
                assert Settings.from_json(altered.decode()) == SETTINGS
            except (ac.CacheFormatError, UnicodeDecodeError):
                refused += 1
    assert refused > 7 * len(data)


@pytest.mark.parametrize(
    "field",
    ["format", "version", "schema", "capacity_bytes", "segment_bytes", "full_rows", "headroom", "durable"],
)
def test_a_missing_field_is_refused(field):
    record = json.loads(SETTINGS.text)
    del record[field]
    with pytest.raises(ac.CacheFormatError):
        Settings.from_json(json.dumps(record))


def test_a_setting_that_stands_by_itself_is_an_argument_of_create():
    assert {*OPTIONS} <= {*inspect.signature(ac.Cache.create).parameters}


@pytest.mark.parametrize("durable", ["no", "false", 0, 1.0])
def test_durable_is_one_of_two(durable):
    """Any text was taken for yes."""
    with pytest.raises(ValueError, match=f"durable={durable!r} is neither True nor False"):
        settings_of(SCHEMA, 100 * MIB, durable=durable)
