"""tensorflow-io reads segments whose wide columns begin at pages, after gaps; and our backends do."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from helpers import segment_files
from tensorflow_backends import NO_READER, every_backend

import arrowcache as ac
from arrowcache.tensorflow import dataset

ROWS = 30
SCHEMA = ac.Schema(
    {"id": ac.Tensor("int64"), "a": ac.Tensor("uint8", (4096,)), "b": ac.Tensor("float32", (2048,))}
)
TYPES = (tf.int64, tf.uint8, tf.float32)
SHAPES = tuple(tf.TensorShape(shape) for shape in ([], [4096], [2048]))


def row_of(number):
    rng = np.random.default_rng(number)
    return {"id": number, "a": rng.integers(0, 256, 4096, np.uint8), "b": rng.random(2048, np.float32)}


@pytest.fixture
def cache(tmp_path):
    with ac.Cache.create(tmp_path / "cache", SCHEMA, "4MiB", "256KiB", segment_rows=10) as cache:
        with cache.writer() as writer:
            for number in range(ROWS):
                writer.append(row_of(number))
        yield cache


def assert_rows(rows):
    count = 0
    for number, row in enumerate(rows):
        for value, wanted in zip(row, row_of(number).values(), strict=True):
            assert np.array_equal(value, wanted)
        count += 1
    assert count == ROWS


@pytest.mark.skipif(bool(NO_READER), reason=NO_READER)
def test_tensorflow_io_reads_batches_and_files(cache):
    from tensorflow_io.arrow import ArrowDataset, ArrowFeatherDataset

    columns = tuple(range(len(SCHEMA)))
    files = segment_files(cache)
    batches = [pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0) for path in files]
    assert_rows(ArrowDataset.from_record_batches(batches, TYPES, SHAPES, columns))
    assert_rows(ArrowFeatherDataset([str(path) for path in files], columns, TYPES, SHAPES))


def test_a_column_is_a_run_of_records_of_fixed_length(cache):
    """So any TensorFlow reads it from the file, told only where it begins and how much is after it."""
    found = []
    for path in segment_files(cache):
        file = pa.py_buffer(path.read_bytes())
        start = pa.ipc.open_file(file).get_batch(0)["b"].buffers()[-1].address - file.address
        assert start % 4096 == 0
        records = tf.data.FixedLengthRecordDataset(str(path), 8192, start, file.size - start - 10 * 8192)
        found += [tf.io.decode_raw(record, tf.float32).numpy() for record in records]
    assert np.array_equal(found, [row_of(number)["b"] for number in range(ROWS)])


@every_backend
def test_each_backend_reads_them(cache, backend):
    batches = dataset(cache, 10, shuffle=None, backend=backend)
    assert_rows((row["id"], row["a"], row["b"]) for row in batches.unbatch())


@every_backend
def test_nothing_that_tensorflow_reads_is_freed_before(cache, backend):
    """The empty file at the end of an epoch was: its memory had other bytes by then."""
    batches = dataset(cache, 10, shuffle=None, columns=["id"], backend=backend)
    others = [pa.allocate_buffer(nbytes) for nbytes in range(64, 8192, 64) for _ in range(8)]
    for other in others:
        memoryview(other).cast("B")[:] = b"\xff" * other.size
    for _ in range(2):
        assert [number for batch in batches for number in batch["id"].numpy()] == [*range(ROWS)]
