"""What stays mapped between two epochs, what an epoch gives up, and that neither is in the way."""

from __future__ import annotations

import gc
import queue
import signal
import threading
import warnings
from functools import partial

import pytest
from helpers import (
    DEADLINE_SECONDS,
    disk_bytes,
    flip_byte,
    ids_of,
    limit,
    mapped_seqs,
    publish,
    published_ids,
    segment_files,
    seqs,
    wait_until,
)
from processes import Script

import arrowcache as ac
from arrowcache import Loader, Snapshot
from arrowcache.native import maps
from arrowcache.reading.stream import IdleSnapshots
from arrowcache.reading.worker_threads import WorkerThreads


@pytest.fixture
def place(cache):
    place = IdleSnapshots(lambda: False, lambda: None)
    place.begin()
    yield place
    place.close()


@pytest.fixture
def for_ever(monkeypatch):
    """What is parked is not let go because of the time that passes."""
    limit(monkeypatch, idle_seconds=3600.0)


def parked(cache: ac.Cache, place: IdleSnapshots) -> None:
    snapshot = Snapshot.take(cache.store)
    snapshot.map_all()
    place.park(snapshot)


# between epochs


@pytest.mark.slow
def test_a_parked_snapshot_is_let_go_after_a_moment(cache, place):
    parked(cache, place)
    wait_until(lambda: cache.stats().leased_bytes == 0, "the moment to pass")
    assert mapped_seqs(cache) == []


def test_a_parked_snapshot_stays_until_a_writer_of_this_process_needs_room(cache, place, for_ever):
    parked(cache, place)
    assert mapped_seqs(cache) == list(range(10))
    assert cache.stats().leased_bytes > 0
    publish(cache, 60)  # twice the capacity, with on_full="raise"
    assert disk_bytes(cache.path) <= cache.stats().capacity_bytes
    assert mapped_seqs(cache) == []
    assert seqs(cache)[0] > 9


@pytest.mark.parametrize("free", [lambda cache: cache.evict(1), lambda cache: cache.resize("256KiB")])
def test_a_parked_snapshot_makes_way_for_evict_and_resize(cache, place, for_ever, free):
    parked(cache, place)
    free(cache)
    assert seqs(cache)[0] > 0


@pytest.mark.parametrize("end", [IdleSnapshots.drop, IdleSnapshots.close])
def test_several_parked_snapshots_are_let_go_by_drop_and_close(cache, place, for_ever, end):
    parked(cache, place)
    publish(cache, 1)
    parked(cache, place)
    end(place)
    assert cache.stats().leased_bytes == 0
    assert mapped_seqs(cache) == []


def test_what_is_parked_after_the_close_is_let_go_at_once(cache, place, for_ever):
    place.close()
    parked(cache, place)
    assert cache.stats().leased_bytes == 0


