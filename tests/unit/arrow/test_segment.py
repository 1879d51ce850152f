"""Segments: one file, one record batch; and that damage is found before it is believed."""

from __future__ import annotations

import random
import struct

import numpy as np
import pyarrow as pa
import pytest
from helpers import DTYPES, EVERY_TYPE, columns_of, file_bytes, limit, variable
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import checked, schemas

import arrowcache as ac
from arrowcache.arrow import segment
from arrowcache.arrow.segment import (
    check_bytes,
    encode,
    encoded_bytes_bound,
    labelled,
    max_rows,
    read_structure,
    structure_spans,
)

SMALL = ac.Schema(
    {
        "n": ac.Tensor("int16"),
        "x": ac.Tensor("float32", (3,)),
        "t": ac.String(),
        "r": ac.Ragged("int32", (2,)),
    }
)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_every_type_survives_the_way_through_a_file(rows):
    columns = columns_of(EVERY_TYPE, rows)
    encoded = encode(EVERY_TYPE, columns)
    data = b"".join(encoded.pieces)
    assert (encoded.rows, encoded.nbytes) == (rows, len(data))
    layout = checked(data, EVERY_TYPE, rows)
    for (name, kind), start in zip(EVERY_TYPE.fixed.items(), layout.fixed, strict=True):
        assert data[start : start + rows * kind.row_bytes] == columns[name].tobytes()
    for name, (offsets_at, data_at) in zip(EVERY_TYPE.variable, layout.variable, strict=True):
        offsets = np.frombuffer(data, np.int32, rows + 1, offsets_at)
        assert offsets.tolist() == columns[name].offsets.tolist()
        content = bytes(columns[name].data)
        assert data[data_at : data_at + len(content)] == content


def test_arrows_own_reader_reads_every_type():
    columns = columns_of(EVERY_TYPE, 9)
    reader = pa.ipc.open_file(pa.py_buffer(file_bytes(EVERY_TYPE, columns)))
    assert reader.num_record_batches == 1
    batch = reader.get_batch(0)
    batch.validate(full=True)
    assert batch.schema.equals(EVERY_TYPE.arrow)
    for name, kind in EVERY_TYPE.fixed.items():
        column = batch.column(name)
        values = column.values if kind.is_list else column
        raw = np.frombuffer(values.buffers()[1], np.uint8)[: columns[name].nbytes]
        assert raw.tobytes() == columns[name].tobytes()
    text = bytes(columns["name"].data).decode()
    assert "".join(batch.column("name").to_pylist()) == text
    assert b"".join(batch.column("data").to_pylist()) == bytes(columns["data"].data)
    lengths = np.diff(columns["ragged_int32"].offsets).tolist()
    assert [len(value) for value in batch.column("ragged_int32").to_pylist()] == lengths


def test_the_pieces_refer_to_the_callers_memory():
    columns = {"x": np.arange(10_000, dtype=np.int64)}
    encoded = encode(ac.Schema({"x": ac.Tensor("int64")}), columns)
    columns["x"][5] = -12345
    assert struct.pack("<q", -12345) in b"".join(encoded.pieces)


def test_the_checksums_in_the_footer_are_xxh3_of_each_buffer():
    import xxhash

    columns = {"x": np.arange(6, dtype=np.int64).reshape(2, 3)}
    data = file_bytes(ac.Schema({"x": ac.Tensor("int64", (3,))}), columns)
    stored = pa.ipc.open_file(pa.py_buffer(data)).metadata[segment.CHECKSUM_KEY].decode().split()
    offsets = np.array([0, 3, 6], np.int32)
    assert stored == [xxhash.xxh3_64_hexdigest(offsets), xxhash.xxh3_64_hexdigest(columns["x"])]


def test_variable_columns_may_be_empty():
    schema = ac.Schema({"t": ac.String(), "b": ac.Binary(), "r": ac.Ragged("float64", (3,))})
    columns = {"t": variable([b""] * 3), "b": variable([b""] * 3), "r": variable([b""] * 3)}
    layout = checked(file_bytes(schema, columns), schema, 3)
    assert len(layout.variable) == 3


def test_full_segments_of_one_schema_have_one_layout_whatever_they_hold():
    layouts = {
        checked(file_bytes(EVERY_TYPE, columns_of(EVERY_TYPE, 33, seed)), EVERY_TYPE, 33).fixed
        for seed in range(4)
    }
    assert len(layouts) == 1


