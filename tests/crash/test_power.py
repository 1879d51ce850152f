"""The power fails at any moment of a life of a cache: what was promised is there, and nothing wrong is read.

A life is recorded once (disk.py). Then it is cut after each of its calls, in all ways that a file system
may have kept what was not synced, and a machine with another boot id opens what is left.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.disk import FATES, LOST_SYNCS, Disk, Tree, chance, lay_out
from helpers import KIB, disk_bytes, flip_byte, full, make_cache, publish, replace_file, sample, segment_files
from quick import first_is_quick, some_of

import arrowcache as ac
from arrowcache import linux
from arrowcache.limits import Limits
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import LockRecord, tasks_listed

CAPACITY = 240 * KIB  # six segments, beside room for two
POOL = "default.0"


@dataclass(frozen=True)
class Moment:
    """What an operation that has returned promises."""

    when: int
    segments: dict[str, bytes]
    capacity: int
    highest: int  # number that was ever given out
    condemned: frozenset[str] = frozenset()  # quarantined: never to be read again


@dataclass
class Life:
    """What was done to a cache, and what each operation promised when it returned."""

    disk: Disk
    path: Path
    moments: list[Moment] = field(default_factory=list)
    content: dict[str, bytes] = field(default_factory=dict)  # of every segment that ever was
    tasks_begun: list[int] = field(default_factory=list)
    condemned: frozenset[str] = frozenset()

    def returned(self, cache: ac.Cache) -> None:
        segments = {path.name: path.read_bytes() for path in segment_files(cache)}
        self.content |= {name: data for name, data in segments.items() if name not in self.content}
        highest = max((int(name[:20]) for name in self.content), default=-1)
        capacity = cache.stats().capacity_bytes
        self.moments.append(Moment(self.disk.now, segments, capacity, highest, self.condemned))

    def promised(self, cut: int) -> tuple[Moment, Moment] | None:
        """What held before the operation that the cut is in, and after it; None: no cache yet."""
        before = [moment for moment in self.moments if moment.when <= cut]
        after = [moment for moment in self.moments if moment.when > cut]
        return (before[-1], (after or before[-1:])[0]) if before else None


SEGMENTS = {"segment_bytes": 12 * KIB, "segment_rows": 8}


def live(root: Path, *, durable: bool) -> Life:
    """Publish, sample, evict, resize, quarantine, each more than once."""
    root.mkdir()
    disk = Disk(root)
    life = Life(disk, root / "new" / "cache")
    with disk.recording():
        cache = make_cache(life.path, capacity=CAPACITY, durable=durable, **SEGMENTS)
        life.returned(cache)
        publish(cache, 1, rows=8)
        life.returned(cache)
        draw(cache, life)
        condemn(cache, life)
        while segment_files(cache)[0].name[:20] < f"{2:020d}":  # beyond the capacity
            publish(cache, 1, rows=8)
            life.returned(cache)
        cache.resize(CAPACITY - 20 * KIB)
        life.returned(cache)
        cache.evict(CAPACITY)
        life.returned(cache)
        publish(cache, 1, rows=8)
        life.returned(cache)
    return life


def draw(cache: ac.Cache, life: Life) -> None:
    """Two tasks of a sampler pool."""

    def draws(rng: np.random.Generator) -> Any:
        life.tasks_begun.append(life.disk.now)
        first = 10**6 * len(life.tasks_begun)
        return map(sample, range(first, first + 8))

    with ThreadPoolExecutor(1) as executor:
        _sampler.draw = draws
        with ac.SamplerPool(
            cache, _sampler, workers=1, executor=executor, segments=2, progress=False
        ) as pool:
            pool.wait(segments=2, timeout=60)
    life.returned(cache)


def _sampler(rng: np.random.Generator) -> Any:
    return _sampler.draw(rng)  # type: ignore[attr-defined]


full(_sampler)


def condemn(cache: ac.Cache, life: Life) -> None:
    """The disk alters a byte of the newest segment, and `verify` finds it."""
    newest = segment_files(cache)[-1]
    data = bytearray(newest.read_bytes())
    data[3000] ^= 1
    life.disk.damage(newest, bytes(data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert len(cache.verify()) == 1
    life.condemned = frozenset([newest.name])
    life.returned(cache)


@contextmanager
def another_boot():
    """The machine has restarted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linux, "boot_id", lambda: "another boot")
        patch.setattr(os, "fsync", lambda fd: None)  # which would take most of the time
        yield


