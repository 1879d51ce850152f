"""Reverb, DeepMind's replay server: a Table in the memory of a server in this process, and its Dataset.

What `write` leaves is a checkpoint of the table, which the server of `loader` loads: the rows are in memory
from then on. As its documentation says, rows are written by a TrajectoryWriter, and read by a
TrajectoryDataset with two to three batches in flight, which batches by itself.

A table that is sampled uniformly gives rows with replacement, and one that removes what was sampled has no
second epoch: so an "epoch" is as many rows as the table has, drawn at random, of which about two in three are
different, and there is no unshuffled one. `workers` is the number of threads that fetch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Batch, Workload


def _server(folder: Path, workload: Workload) -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb
    import tensorflow as tf

    table = reverb.Table(
        name="rows",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=workload.rows,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={
            "x": tf.TensorSpec((workload.columns,), tf.float32),
            "y": tf.TensorSpec((), tf.int64),
        },
    )
    checkpointer = reverb.platform.checkpointers_lib.DefaultCheckpointer(path=str(folder / "checkpoint"))
    return reverb.Server(tables=[table], checkpointer=checkpointer)


def write(folder: Path, workload: Workload) -> None:
    server = _server(folder, workload)
    client = server.localhost_client()
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:
        for x, y in workload.samples():
            writer.append({"x": x, "y": y})
            writer.create_item("rows", 1.0, {"x": writer.history["x"][-1], "y": writer.history["y"][-1]})
            writer.flush(block_until_num_items=64)
        writer.flush()
    client.checkpoint()
    server.stop()


class _Epochs:
    """Each `iter` is as many batches as an epoch would have."""

    def __init__(self, batches: Any, count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(self._batches, self._count)


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    if not shuffled:
        raise ValueError("a table that is read again and again has no order to be read in")
    server = _server(folder, workload)
    import reverb

    dataset = reverb.TrajectoryDataset.from_table_signature(
        server_address=f"localhost:{server.port}",
        table="rows",
        max_in_flight_samples_per_worker=3 * workload.batch_rows,
        num_workers_per_iterator=max(1, workers),
    )
    batches = dataset.map(lambda sample: (sample.data["x"], sample.data["y"]))
    batches = batches.batch(workload.batch_rows, drop_remainder=True).prefetch(2)
    try:
        yield _Epochs(batches.as_numpy_iterator(), workload.rows // workload.batch_rows)
    finally:
        server.stop()
