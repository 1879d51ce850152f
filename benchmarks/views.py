"""What does a batch cost that is a zero-copy view?

Question: bytes copied, and time of a batch, of shuffle="blocks" and None where batches are runs of
rows, for a consumer that only takes and drops them: inside `next`, and in all; and the time of one of
`snapshot.views(batch_rows)`, which one thread makes and drops. A batch of views should cost the same
whatever its bytes.
Method: 1 GiB in segments of 64 MiB whose rows the batch divides, page cache warm; an epoch a turn; the
first turn is left out. `next`: the median of all batches. In all: from the first batch of an epoch in
hand to its last, over the batches between, the median of all turns; likewise the views.
Run: `python -m benchmarks.views`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import arrowcache as ac
from benchmarks.measure import filled_cache, machine

TOTAL_BYTES = 1 << 30
REPEATS = 6
CASES = ((65536, 64), (65536, 320), (1024, 1024), (1024, 64))


def measure(cache: ac.Cache, rows: int, batch_rows: int, shuffle: str | None) -> tuple[float, float, int]:
    """(microseconds in `next`, in all, bytes copied)."""
    inside: list[float] = []
    whole: list[float] = []
    with ac.Loader(cache, batch_rows, shuffle=shuffle, where=lambda s: s.rows == rows) as loader:
        loader.assert_zero_copy()
        for turn in range(REPEATS):
            iterator = iter(loader)
            batch = next(iterator)
            started = time.perf_counter()
            while True:
                del batch
                before = time.perf_counter()
                batch = next(iterator, None)
                if batch is None:
                    break
                if turn:
                    inside.append(time.perf_counter() - before)
            if turn:
                assert loader.steps
                whole.append((time.perf_counter() - started) / (loader.steps - 1))
        copied = loader.stats().copied_bytes
    return statistics.median(inside) * 1e6, statistics.median(whole) * 1e6, copied


def measure_views(cache: ac.Cache, rows: int, batch_rows: int) -> float:
    """Microseconds a view."""
    taken = []
    with cache.snapshot(lambda s: s.rows == rows) as snapshot:
        for _ in range(REPEATS):
            started = time.perf_counter()
            for view in snapshot.views(batch_rows):
                del view
            taken.append((time.perf_counter() - started) / (len(snapshot) // batch_rows))
    return statistics.median(taken[1:]) * 1e6


def main() -> None:
    print(machine())
    print(f"{'row':>8} {'batch':>6} {'shuffle':>8} {'us in next':>11} {'us a batch':>11} {'copied':>7}")
    for row_bytes, batch_rows in CASES:
        rows = 960 if row_bytes == 65536 else 61440
        with tempfile.TemporaryDirectory() as folder:
            cache = filled_cache(Path(folder) / "cache", row_bytes, TOTAL_BYTES, segment_rows=rows)
            for shuffle in ("blocks", None):
                inside, whole, copied = measure(cache, rows, batch_rows, shuffle)
                print(f"{row_bytes:8} {batch_rows:6} {shuffle!s:>8} {inside:11.0f} {whole:11.0f} {copied:7}")
            alone = measure_views(cache, rows, batch_rows)
            print(f"{row_bytes:8} {batch_rows:6} {'views()':>8} {'-':>11} {alone:11.0f} {0:7}")
            cache.close()


if __name__ == "__main__":
    main()
