"""Writers: what is taken is published, whatever happens in between."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest
from begun import own_threads
from helpers import make_cache, publish, published_ids, sample, segment_files, seqs, wait_until

import arrowcache as ac
from arrowcache.storage.folder import Folder
from arrowcache.storage.lease import Lease
from arrowcache.storage.locks import LockFile


@pytest.fixture
def cache(tmp_path):
    return make_cache(tmp_path / "cache")


@pytest.fixture
def full(cache):
    """A full cache whose oldest segment somebody else leases; the lease is closed to make room."""
    while not seqs(cache) or seqs(cache)[0] == 0:
        publish(cache, 1)
    lease = LockFile(cache.store.folder.lease_lock)
    assert lease.try_range(seqs(cache)[0], 1, exclusive=False)
    yield cache, lease
    lease.close()


def many(first, count):
    samples = [sample(number) for number in range(first, first + count)]
    return {"id": np.array([s["id"] for s in samples]), "image": np.stack([s["image"] for s in samples])}


def test_a_full_segment_is_published_at_once_and_the_rest_at_close(cache):
    with cache.writer() as writer:
        for number in range(40):
            writer.append(sample(number))
        assert published_ids(cache) == list(range(32))
    assert published_ids(cache) == list(range(40))


def test_samples_come_as_keywords_or_as_one_mapping(cache):
    with cache.writer() as writer:
        writer.append(**sample(0))
        writer.append(sample(1))
        writer.extend(**many(2, 2))
        writer.extend(many(4, 2))
    assert published_ids(cache) == list(range(6))


def test_extending_cuts_segments_where_appending_does(cache):
    with cache.writer() as writer:
        writer.extend(many(0, 5))
        writer.extend(many(5, 60))
        writer.extend({name: values[:0] for name, values in many(0, 1).items()})
    assert [path.name.split("-")[1] for path in segment_files(cache)] == ["16", "16", "16", "16", "1"]
    assert published_ids(cache) == list(range(65))


def test_nothing_is_published_without_a_sample(cache):
    with cache.writer():
        pass
    assert seqs(cache) == []


@pytest.mark.parametrize(
    "bad",
    [{}, {"id": 1}, sample(1) | {"more": 1}, sample(1) | {"id": 0.5},
     sample(1) | {"image": np.zeros((16, 16))}, sample(1) | {"image": np.zeros(256, np.float32)},
     sample(1) | {"id": None}],
)  # fmt: skip
def test_a_bad_sample_is_refused_and_nothing_taken_before_is_lost(cache, bad):
    with cache.writer() as writer:
        for number in range(20):
            writer.append(sample(number))
            with pytest.raises(ac.SchemaError):
                writer.append(bad)
    assert published_ids(cache) == list(range(20))


def test_a_sample_of_the_shape_of_many_is_refused_with_the_call_that_takes_them(tmp_path):
    cache = ac.Cache.create(tmp_path / "cache", ac.Schema({"x": ac.Tensor("int64", (2,))}), capacity="1MB")
    for many in (np.ones((3, 2), np.int64), [[1, 2], [3, 4]]):
        with cache.writer() as writer:
            with pytest.raises(ac.SchemaError, match=r"; many samples: extend\(\)$"):
                writer.append(x=many)
            writer.extend(x=many)
            assert writer.rows == len(many)


def test_one_bad_sample_of_many_refuses_all_of_them(cache):
    with cache.writer() as writer:
        writer.append(sample(0))
        with pytest.raises(ac.SchemaError):
            writer.extend(id=np.arange(3), image=np.zeros((2, 16, 16), np.float32))
    assert published_ids(cache) == [0]


def leave_by_an_exception(writer, count):
    with writer:
        for number in range(count):
            writer.append(sample(number))
        raise KeyError


def append_many(writer, count):
    for number in range(count):
        writer.append(sample(number))


def test_closing_and_aborting_are_idempotent_and_end_the_writer(cache):
    writer = cache.writer()
    writer.append(sample(0))
    writer.close()
    writer.close()
    writer.abort()
    assert published_ids(cache) == [0]
    for use in (lambda: writer.append(sample(1)), lambda: writer.extend(many(0, 1))):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_aborting_discards_what_is_not_yet_published(cache):
    writer = cache.writer()
    for number in range(20):
        writer.append(sample(number))
    writer.abort()
    writer.close()
    assert published_ids(cache) == list(range(16))


def test_leaving_by_an_exception_publishes_what_was_taken(cache):
    writer = cache.writer()
    with pytest.raises(KeyError):
        leave_by_an_exception(writer, 1)
    assert published_ids(cache) == [0]
    with pytest.raises(ValueError, match="closed"):
        writer.append(sample(1))


def test_leaving_by_an_exception_never_waits_for_room(full):
    cache, _ = full
    writer = cache.writer()
    with pytest.warns(RuntimeWarning, match="discarded 15 samples"), pytest.raises(KeyError):
        leave_by_an_exception(writer, 15)
    with pytest.raises(ValueError, match="closed"):
        writer.append(sample(1))


def test_leaving_by_an_exception_ends_the_writer_though_publishing_fails(cache, monkeypatch):
    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", broken)
    writer = cache.writer(max_delay=60)
    with pytest.warns(RuntimeWarning, match="Input/output"), pytest.raises(KeyError):
        leave_by_an_exception(writer, 1)
    assert own_threads("arrowcache-flush") == []
    with pytest.raises(ValueError, match="closed"):
        writer.append(sample(1))


@pytest.mark.parametrize("method", ["sync_segments", "link"])
def test_ctrl_c_once_a_segment_has_its_name_does_not_publish_its_rows_again(tmp_path, monkeypatch, method):
    """Syncing takes long, so Ctrl-C comes there often."""
    cache = make_cache(tmp_path / "cache", durable=True)
    original = getattr(Folder, method)

    def interrupted(*arguments):
        original(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    def write():
        with cache.writer() as writer:
            for number in range(15):
                writer.append(sample(number))
            monkeypatch.setattr(Folder, method, interrupted)
            writer.append(sample(15))

    with pytest.raises(KeyboardInterrupt):
        write()
    assert published_ids(cache) == list(range(16))
    assert os.listdir(cache.path / "incoming") == []


def test_a_warning_that_is_an_error_does_not_publish_rows_again(tmp_path, monkeypatch):
    cache = make_cache(tmp_path / "cache", durable=True)

    def failing(folder):
        monkeypatch.undo()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = cache.writer()
    for number in range(15):
        writer.append(sample(number))
    monkeypatch.setattr(Folder, "sync_segments", failing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="may be lost"):
            writer.append(sample(15))
    writer.close()
    assert published_ids(cache) == list(range(16))


def test_leaving_a_writer_that_was_aborted_publishes_nothing(cache):
    with cache.writer() as writer:
        writer.append(sample(0))
        writer.abort()
    assert seqs(cache) == []


def test_no_room_takes_no_sample_and_loses_none(full):
    cache, lease = full
    start = published_ids(cache)[-1] + 1
    taken = []
    with cache.writer(on_full="raise") as writer:
        for number in range(start, start + 40):
            try:
                writer.append(sample(number))
                taken.append(number)
            except ac.CacheFullError:
                if len(taken) == 16:
                    lease.close()
    assert len(taken) == 39
    assert published_ids(cache)[-39:] == taken


def test_no_room_for_many_says_how_many_were_taken(full):
    cache, lease = full
    start = published_ids(cache)[-1] + 1
    writer = cache.writer(on_full="raise")
    with pytest.raises(ac.CacheFullError, match="16 of 40 samples were taken"):
        writer.extend(many(start, 40))
    with pytest.raises(ac.CacheFullError):
        writer.close()
    lease.close()
    writer.extend(many(start + 16, 4))
    writer.close()
    assert published_ids(cache)[-20:] == list(range(start, start + 20))


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ac.CacheFormatError("damaged"), MemoryError()]
)
def test_an_append_that_raises_has_not_taken_its_sample(cache, monkeypatch, error):
    real, taken = os.link, []
    failing = True

    def link(source, target):
        if failing:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    writer = cache.writer()
    for number in range(20):
        try:
            writer.append(sample(number))
            taken.append(number)
        except type(error):
            pass
    with pytest.raises(type(error)):
        writer.close()
    failing = False
    writer.close()
    assert published_ids(cache) == taken


def test_a_wait_for_room_ends_at_its_timeout(full):
    cache, _ = full
    writer = cache.writer(timeout=0.02)
    for number in range(16):
        writer.append(sample(number))
    with pytest.raises(ac.CacheFullError, match="waited"):
        writer.append(sample(16))
    writer.abort()


def test_a_writer_waits_for_room_and_goes_on_when_there_is(full):
    cache, lease = full
    start = published_ids(cache)[-1] + 1
    barrier = threading.Event()

    def work():
        with cache.writer() as writer:
            for number in range(start, start + 40):
                writer.append(sample(number))
        barrier.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(lambda: cache.stats().waiting_writers == 1, "a waiting writer")
    finally:
        lease.close()
        thread.join(20)
    assert barrier.is_set()
    assert published_ids(cache)[-40:] == list(range(start, start + 40))


def test_a_writer_blocked_by_its_own_process_fails_instead_of_waiting(cache):
    while not seqs(cache) or seqs(cache)[0] == 0:
        publish(cache, 1)
    lease = Lease(cache.store.folder.lease_lock, seqs(cache)[0], seqs(cache)[-1])
    writer = cache.writer()
    with pytest.raises(ac.CacheFullError, match="this very process"):
        append_many(writer, 100)
    writer.abort()
    lease.close()


def test_a_part_filled_segment_is_published_after_max_delay(cache):
    with cache.writer(max_delay=0.01) as writer:
        writer.append(sample(0))
        wait_until(lambda: published_ids(cache) == [0], "the first part-filled segment")
        writer.append(sample(1))
        writer.append(sample(2))
        wait_until(lambda: published_ids(cache) == [0, 1, 2], "the second")
    assert own_threads("arrowcache-flush") == []
    assert published_ids(cache) == [0, 1, 2]


def test_max_delay_of_zero_publishes_at_once(cache):
    with cache.writer(max_delay=0) as writer:
        writer.append(sample(0))
        wait_until(lambda: published_ids(cache) == [0], "the sample")


def test_max_delay_does_not_wait_for_room_but_tries_again(full):
    cache, lease = full
    with cache.writer(max_delay=0.01, on_full="raise") as writer:
        writer.append(sample(12345))
        wait_until(lambda: len(own_threads("arrowcache-flush")) == 1, "the flusher")
        lease.close()
        wait_until(lambda: published_ids(cache)[-1] == 12345, "the sample")
    assert own_threads("arrowcache-flush") == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ac.CacheFormatError("damaged")])
def test_max_delay_survives_an_error_and_tries_again(cache, monkeypatch, error):
    real, calls = os.link, []

    def link(source, target):
        calls.append(target)
        if len(calls) == 1:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    with cache.writer(max_delay=0.01) as writer:
        writer.append(sample(0))
        wait_until(lambda: published_ids(cache) == [0], "the second attempt")


def test_no_thread_is_made_without_max_delay_or_without_a_sample(cache):
    with cache.writer() as plain, cache.writer(max_delay=60):
        plain.append(sample(0))
        assert own_threads("arrowcache-flush") == []


def test_several_threads_may_share_a_writer(cache):
    barrier = threading.Barrier(4)

    def work(first):
        barrier.wait(20)
        for number in range(first, first + 50):
            writer.append(sample(number))

    with cache.writer() as writer:
        threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    ids = published_ids(cache)
    assert sorted(ids) == sorted(first + n for first in range(0, 4000, 1000) for n in range(50))
    assert cache.verify() == []


def drop(writers):
    """Drop them, and wait for their threads: one of these may be the last to have its writer."""
    writers.clear()
    wait_until(lambda: not own_threads("arrowcache-flush"), "the end of the thread")


@pytest.mark.parametrize("max_delay", [None, 60])
def test_a_forgotten_writer_warns_and_ends_its_thread(cache, max_delay):
    writers = [cache.writer(max_delay=max_delay)]
    writers[0].append(sample(0))
    with pytest.warns(ResourceWarning, match="1 unpublished"):
        drop(writers)


def test_a_forgotten_writer_that_published_what_it_had_ends_its_thread_too(cache):
    writer = cache.writer(max_delay=0)
    writer.append(sample(0))
    wait_until(lambda: published_ids(cache) == [0], "the sample")
    del writer
    wait_until(lambda: not own_threads("arrowcache-flush"), "the end of the thread")


@pytest.mark.slow
@pytest.mark.parametrize("max_delay", [None, 60])
def test_a_writer_that_is_open_at_exit_warns(cache, max_delay):
    script = f"""
        import sys
        import arrowcache as ac
        writer = ac.Cache.open(sys.argv[1]).writer(max_delay={max_delay})
        writer.append(id=1, image=__import__("numpy").zeros((16, 16), "float32"))
    """
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", textwrap.dedent(script), cache.path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "a writer with 1 unpublished sample was not closed" in ended.stderr


def test_variable_rows_fill_a_segment_by_their_bytes(tmp_path):
    schema = ac.Schema({"id": ac.Tensor("int64"), "raw": ac.Binary()})
    cache = ac.Cache.create(tmp_path / "cache", schema, capacity="4MiB", segment_bytes="16KiB")
    with cache.writer() as writer:
        for number in range(40):
            writer.append(id=number, raw=bytes(3000))
        with pytest.raises(ValueError, match="larger segment_bytes"):
            writer.append(id=40, raw=bytes(20_000))
    assert published_ids(cache) == list(range(40))
    sizes = [path.stat().st_size for path in segment_files(cache)]
    assert max(sizes) <= 16 * 1024
    assert len(sizes) == 8, "five rows of 3012 bytes fit into 16 KiB"


def test_abort_ends_another_threads_wait_for_room(full):
    cache, _ = full
    writer, outcome = cache.writer(), []

    def fill():
        try:
            while True:
                writer.append(sample(0))
        except ValueError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=fill)
    thread.start()
    wait_until(lambda: cache.stats().waiting_writers, "the writer waits for room")
    writer.abort()
    thread.join(20)
    assert not thread.is_alive()
    assert "abort" in outcome[0] or "closed" in outcome[0]


def test_extending_by_nothing_takes_nothing(cache):
    with cache.writer() as writer:
        writer.extend(id=[], image=[])
        writer.append(sample(0))
    assert published_ids(cache) == [0]


def test_a_wait_without_bound_may_be_said_as_infinity(cache):
    with cache.writer(timeout=float("inf"), max_delay=float("inf")) as writer:
        writer.append(sample(0))
    assert published_ids(cache) == [0]
