from __future__ import annotations

import gc
import itertools
import os
import pickle
import random
import warnings
from contextlib import nullcontext

import pytest
from helpers import flip_byte, ids_of, publish, published_ids, segment_files, wait_until
from quick import first_is_quick

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch.utils.data import DataLoader

import arrowcache as ac
from arrowcache.torch import CacheIterableDataset, Loader
from arrowcache.torch.epoch_counter import MOST_WORKERS, EpochCounter, Turn

BASE = torch.arange(256, dtype=torch.float32).reshape(16, 16)


def batches_of(dataset, workers=0, context=None, **options):
    return DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=context, **options
    )


def no_lease_is_left(cache) -> None:
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")
    assert cache.verify() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_epochs_of_spawned_workers_are_those_of_the_loader(cache):
    """Those of forked ones: test_readers.py."""
    dataset = CacheIterableDataset(cache, 16, seed=3)
    loader = batches_of(dataset, 3, "spawn", persistent_workers=True)
    with Loader(cache, 16, seed=3) as own:
        for _ in range(3):
            batches = list(loader)
            for batch in batches:
                assert torch.equal(batch["image"], BASE + batch["id"].float()[:, None, None])
            assert ids_of(batches) == ids_of(own)
            publish(cache, 1)
    del loader
    no_lease_is_left(cache)


@pytest.mark.slow
def test_more_workers_than_batches(cache):
    loader = batches_of(CacheIterableDataset(cache, 160), 2)
    for _ in range(2):
        assert sorted(ids_of(loader)) == list(range(160))


@pytest.mark.slow
def test_the_default_batch_size_of_a_dataloader_changes_nothing_and_a_larger_one_is_refused(cache):
    dataset = CacheIterableDataset(cache, 16)
    for workers in (0, 2):
        (batch, *_) = DataLoader(dataset, num_workers=workers)
        assert batch["id"].shape == (16,)
        with pytest.raises(ValueError, match="batch_size=None"):
            next(iter(DataLoader(dataset, batch_size=4, num_workers=workers)))


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_decides_the_order_also_in_workers_that_live_on(cache, workers):
    with Loader(cache, 16, seed=5) as own:
        epochs = [ids_of(own) for _ in range(3)]
    dataset = CacheIterableDataset(cache, 16, seed=5)
    loader = batches_of(dataset, workers, persistent_workers=workers > 0)
    dataset.set_epoch(2)
    assert ids_of(loader) == epochs[2]
    dataset.set_epoch(0)
    assert ids_of(loader) == epochs[0]
    assert ids_of(loader) == epochs[1]


@pytest.mark.slow
def test_a_seed_that_is_set_before_every_epoch_repeats_none(cache):
    loader = batches_of(CacheIterableDataset(cache, 16), 2)
    epochs = []
    for _ in range(3):
        torch.manual_seed(0)
        epochs.append(ids_of(loader))
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(epoch) == list(range(160)) for epoch in epochs)


@pytest.mark.slow
def test_two_datasets_of_one_cache_do_not_agree(cache):
    every = batches_of(CacheIterableDataset(cache, 8), 2)
    some = batches_of(CacheIterableDataset(cache, 8, where=lambda s: s.seq < 5), 2)
    pairs = list(zip(every, itertools.cycle(some)))  # the second one begins again
    assert sorted(ids_of(a for a, _ in pairs)) == list(range(160))
    assert sorted(set(ids_of(b for _, b in pairs))) == list(range(80))


@pytest.mark.slow
def test_a_transform_runs_in_the_worker(cache):
    dataset = CacheIterableDataset(cache, 16, transform=lambda batch: {"pid": os.getpid(), "id": batch["id"]})
    for workers in (0, 2):
        pids = {batch["pid"] for batch in batches_of(dataset, workers, "spawn" if workers else None)}
        assert len(pids) == max(1, workers)
        assert (os.getpid() in pids) == (workers == 0)


@pytest.fixture
def paths(cache, tmp_path):
    """Two paths of the cache: ranks that are one process here number the datasets of each."""
    (tmp_path / "other").symlink_to(cache.path)
    return cache.path, tmp_path / "other"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_read_disjoint_rows_in_equally_many_steps(cache, paths, workers):
    datasets = [CacheIterableDataset(paths[r], 8, rank=r, world_size=2, run_id="job") for r in range(2)]
    loaders = [batches_of(dataset, workers) for dataset in datasets]
    for _ in range(2):
        steps = list(zip(*loaders, strict=True))
        seen = [number for step in steps for number in ids_of(step)]
        assert sorted(seen) == list(range(cache.stats().rows))
        publish(cache, 1)
    del loaders, datasets
    no_lease_is_left(cache)


@pytest.mark.slow
def test_a_dataset_is_pickled_with_its_settings(cache):
    dataset = CacheIterableDataset(cache, 16, seed=7, where=lambda s: s.seq < 3, columns=["id"])
    assert ids_of(pickle.loads(pickle.dumps(dataset))) == ids_of(dataset)


