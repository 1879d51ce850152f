"""Rows of files on their way into a cache: which are there, and what a bad file leaves."""

from __future__ import annotations

import pytest
from helpers import ids_of, make_cache, sample

from arrowcache.storage.file_rows import FileRows, file_rows_of
from arrowcache.storage.ingest import Imported, Ingest

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
