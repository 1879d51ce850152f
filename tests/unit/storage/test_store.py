"""The protocol: publish, make room, lease, evict, resize; and what it says when it cannot."""

from __future__ import annotations

import errno
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (
    KIB,
    ROW,
    disk_bytes,
    limit,
    make_cache,
    publish,
    published_ids,
    sample,
    segment_files,
    seqs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache import linux
from arrowcache.arrow.segment import encode
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import FREED, MAX_SEQ, PART, ranks_name, segment_name
from arrowcache.storage.lease import Lease
from arrowcache.storage.locks import LockFile, once_unlocked
from arrowcache.storage.settings import BOOKKEEPING_BYTES, PART_SLACK_BYTES
from arrowcache.storage.store import Cancelled, RoomPolicy

RAISE = RoomPolicy("raise")


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.fixture
def other(cache):
    """A lock file of somebody else: stands for another process, since each description is its own."""
    file = LockFile(cache.store.folder.lease_lock)
    yield file
    file.close()


def segment(first=0, rows=16):
    samples = [sample(number) for number in range(first, first + rows)]
    images = np.stack([s["image"] for s in samples])
    return encode(ROW, {"id": np.array([s["id"] for s in samples]), "image": images})


def publish_many(cache, count):
    for _ in range(count):
        cache.store.publish(segment(), policy=RoomPolicy("wait", 5))


def fill(cache):
    """Publish until the oldest segment is evicted: the cache is full then."""
    while not seqs(cache) or seqs(cache)[0] == 0:
        publish(cache, 1)


@pytest.mark.parametrize("moment", ["while it is held", "while two are", "while it is let go", "afterwards"])
def test_an_errand_that_takes_the_lock_is_done_as_soon_as_this_thread_has_none(
    cache, tmp_path, monkeypatch, moment
):
    done, real = [], linux.set_lock

    def errand():
        with cache.store.locked(0):
            done.append(moment)

    def set_lock(*arguments):
        if moment == "while it is let go" and not done:
            once_unlocked(errand)
            assert not done
        real(*arguments)

    monkeypatch.setattr(linux, "set_lock", set_lock)
    with cache.store.locked():
        if moment == "while it is held":
            once_unlocked(errand)
            assert not done
        if moment == "while two are":
            with make_cache(tmp_path / "other").store.locked():
                once_unlocked(errand)
            assert not done
    if moment == "afterwards":
        once_unlocked(errand)
    assert done == [moment]


def test_the_garbage_collector_may_bring_an_errand_while_another_one_is_looked_for():
    done = []

    def collect(frame, event, argument):
        if frame.f_code.co_name == "is_locked":
            sys.setprofile(None)
            once_unlocked(lambda: done.append("the collector's"))

    before = sys.getprofile()
    sys.setprofile(collect)
    try:
        once_unlocked(lambda: done.append("ours"))
    finally:
        sys.setprofile(before)
    assert done == ["ours", "the collector's"]


def test_what_is_published_appears_whole_under_the_next_number(cache):
    published = [cache.store.publish(segment(first)).segment for first in (0, 16, 32)]
    assert [info.seq for info in published] == [0, 1, 2] == seqs(cache)
    assert published_ids(cache) == list(range(48))
    assert [info.name for info in published] == sorted(os.listdir(cache.path / "segments"))
    assert os.listdir(cache.path / "incoming") == []
    assert cache.store.segments() == published


@pytest.mark.slow
@pytest.mark.parametrize("do", [lambda cache: publish(cache, 1), lambda cache: cache.evict(1)])
@pytest.mark.parametrize("how", ["undisturbed", "swept", "being swept"])
def test_what_is_unlinked_counts_until_its_bytes_are_free(cache, monkeypatch, do, how):
    """It did not: a name is gone before its bytes are, and meanwhile another writer took their room.

    What counts in its place is made without cache.lock: so a sweep may come before it is locked.
    """
    fill(cache)
    unlink, beyond = Path.unlink, []
    lock, disturbed = LockFile.try_exclusive, []

    def locking(file):
        if file.path.suffix != FREED or how == "undisturbed" or disturbed:
            return lock(file)
        disturbed.append(file.path)
        unlink(file.path)
        return lock(file) if how == "swept" else False

    monkeypatch.setattr(LockFile, "try_exclusive", locking)

    def unlinking(path, **options):
        status = os.stat(path)
        nbytes = status.st_blocks * 512
        unlink(path, **options)
        if nbytes and status.st_nlink == 1:  # now they are being freed
            beyond.append(cache.store.folder.incoming_bytes() - nbytes)

    monkeypatch.setattr(Path, "unlink", unlinking)
    do(cache)
    assert beyond
    assert min(beyond) >= 0
    assert bool(disturbed) == (how != "undisturbed")
    monkeypatch.undo()
    assert os.listdir(cache.path / "incoming") == []


def test_a_task_is_published_once(cache):
    first = cache.store.publish(segment(0), task="pool.3")
    again = cache.store.publish(segment(0), task="pool.3")
    assert first.segment.task == "pool.3"
    assert again.segment is None
    assert seqs(cache) == [0]
    assert cache.store.publish(segment(0), task="pool.4").segment is not None
    assert cache.store.publish(segment(0)).segment is not None
    assert cache.store.publish(segment(0)).segment is not None, "a plain writer has no task to repeat"
    assert os.listdir(cache.path / "incoming") == []


def test_a_task_that_was_evicted_may_come_again(cache):
    cache.store.publish(segment(0), task="pool.3")
    cache.evict("1MiB")
    assert cache.store.publish(segment(0), task="pool.3").segment is not None


@pytest.mark.slow
def test_the_oldest_make_room_and_the_tree_never_exceeds_the_capacity(cache):
    capacity = cache.stats().capacity_bytes
    for number in range(120):
        publish(cache, 1)
        assert disk_bytes(cache.path) <= capacity
        found = seqs(cache)
        assert found == list(range(found[0], number + 1)), "strictly oldest first, without holes"
    assert found[0] > 0
    assert len(found) * segment().nbytes > capacity / 2, "a capacity that is not used is a defect too"
    assert cache.verify() == []


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=20, max_size=60))
def test_segments_of_any_size_stay_within_the_capacity(tmp_path_factory, kilobytes):
    schema = ac.Schema({"raw": ac.Binary()})
    path = tmp_path_factory.mktemp("cache")
    cache = ac.Cache.create(path, schema, capacity="2MiB", segment_bytes="400KiB", segment_rows=1)
    with cache.writer(on_full="raise") as writer:
        for size in kilobytes:
            writer.append(raw=bytes(size * KIB))
            assert disk_bytes(path) <= 2048 * KIB
    found = seqs(cache)
    assert found[-1] == len(kilobytes) - 1
    assert cache.verify() == []


