"""Usage: the counts of what came, was served, and went."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers import make_cache, publish

import arrowcache as ac
from arrowcache.storage.layout import USAGE_COUNTS, USAGE_SEQS, SegmentInfo, UsageRecord
from arrowcache.storage.locks import LockFile
from arrowcache.storage.usage import Usage


@pytest.fixture
def store(tmp_path):
    with make_cache(tmp_path / "cache", capacity="10MB", segment_bytes="1MB") as cache:
        yield cache.store


@pytest.fixture
def usage(store):
    return store.usage


def seqs(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def segment(seq: int, rows: int = 10) -> SegmentInfo:
    return SegmentInfo(seq, rows, "", 1000, 4096, 0.0)


def test_a_new_cache_has_counted_nothing(usage):
    assert usage.record() == UsageRecord()
    assert usage.served(seqs(0, 1, 5)).tolist() == [0, 0, 0]
    assert usage.served(seqs()).tolist() == []


def test_each_segment_has_a_count_of_its_own(usage):
    usage.count_epoch(seqs(3, 4, 5, 100_000), 1)
    usage.count_epoch(seqs(4, 100_000), 2)
    assert usage.served(seqs(2, 3, 4, 5, 6, 99_999, 100_000)).tolist() == [0, 1, 3, 1, 0, 0, 3]


def test_a_count_never_turns_over(usage):
    usage.count_epoch(seqs(0, 1), 2**33)
    usage.count_epoch(seqs(1), 5)
    usage.count_epoch(seqs(2), -5)
    assert usage.served(seqs(0, 1, 2)).tolist() == [2**32 - 1, 2**32 - 1, 0]


def test_seqs_over_the_end_of_the_places_are_counted_from_the_beginning(store, usage):
    around = seqs(USAGE_SEQS - 1, USAGE_SEQS, USAGE_SEQS + 1)
    store.folder.usage.unlink()  # a sparse file so long is more than some file systems take
    store.folder.complete()
    usage.count_epoch(around[1:], 7)
    assert usage.served(around[1:]).tolist() == [7, 7]
    assert usage.served(seqs(0, 1)).tolist() == [7, 7]


def test_no_change_of_counts_runs_over_the_end_of_the_places():
    class Places:
        def change_usage(self, start, nbytes, change):
            changed.append(((start - USAGE_COUNTS) // 4, len(change(b"")) // 4))

    changed = []
    Usage(Places()).count_epoch(np.arange(USAGE_SEQS - 3, USAGE_SEQS + 2), 1)
    assert changed == [(USAGE_SEQS - 3, 3), (0, 2)]


def test_what_is_evicted_unread_is_told_from_what_was_served(usage):
    usage.count_epoch(seqs(1), 1)
    usage.add_evicted([segment(0, 10), segment(1, 20), segment(2, 40)])
    record = usage.record()
    assert (record.evicted_segments, record.evicted_rows, record.unread_rows) == (3, 70, 50)


def test_the_disk_gets_the_counts_of_evicted_segments_back(store, usage):
    counted = np.arange(20_000)
    usage.count_epoch(counted, 1)
    with open(store.folder.usage, "rb") as file:
        os.fsync(file.fileno())  # a file system may allocate late
        before = os.fstat(file.fileno()).st_blocks
        for first in range(0, 19_000, 50):
            usage.add_evicted([segment(seq) for seq in range(first, first + 50)])
        os.fsync(file.fileno())
        assert os.fstat(file.fileno()).st_blocks < before / 2
    assert usage.served(counted)[19_000:].tolist() == [1] * 1000


@pytest.mark.parametrize("last", [10_229, 10_230, 10_239, 10_240])
def test_the_counts_of_segments_that_stay_are_kept_wherever_the_last_one_that_left_lies(usage, last):
    usage.count_epoch(np.arange(12_000), 1)
    usage.add_evicted([segment(seq) for seq in range(last + 1)])
    assert usage.served(np.arange(last + 1, 12_000)).all()


def test_a_pace_goes_by_what_comes_after_it(usage):
    usage.add_inserted(0, 100)
    usage.add_served(50)
    usage.begin_pace()
    record = usage.record()
    assert (record.paced_inserted_rows, record.paced_served_rows) == (100, 50)


def test_samplers_see_that_a_loader_waits(usage):
    assert not usage.a_loader_waits()
    with usage.show_waiting(), usage.show_waiting():
        assert usage.a_loader_waits()
    assert not usage.a_loader_waits()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 56, b"short", b"\x80" * 10_000])
def test_damaged_counts_are_numbers_still(tmp_path, damage):
    with make_cache(tmp_path / "cache", capacity="10MB", segment_bytes="1MB") as cache:
        cache.store.folder.usage.write_bytes(damage)
        publish(cache, 3)
        with ac.Loader(cache, 16) as loader:
            assert sum(1 for _ in loader) == 3
        assert str(cache.stats())
        assert cache._repr_html_()
        cache.evict("10MB")
        assert cache.stats().segments == 0


def test_a_pace_is_kept_after_totals_were_damaged(tmp_path):
    with make_cache(tmp_path / "cache", capacity="10MB", segment_bytes="1MB") as cache:
        cache.set_pace(ac.Pace(samples_per_insert=1, tolerance=0))
        cache.store.folder.usage.write_bytes(b"\xff" * 8 + bytes(range(100, 148)))
        publish(cache, 1)
        assert (cache.stats().inserted_rows, cache.stats().served_rows) == (16, 0)
        assert "16 served rows behind" in cache.stats().paced


def test_a_new_segment_was_served_to_nobody_whatever_its_place_holds(tmp_path):
    with make_cache(tmp_path / "cache", capacity="10MB", segment_bytes="1MB") as cache:
        cache.store.folder.usage.write_bytes(b"\0" * USAGE_COUNTS + b"\xff" * 100)
        publish(cache, 3)
        cache.set_pace(ac.Pace(max_reuse=1))
        with ac.Loader(cache, 16, timeout=0.2) as loader:
            assert sum(1 for _ in loader) == 3
        assert cache.stats().times_served == 1


def test_a_cache_without_counts_goes_on_without_them(tmp_path):
    with make_cache(tmp_path / "cache", capacity="10MB", segment_bytes="1MB") as cache:
        publish(cache, 3)
        cache.store.folder.usage.unlink()
        publish(cache, 1)
        with ac.Loader(cache, 16) as loader:
            assert sum(1 for _ in loader) == 4
        assert cache.stats().inserted_rows == 0
    with ac.Cache.open(cache.path) as cache:  # which makes the file again
        publish(cache, 1)
        assert cache.stats().inserted_rows == 16


def test_counts_begin_behind_the_record():
    assert UsageRecord.nbytes <= USAGE_COUNTS


def test_a_sign_of_writing_is_seen_until_the_last_one_is_closed(usage):
    assert not usage.somebody_writes()
    first, second = usage.show_writing(), usage.show_writing()
    first.close()
    assert usage.somebody_writes()
    assert not usage.a_loader_waits()
    second.close()
    assert not usage.somebody_writes()


def test_the_two_signs_are_told_apart_and_are_where_other_releases_look(store, usage):
    with usage.show_waiting(), LockFile(store.folder.usage) as other:
        assert usage.a_loader_waits()
        assert not usage.somebody_writes()
        assert other.conflict(0, 2**63 - 1) == range(2**62, 2**62 + 1)
        with usage.show_writing():
            assert other.conflict(2**62 + 1, 9) == range(2**62 + 1, 2**62 + 2)
    assert not usage.a_loader_waits()
