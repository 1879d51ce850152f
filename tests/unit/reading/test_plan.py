"""Plans: what a state says, and the rest of an epoch whatever is left of its segments."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowcache.reading.order import EvenOrder, Shard
from arrowcache.reading.plan import Plan
from arrowcache.reading.shuffle import Shuffle
from arrowcache.storage.layout import SegmentInfo

SHUFFLES = ["rows", "window", "blocks", None]


def plan(rows, *, seqs=None, shuffle="rows", epoch_rows=None, position=0, block_rows=4) -> Plan:
    return Plan(
        epoch=2,
        seed=5,
        shuffle=Shuffle(shuffle),
        epoch_rows=epoch_rows,
        window_rows=17,
        block_rows=block_rows,
        seqs=np.arange(len(rows)) if seqs is None else np.array(seqs, np.int64),
        rows=np.array(rows, np.int64),
        position=position,
    )


def segments(plan: Plan, present=None) -> list[SegmentInfo]:
    chosen = range(len(plan.seqs)) if present is None else present
    return [SegmentInfo(int(plan.seqs[i]), int(plan.rows[i]), "", 1, 1, 0.0) for i in chosen]


def named(plan: Plan, present, ids) -> list[tuple[int, int]]:
    """(seq, row) of row ids in the numbering of the present segments."""
    starts = np.concatenate(([0], np.cumsum(plan.rows[present])))
    index = starts.searchsorted(ids, side="right") - 1
    seqs = plan.seqs[present][index]
    return list(zip(seqs.tolist(), (ids - starts[index]).tolist(), strict=True))


# states

plans = st.builds(
    plan,
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    shuffle=st.sampled_from(SHUFFLES),
    epoch_rows=st.none() | st.integers(1, 500),
    block_rows=st.integers(1, 9),
)


@pytest.mark.slow
@given(plans, st.data())
def test_a_state_is_plain_and_gives_the_plan_back(made, data):
    position = data.draw(st.integers(0, made.stream_rows), "position")
    state = made.at(position).to_state()
    assert json.loads(json.dumps(state)) == state
    again = Plan.from_state(state)
    assert again.to_state() == state
    assert again.rows.tolist() == made.rows.tolist()
    assert again.seqs.tolist() == made.seqs.tolist()
    assert again.position == position


def test_pytorch_saves_a_state_and_loads_it_without_running_code(torch):
    state, file = plan([3, 40, 17], shuffle="window", epoch_rows=12).at(5).to_state(), io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


def test_a_state_of_16_000_segments_is_small():
    rows = np.full(16_000, 1024)
    rows[::1000] = 17
    state = plan(rows, seqs=np.arange(16_000) + 10**9).to_state()
    assert len(json.dumps(state)) < 2000


def test_a_state_without_segments_is_one_too():
    state = plan([]).to_state()
    assert state["segments"] == []
    assert len(Plan.from_state(state).seqs) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "torch"}, "not a state"),
        *(({"version": version}, f"version {version}, and this .* reads 6: use") for version in (1, 5, 7)),
        ({"epoch": -1}, "damaged"),
        ({"epoch": 1.5}, "damaged"),
        ({"seed": True}, "damaged"),
        ({"position": None}, "damaged"),
        ({"shuffle": "row"}, "damaged"),
        ({"segments": [[0, 1]]}, "damaged"),
        ({"segments": [[0, 2, 0]]}, "damaged"),
        ({"segments": [[0, 2, 5], [1, 1, 5]]}, "damaged"),
        ({"segments": "no"}, "damaged"),
        ({"segments": [[0, 1], [16, 1], [1, 16]]}, "damaged"),
        ({"segments": [[2**62, 1, 16]]}, "damaged"),
        ({"segments": [[2**63 - 1, 2, 16]]}, "damaged"),
        ({"segments": [[0, 1, True]]}, "damaged"),
        ({"segments": [[0, 2**70, 1]]}, "damaged"),
        ({"segments": [[0, 2**40, 1]]}, "damaged"),
        ({"segments": [[0, 1 << 21, 1]]}, "damaged"),
        ({"segments": [[0, 10, 2**62]]}, "damaged"),
        ({"segments": [[0, 5, 2**62]]}, "damaged"),  # in 64 bits their sum is 2**62
        ({"segments": [[0, 0.5, 1]]}, "damaged"),
        ({"epoch": 2**80}, "damaged"),
        ({"window_rows": "3"}, "damaged"),
    ],
)
def test_what_is_no_state_is_refused_with_a_reason(change, words):
    with pytest.raises(ValueError, match=words):
        Plan.from_state(plan([3, 4]).to_state() | change)


@pytest.mark.parametrize("wrong", [None, 5, [], {}, {"epoch": 3}])
def test_what_is_nothing_like_a_state_is_refused(wrong):
    with pytest.raises(ValueError, match="not a state"):
        Plan.from_state(wrong)


def test_a_state_that_lacks_a_key_names_it():
    state = plan([3]).to_state()
    del state["seed"]
    with pytest.raises(ValueError, match="seed"):
        Plan.from_state(state)


def test_a_segment_of_other_rows_under_the_same_number_is_not_the_planned_one():
    made = plan([3, 4], seqs=[7, 9])
    includes = [made.includes(SegmentInfo(seq, rows, "", 1, 1, 0.0)) for seq, rows in
                [(7, 3), (9, 4), (7, 4), (8, 3), (10, 4), (0, 3)]]  # fmt: skip
    assert includes == [True, True, False, False, False, False]


# the rest of an epoch


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(plans, st.data())
def test_rows_of_segments_that_are_gone_are_passed_over_and_all_others_come_once(made, data):
    draw = data.draw
    present = draw(st.lists(st.sampled_from(range(len(made.seqs))), unique=True).map(sorted), "present")
    size, world = draw(st.integers(1, 9), "batch"), draw(st.integers(1, 3), "world")
    planned = EvenOrder(made, 1, Shard(), False)
    position = draw(st.integers(0, planned.steps), "position")
    rest = made.at(position)
    expected = [
        pair
        for pair in named(made, list(range(len(made.seqs))), planned.batches(position, planned.steps))
        if pair[0] in {int(made.seqs[i]) for i in present}
    ]
    orders = [EvenOrder(rest, size, Shard(r, world), False, segments(made, present)) for r in range(world)]
    assert len({order.steps for order in orders}) == 1
    found, starts = [], []
    for step in range(orders[0].steps):
        ahead = orders[0].segments_span(step).start
        ids_of_ranks = [order.batches(step, step + 1) for order in orders]
        span = orders[0].segments_span(step)
        assert ahead <= span.start, "what is guessed ahead gives up no segment too early"
        starts.append(span.start)
        for ids in ids_of_ranks:
            assert world == 1 or len(ids) == size
            found += named(made, present, ids)
            used = [present.index(int(seq)) for seq, _ in named(made, present, ids)]
            if used and (world == 1 or len(expected) % (size * world) == 0):  # else it is padded
                assert span.start <= min(used) <= max(used) < span.stop
                assert min(used) >= max(starts), "no segment is read after it was given up"
    assert found[: len(expected)] == expected
    assert len(found) - len(expected) < size * world
    if len(present) < len(made.seqs):
        assert not orders[0].is_whole
        assert orders[0].missing == planned.steps - position - len(expected)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(plans, st.data())
def test_a_resumed_epoch_can_be_resumed_again_at_any_step(made, data):
    draw = data.draw
    present = draw(st.lists(st.sampled_from(range(len(made.seqs))), unique=True, min_size=1).map(sorted))
    size = draw(st.integers(1, 7), "batch")
    whole = EvenOrder(made, size, Shard(), False, segments(made, present))
    expected = named(made, present, whole.batches(0, whole.steps))
    first = EvenOrder(made, size, Shard(), False, segments(made, present))
    steps = draw(st.integers(0, first.steps), "steps")
    group = draw(st.integers(1, 5), "group")
    done = 0
    delivered = []
    while done < steps:
        last = min(done + group, steps)
        delivered += named(made, present, first.batches(done, last))
        done = last
    again = EvenOrder(made.at(first.position_after(steps)), size, Shard(), False, segments(made, present))
    assert delivered + named(made, present, again.batches(0, again.steps)) == expected


def test_survivors_tell_the_position_after_any_step_that_was_made_in_any_order():
    made = plan([10, 10, 10], shuffle=None)
    order = EvenOrder(made, 8, Shard(), False, segments(made, [0, 2]))
    order.batches(0, order.steps)
    assert [order.position_after(step) for step in (3, 1, 0, 2, 1, 3)] == [30, 8, 0, 26, 8, 30]


def test_survivors_drop_an_incomplete_last_step_if_told():
    made = plan([10, 10, 10], shuffle=None)
    order = EvenOrder(made, 8, Shard(), True, segments(made, [0, 2]))
    assert order.steps == 2
    assert order.batches(0, 2).tolist() == list(range(16))
    assert order.batches(2, 3).tolist() == []


def test_nothing_is_left_of_an_epoch_whose_segments_are_all_gone():
    made = plan([10, 10])
    for world in (1, 2):
        order = EvenOrder(made, 4, Shard(0, world), False, [])
        assert order.steps == 0
        assert order.batches(0, 5).tolist() == []
        assert order.position_after(0) == 0


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_what_is_left_of_an_epoch_of_very_many_passes_is_counted_without_walking_them(shuffle):
    made = plan([10, 10, 10], shuffle=shuffle, position=12)
    order, short = (
        EvenOrder(replace(made, epoch_rows=rows), 8, Shard(), True, segments(made, [0, 2]))
        for rows in (30 * 2**50, 30 * 20)
    )
    assert not order.is_whole
    assert not short.is_whole
    assert order.rows - short.rows == 20 * (2**50 - 20)
    assert order.batches(0, 20).tolist() == short.batches(0, 20).tolist()
    gone = EvenOrder(replace(made, epoch_rows=2**60), 8, Shard(), True, [])
    assert (gone.steps, gone.batches(0, 1).tolist()) == (0, [])


def test_a_window_over_what_is_left_gives_up_segments_as_it_goes():
    """A resumed epoch leased and read ahead all of its segments, to its end."""
    made = plan([16] * 40, shuffle="window", position=16 * 6)
    present = list(range(2, 40))
    order = EvenOrder(made, 8, Shard(), True, segments(made, present))
    assert not order.is_whole
    spans = []
    while len(spans) < order.steps:
        order.batches(len(spans), len(spans) + 1)
        spans.append(order.segments_span(len(spans)))
    assert max(len(span) for span in spans) <= 6
    assert spans[-1].start >= 36


def test_a_step_of_two_passes_needs_the_segments_of_both():
    made, present = plan([2, 15, 1, 1], shuffle="window", epoch_rows=20), [0, 1]
    orders = [EvenOrder(made, 1, Shard(rank, 2), False, segments(made, present)) for rank in range(2)]
    for step in range(orders[0].steps):
        ids = np.concatenate([order.batches(step, step + 1) for order in orders])
        span = orders[0].segments_span(step)
        assert all(present.index(seq) in span for seq, _ in named(made, present, ids))
