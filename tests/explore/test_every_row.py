"""Whoever looks at a cache sees every row, of the oldest segments too, and while somebody writes, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers import ids_of, nearly_full, wait_until

pytest.importorskip("pandas", reason="pandas is not installed")

import arrowcache as ac
from arrowcache import explore


@pytest.fixture(params=[(0.1, False), (0, False), (0.1, True)], ids=["idle", "no headroom", "written to"])
def cache(tmp_path, request):
    headroom, is_written = request.param
    cache = nearly_full(tmp_path / "cache", headroom)
    if not is_written:
        yield cache
        return
    with cache.writer():
        yield cache


def exported(cache: ac.Cache) -> list[int]:
    files = explore.export_parquet(cache, cache.path.parent / "out", ["id"])
    return [number for file in files for number in pq.read_table(file)["id"].to_pylist()]


def in_batches(cache: ac.Cache) -> list[int]:
    with cache.snapshot() as snapshot:
        assert len(snapshot) == 5000
        assert snapshot.left_out_rows == 0
        return snapshot.gather(range(len(snapshot)), ["id"])["id"].tolist()


def viewed(cache: ac.Cache) -> list[int]:
    with cache.snapshot() as snapshot:
        return ids_of(snapshot.views(columns=["id"]))


READERS: dict[str, Callable[[ac.Cache], list[int]]] = {
    "snapshot": in_batches,
    "views": viewed,
    "dataset": lambda cache: cache.dataset().to_table(columns=["id"])["id"].to_pylist(),
    "sql": lambda cache: explore.sql(cache, "select id from cache order by id")["id"].tolist(),
    "to_pandas": lambda cache: explore.to_pandas(cache, ["id"])["id"].tolist(),
    "to_polars": lambda cache: explore.to_polars(cache, ["id"])["id"].to_list(),
    "head": lambda cache: explore.head(cache, 5000)["id"].tolist(),
    "sample": lambda cache: sorted(explore.sample(cache, 5000)["id"].tolist()),
    "export_parquet": exported,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_every_reader_that_only_looks_sees_every_row(cache, name):
    assert READERS[name](cache) == list(range(5000))
    wait_until(lambda: cache.stats().leased_bytes == 0, "pyarrow's threads to let go of a dataset's batches")


def test_the_head_is_the_oldest_rows(cache):
    assert explore.head(cache)["id"].tolist() == [0, 1, 2, 3, 4]


def test_summaries_are_of_every_row(cache):
    described: Any = explore.describe(cache, ["id"], progress=False)
    assert described.loc["id", ["count", "min", "max"]].tolist() == [5000, 0, 4999]
    drifted = explore.drift(cache, ["id"], share=0.25, progress=False)
    assert drifted.loc["id", "first_mean"] < 4999 / 4, "of the oldest segment"
    assert len(explore.duplicates(cache, ["data"], progress=False)) == 4999


@pytest.mark.slow
def test_the_command_line_shows_every_row(cache, call, tmp_path):
    code, printed, _ = call("head", cache.path, "-n", 5000, "-c", "id", "--json")
    assert (code, [row["id"] for row in json.loads(printed)]) == (0, list(range(5000)))
    code, printed, _ = call("sql", cache.path, "select count(*) as n, min(id) as first from cache", "--json")
    assert json.loads(printed) == [{"n": 5000, "first": 0}]
    code, printed, _ = call("describe", cache.path, "-c", "id", "--json")
    assert json.loads(printed)[0]["count"] == 5000
    assert call("export", cache.path, tmp_path / "files")[0] == 0
    assert sum(pq.read_table(file).num_rows for file in Path(tmp_path / "files").iterdir()) == 5000
