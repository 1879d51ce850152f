"""Claims: of several processes one publishes an item, and hears of those that wait for it."""

from __future__ import annotations

import pytest

from arrowcache.storage.claims import Claims


@pytest.fixture
def both(tmp_path):
    """Claims of two open files, as of two processes."""
    mine, other = (Claims(tmp_path / "claims.lock", 0o600) for _ in range(2))
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


def test_closing_ends_all_claims_and_is_idempotent(both):
    mine, other = both
    for index in range(5):
        mine.claim(index)
    mine.close()
    mine.close()
    assert all(map(other.claim, range(5)))
