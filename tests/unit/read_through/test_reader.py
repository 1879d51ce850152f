"""ReadThrough: what it stores, and when."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import KIB

import arrowcache as ac
from arrowcache.read_through.places import INDEX
from arrowcache.read_through.reader import ReadThrough
from arrowcache.read_through.trouble import Trouble
from arrowcache.storage.layout import CachedItems
from arrowcache.storage.recovery import create_store
from arrowcache.storage.sizing import settings_of

SCHEMA = ac.Schema({"x": ac.Tensor("float32", (1024,)), INDEX: ac.Tensor("int64")})
LENGTH = 500


@pytest.fixture
def store(tmp_path):
    items = CachedItems(LENGTH, "")
    settings = settings_of(SCHEMA, 640 * KIB, 64 * KIB, None, 0.0, durable=False, dataset=items)
    return create_store(tmp_path / "cache", settings, exist_ok=False)


@pytest.fixture
def reader(store):
    reader = ReadThrough(store, ["x"], Trouble())
    yield reader
    reader.close()


def put(reader, index) -> bool:
    """Make an item. Returns: False: it is not stored."""
    claimed = reader.claim(np.array([index])).all()
    if claimed:
        reader.put(index, {"x": np.full(1024, index, np.float32)})
    return bool(claimed)


def test_room_is_used_also_where_as_many_segments_are_there_as_when_there_was_none(store, reader):
    index = 0
    while put(reader, index):
        index += 1
    assert not reader.stores
    reader.rest()
    before = len(store.segments())
    gone = store.evict(3 * 64 * KIB)
    for _ in gone:
        with ac.Cache(store).writer("raise") as writer:
            writer.append(x=np.zeros(1024, np.float32), _index=LENGTH - 1)
    assert len(store.segments()) == before
    assert reader.stores
    assert put(reader, index)
    reader.publish()
    assert len(reader.find(np.array([index])).positions) == 1
