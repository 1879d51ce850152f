"""Fail, or kill the process at, the i-th file call of an operation, for every i.

Calls are counted where storage/folder.py meets the operating system, so nothing depends on how
its methods are cut. Whatever happened, the next one to come finds a sound cache.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import KIB, disk_bytes, flip_byte, make_cache, publish, read_ids, segment_files, seqs
from helpers import sample as row
from processes import Child

import arrowcache as ac
from arrowcache.reading.membership import Membership
from arrowcache.reading.ranks import Agreement
from arrowcache.reading.snapshot import Snapshot

CAPACITY = 400 * KIB
NEW = 10**5  # the first id that an operation publishes
COUNTED = (
    "open",
    "posix_fallocate",
    "ftruncate",
    "writev",
    "fsync",
    "pwrite",
    "link",
    "rename",
    "unlink",
    "mkdir",
)


class Faults:
    """Counts the calls that change files, and does something at one of them."""

    def __init__(self, at: int, act: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.calls: list[str] = []
        self.reached = False
        self._at, self._act = at, act

    def _meet(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self._at:
            self.reached = True
            self._act(name, arguments)

    @contextmanager
    def active(self) -> Iterator[Faults]:
        originals = {name: getattr(os, name) for name in COUNTED}
        write_text = Path.write_text

        def wrapper(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if name != "open" or arguments[1] & os.O_CREAT:
                    self._meet(name, arguments)
                return originals[name](*arguments, **options)

            return call

        def text(path: Path, data: str, *arguments: Any, **options: Any) -> int:
            self._meet("write_text", ())
            return write_text(path, data, *arguments, **options)

        for name in COUNTED:
            setattr(os, name, wrapper(name))
        Path.write_text = text  # type: ignore[method-assign]
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(os, name, original)
            Path.write_text = write_text  # type: ignore[method-assign]


# operations on an open cache; what raises is called once more, as a user would


def do_publish(cache: ac.Cache) -> None:
    writer = cache.writer("raise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that a folder could not be synced
        for number in range(NEW, NEW + 16):
            twice(lambda number=number: writer.append(row(number)))
        twice(writer.close)


def do_evict(cache: ac.Cache) -> None:
    twice(lambda: cache.evict(3 * 20 * KIB))


def do_resize(cache: ac.Cache) -> None:
    twice(lambda: cache.resize(CAPACITY - 60 * KIB))


def do_quarantine(cache: ac.Cache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that it quarantines
        twice(cache.verify)


def do_claim(cache: ac.Cache) -> None:
    with cache.store.locked():
        twice(lambda: cache.store.folder.claim_tasks("default.0", 1))


def do_open(cache: ac.Cache) -> None:
    for number in range(2):
        with open(cache.path / "incoming" / f"{number:032x}.part", "w"):
            pass
    twice(lambda: ac.Cache.open(cache.path))


def do_agree(cache: ac.Cache) -> None:
    """Two ranks, of which one ends its epoch before the other one begins it."""
    ranks = [Agreement(cache.store, Membership(n, 2, "job", 2)) for n in range(2)]
    read = []

    def epoch(rank: Agreement) -> None:
        snapshot = rank.snapshot(0, {"seed": 0}, lambda: Snapshot.take(cache.store))
        assert snapshot is not None
        read.append([segment.seq for segment in snapshot.segments])
        snapshot.close()
        rank.release(0)

    try:
        for rank in ranks:
            twice(lambda rank=rank: epoch(rank))
            assert disk_bytes(cache.path) <= CAPACITY
        assert read[0] == read[1]
    finally:
        for rank in ranks:
            rank.close()


def twice(call: Callable[[], object]) -> None:
    """A call that may fail once: then nothing of it has happened, and it is made again."""
    try:
        call()
    except (OSError, ac.CacheFullError):
        call()


def prepare(path: Path, *, segments: int, damaged: int = 0, quarantined: int = 0, **options: Any) -> None:
    cache = make_cache(path, **{"capacity": CAPACITY, **options})
    publish(cache, segments)
    for _ in range(quarantined):
        flip_byte(segment_files(cache)[0], 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert len(cache.verify()) == 1
    for file in segment_files(cache)[:damaged]:
        flip_byte(file, 3000)


OPERATIONS: dict[str, tuple[Callable[[ac.Cache], None], dict[str, Any], set[str]]] = {
    "publish": (do_publish, {"segments": 3}, {"posix_fallocate", "writev", "pwrite", "link", "unlink"}),
    "publish durably": (do_publish, {"segments": 3, "durable": True}, {"fsync", "link"}),
    "publish into a full cache": (do_publish, {"segments": 20}, {"rename", "unlink", "link"}),
    "publish where something is quarantined": (
        do_publish,
        {"segments": 9, "quarantined": 2},
        {"unlink", "link"},
    ),
    "evict": (do_evict, {"segments": 5}, {"rename", "unlink"}),
    "resize": (do_resize, {"segments": 20}, {"rename", "unlink", "writev", "fsync"}),
    "quarantine": (do_quarantine, {"segments": 5, "damaged": 2}, {"rename", "write_text"}),
    "claim a task": (do_claim, {"segments": 1}, {"open", "pwrite"}),
    "agree": (do_agree, {"segments": 5}, {"open", "writev", "link", "pwrite", "unlink"}),
    "agree in a full cache": (do_agree, {"segments": 20}, {"link", "pwrite", "unlink"}),
    "open": (do_open, {"segments": 1}, {"unlink"}),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> Callable[[str], Path]:
    """A prepared cache for each operation, to be copied."""
    folder = tmp_path_factory.mktemp("templates")
    made: dict[str, Path] = {}

    def template(operation: str) -> Path:
        if operation not in made:
            made[operation] = folder / str(len(made))
            prepare(made[operation], **OPERATIONS[operation][1])
        return made[operation]

    return template


def check_sound(path: Path, before: list[Path], operation: str) -> None:
    """What must hold for whoever comes next."""
    cache = ac.Cache.open(path)
    assert os.listdir(path / "incoming") == [], "debris survived opening"
    assert os.listdir(path / "ranks") == [], "debris survived opening"
    assert disk_bytes(path) <= cache.stats().capacity_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a segment damaged by us, which is still there
        problems = cache.verify()
    assert operation == "quarantine" or problems == []
    assert cache.verify() == []
    old = [int(file.name[:20]) for file in before]
    found = seqs(cache)
    new = [seq for seq in found if seq > old[-1]]
    assert len(new) <= 1
    if operation == "quarantine":
        assert found == old[2:]
    else:
        assert [*found] == [*old, *new][len(old) + len(new) - len(found) :], "not the oldest ones left"
    for file in segment_files(cache):
        ids = read_ids(file)
        assert ids == list(range(ids[0], ids[0] + 16)), "a segment in part"
    stored = [i for file in segment_files(cache) for i in read_ids(file)]
    assert len(set(stored)) == len(stored), "rows twice"
    in_quarantine = os.listdir(path / "quarantine")
    reasons = [name.removesuffix(".reason") for name in in_quarantine if name.endswith(".reason")]
    assert set(reasons) <= set(in_quarantine), "a reason without its segment"
    highest = max(seqs(cache), default=-1)
    publish(cache, 3, first=10**6)
    assert len(set(seqs(cache)) - set(range(highest + 1))) == 3
    assert cache.verify() == []
    assert disk_bytes(path) <= cache.stats().capacity_bytes
    assert os.listdir(path / "incoming") == []
    assert cache.stats().leased_bytes == 0


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that listed them
            pass
    return found


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_file_call_that_fails_once_leaves_nothing_partial_and_nothing_leaked(
    tmp_path, templates, operation, code
):
    do, _, expected_calls = OPERATIONS[operation]

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        raise OSError(code, os.strerror(code), name)

    for i in range(200):
        path = tmp_path / str(i)
        shutil.copytree(templates(operation), path)
        cache, before = ac.Cache.open(path), segment_files(ac.Cache.open(path))
        with Faults(i, fail).active() as faults:
            do(cache)
        assert not [name for name in descriptors() if name.startswith(str(path))], "an open file leaked"
        if "publish" in operation:
            assert read_ids(segment_files(cache)[-1]) == list(range(NEW, NEW + 16))
        check_sound(path, before, operation)
        if not faults.reached:
            break
    assert expected_calls <= set(faults.calls), "the operation does not do what it is tested for"
    assert i == len(faults.calls)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_process_killed_at_any_file_call_leaves_nothing_partial_and_nothing_leaked(
    tmp_path, templates, operation
):
    do = OPERATIONS[operation][0]

    def killed_at(i: int, path: Path) -> bool:
        def kill(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "writev":  # in the middle of it
                os.write(arguments[0], bytes(arguments[1][0])[: arguments[1][0].nbytes // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        cache = ac.Cache.open(path)
        with Faults(i, kill).active() as faults:
            do(cache)
        return faults.reached

    for i in range(200):
        path = tmp_path / str(i)
        shutil.copytree(templates(operation), path)
        before = segment_files(ac.Cache.open(path))
        with Child(killed_at, i, path) as child:
            code = child.exit_code()
            assert code in (0, -signal.SIGKILL)
            ended = code == 0 and not child.result()
        check_sound(path, before, operation)
        if ended:
            break
    assert ended
    assert i > 1


def test_a_disk_that_is_full_for_once_costs_no_more_than_the_room_needed(tmp_path):
    prepare(tmp_path / "cache", segments=8, capacity=1024 * KIB)
    shutil.copytree(tmp_path / "cache", tmp_path / "probe")
    with Faults(-1, lambda name, arguments: None).active() as faults:
        do_publish(ac.Cache.open(tmp_path / "probe"))
    reserve = faults.calls.index("posix_fallocate")

    def full(name: str, arguments: tuple[Any, ...]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = ac.Cache.open(tmp_path / "cache")
    with Faults(reserve, full).active() as faults:
        do_publish(cache)
    assert faults.calls.count("posix_fallocate") == 2
    assert seqs(cache) == list(range(1, 9)), "one segment makes room for one"


def test_a_disk_that_stays_full_is_a_typed_error_and_loses_no_row(tmp_path):
    path = tmp_path / "cache"
    prepare(path, segments=3)
    cache = ac.Cache.open(path)
    writer = cache.writer("raise")
    for number in range(48, 63):
        writer.append(row(number))
    original = os.posix_fallocate

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = full
    try:
        writer.append(row(63))  # fills the segment; every sample is taken
        with pytest.raises(ac.CacheFullError, match="the disk is full"):
            writer.append(row(64))
    finally:
        os.posix_fallocate = original
    writer.append(row(64))
    writer.close()
    assert read_ids(segment_files(cache)[-2]) == list(range(48, 64))
    assert read_ids(segment_files(cache)[-1]) == [64]
    assert cache.verify() == []
    assert os.listdir(path / "incoming") == []


def test_a_creation_that_was_killed_anywhere_can_be_repeated(tmp_path):
    def create(i: int, path: Path) -> bool:
        def kill(name: str, arguments: tuple[Any, ...]) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        with Faults(i, kill).active() as faults:
            make_cache(path)
        return faults.reached

    for i in range(100):
        path = tmp_path / str(i)
        with Child(create, i, path) as child:
            code = child.exit_code()
            ended = code == 0 and not child.result()
            assert ended or code == -signal.SIGKILL
        cache = make_cache(path, exist_ok=True)
        assert os.listdir(path / "incoming") == []
        publish(cache, 2)
        assert cache.verify() == []
        if ended:
            break
    assert ended
    assert i > 8
