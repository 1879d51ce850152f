"""`Loader(rows=)`: which rows an epoch has, how often a function is asked, and who decides among ranks.

Then the numbers and ids of chosen rows, and the orders over them.
"""

from __future__ import annotations

import errno
import itertools
import threading

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import ids_of, make_cache, publish
from hypothesis import given, settings
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading.budget import BudgetOrder
from arrowcache.reading.order import EvenOrder, Shard
from arrowcache.reading.plan import Plan
from arrowcache.reading.row_filter import Selected, bitmap
from arrowcache.reading.shuffle import Shuffle
from arrowcache.storage.folder import Folder
from arrowcache.storage.layout import SegmentInfo

IDS = list(range(160))


def epoch(cache, rows, **options):
    with Loader(cache, 16, rows=rows, **{"drop_last": False, "timeout": 1} | options) as loader:
        return sorted(ids_of(loader))


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("included", IDS),
        ("all", IDS),
        (lambda columns: columns["id"] % 2 == 0, IDS[::2]),
        (lambda columns: (columns["id"] % 2 == 0).tolist(), IDS[::2]),
        (lambda columns: pc.less(columns["id"], 33), IDS[:33]),
        (lambda columns: columns["image"][:, 0, 0] > 150, IDS[151:]),
        (lambda columns: (columns["_seq"] == 4) & (columns["_row"] < 2), [64, 65]),
        ("3:1", [49]),
        (["3:1", (0, 0), ac.RowId(9, 15)], [0, 49, 159]),
        (np.array([[3, 1], [3, 1]]), [49]),
        ({"_seq": [1, 1], "_row": [0, 1]}, [16, 17]),
    ],
)
def test_rows_are_said_in_many_ways(cache, rows, wanted):
    assert epoch(cache, rows) == wanted


def test_a_tag_says_rows_and_excluded_ones_are_left_out_of_all_but_all(cache):
    cache.tag([(0, 0), (1, 1), (2, 2)], "hard")
    cache.exclude((1, 1))
    assert epoch(cache, "hard") == [0, 34]
    assert epoch(cache, lambda columns: columns["id"] < 20) == [*range(17), 18, 19]
    assert epoch(cache, [(1, 1), (1, 2)]) == [18]
    assert epoch(cache, "included") == [number for number in IDS if number != 17]
    assert epoch(cache, "all") == IDS


def test_annotations_of_this_process_are_columns_of_a_function(cache):
    cache.annotate([(0, row) for row in range(16)], loss=np.arange(16))
    assert epoch(cache, lambda columns: columns["loss"] > 13) == [14, 15]
    assert epoch(cache, lambda columns: "loss" in columns and np.isnan(columns["loss"])) == IDS[16:]
    names = []
    epoch(cache, lambda columns: names.append([*columns]) or columns["id"] >= 0)
    assert names[0] == ["id", "image", "_seq", "_row", "_age_seconds", "loss"]


def test_a_function_is_asked_once_for_each_segment_in_each_epoch(cache):
    asked = []

    def rows(columns):
        asked.append(int(columns["_seq"][0]))
        return columns["id"] % 2 == 0

    with Loader(cache, 16, rows=rows) as loader:
        for _ in range(3):
            assert sorted(ids_of(loader)) == IDS[::2]
        publish(cache, 1)
        assert len(ids_of(loader)) == 80
    assert asked == [*range(10)] * 3 + [*range(11)]


def test_a_function_may_use_its_array_again(cache):
    mask = np.empty(16, bool)
    assert epoch(cache, lambda columns: np.equal(columns["id"] % 5, 0, out=mask)) == IDS[::5]


def test_annotations_that_cannot_be_written_end_no_training(cache, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    cache.annotate("0:0", loss=1)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "link_note", fails)
        assert epoch(cache, lambda columns: columns["id"] % 5 == 0) == IDS[::5]
        with pytest.warns(RuntimeWarning, match="annotations of 1 row wait: no room"):
            assert epoch(cache, lambda columns: columns["id"] < 3 + len([*columns]) * 0) == IDS[:3]
    cache.close()


def test_a_function_of_ages_is_asked_in_each_epoch(cache):
    asked = []

    def rows(columns):
        asked.append(columns["_age_seconds"][0])
        return columns["_age_seconds"] >= 0

    with Loader(cache, 1, rows=rows) as loader:
        for _ in range(2):
            assert len(ids_of(loader)) == 160
    assert len(asked) == 20
    assert asked[10] > asked[0]


