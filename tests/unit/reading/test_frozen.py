"""Epochs over frozen caches: any copy, at any time, in any process has the same batches."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from helpers import ROW, limit, publish, segment_files

import arrowcache as ac
from arrowcache import Loader
from arrowcache.reading.options import LoaderOptions
from arrowcache.storage.layout import LockRecord
from arrowcache.storage.settings import Frozen, settings_of

ROWS = 157  # nine segments of 16 and one of 13
ARGUMENTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "window": {"shuffle": "window"},
    "blocks": {"shuffle": "blocks"},
    "oldest first": {"shuffle": None, "drop_last": False},
    "weights": {"weights": "loss", "epoch_rows": 96},
    "expression": {"rows": pc.field("loss") > 20, "weights": pc.field("id") + 1.0},
    "tag": {"rows": "hard"},
}


@pytest.fixture
def frozen(cache: ac.Cache) -> ac.Cache:
    """With notes of each kind."""
    ids = np.array([(number // 16, number % 16) for number in range(ROWS)])
    cache.exclude(ids[[3, 50]])
    cache.tag(ids[::2], "hard")
    cache.annotate(ids, loss=np.arange(ROWS))
    cache.freeze()
    return cache


@pytest.fixture
def copy(frozen: ac.Cache, tmp_path: Path) -> Path:
    """One on another machine, which booted at another time: as its files would say."""
    path = tmp_path / "elsewhere" / "copy"
    shutil.copytree(frozen.path, path)
    path.joinpath("cache.lock").write_bytes(LockRecord(10, 0, "another boot").pack())
    return path


def epochs_of(cache: ac.Cache | Path, count: int = 2, **arguments: Any) -> list[list[list[int]]]:
    with Loader(cache, 8, columns=["id"], seed=3, **arguments) as loader:
        return [[batch["id"].tolist() for batch in loader] for _ in range(count)]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_copy_elsewhere_has_the_same_batches_for_seed_epoch_and_rank(frozen, copy, name):
    arguments = ARGUMENTS[name]
    alone = epochs_of(frozen, **arguments)
    assert epochs_of(copy, **arguments) == alone
    assert alone[0] != alone[1] or name == "oldest first"
    ranks = [epochs_of(frozen, rank=rank, world_size=3, **arguments) for rank in range(3)]
    assert [epochs_of(copy, rank=rank, world_size=3, **arguments) for rank in range(3)] == ranks
    assert len({len(epoch) for rank in ranks for epoch in rank}) == 1  # all have equally many steps
    if "weights" not in arguments and name != "oldest first":
        rows = [number for rank in ranks for step in rank[0] for number in step]
        assert len({*rows}) == len(rows)


@pytest.mark.parametrize(("capacity", "window"), [("64GiB", 2 << 30), ("4GiB", 1 << 30)])
def test_a_window_does_not_depend_on_the_memory_of_a_machine(capacity, window):
    settings = replace(settings_of(ROW, capacity), frozen=Frozen("an id", "a digest"))
    assert LoaderOptions(settings, 8, "window").window_nbytes == window
    assert LoaderOptions(settings, 8, "window", window_bytes="1MiB").window_nbytes == 1 << 20


def test_ranks_need_no_run_and_leave_no_file(frozen):
    epochs_of(frozen, rank=0, world_size=2)
    assert [*(frozen.path / "ranks").iterdir()] == []


def test_ranks_that_agreed_before_a_freeze_agree_on_nothing_after_it(cache):
    publish(cache, 1, first=ROWS)
    arguments: dict[str, Any] = {"columns": ["id"], "world_size": 2, "run_id": "job"}
    loaders = [Loader(cache, 8, rank=rank, **arguments) for rank in range(2)]
    first = [iter(loader) for loader in loaders]
    before = [[batch["id"].tolist() for batch in epoch] for epoch in first]
    cache.freeze()
    after = [[batch["id"].tolist() for batch in loader] for loader in loaders]
    for rows in (before, after):
        ids = [number for rank in rows for step in rank for number in step]
        assert len({*ids}) == len(ids) == 160
    assert [*(cache.path / "ranks").iterdir()] == []
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_state_goes_on_in_a_copy(frozen, copy, name):
    arguments = {"columns": ["id"], "seed": 3, **ARGUMENTS[name]}
    with Loader(frozen, 8, **arguments) as loader, Loader(copy, 8, **arguments) as other:
        epoch = iter(loader)
        for _ in range(4):
            next(epoch)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch["id"].tolist() for batch in epoch]
        other.load_state_dict(state)
        assert [batch["id"].tolist() for batch in other] == rest
        other.load_state_dict(state, missing="raise")
        assert [batch["id"].tolist() for batch in other] == rest


def test_a_state_of_other_content_is_refused(frozen, copy):
    with Loader(frozen, 8) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with pytest.warns(RuntimeWarning):
        frozen.thaw()
    with Loader(frozen, 8) as loader, pytest.raises(ValueError, match="here it is not frozen: load it over"):
        loader.load_state_dict(state)
    frozen.tag([(0, 0)], "easy")
    frozen.freeze()
    with Loader(frozen, 8) as loader:
        with pytest.raises(ValueError, match="load it over that cache or a copy"):
            loader.load_state_dict(state)
        following = {"epoch": state["epoch"] + 1, "position": 0, "segments": [], "weights": None}
        loader.load_state_dict(state | following | {"frozen": None})  # the way out
        assert len([*loader]) == (ROWS - 2) // 8


def test_a_state_of_other_weights_is_refused(frozen):
    with Loader(frozen, 8, weights="loss") as loader:
        next(iter(loader))
        state = loader.state_dict()
    for arguments in ({}, {"weights": "id"}):
        with Loader(frozen, 8, **arguments) as loader, pytest.raises(ValueError, match="same weights="):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": lambda columns: columns["id"] > 3},
        {"weights": lambda columns: columns["id"] + 1.0},
        {"rows": pc.field("_age_seconds") < 1e9},
    ],
    ids=["rows", "weights", "age"],
)
def test_there_is_no_state_where_a_function_chooses_or_weighs_rows(frozen, arguments):
    with Loader(frozen, 8, **arguments) as loader:
        assert next(iter(loader))
        with pytest.raises(ValueError, match="no state can repeat elsewhere"):
            loader.state_dict()


def test_headroom_pace_and_counts_do_not_apply(cache):
    cache.set_pace(ac.Pace(samples_per_insert=1.0, max_reuse=1))
    cache.freeze()
    assert epochs_of(cache, 3)
    assert cache.stats().served_rows == 0
    assert not cache.stats().paced


@pytest.mark.parametrize("arguments", [{"wait_rows": 1000}, {"batch_size": 1000}])
def test_nobody_waits_for_rows(frozen, arguments):
    size = arguments.pop("batch_size", 8)
    with (
        Loader(frozen, size, timeout=None, **arguments) as loader,
        pytest.raises(ac.LoaderTimeoutError, match="with 157 rows, and an epoch here needs 1000: lower"),
    ):
        iter(loader)


def test_an_empty_cache_may_be_frozen(tmp_path, filled):
    cache = filled(0, tmp_path / "empty")
    cache.freeze()
    assert cache.stats().rows == 0
    with Loader(cache.path, 8) as loader, pytest.raises(ac.LoaderTimeoutError, match="with 0 rows"):
        iter(loader)


@pytest.mark.parametrize("opens", ["before", "after"])
def test_a_damaged_segment_is_an_error_and_stays(frozen, opens):
    path = segment_files(frozen)[3]
    path.write_bytes(b"no Arrow" + path.read_bytes()[8:])
    for _ in range(2):
        with (
            Loader(frozen if opens == "before" else frozen.path, 8) as loader,
            pytest.raises(ac.CorruptSegmentError, match=path.name),
        ):
            iter(loader)
    assert path.exists()
    assert len(frozen.verify(repair=False)) == 1


def test_damaged_annotations_are_an_error(frozen, copy):
    path = next(copy.joinpath("notes").glob("*.values.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(ac.CacheFormatError, match="copy it again"):
        Loader(copy, 8, weights="loss")


@pytest.mark.parametrize("endless", [False, True])
def test_readers_compare_the_id_at_the_begin_of_each_epoch(frozen, endless):
    with Loader(frozen.path, 8) as loader:
        for batch in loader:
            assert len(batch["id"]) == 8
        batches = loader.repeat() if endless else iter(loader)
        next(batches)
        with pytest.warns(RuntimeWarning):
            frozen.thaw()
        with pytest.raises(ac.CacheFormatError, match="thawed since: open it anew"):
            [*batches] if endless else iter(loader)


def test_a_loader_of_before_a_freeze_goes_on_with_it(cache):
    with Loader(cache.path, 8, columns=["id"]) as loader:
        first = iter(loader)
        next(first)
        cache.freeze()
        assert len([*first]) == ROWS // 8 - 1
        assert [batch["id"].tolist() for batch in loader] == epochs_of_seed_0(cache)[1]
        assert "frozen" in loader.state_dict()


def epochs_of_seed_0(cache: ac.Cache) -> list[list[list[int]]]:
    with Loader(cache, 8, columns=["id"]) as loader:
        return [[batch["id"].tolist() for batch in loader] for _ in range(2)]


def test_a_frozen_cache_is_mapped_once_for_all_its_loaders(frozen, checked, monkeypatch):
    limit(monkeypatch, mapped_segments=100)
    with Loader(frozen, 8) as one, Loader(frozen.path, 8) as other:
        for loader in (one, other):
            next(iter(loader))
        assert len(checked) == len({*checked})