@settings(max_examples=80, deadline=None)
@given(schemas(), st.integers(1, 300), st.integers(0, 99), st.sampled_from([0, 7, 10**15]))
def test_the_bound_bounds_the_file(schema, rows, seed, skipped):
    columns = columns_of(schema, rows, seed)
    variable_bytes = sum(len(columns[name].data) for name in schema.variable)
    nbytes = encode(schema, columns, skipped=skipped).nbytes
    bound = encoded_bytes_bound(schema, rows) + variable_bytes
    assert nbytes <= bound
    assert bound <= nbytes + 4096 + 256 * len(schema), "a loose bound would waste the segment"


@settings(max_examples=80, deadline=None)
@given(schemas(), st.integers(1, 200_000))
def test_max_rows_is_the_most_that_the_bound_allows(schema, segment_bytes):
    rows = max_rows(schema, segment_bytes)
    assert rows == 0 or encoded_bytes_bound(schema, rows) <= segment_bytes
    assert encoded_bytes_bound(schema, rows + 1) > segment_bytes


def test_elements_stay_below_arrows_offsets(monkeypatch):
    limit(monkeypatch, list_elements=100)
    assert max_rows(ac.Schema({"x": ac.Tensor("int8", (30,))}), 1 << 20) == 3
    assert max_rows(ac.Schema({"x": ac.Tensor("complex64", (30,))}), 1 << 20) == 1
    assert max_rows(ac.Schema({"x": ac.Tensor("int8")}), 1 << 20) == 100


def test_a_file_cut_at_any_length_is_refused():
    data = file_bytes(SMALL, columns_of(SMALL, 20))
    for length in range(len(data)):
        with pytest.raises(ac.CorruptSegmentError):
            checked(data[:length], SMALL, 20)


def test_a_file_full_of_zeros_is_refused():
    data = file_bytes(SMALL, columns_of(SMALL, 20))
    for zeroed in (bytes(len(data)), data[:512] + bytes(len(data) - 512), bytes(6) + data[6:]):
        with pytest.raises(ac.CorruptSegmentError):
            checked(zeroed, SMALL, 20)


@pytest.mark.slow
def test_a_flipped_byte_is_found_or_leaves_every_value_as_it_was():
    columns = columns_of(SMALL, 5)
    data = file_bytes(SMALL, columns)
    original = pa.ipc.open_file(pa.py_buffer(data)).read_all().to_pylist()
    unharmed = 0
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        buffer = pa.py_buffer(bytes(damaged))
        try:
            read_structure(buffer, SMALL, 5)
            check_bytes(buffer, SMALL)
        except ac.CorruptSegmentError:
            continue
        unharmed += 1
        batch = segment.open_batch(buffer, SMALL)
        labelled(batch, SMALL).validate(full=True)
        assert batch.to_pylist() == original, f"byte {position}"
    assert 0 < unharmed < len(data) / 2, "padding is all that may change"


@pytest.mark.parametrize("schema", [SMALL, EVERY_TYPE])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_structure_is_read_from_the_spans_of_headers_and_offsets_alone(schema, rows):
    """Each is told before it is read: what a disk does not give would end the process."""
    data = file_bytes(schema, columns_of(schema, rows))
    told = bytearray(b"\xff" * len(data))
    for start, nbytes in structure_spans(memoryview(told), rows):
        told[start : start + nbytes] = data[start : start + nbytes]
    assert read_structure(pa.py_buffer(bytes(told)), schema, rows) == read_structure(
        pa.py_buffer(data), schema, rows
    )
    if rows == 300:
        assert told.count(0xFF) > data.count(0xFF), "not all is told"


def test_spans_of_any_bytes_lie_in_them():
    data, chance = file_bytes(SMALL, columns_of(SMALL, 5)), random.Random(0)
    for _ in range(2000):
        damaged = bytearray(data[: chance.choice([len(data), chance.randrange(len(data))])])
        for _ in range(chance.choice([0, 1, 5])):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.choice([0, 1, 0x7F, 0xFF])
        for start, nbytes in structure_spans(memoryview(damaged), 5):
            assert 0 <= start <= start + nbytes <= len(damaged)


