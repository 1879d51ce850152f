"""A storm of kills and stops over a small cache: see course.py for what it is, and for longer ones.

STORM_SECONDS says how long: the Makefile has the newest environment do most of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import DEADLINE_SECONDS, make_cache, publish, ramp_rows, segment_files, wait_until
from processes import Child, Script, small_disk
from storm import content
from storm.launch import run
from storm.report import Report
from storm.roles import numbering_of
from storm.usage import Usage
from storm.watch import evicted_but_mapped
from storm.weather import MIN_KILLS, MIN_STOPS, lock_holder

import arrowcache as ac

SECONDS = float(os.environ.get("STORM_SECONDS", "12"))  # of all storms together


def expect_nothing_lost(report: Report) -> None:
    print(report.table())
    assert report.defects == [], "\n\n".join(report.defects)
    assert report.kills >= MIN_KILLS
    assert report.stops >= MIN_STOPS
    assert report.counts["delivered_rows"] > 0
    assert report.counts["held_rows"] > 0
    assert report.evicted > 0
    assert report.blocks > report.capacity / 2, "the cache was never full: this shows nothing"
    assert min(report.looks.values()) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)  # a storm that hangs says where, before
def test_a_storm_on_a_file_system_of_its_own_loses_nothing_and_leaves_nothing(tmp_path):
    """Unlinked files that somebody still maps are counted, too."""
    (tmp_path / "disk").mkdir()
    report = run(tmp_path / "disk", 0.7 * SECONDS, seed=0, on_tmpfs=True)
    expect_nothing_lost(report)
    assert report.file_system > report.capacity / 2


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.timeout(600)  # a storm that hangs says where, before
def test_a_storm_on_the_disk_loses_nothing_and_leaves_nothing(tmp_path):
    expect_nothing_lost(run(tmp_path, 0.3 * SECONDS, seed=1, on_tmpfs=False))


def test_the_readers_of_torch_are_in_the_storm():
    pytest.importorskip("torch", reason="no torch here: its readers are not in the storm")
    from storm.readers import OF_TORCH, kinds

    assert set(OF_TORCH) <= set(kinds())


# what a storm relies on


def batch_of(ids):
    ids = np.array(ids)
    return {"id": ids, "words": content.words_of(ids), "tail": content.tails_of(ids)}


def test_rows_that_were_never_written_are_found():
    assert content.check(batch_of([3, 4, 1 << 40, 9])) == 4
    for alter in ("id", "words", "tail"):
        batch = batch_of([3, 4, 1 << 40, 9])
        (batch["tail"].data if alter == "tail" else batch[alter])[-1] += 1
        with pytest.raises(AssertionError):
            content.check(batch)


@pytest.mark.parametrize(("ids", "words"), [([7, 8, 7], "came twice"), ([7, 8, 10], "missing")])
def test_rows_that_come_twice_or_are_missing_are_found(ids, words):
    everything = content.Pass()
    everything.add(batch_of(ids))
    with pytest.raises(AssertionError, match=words):
        everything.end(is_whole=True)


@pytest.mark.slow
def test_no_two_pools_of_a_storm_draw_the_same_rows(tmp_path):
    cache = ac.Cache.create(tmp_path / "cache", content.SCHEMA, "8MiB", "300KiB", content.SEGMENT_ROWS)
    for number in (5, 6):
        with ac.SamplerPool(
            cache, content.draws, workers=1, segments=2, progress=False, **numbering_of(number)
        ) as pool:
            pool.wait(timeout=DEADLINE_SECONDS)
    everything = content.Pass()
    with cache.snapshot() as snapshot:
        assert everything.add(snapshot.gather(np.arange(len(snapshot)))) == 2 * sum(
            ramp_rows(task, content.SEGMENT_ROWS) for task in (0, 1)
        )
    everything.end(is_whole=True)


def hold(path: Path, ready: Path) -> None:
    with open(path) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        ready.touch()
        threading.Event().wait()


def test_a_mapped_segment_that_was_evicted_is_found(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 2)
    with Child(hold, segment_files(cache)[0], tmp_path / "ready"):
        wait_until((tmp_path / "ready").exists, "the file to be mapped")
        assert evicted_but_mapped(cache.path) == []
        cache.evict(1)
        (found,) = evicted_but_mapped(cache.path)
    assert "(deleted)" in found


def test_what_a_process_does_not_give_back_is_found(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    before = Usage.of()
    assert before.growth_since(before) == []
    with open(tmp_path / "file") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        fcntl.flock(file, fcntl.LOCK_SH)
        found = " ".join(Usage.of().growth_since(before))
    assert "open file" in found
    assert "mapping of" in found
    assert "locks" in found
    assert Usage.of().growth_since(before) == []


UNLINKED = """
    import os, sys
    from pathlib import Path
    from helpers import KIB, wait_until
    from storm.watch import used_of_file_system

    disk = Path(sys.argv[1])
    before = used_of_file_system(disk)
    with open(disk / "file", "wb") as file:
        file.write(bytes(100 * KIB))
        file.flush()
        os.unlink(file.name)
        assert used_of_file_system(disk) - before >= 100 * KIB
    wait_until(lambda: used_of_file_system(disk) == before, "the file to vanish")
"""


@pytest.mark.slow
def test_the_watch_of_a_file_system_sees_unlinked_files_that_are_open(tmp_path):
    with Script(UNLINKED, tmp_path, within=small_disk(tmp_path, "1m")) as script:
        assert script.end() == (0, "")


def test_who_holds_a_lock_is_found(tmp_path):
    cache = make_cache(tmp_path / "cache")
    assert lock_holder(cache.path / "cache.lock") == 0
    with cache.store.locked():
        assert lock_holder(cache.path / "cache.lock") == os.getpid()