@pytest.mark.parametrize("names", [("loss", "_age_seconds"), ("_age_seconds", "loss")])
def test_a_function_of_ages_and_annotations_is_asked_in_each_epoch(cache, names):
    asked = []

    def rows(columns):
        asked.append([columns[name] for name in names])
        return np.ones(16, bool)

    cache.annotate((0, 0), loss=1)
    with Loader(cache, 1, rows=rows) as loader:
        for _ in range(2):
            assert len(ids_of(loader)) == 160
    assert len(asked) == 20


def test_a_function_reads_the_annotations_of_now(cache):
    asked = []

    def rows(columns):
        asked.append(int(columns["_seq"][0]))
        return ~(columns["loss"] > 1)

    cache.annotate((0, 0), loss=1)
    with Loader(cache, 1, rows=rows) as loader:
        assert len(ids_of(loader)) == 160
        assert len(ids_of(loader)) == 160
        assert asked == [*range(10)] * 2
        cache.annotate((0, 0), loss=2)
        assert sorted(ids_of(loader)) == IDS[1:]
    assert asked == [*range(10)] * 3


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (3, TypeError, "rows must be 'included', 'all', a tag, row ids, a function"),
        (None, TypeError, "rows must be 'included', 'all', a tag, row ids, a function"),
        ("", ValueError, "cannot be a tag"),
        ([("a", 1)], TypeError, "rows must be 'included'"),
        (np.zeros((2, 3), int), ValueError, r"ids of shape \(2, 3\)"),
    ],
)
def test_what_says_no_rows_is_refused_at_once(cache, rows, error, words):
    with pytest.raises(error, match=words):
        Loader(cache, rows=rows)


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (
            lambda columns: 3,
            TypeError,
            r"shape \(\) for the 16 rows of segment 0: return a bool for each row",
        ),
        (lambda columns: columns["id"], TypeError, "dtype int64 and shape"),
        (lambda columns: [True], TypeError, r"shape \(1,\)"),
        (
            lambda columns: np.ma.array(columns["id"] < 3, mask=columns["id"] > 1),
            TypeError,
            r"rows= gave for segment 0 a masked array.*\.filled\(False\)",
        ),
        (
            lambda columns: columns["loss"] > 1,
            KeyError,
            "no column 'loss'.*there are id, image, _seq, _row, _age_seconds",
        ),
        (lambda columns: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_a_function_that_gives_no_mask_is_an_error_and_leaves_no_lease(cache, rows, error, words):
    with Loader(cache, 1, rows=rows) as loader, pytest.raises(error, match=words):
        iter(loader)
    assert cache.stats().leased_bytes == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"rows": lambda columns: columns["id"] < 0},
            "`rows` refuses all 160 rows.*look at what `rows` accepts",
        ),
        (
            {"rows": lambda columns: columns["id"] < 0, "where": lambda segment: True},
            "`where` and `rows` refuse all 160 rows.*look at what `where` and `rows` accept",
        ),
        ({"rows": "hard", "expect": "hard", "timeout": 0.3}, r"waited 0\.3 s for .*0 that `rows` accepts"),
        ({"rows": ["0:0"], "batch_size": 2}, "has 1 row that `rows` accepts, one step takes 2"),
    ],
)
def test_too_few_selected_rows_say_who_refuses_them(cache, options, words):
    with (
        Loader(cache, **{"batch_size": 1, "timeout": 2} | options) as loader,
        pytest.raises(ac.LoaderTimeoutError, match=words),
    ):
        iter(loader)


def test_a_cache_all_of_whose_rows_are_excluded_says_so(cache):
    cache.exclude([(seq, row) for seq in range(10) for row in range(16)])
    with (
        Loader(cache, 1, timeout=5) as loader,
        pytest.raises(ac.LoaderTimeoutError, match=r"cache.include\(\)"),
    ):
        iter(loader)


def test_a_loader_that_waits_goes_on_as_rows_are_included(cache):
    cache.exclude([(seq, row) for seq in range(10) for row in range(16)])
    with Loader(cache, 4) as loader, cache.writer():
        timer = threading.Timer(0.3, cache.include, [[(2, 1), (2, 2), (2, 3), (2, 4)]])
        timer.start()
        assert sorted(ids_of(loader)) == [33, 34, 35, 36]
        timer.join()


