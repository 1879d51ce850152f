"""Pace: what it decides for given numbers, and which numbers it refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache.storage.pace import Flow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_rows": 0}, "min_rows"),
        ({"max_reuse": 0}, "max_reuse"),
        ({"samples_per_insert": 0}, "above 0"),
        ({"samples_per_insert": -1.0}, "above 0"),
        ({"samples_per_insert": math.nan}, "finite"),
        ({"samples_per_insert": math.inf}, "finite"),
        ({"samples_per_insert": 10**400}, "finite"),
        ({"samples_per_insert": 2, "tolerance": -1}, "tolerance"),
        ({"samples_per_insert": 2, "tolerance": math.nan}, "tolerance"),
        ({"tolerance": 10}, "give that, too"),
        ({"samples_per_insert": 3, "max_reuse": 2}, "never be reached"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ac.Pace(**options)


@pytest.mark.parametrize(
    "options",
    [{"min_rows": "1"}, {"max_reuse": 1.5}, {"samples_per_insert": "2"}, {"samples_per_insert": True}],
)
def test_what_is_no_number_is_refused(options):
    with pytest.raises(TypeError):
        ac.Pace(**options)


def test_any_type_of_number_is_kept_as_a_plain_one():
    pace = ac.Pace(np.int64(5), np.float32(1.5), np.int32(4), np.int64(7))
    assert pace == ac.Pace(5, 1.5, 4, 7)
    assert json.loads(json.dumps(pace.to_json())) == pace.to_json()


def test_without_a_ratio_neither_side_waits_for_the_other():
    pace = ac.Pace(max_reuse=3)
    for flow in (Flow(0, 10**9, 1), Flow(10**9, 0, 1)):
        assert not pace.keeps_sampler(flow)
        assert not pace.keeps_loader(flow)


def test_samplers_wait_once_training_lags_by_more_than_the_tolerance():
    pace = ac.Pace(samples_per_insert=2, tolerance=100)
    assert not pace.keeps_sampler(Flow(inserted_rows=100, served_rows=100, rows=100))
    assert "101 served rows behind" in pace.keeps_sampler(Flow(100, 99, 100))


def test_an_epoch_waits_once_training_leads_by_more_than_the_tolerance():
    pace = ac.Pace(samples_per_insert=2, tolerance=100)
    assert not pace.keeps_loader(Flow(inserted_rows=100, served_rows=300, rows=100))
    assert "101 served rows ahead" in pace.keeps_loader(Flow(100, 301, 100))


@pytest.mark.parametrize(("ratio", "owed"), [(1, 50), (4, 200), (0.5, 50)])
def test_without_a_tolerance_it_is_what_the_cache_is_to_be_served(ratio, owed):
    pace = ac.Pace(samples_per_insert=ratio)
    inserted = 1000
    assert not pace.keeps_sampler(Flow(inserted, ratio * inserted - owed, 50))
    assert pace.keeps_sampler(Flow(inserted, ratio * inserted - owed - 1, 50))
    assert not pace.keeps_loader(Flow(inserted, ratio * inserted + owed, 50))
    assert pace.keeps_loader(Flow(inserted, ratio * inserted + owed + 1, 50))


def test_without_a_tolerance_samplers_fill_the_cache_before_they_wait_for_training():
    pace = ac.Pace(samples_per_insert=8)
    assert not pace.keeps_sampler(Flow(inserted_rows=1000, served_rows=0, rows=1000))
    assert pace.keeps_sampler(Flow(inserted_rows=1016, served_rows=0, rows=1000))  # something left unserved


def test_too_few_rows_keep_epochs_and_never_samplers():
    pace = ac.Pace(min_rows=100, samples_per_insert=1, tolerance=0)
    assert "99 rows of min_rows=100" in pace.keeps_loader(Flow(10**6, 0, 99))
    assert not pace.keeps_sampler(Flow(10**6, 0, 99))
    assert pace.keeps_sampler(Flow(10**6, 0, 100))


@given(
    st.integers(1, 1000),
    st.floats(0.01, 100),
    st.none() | st.floats(0, 10**6),
    st.integers(0, 10**9),
    st.integers(-1000, 10**9),
    st.integers(0, 10**6),
)
def test_the_two_never_wait_for_each_other(min_rows, ratio, tolerance, inserted, served, rows):
    pace = ac.Pace(min_rows=min_rows, samples_per_insert=ratio, tolerance=tolerance)
    flow = Flow(inserted, served, rows)
    assert not (pace.keeps_sampler(flow) and pace.keeps_loader(flow))


@given(st.builds(ac.Pace, min_rows=st.integers(1, 10**9), samples_per_insert=st.floats(0.1, 9)))
def test_a_pace_comes_back_from_its_record(pace):
    assert ac.Pace.from_json(pace.to_json()) == pace
