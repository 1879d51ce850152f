"""Ctrl-C at any step of what users do: what holds afterwards, and that the next thing goes on.

A scene is a context manager of (a cache of six segments of 16 rows, ids 0 to 95): it gives the work that is
interrupted, and checks after it what must hold.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from begun import own_threads
from helpers import (
    ids_of,
    limit,
    make_cache,
    mapped_seqs,
    open_files,
    publish,
    published_ids,
    segment_files,
    wait_until,
)
from interruptions import Code, files, interruptions, library
from page_cache import drop_from_memory

import arrowcache as ac
from arrowcache import linux
from arrowcache.native import maps
from arrowcache.reading.slots import SharedMemory
from arrowcache.storage.lease import own_leases
from arrowcache.storage.mapping import FileMapping, live_mappings

IDS = list(range(96))
MIXED = ac.Schema(
    {
        "id": ac.Tensor("int64"),
        "name": ac.String(),
        "raw": ac.Binary(),
        "ragged": ac.Ragged("int16", (2,)),
    }
)
Work = Callable[[], Any]


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    return cache


def consume(batches: Any) -> None:
    for _ in batches:
        pass


@contextmanager
def epoch(cache: ac.Cache, *, is_cold: bool = False, **options: Any) -> Iterator[Work]:
    """The next epoch is whole, in whichever thread: nothing is locked for ever."""
    if is_cold:
        drop_from_memory(*segment_files(cache))
    loader, came = ac.Loader(cache, 8, timeout=5, **options), []
    yield lambda: consume(loader)

    def run() -> None:
        with loader:
            came.append(sorted(ids_of(loader)))

    after = threading.Thread(target=run, daemon=True)
    after.start()
    after.join(20)
    assert came == [IDS]


@contextmanager
def beginning(cache: ac.Cache) -> Iterator[Work]:
    """An epoch that did not begin does not count."""
    cache.set_pace(ac.Pace(max_reuse=1))
    loader, begun = ac.Loader(cache, 8, timeout=5), []
    yield lambda: begun.append(iter(loader))
    for each in begun:
        each.close()
    loader.close()
    assert (cache.stats().served_rows, cache.stats().most_times_served) == (0, 0)


@contextmanager
def dropping(cache: ac.Cache) -> Iterator[Work]:
    """An iterator that is dropped as it comes: closing the loader ends its epoch."""
    loader = ac.Loader(cache, 8, timeout=5)
    iterators = [iter(loader)]
    yield iterators.clear
    loader.close()


@contextmanager
def closing_twice(cache: ac.Cache, shuffle: str | None) -> Iterator[Work]:
    """What a first `close` did not do, a second one does."""
    loader = ac.Loader(cache, 8, shuffle=shuffle, transform=dict, worker_type="thread")
    iterator = iter(loader)
    next(iterator)
    yield loader.close
    loader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)
    wait_until(lambda: not own_threads("arrowcache-worker"), "the loader's thread to end")


@contextmanager
def seam(cache: ac.Cache) -> Iterator[Work]:
    """The next epoch of `repeat()`, which begins in slices where there are many segments."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ac.Loader(cache, 8, prefetch=8, columns=["id"]) as loader,
        closing(loader.repeat()) as epochs,
    ):
        limit(patch, slow_segments=6)
        next(epochs)
        yield lambda: consume(itertools.islice(epochs, 20))


@contextmanager
def mapping(cache: ac.Cache, *, is_release: bool = False) -> Iterator[Work]:
    """What is mapped is leased, and what one did not let go of, the next one does."""
    before = open_files()
    snapshot = cache.snapshot()
    if is_release:
        snapshot.gather([0, 20, 40])
        snapshot.release_oldest(1)
    yield snapshot.close if is_release else lambda: snapshot.gather([20, 40, 60])
    assert cache.stats().leased_bytes or not mapped_seqs(cache)
    if not is_release:
        assert snapshot.gather([20, 40, 60])["id"].tolist() == [20, 40, 60]
    snapshot.close()
    cache.snapshot().close()
    wait_until(lambda: open_files() <= before, "descriptors to end")


@contextmanager
def beside(cache: ac.Cache) -> Iterator[Work]:
    """A snapshot that is not made takes nothing from another."""
    with cache.snapshot() as good:
        expected = good.gather(range(len(good)))["id"].tolist()
        yield lambda: cache.snapshot().close()
        gc.collect()
        assert good.gather(range(len(good)))["id"].tolist() == expected
    cache.snapshot().close()


