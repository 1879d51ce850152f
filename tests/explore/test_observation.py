"""What one sees of a cache from outside: who leases, who waits and why, how loaders do."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time

import pytest
from helpers import loader_pages, make_cache, publish, wait_until
from processes import Child

import arrowcache as ac
from arrowcache import proc
from arrowcache.errors import LockTimeoutError
from arrowcache.explore.observation import FIRST_SEEN, PROCESS_START, UNSEEN, observe
from arrowcache.storage.counters import SamplerPage
from arrowcache.storage.locks import LockFile


@pytest.fixture
def events():
    """Two events for a child process."""
    context = multiprocessing.get_context("forkserver")
    return context.Event(), context.Event()


def hold_snapshot(path, ready, go_on):
    import arrowcache as ac

    with ac.Cache.open(path).snapshot(lambda segment: 2 <= segment.seq <= 5):
        ready.set()
        go_on.wait()


def test_it_counts_and_lists_what_the_cache_does(cache):
    seen = observe(cache)
    assert seen.stats == cache.stats()
    assert [segment.seq for segment in seen.segments] == list(range(10))
    assert (seen.path, seen.leases, seen.waiting, seen.loaders) == (cache.path, (), (), ())
    assert abs(seen.time - time.time()) < 60


def test_a_path_will_do(cache):
    assert observe(str(cache.path)).stats == cache.stats()


def test_nothing_is_leased_by_looking(cache):
    observe(cache)
    assert cache.stats().leased_bytes == 0


def test_a_lease_of_another_process_shows_who_holds_it_what_and_since_when(cache, events):
    ready, go_on = events
    empty = observe(cache)
    with Child(hold_snapshot, str(cache.path), ready, go_on) as child:
        assert ready.wait(60)
        alone = observe(cache)
        (lease,) = alone.leases
        assert (lease.pid, lease.first_seq, lease.last_seq, lease.segments) == (child.pid, 2, 5, 4)
        assert lease.nbytes == sum(s.allocated_bytes for s in alone.segments[2:6])
        assert lease.command == proc.command(child.pid)
        assert (lease.since, lease.since_is) == (proc.started(child.pid), PROCESS_START)

        (noticed,) = observe(cache, empty).leases
        assert noticed.since_is == FIRST_SEEN
        assert noticed.since > lease.since
        later = observe(cache, observe(cache, alone)).leases
        assert later == alone.leases, "what was there at first began no later"

        child.kill()
        assert observe(cache).leases == ()


def test_a_lease_that_gives_up_its_oldest_segments_stays_the_same(cache):
    with cache.snapshot() as snapshot:
        first = observe(cache, observe(cache))
        snapshot.release_oldest(4)
        second = observe(cache, first)
    (lease,) = second.leases
    assert (lease.first_seq, lease.last_seq, lease.segments) == (4, 9, 6)
    assert lease.since == first.leases[0].since


def test_a_new_lease_of_the_same_process_begins_when_it_is_seen(cache):
    with cache.snapshot():
        first = observe(cache)
    publish(cache, 1)
    with cache.snapshot():
        (lease,) = observe(cache, first).leases
    assert (lease.last_seq, lease.since_is) == (10, FIRST_SEEN)
    assert lease.since >= first.time


def test_what_no_process_is_seen_to_lease_is_shown_as_leased_by_an_unseen_one(cache, monkeypatch):
    """As another user's lease is."""

    def refuse(path, original=os.listdir):
        if re.fullmatch(r"/proc/\d+/fd", str(path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return original(path)

    with cache.snapshot(lambda segment: segment.seq >= 7):
        monkeypatch.setattr(os, "listdir", refuse)
        (lease,) = observe(cache).leases
    assert (lease.pid, lease.command, lease.first_seq, lease.last_seq) == (None, UNSEEN, 7, 9)
    assert lease.since_is == FIRST_SEEN


def test_an_evictors_lock_is_no_lease(cache):
    file = LockFile(cache.path / "lease.lock")
    assert file.try_range(3, 1, exclusive=True)
    assert [lease.command for lease in observe(cache).leases] in ([], [UNSEEN])
    file.close()


def test_a_lock_on_what_is_not_there_is_no_lease(cache):
    file = LockFile(cache.path / "lease.lock")
    assert file.try_range(2**62, 1, exclusive=False)
    assert observe(cache).leases == ()
    file.close()


def fill(path, started):
    from helpers import sample

    import arrowcache as ac

    with ac.Cache.open(path).writer() as writer:
        started.set()
        for number in range(10**6):
            writer.append(sample(number))


def test_a_waiting_writer_shows_for_whom_it_waits(cache, events):
    started, _ = events
    with cache.snapshot(lambda segment: segment.seq < 3), Child(fill, str(cache.path), started) as child:
        wait_until(lambda: observe(cache).waiting, "the writer to wait")
        seen = observe(cache)
        (writer,) = seen.waiting
        assert writer.pid == child.pid
        assert writer.command == proc.command(child.pid)
        assert proc.started(child.pid) <= writer.since <= seen.time
        assert writer.why.startswith(f"the oldest segment, 0, is leased by pid {os.getpid()} (")
        child.kill()
        assert observe(cache).waiting == ()


def test_a_loader_of_another_process_shows_its_stall_while_it_lasts(cache, events):
    ready, go_on = events

    def train(path, ready, go_on):
        import arrowcache as ac

        def hang(batch):
            if batch["id"].min() >= 0 and ready.is_set():
                go_on.wait()
            return batch

        with ac.Loader(path, 16, transform=hang, prefetch=1) as loader:
            for _ in loader.repeat():
                ready.set()

    with Child(train, str(cache.path), ready, go_on) as child:
        assert ready.wait(60)
        wait_until(lambda: [one for one in observe(cache).loaders if one.is_waiting], "a stall")
        (first,) = observe(cache).loaders
        wait_until(lambda: observe(cache).loaders[0].stall_seconds > first.stall_seconds + 0.2, "it to last")
        (loader,) = observe(cache).loaders
        assert (loader.pid, loader.key, loader.command) == (child.pid, first.key, first.command)
        assert (loader.workers, loader.shuffle, loader.epochs) == (0, "rows", 1)
        assert loader.rows == loader.batches * 16 == first.rows
        assert loader.bytes_per_second == loader.bytes / loader.seconds > 0
        wait_until(lambda: observe(cache).loaders[0].bottleneck == "transform", "the transform to be blamed")
        child.kill()
        assert observe(cache).loaders == ()


def test_loaders_of_another_cache_are_not_shown(cache, tmp_path):
    other = make_cache(tmp_path / "other")
    publish(other, 2)
    with ac.Loader(cache, 16) as mine, ac.Loader(other, 16) as its:
        list(mine)
        list(its)
        assert [loader.batches for loader in observe(cache).loaders] == [10]
        assert [loader.batches for loader in observe(other).loaders] == [2]


def test_a_page_shared_with_a_child_process_is_one_loader_of_its_owner(cache, monkeypatch):
    listdir = os.listdir
    with ac.Loader(cache, 16) as loader:
        list(loader)
        pages = [int(page.fd) for page in loader_pages()]
        with subprocess.Popen(["sleep", "600"], pass_fds=pages) as child:
            try:
                assert len(loader_pages(child.pid)) == len(pages)
                for step in (1, -1):  # whichever is seen first
                    monkeypatch.setattr(os, "listdir", lambda path, step=step: listdir(path)[::step])
                    assert [seen.pid for seen in observe(cache).loaders] == [os.getpid()]
            finally:
                child.kill()


def test_a_cache_that_is_gone_is_an_error_that_says_so(cache):
    os.rename(cache.path, cache.path.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError):
        observe(cache)


def test_a_stopped_process_that_holds_cache_lock_is_named_in_time(cache, events):
    ready, _ = events

    def hold(path, ready):
        import arrowcache as ac

        with ac.Cache.open(path).store.locked():
            ready.set()
            threading.Event().wait()

    with Child(hold, str(cache.path), ready) as child:
        assert ready.wait(60)
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(LockTimeoutError, match=f"held for over 0.01 s by pid {child.pid} "):
            observe(cache, lock_timeout=0.01)


def test_processes_that_are_gone_are_passed_over():
    with Child(os.getpid) as child:
        child.result()
        child.exit_code()
    assert proc.command(child.pid) == "unknown"
    assert proc.started(child.pid) is None
    assert child.pid not in {file.pid for file in proc.open_files()}


def test_a_process_began_after_the_machine_and_before_now():
    start = proc.started(os.getpid())
    assert time.time() - 86400 < start <= time.time() + 1


def test_a_sampler_at_work_shows_how_many_rows_it_has_drawn_and_not_published(cache):
    assert observe(cache).samplers == ()
    page = SamplerPage.open(cache.path, "default.0", 0)
    page.begin(3, 512)
    (seen,) = observe(cache).samplers
    assert (seen.rows, seen.full_rows, seen.last_row_seconds, seen.is_waiting) == (0, 512, None, False)
    page.skip()
    page.count(310, 512)
    (seen,) = observe(cache).samplers
    assert seen.skipped == 1
    assert (seen.pid, seen.pool, seen.task, seen.rows) == (os.getpid(), "default.0", 3, 310)
    assert seen.last_row_seconds < 60
    assert seen.command == proc.command(os.getpid())
    page.wait()
    assert [seen.is_waiting for seen in observe(cache).samplers] == [True]
    page.end()
    assert observe(cache).samplers == (), "between two tasks"
