"""Loaders of random caches against a plain Arrow reader of the same files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers import segment_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import arrowcache as ac
from arrowcache import Loader

DTYPES = ["int8", "uint16", "int32", "int64", "float16", "float32", "float64", "bool", "complex64"]
SHAPES = [(), (1,), (3,), (7, 5), (1001,), (33, 3)]


def fixed(dtype: str, shape: tuple[int, ...]) -> ac.Tensor:
    return ac.Tensor(dtype, shape)


KINDS = st.one_of(
    st.builds(fixed, st.sampled_from(DTYPES), st.sampled_from(SHAPES)),
    st.builds(ac.Ragged, st.sampled_from(["float32", "int64"]), st.sampled_from([(), (3,)])),
    st.just(ac.String()),
    st.just(ac.Binary()),
)
SCHEMAS = st.lists(KINDS, min_size=1, max_size=6).map(
    lambda kinds: ac.Schema({f"c{i}": kind for i, kind in enumerate(kinds)})
)


def value_of(kind: Any, rng: np.random.Generator) -> Any:
    """A random value that a sample may hold."""
    if isinstance(kind, ac.String):
        return "äb€ "[: int(rng.integers(0, 5))] * int(rng.integers(0, 3))
    if isinstance(kind, ac.Binary):
        return rng.bytes(int(rng.integers(0, 6)))
    shape = kind.shape if isinstance(kind, ac.Tensor) else (int(rng.integers(0, 4)), *kind.inner_shape)
    numbers = rng.integers(0, 100, shape)
    if kind.dtype == "bool":
        return (numbers % 2).astype(bool)
    return np.asarray(numbers, np.dtype(kind.dtype))


def plain_rows(cache: ac.Cache, schema: ac.Schema) -> dict[tuple[int, int], dict[str, Any]]:
    """(seq, row) -> the row's Arrow values, flat, past the code under test."""
    found = {}
    for path in segment_files(cache):
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        for row, values in enumerate(table.to_pylist()):
            found[int(path.name[:20]), row] = {name: values[name] for name in schema}
    return found


def as_plain(kind: Any, column: Any, row: int) -> Any:
    """One row of a batch's column as what the plain reader gives."""
    if isinstance(kind, ac.String | ac.Binary):
        return column[row]
    if isinstance(kind, ac.Ragged):
        entries = column.data[column.offsets[row] : column.offsets[row + 1]]
        return entries.ravel().tolist()
    array = np.asarray(column[row])
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], -1)
    if array.dtype.kind == "b":
        array = array.astype(np.uint8)
    values = array.ravel().tolist()
    return values if kind.shape or kind.dtype == "complex64" else values[0]


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(data=st.data(), schema=SCHEMAS, rows=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_every_row_of_every_loader_is_that_of_a_plain_reader_exactly_once(data, schema, rows):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 1000), "content"))
    with tempfile.TemporaryDirectory() as folder:
        cache = ac.Cache.create(
            Path(folder) / "cache", schema, capacity="64MiB", segment_bytes="1MiB", segment_rows=9
        )
        for count in rows:  # a writer each, so most segments are short
            with cache.writer() as writer:
                for _ in range(count):
                    writer.append(**{name: value_of(schema[name], rng) for name in schema})
        expected = plain_rows(cache, schema)
        assert len(expected) == sum(rows)
        for _ in range(2):
            shuffle = draw(st.sampled_from(["rows", "window", "blocks", None]), "shuffle")
            columns = draw(st.none() | st.lists(st.sampled_from(list(schema)), min_size=1, unique=True))
            options: dict[str, Any] = {
                "shuffle": shuffle,
                "columns": columns,
                "workers": draw(st.sampled_from([0, 1, 3]), "workers"),
                "with_ids": True,
                "seed": draw(st.integers(0, 3), "seed"),
                "prefetch": draw(st.integers(1, 5), "prefetch"),
                "transform": draw(st.sampled_from([None, dict]), "transform"),
            }
            if shuffle == "window":
                options["window_bytes"] = draw(st.sampled_from([1, "5kB", "1MiB"]), "window")
            size = draw(st.integers(1, 20), "batch size")
            with Loader(cache, size, worker_type="thread", drop_last=False, **options) as loader:
                for _ in range(2):
                    check_epoch(list(loader), schema, columns, size, expected)


def check_epoch(
    batches: list[dict[str, Any]],
    schema: ac.Schema,
    columns: list[str] | None,
    size: int,
    expected: dict[tuple[int, int], dict[str, Any]],
) -> None:
    names = columns or list(schema)
    seen = []
    assert all(len(batch["_seq"]) == size for batch in batches[:-1])
    for batch in batches:
        assert list(batch) == [*names, "_seq", "_row", "_age_seconds"]
        for row, place in enumerate(zip(batch["_seq"].tolist(), batch["_row"].tolist(), strict=True)):
            seen.append(place)
            for name in names:
                found, wanted = as_plain(schema[name], batch[name], row), expected[place][name]
                assert flat(found) == flat(wanted), f"{name} of row {place}"
    assert sorted(seen) == sorted(expected)


def flat(value: Any) -> Any:
    """Nested lists of numbers as one list."""
    return np.asarray(value).ravel().tolist() if isinstance(value, list) else value
