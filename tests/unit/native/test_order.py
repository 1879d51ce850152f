"""Orders in C: bijections of any number of rows, and how evenly they are drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quick import first_is_quick

from arrowcache.native.order import KEYS, Pass, Runs, Stage

keys_of = st.integers(0, 2**70).map(lambda seed: np.random.SeedSequence(seed).generate_state(KEYS, np.uint64))
KEYS_OF_0 = np.random.SeedSequence(0).generate_state(KEYS, np.uint64)


def shuffled(rows, keys=KEYS_OF_0):
    return Pass(rows, Stage(np.array([0, rows]), keys))


def permutations(rows, count, seed=0):
    """(count, rows) permutations: those of so many blocks of one stage."""
    keys = np.random.SeedSequence(seed).generate_state(KEYS, np.uint64)
    edges = np.arange(0, rows * (count + 1), rows)
    whole = Pass(rows * count, Stage(edges, keys))(0, rows * count)
    return whole.reshape(count, rows) - edges[:-1, None]


def excess(counts, expected):
    """By how many standard deviations chi-square is above its mean."""
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


# What it is.


def test_any_few_rows_are_each_at_one_place():
    for rows in range(1, 300):
        assert np.array_equal(np.sort(shuffled(rows)(0, rows)), np.arange(rows)), rows


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(300, 100_000), keys=keys_of)
def test_any_rows_are_each_at_one_place(rows, keys):
    assert np.array_equal(np.sort(shuffled(rows, keys)(0, rows)), np.arange(rows))


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(2**16, 2**62),
    first=st.integers(0, 2**62),
    apart=st.integers(1, 2**50),
    keys=keys_of,
)
@example(rows=2**62, first=0, apart=2**56, keys=KEYS_OF_0)
@example(rows=2**62 - 1, first=2**61 + 1, apart=2**54 - 1, keys=KEYS_OF_0)
@example(rows=2**32 + 1, first=0, apart=2**26, keys=KEYS_OF_0)
def test_places_far_apart_have_rows_of_their_own(rows, first, apart, keys):
    first, one = first % rows, shuffled(rows, keys)
    times = 1 + min(63, (rows - first - 1) // apart)
    found = one(first, 1, times, apart)
    assert len(np.unique(found)) == times
    assert found.min() >= 0
    assert found.max() < rows
    assert found.tolist() == [int(one(first + number * apart, 1)[0]) for number in range(times)]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    keys=keys_of,
    more_keys=keys_of,
)
def test_stages_shuffle_each_block_by_itself_one_after_another(sizes, keys, more_keys):
    edges = np.concatenate(([0], np.cumsum(sizes)))
    rows, whole = int(edges[-1]), np.array([0, edges[-1]])
    blocks = Pass(rows, Stage(edges, keys))(0, rows)
    for start, stop in itertools.pairwise(edges):
        assert sorted(blocks[start:stop]) == list(range(start, stop))
    first = Pass(rows, Stage(whole, more_keys))(0, rows)
    both = Pass(rows, Stage(whole, more_keys), Stage(edges, keys))(0, rows)
    assert both.tolist() == blocks[first].tolist()


@settings(deadline=None)
@given(
    run_rows=st.integers(1, 90), run_count=st.integers(0, 40), rest=st.integers(0, 89),
    cuts=st.sets(st.integers(1, 3000)), keys=keys_of,
)  # fmt: skip
def test_runs_stay_whole_and_each_place_has_its_shift(run_rows, run_count, rest, cuts, keys):
    rows = run_rows * run_count + rest % run_rows
    starts = np.array([0, *sorted(cut for cut in cuts if cut < rows)])
    shifts = np.arange(len(starts)) * 10_000
    stage = Stage(np.array([0, run_count]), keys)
    runs = Pass(run_count, stage)(0, run_count)
    places = (runs[:, None] * run_rows + np.arange(run_rows)).ravel()
    places = np.concatenate((places, np.arange(run_rows * run_count, rows)))
    expected = places + shifts[starts.searchsorted(places, "right") - 1]
    one = Pass(rows, stage, runs=Runs(run_rows, starts, shifts))
    assert one(0, rows).tolist() == expected.tolist()
    for first in range(0, rows, 101):
        assert one(first, min(100, rows - first)).tolist() == expected[first : first + 100].tolist()


def test_runs_without_a_stage_are_refused():
    runs = Runs(2, np.zeros(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="give a stage"):
        Pass(4, runs=runs)


def test_many_rows_at_once_are_those_of_a_few_at_a_time():
    one = shuffled(100_000)
    few = [one(first, 100) for first in range(0, 100_000, 100)]
    assert np.array_equal(one(0, 100_000), np.concatenate(few))
    assert np.array_equal(one(0, 50, 1000, 100), np.concatenate([ids[:50] for ids in few]))


@pytest.mark.parametrize("asked", [(-1, 1), (0, 11), (10, 1), (0, 1, 3, 5), (5, 3, 2, 3), (2, -1), (0, 1, 0)])
def test_places_outside_are_refused(asked):
    with pytest.raises(IndexError, match="of 10 rows"):
        shuffled(10)(*asked)
    assert shuffled(10)(10, 0).tolist() == []
    assert len(shuffled(10)(0, 1, 2, 9)) == 2


# How it is drawn.


@pytest.mark.parametrize("rows", first_is_quick([5, 2, 3, 4, 6, 7]))
def test_every_permutation_of_a_few_rows_is_drawn_equally_often(rows):
    count = 100_000
    weights = rows ** np.arange(rows)
    drawn = np.bincount(permutations(rows, count) @ weights, minlength=rows**rows)
    possible = np.array(list(itertools.permutations(range(rows)))) @ weights
    assert drawn[possible].sum() == count
    assert excess(drawn[possible], count / len(possible)) < 4


@pytest.mark.parametrize("rows", first_is_quick([8, 12, 13, 16, 17, 33, 64]))
@pytest.mark.parametrize("apart", [1, 7])
def test_any_two_rows_are_at_any_two_places_equally_often(rows, apart):
    count = 50_000
    drawn = permutations(rows, count)
    pairs = np.bincount(drawn[:, 0] * rows + drawn[:, apart], minlength=rows**2).reshape(rows, rows)
    assert pairs.trace() == 0
    others = pairs[~np.eye(rows, dtype=bool)]
    assert excess(others, count / len(others)) < 4


@pytest.mark.parametrize("rows", first_is_quick([1000, 64, 100, 1024, 5000]))
def test_neighbours_are_at_any_distance_equally_often(rows):
    drawn = permutations(rows, 400_000 // rows)
    for apart in (1, 2 ** ((rows - 1).bit_length() // 2)):  # the second is where halves are the same
        distances = (drawn[:, apart:] - drawn[:, :-apart]) % rows
        counts = np.bincount(distances.ravel(), minlength=rows)
        assert counts[0] == 0
        assert excess(counts[1:], counts.sum() / (rows - 1)) < 4


@pytest.mark.parametrize("rows", [4, 16, 17, 256])
def test_odd_permutations_are_drawn_as_often_as_even_ones(rows):
    drawn = permutations(rows, 2000)
    later = np.arange(rows) > np.arange(rows)[:, None]
    odd = [int((later & (one[:, None] > one)).sum()) % 2 for one in drawn]
    assert abs(np.mean(odd) - 0.5) < 4 * 0.5 / np.sqrt(len(odd))


@pytest.mark.parametrize("rows", [2**20, 2**20 + 1, 2**31 + 12345, 2**45 + 1, 2**62])
def test_some_of_many_rows_look_uniform(rows):
    one = shuffled(rows)
    for apart in (1, rows // 20_000):
        ids = one(0, 1, 20_000, apart)
        assert len(np.unique(ids)) == len(ids)
        shares = np.histogram(ids, 50, (0, rows))[0] / len(ids)
        assert abs(shares - 1 / 50).max() < 0.006
        assert abs(np.corrcoef(np.arange(20_000), ids)[0, 1]) < 0.03
        assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 0.03
