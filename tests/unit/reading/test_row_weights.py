"""`Loader(weights=)`: rows drawn as often as they weigh; weights that an epoch keeps."""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np
import pytest
from helpers import ids_of, make_cache, publish
from hypothesis import given
from hypothesis import strategies as st
from quick import first_is_quick

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading.row_weights import Draws, Weighting, Weights
from arrowcache.storage.notes_log import VALUES, NotesLog

ROWS = 160


def drawn(cache, **options):
    with Loader(cache, 20, epoch_rows=16000, columns=["id"], **options) as loader:
        return np.bincount(ids_of(loader), minlength=cache.stats().rows)


def weights_files(cache):
    return [name for name in os.listdir(cache.path / "notes") if name.endswith(".weights.arrow")]


def begun(cache, **options):
    """The state of an epoch after its first batch."""
    with Loader(cache, 8, **options) as loader:
        next(iter(loader))
        return loader.state_dict()


# draws


@given(st.lists(st.floats(0, 100, width=32), min_size=1, max_size=50).filter(lambda each: max(each) > 0))
def test_no_row_of_weight_0_is_drawn_and_any_part_is_as_of_the_whole(of_rows):
    weights = Weights(np.array(of_rows, np.float32))
    draws = Draws(weights, 1, 400, 7, (1, 0))
    rows = draws(0, 400)
    assert (weights.of_rows[rows] > 0).all()
    assert np.array_equal(draws(100, 50), rows[100:150])
    assert np.array_equal(draws(0, 10, 4, 100), rows.reshape(4, 100)[:, :10].ravel())
    assert np.isclose(weights.probabilities(np.arange(len(of_rows))).sum(), 1)


def test_rows_are_drawn_in_proportion_to_their_weights():
    of_rows = np.arange(200, dtype=np.float32)
    counts = np.bincount(Draws(Weights(of_rows), 1, 10**6, 3, (0, 0))(0, 10**6), minlength=200)
    expected = of_rows / of_rows.sum() * 10**6
    chi_squared = ((counts[1:] - expected[1:]) ** 2 / expected[1:]).sum()
    assert 120 < chi_squared < 290, "198 degrees of freedom"
    assert counts[0] == 0


def test_epochs_seeds_and_passes_draw_others():
    weights = Weights(np.ones(1000, np.float32))
    draws = {tuple(Draws(weights, 1, 20, seed, (epoch, 0))(0, 20)) for seed in range(5) for epoch in range(5)}
    assert len(draws) == 25


# what weighs


def test_a_column_an_annotation_and_a_function_weigh(cache):
    cache.annotate([(seq, row) for seq in range(10) for row in range(16)], loss=np.arange(160.0))
    wanted = np.arange(160) / np.arange(160).sum() * 16000
    for weights in ("id", "loss", lambda columns: columns["id"] * 2.0, lambda columns: columns["loss"]):
        counts = drawn(cache, weights=weights)
        assert counts[0] == 0
        assert counts.sum() == 16000
        assert np.abs(counts - wanted).max() < 90


def test_a_row_without_an_annotation_weighs_as_much_as_the_heaviest(cache):
    assert drawn(cache, weights="loss", expect="loss").min() > 40, "none has one: all weigh alike"
    cache.annotate([(seq, row) for seq in range(9) for row in range(16)], loss=np.r_[np.zeros(143), 4.0])
    counts = drawn(cache, weights="loss")
    assert counts[:143].sum() == 0
    assert counts[143:].min() > 700


def test_new_weights_hold_from_the_next_epoch_on(cache):
    with Loader(cache, 20, weights="loss", expect="loss", epoch_rows=400) as loader:
        epoch = iter(loader)
        first = ids_of([next(epoch)])
        cache.annotate([(seq, row) for seq in range(10) for row in range(16)], loss=np.eye(160)[7])
        assert len({*first, *ids_of(epoch)}) > 100
        assert {*ids_of(loader)} == {7}
        cache.annotate("0:9", loss=1)
        assert {*ids_of(loader)} == {7, 9}
        publish(cache, 1)
        assert {*ids_of(loader)} == {7, 9, *range(160, 176)}


