"""The benchmarks of publishing that fit the harness: of sampler processes, of one durable writer, of a Ray
cluster.

Their processes find these functions by name: a module of its own, which imports little.
Run: `python -m benchmarks NAME`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import arrowcache as ac
from benchmarks.harness import Options, Round, scratch, seconds_of

MIB = 1 << 20
ROW_BYTES, SEGMENT_BYTES, WORKERS = 65536, 64 << 20, 2
SCHEMA = ac.Schema({"x": ac.Tensor("float32", (ROW_BYTES // 4,))})
PLACES = (("tmpfs", "/dev/shm"), ("disk", None))
STORE_BYTES, WARM_SEGMENTS, IN_FLIGHT = 1 << 30, 4, WORKERS + 2  # as many as a pool has


def random_rows(nbytes: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).random((nbytes // ROW_BYTES, ROW_BYTES // 4), dtype=np.float32)


@once
def block() -> NDArray[np.float32]:
    """One segment's worth of random rows, made once a process."""
    return random_rows(SEGMENT_BYTES)


def sample(_: np.random.Generator) -> Iterator[dict[str, Any]]:
    for row in block():
        yield {"x": row}


sample.ramp = False  # type: ignore[attr-defined]  # full segments, as in the plain files


def write_file(path: str, rows: NDArray[np.float32] | None = None, folder: int | None = None) -> None:
    """Write rows, or a block's, with plain write(). folder: a descriptor; the file and it are synced."""
    left = (block() if rows is None else rows).data.cast("B")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while left:
            left = left[os.write(fd, left) :]
        if folder is not None:
            os.fsync(fd)
            os.fsync(folder)
    finally:
        os.close(fd)


def warm(_: int) -> int:
    block()
    time.sleep(0.2)
    return os.getpid()


def seconds_of_a_pool(cache: ac.Cache, sampler: Any, workers: int, executor: Any, segments: int) -> float:
    """From the making of a pool until it has published so many segments, and has ended."""

    def publish() -> None:
        with ac.SamplerPool(cache, sampler, workers=workers, executor=executor, segments=segments) as pool:
            pool.wait()

    return seconds_of(publish)


def ingest(options: Options) -> Iterator[Round]:
    """How fast do samplers publish, against plain write() of the same bytes?

    Question: a SamplerPool whose samplers yield ready arrays of 64 KiB, into a cache on tmpfs and on disk,
    against as many processes that write() the same bytes to plain files in 64 MiB calls.
    Method: 2 workers, 1 GiB a turn, worker processes started before the clock; the files of a turn are
    deleted before the next.
    """
    import loky

    segments = options.of(16)
    with loky.ProcessPoolExecutor(WORKERS) as executor:
        list(executor.map(warm, range(2 * WORKERS)))
        for place, parent in PLACES:
            with scratch(parent or options.folder) as folder:

                def publish(folder: Path = folder) -> float:
                    with ac.Cache.create(folder / "cache", SCHEMA, "8GB", SEGMENT_BYTES) as cache:
                        seconds = seconds_of_a_pool(cache, sample, WORKERS, executor, segments)
                    shutil.rmtree(folder / "cache")
                    return seconds

                def write(folder: Path = folder) -> float:
                    (folder / "plain").mkdir()
                    paths = [str(folder / "plain" / str(number)) for number in range(segments)]
                    seconds = seconds_of(lambda: list(executor.map(write_file, paths)))
                    shutil.rmtree(folder / "plain")
                    return seconds

                ways = {"publishing": publish, "write": write}
                yield Round(place, ways, ["write"], segments * SEGMENT_BYTES / 1e9, turns=15, warm=0)


def durable(options: Options) -> Iterator[Round]:
    """What does durable=True cost a writer?

    Question: publishing segments of 1, 8 and 64 MiB into a cache made with and without durable=True,
    against plain files of as many bytes: written, and written and synced one by one, as a careful program
    would do that syncs the file and then its folder.
    Method: one process; rows of 64 KiB, ready in memory, appended a segment at a time; each way with a
    folder of its own on the disk (`--folder`), which is emptied and synced (`sync`) before the clock
    starts, so that nobody pays for another one's dirty pages.
    """
    for nbytes, count in ((1 * MIB, 64), (8 * MIB, 24), (64 * MIB, 6)):
        rows, segments = random_rows(nbytes), options.of(count)
        with scratch(options.folder) as folder:
            ways = {
                "write and fsync": partial(write, folder / "turn", rows, segments, synced=True),
                "default": partial(publish, folder / "turn", rows, segments, durable=False),
                "durable": partial(publish, folder / "turn", rows, segments, durable=True),
                "write": partial(write, folder / "turn", rows, segments, synced=False),
            }
            over, amount = ["write and fsync", "default"], segments * nbytes / 1e9
            yield Round(f"{nbytes // MIB} MiB", ways, over, amount, warm=0)


