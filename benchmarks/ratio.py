"""Does `Pace(samples_per_insert=8)` hold 8, whichever side is faster?

Method: a cache of 64 MB, segments of 1 MiB, rows of 16 KiB; two sampler processes that take some time for
each row, and a loader whose consumer takes some time for each batch; 15 s for each of two cases: without a
pace each row would be served some 30 times, and some twice. The ratio of rows served to rows published, as
`cache.stats()` counts them, every 0.1 s: at the end, and the least and the largest of the last 5 s.
Run: `python -m benchmarks.ratio`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import machine

RATIO, SECONDS, LAST_SECONDS, LOOK_SECONDS = 8.0, 15.0, 5.0, 0.1
ROW_FLOATS, BATCH_ROWS = 4096, 64
CASES = {  # seconds for a row of each sampler, and for a batch
    "training is faster": (4e-3, 4e-3),
    "sampling is faster": (5e-4, 8e-3),
}


class Draw:
    """A sampler that takes so long for each row."""

    def __init__(self, row_seconds: float) -> None:
        self.row_seconds = row_seconds

    def __call__(self, rng: np.random.Generator) -> Iterator[dict[str, np.ndarray]]:
        while True:
            time.sleep(self.row_seconds)
            yield {"x": rng.random(ROW_FLOATS, dtype=np.float32)}


def ratios(folder: Path, row_seconds: float, batch_seconds: float) -> list[tuple[float, float]]:
    """(seconds since the first batch, rows served to rows published), every LOOK_SECONDS."""
    schema = ac.Schema({"x": ac.Tensor("float32", (ROW_FLOATS,))})
    seen: list[tuple[float, float]] = []
    over = threading.Event()

    def look() -> None:
        started = time.monotonic()
        while not over.wait(LOOK_SECONDS):
            stats = cache.stats()
            seen.append((time.monotonic() - started, stats.served_rows / stats.inserted_rows))

    pace = ac.Pace(samples_per_insert=RATIO)
    with (
        ac.Cache.create(folder, schema, "64MB", "1MiB", pace=pace) as cache,
        ac.SamplerPool(cache, Draw(row_seconds), workers=2, progress=False),
        ac.Loader(cache, BATCH_ROWS) as loader,
    ):
        looking = threading.Thread(target=look)
        for number, _ in enumerate(loader.repeat()):
            if number == 0:
                started = time.monotonic()
                looking.start()
            time.sleep(batch_seconds)
            if time.monotonic() - started > SECONDS:
                break
        over.set()
        looking.join()
    return seen


def main() -> None:
    print(machine())
    ends = {}
    for name, (row_seconds, batch_seconds) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            seen = ratios(Path(folder) / "cache", row_seconds, batch_seconds)
        last = [ratio for when, ratio in seen if when > SECONDS - LAST_SECONDS]
        every = ", ".join(f"{ratio:.1f}" for _, ratio in seen[:: round(1 / LOOK_SECONDS)])
        print(f"{name}: {seen[-1][1]:.2f} at the end, {min(last):.2f} to {max(last):.2f} in the last", end="")
        print(f" {LAST_SECONDS:g} s; each second: {every}")
        ends[name] = seen[-1][1] / RATIO
    remember("ratio", ends)


if __name__ == "__main__":
    main()
