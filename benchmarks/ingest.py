"""How fast do samplers publish, against plain write() of the same bytes?

Question: a SamplerPool whose samplers yield ready arrays of 64 KiB, into a cache on tmpfs and on
disk, against as many processes that write() the same bytes to plain files in 64 MiB calls.
Method: 2 workers, 1 GiB a turn, worker processes started before the clock; turns interleaved,
medians; the files of a turn are deleted before the next.
Run: `python -m benchmarks.ingest`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import loky
import numpy as np

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import machine

ROW_BYTES = 65536
SEGMENT_BYTES = 64 << 20
SEGMENTS = 16
WORKERS = 2
REPEATS = 15

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


sample.ramp = False  # type: ignore[attr-defined]  # as much as `write` writes


def write_plain(folder: str, number: int) -> None:
    data = block().data.cast("B")
    fd = os.open(Path(folder) / f"{number}.bin", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        written = 0
        while written < len(data):
            written += os.write(fd, data[written:])
    finally:
        os.close(fd)


def warm(_: int) -> int:
    block()
    time.sleep(0.2)
    return os.getpid()


def measure(folder: Path, executor: Executor) -> tuple[float, float]:
    """(publishing, plain writing) in GB/s."""
    publishing, writing = [], []
    schema = ac.Schema({"x": ac.Tensor("float32", (ROW_BYTES // 4,))})
    for _ in range(REPEATS):
        cache = ac.Cache.create(folder / "cache", schema, capacity="8GB", segment_bytes=SEGMENT_BYTES)
        started = time.perf_counter()
        with ac.SamplerPool(cache, sample, workers=WORKERS, executor=executor, segments=SEGMENTS) as pool:
            pool.wait()
            nbytes = pool.stats().bytes
        publishing.append(nbytes / (time.perf_counter() - started) / 1e9)
        cache.close()
        shutil.rmtree(folder / "cache")
        (folder / "plain").mkdir()
        started = time.perf_counter()
        list(executor.map(write_plain, [str(folder / "plain")] * SEGMENTS, range(SEGMENTS)))
        writing.append(SEGMENTS * SEGMENT_BYTES / (time.perf_counter() - started) / 1e9)
        shutil.rmtree(folder / "plain")
    return statistics.median(publishing), statistics.median(writing)


def main() -> None:
    print(machine())
    print(f"{'on':>6} {'publish GB/s':>13} {'write GB/s':>11} {'ratio':>6}")
    ratios = {}
    with loky.ProcessPoolExecutor(WORKERS) as executor:
        list(executor.map(warm, range(2 * WORKERS)))
        for name, parent in (("tmpfs", "/dev/shm"), ("disk", None)):
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                published, written = measure(Path(folder), executor)
                print(f"{name:>6} {published:13.2f} {written:11.2f} {published / written:6.2f}")
                ratios[f"{name}: publishing over write"] = published / written
    remember("ingest", ratios)


if __name__ == "__main__":
    from benchmarks import ingest  # noqa: PLW0406  # what is pickled from __main__ starts anew each task

    ingest.main()
