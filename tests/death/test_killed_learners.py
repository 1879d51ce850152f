"""Learners of `Loader(once=...)` and their actors, killed at any moment: no row is lost, few come twice.

`ONCE_KILLS` says how many kills there are; a dozen in a usual run.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from pathlib import Path

import pyarrow.compute as pc
import pytest
from helpers import DEADLINE_SECONDS, make_cache, published_ids, wait_until
from processes import Child

import arrowcache as ac

KILLS = int(os.environ.get("ONCE_KILLS", "12"))
ROWS = 16  # of a batch
NUMBER = ac.Schema({"id": ac.Tensor("int64"), "actor": ac.Tensor("int64")})


def act(path: Path, actor: int) -> None:
    with ac.Cache.open(path).writer(timeout=DEADLINE_SECONDS) as writer:
        for number in range(10**6):
            writer.append(id=actor * 10**6 + number, actor=actor)
            time.sleep(0.0002)


def learn(path: Path, log: Path, acknowledges: bool) -> None:
    """Append a line of ids for each batch, before the next one is asked for."""
    with (
        ac.Loader(path, ROWS, once="learner", acknowledge=acknowledges, drop_last=False) as loader,
        open(log, "ab", buffering=0) as lines,
    ):
        for batch in loader:
            lines.write(" ".join(map(str, batch["id"].tolist())).encode() + b"\n")
            if acknowledges:
                loader.done(batch)


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.parametrize("acknowledges", [False, True])
def test_killed_learners_and_actors_lose_no_row_and_repeat_one_batch_a_kill(tmp_path, acknowledges):
    cache = make_cache(tmp_path / "cache", NUMBER, capacity="256MiB", segment_bytes="1MiB")
    chance, logs = random.Random(KILLS), []
    actor = Child(act, cache.path, 0)
    for kill in range(KILLS):
        logs.append(log := tmp_path / f"{kill}.log")
        log.touch()
        learner = Child(learn, cache.path, log, acknowledges)
        with learner:
            wait_until(lambda log=log, learner=learner: log.stat().st_size, "a batch")
            time.sleep(chance.uniform(0, 0.03))
        if chance.random() < 0.3:
            actor.kill()
            actor = Child(act, cache.path, kill + 1)
    actor.kill()
    logs.append(log := tmp_path / "last.log")
    with Child(learn, cache.path, log, acknowledges) as learner:
        learner.result(10 * DEADLINE_SECONDS)
    batches = [[*map(int, line.split())] for log in logs for line in log.read_text().splitlines()]
    published = published_ids(cache)
    had = Counter(number for batch in batches for number in batch)
    assert len({*published}) == len(published)
    assert {*had} == {*published}
    lasts = [log.read_text().splitlines()[-1] for log in logs[:-1] if log.read_text().endswith("\n")]
    repeated = {number for number, times in had.items() if times > 1}
    assert repeated <= {int(number) for line in lasts for number in line.split()}
    assert not cache.verify()


@pytest.mark.slow
def test_rows_of_an_older_version_never_come(tmp_path):
    cache = make_cache(tmp_path / "cache", NUMBER, capacity="64MiB", segment_bytes="1MiB")
    with Child(act, cache.path, 7):
        wait_until(lambda: cache.stats().rows > 64, "some rows")
        with ac.Loader(cache, 4, once="learner", timeout=DEADLINE_SECONDS) as loader:
            batches, floor = iter(loader), 0
            for _ in range(100):
                assert next(batches)["id"].min() >= floor
                floor = max(floor, 7 * 10**6) + 7
                loader.set_rows(pc.field("id") >= floor)
