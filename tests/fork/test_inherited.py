"""What users have when they fork: a child sees what it may, and the parent keeps all that is its own.

A scene is a context manager of (a cache of six segments of 16 rows, ids 0 to 95): it makes what is inherited,
gives what the child does with it, and checks after it what must hold in the parent. It holds once the child
has ended, and while the child lives on with all that it inherited.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from helpers import (
    DEADLINE_SECONDS,
    held_by_another_thread,
    ids_of,
    in_child,
    in_living_child,
    loader_pages,
    make_cache,
    mapped_seqs,
    open_files,
    publish,
    published_ids,
    sample,
    seqs,
    shown_loaders,
    worker_pids,
)

import arrowcache as ac
from arrowcache.native import maps
from arrowcache.storage.counters import LOADER_LINK, SamplerPage, seen_samplers
from arrowcache.storage.lease import Lease, own_leases
from arrowcache.storage.locks import LockFile
from arrowcache.storage.mapping import FileMapping

IDS = list(range(96))
FORKED = "the process that forked this one"
Child = Callable[[], None]


@pytest.fixture
def cache(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 6)
    return cache


# what is read


@contextmanager
def snapshot(cache: ac.Cache) -> Iterator[Child]:
    """It is the parent's, with its lease; nothing that the child has keeps an evicted file."""
    snapshot = cache.snapshot()
    snapshot.map_all()
    table = snapshot.table()

    def child() -> None:
        assert str(cache.path / "segments") not in Path("/proc/self/maps").read_text()
        assert maps.count() == 0
        assert not [name for _, name in open_files() if str(cache.path) in name]
        for use in (lambda: snapshot.gather([0]), snapshot.table):
            with pytest.raises(ValueError, match=FORKED):
                use()
        snapshot.close()
        with cache.snapshot() as own:
            assert own.gather(IDS)["id"].tolist() == IDS
        publish(cache, 1)

    yield child
    assert snapshot.gather([0, 95])["id"].tolist() == [0, 95]
    assert cache.stats().leased_bytes > 0
    assert cache.evict("1GB") == 0
    assert seqs(cache) == list(range(7))
    snapshot.close()
    del table
    gc.collect()
    assert cache.evict("1GB") > 0
    assert seqs(cache) == []


