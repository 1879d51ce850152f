"""`arrowcache.tensorflow.dataset`: the same rows, of every type, through each backend."""

from __future__ import annotations

import itertools
import os
import sys
import types
import warnings

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from helpers import DTYPES, EVERY_TYPE, nearly_full
from tensorflow_backends import (
    NO_READER,
    arrow,
    every_backend,
    ids_of,
    make_cache,
    publish,
)
from tracing import writes_and_locks

import arrowcache as ac
from arrowcache.reading.columns import Values
from arrowcache.tensorflow import dataset
from arrowcache.tensorflow.arrow_backend import Frames, PaddedBuffers
from arrowcache.tensorflow.columns import columns_of


@pytest.fixture
def cache(tmp_path):
    """160 rows in segments of 16."""
    with make_cache(tmp_path / "cache", 160) as cache:
        yield cache


@every_backend
def test_shapes_are_static(tmp_path, backend):
    full = ac.Cache.create(tmp_path / "full", EVERY_TYPE, "64MiB", "64KiB")
    spec = dataset(full, 16, backend=backend).element_spec
    for dtype in DTYPES:
        assert spec[f"scalar_{dtype}"] == tf.TensorSpec((16,), tf.as_dtype(dtype))
        assert spec[f"tensor_{dtype}"] == tf.TensorSpec((16, 3, 5), tf.as_dtype(dtype))
        assert spec[f"ragged_{dtype}"] == tf.RaggedTensorSpec((16, None), tf.as_dtype(dtype), 1, tf.int64)
    assert spec["name"] == tf.TensorSpec((16,), tf.string)
    assert spec["when"] == tf.TensorSpec((16,), tf.int64)
    assert spec["boxes"] == tf.RaggedTensorSpec((16, None, 4), tf.float32, 1, tf.int64)
    spec = dataset(full, 16, backend=backend, drop_remainder=False, columns=["tensor_bool"]).element_spec
    assert spec == {"tensor_bool": tf.TensorSpec((None, 3, 5), tf.bool)}


@every_backend
def test_an_epoch_has_every_row_unless_somebody_writes(tmp_path, backend):
    cache = nearly_full(tmp_path / "nearly-full")
    batches = dataset(cache, 100, columns=["id"], drop_remainder=False, backend=backend)
    assert sorted(ids_of(batches)) == list(range(5000))
    with cache.writer(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert sorted(ids_of(batches)) == list(range(2656, 5000))
    assert sorted(ids_of(batches)) == list(range(5000))


def fit(batches, cache, **arguments):
    """Have Keras fit while 32 rows more are published after each epoch. Returns: the ids that each saw."""
    keras, epochs = tf.keras, []

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            epochs.append([])

        def on_epoch_end(self, epoch, logs=None):
            publish(cache, 160 + 32 * epoch, 192 + 32 * epoch)

    class Model(keras.Sequential):
        def train_step(self, data):
            epochs[-1] += data[1].numpy().astype(int).tolist()
            return super().train_step(data)

    model = Model([keras.layers.Input((16,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", run_eagerly=True)
    pairs = batches.map(lambda batch: (batch["x"], tf.cast(batch["id"], tf.float32)))
    model.fit(pairs, callbacks=[Watch()], verbose=0, shuffle=False, **arguments)  # True is Keras' default
    return epochs


@every_backend
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # of any unknown length
def test_each_epoch_of_keras_is_of_a_new_snapshot(cache, backend):
    epochs = fit(dataset(cache, 16, backend=backend), cache, epochs=3)
    assert sorted(epochs[0]) == list(range(160))
    for number, epoch in enumerate(epochs[1:], 1):  # Keras ends them at the length of the first
        assert len(set(epoch)) == len(epoch) >= 160
        assert 160 <= max(epoch) < 160 + 32 * number


@every_backend
def test_keras_by_steps_sees_all_of_a_growing_cache(cache, backend):
    epochs = fit(dataset(cache, 16, backend=backend).repeat(), cache, epochs=3, steps_per_epoch=12)
    seen = [number for epoch in epochs for number in epoch]
    assert len(seen) == 3 * 12 * 16
    assert sorted(seen[:160]) == list(range(160))
    assert set(range(192)) <= set(seen) <= set(range(224))


@every_backend
def test_a_loop_of_ones_own(cache, backend):
    weights = tf.Variable(tf.zeros((16, 1)))

    @tf.function
    def epoch(batches):
        rows = tf.constant(0)
        for batch in batches:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((batch["x"] @ weights - 1.0) ** 2)
            weights.assign_sub(1e-7 * tape.gradient(loss, weights))
            rows += tf.shape(batch["x"])[0]
        return rows

    batches = dataset(cache, 16, backend=backend)
    assert [int(epoch(batches)) for _ in range(2)] == [160, 160]
    assert weights.numpy().any()


@every_backend
def test_what_an_ended_iteration_still_delivers_is_its_own(cache, backend):
    epoch = ids_of(dataset(cache, 4, backend=backend, seed=3))
    batches = dataset(cache, 4, backend=backend, seed=3, prefetch=0)
    older = iter(batches)
    delivered = ids_of([next(older) for _ in range(2)])
    newer = iter(batches)
    list(itertools.islice(newer, 30))
    with pytest.raises(tf.errors.OpError, match="a newer one began"):
        delivered.extend(number for batch in older for number in ids_of([batch]))
    assert delivered == epoch[: len(delivered)]


@pytest.mark.parametrize("backend", [arrow])
def test_frames_are_not_overwritten_when_an_error_ends_their_iteration(cache, backend, monkeypatch):
    """TensorFlow reads them until it drops the iteration. Here the test takes its place."""
    epochs, make = [], tf.data.Dataset.from_generator

    def watched(epoch, **options):
        epochs.append(epoch)
        return make(epoch, **options)

    monkeypatch.setattr(tf.data.Dataset, "from_generator", watched)
    batches = dataset(cache, 4, backend=backend)
    (epoch,) = epochs
    first, second = epoch(), epoch()
    of_first = [places for places, _ in itertools.islice(first, 2)]
    of_second = [places for places, _ in itertools.islice(second, 2)]
    with pytest.raises(RuntimeError, match="a newer one began"):
        of_first.extend(places for places, _ in first)
    third = epoch()
    of_third = [places for places, _ in itertools.islice(third, 2)]
    # Of an iteration TensorFlow holds two frames; older ones may be written again.
    live = [place for frames in (of_first, of_second, of_third) for place in np.concatenate(frames[-2:])]
    assert len(live) == len({*live})
    assert sorted(ids_of(batches)) == list(range(160))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "tfio"}, ValueError, "'auto', 'arrow', 'native'"),
        ({"columns": ["y"]}, ValueError, "unknown column 'y'"),
        ({"shuffle": True}, ValueError, "shuffle=True is unknown"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"prefetch": -1}, ValueError, "prefetch"),
        ({"drop_remainder": 1}, TypeError, "drop_remainder"),
        ({"columns": {"id": abs}}, TypeError, "columns must be a list of names here"),
        ({"rank": 0}, ValueError, "world_size"),
    ],
)
def test_a_wrong_argument_fails_at_once(cache, arguments, error, words):
    with pytest.raises(error, match=words):
        dataset(cache, **arguments)


