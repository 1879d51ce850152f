from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
import subprocess
import sys
import threading
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import append_rows, flip_byte, ids_of, in_child, make_cache, publish, segment_files, wait_until
from page_cache import drop_from_memory, resident_bytes
from processes import Script
from quick import first_is_quick

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

import arrowcache as ac
from arrowcache.reading.plan import segments_of
from arrowcache.storage.folder import Folder
from arrowcache.torch import CacheDataset, EpochBatchSampler, Loader, dataloader
from arrowcache.torch.lazy_batch import LazyBatch

BASE = torch.arange(256, dtype=torch.float32).reshape(16, 16)


def identity_of_kind(kind: str):
    """A transform that cloudpickle takes by value, or none."""
    return (lambda batch: batch) if kind == "identity" else None


def check(batch) -> None:
    assert batch["image"].dtype == torch.float32
    assert torch.equal(batch["image"], BASE + batch["id"].float()[:, None, None])


def no_lease_is_left(cache) -> None:
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")
    assert cache.verify() == []


@pytest.fixture
def answer(monkeypatch):
    """A function: what a dataset gives for some rows in a DataLoader's worker."""

    def answer(dataset, rows):
        with monkeypatch.context() as patch:
            patch.setattr("torch.utils.data._utils.worker._worker_info", SimpleNamespace(id=0))
            return dataset.__getitems__(rows)

    return answer


def through_a_queue(thing):
    """What arrives at the other end of a worker's queue."""
    return pickle.loads(bytes(ForkingPickler.dumps(thing)))


@pytest.mark.slow
@pytest.mark.parametrize(("context", "transform"), [("spawn", "none"), ("forkserver", "identity")])
def test_epochs_of_spawned_workers_are_those_of_the_loader_and_grow_with_the_cache(cache, context, transform):
    """Those of forked ones: test_readers.py."""
    options = {"multiprocessing_context": context, "transform": identity_of_kind(transform)}
    loader = dataloader(cache, 16, 2, seed=3, **options)
    with Loader(cache, 16, seed=3) as own:
        for _ in range(3):
            batches = list(loader)
            for batch in batches:
                check(batch)
            assert ids_of(batches) == ids_of(own)
            publish(cache, 2)
    del loader, batches, batch
    no_lease_is_left(cache)


@pytest.mark.parametrize("batched", first_is_quick([False, True]))
@pytest.mark.parametrize("workers", first_is_quick(["2", "0", "2, persistent"]))
def test_the_spelled_out_dataloader(cache, workers, batched):
    sampler = EpochBatchSampler(cache, 16, shuffle="rows", seed=0, drop_last=True)
    how = {"batch_sampler": sampler} if batched else {"sampler": sampler, "batch_size": None}
    how |= {"num_workers": int(workers[0]), "persistent_workers": workers.endswith("persistent")}
    loader = DataLoader(CacheDataset(cache), **how)
    with Loader(cache, 16) as own:
        for _ in range(3):
            assert ids_of(loader) == ids_of(own)
    del loader
    no_lease_is_left(cache)


def test_a_transform_may_return_anything_and_sees_numpy(cache):
    def transform(batch):
        assert isinstance(batch["image"], np.ndarray)
        return batch["id"] * 2, {"mean": batch["image"].mean(axis=(1, 2)), "names": ["a", "b"], "n": 3}

    for workers in (0, 2):
        for ids, more in dataloader(cache, 16, workers, transform=transform):
            assert ids.dtype == torch.int64
            assert torch.equal(more["mean"], (ids / 2).float() + 127.5)
            assert (more["names"], more["n"]) == (["a", "b"], 3)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["none", "identity"])
