"""Orders: pure functions of (segment sizes, seed, epoch, rank, world size)."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from helpers import goes_unheld
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowcache.reading.order import EvenOrder, Shard
from arrowcache.reading.plan import Plan
from arrowcache.reading.shuffle import Shuffle

segment_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=40)
few_segments = st.lists(st.integers(1, 30), min_size=1, max_size=12)
batch_sizes = st.integers(1, 40)
worlds = st.integers(2, 5)
epoch_rows_or_none = st.none() | st.integers(1, 500)
# One shuffle and what it needs; `block_rows` for resumes with another batch size.
shuffles = st.fixed_dictionaries(
    {
        "shuffle": st.sampled_from(Shuffle),
        "window_rows": st.integers(1, 1500),
        "block_rows": st.integers(1, 70),
    }
)


def ids_of(order):
    """The whole epoch, a batch at a time."""
    return [order.batches(step, step + 1).tolist() for step in range(order.steps)]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def make(
    segments, batch_size, shuffle="rows", seed=0, epoch=0, *, epoch_rows=None, window_rows=1, block_rows=None,
    start=0, shard=None, drop_last=True,
):  # fmt: skip
    rows, block_rows = np.array(segments, np.int64), block_rows or batch_size
    seqs = np.arange(len(rows))
    plan = Plan(epoch, seed, Shuffle(shuffle), epoch_rows, window_rows, block_rows, seqs, rows, start)
    return EvenOrder(plan, batch_size, shard or Shard(), drop_last)


def make_ranks(world, *arguments, **options):
    return [make(*arguments, shard=Shard(rank, world), **options) for rank in range(world)]


def stream_of(ranks):
    """What all ranks read together, in the order of the epoch's stream."""
    return flat(flat(zip(*map(ids_of, ranks), strict=True)))


# One epoch.


@pytest.mark.slow
@settings(deadline=None)
@given(segment_sizes, batch_sizes, shuffles, st.integers(0, 2**70), st.integers(0, 9))
def test_one_rank_sees_every_row_once(segments, batch_size, options, seed, epoch):
    batches = ids_of(make(segments, batch_size, seed=seed, epoch=epoch, drop_last=False, **options))
    assert sorted(flat(batches)) == list(range(sum(segments)))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    whole = ids_of(make(segments, batch_size, seed=seed, epoch=epoch, **options))
    assert whole == [batch for batch in batches if len(batch) == batch_size]


