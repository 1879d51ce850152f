"""Checking segments, and moving what fails out of sight."""

from __future__ import annotations

import os
import pickle
import warnings

import pytest
from helpers import (
    disk_bytes,
    file_bytes,
    flip_byte,
    make_cache,
    publish,
    replace_file,
    segment_files,
    seqs,
    variable,
)

import arrowcache as ac
from arrowcache.storage.layout import LockRecord
from arrowcache.storage.verification import Problem


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
def test_a_damaged_segment_is_quarantined_beside_the_reason(cache, damage):
    victim = segment_files(cache)[1]
    damage(victim)
    with pytest.warns(RuntimeWarning, match=f"{victim.name} quarantined"):
        (problem,) = cache.verify()
    assert problem.name == victim.name
    assert seqs(cache) == [0, 2, 3]
    assert sorted(os.listdir(cache.path / "quarantine")) == [victim.name, f"{victim.name}.reason"]
    assert (cache.path / "quarantine" / f"{victim.name}.reason").read_text().strip() == problem.reason
    assert cache.verify() == []
    assert cache.stats().quarantined == 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_without_repair_damage_is_reported_and_stays(cache, damage):
    victim = segment_files(cache)[1]
    damage(victim)
    before = sorted(os.listdir(cache.path / "segments"))
    for _ in range(2):
        (problem,) = cache.verify(repair=False)
        assert problem.name == victim.name
    assert sorted(os.listdir(cache.path / "segments")) == before
    assert os.listdir(cache.path / "quarantine") == []


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
    (cache.path / "segments" / "foreign").write_bytes(bytes(2 << 20))
    assert any("exceed the capacity" in problem.reason for problem in cache.verify())


def test_debris_is_swept(cache):
    (cache.path / "incoming" / f"{1:032x}.part").write_bytes(b"x")
    assert cache.verify() == []
    assert os.listdir(cache.path / "incoming") == []


def test_a_segment_that_vanishes_meanwhile_is_no_problem(cache, monkeypatch):
    listed = cache.store.segments()
    monkeypatch.setattr(cache.store, "segments", lambda: listed)
    cache.evict(1)
    assert cache.verify() == []


def test_a_problem_reads_as_its_name_and_reason_and_pickles():
    problem = Problem("name", "reason")
    assert str(problem) == "name: reason"
    assert pickle.loads(pickle.dumps(problem)) == problem


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


def test_a_report_only_verify_sweeps_nothing(tmp_path):
    cache = make_cache(tmp_path / "cache")
    debris = cache.path / "incoming" / f"{'0' * 32}.part"
    debris.write_bytes(b"half")
    assert cache.verify(repair=False) == []
    assert debris.exists()
    cache.verify()
    assert not debris.exists()
