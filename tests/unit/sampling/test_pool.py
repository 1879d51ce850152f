from __future__ import annotations

import atexit
import ctypes
import dataclasses
import importlib
import logging
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from begun import own_threads
from helpers import (
    DEADLINE_SECONDS,
    KIB,
    disk_bytes,
    full,
    held_by_another_thread,
    in_child,
    limit,
    make_cache,
    open_files,
    publish,
    segment_files,
    wait_until,
    worker_processes_run,
)
from helpers import sample as row
from interruptions import interruptions
from markup import seen
from pool_tasks import QUICK, draws, expected, fails_at, gated, sampled, tasks
from processes import Child, Script
from quick import first_is_quick

import arrowcache as ac
from arrowcache import SamplerPool
from arrowcache.sampling.dispatcher import PoolOptions
from arrowcache.sampling.pool import Pool
from arrowcache.sampling.sources import Map, Mix
from arrowcache.sampling.task import Done, Task
from arrowcache.storage.counters import seen_samplers

STOP_SECONDS = 10.0  # the pool's own bounds are shorter; a busy machine gets some grace


def of_tasks(segments: int | None) -> PoolOptions:
    """Of so many tasks, none of which is tried again."""
    return PoolOptions(row, 2, 0, "default", segments, 0, progress=False, reads=1, on_error="raise")


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.fixture
def threads():
    """An executor, which no pool ends."""
    with ThreadPoolExecutor(2) as executor:
        yield executor
        assert executor.submit(abs, -1).result(DEADLINE_SECONDS) == 1


def signs(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


# determinism


EXECUTORS = {
    "its own": lambda: None,
    "threads": lambda: ThreadPoolExecutor(2),
    "processes": lambda: ProcessPoolExecutor(2, mp_context=get_context("forkserver")),
}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", first_is_quick(["threads", "processes", "its own"]))
def test_a_tasks_samples_depend_on_seed_and_number_alone(cache, kind, workers):
    with EXECUTORS[kind]() or nullcontext() as executor:
        sampled(cache, executor=executor, workers=workers, seed=5, segments=12)
    assert tasks(cache, "default.5") == {number: expected(number, 5) for number in range(12)}


def keeps_state(what: str) -> Callable[..., Any]:
    """A sampler that sets attributes as it draws. Made here, so that it is pickled by value."""

    def read(number):
        time.sleep(0.002 * (number % 7))  # reads end in another order
        return {"id": number}

    class Drawing:
        def __call__(self, rng):
            self.rng = rng
            while True:
                yield partial(read, self.draw())

        def draw(self):
            return int(self.rng.integers(1 << 20))

    class Walking:
        def __call__(self, rng):
            self.at = int(rng.integers(1 << 20))
            while True:
                yield partial(read, self.at)
                self.at += 1

        def walk(self, rng):
            return self(rng)

    class Around:
        def __init__(self, sampler):
            self.sampler = sampler

        def __call__(self, rng):
            return self.sampler(rng)

    return {
        "its rng": Drawing,
        "its place": Walking,
        "of a method": lambda: Walking().walk,
        "of one inside": lambda: Around(Walking()),
        "of one in a mix in a map": lambda: Map(Mix([(Walking(), 2), (Walking(), 1)]), dict),
    }[what]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["its rng", "its place", "of a method", "of one inside", "of one in a mix in a map"]
)
def test_what_a_sampler_sets_on_itself_is_not_changed_by_the_task_that_begins_ahead(tmp_path, threads, what):
    """That set it anew, and the task before went on with it: other rows, or an error that blamed reads."""
    schema, drawn = ac.Schema({"id": ac.Tensor("int64")}), []
    for executor in (threads, None):  # in a user's executor no task begins ahead
        form = {"capacity": "64MiB", "segment_rows": 400}
        cache = make_cache(tmp_path / f"cache-{executor is None}", schema, **form)
        sampled(cache, keeps_state(what), executor=executor, reads=8, segments=14, workers=2)
        drawn.append(tasks(cache))
    assert drawn[0] == drawn[1]


def test_a_pool_goes_on_at_the_next_number_of_its_name_and_seed(cache, threads):
    sampled(cache, executor=threads, segments=3)
    sampled(cache, executor=threads, segments=4)
    assert tasks(cache) == {number: expected(number) for number in range(7)}
    for options, pool, seed in (
        ({"name": "other"}, "other.0", 0),
        ({"seed": 1}, "default.1", 1),
        ({"seed": 2**128 - 1}, f"default.{2**128 - 1}", 2**128 - 1),
    ):
        sampled(cache, executor=threads, segments=3, **options)
        assert tasks(cache, pool) == {number: expected(number, seed) for number in range(3)}
    assert sorted(tasks(cache)) == list(range(7))


def test_a_pool_whose_number_a_power_cut_lost_goes_on_behind_what_is_published(cache, threads):
    for lost in (None, b"", bytes(8)):
        if lost is not None:
            (cache.path / "pools" / "default.0").write_bytes(lost)
        sampled(cache, executor=threads, segments=3)
    assert tasks(cache) == {number: expected(number) for number in range(9)}


def test_the_files_of_many_pools_count_like_everything_else(tmp_path, threads):
    """Each took a block of a full cache, and none made room for it."""
    cache = make_cache(tmp_path / "cache", capacity="400KiB")
    publish(cache, 30)
    for seed in range(40):
        with pytest.raises(ac.SamplerError, match="ZeroDivisionError"):
            sampled(cache, lambda rng: 1 / 0, executor=threads, seed=seed, segments=1, retries=0)
        assert disk_bytes(cache.path) <= 400 * KIB
    assert cache.verify() == []


def test_two_pools_at_once_never_share_a_number(cache, threads):
    options = {"executor": threads, "segments": 15, **QUICK}
    with SamplerPool(cache, draws(), **options) as one, SamplerPool(cache.path, draws(), **options) as two:
        one.wait(timeout=DEADLINE_SECONDS)
        two.wait(timeout=DEADLINE_SECONDS)
        assert one.stats().segments == two.stats().segments == 15
    assert tasks(cache) == {number: expected(number) for number in range(30)}


