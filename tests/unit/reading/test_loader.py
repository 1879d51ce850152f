from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from helpers import (
    DEADLINE_SECONDS,
    append_rows,
    disk_bytes,
    flip_byte,
    held_by_another_thread,
    make_cache,
    publish,
    published_ids,
    segment_files,
    seqs,
    wait_until,
)
from helpers import sample as row
from processes import Script

import arrowcache as ac
from arrowcache import Loader, Snapshot
from arrowcache.reading.snapshot import _Reader
from arrowcache.reading.stream import BatchStream

BASE = np.arange(256, dtype=np.float32).reshape(16, 16)


def check(batch: dict[str, Any]) -> None:
    """Every row's image is the one of its id."""
    assert np.array_equal(batch["image"], BASE + batch["id"].astype(np.float32)[:, None, None])


def ids(batches) -> list[int]:
    found = []
    for batch in batches:
        if "image" in batch:
            check(batch)
        found += batch["id"].tolist()
    return found


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("arrowcache-worker")]


def fill(cache: ac.Cache, on_full: str) -> None:
    """Append several capacities of rows."""
    writer = cache.writer(on_full, timeout=1)
    try:
        for number in range(160, 160 + 16 * 200):
            writer.append(row(number))
    finally:
        writer.abort()


# what an epoch holds


def test_without_shuffle_rows_come_oldest_first(cache):
    with Loader(cache, 16, shuffle=None) as loader:
        for _ in range(2):
            assert ids(loader) == list(range(160))


def test_seed_and_epoch_alone_decide_the_order(cache):
    with Loader(cache, 16, seed=3) as loader, Loader(cache.path, 16, seed=3, prefetch=1) as same:
        epochs = [ids(loader) for _ in range(3)]
        assert [ids(same) for _ in range(3)] == epochs
    with Loader(cache, 16, seed=4) as other:
        epochs += [ids(other) for _ in range(3)]
    assert len({tuple(epoch) for epoch in [*epochs, range(160)]}) == 7


def test_fewer_epoch_rows_are_a_draw_without_replacement_that_differs_each_epoch(cache):
    with Loader(cache, 16, epoch_rows=40, drop_last=False) as loader:
        epochs = [ids(loader) for _ in range(8)]
    assert all(len(set(epoch)) == 40 for epoch in epochs)
    assert len(set().union(*epochs)) > 80  # never only the oldest ones


def test_more_epoch_rows_are_reshuffled_passes_one_after_another(cache):
    with Loader(cache, 16, epoch_rows=400, drop_last=False) as loader:
        epoch = ids(loader)
    assert len(epoch) == 400
    assert sorted(epoch[:160]) == sorted(epoch[160:320]) == list(range(160))
    assert epoch[:160] != epoch[160:320]
    assert max(Counter(epoch[320:]).values()) == 1


def test_an_exception_of_where_arrives_and_leaves_no_lease(cache):
    with Loader(cache, 16, where=lambda segment: 1 / 0) as loader:
        with pytest.raises(ZeroDivisionError):
            iter(loader)
        assert cache.stats().leased_bytes == 0


def test_columns_are_yielded_in_the_order_asked_for(cache):
    with Loader(cache, 16, columns=["image", "id"]) as loader:
        assert all(list(batch) == ["image", "id"] for batch in loader)
    with Loader(cache, 16, columns=["image"]) as loader:
        assert all(list(batch) == ["image"] for batch in loader)


def test_variable_length_columns_come_as_lists_and_values(tmp_path):
    schema = {
        "id": ac.Tensor("int64"), "text": ac.String(), "blob": ac.Binary(),
        "points": ac.Ragged("float32", (2,)),
    }  # fmt: skip
    cache = make_cache(tmp_path / "cache", schema)
    with cache.writer() as writer:
        for i in range(40):
            points = np.full((i % 4, 2), i, np.float32)
            writer.append(id=i, text="ä" * (i % 3), blob=bytes([i]) * (i % 5), points=points)
    with Loader(cache, 7, drop_last=False) as loader:
        seen = []
        for batch in loader:
            assert list(batch) == list(schema)
            values = batch["points"]
            assert values.data.dtype == np.float32
            assert values.data.shape == (values.offsets[-1], 2)
            for place, i in enumerate(batch["id"].tolist()):
                points = values.data[values.offsets[place] : values.offsets[place + 1]]
                assert np.array_equal(points, np.full((i % 4, 2), i))
                assert batch["text"][place] == "ä" * (i % 3)
                assert batch["blob"][place] == bytes([i]) * (i % 5)
                seen.append(i)
    assert sorted(seen) == list(range(40))


