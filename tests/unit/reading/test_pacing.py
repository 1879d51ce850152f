"""Pacing: loaders and samplers of one cache wait for each other as its pace says, and never for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import append_rows, make_cache, publish, sample, wait_until

import arrowcache as ac


@pytest.fixture
def cache(tmp_path):
    with make_cache(tmp_path / "cache", capacity="10MB", segment_bytes="1MB") as cache:
        yield cache


def epoch(loader) -> int:
    return sum(1 for _ in loader)


def served(cache) -> list[int]:
    segments = cache.store.segments()
    return cache.store.usage.served(np.array([segment.seq for segment in segments], np.int64)).tolist()


def test_what_is_served_is_counted_by_epoch_and_segment(cache):
    publish(cache, 2)
    with ac.Loader(cache, 16) as loader:
        assert epoch(loader) == 2
        publish(cache, 1)
        assert epoch(loader) == 3
    stats = cache.stats()
    assert served(cache) == [2, 2, 1]
    assert (stats.inserted_rows, stats.served_rows) == (48, 80)
    assert stats.times_served == pytest.approx(5 / 3)
    assert stats.most_times_served == 2


def test_a_loader_that_is_not_paced_does_not_count_nor_wait(cache):
    publish(cache, 2)
    cache.set_pace(ac.Pace(min_rows=1000))
    with ac.Loader(cache, 16, paced=False, timeout=0.2) as loader:
        assert epoch(loader) == 2
    assert served(cache) == [0, 0]
    assert cache.stats().served_rows == 0


def test_looking_at_a_cache_does_not_count(cache):
    publish(cache, 2)
    with cache.snapshot() as snapshot:
        snapshot.gather([0, 1])
    assert served(cache) == [0, 0]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rows_that_an_ended_epoch_did_not_deliver_do_not_count(cache, steps):
    publish(cache, 4)
    with ac.Loader(cache, 16) as loader:
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        batches.close()
        assert cache.stats().served_rows == 16 * steps
        assert served(cache) == [int(steps > 0)] * 4


def wait_for_counts(cache, rows: int, times: list[int]) -> None:
    """An epoch that the read-ahead's thread is just beginning when another ends is given back there."""
    wait_until(
        lambda: cache.stats().served_rows == rows and served(cache) == times,
        "what was not delivered to be given back",
    )


@pytest.mark.parametrize("of", [lambda cache: cache, lambda cache: cache.path])
def test_an_epoch_that_ends_in_a_thread_that_has_the_lock_gives_back_what_it_did_not_deliver(cache, of):
    publish(cache, 4)
    with ac.Loader(of(cache), 16) as loader:
        batches = iter(loader)
        next(batches)
        with cache.store.locked():
            del batches  # as the garbage collector may
        assert cache.stats().served_rows == 16


def test_of_an_endless_run_what_was_delivered_counts(cache):
    publish(cache, 4)
    with ac.Loader(cache, 16) as loader:
        batches = loader.repeat()
        for _ in range(10):
            next(batches)
        batches.close()
        wait_for_counts(cache, 160, [3] * 4)


def test_an_old_iterator_that_is_dropped_late_takes_nothing_from_the_epoch_after_it(cache):
    publish(cache, 4)
    with ac.Loader(cache, 16) as loader:
        for _ in range(3):
            batches = iter(loader)  # the one before is dropped by this
            assert sum(1 for _ in batches) == 4
    assert cache.stats().served_rows == 3 * 64
    assert served(cache) == [3] * 4


def test_of_short_epochs_that_were_made_ahead_those_that_were_delivered_count(cache):
    publish(cache, 1)
    with ac.Loader(cache, 16, prefetch=4) as loader:
        batches = loader.repeat()
        next(batches)
        wait_until(lambda: cache.stats().served_rows >= 4 * 16, "epochs to be made ahead")
        batches.close()
        wait_for_counts(cache, 16, [1])


def test_a_short_last_batch_counts_its_rows(cache):
    publish(cache, 1)
    with ac.Loader(cache, 10, drop_last=False) as loader:
        assert epoch(loader) == 2
    assert cache.stats().served_rows == 16