@pytest.mark.parametrize("excludes", [False, True])
def test_weights_that_are_changed_are_as_weights_that_are_made_anew(tmp_path, excludes):
    cache = make_cache(tmp_path / "long", capacity="32MiB")
    publish(cache, 200)
    rng = np.random.default_rng(0)
    if excludes:
        cache.exclude([(seq, 5) for seq in range(0, 200, 3)])
    options = {"weights": "loss", "expect": "loss", "epoch_rows": 200, "columns": ["id"]}
    with Loader(cache, 20, **options) as loader:
        for epoch in range(20):
            drawn = ids_of(loader)
            with Loader(cache, 20, **options) as other:
                other.load_state_dict(loader.state_dict() | {"epoch": epoch})
                assert ids_of(other) == drawn
            rows = [(int(rng.integers(200)), int(rng.integers(16))) for _ in range(int(rng.integers(12)))]
            match epoch:
                case 6:
                    cache.annotate([(seq, row) for seq in range(199) for row in range(16)], loss=1.0)
                case 12:
                    publish(cache, 1)
                case 16:
                    cache.exclude("9:9")
                case _ if rows:
                    lacks = rng.random(len(rows)) < 0.2
                    cache.annotate(rows, loss=np.where(lacks, np.nan, rng.random(len(rows))))


def test_weights_stay_as_they_are_while_somebody_has_them(cache):
    ids = [(seq, row) for seq in range(10) for row in range(16)]
    cache.annotate(ids, loss=1.0)
    weighting, kept = Weighting(cache.store, "loss"), []
    for row in range(6):
        with cache.snapshot() as snapshot:
            kept.append(weighting.of(snapshot))
            assert weighting.of(snapshot) is kept[-1], "nothing has changed"
        cache.annotate([(0, row)], loss=2.0)
        if row == 3:
            del kept[1]
    assert [int((each.of_rows == 2).sum()) for each in kept] == [0, 2, 3, 4, 5]
    assert [each.table.total for each in kept] == [160, 162, 163, 164, 165]


def test_a_column_is_weighed_once(cache):
    weighting = Weighting(cache.store, "id")
    with cache.snapshot() as snapshot:
        weights = weighting.of(snapshot)
        assert weighting.of(snapshot) is weights
    publish(cache, 1)
    with cache.snapshot() as snapshot:
        assert len(weighting.of(snapshot).of_rows) == 176


def test_weights_are_of_selected_rows(cache):
    cache.exclude("0:5")
    counts = drawn(cache, weights="id", rows=lambda columns: columns["id"] % 5 == 0)
    assert counts[5] == 0
    assert counts[np.arange(160) % 5 != 0].sum() == 0
    assert (counts[10::5] > 0).all()


def test_an_epoch_without_epoch_rows_has_as_many_draws_as_rows(cache):
    with Loader(cache, 16, weights="id") as loader:
        assert len(ids_of(loader)) == 160
        assert loader.steps == 10


def test_probabilities_are_those_of_the_epoch(cache):
    cache.exclude("0:3")
    with Loader(cache, 16, weights="id", with_ids=True) as loader:
        with pytest.raises(ValueError, match="of an epoch that has begun"):
            loader.probabilities("0:1")
        total = sum(range(160)) - 3
        for batch in loader:
            assert np.allclose(loader.probabilities(batch), batch["id"] / total)
        assert loader.probabilities(["0:3", "0:0", "99:0", "9:15", "0:77"]).tolist() == [
            0,
            0,
            0,
            159 / total,
            0,
        ]
    with Loader(cache, 16) as loader:
        next(iter(loader))
        with pytest.raises(ValueError, match="those of Loader"):
            loader.probabilities("0:1")


# states and ranks


@pytest.mark.parametrize("size", [8, 20])
def test_a_state_goes_on_with_the_weights_of_its_epoch(cache, size):
    with Loader(cache, 8, weights="id", epoch_rows=400, rows=lambda columns: columns["id"] > 50) as loader:
        epoch = iter(loader)
        for _ in range(5):
            next(epoch)
        state = loader.state_dict()
        rest = ids_of(epoch)
    assert len(weights_files(cache)) == 1
    with Loader(cache, size, weights=lambda columns: columns["id"] < 3) as loader:
        loader.load_state_dict(state)
        assert ids_of(loader) == rest
        assert {*ids_of(loader)} <= {0, 1, 2}


def test_a_state_between_two_epochs_names_no_weights(cache):
    with Loader(cache, 8, weights="id") as loader:
        ids_of(loader)
        assert loader.state_dict()["weights"] is None
    assert not (cache.path / "notes").exists()


