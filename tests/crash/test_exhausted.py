"""A process that has no file, no mapping or no thread left: what is open goes on, the rest says what to do.

Once there is something left again, all works in the same process.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import ids_of, make_cache, open_files, publish, sample, wait_until
from processes import Script, limited_by_ulimit_u

import arrowcache as ac


@pytest.fixture
def _no_descriptor_is_left():
    gc.collect()
    before = open_files()
    yield
    gc.collect()
    wait_until(lambda: open_files() <= before, "descriptors to end")


@pytest.fixture
def cache(tmp_path):
    """Twenty segments of 16 rows, ids 0 to 319."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    return cache


def runs_well(code: str, *arguments: object, **options: Any) -> None:
    """A script gets to its end, and nothing is told of."""
    with Script(code, *arguments, new_interpreter=True, **options) as script:  # an import takes a descriptor
        assert script.line() == "well"
        assert script.end() == (0, "")


EXHAUSTION = """
    import ctypes, faulthandler, gc, mmap, os, resource, signal, sys, warnings
    from pathlib import Path
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(100)
    import numpy as np
    import arrowcache as ac
    from helpers import append_rows, ids_of, sample, wait_until, worker_pids

    class Descriptors:
        way_out = "ulimit -n"

        def begin(self):
            self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(map(int, os.listdir("/proc/self/fd")))
            self.held = [os.open(os.devnull, os.O_RDONLY)]
            while self.held[-1] <= highest:
                self.held.append(os.open(os.devnull, os.O_RDONLY))
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.held[-1] + 1, self.limits[1]))

        def end(self):
            resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)
            for fd in self.held:
                os.close(fd)

    class Mappings:
        way_out = "vm.max_map_count"

        def begin(self):
            self.libc = ctypes.CDLL(None)
            self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
            most = int(Path("/proc/sys/vm/max_map_count").read_text())
            self.memory = mmap.mmap(-1, 2 * most * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
            page = start
            while self.libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ) == 0:  # each makes two more of it
                page += 2 * mmap.PAGESIZE
            assert page < start + len(self.memory) - 2 * mmap.PAGESIZE
            self.small = []
            try:
                while True:  # until not one is left
                    self.small.append(mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))
            except OSError:
                pass

        def end(self):
            gc.collect()
            self.memory.close()
            for memory in self.small:
                memory.close()

    class Threads:
        way_out = "ulimit -u"

        def begin(self):
            self.limits = resource.getrlimit(resource.RLIMIT_NPROC)
            resource.setrlimit(resource.RLIMIT_NPROC, (1, self.limits[1]))

        def end(self):
            resource.setrlimit(resource.RLIMIT_NPROC, self.limits)

    def fails(call, *words):
        try:
            result = call()
        except (OSError, MemoryError, ac.ArrowCacheError) as error:
            assert all(word in str(error) for word in words), repr(error)
        else:
            raise AssertionError(f"it did not fail: {result!r}")

    def same(batch):
        return batch

    def draws(rng):
        while True:
            yield sample(int(rng.integers(1 << 20)))

    def files():
        return len(os.listdir("/proc/self/fd"))

    def maps():
        return Path("/proc/self/maps").read_text().count("/segments/")
"""

