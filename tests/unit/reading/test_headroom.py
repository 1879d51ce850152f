"""Headroom: an epoch has every row where nobody writes, and says what it leaves out where somebody does."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import warnings

import numpy as np
import pytest
from helpers import (
    DEADLINE_SECONDS,
    append_rows,
    ids_of,
    make_cache,
    nearly_full,
    publish,
    published_ids,
    seqs,
    wait_until,
)
from markup import seen
from processes import Child

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading.shuffle import Shuffle

EVERY_ROW = list(range(5000))
_OLDEST_TWO = 2656  # rows of two of the four segments of `nearly_full`


@pytest.fixture(params=[0.1, 0], ids=["headroom", "no headroom"])
def idle(request, tmp_path):
    """Nearly full, and nobody writes."""
    return nearly_full(tmp_path / "cache", request.param)


@pytest.fixture
def cache(tmp_path):
    """The same, with headroom."""
    return nearly_full(tmp_path / "cache")


def loader_of(cache, **options):
    return Loader(cache, 100, **{"columns": ["id"], "drop_last": False} | options)


def epoch_of(loader):
    return sorted(ids_of(loader))


def left_out(loader, **also):
    """What a new epoch leaves out: by what it delivers, and by what it says."""
    with pytest.warns(RuntimeWarning, match="an epoch leaves out") if also.get("warns") else _quietly():
        delivered = epoch_of(loader)
    assert delivered == EVERY_ROW[-len(delivered) :], "all but the oldest"
    assert loader.stats().left_out_rows == 5000 - len(delivered)
    return 5000 - len(delivered)


def _quietly():
    return warnings.catch_warnings()


# where nobody writes


@pytest.mark.parametrize("shuffle", [each.value for each in Shuffle])
def test_every_epoch_of_a_cache_to_which_nobody_writes_has_every_row(idle, shuffle):
    with loader_of(idle, shuffle=shuffle) as loader:
        for _ in range(2):
            assert epoch_of(loader) == EVERY_ROW
            assert loader.stats().left_out_rows == 0


def test_every_epoch_of_repeat_has_every_row(idle):
    with loader_of(idle) as loader:
        batches = loader.repeat()
        for _ in range(3):
            assert sorted(ids_of(next(batches) for _ in range(50))) == EVERY_ROW
        batches.close()


def test_ranks_deliver_every_row_between_them(idle):
    loaders = [loader_of(idle, rank=rank, world_size=2, run_id="job") for rank in range(2)]
    epochs = [iter(loader) for loader in loaders]
    assert sorted(ids_of(epochs[0]) + ids_of(epochs[1])) == EVERY_ROW
    for loader in loaders:
        loader.close()


def test_the_first_epoch_after_waiting_for_its_rows_has_all_of_them(tmp_path):
    cache = ac.Cache.create(tmp_path / "cache", nearly_full(tmp_path / "like").schema, "3MB", "640KiB")
    with loader_of(cache, wait_rows=5000) as loader:
        fill = threading.Thread(
            target=lambda: _write(cache, id=np.arange(5000), data=np.zeros((5000, 480), np.uint8))
        )
        fill.start()
        epoch = iter(loader)
        fill.join()
        assert len(ids_of(epoch)) in (5000, 5000 - _OLDEST_TWO), "the writer was, or was not, closed by then"
        assert epoch_of(loader) in (EVERY_ROW, EVERY_ROW[_OLDEST_TWO:])
        assert epoch_of(loader) == EVERY_ROW, "nobody wrote, and nothing was published since"


def _write(cache, **columns):
    with cache.writer() as writer:
        writer.extend(**columns)


# where somebody writes


def test_an_epoch_leaves_two_segments_at_least_while_a_writer_is_open(cache):
    with loader_of(cache) as loader:
        with cache.writer():
            assert left_out(loader, warns=True) == _OLDEST_TWO
        assert left_out(loader) == 0


def test_a_half_empty_cache_leaves_nothing_out(cache):
    cache.resize("30MB")
    with loader_of(cache) as loader, cache.writer():
        assert left_out(loader) == 0


def test_the_newest_segment_is_never_left_out(tmp_path):
    cache = ac.Cache.create(
        tmp_path / "cache", nearly_full(tmp_path / "like").schema, "3MB", "640KiB", headroom=0.9
    )
    _write(cache, id=np.arange(5000), data=np.zeros((5000, 480), np.uint8))
    with loader_of(cache) as loader, cache.writer():
        assert left_out(loader, warns=True) == 3 * _OLDEST_TWO // 2


def test_what_was_published_since_this_loaders_epoch_before_counts_as_writing(cache):
    with loader_of(cache) as loader, loader_of(cache) as other:
        assert left_out(loader) == 0
        _write(cache, id=np.arange(5000, 5010), data=np.zeros((10, 480), np.uint8))
        with pytest.warns(RuntimeWarning, match="an epoch leaves out"):
            assert 0 not in epoch_of(loader)
        everything = published_ids(cache)
        assert epoch_of(loader) == everything, "nothing was published since that one"
        assert epoch_of(other) == everything, "and to this one all was there before its first epoch"


def test_the_epochs_of_repeat_heed_a_writer_that_comes_between(cache):
    with loader_of(cache, prefetch=1) as loader:
        batches = loader.repeat()
        first = [next(batches) for _ in range(5)]
        with cache.writer(), pytest.warns(RuntimeWarning, match="an epoch leaves out"):
            first += [next(batches) for _ in range(145)]
        assert sorted(ids_of(first[:50])) == EVERY_ROW
        assert not set(ids_of(first[-20:])) & set(EVERY_ROW[:_OLDEST_TWO])
        batches.close()


def test_what_where_refuses_is_not_left_out_by_headroom(cache):
    first = cache.store.segments()[0].seq
    with loader_of(cache, where=lambda segment: segment.seq != first) as loader, cache.writer():
        with pytest.warns(
            RuntimeWarning, match=f"oldest {_OLDEST_TWO // 2:,} of {5000 - _OLDEST_TWO // 2:,} rows"
        ):
            assert len(epoch_of(loader)) == 5000 - _OLDEST_TWO
        assert loader.stats().left_out_rows == _OLDEST_TWO // 2


def test_the_rank_that_takes_the_snapshot_decides_for_all(cache):
    loaders = [loader_of(cache, rank=rank, world_size=2, run_id="job") for rank in range(2)]
    with cache.writer():
        second = iter(loaders[1])
    with pytest.warns(RuntimeWarning, match="an epoch leaves out") as caught:
        first = iter(loaders[0])  # nobody writes any more: rank 1 has decided
    assert len(caught) == 1, "the node's first rank alone says it"
    assert set(ids_of(first) + ids_of(second)) == set(EVERY_ROW[_OLDEST_TWO:])
    assert [loader.stats().left_out_rows for loader in loaders] == [_OLDEST_TWO] * 2
    assert sorted(ids_of(iter(loaders[0])) + ids_of(iter(loaders[1]))) == EVERY_ROW
    for loader in loaders:
        loader.close()


def test_a_loader_that_cannot_tell_whether_somebody_writes_leaves_the_headroom(cache):
    with loader_of(cache) as loader:
        cache.store.folder.usage.unlink()
        assert left_out(loader, warns=True) == _OLDEST_TWO


# what a writer shows


def test_a_writer_shows_itself_from_its_making_to_its_end(cache):
    writes = cache.store.usage.somebody_writes
    assert not writes()
    for end in ("close", "abort"):
        writer = cache.writer()
        assert writes(), "before it has a row"
        getattr(writer, end)()
        assert not writes()
    with cache.writer(), pytest.raises(KeyError), cache.writer():
        raise KeyError
    assert not writes()
    writer = cache.writer()
    del writer
    gc.collect()
    assert not writes(), "nobody has it any more"


def test_a_writer_that_could_not_publish_its_rest_goes_on_showing_itself(cache):
    writer = cache.writer(on_full="raise")
    with cache.snapshot():
        columns = {"id": np.arange(3000), "data": np.zeros((3000, 480), np.uint8)}
        with pytest.raises(ac.CacheFullError):
            writer.extend(**columns)
        with pytest.raises(ac.CacheFullError):
            writer.close()
        assert cache.store.usage.somebody_writes()
    writer.close()
    assert not cache.store.usage.somebody_writes()


# what is said


def test_a_warning_says_it_once_a_loader_with_the_ways_out(cache):
    with loader_of(cache) as loader, cache.writer():
        with pytest.warns(RuntimeWarning, match=rf"oldest {_OLDEST_TWO:,} of 5,000 rows") as caught:
            assert len([ids_of(loader) for _ in range(3)]) == 3
        (warned,) = caught
        text = str(warned.message)
        for way_out in (
            "stop the pool or close the writer", "smaller headroom than 0.1", "more capacity", "headroom=0",
            "shuffle='window'", "smaller segments", "left_out_rows",
        ):  # fmt: skip
            assert way_out in text
        assert warned.filename.endswith("helpers.py"), "where the user iterates"
    with (
        loader_of(cache) as another,
        cache.writer(),
        pytest.warns(RuntimeWarning, match="an epoch leaves out"),
    ):
        ids_of(another)


def test_where_warnings_are_errors_it_ends_no_training_and_is_logged(cache, caplog):
    with loader_of(cache) as loader, cache.writer(), caplog.at_level(logging.WARNING, "arrowcache"):
        assert epoch_of(loader) == EVERY_ROW[_OLDEST_TWO:], "pytest makes errors of warnings here"
        assert epoch_of(loader) == EVERY_ROW[_OLDEST_TWO:]
    assert [record.getMessage().startswith("an epoch leaves out") for record in caplog.records] == [True]


def test_the_display_shows_what_is_left_out(cache):
    with loader_of(cache) as loader:
        ids_of(loader)
        assert "left out" not in str(loader.stats())
        with cache.writer():
            left_out(loader, warns=True)
        fact = "the oldest 2,656 rows of the last epoch, to samplers"
        assert fact in str(loader.stats())
        assert fact in seen(loader.stats()._repr_html_()).text


def test_the_rest_of_a_resumed_epoch_leaves_out_what_it_left_out_before_and_says_0(cache):
    with loader_of(cache) as loader, cache.writer():
        with pytest.warns(RuntimeWarning, match="an epoch leaves out"):
            epoch = iter(loader)
        begun = ids_of([next(epoch)])
        state = loader.state_dict()
    with loader_of(cache) as resumed:
        resumed.load_state_dict(state)
        assert sorted(begun + ids_of(resumed)) == EVERY_ROW[_OLDEST_TWO:]
        assert resumed.stats().left_out_rows == 0


# who comes while an epoch holds everything


def append_rows_with_timeout(path):
    append_rows(ac.Cache.open(path), range(100_000, 100_000 + 16 * 20))


def fill(cache):
    """Publish until the oldest segment is evicted."""
    while not seqs(cache) or seqs(cache)[0] == 0:
        publish(cache, 1)


def test_a_writer_of_another_process_that_is_not_to_wait_is_told_who_reads(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache)

    def refused(path):
        try:
            publish(ac.Cache.open(path), 5, first=100_000)
        except ac.CacheFullError as error:
            return str(error)
        return "it found room"

    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        with Child(refused, cache.path) as child:
            told = child.result()
        assert f"the oldest of them by pid {os.getpid()}" in told
        assert "on_full='wait'" in told
        epoch.close()


def test_a_writer_in_the_training_thread_is_told_to_be_there_before_the_epoch(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache)
    with Loader(cache, 16) as loader:
        for _ in loader:
            writer = cache.writer()
            with pytest.raises(ac.CacheFullError, match="open the writer before an epoch"):
                writer.extend(id=np.arange(160), image=np.zeros((160, 16, 16), np.float32))
            writer.abort()
            break
        with cache.writer() as writer:
            with pytest.warns(RuntimeWarning, match="an epoch leaves out"):
                epoch = iter(loader)
            for batch in epoch:
                writer.append({"id": 0, "image": batch["image"][0]})


@pytest.mark.slow
@pytest.mark.parametrize("endless", [False, True], ids=["epochs", "repeat"])
def test_a_writer_in_another_thread_gets_on_while_epochs_follow_one_another(tmp_path, endless):
    cache = make_cache(tmp_path / "cache")
    fill(cache)
    with Loader(cache, 16) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        batches = loader.repeat() if endless else iter(loader)
        next(batches)  # of an epoch that leases everything
        child = Child(append_rows_with_timeout, cache.path)
        with child:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while child.is_alive():
                assert time.monotonic() < deadline, "the writer stands still"
                if next(batches, None) is None:
                    batches = iter(loader)
            child.result()
        batches.close()


def test_a_warning_about_an_epoch_begun_ahead_names_the_users_line(cache):
    with loader_of(cache) as loader:
        batches = loader.repeat()
        next(batches)
        with cache.writer(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while loader.stats().epochs < 2:
                next(batches)
        batches.close()
    (warned,) = caught
    assert "leaves out the oldest" in str(warned.message)
    assert warned.filename == __file__


# samplers that wait for this loader's lease


def test_a_wait_for_the_pace_is_not_held_up_by_a_lease(tmp_path):
    """It counted from the begin of the wait, whatever that was for."""
    cache = make_cache(tmp_path / "cache", headroom=0)
    fill(cache)
    cache.set_pace(ac.Pace(samples_per_insert=1, tolerance=1))
    with Child(append_rows_with_timeout, cache.path):
        wait_until(lambda: cache.stats().waiting_writers and cache.stats().paced, "the writer to be paced")
        began = cache.store.folder.waiting_since()
        with Loader(cache, 16, paced=False) as loader:
            epoch = iter(loader)
            next(epoch)
            assert loader.stats().held_up_seconds == 0
            cache.set_pace(None)
            wait_until(lambda: (cache.store.folder.waiting_since() or 0) > began, "the wait for the lease")
            epoch.close()


def test_advice_says_that_samplers_wait_for_this_loaders_lease(tmp_path):
    cache = make_cache(tmp_path / "cache", headroom=0)
    fill(cache)
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        next(epoch)
        with Child(append_rows_with_timeout, cache.path):
            wait_until(lambda: cache.stats().waiting_writers, "the writer to wait")
            wait_until(lambda: "lease" in loader.stats().advice, "a share of the time")
            now = loader.stats()
            assert now.held_up_seconds > 0
            for words in ("samplers waited", "this loader's lease", "shuffle='window'", "headroom"):
                assert words in now.advice
            assert "held up" in str(now)
            assert "held up" in seen(now._repr_html_()).text
            for _ in epoch:
                pass
            ended = loader.stats()
            assert ended.held_up_seconds >= now.held_up_seconds, "it is known still when the epoch has ended"
            assert "this loader's lease" in ended.advice
    assert loader.stats().bottleneck in ("consumer", "gather", "store", "start")


def test_a_writer_that_waits_for_another_reader_is_not_this_loaders_doing(tmp_path):
    cache = make_cache(tmp_path / "cache")
    fill(cache)
    oldest, newest = seqs(cache)[0], seqs(cache)[-1]
    with (
        cache.snapshot(where=lambda segment: segment.seq == oldest),
        Loader(cache, 16, where=lambda segment: segment.seq == newest) as loader,
    ):
        epoch = iter(loader)
        with Child(append_rows_with_timeout, cache.path):
            wait_until(lambda: cache.stats().waiting_writers, "the writer to wait")
            assert loader.stats().held_up_seconds == 0
        epoch.close()


@pytest.mark.parametrize("bottleneck", ["consumer", "gather", "store", "transform"])
def test_the_advice_on_leases_comes_beside_that_on_the_bottleneck(bottleneck):
    import dataclasses

    numbers = {field.name: 0 for field in dataclasses.fields(ac.LoaderStats)}
    numbers |= {"bottleneck": bottleneck, "seconds": 12.0, "shuffle": "rows"}
    without = ac.LoaderStats(**numbers).advice
    advice = ac.LoaderStats(**numbers | {"held_up_seconds": 9.5}).advice
    assert advice.startswith(without)
    assert "9.5 s" in advice
    assert "shuffle='window'" in advice.removeprefix(without)
    assert ac.LoaderStats(**numbers | {"held_up_seconds": 0.5}).advice == without, "a small share"
    window = ac.LoaderStats(**numbers | {"held_up_seconds": 9.5, "shuffle": "window"}).advice
    assert "shuffle='window'" not in window
    assert "headroom" in window
