"""The ranks of one job on one node read the same snapshot, whoever comes first, late or never."""

from __future__ import annotations

import gc
import os
import pickle
import random
import re
import sys
import threading
import warnings
from collections import Counter

import pytest
from helpers import (
    KIB,
    disk_bytes,
    flip_byte,
    in_child,
    in_living_child,
    limit,
    make_cache,
    open_files,
    publish,
    sample,
    segment_files,
    seqs,
    wait_until,
)
from quick import in_part

import arrowcache as ac
from arrowcache.native import maps
from arrowcache.reading.options import RankInfo, rank_info
from arrowcache.reading.ranks import SharedPlan
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import RanksRecord, ranks_name
from arrowcache.storage.locks import LockFile

ROWS = 80  # five segments
TERMS = {"batch_size": 64, "shuffle": "rows", "seed": 0, "epoch_rows": None, "drop_last": True}


class Rank:
    """One rank of a job, as a loader would be it: with a store of its own, in this process."""

    def __init__(self, path, rank=0, world=2, run="job", local=None):
        self.cache = ac.Cache.open(path)
        self.shared_plan = SharedPlan(self.cache.store, RankInfo(rank, world, run, local or world))
        self.taken = 0

    def take(self):
        self.taken += 1
        snapshot = Snapshot.take(self.cache.store)
        snapshot.map_all()
        return snapshot

    def begin(self, epoch=0, take=None, **terms):
        return self.shared_plan.snapshot(epoch, TERMS | terms, take or self.take)

    def epoch(self, epoch=0, **terms):
        """A whole epoch: which segments it read."""
        snapshot = self.begin(epoch, **terms)
        read = seqs_of(snapshot)
        snapshot.close()
        self.shared_plan.release(epoch)
        return read


@pytest.fixture
def job(cache):
    """The ranks of a job of two, to be closed."""
    ranks = [Rank(cache.path, number) for number in range(2)]
    yield ranks
    for rank in ranks:
        rank.shared_plan.close()


def seqs_of(snapshot):
    return [segment.seq for segment in snapshot.segments]


def files(cache):
    return sorted(os.listdir(cache.path / "ranks"))


def roll(cache, segments=100):
    """Publish more than the cache holds, as far as leases allow."""
    writer, first = cache.writer("raise"), cache.stats().next_seq * 16
    try:
        for number in range(first, first + 16 * segments):
            writer.append(sample(number))
        writer.close()
    except ac.CacheFullError:
        pass
    finally:
        writer.abort()


# who is a rank


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, None, None), ValueError), ((None, 2, None), ValueError), ((None, None, "job"), ValueError),
        ((2, 2, "job"), ValueError), ((0.5, 2, "job"), TypeError), ((0, "2", "job"), TypeError),
        ((0, 2, 7), TypeError), ((0, 2, ""), ValueError), ((0, 2**63, "job"), ValueError),
        ((True, 2, "job"), TypeError),
    ],
)  # fmt: skip
def test_what_does_not_make_a_rank_is_refused(arguments, error):
    """tests/refusals has the words."""
    with pytest.raises(error, match=r"rank|world_size|run_id"):
        rank_info(*arguments)


def test_without_a_rank_there_is_nobody_to_agree_with():
    assert rank_info(None, None, None) is None
    assert rank_info(0, 1, None) is None
    assert rank_info(0, 1, "job") is None