EXHAUSTED = """
    if __name__ == "__main__":
        exhausted = {"descriptors": Descriptors, "mappings": Mappings}[sys.argv[2]]()
        cache = ac.Cache.open(sys.argv[1])
        loaders = {
            "plain": ac.Loader(cache, 16),
            "window": ac.Loader(cache, 16, shuffle="window", window_bytes=1 << 16),
            "processes": ac.Loader(cache, 16, workers=2, transform=same),
        }
        fresh = [ac.Loader(cache, 16), ac.Loader(cache, 16, workers=2, transform=same)]
        pool_of = ac.SamplerPool  # modules are imported with its first use, which takes descriptors
        import arrowcache.sampling.workers
        for _ in range(3):
            for loader in loaders.values():
                assert len(ids_of(loader)) == 320
        wait_until(lambda: len(worker_pids()) == 2, "the processes")
        before = files()
        epochs = {name: iter(loader) for name, loader in loaders.items()}
        made = {name: ids_of([next(epoch)]) for name, epoch in epochs.items()}
        snapshot, unmapped = cache.snapshot(), cache.snapshot()
        snapshot.gather([0, 319])
        room = [bytearray(40_000) for _ in range(100)]
        del room[::2]  # listing a folder takes 32 KiB, for which malloc would sometimes want a mapping

        exhausted.begin()
        for name, epoch in epochs.items():
            assert sorted(made[name] + ids_of(epoch)) == list(range(320)), name
        assert snapshot.gather([0, 319])["id"].tolist() == [0, 319]
        fails(snapshot.table, exhausted.way_out)
        fails(cache.verify, exhausted.way_out)
        if sys.argv[2] == "descriptors":
            writer = cache.writer("raise")
            for number in range(320, 336):
                writer.append(sample(number))
            fails(lambda: writer.append(sample(336)), exhausted.way_out)
            fails(lambda: ac.Cache.open(sys.argv[1]), exhausted.way_out)
            for call in (cache.stats, cache.snapshot, lambda: cache.evict(1), lambda: cache.resize("2MiB")):
                fails(call, exhausted.way_out)
            fails(lambda: pool_of(cache, draws, workers=1, progress=False), exhausted.way_out)
            for loader in (*fresh, *loaders.values()):
                fails(lambda: next(iter(loader)), exhausted.way_out)
        else:
            append_rows(cache, range(320, 336))
            alone, with_processes = fresh
            fails(lambda: next(iter(alone)))  # it has no memory for batches
            fails(lambda: next(iter(with_processes)), "no thread can be started", exhausted.way_out)
        exhausted.end()

        if sys.argv[2] == "descriptors":
            writer.close()
        assert len(snapshot.table()) == 320
        for each in (snapshot, unmapped):
            each.close()
        for loader in (*fresh, *loaders.values()):
            assert sorted(ids_of(loader)) == list(range(336))
        with ac.SamplerPool(cache, draws, workers=1, segments=1, progress=False) as pool:
            pool.wait(timeout=60)
        assert cache.verify() == []
        for loader in (*fresh, *loaders.values()):
            loader.close()
        gc.collect()
        wait_until(lambda: files() <= before, "no descriptor to be left")
        wait_until(lambda: not maps(), "no mapping to be left")
        assert cache.stats().leased_bytes == 0
        print("well", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["descriptors", "mappings"])
def test_what_is_open_goes_on_and_all_does_once_there_is_some_again(cache, what):
    runs_well(EXHAUSTION + EXHAUSTED, cache.path, what)


UNMAPPING = """
    if __name__ == "__main__":
        cache, mappings = ac.Cache.open(sys.argv[1]), Mappings()
        for _ in range(2):
            snapshots = [cache.snapshot(), cache.snapshot(lambda s: s.seq % 2 == 1)]
            for snapshot in snapshots:
                assert snapshot.gather(np.arange(len(snapshot)))["id"][0] in (0, 16)
            mappings.begin()
            for snapshot in snapshots:
                snapshot.close()
            leased, left = cache.stats().leased_bytes, maps()
            mappings.end()
            assert (leased, left) == (0, 0)
            with cache.snapshot() as snapshot:
                assert snapshot.gather([3, 300])["id"].tolist() == [3, 300]
            assert cache.stats().leased_bytes == 0
            assert maps() == 0
        print("well", flush=True)
"""


@pytest.mark.slow
def test_where_no_mapping_is_left_what_is_mapped_is_unmapped_and_then_unleased(cache):
    """Ending a part of a mapping would take one."""
    runs_well(EXHAUSTION + UNMAPPING, cache.path)


NO_THREAD = """
    if __name__ == "__main__":
        from tqdm import TqdmMonitorWarning

        warnings.simplefilter("ignore", TqdmMonitorWarning)  # it has a thread of its own
        threads = Threads()
        cache = ac.Cache.open(sys.argv[1])
        loader = ac.Loader(cache, 16, workers=2, transform=same, timeout=60)
        assert len(ids_of(loader)) == 320
        wait_until(lambda: len(worker_pids()) == 2, "the processes")
        epoch = iter(loader)
        made = ids_of([next(epoch)])
        fresh = [ac.Loader(cache, 16), ac.Loader(cache, 16, workers=2, worker_type="thread", transform=same)]
        writer = cache.writer(max_delay=60)

        threads.begin()
        assert sorted(made + ids_of(epoch)) == list(range(320))
        assert sorted(ids_of(fresh[0])) == list(range(320)), "it needs none"
        for call in (
            lambda: ac.SamplerPool(cache, draws, workers=1, progress=False),
            lambda: next(iter(fresh[1])),
            lambda: writer.append(sample(320)),
        ):
            fails(call, "no thread can be started", threads.way_out)
        assert sorted(ids_of(fresh[0])) == list(range(320)), "it needs none"
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        fails(lambda: list(loader), "worker processes cannot start", threads.way_out)
        threads.end()

        for number in range(320, 336):
            writer.append(sample(number))
        writer.close()
        for each in (loader, *fresh):
            assert sorted(ids_of(each)) == list(range(336))
            each.close()
        with ac.SamplerPool(cache, draws, workers=1, segments=1, progress=False) as pool:
            pool.wait(timeout=60)
        print("well", flush=True)