def cuts(life: Life, seeds: int) -> dict[tuple[Any, ...], tuple[int, str, Tree]]:
    """Every different thing that may be left, with a cut and a fate that leave it."""
    found = {}
    for cut in range(life.disk.now + 1):
        fates = FATES | {f"chance {seed}": chance((cut, seed)) for seed in range(seeds)}
        for name, fate in fates.items():
            tree = life.disk.after_a_cut(cut, fate)
            key = (life.promised(cut) is None, *((path, data) for path, (_, data) in sorted(tree.items())))
            found[key] = cut, name, tree  # the latest cut promises most
    return found


def check_all(life: Life, folder: Path, check: Callable[[Life, int, Path], None], seeds: int) -> int:
    """Open what some cuts leave, in the nightly all; returns how many things it may be."""
    left = cuts(life, seeds)
    with another_boot():
        for cut, fate, tree in some_of([*left.values()], 4 if seeds else 1):
            lay_out(tree, folder / "left")
            path = folder / "left" / "new" / "cache"
            try:
                check(life, cut, path)
            except BaseException as error:
                done = ", ".join(map(str, life.disk.calls[max(0, cut - 3) : cut]))
                raise AssertionError(f"cut {cut} ({fate}), after {done}: {error!r}") from error
    return len(left)


def open_again(life: Life, cut: int, path: Path) -> ac.Cache | None:
    """Open a cache that had been made; else make it, which must work. What else every mode promises."""
    promised = life.promised(cut)
    if promised is None:
        cache = make_cache(path, exist_ok=True, **SEGMENTS)
        publish(cache, 1, rows=8)
        assert cache.verify() == []
        return None
    before, after = promised
    cache = ac.Cache.open(path)
    stats = cache.stats()
    assert stats.capacity_bytes in (before.capacity, after.capacity)
    assert disk_bytes(path) <= stats.capacity_bytes
    assert os.listdir(path / "incoming") == []
    assert stats.next_seq > before.highest, "a number is given out twice"
    return cache


def check_durable(life: Life, cut: int, path: Path) -> None:
    """What was published is there, bit for bit, and nothing needs checking."""
    cache = open_again(life, cut, path)
    if cache is None:
        return
    before, after = life.promised(cut) or (life.moments[-1],) * 2
    found = {file.name: file.read_bytes() for file in segment_files(cache)}
    for name in before.segments.keys() & after.segments.keys():
        assert name in found, f"{name} was published, and is lost"
    assert not before.condemned & found.keys(), "known to be damaged, and back"
    altered = life.condemned - before.condemned  # found out by the operation that was cut, if at all
    for name in found.keys() - altered:
        assert found[name] == life.content.get(name, found[name]), f"{name} has other bytes"
    assert {problem.name for problem in quiet_verify(cache)} <= altered
    begun = sum(when <= cut for when in life.tasks_begun)
    with cache.store.locked():
        listed = max(tasks_listed(POOL, cache.store.segments()), default=-1) + 1
        assert cache.store.folder.take_tasks(POOL, 1, listed) >= begun, "a task is done a second time"
    go_on(cache)


def check_default(life: Life, cut: int, path: Path) -> None:
    """What is delivered is right; what is not is quarantined, by the first reader already."""
    cache = open_again(life, cut, path)
    if cache is None:
        return
    read_right(cache)
    quiet_verify(cache)  # what no reader would be given: the headroom
    go_on(cache)


def go_on(cache: ac.Cache) -> None:
    publish(cache, 1, rows=8)
    assert cache.verify(repair=False) == []


