"""Checking segments, and moving what fails out of sight."""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    disk_bytes,
    file_bytes,
    flip_byte,
    ids_of,
    make_cache,
    publish,
    replace_file,
    segment_files,
    seqs,
    variable,
)
from processes import Child

import arrowcache as ac
from arrowcache import linux
from arrowcache.native import maps
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage import mapping, verification
from arrowcache.storage.layout import LockRecord
from arrowcache.storage.locks import LockFile
from arrowcache.storage.verification import Problem, quarantine


@pytest.fixture
def cache(tmp_path):
    made = make_cache(tmp_path / "cache")
    publish(made, 4)
    return made


def truncate(path):
    replace_file(path, path.read_bytes()[:-100])


def empty(path):
    replace_file(path, b"")


def zero(path):
    replace_file(path, bytes(path.stat().st_size))


def alter(path):
    flip_byte(path, path.stat().st_size // 2)


def swap(path):
    replace_file(path, file_bytes(ac.Schema({"t": ac.String()}), {"t": variable([b"a"] * 16)}))


DAMAGE = [truncate, empty, zero, alter, swap]


def test_a_sound_cache_has_no_problems(cache):
    assert cache.verify() == []
    assert cache.verify(repair=False) == []
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_segment_is_quarantined_beside_the_reason_unless_only_a_report_is_asked_for(cache, damage):
    victim, debris = segment_files(cache)[1], cache.path / "incoming" / f"{1:032x}.part"
    damage(victim)
    debris.write_bytes(b"half")
    for _ in range(2):
        assert [problem.name for problem in cache.verify(repair=False)] == [victim.name]
    assert seqs(cache) == [0, 1, 2, 3]
    assert os.listdir(cache.path / "quarantine") == []
    assert debris.exists()
    with pytest.warns(RuntimeWarning, match=f"{victim.name} quarantined"):
        (problem,) = cache.verify()
    assert problem.name == victim.name
    assert seqs(cache) == [0, 2, 3]
    assert not debris.exists()
    assert sorted(os.listdir(cache.path / "quarantine")) == [victim.name, f"{victim.name}.reason"]
    assert (cache.path / "quarantine" / f"{victim.name}.reason").read_text().strip() == problem.reason
    assert cache.verify() == []
    assert cache.stats().quarantined == 1


@pytest.mark.parametrize("damage", [truncate, empty, zero, swap])
def test_a_reader_quarantines_what_has_no_structure_and_reads_the_rest(cache, damage):
    victim = segment_files(cache)[1]
    damage(victim)
    with cache.snapshot() as snapshot:
        with (
            pytest.warns(RuntimeWarning, match="quarantined"),
            pytest.raises(ac.CorruptSegmentError, match=victim.name),
        ):
            snapshot.gather([0, 20])
        assert snapshot.gather([0, 40])["id"].tolist() == [0, 40]
    assert seqs(cache) == [0, 2, 3]


def test_a_damaged_segment_that_another_reader_leases_stays_until_that_one_is_done(cache):
    alter(segment_files(cache)[1])
    with cache.snapshot(), pytest.warns(RuntimeWarning, match="still leased"):
        assert len(cache.verify()) == 1
    assert seqs(cache) == [0, 1, 2, 3]
    with pytest.warns(RuntimeWarning, match="quarantined"):
        cache.verify()
    assert seqs(cache) == [0, 2, 3]


def test_a_file_that_is_no_segment_is_reported_and_never_deleted(cache):
    foreign = cache.path / "segments" / "photo.jpg"
    foreign.write_bytes(b"precious")
    (problem,) = cache.verify()
    assert "photo.jpg" in problem.name
    assert foreign.read_bytes() == b"precious"


def test_a_counter_that_fell_behind_is_reported_and_repaired(cache):
    folder = cache.store.folder
    record = folder.read_record()
    folder.write_record(LockRecord(1, record.suspect_below, record.boot_id))
    (problem,) = cache.verify(repair=False)
    assert problem.name == "cache.lock"
    assert len(cache.verify()) == 1
    assert cache.verify() == []
    assert folder.read_record().next_seq == 4


def once_it_lets_go_of_the_lock(cache, monkeypatch, do):
    """Do something as another process does, which waits for cache.lock."""
    unlock = linux.unlock_file

    def unlocking(fd):
        unlock(fd)
        if os.path.samestat(os.fstat(fd), cache.store.folder.cache_lock.stat()):
            monkeypatch.undo()
            do()

    monkeypatch.setattr(linux, "unlock_file", unlocking)


def test_repairing_the_counter_never_sets_back_what_others_did_meanwhile(cache, monkeypatch):
    """As one that opens the cache repairs it, too, and publishes on: a number would come twice."""
    folder = cache.store.folder
    record = replace(folder.read_record(), next_seq=1)
    folder.write_record(record)
    once_it_lets_go_of_the_lock(cache, monkeypatch, lambda: folder.write_record(replace(record, next_seq=50)))
    (problem,) = cache.verify()
    assert problem.name == "cache.lock"
    assert folder.read_record().next_seq == 50


def test_a_task_that_is_there_twice_is_reported(cache):
    first, second = segment_files(cache)[:2]
    first.rename(first.with_name(f"{0:020d}-16-pool.7.arrow"))
    second.rename(second.with_name(f"{1:020d}-16-pool.7.arrow"))
    (problem,) = cache.verify()
    assert "repeats the task" in problem.reason


def test_rows_that_the_name_does_not_tell_are_damage(cache):
    first = segment_files(cache)[0]
    first.rename(first.with_name(f"{0:020d}-15-.arrow"))
    with pytest.warns(RuntimeWarning, match="16 rows"):
        assert len(cache.verify()) == 1


def test_a_tree_above_the_capacity_is_reported(cache):
    store = cache.store
    for spare, found in ((0, []), (-1, [(".", "allocated bytes exceed the capacity by 1 B")])):
        capacity = store.allocated_bytes(store.segments()) + spare
        store.folder.write_settings(store.settings.with_capacity(capacity))
        assert [(problem.name, problem.reason) for problem in cache.verify()] == found


def test_a_segment_that_vanishes_meanwhile_is_no_problem(cache, monkeypatch):
    once_it_lets_go_of_the_lock(cache, monkeypatch, segment_files(cache)[0].unlink)
    assert cache.verify() == []
    assert seqs(cache) == [1, 2, 3]


def test_a_problem_reads_as_its_name_and_reason_and_pickles():
    problem = Problem("name", "reason")
    assert str(problem) == "name: reason"
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_a_folder_of_a_damaged_segments_name_in_quarantine_keeps_nobody_from_going_on(cache):
    """The damaged one stays where it is, is told by every `verify`, and no row of it is ever delivered."""
    victim = segment_files(cache)[1]
    truncate(victim)
    in_the_way = cache.path / "quarantine" / victim.name
    (in_the_way / "precious").mkdir(parents=True)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=r"left out, since it could not be quarantined .*quarantine/"):
            got = ids_of(ac.Loader(cache, 16, shuffle=None))
        assert got == [*range(16), *range(32, 64)]
        with cache.snapshot() as snapshot:
            with (
                pytest.warns(RuntimeWarning, match="could not be quarantined"),
                pytest.raises(ac.CorruptSegmentError, match=victim.name),
            ):
                snapshot.gather([20])
            assert snapshot.gather([40])["id"].tolist() == [40]
        with pytest.warns(RuntimeWarning, match="could not be quarantined"):
            assert [problem.name for problem in cache.verify()] == [victim.name]
    publish(cache, 2)
    assert (in_the_way / "precious").exists()
    (in_the_way / "precious").rmdir()
    in_the_way.rmdir()
    with pytest.warns(RuntimeWarning, match=f"{victim.name} quarantined: "):
        cache.verify()
    assert cache.verify() == []


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_folder_and_has_a_damaged_segments_name_in_quarantine_gives_way(cache, target, kind):
    victim = segment_files(cache)[1]
    alter(victim)
    in_the_way = cache.path / "quarantine" / victim.name
    if kind == "link":
        in_the_way.symlink_to(target)
    else:
        os.mkfifo(in_the_way)
    with pytest.warns(RuntimeWarning, match="quarantined: "):
        cache.verify()
    assert in_the_way.is_file()
    assert not in_the_way.is_symlink()
    assert cache.verify() == []


