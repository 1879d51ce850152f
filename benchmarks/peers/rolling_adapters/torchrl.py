"""torchrl: samplers' processes extend one shared replay buffer, in memory-mapped files of fixed size.

LazyMemmapStorage under ReplayBuffer(shared=True), as https://docs.pytorch.org/rl/stable/reference/data.html
has it for several processes; prefetch is refused by shared buffers. The oldest row is overwritten by the next
one. Sampling is torchrl's default, with replacement. It has as many rows as fit into the capacity beside the
files that it keeps with them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.footprint import Footprint
from benchmarks.peers.stream import Plan, Running, fill, pool_of, publishing
from benchmarks.peers.workload import Batch

_INDEX_BYTES = 1 << 20  # what is left to a storage for what is not rows and labels


@contextmanager
def running(folder: Path, plan: Plan, counters: Any) -> Iterator[Running]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, ReplayBuffer

    most_rows = (plan.capacity_bytes - _INDEX_BYTES) // (plan.row_bytes + 8)
    storage = LazyMemmapStorage(most_rows, scratch_dir=folder / "storage")
    buffer = ReplayBuffer(storage=storage, batch_size=plan.batch_rows, shared=True)
    x, y = np.empty((1, plan.columns), np.float32), np.zeros(1, np.int64)
    fill(x, y, pool_of(plan), 0.0)
    # This makes the files, which all processes then map.
    buffer.extend(TensorDict({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, [1]))
    with publishing("torchrl", buffer, plan, counters) as published_bytes:
        yield Running(
            handle=buffer,
            published_bytes=published_bytes,
            waited_seconds=None,
            used_bytes=Footprint(folder).bytes,
            limit_bytes=plan.capacity_bytes,
        )


@contextmanager
def writer(handle: Any, _: Plan) -> Iterator[Callable[..., None]]:
    import torch
    from tensordict import TensorDict

    def put(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        handle.extend(TensorDict({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, [len(x)]))

    torch.set_num_threads(1)
    yield put


class _Reading:
    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __iter__(self) -> Iterator[Batch]:
        while True:
            batch = self._buffer.sample()
            yield batch["x"], batch["y"]

    def stall_seconds(self) -> float:
        return math.nan


def reader(handle: Any, _: Plan) -> contextlib.AbstractContextManager[_Reading]:
    return contextlib.nullcontext(_Reading(handle))
