"""Ranks as users see them: loaders that share an epoch, in threads and in processes."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from helpers import (
    DEADLINE_SECONDS,
    held_rank_files,
    ids_of,
    publish,
    wait_until,
)

from arrowcache import Loader
from arrowcache.storage.layout import RanksRecord

SHUFFLES = ["rows", "window", "blocks", None]
ROWS = 157  # nine segments of 16 and one of 13


def ranks_of(cache: Any, world: int, size: int = 8, make: type[Loader] = Loader, **options: Any):
    return [rank_of(cache, rank, world, size, make, **options) for rank in range(world)]


def rank_of(
    cache: Any, rank: int, world: int, size: int = 8, make: type[Loader] = Loader, **options: Any
) -> Loader:
    options = {"columns": ["id"], "seed": 3, "run_id": "job", "worker_type": "thread"} | options
    return make(cache, size, rank=rank, world_size=world, **options)


def close(loaders: list[Loader]) -> None:
    for loader in loaders:
        loader.close()


def one_by_one(loaders: list[Loader]) -> list[list[list[int]]]:
    """The next epoch of each rank, all begun before any goes on: rank, step -> ids."""
    epochs = [iter(loader) for loader in loaders]
    return [[batch["id"].tolist() for batch in epoch] for epoch in epochs]


@pytest.mark.parametrize("epoch_rows", [48, 400])
def test_epoch_rows_are_of_all_ranks_together(cache, epoch_rows):
    loaders = ranks_of(cache, 2, epoch_rows=epoch_rows)
    epochs = one_by_one(loaders)
    assert [len(epoch) for epoch in epochs] == [epoch_rows // 16] * 2
    stream = [number for step in zip(*epochs, strict=True) for batch in step for number in batch]
    assert len(stream) == epoch_rows
    first_pass = stream[:ROWS]
    assert len(set(first_pass)) == len(first_pass)
    close(loaders)


def test_ranks_whose_releases_have_different_orders_do_not_agree(cache):
    loaders = ranks_of(cache, 2)
    first = iter(loaders[0])
    (file,) = cache.store.folder.ranks.iterdir()
    data = file.read_bytes()
    record = RanksRecord.unpack(data)
    altered = dataclasses.replace(record, terms={**record.terms, "order_version": 99})
    file.write_bytes(altered.pack() + data.partition(b"\n")[2])
    with pytest.raises(ValueError, match=r"order_version is \d+ here and 99 there"):
        iter(loaders[1])
    del first
    close(loaders)


def test_what_is_published_between_the_ranks_iter_is_in_neithers_epoch(cache):
    loaders = ranks_of(cache, 2)
    first = iter(loaders[0])
    publish(cache, 2, first=200)
    second = iter(loaders[1])
    assert set(ids_of(first) + ids_of(second)) <= set(range(ROWS))
    epochs = one_by_one(loaders)
    assert len([number for epoch in epochs for batch in epoch for number in batch]) == 176
    close(loaders)


@pytest.mark.slow
def test_a_rank_that_comes_late_gets_the_rows_that_the_first_has_finished_with(cache):
    loaders = ranks_of(cache, 2)
    first = ids_of(loaders[0])
    publish(cache, 8, first=200)
    assert cache.evict("1GB") == 0, "the shared_plan keeps them"
    second = ids_of(loaders[1])
    assert len(set(first + second)) == 144
    assert max(first + second) < ROWS
    wait_until(lambda: cache.stats().leased_bytes == 0, "both to let go, though they are idle")
    assert cache.evict("1GB") > 0
    assert held_rank_files(cache) == []
    close(loaders)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_repeat_agrees_on_every_epoch_while_a_writer_publishes(cache, shuffle):
    loaders = ranks_of(cache, 2, shuffle=shuffle, prefetch=1)
    found: dict[int, list[list[int]]] = {0: [], 1: []}
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            endless = loaders[rank].repeat()
            for number in range(6):
                barrier.wait(DEADLINE_SECONDS)
                epoch = ids_of([next(endless)])
                epoch += ids_of(next(endless) for _ in range(loaders[rank].steps - 1))
                found[rank].append(epoch)
                if rank == 0:
                    publish(cache, 1, first=1000 + 16 * number)
            endless.close()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    workers = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(3 * DEADLINE_SECONDS)
    assert not errors
    for first, second in zip(found[0], found[1], strict=True):
        assert len(first) == len(second)
        assert len(set(first + second)) == 2 * len(first)
    assert len(found[0][-1]) > len(found[0][0])
    close(loaders)
    assert held_rank_files(cache) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_break_of_repeat_the_ranks_agree_although_one_has_worked_further_ahead(cache, workers):
    made: list[int] = []

    def transform(batch):
        made.append(len(batch["id"]))
        return batch

    ahead = rank_of(cache, 0, 2, 32, transform=transform, prefetch=8, workers=workers)
    behind = rank_of(cache, 1, 2, 32, prefetch=1)
    first, second = ahead.repeat(), behind.repeat()
    for number in range(2):
        wait_until(lambda n=number: len(made) >= 2 * (n + 1), "an epoch of two steps to be made")
        next(first)
        wait_until(lambda n=number: len(made) > 2 * (n + 1), "the next one to be begun")
    next(second)
    first.close()
    second.close()
    for number in range(2):
        begun = iter(ahead)
        publish(cache, 2, first=200 + 100 * number)
        epochs = [[batch["id"].tolist() for batch in epoch] for epoch in (begun, iter(behind))]
        found = [number for epoch in epochs for batch in epoch for number in batch]
        assert len(set(found)) == len(found)
        assert ahead.state_dict() == behind.state_dict()
    close([ahead, behind])
    assert held_rank_files(cache) == []


# resuming


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("others", [1, 2, 3])
def test_an_epoch_resumes_with_another_number_of_ranks(cache, shuffle, others):
    loaders = ranks_of(cache, 2, shuffle=shuffle)
    epochs = [iter(loader) for loader in loaders]
    delivered = [number for epoch in epochs for _ in range(4) for number in next(epoch)["id"].tolist()]
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1], "one rank's checkpoint is that of all"
    close(loaders)
    if others == 1:
        resumed = [Loader(cache, 5, shuffle=shuffle, drop_last=False)]
    else:
        resumed = ranks_of(cache, others, 5, shuffle=shuffle, drop_last=False, run_id="again")
    publish(cache, 1, first=300)
    for loader in resumed:
        loader.load_state_dict(states[0])
    rest = one_by_one(resumed)
    assert len({len(epoch) for epoch in rest}) == 1
    stream = [number for step in zip(*rest, strict=True) for batch in step for number in batch]
    expected = set(range(ROWS)) - set(delivered)
    assert set(stream) == expected | (set(stream[len(expected) :]) & set(delivered))
    assert len(set(stream[: len(expected)])) == len(expected)
    assert len(stream) - len(expected) < 5 * others
    close(resumed)


def test_ranks_resume_alike_over_a_cache_that_lost_segments(cache):
    loaders = ranks_of(cache, 2)
    epochs = [iter(loader) for loader in loaders]
    delivered = [number for epoch in epochs for number in next(epoch)["id"].tolist()]
    state = loaders[0].state_dict()
    close(loaders)
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    assert cache.evict(1) > 0
    assert cache.evict(1) > 0
    resumed = ranks_of(cache, 3, 5, drop_last=False, run_id="again")
    rest = []
    for loader in resumed:
        loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="2 of its 10 segments"):
            rest.append(iter(loader))
    found = [[batch["id"].tolist() for batch in epoch] for epoch in rest]
    assert len({len(epoch) for epoch in found}) == 1
    stream = [number for step in zip(*found, strict=True) for batch in step for number in batch]
    expected = set(range(32, ROWS)) - set(delivered)
    assert set(stream) == expected
    assert len(stream) - len(expected) < 15
    close(resumed)


# arguments


def test_a_world_of_one_needs_no_run(cache):
    with Loader(cache, 16, rank=0, world_size=1) as loader:
        assert len(ids_of(loader)) == 144
    assert held_rank_files(cache) == []


@pytest.mark.parametrize(
    "environment",
    [{"TORCHELASTIC_RUN_ID": "7"}, {"MASTER_ADDR": "node1", "MASTER_PORT": "2950"}],
)
def test_the_run_is_taken_from_the_environment(cache, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loaders = ranks_of(cache, 2, run_id=None)
    first = iter(loaders[0])
    publish(cache, 2, first=200)
    second = iter(loaders[1])
    assert len(held_rank_files(cache)) == 1
    found = ids_of(first) + ids_of(second)
    assert len(set(found)) == len(found) == 144, "they read one snapshot"
    close(loaders)
    assert held_rank_files(cache) == []