def read_right(cache: ac.Cache) -> int:
    """Read everything: each row is right; returns how many are left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with cache.snapshot() as snapshot:
            snapshot.map_all()
            got = snapshot.gather(np.arange(len(snapshot)))
    for number, image in zip(got["id"].tolist(), got["image"], strict=True):
        assert np.array_equal(image, sample(number)["image"]), "a wrong row was delivered"
    return len(got["id"])


def quiet_verify(cache: ac.Cache) -> list[ac.Problem]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return cache.verify()


@pytest.mark.slow
@pytest.mark.smoke
def test_a_durable_cache_has_all_that_was_published_wherever_the_power_fails(tmp_path):
    life = live(tmp_path / "disk", durable=True)
    assert check_all(life, tmp_path, check_durable, seeds=2) > 300


@pytest.mark.slow
def test_a_default_cache_delivers_nothing_wrong_wherever_the_power_fails(tmp_path):
    life = live(tmp_path / "disk", durable=False)
    assert check_all(life, tmp_path, check_default, seeds=2) > 300


def test_the_disk_saw_all_that_was_done(tmp_path):
    life = live(tmp_path / "disk", durable=True)
    tree = life.disk.after_a_cut(life.disk.now, FATES["everything"])
    found = {
        os.path.relpath(path, life.disk.root): path.read_bytes() if path.is_file() else None
        for path in life.disk.root.rglob("*")
    }
    assert {name: data for name, (_, data) in tree.items()} == found


SYNC, READ = Folder.sync_folder, Folder.read_record


def nothing(*_: object) -> None:
    pass


def below_the_cache(self: Folder, path: Path) -> None:
    if path.is_relative_to(self.path):
        SYNC(self, path)


def no_suspects(self: Folder) -> LockRecord:
    return replace(READ(self), suspect_below=0)


MISSING: dict[str, tuple[bool, Callable[[pytest.MonkeyPatch], None], str]] = {
    "the bytes' sync": (True, lambda less: less.setitem(LOST_SYNCS, ".part", "left out"),
                        "other bytes|damaged"),
    "the names' sync": (True, lambda less: less.setattr(Folder, "sync_segments", nothing), "is lost"),
    "the parents' sync": (True, lambda less: less.setattr(Folder, "sync_folder", below_the_cache),
                          "no cache here"),
    "the quarantine's sync": (True, lambda less: less.setattr(Folder, "sync_isolated", nothing), "and back"),
    "the tasks' sync": (True, lambda less: less.setattr(Folder, "sync_tasks", nothing), "second time"),
    "the leap of numbers": (True, lambda less: less.setattr(Limits, "current", Limits(number_leap=0)),
                            "given out twice"),
    "the check after a restart": (False, lambda less: less.setattr(Folder, "read_record", no_suspects),
                                  "wrong row"),
}  # fmt: skip


@pytest.mark.parametrize("what", first_is_quick(MISSING))
def test_without_one_of_its_parts_the_promise_is_found_broken(tmp_path, monkeypatch, what):
    durable, leave_out, expected = MISSING[what]
    leave_out(monkeypatch)
    life = live(tmp_path / "disk", durable=durable)
    with pytest.raises(AssertionError, match=expected):
        check_all(life, tmp_path, check_durable if durable else check_default, seeds=0)


# the order of calls


def calls_of(cache: ac.Cache, do: Callable[[], object]) -> list[str]:
    """What an operation does to the disk, without the numbers in names; repeated calls once."""
    with Disk(cache.path.parent).recording() as disk:
        do()
    names = [re.sub(r"cache/?|[0-9a-f]{32}|\d{20}-\d+-", "", str(call)) for call in disk.calls]
    return [name for name, _ in itertools.groupby(names)]


SYNCS = {"sync incoming/.part", "sync segments"}
PUBLISHES = [
    "create incoming/.part", "write incoming/.part", "sync incoming/.part", "write .lock",
    "link incoming/.part segments/.arrow", "unlink incoming/.part", "write usage", "sync segments",
]  # fmt: skip


@pytest.mark.parametrize("durable", [True, False])
def test_a_publish_syncs_the_bytes_before_they_have_a_name_and_the_name_before_it_returns(tmp_path, durable):
    cache = make_cache(tmp_path / "cache", durable=durable)
    expected = PUBLISHES if durable else [call for call in PUBLISHES if call not in SYNCS]
    assert calls_of(cache, lambda: publish(cache, 1)) == expected


@pytest.mark.parametrize("durable", [True, False])
def test_settings_are_synced_in_either_mode_before_they_replace_the_old_ones(tmp_path, durable):
    cache = make_cache(tmp_path / "cache", durable=durable)
    assert calls_of(cache, lambda: cache.resize("2MiB")) == [
        "create incoming/.part", "write incoming/.part", "sync incoming/.part",
        "rename incoming/.part .json", "sync ",
    ]  # fmt: skip


def test_an_eviction_syncs_nothing_for_what_comes_back_is_whole(tmp_path):
    cache = make_cache(tmp_path / "cache", durable=True)
    publish(cache, 1)
    calls = calls_of(cache, lambda: cache.evict(1))
    assert calls[0] == "rename segments/.arrow incoming/.gone"
    assert "unlink incoming/.gone" in calls
    assert not [call for call in calls if call.startswith("sync")]


@pytest.mark.parametrize("durable", [True, False])
def test_a_condemned_segment_is_in_quarantine_before_it_is_out_of_the_segments(tmp_path, durable):
    cache = make_cache(tmp_path / "cache", durable=durable)
    publish(cache, 1)
    flip_byte(segment_files(cache)[0], 3000)
    assert calls_of(cache, lambda: quiet_verify(cache)) == [
        "rename segments/.arrow quarantine/.arrow", "create quarantine/.arrow.reason",
        "write quarantine/.arrow.reason", *(["sync quarantine", "sync segments"] if durable else []),
    ]  # fmt: skip


def test_a_creation_syncs_every_folder_that_has_a_new_name_in_it(tmp_path):
    path = tmp_path / "a" / "b" / "cache"
    with Disk(tmp_path).recording() as disk:
        make_cache(path)
    calls = list(map(str, disk.calls))
    for made, parent in (("mkdir a", "sync ."), ("mkdir a/b", "sync a"), ("mkdir a/b/cache", "sync a/b")):
        assert calls.index(made) < calls.index(parent)
    replaced = next(index for index, call in enumerate(calls) if call.endswith("cache.json"))
    assert calls.index("sync a/b") < replaced, "settings are the last to appear: with them it is a cache"
    assert "sync a/b/cache" in calls[replaced:]


def test_a_durable_pool_syncs_a_tasks_number_before_the_task_begins(tmp_path):
    life = live(tmp_path / "disk", durable=True)
    for number, begun in enumerate(life.tasks_begun):
        calls = [str(call).replace("new/cache/", "") for call in life.disk.calls[:begun]]
        takes = [index for index, call in enumerate(calls) if call == f"write pools/{POOL}"]
        assert len(takes) == 1 + number + 1, "one as the pool begins, and one a task"
        assert calls[takes[-1] + 1 :] == [f"sync pools/{POOL}", "sync pools"]


def test_a_counter_is_synced_before_there_is_a_cache_and_once_a_restart(tmp_path):
    with Disk(tmp_path).recording() as disk:
        make_cache(tmp_path / "cache")
    calls = list(map(str, disk.calls))
    replaced = next(index for index, call in enumerate(calls) if call.endswith("cache.json"))
    assert calls.index("write cache/cache.lock") < calls.index("sync cache/cache.lock") < replaced
    cache = ac.Cache.open(tmp_path / "cache")
    opens = lambda: ac.Cache.open(cache.path)  # noqa: E731
    assert calls_of(cache, opens) == []
    with another_boot():
        assert calls_of(cache, opens) == ["write .lock", "sync .lock"]
        assert calls_of(cache, opens) == []


def test_numbers_are_given_out_once_though_the_power_fails_again_and_again(tmp_path):
    """Each time all that can be forgotten is, and nothing but the counter could know better."""
    path = tmp_path / "disk" / "cache"
    path.parent.mkdir()
    make_cache(path)
    given: list[int] = []
    for number in range(4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linux, "boot_id", lambda number=number: f"boot {number}")
            with Disk(path.parent).recording() as disk:
                cache = ac.Cache.open(path)
                publish(cache, 3)
                numbers = [int(file.name[:20]) for file in segment_files(cache)]
                cache.evict("1MiB")
        assert not set(numbers) & set(given)
        given += numbers
        lay_out(disk.after_a_cut(disk.now, FATES["nothing unsynced"]), path.parent)
    assert given == sorted(set(given))


# what file systems leave of a file


def zeroed_from(start: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:start] + bytes(len(data) - start)


LEFT: dict[str, Callable[[bytes], bytes]] = {
    "all zero": zeroed_from(0),
    "zero from its second block on": zeroed_from(4096),
    "zero in its last block": lambda data: zeroed_from((len(data) - 1) // 4096 * 4096)(data),
    "zero but for a sound footer": lambda data: data[:4096] + bytes(len(data) - 8192) + data[-4096:],
    "one block zero": lambda data: data[:8192] + bytes(4096) + data[12288:],
    "short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


def read_loader(shuffle: str | None, **options: Any) -> Callable[[ac.Cache], dict[int, Any]]:
    def read(cache: ac.Cache) -> dict[int, Any]:
        got: dict[int, Any] = {}
        with ac.Loader(cache, 8, shuffle=shuffle, drop_last=False, **options) as loader:
            for batch in loader:
                got |= dict(zip(batch["id"].tolist(), np.copy(batch["image"]), strict=True))
        return got

    return read


def read_gather(cache: ac.Cache) -> dict[int, Any]:
    got: dict[int, Any] = {}
    with cache.snapshot() as snapshot:
        for first in range(0, len(snapshot), 16):
            with suppress(ac.CorruptSegmentError):
                rows = snapshot.gather(range(first, first + 16))
                got |= dict(zip(rows["id"].tolist(), rows["image"], strict=True))
    return got


def read_table(cache: ac.Cache) -> dict[int, Any]:
    while True:
        with suppress(ac.CorruptSegmentError), cache.snapshot() as snapshot:
            table = snapshot.table().to_pylist()
            return {row["id"]: np.reshape(row["image"], (16, 16)) for row in table}


def read_views(cache: ac.Cache) -> dict[int, Any]:
    got: dict[int, Any] = {}
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        for view in snapshot.views():
            got |= dict(zip(view["id"].tolist(), np.copy(view["image"]), strict=True))
    return got


READERS = {
    "gather": read_gather,
    "table": read_table,
    "views": read_views,
    "rows": read_loader("rows"),
    "in order": read_loader(None),
    "blocks": read_loader("blocks"),
    "worker processes": read_loader("rows", workers=1),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_a_power_cut_zeroed_is_found_out_before_a_row_of_it_is_read(tmp_path, reader):
    path = tmp_path / "cache"
    cache = make_cache(path)
    publish(cache, len(LEFT) + 2)
    files = segment_files(cache)
    for file, left in zip(files[1:], LEFT.values(), strict=False):
        replace_file(file, left(file.read_bytes()))
    with another_boot(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        again = ac.Cache.open(path)
        got = READERS[reader](again)
    sound = [*range(16), *range(16 * (len(files) - 1), 16 * len(files))]
    assert sorted(got) == sound
    for number, image in got.items():
        assert np.array_equal(image, sample(number)["image"])
    assert [file.name for file in segment_files(again)] == [files[0].name, files[-1].name]
    assert again.stats().quarantined == len(LEFT)
    assert again.verify() == []


@pytest.mark.parametrize("left", [b"", bytes(500), bytes(52)], ids=["empty", "zeros", "zeros in part"])
def test_a_cache_whose_locks_were_zeroed_goes_on(tmp_path, left):
    path = tmp_path / "cache"
    cache = make_cache(path)
    publish(cache, 3)
    before = segment_files(cache)
    (path / "cache.lock").write_bytes(left)
    (path / "lease.lock").write_bytes(left)
    with another_boot():
        again = ac.Cache.open(path)
        assert read_right(again) == 48
        publish(again, 1)
        assert again.verify() == []
    assert segment_files(again)[:3] == before
    assert len(segment_files(again)) == 4


@pytest.mark.parametrize("left", [b"", bytes(500), None], ids=["empty", "zeros", "missing"])
def test_settings_that_a_disk_lost_all_the_same_are_refused_with_a_way_out(tmp_path, left):
    """They are synced before they have a name: no power cut does that, but a bad disk or a person may."""
    path = tmp_path / "cache"
    publish(make_cache(path), 3)
    settings = (path / "cache.json").read_bytes()
    (path / "cache.json").unlink()
    if left is not None:
        (path / "cache.json").write_bytes(left)
    for attempt in (lambda: ac.Cache.open(path), lambda: make_cache(path, exist_ok=True)):
        with pytest.raises(
            ac.CacheFormatError, match=r"put back a copy|no cache\.json|give an empty or a new"
        ):
            attempt()
    (path / "cache.json").write_bytes(settings)
    again = ac.Cache.open(path)
    assert read_right(again) == 48
    shutil.rmtree(path)
    publish(make_cache(path), 1)