def replace_and_read(path: Path, kind: str, verify: bool) -> tuple[list[str], list[int], list[str]]:
    """In a process of its own, which opening a pipe to read would stop for ever."""
    cache = ac.Cache.open(path)
    victim = segment_files(cache)[1]
    assert cache.stats().segments == 4  # its name is known
    victim.unlink()
    if kind == "pipe":
        os.mkfifo(victim)
    else:
        victim.symlink_to(segment_files(cache)[0])
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        if verify:
            problems += [problem.name for problem in cache.verify()]
        with ac.Loader(cache, 16) as loader:
            ids = sorted(ids_of(loader))
        with cache.snapshot() as snapshot:
            assert sorted(snapshot.table()["id"].to_pylist()) == ids
    return problems, ids, [str(warning.message) for warning in warned]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("verify", [True, False])
def test_what_took_a_known_segments_place_is_told_and_left_out(cache, kind, verify):
    name = segment_files(cache)[1].name
    with Child(replace_and_read, cache.path, kind, verify) as child:
        problems, ids, warned = child.result()
    assert ids == [*range(16), *range(32, 64)]
    assert problems == ([f"segments/{name}"] if verify else [])
    assert [text.partition(": ")[0] for text in warned] == (
        [] if verify else [f"segment {name} left out, since it is no plain file"]
    )