def test_stats_and_steps_count_what_is_selected(cache):
    cache.exclude([(0, 0), (3, 3)])
    with Loader(cache, 10, rows=lambda columns: columns["id"] < 64) as loader:
        found = ids_of(loader)
        stats = loader.stats()
        assert (len(found), loader.steps, stats.rows, stats.unselected_rows) == (60, 6, 60, 98)
        assert "98 rows of the last epoch's segments" in str(stats)


def test_epoch_rows_are_of_selected_rows(cache):
    with Loader(cache, 4, rows=[(0, row) for row in range(10)], epoch_rows=24) as loader:
        found = ids_of(loader)
    assert len(found) == 24
    assert sorted(found[:10]) == sorted(found[10:20]) == IDS[:10]


def test_ranks_read_what_the_first_of_them_selected(cache):
    """A function may say something else each time."""
    asked = []

    def rows(columns):
        asked.append(1)
        return np.random.default_rng(len(asked)).random(16) < 0.5

    ranks = [Loader(cache, 4, rows=rows, rank=rank, world_size=2, run_id="job") for rank in range(2)]
    for _ in range(2):
        epochs = [iter(loader) for loader in ranks]
        steps = [ids_of(step) for step in zip(*epochs, strict=True)]
        found = [number for step in steps for number in step]
        assert len(found) == len({*found}) > 40
    assert len(asked) == 20
    for loader in ranks:
        loader.close()


def test_ranks_that_ask_for_other_rows_do_not_agree(cache):
    first = Loader(
        cache, 4, rows=["0:0", "0:1", *[(1, row) for row in range(8)]], rank=0, world_size=2, run_id="a"
    )
    other = Loader(cache, 4, rows="all", rank=1, world_size=2, run_id="a")
    with first, other:
        iter(first)
        with pytest.raises(ValueError, match="rows is 'all' here"):
            iter(other)


def test_views_are_made_of_runs_of_selected_rows(cache):
    with Loader(cache, 8, shuffle=None, rows=lambda columns: columns["_row"] >= 8) as loader:
        loader_ids = [ids_of([batch]) for batch in loader]
        assert loader_ids == [[*range(16 * seq + 8, 16 * seq + 16)] for seq in range(10)]
        assert loader.stats().copied_bytes == 0
    with Loader(cache, 8, shuffle=None, rows=lambda columns: columns["_row"] % 2 == 0) as loader:
        assert ids_of(loader) == IDS[::2]


def test_a_row_longer_than_the_budget_can_be_excluded(tmp_path):
    schema = ac.Schema({"id": ac.Tensor("int64"), "tokens": ac.Ragged("int32")})
    cache = make_cache(tmp_path / "text", schema)
    with cache.writer() as writer:
        for number in range(32):
            writer.append(id=number, tokens=np.zeros(100 if number == 20 else number + 1, np.int32))
    with Loader(cache, batch_tokens=64, length_of="tokens", drop_last=False) as loader:
        with pytest.raises(ValueError, match=r"row 4 of segment 1 has length 100.*cache.exclude\(\)"):
            iter(loader)
        cache.exclude("1:4")
        assert sorted(ids_of(loader)) == [number for number in range(32) if number != 20]


def test_an_epoch_in_order_lets_go_of_segments_that_have_no_selected_row(cache):
    with Loader(cache, 4, shuffle=None, rows=lambda columns: columns["id"] >= 100) as loader:
        batches = iter(loader)
        next(batches)
        cache.evict("1MB")
        assert cache.stats().oldest_seq >= 5
        assert len(ids_of(batches)) == 56


# numbers and ids of chosen rows


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
    return Plan(shuffle=Shuffle(shuffle), seqs=seqs, rows=rows, bitmaps=bitmaps, **given)


