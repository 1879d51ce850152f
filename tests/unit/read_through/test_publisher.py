"""Publisher: what it stores, and when, through the reader that has it."""

from __future__ import annotations

import errno
import os
import sys
import threading
from itertools import count
from signal import SIGINT, pthread_kill

import numpy as np
import pytest
from begun import own_threads
from helpers import KIB, wait_for_sleep, wait_until
from quick import in_part

import arrowcache as ac
from arrowcache.read_through import publisher
from arrowcache.read_through.item_index import INDEX
from arrowcache.read_through.publisher import IDLE_SECONDS, FailureBackoff
from arrowcache.read_through.read_through import ReadThrough
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.locks import LockFile
from arrowcache.storage.recovery import create_store
from arrowcache.storage.settings import CachedItems, settings_of

SCHEMA = ac.Schema({"x": ac.Tensor("float32", (1024,)), INDEX: ac.Tensor("int64")})
LENGTH = 500


def make_store(path, capacity=640 * KIB):
    items = CachedItems(LENGTH, "")
    settings = settings_of(SCHEMA, capacity, 64 * KIB, headroom=0.0, dataset=items)
    return create_store(path, settings, exist_ok=False)


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "cache")


@pytest.fixture
def reader(store):
    reader = ReadThrough(store, ["x"], FailureBackoff())
    yield reader
    reader.publisher.close()


def put(reader, index) -> bool:
    """Make an item. Returns: False: it is not stored."""
    claimed = reader.publisher.claim(np.array([index])).all()
    if claimed:
        reader.publisher.put(index, item(index))
    return bool(claimed)


def item(index):
    return {"x": np.full(1024, index, np.float32)}


def test_room_is_used_also_where_as_many_segments_are_there_as_when_there_was_none(store, reader):
    index = 0
    while put(reader, index):
        index += 1
    assert not reader.publisher.can_store
    reader.publisher.drain()
    before = len(store.segments())
    gone = store.evict(3 * 64 * KIB)
    for _ in gone:
        with ac.Cache(store).writer("raise") as writer:
            writer.append(x=np.zeros(1024, np.float32), _index=LENGTH - 1)
    assert len(store.segments()) == before
    assert reader.publisher.can_store
    assert put(reader, index)
    reader.publisher.publish()
    assert len(reader.find(np.array([index])).positions) == 1


def test_who_comes_to_a_full_cache_claims_nothing_until_there_is_room(store, reader):
    """A new process made items of a whole segment ready for storage before it found none."""
    index = 0
    while put(reader, index):
        index += 1
    reader.publisher.close()
    other = ReadThrough(store, ["x"], FailureBackoff())
    assert not put(other, index)
    store.evict(64 * KIB)
    assert put(other, index)
    other.publisher.close()


class SlowStore:
    """A store whose disk writes nothing until `writes` is set. The first `failures` segments are lost."""

    def __init__(self, store, failures=0):
        self._store, self._failures = store, failures
        self.unlisted = 0  # listings that fail from now on
        self.writes, self.asked = threading.Event(), threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._store, name)

    def segments(self):
        if self.unlisted:
            self.unlisted -= 1
            raise OSError(errno.EIO, "the folder is unreadable")
        return self._store.segments()

    def publish(self, *args, **options):
        self.asked.release()
        assert self.writes.wait(10)
        if self._failures:
            self._failures -= 1
            raise OSError(errno.EIO, "the disk is broken")
        return self._store.publish(*args, **options)


@pytest.fixture
def slow(store):
    return SlowStore(store)


@pytest.fixture
def beside(slow):
    reader = ReadThrough(slow, ["x"], FailureBackoff())
    yield reader
    slow.writes.set()
    reader.publisher.close()


def fill(reader, store, first=0) -> int:
    """Put items of one segment. Returns: the number of the next one."""
    after = first + store.settings.form.full_rows
    for index in range(first, after):
        assert put(reader, index)
    return after


def test_while_a_full_segment_is_written_the_next_one_fills_and_others_are_found(store, slow, beside):
    reader = beside
    slow.writes.set()
    after = fill(reader, store)
    reader.publisher.publish()
    slow.writes.clear()
    after = fill(reader, store, after)
    slow.asked.acquire(timeout=10)
    assert put(reader, after)
    assert len(reader.find(np.arange(after)).positions) == store.settings.form.full_rows
    slow.writes.set()
    reader.publisher.drain()
    assert reader.cached == after + 1


def test_who_fills_two_segments_waits_until_one_is_written(store, slow, beside):
    reader = beside
    after = fill(reader, store, fill(reader, store))
    putting = threading.Thread(target=put, args=(reader, after))
    putting.start()
    putting.join(1.5 * IDLE_SECONDS)  # so that the thread takes the reader for idle
    assert putting.is_alive()
    assert not store.segments()
    slow.writes.set()
    putting.join(10)
    reader.publisher.drain()
    assert reader.cached == after + 1