def test_half_written_files_count_and_are_not_swept_while_their_writer_lives(cache):
    fill(cache)
    part = cache.store.folder.new_part()
    part.allocate(100 * KIB)
    before = len(seqs(cache))
    publish(cache, 1)
    assert len(seqs(cache)) < before - 3
    assert part.path.exists()
    assert disk_bytes(cache.path) <= cache.stats().capacity_bytes
    part.discard()


@pytest.mark.parametrize("what", ["a part", "a file in ranks", "what is quarantined"])
def test_what_nobody_needs_goes_before_any_segment(cache, what):
    fill(cache)
    living = cache.store.folder.link_ranks_file(ranks_name("living", 0, 0), b"")
    paths = {
        "a part": cache.path / "incoming" / f"{1:032x}.part",
        "a file in ranks": cache.path / "ranks" / ranks_name("dead", 0, 0),
        "what is quarantined": cache.path / "quarantine" / segment_files(cache)[0].name,
    }
    if what == "what is quarantined":
        cache.store.folder.isolate(paths[what].name, "test")
    else:
        cache.evict("200KiB")
        paths[what].write_bytes(bytes(200 * KIB))
    before = seqs(cache)
    publish(cache, 1)
    assert seqs(cache) == [*before, before[-1] + 1]
    assert not paths[what].exists()
    assert os.listdir(cache.path / "ranks") == [ranks_name("living", 0, 0)]
    living.close()


@pytest.mark.parametrize("what", ["a small file", "resize"])
def test_what_is_quarantined_leaves_for_a_file_and_for_a_smaller_capacity_too(cache, what):
    do, needs = ROOM[what]
    publish(cache, 6)
    cache.store.folder.isolate(segment_files(cache)[0].name, "test")
    capacity = cache.stats().allocated_bytes + needs(cache) - 1
    cache.store.folder.write_settings(cache.store.settings.with_capacity(capacity))
    assert do(cache) == 5
    assert cache.stats().quarantined == 0


def test_no_room_raises_at_once_if_told_so_with_fact_numbers_and_way_out(cache, other):
    fill(cache)
    assert other.try_range(seqs(cache)[0], 1, exclusive=False)
    with pytest.raises(ac.CacheFullError) as caught:
        cache.store.publish(segment(), policy=RAISE)
    message = str(caught.value)
    assert "segment needs 17." in message
    assert "0 B of 1.0 MiB can be freed" in message
    assert f"pid {os.getpid()}" in message
    assert "raise capacity" in message
    assert os.listdir(cache.path / "incoming") == []


def test_nothing_is_evicted_behind_a_leased_segment(cache, other):
    fill(cache)
    before = seqs(cache)
    assert other.try_range(before[2], 1, exclusive=False)
    for _ in range(2):
        publish(cache, 1)
    assert seqs(cache)[0] == before[2]
    with pytest.raises(ac.CacheFullError):
        cache.store.publish(segment(), policy=RAISE)
    assert seqs(cache)[0] == before[2]
    other.unlock_range(before[2], 1)
    publish(cache, 1)
    assert seqs(cache)[0] > before[2]


