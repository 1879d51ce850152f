"""Epochs that end anywhere: after each, nothing is leased, and what was not delivered was not counted.

In a cache that rolls, cold and warm: each row of a snapshot comes once.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    ids_of,
    make_cache,
    mapped_seqs,
    publish,
    sample,
    segment_files,
    seqs,
    wait_until,
)
from page_cache import drop_from_memory
from quick import SEED, some_of

import arrowcache as ac

SHUFFLES = pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
ROWS, STEPS = 57, 9  # three segments of 16 and one of 9


@pytest.mark.parametrize("how", ["iterator", "loader"])
@pytest.mark.parametrize("prefetch", [1, 12])
@SHUFFLES
def test_repeat_may_be_closed_after_any_step(cache, shuffle, prefetch, how):
    """Also where the next epoch was begun, while the last batches of one are under way."""
    options: dict[str, Any] = {"shuffle": shuffle, "prefetch": prefetch, "drop_last": False}
    with ac.Loader(cache, 7, **options) as plain:
        epochs = [ids_of(plain) for _ in range(4)]
    case = prefetch + 2 * (how == "loader")  # these have the steps among them
    for steps in some_of(range(2 * STEPS + 2), seed=SEED + case):
        loader = ac.Loader(cache, 7, **options)
        endless = loader.repeat()
        came = ids_of(next(endless) for _ in range(steps))
        assert came == [*epochs[0], *epochs[1], *epochs[2]][: len(came)]
        number, step = (
            divmod(steps, STEPS) if steps % STEPS else (max(0, steps // STEPS - 1), STEPS * bool(steps))
        )
        state, stats = loader.state_dict(), loader.stats()
        if steps:
            assert (stats.epochs, stats.batches, stats.rows) == (number + 1, steps, len(came))
            assert (state["epoch"], state["position"]) == (number, min(7 * step, ROWS))
        (endless if how == "iterator" else loader).close()
        if how == "iterator" and steps:
            rest = ids_of(loader)
            assert rest == epochs[number + 1], "the epoch after the one that was delivered"
        loader.close()
        assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
        with ac.Loader(cache, 7, **options) as resumed:
            resumed.load_state_dict(state)
            after = ids_of(resumed)
            assert after == epochs[number][min(7 * step, ROWS) :] or (steps and step == STEPS)


def was_published(cache: ac.Cache, first: int) -> bool:
    """Publish a segment, if what nobody leases makes room for it."""
    writer = cache.writer(on_full="raise")
    try:
        for number in range(first, first + 16):
            writer.append(sample(number))
        writer.close()
    except ac.CacheFullError:
        writer.abort()
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@SHUFFLES
def test_epochs_of_a_cache_that_rolls_have_each_row_of_their_snapshot_once(tmp_path, shuffle, cold):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 52)
    first = 52 * 16
    with ac.Loader(cache, 8, shuffle=shuffle, seed=3, with_ids=True) as loader:
        endless = loader.repeat()
        for _ in range(2):
            if cold:
                try:
                    drop_from_memory(*segment_files(cache))
                except pytest.skip.Exception:  # what is mapped stays there
                    pass
            batches = [next(endless)]
            assert loader.steps is not None
            for step in range(1, loader.steps):
                batches.append(next(endless))
                if step % 3 == 0:
                    first += 16 * was_published(cache, first)
            came = ids_of(batches)
            assert len(came) == len(set(came)) == 8 * len(batches)
            for batch in batches:
                assert (batch["image"][:, 0, 0] == batch["id"]).all()
                assert (batch["image"][:, 15, 15] == batch["id"] + 255).all()
                assert (batch["_seq"] * 16 + batch["_row"] == batch["id"]).all()
    del batch, batches, endless  # they may be views
    assert seqs(cache)[0] > 0, "some were evicted"
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize(("transform", "count"), [(None, 200), (dict, 50)])
def test_hundreds_of_loaders_leave_no_thread_mapping_descriptor_or_lease(cache, transform, count):
    def left() -> tuple[int, int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("/segments/")
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), maps

    for number in range(count):
        loader = ac.Loader(
            cache, 8, shuffle=(None, "rows", "window", "blocks")[number % 4], transform=transform
        )
        epoch = iter(loader) if number % 3 else loader.repeat()
        assert len(next(epoch)["id"]) == 8
        if number % 2:
            epoch.close()
        loader.close()
        del epoch, loader
        if number == 5:
            before = left()
    wait_until(lambda: all(now <= was for now, was in zip(left(), before, strict=True)), "all to be let go")
    assert cache.stats().leased_bytes == 0
