"""What a loader shows to other processes: the numbers of its stats, while it lives and no longer."""

from __future__ import annotations

import os
import resource
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers import face, limit, read_counters, wait_until
from processes import Child

from arrowcache import Loader
from arrowcache.reading.portion import ReadyBatch
from arrowcache.reading.stats import STAGES, Meter
from arrowcache.storage.counters import COUNTERS_LINK, TIMED, CounterPage, parse_counters
from arrowcache.storage.page import HEAD, read_page

NO_TIME = dict.fromkeys(TIMED, (0.0, ()))


def counter_pages(pid: int | str = "self") -> list[str]:
    """Descriptors of counter pages in a process."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if os.readlink(path) == COUNTERS_LINK:
                found.append(path)
        except FileNotFoundError:  # the one that listed them
            pass
    return found


def readouts(cache, pid: int | str = "self"):
    """What counter pages of this cache's loaders in a process show."""
    status = os.stat(cache.path)
    found = [read_counters(path) for path in counter_pages(pid)]
    return [shown for shown in found if shown and shown.cache == (status.st_dev, status.st_ino)]


def page_of(folder) -> bytes:
    """The page of the only loader of this folder, as its file has it."""
    status = os.stat(folder)
    (page,) = (
        page
        for page in map(read_page, counter_pages())
        if HEAD.unpack_from(page)[3:] == (status.st_dev, status.st_ino)
    )
    return page


def readout(cache, pid: int | str = "self"):
    (shown,) = readouts(cache, pid)
    return shown


@pytest.mark.parametrize("name", ["Loader", "torch.Loader"])
def test_a_loader_shows_what_its_stats_say(cache, name):
    with face(name)(cache, 16, shuffle="window", workers=2, worker_type="thread") as loader:
        for _ in range(2):
            assert len(list(loader)) == 10
        shown, stats = readout(cache), loader.stats()
    assert (shown.pid, shown.path, shown.workers) == (os.getpid(), str(cache.path), 2)
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
        assert max(STAGES, key=lambda stage: readout(cache).took[stage]) == "transform"
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


def shown_in(folder, after_seconds: float = 0.0):
    return parse_counters(page_of(folder), time.perf_counter() + after_seconds)


def test_a_wait_that_began_right_after_a_show_is_seen_with_what_it_is_for(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    limit(monkeypatch, clock=lambda: clock.now)
    page, meter = CounterPage.open(tmp_path, 0, None), Meter()
    meter.show_on(page)
    meter.begin_run("an epoch")
    with meter.waiting():
        clock.now += 0.001
        with meter.stage("store"):
            shown = parse_counters(page_of(tmp_path), clock.now + 9.0)
    assert (shown.waits, shown.took["stall"], shown.took["store"]) == (1, pytest.approx(9.001), 9.0)
    meter.end_run("an epoch")
    assert parse_counters(page_of(tmp_path), clock.now).took["seconds"] == pytest.approx(0.001)
    meter.show_on(None)


def test_what_others_do_for_it_is_shown_as_its_own(tmp_path):
    page, meter = CounterPage.open(tmp_path, 0, None), Meter()
    since = time.perf_counter() - 7
    meter.show_on(page, lambda: [("transform", since)])
    assert shown_in(tmp_path).took["transform"] >= 7
    meter.show_on(None)


def test_each_batch_is_shown_at_once_and_times_some_times_a_second_or_after_long_steps(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    limit(monkeypatch, clock=lambda: clock.now, wall_clock=lambda: clock.now)
    page, meter = CounterPage.open(tmp_path, 0, None), Meter()
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
        page = CounterPage.open(tmp_path, 0, "rows")
        meter.show_on(page)
        shown = shown_in(tmp_path, after_seconds=10)
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


def test_a_page_that_is_no_counter_page_is_passed_over(tmp_path):
    page = CounterPage.open(tmp_path, 3, None)
    data = bytearray(page_of(tmp_path))
    assert parse_counters(bytes(data), 0.0).workers == 3
    assert parse_counters(bytes(data[:-1]), 0.0) is None
    for position in (0, 16):  # magic, version
        other = data.copy()
        other[position] ^= 1
        assert parse_counters(bytes(other), 0.0) is None
    page.show((1, 2, 3, 4, 5), dict.fromkeys(TIMED, (float("nan"), [])))
    assert parse_counters(page_of(tmp_path), 0.0) is None
    page.close()
    page.show((1, 2, 3, 4, 5), NO_TIME)
    assert read_counters(tmp_path) is None, "a folder"
    assert read_counters(tmp_path / "missing") is None


def test_a_page_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    page = CounterPage.open(tmp_path, 0, None)
    pages = []
    for count in (1, 2, 2):
        page.show((count,) * 5, NO_TIME)
        pages.append(page_of(tmp_path))
    here, pread = threading.get_ident(), os.pread  # a thread of an earlier test may read, too

    def read(*file):
        return pages.pop(0) if threading.get_ident() == here else pread(*file)

    monkeypatch.setattr(os, "pread", read)
    assert read_counters("/dev/null").batches == 2
    assert pages == []