def test_a_damaged_segment_is_reported_and_the_epoch_goes_on_without_it(cache):
    flip_byte(segment_files(cache)[3], 0)
    with Loader(cache, 16) as loader:
        with pytest.warns(RuntimeWarning, match="quarantined"):
            epoch = iter(loader)
        assert sorted(ids(epoch)) == [i for i in range(160) if i // 16 != 3]
    assert seqs(cache) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


# which moment an epoch shows


def test_iter_takes_its_snapshot_at_once(cache):
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        publish(cache, 3)
        assert sorted(ids(epoch)) == list(range(160))
        assert sorted(ids(loader)) == list(range(208))


def test_an_epoch_waits_for_wait_rows(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    looks: list[int] = []
    with Loader(cache, 16, wait_rows=40, where=lambda segment: looks.append(segment.seq) or True) as loader:
        epochs = []
        thread = threading.Thread(target=lambda: epochs.append(ids(loader)))
        thread.start()
        wait_until(lambda: len(looks) > 1, "the loader to look twice")
        publish(cache, 1)
        wait_until(lambda: looks.count(1) > 1, "the loader to see 32 rows twice")
        assert not epochs
        publish(cache, 1)
        thread.join(DEADLINE_SECONDS)
    assert [sorted(epoch) for epoch in epochs] == [list(range(48))]


def test_an_epoch_waits_for_one_full_batch(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    with Loader(cache, 32, timeout=0.1) as loader:
        with pytest.raises(ac.LoaderTimeoutError, match="32 rows"):
            iter(loader)
        publish(cache, 1)
        assert sorted(ids(loader)) == list(range(32))


def test_a_loader_that_waits_for_rows_leases_nothing(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    looked = threading.Event()
    with Loader(cache, 16, wait_rows=1000, timeout=0.2, where=lambda _: looked.set() or True) as loader:
        with pytest.raises(ac.LoaderTimeoutError):
            iter(loader)
        assert looked.is_set()
        assert cache.stats().leased_bytes == 0


def test_a_newer_epoch_ends_the_older_one(cache):
    with Loader(cache, 16) as loader:
        older = iter(loader)
        check(next(older))
        newer = iter(loader)
        with pytest.raises(RuntimeError, match="newer"):
            next(older)
        assert sorted(ids(newer)) == list(range(160))


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("iter", "this epoch ended when a newer one began: iterate anew"),
        ("load", "this epoch ended when a state was loaded: iterate anew"),
        ("close", "the end"),
        ("loader", "the end"),
    ],
)
def test_a_consumer_that_waits_learns_that_its_epoch_was_cut_short_but_not_that_it_was_closed(
    cache, how, found
):
    in_transform, go_on, results = threading.Event(), threading.Event(), []

    def transform(batch):
        in_transform.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return batch

    def consume():
        try:
            results.append(next(older, "the end"))
        except RuntimeError as error:
            results.append(str(error))

    with Loader(cache, 16, transform=transform) as loader:
        older = iter(loader)
        assert in_transform.wait(DEADLINE_SECONDS)
        consumer = threading.Thread(target=consume)
        consumer.start()
        wait_until(lambda: older._stream.consumer, "the consumer to wait")
        if how == "iter":
            newer = iter(loader)
        elif how == "load":
            loader.load_state_dict(loader.state_dict())
        elif how == "close":
            older.close()
        else:
            threading.Thread(target=loader.close).start()  # it waits for the transform
        consumer.join(DEADLINE_SECONDS)
        assert results == [found]
        go_on.set()
        if how == "iter":
            assert loader.state_dict()["epoch"] == 1
            assert sorted(ids(newer)) == list(range(160))
            assert loader.state_dict()["epoch"] == 2
        elif how != "loader":
            assert sorted(ids(loader)) == list(range(160)), "no row was delivered before"
        with pytest.raises(RuntimeError) if found != "the end" else nullcontext():
            assert next(older, None) is None
        assert loader.stats().batches == (0 if how == "loader" else 10)


def test_an_epoch_that_was_closed_stays_so_when_a_newer_one_begins(cache):
    with Loader(cache, 16) as loader:
        older = iter(loader)
        next(older)
        older.close()
        assert len(ids(loader)) == 160
        assert next(older, None) is None


@pytest.mark.parametrize("how", ["iter", "load"])
def test_a_batch_on_its_way_when_another_thread_ends_its_epoch_changes_no_progress(cache, monkeypatch, how):
    with Loader(cache, 16) as loader:
        older = iter(loader)
        state = loader.state_dict()
        take = BatchStream.take

        def take_and_be_late(*args):
            made = take(*args)
            monkeypatch.setattr(BatchStream, "take", take)
            iter(loader) if how == "iter" else loader.load_state_dict(state)
            return made

        monkeypatch.setattr(BatchStream, "take", take_and_be_late)
        with pytest.raises(RuntimeError, match="iterate anew"):
            next(older)
        assert loader.state_dict()["epoch"] == (1 if how == "iter" else 0)
        assert loader.state_dict()["position"] == 0
        assert loader.stats().batches == 0


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": None}, {"transform": lambda batch: batch}],
    ids=["rows", "in order", "transform"],
)
def test_threads_that_share_an_iterator_take_turns_and_get_each_row_once(cache, options):
    taken: list[int] = []
    failed: list[BaseException] = []

    def consume(batches: Any) -> None:
        try:
            taken.extend(ids(batches))
        except BaseException as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with Loader(cache, 1, **options) as loader:
            for _ in range(8):
                batches = iter(loader)
                threads = [threading.Thread(target=consume, args=(batches,)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(DEADLINE_SECONDS)
                assert not failed
                assert sorted(taken) == published_ids(cache)
                taken.clear()
            assert loader.stats().rows == 8 * len(published_ids(cache))
    finally:
        sys.setswitchinterval(before)


def test_a_finished_epoch_stays_finished(cache):
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        assert len(ids(epoch)) == 160
        assert next(epoch, None) is None
        assert len(ids(loader)) == 160
        assert next(epoch, None) is None


# leases


@pytest.mark.slow
def test_an_idle_loader_leases_nothing_soon(cache):
    with Loader(cache, 16) as loader:
        assert len(ids(loader)) == 160
        wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")


@pytest.mark.slow
def test_an_idle_loader_gives_its_lease_up_to_a_writer_of_the_same_process(cache):
    with Loader(cache, 16) as loader:
        for _ in range(3):
            assert ids(loader)
            publish(cache, 150)  # several times the capacity
            assert disk_bytes(cache.path) <= cache.stats().capacity_bytes
        assert min(ids(loader)) >= 160


def test_an_idle_loader_gives_its_lease_up_to_evict_and_resize_of_the_same_process(cache):
    with Loader(cache, 16) as loader:
        assert ids(loader)
        assert cache.evict(1) > 0
        assert ids(loader)
        cache.resize("256KiB")
        assert disk_bytes(cache.path) <= 256 * 1024
        assert ids(loader)


def test_a_loader_that_is_dropped_under_the_cache_s_lock_ends_its_threads_after_it(cache):
    """They may wait for that lock, and every process with them."""
    loader = Loader(cache, 16, transform=lambda batch: batch)
    ids(loader)
    with cache.store.locked():
        del loader  # as the garbage collector may
        assert loader_threads()
    assert not loader_threads()


def test_dropping_a_closed_iterator_asks_for_no_lock(cache):
    """The garbage collector may drop it in a thread that has one, for which another one waits."""
    with Loader(cache, 16) as loader:
        kept = [iter(loader)]
        next(kept[0])
        kept[0].close()
        dropping = threading.Thread(target=kept.clear, daemon=True)
        with held_by_another_thread(loader):
            dropping.start()
            dropping.join(DEADLINE_SECONDS)
            assert not dropping.is_alive()


@pytest.mark.slow
def test_a_writer_waits_for_what_an_ended_epoch_of_the_same_process_still_gathers(cache):
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        check(next(epoch))
        snapshot = loader._epochs.progress.snapshot
        reader = _Reader(snapshot)  # as the loader's thread, for which the end of an epoch does not wait
        epoch.close()
        writing = threading.Thread(target=append_rows, args=(cache, range(160, 160 + 16 * 150)))
        writing.start()
        wait_until(lambda: cache.stats().waiting_writers or not writing.is_alive(), "the writer to wait")
        reader.end()
        writing.join()
    assert seqs(cache)[-1] == 159


@pytest.mark.slow
@pytest.mark.parametrize("on_full", ["raise", "wait"])
def test_a_loader_in_progress_makes_a_writer_of_the_same_process_fail_and_not_hang(cache, on_full):
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        check(next(epoch))
        with pytest.raises(ac.CacheFullError, match=rf"by pid {os.getpid()} .* this very process"):
            fill(cache, on_full)
        assert len(ids(epoch)) == 144
    assert disk_bytes(cache.path) <= cache.stats().capacity_bytes


def test_a_loader_of_a_relative_path_is_known_to_a_writer_of_the_same_process(cache, monkeypatch):
    monkeypatch.chdir(cache.path.parent)
    with Loader("cache", 16) as loader:
        epoch = iter(loader)
        monkeypatch.chdir("/")
        assert len(ids(epoch)) == 160
        epoch = iter(loader)
        with pytest.raises(ac.CacheFullError, match="this very process"):
            fill(cache, "wait")
        epoch.close()


@pytest.mark.slow
def test_readers_one_after_another_never_starve_a_writer(cache):
    publish(cache, 40)
    older = Snapshot.take(cache.store, yields_since=0)
    for _ in range(20):
        newer = Snapshot.take(cache.store, yields_since=0)  # there is a lease at every moment
        older.close()
        publish(cache, 2)
        older = newer
    older.close()
    assert seqs(cache)[-1] == 89


@pytest.mark.slow
def test_an_epoch_of_a_growing_cache_never_loses_rows_to_eviction(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="512KiB")
    publish(cache, 20)
    with Loader(cache, 16) as loader:
        for _ in range(20):
            expected = None
            with cache.snapshot() as snapshot:
                expected = snapshot.gather(np.arange(len(snapshot)), ["id"])["id"].tolist()
            assert sorted(ids(loader)) == expected[loader.stats().left_out_rows :]
            publish(cache, 5)
        assert loader.stats().left_out_rows > 0, "for what was published since the epoch before"


# memory


# transform


def test_a_slow_transform_holds_up_no_batch_before_its_own(cache):
    reached, go_on = threading.Event(), threading.Event()

    def transform(batch):
        if 100 in batch["id"]:
            reached.set()
            assert go_on.wait(DEADLINE_SECONDS)
        return batch

    with Loader(cache, 16, shuffle=None, transform=transform) as loader:
        epoch = iter(loader)
        assert ids(next(epoch) for _ in range(6)) == list(range(96))
        assert reached.wait(DEADLINE_SECONDS)
        go_on.set()
        assert ids(epoch) == list(range(96, 160))


# waiting


def test_an_empty_cache_times_out_and_says_what_it_waited_for(tmp_path):
    cache = make_cache(tmp_path / "cache")
    with Loader(cache, 16, timeout=0.2) as loader:
        with pytest.raises(ac.LoaderTimeoutError, match=r"0\.2 s for 16 rows in .*/cache, which has 0: is a"):
            next(iter(loader))
        publish(cache, 1)
        assert len(ids(loader)) == 16
    loader = Loader(cache, 16, timeout=0.2, where=lambda segment: False)
    with loader, pytest.raises(TimeoutError, match="that `where` accepts"):
        iter(loader)


def test_a_transform_that_hangs_times_out_and_the_next_epoch_works(cache):
    released = threading.Event()

    def hang(batch):
        assert released.wait(DEADLINE_SECONDS)
        return batch

    with Loader(cache, 16, transform=hang, timeout=0.2) as loader:
        with pytest.raises(ac.LoaderTimeoutError, match=r"no batch came in 0\.2 s"):
            next(iter(loader))
        released.set()
        assert sorted(ids(loader)) == list(range(160))


def test_timeout_none_waits_for_the_batch(cache):
    released = threading.Event()
    threading.Timer(0.2, released.set).start()

    def slow(batch):
        assert released.wait(DEADLINE_SECONDS)
        return batch

    with Loader(cache, 16, transform=slow, timeout=None) as loader:
        assert sorted(ids(loader)) == list(range(160))


# the loader's own life


def test_close_is_idempotent_joins_the_thread_and_leases_nothing(cache):
    loader = Loader(cache, 16, transform=lambda batch: batch)
    epoch = iter(loader)
    check(next(epoch))
    assert loader_threads()
    loader.close()
    loader.close()
    assert not loader_threads()
    assert cache.stats().leased_bytes == 0
    assert next(epoch, None) is None
    with pytest.raises(ValueError, match="the loader is closed: make a new one"):
        iter(loader)
    with pytest.raises(ValueError, match="the loader is closed: make a new one"):
        loader.assert_zero_copy()


def test_where_is_asked_about_zero_copy_without_a_lock(cache):
    asked = []

    def where(segment):
        with cache.store.locked(timeout_seconds=0):
            asked.append(segment.seq)
        return segment.seq > 5

    with Loader(cache, 16, shuffle=None, where=where) as loader:
        loader.assert_zero_copy()
    assert asked == list(range(10))


def test_an_error_in_the_first_step_arrives_although_nothing_is_ready_before_it(cache):
    def fail(batch):
        raise KeyError("at once")

    for workers in (0, 2):
        for transform in (fail, None):
            with Loader(
                cache, 32, shuffle=None, prefetch=1, timeout=DEADLINE_SECONDS, workers=workers,
                worker_type="thread", transform=transform,
            ) as loader:  # fmt: skip
                if transform is None:
                    loader._assembly.require_views()  # what assert_zero_copy() asks for
                with pytest.raises((KeyError, ValueError), match=r"at once|needs a copy"):
                    list(loader)


def test_values_of_no_fixed_width_count_in_how_much_is_prefetched(tmp_path, monkeypatch):
    monkeypatch.setattr("arrowcache.reading.assembly._WARM_BYTES", 1 << 20)
    monkeypatch.setattr("arrowcache.reading.temperature._AHEAD_ROWS", 16)
    schema = ac.Schema({"label": ac.Tensor("int64"), "jpeg": ac.Binary()})
    cache = make_cache(tmp_path / "cache", schema, capacity="64MiB", segment_bytes="4MiB", segment_rows=64)
    with cache.writer() as writer:
        for number in range(1024):
            writer.append(label=number, jpeg=bytes(20_000))
    with Loader(cache, 16) as loader:
        under_way = []
        for _ in loader:
            stream = loader._stream
            under_way.append(stream.under_way + len(stream.ready))
        assert max(under_way[8:]) == 3 - 1, "1 MiB of 320 kB each, not of the 128 bytes that labels take"


def test_a_signal_handler_may_ask_for_stats_and_close_while_its_thread_is_counting(cache):
    with Loader(cache, 16) as loader:
        iterator = iter(loader)
        next(iterator)
        with loader._meter._lock:  # as a handler finds it
            assert loader.stats().batches == 1
            assert loader.state_dict()["position"] == 16
            loader.close()


def test_a_signal_handler_may_close_the_loader_as_its_thread_comes_to_the_oldest_batch(cache, monkeypatch):
    """It was an IndexError."""
    take_oldest = BatchStream._take_oldest

    def after_close(stream, seconds):
        loader.close()
        return take_oldest(stream, seconds)

    monkeypatch.setattr(BatchStream, "_take_oldest", after_close)
    loader = Loader(cache, 16)
    assert list(loader) == []
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("rows_come", [False, True])
def test_close_while_another_thread_waits_in_iter_ends_that_and_leases_nothing(tmp_path, rows_come):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    before, looks, errors = loader_threads(), [], []
    loader = Loader(cache, 32, timeout=None, where=lambda segment: looks.append(segment) or True)

    def begin():
        try:
            iter(loader)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=begin)
    thread.start()
    wait_until(lambda: len(looks) > 1, "the loader to wait for rows")
    loader.close()
    if rows_come:
        publish(cache, 1)
    thread.join(DEADLINE_SECONDS)
    assert errors == ["the loader is closed: make a new one"]
    assert cache.stats().leased_bytes == 0
    assert loader_threads() == before


def test_a_loader_that_was_never_iterated_has_no_thread(cache):
    before = loader_threads()
    loader = Loader(cache, 16)
    assert loader_threads() == before
    loader.close()


def test_stats_count_what_was_delivered(cache):
    with Loader(cache, 16, columns=["id"]) as loader:
        assert loader.steps is None
        before = loader.stats()
        assert (before.epochs, before.batches, before.rows, before.bytes) == (0, 0, 0, 0)
        assert before.bottleneck == "none"
        epoch = iter(loader)
        assert loader.steps == 10
        for _ in range(3):
            next(epoch)
        middle = loader.stats()
        assert (middle.epochs, middle.batches, middle.rows, middle.bytes) == (1, 3, 48, 48 * 8)
        assert 0 <= middle.stall_seconds <= middle.seconds
        assert len(ids(epoch)) == 112
        assert len(ids(loader)) == 160
        after = loader.stats()
        assert (after.epochs, after.batches, after.rows, after.bytes) == (2, 20, 320, 320 * 8)
        assert middle.seconds < after.seconds
        assert loader.stats().seconds == after.seconds  # nothing is counted between epochs
        with pytest.raises(AttributeError):
            after.rows = 0


def test_stats_name_the_transform_that_everything_waits_for(cache):
    def slow(batch):
        threading.Event().wait(0.02)
        return batch

    with Loader(cache, 16, transform=slow) as loader:
        list(loader)
        assert loader.stats().bottleneck == "transform"


@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_the_largest_counts_work(cache, shuffle):
    options = {"prefetch": 2**16, "epoch_rows": 2**62, "seed": 2**200, "workers": 256}
    with Loader(cache, 16, shuffle=shuffle, worker_type="thread", **options) as loader:
        assert loader._options.prefetch == 2**16
    options |= {"prefetch": 1, "workers": 0}
    with Loader(cache, 16, shuffle=shuffle, worker_type="thread", **options) as loader:
        check(next(iter(loader)))
        assert loader.steps == 2**58
        loader.load_state_dict(loader.state_dict())
        check(next(iter(loader)))


def test_numpy_integers_are_integers(cache):
    with Loader(cache, np.int64(16), seed=np.uint8(3)) as loader:
        assert len(ids(loader)) == 160


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_an_epoch_that_is_over_needs_no_garbage_collector_to_go(cache, shuffle):
    with Loader(cache, 8, shuffle=shuffle) as loader:
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                for batch in loader:
                    assert len(batch["id"]) == 8
                assert loader._epochs.progress is not None
                snapshot = weakref.ref(loader._epochs.progress.snapshot)
            del batch
            loader._epochs.progress = None
            wait_until(lambda: snapshot() is None, "the second epoch's snapshot to go")
        finally:
            gc.enable()


def test_a_closed_loader_takes_no_state(cache):
    with Loader(cache, 16) as loader:
        state = loader.state_dict()
    with pytest.raises(ValueError, match="closed"):
        loader.load_state_dict(state)


@pytest.mark.slow
def test_no_first_batch_and_no_first_gather_imports_a_module(cache):
    """It would be waited for, 30 ms for numpy.ma, and a fork beside it leaves a child with its lock taken."""
    code = """
        import sys
        import arrowcache as ac

        with ac.Cache.open(sys.argv[1]) as cache, ac.Loader(cache, 4) as loader, cache.snapshot() as snapshot:
            before = set(sys.modules)
            snapshot.gather([0, 150, 3])
            next(iter(loader))
            print(sorted(set(sys.modules) - before))
    """
    with Script(code, cache.path) as script:
        assert script.line() == "[]"
        assert script.end() == (0, "")