@pytest.mark.parametrize("end", ["drain", "close"])
def test_who_ends_it_waits_for_the_thread_that_writes(store, slow, beside, end):
    after = fill(beside, store)
    slow.asked.acquire(timeout=10)
    assert put(beside, after)
    ending = threading.Thread(target=getattr(beside.publisher, end))
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    slow.writes.set()
    ending.join(10)
    assert sum(segment.rows for segment in store.segments()) == after + 1


def test_where_a_full_segment_cannot_be_written_others_may_claim_what_is_unpublished(store, reader):
    slow = SlowStore(store, failures=1)
    failing = ReadThrough(slow, ["x"], FailureBackoff())
    after = fill(failing, store)
    assert put(failing, after)
    assert not reader.publisher.claim(np.arange(after + 1)).any()

    def end():
        slow.writes.set()
        failing.publisher.publish()

    with pytest.warns(RuntimeWarning, match="the disk is broken"):
        end()
    assert reader.publisher.claim(np.arange(after + 1)).all()
    assert not failing.publisher.can_store
    failing.publisher.close()
    assert not store.segments()


def test_the_end_of_a_write_discards_no_segment_that_filled_after_a_failure_elsewhere(store, slow, beside):
    """A batch is claimed before it is made."""
    rows = store.settings.form.full_rows
    assert beside.publisher.claim(np.arange(2 * rows)).all()
    for index in range(rows):
        beside.publisher.put(index, item(index))
    slow.asked.acquire(timeout=10)
    slow.unlisted = 1
    with pytest.warns(RuntimeWarning, match="the folder is unreadable"):
        assert not put(beside, 2 * rows)
    for index in range(rows, 2 * rows):
        beside.publisher.put(index, item(index))
    slow.writes.set()
    beside.publisher.drain()
    assert len(beside.find(np.arange(2 * rows)).positions) == 2 * rows


@pytest.mark.slow
def test_threads_that_put_and_publish_at_once_lose_nothing(tmp_path):
    """A full segment was overwritten by one that was handed over early."""
    reader = ReadThrough(make_store(tmp_path / "cache", 64 << 20), ["x"], FailureBackoff())
    ended, switching = threading.Event(), sys.getswitchinterval()

    def publish():
        while not ended.is_set():
            reader.publisher.publish()

    def put_all(first):
        for index in range(first, LENGTH, 4):
            assert put(reader, index)

    sys.setswitchinterval(1e-6)
    try:
        publishing = threading.Thread(target=publish)
        publishing.start()
        putting = [threading.Thread(target=put_all, args=(first,)) for first in range(4)]
        for thread in putting:
            thread.start()
        for thread in putting:
            thread.join()
        ended.set()
        publishing.join()
    finally:
        sys.setswitchinterval(switching)
    reader.publisher.drain()
    assert reader.cached == LENGTH
    reader.publisher.close()


@pytest.mark.slow
def test_to_rest_waits_for_no_threads_that_read(store, reader):
    assert put(reader, 3)
    reader.publisher.publish()
    ended = threading.Event()

    def read():
        while not ended.is_set():
            reader.find(np.array([3]))

    reading = [threading.Thread(target=read) for _ in range(3)]
    for thread in reading:
        thread.start()
    resting = threading.Thread(target=reader.publisher.drain)
    resting.start()
    resting.join(5)
    is_over = not resting.is_alive()
    ended.set()
    for thread in reading:
        thread.join()
    assert is_over


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_warning_that_is_an_error_claims_end_and_a_new_thread_publishes(store, reader):
    failing = SlowStore(store, failures=1)
    failing.writes.set()
    beside = ReadThrough(failing, ["x"], FailureBackoff())
    assert put(beside, 1)
    wait_until(lambda: put(reader, 1), "the claim to end, as the thread dies of the warning")
    beside.publisher.put(2, item(2))
    wait_until(store.segments, "another thread")
    beside.publisher.close()


def test_a_value_that_raises_a_value_error_is_no_item_that_is_too_large(reader):
    class Odd:
        @property
        def detach(self):
            raise ValueError("no array today")

    assert reader.publisher.claim(np.array([1])).all()
    with pytest.raises(ValueError, match="no array today"):
        reader.publisher.put(1, {"x": Odd()})


def test_what_is_published_early_needs_no_memory_for_the_next_segment(store, reader, monkeypatch):
    assert put(reader, 1)

    empty = np.empty

    def none_left(shape, *options):
        if shape == (store.settings.form.full_rows, 1024):
            raise MemoryError("no memory")
        return empty(shape, *options)

    monkeypatch.setattr(np, "empty", none_left)
    reader.publisher.publish()
    assert len(reader.find(np.array([1])).positions) == 1