@pytest.mark.slow
def test_a_sampler_object_is_unpickled_once_a_worker(cache, tmp_path):
    class Sampler:
        def __init__(self, folder):
            self.folder = folder

        def __setstate__(self, state):
            self.__dict__ = state
            Path(self.folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()

        def __call__(self, rng):
            yield row(1)

    (tmp_path / "signs").mkdir()
    sampled(cache, Sampler(tmp_path / "signs"), segments=10)
    assert 1 <= len(signs(tmp_path / "signs")) <= 2


def test_a_sampler_may_ask_for_full_segments_from_the_start(cache, threads):
    class Draws:
        ramp = False

        def __call__(self, rng):
            return draws()(rng)

    sampled(cache, Draws(), executor=threads, segments=3)
    assert tasks(cache) == {number: expected(number, rows=16) for number in range(3)}


class Counting(ProcessPoolExecutor):
    """Counts the bytes of what it sends to its processes, each of which ends after so many tasks."""

    def __init__(self, workers: int, tasks: int | None = None) -> None:
        options = {} if tasks is None else {"max_tasks_per_child": tasks}
        super().__init__(workers, mp_context=get_context("forkserver"), **options)
        self.nbytes: list[int] = []

    def submit(self, function, /, *arguments, **options):
        self.nbytes.append(len(pickle.dumps((function, arguments, options))))
        return super().submit(function, *arguments, **options)


def heavy(weights: bytes):
    """A sampler of `draws()` that is large when it is pickled."""

    def sampler(rng):
        assert len(weights) == 1 << 20
        while True:
            yield row(int(rng.integers(1 << 20)))

    return sampler


def test_a_sampler_travels_about_once_a_worker_and_its_tasks_are_small(cache):
    with Counting(2) as executor:
        sampler = heavy(os.urandom(1 << 20))
        stats = sampled(cache, sampler, executor=executor, segments=20)
    assert (stats.segments, stats.retries) == (20, 0)
    large = [nbytes for nbytes in executor.nbytes if nbytes > 1000]
    assert 2 <= len(large) <= 4, "once for each worker, and again for one that the first tasks passed by"
    assert len(executor.nbytes) - len(large) >= 16
    assert tasks(cache) == {number: expected(number) for number in range(20)}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ProcessPoolExecutor has no max_tasks_per_child")
def test_a_worker_that_begins_later_asks_for_the_sampler(cache):
    """The tasks before leave nothing to processes that begin after them."""
    with Counting(1, tasks=4) as executor:
        sampler = heavy(bytes(1 << 20))
        assert sampled(cache, sampler, executor=executor, segments=9, workers=1).retries == 0
    large = [nbytes for nbytes in executor.nbytes if nbytes > 1000]
    assert len(large) >= 3, "once a process"
    assert tasks(cache) == {number: expected(number) for number in range(9)}


# failures


def fails_at_first(folder, times):
    """Each task fails `times` times, half-way, and then gives the samples of `draws()`."""

    def sampler(rng):
        first = int(rng.integers(1 << 20))
        yield row(first)
        for number in range(times):
            try:
                Path(folder, f"{first}.{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            raise OSError(f"connection {number} lost")
        while True:
            yield row(int(rng.integers(1 << 20)))

    return sampler


def test_a_sampler_that_fails_sometimes_is_tried_again(cache, threads, tmp_path):
    stats = sampled(cache, full(fails_at_first(tmp_path, 2)), executor=threads, segments=3, retries=2)
    assert (stats.segments, stats.rows, stats.retries, stats.failures) == (3, 48, 6, 0)
    assert tasks(cache) == {number: expected(number, rows=16) for number in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("own_processes", [True, False])
def test_a_task_that_keeps_failing_is_given_up_with_its_traceback_while_others_go_on(
    cache, caplog, threads, own_processes
):
    caplog.set_level(logging.WARNING, "arrowcache")
    executor = None if own_processes else threads
    pool = SamplerPool(cache, fails_at(2), executor=executor, segments=6, retries=1, **QUICK)
    with pytest.raises(ac.SamplerError) as caught:
        pool.wait(timeout=DEADLINE_SECONDS)
    for part in ("1 task given up after 1 retry;", "in read_remote_scan", "Peculiar: no such scan 17"):
        assert part in str(caught.value)
    pool.stop()  # raised already: not again
    stats = pool.stats()
    assert (stats.segments, stats.failures, stats.retries) == (5, 1, 1)
    assert tasks(cache) == {number: expected(number) for number in range(6) if number != 2}
    (record,) = caplog.records
    assert record.getMessage().startswith("sampler task default.0.2 was given up")


def refuses(rng):
    raise PermissionError(13, "the store refuses these credentials", "s3://bucket/table")
    yield


def test_a_sampler_that_always_fails_ends_its_pool(cache, threads):
    pool = SamplerPool(cache, lambda rng: 1 / 0, executor=threads, retries=0, **QUICK)
    with pytest.raises(ac.SamplerError, match="ZeroDivisionError"):
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    pool.stop()
    assert (pool.stats().segments, pool.stats().retries) == (0, 0)
    assert cache.verify() == []


class Unfindable:
    """A sampler whose module the worker does not find."""

    def __call__(self, rng):
        yield row(1)

    def __reduce__(self):
        return importlib.import_module, ("a_module_that_is_nowhere",)


def imports_in_vain(rng):
    import a_module_that_is_nowhere

    yield a_module_that_is_nowhere


def misspells(rng):
    yield {**row(1), "imgae": 1}


def of_another_type(rng):
    while True:
        yield {**row(1), "image": np.zeros((16, 16))}  # float64


def of_another_shape(rng):
    yield row(1)
    yield {**row(1), "image": np.zeros((16, 15), np.float32)}


def of_many_lengths(rng):
    yield ac.Rows(id=[1, 2], image=np.zeros((3, 16, 16), np.float32))


CANNOT_PASS = {
    "another dtype": (of_another_type, "'image'.*float64"),
    "another shape": (full(of_another_shape), "'image'"),
    "a misspelt field": (misspells, "imgae"),
    "a missing field": (lambda rng: [{"id": 1}], "lacks 'image'"),
    "rows of many lengths": (of_many_lengths, "rows|length"),
    "None": (lambda rng: None, "NoneType"),
    "a dict in place of an iterator of them": (lambda rng: row(1), "the sampler returned a dict: `yield` it"),
    "a list of numbers": (lambda rng: [7], "must yield mappings"),
    "an array": (lambda rng: np.zeros(3), "must yield mappings"),
    "nothing": (lambda rng: [], "yielded nothing"),
    "a function without a parameter": (lambda: [row(1)], "positional argument"),
    "a function of two": (lambda rng, more: [row(1)], "positional argument"),
    "a module that is not found by pickle": (Unfindable(), "a_module_that_is_nowhere"),
    "a module that is not found at work": (imports_in_vain, "a_module_that_is_nowhere"),
    "credentials": (refuses, "refuses these credentials: 's3://bucket/table'"),
    "a Map's result": (
        lambda rng: Map(draws(), lambda sample: 7, schema={"x": ac.Tensor("int8")})(rng),
        "Map",
    ),
}


@pytest.mark.parametrize("kind", first_is_quick(["threads", "processes", "its own"]))
@pytest.mark.parametrize("case", [*CANNOT_PASS])
def test_what_cannot_pass_ends_a_pool_at_its_first_try(cache, case, kind):
    sampler, words = CANNOT_PASS[case]
    with EXECUTORS[kind]() or nullcontext() as executor:
        pool = SamplerPool(cache, sampler, executor=executor, retries=1000, **QUICK)
        with pytest.raises(ac.SamplerError, match=words):
            pool.wait(segments=100, timeout=DEADLINE_SECONDS)
        pool.stop()
    assert (pool.stats().segments, pool.stats().retries) == (0, 0)
    assert 1 <= pool.stats().failures <= 2, "each worker tried once at most"
    assert not writes(cache)
    assert cache.verify() == []


def test_a_sample_larger_than_a_segment_ends_a_pool_at_its_first_try(tmp_path, threads):
    schema = ac.Schema({"text": ac.String()})
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="1MiB", segment_bytes="64KiB")
    pool = SamplerPool(cache, lambda rng: [{"text": "x" * (1 << 18)}], executor=threads, **QUICK)
    with pytest.raises(ac.SamplerError, match=r"after 0 retries(.|\n)*RowTooLargeError"):
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    pool.stop()


@pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError, ac.SamplerError, FileNotFoundError])
def test_a_samplers_own_exceptions_may_pass(cache, threads, tmp_path, kind):
    def sampler(rng):
        try:
            (tmp_path / "failed").touch(exist_ok=False)
        except FileExistsError:
            yield from draws()(rng)
        else:
            raise kind("this time only")

    stats = sampled(cache, sampler, executor=threads, segments=2, retries=1, workers=1)
    assert (stats.segments, stats.retries, stats.failures) == (2, 1, 0)


