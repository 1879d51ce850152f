"""ShardIndex: which items of a stream are there, and where, against a model that lists them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers import limit, make_cache

import arrowcache as ac
from arrowcache.read_through.shards import ShardIndex, index_of, named

SCHEMA = ac.Schema({"x": ac.Tensor("float64"), "_index": ac.Tensor("int64")})
SHARDS = 5


def publish(cache, items) -> None:
    with cache.writer() as writer:
        for shard, position in items:
            writer.append(x=1000 * shard + position, _index=index_of(shard, position))


def check(index, there) -> None:
    """The index knows these (shard, position), and no others."""
    index.refresh()
    for shard in range(SHARDS):
        missing = next(at for at in range(10**6) if (shard, at) not in there)
        assert index.stored(shard) == missing
        assert index.has_gaps(shard) is any(of == shard and at > missing for of, at in there)
    asked = sorted({*there, *((shard, at) for shard in range(SHARDS) for at in (0, 7, 10**7))})
    rows = index.rows_of(np.array([index_of(*item) for item in asked]))
    assert [item for item, row in zip(asked, rows.tolist(), strict=True) if row >= 0] == sorted(there)
    assert index.count == len(there)
    found = rows[rows >= 0]
    if len(found):
        values = index.snapshot.gather(found)["x"].tolist()
        assert values == [1000 * shard + at for shard, at in sorted(there)]


@pytest.mark.parametrize("seed", range(4))
def test_items_are_found_as_segments_come_and_go(tmp_path, monkeypatch, seed):
    limit(monkeypatch, left_segments=2)  # so that they are numbered anew
    drawn, published = random.Random(seed), []
    with make_cache(tmp_path / "cache", SCHEMA) as cache:
        index, counts = ShardIndex(cache.store, SHARDS), [0] * SHARDS
        for _ in range(25):
            if published and drawn.random() < 0.3:
                index.release()  # what is leased stays
                cache.evict(1)
                published.pop(0)
            else:
                items = []
                for shard in drawn.choices(range(SHARDS), k=drawn.randrange(1, 12)):
                    at = drawn.randrange(counts[shard] + 1) if drawn.random() < 0.2 else counts[shard]
                    counts[shard] = max(counts[shard], at + 1)
                    items.append((shard, at))
                publish(cache, items)
                published.append(items)
            check(index, {item for items in published for item in items})
        index.release()
        again = ShardIndex(cache.store, SHARDS)
        check(again, {item for items in published for item in items})
        again.release()


def test_what_is_no_item_of_the_stream_is_left_out(tmp_path):
    with make_cache(tmp_path / "cache", SCHEMA) as cache:
        publish(cache, [(SHARDS, 0), (0, 0), (7, 3)])
        index = ShardIndex(cache.store, SHARDS)
        check(index, {(0, 0)})
        index.release()


def test_an_item_has_a_name():
    assert named(index_of(3, 2**39)) == f"item {2**39} of shard 3"