def test_an_epoch_waits_for_min_rows(cache):
    publish(cache, 1)
    cache.set_pace(ac.Pace(min_rows=32))
    with ac.Loader(cache, 16, timeout=0.2) as loader:
        with pytest.raises(ac.LoaderTimeoutError, match="16 rows of min_rows=32"):
            next(iter(loader))
        assert loader.stats().pace_seconds > 0
        assert loader.stats().bottleneck == "pace"
        assert "set_pace" in loader.stats().advice
        publish(cache, 1)
        assert epoch(loader) == 2


def test_a_segment_is_read_by_no_more_than_max_reuse_epochs(cache):
    publish(cache, 2)
    cache.set_pace(ac.Pace(max_reuse=2))
    with ac.Loader(cache, 16, timeout=0.2) as loader:
        assert [epoch(loader), epoch(loader)] == [2, 2]
        with pytest.raises(ac.LoaderTimeoutError, match="2 were served max_reuse=2 times"):
            next(iter(loader))
        publish(cache, 1)
        assert epoch(loader) == 1  # of the new one
        cache.set_pace(ac.Pace(max_reuse=3))  # takes effect at once
        assert epoch(loader) == 3
    assert served(cache) == [3, 3, 2]


@pytest.mark.parametrize(
    ("options", "steps", "never"),
    [
        ({"epoch_rows": 16}, None, 24),
        ({}, None, 8),  # a last batch of 8 rows is dropped
        ({}, 1, 24),
        ({"drop_last": False}, None, 0),
    ],
)
def test_the_error_of_max_reuse_says_how_many_rows_were_never_served(tmp_path, options, steps, never):
    cache = make_cache(tmp_path / "few", segment_bytes="64KiB", segment_rows=40)
    append_rows(cache, range(40))
    cache.set_pace(ac.Pace(max_reuse=1))
    with ac.Loader(cache, 16, timeout=0.2, **options) as loader:
        for number, _ in enumerate(loader, start=1):
            if number == steps:
                break
        with pytest.raises(ac.LoaderTimeoutError, match="1 were served max_reuse=1 times") as caught:
            iter(loader)
    words = f"of 40 rows published so far at least {never} were never served"
    assert (words in str(caught.value)) is bool(never)
    assert ("Loader(once=name) counts rows" in str(caught.value)) is bool(never)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"where": lambda segment: segment.seq == 0},
            "the others have 0 rows that `where` accepts of the 16 wait",
        ),
        (
            {"rows": [(0, row) for row in range(16)]},
            "begun, whichever of its rows `rows` accepts. Is a sampler",
        ),
        ({"weights": "id", "epoch_rows": 16}, "begun, whichever of its rows weights= draws. Is a sampler"),
        ({"rows": "included"}, "begun, whichever of its rows are not excluded. Is a sampler"),
    ],
)
def test_rows_that_nobody_asks_for_are_not_said_to_be_left_out_by_max_reuse(cache, options, words):
    publish(cache, 2)
    cache.exclude((1, 3))
    cache.set_pace(ac.Pace(max_reuse=1))
    with ac.Loader(cache, 16, timeout=0.2, **options) as loader:
        epoch(loader)
        with pytest.raises(ac.LoaderTimeoutError, match="served max_reuse=1 times") as caught:
            iter(loader)
    assert words in str(caught.value)
    assert "never served" not in str(caught.value)


def test_rows_that_may_still_be_served_are_not_said_to_be_left_out_by_max_reuse(cache):
    publish(cache, 2)
    cache.set_pace(ac.Pace(max_reuse=1))
    with ac.Loader(cache, 32, timeout=0.2) as loader:
        assert epoch(loader) == 1
        publish(cache, 1)
        with pytest.raises(
            ac.LoaderTimeoutError, match="the others have 16 rows of the 32 waited for"
        ) as caught:
            iter(loader)
    assert "never served" not in str(caught.value)


def test_max_reuse_goes_together_with_where(cache):
    publish(cache, 4)
    cache.set_pace(ac.Pace(max_reuse=1))
    with ac.Loader(cache, 16, where=lambda segment: segment.seq % 2 == 0) as loader:
        assert epoch(loader) == 2
    assert served(cache) == [1, 0, 1, 0]


