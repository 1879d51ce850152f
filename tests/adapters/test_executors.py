"""SamplerPool on executors of others: concurrent.futures, loky's own, Dask's, mpi4py's.

On each of them content is the same pure function of (sampler, seed, k), a pool that is started again
repeats no task, a task that fails tells where, and the executor goes on after the pool.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE_SECONDS, full, make_cache, publish, published_ids, segment_files, wait_until
from helpers import sample as row
from pool_tasks import QUICK, draws, expected, fails_at, gated, sampled, tasks

import arrowcache as ac
from arrowcache import SamplerPool
from arrowcache.sampling.sources import Items

WORKERS = 2


@contextmanager
def processes(method: str) -> Iterator[Executor]:
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context(method)) as executor:
        yield executor


@contextmanager
def lokys_own() -> Iterator[Executor]:
    loky = pytest.importorskip("loky")

    executor = loky.get_reusable_executor(WORKERS, reuse=False)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, kill_workers=True)


@contextmanager
def dask(threads: int = 1) -> Iterator[Executor]:
    distributed = pytest.importorskip("distributed", reason="Dask's distributed is not installed")
    with (
        distributed.LocalCluster(
            n_workers=WORKERS, threads_per_worker=threads, dashboard_address=":0", silence_logs="CRITICAL"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


EXECUTORS = {
    "spawned processes": lambda: processes("spawn"),
    "forkserver's processes": lambda: processes("forkserver"),
    "loky's reusable executor": lokys_own,
    "Dask, processes of two threads": lambda: dask(threads=2),
}


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request):
    """Each kind of executor, started once for all tests of it."""
    with EXECUTORS[request.param]() as executor:
        yield executor


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.mark.slow
def test_a_pool_started_again_repeats_no_task_and_each_is_what_it_is_anywhere(cache, executor):
    for segments in (5, 4):
        assert sampled(cache, executor=executor, segments=segments, workers=3).segments == segments
    assert tasks(cache) == {number: expected(number) for number in range(9)}
    assert cache.verify() == []


@pytest.mark.slow
def test_a_pool_stopped_in_mid_run_repeats_no_task_and_counts_all_that_it_published(cache, executor):
    pool = SamplerPool(cache, draws(), executor=executor, **QUICK)
    pool.wait(segments=4, timeout=DEADLINE_SECONDS)
    pool.stop()
    first = tasks(cache)
    assert pool.stats().segments == len(first)
    sampled(cache, executor=executor, segments=6, workers=3)
    both = tasks(cache)
    assert min(both.keys() - first.keys()) > max(first)
    assert len(both) == len(first) + 6
    assert both == {number: expected(number) for number in both}
    assert cache.verify() == []
    assert executor.submit(abs, -1).result(DEADLINE_SECONDS) == 1, "it is not the pools' to end"


@pytest.mark.slow
def test_each_item_of_a_dataset_comes_once_and_a_pool_started_again_draws_none(cache, executor):
    items = Items([row(number) for number in range(150)])
    for rows in (150, 0):
        assert sampled(cache, items, executor=executor, workers=3).rows == rows
    assert sorted(published_ids(cache)) == list(range(150))


@pytest.mark.slow
def test_a_failing_task_is_told_with_its_traceback_while_the_others_go_on(cache, executor):
    pool = SamplerPool(cache, fails_at(2), executor=executor, segments=5, retries=1, **QUICK)
    with pytest.raises(ac.SamplerError, match=r"in read_remote_scan(.|\n)*Peculiar: no such scan 17"):
        pool.wait(timeout=DEADLINE_SECONDS)
    pool.stop()
    assert (pool.stats().segments, pool.stats().retries, pool.stats().failures) == (4, 1, 1)
    assert tasks(cache) == {number: expected(number) for number in (0, 1, 3, 4)}


@pytest.mark.slow
def test_a_full_cache_makes_the_workers_of_others_wait_and_stop_ends_that(cache, executor):
    publish(cache, 30)
    with cache.snapshot():
        pool = SamplerPool(cache, draws(), executor=executor, progress=False, workers=2)
        wait_until(lambda: cache.stats().waiting_writers == 2, "both workers to wait for room")
        pool.stop()
    wait_until(lambda: cache.stats().waiting_writers == 0, "the end of their waiting")
    assert len([path for path in segment_files(cache) if "default" in path.name]) == pool.stats().segments


@pytest.mark.slow
def test_a_pool_that_is_stopped_has_the_samplers_of_others_end_well(cache, executor, tmp_path):
    begun, closing, closed = (tmp_path / name for name in ("begun", "closing", "closed"))
    for folder in (begun, closing, closed):
        folder.mkdir()
    may_close = tmp_path / "may close"

    def sampler(rng):
        first = str(rng.integers(1 << 20))
        try:
            yield row(int(first))
            (begun / first).touch()
            while True:
                time.sleep(0.3)
                yield row(1)
        finally:
            (closing / first).touch()
            while not may_close.exists():
                time.sleep(0.01)
            (closed / first).touch()

    def let_close():
        wait_until(lambda: {*os.listdir(closing)} >= {*os.listdir(begun)}, "all to be at their end")
        may_close.touch()

    large = make_cache(tmp_path / "large", segment_rows=1000, segment_bytes="2MiB", capacity="32MiB")
    with SamplerPool(large, full(sampler), executor=executor, **QUICK):
        wait_until(lambda: os.listdir(begun), "a sampler at work")
        thread = threading.Thread(target=let_close)
        thread.start()
    thread.join()
    assert {*os.listdir(closed)} >= {*os.listdir(begun)}
    assert segment_files(large) == []


@pytest.mark.slow
def test_a_sample_that_does_not_fit_ends_the_pool_at_once(cache, executor):
    pool = SamplerPool(cache, lambda rng: [{"id": 1.5}], executor=executor, retries=50, **QUICK)
    with pytest.raises(ac.SamplerError, match=r"given up after 0 retries(.|\n)*SchemaError"):
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    pool.stop()


class Keeper(Executor):
    """Another executor, all whose futures are kept, as a traceback in a cycle does."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.kept: list[Future[Any]] = []

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.kept.append(self._executor.submit(*args, **kwargs))
        return self.kept[-1]


