"""Segments that are truncated or go while they are read: an error names them, the next epoch leaves them out.

Where rows come from the disk, that is. Whoever copies from a mapping gets SIGBUS: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import builtins
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import face, ids_of, limit, mapped_seqs, segment_files, seqs
from mixed_rows import DAMAGED, FIXED, OTHERS, ROWS, SEGMENT_ROWS, VARIABLE, WHOLE, mixed_cache

import arrowcache as ac

KINDS = pytest.mark.parametrize("columns", [FIXED, VARIABLE], ids=["fixed", "variable"])


@pytest.fixture
def cache(tmp_path: Path) -> ac.Cache:
    return mixed_cache(tmp_path / "cache")


def damage(cache: ac.Cache, change: Callable[[Path], None]) -> str:
    """Change a segment's file. Returns: its name."""
    path = segment_files(cache)[DAMAGED]
    change(path)
    return path.name


def truncate(path: Path) -> None:
    os.truncate(path, 100)


@KINDS
def test_a_gather_of_a_truncated_segment_names_it_and_others_can_be_gathered(cache, columns):
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        name = damage(cache, truncate)
        for _ in range(2):
            with pytest.raises(ac.CorruptSegmentError, match=rf"{name} .*its file was truncated"):
                snapshot.gather(range(ROWS), columns)
        assert snapshot.gather(OTHERS, columns)["id"].tolist() == OTHERS
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


def test_a_gather_of_a_segment_that_has_no_mapping_and_goes_names_it(cache, monkeypatch):
    limit(monkeypatch, mapped_segments=0)
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        name = damage(cache, Path.unlink)
        with pytest.raises(ac.CorruptSegmentError, match=rf"{name} .*No such file"):
            snapshot.gather(range(ROWS))
        assert snapshot.gather(OTHERS)["id"].tolist() == OTHERS
    assert cache.stats().leased_bytes == 0


def test_other_readers_learn_of_a_segment_that_could_not_be_read(cache):
    """Although it is mapped still: one that is read from the mapping would end the process."""
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        name = damage(cache, truncate)
        with pytest.raises(ac.CorruptSegmentError):
            snapshot.gather(range(ROWS))
        with cache.snapshot() as after:
            with pytest.warns(RuntimeWarning, match=f"{name} left out, .* it has 100 bytes"):
                assert after.map_all() == ROWS - SEGMENT_ROWS
            assert after.gather(range(len(after)))["id"].tolist() == OTHERS
        with cache.snapshot() as lazy:
            assert lazy.gather([0, ROWS - 1])["id"].tolist() == [0, ROWS - 1]
            with (
                pytest.warns(RuntimeWarning, match="left out"),
                pytest.raises(ac.CorruptSegmentError, match=name),
            ):
                lazy.gather([DAMAGED * SEGMENT_ROWS])
    with cache.snapshot() as last, pytest.warns(RuntimeWarning, match=f"{name} quarantined"):
        assert last.map_all() == ROWS - SEGMENT_ROWS
    assert seqs(cache) == [0, 1, 2, 4, 5]


def test_a_segment_whose_read_failed_by_chance_is_checked_once_and_read_on(cache, monkeypatch):
    limit(monkeypatch, mapped_segments=0)
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        path, away = segment_files(cache)[DAMAGED], cache.path / "away"
        path.rename(away)
        with pytest.raises(ac.CorruptSegmentError, match="No such file"):
            snapshot.gather(range(ROWS))
        away.rename(path)
        opened, opening = [], open
        monkeypatch.setattr(
            builtins, "open", lambda *file, **how: opened.append(file[0]) or opening(*file, **how)
        )
        for _ in range(2):
            with cache.snapshot() as after:
                assert after.map_all() == ROWS
                assert after.gather(range(ROWS))["id"].tolist() == WHOLE
            assert len([each for each in opened if isinstance(each, int)]) == 1, (
                "all its bytes were read, once"
            )


def check_next_epochs(loader: Any, name: str) -> None:
    """They warn, until nobody leases the segment any more."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert sorted(ids_of(loader)) == OTHERS
    assert name in str(caught[0].message)


@KINDS
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Loader", {"shuffle": "rows"}), ("torch.Loader", {"shuffle": "rows"}),
        ("Loader", {"shuffle": "window"}), ("torch.Loader", {"shuffle": "window"}),  # the others give views
        ("Loader", {"workers": 2, "worker_type": "thread", "transform": dict}),
        ("Loader", {"workers": 2, "worker_type": "process", "transform": dict}),
    ],
    ids=["rows", "torch, rows", "window", "torch, window", "threads", "processes"],
)  # fmt: skip
def test_a_step_that_meets_a_truncated_segment_names_it_and_the_next_epoch_goes_on(
    cache, name, options, columns
):
    with face(name)(cache, 6, drop_last=False, prefetch=1, columns=columns, **options) as loader:
        epoch = iter(loader)
        next(epoch)
        damaged = damage(cache, truncate)
        # A worker process that had not opened it finds no footer.
        with pytest.raises(ac.CorruptSegmentError, match=rf"{damaged}.*(its file was truncated|of 100$)"):
            list(epoch)
        assert next(epoch, None) is None
        check_next_epochs(loader, damaged)
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataloader_that_meets_a_truncated_segment_names_it(cache, num_workers):
    loader = face("torch.dataloader")(cache, 8, num_workers=num_workers, seed=1)
    epoch = iter(loader)
    next(epoch)
    name = damage(cache, truncate)
    with pytest.raises(ac.CorruptSegmentError, match=name):
        for _ in epoch:
            pass
    del epoch
    with pytest.warns(RuntimeWarning, match=name):
        assert sorted(ids_of(loader)) == OTHERS


@pytest.mark.parametrize("columns", [FIXED, ["boxes"]], ids=["fixed", "ragged"])
def test_a_view_of_a_truncated_segment_names_it_where_it_was_a_bus_error(cache, columns):
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        name = damage(cache, truncate)
        views = snapshot.views(SEGMENT_ROWS, columns)
        for _ in range(DAMAGED):
            next(views)
        with pytest.raises(ac.CorruptSegmentError, match=f"{name} can't be read any more"):
            next(views)
