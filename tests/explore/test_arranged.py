"""Other readers read segments whose columns begin at pages, after gaps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from helpers import segment_files

import arrowcache as ac

ROWS = 30
SCHEMA = ac.Schema(
    {
        "id": ac.Tensor("int64"),
        "a": ac.Tensor("uint8", (4096,)),
        "b": ac.Tensor("float32", (64, 32)),
        "name": ac.String(),
        "points": ac.Ragged("int32", (2,)),
    }
)


def row_of(number):
    rng = np.random.default_rng(number)
    return {
        "id": number,
        "a": rng.integers(0, 256, 4096, np.uint8),
        "b": rng.random((64, 32), np.float32),
        "name": "é" * (number % 5),
        "points": np.full((number % 3, 2), number, np.int32),
    }


@pytest.fixture
def files(tmp_path):
    """Of ten rows each."""
    with ac.Cache.create(tmp_path / "cache", SCHEMA, "4MiB", "256KiB", segment_rows=10) as cache:
        with cache.writer() as writer:
            for number in range(ROWS):
                writer.append(row_of(number))
        files = segment_files(cache)
    assert all(map(begins_at_a_page, files))
    return files


def begins_at_a_page(path):
    with pa.memory_map(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
        return all(batch[name].buffers()[-1].address % 4096 == 0 for name in ("a", "b"))


def assert_rows(columns):
    """Columns in order, each a list of rows."""
    for number, (*found,) in enumerate(zip(*(columns[name] for name in SCHEMA), strict=True)):
        wanted = row_of(number)
        for name, value in zip(SCHEMA, found, strict=True):
            kind = wanted[name]
            same = np.asarray(value, getattr(kind, "dtype", None)).ravel()
            assert np.array_equal(same, np.ravel(kind)), (number, name)
    assert number == ROWS - 1


def test_pyarrow_maps_them(files):
    tables = []
    for path in files:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        table.validate(full=True)
        tables.append(table)
    assert_rows(pa.concat_tables(tables).to_pydict())


def test_pyarrow_reads_them_without_a_map(files):
    tables = [pa.ipc.open_file(path.read_bytes()).read_all() for path in files]
    assert_rows(pa.concat_tables(tables).to_pydict())
    table = pads.dataset([str(path) for path in files], format="ipc").to_table()
    table.validate(full=True)
    assert_rows(table.to_pydict())


def test_duckdb_reads_them_as_a_data_set(files):
    duckdb = pytest.importorskip("duckdb", reason="the extra 'explore' is not installed")
    dataset = pads.dataset([str(path) for path in files], format="ipc")
    with duckdb.connect() as database:
        database.register("cache", dataset)
        found = database.execute("select * from cache order by id").fetchall()
        assert_rows(dict(zip(SCHEMA, zip(*found, strict=True), strict=True)))
        total = database.execute("select sum(list_sum(a)) from cache where id >= 7").fetchall()
    assert total == [(sum(int(row_of(number)["a"].sum()) for number in range(7, ROWS)),)]


def test_polars_reads_them(files):
    pl = pytest.importorskip("polars", reason="the extra 'explore' is not installed")
    assert_rows(pl.concat([pl.read_ipc(path) for path in files]).to_dict(as_series=False))
    assert_rows(pl.concat([pl.read_ipc(path.read_bytes()) for path in files]).to_dict(as_series=False))
    assert_rows(pl.scan_ipc([str(path) for path in files]).collect().to_dict(as_series=False))