@every_backend
def test_a_column_that_tensorflow_cannot_hold_is_named(tmp_path, backend):
    """Of what a cache can hold that is only one of too many dimensions."""
    schema = {"id": ac.Tensor("int64"), "deep": ac.Ragged("int8", (1,) * 253)}
    with ac.Cache.create(tmp_path / "deep", schema, "1MiB", "16KiB") as cache:
        with pytest.raises(ac.SchemaError, match=r"cannot hold column 'deep'.*255 dimensions.*columns="):
            dataset(cache, 4, backend=backend)
        assert list(dataset(cache, 4, backend=backend, columns=["id"]).element_spec) == ["id"]


class Long(bytes):
    """Says that it is long, and is not."""

    def __new__(cls, length):
        self = super().__new__(cls)
        self.length = length
        return self

    def __len__(self):
        return self.length


@pytest.mark.parametrize("elements", [2**31, 2**32 + 5])
@pytest.mark.parametrize("name", ["x", "text"])
def test_a_batch_beyond_arrows_offsets_is_an_error(elements, name):
    """Which wrapped around. Not through a dataset: no test has so much memory."""
    ones = np.broadcast_to(np.uint8(1), elements)
    (column,) = columns_of(ac.Schema({"x": ac.Ragged("uint8")}), ["x"], 1, with_ids=False)
    values = Values(ones, np.array([0, elements]))
    if name == "text":
        (column,) = columns_of(ac.Schema({"text": ac.String()}), ["text"], 1, with_ids=False)
        values = [Long(elements)]
    with pytest.raises(ValueError, match=f"at most {2**31 - 1} elements .*not {elements}: lower batch_size"):
        Frames([column], [], PaddedBuffers()).write([{name: values}])


def test_a_missing_cache_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        dataset(tmp_path / "nothing")


@pytest.mark.skipif(not NO_READER, reason="tensorflow-io is there")
def test_arrow_without_its_reader_says_what_goes_together(cache):
    with pytest.raises(ImportError, match=r"tensorflow-io 0.37.1 and TensorFlow 2.16 go together"):
        dataset(cache, backend="arrow")
    assert dataset(cache).backend == "native"


def test_what_tensorflow_io_lacks_is_named(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_io", None)
    monkeypatch.setitem(sys.modules, "tensorflow_io.python.ops", None)
    with pytest.raises(ImportError, match=r"needs tensorflow-io, which is not installed; .* go together"):
        dataset(cache, backend="arrow")
    ops = types.ModuleType("tensorflow_io.python.ops")

    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="h5py")

    ops.__getattr__ = absent
    for name in ("tensorflow_io", "tensorflow_io.python"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    with pytest.raises(ImportError, match="needs also h5py, which is not installed"):
        dataset(cache, backend="arrow")


def test_a_reader_for_another_tensorflow_says_what_goes_together(cache, monkeypatch):
    class Library:
        @property
        def io_arrow_zero_copy_dataset(self):
            raise NotImplementedError("unable to open file: libtensorflow_io.so")

    ops = types.ModuleType("tensorflow_io.python.ops")
    ops.core_ops = Library()
    for name in ("tensorflow_io", "tensorflow_io.python"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, ops.__name__, ops)
    words = rf"into TensorFlow {tf.__version__} \(NotImplementedError\).* TensorFlow 2.16 go together"
    with pytest.raises(ImportError, match=words):
        dataset(cache, backend="arrow")
    assert dataset(cache).backend == "native"


@every_backend
def test_a_dataset_says_which_backend_it_has(cache, backend):
    assert dataset(cache, backend=backend).backend == backend


@pytest.mark.slow
def test_a_frozen_cache_on_a_read_only_mount_is_read_without_a_write_or_a_lock(cache):
    cache.freeze()
    code = """
        import sys
        from arrowcache.tensorflow import dataset

        batches = dataset(sys.argv[1], 16)
        for _ in range(2):
            assert len([*batches]) == 10
        """
    assert writes_and_locks(code, cache.path) == []