@pytest.mark.slow
@settings(deadline=None)
@given(segment_sizes, batch_sizes, worlds, shuffles, st.integers(0, 99))
def test_ranks_take_equal_steps_of_disjoint_rows(segments, batch_size, world, options, seed):
    ranks = make_ranks(world, segments, batch_size, seed=seed, **options)
    rows = sum(segments)
    assert {order.steps for order in ranks} == {rows // (world * batch_size)}
    seen = stream_of(ranks)
    assert len(seen) == len(set(seen)) == ranks[0].steps * world * batch_size
    assert set(seen) <= set(range(rows))


@pytest.mark.slow
@settings(deadline=None)
@given(segment_sizes, batch_sizes, worlds, shuffles, epoch_rows_or_none)
def test_without_drop_last_ranks_pad_by_wrapping_around(segments, batch_size, world, options, epoch_rows):
    options |= {"epoch_rows": epoch_rows, "drop_last": False}
    ranks = make_ranks(world, segments, batch_size, **options)
    total = epoch_rows or sum(segments)
    steps = -(-total // (world * batch_size))
    assert {order.steps for order in ranks} == {steps}
    assert all(len(batch) == batch_size for order in ranks for batch in ids_of(order))
    stream = stream_of(ranks)
    assert stream[:total] == flat(ids_of(make(segments, batch_size, **options))), "as one rank alone"
    padded = stream[:total] * (1 + len(stream) // total)
    assert stream == padded[: len(stream)], "the padding is the epoch's own first rows"


@pytest.mark.slow
@settings(deadline=None)
@given(few_segments, st.integers(1, 1000), st.integers(1, 9), shuffles, st.integers(1, 3))
def test_epoch_rows_gives_exactly_so_many_in_whole_passes(segments, epoch_rows, batch_size, options, world):
    ranks = make_ranks(world, segments, batch_size, epoch_rows=epoch_rows, **options)
    assert {order.steps for order in ranks} == {epoch_rows // (batch_size * world)}
    alone = make(segments, batch_size, epoch_rows=epoch_rows, drop_last=False, **options)
    stream = flat(ids_of(alone))
    assert len(stream) == epoch_rows
    for first in range(0, epoch_rows, sum(segments)):
        one_pass = stream[first : first + sum(segments)]
        assert len(set(one_pass)) == len(one_pass), "without replacement within a pass"


@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks"])
def test_each_pass_of_an_epoch_is_shuffled_anew(shuffle):
    stream = flat(ids_of(make([100, 200], 10, shuffle, epoch_rows=900, window_rows=100)))
    passes = [tuple(stream[first : first + 300]) for first in (0, 300, 600)]
    assert len(set(passes)) == 3


@pytest.mark.slow
@settings(deadline=None)
@given(st.data(), segment_sizes, batch_sizes, shuffles, st.integers(1, 3), st.booleans())
def test_any_part_of_an_epoch_is_what_it_is_within_the_whole(
    data, segments, batch_size, options, world, drop_last
):
    options |= {"epoch_rows": data.draw(epoch_rows_or_none), "drop_last": drop_last}
    options |= {"shard": Shard(data.draw(st.integers(0, world - 1)), world)}
    order = make(segments, batch_size, **options)
    whole = flat(ids_of(order))
    first = data.draw(st.integers(0, order.steps))
    last = data.draw(st.integers(first, order.steps + 3))
    part = make(segments, batch_size, **options).batches(first, last)
    assert part.dtype == np.int64
    assert part.tolist() == whole[first * batch_size : last * batch_size]


@pytest.mark.parametrize("shuffle", Shuffle)
def test_an_epoch_may_have_more_rows_than_memory_has_bytes(shuffle):
    options = {"shuffle": shuffle, "window_rows": 2**40, "epoch_rows": 2**62}
    order = make([2**56, 2**55], 16, **options)
    resumed = make([2**56, 2**55], 8, start=order.position_after(2**50), block_rows=16, **options)
    assert order.batches(2**50, 2**50 + 3).tolist() == resumed.batches(0, 6).tolist()
    assert len(set(order.batches(2**50, 2**50 + 3).tolist())) == 48


@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks"])
def test_seed_and_epoch_decide_the_order(shuffle):
    def order(seed, epoch):
        whole = make([40, 60, 100], 8, shuffle, seed=seed, epoch=epoch, window_rows=50)
        return tuple(whole.batches(0, whole.steps))

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1, 2**40) for epoch in range(5)}
    assert len(set(orders.values())) == len(orders)
    assert orders[0, 3] == order(0, 3)


def test_without_shuffle_rows_come_oldest_first():
    assert make([3, 7], 4, None, drop_last=False).batches(0, 3).tolist() == list(range(10))


def test_batches_of_blocks_are_runs_of_the_batch_size():
    batches = ids_of(make([24, 8, 40], 8, "blocks"))
    assert all(np.array_equal(np.diff(batch), np.ones(7)) for batch in batches)
    assert flat(batches) != list(range(72))
    halves = ids_of(make([24, 8, 40], 8, "blocks", block_rows=4))
    assert not all(np.array_equal(np.diff(batch), np.ones(7)) for batch in halves)


# The first batch, a digest of an epoch, and a batch of a very long one. Whoever changes one of them raises
# ORDER_VERSION and the version of states in plan.py: epochs that were begun are refused then.
AS_EVER = {
    "rows": (
        [9878, 6409, 6353, 8747, 2715, 4224, 7984, 977],
        "cdab07369706ae58",
        [1038104019381966363, 1591092483168483419, 1262370687658054619],
    ),
    "window": (
        [2040, 1753, 55, 1805, 1928, 1135, 1534, 877],
        "ae424a51da80c8ab",
        [835245716058933, 630021542505646, 725633152465039],
    ),
    "blocks": (
        [1896, 1897, 1898, 1899, 1900, 1901, 1902, 1903],
        "29818ef2f0d1234a",
        [99433234882376648, 99433234882376649, 99433234882376650],
    ),
}


@pytest.mark.parametrize("shuffle", AS_EVER)
def test_the_order_of_a_seed_and_an_epoch_is_the_same_for_ever(shuffle):
    first, digest, far = AS_EVER[shuffle]
    segments, options = [3001, 5, 4996, 2000], {"epoch_rows": 25_000, "window_rows": 4000}
    order = make(segments, 8, shuffle, seed=2**70, epoch=7, **options)
    assert order.batches(0, 1).tolist() == first
    whole = order.batches(0, order.steps).astype("<i8")
    assert hashlib.sha256(whole.tobytes()).hexdigest().startswith(digest)
    long = make([2**50, 2**61, 3], 3, shuffle, epoch=2**31, window_rows=2**55)
    assert long.batches(2**40, 2**40 + 1).tolist() == far


def test_an_order_goes_when_nobody_holds_it():
    def used():
        order = make([1000], 10)
        order.batches(0, 1)
        return order

    assert goes_unheld(used)


def test_an_epoch_shorter_than_a_step_has_no_step():
    assert make([5], 10).steps == 0
    assert make([5], 10).batches(0, 0).tolist() == []
    assert make([5], 10, drop_last=False).steps == 1


# Resuming.


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(few_segments, batch_sizes, worlds, batch_sizes, worlds, shuffles, epoch_rows_or_none)
def test_ranks_resume_what_other_ranks_began(
    segments, batch_size, world, other_size, other_world, options, epoch_rows
):
    options |= {"drop_last": False, "epoch_rows": epoch_rows}
    stream = flat(ids_of(make(segments, 10, **options)))
    total = len(stream)
    ranks = make_ranks(world, segments, batch_size, **options)
    begun = stream_of(ranks)
    for step in range(ranks[0].steps + 1):
        (start,) = {order.position_after(step) for order in ranks}
        rest = make_ranks(other_world, segments, other_size, start=start, **options)
        assert len({order.steps for order in rest}) == 1
        after = stream_of(rest)
        assert begun[:start] == stream[:start]
        assert after[: total - start] == stream[start:], "the rest, and then padding"
        assert len(after) - (total - start) < other_world * other_size
        padding = after[total - start :]
        assert padding == (stream * (1 + len(padding) // total))[: len(padding)]
        if (total - start) % (other_world * other_size) == 0:
            assert not padding


@pytest.mark.slow
@settings(deadline=None)
@given(few_segments, batch_sizes, shuffles, st.data())
def test_a_resume_of_a_resume_counts_from_the_epochs_begin(segments, batch_size, options, data):
    whole = make(segments, batch_size, drop_last=False, **options)
    first = data.draw(st.integers(0, whole.steps))
    resumed = make(segments, batch_size, drop_last=False, start=whole.position_after(first), **options)
    assert resumed.steps == whole.steps - first
    for step in range(resumed.steps + 1):
        assert resumed.position_after(step) == whole.position_after(first + step)
        assert (
            resumed.batches(step, step + 1).tolist() == whole.batches(first + step, first + step + 1).tolist()
        )


@pytest.mark.slow
@settings(deadline=None)
@given(few_segments, batch_sizes, st.integers(1, 4), epoch_rows_or_none, st.data())
def test_with_drop_last_a_resume_takes_the_whole_steps_left(segments, batch_size, world, epoch_rows, data):
    total = epoch_rows or sum(segments)
    start = data.draw(st.integers(0, total))
    order = make(segments, batch_size, shard=Shard(0, world), epoch_rows=epoch_rows, start=start)
    assert order.steps == (total - start) // (world * batch_size)
    assert all(len(batch) == batch_size for batch in ids_of(order))


# Which segments are in use.


@pytest.mark.slow
@settings(deadline=None)
@given(few_segments, batch_sizes, st.integers(1, 3), shuffles, st.booleans(), st.data())
def test_the_span_of_a_step_is_what_it_and_later_steps_read(
    segments, batch_size, world, options, drop_last, data
):
    rows, count = sum(segments), len(segments)
    epoch_rows = data.draw(st.none() | st.integers(1, 3 * rows))
    start = data.draw(st.integers(0, epoch_rows or rows))
    options |= {"epoch_rows": epoch_rows, "drop_last": drop_last, "start": start}
    ranks = make_ranks(world, segments, batch_size, **options)
    segment_of = np.repeat(np.arange(count), segments)
    steps = [
        segment_of[np.concatenate([order.batches(step, step + 1) for order in ranks])]
        for step in range(ranks[0].steps)
    ]
    for step, used in enumerate(steps):
        (span,) = {order.segments_span(step) for order in ranks}
        assert 0 <= span.start <= min(map(min, steps[step:]))
        assert max(used) < span.stop <= count
    assert len(ranks[0].segments_span(len(steps))) == 0
    assert ranks[0].segments_span(len(steps)).start == count


def test_spans_of_one_pass_move_on_with_the_steps():
    window = make([10] * 20, 5, "window", window_rows=40)
    starts = [window.segments_span(step).start for step in range(window.steps)]
    assert starts == sorted(starts)
    assert starts[-1] >= 16
    oldest_first = make([10] * 20, 5, None)
    assert [oldest_first.segments_span(step) for step in range(4)] == [
        range(1), range(1), range(1, 2), range(1, 2)
    ]  # fmt: skip
    assert make([10] * 20, 15, None).segments_span(1) == range(1, 3)


@pytest.mark.parametrize("shuffle", [None, "window"])
def test_everything_is_in_use_while_it_will_be_read_again(shuffle):
    segments, options = [10] * 20, {"window_rows": 40}
    twice = make(segments, 10, shuffle, epoch_rows=400, **options)
    assert [len(twice.segments_span(step)) for step in range(20)] == [20] * 20
    assert len(twice.segments_span(39)) < 10
    padded = make(segments, 15, shuffle, shard=Shard(0, 2), drop_last=False, **options)
    assert padded.segments_span(6) == range(20)
    divisible = make(segments, 10, shuffle, shard=Shard(0, 2), drop_last=False, **options)
    assert len(divisible.segments_span(9)) < 10
    dropped = make(segments, 10, shuffle, epoch_rows=209, **options)
    assert len(dropped.segments_span(19)) < 10, "the second pass's rows are of a dropped step"


# Arguments.


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (1, 1)])
def test_a_rank_outside_the_world_is_refused(rank, world):
    with pytest.raises(ValueError, match=f"rank={rank}.*world_size={world}"):
        Shard(rank, world)
