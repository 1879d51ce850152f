"""Complaints about what an epoch holds: stale, repeated, disagreed on, clumped, left out. Rows 14-17, 24."""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import held_rank_files, ids_of, make_cache, nearly_full, publish, worker_pids
from processes import Child
from quick import first_is_quick

import arrowcache as ac


@pytest.fixture
def cache(tmp_path):
    """Twenty segments of 16 rows, ids 0 to 319."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    return cache


def same(batch):
    return batch


@pytest.mark.parametrize(
    "kind", first_is_quick(["threads", "processes", "rows of a DataLoader", "tensors of a DataLoader"])
)
def test_complaint_14_workers_that_live_on_read_what_was_published_before_the_epoch(cache, kind):
    workers: Any
    if "DataLoader" in kind:
        pytest.importorskip("torch", reason="PyTorch is not installed")
        from arrowcache.torch import dataloader

        transform = None if "rows" in kind else same
        loader = dataloader(cache, 8, 2, transform=transform, persistent_workers=True, prefetch_factor=6)
        workers = lambda: {worker.pid for worker in multiprocessing.active_children()}  # noqa: E731
    else:
        how = {"threads": "thread", "processes": "process"}[kind]
        loader = ac.Loader(cache, 8, workers=2, worker_type=how, transform=dict, prefetch=12)
        workers = lambda: worker_pids() if how == "process" else None  # noqa: E731
    first = workers_before = None
    for epoch in range(4):
        batches = iter(loader)
        made = [next(batches)]
        publish(cache, 1)  # of the next epoch; batches of this one may be made already, or not
        made += batches
        assert sorted(ids_of(made)) == list(range(320 + 16 * epoch)), f"epoch {epoch}"
        if epoch == 0:
            workers_before = workers()
        next(iter(loader))  # and leave it, with batches of it on their way
        first = made
    assert workers() == workers_before, "other workers: this shows nothing"
    assert first is not None
    del batches, made, first
    loader.close() if isinstance(loader, ac.Loader) else loader.batch_sampler.close()


WORKERS = [{}, {"workers": 2, "worker_type": "thread"}, {"workers": 1}, {"workers": 3}]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["rows", "window"])
def test_complaint_15_resume_skips_and_repeats_nothing_at_any_step_and_number_of_workers(cache, shuffle):
    window = {"window_bytes": "200KiB"} if shuffle == "window" else {}
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                ac.Loader(cache, 16, shuffle=shuffle, seed=4, transform=dict, **window, **options)
            )
            for options in WORKERS
        ]
        other = stack.enter_context(ac.Loader(cache, 7, drop_last=False, transform=dict))
        epoch = iter(loaders[0])
        start = loaders[0].state_dict()
        whole = ids_of(epoch)
        assert sorted(whole) == list(range(320))
        for step in range(21):
            before, after = loaders[step % 4], loaders[(step // 4 + 1) % 4]
            before.load_state_dict(start)
            epoch = iter(before)
            delivered = ids_of([next(epoch) for _ in range(step)])
            state = before.state_dict()
            for resumed in (after, other):
                resumed.load_state_dict(state)
                assert delivered + ids_of(resumed) == whole, f"step {step}"


def train(path: Path, rank: int, world: int, barrier: Any) -> list[list[list[int]]]:
    found = []
    with ac.Loader(path, 8, rank=rank, world_size=world, run_id="job", columns=["id"]) as loader:
        for _ in range(4):
            barrier.wait(60)
            found.append([batch["id"].tolist() for batch in loader])
        barrier.wait(60)
    return found


def test_complaint_16_ranks_agree_on_rows_and_steps_while_the_cache_changes(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity=600 * 1024)
    publish(cache, 20)
    world = 3
    barrier = multiprocessing.get_context("forkserver").Barrier(world)
    with ExitStack() as stack:
        ranks = [stack.enter_context(Child(train, cache.path, rank, world, barrier)) for rank in range(world)]
        number = 1000
        while any(rank.is_alive() for rank in ranks) and number < 1000 + 16 * 60:
            with cache.writer(timeout=60) as writer:
                writer.extend(id=np.arange(number, number + 16), image=np.zeros((16, 16, 16), np.float32))
            number += 16
        results = [rank.result(60) for rank in ranks]
    for epoch in range(4):
        assert len({len(result[epoch]) for result in results}) == 1, "ranks make unequally many steps"
        found = [number for result in results for batch in result[epoch] for number in batch]
        assert len(set(found)) == len(found) > 100, "a row came twice"
    assert held_rank_files(cache) == []
    assert cache.stats().leased_bytes == 0


SEGMENTS, ROWS, BATCH = 32, 128, 32


def spread_and_company(path: Path, **options: Any) -> tuple[float, float]:
    """How far rows of one segment lie apart, and of how many segments a batch is: over uniform's.

    As benchmarks/shuffle.py says; here of what a loader delivers.
    """
    with ac.Loader(path, BATCH, with_ids=True, **options) as loader:
        batches = [(batch["_seq"].copy(), batch["_row"].copy()) for batch in loader]
    seqs, rows = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert len(set(zip(seqs.tolist(), rows.tolist(), strict=True))) == len(seqs) == SEGMENTS * ROWS
    places = [np.flatnonzero(seqs == seq) for seq in range(SEGMENTS)]
    apart = np.mean([np.abs(p[:, None] - p[None, :]).sum() / (ROWS * (ROWS - 1)) for p in places])
    uniform = SEGMENTS * (1 - (1 - 1 / SEGMENTS) ** BATCH)
    company = np.mean([len(np.unique(batch)) for batch, _ in batches]) / uniform
    return float(apart / (len(seqs) / 3)), float(company)


def test_complaint_17_shuffles_do_not_clump(tmp_path):
    cache = make_cache(tmp_path / "cache", ac.Schema({"id": ac.Tensor("int64")}), segment_rows=ROWS)
    with cache.writer() as writer:
        writer.extend(id=np.arange(SEGMENTS * ROWS))
    size = cache.stats().published_bytes
    spread, company = spread_and_company(cache.path)
    assert spread == pytest.approx(1, abs=0.05)
    assert company == pytest.approx(1, abs=0.05)
    spread, company = spread_and_company(cache.path, shuffle="window", window_bytes=size // 2)
    assert spread > 0.35
    assert company > 0.5
    spread, company = spread_and_company(cache.path, shuffle="window", window_bytes=size // 4)
    assert spread > 0.15
    assert company > 0.3
    spread, _ = spread_and_company(cache.path, shuffle="blocks")
    assert spread > 0.65


@pytest.mark.parametrize("headroom", [0.1, 0])
def test_complaint_24_no_row_is_left_out_in_silence(tmp_path, headroom):
    cache = nearly_full(tmp_path / "nearly-full", headroom)
    with ac.Loader(cache, 50, columns=["id"]) as loader:
        assert sorted(ids_of(loader)) == list(range(5000)), "nobody writes"
        with cache.snapshot() as snapshot:
            assert len(snapshot) == cache.stats().rows == 5000
        with cache.writer():
            if headroom:
                with pytest.warns(RuntimeWarning, match="an epoch leaves out the oldest 2,656 of 5,000 rows"):
                    epoch = iter(loader)
            else:
                epoch = iter(loader)
            delivered = len(ids_of(epoch))
        stats = loader.stats()
        assert 5000 - stats.left_out_rows - 50 < delivered <= 5000 - stats.left_out_rows, "but a last batch"
        assert bool(stats.left_out_rows) == bool(headroom)
        assert ("left out" in str(stats)) == bool(headroom)
