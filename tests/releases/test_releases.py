"""Caches and releases: this one opens caches of 0.1.0, and 0.1.0 those of this one until a version is raised.

`arrowcache-0.1.0.tar.xz` is that release (commit 5889155), but for what hands over to frameworks;
`cache-0.1.0.tar.xz` a cache which it made by `use.py make`, for the day when no Python runs it any more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arrowcache as ac
from arrowcache.storage.layout import CLAIMS_LOCK, FORMAT_VERSION, NOTES, TOP_NAMES

HERE = Path(__file__).parent
MADE = {"trained": 20, "rows": 20, "ids": list(range(20)), "pool": 3, "problems": [], "served": True}


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(HERE / f"{name}-0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture
def old(tmp_path):
    """Use a cache in 0.1.0."""
    release = unpacked("arrowcache", tmp_path / "release")

    def use(verb: str, cache: Path) -> dict[str, Any]:
        seen = run(verb, cache, PYTHONPATH=str(release.parent))
        assert seen["release"] == str(release)
        return seen

    return use


def new(verb: str, cache: Path) -> dict[str, Any]:
    """Use a cache in this release."""
    return run(verb, cache)


def run(verb: str, cache: Path, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "use.py"), verb, str(cache)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def without_release(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in seen.items() if name != "release"}


@pytest.mark.slow
def test_a_cache_of_0_1_0_is_opened_read_and_written(tmp_path):
    cache = unpacked("cache", tmp_path)
    seen = new("read", cache)
    assert seen.items() >= MADE.items()
    assert new("append", cache)["ids"] == list(range(30))
    assert sorted(os.listdir(cache)) == sorted(TOP_NAMES - {CLAIMS_LOCK, NOTES})


@pytest.mark.slow
def test_0_1_0_and_this_release_take_turns_on_one_cache(tmp_path, old):
    """As they do where two environments share one."""
    cache = tmp_path / "cache"
    made = old("make", cache)
    assert made.items() >= MADE.items()
    assert without_release(new("read", cache)) == without_release(made)
    by_new = new("append", cache)
    assert by_new["ids"] == list(range(30))
    assert without_release(old("read", cache)) == without_release(by_new)
    assert new("append", cache)["ids"] == list(range(40))
    assert old("append", cache)["problems"] == []


@pytest.mark.slow
@pytest.mark.skipif(FORMAT_VERSION > 1, reason="a cache of a later format is refused by 0.1.0")
def test_a_cache_that_this_release_makes_is_one_to_0_1_0(tmp_path, old):
    cache = tmp_path / "cache"
    made = new("make", cache)
    assert without_release(old("read", cache)) == without_release(made)
    assert old("append", cache)["ids"] == list(range(30))
    assert new("read", cache)["problems"] == []


@pytest.mark.slow
def test_an_epoch_that_0_1_0_began_is_never_finished_in_another_order(tmp_path, old):
    cache = tmp_path / "cache"
    old("make", cache)
    states = old("states", cache)
    for shuffle in ("rows", "window", "blocks", None):
        delivered, within, after = states[str(shuffle)]
        with ac.Loader(cache, 4, shuffle=shuffle, drop_last=False, paced=False) as loader:
            loader.load_state_dict(after)
            assert loader.state_dict()["epoch"] == 1
            if shuffle is None:
                loader.load_state_dict(within)
                rest = [number for batch in loader for number in batch["id"].tolist()]
                assert delivered + rest == list(range(20))
            else:
                with pytest.raises(ValueError, match="15 of 20 rows are left in an order of arrowcache"):
                    loader.load_state_dict(within)


@pytest.mark.slow
@pytest.mark.parametrize("old_is_first", [True, False])
def test_ranks_of_0_1_0_and_of_this_release_do_not_agree(tmp_path, old, old_is_first):
    cache = tmp_path / "cache"
    release = str(Path(old("make", cache)["release"]).parent)
    environments = [os.environ | {"PYTHONPATH": release}, dict(os.environ)]
    if not old_is_first:
        environments.reverse()
    pipe = subprocess.PIPE
    command = [sys.executable, str(HERE / "use.py")]
    with subprocess.Popen(
        [*command, "rank0", str(cache)], stdin=pipe, stdout=pipe, env=environments[0], text=True
    ) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert json.loads(first.stdout.readline()) == {"steps": 2}
        done = subprocess.run(
            [*command, "rank1", str(cache)], input="", stdout=pipe, env=environments[1], text=True, check=True
        )
        first.stdin.close()
    here, there = ("2", "None") if old_is_first else ("None", "2")
    assert f"order_version is {here} here and {there} there" in json.loads(done.stdout)["error"]


@pytest.mark.slow
def test_0_1_0_refuses_a_later_version_and_touches_nothing(tmp_path, old):
    """So whatever is added to the format raises the version: an old release heeds that alone."""
    cache = unpacked("cache", tmp_path)
    text = (cache / "cache.json").read_text()
    (cache / "cache.json").write_text(text.replace('"version": 1', '"version": 4'))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    with pytest.raises(AssertionError, match="format version 4, this arrowcache reads 1"):
        old("append", cache)
    with pytest.raises(AssertionError, match="format version 4, this arrowcache reads 1 to 3"):
        new("append", cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


@pytest.mark.slow
def test_0_1_0_refuses_a_cache_whose_segments_have_gaps_and_touches_nothing(tmp_path, old):
    """It would take them for damaged. A cache that it made gets none, whatever its schema."""
    cache = tmp_path / "cache"
    wide = {"a": ac.Tensor("uint8", (4096,)), "b": ac.Tensor("float32", (1024,))}
    with ac.Cache.create(cache, wide, "4MiB", "64KiB") as made, made.writer() as writer:
        writer.extend(a=np.zeros((9, 4096), np.uint8), b=np.zeros((9, 1024), np.float32))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    with pytest.raises(AssertionError, match="format version 2, this arrowcache reads 1"):
        old("append", cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


@pytest.mark.slow
def test_0_1_0_and_this_release_take_turns_on_a_cache_of_several_wide_columns(tmp_path, old):
    cache = tmp_path / "cache"
    made = old("make-wide", cache)
    assert made["rows"] == 10
    assert new("append-wide", cache)["ids"] == list(range(20))
    assert old("append-wide", cache)["ids"] == list(range(30))
    seen = new("read", cache)
    assert (seen["problems"], seen["rows"], seen["trained"]) == ([], 30, 30)
    assert without_release(old("read", cache)) == without_release(seen)
