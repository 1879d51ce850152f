"""Leases and locks between processes that are stopped, killed, forked and ended."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import make_cache, publish, published_ids, seqs, wait_until
from helpers import sample as row
from processes import METHODS, Child, Script, small_disk

import arrowcache as ac


@pytest.fixture
def cache(tmp_path):
    """Twenty segments of 16 rows, ids 0 to 319."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    return cache


def overfill(cache: ac.Cache) -> None:
    """Append several capacities of rows."""
    writer = cache.writer("raise")
    try:
        for number in range(320, 320 + 16 * 100):
            writer.append(row(number))
    finally:
        writer.abort()


def hold_lock(path: Path, ready: Path) -> None:
    with ac.Cache.open(path).store.locked():
        ready.touch()
        time.sleep(3600)


def hold_snapshot(path: Path, ready: Path) -> None:
    with ac.Cache.open(path).snapshot() as snapshot:
        assert snapshot.gather([0])["id"].tolist() == [0]
        ready.touch()
        time.sleep(3600)


def hold_epoch(path: Path, ready: Path) -> None:
    epoch = iter(ac.Loader(path, 16))
    next(epoch)
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
@pytest.mark.parametrize("hold", [hold_snapshot, hold_epoch])
def test_a_killed_reader_frees_its_lease_at_once(cache, tmp_path, hold):
    with Child(hold, cache.path, tmp_path / "ready") as child:
        wait_until((tmp_path / "ready").exists, "the lease to be held")
        assert cache.stats().leased_bytes > 0
        with pytest.raises(ac.CacheFullError, match=f"the oldest of them by pid {child.pid} "):
            overfill(cache)
        assert seqs(cache)[0] == 0
        child.kill()
        assert cache.stats().leased_bytes == 0
    publish(cache, 100)
    assert seqs(cache)[0] > 20


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


