"""What do many, short or oddly shaped segments cost?

Question: shuffled rows from (a) 2,000 short segments of differing lengths, as `max_delay` makes
them, and (b) 2,000 full segments of 512 KiB, each against the same rows in few full segments of
64 MiB; (c) columns of 1001, 501 and 2001 floats together against memcpy; each by
`snapshot.gather(out=)` and through `arrowcache.Loader(shuffle="rows")`.
Method: rows of 1 KiB and a label for (a) and (b); page cache warm, all segments mapped; cases take
turns; medians; every ratio is of two rates from the same turns. memcpy copies as many bytes from
random places of the same mapped files into one batch-sized slot, which starts at a page, as what
`gather` allocates does.
Run: `python -m benchmarks.segments`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from arrowcache.reading.memory import page_aligned
from benchmarks.history import remember
from benchmarks.measure import interleaved, machine, mapped_files, random_blocks

SEGMENTS = 2000
TURN_BYTES = 256 << 20
REPEATS = 7
KIB_ROWS = ac.Schema({"x": ac.Tensor("float32", (256,)), "y": ac.Tensor("int64")})
ODD = ac.Schema({f"x{size}": ac.Tensor("float32", (size,)) for size in (1001, 501, 2001)})


def made(
    folder: Path, schema: ac.Schema, segment_bytes: str, parts: Sequence[int], *, publish_each: bool = False
) -> ac.Cache:
    """A cache of random rows, written in parts; if `publish_each`, each becomes a segment."""
    cache = ac.Cache.create(folder, schema, capacity="8GiB", segment_bytes=segment_bytes)
    rng = np.random.default_rng(0)
    writer = cache.writer()
    for rows in parts:
        writer.extend(
            {
                name: rng.integers(0, 1 << 20, (rows, *kind.shape)).astype(kind.numpy_dtype)
                for name, kind in schema.fixed.items()
            }
        )
        if publish_each:
            writer.close()
            writer = cache.writer()
    writer.close()
    return cache


def gatherer(cache: ac.Cache, batch_rows: int, rows: int) -> Callable[[], None]:
    """Gathers random batches, so many rows a call; all is mapped and was read once."""
    snapshot = cache.snapshot()
    snapshot.map_all()
    ids = np.random.default_rng(1).integers(0, len(snapshot), (rows // batch_rows, batch_rows))
    out: dict[str, Any] = snapshot.gather(np.arange(batch_rows))
    for first in range(0, len(snapshot), 1000):
        snapshot.gather(np.arange(first, min(first + 1000, len(snapshot))))

    def run() -> None:
        for batch in ids:
            snapshot.gather(batch, out=out)

    return run


def loading(cache: ac.Cache, batch_rows: int, rows: int) -> Callable[[], None]:
    """A whole epoch of so many rows, its beginning included."""
    loader = ac.Loader(cache, batch_rows, epoch_rows=rows)

    def run() -> None:
        for _ in loader:
            pass

    run()
    return run


def copying(cache: ac.Cache, batch_bytes: int, nbytes: int) -> Callable[[], None]:
    """memcpy of so many bytes in blocks of a batch's size."""
    blocks = random_blocks(mapped_files(cache), batch_bytes, nbytes)
    slot = page_aligned(batch_bytes)

    def run() -> None:
        for block in blocks:
            np.copyto(slot, block)

    return run


def compare(title: str, caches: dict[str, ac.Cache], batch_rows: int) -> dict[str, float]:
    """Rates of each cache and of memcpy on the last of them, and each one's ratio to the last."""
    last = list(caches.values())[-1]
    row_bytes = sum(kind.row_bytes for kind in last.schema.fixed.values())
    rows = TURN_BYTES // row_bytes // batch_rows * batch_rows
    cases = {}
    for name, cache in caches.items():
        cases[f"gather {name}"] = gatherer(cache, batch_rows, rows)
        cases[f"loader {name}"] = loading(cache, batch_rows, rows)
    cases["memcpy"] = copying(last, batch_rows * row_bytes, rows * row_bytes)
    rates = {name: rows * row_bytes / s / 1e9 for name, s in interleaved(cases, REPEATS).items()}
    ratios = {}
    for way in ("gather", "loader"):
        values = [rates[f"{way} {name}"] for name in caches]
        base = values[-1] if len(values) > 1 else rates["memcpy"]
        print(f"{title:>8} {batch_rows:6} {way:>7} {values[0]:7.2f} {base:7.2f} {values[0] / base:6.2f}")
        ratios[f"{title}, {batch_rows} rows: {way}"] = values[0] / base
    return ratios


def main() -> None:
    print(machine())
    print(f"{'segments':>8} {'batch':>6} {'way':>7} {'GB/s':>7} {'over':>7} {'ratio':>6}")
    ratios: dict[str, float] = {}
    lengths = np.random.default_rng(3).integers(8, 249, SEGMENTS).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        short = made(folder / "short", KIB_ROWS, "64MiB", lengths, publish_each=True)
        large = made(folder / "large", KIB_ROWS, "64MiB", [sum(lengths)])
        for batch_rows in (64, 1024):
            ratios |= compare("short", {"short": short, "large": large}, batch_rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [5000] * (SEGMENTS // 10)  # 512 KiB hold 502 rows
        small = made(folder / "small", KIB_ROWS, "512KiB", parts)
        large = made(folder / "large", KIB_ROWS, "64MiB", parts)
        for batch_rows in (64, 1024):
            ratios |= compare("512 KiB", {"small": small, "large": large}, batch_rows)
    with tempfile.TemporaryDirectory() as name:
        odd = made(Path(name) / "odd", ODD, "64MiB", [4500] * 12)
        for batch_rows in (64, 256):
            ratios |= compare("odd", {"odd": odd}, batch_rows)
    remember("segments", ratios)


if __name__ == "__main__":
    main()
