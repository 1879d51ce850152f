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
    """Of Python's integers, sums of all rows, and a search in them."""
    shares, mask = [], 2**64 - 1
    for place in range(first, first + count):
        state = ((place + 1) * 0x9E3779B97F4A7C15 + key) & mask
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
        shares.append(((state ^ (state >> 31)) >> 11) * 2.0**-53)
    sums = np.cumsum(weights, dtype=np.float64)
    sought = np.minimum(np.array(shares) * sums[-1], np.nextafter(sums[-1], 0))
    return sums.searchsorted(sought, side="right")


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


@settings(deadline=None, max_examples=300)
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