def test_where_no_thread_can_be_started_items_are_stored_and_found(store, reader, monkeypatch):
    """As in threads that outlive the main one: since Python 3.12 they start no others."""

    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    after = fill(reader, store, fill(reader, store))
    assert put(reader, after)
    assert len(store.segments()) == 1, "who has filled two writes one"
    reader.publisher.publish()
    assert len(reader.find(np.arange(after + 1)).positions) == after + 1
    reader.publisher.drain()
    assert not store.stats().leased_bytes


def test_ctrl_c_while_the_thread_starts_leaves_one_thread(reader, monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(reader, 1)
    monkeypatch.undo()
    assert put(reader, 2)
    assert len(own_threads("arrowcache-publish")) == 1


def test_the_thread_lives_on_where_it_cannot_tell_who_waits(store, reader, monkeypatch):
    conflict = LockFile.conflict

    def fail(file, start, length):
        if start >= 2**62:  # a sign of the claims
            raise OSError(errno.ENOLCK, "no locks")
        return conflict(file, start, length)

    monkeypatch.setattr(LockFile, "conflict", fail)
    assert put(reader, 1)
    wait_until(store.segments, "the item to be published, a second later")


def test_who_cannot_tell_what_others_hold_makes_items(store, reader, monkeypatch):
    beside = ReadThrough(store, ["x"], FailureBackoff())
    assert beside.publisher.claim(np.array([1])).all()

    def fail(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(LockFile, "conflict", fail)
    reader.publisher.wait_for_others(np.array([1]), 60.0)
    reader.publisher.flush()
    monkeypatch.undo()
    beside.publisher.close()


@pytest.mark.no_cover
def test_after_ctrl_c_in_close_the_thread_publishes_what_is_left(store, slow, beside):
    after = fill(beside, store)
    slow.asked.acquire(timeout=10)
    assert put(beside, after)

    def press() -> None:
        wait_for_sleep()
        pthread_kill(threading.main_thread().ident, SIGINT)

    pressing = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        pressing.start()
        beside.publisher.close()
    pressing.join()
    slow.writes.set()
    wait_until(lambda: sum(segment.rows for segment in store.segments()) == after + 1, "the last item")


def test_of_readers_that_end_together_each_is_closed_whatever_another_raises(store):
    broken = SlowStore(store, failures=2)
    broken.writes.set()
    failing = [ReadThrough(broken, ["x"], FailureBackoff()) for _ in range(2)]
    for index, each in enumerate(failing):
        assert put(each, index)
    with pytest.raises(RuntimeWarning, match="the disk is broken"):
        publisher.close_all()
    beside = ReadThrough(store, ["x"], FailureBackoff())
    assert beside.publisher.claim(np.arange(2)).all()
    beside.publisher.close()


def test_a_signal_handler_may_publish_while_a_request_is_under_way(store, slow, beside):
    """It has the reader's lock then, which the thread that wrote waited for."""
    after = fill(beside, store)
    slow.asked.acquire(timeout=10)
    assert put(beside, after)

    def handler():
        del slow.segments
        slow.writes.set()
        beside.publisher.publish()
        return store.segments()

    slow.segments = handler
    asking = threading.Thread(target=beside.has, args=(np.arange(1),), daemon=True)
    asking.start()
    asking.join(10)
    assert not asking.is_alive()
    assert beside.cached == after + 1


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # it came in a destructor
def test_ctrl_c_at_any_call_loses_no_item_and_publishes_none_twice(tmp_path, monkeypatch):
    """Python raises it as a function begins, or after a call of one in C."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what was dropped
    calls, target = count(), 0
    parts = ("arrowcache/read_through", "arrowcache/storage", "arrowcache/arrow")

    def interrupt(frame, event, _):
        is_ours = any(part in frame.f_code.co_filename for part in parts)
        if is_ours and event in ("call", "c_return") and next(calls) == target:
            raise KeyboardInterrupt

    def passes(call, *arguments) -> bool:
        try:
            call(*arguments)
        except KeyboardInterrupt:
            return False
        return True

    while next(calls) >= target:  # the last run was interrupted
        target, calls = target + 23 * 3 // in_part(3), count()
        store = make_store(tmp_path / str(target), 4 << 20)
        reader = ReadThrough(store, ["x"], FailureBackoff())
        sys.setprofile(interrupt)
        try:
            done = [index for index in range(36) if passes(put, reader, index)]
            for end in (reader.publisher.publish, reader.publisher.drain, reader.publisher.close):
                passes(end)
        finally:
            sys.setprofile(None)
        reader.publisher.close()
        with Snapshot.take(store) as snapshot:
            published = snapshot.gather(np.arange(len(snapshot)), [INDEX])[INDEX].tolist()
        assert len({*published}) == len(published)
        assert {*done} <= {*published}


def test_a_cache_for_which_no_file_can_be_opened_says_what_to_do():
    backoff = FailureBackoff()
    with pytest.warns(RuntimeWarning, match=r"not stored: .*ulimit -n"):
        backoff.note(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "cache.lock"))
    assert "ulimit -n" in backoff.why
