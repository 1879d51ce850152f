"""Headroom in PyTorch: whichever way a cache is read, every row is there where nobody writes."""

from __future__ import annotations

import warnings

import pytest
from helpers import ids_of, nearly_full
from torch.utils.data import DataLoader

from arrowcache.torch import CacheDataset, EpochBatchSampler, Loader, dataloader

EVERY_ROW = list(range(5000))
_OLDEST_TWO = 2656  # rows of two of the four segments of `nearly_full`


@pytest.fixture(params=[0.1, 0], ids=["headroom", "no headroom"])
def idle(request, tmp_path):
    """Nearly full, and nobody writes."""
    return nearly_full(tmp_path / "cache", request.param)


@pytest.fixture
def cache(tmp_path):
    return nearly_full(tmp_path / "cache")


def by_dataset(cache):
    sampler = EpochBatchSampler(cache, 100, drop_last=False)
    return DataLoader(CacheDataset(cache), batch_sampler=sampler)


WAYS = {
    "loader": lambda cache: Loader(cache, 100, drop_last=False),
    "dataloader": lambda cache: dataloader(cache, 100, 0, drop_last=False),
    "dataset": by_dataset,
    "workers": lambda cache: dataloader(cache, 100, 2, drop_last=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_epoch_has_every_row_where_nobody_writes(idle, way):
    batches = WAYS[way](idle)
    for _ in range(2):
        assert sorted(ids_of(batches)) == EVERY_ROW


@pytest.mark.parametrize("way", [*WAYS][:3])
def test_an_epoch_leaves_the_oldest_to_an_open_writer_and_says_so_once(cache, way):
    batches = WAYS[way](cache)
    with cache.writer():
        with pytest.warns(
            RuntimeWarning, match=f"leaves out the oldest {_OLDEST_TWO:,} of 5,000 rows"
        ) as caught:
            epochs = [sorted(ids_of(batches)) for _ in range(2)]
        assert len(caught) == 1
    assert epochs == [EVERY_ROW[_OLDEST_TWO:]] * 2
    assert sorted(ids_of(batches)) == EVERY_ROW


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS][3:])
def test_workers_leave_the_same_rows_to_an_open_writer(cache, way):
    batches = WAYS[way](cache)
    with cache.writer(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert sorted(ids_of(batches)) == EVERY_ROW[_OLDEST_TWO:]
    assert sorted(ids_of(batches)) == EVERY_ROW


def test_a_sampler_tells_how_many_rows_and_how_many_batches(cache):
    sampler = EpochBatchSampler(cache, 100, drop_last=False)
    loader = DataLoader(CacheDataset(cache), batch_sampler=sampler)
    assert (len(sampler), sampler.left_out_rows) == (50, 0)
    with cache.writer():
        assert len(sampler) == 24
        with pytest.warns(RuntimeWarning, match="leaves out"):
            ids_of(loader)
        assert sampler.left_out_rows == _OLDEST_TWO
    ids_of(loader)
    assert sampler.left_out_rows == 0
