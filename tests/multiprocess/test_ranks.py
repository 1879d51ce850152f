"""Ranks that are processes: they agree while a writer publishes, and when some of them are killed."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from helpers import held_rank_files, make_cache, overfill, publish, seqs, wait_until
from processes import Child

import arrowcache as ac
from arrowcache.reading.options import rank_info
from arrowcache.reading.ranks import SharedPlan
from arrowcache.reading.snapshot import Snapshot

WORLD = 4
TERMS = {"batch_size": 16, "seed": 0}


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 8)
    return cache


def files(cache: ac.Cache) -> list[str]:
    return sorted(os.listdir(cache.path / "ranks"))


def begin(shared_plan: SharedPlan, cache: ac.Cache, epoch: int = 0) -> Snapshot:
    def take() -> Snapshot:
        snapshot = Snapshot.take(cache.store)
        snapshot.map_all()
        return snapshot

    snapshot = shared_plan.snapshot(epoch, TERMS, take)
    assert snapshot is not None
    return snapshot


def join(path: Path, rank: int, world: int = WORLD) -> tuple[ac.Cache, SharedPlan]:
    cache = ac.Cache.open(path)
    member = rank_info(rank, world, "job/../1")
    assert member is not None
    return cache, SharedPlan(cache.store, member)


def hold(path: Path, rank: int, ready: Path, world: int = WORLD) -> None:
    """Begin an epoch and stay in it."""
    cache, shared_plan = join(path, rank, world)
    snapshot = begin(shared_plan, cache)
    ready.write_text(repr([segment.seq for segment in snapshot.segments]))
    time.sleep(3600)


def hold_ended(path: Path, rank: int, ready: Path) -> None:
    """End an epoch before the others began it, and stay alive."""
    cache, shared_plan = join(path, rank)
    begin(shared_plan, cache).close()
    shared_plan.release(0)
    ready.touch()
    time.sleep(3600)


def read_once(path: Path, rank: int) -> list[int]:
    cache, shared_plan = join(path, rank)
    with begin(shared_plan, cache) as snapshot:
        read = [segment.seq for segment in snapshot.segments]
    shared_plan.close()
    return read


def press(cache: ac.Cache) -> None:
    """A writer that needs all room."""
    with suppress(ac.CacheFullError):
        overfill(cache)


@pytest.mark.slow
def test_a_slow_process_gets_what_the_first_one_read_though_that_ended_and_a_writer_presses(cache, tmp_path):
    with Child(hold_ended, cache.path, 0, tmp_path / "ready") as first:
        wait_until((tmp_path / "ready").exists, "the first rank's epoch to end")
        press(cache)
        assert seqs(cache)[0] == 0
        assert seqs(cache)[-1] > 20, "the cache is full"
        with Child(read_once, cache.path, 1) as second:
            assert second.result() == list(range(8))
        assert len(held_rank_files(cache)) == 1, "two ranks are yet to come"
        first.kill()
    assert held_rank_files(cache) == []
    press(cache)
    assert seqs(cache)[0] > 7


@pytest.mark.slow
@pytest.mark.smoke
def test_the_winner_is_killed_before_the_others_join_and_they_agree_anew(cache, tmp_path):
    with Child(hold, cache.path, 0, tmp_path / "ready") as winner:
        wait_until((tmp_path / "ready").exists, "the first rank to begin")
        assert len(held_rank_files(cache)) == 1
        publish(cache, 2)
        winner.kill()
    assert len(files(cache)) == 1, "debris that nobody cleaned yet"
    ready = [tmp_path / f"ready {rank}" for rank in range(1, WORLD)]
    with ExitStack() as stack:
        for rank in range(1, WORLD):
            stack.enter_context(Child(hold, cache.path, rank, ready[rank - 1]))
        wait_until(lambda: all(path.exists() and path.read_text() for path in ready), "the others to begin")
        assert {path.read_text() for path in ready} == {repr(list(range(10)))}
        assert len(held_rank_files(cache)) == 1
    assert len(files(cache)) == 1
    press(cache)  # seeks room, so it sweeps
    assert files(cache) == []


def test_the_winner_is_killed_after_another_one_joined_and_the_third_joins_that(cache, tmp_path):
    with Child(hold, cache.path, 0, tmp_path / "first") as winner:
        wait_until((tmp_path / "first").exists, "the first rank to begin")
        with Child(hold, cache.path, 1, tmp_path / "second"):
            wait_until((tmp_path / "second").exists, "the second rank to begin")
            winner.kill()
            press(cache)
            with Child(read_once, cache.path, 2) as third:
                assert third.result() == list(range(8))


def test_ranks_are_killed_at_any_moment_and_the_rest_never_sees_two_snapshots(cache, tmp_path):
    """Each round is a job of its own: two are killed while all of them begin."""
    for number in range(6):
        ready = [tmp_path / f"{number} {rank}" for rank in range(WORLD)]
        with ExitStack() as stack:
            children = [
                stack.enter_context(Child(hold, cache.path, rank, ready[rank])) for rank in range(WORLD)
            ]
            wait_until(lambda: files(cache), "some rank to link the file")
            children[number % WORLD].kill()
            publish(cache, 1, first=10**6 + 16 * number)
            alive = [ready[rank] for rank in range(WORLD) if rank != number % WORLD]
            for path in alive:
                wait_until(lambda path=path: path.exists() and path.read_text(), "the rest to begin")
            assert len({path.read_text() for path in alive}) == 1
        assert held_rank_files(cache) == []
        assert cache.stats().leased_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_process_of_a_rank_changes_nothing_by_its_birth_and_death(cache, method):
    cache, shared_plan = join(cache.path, 0, 2)
    snapshot = begin(shared_plan, cache)
    name, leased = files(cache), cache.stats().leased_bytes
    assert leased > 0
    with Child(os.getpid, method=method) as child:
        child.result()
    assert held_rank_files(cache) == name
    assert cache.stats().leased_bytes == leased
    snapshot.close()
    shared_plan.close()
    assert files(cache) == []
