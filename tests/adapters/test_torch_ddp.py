"""Ranks of torch.distributed: DDP training of four processes over gloo, on one cache."""

from __future__ import annotations

import datetime as dt
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Child
from torch import distributed

import arrowcache as ac
from arrowcache.torch import Loader

WORLD, BATCH, SEGMENT_ROWS = 4, 4, 32
SECONDS = 240.0  # four processes import torch; a build for CUDA takes 6 s of a processor each
SCHEMA = ac.Schema(
    {"id": ac.Tensor("int64"), "x": ac.Tensor("float32", (1024,)), "y": ac.Tensor("float32", (1,))}
)


def publish_ids(cache: ac.Cache, first: int, count: int) -> None:
    """Rows whose target is the mean of their input, in full segments."""
    rng = np.random.default_rng(first)
    with cache.writer() as writer:
        x = rng.random((count, 1024), dtype=np.float32)
        writer.extend(id=np.arange(first, first + count), x=x, y=x.mean(axis=1, keepdims=True))


@pytest.fixture
def cache(tmp_path):
    """Six segments of a cache that has room for about ten."""
    cache = ac.Cache.create(
        tmp_path / "cache", SCHEMA, "2400KiB", segment_bytes="192KiB", segment_rows=SEGMENT_ROWS
    )
    publish_ids(cache, 0, 6 * SEGMENT_ROWS)
    return cache


def train(folder: Path, rank: int, epochs: int, dies_at: tuple[int, int] | None) -> Any:
    """What one rank saw: of each epoch its ids, of all the weights; or the error that ended it."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    patience = dt.timedelta(seconds=120)
    distributed.init_process_group("gloo", rendezvous, patience, WORLD, rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    cache = ac.Cache.open(folder / "cache")
    seen: list[list[int]] = []
    try:
        with Loader(cache, BATCH, run_id="ddp") as loader:  # its rank is that of torch.distributed
            for epoch in range(epochs):
                seen.append([])
                for step, batch in enumerate(loader):
                    if dies_at == (epoch, step) and rank == WORLD - 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]).backward()
                    optimizer.step()
                    seen[-1] += batch["id"].tolist()
                distributed.barrier()  # nobody reads: a sampler replaces the oldest rows
                if rank == 0:
                    publish_ids(cache, 1000 * (epoch + 1), 4 * SEGMENT_ROWS)
                distributed.barrier()
    except RuntimeError as error:
        return type(error).__name__
    finally:
        cache.close()
    weights = [parameter.detach().numpy().copy() for parameter in model.parameters()]
    distributed.destroy_process_group()
    return seen, weights


@pytest.mark.slow
def test_ranks_train_in_step_on_disjoint_rows_while_the_cache_grows_and_evicts(cache, tmp_path):
    children = [Child(train, tmp_path, rank, 4, None) for rank in range(WORLD)]
    try:
        results = [child.result(SECONDS) for child in children]
    finally:
        for child in children:
            child.kill()
    for epoch in range(4):
        ids = [seen[epoch] for seen, _ in results]
        assert len({len(rows) for rows in ids}) == 1, "equally many steps"
        together = [row for rows in ids for row in rows]
        assert len(set(together)) == len(together), "no row twice"
        newest = 1000 * epoch
        assert any(newest <= row < newest + 4 * SEGMENT_ROWS for row in together), "what came last is seen"
    assert not set(range(SEGMENT_ROWS)) & set(together), "the oldest were evicted"
    for _, weights in results[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(results[0][1], weights, strict=True))
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []


@pytest.mark.slow
def test_a_rank_that_is_killed_is_an_error_in_the_others_and_leaves_no_lease(cache, tmp_path):
    children = [Child(train, tmp_path, rank, 3, (1, 2)) for rank in range(WORLD)]
    try:
        assert children[-1].exit_code(SECONDS) == -signal.SIGKILL
        for child in children[:-1]:
            assert "Error" in child.result(SECONDS)
    finally:
        for child in children:
            child.kill()
    assert cache.stats().leased_bytes == 0
    publish_ids(cache, 5000, 8 * SEGMENT_ROWS)
    assert cache.verify() == []