def test_who_has_a_segment_quarantined_is_told_whether_it_moved(cache):
    first, second, third, _ = cache.store.segments()
    error = ac.CorruptSegmentError("bad")
    (cache.path / "segments" / first.name).unlink()
    (cache.path / "segments" / first.name).symlink_to(cache.path / "cache.json")
    with LockFile(cache.store.folder.lease_lock) as other:
        assert other.try_range(second.seq, 1, exclusive=False)
        for segment, moves in ((first, False), (second, False), (third, True), (third, True)):
            with pytest.warns(RuntimeWarning, match=segment.name):
                assert quarantine(cache.store, segment, error) == moves
    assert cache.store.folder.quarantined_names() == [third.name]


@pytest.mark.parametrize("durable", [True, False])
def test_what_a_durable_cache_quarantines_stays_there_after_a_power_cut(tmp_path, monkeypatch, durable):
    cache, synced = make_cache(tmp_path / "cache", durable=durable), []
    publish(cache, 1)
    alter(segment_files(cache)[0])
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    with pytest.warns(RuntimeWarning, match="quarantined: "):
        cache.verify()
    assert list(map(os.path.basename, synced)) == ["quarantine", "segments"] * durable


def test_a_folder_in_place_of_a_reason_keeps_no_segment_out_of_quarantine_and_no_writer_waiting(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="512KiB")
    publish(cache, 4)
    victim = segment_files(cache)[1]
    alter(victim)
    in_the_way = cache.path / "quarantine" / f"{victim.name}.reason"
    in_the_way.mkdir()
    with pytest.warns(RuntimeWarning, match="quarantined: "):
        assert len(cache.verify()) == 1
    assert cache.stats().quarantined == 1
    publish(cache, 30)
    assert cache.stats().quarantined == 0
    assert cache.verify() == []
    assert in_the_way.is_dir()


