"""Budgets: batches of rows of similar length are a pure function, whatever becomes of an epoch."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers import goes_unheld
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import in_part

from arrowcache.reading.budget import BudgetOrder, batched, bucket_count
from arrowcache.reading.order import Shard
from arrowcache.reading.plan import Plan
from arrowcache.reading.shuffle import Shuffle
from arrowcache.storage.layout import SegmentInfo

TOKENS = 64


def plan_of(rows, buckets, shuffle="rows", epoch_rows=None, seed=5, epoch=2) -> Plan:
    rows = np.array(rows, np.int64)
    return Plan(epoch, seed, Shuffle(shuffle), epoch_rows, 1, 1, np.arange(len(rows)) + 3, rows, 0, buckets)


class Epoch:
    """An order of all ranks; rows are told by their number among the planned ones."""

    def __init__(self, plan, lengths, tokens=TOKENS, world=1, drop_last=True, present=None):
        indices = range(len(plan.seqs)) if present is None else present
        segments = [SegmentInfo(int(plan.seqs[i]), int(plan.rows[i]), "", 1, 1, 0.0) for i in indices]
        starts = np.concatenate(([0], np.cumsum(plan.rows)))
        known = [np.arange(starts[i], starts[i + 1]) for i in indices]
        self.planned = np.concatenate([np.empty(0, np.int64), *known])  # numbers of the snapshot's rows
        self.lengths, self.tokens = lengths, tokens
        self.ranks = [
            BudgetOrder(plan, segments, lengths[self.planned], tokens, Shard(rank, world), drop_last)
            for rank in range(world)
        ]
        self.steps = self.ranks[0].steps

    def step(self, step):
        """The rows of each rank, checked."""
        batches = [order.batches(step, step + 1) for order in self.ranks]
        for order, batch in zip(self.ranks, batches, strict=True):
            assert len(batch) > 0
            assert order.rows_of(range(step, step + 1)) == len(batch)
            lengths = self.lengths[self.planned[batch]]
            assert len(batch) * lengths.max() <= self.tokens
        return [self.planned[batch].tolist() for batch in batches]

    def batches(self, first=0, last=None):
        return [self.step(step) for step in range(first, self.steps if last is None else last)]

    def remaining(self, steps):
        """The plan of the rest, as each rank saves and loads it."""
        (state,) = {json.dumps(order.remaining(steps).to_state()) for order in self.ranks}
        return Plan.from_state(json.loads(state), has_buckets=True)


def flat(batches):
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(batches)))


@st.composite
def epochs(draw):
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    epoch_rows = draw(st.none() | st.integers(1, 150))
    total = sum(rows) if epoch_rows is None else epoch_rows
    shuffle = draw(st.sampled_from(["rows", None]))
    plan = plan_of(
        rows, draw(st.integers(1, min(total, 9))), shuffle, epoch_rows, draw(st.integers(0, 2**70))
    )
    most = draw(st.sampled_from([1, 5, TOKENS]))
    lengths = np.random.default_rng(draw(st.integers(0, 99))).integers(1, most + 1, sum(rows))
    return plan, lengths.astype(np.int32)


def expected_of(plan) -> Counter[int]:
    """How often each row comes."""
    order = plan.row_order(0)
    rows = int(plan.rows.sum())
    whole, left = divmod(plan.stream_rows, rows)
    passes = [plan.row_order(number) for number in range(whole + 1)]
    found = [passes[number](0, rows) for number in range(whole)] + [passes[whole](0, left)]
    assert order.rows == rows
    return Counter(np.concatenate(found).tolist())


# one epoch


@pytest.mark.slow
@settings(deadline=None)
@given(epochs(), st.integers(1, 5))
def test_ranks_take_equal_steps_within_the_budget_and_each_row_comes_once(made, world):
    plan, lengths = made
    epoch = Epoch(plan, lengths, world=world)
    found = epoch.batches()
    assert all(len(step) == world for step in found)
    expected = expected_of(plan)
    assert Counter(flat(found)) <= expected
    left = expected - Counter(flat(found))
    assert left.total() < world
    for rank, order in enumerate(epoch.ranks):
        for some in (range(epoch.steps), range(1, epoch.steps, 2), range(1), range(0)):
            steps = [step for step in some if step < epoch.steps]
            assert order.rows_of(some) == sum(len(found[step][rank]) for step in steps)
    padded = Epoch(plan, lengths, world=world, drop_last=False)
    assert padded.batches(0, epoch.steps) == found
    last = Counter(flat(padded.batches(epoch.steps)))
    assert left <= last
    assert {*left} == {*last}


def test_fewer_rows_than_ranks_are_left_out_or_repeated():
    plan, lengths = plan_of([3], 1), np.full(3, 7, np.int32)
    assert Epoch(plan, lengths, world=4).steps == 0
    (step,) = Epoch(plan, lengths, world=4, drop_last=False).batches()
    assert sorted(step[:3]) == [[0], [1], [2]]
    assert step[3] == step[0]
    assert Epoch(plan, lengths, world=3).steps == 1


def test_batches_are_as_long_as_the_budget_allows_the_longest_first():
    lengths = np.array([4465, 3, 70_001, 70_000, 3], np.int32)
    places, starts = batched(lengths, 70_001)
    assert places.tolist() == [2, 3, 0, 1, 4]
    assert starts.tolist() == [0, 1, 2, 5]
    places, starts = batched(np.array([3, 10, 3, 1, 3, 10, 9, 10], np.int32), 20)
    assert places.tolist() == [1, 5, 7, 6, 0, 2, 4, 3]
    assert starts.tolist() == [0, 2, 4, 8]


@pytest.mark.parametrize(("rows", "most"), [(30_000, 0.03), (4000, 0.08)])
def test_little_is_padded_where_lengths_are_drawn_as_those_of_texts_are(rows, most):
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.8, rows), 1, 4096).astype(np.int32)
    plan = plan_of([rows], bucket_count(rows, lengths, 16_384))
    batches = flat_batches(Epoch(plan, lengths, 16_384))
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    assert lengths.sum() > (1 - most) * padded
    assert lengths.sum() > (1 - 2 * most) * 16_384 * len(batches), "few batches are much smaller"


def flat_batches(epoch):
    return [batch for step in epoch.batches() for batch in step]


def test_rows_meet_others_in_each_epoch_and_batches_come_in_no_order_of_length():
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 6000), 1, 500).astype(np.int32)
    plan = plan_of([6000], bucket_count(6000, lengths, 1000))
    assert plan.buckets >= 4
    pairs = []
    for epoch in range(2):
        batches = flat_batches(Epoch(replace(plan, epoch=epoch), lengths, 1000))
        pairs.append({pair for batch in batches for pair in itertools.combinations(sorted(batch), 2)})
        longest = [int(lengths[batch].max()) for batch in batches]
        rises = sum(one < other for one, other in itertools.pairwise(longest))
        assert 0.4 < rises / len(longest) < 0.6
    assert len(pairs[0] & pairs[1]) < 0.4 * len(pairs[0])


def test_without_a_shuffle_the_oldest_bucket_comes_first_and_its_segments_are_given_up():
    lengths = np.random.default_rng(0).integers(1, 9, 200).astype(np.int32)
    for world in (1, 3):
        epoch = Epoch(plan_of([20] * 10, 5, None), lengths, world=world)
        starts = []
        for step, batches in enumerate(epoch.batches()):
            spans = {order.segments_span(step) for order in epoch.ranks}
            (span,) = spans
            used = [row // 20 for batch in batches for row in batch]
            assert span.start <= min(used) <= max(used) < span.stop
            starts.append(span.start)
        assert starts == sorted(starts)
        assert max(starts) == 8, "two segments are a bucket"
        assert not epoch.ranks[0].segments_span(epoch.steps)


# Some batches, and a digest of an epoch. Whoever changes one of them raises ORDER_VERSION.
def test_the_batches_of_a_seed_and_an_epoch_are_the_same_for_ever():
    lengths = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32), 125)
    epoch = Epoch(plan_of([301, 5, 494, 200], 4, seed=2**70, epoch=7), lengths, 24)
    batches = flat_batches(epoch)
    assert batches[1:4] == [
        [645, 573],
        [574, 62, 502, 102, 814, 534, 470, 934, 942, 662, 158, 406],
        [845, 397],
    ]
    assert hashlib.sha256(json.dumps(batches).encode()).hexdigest().startswith("5251a650240a9005")
    assert flat_batches(Epoch(plan_of([301, 5, 494, 200], 4, seed=2**70, epoch=7), lengths, 24)) == batches
    for other in ({"seed": 2**70 + 1}, {"epoch": 8}):
        options = {"seed": 2**70, "epoch": 7} | other
        assert flat_batches(Epoch(plan_of([301, 5, 494, 200], 4, **options), lengths, 24)) != batches


def test_an_order_goes_when_nobody_holds_it():
    def used():
        order = Epoch(plan_of([10], 2), np.full(10, 3, np.int32)).ranks[0]
        order.batches(0, 1)
        return order

    assert goes_unheld(used)


# the rest of an epoch


@pytest.mark.slow
@settings(max_examples=in_part(100), deadline=None)
@given(epochs(), st.integers(1, 4))
def test_an_epoch_goes_on_at_any_step_as_if_nothing_had_been(made, world):
    plan, lengths = made
    epoch = Epoch(plan, lengths, world=world)
    whole = epoch.batches()
    for step in range(epoch.steps + 1):
        again = Epoch(epoch.remaining(step), lengths, world=world)
        assert again.batches() == whole[step:]
        assert again.ranks[0].missing == 0
        if again.steps:  # and once more
            assert Epoch(again.remaining(1), lengths, world=world).batches() == whole[step + 1 :]


@pytest.mark.slow
@settings(deadline=None)
@given(epochs(), st.data())
def test_the_rest_comes_once_with_other_ranks_another_budget_and_less_segments(made, data):
    plan, lengths = made
    world, tokens = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([TOKENS, 2 * TOKENS]))
    some = st.lists(st.sampled_from(range(len(plan.seqs))), unique=True).map(sorted)
    present, fewer = data.draw(some), data.draw(some)
    fewer = [index for index in present if index in fewer]
    starts = np.concatenate(([0], np.cumsum(plan.rows)))
    of_segment = starts.searchsorted(np.arange(len(lengths)), side="right") - 1
    first = Epoch(plan, lengths, world=data.draw(st.integers(1, 4)))
    step = data.draw(st.integers(0, first.steps))
    left = expected_of(plan)
    left.subtract(flat(first.batches(0, step)))
    rest = first.remaining(step)
    for there in (present, fewer):
        missing = sum(count for row, count in left.items() if of_segment[row] not in there)
        left = Counter({row: count for row, count in left.items() if of_segment[row] in there and count})
        epoch = Epoch(rest, lengths, tokens, world, present=there)
        assert epoch.ranks[0].missing >= missing, "what was missing before still is, where it lies ahead"
        found = Counter(flat(epoch.batches()))
        assert found <= left
        assert (left - found).total() < world
        step = data.draw(st.integers(0, epoch.steps))
        left.subtract(flat(epoch.batches(0, step)))
        rest = epoch.remaining(step)


def test_a_state_within_a_bucket_has_a_bit_for_each_of_its_rows():
    lengths = np.random.default_rng(0).integers(1, 100, 5000).astype(np.int32)
    epoch = Epoch(plan_of([5000], 5), lengths, 1000)
    state = epoch.remaining(20).to_state()
    assert len(json.dumps(state)) < 300 + 1000 / 8 * 4 / 3
    bare = [step for step in range(epoch.steps) if not epoch.remaining(step).taken]
    assert len(bare) == 5, "where a bucket begins, nothing is to be told"


@pytest.mark.parametrize(
    "change",
    [
        {"buckets": 0}, {"buckets": 51}, {"buckets": 2.5}, {"buckets": 1}, {"taken": None}, {"taken": "?"},
        {"taken": ""}, {"taken": "/w=="}, {"position": 12}, {"position": 0},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(change):
    state = Epoch(plan_of([50], 5), np.full(50, 20, np.int32)).remaining(1).to_state()
    assert state["position"] == 3
    with pytest.raises(ValueError, match="the state is damaged"):
        Plan.from_state(state | change, has_buckets=True)


def test_a_state_of_the_other_kind_goes_on_with_the_next_epoch():
    begun = Epoch(plan_of([50], 5), np.full(50, 20, np.int32)).remaining(1)
    for plan, has_buckets in ((begun, False), (replace(begun, buckets=0, taken=b""), True)):
        state = plan.to_state()
        with pytest.raises(ValueError, match="of epoch 2, with 47 of 50 rows left in batches by") as e:
            Plan.from_state(state, has_buckets=has_buckets)
        way_out = str(e.value).rpartition("next one: ")[2]
        following = Plan.from_state(eval(way_out, {"state": state}), has_buckets=has_buckets)
        assert (following.epoch, len(following.seqs), following.buckets) == (3, 0, 0)