def test_a_wait_ends_at_its_timeout_and_says_how_long_it_was(cache, other):
    fill(cache)
    assert other.try_range(seqs(cache)[0], 1, exclusive=False)
    with pytest.raises(ac.CacheFullError, match=r"waited 0\.\d s for room: segment needs"):
        cache.store.publish(segment(), policy=RoomPolicy("wait", 0.05))
    assert os.listdir(cache.path / "incoming") == []


def test_a_wait_can_be_cancelled(cache, other):
    fill(cache)
    assert other.try_range(seqs(cache)[0], 1, exclusive=False)
    asked = []

    def is_cancelled():
        asked.append(cache.stats().waiting_writers)
        return len(asked) > 2

    with pytest.raises(Cancelled):
        cache.store.publish(segment(), policy=RoomPolicy("wait", None, is_cancelled))
    assert asked == [1, 1, 1]
    assert os.listdir(cache.path / "incoming") == []


def test_a_long_wait_warns_once_what_it_waits_for(cache, other, monkeypatch):
    limit(monkeypatch, lock_warning_seconds=0.0)
    fill(cache)
    assert other.try_range(seqs(cache)[0], 1, exclusive=False)
    with (
        pytest.warns(RuntimeWarning, match="waiting.*for room.*leased") as caught,
        pytest.raises(ac.CacheFullError),
    ):
        cache.store.publish(segment(), policy=RoomPolicy("wait", 0.2))
    assert len(caught) == 1


def test_a_writer_that_its_own_process_blocks_fails_instead_of_waiting(cache):
    fill(cache)
    lease = Lease(cache.store.folder.lease_lock, seqs(cache)[0], seqs(cache)[0])
    with pytest.raises(ac.CacheFullError, match=r"this very process.*close its snapshots"):
        cache.store.publish(segment(), policy=RoomPolicy("wait", None))
    lease.close()
    publish(cache, 1)


def test_a_lease_that_lets_go_on_contention_makes_room_and_one_that_is_ending_is_worth_waiting_for(cache):
    fill(cache)
    oldest = seqs(cache)[0]
    lease = Lease(cache.store.folder.lease_lock, oldest, oldest)
    lease.is_ending = True
    with pytest.raises(ac.CacheFullError, match="pass on_full='wait'"):
        cache.store.publish(segment(), policy=RAISE)
    lease.is_ending = False
    lease.on_contention = lease.close
    cache.store.publish(segment(), policy=RAISE)
    assert seqs(cache)[0] > oldest


def test_a_capacity_that_never_suffices_is_said_at_once(cache):
    cache.store.settings = cache.store.settings.with_capacity(64 * KIB)
    cache.store.folder.write_settings(cache.store.settings)
    with pytest.raises(ac.CacheFullError, match=r"never can be enough.*resize"):
        cache.store.publish(segment(), policy=RoomPolicy("wait", None))


def full_disk(monkeypatch, times, code=errno.ENOSPC):
    """Let posix_fallocate fail some times; returns the list of sizes that were asked for."""
    real, asked = os.posix_fallocate, []

    def fallocate(fd, offset, length):
        asked.append(length)
        if len(asked) <= times:
            real(fd, offset, length // 2)  # a failed reserve keeps what it got
            raise OSError(code, os.strerror(code))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    return asked


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "ftruncate", "posix_fallocate", "writev"])
def test_a_full_disk_evicts_the_oldest_and_tries_again(cache, monkeypatch, call, code):
    publish(cache, 6)
    real, failed = getattr(os, call), []

    def once(target, *arguments):
        if failed or (call == "open" and not str(target).endswith(".part")):
            return real(target, *arguments)
        failed.append(target)
        if call == "writev":
            real(target, arguments[0][:1])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, once)
    publish(cache, 1)
    assert failed
    assert seqs(cache) == list(range(1, 7))
    assert published_ids(cache) == list(range(16, 7 * 16))
    assert os.listdir(cache.path / "incoming") == []


def test_a_disk_that_stays_full_is_a_typed_error_and_leaves_nothing(cache, monkeypatch):
    publish(cache, 5)
    asked = full_disk(monkeypatch, 1000)
    with pytest.raises(ac.CacheFullError, match="the disk is full"):
        cache.store.publish(segment(), policy=RoomPolicy("wait", None))
    assert len(asked) == 4
    assert os.listdir(cache.path / "incoming") == []
    assert seqs(cache) == [3, 4], "up to three leave for room"


def test_a_full_disk_never_takes_a_leased_segment(cache, other, monkeypatch):
    publish(cache, 4)
    assert other.try_range(0, 1, exclusive=False)
    full_disk(monkeypatch, 1000)
    with pytest.raises(ac.CacheFullError, match="the disk is full"):
        cache.store.publish(segment(), policy=RAISE)
    assert seqs(cache) == [0, 1, 2, 3]