def test_draws_from_segments_that_left_are_made_from_the_others(cache):
    state = begun(cache, weights="id", epoch_rows=400)
    cache.evict(1)
    with Loader(cache, 8, weights="id") as loader:
        with pytest.raises(ac.MissingSegmentsError, match="1 of its 10 segments"):
            loader.load_state_dict(state, missing="raise")
        loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="draws from some segments of epoch 0 are lost"):
            found = ids_of(loader)
        assert len(found) == 392
        assert min(found) >= 16


@pytest.mark.parametrize("left", [1, 3])
def test_draws_end_where_all_that_weighs_has_left(tmp_path, left):
    cache = make_cache(tmp_path / "small", capacity="1MiB")
    publish(cache, 3)
    weights = lambda columns: np.where(columns["_seq"] == 0, 1.0, 0.0)  # noqa: E731
    state = begun(cache, weights=weights, epoch_rows=400)
    for _ in range(left):
        cache.evict(1)
    publish(cache, 1)
    with Loader(cache, 8, weights=lambda columns: columns["id"] + 1.0, epoch_rows=40) as loader:
        loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="draws from some segments of epoch 0 are lost"):
            assert ids_of(loader) == []
        assert len(ids_of(loader)) == 40


def test_the_state_of_an_epoch_without_draws_is_loaded(cache):
    with Loader(cache, 8, weights=lambda columns: columns["_seq"] == 0) as loader, closing(iter(loader)):
        state = loader.state_dict()
    cache.evict(1)
    with Loader(cache, 8, weights="id") as loader:
        loader.load_state_dict(state)
        with (
            pytest.warns(RuntimeWarning, match="draws from some segments of epoch 0 are lost"),
            closing(iter(loader)),
        ):
            again = loader.state_dict()
        assert again["epoch_rows"] == 0
        loader.load_state_dict(again)
        assert ids_of(loader) == []
        assert len(ids_of(loader)) == 144


def test_probabilities_after_an_eviction_are_those_of_the_draws(cache):
    state = begun(cache, weights="id", epoch_rows=400)
    cache.evict(1)
    with Loader(cache, 8, weights="id") as loader:
        loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="are lost"):
            next(iter(loader))
        ids = [(seq, row) for seq in range(10) for row in range(16)]
        found = loader.probabilities(ids)
    assert found[:16].tolist() == 16 * [0]
    np.testing.assert_allclose(found[16:], np.arange(16, 160) / sum(range(16, 160)))


def test_a_full_cache_has_room_for_the_weights_of_a_state_and_keeps_its_rows(tmp_path):
    cache = ac.Cache.create(tmp_path / "full", {"x": ac.Tensor("float32", (10,))}, "8MiB", "256KiB")
    while not cache.stats().evicted_rows:
        with cache.writer() as writer:
            writer.extend(x=np.zeros((6000, 10), np.float32))
    before = cache.stats().rows
    for number in range(6):
        with Loader(cache, 64, weights=lambda columns, n=number: columns["_row"] + n + 1.0) as loader:
            next(iter(loader))
            loader.state_dict()
    assert len(weights_files(cache)) >= 1
    assert sum((cache.path / "notes" / name).stat().st_size for name in weights_files(cache)) <= 1 << 20
    assert before - cache.stats().rows <= 2 * 2**20 // 40
    assert cache.verify() == []


@pytest.mark.parametrize("endless", first_is_quick([True, False]))
@pytest.mark.parametrize(
    "weights",
    first_is_quick(
        ["loss", lambda columns: np.nan_to_num(columns.get("loss", np.ones(len(columns["x"]))), nan=1.0)]
    ),
)
def test_priorities_take_hold_on_a_full_cache_that_nobody_writes_to(tmp_path, weights, endless):
    cache = ac.Cache.create(tmp_path / "full", {"x": ac.Tensor("float32", (12,))}, "8MiB", "64KiB")
    while not cache.stats().evicted_rows:
        with cache.writer() as writer:
            writer.extend(x=np.zeros((1200, 12), np.float32))
    before, notes = cache.stats().rows, NotesLog.of(cache.store)
    options = {"epoch_rows": 25 * 4096, "with_ids": True}
    with Loader(cache, 4096, weights=weights, expect="loss", **options) as loader:
        batches = loader.repeat() if endless else (batch for _ in range(5) for batch in loader)
        for step, batch in enumerate(batches):
            if step == 100:
                break
            cache.annotate(batch, loss=(batch["_row"] == 3).astype(np.float32))
            notes.flush()
            notes.merge(VALUES)
        assert loader.stats().epochs == 5
        assert (batch["_row"] == 3).mean() > 0.3, "a weight of 1 among weights of 0"
        loader.state_dict()
    assert before - cache.stats().rows <= before // 4
    assert cache.verify() == []