@pytest.mark.slow
def test_a_task_that_is_tried_again_is_not_answered_from_memory(cache, executor, tmp_path):
    """Dask knows equal calls by their arguments."""
    sign = tmp_path / "sign"

    def fails_at_first(rng):
        try:
            sign.touch(exist_ok=False)
        except FileExistsError:
            yield row(int(rng.integers(1 << 20)))
        else:
            raise OSError("connection lost")

    sampled(cache, fails_at_first, executor=Keeper(executor), segments=1, retries=1)
    assert tasks(cache) == {0: expected(0)}


# a worker that was killed


@contextmanager
def a_killed_worker(cache: ac.Cache, executor: Executor, folder: Path) -> Iterator[SamplerPool]:
    (folder / "pids").mkdir()
    sampler = full(gated(folder / "pids", folder / "gate"))
    with SamplerPool(cache, sampler, executor=executor, segments=6, **QUICK) as pool:
        wait_until(lambda: os.listdir(folder / "pids"), "a worker at work")
        os.kill(int(os.listdir(folder / "pids")[0]), signal.SIGKILL)
        (folder / "gate").touch()
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spawned processes", "loky's reusable executor"])
def test_an_executor_that_breaks_with_a_worker_ends_its_pool_and_another_one_goes_on(cache, tmp_path, kind):
    with EXECUTORS[kind]() as executor, a_killed_worker(cache, executor, tmp_path) as pool:
        with pytest.raises(
            ac.SamplerError, match=r"lost a worker, and takes no more tasks: (.|\n)*new executor"
        ):
            pool.wait(timeout=DEADLINE_SECONDS)
        assert pool.stats().retries == 0, "that was in vain"
    before = tasks(cache)
    with ThreadPoolExecutor(2) as executor:
        sampled(cache, full(draws()), executor=executor, segments=4)
    assert len(tasks(cache)) == len(before) + 4
    assert tasks(cache) == {number: expected(number, rows=16) for number in tasks(cache)}
    assert cache.verify() == []


@pytest.mark.slow
def test_dask_gives_the_task_of_a_killed_worker_to_another_one(cache, tmp_path):
    with dask() as executor, a_killed_worker(cache, executor, tmp_path) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
    assert tasks(cache) == {number: expected(number, rows=16) for number in range(6)}
    assert cache.verify() == []


@pytest.mark.slow
def test_a_sampler_that_kills_dasks_workers_is_given_up_in_the_end(cache):
    def sampler(rng):
        os.kill(os.getpid(), signal.SIGKILL)
        yield {}

    with dask() as executor:
        pool = SamplerPool(cache, sampler, executor=executor, retries=0, segments=1, **QUICK)
        with pytest.raises(ac.SamplerError, match="KilledWorker"):
            pool.wait(timeout=2 * DEADLINE_SECONDS)
        pool.stop()


# executors that end, and such that are elsewhere


def test_an_executor_that_is_shut_down_under_its_pool_is_named(cache):
    executor = ThreadPoolExecutor(2)
    pool = SamplerPool(cache, draws(), executor=executor, **QUICK)
    pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    executor.shutdown()
    with pytest.raises(ac.SamplerError, match=r"ThreadPoolExecutor.* takes no more tasks: .*until the pool"):
        pool.wait(segments=1 << 20, timeout=DEADLINE_SECONDS)
    pool.stop()


class Refusing(ThreadPoolExecutor):
    """Takes so many tasks, then no more."""

    def __init__(self, takes: int, error: Exception) -> None:
        super().__init__(1)
        self._takes, self._error = takes, error

    def submit(self, *arguments: Any) -> Future[Any]:  # type: ignore[override]  # of a pool
        self._takes -= 1
        if self._takes < 0:
            raise self._error
        return super().submit(*arguments)


