"""Read-ahead: what it keeps warm, what it gives up, and that it is never in the way."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
from helpers import (
    DEADLINE_SECONDS,
    disk_bytes,
    flip_byte,
    ids_of,
    in_child,
    make_cache,
    mapped_seqs,
    publish,
    published_ids,
    segment_files,
    seqs,
    wait_until,
)

import arrowcache as ac
from arrowcache import Loader, Snapshot
from arrowcache.reading import readahead
from arrowcache.reading.gather import Gather
from arrowcache.reading.mapped import MappedSegments
from arrowcache.reading.readahead import ReadAhead


@pytest.fixture
def cache(tmp_path):
    """Ten segments of 16 rows, ids 0 to 159."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    return cache


@pytest.fixture
def ahead(cache):
    ahead = ReadAhead(cache.store, None)
    ahead.start()
    yield ahead
    ahead.close()


@pytest.fixture
def gate(monkeypatch):
    """Holds up every look for new segments until it is set; `looked` is set after one more."""

    class Gate:
        def __init__(self) -> None:
            self.go_on, self.looked = threading.Event(), threading.Event()

    gate, look = Gate(), ReadAhead._look_for_new

    def gated(self, epoch):
        assert gate.go_on.wait(DEADLINE_SECONDS)
        try:
            look(self, epoch)
        finally:
            gate.looked.set()

    monkeypatch.setattr(ReadAhead, "_look_for_new", gated)
    yield gate
    gate.go_on.set()


def readahead_threads() -> int:
    return sum(thread.name == "arrowcache-readahead" for thread in threading.enumerate())


def parked(cache: ac.Cache, ahead: ReadAhead) -> None:
    snapshot = Snapshot.take(cache.store)
    snapshot.map_all()
    ahead.park(snapshot)


# between epochs


@pytest.mark.slow
def test_a_parked_snapshot_is_let_go_after_a_moment(cache, ahead):
    parked(cache, ahead)
    wait_until(lambda: cache.stats().leased_bytes == 0, "the moment to pass")
    assert mapped_seqs(cache) == []


def test_a_parked_snapshot_stays_until_a_writer_of_this_process_needs_room(cache, ahead, monkeypatch):
    monkeypatch.setattr(readahead, "_PARKED_SECONDS", 3600.0)
    parked(cache, ahead)
    assert mapped_seqs(cache) == list(range(10))
    assert cache.stats().leased_bytes > 0
    publish(cache, 60)  # twice the capacity, with on_full="raise"
    assert disk_bytes(cache.path) <= cache.stats().capacity_bytes
    assert mapped_seqs(cache) == []
    assert seqs(cache)[0] > 9


@pytest.mark.parametrize("free", [lambda cache: cache.evict(1), lambda cache: cache.resize("256KiB")])
def test_a_parked_snapshot_makes_way_for_evict_and_resize(cache, ahead, monkeypatch, free):
    monkeypatch.setattr(readahead, "_PARKED_SECONDS", 3600.0)
    parked(cache, ahead)
    free(cache)
    assert seqs(cache)[0] > 0


def test_several_parked_snapshots_are_let_go_by_drop_and_close(cache, monkeypatch):
    monkeypatch.setattr(readahead, "_PARKED_SECONDS", 3600.0)
    ahead = ReadAhead(cache.store, None)
    ahead.start()
    for end in (ahead.drop, ahead.close):
        parked(cache, ahead)
        publish(cache, 1)
        parked(cache, ahead)
        end()
        assert cache.stats().leased_bytes == 0
        assert mapped_seqs(cache) == []
    ahead.close()


def test_what_it_was_closed_before_doing_does_not_keep_it(cache):
    """Closed as an epoch began it was kept, with its loader's memory, until the collector came by."""
    gc.collect()
    gc.disable()
    try:
        ahead, busy = ReadAhead(cache.store, None), threading.Event()
        ahead.start()
        ahead.soon(lambda: busy.wait(DEADLINE_SECONDS))
        ahead.retire([])
        closing = threading.Thread(target=ahead.close)
        closing.start()
        wait_until(partial(getattr, ahead, "_closed"), "it to be told")
        ahead.retire([])  # by a thread that has not seen the end yet
        busy.set()
        closing.join()
        known = weakref.ref(ahead)
        del ahead, closing
        wait_until(lambda: known() is None, "it to be gone")
    finally:
        gc.enable()