def test_a_function_that_reads_annotations_only_later_has_room_made_for_them_then(cache):
    reads = False
    weighting = Weighting(cache.store, lambda columns: columns["loss" if reads else "id"] + 1.0, "loss")
    assert weighting.reads_notes is None
    cache.annotate([(seq, row) for seq in range(10) for row in range(16)], loss=1.0)
    for reads in (False, True):
        with cache.snapshot() as snapshot:
            assert len(weighting.of(snapshot).of_rows) == 160
        assert weighting.reads_notes is reads


@pytest.mark.parametrize("factor", [1e-320, 1e300])
def test_weights_that_float32_cannot_hold_weigh_by_their_proportion(cache, factor):
    counts = drawn(cache, weights=lambda columns: columns["id"] * factor)
    assert np.abs(counts - np.arange(160) / np.arange(160).sum() * 16000).max() < 90


def test_a_weight_that_float32_cannot_hold_is_named_by_its_row(cache):
    cache.annotate("0:5", loss=1e39)
    with (
        Loader(cache, 8, weights="loss") as loader,
        pytest.raises(ValueError, match="row 0:5 has the weight inf"),
    ):
        next(iter(loader))


def test_weights_that_left_are_an_error_that_says_how_to_go_on(cache):
    state = begun(cache, weights="id")
    (name,) = weights_files(cache)
    data = (cache.path / "notes" / name).read_bytes()
    (cache.path / "notes" / name).write_bytes(data[:-20])
    with Loader(cache, 8, weights="id") as loader:
        with pytest.raises(ac.MissingSegmentsError, match="are damaged"):
            loader.load_state_dict(state)
        (cache.path / "notes" / name).unlink()
        with pytest.raises(
            ac.MissingSegmentsError, match="have left the cache: those of the last few states are kept; begin"
        ):
            loader.load_state_dict(state)
        with pytest.raises(ValueError, match=r"the state is damaged: weights of the name '../x'"):
            loader.load_state_dict(state | {"weights": "../x"})
        loader.load_state_dict(
            state | {"epoch": state["epoch"] + 1, "position": 0, "segments": [], "weights": None}
        )
        assert len(ids_of(loader)) == 160


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


