"""On-disk names and records, as values."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache.errors import CacheFormatError
from arrowcache.storage.layout import (
    MOST_SEQ,
    RANKS_NAME,
    TOP_NAMES,
    LockRecord,
    RanksRecord,
    SegmentInfo,
    Settings,
    UsageRecord,
    joiner_line,
    joiners,
    modes,
    newer_names,
    parse_segment_name,
    ranks_name,
    segment_name,
    shared_on_purpose,
    tasks_listed,
)

SETTINGS = Settings(ac.Schema({"x": ac.Tensor("int64")}), 10_000_000, 1_000_000, 50, 0.1, durable=True)
tasks = st.from_regex(r"[A-Za-z0-9_.-]{0,150}", fullmatch=True)


@pytest.mark.slow
@given(st.integers(0, MOST_SEQ - 1), st.integers(1, 2**31 - 1), tasks)
def test_a_segments_name_tells_what_it_was_made_of(seq, rows, task):
    assert parse_segment_name(segment_name(seq, rows, task)) == (seq, rows, task)
    assert SegmentInfo(seq, rows, task, 1, 2, 3.0).name == segment_name(seq, rows, task)


def test_the_tasks_of_a_pool_are_told_from_those_of_others():
    def listed(*tasks):
        return [SegmentInfo(seq, 1, task, 1, 2, 3.0) for seq, task in enumerate(tasks)]

    assert tasks_listed("a.0", listed("a.0.4", "a.0.11", "a.0.9", "b.0.30", "a.0.x", "a.00.40", "")) == {
        4,
        11,
        9,
    }
    assert (
        tasks_listed("a.0", listed("a.0.1.50", "x.a.0.51", "a.0.-1", "a.0.", "52", "a.0." + "9" * 19))
        == set()
    )
    assert tasks_listed("a.0", []) == set()


@given(st.integers(0, 10**19), st.integers(0, 10**19))
def test_names_sort_as_their_numbers(first, second):
    assert (segment_name(first, 1, "") < segment_name(second, 1, "")) == (first < second)


@pytest.mark.parametrize(
    "name",
    ["", "cache.json", "1-1-.arrow", f"{1:020d}-0-.arrow", f"{1:020d}-01-.arrow", f"{1:020d}--.arrow",
     f"{1:020d}-1-a/b.arrow", f"{1:020d}-1-.arrow\n", f"{1:020d}-1-.part", f"{1:021d}-1-.arrow",
     f"{1:020d}-1-.arrow.reason", f"{1:020d}-1-é.arrow", "\u0660" * 20 + "-1-.arrow",
     f"{1:020d}-{'9' * 20}-.arrow", f"{1:020d}-{2**31}-.arrow",
     f"{MOST_SEQ:020d}-1-.arrow", f"{'9' * 20}-1-.arrow"],
)  # fmt: skip
def test_another_name_is_none_of_ours(name):
    assert parse_segment_name(name) is None


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


@pytest.mark.parametrize("name", ["labels", "index.json", "notes.lock", "row_groups", "leases"])
def test_an_unknown_name_such_as_a_format_has_is_of_a_newer_one(name):
    assert newer_names([*TOP_NAMES, name]) == [name]


@pytest.mark.parametrize(
    "name",
    [".nfs00000001", "lost+found", "cache.json.bak", "cache.json~", ".cache.json.swp", ".ipynb_checkpoints",
     "#cache.json#", "README.md", "Untitled.ipynb", "nohup.out", "core.4711", "notes.txt", "2026", "été",
     "notes\n", "__pycache__", ".DS_Store", "cache (1).json"],
)  # fmt: skip
def test_another_name_there_is_somebodys_own(name):
    assert newer_names([*TOP_NAMES, name]) == []


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


@given(st.integers(0, MOST_SEQ), st.integers(0, MOST_SEQ), st.uuids().map(str))
def test_a_lock_record_survives_its_bytes(next_seq, suspect_below, boot_id):
    record = LockRecord(next_seq, suspect_below, boot_id)
    assert LockRecord.unpack(record.pack()) == record


@given(st.binary(max_size=80))
def test_any_bytes_are_some_record(data):
    record = LockRecord.unpack(data)
    assert 0 <= record.next_seq <= MOST_SEQ
    assert 0 <= record.suspect_below <= MOST_SEQ


def test_an_empty_record_and_one_of_numbers_that_no_cache_has_are_zero():
    assert LockRecord.unpack(b"") == LockRecord(0, 0, "")
    assert LockRecord.unpack(b"\xff" * 52) == LockRecord()
    assert LockRecord.unpack(LockRecord(MOST_SEQ + 1, 3, "boot").pack()) == LockRecord()


RUNS = [
    "",
    "job",
    "127.0.0.1:29500",
    "../../etc/passwd",
    "a/b",
    "a-b",
    "é\u4e2d\U0001f600",
    "x" * 1000,
    "\0\n",
    "\udcff",
]


@pytest.mark.parametrize("run", RUNS)
def test_any_run_has_a_safe_file_name_of_its_own(run):
    name = ranks_name(run, 3, 10**9, 2)
    assert RANKS_NAME.fullmatch(name)
    assert name.isascii()
    assert not set("/\0") & set(name)
    assert len(name) <= 100
    assert name.endswith("-3-1000000000.2")
    others = [ranks_name(other, 3, 10**9, 2) for other in RUNS if other != run]
    assert name not in others


def test_loaders_epochs_and_their_repetitions_have_names_of_their_own():
    names = [
        ranks_name("r", loader, epoch, repeat) for loader in (0, 1) for epoch in (0, 1) for repeat in (0, 1)
    ]
    assert len(set(names)) == 8
    assert all(RANKS_NAME.fullmatch(name) for name in names)


@pytest.mark.parametrize(
    "name", ["notes.txt", "-0-0", "job-0-0", f"a/b-{'0' * 16}-0-0", f"job-{'0' * 16}-0-0.part"]
)
def test_another_name_in_ranks_is_none_of_ours(name):
    assert not RANKS_NAME.fullmatch(name)


terms = st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())


@pytest.mark.slow
@given(
    terms,
    st.sets(st.integers(0, 300) | st.integers(0, MOST_SEQ - 1)),
    st.sets(st.integers(0, 2**22)),
    st.integers(0, MOST_SEQ),
    st.integers(0, 2**60),
)
def test_what_ranks_agree_on_survives_its_bytes(terms, seqs, pids, next_seq, left_out_rows):
    data = RanksRecord(terms, sorted(seqs), next_seq, left_out_rows).pack()
    for pid in pids:
        data += joiner_line(1, pid)
    read = RanksRecord.unpack(data)
    assert read.terms == terms
    assert list(read.seqs) == sorted(seqs)
    assert (read.next_seq, read.left_out_rows) == (next_seq, left_out_rows)
    assert joiners(data) == {b"1 %d\n" % pid for pid in pids}


@given(st.data())
def test_a_flipped_bit_in_what_ranks_agree_on_is_noticed(data):
    packed = RanksRecord({"batch_size": 64, "shuffle": "rows"}, range(5, 40)).pack()
    position = data.draw(st.integers(0, len(packed) - 2))  # the line's end is no content
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(packed)
    damaged[position] ^= 1 << bit
    with pytest.raises(CacheFormatError):
        RanksRecord.unpack(bytes(damaged))


@pytest.mark.parametrize("length", [0, 1, 16, 17, 40])
def test_half_of_what_ranks_agree_on_is_noticed(length):
    with pytest.raises(CacheFormatError):
        RanksRecord.unpack(RanksRecord({"seed": 1}, range(9)).pack()[:length])


def line_of(record):
    text = json.dumps(record).encode()
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


AGREED = {"version": 4, "terms": {}, "runs": [], "seen": [0, 0]}


@pytest.mark.parametrize(
    "record",
    [
        [], {}, {"version": 4}, AGREED | {"version": 1}, AGREED | {"terms": 5},
        *(AGREED | {"runs": runs} for runs in (
            [1], ["a", "b"], None, [0, 2**20 + 1], [MOST_SEQ, 1], [5, 1, -5, 1], [0, True], [0, -3],
        )),
        *(AGREED | {"seen": seen} for seen in (
            [0], [-1, 0], [0, "1"], 5, [MOST_SEQ + 1, 0], [0, -1], [0, 2**62 + 1],
        )),
    ],
)  # fmt: skip
def test_content_that_is_sound_but_none_of_ours_is_refused(record):
    with pytest.raises(CacheFormatError):
        RanksRecord.unpack(line_of(record))


def test_ranks_agree_on_as_much_as_there_may_be():
    assert len(RanksRecord.unpack(line_of(AGREED | {"runs": [0, 2**20]})).seqs) == 2**20
    last = RanksRecord.unpack(line_of(AGREED | {"runs": [MOST_SEQ - 1, 1], "seen": [MOST_SEQ, 2**62]}))
    assert (list(last.seqs), last.next_seq, last.left_out_rows) == ([MOST_SEQ - 1], MOST_SEQ, 2**62)


def test_a_segment_of_more_rows_than_arrow_counts_is_none_of_ours():
    assert parse_segment_name(segment_name(1, 2**31 - 1, "")) == (1, 2**31 - 1, "")
    assert parse_segment_name(segment_name(1, 2**31, "")) is None


def test_totals_survive_their_bytes_and_such_as_nobody_counted_are_zero():
    totals = UsageRecord(2**62, 1_000_000, 3, 4, 5, 6, 2**40)
    assert UsageRecord.unpack(totals.pack()) == totals
    assert UsageRecord(2**62 + 1).pack() == UsageRecord(2**62).pack()
    assert UsageRecord.unpack(totals.pack()[:20]) == UsageRecord(2**62, 1_000_000, 3 % 2**32)
    assert UsageRecord.unpack(b"\xff" * UsageRecord.nbytes) == UsageRecord()


def test_segments_that_are_not_in_a_row_survive_their_bytes():
    seqs = [0, 1, 2, 5, 7, 8, 10**9]
    assert list(RanksRecord.unpack(RanksRecord({}, seqs).pack()).seqs) == seqs


def test_what_ranks_agree_on_stays_small_for_many_segments():
    offset = 10**9
    in_a_row = RanksRecord({}, range(offset, offset + 16_000)).pack()
    assert len(in_a_row) < 100
    every_tenth_held_out = RanksRecord({}, [offset + i for i in range(16_000) if i % 10]).pack()
    assert len(every_tenth_held_out) < 8 * 1024
    worst = RanksRecord({}, range(offset, offset + 16_000, 2)).pack()
    assert len(worst) < 33 * 1024


@pytest.mark.parametrize(
    ("mode", "is_on_purpose"),
    [(0o770, True), (0o2770, True), (0o2775, True), (0o775, False), (0o777, False), (0o2750, False)],
)
def test_an_empty_folder_is_for_a_group_if_it_hands_it_on_or_shuts_others_out(mode, is_on_purpose):
    assert shared_on_purpose(mode) is is_on_purpose


def test_a_group_that_may_do_all_in_the_folder_may_read_and_write_the_files_and_nobody_else_may():
    assert modes(0o2775) == (0o660, 0o2770)
    assert modes(0o770) == (0o660, 0o770)
    assert modes(0o750) == modes(0o2707) == (0o600, 0o700)