def publish(folder: Path, rows: NDArray[np.float32], segments: int, *, durable: bool) -> float:
    """Seconds for so many full segments."""
    capacity, bound = (segments + 4) * rows.nbytes + (64 << 20), rows.nbytes + MIB
    with ac.Cache.create(folder, SCHEMA, capacity, bound, segment_rows=len(rows), durable=durable) as cache:
        with cache.writer() as writer:
            os.sync()
            started = time.perf_counter()
            for _ in range(segments):
                writer.extend(x=rows)  # full: published at once
            seconds = time.perf_counter() - started
        assert cache.stats().segments == segments
    shutil.rmtree(folder)
    return seconds


def write(folder: Path, rows: NDArray[np.float32], segments: int, *, synced: bool) -> float:
    """Seconds for so many plain files of a segment's size."""
    folder.mkdir()
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.sync()
    started = time.perf_counter()
    for number in range(segments):
        write_file(str(folder / str(number)), rows, parent if synced else None)
    seconds = time.perf_counter() - started
    os.close(parent)
    shutil.rmtree(folder)
    return seconds


def engines(options: Options) -> Iterator[Round]:
    """How much of what Ray's object store carries from node to node arrives in a cache?

    Question: samplers on one node of a Ray cluster whose rows of 64 KiB lie ready, published by
    `arrowcache.ray.SamplerPool` in the cache of another node, on tmpfs and on disk; against Ray alone:
    objects of the size of a segment, put by tasks on the one node and taken by an actor on the other, as
    many in flight.
    Method: two nodes on this machine, 2 workers, 64 MiB a segment, 16 segments a turn after those that
    start the workers. Drawing, check sums and writing the file are in the former's time only.
    """
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.getcwd()}
    segments = options.of(16)
    head = {"num_cpus": WORKERS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        other = cluster.add_node(num_cpus=WORKERS, object_store_memory=STORE_BYTES)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        source, there = (On(node.node_id, soft=False) for node in (cluster.head_node, other))
        sink = ray.remote(Sink).options(num_cpus=0, scheduling_strategy=there).remote()
        ways = {"Ray alone": partial(carry, source, sink, segments)}
        for place, parent in PLACES:
            ways[f"{place}: publishing"] = partial(publish_there, parent, source, other.node_id, segments)
        amount = segments * SEGMENT_BYTES / 1e9
        yield Round("into", ways, ["Ray alone"], amount, turns=5, warm=0, key="{way} over {over}")
    finally:
        ray.shutdown()
        cluster.shutdown()


class Sink:
    """Takes objects, as the actor of a node does."""

    def take(self, array: NDArray[np.float32]) -> int:
        return array.nbytes


def ready() -> NDArray[np.float32]:
    return block()


def carry(source: Any, sink: Any, segments: int) -> float:
    """Seconds of Ray alone, after some segments."""
    import ray

    put = ray.remote(ready).options(scheduling_strategy=source, num_cpus=1)
    seconds = 0.0
    for count in (WARM_SEGMENTS, segments):
        started = time.perf_counter()
        pending: list[Any] = []
        for _ in range(count):
            if len(pending) == IN_FLIGHT:
                _, pending = ray.wait(pending, num_returns=1)
            pending.append(sink.take.remote(put.remote()))
        ray.get(pending)
        seconds = time.perf_counter() - started
    return seconds


def publish_there(parent: str | None, source: Any, node: str, segments: int) -> float:
    """Seconds in which segments arrive in a cache of a node, after some others."""
    from arrowcache.ray import NodeCaches, SamplerPool

    with scratch(parent) as folder:
        caches = NodeCaches(folder / "cache", SCHEMA, "3GB", SEGMENT_BYTES, nodes=[node])
        with SamplerPool(
            caches, sample, workers=WORKERS, segments=WARM_SEGMENTS + segments,
            options={"scheduling_strategy": source}, progress=False,
        ) as pool:  # fmt: skip
            pool.wait(segments=WARM_SEGMENTS)
            before, started = pool.stats(), time.perf_counter()
            pool.wait()
            seconds = time.perf_counter() - started
            return segments * SEGMENT_BYTES * seconds / (pool.stats().bytes - before.bytes)