def test_a_dataset_is_pickled_with_the_check_of_its_cache(cache):
    opened = ac.Cache.open(cache.path, check="bytes")
    flip_byte(segment_files(cache)[3], 3000)
    copy = pickle.loads(pickle.dumps(CacheIterableDataset(opened, 16, None)))
    with pytest.warns(RuntimeWarning, match="quarantined"):
        assert ids_of(copy) == [number for number in range(160) if number // 16 != 3]


# resuming


def test_states_that_do_not_fit_are_refused(cache):
    dataset = CacheIterableDataset(cache, 16)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    del iterator
    for wrong in ({}, None, {"format": "other"}):
        with pytest.raises(ValueError, match="state_dict"):
            dataset.load_state_dict(wrong)
    for damaged in ({"format": state["format"]}, state | {"made": "1"}, state | {"workers": 0}):
        with pytest.raises(ValueError, match=r"damaged|workers=0"):
            dataset.load_state_dict(damaged)
    dataset.load_state_dict(state | {"workers": 3})
    with pytest.raises(ValueError, match="resume with num_workers=3"):
        iter(dataset)
    dataset.load_state_dict(state)
    with pytest.raises(ValueError, match="resume with num_workers=0 or 1"):
        next(iter(batches_of(dataset, 2)))


def window_of(cache, **options):
    """An epoch that gives up segments as it moves on: its window is two segments of ten."""
    return CacheIterableDataset(cache, 8, "window", seed=4, window_bytes="40KiB", **options)


def warn_always(worker: int) -> None:
    """In a worker, which is forked from a test whose warnings are errors."""
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: os.write(2, f"{message}\n".encode())


def evict_what_can_be(cache) -> set[int]:
    """Evict all up to the first segment that is leased; the ids of rows that left."""
    before = set(published_ids(cache))
    cache.evict("1MiB")
    return before - set(published_ids(cache))


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["window", None])
@pytest.mark.parametrize("taken", [1, 9, 19, 20])
def test_an_epoch_whose_delivered_segments_have_left_the_cache_is_resumed_whole(cache, shuffle, taken):
    options = {"window_bytes": "40KiB"} if shuffle else {}
    dataset = CacheIterableDataset(cache, 8, shuffle, seed=4, **options)
    iterator = iter(dataset)
    head = ids_of(itertools.islice(iterator, taken))
    gone = evict_what_can_be(cache)
    assert gone <= set(head)
    assert taken < 9 or gone
    state = dataset.state_dict()
    del iterator
    publish(cache, 3, first=1000)
    copy = CacheIterableDataset(cache, 8, shuffle, seed=4, **options)
    copy.load_state_dict(state)
    rest = ids_of(copy)
    assert sorted(head + rest) == list(range(160))
    assert sorted(ids_of(copy)) == sorted(published_ids(cache))  # the next epoch has what is there


def test_an_epoch_is_resumed_twice(cache):
    seen = []
    dataset, state = window_of(cache), None
    for taken in (7, 6, 99):
        if state is not None:
            dataset = window_of(cache)
            dataset.load_state_dict(state)
        iterator = iter(dataset)
        seen += ids_of(itertools.islice(iterator, taken))
        evict_what_can_be(cache)
        state = dataset.state_dict()
        del iterator
    assert sorted(seen) == list(range(160))


def test_rows_that_left_before_they_were_delivered_are_reported_and_no_other_is_lost(cache):
    dataset = window_of(cache)
    iterator = iter(dataset)
    head = ids_of(itertools.islice(iterator, 7))
    state = dataset.state_dict()
    del iterator
    gc.collect()
    cache.evict("90kB")
    gone = set(range(160)) - set(published_ids(cache)) - set(head)
    assert gone
    for _ in range(2):
        copy = window_of(cache)
        copy.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match=rf"{len(gone)} rows of epoch 0 are lost"):
            batches = list(copy)
        assert all(1 <= len(batch["id"]) <= 8 for batch in batches)
        assert sorted([*head, *ids_of(batches), *gone]) == list(range(160))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_epoch_of_which_nothing_is_left_ends_at_once_and_the_next_one_is_whole(cache, stateful, capfd):
    dataset = window_of(cache)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    del iterator
    loader = stateful(window_of(cache), batch_size=None, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    states = loader.state_dict()
    del iterator, loader
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    assert len(evict_what_can_be(cache)) == 160
    publish(cache, 2, first=1000)
    copy = window_of(cache)
    copy.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match="152 rows of epoch 0 are lost"):
        assert ids_of(copy) == []
    assert sorted(ids_of(copy)) == list(range(1000, 1032))
    loader = stateful(window_of(cache), batch_size=None, num_workers=2, worker_init_fn=warn_always)
    loader.load_state_dict(states)
    assert ids_of(loader) == []
    printed = capfd.readouterr().err
    for worker, rows in ((0, 72), (1, 80)):  # worker 0 had delivered a batch
        assert f"{rows} rows of epoch 0 are lost to it and to worker {worker} of 2: 10 of its 10" in printed
    assert sorted(ids_of(loader)) == list(range(1000, 1032))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_stateful_dataloader_resumes_an_epoch_that_rolls(cache, stateful, workers, every):
    def make():
        dataset = window_of(cache)
        options = {"snapshot_every_n_steps": every, "worker_init_fn": warn_always} if workers else {}
        return stateful(dataset, batch_size=None, num_workers=workers, **options)

    loader = make()
    iterator = iter(loader)
    head, gone = [], set()
    for _ in range(11):
        head += ids_of([next(iterator)])
        gone |= evict_what_can_be(cache)  # as samplers do while the epoch runs
    state = loader.state_dict()
    del iterator, loader
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the leases to end")
    assert gone
    resumed = make()
    resumed.load_state_dict(state)
    rest = ids_of(resumed)
    assert len(set(rest) | set(head)) == len(rest) + len(head), "nothing is repeated"
    lost = set(range(160)) - set(head) - set(rest)
    if every == 1:
        assert lost <= gone, "nothing is lost but what was evicted"
    else:  # of steps that are made again, to be dropped, some may be gone whole
        assert len(lost) <= len(gone)
    assert rest


