"""What does durable=True cost a writer?

Question: publishing segments of 1, 8 and 64 MiB into a cache made with and without durable=True,
against plain files of as many bytes: written, and written and synced one by one, as a careful
program would do that syncs the file and then its folder.
Method: one process; rows of 64 KiB, ready in memory, appended a segment at a time; cases take
turns, each with a folder of its own on the disk, which is emptied and synced (`sync`) before the
clock starts, so that nobody pays for another one's dirty pages; medians; ratios within one run.
Run: `python -m benchmarks.durable [FOLDER]`, a folder on the disk in question.
Last result: durable over default 0.34 with segments of 1 MiB, 0.38 of 8 MiB, 0.5 to 1.0 of 64 MiB;
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import machine

MIB = 1 << 20
ROW_BYTES = 65536
SIZES = {1 * MIB: 64, 8 * MIB: 24, 64 * MIB: 6}  # bytes of a segment -> segments a turn
REPEATS = 9


def publish(folder: Path, rows: np.ndarray[Any, Any], segments: int, *, durable: bool) -> float:
    """Seconds for so many full segments."""
    schema = ac.Schema({"x": ac.Tensor("float32", (ROW_BYTES // 4,))})
    capacity = (segments + 4) * rows.nbytes + (64 << 20)
    bound = rows.nbytes + MIB
    cache = ac.Cache.create(folder, schema, capacity, bound, segment_rows=len(rows), durable=durable)
    with cache.writer() as writer:
        os.sync()
        started = time.perf_counter()
        for _ in range(segments):
            writer.extend(x=rows)  # full: published at once
        seconds = time.perf_counter() - started
    assert cache.stats().segments == segments
    return seconds


def write(folder: Path, rows: np.ndarray[Any, Any], segments: int, *, synced: bool) -> float:
    """Seconds for so many plain files of a segment's size."""
    folder.mkdir()
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.sync()
    started = time.perf_counter()
    for number in range(segments):
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o600)
        left = rows.data.cast("B")
        while left:
            left = left[os.write(fd, left) :]
        if synced:
            os.fsync(fd)
            os.fsync(parent)
        os.close(fd)
    seconds = time.perf_counter() - started
    os.close(parent)
    return seconds


CASES: dict[str, Callable[[Path, np.ndarray[Any, Any], int], float]] = {
    "default": lambda *arguments: publish(*arguments, durable=False),
    "durable": lambda *arguments: publish(*arguments, durable=True),
    "write": lambda *arguments: write(*arguments, synced=False),
    "write+fsync": lambda *arguments: write(*arguments, synced=True),
}


def measure(parent: Path, nbytes: int, segments: int, repeats: int) -> dict[str, float]:
    """Median seconds of each case; they take turns."""
    rows = np.random.default_rng(0).random((nbytes // ROW_BYTES, ROW_BYTES // 4), dtype=np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(repeats):
        for name, run in CASES.items():
            folder = parent / "turn"
            seconds[name].append(run(folder, rows, segments))
            shutil.rmtree(folder)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main(folder: str | None = None, sizes: dict[int, int] = SIZES, repeats: int = REPEATS) -> None:
    print(machine())
    print(f"{'segment':>8} {'':>12} {'segments/s':>10} {'GB/s':>6} {'of default':>10} {'of write+fsync':>14}")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        ratios = {}
        for nbytes, segments in sizes.items():
            seconds = measure(Path(name), nbytes, segments, repeats)
            for case, taken in seconds.items():
                print(
                    f"{nbytes // MIB:4} MiB {case:>12} {segments / taken:10.1f} "
                    f"{segments * nbytes / taken / 1e9:6.2f} {seconds['default'] / taken:10.2f} "
                    f"{seconds['write+fsync'] / taken:14.2f}"
                )
                ratios[f"{nbytes // MIB} MiB: {case} over write and fsync"] = seconds["write+fsync"] / taken
    remember("durable", ratios)


if __name__ == "__main__":
    main(*sys.argv[1:2])