@pytest.mark.parametrize("call", ["posix_fallocate", "writev", "link"])
def test_any_other_error_passes_and_leaves_nothing(cache, monkeypatch, call):
    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(OSError, match="Input/output"):
            cache.store.publish(segment())
    assert os.listdir(cache.path / "incoming") == []
    assert seqs(cache) == []
    publish(cache, 1)
    assert cache.verify() == []


def test_a_held_lock_times_out_and_the_error_names_the_holder(cache):
    held = threading.Event()
    script = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(cache.store.folder.cache_lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        held.set()
        with (
            pytest.raises(ac.LockTimeoutError, match=f"pid {holder.pid} .*kill -CONT"),
            cache.store.locked(0.05),
        ):
            pass
    finally:
        holder.communicate("")
    with cache.store.locked(0.05):
        pass


def test_the_lock_is_let_go_when_its_body_raises(cache):
    with pytest.raises(KeyError), cache.store.locked():
        raise KeyError
    with cache.store.locked(0.0):
        pass


def test_a_lease_takes_what_is_published_and_says_so_in_the_statistics(cache):
    publish(cache, 3)
    segments, lease, *_ = cache.store.lease()
    assert [segment.seq for segment in segments] == [0, 1, 2]
    stats = cache.stats()
    assert stats.leased_bytes == stats.published_bytes > 0
    lease.close()
    assert cache.stats().leased_bytes == 0


def test_an_empty_cache_leases_nothing(cache):
    assert cache.store.lease() == ([], None, 0, 0)


def test_where_chooses_segments_and_a_failing_one_leaves_no_lease(cache):
    publish(cache, 6)
    segments, lease, *_ = cache.store.lease(lambda segment: segment.seq in (2, 4))
    assert [segment.seq for segment in segments] == [2, 4]
    file = LockFile(cache.store.folder.lease_lock)
    free = [seq for seq in range(6) if file.conflict(seq, 1) is None]
    file.close()
    assert free == [0, 1, 5], "the range is narrowed to what is read"
    lease.close()
    assert cache.store.lease(lambda segment: False)[:2] == ([], None)
    assert cache.stats().leased_bytes == 0
    with pytest.raises(KeyError):
        cache.store.lease(lambda segment: {}[segment.seq])
    assert cache.stats().leased_bytes == 0


def test_a_snapshot_of_a_full_cache_has_everything_and_leaves_no_room(tmp_path):
    cache = make_cache(tmp_path / "cache", headroom=0.3)
    fill(cache)
    with cache.snapshot() as snapshot:
        assert [segment.seq for segment in snapshot.segments] == seqs(cache)
        assert snapshot.left_out_rows == 0
        before = seqs(cache)
        with pytest.raises(ac.CacheFullError, match=f"oldest of them by pid {os.getpid()} .*this very"):
            publish_many(cache, 200)
        assert seqs(cache)[: len(before)] == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("since", "is_left"), [(None, False), (math.inf, False), (9.0, True), (0.0, True)],
    ids=["who looks", "first", "published since", "all since"],
)  # fmt: skip
def test_a_lease_yields_to_what_was_published_since(cache, since, is_left):
    fill(cache)
    assert cache.stats().next_seq > 9
    leased = cache.store.lease(yields_since=since)
    assert ([segment.seq for segment in leased.segments] != seqs(cache)) == is_left
    assert (leased.left_out_rows > 0) == is_left
    assert leased.next_seq == cache.stats().next_seq
    leased.lease.close()


def test_a_lease_yields_where_nothing_was_published_only_if_somebody_writes(cache):
    fill(cache)
    known = cache.stats().next_seq
    for _ in range(2):
        leased = cache.store.lease(yields_since=known)
        assert [segment.seq for segment in leased.segments] == seqs(cache)
        leased.lease.close()
        with cache.store.usage.show_writing():
            leased = cache.store.lease(yields_since=known)
            assert 0 < len(leased.segments) < len(seqs(cache))
            leased.lease.close()


def test_who_leaves_no_headroom_leaves_none_however_full_it_is(tmp_path):
    cache = make_cache(tmp_path / "cache", headroom=0)
    fill(cache)
    leased = cache.store.lease(yields_since=0)
    assert [segment.seq for segment in leased.segments] == seqs(cache)
    leased.lease.close()


def test_a_publish_shows_that_somebody_writes_while_it_waits(cache, other):
    fill(cache)
    assert other.try_range(seqs(cache)[0], 1, exclusive=False)
    shown = []

    def is_cancelled():
        shown.append(cache.store.usage.somebody_writes())
        return True

    with pytest.raises(Cancelled):
        cache.store.publish(segment(), policy=RoomPolicy("wait", None, is_cancelled))
    assert shown == [True]
    assert not cache.store.usage.somebody_writes()


