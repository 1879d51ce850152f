"""ParquetRows(passes=): each row once a pass, however its pools end, and whatever a filter leaves."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from helpers import DEADLINE_SECONDS, make_cache, wait_until
from processes import Child

import arrowcache as ac
from arrowcache.sampling.sources import Map, Mix, ParquetRows

SIZES = {"a": 20, "b": 50, "c": 200, "d": 7, "e": 33}  # rows of the row groups of each file


def table(first: int, rows: int) -> pa.Table:
    ids = np.arange(first, first + rows)
    return pa.table(
        {
            "id": ids,
            "text": [f"n{i}" for i in ids],
            "alike": ["of one value, which the file has once" * 3] * rows,
            "ragged": pa.array([[i] * (i % 40) for i in ids.tolist()], pa.list_(pa.int64())),
        }
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    """Rows 0 to 999."""
    path = tmp_path / "data"
    path.mkdir()
    for number, (name, size) in enumerate(SIZES.items()):
        pq.write_table(table(number * 200, 200), path / f"{name}.parquet", row_group_size=size)
    return path


def cache_of(source: Any, path: Path, **options: Any) -> ac.Cache:
    return make_cache(path, source.schema, **{"capacity": "16MiB", "segment_rows": 64} | options)


def ids(cache: ac.Cache) -> list[int]:
    with cache.snapshot() as snapshot:
        rows = snapshot.gather(range(len(snapshot)))
    if "text" in rows:
        assert rows["text"] == [f"n{number}" for number in rows["id"]]
    return rows["id"].tolist()


def drawn(cache: ac.Cache, source: Any, **options: Any) -> ac.PoolStats:
    """All that a pool draws."""
    with (
        ThreadPoolExecutor(2) as executor,
        ac.SamplerPool(
            cache, source, **{"workers": 2, "executor": executor, "progress": False} | options
        ) as pool,
    ):
        pool.wait(timeout=DEADLINE_SECONDS)
        return pool.stats()


@pytest.mark.parametrize("columns", [["id"], None], ids=["fixed", "variable"])
@pytest.mark.parametrize("segment_rows", [20, 64, 1000])
def test_each_row_comes_once_a_pass_in_another_order_and_the_pool_ends(
    folder, tmp_path, columns, segment_rows
):
    source = ParquetRows(folder, columns, passes=2)
    cache = cache_of(source, tmp_path / "cache", segment_rows=segment_rows, segment_bytes="64KiB")
    drawn(cache, source, workers=1)
    one, other = np.split(np.array(ids(cache)), 2)
    assert sorted(one) == sorted(other) == list(range(1000))
    assert list(one) != list(other)
    assert drawn(cache, source).rows == 0, "a pool that is started again has nothing to draw"
    drawn(cache, ParquetRows(folder, columns, passes=3))
    assert Counter(ids(cache)) == Counter([*range(1000)] * 3)


def test_a_task_has_whole_row_groups_and_every_few_rows_of_one_that_no_segment_holds(folder, tmp_path):
    source = ParquetRows(folder, ["id"], passes=1)
    cache = cache_of(source, tmp_path / "cache", segment_rows=64)
    drawn(cache, source)
    groups = {}
    for number, size in enumerate(SIZES.values()):
        for row in range(200):
            groups[number * 200 + row] = (number, row // size)
    shares: dict[tuple[int, int], set[int]] = {}
    for segment, number in enumerate(each.rows for each in cache.store.segments()):
        with cache.snapshot() as snapshot:
            first = sum(each.rows for each in cache.store.segments()[:segment])
            for row in snapshot.gather(range(first, first + number))["id"].tolist():
                shares.setdefault(groups[row], set()).add(segment)
    assert {len(segments) for (file, _), segments in shares.items() if file != 2} == {1}
    assert len(shares[2, 0]) == 4


def slow(folder: Path) -> Map:
    """Each row once, a while after the one before it."""

    def wait(sample):
        time.sleep(0.002)
        return sample

    source = ParquetRows(folder, passes=1)
    return Map(source, wait, schema=source.schema)


@pytest.mark.parametrize("reads", [1, 8])
def test_pools_that_were_stopped_go_on_and_each_row_comes_once(folder, tmp_path, reads):
    source = slow(folder)
    cache = cache_of(source, tmp_path / "cache")
    with ThreadPoolExecutor(2) as executor:
        for _ in range(3):
            with ac.SamplerPool(cache, source, 2, executor=executor, reads=reads, progress=False) as pool:
                pool.wait(rows=40, timeout=DEADLINE_SECONDS)
        assert len(ids(cache)) < 1000
    drawn(cache, source)
    assert Counter(ids(cache)) == Counter(range(1000))


@pytest.mark.slow
def test_rows_of_a_killed_worker_come_once(folder, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()

    def marked(sample):  # here, so that it is pickled by value
        Path(pids, str(os.getpid())).touch()
        time.sleep(0.002)
        return sample

    rows = ParquetRows(folder, ["id", "text"], passes=1)
    source = Map(rows, marked, schema=rows.schema)  # told, so that none is drawn here
    cache = cache_of(source, tmp_path / "cache")
    with ac.SamplerPool(cache, source, workers=2, progress=False) as pool:
        pool.wait(rows=40, timeout=DEADLINE_SECONDS)
        os.kill(int(min(os.listdir(pids))), signal.SIGKILL)
        pool.wait(timeout=DEADLINE_SECONDS)
    assert Counter(ids(cache)) == Counter(range(1000))


def draw_until_killed(path: Path, data: Path, ready: Path) -> None:
    with ac.SamplerPool(path, slow(data), workers=2, progress=False) as pool:
        pool.wait(rows=40)
        ready.touch()
        time.sleep(DEADLINE_SECONDS)


@pytest.mark.slow
def test_rows_of_a_killed_pool_come_once(folder, tmp_path):
    source = ParquetRows(folder, passes=1)
    cache = cache_of(source, tmp_path / "cache")
    for number in range(2):
        ready = tmp_path / f"ready-{number}"
        with Child(draw_until_killed, cache.path, folder, ready) as child:
            wait_until(ready.exists, "the pool to be at work")
            child.kill()
    assert cache.stats().rows < 1000
    drawn(cache, source)
    assert Counter(ids(cache)) == Counter(range(1000))


def test_pools_of_two_ranks_share_the_rows(folder, tmp_path):
    files = [folder / f"{name}.parquet" for name in SIZES]
    cache = cache_of(ParquetRows(folder), tmp_path / "cache")
    with (
        ThreadPoolExecutor(4) as executor,
        ac.SamplerPool(cache, ParquetRows(folder, passes=2), 2, executor=executor) as one,
        ac.SamplerPool(cache, ParquetRows([*files[::-1], folder], passes=2), 2, executor=executor) as other,
    ):
        one.wait(timeout=DEADLINE_SECONDS)
        other.wait(timeout=DEADLINE_SECONDS)
    assert Counter(ids(cache)) == Counter([*range(1000)] * 2)


FEW = pc.bit_wise_and(pc.field("id"), 63) == 1


@pytest.mark.parametrize(
    "condition", [FEW, FEW & (pc.field("id") > 500), pc.bit_wise_and(pc.field("id"), 63) == 64]
)
@pytest.mark.parametrize("reads", [1, 8])
def test_a_filter_leaves_each_of_its_rows_once_and_tasks_without_a_row_are_done(
    folder, tmp_path, condition, reads
):
    rows = ParquetRows(folder, ["id", "text"], condition, passes=2)
    schema = {**rows.schema, "twice": ac.Tensor("int64")}
    source = Map(rows, lambda each: {**each, "twice": 2 * each["id"]}, schema=schema)
    cache = cache_of(source, tmp_path / "cache")
    stats = drawn(cache, source, reads=reads)
    kept = pq.read_table(folder, filters=condition)["id"].to_pylist()
    assert stats.rows == 2 * len(kept)
    assert Counter(ids(cache)) == Counter(kept * 2)
    assert drawn(cache, source).rows == 0
    assert ac.Cache.open(cache.path).verify() == []


@pytest.mark.slow
def test_a_task_may_have_thousands_of_row_groups_without_a_row(tmp_path):
    """More than `Rows` without a row may come from a sampler without an end."""
    pq.write_table(pa.table({"id": [0, 2] * 11_000}), tmp_path / "x.parquet", row_group_size=2)
    source = ParquetRows(tmp_path, filter=pc.field("id") == 1, passes=1)
    cache = cache_of(source, tmp_path / "cache", segment_rows=22_000, segment_bytes="1MiB")
    assert drawn(cache, source).rows == 0


def test_rows_that_cannot_be_read_are_left_out_by_a_pool_that_skips(folder, tmp_path):
    def read(sample):
        if sample["id"] == 607:
            raise FileNotFoundError("gone")
        return sample

    source = Map(ParquetRows(folder / "d.parquet", ["id"], passes=1), read)
    cache = cache_of(source, tmp_path / "cache", segment_rows=1)
    for rows, skipped in ((199, 1), (0, 0)):
        stats = drawn(cache, source, on_error="skip", retries=0)
        assert (stats.rows, stats.skipped) == (rows, skipped)
    assert sorted(ids(cache)) == sorted({*range(600, 800)} - {607})


CHANGES = {
    "a file more": lambda folder: pq.write_table(table(1000, 30), folder / "f.parquet"),
    "a file less": lambda folder: (folder / "a.parquet").unlink(),
    "a file of another name": lambda folder: (folder / "a.parquet").rename(folder / "z.parquet"),
    "a file of another size": lambda folder: pq.write_table(
        table(5000, 200), folder / "a.parquet", compression="gzip", row_group_size=20
    ),
    "other row groups": lambda folder: pq.write_table(table(0, 200), folder / "a.parquet", row_group_size=21),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_list_of_files_is_refused_and_another_name_is_the_way_out(folder, tmp_path, change):
    source = ParquetRows(folder, ["id"], passes=1)
    cache = cache_of(source, tmp_path / "cache")
    drawn(cache, source, segments=2)
    CHANGES[change](folder)
    changed = ParquetRows(folder, ["id"], passes=1)
    says = r"drew from 1,000 rows of 5 files in .* is now to draw from .* Pass another name="
    with pytest.raises(ValueError, match=says):
        ac.SamplerPool(cache, changed)
    before = cache.stats().rows
    drawn(cache, changed, name="then")
    assert cache.stats().rows - before == pq.read_table(folder).num_rows


def test_another_filter_and_no_passes_are_refused_and_what_changes_no_row_is_not(folder, tmp_path):
    def rows(numbers):
        return ParquetRows(folder, ["id"], pc.field("id").isin(numbers), passes=1)

    many = list(range(0, 900, 3))
    cache = cache_of(rows(many), tmp_path / "cache")
    drawn(cache, rows(many), segments=2)
    for other in (rows([*many[:150], 451, *many[151:]]), ParquetRows(folder, ["id"])):
        with pytest.raises(ValueError, match="Pass another name="):
            ac.SamplerPool(cache, other)
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    drawn(cache, rows(many))
    assert sorted(ids(cache)) == many


@pytest.mark.parametrize("size", [40, 3000, 5000])
@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary("int32", pa.string())], ids=str)
def test_long_texts_that_a_file_has_once_for_many_rows_fit_segments(tmp_path, kind, size):
    texts = [(b"x" if number % 2 else b"y") * size for number in range(300)]
    written = pa.table({"id": range(300), "text": pa.array(texts).cast(pa.string()).cast(kind)})
    pq.write_table(written, tmp_path / "x.parquet", row_group_size=100)
    source = ParquetRows(tmp_path, passes=1)
    cache = cache_of(source, tmp_path / "cache", segment_rows=100, segment_bytes="64KiB")
    assert drawn(cache, source, retries=0).rows == 300


def test_texts_that_a_file_has_once_and_without_statistics_may_need_fewer_segment_rows(tmp_path):
    texts = pa.table({"id": range(300), "text": ["x" * 5000] * 300})
    pq.write_table(texts, tmp_path / "x.parquet", write_statistics=False)
    source = ParquetRows(tmp_path, passes=1)
    cache = cache_of(source, tmp_path / "cache", segment_rows=100, segment_bytes="64KiB")
    with pytest.raises(
        ac.SamplerError, match=r"do not fit a segment, .* create the cache with fewer segment_rows; "
    ):
        drawn(cache, source, retries=0)
    cache = cache_of(source, tmp_path / "other", segment_rows=10, segment_bytes="64KiB")
    assert drawn(cache, source).rows == 300


def test_by_itself_it_yields_each_row_and_it_is_never_mixed(folder):
    source = ParquetRows(folder, ["id"], passes=1)
    numbers = [number for rows in source(np.random.default_rng(0)) for number in rows["id"].tolist()]
    assert sorted(numbers) == list(range(1000)) != numbers
    with pytest.raises(TypeError, match="is drawn once, and a mix draws without end"):
        Mix({source: 1.0})
    with pytest.raises(
        ValueError, match="passes= draws all rows of each row group: leave rows_per_group= out"
    ):
        ParquetRows(folder, passes=1, rows_per_group=3)
    with pytest.raises(ValueError, match="passes"):
        ParquetRows(folder, passes=0)
