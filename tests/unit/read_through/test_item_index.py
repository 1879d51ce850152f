"""ItemIndex: which row of the cache an item is, however segments come and go."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import flip_byte, limit, make_cache, segment_files
from quick import one_in

import arrowcache as ac
from arrowcache.read_through.item_index import ItemIndex

SCHEMA = ac.Schema({"x": ac.Tensor("float64"), "_index": ac.Tensor("int64")})


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache", SCHEMA)


@pytest.fixture
def index(cache):
    index = ItemIndex(cache.store, 100)
    yield index
    index.release()


def publish(cache, *indices, of=0.0):
    with cache.writer() as writer:
        for index in indices:
            writer.append(x=index + of, _index=index)


def read(index, *indices):
    """The items' values, None where they are missing."""
    rows = index.rows_of(np.array(indices))
    return [None if row < 0 else index.snapshot.gather([row])["x"][0] for row in rows.tolist()]


def test_items_are_found_where_they_were_published(cache, index):
    assert index.refresh()
    assert read(index, 3, 4) == [None, None]
    publish(cache, 5, 3)
    assert read(index, 3) == [None], "until it looks again"
    assert index.refresh()
    assert read(index, 3, 4, 5) == [3, None, 5]
    assert not index.refresh(), "nothing came"
    publish(cache, 99, 0)
    assert index.refresh()
    assert read(index, 99, 5, 0, 1, 3) == [99, 5, 0, None, 3]
    assert index.count == 4
    assert index.missing.tolist() == sorted({*range(100)} - {0, 3, 5, 99})


def test_of_two_copies_the_older_serves_and_the_other_one_once_it_has_left(cache, index):
    publish(cache, 1, 2)
    publish(cache, 2, 3, 2, of=0.5)
    for _ in range(2):
        index.refresh()
        assert read(index, 1, 2, 3) == [1, 2, 3.5]
        assert index.count == 3
    index.release()
    cache.evict(1)
    assert index.refresh()
    assert read(index, 1, 2, 3) == [None, 2.5, 3.5]
    assert index.count == 2


def test_a_copy_that_came_later_does_not_take_the_place(cache, index):
    publish(cache, 2)
    index.refresh()
    publish(cache, 2, of=0.5)
    index.refresh()
    assert read(index, 2) == [2]


def test_numbers_that_no_item_has_are_left_out(cache, index):
    publish(cache, 100, -1, 7)
    index.refresh()
    assert index.count == 1
    assert read(index, 7) == [7]


def test_it_leases_until_it_is_released_and_knows_the_places_then(cache, index):
    publish(cache, 1)
    index.refresh()
    assert cache.stats().leased_bytes
    index.release()
    index.release()
    assert not cache.stats().leased_bytes
    assert index.count == 1
    assert index.refresh()
    assert read(index, 1) == [1]


def test_a_damaged_segment_is_left_out(cache, index):
    publish(cache, 1)
    publish(cache, 2)
    flip_byte(segment_files(cache)[0], 4)
    with pytest.warns(RuntimeWarning, match="quarantined"):
        index.refresh()
    assert read(index, 1, 2) == [None, 2]


@pytest.mark.parametrize("error", [OSError, MemoryError, KeyboardInterrupt, ac.CorruptSegmentError])
def test_after_a_failure_to_read_new_segments_their_items_are_found(cache, index, monkeypatch, error):
    """They counted as missing until the next segment came."""
    publish(cache, 1, 2)
    publish(cache, 3)
    index.refresh()
    index.release()
    cache.evict(1)

    def fail(*_):
        raise error

    monkeypatch.setattr(np, "repeat", fail)
    with pytest.raises(error):
        index.refresh()
    monkeypatch.undo()
    index.refresh()
    assert read(index, 1, 2, 3) == [None, None, 3]


class Plain:
    """What `ItemIndex` shows, computed from all segments anew."""

    def __init__(self, cache):
        self.rows = {}
        with cache.snapshot() as snapshot:
            for row, index in enumerate(snapshot.gather(range(len(snapshot)))["_index"].tolist()):
                self.rows.setdefault(index, row)


@pytest.mark.parametrize("seed", one_in(2, range(6)))
def test_places_are_those_of_all_segments_however_they_come_and_go(cache, index, seed, monkeypatch):
    """Copies, numbers of no item, segments that leave in the middle, one at a time and many."""
    limit(monkeypatch, left_segments=3 * (seed % 3))  # renumbered soon, or late
    rng = np.random.default_rng(seed)
    for step in range(60):
        for _ in range(rng.integers(0, 3)):
            publish(cache, *rng.integers(-1, 40, rng.integers(1, 6)).tolist(), of=step / 64)
        if rng.random() < 0.5:
            index.release()
            if rng.random() < 0.5:
                cache.store.take_back(lambda listed: [each for each in listed if rng.random() < 0.3])
            elif rng.random() < 0.3:
                cache.evict(1 if rng.random() < 0.8 else "1MB")
        index.refresh()
        rows = Plain(cache).rows
        wanted = [rows.get(index, -1) for index in range(100)]
        assert index.rows_of(np.arange(100)).tolist() == wanted, step
        assert index.count == 100 - wanted.count(-1)


def test_a_segment_is_read_once_whatever_leaves(cache, index, monkeypatch):
    read_rows = []
    repeat = np.repeat  # of the segments' numbers, once for each row that is read

    def counted(numbers, counts):
        read_rows.append(int(counts.sum()))
        return repeat(numbers, counts)

    monkeypatch.setattr(np, "repeat", counted)
    for first in range(0, 80, 4):
        publish(cache, *range(first, first + 4))
    index.refresh()
    assert sum(read_rows) == 80
    index.release()
    cache.evict(1)
    index.refresh()
    publish(cache, 0, 1)
    index.refresh()
    index.release()
    cache.store.take_back(lambda listed: listed[5:8])
    index.refresh()
    assert sum(read_rows) == 82
    assert index.count == 80 - 4 + 2 - 12


def test_ctrl_c_while_segments_leave_shows_no_item_for_another(cache, index, monkeypatch):
    publish(cache, 1)
    publish(cache, 2)
    publish(cache, 3)
    index.refresh()
    index.release()
    cache.evict(1)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "all", interrupted)  # who asks whether some left
    with pytest.raises(KeyboardInterrupt):
        index.refresh()
    monkeypatch.undo()
    index.refresh()
    assert read(index, 1, 2, 3) == [None, 2, 3]
