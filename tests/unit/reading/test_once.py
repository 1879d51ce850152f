"""Rows that a name uses once: which come when, what a break, an end or a kill leaves, and who is refused."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import (
    DEADLINE_SECONDS,
    KIB,
    append_rows,
    ids_of,
    limit,
    make_cache,
    overfill,
    publish,
    sample,
    segment_files,
    wait_until,
)
from processes import Child

import arrowcache as ac
from arrowcache import Loader

FIELD = pc.field("id")


@pytest.fixture(autouse=True)
def _nobody_is_waited_for(monkeypatch):
    limit(monkeypatch, grace_seconds=0.01)


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


def once(cache, batch_size=16, name="learner", **options):
    return Loader(cache, batch_size, **{"once": name, "timeout": DEADLINE_SECONDS} | options)


def taken(iterator, batches: int) -> list[int]:
    return ids_of(itertools.islice(iterator, batches))


def test_each_row_comes_once_over_breaks_and_restarts(cache):
    append_rows(cache, range(40))
    with once(cache) as loader:
        for batch in loader:
            assert batch["id"].tolist() == [*range(16)]
            break
        assert ids_of(loader) == [*range(16, 32)]  # eight are too few for a batch
        assert ids_of(loader) == []
    append_rows(cache, range(40, 50))
    with once(cache) as loader:
        assert ids_of(loader) == [*range(32, 48)]
    with once(cache, drop_last=False) as loader:
        assert ids_of(loader) == [48, 49]
    with once(cache, name="another") as loader:
        assert taken(loader, 2) == [*range(32)]


def test_a_loader_that_is_closed_has_used_its_last_batch(cache):
    append_rows(cache, range(40))
    with once(cache) as loader:
        assert taken(iter(loader), 2) == [*range(32)]
    with once(cache, drop_last=False) as loader:
        assert ids_of(loader) == [*range(32, 40)]


@pytest.mark.parametrize("end", ["an exception", "dropped"])
def test_a_batch_that_was_not_followed_by_another_comes_again_after_a_restart(cache, end):
    append_rows(cache, range(40))
    if end == "dropped":
        loader = once(cache)
        assert taken(iter(loader), 2) == [*range(32)]
        del loader
        gc.collect()
    else:
        with suppress(KeyError), once(cache) as loader:
            assert taken(iter(loader), 2) == [*range(32)]
            raise KeyError("of a training step")
    with once(cache) as loader:
        assert taken(iter(loader), 1) == [*range(16, 32)]


def test_rows_that_come_later_are_waited_for_and_the_oldest_come_first(cache):
    append_rows(cache, range(10))
    with once(cache) as loader, cache.writer() as writer:
        found: list[list[int]] = []
        learner = threading.Thread(target=lambda: found.extend(b["id"].tolist() for b in loader))
        learner.start()
        for number in range(10, 40):
            writer.append(sample(number))
        writer.close()
        learner.join(DEADLINE_SECONDS)
    assert found == [[*range(16)], [*range(16, 32)]]


def test_a_wait_leases_nothing_and_ends_with_an_error_after_the_timeout(cache):
    append_rows(cache, range(20))
    with once(cache, timeout=0.3) as loader, cache.writer():
        batches = iter(loader)
        assert taken(batches, 1) == [*range(16)]
        assert not cache.stats().leased_bytes
        with pytest.raises(ac.LoaderTimeoutError, match=r"waited 0\.3 s for 16 rows in"):
            next(batches)
        assert not cache.stats().leased_bytes
        assert ids_of(batches) == []
        append_rows(cache, range(20, 40))
        assert taken(iter(loader), 1) == [*range(16, 32)]


def test_a_writer_of_the_same_process_waits_while_a_batch_is_made(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity=256 * KIB)
    overfill(cache, on_full="raise")
    began, goes_on = threading.Event(), threading.Event()

    def transform(batch):
        began.set()
        assert goes_on.wait(DEADLINE_SECONDS)
        return batch

    with once(cache, transform=transform) as loader, ThreadPoolExecutor(2) as threads:
        learner = threads.submit(lambda: taken(iter(loader), 1))
        assert began.wait(DEADLINE_SECONDS)
        writer = threads.submit(overfill, cache, "wait")
        wait_until(lambda: cache.stats().waiting_writers, "the writer to wait")
        goes_on.set()
        assert len(learner.result(DEADLINE_SECONDS)) == 16
        writer.result(DEADLINE_SECONDS)


def test_an_empty_cache_is_waited_for_as_its_samplers_may_be_starting(cache):
    with once(cache, timeout=0.3) as loader:
        with pytest.raises(ac.LoaderTimeoutError, match=r"waited 0\.3 s .* is a sampler running\?"):
            next(iter(loader))
        publish(cache, 1)
        assert ids_of(loader) == [*range(16)]
        cache.evict("1MiB")
        assert ids_of(loader) == []


def test_other_rows_hold_from_the_next_batch_on(cache):
    append_rows(cache, range(64))
    with once(cache, 4, rows=FIELD >= 10) as loader:
        batches = loader.repeat()
        assert taken(batches, 1) == [10, 11, 12, 13]
        loader.set_rows(FIELD >= 40)
        assert taken(batches, 1) == [40, 41, 42, 43]
        loader.set_rows("all")
        assert taken(batches, 3) == [*range(10), 14, 15]
        with pytest.raises(ValueError, match="no row has the tag 'hard'"):
            loader.set_rows("hard")
        cache.tag([(3, 15)], "hard")
        loader.set_rows("hard")
        assert ids_of(batches) == []  # one is no batch
        loader.set_rows(lambda columns: columns["id"] % 2 == 0)
        assert taken(iter(loader), 1) == [16, 18, 20, 22]


def test_columns_are_read_once_for_all_rows_that_are_asked_for(cache):
    append_rows(cache, range(64))
    with once(cache, 4, rows=FIELD >= 60) as loader:
        batches = loader.repeat()
        assert taken(batches, 1) == [60, 61, 62, 63]
        os.truncate(segment_files(cache)[0], 0)  # which would be noticed, were it read again
        loader.set_rows(FIELD >= 56)
        assert taken(batches, 1) == [56, 57, 58, 59]
        append_rows(cache, range(64, 80))
        loader.set_rows(FIELD >= 64)
        assert taken(batches, 1) == [64, 65, 66, 67]
        assert loader.stats().unread_rows == 0
        loader.set_rows("all")
        with pytest.warns(RuntimeWarning, match="quarantined"):
            assert taken(batches, 1) == [16, 17, 18, 19]
        assert loader.stats().unread_rows == 16


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_are_asked_for_by_any_column_are_those_that_it_has(tmp_path, seed):
    rng = np.random.default_rng(seed)
    schema = ac.Schema({"id": ac.Tensor("int64"), "kind": ac.Tensor("uint8"), "name": ac.String()})
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="1MB", segment_rows=8)
    table: list[dict] = []

    def publish_more(rows):
        with cache.writer() as writer:
            for _ in range(rows):
                row = {"id": len(table), "kind": int(rng.integers(3)), "name": "ab"[rng.integers(2)]}
                writer.append(**row)
                table.append(row | {"hard": 0})

    asked = [
        (pc.field("kind") == 1, lambda row: row["kind"] == 1),
        ((pc.field("name") == "a") & (FIELD > 20), lambda row: row["name"] == "a" and row["id"] > 20),
        (pc.field("hard") > 0, lambda row: row["hard"] > 0),
        (pc.field("_row") < 3, lambda row: row["id"] % 8 < 3),
        ("included", lambda row: True),
    ]
    publish_more(40)
    cache.annotate([(0, 0)], hard=np.zeros(1))
    with once(cache, 3, rows=pc.field("kind") == 0) as loader:
        batches, had, rule = loader.repeat(), set[int](), pc.field("kind") == 2
        for _ in range(40):
            rows, accepts = asked[rng.integers(len(asked))]
            loader.set_rows(rows)
            if rng.random() < 0.3:
                publish_more(8)
            if rng.random() < 0.3:
                some = rng.choice(len(table), 5, replace=False).tolist()
                cache.annotate([divmod(number, 8) for number in some], hard=np.ones(5))
                for number in some:
                    table[number]["hard"] = 1
            if rng.random() < 0.2:
                (cache.include if cache.rules() else cache.exclude)(where=rule)
            kinds = {0, 1} if cache.rules() else {0, 1, 2}
            left = [
                row["id"] for row in table if row["kind"] in kinds and accepts(row) and row["id"] not in had
            ][:3]
            if len(left) == 3:
                assert taken(batches, 1) == left
                had.update(left)
        assert len(had) > 60


def test_rows_to_ask_for_later_may_be_of_names_that_are_only_to_come(cache):
    append_rows(cache, range(32))
    with once(cache, 4, expect=["loss", "hard"]) as loader:
        batches = loader.repeat()
        assert taken(batches, 1) == [0, 1, 2, 3]
        loader.set_rows(pc.field("loss") > 1)
        cache.annotate([(0, row) for row in range(8, 12)], loss=np.full(4, 2.0))
        assert taken(batches, 1) == [8, 9, 10, 11]
        loader.set_rows("hard")
        with pytest.raises(ValueError, match="expect='easy'"):
            loader.set_rows("easy")


@pytest.mark.parametrize("timeout", [0.02, 0.3])
def test_where_nobody_writes_it_ends_however_short_the_timeout_is(cache, monkeypatch, timeout):
    limit(monkeypatch, grace_seconds=0.5)
    append_rows(cache, range(6))
    with once(cache, 4, timeout=timeout, drop_last=False) as loader:
        assert ids_of(loader) == [*range(6)]
    with once(cache, 4, "other", timeout=timeout) as loader, cache.writer() as writer:
        batches = iter(loader)
        assert taken(batches, 1) == [0, 1, 2, 3]
        with pytest.raises(ac.LoaderTimeoutError):
            next(batches)
        writer.abort()


def test_rows_are_chosen_by_what_is_noted_of_them_when_their_batch_is(cache):
    append_rows(cache, range(32))
    cache.annotate([(0, row) for row in range(16)], version=1.0)
    with once(cache, 4, rows=pc.field("version") == 1) as loader:
        batches = iter(loader)
        assert taken(batches, 1) == [0, 1, 2, 3]
        cache.exclude([(0, 4), (0, 5)])
        assert taken(batches, 1) == [6, 7, 8, 9]
        cache.include([(0, 5)])
        cache.annotate([(0, row) for row in range(16)], version=0.0)
        cache.annotate([(1, row) for row in range(8, 16)], version=1.0)
        assert taken(batches, 1) == [24, 25, 26, 27]
        loader.set_rows("included")
        assert taken(batches, 2) == [5, *range(10, 17)]


def test_excluded_rows_are_neither_delivered_nor_used(cache):
    append_rows(cache, range(32))
    cache.exclude([(0, row) for row in range(16)])
    with once(cache, 8) as loader:
        assert ids_of(loader) == [*range(16, 32)]
    cache.include([(0, row) for row in range(16)])
    with once(cache, 8) as loader:
        assert ids_of(loader) == [*range(16)]


def test_an_expression_of_the_age_is_asked_at_each_batch(cache, monkeypatch):
    append_rows(cache, range(32))
    with once(cache, 4, rows=pc.field("_age_seconds") < 1000) as loader:
        batches = iter(loader)
        assert taken(batches, 2) == [*range(8)]
        for path in (cache.path / "segments").iterdir():
            os.utime(path, (0, 0))
    cache = ac.Cache.open(cache.path)
    with once(cache, 4, rows=pc.field("_age_seconds") < 1000) as loader:
        assert ids_of(loader) == []


def test_segments_are_divided_by_where(cache):
    publish(cache, 6)
    found = []
    for rank in range(2):
        with once(
            cache, 8, f"rank-{rank}", where=lambda segment, rank=rank: segment.seq % 2 == rank
        ) as loader:
            found.append(ids_of(loader))
    assert found[0] == [number for number in range(96) if number // 16 % 2 == 0]
    assert sorted(found[0] + found[1]) == [*range(96)]


def test_rows_that_left_unread_are_counted(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity=256 * KIB)
    publish(cache, 4)
    with once(cache) as loader:
        batches = iter(loader)
        assert taken(batches, 1) == [*range(16)]
        cache.evict(40 * KIB)
        (oldest, *_) = (info.seq for info in cache.store.segments())
        assert oldest > 1
        assert taken(batches, 1) == [*range(16 * oldest, 16 * oldest + 16)]
        assert loader.stats().unread_rows == 16 * (oldest - 1)
        publish(cache, 40)  # some come and leave between two batches
        had = ids_of(batches)
        unread = loader.stats().unread_rows
        assert unread > 16 * 20
        assert unread + len(had) + 32 == cache.stats().inserted_rows
        assert "left the cache before they were chosen" in str(loader.stats())


def test_what_was_used_is_forgotten_with_its_segment_and_counts_in_the_capacity(tmp_path):
    cache = make_cache(tmp_path / "cache")
    path = cache.path / "notes" / "learner.used"
    for round_ in range(8):
        publish(cache, 16)
        with once(cache, 8) as loader:
            assert len(ids_of(loader)) == 256
            before = cache.stats().allocated_bytes
            assert before <= 1024 * KIB
        assert path.stat().st_blocks * 512 <= 64 * KIB, round_
    once(cache).close()
    assert len(path.read_bytes().rstrip(b"\0")) < 24 * 40  # the runs of segments that are there


def test_a_name_leaves_with_the_rows_that_it_had(cache):
    publish(cache, 2)
    for name in ("one", "two"):
        with once(cache, name=name) as loader:
            assert taken(iter(loader), 1) == [*range(16)]
    cache.evict(20 * KIB)
    with once(cache, name="three"):
        assert [path.name for path in (cache.path / "notes").iterdir()] == ["three.used"]


def test_rows_that_left_before_the_first_batch_are_counted(cache):
    publish(cache, 4)
    with once(cache) as loader:
        cache.evict(20 * KIB)
        assert ids_of(loader) == [*range(16, 64)]
        assert loader.stats().unread_rows == 16


def test_a_batch_is_used_once_it_is_acknowledged(cache):
    append_rows(cache, range(64))
    with once(cache, 8, acknowledge=True) as loader:
        batches = iter(loader)
        first, second, third = (next(batches) for _ in range(3))
        assert first.keys() == {"id", "image", "_seq", "_row", "_age_seconds"}
        loader.done(second)
        loader.done(second)
        loader.done([(0, 3)])
        for row in ((2, 0), (999, 0)):
            with pytest.raises(ValueError, match=f"rows of segment {row[0]} were not handed out"):
                loader.done([row])
        batches.close()
        assert taken(iter(loader), 1) == [*range(24, 32)]  # in this process they are not handed out again
        del third
    for use in (lambda: loader.done(first), lambda: loader.set_rows("all")):
        with pytest.raises(ValueError, match="the loader is closed"):
            use()
    with once(cache, 8) as loader:
        assert taken(iter(loader), 2) == [0, 1, 2, 4, 5, 6, 7, *range(16, 25)]


def test_a_batch_that_is_dropped_before_its_consumer_has_it_is_left(cache):
    append_rows(cache, range(32))

    def fails(batch):
        if fail:
            raise KeyError("a transform that fails")
        return batch

    fail = [True]
    with once(cache, transform=fails) as loader:
        with pytest.raises(KeyError):
            next(iter(loader))
        fail.clear()
        assert ids_of(loader) == [*range(32)]


def test_a_damaged_segment_is_left_out_and_the_others_come(cache):
    publish(cache, 3)
    second = segment_files(cache)[1]
    second.write_bytes(b"\0" * second.stat().st_size)
    with once(cache) as loader, pytest.warns(RuntimeWarning, match="quarantined"):
        assert ids_of(loader) == [*range(16), *range(32, 48)]
    assert cache.stats().quarantined == 1


def test_a_name_has_one_loader_at_a_time(cache):
    publish(cache, 2)
    with once(cache) as loader:
        with pytest.raises(ValueError, match=rf"once='learner' is in use by pid {os.getpid()}"):
            once(cache)

        def open_it(path):
            with pytest.raises(ValueError, match="is in use by pid"):
                once(path)
            return True

        with Child(open_it, cache.path) as child:
            assert child.result()
        assert taken(iter(loader), 1) == [*range(16)]
    once(cache).close()


def test_the_name_stays_its_parents_in_a_forked_child(cache):
    publish(cache, 2)

    def child_of(loader):
        with pytest.raises(ValueError, match="belongs to the process that forked this one"):
            next(iter(loader))
        loader.close()
        return True

    with once(cache) as loader:
        batches = iter(loader)
        assert taken(batches, 1) == [*range(16)]
        with Child(child_of, loader, method="fork") as child:
            assert child.result()
        with pytest.raises(ValueError, match="is in use"):
            once(cache)
        assert ids_of(batches) == [*range(16, 32)]


def test_a_damaged_file_says_so_and_a_cut_one_does_not(cache, recwarn):
    publish(cache, 4)
    path = cache.path / "notes" / "learner.used"
    with once(cache) as loader:
        assert taken(iter(loader), 3) == [*range(48)]
    sound = path.read_bytes().rstrip(b"\0")
    path.write_bytes(sound[:-5])
    with once(cache) as loader:
        assert taken(iter(loader), 1) == [*range(32, 48)]
    assert not recwarn.list
    path.write_bytes(sound[:30] + b"x" + sound[31:])
    with pytest.warns(RuntimeWarning, match="is damaged from byte 24 on"), once(cache) as loader:
        assert taken(iter(loader), 1) == [*range(16)]
    path.write_bytes(b"a newer one" + sound)
    with pytest.raises(ac.CacheFormatError, match="does not know"):
        once(cache)


def test_a_batch_that_cannot_be_noted_raises_and_is_not_lost(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    with once(cache) as loader:
        batches = iter(loader)
        assert taken(batches, 1) == [*range(16)]
        with monkeypatch.context() as patch:

            def fails(*_):
                raise OSError(28, "No space left on device")

            patch.setattr(os, "writev", fails)
            with pytest.raises(OSError, match="No space left"):
                next(batches)
        with pytest.raises(ValueError, match="is in use"):
            once(cache)
        assert taken(iter(loader), 1) == [*range(16, 32)]
        with pytest.raises(ValueError, match="is in use"):
            once(cache)
    with once(cache) as loader:
        assert ids_of(loader) == [*range(32, 64)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epoch_rows": 64}, "epoch_rows does not go with once='learner': it has no epochs"),
        ({"weights": "id"}, "weights does not go with"),
        ({"batch_size": None, "batch_tokens": 64, "length_of": "id"}, "batch_tokens does not go with"),
        ({"shuffle": "window"}, "shuffle does not go with"),
        ({"wait_rows": 32}, "wait_rows does not go with"),
        ({"workers": 2}, "workers does not go with"),
        ({"prefetch": 2}, "prefetch does not go with"),
        ({"rank": 0, "world_size": 2, "run_id": "a"}, "give each rank a name of its own, and where="),
        ({"once": ""}, "once='' is a file's name"),
        ({"once": "a/b"}, "once='a/b' is a file's name"),
        ({"once": None, "acknowledge": True}, "acknowledge=True belongs to once="),
    ],
)
def test_what_does_not_go_with_it_is_refused(cache, options, said):
    with pytest.raises(ValueError, match=said):
        Loader(cache, **{"batch_size": 16, "once": "learner"} | options)


def test_a_name_is_a_text_and_a_flag_a_bool(cache):
    with pytest.raises(TypeError, match="once=3 must be a name"):
        Loader(cache, once=3)
    with pytest.raises(TypeError, match="acknowledge must be True or False"):
        Loader(cache, once="learner", acknowledge=1)


def test_it_has_no_state_and_others_have_no_such_methods(cache):
    publish(cache, 1)
    with once(cache) as loader:
        for use in (loader.state_dict, lambda: loader.load_state_dict({})):
            with pytest.raises(ValueError, match="has no state to save or load: the cache keeps"):
                use()
        with pytest.raises(ValueError, match="belongs to acknowledge=True"):
            loader.done([(0, 0)])
        assert loader.steps is None
    with Loader(cache) as loader:
        for use in (lambda: loader.set_rows("all"), lambda: loader.done([(0, 0)])):
            with pytest.raises(ValueError, match="belongs to Loader\\(once="):
                use()


def test_its_counts_are_batches_and_the_caches_are_rows_served(cache):
    publish(cache, 4)
    with once(cache, 8) as loader:
        assert taken(iter(loader), 5) == [*range(40)]
        stats = loader.stats()
        assert (stats.batches, stats.rows, stats.epochs, stats.shuffle) == (5, 40, 0, None)
        assert "once='learner'" in repr(loader)
        assert cache.stats().served_rows == 32  # the fifth is not used yet
    assert cache.stats().served_rows == 40
    assert cache.stats().most_times_served == 1


def test_the_pace_holds_it_back_as_any_loader(cache):
    publish(cache, 2)
    cache.set_pace(ac.Pace(min_rows=64))
    with once(cache) as loader:
        found: list[int] = []
        learner = threading.Thread(target=lambda: found.extend(taken(iter(loader), 1)))
        learner.start()
        wait_until(lambda: cache.store.usage.a_loader_waits(), "the loader to wait")
        assert not found
        publish(cache, 2)
        learner.join(DEADLINE_SECONDS)
        assert found == [*range(16)]


def test_a_durable_cache_has_a_batch_on_the_disk_before_the_next(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache", durable=True)
    publish(cache, 3)
    with once(cache) as loader:
        batches = iter(loader)
        next(batches)
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        next(batches)
        assert len(synced) == 1


def test_the_file_is_made_anew_as_it_grows(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache", capacity=4096 * KIB)
    publish(cache, 8)
    limit(monkeypatch, used_bytes=4 * KIB)
    path = cache.path / "notes" / "learner.used"
    cache.close()
    with once(cache.path, 1) as loader:
        batches, files = iter(loader), set()
        for _ in range(128):
            taken(batches, 1)
            files.add(path.stat().st_ino)
        assert len(files) > 1
    with once(cache.path, 1) as loader:
        assert ids_of(loader) == []
    assert np.frombuffer(path.read_bytes()[24:48], np.int64).tolist() == [0, 0, 16]
