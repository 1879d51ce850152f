"""Loaders with several threads: the same batches in the same order, and a bounded end."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEADLINE_SECONDS, in_child, make_cache, wait_until
from processes import Script

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading import worker_threads
from arrowcache.torch import Loader as TorchLoader

BASE = np.arange(256, dtype=np.float32).reshape(16, 16)
SHUFFLES = ["rows", "window", "blocks", None]


def loader_of(cache: ac.Cache, size: int = 8, workers: int = 3, **options: Any) -> Loader:
    return Loader(cache, size, workers=workers, worker_type="thread", **options)


def ids(batches: Any) -> list[int]:
    found = []
    for batch in batches:
        assert np.array_equal(batch["image"], BASE + np.asarray(batch["id"], np.float32)[:, None, None])
        found += batch["id"].tolist()
    return found


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("arrowcache")]


# order and content


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, lambda batch: batch])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_any_number_of_threads_yields_what_none_does(cache, shuffle, workers, transform):
    options = {"shuffle": shuffle, "drop_last": False, "transform": transform}
    with Loader(cache, 7, **options) as plain, loader_of(cache, 7, workers, **options) as loader:
        for _ in range(3):
            expected = [batch["id"].tolist() for batch in plain]
            assert [batch["id"].tolist() for batch in loader] == expected


def test_transforms_that_end_in_another_order_are_delivered_in_step_order(cache):
    started = {step: threading.Event() for step in range(20)}
    ended = {step: threading.Event() for step in range(20)}
    order = []

    def transform(batch):
        step = int(batch["id"][0]) // 8
        started[step].set()
        if step % 3 < 2 and step + 1 < 20:  # of each three, the last ends first
            assert ended[step + 1].wait(DEADLINE_SECONDS)
        order.append(step)
        ended[step].set()
        return batch

    with loader_of(cache, shuffle=None, transform=transform) as loader:
        assert ids(loader) == list(range(160))
    assert order[:6] == [2, 1, 0, 5, 4, 3]


def test_transforms_of_random_duration_keep_the_order(cache):
    random.seed(5)
    pace = threading.Event()

    def transform(batch):
        pace.wait(random.random() * 0.005)
        return batch

    with loader_of(cache, 4, 4, shuffle=None, transform=transform) as loader:
        for _ in range(2):
            assert ids(loader) == list(range(160))


def test_transforms_run_side_by_side(cache):
    together = threading.Barrier(3)

    def transform(batch):
        together.wait(DEADLINE_SECONDS)  # passes only if three run at a time
        return batch

    with loader_of(cache, 16, transform=transform, epoch_rows=144) as loader:
        assert len(set(ids(loader))) == 144


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_batch_that_threads_make_is_the_same(tmp_path, shuffle):
    schema = ac.Schema(
        {
            "id": ac.Tensor("int64"), "odd": ac.Tensor("float32", (7,)), "flag": ac.Tensor("bool", (3,)),
            "text": ac.String(), "points": ac.Ragged("float32", (2,)),
        }
    )  # fmt: skip
    cache = make_cache(tmp_path / "cache", schema)
    with cache.writer() as writer:
        for n in range(100):
            points = np.full((n % 4, 2), n, np.float32)
            writer.append(id=n, odd=np.full(7, n, np.float32), flag=[n % 2, 0, 1], text=f"{n}", points=points)
    for size in (1, 2, 9, 64):
        options = {"shuffle": shuffle, "with_ids": True, "drop_last": False}
        with Loader(cache, size, **options) as plain, loader_of(cache, size, **options) as loader:
            for _ in range(2):
                for expected, batch in zip(plain, loader, strict=True):
                    assert list(batch) == list(expected)
                    for name in ("id", "odd", "flag", "_seq", "_row"):
                        assert np.array_equal(batch[name], expected[name])
                    assert batch["text"] == expected["text"]
                    assert np.array_equal(batch["points"].data, expected["points"].data)
                    assert np.array_equal(batch["points"].offsets, expected["points"].offsets)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Loader, TorchLoader])
def test_nothing_that_is_kept_is_overwritten(cache, make):
    kept = []
    with make(cache, 16, workers=4, worker_type="thread", prefetch=2) as loader:
        epochs = [list(loader) for _ in range(3)]
        for number in range(30):
            for step, batch in enumerate(loader):
                if (step + number) % 7 == 0:
                    kept.append((batch["image"][3], int(batch["id"][3])))
    del batch, loader
    gc.collect()
    assert all(sorted(ids(epoch)) == list(range(160)) for epoch in epochs)
    assert len(kept) > 40
    assert all(np.array_equal(image, BASE + number) for image, number in kept)


def test_what_a_transform_writes_into_its_batch_reaches_no_other(cache):
    def transform(batch):
        batch["image"] += 1
        return batch

    for shuffle in SHUFFLES:
        with loader_of(cache, 16, shuffle=shuffle, transform=transform) as loader:
            for _ in range(3):
                for batch in loader:
                    assert np.array_equal(
                        batch["image"], BASE + 1 + batch["id"].astype(np.float32)[:, None, None]
                    )
    assert cache.verify() == []


# errors and ends


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_of_a_transform_arrives_in_its_place_and_the_loader_goes_on(cache, workers, error):
    failing = True

    def transform(batch):
        if failing and 80 in batch["id"]:
            raise error("the image 80")
        return batch

    with loader_of(cache, workers=workers, shuffle=None, transform=transform) as loader:
        for _ in range(3):
            delivered: list[int] = []
            with pytest.raises(error, match="the image 80"):
                delivered.extend(number for batch in loader for number in batch["id"].tolist())
            assert delivered == list(range(80))
        failing = False
        assert ids(loader) == list(range(160))


@pytest.mark.slow
def test_a_break_lets_go_and_the_next_epoch_is_whole(cache):
    with loader_of(cache) as loader:
        for _ in range(5):
            for batch in loader:
                assert len(batch["id"]) == 8
                break
        del batch
        wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")
        assert sorted(ids(loader)) == list(range(160))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_close_while_a_transform_blocks_is_bounded_and_lets_go_when_it_returns(cache, monkeypatch, workers):
    monkeypatch.setattr(worker_threads, "_JOIN_SECONDS", 0.1)
    before = len(threads())
    inside, go_on = threading.Event(), threading.Event()

    def transform(batch):
        inside.set()
        assert go_on.wait(DEADLINE_SECONDS)
        return batch

    loader = loader_of(cache, workers=workers, transform=transform)
    epoch = iter(loader)
    assert inside.wait(DEADLINE_SECONDS)
    loader.close()
    assert not go_on.is_set()
    assert next(epoch, None) is None
    go_on.set()
    wait_until(lambda: len(threads()) == before, "the threads to end")
    assert cache.stats().leased_bytes == 0


def test_a_loader_that_is_dropped_while_transforms_block_leaves_no_thread(cache):
    before = len(threads())
    inside, go_on = threading.Semaphore(0), threading.Event()

    def transform(batch):
        inside.release()
        assert go_on.wait(DEADLINE_SECONDS)
        return batch

    epoch = iter(loader_of(cache, transform=transform))
    for _ in range(3):
        assert inside.acquire(timeout=DEADLINE_SECONDS)
    del epoch
    gc.collect()
    go_on.set()
    wait_until(lambda: len(threads()) == before, "the threads to end")
    wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")


def test_a_forked_child_iterates_anew_and_its_parent_goes_on(cache):
    with loader_of(cache, shuffle=None) as loader:
        epoch = iter(loader)
        first = ids([next(epoch)])

        def child():
            with pytest.raises(ValueError, match="iterate anew"):
                next(epoch)
            assert ids(loader) == list(range(160))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork beside threads
            with in_child(child):
                pass
        assert first + ids(epoch) == list(range(160))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_process_ends_although_a_transform_never_does(cache, workers):
    code = """
        import sys, threading
        import arrowcache as ac

        inside = threading.Event()

        def transform(batch):
            inside.set()
            threading.Event().wait()

        number = int(sys.argv[2])
        loader = ac.Loader(sys.argv[1], 8, transform=transform, workers=number, worker_type="thread")
        epoch = iter(loader)
        assert inside.wait(20)
        print("inside", flush=True)
    """
    with Script(code, cache.path, workers) as script:
        assert script.line() == "inside"
        assert script.end() == (0, "")
    assert cache.stats().leased_bytes == 0


# arguments


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"worker_type": "fiber"}, ValueError, "worker_type='fiber' is unknown.*process.*thread"),
        ({"workers": 2, "worker_type": None}, ValueError, "worker_type=None"),
        ({"workers": -1, "worker_type": "thread"}, ValueError, "workers"),
        ({"workers": 1.5, "worker_type": "thread"}, TypeError, "workers"),
        ({"workers": True, "worker_type": "thread"}, ValueError, "workers"),
    ],
)
def test_a_wrong_worker_argument_fails_in_the_constructor(cache, options, error, words):
    with pytest.raises(error, match=words):
        Loader(cache, 16, **options)


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_no_workers_are_one_background_thread_of_either_type(cache, worker_type):
    names = set()

    def transform(batch):
        names.add(threading.current_thread().name)
        return batch

    with Loader(cache, 16, workers=0, worker_type=worker_type, transform=transform) as loader:
        assert sorted(ids(loader)) == list(range(160))
    assert names == {"arrowcache-worker-0"}


def test_tensors_of_several_threads_share_no_memory(cache):
    with TorchLoader(cache, 16, workers=3, worker_type="thread") as loader:
        batches = list(loader)
    for batch in batches:
        batch["image"].fill_(int(batch["id"][0]))
    assert all(torch.all(batch["image"] == int(batch["id"][0])) for batch in batches)
