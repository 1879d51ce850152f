"""Progress: what samplers have drawn and not published, seen from any process of the same user."""

from __future__ import annotations

import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from helpers import DEADLINE_SECONDS, KIB, full, make_cache, open_files, publish, wait_until
from helpers import sample as row

import arrowcache as ac
from arrowcache import SamplerPool
from arrowcache.storage.progress import Progress, State, seen_samplers, shown_pool

QUICK = {"progress": False, "workers": 1}


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


def at_work(cache):
    return [each for each in seen_samplers(cache.path) if each.state != State.IDLE]


def stops_after(rows, gate):
    """A sampler that waits for a gate after so many rows. Made here, so that it is pickled by value."""

    def sampler(rng):
        for number in range(rows):
            yield row(number)
        while not os.path.exists(gate):
            time.sleep(0.01)
        while True:
            yield row(0)

    return full(sampler)


EXECUTORS = {
    "its own processes": lambda: None,
    "threads": lambda: ThreadPoolExecutor(1),
    "processes": lambda: ProcessPoolExecutor(1, mp_context=get_context("forkserver")),
}


@pytest.mark.slow
@pytest.mark.parametrize("executor", [*EXECUTORS])
def test_rows_that_are_drawn_and_not_published_are_seen_with_any_executor(cache, tmp_path, executor):
    gate = tmp_path / "gate"
    executor = EXECUTORS[executor]()
    before = time.monotonic()
    pool = SamplerPool(cache, stops_after(5, gate), executor=executor, segments=1, **QUICK)
    wait_until(lambda: [each.rows for each in at_work(cache)] == [5], "5 rows to be seen")
    (seen,) = at_work(cache)
    assert (seen.pool, seen.task, seen.full_rows, seen.state) == ("default.0", 0, 16, State.DRAWS)
    assert before < seen.last_row < time.monotonic()
    assert (seen.pid == os.getpid()) == isinstance(executor, ThreadPoolExecutor)
    wait_until(lambda: pool.stats().drawn_rows == 5, "the pool to say so")
    assert "drawn, not published  5 rows" in str(pool.stats())
    assert pool.stats().rows == 0
    gate.touch()
    pool.wait(timeout=DEADLINE_SECONDS)
    assert at_work(cache) == []
    assert (pool.stats().rows, pool.stats().drawn_rows) == (16, 0)
    pool.stop()
    if executor is not None:
        executor.shutdown()


def test_a_sampler_that_waits_for_room_says_so(cache):
    publish(cache, 30)
    with cache.snapshot(), ThreadPoolExecutor(1) as executor:
        sampler = full(lambda rng: map(row, range(16)))
        with SamplerPool(cache, sampler, executor=executor, **QUICK):
            wait_until(lambda: [each.state for each in at_work(cache)] == [State.WAITS], "it to wait")
            assert [(each.rows, each.full_rows) for each in at_work(cache)] == [(16, 16)]


@pytest.mark.slow
def test_of_texts_it_says_how_many_rows_the_segment_will_have_about(tmp_path):
    gate = tmp_path / "gate"
    cache = make_cache(
        tmp_path / "cache", ac.Schema({"text": ac.String()}), segment_rows=None, segment_bytes=64 * KIB
    )

    def sampler(rng):
        for _ in range(9):
            yield {"text": "x" * 996}
        while not os.path.exists(gate):
            time.sleep(0.01)

    with SamplerPool(cache, full(sampler), **QUICK):
        wait_until(lambda: [each.rows for each in at_work(cache)] == [9], "9 rows to be seen")
        assert [each.full_rows for each in at_work(cache)] == [64 * KIB // 1000]


def test_only_the_samplers_of_a_cache_are_seen_and_of_two_pools_each_counts_its_own(tmp_path):
    gate = tmp_path / "gate"
    caches = [make_cache(tmp_path / name) for name in ("one", "two")]
    with ThreadPoolExecutor(3) as executor:
        pools = [
            SamplerPool(cache, stops_after(rows, gate), executor=executor, **QUICK)
            for cache, rows in [(caches[0], 3), (caches[0], 4), (caches[1], 5)]
        ]
        wait_until(lambda: [pool.stats().drawn_rows for pool in pools] == [3, 4, 5], "all to be seen")
        assert sorted(each.rows for each in at_work(caches[0])) == [3, 4]
        assert [each.rows for each in at_work(caches[1])] == [5]
        gate.touch()
        for pool in pools:
            pool.stop()


def test_a_task_is_seen_as_soon_as_it_begins_and_without_the_rows_of_the_one_before(cache):
    progress = Progress.open(cache.path, "default.0", 0)
    for task in (7, 8):
        progress.begin(task, 16)
        (seen,) = seen_samplers(cache.path)
        assert (seen.task, seen.rows, seen.full_rows, seen.state) == (task, 0, 16, State.DRAWS)
        progress.count(3, 16)
    progress.close()


def test_without_memfd_samplers_work_unseen(cache, monkeypatch):
    def refuse(*_):
        raise OSError(38, "no such call")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with ThreadPoolExecutor(1) as executor:
        sampler = full(lambda rng: map(row, range(16)))
        with SamplerPool(cache, sampler, executor=executor, segments=2, **QUICK) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            assert pool.stats().segments == 2
    assert seen_samplers(cache.path) == []


def test_a_page_of_numbers_that_no_sampler_shows_is_passed_over(cache):
    progress = Progress.open(cache.path, "default.0", 0)
    for task, rows, full_rows in [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (0, 2**62, 0), (0, 0, 2**62)]:
        progress.begin(task, full_rows)
        progress.count(rows, full_rows)
        assert seen_samplers(cache.path) == []
    for task, rows, full_rows in [(0, 1, 2), (2**62, 2**62 - 1, 2**62 - 1)]:
        progress.begin(task, full_rows)
        progress.count(rows, full_rows)
        (seen,) = seen_samplers(cache.path)
        assert (seen.task, seen.rows, seen.full_rows) == (task, rows, full_rows)


def test_of_a_long_name_a_page_shows_the_beginning(cache):
    progress = Progress.open(cache.path, "x" * 63 + "yz", 5)
    assert [(each.pool, each.token) for each in seen_samplers(cache.path)] == [("x" * 63 + "y", 5)]
    assert shown_pool("x" * 63 + "yz") == "x" * 63 + "y"
    pages = [fd for fd, link in open_files() if "memfd:arrowcache-sampler " in link]
    assert {os.fstat(fd).st_size for fd in pages} == {4096}, "that of another test, too, if it lives"
    progress.close()


def test_a_process_that_is_nearly_out_of_descriptors_shows_nothing(cache, monkeypatch):
    fd = os.dup(0)
    os.close(fd)
    for limit, is_shown in ((fd + 33, True), (fd + 32, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, 2**20))
        page = Progress.open(cache.path, "default.0", 0)
        assert (page is not None) == is_shown
        page = None


def test_samplers_of_a_folder_that_is_gone_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        seen_samplers(tmp_path / "no such")


def test_threads_of_one_executor_have_a_page_each(cache, tmp_path):
    gate = tmp_path / "gate"
    with (
        ThreadPoolExecutor(3) as executor,
        SamplerPool(cache, stops_after(2, gate), workers=3, executor=executor, progress=False) as pool,
    ):
        wait_until(lambda: [each.rows for each in at_work(cache)] == [2, 2, 2], "three samplers")
        assert {each.task for each in at_work(cache)} == {0, 1, 2}
        gate.touch()
        pool.wait(segments=3, timeout=DEADLINE_SECONDS)
