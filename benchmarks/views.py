"""What does a batch cost that is a zero-copy view?

Question: bytes copied, and time of a batch, of shuffle="blocks" and None where batches are runs of
rows: time from one `next` to the next with a consumer that only takes and drops them, and of
`snapshot.view` alone. A batch of views should cost the same whatever its bytes.
Method: 1 GiB in segments of 64 MiB whose rows the batch divides, page cache warm; an epoch a turn,
cases take turns; medians of all batches of all turns but the first.
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


def measure(row_bytes: int, batch_rows: int, shuffle: str | None) -> tuple[float, float, int]:
    """(microseconds a batch in `next`, in the whole epoch, bytes copied)."""
    rows = 960 if row_bytes == 65536 else 61440
    inside: list[float] = []
    whole: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = filled_cache(Path(folder) / "cache", row_bytes, TOTAL_BYTES, segment_rows=rows)
        with ac.Loader(cache, batch_rows, shuffle=shuffle, where=lambda s: s.rows == rows) as loader:
            loader.assert_zero_copy()
            for turn in range(REPEATS):
                started = time.perf_counter()
                iterator = iter(loader)
                while True:
                    before = time.perf_counter()
                    batch = next(iterator, None)
                    after = time.perf_counter()
                    if batch is None:
                        break
                    del batch
                    if turn:
                        inside.append(after - before)
                if turn:
                    assert loader.steps
                    whole.append((time.perf_counter() - started) / loader.steps)
            copied = loader.stats().copied_bytes
        cache.close()
    return statistics.median(inside) * 1e6, statistics.median(whole) * 1e6, copied


def main() -> None:
    print(machine())
    print(f"{'row':>8} {'batch':>6} {'shuffle':>8} {'us in next':>11} {'us a batch':>11} {'copied':>7}")
    for row_bytes, batch_rows in CASES:
        for shuffle in ("blocks", None):
            inside, whole, copied = measure(row_bytes, batch_rows, shuffle)
            print(f"{row_bytes:8} {batch_rows:6} {shuffle!s:>8} {inside:11.0f} {whole:11.0f} {copied:7}")


if __name__ == "__main__":
    main()