@pytest.mark.parametrize("batched", first_is_quick([True, False]))
def test_a_collate_function_of_the_users_own_gets_the_batch(cache, workers, kind, batched):
    def loader(collate):
        sampler = EpochBatchSampler(cache, 16, seed=1)
        options = {"batch_sampler": sampler} if batched else {"sampler": sampler, "batch_size": None}
        dataset = CacheDataset(cache, transform=identity_of_kind(kind))
        return DataLoader(dataset, num_workers=workers, collate_fn=collate, **options)

    def changed(batch):
        assert "id" in batch
        assert "nosuch" not in batch
        assert len(batch) == 2
        assert [*batch] == [*batch.keys()] == [*dict(batch)]
        assert len([*batch.values()]) == 2
        return batch["image"].mean(), {name: 2 * column for name, column in batch.items()}

    def looked_into(batch):
        assert batch["id"].dtype == torch.int64
        return batch

    with Loader(cache, 16, seed=1) as own:
        expected = list(own)
    for collate in (lambda batch: batch, looked_into):
        found = list(loader(collate))
        for batch in found:
            assert isinstance(batch, dict)
            check(batch)
        assert ids_of(found) == ids_of(expected)
        no_lease_is_left(cache)
    for (mean, doubled), batch in zip(loader(changed), expected, strict=True):
        assert mean == batch["image"].mean()
        assert torch.equal(doubled["id"], 2 * batch["id"])
    no_lease_is_left(cache)


@pytest.fixture
def openings(monkeypatch):
    """How often a cache was opened, in this process and those that are forked from it."""
    count = multiprocessing.get_context("fork").Value("i", 0)
    complete = Folder.complete

    def counted(folder):
        with count.get_lock():
            count.value += 1
        complete(folder)

    monkeypatch.setattr(Folder, "complete", counted)
    return count


@pytest.mark.parametrize("kind", ["none", "identity"])
def test_a_collate_function_of_the_users_own_opens_the_cache_no_more_often(cache, openings, kind):
    dataset = CacheDataset(cache.path, transform=identity_of_kind(kind))
    sampler = EpochBatchSampler(cache.path, 16)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=2, multiprocessing_context="fork",
        persistent_workers=True, collate_fn=lambda batch: {"id": batch["id"] + 1},
    )  # fmt: skip
    assert openings.value == 2  # by the dataset and by the sampler
    for _ in range(3):
        assert sorted(ids_of(loader)) == list(range(1, 161))
    assert openings.value == 2


@pytest.mark.slow
def test_workers_that_are_spawned_check_as_the_cache_was_opened_to_check(cache):
    flip_byte(segment_files(cache)[3], 3000)
    dataset = CacheDataset(ac.Cache.open(cache.path, check="bytes"), transform=lambda batch: batch)
    sampler = EpochBatchSampler(cache, 16, None)  # of a cache that was opened to check less
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ac.CorruptSegmentError, match=f"{3:020d}"):
        ids_of(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_function_for_batches_that_are_no_dicts_is_told_what_to_do(cache, workers):
    dataset = CacheDataset(cache, transform=lambda batch: (batch["id"], 3))
    sampler = EpochBatchSampler(cache, 16)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, collate_fn=lambda pair: pair[1])
    with pytest.raises(TypeError, match="this transform returned none"):
        next(iter(loader))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["none", "identity"])
def test_closing_the_sampler_after_a_break_ends_the_lease_though_workers_live(cache, workers, kind):
    loader = dataloader(cache, 8, workers, transform=identity_of_kind(kind))
    loader.batch_sampler.close()
    for _ in range(3):
        check(next(iter(loader)))  # as a `break` after it: the loader keeps its iterator
        loader.batch_sampler.close()
        loader.batch_sampler.close()
        no_lease_is_left(cache)
    assert len(loader) == 20
    assert sorted(ids_of(loader)) == list(range(160))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "identity"])
def test_dropping_a_dataloader_in_the_middle_leaves_no_lease(cache, kind):
    sampler = EpochBatchSampler(cache, 16)  # lives on
    for batches in (1, 8, 10):  # on their way, or all of them drawn
        dataset = CacheDataset(cache, transform=identity_of_kind(kind))
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, persistent_workers=True)
        taken = list(itertools.islice(loader, batches))
        assert len(taken) == batches
        del loader
        no_lease_is_left(cache)


def test_during_an_epoch_its_segments_are_leased_and_a_window_gives_them_up(cache):
    loader = dataloader(cache, 16, 0, shuffle="window", window_bytes="40KiB")
    leased = [cache.stats().leased_bytes for _ in loader]
    assert leased[0] > leased[5] > leased[9] == 0


def test_two_epochs_at_once_are_two_epochs(cache):
    loader = dataloader(cache, 16, 2, persistent_workers=False)
    pairs = list(zip(loader, loader, strict=True))
    first, second = ids_of(a for a, _ in pairs), ids_of(b for _, b in pairs)
    assert sorted(first) == sorted(second) == list(range(160))
    assert first != second


