"""TFRecordFiles: samples of TFRecord files, drawn by tasks."""

from __future__ import annotations

import numpy as np
import pytest
from drawing import require_pure, take

import arrowcache as ac
from arrowcache.errors import SamplerError, SchemaError

tf = pytest.importorskip("tensorflow")

from arrowcache.tensorflow import TFRecordFiles, to_tfrecords  # noqa: E402  # after the skip

SCHEMA = ac.Schema({"id": ac.Tensor("int64"), "x": ac.Tensor("float32", (3,)), "name": ac.String()})


@pytest.fixture
def folder(tmp_path):
    """Four files of ten records."""
    with ac.Cache.create(tmp_path / "cache", SCHEMA, "1MiB", "16KiB", segment_rows=10) as cache:
        with cache.writer() as writer:
            for number in range(40):
                writer.append(id=number, x=np.full(3, number, np.float32), name=f"n{number}")
        to_tfrecords(cache, tmp_path / "records")
    return tmp_path / "records"


def test_samples_are_what_was_stored_and_tasks_are_pure(folder):
    source = TFRecordFiles(folder / "*.tfrecord", SCHEMA)
    seen = set()
    for sample in take(source, 400):
        number = int(sample["id"])
        seen.add(number)
        assert sample["name"] == f"n{number}"
        assert np.array_equal(sample["x"], np.full(3, number, np.float32))
    assert seen == set(range(40))
    require_pure(source)


def test_a_file_is_read_in_order_without_a_shuffle(folder):
    ids = [int(s["id"]) for s in take(TFRecordFiles(folder / "*.tfrecord", SCHEMA, shuffle=0), 10)]
    assert ids == list(range(ids[0], ids[0] + 10))


def test_bad_input_is_an_error_that_names_it(folder):
    with pytest.raises(FileNotFoundError, match="none"):
        TFRecordFiles(folder / "none", SCHEMA)
    with pytest.raises(ValueError, match="compression"):
        TFRecordFiles(folder / "*.tfrecord", SCHEMA, compression="zip")
    with pytest.raises(SchemaError, match=r"tfrecord, record 0.*'y'"):
        take(TFRecordFiles(folder / "*.tfrecord", {"y": ac.String()}), 1)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(SamplerError, match=r"tfrecord, record 9"):
        take(TFRecordFiles(folder / "*.tfrecord", SCHEMA), 10)
