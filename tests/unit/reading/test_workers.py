"""Loaders with several threads: the same batches in the same order, and a bounded end."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from begun import own_threads
from helpers import DEADLINE_SECONDS, limit, wait_until
from processes import Script
from reader_contract import ids_of as ids

import arrowcache as ac
from arrowcache import Loader


def loader_of(cache: ac.Cache, size: int = 8, workers: int = 3, **options: Any) -> Loader:
    return Loader(cache, size, workers=workers, worker_type="thread", **options)


# order and content


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


# errors and ends


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_close_while_a_transform_blocks_is_bounded_and_lets_go_when_it_returns(cache, monkeypatch, workers):
    limit(monkeypatch, join_seconds=0.1)
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
    with pytest.raises(RuntimeError, match="was closed"):
        next(epoch)
    go_on.set()
    wait_until(lambda: not own_threads("arrowcache-worker"), "the threads to end")
    assert cache.stats().leased_bytes == 0


def test_a_loader_that_is_dropped_while_transforms_block_leaves_no_thread(cache, monkeypatch):
    limit(monkeypatch, join_seconds=0.1)
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
    wait_until(lambda: not own_threads("arrowcache-worker"), "the threads to end")
    wait_until(lambda: cache.stats().leased_bytes == 0, "the lease to end")


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
    with Script(code, cache.path, workers, new_interpreter=True) as script:
        assert script.line() == "inside"
        assert script.end() == (0, "")
    assert cache.stats().leased_bytes == 0


# arguments


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_no_workers_are_one_background_thread_of_either_type(cache, worker_type):
    names = set()

    def transform(batch):
        names.add(threading.current_thread().name)
        return batch

    with Loader(cache, 16, workers=0, worker_type=worker_type, transform=transform) as loader:
        assert sorted(ids(loader)) == list(range(160))
    assert names == {"arrowcache-worker-0"}
