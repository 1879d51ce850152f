"""Arrangement: rows meet few pages: columns begin at a multiple of what rows and pages have in common."""

from __future__ import annotations

import itertools
import math
import os
import struct

import numpy as np
import pyarrow as pa
import pytest
from helpers import columns_of, file_bytes, segment_files
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import KINDS, checked, schemas

import arrowcache as ac
from arrowcache.arrow.segment import (
    encode,
    encoded_bytes_bound,
    max_rows,
    rewrite,
)
from arrowcache.native import maps
from arrowcache.reading.mapped import KnownLayouts, make_template

PAGE = 4096
WIDE = ac.Schema(
    {
        "n": ac.Tensor("int64"),
        "a": ac.Tensor("uint8", (2, PAGE)),
        "m": ac.Tensor("int16"),
        "b": ac.Tensor("float32", (32, 32)),
        "half": ac.Tensor("uint8", (PAGE // 2,)),
        "odd": ac.Tensor("uint8", (PAGE + 8,)),
        "c": ac.Tensor("float64", (2, 288)),  # 4,608 bytes: nine blocks of 512
        "t": ac.String(),
        "r": ac.Ragged("int32", (2,)),
    }
)
FIXED = ac.Schema(WIDE.fixed)


def starts(data, schema, rows):
    """Where the values of each fixed-width column begin, as Arrow says."""
    file = pa.py_buffer(data)
    batch = pa.ipc.open_file(file).get_batch(0)
    return {name: batch.column(name).buffers()[-1].address - file.address for name in schema.fixed}


ALIGNED = {"n": 8, "a": PAGE, "m": 8, "b": PAGE, "half": PAGE // 2, "odd": 64, "c": 512}


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("schema", [WIDE, FIXED], ids=["variable", "fixed"])
def test_a_column_begins_at_what_its_rows_and_a_page_have_in_common_after_the_least_gap(schema, rows):
    columns = columns_of(schema, rows)
    data = file_bytes(schema, columns)
    found = starts(data, schema, rows)
    assert found == dict(zip(schema.fixed, checked(data, schema, rows).fixed, strict=True))
    for before, after in itertools.pairwise(ALIGNED):
        end = found[before] + columns[before].nbytes
        end += -end % 8
        if schema[after].is_list:
            end += 4 * (rows + 1) + -(4 * (rows + 1)) % 8
        assert found[after] == end + -end % ALIGNED[after]
    for name, column in columns.items():
        if name in schema.fixed:
            assert data[found[name] : found[name] + column.nbytes] == column.tobytes()
    assert encode(schema, columns).nbytes == len(data)


def test_a_gap_holds_zeros():
    data = file_bytes(FIXED, columns_of(FIXED, 3))
    found = starts(data, FIXED, 3)
    end = found["n"] + 3 * 8 + 16
    assert not any(data[end : found["a"]])


widths = st.sampled_from([1, 2, 9, 1024, PAGE - 8, PAGE, PAGE + 8, PAGE + 512, 2 * PAGE, 16 * PAGE])
kinds = st.one_of(st.builds(ac.Tensor, st.just("uint8"), st.tuples(widths)), KINDS)


@settings(max_examples=60, deadline=None)
@given(schemas(kinds=kinds), st.integers(1, 40), st.integers(0, 99), st.sampled_from([0, 10**15]))
def test_any_schema_survives(schema, rows, seed, skipped):
    columns = columns_of(schema, rows, seed)
    encoded = encode(schema, columns, skipped=skipped)
    data = b"".join(encoded.pieces)
    file = pa.py_buffer(data)
    layout = checked(data, schema, rows)
    for (name, kind), start in zip(schema.fixed.items(), layout.fixed, strict=True):
        values = columns[name].tobytes()
        assert data[start : start + len(values)] == values
        assert start % (8 if kind.row_bytes <= 8 else math.gcd(PAGE, kind.row_bytes)) == 0
    for name, (at, values_at) in zip(schema.variable, layout.variable, strict=True):
        assert np.frombuffer(data, np.int32, rows + 1, at).tolist() == columns[name].offsets.tolist()
        values = bytes(columns[name].data)
        assert data[values_at : values_at + len(values)] == values
    table = pa.ipc.open_file(file).read_all()
    table.validate(full=True)
    pieces, _ = rewrite(file, schema)
    assert b"".join(pieces) == data
    assert (make_template(file, schema, layout) is not None) or schema.variable

    variable_bytes = sum(len(columns[name].data) for name in schema.variable)
    bound = encoded_bytes_bound(schema, rows) + variable_bytes
    gaps = sum(max(64, math.gcd(PAGE, kind.row_bytes)) for kind in schema.fixed.values())
    assert encoded.nbytes <= bound <= encoded.nbytes + PAGE + gaps + 256 * len(schema)
    most = max_rows(schema, bound)
    assert encoded_bytes_bound(schema, most) <= bound
    assert encoded_bytes_bound(schema, most + 1) > bound


def test_files_of_one_schema_have_one_layout_which_is_known_again():
    layouts, known = set(), KnownLayouts(FIXED)
    for seed in range(4):
        data = file_bytes(FIXED, columns_of(FIXED, 9, seed))
        layouts.add(checked(data, FIXED, 9))
        known.learn(pa.py_buffer(data), checked(data, FIXED, 9))
    assert len(layouts) == 1
    template = known.find(len(data), 9)
    assert {template.layout} == layouts
    fd = os.memfd_create("segment")
    try:
        os.pwrite(fd, data, 0)
        assert template.kind.has(maps.File(fd=fd, nbytes=len(data)))
        os.pwrite(fd, b"\1", starts(data, FIXED, 9)["a"] - 1)
        assert not template.kind.has(maps.File(fd=fd, nbytes=len(data))), "a gap holds zeros"
    finally:
        os.close(fd)


def test_a_header_that_says_a_buffer_is_elsewhere_is_refused():
    data = file_bytes(FIXED, columns_of(FIXED, 8))
    places = checked(data, FIXED, 8).fixed
    base, first = data.index(struct.pack("<qqqq", 0, 0, 0, 64)), min(places)
    numbers = {"n": 1, "a": 5, "m": 7, "b": 11, "half": 15, "odd": 19, "c": 23}
    for name, place in zip(FIXED.fixed, places, strict=True):
        at = base + 16 * numbers[name]
        assert data[at : at + 8] == struct.pack("<q", place - first)
        for by in (-PAGE, -64, -8, 8, 64, PAGE):
            altered = data[:at] + struct.pack("<q", place - first + by) + data[at + 8 :]
            with pytest.raises(ac.CorruptSegmentError):
                checked(altered, FIXED, 8)


def test_a_file_cut_anywhere_is_refused():
    data = file_bytes(FIXED, columns_of(FIXED, 2))
    for length in [*range(0, len(data), 997), *range(len(data) - 1500, len(data))]:
        with pytest.raises(ac.CorruptSegmentError):
            checked(data[:length], FIXED, 2)


def rows_of(start, stop):
    return [
        {
            "n": number,
            "a": np.full((2, PAGE), number, np.uint8),
            "m": number,
            "b": np.full((32, 32), number, np.float32),
            "half": np.full(PAGE // 2, number, np.uint8),
            "odd": np.full(PAGE + 8, number, np.uint8),
            "c": np.full((2, 288), number, np.float64),
            "t": "é" * number,
            "r": np.full((number % 4, 2), number, np.int32),
        }
        for number in range(start, stop)
    ]


def write(cache, start, stop):
    with cache.writer() as writer:
        for row in rows_of(start, stop):
            writer.append({name: row[name] for name in cache.schema})


@pytest.mark.parametrize("schema", [WIDE, FIXED], ids=["variable", "fixed"])
def test_segments_keep_their_bound_with_gaps_in_them(tmp_path, schema):
    with ac.Cache.create(tmp_path / "cache", schema, "8MiB", "200KiB") as cache:
        settings = cache.store.settings
        assert encoded_bytes_bound(schema, settings.full_rows) <= settings.segment_bytes
        assert encoded_bytes_bound(schema, settings.full_rows + 1) > settings.segment_bytes
        write(cache, 0, 25)
        assert all(path.stat().st_size <= settings.segment_bytes for path in segment_files(cache))
        for path in segment_files(cache):
            rows = int(path.name.split("-")[1])
            found = starts(path.read_bytes(), schema, rows)
            assert [found[name] % at for name, at in ALIGNED.items()] == [0] * len(ALIGNED)
        assert cache.verify() == []
        assert cache.stats().rows == 25


def test_rows_of_a_full_segment_tighten_the_bound_with_gaps_in_it(tmp_path):
    with ac.Cache.create(tmp_path / "cache", FIXED, "8MiB", "1MiB", segment_rows=4) as cache:
        assert cache.store.settings.segment_bytes < 200_000
        write(cache, 0, 8)
        assert [path.stat().st_size for path in segment_files(cache)] == [
            len(file_bytes(FIXED, columns_of(FIXED, 4)))
        ] * 2
        assert cache.verify() == []
