"""`arrowcache.tensorflow.dataset`: the same rows, of every type, through each backend."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from helpers import wait_until

import arrowcache as ac
from arrowcache.tensorflow import dataset
from arrowcache.tensorflow.arrow import find_reader

try:
    find_reader()
    NO_READER = ""
except ImportError as error:
    NO_READER = str(error)

arrow = pytest.param("arrow", marks=pytest.mark.skipif(bool(NO_READER), reason=NO_READER))
every_backend = pytest.mark.parametrize("backend", ["native", arrow])

DTYPES = [
    "bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
SCHEMA = ac.Schema(
    {"id": ac.Tensor("int64")}
    | {f"scalar_{dtype}": ac.Tensor(dtype) for dtype in DTYPES}
    | {f"tensor_{dtype}": ac.Tensor(dtype, (3, 5)) for dtype in DTYPES}
    | {f"ragged_{dtype}": ac.Ragged(dtype) for dtype in DTYPES}
    | {"boxes": ac.Ragged("float32", (4,)), "name": ac.String(), "data": ac.Binary(), "when": ac.Timestamp()}
)


def bits(rng, dtype, shape):
    """Values of a dtype that compare equal with themselves."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "bfloat16":
        return rng.integers(-50, 50, shape).astype(tf.bfloat16.as_numpy_dtype)
    if dtype.startswith("complex"):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    low = 0 if dtype.startswith("u") else -50
    return rng.integers(low, 50, shape).astype(dtype)


def sample(number):
    rng = np.random.default_rng(number)
    row = {"id": number, "name": "ä" * (number % 4) + str(number), "data": bytes(rng.bytes(number % 7))}
    row["when"] = np.datetime64(1_700_000_000_000_000 + number, "us")
    row["boxes"] = bits(rng, "float32", (number % 3, 4))
    for dtype in DTYPES:
        row[f"scalar_{dtype}"] = bits(rng, dtype, ())[()]
        row[f"tensor_{dtype}"] = bits(rng, dtype, (3, 5))
        row[f"ragged_{dtype}"] = bits(rng, dtype, number % 4)
    return row


@pytest.fixture
def rows():
    return {number: sample(number) for number in range(100)}


@pytest.fixture
def full(tmp_path, rows):
    """All types, in several segments."""
    with ac.Cache.create(tmp_path / "full", SCHEMA, "64MiB", "64KiB") as cache:
        with cache.writer() as writer:
            for row in rows.values():
                writer.append(row)
        yield cache


@pytest.fixture
def cache(tmp_path):
    """160 rows in segments of 16."""
    schema = ac.Schema({"id": ac.Tensor("int64"), "x": ac.Tensor("float32", (16,))})
    with ac.Cache.create(tmp_path / "cache", schema, "1MiB", "16KiB", 16) as cache:
        publish(cache, 0, 160)
        yield cache


def publish(cache, start, stop):
    ids = np.arange(start, stop)
    with cache.writer() as writer:
        writer.extend(id=ids, x=np.repeat(ids[:, None], 16, 1).astype(np.float32))


def ids_of(batches):
    return [number for batch in batches for number in batch["id"].numpy().tolist()]


def values_of(column):
    """One array a row."""
    if not isinstance(column, tf.RaggedTensor):
        return column.numpy()
    splits = column.row_splits.numpy()
    return np.split(column.values.numpy(), splits[1:-1])


def expected(value):
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.datetime64):
        return int(value.astype(np.int64))
    return value


@every_backend
@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_every_type_comes_out_as_it_was_written(full, rows, backend, drop_remainder, shuffle):
    batches = dataset(full, 16, shuffle=shuffle, backend=backend, drop_remainder=drop_remainder)
    seen = []
    for batch in batches:
        numbers = batch["id"].numpy().tolist()
        seen += numbers
        for name, column in batch.items():
            if name.startswith(("scalar_", "tensor_", "ragged_")):
                assert column.dtype == tf.as_dtype(SCHEMA[name].dtype)
            for got, number in zip(values_of(column), numbers, strict=True):
                np.testing.assert_array_equal(got, expected(rows[number][name]), err_msg=name)
    assert len(set(seen)) == len(seen) == (96 if drop_remainder else 100)
    wait_until(lambda: full.stats().leased_bytes == 0, "the lease is released")


@every_backend
def test_shapes_are_static(full, backend):
    spec = dataset(full, 16, backend=backend).element_spec
    assert spec["tensor_float32"] == tf.TensorSpec((16, 3, 5), tf.float32)
    assert spec["name"] == tf.TensorSpec((16,), tf.string)
    assert spec["when"] == tf.TensorSpec((16,), tf.int64)
    assert spec["boxes"] == tf.RaggedTensorSpec((16, None, 4), tf.float32, 1, tf.int64)
    spec = dataset(full, 16, backend=backend, drop_remainder=False, columns=["tensor_bool"]).element_spec
    assert spec == {"tensor_bool": tf.TensorSpec((None, 3, 5), tf.bool)}


@every_backend
def test_each_iteration_is_an_epoch_over_a_new_snapshot(cache, backend):
    batches = dataset(cache, 16, backend=backend)
    first = ids_of(batches)
    publish(cache, 160, 192)
    second = ids_of(batches)
    assert sorted(first) == list(range(160))
    assert sorted(second) == list(range(192))
    assert first != sorted(first)


@every_backend
def test_a_dropped_iterator_leaves_no_lease(cache, backend):
    batches = dataset(cache, 16, backend=backend)
    iterator = iter(batches)
    next(iterator)
    assert cache.stats().leased_bytes > 0
    del iterator
    gc.collect()
    wait_until(lambda: cache.stats().leased_bytes == 0, "the lease is released")
