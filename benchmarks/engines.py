"""How much of what Ray's object store carries from node to node arrives in a cache?

Question: samplers on one node of a Ray cluster whose rows of 64 KiB lie ready, published by
`arrowcache.ray.SamplerPool` in the cache of another node, on tmpfs and on disk; against Ray alone: objects of
the size of a segment, put by tasks on the one node and taken by an actor on the other, as many in flight.
Method: two nodes on this machine, 2 workers, 64 MiB a segment, 16 segments a turn after those that start the
workers; turns interleaved, medians. Drawing, check sums and writing the file are in the former's time only.
Run: `python -m benchmarks.engines`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import arrowcache as ac
from arrowcache.ray import NodeCaches, SamplerPool
from benchmarks.history import remember
from benchmarks.measure import machine

ROW_BYTES = 65536
SEGMENT_BYTES = 64 << 20
STORE_BYTES = 1 << 30
SEGMENTS = 16
WARM = 4
WORKERS = 2
IN_FLIGHT = WORKERS + 2  # as many as the pool has
REPEATS = 5

_block: np.ndarray[Any, Any] | None = None


def block() -> np.ndarray[Any, Any]:
    """One segment's worth of random rows, made once a process."""
    global _block
    if _block is None:
        rows = SEGMENT_BYTES // ROW_BYTES
        _block = np.random.default_rng(0).random((rows, ROW_BYTES // 4), dtype=np.float32)
    return _block


def sample(_: np.random.Generator) -> Iterator[dict[str, Any]]:
    for row in block():
        yield {"x": row}


sample.ramp = False  # type: ignore[attr-defined]  # segments as large as what Ray alone carries


class Sink:
    """Takes objects, as the actor of a node does."""

    def take(self, array: np.ndarray[Any, Any]) -> int:
        return array.nbytes


def transfer(source: Any, sink: Any) -> float:
    """GB/s of Ray alone."""
    put = ray.remote(block).options(scheduling_strategy=source, num_cpus=1)

    def carry(count: int) -> float:
        started = time.perf_counter()
        pending: list[Any] = []
        for _ in range(count):
            if len(pending) == IN_FLIGHT:
                _, pending = ray.wait(pending, num_returns=1)
            pending.append(sink.take.remote(put.remote()))
        ray.get(pending)
        return time.perf_counter() - started

    carry(WARM)
    return SEGMENTS * SEGMENT_BYTES / carry(SEGMENTS) / 1e9


def publish(folder: Path, source: Any, node: str) -> float:
    """GB/s that arrive in a cache."""
    schema = ac.Schema({"x": ac.Tensor("float32", (ROW_BYTES // 4,))})
    caches = NodeCaches(folder / "cache", schema, "3GB", SEGMENT_BYTES, nodes=[node])
    options = {"scheduling_strategy": source}
    with SamplerPool(
        caches, sample, workers=WORKERS, segments=WARM + SEGMENTS, options=options, progress=False
    ) as pool:
        pool.wait(segments=WARM)
        before, started = pool.stats(), time.perf_counter()
        pool.wait()
        return (pool.stats().bytes - before.bytes) / (time.perf_counter() - started) / 1e9


def main() -> None:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.getcwd()}
    print(machine(), "ray", ray.__version__)
    head = {"num_cpus": WORKERS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        other = cluster.add_node(num_cpus=WORKERS, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        source = NodeAffinitySchedulingStrategy(cluster.head_node.node_id, soft=False)
        there = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
        sink = ray.remote(Sink).options(num_cpus=0, scheduling_strategy=there).remote()
        carried: list[float] = []
        published: dict[str, list[float]] = {"tmpfs": [], "disk": []}
        for _ in range(REPEATS):
            carried.append(transfer(source, sink))
            for name, parent in (("tmpfs", "/dev/shm"), ("disk", None)):
                with tempfile.TemporaryDirectory(dir=parent) as folder:
                    published[name].append(publish(Path(folder), source, other.node_id))
        print(f"{'into':>6} {'publish GB/s':>13} {'Ray alone GB/s':>15} {'ratio':>6}")
        alone = statistics.median(carried)
        for name, each in published.items():
            print(f"{name:>6} {(rate := statistics.median(each)):13.2f} {alone:15.2f} {rate / alone:6.2f}")
        over = {name: [rate / alone for rate in each] for name, each in published.items()}
        remember("engines", {f"{name}: publishing over Ray alone": each for name, each in over.items()})
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    from benchmarks import engines  # noqa: PLW0406  # what is pickled from __main__ starts anew each task

    engines.main()
