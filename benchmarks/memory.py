"""How much private memory does a loader over 16,000 segments need?

Question: growth of the process' private resident memory (RssAnon), beyond the loader's ring, over what
it was after `import arrowcache` and opening the cache: with all segments mapped, and after each of
three epochs.
Method: 16,000 segments of 4 rows of 1 KiB and a label, in memory (/dev/shm), each read in full in
every epoch; the page cache is not private memory.
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
from benchmarks.measure import machine

SEGMENTS, ROWS = 16_000, 4
SCHEMA = ac.Schema({"x": ac.Tensor("float32", (256,)), "y": ac.Tensor("int64")})


def fill(folder: Path) -> None:
    cache = ac.Cache.create(folder, SCHEMA, "2GiB", segment_bytes="32KiB", segment_rows=ROWS)
    with cache.writer() as writer:
        for first in range(0, SEGMENTS * ROWS, 4000):
            writer.extend(x=np.ones((4000, 256), np.float32), y=np.arange(first, first + 4000))


def measure(folder: Path) -> None:
    """Print what this fresh process needs."""
    cache = ac.Cache.open(folder)
    before = resident_bytes()[0]
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        print(f"{len(snapshot.segments)} segments mapped: {(resident_bytes()[0] - before) / 1e6:.1f} MB")
    with ac.Loader(cache, 64) as loader:
        for epoch in range(3):
            rows = sum(len(batch["y"]) for batch in loader)
            stats = loader.stats()
            grown = (stats.private_bytes - before) / 1e6
            beyond = (stats.private_bytes - before - stats.ring_bytes) / 1e6
            print(f"epoch {epoch} of {rows} rows: {grown:.1f} MB, {beyond:.1f} MB beyond the ring")


def main() -> None:
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]))
        return
    print(machine())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        fill(Path(folder) / "cache")
        subprocess.run([sys.executable, "-m", "benchmarks.memory", str(Path(folder) / "cache")], check=True)


if __name__ == "__main__":
    main()
