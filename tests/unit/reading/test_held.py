"""What the kernel holds, at the faces of reading: memory, mapping, lease stay; Ctrl-C waits for no disk."""

from __future__ import annotations

import _thread
import mmap
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import face, held_by_another_thread, ids_of, in_child, limit, make_cache, mapped_seqs, wait_until
from plain_rows import threads as engine_threads
from slow_pages import SlowPages, require_slow_pages

import arrowcache as ac
from arrowcache.native import engine
from arrowcache.native.engine import threads as of_process
from arrowcache.reading import gather
from arrowcache.reading.assembly import Memory
from arrowcache.reading.slots import Slots

ROWS = 96  # six segments


@pytest.fixture
def pages() -> Iterator[SlowPages]:
    """Pages that come when they are let go."""
    require_slow_pages()
    made = SlowPages(are_held=True)
    yield made
    made.let_go()


def slow(pages: SlowPages, nbytes: int) -> Any:
    """Memory of such pages."""
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    array = np.frombuffer(mmap.mmap(-1, whole), np.uint8)
    pages.replace(array.ctypes.data, whole)
    return array[:nbytes]


@contextmanager
def ctrl_c_in_a_wait(monkeypatch: pytest.MonkeyPatch, pages: SlowPages) -> Iterator[None]:
    """Ctrl-C comes once this thread sleeps in the engine and a page is held, which nobody could wait for."""
    limit(monkeypatch, stuck_seconds=3600.0)
    main, number, real = threading.get_ident(), threading.get_native_id(), engine.library.engine_take
    waits = threading.Event()

    def engine_take(*arguments: Any) -> int:
        waits.set()
        return int(real(*arguments))

    def press() -> None:
        assert pages.touched.wait(60)
        assert waits.wait(60)
        task = Path(f"/proc/self/task/{number}/stat")
        wait_until(lambda: task.read_text().rpartition(")")[2].split()[0] == "S", "it to sleep")
        signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(engine.library, "engine_take", engine_take)
    with engine_threads(1), ThreadPoolExecutor(1) as pool:
        pressed = pool.submit(press)
        yield
        pressed.result(60)
        assert pages.brought == 0
        pages.let_go()


@pytest.mark.no_cover
def test_ctrl_c_in_a_gather_waits_for_no_disk(cache, pages, monkeypatch):
    out = {"image": slow(pages, 8 * 1024).view(np.float32).reshape(8, 16, 16)}
    snapshot = cache.snapshot()
    with ctrl_c_in_a_wait(monkeypatch, pages):
        with pytest.raises(KeyboardInterrupt):
            snapshot.gather(range(8), ["image"], out)
        snapshot.close()
        assert mapped_seqs(cache) == [0], "a thread is at it"
        assert cache.stats().leased_bytes > 0
    wait_until(lambda: not cache.stats().leased_bytes, "the lease to end")
    assert mapped_seqs(cache) == []


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["Loader", "torch.Loader"])
@pytest.mark.parametrize("shuffle", ["rows", "window"])
def test_ctrl_c_in_a_step_waits_for_no_disk(cache, pages, monkeypatch, name, shuffle):
    make = face(name)

    class Slow(make):
        def _memory(self) -> Memory:
            return Memory(partial(slow, pages))

    loader = Slow(cache, 8, shuffle=shuffle, prefetch=2)
    with ctrl_c_in_a_wait(monkeypatch, pages):
        epoch = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            next(epoch)
        assert next(epoch, None) is None
        loader.close()
        assert mapped_seqs(cache) == list(range(6)), "a thread is at it"
        assert cache.stats().leased_bytes > 0
    wait_until(lambda: not cache.stats().leased_bytes, "the leases to end")
    assert mapped_seqs(cache) == []
    with make(cache, 8, shuffle=shuffle) as after:
        assert sorted(ids_of(after)) == list(range(ROWS))


def test_where_no_thread_can_be_started_ctrl_c_waits(cache, pages, monkeypatch):
    """For what was begun: nobody else would let go of it."""
    let_go = threading.Timer(0.1, pages.let_go)

    def refused(*_: object) -> int:
        let_go.start()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refused)
    read = cache.snapshot()
    with engine_threads(1):
        on_its_way = begun_gather(cache, read, pages)
        gather.abandon(on_its_way)
        read.close()
        assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
    let_go.join()


# What dies first. In a process of its own: what is left behind stays for ever.