def test_the_next_epoch_finds_mapped_what_the_last_one_read(cache, monkeypatch):
    monkeypatch.setattr(readahead, "_PARKED_SECONDS", 3600.0)
    mappings: list[int] = []
    opening = MappedSegments._open

    def counted(self, found, segment, *arguments):
        mappings.append(segment.seq)
        opening(self, found, segment, *arguments)

    monkeypatch.setattr(MappedSegments, "_open", counted)
    with Loader(cache, 16) as loader:
        for _ in range(4):
            assert len(ids_of(loader)) == 160
    assert sorted(mappings) == list(range(10)), "each was mapped once"


# while an epoch runs


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_warmed_before_the_first_batch_of_an_epoch_is_made(cache, monkeypatch, workers):
    """Its rows would wait for the disk behind all others."""
    order, take, warm = [], Gather.take, Snapshot.warm

    def taking(self, *arguments):
        deadline = time.monotonic() + 0.5
        while not order and time.monotonic() < deadline:
            time.sleep(0.01)  # for a read-ahead that has begun already
        order.append("gather")
        return take(self, *arguments)

    def warming(self, *arguments):
        order.append("warm")
        return warm(self, *arguments)

    monkeypatch.setattr(Gather, "take", taking)
    monkeypatch.setattr(Snapshot, "warm", warming)
    with Loader(cache, 16, workers=workers, worker_type="thread") as loader:
        epoch = iter(loader)
        next(epoch)
        wait_until(lambda: order.count("warm") >= 10, "all segments to be warm")
        epoch.close()
    assert order[0] == "gather"


def test_what_an_epochs_end_cut_short_is_warmed_in_the_next(cache, monkeypatch):
    is_first, warm = True, Snapshot.warm

    def cut_short(self, index, is_wanted):
        return warm(self, index, (lambda: False) if is_first else is_wanted)

    monkeypatch.setattr(Snapshot, "warm", cut_short)
    with Loader(cache, 16) as loader:
        ids_of(loader)
        is_first = False
        epoch = iter(loader)
        next(epoch)
        found = MappedSegments.of(cache.store)._segments.values()
        wait_until(lambda: [each.warm[0] for each in found] == [1] * 10, "all segments to be warm")
        epoch.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_an_epoch_asks_ahead_until_its_rows_are_found_in_memory(cache, monkeypatch, is_on_disk):
    asked, begin_gather = [], Snapshot.begin_gather

    def gathering(self, *arguments):
        asked.append(self.asks_ahead)
        return begin_gather(self, *arguments)

    monkeypatch.setattr(Snapshot, "begin_gather", gathering)
    monkeypatch.setattr(Gather, "was_on_disk", is_on_disk)
    monkeypatch.setattr("arrowcache.reading.assembly._GROUP_BYTES", 1)
    with Loader(cache, 16, shuffle="rows", prefetch=1) as loader:
        ids_of(loader)
    assert len(asked) > 1
    assert asked[0]
    assert set(asked[1:]) == {is_on_disk}
    with cache.snapshot() as mine:
        assert not mine.asks_ahead, "nobody reads on"


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_segments_published_while_an_epoch_runs_are_mapped_before_the_next(cache, shuffle):
    with Loader(cache, 16, shuffle=shuffle, prefetch=1) as loader:
        epoch = iter(loader)
        next(epoch)
        publish(cache, 3)
        wait_until(lambda: {10, 11, 12} <= set(mapped_seqs(cache)), "the new ones to be mapped")
        publish(cache, 2)
        wait_until(lambda: {13, 14} <= set(mapped_seqs(cache)), "still newer ones, too")
        assert max(ids_of(epoch)) < 160, "the epoch goes on without them"
        assert sorted(ids_of(loader)) == list(range(240))