@contextmanager
def mapping_a_file(cache: ac.Cache, *, sparse: bool) -> Iterator[Work]:
    """It would be mapped until the process ends, and its bytes on the disk be taken, though it is deleted."""
    file, told, before = segment_files(cache)[0], [], live_mappings()
    yield lambda: FileMapping(file, lambda: told.append(mapped_seqs(cache)), sparse=sparse)
    gc.collect()
    assert mapped_seqs(cache) == []
    assert not any(told)
    assert live_mappings() == before


def every_kind(first: int, count: int) -> dict[str, Any]:
    numbers = range(first, first + count)
    return {
        "id": np.arange(first, first + count),
        "name": [f"row {number}" for number in numbers],
        "raw": [bytes([number]) * number for number in numbers],
        "ragged": [np.full((number, 2), number, np.int16) for number in numbers],
    }


@contextmanager
def writing(cache: ac.Cache, *, count: int) -> Iterator[Work]:
    """Rows are taken whole, all of a call's or none."""
    path = cache.path.with_name(f"written {len(os.listdir(cache.path.parent))}")
    with make_cache(path, MIXED, segment_rows=None) as written:
        with written.writer() as writer:
            writer.extend(every_kind(0, 2))
            if count == 1:
                yield lambda: writer.append({name: each[0] for name, each in every_kind(2, 1).items()})
            else:
                yield lambda: writer.extend(every_kind(2, count))
            writer.extend(every_kind(8, 2))
        assert written.verify() == []
        with written.snapshot() as snapshot:
            rows = snapshot.table().to_pylist()
        assert [row["id"] for row in rows] in ([0, 1, 8, 9], [0, 1, *range(2, 2 + count), 8, 9])
        for row in rows:
            expected = every_kind(row["id"], 1)
            assert (row["name"], row["raw"]) == (expected["name"][0], expected["raw"][0])
            assert row["ragged"] == expected["ragged"][0].ravel().tolist()


@contextmanager
def delayed(cache: ac.Cache) -> Iterator[Work]:
    """A writer with `max_delay` goes on publishing."""
    path = cache.path.with_name(f"delayed {len(os.listdir(cache.path.parent))}")
    with make_cache(path, {"id": ac.Tensor("int64")}) as written, written.writer(max_delay=0) as writer:
        writer.append(id=0)
        wait_until(lambda: written.stats().rows, "the first row")
        yield lambda: writer.append(id=1)
        writer.append(id=2)
        wait_until(lambda: published_ids(written)[-1] == 2, "the last row")


@dataclass(frozen=True)
class Operation:
    """A scene, which steps of it are interrupted, and how many there are at least."""

    scene: Callable[[ac.Cache], AbstractContextManager[Work]]
    least: int
    code: Code = library
    events: tuple[str, ...] = ("call",)
    every: int = 1


