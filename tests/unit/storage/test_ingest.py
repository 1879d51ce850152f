"""Rows of files on their way into a cache: which are missing, how files differ, what a bad one leaves."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ids_of, make_cache, sample
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.storage.ingest import Coverage, Imported, Ingest, fingerprint
from arrowcache.storage.layout import FileRows, SegmentInfo, file_rows_of

ONE, OTHER = "0123456789abcdef", "f" * 16


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


def begun(cache, **options):
    return Ingest(cache.store.settings, lambda: cache.store, "parquet", **options)


def take(ingest, fingerprint, numbers):
    ingest.begin(fingerprint, 0)
    for number in numbers:
        ingest.take(sample(number), many=False)
    ingest.end()


def tasks(cache):
    return [file_rows_of(segment.task) for segment in cache.store.segments()]


def ids(cache):
    with cache.snapshot() as snapshot:
        return ids_of([snapshot.gather(range(len(snapshot)))])


def test_a_file_goes_on_in_the_next_segment_and_is_known_to_the_next_import(cache):
    with begun(cache) as ingest:
        take(ingest, ONE, range(20))
        assert ids(cache) == [*range(16)]
        assert (ingest.rows_of(ONE), ingest.missing(ONE, 20)) == (20, []), "pending rows count"
        ingest.publish()
        ingest.publish()
        nbytes = sum(segment.allocated_bytes for segment in cache.store.segments())
        assert ingest.published == Imported(20, 2, nbytes)
    assert tasks(cache) == [(FileRows(ONE, 0, 16),), (FileRows(ONE, 16, 4, is_last=True),)]
    with begun(cache) as again:
        again.open()
        assert again.missing(ONE, 20) == []
        assert again.missing(OTHER, 5) == [(0, 5)]


def test_small_files_share_a_segment(cache):
    with begun(cache) as ingest:
        take(ingest, ONE, range(3))
        take(ingest, OTHER, range(3, 7))
        ingest.publish()
    assert tasks(cache) == [(FileRows(ONE, 0, 3, is_last=True), FileRows(OTHER, 0, 4, is_last=True))]


def test_what_was_not_published_is_discarded(cache):
    with begun(cache) as ingest:
        take(ingest, ONE, range(3))
    ingest.publish()
    assert tasks(cache) == []


def test_a_bad_file_leaves_none_of_its_rows_and_is_missing_again(cache):
    with begun(cache) as ingest:
        take(ingest, ONE, range(20))
        take(ingest, OTHER, range(20, 50))
        assert len(ids(cache)) == 48
        assert ingest.give_up(OTHER) == []
        assert ids(cache) == [*range(16)], "those of the file before, in the same segment, leave too"
        assert ingest.missing(OTHER, 30) == [(0, 30)]
        assert ingest.missing(ONE, 20) == [(16, 20)]
        assert (ingest.published.rows, ingest.published.segments) == (16, 1)
        assert cache.verify() == []


def test_of_a_bad_file_stays_what_somebody_reads(cache):
    with begun(cache) as ingest:
        take(ingest, ONE, range(32))
        ingest.publish()
        with cache.snapshot():
            assert [segment.rows for segment in ingest.give_up(ONE)] == [16, 16]
        assert ids(cache) == [*range(32)]
        assert ingest.missing(ONE, 32) == []


def test_what_is_imported_again_is_taken_back_alone(cache):
    with begun(cache) as ingest:
        take(ingest, ONE, range(16))
        ingest.publish()
    published, writes = [], cache.store.usage.somebody_writes
    with begun(cache, again="01234567", before=lambda: published.append(len(ids(cache)))) as again:
        assert again.give_up(ONE) == []
        assert again.store is None, "it was not needed"
        assert not writes()
        assert again.missing(ONE, 16) == [(0, 16)], "whatever is there"
        take(again, ONE, range(16, 48))
        again.publish()
        assert published == [16, 32]
        assert writes()
        assert again.give_up(ONE) == []
        assert ids(cache) == [*range(16)]
        assert again.published == Imported()
    assert not writes()


# which rows are missing


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
