"""How fast does `arrowcache.torch.Loader` deliver shuffled batches, and at what CPU cost?

Question: batches of 64 KiB and 1 KiB rows with shuffle="rows", against a memcpy of the same bytes
in the same run (contiguous blocks of the same mapped files into one batch-sized slot); CPU
seconds of the whole process per GB delivered.
Method: 1 GiB in 64 MiB segments on disk, page cache warm; one epoch a turn, after one that is not
counted; cases take turns; medians. The consumer takes each batch and drops it.
Run: `python -m benchmarks.loader`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import arrowcache.torch
from benchmarks.history import remember
from benchmarks.measure import cpu_seconds, filled_cache, machine, mapped_files, random_blocks

TOTAL_BYTES = 1 << 30
REPEATS = 9


def measure(row_bytes: int, batch_rows: int) -> dict[str, list[float]]:
    """GB/s of loader and memcpy, CPU seconds per GB of the loader, of each turn."""
    with tempfile.TemporaryDirectory() as folder:
        cache = filled_cache(Path(folder) / "cache", row_bytes, TOTAL_BYTES)
        blocks = random_blocks(mapped_files(cache), batch_rows * row_bytes, TOTAL_BYTES // 4)
        slot = np.empty(batch_rows * row_bytes, np.uint8)
        rates: dict[str, list[float]] = {"loader": [], "memcpy": [], "cpu": []}
        with arrowcache.torch.Loader(cache, batch_rows) as loader:
            for turn in range(REPEATS + 1):
                started, used, nbytes = time.perf_counter(), cpu_seconds(), 0
                for batch in loader:
                    nbytes += batch["x"].nbytes
                seconds, used = time.perf_counter() - started, cpu_seconds() - used
                copying = time.perf_counter()
                for block in blocks:
                    np.copyto(slot, block)
                copying = time.perf_counter() - copying
                if turn:
                    rates["loader"].append(nbytes / seconds / 1e9)
                    rates["cpu"].append(used / (nbytes / 1e9))
                    rates["memcpy"].append(len(blocks) * slot.nbytes / copying / 1e9)
        cache.close()
    return rates


def main() -> None:
    print(machine())
    print(f"{'row':>8} {'batch':>6} {'loader GB/s':>12} {'memcpy GB/s':>12} {'ratio':>6} {'CPU s/GB':>9}")
    ratios = {}
    for row_bytes, batch_rows in ((65536, 64), (65536, 256), (1024, 64), (1024, 1024), (1024, 4096)):
        rates = measure(row_bytes, batch_rows)
        loader, memcpy, cpu = (statistics.median(rates[name]) for name in ("loader", "memcpy", "cpu"))
        pairs = zip(rates["loader"], rates["memcpy"], strict=True)
        ratios[f"{row_bytes} bytes, {batch_rows} rows: loader over memcpy"] = [a / b for a, b in pairs]
        print(f"{row_bytes:8} {batch_rows:6} {loader:12.2f} {memcpy:12.2f} {loader / memcpy:6.2f} {cpu:9.3f}")
    remember("loader", ratios)


if __name__ == "__main__":
    main()