def test_set_epoch_decides_the_order(cache):
    with Loader(cache, 16, seed=5) as own:
        epochs = [ids_of(own) for _ in range(3)]
    loader = dataloader(cache, 16, 0, seed=5)
    loader.batch_sampler.set_epoch(2)
    assert ids_of(loader) == epochs[2]
    loader.batch_sampler.set_epoch(0)
    assert ids_of(loader) == epochs[0]
    assert ids_of(loader) == epochs[1]


def test_set_epoch_after_a_loaded_state_takes_the_place_of_its_rest(cache):
    sampler = EpochBatchSampler(cache, 16)
    epoch = iter(sampler)
    next(epoch)
    state = epoch.state_dict()
    iter(sampler).load_state_dict(state)
    assert sampler.epoch == 0
    sampler.set_epoch(7)
    assert sampler.epoch == 7
    later = iter(sampler)
    assert len([*later]) == 10, "all of it, and no rest"
    assert later.state_dict()["epoch"] == 7


def rest_of(cache, batches) -> list[int]:
    return ids_of(CacheDataset(cache).__getitems__(rows) for rows in batches)


@pytest.mark.parametrize("taken", [0, 1, 4, 16])
def test_a_state_of_draws_by_weights_goes_on_in_another_process_with_the_same_draws(cache, tmp_path, taken):
    """Its file of weights is there from then on, also where it was asked for before the epoch began."""
    file = tmp_path / "state"
    batches = iter(EpochBatchSampler(cache, 10, weights="id", seed=3))
    state = batches.state_dict()
    for _ in range(taken):
        next(batches)
    if taken % 2:
        state = batches.state_dict()
    elif taken:
        taken = 0  # the state is of the epoch's begin
    torch.save(state, file)
    expected = rest_of(cache, iter(EpochBatchSampler(cache, 10, weights="id", seed=3)))[taken * 10 :]

    def child() -> None:
        again = iter(EpochBatchSampler(ac.Cache.open(cache.path), 10, weights="id", seed=3))
        again.load_state_dict(torch.load(file, weights_only=True))
        assert rest_of(cache, again) == expected

    with in_child(child):
        pass


def test_the_dataloader_draws_by_weights(cache):
    with Loader(cache, 16, weights="id") as loader:
        expected = ids_of(loader)
    assert ids_of(dataloader(cache, 16, 0, weights="id")) == expected
    assert len({*expected}) < 160


def test_a_state_of_a_weighted_loader_goes_on_in_a_sampler(cache):
    with Loader(cache, 10, weights="id") as loader:
        epoch = iter(loader)
        begun = ids_of([next(epoch)])
        state = loader.state_dict()
        whole = begun + ids_of(epoch)
    batches = iter(EpochBatchSampler(cache, 10))
    batches.load_state_dict(state)
    assert begun + rest_of(cache, batches) == whole
    after = {"epoch": state["epoch"] + 1, "position": 0, "segments": [], "weights": None}
    batches = iter(EpochBatchSampler(cache, 10))
    batches.load_state_dict(state | after)
    rows = torch.cat([CacheDataset(cache).__getitems__(next(batches))["id"] for _ in range(4)])
    assert len(rows.unique()) == 40


def test_len_is_of_the_epoch_in_progress_else_of_the_next(cache):
    loader = dataloader(cache, 16, 2)
    assert len(loader) == 10
    for _ in loader:
        publish(cache, 1) if cache.stats().segments < 12 else None
        if cache.stats().leased_bytes:
            assert len(loader) == 10
    assert len(loader) == 12
    assert len(dataloader(cache, 16, 0, rank=1, world_size=4, run_id="x")) == 3
    assert len(dataloader(cache, 16, 0, epoch_rows=320)) == 20
    assert cache.stats().leased_bytes == 0


# ranks


