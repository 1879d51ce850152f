from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

pytest.importorskip("pandas", reason="the extra 'explore' is not installed")

from arrowcache.explore.summary import Distribution, Histogram, distribution

DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "uint64"]


def distribution_of(*parts, piece=1 << 17) -> Distribution:
    found = Distribution()
    for part in map(np.asarray, parts):
        for start in range(0, len(part), piece):
            found.merge(distribution(part[start : start + piece]))
    return found


def assert_is_of(found: Distribution, values: np.ndarray, bins: int = 20) -> None:
    """Compare with NumPy, which looks at all values at once, in its longest float."""
    assert found.count == len(values)
    kept = values[~np.isnan(values)] if values.dtype.kind == "f" else values
    assert found.nans == len(values) - len(kept)
    if not len(kept):
        assert (found.low, found.high) == (None, None)
        assert math.isnan(found.mean)
        assert math.isnan(found.std)
        return
    assert (found.low, found.high) == (kept.min().item(), kept.max().item())
    assert (values[found.low_at], values[found.high_at]) == (found.low, found.high)
    assert (found.low_at, found.high_at) == ((values == kept.min()).argmax(), (values == kept.max()).argmax())
    finite = kept[np.isfinite(kept)]
    long = finite.astype(np.longdouble)
    if len(finite) == len(kept):
        scale = float(np.abs(long).max())
        assert found.mean == pytest.approx(float(long.mean()), rel=1e-6, abs=1e-6 * scale)
        assert found.std == pytest.approx(float(long.std()), rel=1e-5, abs=1e-12 * scale)
    assert_counts(found.histogram(bins), finite, bins)


def assert_counts(histogram: Histogram, finite: np.ndarray, bins: int) -> None:
    """Each count is exact."""
    counts, edges = histogram.counts, histogram.edges
    assert len(edges) == len(counts) + 1
    assert len(counts) <= bins
    assert counts.sum() == len(finite)
    if len(finite):
        wide = finite.astype(np.float64)
        assert edges[0] <= wide.min()
        assert edges[-1] > wide.max()
        assert counts.tolist() == np.diff(np.searchsorted(np.sort(wide), edges)).tolist()
        assert counts[0]
        assert counts[-1]
        assert np.ptp(np.diff(edges)) == 0


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), bins=st.integers(1, 64))
def test_it_is_that_of_all_numbers_however_they_come(data, dtype, bins):
    elements = None
    if dtype.startswith("float"):
        width = int(dtype[5:])
        most = 2.0**15 if width == 16 else 2.0**60
        numbers = st.floats(-most, most, width=width, allow_subnormal=False)
        numbers = numbers.map(lambda number: number if abs(number) > 1e-25 else 0.0)
        elements = numbers | st.just(np.nan)
    values = data.draw(hnp.arrays(dtype, st.integers(0, 60), elements=elements))
    cut = data.draw(st.integers(0, len(values)))
    assert_is_of(distribution_of(values, piece=10), values, bins)
    one, other = distribution_of(values[:cut], piece=10), distribution_of(values[cut:], piece=10)
    assert_is_of(one.merge(other), values, bins)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_numbers_are_counted(dtype):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(300_001) * 30 + 50).astype(np.float64)
    values = (values if dtype.startswith("float") else np.clip(values, 0, 100)).astype(dtype)
    found = distribution_of(values)
    assert_is_of(found, values)
    assert len(found.histogram(20).counts) >= 11


def test_means_and_deviations_of_numbers_far_from_zero_do_not_cancel():
    values = np.float32(1000) + np.random.default_rng(0).standard_normal(100_000).astype(np.float32) / 100
    found = distribution_of(values)
    assert found.mean == pytest.approx(values.mean(dtype=np.float64), rel=1e-9)
    assert found.std == pytest.approx(values.std(dtype=np.float64), rel=1e-5)


def test_a_mean_of_small_integers_is_exact():
    values = np.array([-114, 127, -20, 3, 2, -2, 1], np.int8)  # whose mean float32 does not have
    assert distribution_of(values).mean == pytest.approx(values.mean(dtype=np.float64), abs=1e-14)


def test_a_range_that_keeps_growing_loses_no_number():
    parts = [np.array([sign * 10.0**power]) for power in range(-30, 150, 30) for sign in (1, -1)]
    assert_is_of(distribution_of(*parts), np.concatenate(parts))
    assert_is_of(distribution_of(*reversed(parts)), np.concatenate(parts[::-1]))


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(5),
        np.full(5, 1e30, np.float32),
        np.full(5, -1e-30, np.float32),
        np.array([1e20, -1e20, 3e19], np.float32),
        np.array([1e-20, 3e-20, -2e-20], np.float32),
        np.array([0, 2**64 - 1, 2**63], np.uint64),
        np.array([-(2**63), 2**63 - 1]),
        np.array([2**53, 2**53 + 2, 2**53 + 4]),
        np.array([1e8, 1e8 + 8, 1e8 + 16], np.float32),
        np.array([1.0, np.nextafter(1, 2)]),
        np.zeros(0),
    ],
)
def test_extreme_numbers(values):
    assert_is_of(distribution_of(values), values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("least", [-(2.0**30), -(2.0**30) - 1, -(2.0**100), 0, 2.0**30])
def test_a_negative_number_that_is_next_to_nothing_is_not_lost(dtype, least):
    for tiny in (-(2.0**-149), -(2.0**-126), -(2.0**-50)):
        values = np.array([least, tiny], dtype)
        assert distribution_of(values).histogram(20).counts.sum() == 2
        merged = distribution_of(values[1:]).merge(distribution_of(values[:1]))
        assert merged.histogram(20).counts.sum() == 2


def test_squares_beyond_any_float_are_infinite():
    assert distribution_of([1e300, -1e300, 0.0]).std == math.inf


@pytest.mark.parametrize(("dtype", "most"), [("float32", 3e38), ("float64", 1.7e308)])
def test_infinity_is_an_extreme_but_no_number_to_count(dtype, most):
    values = np.array([np.inf, 1, 2, np.nan, 3, np.inf], dtype)
    found = distribution_of(values)
    assert (found.count, found.nans, found.low, found.high, found.mean) == (6, 1, 1, math.inf, math.inf)
    assert math.isnan(found.std)
    assert_counts(found.histogram(4), np.array([1.0, 2, 3]), 4)
    assert math.isnan(distribution_of(values, -values).mean)
    assert distribution_of(-values).mean == -math.inf
    assert distribution_of(np.array([-most, most], dtype)).histogram(3).counts.sum() == 2


def test_datetimes_are_their_integers_and_not_a_time_is_not_a_number():
    found = distribution_of(np.array([5, "NaT", 7], "datetime64[us]"))
    assert (found.count, found.nans, found.low, found.high, found.mean) == (3, 1, 5, 7, 6)
    assert (found.low_at, found.high_at) == (0, 2)
    nothing = distribution_of(np.array(["NaT"], "datetime64[us]"))
    assert (nothing.count, nothing.nans, nothing.low) == (1, 1, None)


def test_integers_have_bins_of_their_own_as_long_as_there_are_enough():
    histogram = distribution_of([3, 3, 4, 6]).histogram(20)
    assert histogram.edges.tolist() == [3, 4, 5, 6, 7]
    assert histogram.counts.tolist() == [2, 1, 0, 1]


def test_a_histogram_prints_as_bars():
    assert str(Histogram(np.array([0, 1, 500, 1000]), np.arange(5.0))) == "▁▂▅█"
    assert repr(distribution_of().histogram(5)) == ""