def test_a_wait_for_room_is_counted_to_the_lease_that_covers_the_oldest_segment(cache, other):
    fill(cache)
    oldest = seqs(cache)[0]
    held_up, told = cache.store.held_up_seconds, []
    assert held_up(lambda seq: True) == 0, "nobody waits"
    assert other.try_range(oldest, 1, exclusive=False)

    def is_cancelled():
        told.append((held_up(lambda seq: seq == oldest), held_up(lambda seq: seq > oldest)))
        return told[-1][0] > 0

    with pytest.raises(Cancelled):
        cache.store.publish(segment(), policy=RoomPolicy("wait", None, is_cancelled))
    mine, of_others = told[-1]
    assert mine > 0
    assert of_others == 0
    assert held_up(lambda seq: True) == 0


def test_an_epochs_lease_of_a_full_cache_leaves_the_headroom_to_writers(tmp_path):
    cache = make_cache(tmp_path / "cache", headroom=0.3)
    fill(cache)
    with Snapshot.take(cache.store, yields_since=0) as snapshot:
        leased = [segment.seq for segment in snapshot.segments]
        skipped = [seq for seq in seqs(cache) if seq not in leased]
        assert skipped == seqs(cache)[: len(skipped)]
        assert leased == seqs(cache)[len(skipped) :]
        freed = cache.stats().capacity_bytes - cache.stats().leased_bytes
        assert freed >= 0.3 * cache.stats().capacity_bytes
        publish(cache, len(skipped))  # goes on while the snapshot is read
        assert snapshot.gather([0])["id"][0] == leased[0] * 16
        with pytest.raises(ac.CacheFullError, match=f"oldest of them by pid {os.getpid()} .*this very"):
            publish_many(cache, 200)


def test_a_snapshot_of_a_half_empty_cache_reads_all_of_it(cache):
    publish(cache, 10)
    with cache.snapshot() as snapshot:
        assert [segment.seq for segment in snapshot.segments] == list(range(10))


def test_evicting_frees_at_least_what_was_asked_for_and_says_how_much(cache):
    publish(cache, 6)
    one = cache.store.segments()[0].allocated_bytes
    before = disk_bytes(cache.path)
    assert cache.evict(one + 1) == 2 * one
    assert seqs(cache) == [2, 3, 4, 5]
    assert disk_bytes(cache.path) == before - 2 * one
    assert cache.evict("1GB") == 4 * one
    assert cache.evict(1) == 0


@pytest.mark.slow
def test_shrinking_evicts_at_once_and_holds_for_every_process(cache):
    elsewhere = ac.Cache.open(cache.path)
    publish(cache, 40)
    cache.resize("512KiB")
    assert disk_bytes(cache.path) <= 512 * KIB
    assert elsewhere.stats().capacity_bytes == 512 * KIB
    publish(elsewhere, 30)
    assert disk_bytes(cache.path) <= 512 * KIB
    assert ac.Cache.open(cache.path).stats().capacity_bytes == 512 * KIB
    elsewhere.resize("2MiB")
    publish(cache, 60)
    assert disk_bytes(cache.path) > 1024 * KIB
    assert cache.verify() == []


def test_shrinking_below_what_is_leased_changes_nothing(cache):
    publish(cache, 40)
    before = seqs(cache)
    with (
        cache.snapshot(),
        pytest.raises(ac.CacheFullError, match=r"a capacity of .* needs .* to be freed, and .* can be"),
    ):
        cache.resize("256KiB")
    assert seqs(cache) == before
    assert cache.stats().capacity_bytes == 1024 * KIB
    cache.resize("256KiB")
    assert disk_bytes(cache.path) <= 256 * KIB


def test_statistics_agree_with_the_folder(cache):
    empty = cache.stats()
    assert (empty.segments, empty.rows, empty.oldest_seq, empty.next_seq) == (0, 0, None, 0)
    publish(cache, 5)
    cache.evict(1)
    cache.store.folder.isolate(min(os.listdir(cache.path / "segments")), "test")
    part = cache.store.folder.new_part()
    part.allocate(50 * KIB)
    stats = cache.stats()
    assert (stats.segments, stats.rows, stats.oldest_seq, stats.next_seq) == (3, 48, 2, 5)
    assert (stats.quarantined, stats.waiting_writers, stats.leased_bytes) == (1, 0, 0)
    assert stats.incoming_bytes >= 50 * KIB
    assert stats.published_bytes == sum(
        os.stat(path).st_blocks * 512 for path in (cache.path / "segments").iterdir()
    )
    slack = stats.allocated_bytes - disk_bytes(cache.path)
    assert 0 <= slack <= 64 * KIB
    part.discard()


def test_a_lease_in_pieces_is_counted_exactly(cache, other):
    publish(cache, 9)
    for seq in (1, 2, 5, 8):
        assert other.try_range(seq, 1, exclusive=False)
    one = cache.store.segments()[0].allocated_bytes
    assert cache.stats().leased_bytes == 4 * one


