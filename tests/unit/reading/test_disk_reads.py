"""What a loader asks of the disk ahead of its batches, and what it has leave memory again."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ids_of, make_cache, segment_files
from page_cache import drop_from_memory, resident_bytes

import arrowcache as ac
from arrowcache.linux import PAGE_BYTES
from arrowcache.native import engine

ROWS, ROW_BYTES = 128, 64 << 10


@pytest.fixture
def cache(tmp_path: Path) -> ac.Cache:
    """Eight segments of 16 rows of 64 KiB, ids 0 to 127, that are on the disk only."""
    schema = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (128, 128))})
    cache = make_cache(tmp_path / "cache", schema, capacity="64MiB", segment_bytes="4MiB")
    with cache.writer() as writer:
        for number in range(ROWS):
            writer.append(id=number, image=np.full((128, 128), number, np.float32))
    drop_from_memory(*segment_files(cache))
    return cache


@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_rows_are_fetched_before_they_are_read_but_where_their_order_is_any(cache, monkeypatch, shuffle):
    fetched: set[int] = set()
    submit = engine.quick.engine_submit

    def noted(handle: int, job: int) -> Any:
        _, way, _, address, count = (ctypes.c_int64 * 5).from_address(job)
        ids = (ctypes.c_int64 * count).from_address(address)
        if way == engine.FETCH:
            fetched.update(range(ids[0], ids[1]))
        else:
            assert shuffle == "rows" or fetched.issuperset(ids)
        return submit(handle, job)

    monkeypatch.setattr(engine.quick, "engine_submit", noted)
    with ac.Loader(cache, 16, shuffle=shuffle, transform=dict, workers=1, worker_type="thread") as loader:
        assert sorted(ids_of(loader)) == list(range(ROWS))
    assert fetched == (set() if shuffle == "rows" else set(range(ROWS)))


@pytest.mark.parametrize(("memory", "is_dropped"), [(4 << 20, True), (1 << 40, False)])
def test_rows_of_a_cache_larger_than_memory_leave_it_again(cache, monkeypatch, memory, is_dropped):
    """So that what is there stays there: else each row puts out one that may be asked for next."""
    sysconf = os.sysconf
    pages = {"SC_PHYS_PAGES": memory // PAGE_BYTES}
    monkeypatch.setattr(os, "sysconf", lambda name: pages.get(name) or sysconf(name))
    with ac.Loader(cache, 16, shuffle="rows") as loader:
        assert sorted(ids_of(loader)) == list(range(ROWS))
    kept = sum(map(resident_bytes, segment_files(cache)))
    assert (kept < ROWS * ROW_BYTES // 2) is is_dropped
