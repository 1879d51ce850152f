"""Pace: what it decides for given numbers, and which numbers it refuses."""

from __future__ import annotations

import json
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache.storage.pace import Flow


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


def test_without_a_tolerance_an_epoch_begins_once_half_of_it_is_due():
    pace = ac.Pace(samples_per_insert=8)
    assert not pace.keeps_loader(Flow(inserted_rows=100, served_rows=750, rows=100))
    why = pace.keeps_loader(Flow(100, 751, 100))
    assert why == "samples_per_insert=8 has 49 served rows due, and an epoch begins at 50, half of its own"
    assert not pace.keeps_loader(Flow(100, 751, 100), epoch_rows=80)
    assert pace.keeps_loader(Flow(100, 751, 100), epoch_rows=1000), "where a sampler waits, an epoch begins"


@pytest.mark.parametrize("ratio", [0.01, 0.4, 1])
def test_without_a_tolerance_the_first_epoch_waits_for_no_more_than_its_rows(ratio):
    """However few times a sample is to be served, rows that are there can be trained on."""
    assert not ac.Pace(samples_per_insert=ratio).keeps_loader(Flow(10, 0, 10))
    assert ac.Pace(samples_per_insert=ratio).keeps_loader(Flow(10, 10, 10))


def test_without_a_tolerance_samplers_fill_the_cache_and_then_wait_until_training_has_caught_up():
    pace = ac.Pace(samples_per_insert=8)
    assert not pace.keeps_sampler(Flow(inserted_rows=1000, served_rows=0, rows=1000, fills=True))
    assert "it may be 740" in pace.keeps_sampler(Flow(1000, 0, 1000))  # 500, and 3 % of 8,000
    assert pace.keeps_sampler(Flow(1000, 7259, 1000))
    assert not pace.keeps_sampler(Flow(1000, 7260, 1000))


def test_without_a_tolerance_samplers_are_not_ever_further_ahead_the_longer_a_run_is():
    pace = ac.Pace(samples_per_insert=8)
    inserted, rows = 10**9, 1000
    assert not pace.keeps_sampler(Flow(inserted, 8 * inserted - 1500, rows))
    assert pace.keeps_sampler(Flow(inserted, 8 * inserted - 1501, rows))


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
    st.none() | st.integers(1, 10**7),
    st.booleans(),
)
def test_the_two_never_wait_for_each_other(
    min_rows, ratio, tolerance, inserted, served, rows, epoch_rows, fills
):
    pace = ac.Pace(min_rows=min_rows, samples_per_insert=ratio, tolerance=tolerance)
    flow = Flow(inserted, served, rows, fills)
    assert not (pace.keeps_sampler(flow) and pace.keeps_loader(flow, epoch_rows))


class Run:
    """A loader and samplers that keep a pace on a cache of so many segments, in no time at all.

    Args:
        train_seconds: for a row. draw_seconds: for a segment, of each sampler.
        ramp: early segments are small.
    """

    def __init__(self, pace, segments, segment_rows, train_seconds, draw_seconds, *, ramp=False):
        self.pace, self.capacity_rows = pace, segments * segment_rows
        self.segment_rows, self.train_seconds = segment_rows, train_seconds
        self.draw_seconds, self.ramp = draw_seconds, ramp
        self.tasks = self.inserted = self.served = 0
        self.listed: deque[int] = deque()
        # when: a sampler has drawn a segment; has written the one whose room it reserved; an epoch is over
        self.events = [(seconds, "drawn", n) for n, seconds in enumerate(draw_seconds)] + [(0.0, "loader", 0)]
        self.waiting: set[tuple[str, int]] = set()
        self.now = 0.0

    @property
    def rows(self):
        return sum(self.listed)

    @property
    def rows_of_next(self):
        return max(1, self.segment_rows >> max(0, 10 - self.tasks)) if self.ramp else self.segment_rows

    def step(self):
        """The next thing happens; False: nothing ever will."""
        if not self.events:
            return False
        event = min(self.events)
        self.events.remove(event)
        self.now, kind, number = event
        if kind == "written":
            self._insert()
            self.events.append((self.now + self.draw_seconds[number], "drawn", number))
        else:
            self.waiting.add((kind, number))
        for who in sorted(self.waiting, reverse=True):  # the loader first: it waits only if it must
            self._try(*who)
        return True

    def _try(self, kind, number):
        fills = self.rows + self.segment_rows <= self.capacity_rows
        flow = Flow(self.inserted, self.served, self.rows, fills)
        if kind == "loader":
            if not self.rows or self.pace.keeps_loader(flow):
                return
            self.served += self.rows
            self.events.append((self.now + self.rows * self.train_seconds, "loader", 0))
        else:
            if ("loader", 0) not in self.waiting and self.pace.keeps_sampler(flow):
                return
            self.events.append((self.now + self.draw_seconds[number] / 10, "written", number))
        self.waiting.remove((kind, number))

    def _insert(self):
        rows = self.rows_of_next
        self.tasks += 1
        self.listed.append(rows)
        self.inserted += rows
        while self.rows > self.capacity_rows:
            self.listed.popleft()


@pytest.mark.slow
@given(
    st.sampled_from([0.3, 0.5, 1, 2, 3.7, 8, 20]),
    st.integers(4, 60),
    st.integers(1, 100),
    st.floats(-3, 3),
    st.lists(st.floats(0.5, 2), min_size=1, max_size=6),
    st.booleans(),
)
def test_without_a_tolerance_the_ratio_holds_within_a_tenth(ratio, segments, rows, speed, samplers, ramp):
    """Whoever of the two is faster, by whatever factor up to a thousand: as the docstring defines it."""
    seconds = [factor * 10**speed * rows for factor in samplers]
    run = Run(ac.Pace(samples_per_insert=ratio), segments, rows, 1.0, seconds, ramp=ramp)
    start = (10 + ratio) * run.capacity_rows
    while run.served < 3 * start:
        assert run.step(), "both wait for each other"
        if run.served >= start:
            due = ratio * run.inserted
            allowed = 0.1 * due + ratio * rows * len(samplers)
            assert abs(run.served - due) <= allowed, (run.now, run.served / run.inserted)


def test_without_a_tolerance_a_fast_loader_is_held_from_the_first_segment_on():
    """It ran at twice the ratio for as long as the cache took to be filled twice."""
    run = Run(ac.Pace(samples_per_insert=8), 40, 100, 1e-6, [1.0], ramp=True)
    while run.inserted < 2 * run.capacity_rows:
        assert run.step()
        if run.inserted and run.served:
            assert run.served / run.inserted < 8.8
    assert run.served / run.inserted > 7.2


@given(st.builds(ac.Pace, min_rows=st.integers(1, 10**9), samples_per_insert=st.floats(0.1, 9)))
def test_a_pace_comes_back_from_its_record(pace):
    assert ac.Pace.from_json(pace.to_json()) == pace