def test_many_threads_publish_each_under_a_number_of_its_own(cache):
    barrier = threading.Barrier(4)
    failures = []

    def work(first):
        try:
            barrier.wait(20)
            for number in range(8):
                cache.store.publish(segment(first + 16 * number), task=f"p.{first + number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert seqs(cache) == list(range(32))
    assert cache.verify() == []


@pytest.mark.slow
def test_nothing_is_evicted_in_vain(cache, other):
    publish_many(cache, 100)  # until the cache is full
    first, second, *_ = seqs(cache)
    assert other.try_range(second, 1, exclusive=False)
    before = seqs(cache)
    large = encode(ROW, {"id": np.arange(48), "image": np.zeros((48, 16, 16), np.float32)})
    with pytest.raises(ac.CacheFullError):
        cache.store.publish(large, policy=RAISE)
    assert seqs(cache) == before, f"dropping {first} alone made no room"


def test_a_small_file_in_a_full_cache_evicts_as_much_as_it_needs(cache):
    fill(cache)
    before = seqs(cache)
    with cache.store.locked():
        cache.store.require_room(200 * KIB)
        file = cache.store.folder.link_ranks_file(ranks_name("job", 0, 0), bytes(200 * KIB))
    assert disk_bytes(cache.path) <= 1024 * KIB
    assert before[-5:] == seqs(cache)[-5:]
    assert 0 < len(before) - len(seqs(cache)) <= 200 // 20 + 1
    file.close()


def test_a_small_file_evicts_nothing_in_vain(cache, other):
    fill(cache)
    before = seqs(cache)
    assert other.try_range(before[2], 1, exclusive=False)
    with (
        cache.store.locked(),
        pytest.raises(ac.CacheFullError, match=r"a file of 300.0 KiB needs .* to be freed, and 40.0 KiB"),
    ):
        cache.store.require_room(300 * KIB)
    assert seqs(cache) == before


def test_of_two_files_with_one_number_only_one_is_a_segment(cache):
    publish(cache, 3)
    paths = segment_files(cache)
    other = paths[1].with_name(segment_name(1, 17, "other"))
    shutil.copy(paths[2], other)
    for each in (cache, ac.Cache.open(cache.path)):  # one that knew it before, and one that did not
        assert [segment.seq for segment in each.store.segments()] == [0, 1, 2]
        with each.snapshot() as snapshot:
            assert snapshot.gather(range(48))["id"].tolist() == list(range(48))
    assert [problem.name for problem in cache.verify()] == [f"segments/{other.name}"]
    early = paths[1].with_name(segment_name(1, 1, ""))  # sorts before it
    shutil.copy(paths[2], early)
    with cache.snapshot() as snapshot:
        assert snapshot.gather(range(48))["id"].tolist() == list(range(48))


@pytest.mark.parametrize("seq", [MAX_SEQ, 2**63, 2**64, 10**20 - 1])
def test_a_number_that_no_segment_has_is_a_foreign_name(cache, seq):
    publish(cache, 1)
    name = segment_name(seq, 16, "")
    shutil.copy(segment_files(cache)[0], cache.path / "segments" / name)
    again = ac.Cache.open(cache.path)
    with again.snapshot() as snapshot:
        assert len(snapshot) == 16
    publish(again, 1)
    assert [problem.name for problem in again.verify()] == [f"segments/{name}"]


def test_publishing_ends_with_the_last_number_and_says_so(cache):
    publish(cache, 1)
    segment_files(cache)[0].rename(cache.path / "segments" / segment_name(MAX_SEQ - 1, 16, ""))
    again = ac.Cache.open(cache.path)
    with again.snapshot() as snapshot:
        assert snapshot.gather(range(16))["id"].tolist() == list(range(16))
    with pytest.raises(ac.CacheFormatError, match=f"{MAX_SEQ - 1}"):
        again.store.publish(segment())
    assert again.stats().incoming_bytes == 0


def test_a_damaged_counter_is_found_anew_when_the_cache_is_opened(cache):
    publish(cache, 2)
    (cache.path / "cache.lock").write_bytes(b"\xff" * 52)
    again = ac.Cache.open(cache.path)
    publish(again, 1)
    *old, new = seqs(again)
    assert old == [0, 1]
    assert new > 2, "numbers of segments that were evicted may be lost"
    assert again.verify() == []


def test_who_only_looks_asks_about_each_file_before_it_takes_the_lock(cache, monkeypatch):
    looking = ac.Cache.open(cache.path)
    publish_many(cache, 5)
    asked, lstat = [], os.lstat

    def noting(path, **options):
        if str(path).endswith(".arrow"):
            with LockFile(cache.store.folder.cache_lock) as lock:
                asked.append(lock.try_exclusive())
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", noting)
    assert looking.stats().segments == 5
    assert asked == [True] * 5


def test_what_is_being_unlinked_counts_once(tmp_path, monkeypatch):
    """Neither with a part's slack, nor together with the part that stands for it while the disk frees it."""
    with make_cache(tmp_path / "cache", capacity="1MiB", segment_bytes="32KiB") as cache:
        publish(cache, 40)
        before, seen = cache.stats(), []
        unlink = Path.unlink

        def unlink_and_look(path, **options):
            looks = str(path).endswith(".gone")  # else under cache.lock
            seen.extend(cache.stats() for _ in range(looks))
            unlink(path, **options)
            seen.extend(cache.stats() for _ in range(looks))

        monkeypatch.setattr(Path, "unlink", unlink_and_look)
        cache.evict(8 * 32768)
        assert len(seen) > 10
        assert max(stats.allocated_bytes for stats in seen) <= before.allocated_bytes
        publish(cache, 40)
        assert max(stats.allocated_bytes for stats in seen) <= before.capacity_bytes


def test_what_is_listed_after_changes_is_what_is_listed_anew(cache):
    """Only new names are looked up: whatever came and went, and in which order."""
    folder, rng = cache.store.folder.segments, np.random.default_rng(0)
    publish(cache, 1)
    data = next(folder.iterdir()).read_bytes()
    for _ in range(60):
        seq = int(rng.integers(50))
        names = [name for name in os.listdir(folder) if name.startswith(f"{seq:020d}")]
        if names:
            (folder / names[0]).unlink()
        else:
            (folder / segment_name(seq, 16, "")).write_bytes(data)
        (folder / "zebra").write_bytes(bytes(10_000))
        anew = ac.Cache.open(cache.path).store
        assert cache.store.segments() == anew.segments()
        assert cache.store.allocated_bytes([]) == anew.allocated_bytes([])


def file_bytes_of(cache, nbytes):
    """What a file of so many bytes takes on the disk."""
    block = os.statvfs(cache.path).f_frsize
    return -(-nbytes // block) * block


def publish_and_count(cache):
    publish(cache, 1)
    return len(seqs(cache)) - 1


def require(cache, nbytes):
    with cache.store.locked():
        cache.store.require_room(nbytes)
    return len(seqs(cache))


def resize(cache, nbytes):
    cache.resize(cache.store.folder.read_settings().capacity_bytes)
    return len(seqs(cache))


SEGMENT_BYTES = segment().nbytes
ROOM = {  # what is done in a cache of six segments, and how much room it needs to cost none of them
    "publish": (
        lambda cache: publish_and_count(cache),
        lambda cache: file_bytes_of(cache, SEGMENT_BYTES) + PART_SLACK_BYTES + BOOKKEEPING_BYTES,
    ),
    "a small file": (lambda cache: require(cache, 1), lambda cache: 2 * file_bytes_of(cache, 1)),
    "a file": (lambda cache: require(cache, 8193), lambda cache: 4 * file_bytes_of(cache, 1)),
    "resize": (lambda cache: resize(cache, 0), lambda cache: 2 * PART_SLACK_BYTES),
}


@pytest.mark.parametrize("what", ROOM)
def test_a_segment_leaves_where_a_byte_is_lacking_and_not_before(cache, what):
    do, needs = ROOM[what]
    publish(cache, 6)
    capacity = cache.stats().allocated_bytes + needs(cache)
    for spare, left in ((0, 6), (-1, 5)):
        cache.store.folder.write_settings(cache.store.settings.with_capacity(capacity + spare))
        assert do(cache) == left
        if what == "publish":
            cache.store.take_back(lambda listed: listed[-1:])


def test_what_is_quarantined_leaves_where_a_byte_is_lacking_and_not_before(cache):
    publish(cache, 6)
    for name in sorted(os.listdir(cache.path / "segments"))[:3]:
        cache.store.folder.isolate(name, "test")
    (one, *_), allocated = cache.store.segments(), cache.stats().allocated_bytes
    with cache.store.locked():
        assert cache.store.drop_quarantined(allocated) == 0
        cache.store.settings = cache.store.settings.with_capacity(allocated + BOOKKEEPING_BYTES // 2)
        assert cache.store.drop_quarantined() == 0
        assert len(cache.store.folder.quarantined_names()) == 3
        reason = file_bytes_of(cache, 1)
        assert cache.store.drop_quarantined(allocated - 1) == 1 - one.allocated_bytes - reason
        assert cache.store.drop_quarantined(0) > 0
        assert cache.store.folder.quarantined_names() == []


@pytest.mark.parametrize("what", ["capacity", "disk"])
def test_a_pace_keeps_no_writer_while_a_segment_finds_room_to_the_last_byte(cache, monkeypatch, what):
    cache.set_pace(ac.Pace(samples_per_insert=1))
    publish(cache, 4)
    store, allocated = cache.store, cache.stats().allocated_bytes
    needed = store.settings.segment_bytes + PART_SLACK_BYTES + BOOKKEEPING_BYTES
    for spare in (0, -1):
        if what == "capacity":
            store.folder.write_settings(store.settings.with_capacity(allocated + needed + spare))
        else:
            free = SimpleNamespace(f_bavail=needed + spare, f_bfree=2**40, f_frsize=1)
            monkeypatch.setattr(os, "statvfs", lambda path, free=free: free)
        assert bool(cache.stats().paced) == (spare < 0)


def test_a_wait_asks_ever_less_often_and_says_how_long_it_was(cache, other, monkeypatch):
    fill(cache)
    assert other.try_range(seqs(cache)[0], 1, exclusive=False)
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 8:
            other.close()

    monkeypatch.setattr(time, "sleep", sleep)
    published = cache.store.publish(segment(), policy=RoomPolicy("wait", 50))
    assert pauses == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.2, 0.2]
    assert 0 < published.waiting_seconds < 50


def test_the_lock_is_asked_for_ever_less_often(cache, monkeypatch):
    holder, pauses = LockFile(cache.store.folder.cache_lock), []
    assert holder.try_exclusive()

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 30:
            holder.close()

    monkeypatch.setattr(time, "sleep", sleep)
    with cache.store.locked(50):
        pass
    most = [min(0.0005 * 2**n, 0.02) for n in range(30)]
    assert all(each / 2 <= pause <= each for pause, each in zip(pauses, most, strict=True))
    assert len({pause / each for pause, each in zip(pauses, most, strict=True)}) > 20, "no two in step"


def test_each_file_is_asked_about_once_also_ahead_and_again_only_if_it_was_not_there(cache, monkeypatch):
    publish(cache, 5)
    asked, lstat, missing = [], os.lstat, []

    def noting(path, **options):
        if str(path).endswith(".arrow"):
            asked.append(path)
            if missing:
                raise missing.pop()
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", noting)
    store = ac.Cache.open(cache.path).store
    store.look_anew()
    asked.clear()
    steps = store.look_ahead()
    next(steps)
    assert asked == []
    next(steps)
    assert len(asked) == 5
    assert [*steps] == []
    assert [len(store.segments()) for _ in range(2)] == [5, 5]
    assert len(asked) == 5
    publish(cache, 2)
    asked.clear()
    missing.append(FileNotFoundError())
    assert [len(store.segments()) for _ in range(3)] == [6, 7, 7]
    assert len(asked) == 3


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_cache_syncs_a_segments_bytes_and_then_its_name(tmp_path, monkeypatch, durable):
    cache = make_cache(tmp_path / "cache", durable=durable)
    synced = []

    def fsync(fd):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        if synced[-1] == "segments":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    if durable:
        with pytest.warns(
            RuntimeWarning, match="may be lost if the machine stops now: .*Input/out"
        ) as caught:
            assert cache.store.publish(segment()).segment is not None
        assert [warning.filename for warning in caught] == [__file__]
        assert synced[0].endswith(".part")
        assert synced[1:] == ["segments"]
    else:
        cache.store.publish(segment())
        assert synced == []
    assert seqs(cache) == [0]


@pytest.mark.parametrize("is_linked", [True, False])
def test_ctrl_c_tells_whether_a_segment_is_visible(cache, monkeypatch, is_linked):
    link, told = os.link, []

    def interrupted(*arguments, **options):
        if is_linked:
            link(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.store.publish(segment(), on_visible=lambda: told.append(True))
    assert told == [True] * is_linked
    assert len(seqs(cache)) == is_linked
    assert os.listdir(cache.path / "incoming") == []


def test_who_is_told_of_a_visible_segment_is_told_again_where_ctrl_c_cuts_that_short(cache):
    """A builder had its rows still, and published them twice."""
    told = []

    def clear():
        told.append(True)
        if len(told) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.store.publish(segment(), on_visible=clear)
    assert len(told) == 2


@pytest.mark.parametrize("suffix", [PART, FREED])
def test_what_another_writer_has_begun_is_worth_waiting_for(cache, suffix):
    cache.store.folder.write_settings(cache.store.settings.with_capacity(64 * KIB))
    part = cache.store.folder.new_part()
    part.path.rename(part.path.with_suffix(suffix))
    with pytest.raises(ac.CacheFullError, match="or pass on_full='wait'"):
        cache.store.publish(segment(), policy=RAISE)
    part.file.close()
    with pytest.raises(ac.CacheFullError, match="never can be enough"):
        cache.store.publish(segment(), policy=RAISE)


def test_only_a_capacity_that_is_raised_beyond_the_disk_is_warned_of(cache, monkeypatch):
    free = SimpleNamespace(f_bavail=1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    cache.store.resize(1024 * KIB)
    cache.store.resize(512 * KIB)
    with pytest.warns(RuntimeWarning, match="the disk has"):
        cache.store.resize(512 * KIB + 1)
