"""Counters: what loaders and samplers show to other processes of the same user, while they live."""

from __future__ import annotations

import os
import resource
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from helpers import (
    DEADLINE_SECONDS,
    KIB,
    face,
    full,
    limit,
    loader_pages,
    make_cache,
    open_files,
    publish,
    shown_loaders,
    wait_until,
)
from helpers import sample as row
from processes import Child

import arrowcache as ac
from arrowcache import Loader, SamplerPool
from arrowcache.proc import OpenFile
from arrowcache.reading.assembly import ReadyBatch
from arrowcache.reading.stats import STAGES, Meter
from arrowcache.storage.counters import (
    LOADER_LINK,
    TIMED,
    WAITS,
    LoaderPage,
    SamplerPage,
    SamplerState,
    seen_loaders,
    seen_samplers,
    shown_pool,
)

QUICK = {"progress": False, "workers": 1}
NO_TIME = dict.fromkeys(TIMED, (0.0, ()))
NO_WAITS = [0] * (len(WAITS) + 1)


@pytest.fixture
def cache(tmp_path, filled):
    return filled(160, tmp_path / "cache")


@pytest.fixture
def empty(tmp_path):
    return make_cache(tmp_path / "empty")


# loaders


def readouts(cache, pid=None):
    return shown_loaders(cache.path, pid)


def readout(cache, pid=None):
    (shown,) = readouts(cache, pid)
    return shown


def shown_in(folder, now=None):
    (shown,) = shown_loaders(folder, now=now)
    return shown


@pytest.mark.parametrize("name", ["Loader", "torch.Loader"])
def test_a_loader_shows_what_its_stats_say(cache, name):
    with face(name)(cache, 16, shuffle="window", workers=2, worker_type="thread") as loader:
        for _ in range(2):
            assert len(list(loader)) == 10
        shown, stats = readout(cache), loader.stats()
    assert (shown.pid, shown.workers) == (os.getpid(), 2)
    assert shown.shuffle == "window"
    assert (shown.epochs, shown.batches, shown.rows, shown.bytes) == (2, 20, 320, stats.bytes)
    assert shown.stalls == stats.stalls
    assert shown.took["seconds"] == pytest.approx(stats.seconds)
    assert shown.took["stall"] == pytest.approx(stats.stall_seconds)
    assert shown.waits == 0
    assert shown.took["transform"] == pytest.approx(stats.transform_seconds)


def test_a_loader_shows_itself_from_its_first_epoch_to_its_end(cache):
    loader = Loader(cache, 16)
    assert readouts(cache) == []
    epoch = iter(loader)
    assert readout(cache).epochs == 1
    next(epoch)
    assert readout(cache).batches == 1
    loader.close()
    assert readouts(cache) == []
    loader.close()


def test_a_dropped_loader_shows_nothing_any_more(cache):
    loader = Loader(cache, 16)
    list(loader)
    assert len(readouts(cache)) == 1
    del loader
    wait_until(lambda: not readouts(cache), "the loader to be gone")


def test_a_stall_rises_while_it_lasts_for_whoever_looks(cache):
    go_on = threading.Event()

    def hang(batch):
        go_on.wait()
        return batch

    with Loader(cache, 16, transform=hang) as loader:
        consumer = threading.Thread(target=lambda: next(iter(loader)))
        consumer.start()
        wait_until(
            lambda: readouts(cache) and readout(cache).took["transform"] > 0.1, "the transform to hang"
        )
        wait_until(lambda: readout(cache).waits == 1, "the consumer to wait")
        first = readout(cache)
        wait_until(lambda: readout(cache).took["stall"] > first.took["stall"] + 0.1, "the stall to rise")
        assert first.batches == 0
        wait_until(  # the start may have taken seconds, too
            lambda: max(STAGES, key=lambda stage: readout(cache).took[stage]) == "transform", "the longest"
        )
        go_on.set()
        consumer.join()
        assert (readout(cache).waits, readout(cache).batches) == (0, 1)


