"""How close does `snapshot.gather(out=)` come to memcpy?

Question: shuffled rows of 64 KiB and 1 KiB, gathered into preallocated arrays, against copying
the same number of bytes from and to equally large memory, in the same run.
Method: 1 GiB of rows in 64 MiB segments, page cache warm; 512 MiB gathered per turn, in batches;
cases take turns; medians. memcpy copies the same bytes, from the same mapped files into the same
slot, but contiguous: a batch-sized block from a random place. The slot is what a first gather
allocated, which starts at a page.
Run: `python -m benchmarks.gather`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.history import remember
from benchmarks.measure import filled_cache, interleaved, machine, mapped_files, random_blocks

TOTAL_BYTES = 1 << 30
TURN_BYTES = 512 << 20


def measure(row_bytes: int, batch_rows: int) -> tuple[float, float]:
    """(gather, memcpy) in GB/s."""
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        cache = filled_cache(Path(folder) / "cache", row_bytes, TOTAL_BYTES)
        with cache.snapshot() as snapshot:
            snapshot.map_all()
            turns = TURN_BYTES // (batch_rows * row_bytes)
            out: dict[str, Any] = snapshot.gather(np.arange(batch_rows), ["x"])
            flat = out["x"].reshape(-1).view(np.uint8)
            ids = rng.integers(0, len(snapshot), (turns, batch_rows))
            blocks = random_blocks(mapped_files(cache), flat.nbytes, TURN_BYTES)
            for row in range(0, len(snapshot), batch_rows):  # touch every page once
                snapshot.gather(np.arange(row, min(row + batch_rows, len(snapshot))), ["x"])

            def gather() -> None:
                for batch in ids:
                    snapshot.gather(batch, ["x"], out)

            def memcpy() -> None:
                for block in blocks:
                    np.copyto(flat, block)

            seconds = interleaved({"gather": gather, "memcpy": memcpy}, repeats=11)
        cache.close()
    return tuple(TURN_BYTES / seconds[name] / 1e9 for name in ("gather", "memcpy"))  # type: ignore[return-value]


def main() -> None:
    print(machine())
    print(f"{'row':>8} {'batch':>6} {'gather GB/s':>12} {'memcpy GB/s':>12} {'ratio':>6}")
    ratios = {}
    for row_bytes, batch_rows in ((65536, 64), (65536, 256), (1024, 64), (1024, 1024), (1024, 4096)):
        gather, memcpy = measure(row_bytes, batch_rows)
        print(f"{row_bytes:8} {batch_rows:6} {gather:12.2f} {memcpy:12.2f} {gather / memcpy:6.2f}")
        ratios[f"{row_bytes} bytes, {batch_rows} rows: gather over memcpy"] = gather / memcpy
    remember("gather", ratios)


if __name__ == "__main__":
    main()
