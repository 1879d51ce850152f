"""Draws in C: the same rows as a plain model in NumPy draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arrowcache.native.order import Drawn, Pass, WeightSums

TINY, HUGE = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
KEY = 0xFEDCBA9876543210


def drawn(weights, first, count, key=KEY):
    return Pass(first + count, drawn=Drawn(WeightSums(weights), key))(first, count)


def modelled(weights, first, count, key=KEY):
    """Of Python's integers, and a tree of NumPy's sums."""
    shares, mask = [], 2**64 - 1
    for place in range(first, first + count):
        state = ((place + 1) * 0x9E3779B97F4A7C15 + key) & mask
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        shares.append(((state ^ (state >> 31)) >> 11) * 2.0**-53)
    blocks = filled_up(weights.astype(np.float64), 16)
    fours = blocks.reshape(-1, 4, 4)
    quarters = ((fours[..., 0] + fours[..., 1]) + (fours[..., 2] + fours[..., 3])).cumsum(axis=1)
    levels = [filled_up(quarters[:, -1], 16).cumsum(axis=1)]
    while len(levels[0]) > 1:
        levels.insert(0, filled_up(levels[0][:, -1], 16).cumsum(axis=1))
    sought, rows = np.array(shares) * levels[0][0, -1], np.zeros(count, np.int64)
    for level in levels:
        ends = level[rows]
        sought = np.where(sought < ends[:, -1], sought, np.nextafter(ends[:, -1], 0))
        rows, sought = descended(rows, ends, sought)
    rows, sought = descended(rows, quarters[rows], sought)
    rows, _ = descended(rows, blocks.reshape(-1, 4)[rows].cumsum(axis=1), sought)
    for at, row in enumerate(rows):
        rows[at] = np.flatnonzero(weights[: row + 1]).max()
    return rows


def filled_up(values, width):
    return np.append(values, np.zeros(-len(values) % width)).reshape(-1, width)


def descended(rows, ends, sought):
    """The child of each node, and what is sought there."""
    passed = (ends[:, :-1] <= sought[:, None]).sum(axis=1)
    before = np.append(np.zeros((len(ends), 1)), ends, axis=1)
    return ends.shape[1] * rows + passed, sought - before[np.arange(len(ends)), passed]


def weights_of(rows, kind, seed):
    rng = np.random.default_rng(seed)
    weights = rng.random(rows).astype(np.float32)
    match kind:
        case "zeros":
            weights[rng.random(rows) < 0.9] = 0
        case "ends of zeros":
            weights[: rows // 3] = weights[rows - rows // 3 :] = 0
        case "one row":
            weights[:] = 0
        case "huge and tiny":
            weights = rng.choice(np.array([0, TINY, 1e-30, 1, 1e30, HUGE], np.float32), rows)
        case "tiny":
            weights[:] = TINY
    weights[rng.integers(rows)] += np.float32(0 if kind == "tiny" else 1)
    return weights


@settings(deadline=None, max_examples=150)
@given(
    rows=st.one_of(st.integers(1, 40), st.integers(240, 275), st.integers(1, 9000), st.just(65537)),
    kind=st.sampled_from(["any", "zeros", "ends of zeros", "one row", "huge and tiny", "tiny"]),
    seed=st.integers(0, 1000),
    first=st.integers(0, 2**62 - 200),
    count=st.integers(0, 200),
)
@example(rows=1, kind="tiny", seed=0, first=0, count=200)
@example(rows=16**4 + 1, kind="one row", seed=1, first=0, count=200)
@example(rows=16**4, kind="huge and tiny", seed=2, first=2**62 - 200, count=200)
def test_draws_are_those_of_a_plain_model(rows, kind, seed, first, count):
    weights = weights_of(rows, kind, seed)
    assert np.array_equal(drawn(weights, first, count), modelled(weights, first, count))


@settings(deadline=None, max_examples=200)
@given(
    rows=st.one_of(st.integers(1, 40), st.integers(240, 275), st.integers(1, 9000)),
    kinds=st.tuples(*[st.sampled_from(["any", "zeros", "one row", "huge and tiny"])] * 2),
    seed=st.integers(0, 1000),
    share=st.sampled_from([0, 0.001, 0.1, 1]),
)
@example(rows=16**3 + 1, kinds=("one row", "one row"), seed=1, share=1)
def test_a_table_that_changed_is_as_one_made_of_all_weights(rows, kinds, seed, share):
    before, after = (weights_of(rows, kind, seed + at) for at, kind in enumerate(kinds))
    rng = np.random.default_rng(seed)
    changed = np.sort(rng.integers(0, rows, round(rows * share)))
    wanted = before.copy()
    wanted[changed] = after[changed]
    given = after[changed]
    lacks = rng.random(len(changed)) < 0.1
    given[np.isin(changed, changed[lacks])] = np.nan
    wanted[changed[lacks]] = 0.5
    table, made = WeightSums(before), WeightSums(wanted.copy())
    table.change(changed, given, 0.5)
    assert (table.bad, table.total) == (-1, made.total)
    assert np.array_equal(table.weights, wanted)
    if made.total:
        ways = [Pass(1000, drawn=Drawn(each, KEY))(0, 1000) for each in (table, made)]
        assert np.array_equal(*ways)
    source = np.full(rows, np.nan, np.float32)
    table.fill(source, 2.0)
    assert np.array_equal(table.weights, np.full(rows, 2.0))
    table.change(np.array([rows - 1]), np.array([-1], np.float32))
    assert table.bad == rows - 1


def test_draws_are_those_of_earlier_releases():
    weights = (np.arange(5000) % 7).astype(np.float32)
    assert drawn(weights, 10**6, 6, 12345).tolist() == [3966, 3964, 1032, 67, 1206, 2364]


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 256, 257, 4100])
def test_all_weight_on_one_row_draws_this_row(rows):
    for row in {0, rows // 2, rows - 1}:
        weights = np.zeros(rows, np.float32)
        weights[row] = TINY
        assert (drawn(weights, 0, 100) == row).all()
        assert WeightSums(weights).total == TINY
    assert (WeightSums(weights[:0]).bad, WeightSums(weights[:0]).total) == (-1, 0)


@pytest.mark.parametrize("value", [-1, -TINY, np.inf, -np.inf, np.nan])
def test_the_first_weight_that_is_none_is_named(value):
    weights = np.ones(300, np.float32)
    weights[5] = -0.0
    assert WeightSums(weights).bad == -1
    for row in (299, 273, 16, 0):
        weights[row] = value
        assert WeightSums(weights).bad == row