@pytest.mark.slow
def test_what_a_worker_process_hangs_in_is_seen_while_it_does(cache):
    def hang(batch):
        import threading

        threading.Event().wait()

    with Loader(cache, 16, transform=hang, workers=1, timeout=None) as loader:

        def consume():
            with suppress(RuntimeError):  # the loader was closed
                list(loader)

        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        wait_until(lambda: readouts(cache) and readout(cache).took["transform"] > 0.1, "the hang")
        loader.close()
        consumer.join()


def test_a_wait_that_began_right_after_a_show_is_seen_with_what_it_is_for(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    limit(monkeypatch, clock=lambda: clock.now)
    page, meter = LoaderPage.open(tmp_path, 0, None), Meter()
    meter.show_on(page)
    meter.begin_run("an epoch")
    with meter.waiting():
        clock.now += 0.001
        with meter.stage("store"):
            shown = shown_in(tmp_path, clock.now + 9.0)
    assert (shown.waits, shown.took["stall"], shown.took["store"]) == (1, pytest.approx(9.001), 9.0)
    meter.end_run("an epoch")
    assert shown_in(tmp_path, clock.now).took["seconds"] == pytest.approx(0.001)
    meter.show_on(None)


def test_what_others_do_for_it_is_shown_as_its_own(tmp_path):
    page, meter = LoaderPage.open(tmp_path, 0, None), Meter()
    since = time.perf_counter() - 7
    meter.show_on(page, lambda: [("transform", since)])
    assert shown_in(tmp_path).took["transform"] >= 7
    meter.show_on(None)


def test_each_batch_is_shown_at_once_and_times_some_times_a_second_or_after_long_steps(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    limit(monkeypatch, clock=lambda: clock.now, wall_clock=lambda: clock.now)
    page, meter = LoaderPage.open(tmp_path, 0, None), Meter()
    meter.show_on(page)

    meter.begin_run("an epoch")

    def step(train_seconds: float, wait_seconds: float = 0.0) -> None:
        with meter.waiting():
            clock.now += wait_seconds
            if wait_seconds:
                meter.show()
        meter.deliver(ReadyBatch({}, 16, 1000, 0, 0.0, None))
        assert shown_in(tmp_path).batches == meter.batches, "a burst before a pause would stay unseen"
        clock.now += train_seconds

    gathered = set()
    for _ in range(40):
        meter.leave({"gather": 1.0})
        step(0.01)
        gathered.add(shown_in(tmp_path).took["gather"])
    assert len(gathered) in (4, 5)
    step(60.0)
    step(60.0, wait_seconds=1.0)
    assert (shown_in(tmp_path).waits, shown_in(tmp_path).took["stall"]) == (0, 1.0)
    meter.end_run("an epoch")
    meter.show_on(None)


def test_what_was_counted_before_is_shown_at_once(tmp_path):
    meter = Meter()
    meter.begin_epoch()
    with meter.stage("samplers"), meter.waiting():
        page = LoaderPage.open(tmp_path, 0, "rows")
        meter.show_on(page)
        shown = shown_in(tmp_path, time.perf_counter() + 10)
    assert (shown.epochs, shown.waits) == (1, 1)
    assert shown.took["stall"] >= 10
    assert shown.took["samplers"] >= 10
    meter.show_on(None)
    assert not page.is_open


def test_another_process_sees_it_until_it_is_killed(cache):
    def train(path: str) -> None:
        loader = Loader(path, 16)
        for _ in loader.repeat():
            pass

    with Child(train, str(cache.path)) as child:
        wait_until(lambda: readouts(cache, child.pid), "the child's loader")
        wait_until(lambda: readout(cache, child.pid).epochs >= 2, "an epoch")
        shown = readout(cache, child.pid)
        assert shown.pid == child.pid
        assert shown.rows == shown.batches * 16 >= 160
        child.kill()
    assert not os.path.exists(f"/proc/{child.pid}/fd")


def test_without_memfd_a_loader_works_unseen(cache, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with Loader(cache, 16) as loader:
        assert len(list(loader)) == 10
        assert readouts(cache) == []


def test_a_loader_that_is_nearly_out_of_descriptors_keeps_them_for_itself(cache):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 30, hard))
        with Loader(cache, 16) as loader:
            assert len(list(loader)) == 10
            assert readouts(cache) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_page_that_is_no_loaders_is_passed_over(tmp_path):
    page = LoaderPage.open(tmp_path, 3, None)
    (file,) = (each for each in loader_pages() if seen_loaders(tmp_path, [each]))
    fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
    assert shown_in(tmp_path).workers == 3
    assert os.pread(fd, 4096, 1024).rstrip(b"\0") == os.fsencode(tmp_path)
    for position in (0, 16, 32, 40):  # magic, version, device, inode
        (byte,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([byte ^ 1]), position)
        assert shown_loaders(tmp_path) == []
        os.pwrite(fd, bytes([byte]), position)
    os.ftruncate(fd, 4095)
    assert shown_loaders(tmp_path) == []
    os.ftruncate(fd, 4096)
    assert shown_in(tmp_path).workers == 3
    os.close(fd)
    page.show((1, 2, 3, 4, 5), dict.fromkeys(TIMED, (float("nan"), [])), NO_WAITS)
    assert shown_loaders(tmp_path) == []
    page.close()
    page.show((1, 2, 3, 4, 5), NO_TIME, NO_WAITS)
    assert seen_loaders(tmp_path, [file]) == [], "its descriptor is closed"


def test_a_descriptor_that_cannot_be_read_is_passed_over(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    assert seen_loaders(tmp_path, [OpenFile(os.getpid(), str(fd), LOADER_LINK)]) == [], "a folder"
    os.close(fd)


def test_a_page_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    page = LoaderPage.open(tmp_path, 0, None)
    (file,) = (each for each in loader_pages() if seen_loaders(tmp_path, [each]))
    pages = []
    for count in (1, 2, 2):
        page.show((count,) * 5, NO_TIME, NO_WAITS)
        with open(f"/proc/self/fd/{file.fd}", "rb") as content:
            pages.append(content.read())
    here, pread = threading.get_ident(), os.pread  # a thread of an earlier test may read, too

    def read(*args):
        return pages.pop(0) if threading.get_ident() == here else pread(*args)

    monkeypatch.setattr(os, "pread", read)
    assert [shown.batches for shown in seen_loaders(tmp_path, [file])] == [2]
    assert pages == []


# samplers


def at_work(empty):
    return [each for each in seen_samplers(empty.path) if each.state != SamplerState.IDLE]


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
def test_rows_that_are_drawn_and_not_published_are_seen_with_any_executor(empty, tmp_path, executor):
    gate = tmp_path / "gate"
    executor = EXECUTORS[executor]()
    before = time.monotonic()
    pool = SamplerPool(empty, stops_after(5, gate), executor=executor, segments=1, **QUICK)
    wait_until(lambda: [each.rows for each in at_work(empty)] == [5], "5 rows to be seen")
    (seen,) = at_work(empty)
    assert (seen.pool, seen.task, seen.full_rows, seen.state) == ("default.0", 0, 16, SamplerState.DRAWS)
    assert before < seen.last_row < time.monotonic()
    assert (seen.pid == os.getpid()) == isinstance(executor, ThreadPoolExecutor)
    wait_until(lambda: pool.stats().drawn_rows == 5, "the pool to say so")
    assert "drawn, not published  5 rows" in str(pool.stats())
    assert pool.stats().rows == 0
    gate.touch()
    pool.wait(timeout=DEADLINE_SECONDS)
    assert at_work(empty) == []
    assert (pool.stats().rows, pool.stats().drawn_rows) == (16, 0)
    pool.stop()
    if executor is not None:
        executor.shutdown()


def test_a_sampler_that_waits_for_room_says_so(empty):
    publish(empty, 30)
    with empty.snapshot(), ThreadPoolExecutor(1) as executor:
        sampler = full(lambda rng: map(row, range(16)))
        with SamplerPool(empty, sampler, executor=executor, **QUICK):
            wait_until(lambda: [each.state for each in at_work(empty)] == [SamplerState.WAITS], "it to wait")
            assert [(each.rows, each.full_rows) for each in at_work(empty)] == [(16, 16)]


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


def test_a_task_is_seen_as_soon_as_it_begins_and_without_the_rows_of_the_one_before(empty):
    page = SamplerPage.open(empty.path, "default.0", 0)
    for task in (7, 8):
        page.begin(task, 16)
        (seen,) = seen_samplers(empty.path)
        assert (seen.task, seen.rows, seen.full_rows, seen.state) == (task, 0, 16, SamplerState.DRAWS)
        page.count(3, 16)
    page.close()


def test_without_memfd_samplers_work_unseen(empty, monkeypatch):
    def refuse(*_):
        raise OSError(38, "no such call")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with ThreadPoolExecutor(1) as executor:
        sampler = full(lambda rng: map(row, range(16)))
        with SamplerPool(empty, sampler, executor=executor, segments=2, **QUICK) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
            assert pool.stats().segments == 2
    assert seen_samplers(empty.path) == []


def test_a_page_of_numbers_that_no_sampler_shows_is_passed_over(empty):
    page = SamplerPage.open(empty.path, "default.0", 0)
    for task, rows, full_rows in [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (0, 2**62, 0), (0, 0, 2**62)]:
        page.begin(task, full_rows)
        page.count(rows, full_rows)
        assert seen_samplers(empty.path) == []
    for task, rows, full_rows in [(0, 1, 2), (2**62, 2**62 - 1, 2**62 - 1)]:
        page.begin(task, full_rows)
        page.count(rows, full_rows)
        (seen,) = seen_samplers(empty.path)
        assert (seen.task, seen.rows, seen.full_rows) == (task, rows, full_rows)


def test_of_a_long_name_a_page_shows_the_beginning(empty):
    page = SamplerPage.open(empty.path, "x" * 63 + "yz", 5)
    assert [(each.pool, each.token) for each in seen_samplers(empty.path)] == [("x" * 63 + "y", 5)]
    assert shown_pool("x" * 63 + "yz") == "x" * 63 + "y"
    pages = [fd for fd, link in open_files() if "memfd:arrowcache-sampler " in link]
    assert {os.fstat(fd).st_size for fd in pages} == {4096}, "that of another test, too, if it lives"
    page.close()


def test_a_process_that_is_nearly_out_of_descriptors_shows_nothing(empty, monkeypatch):
    fd = os.dup(0)
    os.close(fd)
    for most, is_shown in ((fd + 33, True), (fd + 32, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=most: (most, 2**20))
        page = SamplerPage.open(empty.path, "default.0", 0)
        assert page.is_open == is_shown
        page = None


def test_samplers_of_a_folder_that_is_gone_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        seen_samplers(tmp_path / "no such")


def test_threads_of_one_executor_have_a_page_each(empty, tmp_path):
    gate = tmp_path / "gate"
    with (
        ThreadPoolExecutor(3) as executor,
        SamplerPool(empty, stops_after(2, gate), workers=3, executor=executor, progress=False) as pool,
    ):
        wait_until(lambda: [each.rows for each in at_work(empty)] == [2, 2, 2], "three samplers")
        assert {each.task for each in at_work(empty)} == {0, 1, 2}
        gate.touch()
        pool.wait(segments=3, timeout=DEADLINE_SECONDS)
