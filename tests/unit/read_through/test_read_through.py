"""ReadThrough: items are found in the cache or made, each in its place, and one process publishes each."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from helpers import KIB

import arrowcache as ac
from arrowcache.read_through.item_index import INDEX
from arrowcache.read_through.publisher import FailureBackoff
from arrowcache.read_through.read_through import LeftOut, ReadThrough
from arrowcache.reading.slots import Slots
from arrowcache.storage.recovery import create_store
from arrowcache.storage.settings import CachedItems, settings_of

SCHEMA = ac.Schema({"x": ac.Tensor("float32", (1024,)), INDEX: ac.Tensor("int64")})
LENGTH = 500


@pytest.fixture
def store(tmp_path):
    items = CachedItems(LENGTH, "")
    settings = settings_of(SCHEMA, 640 * KIB, 64 * KIB, headroom=0.0, dataset=items)
    return create_store(tmp_path / "cache", settings, exist_ok=False)


@pytest.fixture
def reader(store):
    reader = ReadThrough(store, ["x"], FailureBackoff())
    yield reader
    reader.publisher.close()


@pytest.fixture
def beside(store):
    """What another process has: claims of its own."""
    reader = ReadThrough(store, ["x"], FailureBackoff())
    yield reader
    reader.publisher.close()


class Maker:
    """Makes items, which are their numbers, and notes in `made` which, and in `put` which were published.

    Args:
        left_out: numbers of items that cannot be made.
        fails: number of an item whose making raises.
    """

    def __init__(self, left_out=(), fails=None):
        self.made, self.put, self.calls = [], [], []
        self._left_out, self._fails = left_out, fails

    def __call__(self, indices, put):
        self.calls.append(len(indices))
        for index in indices:
            if index == self._fails:
                raise ValueError(f"item {index} is broken")
            if index in self._left_out:
                yield LeftOut(index, ValueError("broken"))
                continue
            self.made.append(index)
            if put is not None:
                self.put.append(index)
                put(index, {"x": np.full(1024, index, np.float32)})
            yield index


def items_of(columns):
    return columns["x"][:, 0].astype(int).tolist()


def items(reader, indices, make, at_once=1):
    return reader.items(np.array(indices), items_of, make, at_once)


def test_items_are_made_once_then_found_each_in_its_place(reader):
    first, second = Maker(), Maker()
    assert items(reader, [5, 3, 8], first) == [5, 3, 8]
    assert first.made == first.put == [5, 3, 8]
    reader.publisher.publish()
    assert items(reader, [8, 1, 5, 3, 2, 5], second) == [8, 1, 5, 3, 2, 5]
    assert second.made == second.put == [1, 2]
    reader.publisher.publish()
    assert reader.cached == 5
    assert reader.has(np.array([1, 2, 3, 5, 8]))
    assert sorted({*range(LENGTH)} - {*reader.missing.tolist()}) == [1, 2, 3, 5, 8]


@pytest.mark.parametrize("at_once", [None, 10])
def test_as_many_are_made_together_as_is_asked_for(reader, at_once):
    make = Maker()
    items(reader, range(10), make, at_once)
    assert make.calls == [10]


def test_an_item_that_is_asked_for_twice_is_published_once(reader):
    make = Maker()
    assert items(reader, [4, 4], make, None) == [4, 4]
    assert make.put == [4]
    reader.publisher.publish()
    assert reader.cached == 1


def test_what_another_process_publishes_meanwhile_is_not_made(reader, beside):
    wanted = np.array([7])
    assert beside.publisher.claim(wanted).all()
    make, found = Maker(), []
    asking = threading.Thread(target=lambda: found.extend(items(reader, [6, 7], make)))
    asking.start()
    beside.publisher.put(7, {"x": np.full(1024, 7, np.float32)})
    asking.join(30)
    assert found == [6, 7]
    assert make.made == [6]


def test_what_another_process_claims_and_gives_up_is_made_here(reader, beside):
    assert beside.publisher.claim(np.array([7])).all()
    make, found = Maker(), []
    asking = threading.Thread(target=lambda: found.extend(items(reader, [7], make)))
    asking.start()
    beside.publisher.release_claims([7])
    asking.join(30)
    assert found == [7]
    assert make.made == [7]


def test_what_is_left_out_is_not_published_and_claimed_by_nobody(reader, beside):
    found = items(reader, [1, 2, 3], Maker(left_out=[2]), None)
    assert [found[0], found[1].number, found[2]] == [1, 2, 3]
    assert beside.publisher.claim(np.array([2])).all()
    reader.publisher.publish()
    assert reader.cached == 2


def test_after_an_error_what_was_made_is_published_and_the_rest_is_claimed_by_nobody(reader, beside):
    with pytest.raises(ValueError, match="item 2 is broken"):
        items(reader, [1, 2, 3], Maker(fails=2), None)
    assert beside.publisher.claim(np.array([1, 2, 3])).tolist() == [False, True, True]
    reader.publisher.publish()
    assert reader.cached == 1


def test_of_a_full_cache_the_others_are_made_each_time_and_not_stored(store, reader):
    make = Maker()
    assert items(reader, range(LENGTH), make) == [*range(LENGTH)]
    reader.publisher.drain()
    there = reader.cached
    assert 0 < there < LENGTH
    again = Maker()
    assert items(reader, range(LENGTH), again) == [*range(LENGTH)]
    assert len(again.made) == LENGTH - there
    reader.publisher.drain()
    assert reader.cached == there


def test_counts_of_all_processes_are_together(store):
    counts = np.zeros((8, 3), np.int64)
    readers = [ReadThrough(store, ["x"], FailureBackoff(), counts) for _ in range(2)]
    items(readers[0], range(4), Maker(left_out=[3]), None)
    readers[0].publisher.publish()
    items(readers[1], range(3), Maker(), None)
    assert counts.sum(0).tolist() == [3, 3, 1]
    for each in readers:
        each.publisher.close()


def test_items_begun_ahead_are_there_as_columns_and_missing_ones_are_not_begun(reader):
    items(reader, [2, 9], Maker())
    reader.publisher.publish()
    slots = Slots({"x": ((1024,), np.dtype(np.float32))}, 2)
    assert reader.begin(np.array([2, 3]), slots) is None
    pending = reader.begin(np.array([9, 2]), slots)
    assert pending is not None
    assert pending.result()["x"][:, 0].tolist() == [9, 2]
    assert pending.take(0)
    assert pending.published > 1.6e9
