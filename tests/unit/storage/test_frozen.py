"""Frozen caches: what a freeze refuses, what then refuses, and what opening one looks at."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_cache, publish, sample, segment_files
from processes import Child

import arrowcache as ac
from arrowcache.explore.exchange import ParquetImport, export_parquet
from arrowcache.explore.observation import observe
from arrowcache.storage.claims import MERGING, the_only_one
from arrowcache.storage.layout import LockRecord
from arrowcache.storage.recovery import create_store, open_store
from arrowcache.storage.settings import CachedItems, Frozen, Settings, settings_of

THAW = "cache.thaw"


@pytest.fixture
def cache(tmp_path: Path) -> ac.Cache:
    """Ten segments of 16 rows, with notes of each kind."""
    made = make_cache(tmp_path / "cache")
    publish(made, 10)
    made.exclude([(0, 3)])
    made.tag([(1, 1)], "hard")
    made.annotate([(2, 2)], loss=1.5)
    made.close()  # which writes it
    return ac.Cache.open(made.path)


def files_of(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """All files of a folder: times and content."""
    found = {}
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            status = os.lstat(file := Path(folder, name))
            content = file.read_bytes() if file.is_file() else b""
            found[str(file)] = status.st_mtime_ns, status.st_mode, content
    return found


@contextlib.contextmanager
def untouched(path: Path) -> Iterator[None]:
    before = files_of(path)
    yield
    assert files_of(path) == before


def draw(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    yield sample(int(rng.integers(10)))


def import_rows(cache: ac.Cache) -> None:
    folder = cache.path.with_name("parquet")
    with pytest.warns(RuntimeWarning, match="may change from now on"):
        cache.thaw()
    export_parquet(cache, folder)
    cache.freeze()
    ParquetImport([folder], cache, again=True).run()


CHANGES: dict[str, Callable[[ac.Cache], object]] = {
    "writer": lambda cache: cache.writer(),
    "pool": lambda cache: ac.SamplerPool(cache, draw, workers=1),
    "evict": lambda cache: cache.evict(1),
    "resize": lambda cache: cache.resize("2MiB"),
    "set_pace": lambda cache: cache.set_pace(ac.Pace(min_rows=1)),
    "exclude": lambda cache: cache.exclude([(0, 1)]),
    "include": lambda cache: cache.include([(0, 3)]),
    "tag": lambda cache: cache.tag([(0, 1)], "hard"),
    "untag": lambda cache: cache.untag([(1, 1)], "hard"),
    "annotate": lambda cache: cache.annotate([(0, 1)], loss=1.0),
    "verify": lambda cache: cache.verify(),
    "import": import_rows,
    "create": lambda cache: make_cache(cache.path, capacity="2MiB", exist_ok=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_would_change_a_frozen_cache_is_an_error_that_names_thaw(cache, change):
    cache.freeze()
    with (
        untouched(cache.path) if change != "import" else contextlib.nullcontext(),
        pytest.raises(ac.CacheFrozenError, match=THAW),
    ):
        CHANGES[change](cache)


@pytest.mark.parametrize("change", [name for name in CHANGES if name not in ("import", "create")])
def test_so_it_is_for_who_opened_it_before(cache, change):
    other = ac.Cache.open(cache.path)
    cache.freeze()
    digest = cache.store.settings.frozen
    with pytest.raises(ac.CacheFrozenError, match=THAW):
        CHANGES[change](other)
    assert ac.Cache.open(cache.path).store.settings.frozen == digest


def test_a_publish_that_is_under_way_in_a_store_of_before_is_refused(cache):
    writer = cache.writer()
    writer.append(sample(1))
    settings = cache.store.settings
    frozen = Settings.from_json(settings.text)
    object.__setattr__(frozen, "frozen", Frozen("a", "b"))
    cache.store.folder.write_settings(frozen)
    with pytest.raises(ac.CacheFrozenError, match=THAW):
        writer.close()
    cache.store.folder.write_settings(settings)
    writer.abort()


# what a freeze refuses


def hold(cache: ac.Cache, how: str) -> contextlib.AbstractContextManager[object]:
    stack = contextlib.ExitStack()
    if how == "writer":
        stack.callback(cache.writer().abort)
    elif how == "annotations":
        other = ac.Cache.open(cache.path)
        stack.enter_context(other.store.usage.show_noting())
    elif how == "weights":
        loader = stack.enter_context(ac.Loader(cache, 16, weights="id"))
        next(epoch := iter(loader))
        stack.callback(epoch.close)
    elif how == "ranks":
        loader = stack.enter_context(ac.Loader(cache, 16, rank=0, world_size=2, run_id="job"))
        iter(loader)
    elif how == "part":
        with cache.store.locked():
            stack.callback(cache.store.folder.new_part().discard)
    return stack


@pytest.mark.parametrize(
    ("how", "does"),
    [
        ("writer", "writes, or has a writer or a pool open"),
        ("annotations", "has annotations to be written"),
        ("weights", "reads an epoch by weights"),
        ("ranks", "is in an epoch that ranks have agreed on"),
        ("part", "writes"),
    ],
)
def test_a_freeze_is_refused_and_names_who_is_in_the_way(cache, how, does):
    with hold(cache, how):
        with pytest.raises(ac.CacheFrozenError, match=re.escape(f"pid {os.getpid()} (")) as caught:
            cache.freeze()
        assert does in str(caught.value)
        assert not cache.store.is_frozen
    cache.freeze()
    assert cache.store.is_frozen


@pytest.mark.slow
def test_a_freeze_names_a_pool_and_a_writer_of_another_process(cache):
    def write(path: Path) -> None:
        with ac.Cache.open(path).writer() as writer:
            writer.append(sample(1))
            print("open", flush=True)
            import time

            time.sleep(600)  # until it is killed

    with Child(write, cache.path) as child:
        while not cache.store.usage.somebody_writes():
            pass
        with pytest.raises(ac.CacheFrozenError, match=rf"pid {child.pid} \("):
            cache.freeze()
        child.kill()
    cache.freeze()


def test_a_freeze_is_refused_while_items_are_merged(tmp_path):
    schema = ac.Schema({"x": ac.Tensor("int64")})
    dataset = CachedItems(10, "")
    store = create_store(tmp_path, settings_of(schema, "4MiB", dataset=dataset), exist_ok=False)
    cache = ac.Cache(store)
    with (
        the_only_one(store.folder, MERGING),
        pytest.raises(ac.CacheFrozenError, match=rf"pid {os.getpid()} \(.*merges segments"),
    ):
        cache.freeze()
    cache.freeze()


def test_a_freeze_writes_the_annotations_that_wait_here(cache):
    cache.annotate([(4, 4)], loss=4.5)
    cache.freeze()
    with ac.Loader(cache, 1, weights="loss", columns=["id"]) as loader:
        next(iter(loader))
        assert loader.probabilities([(4, 4)])[0] > loader.probabilities([(2, 2)])[0]
    cache.freeze()  # again: nothing


def test_a_segment_that_a_restart_may_have_damaged_is_checked_before_a_freeze(cache):
    path = segment_files(cache)[3]
    data = bytearray(path.read_bytes())
    data[-len(data) // 2] ^= 255  # a value
    path.write_bytes(data)
    with cache.store.locked():
        record = cache.store.folder.read_record()
        cache.store.folder.write_record(LockRecord(record.next_seq, 10, record.boot_id))
    with pytest.warns(RuntimeWarning, match="quarantined"):
        cache.freeze()
    assert cache.stats().segments == 9
    assert cache.verify(repair=False) == []


# opening one


def test_opening_and_looking_at_a_frozen_cache_touches_nothing(cache):
    cache.freeze()
    with untouched(cache.path):
        other = ac.Cache.open(cache.path, check="bytes")
        assert other.stats().rows == 160
        assert other.verify(repair=False) == []
        assert other.pace is None
        with other.snapshot() as snapshot:
            assert snapshot.gather([5], ["id"])["id"] == [5]
            assert other.stats().leased_bytes == 0
        assert len(other.dataset().to_table()) == 160
        other.close()


def test_a_copy_needs_no_lock_files_and_no_empty_folders(cache, tmp_path):
    """As of git or an object store, which keep no empty folders."""
    cache.freeze()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("segments", "notes", "cache.json"):
        copied = shutil.copytree if (cache.path / name).is_dir() else shutil.copy
        copied(cache.path / name, copy / name)
    other = ac.Cache.open(copy)
    assert other.stats().rows == 160
    assert other.verify(repair=False) == []
    assert observe(other).stats.segments == 10
    with ac.Loader(other, 16, columns=["id"]) as there, ac.Loader(cache, 16, columns=["id"]) as here:
        for mine, its in zip(here, there, strict=True):
            assert np.array_equal(mine["id"], its["id"])
    with pytest.warns(RuntimeWarning, match="may change from now on"):
        other.thaw()
    publish(other, 1)
    assert other.stats().rows == 176
    assert ac.Cache.open(copy).verify() == []


@pytest.mark.parametrize("lost", ["segments", "notes"])
def test_an_incomplete_copy_is_an_error(cache, tmp_path, lost):
    cache.freeze()
    copy = shutil.copytree(cache.path, tmp_path / "copy")
    min((copy / lost).iterdir()).unlink()
    with pytest.raises(ac.CacheFormatError, match="incomplete copy"):
        ac.Cache.open(copy)


def test_a_copy_with_a_segment_of_another_length_is_an_error(cache, tmp_path):
    cache.freeze()
    copy = shutil.copytree(cache.path, tmp_path / "copy")
    path = min((copy / "segments").iterdir())
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ac.CacheFormatError, match="incomplete copy"):
        ac.Cache.open(copy)


def test_the_digest_is_of_what_is_there_and_the_id_is_of_the_freeze(cache, tmp_path):
    cache.freeze()
    first = cache.store.settings.frozen
    with pytest.warns(RuntimeWarning):
        cache.thaw()
    cache.freeze()
    again = cache.store.settings.frozen
    assert first.digest == again.digest
    assert first.id != again.id
    with pytest.warns(RuntimeWarning):
        cache.thaw()
    cache.tag([(0, 0)], "easy")
    cache.freeze()
    assert cache.store.settings.frozen.digest != again.digest
    assert Settings.from_json(cache.store.settings.text).frozen == cache.store.settings.frozen


@pytest.mark.parametrize("frozen", [{}, {"id": "a"}, {"id": "a", "digest": 3}, {"id": "", "digest": "b"}, 3])
def test_a_mark_that_is_none_is_a_newer_format(cache, frozen):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Frozen.from_json(frozen)


# thawing


def test_thaw_warns_and_has_the_cache_change_again(cache):
    cache.freeze()
    other = ac.Cache.open(cache.path)
    with pytest.warns(RuntimeWarning, match="begin of the next epoch"):
        cache.thaw()
    publish(cache, 1)
    cache.exclude([(0, 5)])
    assert cache.stats().rows == 176
    for use in (other.stats, other.writer, other.snapshot, partial(other.tag, [(0, 1)], "hard")):
        with pytest.raises(ac.CacheFormatError, match="thawed since: open it anew"):
            use()
    assert ac.Cache.open(cache.path).verify() == []
    cache.thaw()  # again: nothing


def test_a_thaw_whose_warning_is_an_error_leaves_the_cache_frozen(cache):
    cache.freeze()
    with untouched(cache.path), pytest.raises(RuntimeWarning):
        cache.thaw()
    assert open_store(cache.path, check="structure").is_frozen