@pytest.mark.slow
@pytest.mark.parametrize("evicted", ["60kB", "90kB", "130kB"])
def test_ranks_resume_a_rolled_epoch_in_equally_many_steps(cache, paths, evicted):
    def make():
        return [window_of(paths[r], rank=r, world_size=2, run_id="job") for r in range(2)]

    datasets = make()
    iterators = [iter(dataset) for dataset in datasets]
    head = [number for iterator in iterators for number in ids_of(itertools.islice(iterator, 4))]
    states = [dataset.state_dict() for dataset in datasets]
    del iterators, datasets
    gc.collect()
    cache.evict(evicted)
    gone = set(range(160)) - set(published_ids(cache)) - set(head)
    copies = make()
    for copy, state in zip(copies, states, strict=True):
        copy.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match="are lost") if gone else nullcontext():
        steps = list(zip(*copies, strict=True))
    rest = [number for step in steps for number in ids_of(step)]
    assert len(set(rest + head)) == len(rest + head)
    assert len(set(range(160)) - set(rest + head) - gone) <= 1, "two ranks cannot share one row of a step"


def test_a_state_of_other_batches_is_refused(cache):
    dataset = window_of(cache)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    other = CacheIterableDataset(cache, 16, "window")
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="resume with batch_size=8"):
        iter(other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 1), (2, 5)])
@pytest.mark.parametrize("taken", first_is_quick([7, 0, 1, 3, 20]))
def test_a_stateful_dataloader_resumes(cache, stateful, workers, every, taken):
    """Also before all workers told a state: it counts such steps from what they told it before any batch."""

    def make():
        dataset = CacheIterableDataset(cache, 8, seed=2)
        options = {"snapshot_every_n_steps": every} if workers else {}
        return stateful(dataset, batch_size=None, num_workers=workers, **options)

    loader = make()
    assert sorted(ids_of(loader)) == list(range(160))
    iterator = iter(loader)
    head = ids_of(itertools.islice(iterator, taken))
    if taken == 20:
        assert next(iterator, None) is None
    state = loader.state_dict()
    rest = ids_of(iterator)
    assert sorted(head + rest) == list(range(160))
    del iterator, loader
    publish(cache, 6)
    resumed = make()
    resumed.load_state_dict(state)
    found, is_amid = ids_of(resumed), taken < 20 and (taken > 0 or workers > 0)
    assert found == rest if is_amid else sorted(found) == list(range(256))


# numbers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [62, 63, 64, 200, MOST_WORKERS])
def test_any_number_of_workers_get_one_number_a_pass_in_any_order(workers):
    numbers, rng, before = EpochCounter(), random.Random(workers), 56
    for passes in range(before):  # soon the table is full, and the oldest pass gives its place to a new one
        assert numbers.take(Turn(0, 1, 3, passes)) == passes
    for passes in range(8):
        turns = [Turn(worker, workers, 1, passes % 2) for worker in range(workers)]  # the seeds come again
        others = [Turn(worker, workers, 2, passes) for worker in range(workers)]  # at the same time
        taken: dict[int, set[int]] = {1: set(), 2: set()}
        for turn in rng.sample(turns + others, 2 * workers):
            taken[turn.base_seed].add(numbers.take(turn))
        assert sorted(map(sorted, taken.values())) == [[before + 2 * passes], [before + 2 * passes + 1]]


def test_more_workers_than_can_be_told_apart_are_an_error():
    with pytest.raises(ValueError, match="lower num_workers"):
        EpochCounter().take(Turn(0, MOST_WORKERS + 1, 1, 0))


def test_workers_of_a_pass_get_one_number_and_passes_different_ones():
    numbers = EpochCounter()
    for _ in range(2):  # the same seeds once more
        taken = []
        for seed, passes in itertools.product((1, 2), (0, 1)):
            taken.append({numbers.take(Turn(worker, 3, seed, passes)) for worker in (2, 0, 1)})
        assert all(len(number) == 1 for number in taken)
        assert len(set.union(*taken)) == 4
    numbers.set(40)
    numbers.raise_to(7)
    assert numbers.take(Turn(0, 1, 0, 0)) == 40
    numbers.raise_to(50)
    assert numbers.take(Turn(0, 1, 0, 0)) == 50