def begun_gather(cache: ac.Cache, snapshot: ac.Snapshot, pages: SlowPages) -> Any:
    image = cache.schema.fixed["image"]
    slots = Slots({"image": (image.shape, image.numpy_dtype)}, 8, 1, lambda nbytes: slow(pages, nbytes))
    begun = snapshot.read(np.arange(8), snapshot.columns_of(["image"]), slots.lend(8))
    while not pages.touched.is_set():
        begun.take(0)
    return begun


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("end", ["dropped", "cancelled"])
def test_a_gather_that_dies_while_the_kernel_holds_its_thread_leaves_lease_and_mapping(
    cache, monkeypatch, cold, end
):
    require_slow_pages()
    limit(monkeypatch, stuck_seconds=0.01, inline_bytes=0)

    def body() -> None:
        pages, snapshot = SlowPages(are_held=True), cache.snapshot()
        snapshot.read_mode.is_cold = cold
        if not cold:  # else this thread would help, with the GIL
            limit(monkeypatch, held_gil_chunks=0)
        begun = begun_gather(cache, snapshot, pages)
        if end == "cancelled":
            begun.cancel()
        del begun
        snapshot.close()
        del snapshot
        assert mapped_seqs(cache) == [0]
        assert cache.stats().leased_bytes
        assert cache.evict("1GB") == 0
        with ac.Loader(cache, 8) as loader:  # another thread reads
            assert sorted(ids_of(loader)) == list(range(ROWS))
        pages.let_go()

    with in_child(body):
        pass


def test_a_fetch_that_is_dropped_while_the_kernel_holds_its_thread_leaves_lease_and_mapping(
    cache, monkeypatch
):
    def body() -> None:
        snapshot = cache.snapshot()
        snapshot.map_all()
        fetch = snapshot.fetch(0, ROWS, ["id", "image"])
        monkeypatch.setattr(engine.library, "engine_cancel", lambda *_: 1)
        monkeypatch.setattr(engine.quick, "engine_cancel", lambda *_: 1)
        del fetch
        snapshot.close()
        del snapshot
        assert mapped_seqs(cache) == list(range(6))
        assert cache.evict("1GB") == 0

    with in_child(body):
        pass


def no_memory_for(length: int, dtype: Any) -> Any:
    """`np.empty`, which has none for such an array."""
    empty = np.empty

    def allocate(*arguments: Any, **options: Any) -> Any:
        if arguments == (length, dtype):
            raise MemoryError
        return empty(*arguments, **options)

    return allocate


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_what_was_begun_before_an_error_has_ended_when_it_comes(tmp_path, monkeypatch, cold):
    """Whoever has the error has its frames, and in them what was begun."""
    schema = ac.Schema({"data": ac.Tensor("uint8", (64 << 10,)), "name": ac.String()})
    cache = make_cache(tmp_path / "cache", schema, capacity="64MiB", segment_bytes="4MiB", segment_rows=32)
    with cache.writer() as writer:
        for number in range(64):
            writer.append(data=np.full(64 << 10, number + 1, np.uint8), name=str(number))
    name_bytes = 10 + 54 * 2
    for length, dtype in ((64, np.int64), (name_bytes, np.uint8)):  # the names' places, or the names
        with cache.snapshot() as snapshot, pytest.MonkeyPatch.context() as patched, engine_threads(1):
            snapshot.map_all()
            snapshot.read_mode.is_cold = cold
            out = np.zeros((64, 64 << 10), np.uint8)
            patched.setattr(np, "empty", no_memory_for(length, dtype))
            with pytest.raises(MemoryError) as caught:
                snapshot.gather(range(64), out={"data": out})
            snapshot.close()
            assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])
            before = out.copy()
            assert of_process.stop()
            assert np.array_equal(out, before)
            del caught


# Forks, and the end of the interpreter.


def test_a_forked_child_lets_go_of_a_gather_although_a_lock_is_held_for_ever(cache):
    with engine_threads(0), cache.snapshot() as snapshot:
        slots = Slots({"id": ((), np.dtype(np.int64))}, ROWS)
        kept = [snapshot.read(np.arange(ROWS), snapshot.columns_of(["id"]), slots.lend(ROWS))]
        fetched = [snapshot.fetch(0, ROWS, ["id"])]

        def body() -> None:
            kept.clear()
            fetched.clear()
            snapshot.close()

        with held_by_another_thread(snapshot), in_child(body):
            pass
        kept[0].wait()
        assert snapshot.gather(range(ROWS))["id"].tolist() == list(range(ROWS))


def test_a_job_that_is_dropped_when_the_engines_module_is_gone_waits_for_nothing(cache, monkeypatch):
    """As at the end of the interpreter, where nothing is unmapped any more."""
    with engine_threads(0), cache.snapshot() as snapshot:
        slots = Slots({"id": ((), np.dtype(np.int64))}, ROWS)
        begun = snapshot.read(np.arange(ROWS), snapshot.columns_of(["id"]), slots.lend(ROWS))
        with pytest.MonkeyPatch.context() as gone:
            gone.setattr(engine, "threads", None)
            begun.cancel()
        begun.cancel()