"""


@pytest.mark.slow
def test_where_no_thread_or_process_can_be_started_the_limit_is_named(tmp_path):
    within, folder = limited_by_ulimit_u()
    with folder as name:
        cache = make_cache(Path(name) / "cache")
        publish(cache, 20)
        give_away(cache.path)
        with Script(EXHAUSTION + NO_THREAD, cache.path, within=within) as script:
            assert script.line() == "well"
            code, errors = script.end()
            said = [
                line for line in errors.splitlines() if not line.startswith("<jemalloc>")
            ]  # Arrow's allocator
            assert (code, said) == (0, [])


def give_away(path: Path) -> None:
    """To whoever owns the folder that it is in."""
    owner = path.parent.stat().st_uid
    for each in (path, *path.rglob("*")):
        os.chown(each, owner, -1)


def refuse_threads(monkeypatch, names: Sequence[str]) -> list[str]:
    """The first thread of each name cannot be started; returns which were refused."""
    refused: list[str] = []
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name in names and thread.name not in refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    return refused


@pytest.mark.usefixtures("_no_descriptor_is_left")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("arrowcache-worker-0", {"transform": dict}),
        ("arrowcache-worker-1", {"workers": 2, "worker_type": "thread", "transform": dict}),
        ("arrowcache-process", {"workers": 2, "transform": dict}),
    ],
)
def test_a_loader_that_lacks_one_thread_says_so_and_has_it_the_next_time(cache, monkeypatch, name, options):
    """One whose processes' thread had failed to start waited for them in vain ever after."""
    refused = refuse_threads(monkeypatch, [name])
    with ac.Loader(cache, 16, timeout=60, **options) as loader:
        with pytest.raises(ac.WorkerError, match=r"no thread can be started: .*ulimit -u.*vm\.max_map_count"):
            next(iter(loader))
        assert refused == [name]
        assert sorted(ids_of(loader)) == list(range(320))


def test_a_writer_without_its_thread_has_not_taken_the_sample(cache, monkeypatch):
    """It had, so that whoever gave it again had it twice; and it published nothing by itself any more."""
    refuse_threads(monkeypatch, ["arrowcache-flush"])
    with cache.writer(max_delay=0.0) as writer:
        with pytest.raises(ac.WorkerError, match="no thread"):
            writer.append(sample(320))
        for number in range(320, 336):
            writer.append(sample(number))
    with ac.Loader(cache, 16) as loader:
        assert sorted(ids_of(loader)) == list(range(336))


@pytest.mark.usefixtures("_no_descriptor_is_left")
@pytest.mark.slow
def test_a_pool_without_its_thread_says_so_and_leaves_nothing(cache, monkeypatch):
    refuse_threads(monkeypatch, ["arrowcache-pool"])
    with pytest.raises(ac.WorkerError, match="no thread"):
        ac.SamplerPool(cache, lambda rng: iter(()), workers=1, progress=False)


@pytest.mark.usefixtures("_no_descriptor_is_left")
@pytest.mark.slow
def test_a_pool_that_lacks_a_descriptor_for_its_processes_says_so_and_no_more(cache, monkeypatch):
    """Nothing is written to stderr by what could not be made, which pytest would take for an error."""
    asked = []

    def refused(*_, **__):
        asked.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", refused)
    with (
        pytest.raises((OSError, ac.SamplerError), match="ulimit -n"),
        ac.SamplerPool(cache, lambda rng: iter(()), workers=1, segments=1, progress=False) as pool,
    ):
        pool.wait(timeout=60)
    assert asked


@pytest.mark.parametrize("has_widget", [False, True])
def test_a_first_bar_that_lacks_a_descriptor_for_its_import_says_so(has_widget):
    code = f"""
    from arrowcache.progress import progress_bar

    bar = lambda: progress_bar(False, has_widget={has_widget})
    descriptors = Descriptors()
    descriptors.begin()
    fails(bar, descriptors.way_out)
    descriptors.end()
    with bar():
        print("well", flush=True)
    """
    runs_well(EXHAUSTION + code)


#: A user who may have no thread: cold and warm, through each shuffle.
WITHOUT_THREADS = """
import os, resource, sys
import numpy as np
import arrowcache as ac
from pathlib import Path

schema = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (128, 128)), "name": ac.String()})
cache = ac.Cache.create(Path(sys.argv[1]) / "cache", schema, "64MiB", "4MiB")
with cache.writer() as writer:
    for number in range(256):
        writer.append(id=number, image=np.full((128, 128), number, np.float32), name=str(number))
os.sync()
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
before = len(os.listdir("/proc/self/task"))
for cold in (True, False):
    for shuffle in ("rows", "window", "blocks", None):
        if cold:
            for path in (cache.path / "segments").iterdir():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with ac.Loader(cache, 16, shuffle=shuffle) as loader:
            for _ in range(2):
                found = []
                for batch in loader:
                    ids = batch["id"].tolist()
                    assert batch["image"][:, 127, 127].tolist() == ids
                    assert batch["name"] == list(map(str, ids))
                    found += ids
                del batch  # it may be a view
                assert sorted(found) == list(range(256)), (cold, shuffle)
                assert not cache.stats().leased_bytes, "nothing is parked"
        with cache.snapshot() as snapshot:
            rows = snapshot.gather(range(255, -1, -1))
            assert rows["id"].tolist() == list(range(255, -1, -1))
assert len(os.listdir("/proc/self/task")) == before
print("well", flush=True)
"""


@pytest.mark.slow
def test_where_no_thread_can_be_started_a_loader_and_a_gather_copy_and_read_by_themselves():
    command, folder = limited_by_ulimit_u()
    with folder:
        runs_well(WITHOUT_THREADS, folder.name, within=command)
