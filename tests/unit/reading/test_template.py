"""Templates: what they recognize, the complete check accepts with the same layout, and nothing else."""

from __future__ import annotations

import os
import struct

import numpy as np
import pyarrow as pa
import pytest
from helpers import EVERY_TYPE, columns_of, file_bytes, limit, variable

import arrowcache as ac
from arrowcache.arrow.segment import CHECKSUM_KEY, Layout, encode, read_structure
from arrowcache.native import maps
from arrowcache.reading.mapped import KnownLayouts, make_template

SCHEMAS = {
    "every": ac.Schema(EVERY_TYPE.fixed),
    "small": ac.Schema({"n": ac.Tensor("int16"), "x": ac.Tensor("float32", (3,))}),
    "scalar": ac.Schema({"n": ac.Tensor("int64")}),
    "with gaps": ac.Schema({"x": ac.Tensor("float32", (128,)), "n": ac.Tensor("uint8")}),
}
ROWS = 3


def has(kind, data, told_bytes=None):
    """Whether a file of these bytes is of a kind; told_bytes: it had so many when it was opened."""
    fd = os.memfd_create("segment")
    try:
        os.pwrite(fd, data, 0)
        file = maps.File(fd=fd)
        file.nbytes = len(data) if told_bytes is None else told_bytes
        return kind.has(file)
    finally:
        os.close(fd)


def found(known, data, rows, told_bytes=None):
    """The layout of a file of these bytes."""
    made = known.find(len(data) if told_bytes is None else told_bytes, rows)
    return made.layout if made is not None and has(made.kind, data, told_bytes) else None


def learned(schema, data, rows=ROWS):
    """What knows a file's layout, having met it often enough; and the layout."""
    known, file = KnownLayouts(schema), pa.py_buffer(data)
    layout = read_structure(file, schema, rows)
    for _ in range(2):
        known.learn(file, layout)
    return known, layout


@pytest.mark.parametrize("kind", SCHEMAS)
def test_files_of_the_same_layout_are_recognized_whatever_they_hold(kind):
    schema = SCHEMAS[kind]
    known, layout = learned(schema, file_bytes(schema, columns_of(schema, ROWS)))
    for seed in range(1, 5):
        other = file_bytes(schema, columns_of(schema, ROWS, seed))
        assert found(known, other, ROWS) == layout == read_structure(pa.py_buffer(other), schema, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEMAS)
def test_whatever_byte_is_altered_a_template_accepts_nothing_that_the_complete_check_refuses(kind):
    schema = SCHEMAS[kind]
    data = file_bytes(schema, columns_of(schema, ROWS))
    known, layout = learned(schema, data)
    accepted = 0
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 + 37 * position % 255
        if found(known, bytes(altered), ROWS) is not None:
            accepted += 1
            assert read_structure(pa.py_buffer(bytes(altered)), schema, ROWS) == layout, position
    free = sum(ROWS * kind.row_bytes for kind in schema.fixed.values())
    digits = 17 * sum(1 + kind.is_list for kind in schema.fixed.values()) - 1
    assert accepted == free + digits, "values and checksums may differ, and nothing else"


def test_a_file_of_another_length_or_number_of_rows_is_unknown():
    schema = SCHEMAS["small"]
    data = file_bytes(schema, columns_of(schema, ROWS))
    known, layout = learned(schema, data)
    assert found(known, data, ROWS) == layout
    for rows in (ROWS - 1, ROWS + 1):
        assert found(known, data, rows) is None
    for length in range(len(data)):
        assert found(known, data[:length], ROWS) is None
        assert found(known, data[:length], ROWS, len(data)) is None, "shortened after its length was asked"
    assert found(known, data + b"\0", ROWS) is None


def test_a_file_with_variable_length_columns_has_no_template():
    schema = ac.Schema({"n": ac.Tensor("int16"), "t": ac.String()})
    data = file_bytes(schema, {"n": np.zeros(2, np.int16), "t": variable([b"a", b"bc"])})
    known, _ = learned(schema, data, 2)
    assert found(known, data, 2) is None


def test_a_file_that_is_valid_but_not_as_we_write_it_has_no_template():
    schema = SCHEMAS["scalar"]
    data = file_bytes(schema, {"n": np.arange(ROWS)})
    file = pa.py_buffer(data)
    layout = read_structure(file, schema, ROWS)
    assert make_template(file, schema, layout) is not None
    unharmed = 0
    for position in range(len(data)):  # a file that is a little different, but sound, teaches nothing
        altered = bytearray(data)
        altered[position] ^= 0xFF
        odd = pa.py_buffer(bytes(altered))
        try:
            layout = read_structure(odd, schema, ROWS)
        except ac.CorruptSegmentError:
            continue
        made = make_template(odd, schema, layout)
        if made is not None:
            unharmed += 1
            assert made.layout == layout
            assert has(made.kind, data), "it differs in values or digits only"
    assert unharmed == 8 * ROWS + 16


def test_a_file_without_checksums_or_with_ambiguous_ones_has_no_template():
    schema = SCHEMAS["scalar"]
    columns = {"n": np.arange(ROWS)}
    batch = pa.RecordBatch.from_arrays([pa.array(columns["n"])], schema=schema.arrow)
    for metadata in ({}, {CHECKSUM_KEY: b""}, {CHECKSUM_KEY: b"0" * 16, b"again": b"0" * 16}):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema, metadata=metadata) as writer:
            writer.write_batch(batch)
        file = sink.getvalue()
        assert make_template(file, schema, read_structure(file, schema, ROWS)) is None


def test_overlapping_columns_have_no_template():
    schema = ac.Schema({"a": ac.Tensor("int64"), "b": ac.Tensor("int64")})
    data = file_bytes(schema, {"a": np.arange(8), "b": np.arange(8)})
    first, second = read_structure(pa.py_buffer(data), schema, 8).fixed
    at = data.rindex(struct.pack("<qq", second - first, 64))
    crafted = pa.py_buffer(data[:at] + struct.pack("<qq", 0, 64) + data[at + 16 :])
    with pytest.raises(ac.CorruptSegmentError, match="follow one another"):
        read_structure(crafted, schema, 8)
    assert make_template(crafted, schema, Layout(8, (first, first), ())) is None


def test_only_what_comes_again_is_learned_and_only_so_much_is_kept(monkeypatch):
    limit(monkeypatch, templates=5)
    schema = SCHEMAS["scalar"]
    known = KnownLayouts(schema)
    files = {}
    for rows in range(1, 100):
        files[rows] = data = b"".join(encode(schema, {"n": np.arange(rows)}).pieces)
        known.learn(pa.py_buffer(data), read_structure(pa.py_buffer(data), schema, rows))
        assert found(known, data, rows) is None, "met once"
    for rows in (99, 98, 98):
        known.learn(pa.py_buffer(files[rows]), read_structure(pa.py_buffer(files[rows]), schema, rows))
    assert [found(known, files[rows], rows) is None for rows in (99, 98, 97)] == [False, False, True]
    for _ in range(2):
        for rows in range(1, 10):
            known.learn(pa.py_buffer(files[rows]), read_structure(pa.py_buffer(files[rows]), schema, rows))
            assert found(known, files[99], 99) is not None, "in use"
    kept = [rows for rows in files if found(known, files[rows], rows) is not None]
    assert len(kept) == 5


def test_a_template_that_would_be_large_is_not_made(monkeypatch):
    schema = SCHEMAS["with gaps"]
    data = file_bytes(schema, columns_of(schema, ROWS))
    limit(monkeypatch, template_bytes=100)
    known, _ = learned(schema, data)
    assert found(known, data, ROWS) is None
