"""Leases and locks between processes that are stopped and ended."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import make_cache, overfill, publish, published_ids, seqs, wait_until
from helpers import sample as row
from processes import METHODS, Child, hold_snapshot
from quick import SEED, one_in

import arrowcache as ac


def hold_lock(path: Path, ready: Path) -> None:
    with ac.Cache.open(path).store.locked():
        ready.touch()
        time.sleep(3600)


def test_a_stopped_process_that_holds_the_lock_is_named_and_hangs_nobody(cache, tmp_path):
    with Child(hold_lock, cache.path, tmp_path / "ready") as child:
        wait_until((tmp_path / "ready").exists, "the lock to be held")
        child.send_signal(signal.SIGSTOP)
        words = rf"held for over 0\.2 s by pid {child.pid} \(.*kill -CONT"
        with pytest.raises(ac.LockTimeoutError, match=words), cache.store.locked(0.2):
            pass
    assert cache.stats().segments == 20  # its death freed the lock


@pytest.mark.slow
def test_a_stopped_reader_keeps_its_lease(cache, tmp_path):
    with Child(hold_snapshot, cache.path, tmp_path / "ready") as child:
        wait_until((tmp_path / "ready").exists, "the lease to be held")
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(ac.CacheFullError):
            overfill(cache)
        assert seqs(cache)[0] == 0
    publish(cache, 100)


def test_a_writer_goes_on_when_a_reader_of_another_process_lets_go(cache, tmp_path):
    with Child(hold_snapshot, cache.path, tmp_path / "ready") as reader:
        wait_until((tmp_path / "ready").exists, "the lease to be held")

        def write(path: Path) -> int:
            publish_all = ac.Cache.open(path).writer("wait", timeout=60)
            for number in range(2000):
                publish_all.append(id=number, image=np.zeros((16, 16), np.float32))
            publish_all.close()
            return number

        with Child(write, cache.path) as writer:
            wait_until(lambda: cache.stats().waiting_writers == 1, "the writer to wait")
            reader.kill()
            assert writer.result() == 1999
    assert cache.stats().waiting_writers == 0
    assert cache.verify() == []


def sample_and_read(cache: ac.Cache, with_torch: bool) -> tuple[int, list[list[int]]]:
    """Everything that starts processes or threads of its own, in a process that was itself started."""

    def draws(rng):
        while True:
            yield {"id": -1, "image": np.zeros((16, 16), np.float32)}

    def same(batch):
        return batch

    def only_read(segment):
        return segment.seq < 20

    found = []
    with ac.SamplerPool(cache, draws, workers=1, segments=2, progress=False) as pool:
        for it, how in ((cache, "thread"), (cache.path, "process")):
            with ac.Loader(it, 16, workers=2, worker_type=how, transform=same, where=only_read) as loader:
                found.append(sorted(i for batch in loader for i in batch["id"].tolist()))
        if with_torch:
            from arrowcache.torch import dataloader

            batches = dataloader(cache, 16, 2, transform=same, where=only_read)
            found.append(sorted(i for batch in batches for i in batch["id"].tolist()))
        pool.wait(timeout=60)
        return pool.stats().segments, found


@pytest.mark.slow
@pytest.mark.parametrize("method", one_in(3, METHODS, seed=SEED + 2))
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_started_in_any_way_amid_threads_and_workers_has_its_own(tmp_path, method):
    try:
        import torch  # noqa: F401

        with_torch = True
    except ImportError:
        with_torch = False
    cache = make_cache(tmp_path / "cache", capacity="16MiB")
    publish(cache, 20)

    def draws(rng):
        while True:
            yield row(int(rng.integers(320, 1 << 20)))

    with (
        ac.SamplerPool(cache, draws, workers=1, segments=30, name="parent", progress=False) as pool,
        ac.Loader(cache, 16, workers=2, worker_type="thread", transform=dict) as threads,
        ac.Loader(cache, 16, workers=1, transform=dict) as processes,
    ):
        epochs = [iter(threads), iter(processes)]
        firsts = [next(epoch)["id"].tolist() for epoch in epochs]
        with Child(sample_and_read, cache, with_torch, method=method) as child:
            segments, found = child.result(60)
        assert segments == 2
        assert found == [list(range(320))] * len(found)
        for first, epoch in zip(firsts, epochs, strict=True):
            rows = first + [i for batch in epoch for i in batch["id"].tolist()]
            assert sorted(i for i in rows if i < 320) == list(range(320)), "of what was there each row once"
        pool.wait(timeout=60)
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []


def test_many_processes_that_create_the_same_cache_at_once_share_one(tmp_path):
    def create(path: Path, number: int) -> None:
        cache = make_cache(path, exist_ok=True)
        with cache.writer() as writer:
            for i in range(16):
                writer.append(id=16 * number + i, image=np.zeros((16, 16), np.float32))

    path = tmp_path / "cache"
    children = [Child(create, path, number) for number in range(4)]
    try:
        for child in children:
            child.result()
    finally:
        for child in children:
            child.kill()
    cache = ac.Cache.open(path)
    assert sorted(published_ids(cache)) == list(range(64))
    assert cache.verify() == []