@pytest.mark.slow
def test_the_reasons_of_many_quarantined_segments_stay_within_the_capacity(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="1MiB", segment_bytes="10KiB", segment_rows=4)
    while not seqs(cache) or seqs(cache)[0] == 0:
        publish(cache, 1, rows=4)
    for path in segment_files(cache):
        replace_file(path, bytes(path.stat().st_size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        problems = cache.verify()
    assert len(problems) > 50
    assert disk_bytes(cache.path) <= 1024 * 1024


def test_verify_knows_that_another_process_resized(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="512KiB")
    other = ac.Cache.open(tmp_path / "cache")
    other.resize("4MiB")
    publish(other, 60)
    assert cache.verify() == []


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_without_descriptors_or_memory_calls_no_segment_damaged(cache, monkeypatch, code):
    def fails(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(maps.File, "open", fails)
    with pytest.raises(OSError, match=os.strerror(code)):
        cache.verify()
    monkeypatch.undo()
    assert seqs(cache) == [0, 1, 2, 3]
    assert cache.verify() == []
    assert cache.stats().leased_bytes == 0


def refuse_to_map(path, code, monkeypatch):
    """As the kernel refuses one file to a snapshot."""
    opened = maps.File.open

    def refused(file, *arguments):
        if file.path == os.fsencode(path):
            raise OSError(code, os.strerror(code), str(path))
        opened(file, *arguments)

    monkeypatch.setattr(maps.File, "open", refused)
    # Each is opened by itself.
    monkeypatch.setattr(maps, "open_alike", lambda files, *_: np.zeros(len(files), bool))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_segment_that_cannot_be_opened_is_reported_and_stays_where_it_is(cache, monkeypatch, code):
    """It was quarantined, and so went with the next eviction, though nothing may be wrong with it."""
    refuse_to_map(segment_files(cache)[1], code, monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"left out: .*{os.strerror(code)}"):
        (problem,) = cache.verify()
    assert problem.name == segment_files(cache)[1].name
    with cache.snapshot() as snapshot, pytest.warns(RuntimeWarning, match="left out"):
        assert snapshot.map_all() == 48
    with cache.snapshot() as snapshot:
        with pytest.warns(RuntimeWarning, match="left out"), pytest.raises(ac.CorruptSegmentError):
            snapshot.gather([16])
        with pytest.warns(RuntimeWarning, match="left out"), pytest.raises(ac.CorruptSegmentError):
            snapshot.table()
    monkeypatch.undo()
    assert seqs(cache) == [0, 1, 2, 3]
    assert os.listdir(cache.path / "quarantine") == []
    assert cache.verify() == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_segment_that_may_not_be_opened_ends_every_reading_of_the_cache(cache, monkeypatch, code):
    """It was left out, and a second user trained on the other half."""
    refuse_to_map(segment_files(cache)[1], code, monkeypatch)
    message = "chgrp.*must be able to write all of it"
    with pytest.raises(PermissionError, match=message):
        cache.verify()
    for use in (Snapshot.map_all, Snapshot.table):
        with cache.snapshot() as snapshot, pytest.raises(PermissionError, match=message):
            use(snapshot)
    with ac.Loader(cache, 16) as loader, pytest.raises(PermissionError, match=message):
        next(iter(loader))
    monkeypatch.undo()
    assert seqs(cache) == [0, 1, 2, 3]
    assert os.listdir(cache.path / "quarantine") == []
    assert cache.verify() == []


def test_bytes_that_the_disk_does_not_give_are_damage_and_no_bus_error(cache):
    def verify(path: Path) -> list[str]:
        whole = maps.File.map

        def cut(file: maps.File) -> None:
            whole(file)
            if f"/{1:020}" in os.fsdecode(file.path):
                os.truncate(file.path, 0)  # what is mapped of it cannot be had any more

        maps.File.map = cut  # type: ignore[method-assign]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return [f"{problem.name[:20]} {problem.reason}" for problem in ac.Cache.open(path).verify()]

    with Child(verify, cache.path) as child:
        (problem,) = child.result()
    assert problem.startswith(f"{1:020} the disk does not give its bytes")
    assert seqs(cache) == [0, 2, 3]


def test_headers_that_the_disk_does_not_give_are_an_error_and_no_bus_error(cache):
    def check(path: Path) -> str:
        store = ac.Cache.open(path).store
        segment = store.segments()[1]
        file = mapping.FileMapping(store.path_of(segment)).buffer()
        os.truncate(store.path_of(segment), 0)
        with pytest.raises(ac.CorruptSegmentError) as caught:
            verification.check_file(file, store, segment, check_bytes=False)
        return str(caught.value)

    with Child(check, cache.path) as child:
        assert "the disk does not give its bytes" in child.result()


def test_a_damaged_segment_that_cannot_be_moved_is_left_out_all_the_same(cache, monkeypatch):
    """As on a disk that is read-only by now: what else there is could not be read either."""
    flip_byte(segment_files(cache)[1], 0)

    def fails(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", fails)
    with (
        cache.snapshot() as snapshot,
        pytest.warns(RuntimeWarning, match=r"could not be quarantined \(.*Read-only"),
    ):
        assert snapshot.map_all() == 48
    assert seqs(cache) == [0, 1, 2, 3]


def test_a_file_longer_than_any_segment_is_damage_to_every_reader(cache):
    path = segment_files(cache)[1]
    replace_file(path, path.read_bytes()[:-6] + bytes(1 << 16) + b"ARROW1")
    (problem,) = cache.verify(repair=False)
    assert "a segment has 1 to" in problem.reason
    with cache.snapshot() as snapshot, pytest.warns(RuntimeWarning), pytest.raises(ac.CorruptSegmentError):
        snapshot.table()


@pytest.mark.parametrize("how", ["verify", "table"])
def test_a_file_of_more_bytes_than_there_are_addresses_is_damage_and_not_this_process_memory(
    cache, monkeypatch, how
):
    length, mapped = 1 << 43, maps.File.map

    def read_table():
        with cache.snapshot() as snapshot, pytest.raises(ac.CorruptSegmentError):
            snapshot.table()

    def map_of_few_addresses(file):
        if file.nbytes == length:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        mapped(file)

    monkeypatch.setattr(maps.File, "map", map_of_few_addresses)
    path = segment_files(cache)[1]
    path.unlink()
    with open(path, "wb") as file:
        file.truncate(length)  # all of it a hole
    read = {"verify": cache.verify, "table": read_table}[how]
    with pytest.warns(RuntimeWarning, match="quarantined: .*a segment has 1 to"):
        read()
    assert seqs(cache) == [0, 2, 3]