def test_only_what_where_accepts_is_mapped_ahead(cache):
    with Loader(cache, 16, where=lambda segment: segment.seq % 2 == 0) as loader:
        epoch = iter(loader)
        publish(cache, 4)
        wait_until(lambda: {10, 12} <= set(mapped_seqs(cache)), "the new ones to be mapped")
        assert all(seq % 2 == 0 for seq in mapped_seqs(cache))
        assert len(ids_of(epoch)) == 80


def test_what_is_mapped_ahead_does_not_keep_older_segments(cache):
    with Loader(cache, 16, where=lambda segment: segment.seq >= 8) as loader:
        epoch = iter(loader)
        publish(cache, 2)
        wait_until(lambda: {10, 11} <= set(mapped_seqs(cache)), "the new ones to be mapped")
        assert cache.evict("1GB") > 0
        assert seqs(cache) == [8, 9, 10, 11]
        assert len(ids_of(epoch)) == 32


def test_what_is_mapped_ahead_makes_way_for_a_writer_of_this_process(cache):
    """It cannot be evicted before the epoch's own segments; afterwards it must not be in the way."""
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        publish(cache, 2)
        wait_until(lambda: {10, 11} <= set(mapped_seqs(cache)), "the new ones to be mapped")
        assert len(ids_of(epoch)) == 160
        publish(cache, 60)
        assert seqs(cache)[0] > 11


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", ["window", None])
def test_an_epoch_in_order_gives_up_what_was_delivered_while_only_the_consumer_moves(cache, shuffle, workers):
    options = {"window_bytes": 3 * segment_files(cache)[0].stat().st_size} if shuffle else {}
    options |= {"workers": workers, "worker_type": "thread", "columns": ["id"]}
    with Loader(cache, 8, shuffle=shuffle, prefetch=100, **options) as loader:
        epoch = iter(loader)
        wait_until(lambda: epoch._stream.exhausted, "every batch to be made")
        assert cache.evict(1) == 0, "nothing was delivered"
        delivered = ids_of(next(epoch) for _ in range(12))
        gc.collect()
        wait_until(lambda: cache.evict(1), "the oldest to be let go")
        left = set(published_ids(cache))
        assert set(range(160)) - set(delivered) <= left, "what is to come stays"
        assert sorted(delivered + ids_of(epoch)) == list(range(160))


@pytest.mark.parametrize("shuffle", ["rows", "blocks"])
def test_an_epoch_that_reads_everywhere_gives_up_nothing_before_its_end(cache, shuffle):
    with Loader(cache, 8, shuffle=shuffle, prefetch=100) as loader:
        epoch = iter(loader)
        delivered = ids_of(next(epoch) for _ in range(19))
        publish(cache, 1)
        wait_until(lambda: 10 in mapped_seqs(cache), "the read-ahead to have looked")
        assert cache.evict(1) == 0
        assert sorted(delivered + ids_of(epoch)) == list(range(160))


# errors end nothing


