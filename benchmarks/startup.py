"""How long until the first row: importing, opening, taking a snapshot?

Question: `import arrowcache` beyond NumPy and pyarrow, without and with the first use of Cache, Loader and
SamplerPool; a snapshot of 16,000 segments, listed before
and not; the first batch of a Loader.
Method: 16,000 files of one small segment each under consecutive names; medians of several;
imports in fresh processes, interleaved.
Run: `python -m benchmarks.startup`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import arrowcache as ac
from arrowcache.storage.layout import segment_name
from benchmarks.measure import machine

SEGMENTS = 16_000
REPEATS = 9


def import_seconds(statement: str) -> float:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def many_segments(path: Path) -> None:
    """A cache whose one published segment stands there 16,000 times."""
    schema = ac.Schema({"x": ac.Tensor("float32", (16,))})
    with ac.Cache.create(path, schema, capacity="10GB", segment_bytes="16KiB") as cache:
        with cache.writer() as writer:
            writer.extend(x=np.zeros((100, 16), np.float32))
        first = next((path / "segments").iterdir())
        data = first.read_bytes()
        for seq in range(1, SEGMENTS):
            (path / "segments" / segment_name(seq, 100, "")).write_bytes(data)


def main() -> None:
    print(machine())
    bare, ours, used = [], [], []
    for _ in range(REPEATS):
        bare.append(import_seconds("import numpy, pyarrow"))
        ours.append(import_seconds("import numpy, pyarrow, arrowcache"))
        used.append(
            import_seconds("import numpy, pyarrow, arrowcache as ac; ac.Cache, ac.Loader, ac.SamplerPool")
        )
    for what, seconds in (("import arrowcache", ours), ("that, and its Cache, Loader and SamplerPool", used)):
        beyond = statistics.median(seconds) - statistics.median(bare)
        print(f"{what}, beyond numpy and pyarrow: {1e3 * beyond:.1f} ms")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        many_segments(path)
        firsts, agains = [], []
        for _ in range(REPEATS):
            started = time.perf_counter()
            cache = ac.Cache.open(path)
            with cache.snapshot():
                firsts.append(time.perf_counter() - started)
            started = time.perf_counter()
            with cache.snapshot():
                agains.append(time.perf_counter() - started)
            cache.close()
    print(f"open and first snapshot of {SEGMENTS} segments: {1e3 * statistics.median(firsts):.0f} ms")
    print(f"snapshot of them, listed before: {1e3 * statistics.median(agains):.0f} ms")


if __name__ == "__main__":
    main()