def test_the_rank_of_torch_distributed_is_taken_when_the_first_epoch_begins(cache, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    samplers = [EpochBatchSampler(cache, 8) for _ in range(2)]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    seen = []
    assert len(samplers[0]) == 20  # before there is a rank
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, sampler in enumerate(samplers):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        iterator = iter(DataLoader(CacheDataset(cache), batch_sampler=sampler))
        seen.append((iterator, ids_of([next(iterator)])))
    for iterator, first in seen:
        first += ids_of(iterator)
    assert len(seen[0][1]) == len(seen[1][1]) == 80
    assert sorted(seen[0][1] + seen[1][1]) == list(range(160))


# mistakes


def test_the_length_before_an_epoch_is_of_selected_rows(cache):
    sampler = EpochBatchSampler(cache, 8, rows=lambda columns: columns["id"] % 2 == 0)
    expected = len(sampler)
    assert expected == len([*sampler]) > 0
    cache.exclude([(0, row) for row in range(16)])
    assert len(sampler) == expected - 1


def test_the_sampler_counts_the_rows_that_are_not_selected(cache):
    cache.exclude("0:1")
    loader = dataloader(cache, 8, 0)
    assert loader.batch_sampler.unselected_rows == 0
    for _ in loader:
        assert loader.batch_sampler.unselected_rows == 1
    assert loader.batch_sampler.unselected_rows == 1


def test_a_dataset_of_another_cache_is_refused(cache, tmp_path):
    other = make_cache(tmp_path / "other")
    loader = DataLoader(CacheDataset(other), batch_sampler=EpochBatchSampler(cache, 16))
    with pytest.raises(ValueError, match="the same cache"):
        next(iter(loader))


def test_what_cannot_be_pickled_for_a_worker_is_told_so(cache):
    def locked(batch, lock=threading.Lock()):  # noqa: B008  # one that is there before the worker
        return batch

    with pytest.raises(TypeError, match="in its first call, not before"):
        pickle.dumps(CacheDataset(cache, transform=locked))


def test_an_error_of_a_gather_is_an_answer_and_not_an_exception_in_torchs_thread(tmp_path, answer):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    rows = list(itertools.islice(EpochBatchSampler(cache, 16), 3))
    assert cache.stats().leased_bytes == 0  # its iterator is gone
    dataset = CacheDataset(cache)
    batch = through_a_queue(answer(dataset, rows[0]))  # the segments are still there: read anew
    check(batch)
    assert batch["id"].tolist() == dataset[rows[0]]["id"].tolist()
    cache.evict("1MiB")
    error = through_a_queue(answer(dataset, rows[1]))
    assert isinstance(error, ExceptionWrapper)
    with pytest.raises(ac.MissingSegmentsError, match="keep the DataLoader's iterator"):
        error.reraise()
    assert cache.stats().leased_bytes == 0


def test_a_batch_of_an_epoch_left_for_a_newer_one_is_not_gathered(cache):
    sampler = EpochBatchSampler(cache, 16)
    old = iter(sampler)
    rows = next(old)
    newer = iter(sampler)
    del old
    gc.collect()
    answer = through_a_queue(LazyBatch(rows, ("id",), cache.store))
    with pytest.raises(ac.ArrowCacheError, match="left for a newer one"):
        answer.reraise()
    assert len(list(newer)) == 10


KILLED = """
import gc, multiprocessing, os, signal, sys, warnings
import arrowcache as ac
from arrowcache.torch import dataloader

warnings.simplefilter("error")
cache = ac.Cache.open(sys.argv[1])
iterator = iter(dataloader(cache, 2, 2, transform=lambda batch: batch))
next(iterator)
try:  # torch raises out of a signal handler, at any point, or while it asks the dead for a file; or both
    try:
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        for batch in iterator:
            pass
        print("went on")
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
except (ConnectionError, EOFError, FileNotFoundError):
    print(True)
except RuntimeError as error:
    print("exited unexpectedly" in str(error) or "killed by signal" in str(error))
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
del iterator
gc.collect()
print(cache.stats().leased_bytes)
"""


STARTING = """
    import os, sys, time
    from arrowcache.torch import dataloader

    def begin_as_an_orphan(worker):
        parent = os.getppid()
        print("begun", flush=True)
        while os.getppid() == parent:
            time.sleep(0.01)

    if __name__ == "__main__":
        options = {"multiprocessing_context": "fork", "worker_init_fn": begin_as_an_orphan}
        list(dataloader(sys.argv[1], 16, 2, **options))
"""


@pytest.mark.slow
def test_workers_whose_process_is_killed_while_they_start_end_too(cache):
    """torch's own look at their parent comes too late, so that they waited for ever."""
    with Script(STARTING, cache.path) as script:
        assert [script.line() for _ in range(2)] == ["begun"] * 2
        script.kill()
        wait_until(lambda: not script.processes(), "its workers to end")
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch_as_if_complete(cache, workers):
    with pytest.raises(RuntimeError, match="transform raised StopIteration"):
        list(dataloader(cache, 16, workers, transform=lambda batch: next(iter(()))))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(iter(dataloader(cache, 16, workers, where=lambda segment: next(iter(())))))
    with pytest.raises(RuntimeError, match="the function of where= raised StopIteration"):
        len(EpochBatchSampler(cache, 16, where=lambda segment: next(iter(()))))


def test_a_forked_child_does_not_go_on_with_the_epoch_of_its_parent(cache):
    batches = iter(dataloader(cache, 16, 0, shuffle=None))
    head = next(batches)["id"].tolist()

    def child():
        with pytest.raises(ValueError, match=r"this epoch belongs to the process that forked.*iterate anew"):
            next(batches)
        assert len(ids_of(dataloader(cache, 16, 0))) == len(cache.snapshot())

    with in_child(child):
        pass
    assert sorted(head + ids_of(batches)) == sorted(ids_of(dataloader(cache, 16, 0)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_is_closed_within_an_epoch_raises_in_its_consumer(cache, workers):
    loader = dataloader(cache, 4, workers)
    epoch = iter(loader)
    next(epoch)
    loader.batch_sampler.close()
    with pytest.raises(RuntimeError, match="its batch sampler was closed"):
        list(epoch)
    assert len([*loader]) == 40
    epoch = iter(loader)
    for _ in range(40):
        next(epoch)
    loader.batch_sampler.close()
    assert [*epoch] == []


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_leaves_no_lease(cache):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(cache.path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout.split(), done.returncode) == (["True", "0"], 0), done.stderr


CLASSES = """
import sys
from typing import Any, NamedTuple
from arrowcache.torch import dataloader

class Pair(NamedTuple):
    ids: Any
    factor: int

factor = 1

def pair(batch):
    return Pair(batch["id"] * factor, factor)

if __name__ == "__main__":
    factor = 3  # a function goes by value, with its globals
    path, context = sys.argv[1:]
    options = {"num_workers": 1, "multiprocessing_context": context}
    batches = list(dataloader(path, 16, transform=pair, **options))
    print(all(type(batch) is Pair for batch in batches), sum(int(batch.ids.sum()) for batch in batches))
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_transform_of_a_script_may_return_instances_of_its_classes(cache, tmp_path, context):
    script = tmp_path / "script.py"
    script.write_text(CLASSES)
    done = subprocess.run(
        [sys.executable, str(script), str(cache.path), context],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"True {3 * sum(range(160))}"], done.stderr


# what travels


def test_a_batch_travels_as_row_ids(cache, answer):
    rows = next(iter(EpochBatchSampler(cache, 16)))
    assert list(rows) == rows.ids.tolist()
    assert len(rows) == 16
    dataset = CacheDataset(cache)
    sent = answer(dataset, rows)
    assert type(sent) is LazyBatch
    assert len(ForkingPickler.dumps(sent)) < 1500  # a row alone has 1032 bytes
    again = through_a_queue(rows)
    assert again == rows
    seqs, rows = segments_of(again.snapshot.runs)
    assert (seqs.tolist(), rows.tolist()) == (list(range(10)), [16] * 10)


def test_a_dataset_pickles_as_its_settings(cache):
    dataset = CacheDataset(cache, ["id"], transform=lambda batch: batch["id"] + 1)
    copy = pickle.loads(pickle.dumps(dataset))
    rows = next(iterator := iter(EpochBatchSampler(cache, 16)))
    assert torch.equal(copy[rows], dataset[rows])
    assert len(pickle.dumps(CacheDataset(cache))) < 1000
    assert bool(copy)
    del iterator


@pytest.mark.slow
def test_segments_that_end_short_or_are_left_out_have_their_numbers(tmp_path):
    cache = make_cache(tmp_path / "cache")
    for first, count in ((0, 20), (20, 3), (23, 40), (63, 1), (64, 30)):
        append_rows(cache, range(first, first + count))
    where = partial(lambda without, segment: segment.seq != without, 2)
    for kind in ("none", "identity"):
        loader = dataloader(cache, 4, 2, where=where, drop_last=False, transform=identity_of_kind(kind))
        for _ in range(2):
            found = ids_of(loader)
            assert sorted(found) == sorted({*range(94)} - {20, 21, 22})


def test_a_forked_child_cannot_end_its_parents_epoch(cache):
    iterator = iter(dataloader(cache, 16, 0))
    next(iterator)

    def child() -> None:
        nonlocal iterator
        del iterator
        gc.collect()

    with in_child(child):
        pass
    assert cache.stats().leased_bytes > 0
    assert len(ids_of(iterator)) == 144


@pytest.mark.slow
def test_pin_memory_is_accepted_where_there_is_no_accelerator(cache, recwarn):
    assert sorted(ids_of(dataloader(cache, 16, 2, pin_memory=True))) == list(range(160))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_with_pin_memory_batches_are_pinned(cache, workers):
    loader = dataloader(cache, 16, workers, pin_memory=True)
    for _ in range(3):
        batches = list(loader)
        assert sorted(ids_of(batches)) == list(range(160))
        for batch in batches:
            assert batch["image"].is_pinned()
            check(batch)


# torchdata


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("taken", first_is_quick([0, 1, 7, 19]))
def test_a_stateful_dataloader_resumes_in_the_middle_of_an_epoch(cache, stateful, workers, every, taken):
    def make():
        sampler = EpochBatchSampler(cache, 8, seed=2)
        return stateful(
            CacheDataset(cache), batch_sampler=sampler, num_workers=workers, snapshot_every_n_steps=every
        )

    loader = make()
    assert len(ids_of(loader)) == 160
    iterator = iter(loader)
    head = ids_of(itertools.islice(iterator, taken))
    state = loader.state_dict()
    rest, following = ids_of(iterator), ids_of(loader)
    assert sorted(head + rest) == list(range(160))
    del iterator, loader
    gc.collect()
    publish(cache, 2)
    resumed = make()
    resumed.load_state_dict(state)
    assert ids_of(resumed) == rest
    assert sorted(ids_of(resumed)) == list(range(192))
    assert sorted(following) == list(range(160))


@pytest.mark.parametrize("reader", ["loader", "sampler"])
def test_a_state_of_segments_that_this_cache_cannot_have_is_refused_and_walked_by_nobody(cache, reader):
    """Walking so many rows takes years."""
    with Loader(cache, 8) as loader:
        state = loader.state_dict() | {"segments": [[0, 1, 16], [1, 1, 10**12]]}
        readers = {"loader": loader, "sampler": iter(EpochBatchSampler(cache, 8))}
        with pytest.raises(ValueError, match=r"of another cache: it has segments of 1,000,000,000,000 rows"):
            readers[reader].load_state_dict(state)


@pytest.mark.parametrize("name", [{}, {"name": ac.String()}], ids=["fixed", "variable"])
def test_rows_are_asked_of_the_disk_while_their_batches_are_on_their_way(tmp_path, name):
    """Those of one batch were, as it arrived: the disk waited for the training."""
    schema = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("uint8", (1 << 16,)), **name})
    cache = make_cache(tmp_path / "cache", schema, capacity="64MiB", segment_bytes="4MiB", segment_rows=48)
    with cache.writer() as writer:
        for number in range(240):
            image, text = np.full(1 << 16, number, np.uint8), dict.fromkeys(name, f"{number:03}")
            writer.append(id=number, image=image, **text)
    files = segment_files(cache)
    drop_from_memory(*files)
    dataset, sampler = CacheDataset(cache), EpochBatchSampler(cache, 6, seed=1)
    drawing = iter(sampler)
    drawn = [next(drawing) for _ in range(5)]
    before = sum(map(resident_bytes, files))
    came = [dataset[drawn[0]]]
    if not name:  # else all was read as it was checked
        wait_until(lambda: sum(map(resident_bytes, files)) - before > 12 * (1 << 16), "three batches")
    drawn += drawing
    came += [dataset[rows] for rows in drawn[1:]]
    assert sorted(ids_of(came)) == list(range(240))
    for rows, batch in zip(drawn, came, strict=True):
        assert batch["id"].tolist() == [*rows]
        assert (batch["image"] == batch["id"][:, None]).all()
        assert batch.get("name", ()) in ((), [f"{number:03}" for number in rows])
    del drawing
    no_lease_is_left(cache)
