"""Two ranks that are processes, over a cache that rolls under them, with and without a pace.

In each epoch they have the same snapshot, each row of it comes once, and none of a segment that stayed is
left out but the oldest, for the headroom.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import make_cache, publish, seqs
from helpers import sample as row
from processes import Child

import arrowcache as ac

EPOCHS = 5
Read = list[tuple[list[int], list[tuple[int, int]]]]


def train(path: Path, rank: int, shuffle: str, barrier: Any) -> Read:
    """Of each epoch: the segments that were there before it, and the rows that came."""
    cache, read = ac.Cache.open(path), []
    options: dict[str, Any] = {"rank": rank, "world_size": 2, "run_id": "a", "shuffle": shuffle}
    with ac.Loader(cache, 8, with_ids=True, timeout=60, **options) as loader:
        for _ in range(EPOCHS):
            before = seqs(cache)
            barrier.wait(60)
            came: list[tuple[int, int]] = []
            for batch in loader:
                assert (batch["image"][:, 15, 15] == batch["id"] + 255).all()
                assert (batch["_seq"] * 16 + batch["_row"] == batch["id"]).all()
                came += zip(batch["_seq"].tolist(), batch["_row"].tolist(), strict=True)
            read.append((before, came))
        barrier.wait(60)  # who closes its loader lets go of epochs that the other one may not have begun
    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    "pace", [None, ac.Pace(samples_per_insert=2.0), ac.Pace(max_reuse=2)], ids=["free", "ratio", "reuse"]
)
@pytest.mark.parametrize("shuffle", ["rows", "window"])
def test_ranks_have_each_row_of_an_epoch_once_while_segments_come_and_go(tmp_path, shuffle, pace):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 50)
    cache.set_pace(pace)
    writer, is_over = cache.writer("wait"), threading.Event()

    def write() -> None:
        for number in itertools.count(50 * 16):
            if is_over.is_set():
                break
            writer.append(row(number))

    thread = threading.Thread(target=write)
    thread.start()
    barrier = multiprocessing.get_context("forkserver").Barrier(2)
    try:
        with (
            Child(train, cache.path, 0, shuffle, barrier) as one,
            Child(train, cache.path, 1, shuffle, barrier) as other,
        ):
            both = [one.result(), other.result()]
    finally:
        is_over.set()
        cache.set_pace(None)
        thread.join()
    writer.close()
    for (before, mine), (_, theirs) in zip(*both, strict=True):
        assert len(mine) == len(theirs) > 0
        rows = {*mine, *theirs}
        assert len(rows) == len(mine) + len(theirs), "none came twice"
        segments = sorted({seq for seq, _ in rows})
        assert rows == {(seq, number) for seq in segments for number in range(16)}
        if pace is None or pace.max_reuse is None:
            assert segments == list(range(segments[0], segments[-1] + 1))
            assert {seq for seq in before if seq >= segments[0]} <= {*segments}
    assert seqs(cache)[0] > 0, "some were evicted"
    if pace is not None and pace.max_reuse is not None:
        assert cache.stats().most_times_served <= pace.max_reuse
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []
