"""Operations to be failed at each of their calls, and what must hold for whoever comes next."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.acero  # noqa: F401  # not while files are counted
import pyarrow.compute as pc
from crash.faults import Faults
from helpers import (
    KIB,
    disk_bytes,
    flip_byte,
    make_cache,
    publish,
    read_ids,
    replace_file,
    sample,
    segment_files,
    seqs,
)

import arrowcache as ac
from arrowcache.linux import boot_id
from arrowcache.reading.options import RankInfo
from arrowcache.reading.ranks import SharedPlan
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage import mapping
from arrowcache.storage.layout import LockRecord
from arrowcache.storage.notes_log import NotesLog
from arrowcache.storage.row_ids import NumberedRows

CAPACITY = 400 * KIB
NEW = 10**5  # the first id that an operation publishes
Twice = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Operation:
    """What is done to a cache, which is made anew for each failure.

    Args:
        do: given what `begin` returned, and `twice`: what that calls may fail, and is called once more.
        begin: given the path, before anything fails: opens the cache, if opening is not what is done.
        segments, damaged, quarantined, options: what is there before.
        also: done to it before, beside.
        expected: calls without which this would not be what it says.
        evicts: the oldest segments may go; or else those before stay, all of them but the damaged.
        publishes: rows from NEW on.
    """

    do: Callable[[Any, Twice], object]
    segments: int = 5
    begin: Callable[[Path], Any] = ac.Cache.open
    damaged: int = 0
    quarantined: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    also: Callable[[Path], None] = lambda path: None
    expected: frozenset[str] = frozenset()
    evicts: bool = False
    publishes: bool = False

    def prepare(self, path: Path) -> None:
        cache = make_cache(path, **{"capacity": CAPACITY, **self.options})
        publish(cache, self.segments)
        for _ in range(self.quarantined):
            flip_byte(segment_files(cache)[0], 0)
            with quiet():
                assert len(cache.verify()) == 1
        for file in segment_files(cache)[: self.damaged]:
            flip_byte(file, 3000)
        self.also(path)


@contextmanager
def quiet() -> Iterator[None]:
    """What is quarantined or left out is told of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def failing_once(faults: Faults) -> Twice:
    """A call that may fail: then nothing of it has happened, and what failed is over as it is made again."""

    def twice(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (OSError, MemoryError, ac.ArrowCacheError):
            faults.heal()
        return call()

    return twice


# what is done to an open cache, or a path


def do_publish(cache: ac.Cache, twice: Twice) -> None:
    writer = cache.writer("raise")
    for number in range(NEW, NEW + 16):
        twice(lambda number=number: writer.append(sample(number)))
    twice(writer.close)


def do_evict(cache: ac.Cache, twice: Twice) -> None:
    twice(lambda: cache.evict(3 * 20 * KIB))


def do_resize(cache: ac.Cache, twice: Twice) -> None:
    twice(lambda: cache.resize(CAPACITY - 60 * KIB))


def do_verify(cache: ac.Cache, twice: Twice) -> None:
    twice(cache.verify)


def do_freeze_and_thaw(cache: ac.Cache, twice: Twice) -> None:
    twice(cache.freeze)
    with quiet():
        twice(cache.thaw)


def do_take(cache: ac.Cache, twice: Twice) -> None:

    def take() -> int:
        with cache.store.locked():
            return cache.store.folder.take_tasks("default.0", 1)

    first = twice(take)
    assert twice(take) > first


def do_open(path: Path, twice: Twice) -> None:
    do_publish(twice(lambda: ac.Cache.open(path)), twice)


def do_open_and_read(path: Path, twice: Twice) -> None:
    cache = twice(lambda: ac.Cache.open(path))
    for _ in range(2):
        assert set(twice(lambda: mapped_ids(cache))) <= set(range(64)), "zeros were read"


def do_create(path: Path, twice: Twice) -> None:
    twice(lambda: make_cache(path, capacity=CAPACITY, exist_ok=True))


def do_stats(cache: ac.Cache, twice: Twice) -> None:
    stats = twice(cache.stats)
    assert (stats.segments, stats.rows) == (5, 80)
    assert stats.allocated_bytes == disk_bytes(cache.path)


def do_read(cache: ac.Cache, twice: Twice) -> None:
    twice(lambda: read_rows(cache))


def checked(path: Path) -> ac.Cache:
    return ac.Cache.open(path, check="bytes")


def read_rows(cache: ac.Cache) -> None:
    """In every way; the snapshot itself may go on after what failed."""
    with cache.snapshot() as snapshot:
        try:
            table, view = snapshot.table(), next(snapshot.views())
        except ValueError as error:
            raise OSError("no view can be had") from error
        ids = np.arange(len(snapshot))[::-7]
        for rows in (view, snapshot.gather(ids), table.to_pydict()):
            for number, image in zip(rows["id"], rows["image"], strict=True):
                assert (np.reshape(image, (16, 16)) == sample(int(number))["image"]).all(), "a wrong row"
        del rows, table, view, image
    assert len(mapped_ids(cache)) % 16 == 0


def mapped_ids(cache: ac.Cache) -> list[int]:
    """As a loader reads: what cannot be read is left out."""
    with cache.snapshot() as snapshot:
        rows = snapshot.gather(np.arange(snapshot.map_all()))
        for number, image in zip(rows["id"].tolist(), rows["image"], strict=True):
            assert (image == sample(number)["image"]).all(), "a wrong row"
        return rows["id"].tolist()


def do_agree(cache: ac.Cache, twice: Twice) -> None:
    """Two ranks, of which one ends its epoch before the other one begins it."""
    ranks = [twice(lambda n=n: SharedPlan(cache.store, RankInfo(n, 2, "job", 2))) for n in range(2)]
    read = []

    def epoch(rank: SharedPlan) -> None:
        snapshot = rank.snapshot(0, {"seed": 0}, lambda: Snapshot.take(cache.store))
        assert snapshot is not None
        read.append([segment.seq for segment in snapshot.segments])
        snapshot.close()
        rank.release(0)

    try:
        for rank in ranks:
            twice(lambda rank=rank: epoch(rank))
            assert disk_bytes(cache.path) <= CAPACITY
        assert read[0] == read[-1]
    finally:
        for rank in ranks:
            rank.close()


def do_note(cache: ac.Cache, twice: Twice) -> None:
    """Notes are there wholly, before those that are merged with them leave."""
    for count in (3, 16):
        rows = [(seq, row) for seq in range(5) for row in range(count)]
        before = twice(lambda: noted(cache))
        try:
            cache.exclude(rows, reason="dark")
        except (OSError, MemoryError, ac.ArrowCacheError):
            assert twice(lambda: noted(cache)) in (before, 5 * count), "a note in part"
            twice(lambda rows=rows: cache.exclude(rows, reason="dark"))
        assert twice(lambda: noted(cache)) == 5 * count
    twice(lambda: cache.annotate(rows, loss=range(80)))
    twice(cache.close)


def do_rule(opened: tuple[ac.Cache, Snapshot], twice: Twice) -> None:
    """A rule holds or not, and one that is said again takes the place of the first."""
    cache, snapshot = opened
    rule = pc.field("id") < 8
    for _ in range(2):  # the second takes the place of the first
        try:
            cache.exclude(where=rule)
        except (OSError, MemoryError, ac.ArrowCacheError):
            assert len(twice(cache.rules)) < 3
            twice(lambda: cache.exclude(where=rule))
        assert 1 <= len(twice(cache.rules)) < 3
    try:
        cache.include(where=rule)
    except (OSError, MemoryError, ac.ArrowCacheError, ValueError):
        if twice(cache.rules):
            twice(lambda: cache.include(where=rule))
    assert twice(cache.rules) == []
    snapshot.close()


def mapped(path: Path) -> tuple[ac.Cache, Snapshot]:
    """A cache whose segments are mapped, so that a look at all rows opens no file."""
    snapshot = (cache := ac.Cache.open(path)).snapshot()
    snapshot.map_all()
    return cache, snapshot


def noted(cache: ac.Cache) -> int:
    return int(NotesLog(cache.store).excluded(NumberedRows.of(cache.store.segments())).sum())


def do_use(cache: ac.Cache, twice: Twice) -> None:
    """Rows come once, in order, though a batch is asked for again after what failed."""

    def learner() -> ac.Loader:
        return ac.Loader(cache, 16, once="learner", timeout=60)

    had: list[int] = []
    for _ in range(2):
        with twice(learner) as loader:
            for _ in range(2):
                had += twice(lambda loader=loader: next(iter(loader)))["id"].tolist()
    again = [*range(16, 48)]  # the last batch of a loader whose end could not be noted
    assert had[:32] == [*range(32)]
    assert had[32:] in ([*range(32, 64)], again), "a row came twice, or never"


# what happened to a cache before


def died(path: Path) -> None:
    """Writers and ranks were killed, and cache.lock lost its counter."""
    for number in range(2):
        (path / "incoming" / f"{number:032x}.part").write_bytes(bytes(5000))
    (path / "incoming" / f"{2:032x}.wait").touch()
    (path / "ranks" / "job-0123456789abcdef-0-0").write_bytes(b"half a li")
    (path / "cache.lock").write_bytes(LockRecord(0, 0, boot_id()).pack())


def restarted(path: Path) -> None:
    """The machine lost power: the newest segment is full of zeros."""
    file = max((path / "segments").iterdir())
    replace_file(file, bytes(file.stat().st_size))
    (path / "cache.lock").write_bytes(LockRecord(5, 0, "another boot").pack())


def copied(path: Path) -> None:
    """By what leaves out empty folders and files."""
    for name in ("incoming", "quarantine", "ranks", "pools"):
        (path / name).rmdir()
    for name in ("cache.lock", "lease.lock"):
        (path / name).unlink()


WRITES = frozenset({"create", "posix_fallocate", "writev", "pwrite", "link", "unlink"})
OPERATIONS = {
    "publish": Operation(do_publish, 3, expected=WRITES, publishes=True),
    "publish durably": Operation(
        do_publish, 3, options={"durable": True}, expected=WRITES | {"fsync"}, publishes=True
    ),
    "publish into a full cache": Operation(
        do_publish, 20, expected=WRITES | {"rename"}, evicts=True, publishes=True
    ),
    "publish where something is quarantined": Operation(
        do_publish, 9, quarantined=2, expected=WRITES, evicts=True, publishes=True
    ),
    "evict": Operation(do_evict, 5, expected=frozenset({"rename", "unlink", "fcntl"}), evicts=True),
    "resize": Operation(do_resize, 20, expected=frozenset({"rename", "writev", "fsync"}), evicts=True),
    "quarantine": Operation(do_verify, 5, damaged=2, expected=frozenset({"rename", "create", "pwrite"})),
    "freeze and thaw": Operation(do_freeze_and_thaw, expected=frozenset({"fsync", "rename", "writev"})),
    "verify": Operation(do_verify, expected=frozenset({"maps.open", "maps.map", "flock", "fcntl", "lstat"})),
    "take a task": Operation(do_take, 1, expected=frozenset({"create", "pread", "pwrite"})),
    "agree": Operation(do_agree, 5, expected=frozenset({"open", "link", "pread", "unlink"})),
    "agree in a full cache": Operation(do_agree, 20, expected=frozenset({"link", "pwrite"}), evicts=True),
    "open": Operation(
        do_open, begin=Path, also=died, publishes=True, expected=frozenset({"unlink", "pwrite", "read_text"})
    ),
    "open after a restart": Operation(
        do_open_and_read, begin=Path, also=restarted, expected=frozenset({"pwrite", "maps.map", "rename"})
    ),
    "open a copy": Operation(
        do_open,
        begin=Path,
        also=copied,
        publishes=True,
        expected=frozenset({"mkdir", "chmod", "create", "lstat"}),
    ),
    "create": Operation(do_create, 0, begin=Path, expected=frozenset({"mkdir", "chmod", "rename"})),
    "read": Operation(do_read, expected=frozenset({"maps.open", "maps.map", "pread", "flock"})),
    "read checked": Operation(do_read, begin=checked, expected=frozenset({"maps.open", "maps.map"})),
    "note": Operation(do_note, expected=frozenset({"create", "writev", "fsync", "link", "unlink"})),
    "rule": Operation(do_rule, begin=mapped, expected=frozenset({"link", "unlink", "fsync"})),
    "use once": Operation(
        do_use, expected=frozenset({"create", "posix_fallocate", "writev", "rename", "fsync"})
    ),
    "stats": Operation(do_stats, expected=frozenset({"scandir", "entry.stat", "listdir", "stat"})),
}


def check_sound(path: Path, before: list[Path], operation: Operation, *, was_full: bool = False) -> None:
    """What must hold for whoever comes next, whatever happened.

    Args:
        before: what was published then and was not damaged, oldest first.
        was_full: the disk was, which has a writer evict.
    """
    cache = ac.Cache.open(path)
    with quiet():
        cache.thaw()  # if it was killed in between
    assert os.listdir(path / "incoming") == [], "debris survived opening"
    assert os.listdir(path / "ranks") == [], "debris survived opening"
    assert disk_bytes(path) <= cache.stats().capacity_bytes
    assert cache.stats().leased_bytes == 0
    if operation.damaged or operation.also is restarted:
        with quiet():  # a segment damaged by us, which is still there
            cache.verify()
    old = [int(file.name[:20]) for file in before]
    found = seqs(cache)
    new = [seq for seq in found if seq > max([*old, operation.segments - 1])]
    kept = [seq for seq in found if seq not in new]
    assert len(new) <= 1
    if operation.evicts or (was_full and operation.publishes):
        assert kept == old[len(old) - len(kept) :], "not the oldest ones left"
    else:
        assert kept == old, "what was published is lost"
    stored = []
    for file in segment_files(cache):
        ids = read_ids(file)
        assert ids == list(range(ids[0], ids[0] + 16)), "a segment in part"
        stored += ids
    assert len(set(stored)) == len(stored), "rows twice"
    in_quarantine = os.listdir(path / "quarantine")
    segments = {name.removesuffix(".reason") for name in in_quarantine}
    assert segments <= set(in_quarantine), "a reason without its segment"
    assert len(segments) <= operation.damaged + operation.quarantined + (operation.also is restarted), (
        "a sound segment was quarantined"
    )
    highest = max(found, default=-1)
    publish(cache, 1, first=10**6)
    assert len({seq for seq in seqs(cache) if seq > highest}) == 1  # numbers leap, by millions
    assert cache.verify() == []
    assert disk_bytes(path) <= cache.stats().capacity_bytes
    assert os.listdir(path / "incoming") == []
    assert cache.stats().leased_bytes == 0


def sound_segments(path: Path, operation: Operation) -> list[Path]:
    """What is there before, and stays unless it is evicted."""
    files = sorted((path / "segments").iterdir()) if path.exists() else []
    return files[operation.damaged : len(files) - (operation.also is restarted)]


def held(path: Path) -> list[str]:
    """Descriptors and mappings of this process below a path."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that listed them
            pass
    found += [line.partition(" /")[2] for line in Path("/proc/self/maps").read_text().splitlines()]
    found += ["a mapping"] * mapping.live_mappings()
    return [name for name in found if f"{path}/".lstrip("/") in name or name == "a mapping"]