LINES = ("line", "return")
THREADS = {"workers": 2, "worker_type": "thread", "transform": dict}
OF_MAPS = files("reading/mapped.py", "native/maps.py", "arrowcache/lifetimes.py")
OF_A_FILE = files("storage/mapping.py", "arrowcache/linux.py", functions=("__init__", "_mmap", "map_memory"))
OF_SEAMS = files("reading/batch_source.py", "reading/stream.py", "reading/available_rows.py")
OF_ROWS = files("arrow/builder.py", "storage/writer.py")
OPERATIONS = {
    "an epoch": Operation(epoch, 300),
    "an epoch of threads": Operation(
        partial(epoch, workers=2, worker_type="thread", transform=dict), 300, every=3
    ),
    "an epoch from the disk": Operation(partial(epoch, is_cold=True), 300, every=3),
    "a window from the disk": Operation(partial(epoch, is_cold=True, shuffle="window"), 300, every=3),
    "the beginning of an epoch": Operation(beginning, 300),
    "the end of an iterator": Operation(dropping, 20),
    "the end of a loader": Operation(partial(closing_twice, shuffle="rows"), 30),
    "the end of a loader of a window": Operation(partial(closing_twice, shuffle="window"), 30),
    "the seam of two epochs": Operation(seam, 50, OF_SEAMS, ("line",)),
    "mapping": Operation(mapping, 15, OF_MAPS, LINES),
    "letting go": Operation(partial(mapping, is_release=True), 15, OF_MAPS, LINES),
    "a snapshot beside another": Operation(
        beside, 1, files("reading/mapped.py", functions=("acquire",)), ("line",)
    ),
    "mapping a file": Operation(partial(mapping_a_file, sparse=False), 10, OF_A_FILE, LINES),
    "mapping a sparse file": Operation(partial(mapping_a_file, sparse=True), 10, OF_A_FILE, LINES),
    "appending": Operation(partial(writing, count=1), 50, OF_ROWS, ("call", "line")),
    "extending": Operation(partial(writing, count=3), 50, OF_ROWS, ("call", "line")),
    "publishing later": Operation(delayed, 20, OF_ROWS, ("call", "line"), 3),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")  # it came in a destructor
@pytest.mark.filterwarnings("ignore:a snapshot was not closed", "ignore:a writer with")
@pytest.mark.parametrize("name", OPERATIONS)
def test_after_ctrl_c_at_any_step_nothing_is_left_and_all_goes_on(cache, monkeypatch, name):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps what was dropped
    operation = OPERATIONS[name]
    mapped = maps.count()
    for interruption in interruptions(
        operation.least, operation.code, operation.events, every=operation.every, finalizers=True
    ):
        with operation.scene(cache) as work, interruption:
            work()
        del work
        wait_until(lambda: not cache.stats().leased_bytes, f"the leases to end, after {interruption.where}")
        assert mapped_seqs(cache) == [], interruption.where
        assert maps.count() <= mapped, interruption.where  # what an earlier test left may go meanwhile
    assert cache.verify() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_as_memory_is_shared_closes_its_descriptor_once(monkeypatch):
    """It was closed twice: by then it may be another thread's file."""
    opened, closed, make, close = [], [], linux.anonymous_file, os.close
    monkeypatch.setattr(linux, "anonymous_file", lambda: opened.append(make()) or opened[-1])
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))
    for interruption in interruptions(5, files("reading/slots.py"), LINES):
        with interruption:
            SharedMemory.create()
    del interruption
    gc.collect()
    assert sorted(closed) == sorted(opened)


@pytest.mark.slow
def test_ctrl_c_while_worker_processes_let_go_is_nothing_else(cache, monkeypatch):
    """A RuntimeError, where it came as the wait for them let go of a lock."""
    limit(monkeypatch, idle_seconds=3600.0)
    with ac.Loader(cache, 8, workers=1, transform=dict) as loader:
        assert sorted(ids_of(loader)) == IDS
        (lease,) = own_leases(cache.store.folder.lease_lock, 0)
        let_go = lease.on_contention  # as a writer asks for it; the lease forgets it as it ends
        for interruption in interruptions(5, library, ("call", "return"), finalizers=True):
            with interruption:
                let_go()
        assert sorted(ids_of(loader)) == IDS


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"workers": 2, "transform": dict}], ids=["plain", "processes"])
def test_a_signal_handler_may_close_a_loader_at_any_step_of_iter(cache, options):
    """It was an AttributeError of what `close` had taken away; before that was made, its thread lived on."""
    loaders: list[ac.Loader] = []
    code = files("reading/loader.py", "reading/stream.py")
    for interruption in interruptions(10, code, error=lambda: loaders[-1].close()):
        loaders.append(ac.Loader(cache, 16, **options))
        epochs: list[Any] = []
        with suppress(ValueError), interruption:
            epochs.append(iter(loaders[-1]))
        loaders[-1].close()
        for each in epochs:
            with pytest.raises(RuntimeError, match="was closed"):
                next(each)
        assert cache.stats().leased_bytes == 0, interruption.where
        assert not own_threads(), interruption.where


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on the disk"])
def test_a_signal_handler_may_close_a_loader_at_any_step_of_next(tmp_path, on_disk):
    """It begins by asking the disk. Native threads went on with rows of files that it had unmapped."""
    cache = make_cache(tmp_path / "cache", MIXED, segment_rows=16)
    with cache.writer() as writer:
        writer.extend(every_kind(0, 96))
    loaders: list[ac.Loader] = []
    making = ("batch_source", "stream", "assembly", "gather")
    code = files(*(f"reading/{name}.py" for name in making), "native/engine.py")
    for interruption in interruptions(
        100, code, ("opcode",), lambda: loaders[-1].close(), every=29, blocks=True
    ):
        if on_disk:
            drop_from_memory(*segment_files(cache))
        loaders.append(ac.Loader(cache, 16, prefetch=2))
        batches = iter(loaders[-1])
        next(batches)
        with interruption:
            try:
                consume(itertools.islice(batches, 2))
            except RuntimeError as error:
                assert "the loader was closed" in str(error), interruption.where  # noqa: PT017  # or none
        loaders[-1].close()
        assert cache.stats().leased_bytes == 0, interruption.where
