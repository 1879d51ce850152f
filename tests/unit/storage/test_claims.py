"""Claims: of several processes one publishes an item, and hears of those that wait for it."""

from __future__ import annotations

import os
import signal

import pytest

from arrowcache.storage.claims import Claims, ShardClaims


@pytest.fixture
def both(tmp_path):
    """Claims of two open files, as of two processes."""
    mine, other = (Claims(tmp_path / "claims.lock", 0o600, 1000) for _ in range(2))
    yield mine, other
    mine.close()
    other.close()


def test_one_of_two_has_an_item_until_it_lets_go(both):
    mine, other = both
    assert mine.claim(7)
    assert not other.claim(7)
    assert not mine.claim(7), "one thread of a process has it"
    assert other.claim(6)
    assert other.claim(8)
    assert mine.held == {7}
    mine.release([6, 7])
    assert mine.held == frozenset()
    assert other.claim(7)


def test_others_see_who_has_it(both):
    mine, other = both
    mine.claim(3)
    assert other.is_held_elsewhere(3)
    assert not mine.is_held_elsewhere(3)
    assert not other.is_held_elsewhere(2)
    mine.close()
    assert not other.is_held_elsewhere(3)


def test_who_waits_is_seen_while_it_does(both):
    mine, other = both
    assert not mine.somebody_waits()
    with other.waiting():
        assert mine.somebody_waits()
        assert not other.somebody_waits(), "but itself"
        with mine.waiting():
            assert other.somebody_waits()
    assert not mine.somebody_waits()


def test_the_first_of_two_threads_that_waits_no_more_leaves_the_sign_of_the_other(both):
    mine, other = both
    one, two = mine.waiting(), mine.waiting()
    with one:
        two.__enter__()
    assert other.somebody_waits()
    two.__exit__(None, None, None)
    assert not other.somebody_waits()


def test_closing_ends_all_claims_and_is_idempotent(both):
    mine, other = both
    for index in range(5):
        mine.claim(index)
    mine.close()
    mine.close()
    assert all(map(other.claim, range(5)))


def test_a_process_that_died_claims_nothing_more(tmp_path):
    path = tmp_path / "claims.lock"
    claims = Claims(path, 0o600, 10)
    pid = os.fork()
    if not pid:
        Claims(path, 0o600, 10).claim(3)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not claims.is_held_elsewhere(3)
    assert not claims.some_are_held_elsewhere()
    assert claims.claim(3)
    claims.close()


def test_others_see_that_somebody_has_claims(both):
    mine, other = both
    assert not other.some_are_held_elsewhere()
    mine.claim(1)
    mine.claim(2)
    mine.release([1])
    assert other.some_are_held_elsewhere()
    assert not mine.some_are_held_elsewhere()
    mine.release([2])
    assert not other.some_are_held_elsewhere()


def test_a_claim_locks_no_byte_and_takes_no_more_disk(tmp_path):
    """The kernel walks all locks of a file at each call: with one for each item, claims cost ever more."""
    path = tmp_path / "claims.lock"
    claims = Claims(path, 0o600, 10_000)

    def locks():
        inode = f":{path.stat().st_ino} "
        with open("/proc/locks") as file:  # which may have a lock twice, where others change meanwhile
            return len({tuple(line.split()[-2:]) for line in file if inode in line})

    before = path.stat().st_blocks
    assert all(map(claims.claim, range(0, 10_000, 7)))
    assert locks() == 2, "its own number, and the sign that it holds some"
    assert path.stat().st_blocks == before
    claims.close()
    assert locks() == 0


def test_a_shard_has_one_holder_and_a_length_once_that_is_noted(tmp_path):
    mine, other = (ShardClaims(tmp_path / "claims.lock", 0o600, 100) for _ in range(2))
    assert mine.claim(7)
    assert not mine.claim(7), "one iterator of a process has it"
    assert not other.claim(7)
    assert other.claim(8)
    assert mine.left == frozenset()
    assert mine.lengths().tolist() == [-1] * 100
    mine.set_length(7, 0)
    mine.set_length(99, 2**40)
    assert (other.length(7), other.length(8), other.length(99)) == (0, -1, 2**40)
    assert other.lengths()[[7, 8, 99]].tolist() == [0, -1, 2**40]
    mine.release([7, 8])
    assert other.claim(7)
    other.close()
    assert mine.claim(8)
    mine.close()