def test_a_sample_that_does_not_fit_is_told_in_place_of_the_loader_that_waited(cache, threads):
    def train():
        with (
            SamplerPool(cache, of_another_type, executor=threads, **QUICK),
            ac.Loader(cache, 16, timeout=3.0) as loader,
        ):
            next(iter(loader))

    with pytest.raises(ac.SamplerError, match="float64") as caught:
        train()
    assert isinstance(caught.value.__cause__, ac.LoaderTimeoutError)


def test_stop_raises_what_no_wait_did(cache, threads):
    pool = SamplerPool(cache, lambda rng: 1 / 0, executor=threads, retries=0, **QUICK)
    wait_until(lambda: pool.stats().failures, "a failure")
    with pytest.raises(ac.SamplerError, match="ZeroDivisionError"):
        pool.stop()
    pool.stop()


def test_an_exception_in_the_with_block_passes_rather_than_the_pools_own(cache, threads):
    def work(pool):
        wait_until(lambda: pool.stats().failures, "a failure")
        raise KeyError("mine")

    with (
        pytest.raises(KeyError, match="mine"),
        SamplerPool(cache, lambda rng: 1 / 0, executor=threads, retries=0, **QUICK) as pool,
    ):
        work(pool)


# under torchrun


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_a_pool_on_any_but_the_first_local_rank_says_how_to_have_one_a_node(
    cache, threads, monkeypatch, name
):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=rf"local rank 1.*'{name}'\]\) == 0.*every_rank=True"):
        SamplerPool(cache, draws(), **QUICK)
    assert not (cache.path / "pools" / "default.0").exists()
    sampled(cache, executor=threads, segments=1, every_rank=True)


@pytest.mark.parametrize("rank", ["0", "", "strange", None])
def test_the_first_local_rank_and_a_script_without_ranks_have_a_pool(cache, threads, monkeypatch, rank):
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    sampled(cache, executor=threads, segments=1)


_RANK = """
import contextlib, os, sys
import numpy as np
import arrowcache as ac
rank = int(os.environ["LOCAL_RANK"])

def sample(rng):
    while True:
        yield {"id": int(rng.integers(1 << 20)), "image": np.zeros((16, 16), np.float32)}

is_first = rank == 0
pool = ac.SamplerPool(sys.argv[1], sample, workers=1) if is_first else contextlib.nullcontext()
with pool, ac.Loader(sys.argv[1], 8, rank=rank, world_size=2, run_id="job", timeout=60) as loader:
    batches = loader.repeat()
    print(sum(len(next(batches)["id"]) for _ in range(3)), flush=True)
    input()
"""


