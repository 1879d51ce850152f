"""Leases and locks between processes that are stopped, killed, forked and ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import make_cache, publish, published_ids, seqs, wait_until
from helpers import sample as row
from processes import METHODS, Child, Script

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


def hold_part(path: Path, ready: Path) -> None:
    part = ac.Cache.open(path).store.folder.new_part()
    part.reserve(16 * 1024)
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


def test_a_stopped_reader_keeps_its_lease(cache, tmp_path):
    with Child(hold_snapshot, cache.path, tmp_path / "ready") as child:
        wait_until((tmp_path / "ready").exists, "the lease to be held")
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(ac.CacheFullError):
            overfill(cache)
        assert seqs(cache)[0] == 0
    publish(cache, 100)


def test_what_a_killed_writer_left_is_swept_only_after_its_death(cache, tmp_path):
    with Child(hold_part, cache.path, tmp_path / "ready") as child:
        wait_until((tmp_path / "ready").exists, "the part to be written")
        publish(cache, 100)  # evicts, so it sweeps
        assert len(os.listdir(cache.path / "incoming")) == 1
        child.kill()
    publish(cache, 100)
    assert os.listdir(cache.path / "incoming") == []


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


def test_a_fork_leaves_the_parent_its_lease_and_lets_the_child_read_anew(cache):
    with Script(FORK, cache.path) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_living_fork_does_not_prolong_its_parents_lease(cache, how):
    code = """
        import os, sys, time
        import arrowcache as ac

        cache = ac.Cache.open(sys.argv[1])
        with ac.Loader(cache, 16) as loader, cache.snapshot() as snapshot:
            next(iter(loader))
            snapshot.gather([0])
            if os.fork() == 0:
                time.sleep(3600)
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


EXIT = """
    import sys
    import arrowcache as ac

    cache = ac.Cache.open(sys.argv[1])
    how = sys.argv[2]
    loader = ac.Loader(cache, 2, transform=dict)
    snapshot = cache.snapshot() if how == "snapshot" else None
    epoch = iter(loader)
    batch = next(epoch)
    if how == "torch":
        import arrowcache.torch
        tensors = arrowcache.torch.Loader(cache, 2)
        kept = next(iter(tensors))
    if how == "table":
        table = cache.dataset().to_table()
    print("ready", flush=True)
    if how == "raise":
        raise LookupError("mine")
    if how == "sys.exit":
        sys.exit(3)
    if how == "break":
        for batch in loader:
            break
    if how == "interrupt":
        while True:
            for batch in loader:
                pass
"""


@pytest.mark.parametrize(
    ("how", "code"), [("end", 0), ("break", 0), ("table", 0), ("torch", 0), ("sys.exit", 3), ("raise", 1)]
)
def test_a_process_may_end_in_the_middle_of_an_epoch(cache, how, code):
    if how == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    with Script(EXIT, cache.path, how) as script:
        assert script.line() == "ready"
        ended, errors = script.end()
    assert ended == code, errors
    if how == "raise":
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("LookupError: mine")
    else:
        assert errors == ""
    assert cache.stats().leased_bytes == 0


def test_ctrl_c_ends_a_reading_process_with_its_traceback_alone(cache):
    with Script(EXIT, cache.path, "interrupt") as script:
        assert script.line() == "ready"
        script.signal_group(signal.SIGINT)
        code, errors = script.end(5)
    assert code == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "ignored" not in errors, errors
    assert "Thread" not in errors, "no other thread came to an end by it"
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
