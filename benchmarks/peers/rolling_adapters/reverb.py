"""dm-reverb: a server whose table holds so many rows and drops the oldest; samplers and trainer are clients.

https://github.com/google-deepmind/reverb#readme: `remover=Fifo`, `sampler=Uniform`, no rate limit but one
row; a TrajectoryWriter a sampler, a row an item; the trainer's rows come by TrajectoryDataset, with three
batches in flight, batched by tf.data. The server has no limit in bytes: what counts is the memory that its
process, here the driver's, has got since it was made, against `max_size` rows of the capacity.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.stream import Plan, Running, publishing
from benchmarks.peers.workload import Batch

TABLE = "rows"


def _resident_bytes() -> int:
    """Memory of this process that is no file's."""
    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()]
    return (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(_: Path, plan: Plan, counters: Any) -> Iterator[Running]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb
    import tensorflow as tf

    most_rows = plan.capacity_bytes // plan.row_bytes
    table = reverb.Table(
        name=TABLE,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=most_rows,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={
            "x": tf.TensorSpec([plan.columns], tf.float32),
            "y": tf.TensorSpec([], tf.int64),
        },
    )
    server = reverb.Server([table])
    before = _resident_bytes()
    try:
        address = f"127.0.0.1:{server.port}"
        with publishing("reverb", address, plan, counters) as published_bytes:
            yield Running(
                handle=address,
                published_bytes=published_bytes,
                waited_seconds=None,
                used_bytes=lambda: max(0, _resident_bytes() - before),
                limit_bytes=most_rows * plan.row_bytes,
                facts=lambda: {"rows_in_table": server.localhost_client().server_info()[TABLE].current_size},
            )
    finally:
        server.stop()


@contextmanager
def writer(handle: str, _: Plan) -> Iterator[Callable[..., None]]:
    import reverb

    with reverb.Client(handle).trajectory_writer(num_keep_alive_refs=1) as rows:

        def put(xs: np.ndarray[Any, Any], ys: np.ndarray[Any, Any]) -> None:
            for x, y in zip(xs, ys, strict=True):
                rows.append({"x": x, "y": y})
                rows.create_item(TABLE, 1.0, {"x": rows.history["x"][-1], "y": rows.history["y"][-1]})
            rows.flush(block_until_num_items=len(xs))  # what is on its way is bounded

        yield put


class _Reading:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Batch]:
        for sample in self._dataset.as_numpy_iterator():
            yield sample["x"], sample["y"]

    def stall_seconds(self) -> float:
        return math.nan


@contextmanager
def reader(handle: str, plan: Plan) -> Iterator[_Reading]:
    import reverb

    dataset = reverb.TrajectoryDataset.from_table_signature(
        handle, TABLE, max_in_flight_samples_per_worker=3 * plan.batch_rows
    )
    rows = dataset.map(lambda sample: sample.data)
    batches = rows.batch(plan.batch_rows, drop_remainder=True).prefetch(plan.prefetch)
    yield _Reading(batches)