@pytest.mark.slow
def test_the_documented_way_under_torchrun_has_one_pool_and_rows_on_every_rank(cache, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with Script(_RANK, cache.path) as first:
        monkeypatch.setenv("LOCAL_RANK", "1")
        with Script(_RANK, cache.path) as second:
            assert first.line() == second.line() == "24"
            assert len({(seen.pool, seen.token) for seen in seen_samplers(cache.path)}) == 1
            for script in (first, second):
                script.say("done")
                assert script.end()[0] == 0
    assert os.listdir(cache.path / "pools") == ["default.0"]


# killed workers


@pytest.mark.slow
def test_a_killed_worker_costs_no_task_and_none_is_published_twice(cache, tmp_path):
    folder, gate = tmp_path / "pids", tmp_path / "gate"
    folder.mkdir()
    with SamplerPool(cache, full(gated(folder, gate)), segments=8, workers=4, progress=False) as pool:
        wait_until(lambda: len(signs(folder)) == 4, "all workers at work")
        os.kill(int(signs(folder)[0]), signal.SIGKILL)
        wait_until(lambda: len(signs(folder)) >= 5, "a new worker at work")
        assert sum(Path("/proc", pid).exists() for pid in signs(folder)) == 4, "one of them is new"
        gate.touch()
        pool.wait(timeout=DEADLINE_SECONDS)
        stats = pool.stats()
    assert (stats.segments, stats.failures, stats.retries) == (8, 0, 1)
    assert {number: ids[:1] for number, ids in tasks(cache).items()} == {
        number: expected(number)[:1] for number in range(8)
    }
    assert cache.verify() == []


@pytest.mark.slow
def test_a_sampler_that_kills_its_process_is_given_up_in_the_end(cache):
    def sampler(rng):
        os.kill(os.getpid(), signal.SIGKILL)
        yield {}

    pool = SamplerPool(cache, sampler, retries=0, workers=1, progress=False)
    with pytest.raises(ac.SamplerError, match="given up"):
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    pool.stop()


def test_the_failure_of_samplers_passes_on_in_place_of_the_loader_that_waited_for_them(cache, threads):
    def train():
        with SamplerPool(cache, lambda rng: 1 / 0, executor=threads, segments=1, retries=0, **QUICK) as pool:
            wait_until(lambda: pool.stats().failures, "the task to be given up")
            next(iter(ac.Loader(cache, 16, timeout=0.5)))

    with pytest.raises(ac.SamplerError, match="ZeroDivisionError") as caught:
        train()
    assert isinstance(caught.value.__cause__, ac.LoaderTimeoutError)


def test_a_loader_that_waits_in_vain_says_so_where_no_sampler_failed(cache, threads):
    def train():
        with SamplerPool(cache, draws(), executor=threads, segments=1, **QUICK) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            next(iter(ac.Loader(cache, 16, wait_rows=64, timeout=0.5)))

    with pytest.raises(ac.LoaderTimeoutError):
        train()


# waiting and stopping


def test_wait_returns_once_so_much_is_published(cache, threads):
    with SamplerPool(cache, draws(), executor=threads, **QUICK) as pool:
        pool.wait(segments=5, timeout=DEADLINE_SECONDS)
        assert pool.stats().segments >= 5
        pool.wait(segments=5, timeout=0)
        pool.wait(rows=20, timeout=DEADLINE_SECONDS)
        assert pool.stats().rows >= 20
        pool.wait(segments=2, rows=40, timeout=DEADLINE_SECONDS)
        assert pool.stats().rows >= 40
        pool.wait(15, 1, DEADLINE_SECONDS)
        assert pool.stats().segments >= 15
        with pytest.raises(ValueError, match="no end"):
            pool.wait()


def test_wait_times_out_with_numbers(cache, threads, tmp_path):
    gate = tmp_path / "gate"
    sampler = full(gated(tmp_path, gate))
    with SamplerPool(cache, sampler, executor=threads, segments=2, **QUICK) as pool:
        for arguments, words in (
            ({}, r"waited 0\.1 s for all tasks: 0 segments and 0 rows published"),
            ({"segments": 1}, r"waited 0\.1 s for 1 segment: 0 segments"),
        ):
            with pytest.raises(TimeoutError, match=words):
                pool.wait(timeout=0.1, **arguments)
        gate.touch()
        pool.wait(timeout=DEADLINE_SECONDS)
        for arguments, words in (
            ({"segments": 3}, "3 segments waited for"),
            ({"rows": 33}, "33 rows waited for"),
            ({"segments": 3, "rows": 2}, "3 segments and 2 rows waited for"),
        ):
            with pytest.raises(
                ac.SamplerError, match=f"ended with 2 segments and 32 rows published, {words}"
            ):
                pool.wait(timeout=DEADLINE_SECONDS, **arguments)


@pytest.fixture
def impatient(monkeypatch):
    """A pool that ends does not wait for tasks of others' executors."""
    limit(monkeypatch, task_end_seconds=0.2, task_cancel_seconds=0.0)


def test_a_wait_is_woken_by_stop(cache, threads, tmp_path, impatient):
    gate = tmp_path / "gate"
    pool = SamplerPool(cache, full(gated(tmp_path, gate)), executor=threads, **QUICK)
    with ThreadPoolExecutor(1) as waiting:
        waiter = waiting.submit(pool.wait, segments=1, timeout=DEADLINE_SECONDS)
        wait_until(lambda: signs(tmp_path), "a task at work")
        pool.stop()
        assert type(waiter.exception(DEADLINE_SECONDS)) is ac.SamplerError
    gate.touch()


def test_stats_count_what_was_published(cache, threads):
    stats = sampled(cache, executor=threads, segments=4)
    assert (stats.segments, stats.rows, stats.retries, stats.failures) == (4, 4, 0, 0)
    assert stats.bytes == sum(path.stat().st_size for path in segment_files(cache))
    assert stats.seconds > 0
    assert stats.waiting_seconds >= 0


# the end of samplers


def closing(
    folder: Path, seconds: float = 0.0, held: float = 0.0, exiting: float = 0.0
) -> Callable[..., Any]:
    """Like `draws()`; notes where each task begins, and where its `with`, `finally` and `atexit` have run.

    Args:
        seconds: how long it takes for its second sample.
        held: how long its `finally` takes.
        exiting: how long its function of `atexit` takes.
    """
    for name in ("begun", "closed", "left", "exited"):
        (folder / name).mkdir(exist_ok=True)

    def note(name, after=0.0):
        time.sleep(after)
        Path(folder, name, str(os.getpid())).touch()

    @contextmanager
    def server():
        try:
            yield
        finally:
            note("left")

    def sampler(rng):
        atexit.register(note, "exited", exiting)
        with server():
            try:
                yield row(int(rng.integers(1 << 20)))
                note("begun")
                while True:
                    time.sleep(seconds)
                    yield row(int(rng.integers(1 << 20)))
            finally:
                time.sleep(held)
                note("closed")

    return full(sampler)


def ends_well(folder: Path, *, exits: bool = True) -> None:
    begun = signs(folder / "begun")
    assert begun
    for name in ("closed", "left", *(["exited"] if exits else [])):
        assert set(signs(folder / name)) >= set(begun), name


@pytest.fixture
def large(tmp_path):
    """A cache whose full segments take a slow sampler for ever."""
    return make_cache(tmp_path / "large", segment_rows=1000, segment_bytes="2MiB", capacity="32MiB")


@pytest.mark.slow
@pytest.mark.parametrize("executor", [*EXECUTORS])
@pytest.mark.parametrize("how", ["stop", "with", "error"])
def test_a_pool_that_ends_has_its_samplers_end_well(large, tmp_path, executor, how):
    with EXECUTORS[executor]() or nullcontext() as others:
        pool = SamplerPool(large, closing(tmp_path, 0.02, held=0.5), executor=others, **QUICK)
        wait_until(lambda: signs(tmp_path / "begun"), "a sampler at work")
        if how == "stop":
            pool.stop()
        elif how == "with":
            with pool:
                pass
        else:
            with pytest.raises(KeyError), pool:
                raise KeyError("mine")
        ends_well(tmp_path, exits=others is None)
    assert segment_files(large) == []


@pytest.mark.slow
def test_the_tasks_of_a_pool_that_was_stopped_are_passed_over(large, threads, tmp_path):
    pool = SamplerPool(large, closing(tmp_path, 0.02), executor=threads, **QUICK)
    wait_until(lambda: pool.stats().drawn_rows >= 2, "both samplers to have drawn something")
    pool.stop()
    assert segment_files(large) == []
    sampled(large, executor=threads, segments=1)
    assert sorted(tasks(large)) == [2]


@pytest.mark.slow
def test_a_pool_that_has_done_all_its_tasks_has_its_processes_exit_as_usual(cache, tmp_path):
    sampled(cache, closing(tmp_path), segments=3)
    ends_well(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["room", "pace"])
def test_samplers_that_wait_to_publish_end_well(cache, tmp_path, why):
    publish(cache, 30)
    held = cache.snapshot() if why == "room" else nullcontext()
    if why == "pace":
        cache.set_pace(ac.Pace(samples_per_insert=1.0, tolerance=1))
    with held:
        pool = SamplerPool(cache, closing(tmp_path), **QUICK)
        wait_until(lambda: cache.stats().waiting_writers == 2, "both to wait")
        stop_in_time(pool)
        ends_well(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("within", ["map", "mix", "iterator"])
def test_samplers_within_others_end_well(large, tmp_path, within):
    inner = closing(tmp_path, 0.02)
    sampler: Any
    if within == "map":
        sampler = Map(inner, dict, schema=large.schema)
    elif within == "mix":
        others = Map(draws(), dict, schema=large.schema)
        sampler = Mix([(Map(inner, dict, schema=large.schema), 1), (others, 1)])
    else:

        def sampler(rng):
            return map(dict, inner(rng))

    pool = SamplerPool(large, sampler, **QUICK)
    wait_until(lambda: signs(tmp_path / "begun"), "a sampler at work")
    stop_in_time(pool)
    ends_well(tmp_path)


@pytest.mark.slow
def test_a_failing_task_has_its_sampler_end_well(cache, tmp_path):
    inner = closing(tmp_path)

    def fails(rng):
        for number, sample in enumerate(inner(rng)):
            yield sample if number < 2 else {"id": 1.5}

    pool = SamplerPool(cache, fails, **QUICK)
    with pytest.raises(ac.SamplerError, match="SchemaError"):
        pool.wait(segments=100, timeout=DEADLINE_SECONDS)
    ends_well(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("held", [0.0, 2.5])
def test_a_sampler_that_gives_no_sample_is_interrupted_but_not_its_finally(large, tmp_path, held):
    """With 2.5 s, the end of the time for closing comes within `finally` where samples come quickly."""
    pool = SamplerPool(large, closing(tmp_path, 0.8 if held else 3600.0, held), **QUICK)
    wait_until(lambda: signs(tmp_path / "begun"), "a sampler at work")
    stop_in_time(pool)
    ends_well(tmp_path)


def holds_the_gil(rng):
    yield row(1)
    Path(place, str(os.getpid())).touch()
    ctypes.PyDLL(None).sleep(3600)


def ignores_everything(rng):
    yield row(1)
    while True:
        try:
            Path(place, str(os.getpid())).touch()
            time.sleep(3600)
        except BaseException:
            pass


place = ""  # where both note that they are stuck; sent with them


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [holds_the_gil, ignores_everything])
def test_a_sampler_that_never_ends_is_killed_in_time(large, tmp_path, stuck):
    folder = str(tmp_path)

    def sampler(rng):
        stuck.__globals__["place"] = folder
        yield from stuck(rng)

    pool = SamplerPool(large, sampler, **QUICK)
    numbers = lambda: [name for name in signs(tmp_path) if name.isdecimal()]  # noqa: E731
    wait_until(lambda: len(numbers()) == 2, "both to be stuck")
    stop_in_time(pool)
    assert not any(Path("/proc", pid).exists() for pid in numbers())


# the sign that somebody writes


def writes(cache) -> bool:
    """Some process shows that it writes to the cache."""
    return cache.store.usage.somebody_writes()


def test_a_pool_shows_that_somebody_writes_until_all_its_tasks_are_done(cache, threads, tmp_path):
    gate = tmp_path / "gate"
    assert not writes(cache)
    pool = SamplerPool(cache, full(gated(tmp_path, gate)), executor=threads, segments=3, **QUICK)
    assert writes(cache), "from construction on"
    wait_until(lambda: signs(tmp_path), "a task at work")
    assert writes(cache)
    gate.touch()
    pool.wait(timeout=DEADLINE_SECONDS)
    assert not writes(cache), "without being stopped"
    pool.stop()


@pytest.mark.slow
def test_a_pool_that_is_stopped_or_gave_up_shows_no_more_that_somebody_writes(cache, threads):
    pool = SamplerPool(cache, draws(), **QUICK)
    pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    assert writes(cache)
    pool.stop()
    assert not writes(cache)
    pool = SamplerPool(cache, lambda rng: 1 / 0, executor=threads, retries=0, **QUICK)
    with pytest.raises(ac.SamplerError):
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    assert not writes(cache)
    pool.stop()


def test_of_two_pools_the_last_one_to_end_takes_the_sign_down(cache, threads):
    one, two = (SamplerPool(cache, draws(), executor=threads, **QUICK) for _ in range(2))
    one.stop()
    assert writes(cache)
    two.stop()
    assert not writes(cache)


def stop_in_time(pool: SamplerPool) -> None:
    started = time.monotonic()
    pool.stop()
    assert time.monotonic() - started < STOP_SECONDS


@pytest.mark.slow
def test_a_full_cache_makes_samplers_wait_and_stop_ends_them_in_time(cache):
    publish(cache, 30)
    with cache.snapshot() as snapshot:
        pool = SamplerPool(cache, draws(), **QUICK)
        wait_until(lambda: cache.stats().waiting_writers == 2, "both workers to wait for room")
        stop_in_time(pool)
        assert len(snapshot) == 480
        assert cache.verify() == []
    wait_until(lambda: cache.stats().waiting_writers == 0, "the waiting to end")
    published = pool.stats().segments
    assert len(tasks(cache)) == published


def test_samplers_in_threads_wait_for_the_readers_of_their_own_process(cache, threads):
    publish(cache, 40)
    with cache.snapshot() as snapshot:
        pool = SamplerPool(cache, draws(), executor=threads, segments=30, retries=0, **QUICK)
        wait_until(lambda: cache.stats().waiting_writers == 2, "both samplers to wait for room")
        assert len(snapshot) > 0
        assert pool.stats().failures == 0
    pool.wait(timeout=DEADLINE_SECONDS)
    pool.stop()
    assert pool.stats().segments == 30
    assert pool.stats().waiting_seconds > 0


@pytest.mark.slow
def test_stop_ends_a_slow_sampler_in_time(cache, tmp_path):
    def slow(rng):
        Path(tmp_path, "begun").touch()
        time.sleep(3600)
        yield {}

    pool = SamplerPool(cache, slow, **QUICK)
    wait_until(lambda: (tmp_path / "begun").exists(), "the sampler to begin")
    stop_in_time(pool)
    assert tasks(cache) == {}


def test_stopping_with_tasks_that_no_worker_has_yet_ends_the_workers_in_time(cache, monkeypatch, tmp_path):
    place = tmp_path / "starting"
    place.mkdir()
    starting = f"import os, time; open({str(place)!r} + '/%d' % os.getpid(), 'w').close(); time.sleep(3600)"
    worker_processes_run(monkeypatch, starting, instead=True)
    pool = SamplerPool(cache, draws(), **QUICK)
    wait_until(lambda: len(signs(place)) == 2, "both workers to start")
    stop_in_time(pool)
    assert not [pid for pid in signs(place) if Path("/proc", pid).exists()]


def sockets() -> set[str]:
    return {link for _, link in open_files() if link.startswith("socket:")}


@pytest.mark.slow
def test_the_child_that_a_pools_process_forks_holds_none_of_its_workers(cache, tmp_path):
    folder, gate = tmp_path / "pids", tmp_path / "gate"
    folder.mkdir()
    others = sockets()  # of other tests
    with SamplerPool(cache, gated(folder, gate), **QUICK) as pool:
        wait_until(lambda: len(signs(folder)) == 2, "both workers at work")
        before = sockets()
        assert len(before - others) >= 2

        def child() -> None:
            assert not sockets() & before - others
            pool.stop()

        with in_child(child):
            pass
        assert all(Path("/proc", pid).exists() for pid in signs(folder))
    assert not any(Path("/proc", pid).exists() for pid in signs(folder)), "with the pool"


@pytest.mark.slow
def test_a_task_of_a_foreign_executor_that_outlives_its_pool_publishes_nothing(
    cache, threads, tmp_path, impatient
):
    gate = tmp_path / "gate"
    pool = SamplerPool(cache, full(gated(tmp_path, gate)), executor=threads, **QUICK)
    wait_until(lambda: pool.stats().drawn_rows == 2, "both tasks at work")
    stop_in_time(pool)
    gate.touch()
    both_are_free = threading.Barrier(2)
    list(threads.map(both_are_free.wait, [DEADLINE_SECONDS] * 2))
    assert tasks(cache) == {}


def test_a_dropped_pool_ends_by_itself(cache, threads):
    pool = SamplerPool(cache, draws(), executor=threads, **QUICK)
    pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    del pool
    assert not is_at_work()


# a fork, Ctrl-C and the garbage collector


class Engine:
    """One task at a time, which is done at once and publishes a row."""

    def __init__(self) -> None:
        self.begun: list[Task] = []
        self.tasks = self.ends = 0

    def idle(self) -> int:
        return 1 - len(self.begun)

    def take(self, count: int) -> list[Task]:
        self.tasks += 1
        return [Task("", b"", "default.0", 0, self.tasks, 0)]

    def begin(self, task: Task) -> None:
        self.begun.append(task)

    def collect(self, timeout_seconds: float) -> list[tuple[Task, Done]]:
        time.sleep(0.01)
        begun, self.begun = self.begun, []
        return [(task, Done(task.number, 1, 1)) for task in begun]

    def at_work(self) -> tuple[int, int]:
        return 0, 0

    def end(self) -> list[Done]:
        self.ends += 1
        return []


def is_at_work() -> bool:
    return bool(own_threads("arrowcache-pool"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # it came in a destructor
def test_ctrl_c_at_any_step_of_a_pool_leaves_one_that_stops():
    for interrupt in interruptions(20, finalizers=True):
        engine, pool = Engine(), None
        with interrupt:
            pool = Pool(engine, of_tasks(None))
            with pool:
                pool.wait(segments=2, timeout=DEADLINE_SECONDS)
                pool.stats()
                pool.stop()
        if pool is not None:
            pool.stop()
            assert not is_at_work(), interrupt.where
            assert engine.ends, interrupt.where
        pool = None
        wait_until(lambda: not is_at_work(), f"the pool's end, after {interrupt.where}")
        assert engine.ends or not engine.tasks, interrupt.where


def functions_of(thread: int) -> set[str]:
    """The names of the functions that a thread is in."""
    frame = sys._current_frames()[thread]
    return {each.f_code.co_name for each, _ in traceback.walk_stack(frame)}


@pytest.mark.no_cover
def test_a_stop_that_ctrl_c_cut_short_is_done_by_the_next_one():
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        def end(self) -> list[Done]:
            begun.set()
            go_on.wait(DEADLINE_SECONDS)
            return super().end()

    main = threading.get_ident()

    def once_stop_waits(then: Callable[[], None]) -> None:
        begun.wait(DEADLINE_SECONDS)
        wait_until(lambda: {"shut_down", "wait_for"} <= functions_of(main), "`stop` to wait")
        then()

    engine = Slow()
    pool = Pool(engine, of_tasks(None))
    pool.wait(segments=1, timeout=DEADLINE_SECONDS)
    pressing = threading.Thread(target=once_stop_waits, args=[lambda: os.kill(os.getpid(), signal.SIGINT)])
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        pool.stop()
    pressing.join()
    assert is_at_work()
    assert not engine.ends
    later = threading.Thread(target=once_stop_waits, args=[go_on.set])
    later.start()
    pool.stop()
    later.join()
    assert engine.ends == 1
    assert not is_at_work()


def test_an_engine_that_fails_to_end_is_told_and_leaves_nobody_waiting():
    class Failing(Engine):
        def end(self) -> list[Done]:
            raise OSError("no end")

    pool = Pool(Failing(), of_tasks(3))
    with pytest.raises(OSError, match="no end"):
        pool.wait(timeout=10)
    pool.stop()


def test_a_pool_that_is_dropped_in_a_thread_with_the_caches_lock_has_it_go_on(cache):
    asking = threading.Event()

    class Asking(Engine):
        def take(self, count: int) -> list[Task]:
            asking.set()
            with cache.store.locked():
                return super().take(count)

    engine = Asking()
    with cache.store.locked():
        pool = Pool(engine, of_tasks(None))
        assert asking.wait(DEADLINE_SECONDS)
        dropped = time.monotonic()
        del pool  # as the garbage collector may
        assert time.monotonic() - dropped < 5
        assert is_at_work()
    assert not is_at_work()
    assert engine.ends == 1


def test_a_forked_child_answers_though_its_parent_had_the_pools_lock():
    with Pool(Engine(), of_tasks(None)) as pool:
        pool.wait(segments=1, timeout=DEADLINE_SECONDS)

        def body() -> None:
            assert pool.stats().segments >= 1
            assert "published" in repr(pool)
            with pytest.raises(ValueError, match="process that forked this one"):
                pool.wait(segments=1)
            with pool:
                pass
            pool.stop()

        with held_by_another_thread(pool), in_child(body):
            pass
        published = pool.stats().segments
        pool.wait(segments=published + 2, timeout=DEADLINE_SECONDS)  # it goes on here


# the end of the whole process

SCRIPT = """
    import os, sys, time
    import numpy.random  # what a loader imports; this swallows 3 % of the Ctrl-C that come within it
    import arrowcache as ac
    from helpers import sample

    def sampler(rng):
        while True:
            yield sample(int(rng.integers(1 << 20)))

    begun = sys.argv[1] + ".begun"

    def slow(rng):
        open(begun, "w").close()
        time.sleep(3600)
        yield {}

    if __name__ == "__main__":
        cache, how = ac.Cache.open(sys.argv[1]), sys.argv[2]
        of_loader = ac.Loader  # its module is imported here: Ctrl-C within that ends it with two tracebacks
        pool = ac.SamplerPool(cache, slow if how == "slow" else sampler, workers=2, progress=False)
        if how == "full":
            held = cache.snapshot()
            while cache.stats().waiting_writers < 2:
                time.sleep(0.01)
        elif how == "slow":
            while not os.path.exists(begun):
                time.sleep(0.01)
        elif how != "starting":
            pool.wait(segments=3, timeout=60)
        print("ready", flush=True)
        if how == "train":
            with pool, of_loader(cache, 8) as loader:
                while True:
                    for batch in loader:
                        pass
        while how in ("idle", "starting"):
            time.sleep(0.1)  # a signal just before a long one would not end it
        if how == "full":
            held.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["slow", "full"])  # a quick one: complaint 12
def test_an_interpreter_that_exits_without_stop_leaves_no_process(cache, how):
    if how == "full":
        publish(cache, 30)
    with Script(SCRIPT, cache.path, how, new_interpreter=True) as script:
        assert script.line() == "ready"
        code, errors = script.end()
        wait_until(lambda: not script.processes(), "the processes to end")
        assert (code, errors) == (0, "")
    assert cache.verify() == []


@pytest.mark.slow
def test_workers_with_a_slow_sampler_are_gone_within_5_s_after_their_parent_was_killed(cache):
    """Those of a script at work: complaint 1."""
    with Script(SCRIPT.replace('how in ("idle", "starting")', 'how == "slow"'), cache.path, "slow") as script:
        assert script.line() == "ready"
        wait_until(lambda: len(script.processes()) >= 3, "the workers to start")
        script.kill()
        script.all_end_awake(5)
    assert cache.verify() == []
    publish(cache, 1)
    assert os.listdir(cache.path / "incoming") == []
    assert cache.stats().leased_bytes == 0


ENDINGS = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy.random
    import arrowcache as ac
    from helpers import full, sample

    folder, seconds = Path(sys.argv[2]), float(sys.argv[3])

    def sampler(rng):
        Path(folder, "begun").touch()
        try:
            while True:
                yield sample(int(rng.integers(1 << 20)))
                Path(folder, "drawn").touch()
                time.sleep(seconds)
        finally:
            time.sleep(0.2)
            Path(folder, "closed").touch()

    if __name__ == "__main__":
        cache, loader = ac.Cache.open(sys.argv[1]), ac.Loader
        pool = ac.SamplerPool(cache, full(sampler), workers=1, progress=False)
        while not Path(folder, "drawn").exists():
            time.sleep(0.01)
        print("ready", flush=True)
        with pool:
            sys.stdin.readline()
            if sys.argv[4] == "os._exit":
                os._exit(1)
            if sys.argv[4] == "exit":
                sys.exit(1)
"""
DEATHS = ["SIGKILL", "SIGTERM", "SIGHUP to all", "SIGTERM to all", "Ctrl-C", "os._exit", "exit"]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 3600.0])
@pytest.mark.parametrize("how", DEATHS)
def test_samplers_end_well_however_the_pools_process_ends(large, tmp_path, how, seconds):
    is_end = how in ("Ctrl-C", "exit")  # of the interpreter itself
    with Script(ENDINGS, large.path, tmp_path, seconds, how, new_interpreter=is_end) as script:
        assert script.line() == "ready"
        if how == "Ctrl-C":
            script.signal_group(signal.SIGINT)
        elif how.endswith("to all"):
            script.signal_group(signal.Signals[how.split()[0]])
        elif how.startswith("SIG"):
            os.kill(script.pid, signal.Signals[how])
        else:
            script.say("")
        wait_until(lambda: not script.processes(), "all processes to end")
        assert (tmp_path / "closed").exists()
    assert large.verify() == []
    assert not writes(large)


@pytest.mark.slow
def test_a_worker_that_gets_sigterm_ends_well_and_costs_no_task(cache, tmp_path):
    sampler = closing(tmp_path, 3600.0, exiting=2.0)
    with SamplerPool(cache, sampler, workers=1, retries=1, progress=False) as pool:
        wait_until(lambda: signs(tmp_path / "begun"), "a sampler at work")
        (pid,) = signs(tmp_path / "begun")
        os.kill(int(pid), signal.SIGTERM)
        wait_until(lambda: len(signs(tmp_path / "begun")) == 2, "another process at work")
        assert signs(tmp_path / "closed") == signs(tmp_path / "exited") == [pid]
        assert (pool.stats().retries, pool.stats().failures) == (1, 0)


@pytest.mark.slow
def test_a_sampler_that_holds_the_gil_does_not_outlive_the_pools_process_for_long(large, tmp_path):
    code = ENDINGS.replace("time.sleep(seconds)", "import ctypes; ctypes.PyDLL(None).sleep(3600)")
    with Script(code, large.path, tmp_path, 0, "") as script:
        assert script.line() == "ready"
        wait_until(lambda: len(script.processes()) == 2, "the worker")
        script.kill()
        wait_until(lambda: not script.processes(), "the worker to end")


def workers_of(script: Script) -> list[str]:
    return [line.split()[0] for line in script.processes() if "arrowcache.sampling.workers" in line]


def is_deaf(pid: str) -> bool:
    """Whether SIGINT does nothing to a process, however young it is."""
    status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(status["SigBlk"], 16) | int(status["SigIgn"], 16)) & 1 << signal.SIGINT - 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["starting", "train"])  # an idle one: complaint 12
