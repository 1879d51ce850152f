"""SIGKILL to a process at work: what it held is free at once, what it did counts, and all goes on.

A scene is a generator over (a cache of ten segments of 16 rows, ids 0 to 159): it gives the work of a
process, which touches a file once there is something to kill; gets that process, and checks what it shows
while it lives; and goes on once that is dead.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import pytest
from helpers import ids_of, make_cache, overfill, publish, read_ids, sample, segment_files, seqs, wait_until
from processes import Child, Script, hold_snapshot, small_disk

import arrowcache as ac
from arrowcache.sampling.sources import Items

Work = Callable[[Path, Path], None]
Scene = Generator[Work | None, Child]


def hold_epoch(path: Path, ready: Path) -> None:
    epoch = iter(ac.Loader(path, 16))
    next(epoch)
    ready.touch()
    Event().wait()


def reader(cache: ac.Cache, work: Work) -> Scene:
    """Its lease is named while it lives."""
    child = yield work
    assert cache.stats().leased_bytes > 0
    with pytest.raises(ac.CacheFullError, match=f"the oldest of them by pid {child.pid} "):
        overfill(cache)
    assert seqs(cache)[0] == 0
    yield None
    assert cache.stats().leased_bytes == 0


def served(cache: ac.Cache) -> Scene:
    """What it was served counts."""
    yield hold_epoch
    yield None
    stats = cache.stats()
    assert (stats.served_rows, stats.most_times_served) == (160, 1)


def writer(cache: ac.Cache) -> Scene:
    """Nobody writes, and no row of a segment that was not full is there."""

    def write(path: Path, ready: Path) -> None:
        writer = ac.Cache.open(path).writer()
        writer.append(sample(160))
        ready.touch()
        Event().wait()
        writer.close()

    yield write
    assert cache.store.usage.somebody_writes()
    yield None
    assert not cache.store.usage.somebody_writes()
    assert cache.stats().rows == 160


def trained(cache: ac.Cache, shuffle: str | None) -> Scene:
    """The state that it wrote last resumes in another process."""
    log = cache.path.with_name("log")

    def train(path: Path, ready: Path) -> None:
        options = {"columns": ["id"], "workers": 2, "worker_type": "thread"}
        loader = ac.Loader(path, 7, shuffle=shuffle, seed=3, **options)
        delivered = []
        for batch in loader:
            delivered += batch["id"].tolist()
            if len(delivered) == 35:
                log.write_text(json.dumps([delivered, loader.state_dict()]))
                ready.touch()
                Event().wait()

    yield train
    yield None
    delivered, state = json.loads(log.read_text())
    with ac.Loader(cache, 7, shuffle=shuffle, seed=3, drop_last=False) as loader:
        loader.load_state_dict(state)
        assert sorted(delivered + ids_of(loader)) == list(range(160))


def sampled(cache: ac.Cache) -> Scene:
    """Neither it nor workers that it left show that somebody writes."""
    before = len(segment_files(cache))

    def draw(path: Path, ready: Path) -> None:
        def sampler(rng):
            while True:
                yield sample(int(rng.integers(1 << 20)))

        with ac.SamplerPool(path, sampler, workers=1, progress=False):
            ready.touch()
            Event().wait()

    yield draw
    wait_until(lambda: len(segment_files(cache)) > before, "a segment")
    assert cache.store.usage.somebody_writes()
    yield None
    wait_until(lambda: not cache.store.usage.somebody_writes(), "the sign to go")


SCENES: dict[str, Callable[[ac.Cache], Scene]] = {
    "a snapshot": partial(reader, work=hold_snapshot),
    "an epoch": partial(reader, work=hold_epoch),
    "what was served": served,
    "a writer": writer,
    **{
        f"a state, {shuffle}": partial(trained, shuffle=shuffle)
        for shuffle in ("rows", "window", "blocks", None)
    },
    "a pool": sampled,
}


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("name", SCENES)
def test_what_a_killed_process_held_is_free_and_all_goes_on(cache, tmp_path, name):
    scene, ready = SCENES[name](cache), tmp_path / "ready"
    work = next(scene)
    with Child(work, cache.path, ready) as child:
        wait_until(ready.exists, "the process to be at work")
        scene.send(child)
        child.kill()
        assert next(scene, "over") == "over"
    assert (cache.stats().leased_bytes, cache.stats().waiting_writers) == (0, 0)
    publish(cache, 100)
    assert seqs(cache)[0] > 20, "the oldest went"
    ac.Cache.open(cache.path)
    assert os.listdir(cache.path / "incoming") == []
    assert cache.verify() == []


class Samples:
    """A slow dataset."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, object]:
        time.sleep(0.002)
        return sample(index)


def draw_items(path: Path, ready: Path) -> None:
    with ac.SamplerPool(path, Items(Samples()), workers=2, progress=False) as pool:
        pool.wait(rows=50)
        ready.touch()
        Event().wait()


@pytest.mark.slow
def test_items_of_tasks_that_a_killed_pool_had_begun_are_drawn_by_the_next_one(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="8MiB")
    for number in range(2):
        ready = tmp_path / f"ready-{number}"
        with Child(draw_items, cache.path, ready) as child:
            wait_until(ready.exists, "the pool to be at work")
            child.kill()
    assert cache.stats().rows < 400
    with (
        ThreadPoolExecutor(2) as executor,
        ac.SamplerPool(cache, Items(Samples()), 2, executor=executor) as pool,
    ):
        pool.wait(timeout=60)
    drawn = Counter(number for file in segment_files(cache) for number in read_ids(file))
    assert drawn == Counter(range(400))


READERS_THAT_ARE_KILLED = """
    import os, signal, sys
    import arrowcache as ac
    from arrowcache.storage.locks import LockFile
    from helpers import ROW, publish

    def free_bytes():
        return os.statvfs(sys.argv[1]).f_bfree * os.statvfs(sys.argv[1]).f_frsize

    cache = ac.Cache.create(sys.argv[1] + "/cache", ROW, "60MiB", segment_bytes="32KiB", segment_rows=1)
    publish(cache, 1500, rows=1)
    reads, writes = os.pipe()
    for oldest in range(5):
        pid = os.fork()
        if pid == 0:
            snapshot = cache.snapshot()
            assert snapshot.map_all() == 1500 - oldest
            os.write(writes, b"-")
            signal.pause()
        os.read(reads, 1)
        before, newest = free_bytes(), max(os.listdir(cache.path / "segments"))
        path = cache.path / "segments" / newest  # what was mapped first is freed first: it would show nothing
        size = path.stat().st_blocks * 512
        evictor = LockFile(cache.path / "lease.lock")
        assert not evictor.try_range(oldest, 1, exclusive=True)
        os.kill(pid, signal.SIGKILL)
        while not evictor.try_range(oldest, 1, exclusive=True):
            pass
        path.unlink()
        print(free_bytes() - before - size, flush=True)
        evictor.close()
        os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_what_a_killed_reader_had_mapped_is_free_as_soon_as_its_lease_is(tmp_path):
    """It was not: the kernel dropped the lock first, and an evictor filled the disk beyond the capacity."""
    (tmp_path / "disk").mkdir()
    command = small_disk(tmp_path / "disk", "100m")
    with Script(READERS_THAT_ARE_KILLED, tmp_path / "disk", within=command) as script:
        assert [script.line() for _ in range(5)] == ["0"] * 5
        assert script.end() == (0, "")
