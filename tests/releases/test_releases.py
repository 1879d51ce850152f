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

import pytest

from arrowcache.storage.layout import FORMAT_VERSION, TOP_NAMES

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
    assert sorted(os.listdir(cache)) == sorted(TOP_NAMES)


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
def test_0_1_0_refuses_a_later_version_and_touches_nothing(tmp_path, old):
    """So whatever is added to the format raises the version: an old release heeds that alone."""
    cache = unpacked("cache", tmp_path)
    text = (cache / "cache.json").read_text()
    (cache / "cache.json").write_text(text.replace('"version": 1', '"version": 2'))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    with pytest.raises(AssertionError, match="format version 2, this arrowcache reads 1"):
        old("append", cache)
    with pytest.raises(AssertionError, match="format version 2, this arrowcache reads 1"):
        new("append", cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
