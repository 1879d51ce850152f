from __future__ import annotations

import ctypes
import gc
import sys
import threading
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from begun import own_threads
from helpers import (
    DEADLINE_SECONDS,
    append_rows,
    held_by_another_thread,
    limit,
    locks_of,
    make_cache,
    overfill,
    publish,
    published_ids,
    wait_until,
)
from processes import Script
from reader_contract import ids_of as ids

import arrowcache as ac
from arrowcache import Loader, Snapshot
from arrowcache.native import engine

# what an epoch holds


def test_seed_and_epoch_alone_decide_the_order(cache):
    with Loader(cache, 16, seed=3) as loader, Loader(cache.path, 16, seed=3, prefetch=1) as same:
        epochs = [ids(loader) for _ in range(3)]
        assert [ids(same) for _ in range(3)] == epochs
    with Loader(cache, 16, seed=4) as other:
        epochs += [ids(other) for _ in range(3)]
    assert len({tuple(epoch) for epoch in [*epochs, range(160)]}) == 7


def test_an_exception_of_where_arrives_and_leaves_no_lease(cache):
    with Loader(cache, 16, where=lambda segment: 1 / 0) as loader:
        with pytest.raises(ZeroDivisionError):
            iter(loader)
        assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_so_many_batches_are_begun_ahead_of_the_one_that_is_asked_for(cache, prefetch):
    """It was one fewer, and a dataset's loader, which had as many, took 0, which this refused."""
    calls: list[int] = []
    with Loader(cache, 16, prefetch=prefetch, transform=lambda batch: calls.append(1) or batch) as loader:
        epoch = iter(loader)
        next(epoch)
        wait_until(lambda: len(calls) > prefetch, "batches ahead")
        assert len(calls) == prefetch + 1


# which moment an epoch shows


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("iter", "this epoch ended when a newer one began: iterate anew"),
        ("load", "this epoch ended when a state was loaded: iterate anew"),
        ("close", "the end"),
        (
            "loader",
            "this epoch ended when the loader was closed, before its last batch: "  # noqa: ISC004
            "leave the loop first, or close after it",
        ),
    ],
)
def test_a_consumer_that_waits_learns_that_its_epoch_was_cut_short(cache, how, found):
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
        wait_until(lambda: loader.stats().stall_seconds, "the consumer to wait")
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


def test_a_loader_that_is_dropped_under_the_cache_s_lock_ends_its_threads_after_it(cache):
    """They may wait for that lock, and every process with them."""
    loader = Loader(cache, 16, transform=lambda batch: batch)
    ids(loader)
    with cache.store.locked():
        del loader  # as the garbage collector may
        assert own_threads("arrowcache-worker")
    assert not own_threads("arrowcache-worker")


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


def test_a_loader_of_a_relative_path_is_known_to_a_writer_of_the_same_process(cache, monkeypatch):
    monkeypatch.chdir(cache.path.parent)
    with Loader("cache", 16) as loader:
        epoch = iter(loader)
        monkeypatch.chdir("/")
        assert len(ids(epoch)) == 160
        epoch = iter(loader)
        with pytest.raises(ac.CacheFullError, match="this very process"):
            overfill(cache, "wait")
        epoch.close()


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


def test_a_wait_says_what_rows_where_would_have_to_accept(tmp_path):
    cache = make_cache(tmp_path / "cache")
    loader = Loader(cache, 16, timeout=0.1, where=lambda segment: False)
    with (
        loader,
        pytest.raises(TimeoutError, match=r"for 16 rows in .*/cache, which has 0 that `where` accepts"),
    ):
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


# the loader's own life


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

    options = {"shuffle": None, "prefetch": 1, "timeout": DEADLINE_SECONDS, "worker_type": "thread"}
    for workers in (0, 2):
        with (
            Loader(cache, 16, transform=fail, workers=workers, **options) as loader,
            pytest.raises(KeyError, match="at once"),
        ):
            list(loader)
        with Loader(cache, 16, workers=workers, **options) as loader:
            loader.assert_zero_copy()
            cache.evict("1GB")
            for first in (0, 12):
                append_rows(cache, range(first, first + 12))
            with pytest.raises(ValueError, match="needs a copy"):
                list(loader)
            cache.evict("1GB")
            publish(cache, 1)


