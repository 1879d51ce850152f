"""The cache of a dataset: it says so in cache.json, and keeps what it has where room is short."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest
import xxhash

import arrowcache as ac
from arrowcache.storage.recovery import create_store
from arrowcache.storage.settings import CachedItems, Settings, settings_of

SCHEMA = ac.Schema({"x": ac.Tensor("float32", (256,)), "_index": ac.Tensor("int64")})
ITEMS = CachedItems(500, "a", "x: Tensor")
SETTINGS = settings_of(SCHEMA, "1MiB", "64KiB", headroom=0.0, dataset=ITEMS)


@pytest.fixture
def cache(tmp_path):
    return ac.Cache(create_store(tmp_path / "cache", SETTINGS, exist_ok=False))


def test_that_of_a_stream_has_shards_and_no_length():
    of_stream = settings_of(SCHEMA, "1MiB", "64KiB", headroom=0.0, dataset=CachedItems(0, "a", "x: T", 7))
    assert Settings.from_json(of_stream.text) == of_stream
    assert json.loads(of_stream.text)["dataset"] == {"version": "a", "values": "x: T", "shards": 7}
    assert str(of_stream.dataset) == "7 shards of version 'a'"
    described = {"length": 500, "version": "a", "values": "x: Tensor"}
    assert json.loads(SETTINGS.text)["dataset"] == described, "as releases before read it"
    for wrong in ({"shards": 0}, {"shards": 2**40}, {"length": 0}, {"length": 1, "shards": 1}, {}):
        with pytest.raises((KeyError, ValueError)):
            CachedItems.from_json({"version": "a", "values": ""} | wrong)


def fill(cache, on_full="raise"):
    """Publish as many items as there is room for. Returns: why there is no more."""
    writer = cache.writer(on_full, timeout=60)
    try:
        for number in range(10_000):
            writer.append(x=np.full(256, number, np.float32), _index=number)
    except ac.CacheFullError as error:
        return str(error)
    finally:
        writer.abort()
    raise AssertionError("it is never full")


def test_a_full_one_keeps_what_it_has_and_says_what_to_do(cache):
    message = fill(cache)
    assert "the cache of a dataset keeps what it has in a capacity of 1.0 MiB: raise that with" in message
    stats = cache.stats()
    assert stats.evicted_segments == stats.oldest_seq == 0
    assert 0.85 * stats.capacity_bytes < stats.allocated_bytes <= stats.capacity_bytes
    assert fill(cache, "wait") == message, "nobody waits for what will not leave"


def test_evict_and_resize_do_what_they_say(cache):
    fill(cache)
    before = cache.stats().segments
    assert cache.evict("100KiB") >= 100 << 10
    cache.resize("2MiB")
    cache.resize("768KiB")
    assert cache.stats().segments < before
    assert cache.stats().allocated_bytes <= 768 << 10


def test_a_full_disk_makes_no_room_either(cache, monkeypatch):
    with cache.writer() as writer:
        writer.extend(x=np.zeros((10, 256), np.float32), _index=np.arange(10))

    def full(fd, start, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    writer = cache.writer()
    writer.append(x=np.zeros(256, np.float32), _index=10)
    with pytest.raises(ac.CacheFullError, match="the disk is full"):
        writer.flush()
    writer.abort()
    assert cache.stats().rows == 10


def test_its_settings_survive_their_text():
    assert Settings.from_json(SETTINGS.text) == SETTINGS
    assert Settings.from_json(SETTINGS.text).dataset == ITEMS


@pytest.mark.parametrize("columns", [1, 3])
def test_segments_are_arranged_as_in_a_rolling_cache(columns):
    schema = ac.Schema({f"x{n}": ac.Tensor("float32", (4096,)) for n in range(columns)})
    rolling = settings_of(schema, "64MiB", "1MiB", headroom=0.0)
    of_items = settings_of(schema, "64MiB", "1MiB", headroom=0.0, dataset=ITEMS)
    assert of_items.form == rolling.form


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": {"length": 0, "version": "a", "values": ""}},
        {"dataset": {"length": "5", "version": "a", "values": ""}},
        {"dataset": {"length": 5, "version": 3, "values": ""}},
        {"dataset": {"length": 5, "version": "a", "values": 3}},
        {"dataset": {"length": 5, "version": "a"}},
        {"dataset": {"length": 5, "version": "a", "values": "", "more": 1}},
        {"dataset": 5},
    ],
)
def test_what_no_cache_of_a_dataset_says_is_a_newer_format(change):
    record = json.loads(SETTINGS.text) | change
    del record["checksum"]
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(record).encode())
    with pytest.raises(ac.CacheFormatError, match="which this arrowcache does not know"):
        Settings.from_json(json.dumps(record | {"checksum": checksum}))


def test_a_rolling_cache_has_no_dataset():
    rolling = settings_of(SCHEMA, "1MiB", "64KiB", headroom=0.0)
    record = json.loads(rolling.text)
    assert "dataset" not in record
    assert Settings.from_json(rolling.text).dataset is None


def test_flush_publishes_what_there_is_now(cache):
    with cache.writer() as writer:
        writer.flush()
        assert cache.stats().segments == 0
        writer.append(x=np.zeros(256, np.float32), _index=0)
        assert writer.rows == 1
        writer.flush()
        assert (writer.rows, cache.stats().rows) == (0, 1)
        writer.append(x=np.zeros(256, np.float32), _index=1)
    assert cache.stats().rows == 2
    with pytest.raises(ValueError, match="closed"):
        writer.flush()