@contextmanager
def forgotten(cache: ac.Cache) -> Iterator[Child]:
    """Nobody is warned of what is the parent's to close."""
    inherited = [cache.snapshot()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def child() -> None:
            caught.clear()  # Python's own, of a fork beside threads
            inherited.clear()
            assert caught == []
            own = [cache.snapshot()]
            own.clear()
            assert [str(each.message) for each in caught] == ["a snapshot was not closed"], "its own alone"

        yield child
        inherited[0].close()
    assert not [each for each in caught if "not closed" in str(each.message)]


@contextmanager
def view(cache: ac.Cache) -> Iterator[Child]:
    """A child that drops it unmaps nothing, and unlocks nothing."""
    with cache.snapshot() as snapshot:
        views = [next(snapshot.views())]

        def child() -> None:
            views.clear()
            gc.collect()

        yield child
        assert views[0]["id"].tolist() == IDS[:16]
        expected = [sample(number)["image"] for number in range(16)]
        assert np.array_equal(views[0]["image"], expected)
        assert cache.stats().leased_bytes > 0
        views.clear()


@contextmanager
def loader(cache: ac.Cache, *, is_between_epochs: bool = False) -> Iterator[Child]:
    """The child's epochs, what it has mapped and what it shows are its own; the parent's epoch goes on."""

    def shown() -> tuple[int, int]:
        (found,) = shown_loaders(cache.path)
        return found.pid, found.epochs

    with ac.Loader(cache, 16) as loader:
        epoch = iter(loader)
        came = ids_of([next(epoch)])
        if is_between_epochs:
            came += ids_of(epoch)

        def child() -> None:
            assert (mapped_seqs(cache), loader_pages()) == ([], [])
            assert LOADER_LINK not in Path("/proc/self/maps").read_text()
            if not is_between_epochs:
                with pytest.raises(ValueError, match=FORKED):
                    next(epoch)
            publish(cache, 1)
            assert sorted(ids_of(loader)) == list(range(112))
            assert shown() == (os.getpid(), 2)
            with (
                ac.Loader(cache.path, 16) as second,
                closing(iter(loader)) as one,
                closing(iter(second)) as other,
            ):
                begun = ids_of([next(one)]), ids_of([next(other)])
                assert mapped_seqs(cache) == list(range(7)), "they share what is mapped"
                for epoch_of_child, came_there in zip((one, other), begun, strict=True):
                    assert sorted(came_there + ids_of(epoch_of_child)) == list(range(112))
            epoch.close()
            loader.close()

        yield child
        assert shown() == (os.getpid(), 1)
        if not is_between_epochs:
            assert cache.evict(1) == 0, "the parent's lease holds"
            came += ids_of(epoch)
        assert sorted(came) == IDS
        assert sorted(ids_of(loader)) == list(range(112))


@contextmanager
def state(cache: ac.Cache) -> Iterator[Child]:
    """Parent and child may each resume what the parent began."""
    with ac.Loader(cache, 16) as loader:
        with closing(iter(loader)) as epoch:
            came = ids_of([next(epoch), next(epoch)])
            state = loader.state_dict()

        def child() -> None:
            loader.load_state_dict(state)
            assert sorted(came + ids_of(loader)) == IDS

        yield child
        child()


@contextmanager
def locked(cache: ac.Cache) -> Iterator[Child]:
    """A child waits for no lock that a thread of its parent had."""
    with ac.Loader(cache, 16) as loader, cache.snapshot() as snapshot:
        epoch = iter(loader)
        came = ids_of([next(epoch)])

        def child() -> None:
            assert loader.stats().batches == 1
            with pytest.raises(ValueError, match=FORKED):
                next(epoch)
            assert sorted(ids_of(loader)) == IDS
            epoch.close()
            loader.close()
            with pytest.raises(ValueError, match=FORKED):
                snapshot.gather([0])
            snapshot.close()

        with held_by_another_thread(epoch, loader, snapshot):
            yield child
        assert sorted(came + ids_of(epoch)) == IDS


@contextmanager
def measuring(cache: ac.Cache) -> Iterator[Child]:
    """A child reads although a thread of its parent was finding out how much memory there is."""
    is_asking, go_on, sysconf = threading.Event(), threading.Event(), os.sysconf

    def slow(name: str) -> int:
        if threading.current_thread() is reading:
            is_asking.set()
            assert go_on.wait(DEADLINE_SECONDS)
        return sysconf(name)

    def child() -> None:
        with ac.Loader(cache, 16) as own:
            assert sorted(ids_of(own)) == IDS

    came: list[int] = []
    reading = threading.Thread(target=lambda: came.extend(ids_of(loader)))
    with mock.patch.object(os, "sysconf", slow), ac.Loader(cache, 16) as loader:
        reading.start()
        assert is_asking.wait(DEADLINE_SECONDS)
        yield child
        go_on.set()
        reading.join(DEADLINE_SECONDS)
    assert sorted(came) == IDS


@contextmanager
def workers(cache: ac.Cache) -> Iterator[Child]:
    """A child has worker processes of its own, no descriptor of its parent's, and leaves those alone."""
    kinds = ("anon_inode:[event", "anon_inode:[pidfd", "socket:")
    before = open_files()
    with ac.Loader(cache, 8, workers=2, transform=dict) as loader:
        epoch = iter(loader)
        made = [next(epoch)]
        pids = worker_pids()

        def child() -> None:
            assert not [name for _, name in open_files() - before if name.startswith(kinds)]
            made[0]["id"][:] = -1  # which stays here
            assert sorted(ids_of(loader)) == IDS
            own = worker_pids()
            assert len(own) == 2
            assert not {*own} & {*pids}
            loader.close()
            assert not [pid for pid in own if Path(f"/proc/{pid}").exists()]

        yield child
        assert sorted(ids_of([*made, *epoch])) == IDS
        assert worker_pids() == pids


# what is written


@contextmanager
def writer(cache: ac.Cache) -> Iterator[Child]:
    """The child neither publishes rows of its parent's writer, nor shows it, nor has it live longer."""
    writer = cache.writer(max_delay=0.01)
    writer.append(sample(96))

    def child() -> None:
        with pytest.raises(ValueError, match=FORKED):
            writer.append(sample(97))
        writer.close()
        writer.abort()
        assert cache.store.usage.somebody_writes(), "its parent does"

    yield child
    assert cache.store.usage.somebody_writes()
    writer.append(sample(98))
    writer.close()
    assert not cache.store.usage.somebody_writes()
    assert published_ids(cache) == [*IDS, 96, 98]


@contextmanager
def progress(cache: ac.Cache) -> Iterator[Child]:
    """A child shows nothing of its parent's samplers."""
    page = SamplerPage.open(cache.path, "default.0", 0)
    page.begin(7, 16)
    page.count(3, 16)
    parent = os.getpid()

    def child() -> None:
        assert [each.pid for each in seen_samplers(cache.path)] == [parent]
        page.count(5, 16)

    yield child
    (seen,) = seen_samplers(cache.path)
    assert (seen.task, seen.rows) == (7, 3)
    page.close()
    assert seen_samplers(cache.path) == []


# what is held


def is_free(path: Path, seq: int) -> bool:
    with closing(LockFile(path)) as file:
        return file.try_range(seq, 1, exclusive=True)


@contextmanager
def lease(cache: ac.Cache) -> Iterator[Child]:
    """A child has no lease, and leaves its parent's alone."""
    path = cache.path.with_name("leases")
    path.touch()
    lease = Lease(path, 2, 6)

    def child() -> None:
        assert own_leases(path, 4) == []
        assert not lease.covers(4)
        lease.give_up(4)
        lease.narrow(5, 5)
        lease.close()
        with closing(Lease(path, 4, 4)) as own:
            assert own_leases(path, 4) == [own]

    yield child
    assert [seq for seq in range(20) if not is_free(path, seq)] == [2, 3, 4, 5, 6]
    lease.close()
    assert all(is_free(path, seq) for seq in range(20))


@contextmanager
def locks(cache: ac.Cache) -> Iterator[Child]:
    """A child neither keeps nor drops its parent's locks."""
    path = cache.path.with_name("locks")
    path.touch()
    with closing(LockFile(path)) as first, closing(LockFile(path)) as second:
        assert first.try_range(3, 4, exclusive=False)
        assert first.try_exclusive()

        def child() -> None:
            assert first.fd == -1
            first.close()
            del first.__dict__["path"]

        yield child
        assert not second.try_range(3, 1, exclusive=True), "the child dropped the lock"
        assert not second.try_exclusive()
        first.close()
        assert second.try_range(3, 1, exclusive=True), "the child keeps the lock"
        assert second.try_exclusive()


@contextmanager
def mapping(cache: ac.Cache) -> Iterator[Child]:
    """A child has no mapping, and ends nothing."""
    file, told = cache.path.with_name("file"), []
    file.write_bytes(b"abc")
    buffers = [FileMapping(file, on_unmap=lambda: told.append(1)).buffer()]

    def child() -> None:
        assert str(file) not in Path("/proc/self/maps").read_text()
        buffers.clear()
        gc.collect()
        assert told == []

    yield child
    assert buffers[0][:3].to_pybytes() == b"abc"
    assert told == []


SCENES: dict[str, Callable[[ac.Cache], AbstractContextManager[Child]]] = {
    "a snapshot": snapshot,
    "a snapshot that is forgotten": forgotten,
    "a view": view,
    "a loader in an epoch": loader,
    "a loader between epochs": partial(loader, is_between_epochs=True),
    "the state of a loader": state,
    "locks that threads have": locked,
    "a question of a thread": measuring,
    "worker processes": workers,
    "a writer": writer,
    "progress": progress,
    "a lease": lease,
    "files of locks": locks,
    "a mapped file": mapping,
}


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("fork", [in_child, in_living_child], ids=["ended", "alive"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "worker processes")) for name in SCENES]
)
def test_a_child_sees_what_it_may_and_its_parent_keeps_the_rest(cache, name, fork):
    with ExitStack() as until_the_end, SCENES[name](cache) as child:
        until_the_end.enter_context(fork(child))
        if fork is in_child:
            until_the_end.close()
    assert cache.stats().leased_bytes == 0


def test_a_view_is_dead_in_a_child_and_ends_who_touches_it(cache):
    with cache.snapshot() as snapshot:
        view = next(snapshot.views())
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            view["image"].sum()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
        assert np.array_equal(view["image"][15], sample(15)["image"])
        del view
