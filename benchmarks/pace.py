"""What does keeping a pace cost a loader?

Method: 1 GiB of 64 KiB rows in 8 MiB segments, page cache warm; a consumer that copies each batch and works
on it until it takes 2 GB/s, and never makes up for a wait; in turns, in one process: a loader that keeps a
pace that never makes it wait, and one with paced=False, 10 runs of 8 epochs each. The overhead is the ratio
of the pairs' times less 1: its mean, and the 95 % interval of that (Student's t of 10 runs).
Run: `python -m benchmarks.pace`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import filled_cache, machine

ROW_BYTES, TOTAL_BYTES, BATCH_ROWS = 65536, 1 << 30, 64
BYTES_PER_SECOND = 2e9
RUNS, EPOCHS = 10, 8
T_OF_10 = 2.262


def seconds(loader: ac.Loader, target: np.ndarray) -> float:
    """What so many epochs take."""
    started = time.perf_counter()
    for _ in range(EPOCHS):
        for batch in loader:
            came = time.perf_counter()
            np.copyto(target, batch["x"])
            while time.perf_counter() - came < target.nbytes / BYTES_PER_SECOND:
                pass
    return time.perf_counter() - started


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        cache = filled_cache(Path(folder) / "cache", ROW_BYTES, TOTAL_BYTES, "8MiB")
        cache.set_pace(ac.Pace(min_rows=1, samples_per_insert=1, max_reuse=10**6, tolerance=1e12))
        with ac.Loader(cache, BATCH_ROWS) as paced, ac.Loader(cache, BATCH_ROWS, paced=False) as free:
            target = np.empty_like(next(iter(free))["x"])
            for loader in (paced, free):
                seconds(loader, target)
            pairs = [(seconds(paced, target), seconds(free, target)) for _ in range(RUNS)]
        rates = [cache.stats().rows * ROW_BYTES * EPOCHS / with_pace / 1e9 for with_pace, _ in pairs]
    remember("pace", {"rate with a pace over without": [free / paced for paced, free in pairs]})
    overhead = [100 * (with_pace / without - 1) for with_pace, without in pairs]
    spread = T_OF_10 * statistics.stdev(overhead) / RUNS**0.5
    print(f"at {statistics.median(rates):.2f} GB/s")
    print(f"overhead {statistics.mean(overhead):+.2f} % +- {spread:.2f} % (95 %, {RUNS} pairs)")


if __name__ == "__main__":
    main()
