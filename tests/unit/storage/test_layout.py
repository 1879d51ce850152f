"""On-disk names and records, as values."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.errors import CacheFormatError
from arrowcache.storage.layout import (
    MAX_SEQ,
    RANKS_NAME,
    TOP_NAMES,
    FileRows,
    LockRecord,
    RanksRecord,
    SegmentInfo,
    UsageRecord,
    file_rows_of,
    has_place,
    import_task,
    joiner_line,
    joiners,
    merge_task,
    modes,
    newer_names,
    parse_segment_name,
    parts_of,
    publisher_of,
    ranks_name,
    segment_name,
    shared_on_purpose,
    tasks_listed,
)

tasks = st.from_regex(r"[A-Za-z0-9_.-]{0,150}", fullmatch=True)


@pytest.mark.slow
@given(st.integers(0, MAX_SEQ - 1), st.integers(1, 2**31 - 1), tasks)
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
     f"{MAX_SEQ:020d}-1-.arrow", f"{'9' * 20}-1-.arrow"],
)  # fmt: skip
def test_another_name_is_none_of_ours(name):
    assert parse_segment_name(name) is None


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


@given(st.integers(0, MAX_SEQ), st.integers(0, MAX_SEQ), st.uuids().map(str))
def test_a_lock_record_survives_its_bytes(next_seq, suspect_below, boot_id):
    record = LockRecord(next_seq, suspect_below, boot_id)
    assert LockRecord.unpack(record.pack()) == record


@given(st.binary(max_size=80))
def test_any_bytes_are_some_record(data):
    record = LockRecord.unpack(data)
    assert 0 <= record.next_seq <= MAX_SEQ
    assert 0 <= record.suspect_below <= MAX_SEQ


def test_an_empty_record_and_one_of_numbers_that_no_cache_has_are_zero():
    assert LockRecord.unpack(b"") == LockRecord(0, 0, "")
    assert LockRecord.unpack(b"\xff" * 52) == LockRecord()
    assert LockRecord.unpack(LockRecord(MAX_SEQ + 1, 3, "boot").pack()) == LockRecord()


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
    st.sets(st.integers(0, 300) | st.integers(0, MAX_SEQ - 1)),
    st.sets(st.integers(0, 2**22)),
    st.integers(0, MAX_SEQ),
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
            [1], ["a", "b"], None, [0, 2**20 + 1], [MAX_SEQ, 1], [5, 1, -5, 1], [0, True], [0, -3],
        )),
        *(AGREED | {"seen": seen} for seen in (
            [0], [-1, 0], [0, "1"], 5, [MAX_SEQ + 1, 0], [0, -1], [0, 2**62 + 1],
        )),
    ],
)  # fmt: skip
def test_content_that_is_sound_but_none_of_ours_is_refused(record):
    with pytest.raises(CacheFormatError):
        RanksRecord.unpack(line_of(record))


def test_ranks_agree_on_as_much_as_there_may_be():
    assert len(RanksRecord.unpack(line_of(AGREED | {"runs": [0, 2**20]})).seqs) == 2**20
    last = RanksRecord.unpack(line_of(AGREED | {"runs": [MAX_SEQ - 1, 1], "seen": [MAX_SEQ, 2**62]}))
    assert (list(last.seqs), last.next_seq, last.left_out_rows) == ([MAX_SEQ - 1], MAX_SEQ, 2**62)


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


# where the rows of a segment come from

ONE, OTHER = "0123456789abcdef", "f" * 16
ORIGINS = st.lists(
    st.builds(
        FileRows, st.sampled_from([ONE, OTHER]), st.integers(0, 10**15), st.integers(1, 10**9), st.booleans()
    ),
    min_size=1,
    max_size=20,
)


@pytest.mark.slow
@given(st.sampled_from(["parquet", "tfrecord"]), ORIGINS, st.sampled_from(["", "01234567"]))
def test_a_task_names_the_rows_and_is_a_segments_name(kind, origins, again):
    kept: list[FileRows] = []
    for origin in origins:
        if not has_place(kind, kept, origin.first, again):
            break
        kept.append(origin)
    assert kept
    task = import_task(kind, kept, again)
    assert file_rows_of(task) == tuple(kept)
    assert publisher_of(task) == kind
    name = segment_name(2**59, 2**31 - 1, task)
    assert len(name) < 255 - len(".reason")
    assert parse_segment_name(name) == (2**59, 2**31 - 1, task)


def test_a_segment_names_some_small_files():
    kept: list[FileRows] = []
    while has_place("parquet", kept, 0):
        kept.append(FileRows(ONE, 0, 100, is_last=True))
    assert len(kept) == 7


@pytest.mark.parametrize(
    "task",
    ["", "default.0.17", "parquet.3.17", "tfrecord.0123456789abcdef0123456789abcdef.3.17", f"mine.{ONE}-0-1",
     f"parquet.{ONE}-0-1.again-xyz", f"parquet.{ONE}-0-1 "],
)  # fmt: skip
def test_other_tasks_come_from_no_file(task):
    assert file_rows_of(task) == ()


@pytest.mark.parametrize(
    ("task", "publisher"),
    [
        ("", "writer"),
        ("default.0.17", "default.0"),
        ("a.b.c.3.17", "a.b.c.3"),
        ("mine", "mine"),
        ("tfrecord.0123456789abcdef.3.17", "tfrecord.01234567"),
        ("tfrecord.3.17", "tfrecord.3"),
        ("tfrecord.0123456789abcdef-0-16", "tfrecord"),
        ("parquet.0123456789abcdef-16-4e.fedcba9876543210-0-12", "parquet"),
    ],
)
def test_a_task_tells_the_publisher(task, publisher):
    assert publisher_of(task) == publisher


@pytest.mark.parametrize("again", ["", "01234567"])
@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_a_name_has_as_many_files_as_two_hundred_characters_hold(kind, again):
    """The next file's rows may take ten digits, and be its last."""
    met = set()
    for digits in range(1, 19):
        for files in range(1, 8):
            origins = [*[FileRows(ONE, 0, 10)] * files, FileRows(ONE, 10 ** (digits - 1), 10)]
            longest = FileRows(OTHER, 7, 9_999_999_999, is_last=True)
            length = len(import_task(kind, [*origins, longest], again))
            assert has_place(kind, origins, 7, again) == (length <= 200), length
            met.add(length)
    assert {200, 201} <= met


def segment_of(seq, task):
    return SegmentInfo(seq, 1, task, 10, 10, 0.0)


def test_the_name_tells_the_parts():
    parts = [segment_of(seq, "") for seq in (3, 4, 9)]
    assert parts_of(segment_of(20, merge_task(parts))) == range(3, 10)
    assert not parts_of(segment_of(20, ""))
    assert not parts_of(segment_of(20, "parts.x-3"))