def test_ctrl_c_ends_all_processes_of_a_training_script_within_5_s(cache, how):
    with Script(SCRIPT, cache.path, how, new_interpreter=True) as script:
        assert script.line() == "ready"
        wait_until(lambda: len(workers_of(script)) == 2, "the workers")
        assert all(map(is_deaf, workers_of(script))), "Ctrl-C would end them, with a traceback"
        script.signal_group(signal.SIGINT)
        script.all_end_awake(5)
        code, errors = script.end()
        assert code == -signal.SIGINT
        assert errors.count("Traceback (most recent call last):") == 1, errors
        assert errors.rstrip().endswith("KeyboardInterrupt")
    assert cache.verify() == []
    publish(cache, 1)
    assert os.listdir(cache.path / "incoming") == []


@pytest.mark.slow
def test_pools_of_several_processes_share_their_numbers(cache):
    def sample(path):
        sampled(path, segments=6)

    with Child(sample, str(cache.path)) as one, Child(sample, str(cache.path)) as two:
        one.result(60)
        two.result(60)
    assert tasks(cache) == {number: expected(number) for number in range(12)}


@pytest.mark.parametrize(
    ("counts", "advice"),
    [
        ({"reading_seconds": 80.0, "cpu_seconds": 20.0}, "the store is the limit: more `reads`, or of HDF5"),
        ({"reading_seconds": 80.0, "cpu_seconds": 90.0}, "the processor is the limit: more workers"),
        ({"reading_seconds": 5.0, "cpu_seconds": 10.0}, r"the sampler itself waits: .*partial\(read, key\)"),
        (
            {"reading_seconds": 80.0, "read_retries": 60, "reads_done": 500},
            "the store does not answer many reads, 60 retries of 500 reads: fewer `reads`, or fewer workers$",
        ),
        ({"reading_seconds": 80.0, "read_retries": 40, "reads_done": 500}, "the store .*: more `reads`, .*"),
        ({"cpu_seconds": 60.0, "fetched_bytes": 49 << 20}, "4.9 bytes .*: if .* `windows_per_chunk`"),
        ({"reading_seconds": 80.0, "fetched_bytes": 49 << 20}, "the store .*; 4.9 bytes"),
        ({"reading_seconds": 80.0, "waiting_seconds": 200.0}, "$"),
        ({"reading_seconds": 40.0, "cpu_seconds": 40.0, "fetched_bytes": 12 << 20}, "$"),
        ({"reading_seconds": 0.5, "drawing_seconds": 0.6}, "$"),
    ],
)
def test_a_pool_says_what_would_make_it_faster(counts, advice):
    base = ac.PoolStats(3, 48, 10 << 20, 50.0, 0.0, 0, 0, drawing_seconds=100.0)
    stats = dataclasses.replace(base, **counts)
    assert re.match(advice, stats.advice)
    assert ("advice" in str(stats)) == bool(stats.advice)


@pytest.mark.slow
def test_statistics_are_shown_in_a_terminal_and_in_a_notebook(cache, threads):
    stats = ac.PoolStats(3, 48, 3 << 20, 2.0, 90.0, 1, 0)
    assert str(stats).splitlines() == [
        "published          3 segments, 48 rows, 3.0 MiB in 2.0 s (1.5 MiB/s, 24.0 rows/s)",
        "waited to publish  1.5 min, all workers together",
        "tasks              1 retry, 0 tasks given up",
    ]
    shown = seen(stats._repr_html_())
    assert "3 segments, 48 rows, 3.0 MiB in 2.0 s (1.5 MiB/s, 24.0 rows/s)" in shown.text
    assert "1 retry, 0 tasks given up" in shown.text
    assert "0 segments, 0 rows, 0 B in 0 s" in str(ac.PoolStats(0, 0, 0, 0.0, 0.0, 0, 0))
    with SamplerPool(cache, draws(), executor=threads, segments=1, **QUICK) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
        assert repr(pool).startswith("<SamplerPool published 1 segment, 1 row,")
        assert "\n" not in repr(pool)
