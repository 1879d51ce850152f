"""What users make of `arrowcache.tensorflow.dataset`: transformations of tf.data, Keras, tf.distribute."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import tensorflow as tf
from processes import Script
from tensorflow_backends import every_backend, ids_of, make_cache, wait_until_unleased

import arrowcache as ac
from arrowcache.tensorflow import dataset


@pytest.fixture
def cache(tmp_path):
    """64 rows in segments of 16."""
    with make_cache(tmp_path / "cache", 64) as cache:
        yield cache


EACH = list(range(64))


@every_backend
def test_transformations_log_no_error(cache, backend, capfd):
    """But one that is tensorflow-io's own."""
    batches = dataset(cache, 8, backend=backend)
    assert len(ids_of(batches.repeat(2).shuffle(4).map(lambda b: b).prefetch(2))) == 128
    errors = re.findall(r"(?m)^(?:E\d{4} |.* E tensorflow/).*", capfd.readouterr().err)
    assert [line for line in errors if "InputDatasets" not in line] == []


@every_backend
def test_transformations_deliver_each_row(cache, backend):
    def batches(**options):
        return dataset(cache, 8, backend=backend, **options)

    def numbered(batch):
        return {"id": batch["id"] + tf.cast(batch["x"][:, 0], tf.int64)}

    assert len(ids_of(batches().take(2))) == 16
    assert len(ids_of(batches().skip(2))) == 48
    assert sorted(ids_of(batches().repeat(3))) == sorted(EACH * 3)
    assert sorted(ids_of(batches().shuffle(4))) == EACH
    assert sorted(ids_of(batches().map(numbered, num_parallel_calls=4))) == [2 * n for n in EACH]
    assert sorted(ids_of(batches().rebatch(5))) == EACH
    assert sorted(ids_of(batches().unbatch().batch(10))) == EACH
    assert sorted(ids_of(batches().concatenate(batches()))) == sorted(EACH * 2)
    assert sorted(ids_of(batches().ignore_errors())) == EACH
    to_device = tf.data.experimental.prefetch_to_device("/CPU:0")
    assert sorted(ids_of(batches().apply(to_device))) == EACH
    assert [int(number) for number, _ in batches().enumerate()] == list(range(8))
    cached = batches().cache()
    assert sorted(ids_of(cached)) == EACH
    assert ids_of(cached) == ids_of(cached)
    wait_until_unleased(cache)


@every_backend
def test_two_datasets_of_a_cache_side_by_side(cache, backend):
    ordered = dataset(cache, 8, shuffle=None, backend=backend)
    both = list(tf.data.Dataset.zip((ordered, dataset(cache, 8, backend=backend))))
    assert ids_of(batch for batch, _ in both) == EACH
    assert sorted(ids_of(batch for _, batch in both)) == EACH
    wait_until_unleased(cache)


NAMES = ["a b", "ä", "class", "name", "x/y", "x:0", "^x", "_x", "0", "self", "args", "%s", "{}", "\n"]


@every_backend
def test_a_column_may_have_any_name(tmp_path, backend):
    schema = ac.Schema({name: ac.Tensor("int32") for name in NAMES})

    @tf.function
    def sums(batches):
        total = {name: tf.constant(0) for name in NAMES}
        for batch in batches:
            total = {name: total[name] + tf.reduce_sum(batch[name]) for name in NAMES}
        return total

    with ac.Cache.create(tmp_path / "names", schema, "1MiB", "16KiB") as cache:
        with cache.writer() as writer:
            for _ in range(8):
                writer.append(dict(zip(NAMES, range(len(NAMES)), strict=True)))
        got = sums(dataset(cache, 4, backend=backend))
        assert list(next(iter(dataset(cache, 4, backend=backend)))) == NAMES
    assert [int(got[name]) for name in NAMES] == [8 * number for number in range(len(NAMES))]


TEXTS = ["", "a\0b", "\0", "ä" * 300, "", "", "", "z"]


@every_backend
def test_texts_and_bytes_of_all_kinds(tmp_path, backend):
    """NUL, empty, all of a batch empty, and bytes that are no text."""
    data = [text.encode() + b"\xff\xfe\0" for text in TEXTS]
    with ac.Cache.create(
        tmp_path / "texts", {"text": ac.String(), "data": ac.Binary()}, "1MiB", "32KiB"
    ) as cache:
        with cache.writer() as writer:
            for text, item in zip(TEXTS, data, strict=True):
                writer.append(text=text, data=item)
        batches = list(dataset(cache, 2, shuffle=None, backend=backend))
    assert [text for batch in batches for text in batch["text"].numpy()] == [t.encode() for t in TEXTS]
    assert [item for batch in batches for item in batch["data"].numpy()] == data


