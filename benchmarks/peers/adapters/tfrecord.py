"""tf.data over TFRecord files of tf.train.Example, tuned as TensorFlow's guide to tf.data's performance says.

Files are read by a parallel interleave; batches are made before they are parsed, so that parsing is one
vectorised call a batch (`parse_example`, `decode_raw`); what is ready is prefetched; batches come out as
views of TensorFlow's memory (`as_numpy_iterator`). The order of files is drawn anew each epoch, and rows are
drawn from a buffer of 64 MiB.

tf.data has no worker processes: `workers` is how many threads it is given, as size of its private
thread pool and as `num_parallel_calls`; without workers that is left to tf.data itself (`AUTOTUNE`), as the
guide says. Its `cache`, which would keep the whole data set in memory, is not used: that is for what fits.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Batch, Workload

_FILE_BYTES = 64 << 20
_SHUFFLE_BYTES = 64 << 20
_BLOCK_ROWS = 16  # of one file at a time: less CPU than a row at a time


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    return tf


def write(folder: Path, workload: Workload) -> None:
    tf = _tensorflow()
    rows_per_file = max(workload.batch_rows, min(_FILE_BYTES, workload.nbytes // 4) // workload.row_bytes)
    file = None
    for number, (x, y) in enumerate(workload.samples()):
        if number % rows_per_file == 0:
            if file is not None:
                file.close()
            file = tf.io.TFRecordWriter(str(folder / f"{number // rows_per_file:05}.tfrecord"))
        features = {
            "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[x.tobytes()])),
            "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[int(y)])),
        }
        file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    if file is not None:
        file.close()


class _Epochs:
    """Each `iter` is an epoch of pairs of ndarrays."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._dataset.as_numpy_iterator())


def _batches(folder: Path, workload: Workload, workers: int, *, shuffled: bool) -> Any:
    tf = _tensorflow()
    threads = workers or tf.data.AUTOTUNE
    features = {"x": tf.io.FixedLenFeature((), tf.string), "y": tf.io.FixedLenFeature((), tf.int64)}

    def parse(batch: Any) -> tuple[Any, Any]:
        parsed = tf.io.parse_example(batch, features)
        return tf.io.decode_raw(parsed["x"], tf.float32), parsed["y"]

    files = tf.data.Dataset.list_files(str(folder / "*.tfrecord"), shuffle=shuffled)
    rows = files.interleave(
        tf.data.TFRecordDataset,
        cycle_length=4,
        block_length=_BLOCK_ROWS,
        num_parallel_calls=threads,
        deterministic=not shuffled,
    )
    if shuffled:
        rows = rows.shuffle(max(4 * workload.batch_rows, _SHUFFLE_BYTES // workload.row_bytes))
    batches = rows.batch(workload.batch_rows, drop_remainder=True)
    batches = batches.map(parse, num_parallel_calls=threads).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    if workers:
        options.threading.private_threadpool_size = workers
        options.threading.max_intra_op_parallelism = 1
    return batches.with_options(options)


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    yield _Epochs(_batches(folder, workload, workers, shuffled=shuffled))


def resume(
    folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    """With a checkpoint of the iterator, in which its shuffle buffer is."""
    tf = _tensorflow()
    epoch = iter(_batches(folder, workload, workers, shuffled=True))
    checkpoint = tf.train.Checkpoint(epoch=epoch)
    with tempfile.TemporaryDirectory() as temporary:
        if state is not None:
            for name, content in pickle.loads(state).items():
                Path(temporary, name).write_bytes(content)
            checkpoint.read(f"{temporary}/state").assert_consumed()
        rows = [int(row) for _, y in itertools.islice(epoch, batches) for row in y.numpy()]
        checkpoint.write(f"{temporary}/state")
        return rows, pickle.dumps({path.name: path.read_bytes() for path in Path(temporary).iterdir()})
