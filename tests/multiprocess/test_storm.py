"""Writers and readers at work while random ones of them are killed: the capacity holds throughout."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers import KIB, make_cache, publish, read_ids, segment_files, wait_until
from helpers import sample as row
from processes import Child

import arrowcache as ac

if TYPE_CHECKING:
    from typing import Self

SECONDS = 7.0
WRITERS, READERS = 4, 2
CAPACITY = 2048 * KIB
SEGMENT = {"segment_bytes": 128 * KIB, "segment_rows": 100}  # so that half-written ones weigh
IDS_A_WRITER = 200_000


# what the processes do


def write(path: Path, first: int, stop: Path, barrier: Any = None) -> None:
    cache = ac.Cache.open(path)
    if barrier is not None:
        barrier.wait(60)
    with cache.writer(timeout=60) as writer:
        number = 0
        while not stop.exists():
            for _ in range(16):
                writer.append(row(first + number % IDS_A_WRITER))
                number += 1


def read(path: Path, seed: int, stop: Path, barrier: Any = None) -> tuple[int, int]:
    """Epochs and rows that were delivered, each row checked against its deterministic content."""
    base = np.arange(256, dtype=np.float32).reshape(16, 16)
    epochs = rows = 0
    kept: list[Any] = []
    cache = ac.Cache.open(path)
    if barrier is not None:
        barrier.wait(60)
    with ac.Loader(cache, 24, seed=seed, drop_last=False, with_ids=True) as loader:
        while not stop.exists():
            places: set[tuple[int, int]] = set()
            for batch in loader:
                expected = base + batch["id"].astype(np.float32)[:, None, None]
                assert np.array_equal(batch["image"], expected), "a row that was never written"
                places.update(zip(batch["_seq"].tolist(), batch["_row"].tolist(), strict=True))
                rows += len(batch["id"])
                kept.append((batch["image"][0], expected[0]))
            with cache.snapshot() as snapshot:
                found = snapshot.gather(np.arange(len(snapshot)))
                expected = base + found["id"].astype(np.float32)[:, None, None]
                assert np.array_equal(found["image"], expected)
                assert len(np.unique(found["id"])) == len(found["id"]), "a row twice"
            assert all(np.array_equal(image, content) for image, content in kept), "a kept row changed"
            del kept[:-50]
            epochs += 1
    return epochs, rows


# watching from outside


def blocks_on_disk(path: Path) -> int:
    """Allocated bytes of the tree, each file once, at a moment when nobody begins or ends anything."""
    with open(path / "cache.lock") as lock:
        while True:  # as the library does: polled
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)
        blocks = {0: os.lstat(path).st_blocks}
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                try:
                    status = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:  # a retired segment is unlinked without the lock
                    continue
                blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def used_of_file_system(path: Path) -> int:
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.fixture
def small_file_system(tmp_path) -> Iterator[Path]:
    """A tmpfs of its own, so that statvfs counts nothing but the cache."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "arrowcache-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = done.stderr.strip() if done.returncode else ""
    except FileNotFoundError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"no tmpfs can be mounted here: {reason}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Watch:
    """A thread that remembers the largest size it ever saw."""

    def __init__(self, measure: Any) -> None:
        self.sizes: list[int] = []
        self._measure, self._stop = measure, Event()
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.sizes.append(self._measure())
            self._stop.wait(0.002)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def storm(path: Path, stop: Path, measure: Any) -> None:
    import multiprocessing

    make_cache(path, capacity=CAPACITY, **SEGMENT)
    chance = random.Random(0)
    barrier = multiprocessing.get_context("forkserver").Barrier(WRITERS + READERS + 1)
    started = 0

    def start(work: Any, barrier: Any = None) -> Child:
        nonlocal started
        started += 1
        return Child(work, path, started * IDS_A_WRITER if work is write else started, stop, barrier)

    roles = [write] * WRITERS + [read] * READERS
    children = [start(role, barrier) for role in roles]
    kills, delivered = 0, 0
    try:
        with Watch(measure) as watch:
            barrier.wait(60)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                time.sleep(chance.uniform(0.02, 0.4))  # the pace of disaster
                victim = chance.randrange(len(roles))
                assert children[victim].is_alive(), children[victim].result()
                children[victim].kill()
                kills += 1
                children[victim] = start(roles[victim])
            stop.touch()
            for child, role in zip(children, roles, strict=True):
                result = child.result(60)
                if role is read:
                    delivered += result[1]
    finally:
        for child in children:
            child.kill()

    assert kills > 10
    assert delivered > 0
    assert len(watch.sizes) > 100
    assert max(watch.sizes) <= CAPACITY
    assert max(watch.sizes) > CAPACITY / 2, "the cache was never full: this shows nothing"
    cache = ac.Cache.open(path)
    assert cache.verify() == []
    stats = cache.stats()
    assert (stats.leased_bytes, stats.waiting_writers, stats.quarantined) == (0, 0, 0)
    assert stats.oldest_seq is not None
    assert stats.oldest_seq > 50, "hardly anything was evicted: this shows nothing"
    for file in segment_files(cache):
        ids = read_ids(file)
        assert ids == list(range(ids[0], ids[0] + len(ids)))
    publish(cache, 1, first=0)
    assert os.listdir(path / "incoming") == []


def test_the_blocks_of_all_files_stay_within_the_capacity_in_a_storm_of_kills(tmp_path):
    path = tmp_path / "cache"
    storm(path, tmp_path / "stop", lambda: blocks_on_disk(path))


def test_a_whole_file_system_stays_within_the_capacity_in_a_storm_of_kills(small_file_system, tmp_path):
    """This one counts unlinked files that somebody still maps, too."""
    before = used_of_file_system(small_file_system)
    storm(
        small_file_system / "cache",
        tmp_path / "stop",
        lambda: used_of_file_system(small_file_system) - before,
    )


def test_the_watch_of_a_file_system_sees_unlinked_files_that_are_mapped(small_file_system):
    before = used_of_file_system(small_file_system)
    with open(small_file_system / "file", "wb") as file:
        file.write(bytes(100 * KIB))
        file.flush()
        os.unlink(file.name)
        assert used_of_file_system(small_file_system) - before >= 100 * KIB
    wait_until(lambda: used_of_file_system(small_file_system) == before, "the file to vanish")
