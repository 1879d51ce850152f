"""Grain over ArrayRecord: a record a row, a global shuffle by index, read-ahead in threads or processes.

Batches made by the reading threads were faster than rows read ahead and batched afterwards; as many threads
as Grain has by default, no slower than two.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.workload import Batch, Workload

_LABEL_BYTES = 8


def write(folder: Path, workload: Workload) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(folder / "data.arrayrecord"), "group_size:1,uncompressed")
    for x, y in workload.samples():
        writer.write(y.tobytes() + x.tobytes())
    writer.close()


def parse(record: bytes) -> Batch:
    return np.frombuffer(record, np.float32, offset=_LABEL_BYTES), np.frombuffer(record, np.int64, 1)[0]


class _Epochs:
    """Each `iter` is an epoch of one stream that repeats the data set, so that workers are started once."""

    def __init__(self, dataset: Any, batches: int) -> None:
        self._dataset, self._batches = dataset, batches
        self._stream: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        stream = self._stream or iter(self._dataset)
        self._stream = None  # an epoch that is abandoned gives its stream up
        for _ in range(self._batches):
            yield next(stream)
        self._stream = stream


def _batches(folder: Path, workload: Workload, workers: int, *, shuffled: bool) -> tuple[Any, int]:
    """A stream that repeats the data set, and how many of its batches are an epoch."""
    import grain

    source = grain.sources.ArrayRecordDataSource(str(folder / "data.arrayrecord"))
    rows = grain.MapDataset.source(source).seed(0)
    if shuffled:
        rows = rows.shuffle()
    batches = rows.map(parse).batch(workload.batch_rows, drop_remainder=True)
    stream = batches.repeat().to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=16))
    if workers:
        stream = stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return stream, len(batches)


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    yield _Epochs(*_batches(folder, workload, workers, shuffled=shuffled))


def resume(
    folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    """With the iterator's `get_state` and `set_state`, and the number of batches that were taken."""
    dataset, epoch = _batches(folder, workload, workers, shuffled=True)
    stream = iter(dataset)
    done = 0
    if state is not None:
        at, done = pickle.loads(state)
        stream.set_state(at)
    count = epoch - done if batches is None else batches
    rows = [int(row) for _, (_, y) in zip(range(count), stream, strict=False) for row in y]
    return rows, pickle.dumps((stream.get_state(), done + count))