def test_a_new_segment_that_is_damaged_ends_nothing_and_is_reported(cache, gate):
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        publish(cache, 2)
        flip_byte(segment_files(cache)[10], 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gate.looked.clear()
            gate.go_on.set()
            assert gate.looked.wait(DEADLINE_SECONDS)
            assert sorted(ids_of(epoch)) == list(range(160))
            assert sorted(ids_of(loader)) == [*range(160), *range(176, 192)]
        assert any("quarantined" in str(warning.message) for warning in caught)
    assert seqs(cache) == [*range(10), 11]
    assert cache.stats().leased_bytes == 0


def test_a_folder_that_vanishes_ends_no_epoch_and_is_told_by_the_next(cache, gate):
    folder = cache.path
    away = folder.with_name("away")
    with Loader(cache, 16, timeout=1) as loader:
        epoch = iter(loader)
        first = ids_of([next(epoch)])
        folder.rename(away)
        gate.looked.clear()
        gate.go_on.set()
        assert gate.looked.wait(DEADLINE_SECONDS)
        rest = ids_of(epoch)
        assert sorted(first + rest) == list(range(160))
        with pytest.raises(OSError):
            iter(loader)
        away.rename(folder)
        assert sorted(ids_of(loader)) == list(range(160))


def test_an_exception_of_where_in_the_thread_is_told_by_the_next_epoch(cache, gate):
    broken = threading.Event()

    def where(segment):
        if broken.is_set():
            raise LookupError("where is broken")
        return True

    with Loader(cache, 16, where=where) as loader:
        epoch = iter(loader)
        publish(cache, 1)
        broken.set()
        gate.looked.clear()
        gate.go_on.set()
        assert gate.looked.wait(DEADLINE_SECONDS)
        assert sorted(ids_of(epoch)) == list(range(160))
        with pytest.raises(LookupError, match="where is broken"):
            iter(loader)
        broken.clear()
        assert sorted(ids_of(loader)) == list(range(176))
        epoch = iter(loader)
        publish(cache, 1)
        wait_until(lambda: 11 in mapped_seqs(cache), "the thread to work on")
        epoch.close()


# its end


def test_close_ends_the_thread_and_lets_go_of_everything(cache):
    before = readahead_threads()
    loader = Loader(cache, 16)
    epoch = iter(loader)
    publish(cache, 2)
    wait_until(lambda: {10, 11} <= set(mapped_seqs(cache)), "the new ones to be mapped")
    loader.close()
    assert cache.stats().leased_bytes == 0
    assert mapped_seqs(cache) == []
    wait_until(lambda: readahead_threads() == before, "the thread to end")
    assert next(epoch, None) is None


def test_close_waits_for_what_its_thread_is_at(cache, ahead):
    begun, go_on = threading.Event(), threading.Event()
    ahead.soon(lambda: (begun.set(), go_on.wait(DEADLINE_SECONDS)))
    assert begun.wait(DEADLINE_SECONDS)
    closer = threading.Thread(target=ahead.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive(), "it may be closing a snapshot, which is leased until it is done"
    go_on.set()
    closer.join(DEADLINE_SECONDS)
    assert not closer.is_alive()


@pytest.mark.parametrize("state", ["in an epoch", "between epochs"])
def test_a_loader_that_is_dropped_leaves_no_thread(cache, state):
    before = readahead_threads()
    loader = Loader(cache, 16)
    epoch = iter(loader)
    next(epoch)
    if state == "between epochs":
        assert len(ids_of(epoch)) == 144
    assert readahead_threads() == before + 1
    del epoch, loader
    gc.collect()
    wait_until(lambda: readahead_threads() == before, "the thread to end")
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    assert mapped_seqs(cache) == []


@pytest.mark.parametrize("state", ["in an epoch", "between epochs"])
def test_a_forked_child_has_a_read_ahead_of_its_own_and_its_parent_keeps_its_lease(cache, state):
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        first = ids_of([next(epoch)])
        if state == "between epochs":
            first += ids_of(epoch)

        def child():
            del first[:]
            newer = iter(loader)
            publish(cache, 1)
            wait_until(lambda: 10 in mapped_seqs(cache), "the child's thread to map it")
            assert sorted(ids_of(newer)) == list(range(160))
            loader.close()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork beside threads
            with in_child(child):
                pass
        if state == "in an epoch":
            assert cache.evict(1) == 0, "the parent's lease holds"
            assert sorted(first + ids_of(epoch)) == list(range(160))
        assert sorted(ids_of(loader)) == list(range(176))


def test_touching_ahead_changes_no_page_of_the_files(cache):
    before = [path.read_bytes() for path in segment_files(cache)]
    with Loader(cache, 16) as loader:
        for _ in range(2):
            for batch in loader:
                assert np.all(batch["image"][:, 0, 0] == batch["id"])
    assert [path.read_bytes() for path in segment_files(cache)] == before
