"""Merging of small segments: few full ones, nothing lost, whoever reads, writes or dies meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress

import numpy as np
import pytest
from crash.faults import Faults
from helpers import KIB, disk_bytes, limit, segment_files, wait_until
from processes import Child
from quick import SEED, in_part

import arrowcache as ac
from arrowcache.arrow.schema import Schema
from arrowcache.read_through.item_index import INDEX, ItemIndex
from arrowcache.read_through.publisher import FailureBackoff, is_merge_worth_it, merge
from arrowcache.read_through.read_through import ReadThrough
from arrowcache.storage.claims import MERGING, the_only_one
from arrowcache.storage.eviction import superseded
from arrowcache.storage.recovery import create_store, open_store
from arrowcache.storage.settings import CachedItems, settings_of

SCHEMA = Schema(
    {
        "x": ac.Tensor("float32", (16,)),
        "half": ac.Tensor("bfloat16", (2,)),
        "words": ac.String(),
        "raw": ac.Binary(),
        "tokens": ac.Ragged("int32", (2,)),
        "waves": ac.Ragged("complex64"),
        INDEX: ac.Tensor("int64"),
    }
)
SEGMENT, LENGTH = 64 * KIB, 200
FULL = [60 + number % 140 for number in range(600)]  # of a segment and some more


def row(index):
    return {
        "x": np.full(16, index, np.float32),
        "half": np.full(2, index, np.uint16),
        "words": "w" * (index % 7),
        "raw": bytes([index % 256]) * (index % 5),
        "tokens": np.full((index % 3, 2), index, np.int32),
        "waves": np.full(index % 4, index + 1j, np.complex64),
        INDEX: index,
    }


def make_store(path, capacity=4 << 20):
    settings = settings_of(SCHEMA, capacity, SEGMENT, headroom=0.0, dataset=CachedItems(LENGTH, ""))
    return create_store(path, settings, exist_ok=True)


def publish(store, indices):
    writer = ac.Cache(store).writer("raise")
    try:
        for index in indices:
            writer.append(**row(index))
        writer.flush()
    finally:
        writer.abort()


@pytest.fixture(scope="module")
def small_segments(tmp_path_factory):
    """The folder of a closed cache, to be copied."""
    store = make_store(tmp_path_factory.mktemp("small") / "cache")
    for first in range(0, LENGTH, 5):
        publish(store, range(first, first + 5))
    ac.Cache(store).close()
    return store.folder.path


@pytest.fixture
def store(tmp_path, small_segments):
    """Of 40 small segments of 5 items each."""
    return make_store(shutil.copytree(small_segments, tmp_path / "cache", copy_function=shutil.copy))


def nothing():
    pass


def merge_all(store, release=nothing):
    while merge(store, release):
        pass


def check(store, length=LENGTH):
    """Every item is there, and what it was; as a process sees it that opens the cache now."""
    places = ItemIndex(open_store(store.folder.path, check="bytes"), LENGTH)
    places.refresh()
    try:
        assert places.count == length
        there = np.setdiff1d(np.arange(LENGTH), places.missing)
        columns = places.snapshot.gather(places.rows_of(there))
        for at, index in enumerate(there.tolist()):
            wanted = row(index)
            for name, column in columns.items():
                if isinstance(column, ac.Values):
                    found = column.data[column.offsets[at] : column.offsets[at + 1]]
                else:
                    found = column[at]
                assert np.array_equal(found, wanted[name]), (index, name)
    finally:
        places.release()
    assert ac.Cache(store).verify() == []
    assert disk_bytes(store.folder.path) <= store.settings.capacity_bytes


def names(store):
    return [segment.name for segment in store.segments()]


def test_many_small_segments_become_few_full_ones(store):
    merge_all(store)
    check(store)
    assert len(segment_files(ac.Cache(store))) <= 3
    assert store.stats().rows == LENGTH
    assert store.stats().inserted_rows == LENGTH, "a merge publishes no new rows"
    before = names(store)
    merge_all(store)
    assert names(store) == before


def test_a_reader_goes_on_and_parts_leave_once_nobody_leases_them(store):
    reader = ItemIndex(store, LENGTH)
    reader.refresh()
    before = reader.snapshot
    merge_all(store)
    assert len(names(store)) > 40, "the parts are leased"
    ids = reader.rows_of(np.arange(LENGTH))
    assert before.gather(ids)[INDEX].tolist() == [*range(LENGTH)]
    check(store)
    reader.refresh()
    assert reader.count == LENGTH
    merge_all(store, reader.release)
    assert len(names(store)) <= 3
    reader.refresh()
    assert reader.snapshot.gather(reader.rows_of(np.arange(LENGTH)))[INDEX].tolist() == [*range(LENGTH)]
    reader.release()
    check(store)


@pytest.mark.parametrize("capacity", [400 * KIB, 460 * KIB])
def test_the_capacity_holds(tmp_path, capacity):
    store = make_store(tmp_path / "cache", capacity)
    published = 0
    with suppress(ac.CacheFullError):
        while published < LENGTH:
            publish(store, range(published, published + 2))
            published += 2
    assert published < LENGTH
    merge_all(store)
    check(store, published)


def test_only_one_merges(store):
    before = names(store)
    with the_only_one(store.folder, MERGING) as first:
        assert first
        merge_all(store)
        assert names(store) == before
    merge_all(store)
    assert len(names(store)) <= 3


def test_a_damaged_part_is_left_out(store):
    with open(segment_files(ac.Cache(store))[3], "r+b") as file:
        file.truncate(100)
    with pytest.warns(RuntimeWarning, match="quarantined"):
        merge_all(store)
    merge_all(store)
    check(store, LENGTH - 5)
    assert len(names(store)) <= 4


def merge_at(path):
    merge_all(open_store(path, check="structure"))


@pytest.mark.slow
def test_processes_that_race_lose_nothing(store):
    children = [Child(merge_at, store.folder.path) for _ in range(4)]
    for child in children:
        with child:
            child.result()
    merge_all(store)
    check(store)
    assert len(names(store)) <= 3
    assert store.stats().rows == LENGTH


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_kill_in_any_step_loses_nothing(tmp_path):
    every = 3 // in_part(3)
    number, before = SEED % every, make_store(tmp_path / "before")
    for first in range(0, 40, 5):
        publish(before, range(first, first + 5))
    while True:
        path = shutil.copytree(before.folder.path, tmp_path / str(number))
        store = open_store(path, check="structure")
        pid = os.fork()
        if not pid:
            try:
                with Faults(number, die, only=lambda point: point.is_change).active():
                    merge_all(open_store(store.folder.path, check="structure"))
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        check(store, 40)
        merge_all(store)
        check(store, 40)
        assert len(names(store)) == 1
        assert store.stats().rows == 40
        assert status in (0, signal.SIGKILL)
        if not status:
            break
        number += every
    assert number > 15, "the calls of a publish, and of removals"


def test_who_reads_the_cache_itself_sees_each_item_once_while_merged_parts_are_leased(store):
    """A loader over `train.cache`, and `packed`, had items twice."""
    cache = ac.Cache(store)
    with cache.snapshot() as before:
        merge_all(store)
        assert store.stats().rows > LENGTH, "parts are leased, and their copies are there"
        assert sorted(before.gather(np.arange(len(before)))[INDEX]) == [*range(LENGTH)]
        with cache.snapshot() as now, ac.Loader(cache, 8, drop_last=False, paced=False) as loader:
            assert sorted(now.gather(np.arange(len(now)))[INDEX]) == [*range(LENGTH)]
            assert sorted(index for batch in loader for index in batch[INDEX]) == [*range(LENGTH)]
            epoch = iter(loader)
            given = next(epoch)[INDEX].tolist()
            state = loader.state_dict()
        with cache.snapshot(where=lambda segment: segment.seq < 3) as parts:
            assert parts.gather(np.arange(len(parts)))[INDEX].tolist() == [*range(15)]
    with ac.Loader(cache, 8, drop_last=False, paced=False) as loader:
        loader.load_state_dict(state)
        assert sorted(given + [index for batch in loader for index in batch[INDEX]]) == [*range(LENGTH)]


def test_places_are_not_looked_up_again_while_merged_parts_stay(store):
    with ac.Cache(store).snapshot():
        merge_all(store)
        places = ItemIndex(store, LENGTH)
        assert places.refresh()
        assert not places.refresh()
        assert places.count == LENGTH
        places.release()


def test_readers_of_a_dataset_merge_what_they_published(tmp_path):
    store = make_store(tmp_path / "cache")
    reader = ReadThrough(store, [name for name in SCHEMA if name != INDEX], FailureBackoff())
    for index in range(40):
        wanted = np.array([index])
        assert reader.publisher.claim(wanted).all()
        reader.publisher.put(index, {name: value for name, value in row(index).items() if name != INDEX})
        reader.publisher.publish()
    wait_until(lambda: not is_merge_worth_it(store), "the merges of its thread")
    assert len(reader.find(np.arange(40)).positions) == 40
    reader.publisher.close()
    check(store, 40)
    assert len(names(store)) < 12, "fewer than eight that are small, beside what they were merged into"


@pytest.mark.parametrize("who", ["asks", "is idle"])
def test_small_segments_that_others_left_are_merged_by_who_only_reads(store, who, monkeypatch):
    """No more came of a complete cache, so its writers' last parts stayed for ever."""
    limit(monkeypatch, parts_seconds=0.05)
    reader = reader_of(store.folder.path)
    assert len(reader.find(np.arange(LENGTH)).positions) == LENGTH
    if who == "asks":
        wait_until(lambda: [reader.find(np.arange(LENGTH)), len(names(store)) < 9][-1], "the merges")
    else:
        wait_until(lambda: len(names(store)) < 9, "the merges")
    reader.publisher.close()
    check(store, LENGTH)


