"""On-disk names and records, as values."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache.storage.layout import LockRecord, SegmentInfo, Settings, parse_segment_name, segment_name

SETTINGS = Settings(ac.Schema({"x": ac.Tensor("int64")}), 10_000_000, 1_000_000, 50, 0.1, durable=True)
tasks = st.from_regex(r"[A-Za-z0-9_.-]{0,150}", fullmatch=True)


@given(st.integers(0, 10**20 - 1), st.integers(1, 10**18), tasks)
def test_a_segments_name_tells_what_it_was_made_of(seq, rows, task):
    assert parse_segment_name(segment_name(seq, rows, task)) == (seq, rows, task)
    assert SegmentInfo(seq, rows, task, 1, 2, 3.0).name == segment_name(seq, rows, task)


@given(st.integers(0, 10**19), st.integers(0, 10**19))
def test_names_sort_as_their_numbers(first, second):
    assert (segment_name(first, 1, "") < segment_name(second, 1, "")) == (first < second)


@pytest.mark.parametrize(
    "name",
    ["", "cache.json", "1-1-.arrow", f"{1:020d}-0-.arrow", f"{1:020d}-01-.arrow", f"{1:020d}--.arrow",
     f"{1:020d}-1-a/b.arrow", f"{1:020d}-1-.arrow\n", f"{1:020d}-1-.part", f"{1:021d}-1-.arrow",
     f"{1:020d}-1-.arrow.reason", f"{1:020d}-1-é.arrow", "\u0660" * 20 + "-1-.arrow",
     f"{1:020d}-{'9' * 20}-.arrow"],
)  # fmt: skip
def test_another_name_is_none_of_ours(name):
    assert parse_segment_name(name) is None


def test_settings_survive_their_text():
    assert Settings.from_json(SETTINGS.text) == SETTINGS
    assert Settings.from_json(SETTINGS.with_capacity(7).text).capacity_bytes == 7


def test_headroom_is_a_share_of_the_capacity_but_at_least_two_segments():
    assert SETTINGS.headroom_bytes == 2_000_000
    assert SETTINGS.with_capacity(50_000_000).headroom_bytes == 5_000_000


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_another_format_version_is_refused_with_both(version):
    record = json.loads(SETTINGS.text) | {"version": version}
    with pytest.raises(ac.CacheFormatError, match=f"version {version}.*reads 1"):
        Settings.from_json(json.dumps(record))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", "3", '"text"', "{", "\0" * 100, '{"format": "other"}', "[" * 100_000]
)
def test_text_that_is_not_ours_is_refused(text):
    with pytest.raises(ac.CacheFormatError):
        Settings.from_json(text)


@pytest.mark.parametrize("field", ["schema", "capacity_bytes", "segment_bytes", "full_rows", "headroom"])
@pytest.mark.parametrize("value", [None, "x", [], {}])
def test_a_damaged_field_is_refused(field, value):
    with pytest.raises(ac.CacheFormatError):
        Settings.from_json(json.dumps(json.loads(SETTINGS.text) | {field: value}))


@pytest.mark.parametrize("field", ["capacity_bytes", "segment_bytes", "full_rows"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_that_is_not_positive_is_refused(field, value):
    with pytest.raises(ac.CacheFormatError, match="not positive"):
        Settings.from_json(json.dumps(json.loads(SETTINGS.text) | {field: value}))


@pytest.mark.parametrize(
    "field",
    ["format", "version", "schema", "capacity_bytes", "segment_bytes", "full_rows", "headroom", "durable"],
)
def test_a_missing_field_is_refused(field):
    record = json.loads(SETTINGS.text)
    del record[field]
    with pytest.raises(ac.CacheFormatError):
        Settings.from_json(json.dumps(record))


@given(st.integers(0, 2**62), st.integers(0, 2**62), st.uuids().map(str))
def test_a_lock_record_survives_its_bytes(next_seq, suspect_below, boot_id):
    record = LockRecord(next_seq, suspect_below, boot_id)
    assert LockRecord.unpack(record.pack()) == record


@given(st.binary(max_size=80))
def test_any_bytes_are_some_record(data):
    record = LockRecord.unpack(data)
    assert 0 <= record.next_seq <= 2**62
    assert 0 <= record.suspect_below <= 2**62


def test_an_empty_record_is_zero():
    assert LockRecord.unpack(b"") == LockRecord(0, 0, "")