def test_where_no_thread_can_be_started_nothing_is_parked(cache, for_ever, monkeypatch):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    place = IdleSnapshots(lambda: False, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        place.begin()
    parked(cache, place)
    assert cache.stats().leased_bytes == 0
    place.begin()
    parked(cache, place)
    assert cache.stats().leased_bytes > 0, "the next epoch has one"
    place.close()


def test_what_is_parked_when_the_next_epoch_begins_stays_until_it_is_dropped(cache, monkeypatch):
    looks = queue.SimpleQueue()
    place = IdleSnapshots(lambda: looks.put(1) or False, lambda: None)
    place.begin()
    limit(monkeypatch, idle_seconds=0.0)
    parked(cache, place)
    looks.get(timeout=DEADLINE_SECONDS)
    limit(monkeypatch, idle_seconds=0.1)
    parked(cache, place)
    place.begin()
    with pytest.raises(queue.Empty):
        looks.get(timeout=0.5)
    assert cache.stats().leased_bytes > 0
    place.close()
    assert cache.stats().leased_bytes == 0


def test_ranks_are_looked_at_until_all_have_joined(cache, monkeypatch):
    limit(monkeypatch, idle_seconds=0.0, joined_look_seconds=0.0)
    left = [True, True, False]
    place = IdleSnapshots(lambda: left.pop(0), lambda: None)
    place.begin()
    parked(cache, place)
    wait_until(lambda: not left, "it to have looked three times")
    place.close()


def test_close_waits_for_what_its_thread_is_at(cache, monkeypatch):
    limit(monkeypatch, idle_seconds=0.0)
    begun, go_on = threading.Event(), threading.Event()

    def release_joined() -> bool:
        begun.set()
        return not go_on.wait(DEADLINE_SECONDS)

    place = IdleSnapshots(release_joined, lambda: None)
    place.begin()
    parked(cache, place)
    assert begun.wait(DEADLINE_SECONDS)
    closer = threading.Thread(target=place.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive(), "it may be closing a snapshot, which is leased until it is done"
    go_on.set()
    closer.join(DEADLINE_SECONDS)
    assert not closer.is_alive()


ENDS = """
    import atexit, sys, threading

    @atexit.register  # before arrowcache's own: called after it
    def end():
        place.close()
        with Snapshot.take(cache.store) as another:
            place.park(another)
        print(cache.stats().leased_bytes > 0, flush=True)

    import arrowcache as ac
    from arrowcache import Snapshot
    from arrowcache.limits import Limits
    from arrowcache.reading.stream import IdleSnapshots

    Limits.current = Limits(idle_seconds=3600.0, join_seconds=3600.0)
    cache = ac.Cache.open(sys.argv[1])
    begun = threading.Event()
    place = IdleSnapshots(lambda: begun.set() or threading.Event().wait(), lambda: None)
    place.begin()
    place.leave(Snapshot.take(cache.store))
    begun.wait()  # from now on its thread does nothing
    snapshot = Snapshot.take(cache.store)
    place.park(snapshot)
"""


def test_when_the_interpreter_ends_nobody_waits_for_a_thread(cache):
    """None runs any more: its wait would take as long as it may."""
    with Script(ENDS, cache.path, new_interpreter=True) as script:
        assert script.line() == "True", "the kernel lets go of all"
        assert script.end() == (0, "")


def test_the_next_epoch_finds_mapped_what_the_last_one_read(cache, for_ever, monkeypatch):
    with Loader(cache, 16) as loader:
        assert len(ids_of(loader)) == 160
        monkeypatch.setattr(maps.File, "open", None)
        monkeypatch.setattr(maps, "open_alike", None)
        for _ in range(3):
            assert len(ids_of(loader)) == 160
            assert mapped_seqs(cache) == list(range(10))


# while an epoch runs


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", ["window", None])
def test_an_epoch_in_order_gives_up_what_was_delivered_while_only_the_consumer_moves(cache, shuffle, workers):
    options = {"window_bytes": 3 * segment_files(cache)[0].stat().st_size} if shuffle else {}
    made: list[int] = []
    options |= {"workers": workers, "worker_type": "thread", "columns": ["id"]}
    options |= {"transform": lambda batch: made.append(1) or batch}
    with Loader(cache, 8, shuffle=shuffle, prefetch=100, **options) as loader:
        epoch = iter(loader)
        wait_until(lambda: len(made) == 20, "every batch to be made")
        assert cache.evict(1) == 0, "nothing was delivered"
        delivered = ids_of(next(epoch) for _ in range(12))
        gc.collect()
        assert cache.evict(1), "the oldest was let go"
        left = set(published_ids(cache))
        assert set(range(160)) - set(delivered) <= left, "what is to come stays"
        assert sorted(delivered + ids_of(epoch)) == list(range(160))


@pytest.mark.parametrize("shuffle", ["rows", "blocks"])
def test_an_epoch_that_reads_everywhere_gives_up_nothing_before_its_end(cache, shuffle):
    with Loader(cache, 8, shuffle=shuffle, prefetch=100) as loader:
        epoch = iter(loader)
        delivered = ids_of(next(epoch) for _ in range(19))
        assert cache.evict(1) == 0
        assert sorted(delivered + ids_of(epoch)) == list(range(160))


# errors end nothing


def test_a_new_segment_that_is_damaged_ends_nothing_and_is_reported(cache):
    with Loader(cache, 16) as loader:
        epoch = iter(loader)
        publish(cache, 2)
        flip_byte(segment_files(cache)[10], 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert sorted(ids_of(epoch)) == list(range(160))
            assert sorted(ids_of(loader)) == [*range(160), *range(176, 192)]
        assert any("quarantined" in str(warning.message) for warning in caught)
    assert seqs(cache) == [*range(10), 11]
    assert cache.stats().leased_bytes == 0


def test_a_folder_that_vanishes_ends_no_epoch_and_is_told_by_the_next(cache):
    folder = cache.path
    away = folder.with_name("away")
    with Loader(cache, 16, timeout=1) as loader:
        epoch = iter(loader)
        first = ids_of([next(epoch)])
        folder.rename(away)
        rest = ids_of(epoch)
        assert sorted(first + rest) == list(range(160))
        with pytest.raises(OSError):
            iter(loader)
        away.rename(folder)
        assert sorted(ids_of(loader)) == list(range(160))


# its end


@pytest.mark.parametrize("state", ["in an epoch", "between epochs"])
def test_a_loader_that_is_dropped_leases_nothing(cache, state, for_ever):
    loader = Loader(cache, 16)
    epoch = iter(loader)
    next(epoch)
    if state == "between epochs":
        assert len(ids_of(epoch)) == 144
    del epoch, loader
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    assert mapped_seqs(cache) == []


@pytest.mark.no_cover
@pytest.mark.parametrize("of", ["parking", "threads"])
def test_a_thread_that_begins_late_after_ctrl_c_is_not_started_twice(of, monkeypatch):
    """Joining one that was failed now and then, and left another one."""
    may_begin, begin = threading.Event(), threading.Thread._bootstrap_inner
    begun, ended = [], []

    def late(thread: threading.Thread) -> None:
        begun.append(thread)
        may_begin.wait(60)
        begin(thread)
        ended.append(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", late)
    owner = IdleSnapshots(lambda: False, lambda: None) if of == "parking" else WorkerThreads(1)
    call = owner.begin if isinstance(owner, IdleSnapshots) else partial(owner.submit, list)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                call()
    finally:
        signal.signal(signal.SIGALRM, handler)
    may_begin.set()
    call()
    owner.close()
    wait_until(lambda: begun and len(ended) == len(begun), "the threads to end")