@pytest.mark.parametrize("takes", [0, 1, 3])
@pytest.mark.parametrize("error", [RuntimeError("shut down"), BrokenExecutor("a process died.")])
def test_a_task_that_an_executor_refuses_is_the_next_pools(cache, takes, error):
    """Its number was taken, and its samples were drawn by nobody."""
    with Refusing(takes, error) as executor:
        pool = SamplerPool(cache, draws(), executor=executor, **QUICK | {"workers": 1})
        with pytest.raises(ac.SamplerError, match="takes no more tasks"):
            pool.wait(segments=4, timeout=DEADLINE_SECONDS)
        pool.stop()
    assert sorted(tasks(cache)) == [*range(takes)]
    with (
        ThreadPoolExecutor(1) as others,
        SamplerPool(cache, draws(), executor=others, segments=4 - takes, **QUICK | {"workers": 1}) as again,
    ):
        again.wait(timeout=DEADLINE_SECONDS)
    assert sorted(tasks(cache)) == [*range(4)]


@pytest.mark.slow
def test_a_cluster_that_is_closed_under_its_pool_ends_it(cache):
    with dask() as executor:
        pool = SamplerPool(cache, draws(), executor=executor, **QUICK)
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    with pytest.raises(ac.SamplerError, match="takes no more tasks"):
        pool.wait(segments=1 << 20, timeout=DEADLINE_SECONDS)
    pool.stop()


class Elsewhere(Executor):
    """Runs tasks at once, on a host that has another cache under the same path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def submit(self, run: Any, task: Any) -> Future[Any]:
        from dataclasses import replace

        future: Future[Any] = Future()
        future.set_result(run(replace(task, cache=str(self._path))))
        return future


@pytest.mark.slow
def test_workers_of_another_host_are_an_error_and_no_end_of_tasks_that_do_nothing(cache, tmp_path):
    make_cache(tmp_path / "other")
    (tmp_path / "other" / "pools" / "default.0").touch()
    executor = Elsewhere(tmp_path / "other")
    pool = SamplerPool(cache, draws(), executor=executor, retries=0, workers=1, progress=False)
    with pytest.raises(ac.SamplerError, match="must run on this host"):
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    pool.stop()
    assert tasks(cache) == {}


# MPI

MPI_SCRIPT = """
    import json, sys
    from concurrent.futures import Executor
    from mpi4py.futures import MPIPoolExecutor
    import arrowcache as ac
    from helpers import sample as row

    def sampler(rng):
        while True:
            yield row(int(rng.integers(1 << 20)))

    def read_remote_scan(rng):
        raise LookupError("no such scan")
        yield

    if __name__ == "__main__":
        cache, told = ac.Cache.open(sys.argv[1]), []
        with MPIPoolExecutor(max_workers=2) as executor:
            options = {"executor": executor, "progress": False, "workers": 3}
            for segments in (5, 4):
                with ac.SamplerPool(cache, sampler, segments=segments, **options) as pool:
                    pool.wait(timeout=60)
                    told.append(pool.stats().segments)
            pool = ac.SamplerPool(cache, sampler, **options)
            pool.wait(segments=3, timeout=60)
            pool.stop()
            told.append(pool.stats().segments)
            pool = ac.SamplerPool(cache, read_remote_scan, segments=1, retries=1, **options)
            try:
                pool.wait(timeout=60)
            except ac.SamplerError as error:
                told.append(str(error))
            pool.stop()
            told.append(executor.submit(abs, -1).result(60))
        print(json.dumps(told), flush=True)
"""
PATHS = (Path(ac.__file__).parents[1], Path(__file__).parents[1])
MPI_ENVIRONMENT = {  # Open MPI: as root in a container, more processes than processors, nothing to log in to
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_plm_rsh_agent": "",
    "OMPI_MCA_btl_base_warn_component_unused": "0",
}


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["spawned by the script", "started beside it"])
def test_a_pool_on_mpi(cache, tmp_path, launch):
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None or not find_library("mpi"):
        pytest.skip("no MPI is installed: apt-get install --no-install-recommends openmpi-bin")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(MPI_SCRIPT))
    launcher = {
        "spawned by the script": [mpiexec, "-n", "1", sys.executable],
        "started beside it": [mpiexec, "-n", "3", sys.executable, "-m", "mpi4py.futures"],
    }[launch]
    done = subprocess.run(
        [*launcher, str(script), str(cache.path)],
        env={**os.environ, **MPI_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True, text=True, timeout=4 * DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    five, four, stopped, error, alive = json.loads(done.stdout.splitlines()[-1])
    assert (five, four, alive) == (5, 4, 1)
    assert "in read_remote_scan" in error
    assert "LookupError: no such scan" in error
    published = tasks(cache)
    assert len(published) == 9 + stopped
    assert set(range(9)) <= published.keys()
    assert published == {number: expected(number) for number in published}
    assert cache.verify() == []
