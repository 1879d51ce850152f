"""Recipes of the README, as they stand there but for sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import ROW, ids_of, make_cache, publish, published_ids, sample

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

import arrowcache as ac
from arrowcache.torch import Loader

LOADERS = pytest.mark.parametrize("kind", [ac.Loader, Loader])


@pytest.mark.slow
@LOADERS
@pytest.mark.parametrize("workers", [0, 1])
def test_finite_data_comes_once_an_epoch(tmp_path, kind, workers):
    data = [sample(number) for number in range(150)]  # no multiple of a batch, nor of a segment
    with ac.Cache.create(tmp_path / "cache", ROW, capacity="8MiB", segment_bytes="64KiB") as cache:
        with cache.writer(on_full="raise") as writer:
            for each in data:
                writer.append(each)
        with kind(cache, batch_size=64, drop_last=False, workers=workers) as loader:
            epochs = [ids_of(loader) for _ in range(3)]
            assert loader.steps == 3
        assert cache.stats().evicted_rows == 0
    assert [sorted(epoch) for epoch in epochs] == [list(range(150))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def endless(rng: np.random.Generator):
    while True:
        yield sample(int(rng.integers(10**6, 10**9)))


@pytest.mark.slow
@LOADERS
def test_an_epoch_that_is_begun_before_the_pool_is_resumed_without_loss(tmp_path, kind):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 40)
    with kind(cache, 16) as loader:
        epoch = iter(loader)
        head = ids_of(itertools.islice(epoch, 5))
        torch.save(loader.state_dict(), tmp_path / "loader.pt")
        planned = head + ids_of(epoch)

    with kind(cache, 16) as loader:
        loader.load_state_dict(torch.load(tmp_path / "loader.pt"))
        epoch = iter(loader)  # leases the rest of the epoch: samplers evict nothing of it from here on
        with ac.SamplerPool(cache, endless, workers=1) as pool:
            assert head + ids_of(epoch) == planned  # and a warning would be an error
            pool.wait(segments=20, timeout=120)
            assert max(ids_of(loader)) >= 10**6
    assert cache.stats().evicted_rows


@pytest.mark.slow
@LOADERS
def test_an_epoch_that_is_begun_after_samplers_went_on_says_how_many_rows_it_lost(tmp_path, kind):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 40)
    with kind(cache, 16) as loader:
        epoch = iter(loader)
        head = ids_of(itertools.islice(epoch, 5))
        state = loader.state_dict()
        planned = head + ids_of(epoch)
    publish(cache, 30, first=10**6)
    with kind(cache, 16, drop_last=False) as loader:
        loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="rows of epoch 0 are lost to it"):
            rest = ids_of(loader)
    there = set(published_ids(cache))
    assert rest == [number for number in planned[len(head) :] if number in there]


@pytest.mark.slow
@LOADERS
@pytest.mark.parametrize("workers", [0, 1])
def test_held_out_segments_are_never_trained_on_while_the_cache_rolls(tmp_path, kind, workers):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    with (
        kind(cache, 16, where=lambda s: s.seq % 10 != 0, workers=workers) as train,
        kind(cache, 16, where=lambda s: s.seq % 10 == 0, shuffle=None, drop_last=False, paced=False) as held,
    ):
        trained, validated = set(), set()
        for _ in range(4):
            rows = [ids_of(train), ids_of(held)]
            assert sorted(rows[0] + rows[1]) == published_ids(cache)
            assert rows[1] == [number for number in published_ids(cache) if number // 16 % 10 == 0]
            trained |= set(rows[0])
            validated |= set(rows[1])
            publish(cache, 5)
    assert not trained & validated
