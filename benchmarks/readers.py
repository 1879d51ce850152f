"""Which share of the rows of a nearly full cache do readers see?

Question: of three caches that hold all that was ever published, and to which nobody writes.
Method: fill each by one writer, close it, and count what a Loader's epoch delivers and what a snapshot has.
Only the public API is used, so that `PYTHONPATH` may name an older release.
Run: `python -m benchmarks.readers`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

import arrowcache as ac
from benchmarks.measure import machine


class Case(NamedTuple):
    """A cache of 300 MB, and how many rows of which size fill it."""

    name: str
    row_bytes: int
    rows: int
    segment_bytes: str
    headroom: float


CASES = (
    Case("5,000 rows of 48 KiB, segments of 64 MiB, headroom=0", 48 << 10, 5000, "64MiB", 0.0),
    Case("5,800 rows of 48 KiB, segments of 4 MiB, headroom as it is", 48 << 10, 5800, "4MiB", 0.1),
    Case("17 rows of 15 MiB, four a segment, headroom as it is", 15 << 20, 17, "64MiB", 0.1),
)


def seen(case: Case, path: Path) -> tuple[int, int]:
    """Rows of an epoch, and of a snapshot."""
    schema = {"id": ac.Tensor("int64"), "data": ac.Tensor("uint8", (case.row_bytes,))}
    with ac.Cache.create(path, schema, "300MB", case.segment_bytes, headroom=case.headroom) as cache:
        with cache.writer() as writer:
            for number in range(case.rows):
                writer.append(id=number, data=np.zeros(case.row_bytes, np.uint8))
        assert cache.stats().rows == case.rows, "nothing was evicted"
        with ac.Loader(cache, 4, columns=["id"], drop_last=False) as loader:
            delivered = sum(len(batch["id"]) for batch in loader)
        with cache.snapshot() as snapshot:
            return delivered, len(snapshot)


def main() -> None:
    print(machine())
    shares = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            delivered, found = seen(case, Path(folder) / "cache")
        shares.append(delivered / case.rows)
        print(f"{case.name}: an epoch {delivered}, a snapshot {found} of {case.rows} rows: {shares[-1]:.0%}")
    print(f"the mean of the three: {sum(shares) / len(shares):.0%}")


if __name__ == "__main__":
    main()