# parts that somebody leased as they were merged


def parts_of(store):
    return superseded(store.segments())


@pytest.fixture
def leased(tmp_path):
    """A store with a full segment, parts merged into another one, and the snapshot that leases them."""
    store = make_store(tmp_path / "cache")
    publish(store, FULL)  # the oldest: each later lease reaches over the parts
    for first in range(0, 60, 5):
        publish(store, range(first, first + 5))
    snapshot = ac.Cache(store).snapshot()
    merge_all(store)
    assert len(parts_of(store)) == 12
    yield store, snapshot
    snapshot.close()


def reader_of(path):
    store = open_store(path, check="structure")
    return ReadThrough(store, [name for name in SCHEMA if name != INDEX], FailureBackoff())


def test_a_snapshot_does_not_lease_merged_parts_that_lie_between_its_segments(leased):
    store, before = leased
    now = ac.Cache(store).snapshot()
    assert now.segments[0].seq < parts_of(store)[0].seq < now.segments[-1].seq
    assert not store.take_back(superseded)[0], "the one before leases them"
    before.close()
    assert len(store.take_back(superseded)[0]) == 12
    assert sorted({*now.gather(np.arange(len(now)))[INDEX].tolist()} & {*range(60)}) == [*range(60)]
    now.close()


@pytest.mark.parametrize("who", ["asks", "is idle", "rests", "closes", "opens"])
def test_parts_leave_after_their_last_lease_though_nobody_publishes(leased, who, monkeypatch):
    limit(monkeypatch, parts_seconds=0.05)
    store, before = leased
    reader = reader_of(store.folder.path)
    assert len(reader.find(np.arange(60)).positions) == 60
    before.close()
    if who == "asks":
        wait_until(lambda: [reader.find(np.arange(60)), not parts_of(store)][-1], "the parts to leave")
    elif who == "is idle":
        wait_until(lambda: not parts_of(store), "the parts to leave")
    elif who == "opens":
        other = reader_of(store.folder.path)
        other.publisher.drain()
        other.publisher.close()
    else:
        reader.publisher.drain() if who == "rests" else reader.publisher.close()
    assert not parts_of(store)
    reader.publisher.close()