def read_all(cache: ac.Cache | Path) -> list[int]:
    with ac.Loader(cache, 16) as loader:
        return sorted(i for batch in loader for i in batch["id"].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_children_started_in_any_way_read_the_cache_that_their_parent_reads(cache, method):
    with ac.Loader(cache, 16) as loader:
        epoch = iter(loader)
        first = next(epoch)["id"].tolist()
        with Child(read_all, cache, method=method) as one, Child(read_all, cache.path, method=method) as two:
            assert one.result() == two.result() == list(range(320))
        assert cache.stats().leased_bytes > 0
        assert sorted(first + [i for batch in epoch for i in batch["id"].tolist()]) == list(range(320))


def sample_and_read(path: Path, with_torch: bool) -> tuple[int, list[list[int]]]:
    """Everything that starts processes or threads of its own, in a process that was itself started."""

    def draws(rng):
        while True:
            yield {"id": -1, "image": np.zeros((16, 16), np.float32)}

    def same(batch):
        return batch

    def only_read(segment):
        return segment.seq < 20

    found = []
    with ac.SamplerPool(path, draws, workers=1, segments=2, progress=False) as pool:
        for how in ("thread", "process"):
            with ac.Loader(path, 16, workers=2, worker_type=how, transform=same, where=only_read) as loader:
                found.append(sorted(i for batch in loader for i in batch["id"].tolist()))
        if with_torch:
            from arrowcache.torch import dataloader

            batches = dataloader(path, 16, 2, transform=same, where=only_read)
            found.append(sorted(i for batch in batches for i in batch["id"].tolist()))
        pool.wait(timeout=60)
        return pool.stats().segments, found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
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
        with Child(sample_and_read, cache.path, with_torch, method=method) as child:
            segments, found = child.result(60)
        assert segments == 2
        assert found == [list(range(320))] * len(found)
        for first, epoch in zip(firsts, epochs, strict=True):
            rows = first + [i for batch in epoch for i in batch["id"].tolist()]
            assert sorted(i for i in rows if i < 320) == list(range(320)), "of what was there each row once"
        pool.wait(timeout=60)
    assert cache.stats().leased_bytes == 0
    assert cache.verify() == []


FORK = """
    import os, sys
    import numpy as np
    import arrowcache as ac

    cache = ac.Cache.open(sys.argv[1])
    loader = ac.Loader(cache, 16)
    epoch = iter(loader)
    first = next(epoch)
    snapshot = cache.snapshot()
    snapshot.gather([0])
    table = snapshot.table()
    leased = cache.stats().leased_bytes
    assert leased > 0

    def refused(call):
        try:
            call()
        except ValueError as error:
            assert "forked" in str(error), error
            return True
        return False

    def ids(batches):
        return sorted(i for batch in batches for i in batch["id"].tolist())

    pid = os.fork()
    if pid == 0:
        assert refused(lambda: snapshot.gather([0])), "an inherited snapshot was read"
        assert refused(lambda: next(epoch)), "an inherited epoch was read"
        assert refused(snapshot.table), "an inherited snapshot was read"
        assert ids(loader) == list(range(320)), "an inherited loader begins epochs of its own"
        with ac.Cache.open(sys.argv[1]) as mine, mine.snapshot() as own, cache.snapshot() as other:
            rows = np.arange(320)
            assert own.gather(rows)["id"].tolist() == other.gather(rows)["id"].tolist() == rows.tolist()
        snapshot.close()
        epoch.close()
        loader.close()
        sys.exit(7)  # with all finalizers
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert cache.stats().leased_bytes == leased, "the child's end touched the parent's lease"
    assert ids(epoch) + first["id"].tolist() and ids([first]) == sorted(first["id"].tolist())
    assert snapshot.gather(np.arange(320))["id"].tolist() == list(range(320))
    assert table["id"].to_pylist() == list(range(320))
    del table
    snapshot.close()
    loader.close()
    assert cache.stats().leased_bytes == 0, "the child prolonged the parent's lease"
    print("well")
"""


@pytest.mark.slow
def test_a_fork_leaves_the_parent_its_lease_and_lets_the_child_read_anew(cache):
    with Script(FORK, cache.path) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_living_fork_does_not_prolong_its_parents_lease(cache, how):
    code = """
        import os, sys, time
        import arrowcache as ac

        cache = ac.Cache.open(sys.argv[1])
        reads, writes = os.pipe()
        with ac.Loader(cache, 16) as loader, cache.snapshot() as snapshot:
            next(iter(loader))
            snapshot.gather([0])
            if os.fork() == 0:
                os.write(writes, b"-")
                time.sleep(3600)
            os.read(reads, 1)  # the child is at the user's own code: what it inherited is closed
            if sys.argv[2] == "killed":
                print("leased" if cache.stats().leased_bytes else "", flush=True)
                sys.stdin.read()
        print("" if cache.stats().leased_bytes else "closed", flush=True)
        sys.stdin.read()
    """
    with Script(code, cache.path, how) as script:
        assert script.line() == {"closed": "closed", "killed": "leased"}[how]
        if how == "closed":
            publish(cache, 100)
        script.kill()
        assert len(script.processes()) == 1
        assert cache.stats().leased_bytes == 0


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


READERS_THAT_ARE_KILLED = """
    import os, signal, sys
    import arrowcache as ac
    from arrowcache.storage.locks import LockFile
    from helpers import ROW, publish

    def free_bytes():
        return os.statvfs(sys.argv[1]).f_bfree * os.statvfs(sys.argv[1]).f_frsize

    cache = ac.Cache.create(sys.argv[1] + "/cache", ROW, "60MiB", segment_bytes="32KiB", segment_rows=1)
    publish(cache, 1500, rows=1)
    reads, writes = os.pipe()
    for oldest in range(5):
        pid = os.fork()
        if pid == 0:
            snapshot = cache.snapshot()
            assert snapshot.map_all() == 1500 - oldest
            os.write(writes, b"-")
            signal.pause()
        os.read(reads, 1)
        before, newest = free_bytes(), max(os.listdir(cache.path / "segments"))
        path = cache.path / "segments" / newest  # what was mapped first is freed first: it would show nothing
        size = path.stat().st_blocks * 512
        evictor = LockFile(cache.path / "lease.lock")
        assert not evictor.try_range(oldest, 1, exclusive=True)
        os.kill(pid, signal.SIGKILL)
        while not evictor.try_range(oldest, 1, exclusive=True):
            pass
        path.unlink()
        print(free_bytes() - before - size, flush=True)
        evictor.close()
        os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_what_a_killed_reader_had_mapped_is_free_as_soon_as_its_lease_is(tmp_path):
    """It was not: the kernel dropped the lock first, and an evictor filled the disk beyond the capacity."""
    (tmp_path / "disk").mkdir()
    command = small_disk(tmp_path / "disk", "100m")
    with Script(READERS_THAT_ARE_KILLED, tmp_path / "disk", within=command) as script:
        assert [script.line() for _ in range(5)] == ["0"] * 5
        assert script.end() == (0, "")
