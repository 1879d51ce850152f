"""`Loader(rows=)`: which rows an epoch has, how often a function is asked, and who decides among ranks."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import ids_of, make_cache, publish

import arrowcache as ac
from arrowcache import Loader
from arrowcache.storage.folder import Folder

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