def test_a_reader_that_finds_all_it_wants_lets_go_of_parts_that_others_merged(tmp_path, monkeypatch):
    """It never looked for newer segments, and leased the parts for all of a training."""
    limit(monkeypatch, parts_seconds=0.05)
    store = make_store(tmp_path / "cache")
    publish(store, FULL)
    for first in range(0, 60, 5):
        publish(store, range(first, first + 5))
    readers = [reader_of(store.folder.path) for _ in range(2)]

    def read():
        for reader in readers:
            assert len(reader.find(np.arange(60)).positions) == 60

    with the_only_one(store.folder, MERGING):  # readers merge none
        read()
    merge_all(store)
    wait_until(lambda: [read(), not parts_of(store) and len(names(store)) < 12][-1], "the parts to leave")
    for reader in readers:
        reader.publisher.close()


def test_who_needs_room_takes_merged_parts_back_first(tmp_path):
    """A full cache counted parts and their copies, and stored nothing more."""
    store = make_store(tmp_path / "cache", 700 * KIB)
    for first in range(0, LENGTH, 5):
        publish(store, range(first, first + 5))
    before = ac.Cache(store).snapshot()
    merge_all(store)
    with suppress(ac.CacheFullError):
        while True:
            publish(store, FULL)
    assert parts_of(store)
    assert not store.has_room()
    before.close()
    assert store.has_room()
    quarantined = store.stats().quarantined
    publish(store, FULL)
    assert not parts_of(store)
    assert store.stats().quarantined == quarantined
    check(store)
