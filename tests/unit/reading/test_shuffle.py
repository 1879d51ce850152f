"""Row orders: bijections of positions to row ids, and which segments they have in use."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import first_is_quick

from arrowcache.reading.shuffle import Blocks, Permutation, Sequential, Window

seeds = st.integers(0, 2**70)
segment_sizes = st.lists(st.integers(1, 60), min_size=1, max_size=40).map(np.array)
MAKERS = {
    "sequential": lambda segments, _size, _seed, _key: Sequential(segments),
    "rows": lambda segments, _size, seed, key: Permutation(int(segments.sum()), seed, key, len(segments)),
    "window": Window,
    "blocks": Blocks,
}
every_order = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
every_shuffle = pytest.mark.parametrize(
    "make", [MAKERS[name] for name in ("rows", "window", "blocks")], ids=["rows", "window", "blocks"]
)


def ids_of(order):
    return order(0, order.rows)


def deviation(permutations, rows):
    """By how many standard deviations chi-square over all positions x row ids is off its mean."""
    counts = np.zeros((rows, rows))
    for ids in permutations:
        counts[np.arange(rows), ids] += 1
    expected = counts.sum() / rows**2
    freedom = (rows - 1) ** 2
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


# Every order.


@pytest.mark.slow
@every_order
@settings(deadline=None)
@given(segments=segment_sizes, size=st.integers(1, 3000), seed=seeds)
def test_every_row_is_at_one_position(make, segments, size, seed):
    order = make(segments, size, seed, (3, 1))
    assert order.rows == segments.sum()
    ids = ids_of(order)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(order.rows))


@pytest.mark.slow
@every_order
@settings(deadline=None)
@given(segments=segment_sizes, size=st.integers(1, 1500), data=st.data())
def test_places_may_be_asked_for_in_any_order_and_repeatedly(make, segments, size, data):
    whole = ids_of(make(segments, size, 5, ()))
    order = make(segments, size, 5, ())
    for _ in range(data.draw(st.integers(1, 4), "calls")):
        first = data.draw(st.integers(0, len(whole)), "first")
        count = data.draw(st.integers(0, len(whole) - first), "count")
        apart = data.draw(st.integers(0, 200), "apart")
        most = 1 + (len(whole) - first - count) // max(1, apart)
        times = data.draw(st.integers(1, min(5, most)), "times")
        ids = order(first, count, times, apart)
        assert ids.dtype == np.int64
        assert ids.flags.writeable
        places = first + np.arange(times)[:, None] * apart + np.arange(count)
        assert ids.tolist() == whole[places.ravel()].tolist()


@pytest.mark.slow
@every_order
@settings(deadline=None)
@given(segments=segment_sizes, size=st.integers(1, 1500), seed=seeds)
def test_no_segment_outside_the_span_has_a_row_beyond_the_position(make, segments, size, seed):
    order = make(segments, size, seed, ())
    segment_of = np.repeat(np.arange(len(segments)), segments)[ids_of(order)]
    first_from = np.minimum.accumulate(segment_of[::-1])[::-1]  # oldest with a row at position >= p
    last_until = np.maximum.accumulate(segment_of)
    for position in range(order.rows):
        span = order.span(position)
        assert 0 <= span.start <= first_from[position]
        assert last_until[position] < span.stop <= len(segments)


@every_shuffle
def test_seed_and_key_decide_the_order(make):
    segments = np.full(10, 20)
    orders = {
        (seed, key): tuple(ids_of(make(segments, 8, seed, key)))
        for seed in (0, 1, 2**40)
        for key in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[1, (0, 1)] == tuple(ids_of(make(segments, 8, 1, (0, 1))))


@every_shuffle
def test_threads_that_ask_at_once_get_what_one_gets(make):
    segments = np.full(10, 2000)
    whole = ids_of(make(segments, 4000, 0, ()))
    order, answers = make(segments, 4000, 0, ()), {}
    barrier = threading.Barrier(4)

    def ask(number):
        barrier.wait()
        answers[number] = [order(first, 100) for first in range(100 * number, 20_000, 400)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        expected = [whole[first : first + 100] for first in range(100 * number, 20_000, 400)]
        assert np.array_equal(answers[number], expected)


def test_sequential_is_oldest_first_and_uses_one_segment():
    order = Sequential(np.array([2, 1, 3]))
    assert order(2, 3).tolist() == [2, 3, 4]
    assert [order.span(position) for position in range(6)] == [
        range(segment, segment + 1) for segment in (0, 0, 1, 2, 2, 2)
    ]


# Permutation.


def test_a_permutation_is_apart_from_a_users_own_stream_of_the_same_seed():
    users = {tuple(np.random.default_rng(0).permutation(128))}
    for key in range(20):
        own = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(key,)))
        users.add(tuple(own.permutation(128)))
    assert not users & {tuple(ids_of(Permutation(128, 0, (key,)))) for key in range(20)}


@pytest.mark.parametrize("rows", first_is_quick([5, 2, 3, 7, 8, 13, 17, 33, 64]))
def test_epochs_put_each_row_everywhere_about_equally_often(rows):
    assert deviation((ids_of(Permutation(rows, 7, (key,))) for key in range(1500)), rows) < 4


def test_orders_of_seeds_and_epochs_that_follow_each_other_are_strangers():
    rows = 500
    orders = [[ids_of(Permutation(rows, seed, (epoch, 0))) for epoch in range(8)] for seed in range(8)]
    pairs = [(orders[a][b], orders[a][b + 1]) for a in range(8) for b in range(7)]
    pairs += [(orders[b][a], orders[b + 1][a]) for a in range(8) for b in range(7)]
    same = np.mean([(one == other).sum() for one, other in pairs])
    assert abs(same - 1) < 4 / np.sqrt(len(pairs)), "one row of each, by chance"
    alike = np.mean([np.corrcoef(one, other)[0, 1] for one, other in pairs])
    assert abs(alike) < 4 / np.sqrt(len(pairs) * rows)


# Window.


@settings(deadline=None)
@given(segments=segment_sizes, window_rows=st.integers(1, 3000), seed=seeds)
def test_a_row_moves_no_further_than_the_window(segments, window_rows, seed):
    ids = ids_of(Window(segments, window_rows, seed))
    if window_rows < segments.sum():
        # Three half blocks, each of half a window to the nearest segment boundary.
        block_rows = max(window_rows / 2 + segments.max() / 2, segments.max())
        assert abs(ids - np.arange(len(ids))).max() <= 1.5 * block_rows + 1


@pytest.mark.slow
@settings(deadline=None)
@given(segments=segment_sizes, window_rows=st.integers(1, 1500))
def test_a_window_has_no_more_segments_in_use_than_it_spans(segments, window_rows):
    order = Window(segments, window_rows, 0)
    for position in range(order.rows):
        span = order.span(position)
        in_use = int(segments[span.start : span.stop].sum())
        assert in_use <= 2 * max(window_rows / 2 + segments.max() / 2, segments.max()) or in_use == order.rows


def test_a_window_spreads_each_segments_rows_about_evenly_over_itself():
    segments, window_rows = np.full(40, 100), 1000
    deviations, extents = [], []
    for seed in range(20):
        places = np.argsort(ids_of(Window(segments, window_rows, seed))).reshape(40, 100)
        inner = places[10:30]
        deviations.append(inner.std(axis=1))
        extents.append(inner.max(axis=1) - inner.min(axis=1))
    uniform = window_rows / np.sqrt(12)
    assert 0.6 * uniform < np.mean(deviations) < 1.1 * uniform
    assert 0.6 * window_rows < np.mean(extents) <= window_rows


def test_a_window_frees_segments_steadily():
    order = Window(np.full(100, 50), 1000, 0)
    starts = [order.span(position).start for position in range(order.rows)]
    assert starts == sorted(starts)
    behind = np.arange(order.rows) // 50 - starts
    assert behind.max() <= 1000 / 50, "no more than a window is kept"


def test_half_a_window_is_whole_segments_at_least_one_and_rather_more_rows_than_fewer():
    spans = [Window(np.array([1, 1, 1, 1]), 2, 0).span(place) for place in range(4)]
    assert spans == [range(2), range(1, 3), range(2, 4), range(3, 4)], "each segment is half a window"
    order = Window(np.array([2, 2, 2, 2]), 6, 0)
    assert (order.span(0), order.span(4), order.span(7)) == (range(1), range(1, 4), range(3, 4))


@pytest.mark.parametrize("window_rows", first_is_quick([13, 14, 1000]))
def test_a_window_over_everything_is_uniform(window_rows):
    segments = np.array([3, 4, 1, 5])
    assert deviation((ids_of(Window(segments, window_rows, 7, (key,))) for key in range(1500)), 13) < 4


# Blocks.


def runs_of(ids, size, segments):
    """Which full batches are one contiguous run of one segment."""
    batches = ids[: len(ids) // size * size].reshape(-1, size)
    segment_of = np.repeat(np.arange(len(segments)), segments)
    contiguous = (np.diff(batches, axis=1) == 1).all(axis=1)
    return contiguous & (segment_of[batches[:, 0]] == segment_of[batches[:, -1]])


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    block_rows=st.integers(1, 9),
    seed=seeds,
)
def test_every_batch_is_a_run_where_segments_are_whole_runs(sizes, block_rows, seed):
    segments = np.array(sizes) * block_rows
    ids = ids_of(Blocks(segments, block_rows, seed))
    assert runs_of(ids, block_rows, segments).all()


@settings(deadline=None)
@given(segments=segment_sizes, block_rows=st.integers(1, 70), seed=seeds)
def test_each_segment_gives_as_many_runs_as_fit(segments, block_rows, seed):
    ids = ids_of(Blocks(segments, block_rows, seed))
    assert runs_of(ids, block_rows, segments).sum() >= (segments // block_rows).sum()


def test_runs_begin_at_every_phase_and_lie_everywhere():
    segments = np.array([37, 25])
    phases, first_rows = set(), np.zeros(62)
    for key in range(400):
        ids = ids_of(Blocks(segments, 10, 0, (key,)))
        starts = ids[:60].reshape(-1, 10)[runs_of(ids, 10, segments), 0]
        phases |= {int(start) % 10 for start in starts if start < 37 and start + 10 <= 37}
        first_rows[ids[0]] += 1
    assert phases == set(range(8)), "of a segment of 37 rows, 7 are left over"
    assert first_rows[:28].sum() > 100
    assert first_rows[37:53].sum() > 50


def test_rows_left_over_of_segments_are_mixed():
    segments = np.full(100, 7)
    order = Blocks(segments, 10, 0)
    batches = ids_of(order).reshape(-1, 10)
    assert not runs_of(ids_of(order), 10, segments).any()
    assert np.mean([len({int(row) // 7 for row in batch}) for batch in batches]) > 2
    assert np.mean([np.ptp(batch) for batch in batches]) > 200
