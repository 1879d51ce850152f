"""Arrangement: wide columns begin at pages, in files that a reader takes with gaps and without."""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from helpers import columns_of, file_bytes, segment_files
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import KINDS, checked, schemas

import arrowcache as ac
from arrowcache.arrow.arrangement import needs_gaps
from arrowcache.arrow.segment import (
    encode,
    encoded_bytes_bound,
    max_rows,
    rewrite,
)
from arrowcache.arrow.template import KnownLayouts, make_template
from arrowcache.native import maps

PAGE = 4096
WIDE = ac.Schema(
    {
        "n": ac.Tensor("int64"),
        "a": ac.Tensor("uint8", (2, PAGE)),
        "m": ac.Tensor("int16"),
        "b": ac.Tensor("float32", (32, 32)),
        "odd": ac.Tensor("uint8", (PAGE + 8,)),
        "c": ac.Tensor("float64", (2, 288)),  # 4,608 bytes: nine blocks of 512
        "t": ac.String(),
        "r": ac.Ragged("int32", (2,)),
    }
)
FIXED = ac.Schema(WIDE.fixed)


def paged_bytes(schema, columns):
    return b"".join(encode(schema, columns, paged=True).pieces)


def starts(data, schema, rows):
    """Where the values of each fixed-width column begin, as Arrow says."""
    file = pa.py_buffer(data)
    batch = pa.ipc.open_file(file).get_batch(0)
    return {name: batch.column(name).buffers()[-1].address - file.address for name in schema.fixed}


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("schema", [WIDE, FIXED], ids=["variable", "fixed"])
def test_each_wide_column_begins_at_a_page_and_the_others_right_after_what_is_before_them(schema, rows):
    columns = columns_of(schema, rows)
    data = paged_bytes(schema, columns)
    found = starts(data, schema, rows)
    assert [found[name] % PAGE for name in ("a", "b", "c")] == [0, 0, 0]
    assert found == dict(zip(schema.fixed, checked(data, schema, rows).fixed, strict=True))
    for before, after, between in (("n", "a", 4 * (rows + 1)), ("a", "m", 0), ("m", "b", 4 * (rows + 1))):
        end = found[before] + columns[before].nbytes
        end += -end % 8 + between + -between % 8
        assert found[after] == end + (-end % PAGE if after != "m" else 0)
    for name, column in columns.items():
        if name in schema.fixed:
            assert data[found[name] : found[name] + column.nbytes] == column.tobytes()
    assert encode(schema, columns, paged=True).nbytes == len(data)


def test_a_gap_holds_zeros():
    data = paged_bytes(FIXED, columns_of(FIXED, 3))
    found = starts(data, FIXED, 3)
    end = found["n"] + 3 * 8 + 16
    assert not any(data[end : found["a"]])


def test_the_only_wide_column_of_a_packed_file_begins_at_a_page():
    schema = ac.Schema({"n": ac.Tensor("int64"), "x": ac.Tensor("float32", (2048,)), "t": ac.String()})
    for rows in (1, 5, 100):
        assert starts(file_bytes(schema, columns_of(schema, rows)), schema, rows)["x"] % PAGE == 0


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        ([], False),
        ([(PAGE,)], False),
        ([(PAGE,), (PAGE - 1,)], False),
        ([(PAGE,), (PAGE,)], True),
        ([(100_000,), (PAGE,)], True),
        ([(PAGE,), (100_000,)], True),
        ([(PAGE + 8,), (PAGE + 8,)], False),
        ([(PAGE + 8,), (PAGE + 512,)], False),
        ([(3, 224, 224), (3, 224, 224)], True),
        ([(), (256,)], False),
    ],
)
def test_gaps_are_for_several_wide_columns(shapes, wanted):
    columns = {f"c{number}": ac.Tensor("uint8", shape) for number, shape in enumerate(shapes)}
    assert needs_gaps(ac.Schema({"t": ac.String()} | columns)) is wanted


widths = st.sampled_from([1, 2, 9, 1024, PAGE - 8, PAGE, PAGE + 8, PAGE + 512, 2 * PAGE, 16 * PAGE])
kinds = st.one_of(st.builds(ac.Tensor, st.just("uint8"), st.tuples(widths)), KINDS)


@settings(max_examples=60, deadline=None)
@given(
    schemas(kinds=kinds), st.integers(1, 40), st.integers(0, 99), st.booleans(), st.sampled_from([0, 10**15])
)
def test_any_schema_survives_in_any_arrangement(schema, rows, seed, paged, skipped):
    columns = columns_of(schema, rows, seed)
    encoded = encode(schema, columns, paged=paged, skipped=skipped)
    data = b"".join(encoded.pieces)
    file = pa.py_buffer(data)
    layout = checked(data, schema, rows)
    for (name, kind), start in zip(schema.fixed.items(), layout.fixed, strict=True):
        values = columns[name].tobytes()
        assert data[start : start + len(values)] == values
        if paged and kind.row_bytes >= PAGE and kind.row_bytes % 512 == 0:
            assert start % PAGE == 0
    for name, (at, values_at) in zip(schema.variable, layout.variable, strict=True):
        assert np.frombuffer(data, np.int32, rows + 1, at).tolist() == columns[name].offsets.tolist()
        values = bytes(columns[name].data)
        assert data[values_at : values_at + len(values)] == values
    table = pa.ipc.open_file(file).read_all()
    table.validate(full=True)
    packed = pa.ipc.open_file(pa.py_buffer(file_bytes(schema, columns))).read_all()
    for name in schema:
        for one, other in zip(table[name].chunk(0).buffers(), packed[name].chunk(0).buffers(), strict=True):
            assert (one is None) == (other is None)
            assert one is None or one.to_pybytes() == other.to_pybytes()
    pieces, _ = rewrite(file, schema)
    assert b"".join(pieces) == data
    assert (make_template(file, schema, layout) is not None) or schema.variable

    variable_bytes = sum(len(columns[name].data) for name in schema.variable)
    bound = encoded_bytes_bound(schema, rows, paged=paged) + variable_bytes
    wide = sum(kind.row_bytes >= PAGE for kind in schema.fixed.values())
    assert encoded.nbytes <= bound <= encoded.nbytes + PAGE * (1 + wide) + 256 * len(schema)
    most = max_rows(schema, bound, paged=paged)
    assert encoded_bytes_bound(schema, most, paged=paged) <= bound
    assert encoded_bytes_bound(schema, most + 1, paged=paged) > bound