def test_a_run_comes_from_its_argument_else_from_the_launcher(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rank_info(1, 4, None) == RankInfo(1, 4, "10.0.0.1:29500", 4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun without --rdzv-id: every job's
    assert rank_info(1, 4, None).run == "10.0.0.1:29500"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    assert rank_info(1, 4, None).run == "elastic"
    assert rank_info(1, 4, "mine").run == "mine"


def test_the_launcher_says_how_many_ranks_are_local(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert rank_info(9, 16, "job") == RankInfo(9, 16, "job", 4)
    assert rank_info(1, 2, "job").local_world_size == 2, "never more than there are"
    for text in ("0", "-1", "four", "", "2.0", "\u0664"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE.*number of ranks on this node"):
            rank_info(0, 2, "job")


def test_half_an_address_is_no_run(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ValueError, match=r"neither TORCHELASTIC_RUN_ID nor MASTER_ADDR.*pass run_id="):
        rank_info(0, 2, None)


# agreeing


def test_ranks_read_the_same_segments_whatever_is_published_between(cache, job):
    first = job[0].begin()
    publish(cache, 3)
    second = job[1].begin()
    assert seqs_of(first) == seqs_of(second) == [0, 1, 2, 3, 4]
    assert len(first) == len(second) == 80
    assert second.gather([0, 79])["id"].tolist() == [0, 79]
    assert job[1].taken == 0, "the second one needs no snapshot of its own"
    first.close()
    second.close()
    for rank in job:
        rank.shared_plan.release(0)
    publish(cache, 1)
    assert job[1].epoch(1) == job[0].epoch(1) == list(range(9)), "the other one may come first, too"
    job[1].shared_plan.release_joined()
    assert files(cache) == []


def test_what_is_agreed_on_is_all_mapped(cache, job):
    snapshots = [rank.begin() for rank in job]
    for path in segment_files(cache):
        path.unlink()
    assert [s.gather([0, 79])["id"].tolist() for s in snapshots] == [[0, 79]] * 2
    for snapshot in snapshots:
        snapshot.close()


def test_a_rank_without_enough_rows_holds_nothing_and_asks_again(cache, job):
    assert job[0].begin(take=lambda: None) is None
    assert files(cache) == []
    assert cache.stats().leased_bytes == 0
    read = job[1].begin()
    publish(cache, 1)
    again = job[0].begin(take=lambda: pytest.fail("somebody has begun meanwhile"))
    assert seqs_of(again) == seqs_of(read)
    read.close()
    again.close()


def test_of_two_ranks_that_take_at_once_the_first_to_link_wins(cache, job):
    others = []

    def take():
        mine = job[0].take()
        publish(cache, 2)
        others.append(job[1].begin())
        return mine

    snapshot = job[0].begin(take=take)
    assert seqs_of(snapshot) == seqs_of(others[0]) == list(range(7))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        gc.collect()  # the one that lost was closed
    for each in (snapshot, *others):
        each.close()
    for rank in job:
        rank.shared_plan.release(0)
    assert cache.stats().leased_bytes == 0
    assert files(cache) == []


def test_what_take_raises_passes_and_leaves_nothing(cache, job):
    def fail():
        raise KeyError("no rows")

    before = open_files()
    with pytest.raises(KeyError, match="no rows"):
        job[0].begin(take=fail)
    assert files(cache) == []
    wait_until(lambda: len(open_files()) <= len(before), "descriptors to end")
    assert job[0].epoch() == job[1].epoch()


def test_a_snapshot_of_nothing_can_be_agreed_on(tmp_path):
    cache = make_cache(tmp_path / "empty")
    first, second = (Rank(cache.path, number) for number in range(2))
    assert first.epoch() == []
    publish(cache, 1)
    assert second.epoch() == []
    first.shared_plan.close()
    assert files(cache) == []


def test_loaders_of_one_job_do_not_mix(cache, job):
    second_loaders = [Rank(cache.path, number) for number in range(2)]
    assert [job[0].epoch(), second_loaders[0].epoch()] == [list(range(5))] * 2
    publish(cache, 1)
    assert second_loaders[1].epoch() == list(range(5))
    assert job[1].epoch(batch_size=64) == list(range(5))
    numbers = [repr(rank.shared_plan).split(" of ")[0] for rank in (*job, *second_loaders)]
    assert numbers == ["<SharedPlan: loader 0", "<SharedPlan: loader 0", "<SharedPlan: loader 1",
                       "<SharedPlan: loader 1"]  # fmt: skip
    for rank in second_loaders:
        rank.shared_plan.close()


def test_jobs_runs_and_caches_do_not_mix(cache, job, tmp_path):
    other_run, other_cache = Rank(cache.path, 0, run="other"), make_cache(tmp_path / "other")
    job[0].epoch()
    publish(cache, 1)
    publish(other_cache, 2)
    assert other_run.epoch() == list(range(6))
    assert Rank(other_cache.path, 0).epoch() == [0, 1]
    assert job[1].epoch() == list(range(5))


def test_loaders_are_numbered_by_cache_whatever_path_leads_to_it(cache, tmp_path):
    (tmp_path / "link").symlink_to(cache.path)
    first, second = Rank(cache.path, run="linked"), Rank(tmp_path / "link", run="linked")
    assert repr(first.shared_plan).startswith("<SharedPlan: loader 0")
    assert repr(second.shared_plan).startswith("<SharedPlan: loader 1")


def test_loaders_are_numbered_anew_in_a_cache_that_was_made_anew(cache):
    assert repr(Rank(cache.path, run="anew").shared_plan).startswith("<SharedPlan: loader 0")
    os.utime(cache.path / "lease.lock", (1, 1))  # stands for a new file in a reused inode
    assert repr(Rank(cache.path, run="anew").shared_plan).startswith("<SharedPlan: loader 0")


@pytest.mark.parametrize(
    "run", ["a/b", "../../../escape", "/etc/passwd", "é\u4e2d\U0001f600", "x" * 1000, "..", "a b\n", "\udcff"]
)
def test_a_run_may_hold_any_characters(cache, run, tmp_path):
    before = {path for path in tmp_path.rglob("*") if path.parent != cache.path / "segments"}
    first, second, other = (Rank(cache.path, n, run=r) for n, r in ((0, run), (1, run), (1, run + "x")))
    snapshot = first.begin()
    assert {p for p in tmp_path.rglob("*") if p.parent != cache.path / "segments"} - before == {
        cache.path / "ranks" / files(cache)[0]
    }
    publish(cache, 1)
    assert second.epoch() == seqs_of(snapshot)
    assert other.epoch() == list(range(6))
    snapshot.close()
    for rank in (first, second, other):
        rank.shared_plan.close()
    assert files(cache) == []


def test_an_epoch_that_is_begun_again_is_agreed_on_anew(cache, job):
    assert job[0].epoch(3) == list(range(5))
    publish(cache, 1)
    assert job[0].epoch(3, position=7) == list(range(6)), "rolled back before the other one began at all"
    publish(cache, 1)
    assert job[1].epoch(3) == list(range(5))
    assert job[1].epoch(3, position=7) == list(range(6))
    job[0].shared_plan.release_joined()
    assert files(cache) == []


# terms


@pytest.mark.parametrize("seed", range(4))
def test_how_often_an_epoch_was_begun_is_counted_in_a_few_numbers(cache, seed):
    """It took an entry an epoch. A loaded state begins one."""
    publish(cache, 1)
    draw, counted, epoch, names = random.Random(seed), Counter(), 0, {}
    rank = Rank(cache.path, world=1)
    times = in_part(150)
    for _ in range(times):
        snapshot = rank.begin(epoch)
        (name,) = files(cache)
        assert names.setdefault(name, (epoch, counted[epoch])) == (epoch, counted[epoch])
        snapshot.close()
        rank.shared_plan.release(epoch)
        counted[epoch] += 1
        epoch = draw.randrange(epoch + 3) if draw.random() < seed / 30 else epoch + 1
    assert len(names) == times
    if not seed:
        assert max(map(sys.getsizeof, vars(rank.shared_plan).values())) < 1000
    rank.shared_plan.close()


def test_terms_that_differ_are_named_with_both_values(cache, job):
    job[0].epoch(batch_size=32, seed=7)
    with pytest.raises(ValueError, match=r"rank 1 .*run 'job' .*epoch 0") as caught:
        job[1].begin(shuffle=None)
    text = str(caught.value)
    assert "batch_size is 64 here and 32 there" in text
    assert "seed is 0 here and 7 there" in text
    assert "shuffle is None here and 'rows' there" in text
    assert "epoch_rows" not in text
    assert "drop_last" not in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert job[1].epoch(batch_size=32, seed=7) == list(range(5)), "it has not joined yet"


def test_a_term_that_only_one_rank_has_is_named(cache, job):
    job[0].epoch()
    with pytest.raises(ValueError, match="position is 5 here and None there"):
        job[1].begin(position=5)


def test_ranks_of_worlds_of_different_size_do_not_agree(cache, job):
    job[0].epoch()
    with pytest.raises(ValueError, match="world_size is 3 here and 2 there"):
        Rank(cache.path, 2, 3).begin()


def test_a_rank_whose_terms_differ_leaves_no_lease_and_no_open_file(cache, job):
    job[0].epoch()
    before = open_files()
    for _ in range(5):
        with pytest.raises(ValueError, match="seed"):
            job[1].begin(seed=1)
    wait_until(lambda: len(open_files()) <= len(before), "descriptors to end")


# until all have joined


def test_the_second_of_three_keeps_what_the_first_one_proposed(cache):
    first, second, third = (Rank(cache.path, number, 3) for number in range(3))
    read = first.epoch()
    assert second.epoch() == read
    first.shared_plan.close()  # its loader is gone
    roll(cache)
    assert third.epoch() == read
    second.shared_plan.release_joined()
    assert cache.stats().leased_bytes == 0
    assert files(cache) == []


def test_only_the_ranks_of_this_node_are_waited_for(cache):
    first, second = (Rank(cache.path, number, 8, local=2) for number in (4, 5))
    first.epoch()
    assert len(files(cache)) == 1
    second.epoch()
    first.shared_plan.release_joined()
    assert files(cache) == []


def test_when_all_have_joined_only_the_loaders_own_leases_count(cache, job):
    snapshots = [rank.begin() for rank in job]
    for snapshot in snapshots:
        snapshot.close()
    assert cache.stats().leased_bytes > 0
    job[0].shared_plan.release_joined()  # the first one has to look; the last one to join knows
    assert cache.stats().leased_bytes == 0
    assert len(files(cache)) == 1, "the epoch goes on"
    for rank in job:
        rank.shared_plan.release(0)
    assert files(cache) == []


@pytest.mark.slow
def test_a_writer_of_this_process_gets_room_as_soon_as_all_have_joined(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 5)
    first, second = (Rank(cache.path, number) for number in range(2))
    first.epoch()
    roll(cache)
    assert seqs(cache)[0] == 0
    second.epoch()
    publish(cache, 100)  # the first one is asked, with cache.lock held
    assert files(cache) == [], "and the writer sweeps"


def test_a_rank_that_tries_again_counts_once(cache, monkeypatch):
    first, second, third = (Rank(cache.path, number, 3) for number in range(3))
    read = first.epoch()
    with monkeypatch.context() as patch:
        patch.setattr(maps, "open_alike", lambda *_: 1 / 0)
        patch.setattr(maps.File, "open", lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                second.begin()
    assert second.epoch() == read
    roll(cache)
    assert third.epoch() == read, "the others kept it leased for the third"
    for rank in (first, second, third):
        rank.shared_plan.close()
    assert files(cache) == []


@pytest.mark.slow
def test_a_rank_that_comes_after_all_others_let_go_of_the_segments_is_told(cache):
    first, second = (Rank(cache.path, number, local=1) for number in range(2))
    first.begin().close()
    roll(cache)
    with pytest.raises(
        ValueError, match=r"rank 1 comes too late to epoch 0: 5 of its 5 segments.*LOCAL_WORLD_SIZE"
    ):
        second.begin()
    first.shared_plan.close()


def test_many_epochs_that_a_rank_never_begins_are_worth_one_warning(cache, job, monkeypatch):
    limit(monkeypatch, unjoined_epochs=3)
    for epoch in range(3):
        job[0].epoch(epoch)
    words = "3 epochs ended on rank 0 that only 1 of 2 ranks on this node have begun.*LOCAL_WORLD_SIZE"
    with pytest.warns(RuntimeWarning, match=words):
        job[0].epoch(3)
    job[0].epoch(4)
    assert [job[1].epoch(epoch) for epoch in range(5)] == [list(range(5))] * 5
    job[0].shared_plan.release_joined()
    assert files(cache) == []


@pytest.mark.slow
def test_hundreds_of_epochs_leave_nothing(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 1)
    job = [Rank(cache.path, number) for number in range(2)]
    for epoch in range(200):
        assert job[epoch % 2].epoch(epoch) == job[1 - epoch % 2].epoch(epoch) == [0]
        assert len(files(cache)) <= 2
        if epoch == 10:
            before = open_files()
    wait_until(lambda: len(open_files()) <= len(before), "descriptors to end")
    for rank in job:
        rank.shared_plan.release_joined()
    assert files(cache) == []
    assert os.listdir(cache.path / "incoming") == []
    assert cache.stats().leased_bytes == 0


# letting go


def test_closing_lets_go_of_everything_whoever_has_joined(cache, job):
    before = open_files()
    for epoch in range(3):
        job[0].epoch(epoch)
    assert len(files(cache)) == 3
    job[0].shared_plan.close()
    job[0].shared_plan.close()
    assert files(cache) == []
    assert cache.stats().leased_bytes == 0
    wait_until(lambda: len(open_files()) <= len(before), "descriptors to end")


def test_a_forgotten_agreement_lets_go(cache):
    rank = Rank(cache.path)
    rank.epoch()
    assert len(files(cache)) == 1
    del rank
    gc.collect()
    assert files(cache) == []
    assert cache.stats().leased_bytes == 0


def test_letting_go_while_this_thread_holds_cache_lock_ends_and_leaves_debris(cache, job):
    job[0].epoch()
    with cache.store.locked():
        job[0].shared_plan.close()  # as a finalizer might, at any point
    assert len(files(cache)) == 1
    assert cache.stats().leased_bytes == 0
    assert job[1].epoch(1) == list(range(5))
    assert [name for name in files(cache) if name.endswith("-0")] == [], "the next proposal swept it"


def test_letting_go_within_letting_go_is_done_by_the_one_at_work(cache, job, monkeypatch):
    snapshots = [job[0].begin(0), job[0].begin(1)]
    for epoch in (0, 1):
        job[1].epoch(epoch)
    read, inner = os.pread, []

    def collect_garbage(*file):
        if not inner:
            inner.append(1)
            job[0].shared_plan.release(1)  # what a finalizer does that runs just here
        return read(*file)

    monkeypatch.setattr(os, "pread", collect_garbage)
    job[0].shared_plan.release(0)
    assert inner
    for snapshot in snapshots:
        snapshot.close()
    assert files(cache) == []


def test_closing_while_another_thread_begins_leaves_nothing(cache, job):
    entered, go_on = threading.Event(), threading.Event()

    def take():
        entered.set()
        assert go_on.wait(20)
        return job[0].take()

    begun = []
    thread = threading.Thread(target=lambda: begun.append(job[0].begin(take=take)))
    thread.start()
    assert entered.wait(20)
    job[0].shared_plan.close()
    go_on.set()
    thread.join(20)
    begun[0].close()
    assert cache.stats().leased_bytes == 0
    wait_until(lambda: files(cache) == [] or sweep(cache), "the file to go")


def sweep(cache):
    with cache.store.locked():
        return cache.store.folder.sweep()


def test_letting_go_in_a_folder_that_is_gone_raises_nothing(cache, job):
    job[0].epoch()
    cache.path.rename(cache.path.with_name("moved"))
    job[0].shared_plan.close()


# what others left


def name_of(cache, number=0, epoch=0):
    return cache.path / "ranks" / ranks_name("job", number, epoch)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"garbage\n", RanksRecord({}, range(3)).pack()])
def test_a_file_that_nobody_holds_is_debris_whatever_it_says(cache, job, content):
    number = re.search("loader ([0-9]+)", repr(job[0].shared_plan))
    name_of(cache, int(number[1])).write_bytes(content)
    snapshot = job[0].begin()
    assert seqs_of(snapshot) == list(range(5))
    assert job[1].epoch() == list(range(5))
    snapshot.close()
    job[0].shared_plan.release(0)
    assert files(cache) == []


def test_debris_of_other_jobs_goes_with_the_next_agreement_and_foreign_files_stay(cache, job):
    for run in ("dead", "deader"):
        (cache.path / "ranks" / ranks_name(run, 0, 7)).write_bytes(b"x")
    (cache.path / "ranks" / "notes.txt").write_bytes(b"precious")
    snapshot = job[0].begin()
    assert len(files(cache)) == 2
    snapshot.close()
    job[0].shared_plan.close()
    assert files(cache) == ["notes.txt"]


@pytest.mark.parametrize("damage", ["flip", "empty", "version"])
def test_a_file_that_was_altered_while_ranks_use_it_is_an_error_not_another_snapshot(cache, job, damage):
    snapshot = job[0].begin()
    path = cache.path / "ranks" / files(cache)[0]
    data = {"empty": b"", "flip": b"\0" + path.read_bytes()[1:], "version": b"0 {}\n"}[damage]
    with open(path, "r+b") as file:  # the same file, which the first rank holds
        file.truncate()
        file.write(data)
    before = open_files()
    with pytest.raises(ac.CacheFormatError, match=r"altered while ranks use it.*restart the job"):
        job[1].begin()
    wait_until(lambda: len(open_files()) <= len(before), "descriptors to end")
    snapshot.close()


def test_lines_that_make_no_sense_below_a_sound_record_harm_nobody(cache, job):
    snapshot = job[0].begin()
    path = cache.path / "ranks" / files(cache)[0]
    with open(path, "ab") as file:
        file.write(b"\xff\xfe")
    assert job[1].epoch() == seqs_of(snapshot)
    snapshot.close()
    job[0].shared_plan.close()
    assert files(cache) == []


def test_a_segment_that_is_damaged_here_is_an_error_since_the_others_count_on_it(cache, job):
    first = job[0].begin()
    flip_byte(segment_files(cache)[2], 0)
    name = segment_files(cache)[2].name
    before = seqs(cache)

    def begin_too():  # in a process of its own, which maps the file that is there now
        with (
            pytest.warns(RuntimeWarning, match="left out, still leased by another reader"),
            pytest.raises(ac.CorruptSegmentError, match=f"1 of 5 segments .*{name}.*end this epoch on all"),
        ):
            job[1].begin()

    with in_child(begin_too):
        pass
    assert seqs(cache) == before
    first.close()
    job[0].shared_plan.release(0)  # the other one has already
    assert files(cache) == []
    assert cache.stats().leased_bytes == 0


@pytest.mark.slow
def test_the_capacity_holds_where_a_cache_is_full(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity=300 * KIB, segment_bytes=32 * KIB)
    roll(cache)
    held = [Rank(cache.path, 0, run=f"job {number}") for number in range(40)]
    for rank in held:
        rank.begin(take=lambda: Snapshot.take(cache.store, yields_since=0)).close()  # as beside a writer
        assert disk_bytes(cache.path) <= 300 * KIB
    assert len(files(cache)) == 40
    for rank in held:
        rank.shared_plan.close()
    assert files(cache) == []


@pytest.mark.slow
def test_ranks_agree_where_a_cache_is_full_and_all_of_it_is_leased(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity=300 * KIB, segment_bytes=32 * KIB)
    roll(cache)
    everything = [segment.seq for segment in cache.store.segments()]
    # their files fit into what writers keep free
    held = [Rank(cache.path, 0, run=f"job {number}") for number in range(8)]
    for rank in held:
        snapshot = rank.begin()
        assert seqs_of(snapshot) == everything
        snapshot.close()
        assert disk_bytes(cache.path) <= 300 * KIB
    for rank in held:
        rank.shared_plan.close()


# forked children


def test_a_forked_child_lets_go_of_nothing_of_its_parents(cache, job):
    snapshot = job[0].begin()
    name = files(cache)[0]

    def body():
        job[0].shared_plan.release(0)
        job[0].shared_plan.close()
        gc.collect()

    with in_child(body):
        pass
    assert files(cache) == [name]
    probe = LockFile(cache.path / "ranks" / name)
    assert probe.conflict(0, 1) is not None
    probe.close()
    roll(cache)
    assert job[1].epoch() == seqs_of(snapshot)
    snapshot.close()


def test_a_living_forked_child_holds_nothing_of_its_parents(cache, job):
    job[0].epoch()
    with in_living_child(gc.collect):
        job[0].shared_plan.close()
        assert files(cache) == []
        assert cache.stats().leased_bytes == 0


def test_a_forked_child_can_begin_epochs_of_its_own(cache, job):
    snapshot = job[0].begin()

    def body():
        publish(cache, 1)
        assert job[0].epoch(1) == list(range(6))
        assert job[1].epoch(0) == list(range(5))
        job[0].shared_plan.close()
        job[1].shared_plan.close()

    with in_child(body):
        pass
    assert len(files(cache)) == 1
    snapshot.close()
    job[0].shared_plan.close()
    assert files(cache) == []
