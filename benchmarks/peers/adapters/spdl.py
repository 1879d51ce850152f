"""SPDL: a pipeline whose threads gather batches out of a mapped `.npy` file.

A stage that gathers a batch was faster than one that copies a row, with an `aggregate` after it. One pipeline
serves all epochs (`continuous`), as its page on execution models says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters import memmap
from benchmarks.peers.workload import Batch, Workload

write = memmap.write


class _Orders:
    """Each `iter` is the batches of an epoch: the numbers of their rows."""

    def __init__(self, workload: Workload, *, shuffled: bool) -> None:
        self._workload = workload
        self._random = np.random.default_rng() if shuffled else None

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        rows, batch_rows = self._workload.rows, self._workload.batch_rows
        order = np.arange(rows) if self._random is None else self._random.permutation(rows)
        return (order[start : start + batch_rows] for start in range(0, rows - batch_rows + 1, batch_rows))


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[Iterable[Batch]]:
    from spdl.pipeline import PipelineBuilder

    x, y = (np.asarray(np.load(folder / name, mmap_mode="r")) for name in ("x.npy", "y.npy"))
    threads = max(1, workers)

    def gather(rows: NDArray[np.int64]) -> Batch:
        return np.take(x, rows, axis=0), np.take(y, rows)

    pipeline = (
        PipelineBuilder()
        .add_source(_Orders(workload, shuffled=shuffled), continuous=True)
        .pipe(gather, concurrency=threads, output_order="input")
        .add_sink(3)
        .build(num_threads=threads)
    )
    with pipeline.auto_stop():
        yield pipeline
