"""Reads in the workers of pools: of the next task, too; and what a kill, a stop or a hung store leaves."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from helpers import DEADLINE_SECONDS, make_cache, wait_until
from helpers import sample as row
from pool_tasks import expected, tasks

import arrowcache as ac
from arrowcache import explore


def reader(
    folder: Path | None = None, gate: Path | None = None, *, of_task: int = 1 << 30, closes: bool = False
):
    """A sampler like `draws()`, by reads, which note that they began, and wait for a gate."""

    def read(key: int, name: str) -> dict:
        if folder is not None:
            Path(folder, name).touch()
        while gate is not None and not os.path.exists(gate):
            time.sleep(0.005)
        return row(key)

    def sampler(rng):
        (task,) = rng.bit_generator.seed_seq.spawn_key
        try:
            for number in itertools.count():
                yield partial(read, int(rng.integers(1 << 20)), f"{task}.{number}.{os.getpid()}")
        finally:
            if closes:
                Path(folder, f"closed.{task}").touch()

    return sampler


def begun(folder: Path) -> set[int]:
    """The tasks of which a read has begun."""
    return {int(path.name.partition(".")[0]) for path in folder.glob("[0-9]*")}


def pids(folder: Path) -> set[int]:
    return {int(path.suffix[1:]) for path in folder.glob("[0-9]*")}


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "begun"
    path.mkdir()
    return path


def require_as_ever(cache: ac.Cache, count: int) -> None:
    """Tasks 0 to count-1, each once, with the rows of a sampler without reads."""
    found = tasks(cache)
    assert sorted(found) == list(range(count)), "there is a gap"
    assert all(ids == expected(number)[: len(ids)] for number, ids in found.items())
    assert [len(found[number]) for number in found] == [len(expected(number)) for number in found]


def executors(kind: str):
    if kind == "threads":
        return ThreadPoolExecutor(2)
    return None if kind == "own" else ProcessPoolExecutor(2)


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["own", "threads", "processes"])
@pytest.mark.parametrize("reads", [1, 32])
def test_a_pool_publishes_the_same_tasks_by_reads(tmp_path, kind, reads):
    cache, executor = make_cache(tmp_path / "cache"), executors(kind)
    options = {"workers": 2, "segments": 24, "reads": reads, "progress": False, "executor": executor}
    with ac.SamplerPool(cache, reader(), **options) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().segments == 24
    if executor is not None:
        executor.shutdown()
    require_as_ever(cache, 24)


@pytest.mark.slow
def test_a_worker_reads_for_its_next_task_while_it_waits_for_the_last_reads_of_one(tmp_path, folder):
    cache, gate = make_cache(tmp_path / "cache"), tmp_path / "gate"
    sampler = reader(folder, gate)
    with ac.SamplerPool(cache, sampler, workers=1, segments=3, reads=16, progress=False) as pool:
        wait_until(lambda: begun(folder) == {0, 1}, "reads of two tasks; the first has one row")
        gate.touch()
        pool.wait(timeout=DEADLINE_SECONDS)
    require_as_ever(cache, 3)


@pytest.mark.slow
def test_a_killed_worker_leaves_no_gap_though_it_had_begun_two_tasks(tmp_path, folder):
    cache, gate = make_cache(tmp_path / "cache"), tmp_path / "gate"
    with ac.SamplerPool(cache, reader(folder, gate), 2, segments=8, reads=16, progress=False) as pool:
        wait_until(lambda: begun(folder) == {0, 1, 2, 3}, "two tasks of each worker")
        for pid in pids(folder):
            os.kill(pid, signal.SIGKILL)
        gate.touch()
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().failures == 0
        assert pool.stats().retries == 2, "what a worker had begun ahead has not failed"
    require_as_ever(cache, 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "threads"])
def test_a_stop_waits_for_no_read_and_closes_both_samplers_of_a_worker(tmp_path, folder, kind):
    cache, gate, executor = make_cache(tmp_path / "cache"), tmp_path / "gate", executors(kind)
    sampler = reader(folder, gate, closes=True)
    pool = ac.SamplerPool(cache, sampler, 2, reads=16, progress=False, executor=executor)
    wait_until(lambda: len(begun(folder)) == (4 if kind == "own" else 2), "the reads")
    pool.stop()
    assert {path.name for path in folder.glob("closed.*")} == {f"closed.{n}" for n in begun(folder)}
    assert not tasks(cache)
    if executor is not None:
        executor.shutdown()  # waits for no read, since their threads are daemons
        assert [thread for thread in threading.enumerate() if thread.name == "arrowcache-read"]
        gate.touch()
    else:
        assert not [pid for pid in pids(folder) if os.path.exists(f"/proc/{pid}")]


@pytest.mark.slow
def test_a_stop_waits_for_no_read_that_was_begun_twice(tmp_path, folder):
    def read(key: int, number: int) -> dict:
        while number == 12:
            Path(folder, f"{threading.get_ident()}.{os.getpid()}").touch()
            time.sleep(0.005)
        return row(key)

    def sampler(rng):
        for number in itertools.count():
            yield partial(read, int(rng.integers(1 << 20)), number)

    sampler.hedge, sampler.ramp = True, False
    cache = make_cache(tmp_path / "cache")
    pool = ac.SamplerPool(cache, sampler, 1, reads=8, progress=False)
    wait_until(lambda: len(begun(folder)) == 2, "both")
    (pid,) = pids(folder)
    pool.stop()
    assert not os.path.exists(f"/proc/{pid}")
    assert not tasks(cache)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "threads", "processes"])
def test_a_pool_and_a_monitor_say_what_reads_took_and_brought(tmp_path, folder, kind):
    gate = tmp_path / "gate"

    def read(key: int, number: int) -> dict:
        while not os.path.exists(gate):
            time.sleep(0.005)
        if number == 3:
            raise_once(folder / "failed")
        while number == 12 and len(begun(folder)) < 2:  # until it is begun again
            Path(folder, f"{threading.get_ident()}").touch()
            time.sleep(0.005)
        return row(key)

    def raise_once(path: Path) -> None:
        if not path.exists():
            path.touch()
            raise ConnectionResetError("reset")

    def sampler(rng):
        for number in itertools.count():
            yield partial(read, int(rng.integers(1 << 20)), number)

    sampler.hedge, sampler.ramp = True, False
    cache, executor = make_cache(tmp_path / "cache"), executors(kind)
    options = {"workers": 1, "segments": 1, "reads": 4, "progress": False, "executor": executor}
    with ac.SamplerPool(cache, sampler, **options) as pool:
        wait_until(lambda: pool.stats().reads_at_work == 4, "the reads")
        (seen,) = explore.observe(cache).samplers
        assert seen.reads.at_work == 4
        assert "4 at work" in str(pool.stats())
        gate.touch()
        pool.wait(timeout=DEADLINE_SECONDS)
        stats = pool.stats()
    assert 0 < stats.usual_read_seconds <= stats.slow_read_seconds < DEADLINE_SECONDS
    assert (stats.read_retries, stats.hedges, stats.reads_at_work) == (1, 1, 0)
    assert stats.fetched_bytes >= 16 * row(0)["image"].nbytes
    assert 0 < stats.reading_seconds < stats.drawing_seconds
    assert stats.cpu_seconds > 0
    assert "1 retry, 1 hedge" in str(stats)
    if executor is not None:
        executor.shutdown()


@pytest.mark.slow
def test_a_read_that_ends_its_process_is_a_failure_of_its_task_alone(tmp_path, folder):
    def sampler(rng):
        (task,) = rng.bit_generator.seed_seq.spawn_key

        def read(key: int, kills: bool) -> dict:
            once = Path(folder, "killed")
            if kills and not once.exists():
                once.touch()
                os._exit(7)
            return row(key)

        while True:
            yield partial(read, int(rng.integers(1 << 20)), task == 3)

    cache = make_cache(tmp_path / "cache")
    with ac.SamplerPool(cache, sampler, 2, segments=12, progress=False) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().failures == 0
    require_as_ever(cache, 12)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("reads", [1, 8, 64])
def test_a_task_has_the_same_rows_whatever_befalls_its_reads(tmp_path, folder, reads):
    def read(key: int, is_late: bool, fails: bool, kills: bool) -> dict:
        is_first = not (folder / f"{key}").exists()
        (folder / f"{key}").touch()
        if kills and is_first:
            os._exit(7)
        if fails and is_first:
            raise ConnectionResetError("reset")
        time.sleep(0.3 * (is_late and is_first))
        return row(key)

    def sampler(rng):
        (task,) = rng.bit_generator.seed_seq.spawn_key
        for number in itertools.count():
            befalls = number == 3, number % 5 == 4, task in (9, 12) and number == 2
            yield partial(read, int(rng.integers(1 << 20)), *befalls)

    sampler.hedge = True
    cache = make_cache(tmp_path / "cache")
    with ac.SamplerPool(cache, sampler, 2, segments=13, reads=reads, progress=False) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        stats = pool.stats()
    require_as_ever(cache, 13)
    assert stats.retries > 0
    assert stats.read_retries > 0


def test_an_error_of_a_read_names_where_it_was_raised(tmp_path):
    def sampler(rng):
        def read_of_the_user(key: int) -> dict:
            raise ValueError(f"record {key} does not decode")

        yield partial(read_of_the_user, 7)

    cache = make_cache(tmp_path / "cache")
    with (
        pytest.raises(ac.SamplerError, match=r"(?s)in read_of_the_user.*record 7 does not decode"),
        ac.SamplerPool(cache, sampler, 1, segments=1, retries=0, progress=False) as pool,
    ):
        pool.wait(timeout=DEADLINE_SECONDS)


def test_pyarrow_has_a_thread_for_each_read_of_a_worker(tmp_path):
    def sampler(rng):
        while True:
            yield {"threads": pa.io_thread_count()}

    cache = ac.Cache.create(tmp_path / "cache", ac.Schema({"threads": ac.Tensor("int64")}), "16MB")
    with ac.SamplerPool(cache, sampler, reads=40, progress=False) as pool:
        pool.wait(rows=1, timeout=DEADLINE_SECONDS)
    with cache.snapshot() as snapshot:
        assert snapshot.gather([0])["threads"].tolist() == [40]