def test_values_of_no_fixed_width_count_in_how_much_is_prefetched(tmp_path, monkeypatch):
    limit(monkeypatch, warm_bytes=1 << 20, ahead_rows=16)
    schema = ac.Schema({"label": ac.Tensor("int64"), "jpeg": ac.Binary()})
    cache = make_cache(tmp_path / "cache", schema, capacity="64MiB", segment_bytes="4MiB", segment_rows=64)
    with cache.writer() as writer:
        for number in range(1024):
            writer.append(label=number, jpeg=bytes(20_000))
    begun: list[int] = []

    def noted(call):
        def begin(*job):
            if ctypes.c_int64.from_address(job[-1]).value == engine.LENGTHS:  # of which each batch has one
                begun.append(1)
            return call(*job)

        return begin

    monkeypatch.setattr(engine.quick, "engine_submit", noted(engine.quick.engine_submit))
    monkeypatch.setattr(engine.quick, "engine_copy", noted(engine.quick.engine_copy))
    with Loader(cache, 16) as loader:
        ahead = [len(begun) - number for number, _ in enumerate(loader, 1)]
    assert max(ahead[8:]) == 3 - 1, "1 MiB of 320 kB each, not of the 128 bytes that labels take"


def test_a_signal_handler_may_ask_for_stats_and_close_while_its_thread_is_counting(cache):
    with Loader(cache, 16) as loader:
        iterator = iter(loader)
        next(iterator)
        with ExitStack() as held:  # as a handler finds them
            for lock in locks_of(loader):
                held.enter_context(lock)
            assert loader.stats().batches == 1
            assert loader.state_dict()["position"] == 16
            loader.close()


@pytest.mark.parametrize("rows_come", [False, True])
def test_close_while_another_thread_waits_in_iter_ends_that_and_leases_nothing(tmp_path, rows_come):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    looks, errors = [], []
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
    assert not own_threads("arrowcache-worker")


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


@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_the_largest_counts_work(cache, shuffle):
    options = {"prefetch": 2**16, "epoch_rows": 2**62, "seed": 2**200, "workers": 256}
    Loader(cache, 16, shuffle=shuffle, worker_type="thread", **options).close()
    options |= {"prefetch": 1, "workers": 0}
    with Loader(cache, 16, shuffle=shuffle, worker_type="thread", **options) as loader:
        assert ids([next(iter(loader))])
        assert loader.steps == 2**58
        loader.load_state_dict(loader.state_dict())
        assert ids([next(iter(loader))])


def test_numpy_integers_are_integers(cache):
    with Loader(cache, np.int64(16), seed=np.uint8(3)) as loader:
        assert len(ids(loader)) == 160


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_an_epoch_that_is_over_needs_no_garbage_collector_to_go(cache, shuffle):
    gc.collect()
    gc.disable()
    try:
        with Loader(cache, 8, shuffle=shuffle) as loader:
            for _ in range(2):
                for batch in loader:
                    assert len(batch["id"]) == 8
        del batch, loader
        wait_until(lambda: not any(type(each) is Snapshot for each in gc.get_objects()), "them to go")
    finally:
        gc.enable()


def test_a_closed_loader_takes_no_state_and_begins_and_asserts_nothing(cache):
    with Loader(cache, 16) as loader:
        state = loader.state_dict()
    for use in (partial(loader.load_state_dict, state), loader.assert_zero_copy, loader.__iter__):
        with pytest.raises(ValueError, match="the loader is closed: make a new one"):
            use()


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
    with Script(code, cache.path, new_interpreter=True) as script:
        assert script.line() == "[]"
        assert script.end() == (0, "")