def test_several_loaders_at_once_do_not_exceed_max_reuse(cache):
    publish(cache, 4)
    cache.set_pace(ac.Pace(max_reuse=3))
    barrier, steps = threading.Barrier(6), []

    def read() -> None:
        with ac.Loader(cache, 16, timeout=0.5) as loader:
            barrier.wait()
            try:
                steps.append(epoch(loader))
            except ac.LoaderTimeoutError:
                steps.append(0)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(steps) == [0, 0, 0, 4, 4, 4]
    assert served(cache) == [3] * 4


def test_ranks_that_begin_an_epoch_at_once_count_it_once(cache):
    publish(cache, 4)
    barrier = threading.Barrier(2)

    def where(segment: ac.SegmentInfo) -> bool:
        if segment.seq == 0:
            barrier.wait(60)  # both look before either takes a snapshot
        return True

    loaders = [ac.Loader(cache, 8, rank=rank, world_size=2, run_id="run", where=where) for rank in range(2)]
    threads = [threading.Thread(target=epoch, args=(loader,)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for loader in loaders:
        loader.close()
    assert served(cache) == [1] * 4
    assert cache.stats().served_rows == 64


def test_an_epoch_waits_while_training_is_too_far_ahead(cache):
    cache.set_pace(ac.Pace(samples_per_insert=1, tolerance=0))
    publish(cache, 1)
    with ac.Loader(cache, 16, timeout=0.2) as loader:
        assert epoch(loader) == 1
        assert epoch(loader) == 1  # it had caught up, and was not ahead
        with pytest.raises(ac.LoaderTimeoutError, match="16 served rows ahead"):
            next(iter(loader))
        publish(cache, 1)
        assert epoch(loader) == 2


def test_a_writer_waits_while_training_is_too_far_behind(cache):
    cache.set_pace(ac.Pace(samples_per_insert=1, tolerance=16))
    publish(cache, 2)
    writer = cache.writer(on_full="raise")
    writer.append(sample(0))
    with pytest.raises(ac.CacheFullError, match=r"32 served rows behind.*pass on_full='wait'"):
        writer.close()
    writer.abort()
    writer = cache.writer(timeout=0.2)
    writer.append(sample(0))
    with pytest.raises(ac.CacheFullError, match=r"waited 0\.\d s: .*32 served rows behind"):
        writer.close()
    with ac.Loader(cache, 16) as loader:
        assert epoch(loader) == 2
    writer.close()
    assert cache.stats().rows == 33


def test_a_waiting_writer_shows_in_the_statistics_and_goes_on_with_another_pace(cache):
    cache.set_pace(ac.Pace(samples_per_insert=1, tolerance=0))
    publish(cache, 1)
    writing = threading.Thread(target=append_rows, args=(cache, range(16)))
    writing.start()
    wait_until(lambda: cache.stats().waiting_writers == 1, "the writer to wait")
    cache.set_pace(None)
    writing.join()
    assert cache.stats().segments == 2
    assert cache.pace is None


def test_no_writer_waits_for_training_while_a_loader_waits(cache):
    cache.set_pace(ac.Pace(samples_per_insert=4, tolerance=0))
    with ac.Loader(cache, 64, timeout=60) as loader:
        reading = threading.Thread(target=lambda: next(iter(loader)))
        reading.start()
        wait_until(cache.store.usage.a_loader_waits, "the loader to wait")
        publish(cache, 3)  # more than the tolerance, but what the loader waits for
        assert cache.stats().paced == ""
        publish(cache, 1)
        reading.join()
        wait_until(lambda: "served rows behind" in cache.stats().paced, "writers to be kept again")


@pytest.mark.slow
def test_a_pool_and_a_loader_keep_the_pace(cache):
    cache.set_pace(ac.Pace(min_rows=32, samples_per_insert=2, tolerance=32))
    with ac.SamplerPool(cache, draw, workers=1, progress=False) as pool, ac.Loader(cache, 16) as loader:
        for _ in range(5):
            epoch(loader)
            wait_until(lambda: lag(cache) > 32 and cache.stats().waiting_writers, "the sampler to be ahead")
        # The tolerance, and a segment. Before, while the first epochs waited, the sampler did not.
        assert lag(cache) <= 32 + 2 * 16
        assert pool.stats().failures == 0


def test_without_a_tolerance_what_is_there_is_served_as_often_as_asked_and_no_more(cache):
    """A full cache was served twice as often."""
    publish(cache, 4)
    cache.set_pace(ac.Pace(samples_per_insert=8))
    publish(cache, 4, first=0)
    cache.evict(cache.stats().allocated_bytes)  # by hand: counts anew
    publish(cache, 3)
    with ac.Loader(cache, 16, timeout=0.2) as loader:
        assert [epoch(loader) for _ in range(8)] == [3] * 8
        with pytest.raises(ac.LoaderTimeoutError, match="0 served rows due"):
            next(iter(loader))
        publish(cache, 1)
        assert [epoch(loader) for _ in range(2)] == [4] * 2
        with pytest.raises(ac.LoaderTimeoutError, match="0 served rows due"):
            next(iter(loader))


def test_without_a_tolerance_a_writer_fills_the_cache_and_waits_before_rows_leave(tmp_path):
    """It waited after the first segment, or had rows leave that nobody had read."""
    cache = make_cache(tmp_path / "full", pace=ac.Pace(samples_per_insert=8))
    writer = cache.writer(on_full="raise")
    rows = [sample(number) for number in range(2000)]
    columns = {name: np.stack([row[name] for row in rows]) for name in ("id", "image")}
    with pytest.raises(ac.CacheFullError, match="rows behind"):
        writer.extend(columns)
    writer.abort()
    stats = cache.stats()
    assert stats.evicted_rows == 0
    assert stats.allocated_bytes > 0.8 * stats.capacity_bytes
    with ac.Loader(cache, 16) as loader:
        while "behind" in cache.stats().paced:
            epoch(loader)
        times = cache.stats().times_served
    assert 7 <= times <= 8
    publish(cache, 1)
    assert cache.stats().evicted_rows > 0
    cache.close()


def test_rows_that_left_as_the_cache_was_made_smaller_are_not_waited_for(tmp_path):
    """They can never be served, and samplers would wait for it."""
    cache = make_cache(tmp_path / "cache", capacity="4MiB", pace=ac.Pace(samples_per_insert=8))
    publish(cache, 60)
    cache.resize("1MiB")
    assert cache.stats().paced == ""
    publish(cache, 1)
    cache.close()


def lag(cache) -> int:
    stats = cache.stats()
    return 2 * stats.inserted_rows - stats.served_rows


def draw(rng: np.random.Generator) -> Iterator[dict[str, object]]:
    while True:
        yield {"id": int(rng.integers(1000)), "image": np.zeros((16, 16), np.float32)}


def test_a_pace_is_of_all_processes_and_stays(cache):
    pace = ac.Pace(min_rows=5, samples_per_insert=1.5, max_reuse=4, tolerance=7)
    cache.set_pace(pace)
    with ac.Cache.open(cache.path) as other:
        assert other.pace == pace
        other.resize("20MB")
        assert other.pace == pace
    assert ac.Cache.open(cache.path).pace == pace


def test_a_pace_can_be_given_where_a_cache_is_made(tmp_path):
    pace = ac.Pace(max_reuse=2)
    with ac.Cache.create(tmp_path / "a", {"x": ac.Tensor("int64")}, "10MB", "1MB", pace=pace) as cache:
        assert cache.pace == pace
    with ac.Cache.open(tmp_path / "a") as cache, pytest.raises(TypeError, match=r"arrowcache\.Pace"):
        cache.set_pace({"max_reuse": 2})


def test_rows_that_a_cache_can_never_hold_are_not_waited_for(cache):
    pace = ac.Pace(min_rows=10_000)
    with pytest.raises(ValueError, match=r"capacity is 9\.5 MiB: lower min_rows"):
        cache.set_pace(pace)
    cache.resize("20MB")
    cache.set_pace(pace)