def steps_of(order):
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
    assert selected.counts.tolist() == [*map(sum, masks)]
    assert selected.ids(np.arange(selected.size)).tolist() == wanted
    backwards = np.arange(selected.size)[::-1]
    assert selected.ids(backwards).tolist() == wanted[::-1]
    assert selected.ids(np.empty(0, np.int64)).tolist() == []


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=6))
def test_numbers_of_ids_are_the_inverse_of_ids_of_numbers(masks):
    seqs, rows = np.arange(len(masks)), np.array([*map(len, masks)])
    selected = Selected(seqs, rows, {seq: bitmap(np.array(mask)) for seq, mask in enumerate(masks)})
    numbers, is_selected = selected.numbers(np.arange(rows.sum()))
    assert is_selected.tolist() == [*np.concatenate(masks)]
    assert numbers.tolist() == [*range(selected.size)]


def test_where_all_rows_are_selected_nothing_is_made():
    numbers = np.arange(5)
    selected = Selected(np.array([1, 2]), np.array([3, 2]))
    assert selected.are_all
    assert selected.ids(numbers) is numbers


@settings(max_examples=200)
@given(
    sizes_and_masks, st.sampled_from(Shuffle), st.integers(1, 9), st.integers(1, 3), st.integers(0, 60),
    st.booleans(),
)  # fmt: skip
def test_an_epoch_has_each_selected_row_once_and_goes_on_from_its_state(
    masks, shuffle, size, world, taken, drop_last
):
    plan, wanted = plan_of(masks, shuffle), chosen(masks)
    orders = [EvenOrder(plan, size, Shard(rank, world), drop_last) for rank in range(world)]
    found = flat(flat(zip(*map(steps_of, orders), strict=True)))
    if drop_last or world == 1:
        assert len(set(found)) == len(found) >= len(wanted) - (size * world - 1) * drop_last
    assert {*found} <= {*wanted}
    if not drop_last:
        assert {*found} == {*wanted}
    taken = min(taken, orders[0].steps)
    rest = Plan.from_state(orders[0].remaining(taken).to_state())
    assert rest.bitmaps == plan.bitmaps
    again = [EvenOrder(rest, size, Shard(rank, world), drop_last) for rank in range(world)]
    if drop_last or world == 1:
        assert [*map(steps_of, again)] == [steps_of(order)[taken:] for order in orders]


@given(sizes_and_masks, st.sampled_from(Shuffle), st.data())
def test_a_resumed_epoch_has_the_selected_rows_of_the_segments_that_are_left(masks, shuffle, data):
    plan = plan_of(masks, shuffle, position=0)
    is_left = data.draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks)))
    left = [
        SegmentInfo(int(seq), int(rows), "", 1, 1, 0.0)
        for seq, rows, stays in zip(plan.seqs, plan.rows, is_left, strict=True)
        if stays
    ]
    wanted = chosen([mask for mask, stays in zip(masks, is_left, strict=True) if stays] or [[False]])
    whole = EvenOrder(plan, 1, Shard(), drop_last=False)
    missing = len(chosen(masks)) - len(wanted)
    order = EvenOrder(plan, 4, Shard(), drop_last=False, present=left)
    assert sorted(flat(steps_of(order))) == wanted
    for step in range(order.steps):
        span, ids = order.segments_span(step), order.batches(step, step + 1)
        starts = np.cumsum([0, *(segment.rows for segment in left)])
        inside = (ids >= starts[span.start]) & (ids < starts[span.stop])
        assert inside.all()
    assert order.missing == missing
    assert len(flat(steps_of(whole))) == len(chosen(masks))


@given(sizes_and_masks, st.sampled_from(["rows", None]))
def test_batches_by_tokens_are_of_selected_rows(masks, shuffle):
    wanted = chosen(masks)
    plan = plan_of(masks, shuffle, buckets=1)
    lengths = (np.arange(len(wanted)) % 9 + 1).astype(np.int32)
    present = [SegmentInfo(int(s), int(r), "", 1, 1, 0.0) for s, r in zip(plan.seqs, plan.rows, strict=True)]
    order = BudgetOrder(plan, present, lengths, 20, Shard(), drop_last=False)
    found = steps_of(order)
    assert sorted(flat(found)) == wanted
    length_of = dict(zip(wanted, lengths.tolist(), strict=True))
    assert all(len(ids) * max(length_of[row] for row in ids) <= 20 for ids in found)
    rest = Plan.from_state(order.remaining(1).to_state(), has_buckets=True)
    assert steps_of(BudgetOrder(rest, present, lengths, 20, Shard(), drop_last=False)) == found[1:]


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
