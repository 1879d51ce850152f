"""For peers that read a data set from afar: an S3 endpoint on loopback, no faster than samplers publish.

It is tests/object_store.py, in a thread of the driver. Its answers share `in_rate`. Who reads from it needs
boto3 or obstore in its environment, the endpoint, and any key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.footprint import Footprint
from benchmarks.peers.stream import Plan, Running, fill, pool_of
from benchmarks.peers.workload import Batch, Samples
from tests.object_store import serve

BUCKET, PREFIX = "bucket", "data"
URI = f"s3://{BUCKET}/{PREFIX}"
LATENCY_SECONDS = 0.02  # of each answer
CREDENTIALS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}


def chunks(plan: Plan) -> Iterator[Samples]:
    """The data set in order, a block at a time; each is overwritten by the next. Its rows have no age."""
    pool = pool_of(plan)
    for start in range(0, plan.rows, plan.block_rows):
        ids = np.arange(start, min(start + plan.block_rows, plan.rows))
        x = np.empty((len(ids), plan.columns), np.float32)
        fill(x, ids, pool, 0.0)
        yield x, ids


@contextmanager
def served(folder: Path, plan: Plan, write: Callable[[Path, Plan], None]) -> Iterator[Running]:
    """Write the data set, and serve it; the peer may keep `capacity_bytes` of it in folder/local."""
    data, local = folder / "remote" / BUCKET / PREFIX, folder / "local"
    data.parent.mkdir(parents=True)
    local.mkdir()
    write(data, plan)
    with serve(folder / "remote", LATENCY_SECONDS, bytes_per_second=plan.in_rate) as store:

        def facts() -> dict[str, Any]:
            return {"requests": len(store.requests), "remote_bytes": Footprint(data).bytes()}

        yield Running(
            handle={"endpoint": f"http://127.0.0.1:{store.port}", "local": str(local)},
            published_bytes=store.read_bytes,
            waited_seconds=None,
            used_bytes=Footprint(local).bytes,
            limit_bytes=plan.capacity_bytes,
            facts=facts,
        )


class Reading:
    """One epoch after another of a peer whose batches are dicts, and which keeps no account of stalls."""

    def __init__(self, epochs: Iterable[dict[str, Any]]) -> None:
        self._epochs = epochs

    def __iter__(self) -> Iterator[Batch]:
        while True:
            for batch in self._epochs:
                yield batch["x"], batch["y"]

    def stall_seconds(self) -> float:
        return math.nan
