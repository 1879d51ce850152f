"""How much private memory does a loader need, over 16,000 segments and with large batches?

Question: growth of the process' private resident memory (RssAnon) over what it was after `import
arrowcache` and opening the cache: with all segments mapped, and after each of three epochs; beyond
the loader's slots, which are what the same loader takes for the same rows in 16 segments; and with batches of
4 MiB, 64 rows of 64 KiB, of 256 MiB in 4 segments.
Method: 64,000 rows of 1 KiB and a label, in 16,000 segments of 4 and in 16 of 4,000, in memory
(/dev/shm); a fresh process each; every epoch reads all. The page cache is not private memory.
Run: `python -m benchmarks.memory`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import arrowcache as ac
from arrowcache.reading.stats import resident_bytes
from benchmarks.measure import filled_cache, machine

ROWS = 64_000
SCHEMA = ac.Schema({"x": ac.Tensor("float32", (256,)), "y": ac.Tensor("int64")})


def fill(folder: Path, segment_rows: int) -> None:
    capacity, segment_bytes = "2GiB", 1200 * segment_rows + 8192
    cache = ac.Cache.create(folder, SCHEMA, capacity, segment_bytes, segment_rows)
    with cache.writer() as writer:
        for first in range(0, ROWS, 4000):
            writer.extend(x=np.ones((4000, 256), np.float32), y=np.arange(first, first + 4000))


def measure(folder: Path) -> None:
    """Print what this fresh process needs, in MB: with all mapped, and after each of three epochs."""
    cache = ac.Cache.open(folder)
    before = resident_bytes()[0]
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        grown = [resident_bytes()[0] - before]
    with ac.Loader(cache, 64) as loader:
        for _ in range(3):
            assert sum(len(batch["y"]) for batch in loader) == len(snapshot)
            grown.append(resident_bytes()[0] - before)
    print(*(nbytes / 1e6 for nbytes in grown))


def needed(folder: Path) -> list[float]:
    """What `measure` prints in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.memory", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(word) for word in text.split()]


def main() -> None:
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
        return
    print(machine())
    needs = {}
    for segment_rows in (4, 4000):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            fill(Path(folder) / "cache", segment_rows)
            needs[segment_rows] = needed(Path(folder) / "cache")
    print(f"{'MB':>12} {'16,000 segments':>16} {'16':>6} {'difference':>11}")
    for name, many, few in zip(
        ("mapped", "epoch 0", "epoch 1", "epoch 2"), needs[4], needs[4000], strict=True
    ):
        print(f"{name:>12} {many:16.1f} {few:6.1f} {many - few:11.1f}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        filled_cache(Path(folder) / "cache", 65536, 256 << 20).close()
        grown = needed(Path(folder) / "cache")
    print(f"batches of 4 MiB: {max(grown) * 1e6 / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
