"""Orders: pure functions of (rows, seed, epoch, rank, world size)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowcache.reading import order as order_module
from arrowcache.reading.order import EpochOrder, Permutation, Sequential, Share, index_shuffle

shuffles = st.sampled_from(["rows", None])


def ids_of(order):
    """The whole epoch, a batch at a time."""
    return [order.batches(step, step + 1).tolist() for step in range(order.steps)]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def make(rows, batch_size, shuffle="rows", seed=0, epoch=0, **options):
    return EpochOrder(rows, batch_size, shuffle=shuffle, seed=seed, epoch=epoch, **options)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), shuffles, st.integers(0, 2**70), st.integers(0, 9))
def test_one_rank_sees_every_row_once(rows, batch_size, shuffle, seed, epoch):
    batches = ids_of(make(rows, batch_size, shuffle, seed, epoch, drop_last=False))
    assert sorted(flat(batches)) == list(range(rows))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    whole = ids_of(make(rows, batch_size, shuffle, seed, epoch))
    assert whole == [batch for batch in batches if len(batch) == batch_size]


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(2, 5), shuffles, st.integers(0, 99))
def test_ranks_take_equal_steps_of_disjoint_rows(rows, batch_size, world, shuffle, seed):
    orders = [make(rows, batch_size, shuffle, seed, share=Share(rank, world)) for rank in range(world)]
    assert {order.steps for order in orders} == {rows // (world * batch_size)}
    seen = flat(flat(ids_of(order)) for order in orders)
    assert len(seen) == len(set(seen)) == orders[0].steps * world * batch_size
    assert set(seen) <= set(range(rows))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(2, 5), shuffles, st.none() | st.integers(1, 500))
def test_without_drop_last_ranks_pad_by_wrapping_around(rows, batch_size, world, shuffle, epoch_rows):
    options = {"epoch_rows": epoch_rows, "drop_last": False}
    orders = [make(rows, batch_size, shuffle, share=Share(rank, world), **options) for rank in range(world)]
    total = epoch_rows or rows
    steps = -(-total // (world * batch_size))
    assert {order.steps for order in orders} == {steps}
    batches = [ids_of(order) for order in orders]
    assert all(len(batch) == batch_size for rank in batches for batch in rank)
    stream = [i for step in range(steps) for rank in range(world) for i in batches[rank][step]]
    assert stream[:total] == flat(ids_of(make(rows, batch_size, shuffle, **options))), "as one rank alone"
    padded = stream[:total] * (1 + len(stream) // total)
    assert stream == padded[: len(stream)], "the padding is the epoch's own first rows"


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 9), shuffles, st.integers(1, 3))
def test_epoch_rows_gives_exactly_so_many_in_whole_passes(rows, epoch_rows, batch_size, shuffle, world):
    orders = [
        make(rows, batch_size, shuffle, epoch_rows=epoch_rows, share=Share(rank, world))
        for rank in range(world)
    ]
    assert {order.steps for order in orders} == {epoch_rows // (batch_size * world)}
    alone = make(rows, batch_size, shuffle, epoch_rows=epoch_rows, drop_last=False)
    stream = flat(ids_of(alone))
    assert len(stream) == epoch_rows
    for first in range(0, epoch_rows, rows):
        one_pass = stream[first : first + rows]
        assert len(set(one_pass)) == len(one_pass), "without replacement within a pass"


def test_each_pass_of_an_epoch_is_shuffled_anew():
    stream = flat(ids_of(make(50, 10, epoch_rows=150)))
    passes = [tuple(stream[first : first + 50]) for first in (0, 50, 100)]
    assert len(set(passes)) == 3


@settings(deadline=None)
@given(st.data(), st.integers(1, 300), st.integers(1, 20), shuffles, st.integers(1, 3), st.booleans())
def test_any_part_of_an_epoch_is_what_it_is_within_the_whole(
    data, rows, batch_size, shuffle, world, drop_last
):
    epoch_rows = data.draw(st.none() | st.integers(1, 600))

    def fresh():
        share = Share(data.draw(st.just(0)), world)
        return make(rows, batch_size, shuffle, share=share, drop_last=drop_last, epoch_rows=epoch_rows)

    order = fresh()
    whole = np.concatenate([np.empty(0, np.int64), *(order.batches(s, s + 1) for s in range(order.steps))])
    first = data.draw(st.integers(0, order.steps))
    last = data.draw(st.integers(first, order.steps + 3))
    part = fresh().batches(first, last)
    assert part.dtype == np.int64
    assert part.tolist() == whole[first * batch_size : last * batch_size].tolist()


def test_no_order_remembers_what_was_asked_before():
    order, again = make(1000, 7, epoch_rows=5000), make(1000, 7, epoch_rows=5000)
    forwards = [order.batches(step, step + 1).tolist() for step in range(order.steps)]
    backwards = [again.batches(step, step + 1).tolist() for step in reversed(range(again.steps))]
    assert forwards == backwards[::-1]


def test_seed_and_epoch_decide_the_order():
    orders = {
        (seed, epoch): tuple(make(100, 100, seed=seed, epoch=epoch).batches(0, 1).tolist())
        for seed in (0, 1, 2**40)
        for epoch in range(5)
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[0, 3] == tuple(make(100, 100, seed=0, epoch=3).batches(0, 1).tolist())


def test_the_order_is_apart_from_a_users_own_stream_of_the_same_seed():
    users = {tuple(np.random.default_rng(0).permutation(100))}
    users |= {
        tuple(np.random.default_rng(np.random.SeedSequence(0, spawn_key=(k,))).permutation(100))
        for k in range(20)
    }
    ours = {tuple(make(100, 100, seed=0, epoch=epoch).batches(0, 1)) for epoch in range(20)}
    assert not users & ours


def test_sequential_is_oldest_first():
    assert make(10, 4, None, drop_last=False).batches(0, 3).tolist() == list(range(10))
    assert Sequential(5)(np.array([4, 0])).tolist() == [4, 0]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_the_index_shuffle_is_a_bijection(rows, seed):
    keys = np.random.default_rng(seed).integers(0, 2**64, 12, np.uint64)
    ids = index_shuffle(np.arange(rows), rows, keys)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(rows))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2**20, 2**62 - 1),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=50),
    st.integers(0, 99),
)
def test_the_index_shuffle_maps_far_apart_positions_into_range_one_to_one(rows, places, seed):
    keys = np.random.default_rng(seed).integers(0, 2**64, 12, np.uint64)
    positions = np.unique(np.array(places, np.int64) % rows)
    ids = index_shuffle(positions, rows, keys)
    assert len(np.unique(ids)) == len(positions)
    assert ids.min() >= 0
    assert ids.max() < rows
    alone = np.concatenate([index_shuffle(positions[i : i + 1], rows, keys) for i in range(len(positions))])
    assert np.array_equal(ids, alone)


@pytest.mark.parametrize("rows", [2, 3, 8, 13])
def test_the_index_shuffle_puts_each_row_everywhere_about_equally_often(rows, monkeypatch):
    monkeypatch.setattr(order_module, "_TABLE_ROWS", 0)
    trials = 1500
    counts = np.zeros((rows, rows))
    for trial in range(trials):
        counts[np.arange(rows), Permutation(rows, 7, (trial,))(np.arange(rows))] += 1
    expected = trials / rows
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (rows - 1) ** 2
    assert chi_squared < freedom + 5 * np.sqrt(2 * freedom) + 5, "a fixed seed: this fails always or never"


def test_beyond_the_table_a_permutation_is_computed_where_it_is_asked_for(monkeypatch):
    rows = order_module._TABLE_ROWS + 12345
    shuffle = Permutation(rows, 3, (1, 2))
    assert shuffle._table is None
    sampled = np.unique(np.random.default_rng(0).integers(0, rows, 20_000))
    ids = shuffle(sampled)
    assert len(np.unique(ids)) == len(sampled)
    assert 0.49 < ids.mean() / rows < 0.51
    assert abs(np.corrcoef(sampled, ids)[0, 1]) < 0.03
    assert not np.array_equal(ids, Permutation(rows, 3, (1, 3))(sampled))
    assert np.array_equal(ids, Permutation(rows, 3, (1, 2))(sampled))


def test_an_epoch_without_a_table_sees_every_row_once_too(monkeypatch):
    monkeypatch.setattr(order_module, "_TABLE_ROWS", 0)
    batches = ids_of(make(1001, 10, drop_last=False, epoch_rows=2002))
    stream = flat(batches)
    assert sorted(stream[:1001]) == sorted(stream[1001:]) == list(range(1001))


def test_an_epoch_shorter_than_a_step_has_no_step():
    assert make(5, 10).steps == 0
    assert make(5, 10).batches(0, 0).tolist() == []
    assert make(5, 10, drop_last=False).steps == 1


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (2, 2), (0, 0), (1, 1)])
def test_a_rank_outside_the_world_is_refused(rank, world):
    with pytest.raises(ValueError, match=f"rank={rank}.*world_size={world}"):
        Share(rank, world)
