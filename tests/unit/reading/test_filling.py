"""Filling a ring: before each step its rows are there, whatever the order, in runs, and not too many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arrowcache.reading.filling import Filling
from arrowcache.reading.order import EpochOrder, Shard, order_of
from arrowcache.reading.plan import SHUFFLES, Plan
from arrowcache.storage.layout import SegmentInfo

NOTHING = -1


def plan_of(segments, shuffle="window", window_rows=40, epoch_rows=None, position=0, seed=3):
    seqs = np.arange(len(segments))
    return Plan(0, seed, shuffle, epoch_rows, window_rows, 5, seqs, np.array(segments, np.int64), position)


def even(segments=20, rows=10, window_rows=40, **options):
    return plan_of([rows] * segments, window_rows=window_rows, **options)


class Ring:
    """A ring whose places tell the numbers of their rows in the line; `put` is how many came each step."""

    def __init__(self, order, pass_rows, rows, run_rows):
        self.places = np.full(rows, NOTHING)
        self.filling = Filling(order, pass_rows, rows, run_rows)
        self.pass_rows, self.run_rows = pass_rows, run_rows
        self.put: list[int] = []

    def before(self, step):
        runs = self.filling.before(step)
        for run in runs or ():
            assert 0 < len(run) <= self.run_rows
            assert run[0] // self.pass_rows == run[-1] // self.pass_rows, "rows of the snapshot follow"
            places = np.array(run) % len(self.places)
            assert places[-1] - places[0] == len(run) - 1, "and places"
            self.places[places] = run
        self.put.append(sum(map(len, runs or ())))
        return runs is not None


def hold(ranks, pass_rows, ring_rows, run_rows):
    """Fill a ring for an epoch. Returns: whether each step found its rows there; how many came before."""
    ring = Ring(ranks[0], pass_rows, ring_rows, run_rows)
    held = []
    for step in range(ranks[0].steps):
        lines = [order.in_line(step) for order in ranks]
        if any(line is None for line in lines):
            assert step == ranks[0].steps - 1, "only the last step is padded"
            continue
        for line, order in zip(lines, ranks, strict=True):
            assert (line % pass_rows == order.batches(step, step + 1)).all()
        held.append(ring.before(step))
        if held[-1]:
            for line in lines:
                assert (ring.places[line % ring_rows] == line).all()
        else:
            assert len(ranks[0].span_in_line(step)) > ring_rows
    return held, ring.put


plans = st.builds(
    plan_of,
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.sampled_from(["window", "window", *SHUFFLES]),
    st.integers(1, 200),
    st.none() | st.integers(1, 400),
    seed=st.integers(0, 99),
)


@given(
    plans,
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 250),
    st.integers(1, 60),
    st.floats(0, 1),
    st.sets(st.integers(0, 11), max_size=5),
)
def test_all_rows_of_a_step_are_there(plan, size, world, drop_last, ring_rows, run_rows, share, gone):
    plan = plan.at(int(share * plan.stream_rows))
    there = [
        SegmentInfo(int(seq), int(rows), "", 1, 1, 0.0)
        for seq, rows in zip(plan.seqs, plan.rows, strict=True)
    ]
    there = [segment for segment in there if segment.seq not in gone]
    pass_rows = sum(segment.rows for segment in there)
    if pass_rows:
        ranks = [order_of(plan, there, size, Shard(rank, world), drop_last) for rank in range(world)]
        hold(ranks, pass_rows, ring_rows, run_rows)


@pytest.mark.parametrize("epoch_rows", [None, 150, 500])
@pytest.mark.parametrize("position", [0, 37])
def test_two_windows_hold_each_step_of_even_segments(epoch_rows, position):
    order = EpochOrder(even(epoch_rows=epoch_rows, position=position), 4, Shard(), drop_last=True)
    held, _ = hold([order], 200, 80, 10)
    assert all(held)


def test_a_segment_larger_than_the_ring_is_not_held_and_what_follows_is():
    order = EpochOrder(plan_of([10] * 10 + [300] + [10] * 10, window_rows=40), 5, Shard(), drop_last=True)
    held, put = hold([order], 500, 80, 20)
    assert held[0]
    assert held[-1]
    assert not all(held)
    assert sum(put) <= 200 + 80


def test_each_row_goes_there_once():
    order = EpochOrder(even(), 4, Shard(), drop_last=True)
    _, put = hold([order], 200, 80, 10)
    assert sum(put) == 200


def test_rows_that_are_not_in_the_epoch_or_were_delivered_stay_away():
    order = EpochOrder(even(epoch_rows=60), 4, Shard(), drop_last=True)
    assert sum(hold([order], 200, 80, 10)[1]) <= 60 + 40
    order = EpochOrder(even(position=180), 4, Shard(), drop_last=True)
    assert sum(hold([order], 200, 80, 10)[1]) <= 40


def test_no_step_but_the_first_waits_for_half_a_window():
    order = EpochOrder(even(200, 10, 400), 4, Shard(), drop_last=True)
    held, put = hold([order], 2000, 800, 4)
    assert all(held)
    assert put[0] <= 200 + 2 * 4 + 4, "half a window, and a little ahead"
    assert max(put[1:]) <= 2 * 4 + 4


def test_what_goes_there_ahead_goes_in_whole_parts():
    order = EpochOrder(even(200, 10, 400), 4, Shard(), drop_last=True)
    _, put = hold([order], 2000, 800, 50)
    ahead = [rows for rows in put[1:] if rows]
    assert ahead.count(50) > 0.8 * len(ahead)