DAMAGE = {
    "zeros": lambda data: bytes(len(data)),
    "cut": lambda data: data[:-20],
    "empty": lambda data: b"",
    "the name of its column": lambda data: flipped(data, data.rfind(b"weight")),
    "its footer": lambda data: flipped(data, len(data) - 40),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_weights_that_are_damaged_anywhere_are_said_to_be(cache, damage):
    state = begun(cache, weights="id")
    (name,) = weights_files(cache)
    path = cache.path / "notes" / name
    path.write_bytes(damage(path.read_bytes()))
    with (
        Loader(cache, 8, weights="id") as loader,
        pytest.raises(ac.MissingSegmentsError, match="are damaged"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_of_weights_is_written_again(cache, damage):
    for _ in range(2):  # as after a restart
        with Loader(cache, 8, weights="id") as loader:
            next(iter(loader))
            state = loader.state_dict()
            (name,) = weights_files(cache)
            with Loader(cache, 8) as other:
                other.load_state_dict(state)
                assert len(ids_of(other)) == 152
        path = cache.path / "notes" / name
        path.write_bytes(damage(path.read_bytes()))


@pytest.fixture
def full(tmp_path):
    """A full cache that nobody writes to, of rows of 100 bytes."""
    fields = {"id": ac.Tensor("int32"), "y": ac.Tensor("uint8", (96,))}
    cache = ac.Cache.create(tmp_path / "full", fields, "8MiB", "256KiB")
    with cache.writer() as writer:
        while not cache.stats().evicted_rows:
            writer.extend({"id": np.arange(1, 10001, dtype=np.int32), "y": np.zeros((10000, 96), np.uint8)})
    return cache


def test_room_for_weights_is_made_anew_once_something_took_it(full):
    weighting, rows = Weighting(full.store, "id"), full.stats().rows
    for is_taken in (False, False, True):
        if is_taken:
            (full.path / "notes").mkdir(exist_ok=True)
            (full.path / "notes" / "mine").write_bytes(bytes(1 << 19))
        else:
            for folder in [full.path, *(each for each in full.path.iterdir() if each.is_dir())]:
                os.utime(folder, (10, 10))  # nothing has changed for long
        weighting.reserve(rows, of_ranks=False)
        stats = full.stats()
        assert stats.capacity_bytes - stats.allocated_bytes >= 4 * rows


@pytest.mark.parametrize("weights", ["id", lambda columns: columns["id"]], ids=["column", "function"])
def test_of_a_full_cache_no_more_rows_leave_than_one_file_of_weights_needs(full, weights):
    before = full.stats()
    for _ in range(3):
        with Loader(full, 100, weights=weights, epoch_rows=1000) as loader:
            next(iter(loader))
            assert loader.state_dict()["weights"]
    segment_rows = before.rows // before.segments + 1
    assert before.rows - full.stats().rows <= 4 * before.rows // 100 + 2 * segment_rows
    assert len(weights_files(full)) == 1, "each loads and is the same"


def test_a_loader_that_wants_all_rows_has_none_leave(full):
    rows = full.stats().rows
    with Loader(full, 100, weights="id", epoch_rows=1000, wait_rows=rows, timeout=5) as loader:
        assert len(ids_of(loader)) == 1000
    assert full.stats().rows == rows


def test_earlier_weights_leave_where_what_is_leased_leaves_no_room(full):
    states = []
    for number in range(3):
        with Loader(full, 100, weights=lambda columns, n=number: columns["id"] + n) as loader:
            next(iter(loader))
            states.append(loader.state_dict())
    assert f"{states[-1]['weights']}.weights.arrow" in weights_files(full)


@pytest.mark.parametrize(("name", "says"), [("", "names nothing"), ("\ud800", "UTF-8 cannot hold")])
def test_a_name_that_no_annotation_has_is_refused(cache, name, says):
    with pytest.raises(ValueError, match=says):
        Loader(cache, 8, weights=name)


def test_the_last_few_files_of_weights_are_kept(cache):
    for number in range(7):
        with Loader(cache, 8, weights=lambda columns, n=number: columns["id"] + n) as loader:
            next(iter(loader))
            state = loader.state_dict()
            assert loader.state_dict() == state
    assert len(weights_files(cache)) == 4
    with Loader(cache, 8, weights="id") as loader:
        loader.load_state_dict(state)
        assert len(ids_of(loader)) == 152


def test_ranks_draw_by_the_weights_of_the_first_of_them(cache):
    asked = []

    def weights(columns):
        asked.append(1)
        return np.random.default_rng(len(asked)).random(16)

    ranks = [Loader(cache, 4, weights=weights, rank=rank, world_size=2, run_id="job") for rank in range(2)]
    with Loader(cache, 8, weights=weights) as own:
        wanted = [ids_of([batch]) for batch in own]
    asked.clear()
    epochs = [iter(loader) for loader in ranks]
    assert [ids_of(step) for step in zip(*epochs, strict=True)] == wanted
    assert len(asked) == 10
    for loader in ranks:
        loader.close()


def test_the_file_that_no_state_has_used_for_longest_leaves_first(cache):
    loaders = [Loader(cache, 8, weights=lambda columns, n=number: columns["id"] + n) for number in range(5)]
    names = {}
    for loader in loaders[:4]:
        next(iter(loader))
        names[f"{loader.state_dict()['weights']}.weights.arrow"] = loader
    *kept, second, oldest = sorted(names)
    for seconds, name in enumerate([oldest, second, *kept], start=1):
        os.utime(cache.path / "notes" / name, (seconds, seconds))
    names[oldest].state_dict()
    next(iter(loaders[4]))
    new = loaders[4].state_dict()["weights"]
    assert {*weights_files(cache)} == {*kept, oldest, f"{new}.weights.arrow"}
    for loader in loaders:
        loader.close()


def two_ranks(monkeypatch, cache, **options):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return [Loader(cache, rank=rank, world_size=2, run_id="job", **options) for rank in range(2)]


def test_a_rank_that_is_five_epochs_behind_has_the_weights_of_its_epoch(cache, monkeypatch):
    first, second = two_ranks(monkeypatch, cache, batch_size=8, weights="loss", expect="loss")
    ids = [(seq, row) for seq in range(10) for row in range(16)]
    for row in range(6):
        cache.annotate(ids, loss=np.eye(160)[row])
        assert {*ids_of(first)} == {row}
    assert len(weights_files(cache)) == 6
    for row in range(6):
        assert {*ids_of(second)} == {row}
    cache.annotate(ids, loss=1.0)
    next(iter(first))
    assert len(weights_files(cache)) == 1
    for loader in (first, second):
        loader.close()


def test_states_push_out_no_weights_of_ranks(tmp_path, monkeypatch):
    """At a seam, where one rank still saves states of the old epoch; an eighth has room for one file."""
    cache = ac.Cache.create(tmp_path / "small", {"id": ac.Tensor("int64")}, "1MiB", "64KiB")
    with cache.writer() as writer:
        writer.extend(id=np.arange(20_000))
    first, second = two_ranks(monkeypatch, cache, batch_size=8, weights="loss", expect="loss", epoch_rows=320)
    ids = [(seq, row) for seq in range(3) for row in range(100)]
    cache.annotate(ids, loss=1)
    one, other = first.repeat(), second.repeat()
    for step in range(60):
        if step % 10 == 3:
            cache.annotate(ids, loss=float(step))
        batch = next(one)
        first.state_dict()
        assert ids_of([batch]) != ids_of([next(other)])
    for loader in (first, second):
        loader.close()


def test_ranks_push_out_no_weights_of_a_state(cache, monkeypatch):
    ranks = two_ranks(monkeypatch, cache, batch_size=8, weights="loss", expect="loss", epoch_rows=160)
    batches = [rank.repeat() for rank in ranks]
    for step in range(100):
        for each in batches:
            next(each)
        if step == 5:
            state = ranks[0].state_dict()
        cache.annotate([(0, row) for row in range(8)], loss=float(step))
    for rank in ranks:
        rank.close()
    with Loader(cache, 16, weights="loss", expect="loss", epoch_rows=160) as loader:
        loader.load_state_dict(state)
        assert len(ids_of(loader)) == 64


def test_a_rank_whose_weights_were_removed_is_told_what_to_do(cache, monkeypatch):
    first, second = two_ranks(monkeypatch, cache, batch_size=8, weights="id")
    next(iter(first))
    (name,) = weights_files(cache)
    (cache.path / "notes" / name).unlink()
    with pytest.raises(ac.MissingSegmentsError, match="of the ranks' epoch 0 have left the cache: end"):
        next(iter(second))
    for loader in (first, second):
        loader.close()


# wrong arguments


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"weights": 3}, TypeError, "weights must be None, the name"),
        ({"weights": "image"}, ValueError, "'image' is a column of .*name one of a number a row"),
        ({"weights": ""}, ValueError, "weights='' names nothing"),
        ({"weights": "_age_seconds"}, ValueError, r"can be no annotation.*lambda columns: columns\['_age_s"),
        ({"weights": "loss", "shuffle": "window"}, ValueError, "not the order of shuffle='window'"),
        ({"weights": "loss", "batch_tokens": 100, "length_of": "id"}, ValueError, "leave one out"),
    ],
)
def test_what_cannot_weigh_is_refused_at_once(cache, options, error, words):
    with pytest.raises(error, match=words):
        Loader(cache, **options)


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        (lambda columns: columns["id"] - 20.0, ValueError, "row 0:0 has the weight -20.0: .* at least 0"),
        (lambda columns: np.where(columns["id"] == 17, np.nan, 1), ValueError, "row 1:1 has the weight nan"),
        (lambda columns: np.where(columns["id"] == 17, np.inf, 1), ValueError, "row 1:1 has the weight inf"),
        (lambda columns: columns["id"] * 0, ValueError, "160 rows, and none weighs more than 0"),
        (
            lambda columns: np.ma.array(np.ones(16), mask=columns["id"] > 1),
            TypeError,
            r"weights= gave for segment 0 a masked array.*\.filled\(0\)",
        ),
        (
            lambda columns: [np.ma.masked, *range(15)],
            TypeError,
            "weights= gave for segment 0 a masked array, whose mask would be lost",
        ),
        (lambda columns: 1.0, TypeError, r"shape \(\) for the 16 rows of segment 0"),
        (lambda columns: ["a"] * 16, TypeError, "return a number for each row"),
    ],
)
def test_weights_that_cannot_be_are_an_error_and_leave_no_lease(cache, weights, error, words):
    with Loader(cache, 1, weights=weights) as loader, pytest.raises(error, match=words):
        iter(loader)
    assert cache.stats().leased_bytes == 0