@every_backend
def test_ragged_columns_with_inner_shapes_and_no_entries(tmp_path, backend):
    schema = ac.Schema(
        {"a": ac.Ragged("bfloat16", (2, 3)), "b": ac.Ragged("complex64", (2,)), "c": ac.Ragged("bool")}
    )
    lengths = [0, 0, 0, 0, 2, 0, 1, 3]
    with ac.Cache.create(tmp_path / "ragged", schema, "1MiB", "64KiB") as cache:
        with cache.writer() as writer:
            for n in lengths:
                a = np.full((n, 2, 3), 0x3F80, np.uint16)  # 1.0
                writer.append(a=a, b=np.full((n, 2), 1j, np.complex64), c=np.ones(n, bool))
        for drop_remainder in (True, False):
            options = {"shuffle": None, "backend": backend, "drop_remainder": drop_remainder}
            empty, full = dataset(cache, 4, **options)
            assert [column.row_lengths().numpy().tolist() for column in empty.values()] == [[0] * 4] * 3
            assert [column.row_lengths().numpy().tolist() for column in full.values()] == [[2, 0, 1, 3]] * 3
            assert full["a"].shape == (4, None, 2, 3)
            assert empty["a"].values.shape == (0, 2, 3)
            assert (tf.cast(full["a"].values, tf.float32).numpy() == 1).all()
            assert (full["b"].values.numpy() == 1j).all()
            assert full["c"].values.numpy().all()


@every_backend
def test_two_hundred_columns(tmp_path, backend):
    kinds = [ac.Tensor("int32"), ac.Tensor("bool", (3,)), ac.String(), ac.Ragged("float16")]
    names = [f"c{number}" for number in range(200)]
    row = [7, np.ones(3, bool), "text", np.ones(2, np.float16)]
    schema = ac.Schema({name: kinds[n % 4] for n, name in enumerate(names)})
    with ac.Cache.create(tmp_path / "wide", schema, "4MiB", "512KiB") as cache:
        with cache.writer() as writer:
            for _ in range(8):
                writer.append({name: row[n % 4] for n, name in enumerate(names)})
        for batch in dataset(cache, 4, backend=backend):
            assert list(batch) == names
            assert batch["c196"].numpy().tolist() == [7] * 4
            assert batch["c198"].numpy().tolist() == [b"text"] * 4
            assert batch["c199"].to_list() == [[1, 1]] * 4


# -- Keras -----------------------------------------------------------------------------------------


@every_backend
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # of any unknown length
def test_keras_fits_evaluates_and_predicts_on_dicts(cache, backend):
    keras = tf.keras
    x, number = keras.Input((16,), name="x"), keras.Input((), name="id", dtype="int64")
    model = keras.Model({"x": x, "id": number}, keras.layers.Dense(2)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def pairs(**options):
        batches = dataset(cache, 10, backend=backend, drop_remainder=False, **options)
        return batches.map(lambda batch: (batch, batch["id"] % 2))

    history = model.fit(
        pairs(),
        epochs=2,
        class_weight={0: 1.0, 1: 2.0},
        validation_data=pairs(shuffle=None, where=lambda segment: segment.seq == 0),
        shuffle=False,
        verbose=0,
    )
    assert np.isfinite(history.history["loss"] + history.history["val_loss"]).all()
    assert len(history.history["val_loss"]) == 2
    assert np.isfinite(model.evaluate(pairs(), verbose=0))
    inputs = dataset(cache, 10, backend=backend, drop_remainder=False, shuffle=None)
    rows = np.repeat(np.array(EACH, np.float32)[:, None], 16, 1)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), model.predict_on_batch({"x": rows, "id": np.array(EACH)}), rtol=1e-5
    )
    wait_until_unleased(cache)


# -- tf.distribute ---------------------------------------------------------------------------------


@every_backend
def test_two_replicas_divide_batches_and_each_row_comes_once(cache, backend):
    """In a process of its own: a second device must be declared before the first operation."""
    code = """
import sys
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from arrowcache.tensorflow import dataset

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def batches(context=None):
    parts = {} if context is None else {
        "rank": context.input_pipeline_id, "world_size": context.num_input_pipelines
    }
    return dataset(sys.argv[1], 8, backend=sys.argv[2], **parts)

def show(distributed):
    sizes, ids = set(), []
    for batch in distributed:
        replicas = [part.numpy().tolist() for part in strategy.experimental_local_results(batch["id"])]
        sizes.add(tuple(map(len, replicas)))
        ids += sum(replicas, [])
    print(sizes, sorted(ids) == list(range(64)), flush=True)

show(strategy.experimental_distribute_dataset(batches()))
show(strategy.distribute_datasets_from_function(batches))
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Input((16,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
pairs = batches().map(lambda batch: (batch["x"], batch["x"][:, :1])).repeat()
history = model.fit(pairs, epochs=2, steps_per_epoch=12, shuffle=False, verbose=0)
print(len(history.history["loss"]), flush=True)
"""
    with Script(code, cache.path, backend, new_interpreter=True) as script:
        assert script.line() == "{(4, 4)} True"
        assert script.line() == "{(8, 8)} True"
        assert script.line() == "2"
        assert script.end()[0] == 0
    assert cache.stats().leased_bytes == 0