def test_paged_files_of_one_schema_have_one_layout_which_is_known_again():
    layouts, known = set(), KnownLayouts(FIXED)
    for seed in range(4):
        data = paged_bytes(FIXED, columns_of(FIXED, 9, seed))
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


def test_a_header_of_a_paged_file_that_says_a_buffer_is_elsewhere_is_refused():
    data = paged_bytes(FIXED, columns_of(FIXED, 8))
    places = checked(data, FIXED, 8).fixed
    base, first = data.index(struct.pack("<qqqq", 0, 0, 0, 64)), min(places)
    numbers = {"n": 1, "a": 5, "m": 7, "b": 11, "odd": 15, "c": 19}
    for name, place in zip(FIXED.fixed, places, strict=True):
        at = base + 16 * numbers[name]
        assert data[at : at + 8] == struct.pack("<q", place - first)
        for by in (-PAGE, -64, -8, 8, 64, PAGE):
            altered = data[:at] + struct.pack("<q", place - first + by) + data[at + 8 :]
            with pytest.raises(ac.CorruptSegmentError):
                checked(altered, FIXED, 8)


def test_a_paged_file_cut_anywhere_is_refused():
    data = paged_bytes(FIXED, columns_of(FIXED, 2))
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
        assert settings.version == 2
        assert encoded_bytes_bound(schema, settings.full_rows, paged=True) <= settings.segment_bytes
        assert encoded_bytes_bound(schema, settings.full_rows + 1, paged=True) > settings.segment_bytes
        write(cache, 0, 25)
        assert all(path.stat().st_size <= settings.segment_bytes for path in segment_files(cache))
        for path in segment_files(cache):
            rows = int(path.name.split("-")[1])
            found = starts(path.read_bytes(), schema, rows)
            assert [found[name] % PAGE for name in ("a", "b", "c")] == [0, 0, 0]
        assert cache.verify() == []
        assert cache.stats().rows == 25


def test_rows_of_a_full_segment_tighten_the_bound_with_gaps_in_it(tmp_path):
    with ac.Cache.create(tmp_path / "cache", FIXED, "8MiB", "1MiB", segment_rows=4) as cache:
        assert cache.store.settings.segment_bytes < 200_000
        write(cache, 0, 8)
        assert [path.stat().st_size for path in segment_files(cache)] == [
            len(paged_bytes(FIXED, columns_of(FIXED, 4)))
        ] * 2
        assert cache.verify() == []


def test_a_cache_of_version_1_gets_no_gaps(tmp_path):
    """0.1.0 may read it, too, and takes a file with gaps for damaged."""
    cache = older_cache(tmp_path / "cache")
    write(cache, 0, 5)
    for path in segment_files(cache):
        found = starts(path.read_bytes(), WIDE, int(path.name.split("-")[1]))
        assert found["a"] % PAGE == 0, "the widest"
        assert found["b"] % PAGE != 0


def test_one_cache_may_have_segments_of_both_kinds(tmp_path):
    cache = older_cache(tmp_path / "cache")
    write(cache, 0, 5)
    cache.close()
    settings = cache.path / "cache.json"
    later = ac.Cache.create(tmp_path / "later", WIDE, "8MiB", "200KiB")
    settings.write_text(later.store.settings.text)
    later.close()
    with ac.Cache.open(cache.path) as cache:
        write(cache, 5, 12)
        assert cache.verify() == []
        with cache.snapshot() as snapshot:
            table = snapshot.table()
            table.validate(full=True)
            assert table["n"].to_pylist() == list(range(12))
            for name, values in snapshot.gather(np.arange(12)[::-1]).items():
                wanted = [row[name] for row in reversed(rows_of(0, 12))]
                if isinstance(values, ac.Values):
                    assert np.array_equal(values.data, np.concatenate(wanted))
                else:
                    assert all(np.array_equal(one, other) for one, other in zip(values, wanted, strict=True))
        with ac.Loader(cache, 4, paced=False) as loader:
            for batch in loader:
                for place, number in enumerate(batch["n"]):
                    row = rows_of(number, number + 1)[0]
                    for name in ("a", "b", "c", "odd"):
                        assert np.array_equal(batch[name][place], row[name])


def older_cache(path):
    """A cache of WIDE as 0.1.0 makes one."""
    cache = ac.Cache.create(path, WIDE, "8MiB", "200KiB")
    text = replace(cache.store.settings, version=1).text
    cache.close()
    (path / "cache.json").write_text(text)
    return ac.Cache.open(path)
