"""Where imported rows come from: names of tasks, which rows are missing, and what tells files apart."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.storage.file_rows import (
    Coverage,
    FileRows,
    file_rows_of,
    fingerprint,
    has_place,
    kind_of_import,
    sampler_of,
    task_of,
)
from arrowcache.storage.layout import SegmentInfo, parse_segment_name, segment_name

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
    task = task_of(kind, kept, again)
    assert file_rows_of(task) == tuple(kept)
    assert kind_of_import(task) == kind
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
    assert kind_of_import(task) == ""


def covered(*origins: FileRows) -> Coverage:
    coverage = Coverage()
    for origin in origins:
        coverage.add(origin)
    return coverage


def test_what_is_missing_of_a_file():
    coverage = covered(
        FileRows(ONE, 20, 10), FileRows(ONE, 10, 10), FileRows(ONE, 50, 5), FileRows(OTHER, 0, 99)
    )
    assert coverage.missing(ONE, 100) == [(0, 10), (30, 50), (55, 100)]
    assert coverage.missing(ONE, 55) == [(0, 10), (30, 50)]
    assert coverage.missing(ONE, 100, [FileRows(ONE, 55, 45), FileRows(ONE, 0, 10)]) == [(30, 50)]
    assert coverage.missing("a" * 16, 7) == [(0, 7)]
    assert coverage.rows(ONE, [FileRows(ONE, 52, 8), FileRows(OTHER, 99, 1)]) == 30
    assert coverage.missing("a" * 16, 0) == []
    coverage.forget(FileRows(ONE, 50, 5))
    coverage.forget(FileRows(ONE, 50, 5))
    assert coverage.missing(ONE, 55) == [(0, 10), (30, 55)]


def test_where_the_end_of_a_file_is_not_known_there_may_be_more():
    assert covered(FileRows(ONE, 0, 10)).missing(ONE) == [(10, None)]
    assert covered(FileRows(ONE, 0, 10), FileRows(ONE, 10, 5, is_last=True)).missing(ONE) == []
    assert covered(FileRows(ONE, 10, 5, is_last=True)).missing(ONE) == [(0, 10)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20))), st.integers(0, 80))
def test_what_is_there_and_what_is_missing_are_the_file(runs, total):
    runs = [(first, rows) for first, rows in runs if first + rows <= total]
    missing = covered(*(FileRows(ONE, first, rows) for first, rows in runs)).missing(ONE, total)
    there = {row for first, rows in runs for row in range(first, first + rows)}
    assert {row for first, stop in missing for row in range(first, stop)} == set(range(total)) - there


def test_the_folder_says_what_is_there():
    tasks = [
        f"parquet.{ONE}-0-10",
        "",
        "default.0.3",
        f"parquet.{ONE}-10-2e.{OTHER}-0-6",
        f"tfrecord.{OTHER}-6-1",
    ]
    listed = [SegmentInfo(seq, 10, task, 0, 0, 0.0) for seq, task in enumerate(tasks)]
    assert Coverage(listed).missing(ONE) == []
    assert Coverage(listed).missing(OTHER, 10) == [(7, 10)]


def test_a_file_is_known_by_its_bytes_wherever_it_lies(tmp_path):
    (tmp_path / "a").write_bytes(b"1" * 3_000_000)
    (tmp_path / "b").write_bytes(b"1" * 3_000_000)
    (tmp_path / "c").write_bytes(b"1" * 2_999_999 + b"2")
    (tmp_path / "empty").touch()
    a, b, c, empty = (fingerprint(tmp_path / name) for name in ("a", "b", "c", "empty"))
    assert a == b
    assert len({a, c, empty}) == 3
    assert all(len(found) == 16 for found in (a, c, empty))


def test_files_of_one_length_and_one_footer_are_two(tmp_path):
    """Why it is not the footer's: shards of pictures that are stored as they are."""
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        pixels = rng.permutation(np.arange(256, dtype=np.uint8).repeat(40))
        images = pa.FixedSizeListArray.from_arrays(pa.array(pixels), 64)
        table = pa.table({"image": images})
        pq.write_table(table, tmp_path / name, compression="none", use_dictionary=False)
    footers = []
    for name in ("a", "b"):
        data = (tmp_path / name).read_bytes()
        length = int.from_bytes(data[-8:-4], "little")
        footers.append(data[-8 - length :])
    assert footers[0] == footers[1]
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


@pytest.mark.parametrize(
    ("task", "sampler"),
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
def test_a_task_tells_the_sampler(task, sampler):
    assert sampler_of(task) == sampler


@pytest.mark.parametrize("again", ["", "01234567"])
@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_a_name_has_as_many_files_as_two_hundred_characters_hold(kind, again):
    """The next file's rows may take ten digits, and be its last."""
    met = set()
    for digits in range(1, 19):
        for files in range(1, 8):
            origins = [*[FileRows(ONE, 0, 10)] * files, FileRows(ONE, 10 ** (digits - 1), 10)]
            length = len(task_of(kind, [*origins, FileRows(OTHER, 7, 9_999_999_999, is_last=True)], again))
            assert has_place(kind, origins, 7, again) == (length <= 200), length
            met.add(length)
    assert {200, 201} <= met
