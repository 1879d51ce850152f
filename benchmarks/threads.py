"""Do thread workers change the rate where there is no transform?

Question: `Loader(workers=2, worker_type="thread")` against `workers=1` and the default, batches of
1 KiB rows, shuffle="rows"; also one large batch a step (64 MiB). The engine's threads copy the rows, and
share a large batch; thread workers run transforms only. So all ratios should be 1.
Method: 1 GiB in 64 MiB segments, page cache warm; an epoch a turn, the cases take turns; medians,
and the median of the ratios of each turn. The consumer drops each batch.
Run: `python -m benchmarks.threads`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import filled_cache, machine

TOTAL_BYTES = 1 << 30
REPEATS = 7
WORKERS = (0, 1, 2)


def measure(row_bytes: int, batch_rows: int) -> dict[int, list[float]]:
    """GB/s of each number of workers, of each turn."""
    rates: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    with tempfile.TemporaryDirectory() as folder:
        cache = filled_cache(Path(folder) / "cache", row_bytes, TOTAL_BYTES)
        loaders = {n: ac.Loader(cache, batch_rows, workers=n, worker_type="thread") for n in WORKERS}
        for turn in range(REPEATS + 1):
            for workers, loader in loaders.items():
                started, nbytes = time.perf_counter(), 0
                for batch in loader:
                    nbytes += batch["x"].nbytes
                    del batch
                if turn:
                    rates[workers].append(nbytes / (time.perf_counter() - started) / 1e9)
        for loader in loaders.values():
            loader.close()
        cache.close()
    return rates


def main() -> None:
    print(machine())
    print(f"{'row':>8} {'batch':>6} {'default':>8} {'one':>8} {'two':>8}  two over one (of each turn)")
    found = {}
    for row_bytes, batch_rows in ((1024, 64), (1024, 1024), (1024, 4096), (1024, 65536), (65536, 64)):
        rates = measure(row_bytes, batch_rows)
        ratios = sorted(two / one for one, two in zip(rates[1], rates[2], strict=True))
        default, one, two = (statistics.median(rates[workers]) for workers in WORKERS)
        print(
            f"{row_bytes:8} {batch_rows:6} {default:8.2f} {one:8.2f} {two:8.2f}  "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        )
        found[f"{row_bytes} bytes, {batch_rows} rows: two threads over one"] = ratios
    remember("threads", found)


if __name__ == "__main__":
    main()