@pytest.mark.slow
def test_what_passes_the_structure_check_is_safe_to_read_whatever_its_bytes():
    data = file_bytes(SMALL, columns_of(SMALL, 5))
    chance = random.Random(0)
    passed = 0
    for _ in range(4000):
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 5])):
            damaged[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        buffer = pa.py_buffer(bytes(damaged))
        try:
            layout = read_structure(buffer, SMALL, 5)
        except ac.CorruptSegmentError:
            continue
        passed += 1
        assert all(0 <= start <= len(data) for start in layout.fixed)
        batch = labelled(segment.open_batch(buffer, SMALL), SMALL)
        batch.validate()
        for name in ("n", "x", "r"):  # text may have become invalid UTF-8, whose bytes are still there
            batch.column(name).to_pylist()
        batch.column("t").cast(pa.binary()).to_pylist()
    assert passed > 100


def test_a_negative_number_of_elements_is_refused_even_where_none_are_needed():
    schema = ac.Schema({"r": ac.Ragged("int32")})
    data = bytearray(file_bytes(schema, {"r": variable([b""] * 3, 4)}))
    at = data.index(struct.pack("<qqqq", 3, 0, 0, 0))  # length and nulls of the list, then of its elements
    data[at + 16 : at + 24] = struct.pack("<q", -1)
    with pytest.raises(ac.CorruptSegmentError):
        read_structure(pa.py_buffer(bytes(data)), schema, 3)


def test_what_a_footer_says_its_checksum_is_cannot_write_to_a_terminal():
    data = file_bytes(NUMBERS, {"x": np.arange(3)})
    digest = pa.ipc.open_file(pa.py_buffer(data)).metadata[segment.CHECKSUM_KEY]
    hostile = pa.py_buffer(data.replace(digest, b"\x1b[2J".ljust(len(digest), b"\x07")))
    with pytest.raises(ac.CorruptSegmentError) as caught:
        check_bytes(hostile, NUMBERS)
    assert str(caught.value).isprintable()


def test_offsets_that_do_not_begin_at_zero_are_refused():
    schema = ac.Schema({"r": ac.Ragged("int32")})
    data = bytearray(file_bytes(schema, {"r": variable([bytes(8), bytes(4)], 4)}))
    at = data.index(struct.pack("<iii", 0, 2, 3))
    data[at] = 1
    with pytest.raises(ac.CorruptSegmentError, match="rise"):
        read_structure(pa.py_buffer(bytes(data)), schema, 2)


def test_another_number_of_rows_than_stated_is_refused():
    data = file_bytes(SMALL, columns_of(SMALL, 5))
    for rows in (4, 6):
        with pytest.raises(ac.CorruptSegmentError, match=f"5 rows.*{rows}"):
            read_structure(pa.py_buffer(data), SMALL, rows)


def foreign(batches, schema=None, options=None):
    """A file that another Arrow writer made."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema or batches[0].schema, options=options) as file:
        for batch in batches:
            file.write_batch(batch)
    return sink.getvalue()


NUMBERS = ac.Schema({"x": ac.Tensor("int64")})


def numbers(values, arrow_schema=NUMBERS.arrow):
    return pa.RecordBatch.from_arrays([pa.array(values, pa.int64())], schema=arrow_schema)


def test_a_foreign_file_of_the_very_same_structure_passes_but_lacks_checksums():
    file = foreign([numbers([1, 2, 3])])
    assert read_structure(file, NUMBERS, 3).rows == 3
    with pytest.raises(ac.CorruptSegmentError, match="0 checksums"):
        check_bytes(file, NUMBERS)


def with_dictionary():
    """A file with a dictionary, which Arrow reads together with the first record batch."""
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    return foreign([pa.RecordBatch.from_arrays([words], names=["x"])])


def test_files_of_another_structure_are_refused():
    plain = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    other = ac.Schema({"y": ac.Tensor("int64")}).arrow
    for file, reason in [
        (foreign([numbers([1, 2]), numbers([3])]), "2 record batches"),
        (foreign([], NUMBERS.arrow), "0 record batches"),
        (foreign([numbers([1, 2, 3], plain)]), "another schema"),
        (foreign([numbers([1, 2, 3], other)]), "another schema"),
        (foreign([numbers([1, None, 3], NUMBERS.arrow)]), "nulls"),
        (
            foreign([numbers(list(range(3)))], options=pa.ipc.IpcWriteOptions(compression="zstd")),
            "is compressed",
        ),
        (with_dictionary(), "dictionaries"),
    ]:
        with pytest.raises(ac.CorruptSegmentError, match=reason):
            checked(bytes(file), NUMBERS, 3)


def test_a_compressed_body_is_refused_before_memory_is_taken_for_it():
    rows = 1 << 24
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    file = foreign([numbers(np.zeros(rows, np.int64))], options=options)
    assert file.size < 1 << 20
    peak = pa.default_memory_pool().max_memory()
    with pytest.raises(ac.CorruptSegmentError, match="compressed"):
        read_structure(file, NUMBERS, rows)
    assert pa.default_memory_pool().max_memory() == peak


def test_another_byte_order_is_another_schema():
    data = file_bytes(NUMBERS, {"x": np.arange(3)})
    as_it_is = pa.ipc.IpcReadOptions(ensure_native_endian=False)
    swapped = 0
    for position in range(
        0, len(data) - 1, 2
    ):  # a schema's byte order is left out: point its slot at something
        altered = pa.py_buffer(data[:position] + b"\4\0" + data[position + 2 :])
        try:
            native, kept = pa.ipc.open_file(altered), pa.ipc.open_file(altered, options=as_it_is)
        except (pa.ArrowException, OSError):
            continue
        if native.schema.equals(NUMBERS.arrow) and not kept.schema.equals(NUMBERS.arrow):
            swapped += 1
            with pytest.raises(ac.CorruptSegmentError, match="another schema"):
                read_structure(altered, NUMBERS, 3)
    assert swapped


def test_a_buffer_that_a_header_says_is_elsewhere_is_refused():
    schema = ac.Schema({"a": ac.Tensor("int64"), "b": ac.Tensor("int64"), "t": ac.String()})
    columns = {"a": np.arange(8), "b": np.arange(8), "t": variable([b"abcdefgh"] * 8)}
    data = file_bytes(schema, columns)
    layout = read_structure(pa.py_buffer(data), schema, 8)
    places = [*layout.fixed, *layout.variable[0]]
    base = layout.fixed[0]
    buffers = data.index(struct.pack("<qqqq", 0, 0, 0, 64), 0, base)  # (offset, length), validity first
    for place, number in zip(places, (1, 3, 5, 6), strict=True):
        at = buffers + 16 * number
        assert data[at : at + 8] == struct.pack("<q", place - base)
        for moved in {*places, *(place + by for by in (-64, -8, 8, 64))} - {place}:
            altered = data[:at] + struct.pack("<q", moved - base) + data[at + 8 :]
            with pytest.raises(ac.CorruptSegmentError):
                read_structure(pa.py_buffer(altered), schema, 8)


def test_tensors_with_uneven_lists_are_refused():
    schema = ac.Schema({"x": ac.Tensor("int8", (2,))})
    kind = schema.arrow.field("x").type
    for values in ([[1], [2, 3, 4]], [[1, 2, 3], [4, 5, 6]], [[], []]):
        batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], schema=schema.arrow)
        with pytest.raises(ac.CorruptSegmentError):
            read_structure(foreign([batch]), schema, 2)


def test_ragged_offsets_within_an_entry_are_refused():
    schema = ac.Schema({"x": ac.Ragged("int8", (2,))})
    kind = schema.arrow.field("x").type
    batch = pa.RecordBatch.from_arrays([pa.array([[1], [2, 3, 4]], kind)], schema=schema.arrow)
    with pytest.raises(ac.CorruptSegmentError, match="rise"):
        read_structure(foreign([batch]), schema, 2)


def test_labels_show_tensors_as_fixed_shape_tensors_without_a_copy():
    columns = columns_of(EVERY_TYPE, 4)
    data = pa.py_buffer(file_bytes(EVERY_TYPE, columns))
    batch = labelled(segment.open_batch(data, EVERY_TYPE), EVERY_TYPE)
    assert batch.schema.names == list(EVERY_TYPE)
    batch.validate(full=True)
    for dtype in DTYPES:
        tensor = batch.column(f"tensor_{dtype}")
        pair = (2,) if dtype.startswith("complex") else ()
        assert tuple(tensor.type.shape) == (3, 5, *pair)
        values = tensor.to_numpy_ndarray()
        assert values.tobytes() == columns[f"tensor_{dtype}"].tobytes()
        address = tensor.storage.flatten().buffers()[1].address
        assert data.address <= address < data.address + data.size
    assert tuple(batch.column("scalar_complex64").type.shape) == (2,)
