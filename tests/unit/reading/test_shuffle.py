"""Row orders: bijections of positions to row ids, and which segments they have in use."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quick import first_is_quick

from arrowcache.reading import shuffle
from arrowcache.reading.shuffle import (
    Blocks,
    IndexShuffle,
    Permutation,
    Sequential,
    Window,
    prepare,
)

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


@pytest.fixture(autouse=True)
def nothing_is_prepared(monkeypatch):
    monkeypatch.setattr(shuffle, "_prepared", ())


@pytest.fixture
def no_tables(monkeypatch):
    """As for more rows than a table is drawn for."""
    monkeypatch.setattr(shuffle, "_TABLE_ROWS", 0)


def ids_of(order):
    return order(np.arange(order.rows))


def index_shuffle(rows, seed=0, key=()):
    return IndexShuffle(rows, shuffle._sequence(seed, key))


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
def test_positions_may_be_asked_for_in_any_order_and_repeatedly(make, segments, size, data):
    whole = ids_of(make(segments, size, 5, ()))
    places = st.lists(st.integers(0, len(whole) - 1), max_size=20)
    order = make(segments, size, 5, ())
    for positions in data.draw(st.lists(places, min_size=1, max_size=4)):
        asked = np.array(positions, np.int64)
        ids = order(asked)
        assert ids.dtype == np.int64
        assert ids.tolist() == whole[asked].tolist()
        assert asked.tolist() == positions, "what was passed is left alone"


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
        answers[number] = [order(np.arange(first, first + 100)) for first in range(100 * number, 20_000, 400)]

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
    assert order(np.array([4, 0])).tolist() == [4, 0]
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


@settings(deadline=None)
@given(st.integers(0, 14), seeds, st.data())
def test_fewer_rows_keep_the_order_of_more_up_to_the_same_power_of_two(bits, seed, data):
    rows = data.draw(st.integers(2**bits // 2 + 1, 2**bits))
    whole = ids_of(Permutation(2**bits, seed, (1,)))
    assert ids_of(Permutation(rows, seed, (1,))).tolist() == whole[whole < rows].tolist()


@pytest.mark.parametrize("rows", [1, 2, 1000, 5000])
def test_what_is_prepared_is_the_order_that_is_drawn_otherwise(rows):
    drawn = ids_of(Permutation(rows, 4, (5, 6)))
    prepare(2 ** (rows - 1).bit_length(), 4, (5, 6))
    (prepared,) = (table for _, table in shuffle._prepared)
    order = Permutation(rows, 4, (5, 6))
    assert order._row_ids._table is prepared
    assert np.array_equal(ids_of(order), drawn)


def test_only_the_last_few_prepared_tables_are_kept_each_once():
    for key in (0, 1, 2, 3, 3, 2, 3):
        prepare(100, 0, (key,))
    assert [name for name, _ in shuffle._prepared] == [(7, 0, (key,)) for key in (1, 2, 3)]


def test_beyond_the_table_nothing_is_prepared():
    prepare(shuffle._TABLE_ROWS + 1, 0)
    assert not shuffle._prepared


def test_a_table_is_searched_only_as_far_as_it_is_asked_about():
    order = Permutation(600_000, 0)
    order(np.arange(64))
    assert order._row_ids._found[0] == shuffle._FIRST_FOUND
    order(np.array([599_999]))
    assert len(order._row_ids._found[1]) == 600_000


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 13, 33])
def test_a_table_puts_each_row_everywhere_about_equally_often(rows):
    assert deviation((ids_of(Permutation(rows, 7, (key,))) for key in range(1500)), rows) < 4


@pytest.mark.parametrize("rows", first_is_quick([2, 3, 5, 7, 8, 13, 17, 33, 64]))
def test_an_index_shuffle_puts_each_row_everywhere_about_equally_often(rows):
    positions = np.arange(rows)
    assert deviation((index_shuffle(rows, 7, (key,))(positions) for key in range(1500)), rows) < 4


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 8])
def test_an_index_shuffle_puts_any_two_rows_anywhere_about_equally_often(rows):
    counts = np.zeros((rows, rows))
    for key in range(3000):
        first, last = index_shuffle(rows, 7, (key,))(np.array([0, rows - 1]))
        counts[first, last] += 1
    assert counts.trace() == 0
    pairs, expected = counts[~np.eye(rows, dtype=bool)], 3000 / (rows * (rows - 1))
    assert ((pairs - expected) ** 2 / expected).sum() < len(pairs) + 4 * np.sqrt(2 * len(pairs))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 8, 13])
def test_hashed_rounds_put_each_row_everywhere_about_equally_often(rows, monkeypatch):
    monkeypatch.setattr(shuffle, "_ROUND_TABLES_ROWS", 0)
    positions = np.arange(rows)
    assert deviation((index_shuffle(rows, 7, (key,))(positions) for key in range(1500)), rows) < 4


@pytest.mark.parametrize("tables_rows", [0, shuffle._ROUND_TABLES_ROWS], ids=["hashed", "tables"])
def test_an_index_shuffle_of_any_few_rows_is_a_bijection(tables_rows, monkeypatch):
    monkeypatch.setattr(shuffle, "_ROUND_TABLES_ROWS", tables_rows)
    for rows in range(1, 300):
        ids = index_shuffle(rows, rows)(np.arange(rows))
        assert np.array_equal(np.sort(ids), np.arange(rows)), rows


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(300, 100_000), seed=seeds)
def test_an_index_shuffle_is_a_bijection(rows, seed):
    assert np.array_equal(np.sort(index_shuffle(rows, seed)(np.arange(rows))), np.arange(rows))


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(2**20, 2**62),
    places=st.lists(st.integers(0, 2**62), min_size=1, max_size=50),
    seed=st.integers(0, 99),
)
@example(rows=2**62, places=[0, 1, 2**62 - 1], seed=0)
@example(rows=2**34, places=[0, 1, 2**34 - 1], seed=0)
@example(rows=2**34 + 1, places=[0, 1, 2**34], seed=0)
def test_an_index_shuffle_maps_far_apart_positions_into_range_one_to_one(rows, places, seed):
    positions = np.unique(np.array([place % rows for place in places], np.int64))
    one = index_shuffle(rows, seed)
    ids = one(positions)
    assert len(np.unique(ids)) == len(positions)
    assert ids.min() >= 0
    assert ids.max() < rows
    assert ids.tolist() == [int(one(positions[i : i + 1])[0]) for i in range(len(positions))]


@pytest.mark.parametrize("rows", [2**20 + 1, 2**21 - 7, 2**31, 2**31 + 12345, 2**45 + 1])
def test_an_index_shuffle_of_many_rows_looks_uniform_and_is_its_keys(rows):
    one = Permutation(rows, 3, (1, 2))
    for positions in (np.arange(20_000), np.unique(np.random.default_rng(0).integers(0, rows, 20_000))):
        ids = one(positions)
        assert len(np.unique(ids)) == len(positions)
        assert 0 <= ids.min() < 0.001 * rows
        assert 0.999 * rows < ids.max() < rows
        shares = np.histogram(ids, 50, (0, rows))[0] / len(ids)
        assert abs(shares - 1 / 50).max() < 0.006
        assert abs(np.corrcoef(positions, ids)[0, 1]) < 0.03
        assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 0.03
        assert not np.array_equal(ids, Permutation(rows, 3, (1, 3))(positions))
        assert np.array_equal(ids, Permutation(rows, 3, (1, 2))(positions))


def test_an_index_shuffle_keeps_a_few_tables_not_an_array_of_all_rows():
    assert sum(table.nbytes for table in index_shuffle(2**31)._tables) < 8 * 2**20
    assert not index_shuffle(2**62)._tables


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


@pytest.mark.parametrize("window_rows", first_is_quick([13, 14, 1000]))
def test_a_window_over_everything_is_uniform(window_rows):
    segments = np.array([3, 4, 1, 5])
    assert deviation((ids_of(Window(segments, window_rows, 7, (key,))) for key in range(1500)), 13) < 4


@pytest.mark.usefixtures("no_tables")
def test_blocks_of_a_window_may_be_beyond_the_table():
    order = Window(np.full(50, 40), 600, 0)
    assert np.array_equal(np.sort(ids_of(order)), np.arange(2000))


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


@pytest.mark.usefixtures("no_tables")
def test_runs_may_be_more_than_a_table_holds():
    segments = np.full(30, 47)
    order = Blocks(segments, 8, 0)
    assert np.array_equal(np.sort(ids_of(order)), np.arange(order.rows))
