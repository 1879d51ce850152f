"""Fail, or kill the process at, the i-th file call of an operation, for every i.

Whatever happened, what failed can be done again at once, and the next one to come finds a sound cache.
A kill at a call that only reads is the kill at the next one that changes something.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from crash.faults import CODES, Faults, Point, error_of
from crash.matrix import Templates, attempt, little_to_collect, points_of, some_cases
from crash.operations import OPERATIONS, check_sound, failing_once, quiet, sound_segments
from helpers import make_cache, publish, read_ids, sample, segment_files, seqs
from processes import Child
from quick import one_in

import arrowcache as ac
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.sampling.executors import OpenTasks
from arrowcache.storage.layout import tasks_listed
from arrowcache.storage.locks import LockFile

ONLY_READING = ("verify", "read", "read checked", "stats")


@pytest.fixture(scope="module", autouse=True)
def _sync_nothing():
    """Slow disks would take minutes, and nobody cuts the power here: test_power.py does."""
    with mock.patch.object(os, "fsync", return_value=None), little_to_collect():
        yield


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return Templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory, templates):
    """For each operation, which failures are tried."""
    folder = tmp_path_factory.mktemp("probes")
    return some_cases(
        {name: points_of(name, templates, folder / str(n)) for n, name in enumerate(OPERATIONS)}
    )


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("operation", "third"), one_in(3, itertools.product(OPERATIONS, range(3)), "arrowcache/storage")
)
def test_a_call_that_fails_once_or_for_a_while_leaves_nothing_partial_and_nothing_leaked(
    tmp_path, templates, cases, operation, third
):
    for number, case in enumerate(cases[operation][third::3]):
        try:
            attempt(operation, case, templates, tmp_path / str(number))
        except Exception as error:
            raise AssertionError(f"after {case}") from error


def test_each_call_fails_in_each_way_in_some_operation(cases):
    """As a table: what opens, reads, locks, maps, lists, makes, writes, moves, syncs and removes."""
    met = {(case.point.name, case.code, case.lasting) for tried in cases.values() for case in tried}
    calls = {name for name, _, _ in met}
    assert calls >= {"open", "create", "pread", "maps.open", "maps.map", "fstat", "lstat", "stat"}
    assert calls >= {"entry.stat", "scandir", "listdir", "statvfs", "flock", "fcntl", "read_text", "chmod"}
    assert calls >= {"mkdir", "ftruncate", "posix_fallocate", "writev", "pwrite"}
    assert calls >= {"fsync", "link", "rename", "unlink"}
    assert met == {(name, code, lasting) for name in calls for code in CODES for lasting in (False, True)}


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("operation", "first"),
    one_in(
        3,
        itertools.product([name for name in OPERATIONS if name not in ONLY_READING], range(3)),
        "arrowcache/storage",
    ),
)
def test_a_process_killed_at_any_file_call_leaves_nothing_partial_and_nothing_leaked(
    tmp_path, templates, operation, first
):
    what = OPERATIONS[operation]

    def killed_at(i: int, path: Path) -> bool:
        def kill(name: str, arguments: tuple[Any, ...]) -> None:
            if name == "writev":  # in the middle of it
                os.write(arguments[0], bytes(arguments[1][0])[: arguments[1][0].nbytes // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        subject, faults = what.begin(path), Faults(i, kill, only=changes)
        with quiet(), faults.active():
            what.do(subject, failing_once(faults))
        return faults.reached

    for i in range(first, 200, 3):
        path = tmp_path / str(i)
        templates.copy(operation, path)
        before = sound_segments(path, what)
        with Child(killed_at, i, path) as child:
            code = child.exit_code()
            assert code in (0, -signal.SIGKILL)
            ended = code == 0 and not child.result()
        if operation == "create":
            what.do(path, lambda call: call())
        check_sound(path, before, what)
        if ended:
            break
    assert ended
    assert i > 1


@pytest.mark.slow
def test_a_task_of_divided_samples_is_published_or_open_wherever_its_process_was_killed(tmp_path):
    pool = "default.0"

    def opened(cache: ac.Cache) -> OpenTasks:
        cache.store.folder.take_tasks(pool, 0)
        return OpenTasks(cache.store, pool, LockFile(cache.path / "pools" / pool))

    def killed_at(i: int, path: Path) -> bool:
        def kill(name: str, arguments: tuple[Any, ...]) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        cache, segment = ac.Cache.open(path), SegmentBuilder(ac.Cache.open(path).store.settings.form)
        segment.take(segment.convert(sample(0), many=False), 0)
        faults = Faults(i, kill, only=changes)
        with faults.active():
            with cache.store.locked():
                tasks = opened(cache)
                assert [tasks.take(3), tasks.take(3)] == [0, 1]
            for number in (1, 0):
                cache.store.publish(segment.encode(), f"{pool}.{number}")
        return faults.reached

    for i in range(200):
        cache = make_cache(tmp_path / str(i))
        with Child(killed_at, i, cache.path) as child:
            assert child.exit_code() in (0, -signal.SIGKILL)
            ended = child.exit_code() == 0 and not child.result()
        published = tasks_listed(pool, cache.store.segments())
        with cache.store.locked():
            tasks = opened(cache)
            taken = [tasks.take(3) for _ in range(4 - len(published))]
        assert taken == [*({0, 1, 2} - published), None]
        assert cache.store.folder.returned_tasks(pool) == taken[:-1]
        if ended:
            break
    assert ended
    assert published == {0, 1}


def changes(point: Point) -> bool:
    return point.is_change


def test_a_disk_that_is_full_for_once_costs_no_more_than_the_room_needed(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 8)

    def full(name: str, arguments: tuple[Any, ...]) -> None:
        raise error_of(name, errno.ENOSPC)

    with Faults(0, full, only=lambda point: point.name == "posix_fallocate").active() as faults:
        publish(cache, 1)
    assert faults.calls == 2 * ["posix_fallocate"]
    assert seqs(cache) == list(range(1, 9)), "one segment makes room for one"


def test_a_disk_that_stays_full_costs_nothing_after_the_last_attempt(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 8)
    writer = cache.writer("raise")
    for number in range(128, 143):
        writer.append(sample(number))

    def full(name: str, arguments: tuple[Any, ...]) -> None:
        raise error_of(name, errno.ENOSPC)

    with Faults(0, full, lasting=True, only=lambda point: point.name == "posix_fallocate").active() as faults:
        writer.append(sample(143))
    assert len(faults.calls) == 8 - len(seqs(cache)) + 1
    writer.close()


def test_a_disk_that_stays_full_is_a_typed_error_and_loses_no_row(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="400KiB")
    publish(cache, 3)
    writer = cache.writer("raise")
    for number in range(48, 63):
        writer.append(sample(number))

    def full(name: str, arguments: tuple[Any, ...]) -> None:
        raise error_of(name, errno.ENOSPC)

    with Faults(0, full, lasting=True, only=lambda point: point.name == "posix_fallocate").active():
        writer.append(sample(63))  # fills the segment; every sample is taken
        with pytest.raises(ac.CacheFullError, match="the disk is full"):
            writer.append(sample(64))
    writer.append(sample(64))
    writer.close()
    assert read_ids(segment_files(cache)[-2]) == list(range(48, 64))
    assert read_ids(segment_files(cache)[-1]) == [64]
    assert cache.verify() == []
    assert os.listdir(cache.path / "incoming") == []
