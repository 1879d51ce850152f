"""Selected rows: their numbers and ids, and the orders over them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowcache.reading.budget import BudgetOrder
from arrowcache.reading.order import EpochOrder, ResumedOrder, Shard
from arrowcache.reading.plan import SHUFFLES, Plan
from arrowcache.reading.selected import Selected, bitmap, counts_of
from arrowcache.storage.layout import SegmentInfo

sizes_and_masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=12).filter(
    lambda masks: any(map(any, masks))
)


def selection(masks, only_partial=True):
    """Numbers, rows, and bitmaps of segments, whose numbers have gaps."""
    seqs = np.arange(len(masks)) * 3 + 1
    bitmaps = {
        int(seq): bitmap(np.array(mask))
        for seq, mask in zip(seqs, masks, strict=True)
        if not (only_partial and all(mask))
    }
    return seqs, np.array([*map(len, masks)]), bitmaps


def plan_of(masks, shuffle="rows", **options):
    seqs, rows, bitmaps = selection(masks)
    given = {"epoch": 1, "seed": 2, "epoch_rows": None, "window_rows": 50, "block_rows": 7} | options
    return Plan(shuffle=shuffle, seqs=seqs, rows=rows, bitmaps=bitmaps, **given)


def ids_of(order):
    return [order.batches(step, step + 1).tolist() for step in range(order.steps)]


def flat(batches):
    return [*itertools.chain.from_iterable(batches)]


def chosen(masks):
    return np.flatnonzero(np.concatenate(masks)).tolist()


@given(sizes_and_masks, st.booleans())
def test_numbers_become_the_ids_of_rows_that_are_selected(masks, only_partial):
    seqs, rows, bitmaps = selection(masks, only_partial)
    selected, wanted = Selected(seqs, rows, bitmaps), chosen(masks)
    assert selected.size == len(wanted)
    assert counts_of(seqs, rows, bitmaps).tolist() == [*map(sum, masks)]
    assert selected.ids(np.arange(selected.size)).tolist() == wanted
    backwards = np.arange(selected.size)[::-1]
    assert selected.ids(backwards).tolist() == wanted[::-1]
    assert selected.ids(np.empty(0, np.int64)).tolist() == []


def test_where_all_rows_are_selected_nothing_is_made():
    numbers = np.arange(5)
    selected = Selected(np.array([1, 2]), np.array([3, 2]))
    assert selected.are_all
    assert selected.ids(numbers) is numbers


@settings(max_examples=200)
@given(
    sizes_and_masks, st.sampled_from(SHUFFLES), st.integers(1, 9), st.integers(1, 3), st.integers(0, 60),
    st.booleans(),
)  # fmt: skip
def test_an_epoch_has_each_selected_row_once_and_goes_on_from_its_state(
    masks, shuffle, size, world, taken, drop_last
):
    plan, wanted = plan_of(masks, shuffle), chosen(masks)
    orders = [EpochOrder(plan, size, Shard(rank, world), drop_last) for rank in range(world)]
    found = flat(flat(zip(*map(ids_of, orders), strict=True)))
    if drop_last or world == 1:
        assert len(set(found)) == len(found) >= len(wanted) - (size * world - 1) * drop_last
    assert {*found} <= {*wanted}
    if not drop_last:
        assert {*found} == {*wanted}
    taken = min(taken, orders[0].steps)
    rest = Plan.from_state(orders[0].rest(taken).to_state())
    assert rest.bitmaps == plan.bitmaps
    again = [EpochOrder(rest, size, Shard(rank, world), drop_last) for rank in range(world)]
    if drop_last or world == 1:
        assert [*map(ids_of, again)] == [ids_of(order)[taken:] for order in orders]


@given(sizes_and_masks, st.sampled_from(SHUFFLES), st.data())
def test_a_resumed_epoch_has_the_selected_rows_of_the_segments_that_are_left(masks, shuffle, data):
    plan = plan_of(masks, shuffle, position=0)
    is_left = data.draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks)))
    left = [
        SegmentInfo(int(seq), int(rows), "", 1, 1, 0.0)
        for seq, rows, stays in zip(plan.seqs, plan.rows, is_left, strict=True)
        if stays
    ]
    wanted = chosen([mask for mask, stays in zip(masks, is_left, strict=True) if stays] or [[False]])
    whole = EpochOrder(plan, 1, Shard(), drop_last=False)
    missing = len(chosen(masks)) - len(wanted)
    order = ResumedOrder(plan, left, 4, Shard(), drop_last=False)
    assert sorted(flat(ids_of(order))) == wanted
    for step in range(order.steps):
        span, ids = order.segments_span(step), order.batches(step, step + 1)
        starts = np.cumsum([0, *(segment.rows for segment in left)])
        inside = (ids >= starts[span.start]) & (ids < starts[span.stop])
        assert inside.all()
    assert order.missing == missing
    assert len(flat(ids_of(whole))) == len(chosen(masks))


@given(sizes_and_masks, st.sampled_from(["rows", None]))
def test_batches_by_tokens_are_of_selected_rows(masks, shuffle):
    wanted = chosen(masks)
    plan = plan_of(masks, shuffle, buckets=1)
    lengths = (np.arange(len(wanted)) % 9 + 1).astype(np.int32)
    present = [SegmentInfo(int(s), int(r), "", 1, 1, 0.0) for s, r in zip(plan.seqs, plan.rows, strict=True)]
    order = BudgetOrder(plan, present, lengths, 20, Shard(), drop_last=False)
    found = ids_of(order)
    assert sorted(flat(found)) == wanted
    length_of = dict(zip(wanted, lengths.tolist(), strict=True))
    assert all(len(ids) * max(length_of[row] for row in ids) <= 20 for ids in found)
    rest = Plan.from_state(order.rest(1).to_state(), has_buckets=True)
    assert ids_of(BudgetOrder(rest, present, lengths, 20, Shard(), drop_last=False)) == found[1:]


@pytest.mark.parametrize(
    "selected",
    [
        [[2, "gA=="]],  # of no segment
        [[1, "gAA="]],  # too long
        [[1, ""]],
        [[1, "/w=="]],  # 8 rows of 5
        [[1, "no base64"]],
        [[1.5, "gA=="]],
        [["1", "gA=="]],
        [1],
        3,
    ],
)
def test_a_state_with_bitmaps_that_cannot_be_is_refused(selected):
    state = plan_of([[True, False, True, True, True], [True]]).to_state()
    assert Plan.from_state(state).counts.tolist() == [4, 1]
    with pytest.raises(ValueError, match="the state is damaged"):
        Plan.from_state(state | {"selected": selected})


def test_a_state_that_lacks_its_selection_is_refused_and_the_next_epoch_needs_none():
    state = plan_of([[True, False], [True]]).to_state()
    without = {name: value for name, value in state.items() if name != "selected"}
    with pytest.raises(ValueError, match="the state is damaged"):
        Plan.from_state(without)
    following = state | {"epoch": 2, "position": 0, "segments": []}
    assert Plan.from_state(following).epoch == 2
