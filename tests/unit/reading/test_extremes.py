"""Sizes at the edges: tiny and huge rows, many rows, columns and segments, against a plain Arrow reader."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from helpers import columns_of, in_child, segment_files

import arrowcache as ac
from arrowcache.arrow.schema import DTYPES
from arrowcache.arrow.segment import encode, read_structure
from arrowcache.native.maps import count as mapped_files
from arrowcache.storage.layout import segment_name
from arrowcache.storage.mapping import FileMapping

GIB = 1 << 30


def create(path, schema, rows, segment_bytes="1MiB", capacity="256MiB"):
    return ac.Cache.create(path, schema, capacity=capacity, segment_bytes=segment_bytes, segment_rows=rows)


def place(cache, encoded, zeros=0):
    """Publish one segment past the writer; pieces of at least `zeros` bytes stay holes, if any are given."""
    folder = cache.store.folder
    record = folder.read_record()
    path = folder.segments / segment_name(record.next_seq, encoded.rows, "")
    with path.open("wb", buffering=0) as file:
        for piece in encoded.pieces:
            if zeros and piece.nbytes >= zeros:
                file.seek(piece.nbytes, os.SEEK_CUR)
            else:
                file.write(piece)
    folder.write_record(replace(record, next_seq=record.next_seq + 1))
    return path


def fill(cache, parts):
    """Random segments of so many rows."""
    for seed, rows in enumerate(parts):
        place(cache, encode(cache.schema, columns_of(cache.schema, rows, seed)))


def stored(cache, name):
    """All rows of a fixed-width column, by a plain Arrow reader: (rows, bytes of a row) uint8."""
    parts = []
    for path in segment_files(cache):
        with pa.OSFile(str(path)) as file:
            batch = pa.ipc.open_file(file).get_batch(0)
        column = batch.column(name)
        values = column.values if pa.types.is_list(column.type) else column
        raw = np.frombuffer(values.buffers()[1], np.uint8)
        parts.append(raw[: batch.num_rows * cache.schema[name].row_bytes].reshape(batch.num_rows, -1))
    return np.concatenate(parts)


def assert_reads_like_a_plain_reader(cache, *, batches=(1, 7, 1500)):
    rng = np.random.default_rng(0)
    expected = {name: stored(cache, name) for name in cache.schema}
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        assert len(snapshot) == len(next(iter(expected.values())))
        for count in batches:
            for ids in (rng.integers(0, len(snapshot), count), np.arange(len(snapshot))[-count:]):
                got = snapshot.gather(ids)
                for name, rows in expected.items():
                    raw = got[name].reshape(len(ids), -1).view(np.uint8).reshape(len(ids), -1)
                    np.testing.assert_array_equal(raw, rows[ids], err_msg=name)
    with ac.Loader(cache, 50, drop_last=False, with_ids=True) as loader:
        firsts = np.cumsum([0, *(segment.rows for segment in cache.store.segments())])
        seen = []
        for batch in loader:
            ids = firsts[batch["_seq"]] + batch["_row"]
            for name, rows in expected.items():
                raw = batch[name].reshape(len(ids), -1).view(np.uint8).reshape(len(ids), -1)
                assert np.array_equal(raw, rows[ids]), name
            seen += ids.tolist()
    assert sorted(seen) == list(range(firsts[-1]))


MANY = {
    f"c{i}": ac.Tensor(dtype, [(), (3,), (2, 5), (129,), (1,)][i % 5]) for i, dtype in enumerate(DTYPES * 25)
}


@pytest.mark.parametrize(
    ("schema", "rows", "parts"),
    [
        ({"x": ac.Tensor("uint8")}, 1000, [1000, 1000, 1, 999, 1000]),
        ({"x": ac.Tensor("bool")}, 1000, [1000, 1000, 1, 999, 1000]),
        ({"x": ac.Tensor("int8", (3,))}, 500, [500, 3, 500]),
        ({f"x{size}": ac.Tensor("float32", (size,)) for size in (1001, 501, 2001)}, 40, [40, 40, 9, 40, 1]),
        pytest.param(MANY, 7, [7, 7, 7, 2, 7], marks=pytest.mark.slow),
    ],
    ids=["bytes", "bools", "three bytes", "odd columns", "hundreds of columns"],
)
def test_rows_of_any_width_and_number_of_columns(tmp_path, schema, rows, parts):
    cache = create(tmp_path / "cache", ac.Schema(schema), rows, "2MiB")
    fill(cache, parts)
    assert_reads_like_a_plain_reader(cache, batches=(1, 30, 256))


def test_what_was_mapped_of_several_wide_columns_is_unmapped(tmp_path):
    widths = {"a": ac.Tensor("float32", (129,)), "b": ac.Tensor("float32", (131,)), "n": ac.Tensor("int64")}
    cache = create(tmp_path / "cache", ac.Schema(widths), 1100, "2MiB")
    fill(cache, [1100, 1100, 17, 1100, 600, 1099, 1])
    assert_reads_like_a_plain_reader(cache)
    with cache.snapshot() as snapshot:
        before = mapped_files()
        snapshot.map_all()
        assert mapped_files() - before == 7
    assert mapped_files() == before
    with open("/proc/self/maps") as maps:
        assert str(cache.path) not in maps.read()


@pytest.mark.slow
def test_more_rows_than_an_int32_counts(tmp_path):
    """65 segments of 2**25 rows of one byte, most of them one file under many names."""
    rows = 1 << 25
    if shutil.disk_usage(tmp_path).free < GIB:
        pytest.skip("less than 1 GiB of disk is free")
    schema = ac.Schema({"x": ac.Tensor("uint8")})
    cache = create(tmp_path / "cache", schema, rows, "33MiB", "8GiB")
    pattern = (np.arange(rows) % 251).astype(np.uint8)
    first = place(cache, encode(schema, {"x": pattern}))
    for seq in range(1, 63):
        os.link(first, first.with_name(segment_name(seq, rows, "")))
    record = cache.store.folder.read_record()
    cache.store.folder.write_record(replace(record, next_seq=63))
    for seq in (63, 64):
        place(cache, encode(schema, {"x": pattern + np.uint8(seq)}))
    with cache.snapshot() as snapshot:
        assert len(snapshot) == 65 * rows > 2**31
        edge = np.array([2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 65 * rows - 1, 0, rows - 1, rows])
        ids = np.r_[edge, np.random.default_rng(0).integers(0, 65 * rows, 700)]
        assert snapshot.map_all() == len(snapshot)
        got = snapshot.gather(ids)["x"]
        added = np.where(ids // rows >= 63, ids // rows, 0)
        np.testing.assert_array_equal(got, ((ids % rows % 251) + added).astype(np.uint8))
        found = snapshot.locate(edge)
        assert found["_seq"].tolist() == (edge // rows).tolist()
        assert found["_row"].tolist() == (edge % rows).tolist()
        with pytest.raises(IndexError):
            snapshot.gather([65 * rows])
    with ac.Loader(cache, 64, epoch_rows=640, with_ids=True) as loader:
        batches = list(loader)
    seqs, at = (np.concatenate([batch[name] for batch in batches]) for name in ("_seq", "_row"))
    values = np.concatenate([batch["x"] for batch in batches])
    np.testing.assert_array_equal(values, ((at % 251) + np.where(seqs >= 63, seqs, 0)).astype(np.uint8))
    assert len(set(zip(seqs.tolist(), at.tolist(), strict=True))) == 640


@pytest.mark.slow
def test_a_row_of_a_gibibyte(tmp_path):
    if shutil.disk_usage(tmp_path).free < 2 * GIB:
        pytest.skip("less than 2 GiB of disk is free")
    schema = ac.Schema({"x": ac.Tensor("uint8", (GIB,)), "y": ac.Tensor("int64")})
    cache = create(tmp_path / "cache", schema, 1, GIB + (1 << 20), "8GiB")
    path = place(cache, encode(schema, {"x": np.zeros((1, GIB), np.uint8), "y": np.array([7])}), zeros=GIB)
    marks = {0: 1, 4095: 2, 2**29: 3, GIB - 1: 4}
    start = read_structure(FileMapping(path).buffer(), schema, 1).fixed[0]
    with path.open("r+b", buffering=0) as file:
        for at, value in marks.items():
            file.seek(start + at)
            file.write(bytes([value]))
    with cache.snapshot() as snapshot:
        got = snapshot.gather([0])
    assert got["y"].tolist() == [7]
    assert got["x"].shape == (1, GIB)
    assert {at: int(got["x"][0, at]) for at in marks} == marks
    assert np.count_nonzero(got["x"].view(np.uint64)) == len(marks)


def test_the_oldest_segments_may_be_unmapped_while_the_newest_are_read(tmp_path):
    """Nothing of a segment is read that no row asked for: it would be a segmentation fault, so a child."""
    schema = ac.Schema({"a": ac.Tensor("float32", (768,)), "b": ac.Tensor("float32", (768,))})
    cache = create(tmp_path / "cache", schema, 10, "512KiB")
    fill(cache, [10, 10, 3, 10])
    expected = stored(cache, "b")

    def child():
        with cache.snapshot() as snapshot:
            snapshot.map_all()
            snapshot.gather(range(33))
            snapshot.release_oldest(2)
            ids = np.r_[np.random.default_rng(0).integers(23, 33, 300), 20:23]
            np.testing.assert_array_equal(snapshot.gather(ids)["b"].view(np.uint8), expected[ids])

    with in_child(child):
        pass


@pytest.mark.slow
def test_16_000_segments_are_read_whole_and_every_row_once(tmp_path):
    schema = ac.Schema({"id": ac.Tensor("int64")})
    with create(tmp_path / "cache", schema, 3, segment_bytes="16KiB", capacity="1GiB") as cache:
        for seq in range(16_000):
            place(cache, encode(schema, {"id": np.arange(2 + seq % 2) + 3 * seq}))  # of two lengths
        expected = [number for number in range(48_000) if number % 6 != 2]
        with cache.snapshot() as snapshot, ac.Loader(cache, 1000, drop_last=False) as loader:
            assert snapshot.gather(np.arange(len(snapshot)))["id"].tolist() == expected
            for _ in range(2):
                assert sorted(np.concatenate([batch["id"] for batch in loader])) == expected
