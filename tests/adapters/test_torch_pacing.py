"""Pacing through the stock DataLoader: what it delivers is counted once, however many processes make it."""

from __future__ import annotations

import pytest
from helpers import make_cache, publish

pytest.importorskip("torch", reason="PyTorch is not installed")

import arrowcache as ac
import arrowcache.torch as at


@pytest.fixture
def cache(tmp_path):
    with make_cache(tmp_path / "cache", capacity="10MB", segment_bytes="1MB") as cache:
        publish(cache, 4)
        yield cache


def test_a_dataloader_that_is_left_gives_back_what_did_not_arrive(cache):
    loader = at.dataloader(cache, 16, num_workers=0)
    for _ in loader:
        break
    assert cache.stats().served_rows == 16
    assert sum(1 for _ in loader) == 4
    assert cache.stats().served_rows == 5 * 16


def test_a_dataloader_of_workers_counts_each_batch_once(cache):
    loader = at.dataloader(cache, 10, num_workers=2, drop_last=False, persistent_workers=False)
    assert sum(1 for _ in loader) == 7
    assert cache.stats().served_rows == 64


def test_the_length_of_the_next_epoch_leaves_out_what_was_served_often_enough(cache):
    cache.set_pace(ac.Pace(max_reuse=1))
    loader = at.dataloader(cache, 16, num_workers=0)
    assert len(loader) == sum(1 for _ in loader) == 4
    publish(cache, 2)
    assert len(loader) == sum(1 for _ in loader) == 2
