"""How fast does NumPy gather rows from a mapped file at random?

Question: NumPy's `take` of random rows into a slot of 8 MiB: a loader without C of its own gets no further.
(The engine prefetches rows, and so is not bound by this.) From one thread and from two, in the order of the
file within each slot, from huge pages, with the first byte of each of the next 256 rows read ahead, and into
a slot of 1 MiB, which stays in the cache.
Method: 64 MiB and 512 MiB in the page cache, mapped; a pass takes every row once; ways take turns; medians.
Run: `python -m benchmarks.ceiling`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.history import remember
from benchmarks.measure import machine

SLOT_BYTES, BATCH_BYTES, AHEAD_ROWS = 8 << 20, 1 << 20, 256
SLOTS = 3
TURNS = 7

Rows = NDArray[Any]
Way = Callable[[NDArray[np.int64], Rows], object]


def ways(rows: Rows, huge: Rows, pool: ThreadPoolExecutor) -> dict[str, Way]:
    """Each gathers the rows of some ids into a slot of as many."""

    def take(ids: NDArray[np.int64], out: Rows, source: Rows = rows) -> Rows:
        return np.take(source, ids, axis=0, out=out, mode="clip")

    def two_threads(ids: NDArray[np.int64], out: Rows) -> None:
        half = len(ids) // 2
        list(pool.map(take, (ids[:half], ids[half:]), (out[:half], out[half:])))

    def read_ahead(ids: NDArray[np.int64], out: Rows) -> None:
        for start in range(0, len(ids), AHEAD_ROWS):
            part = slice(start, start + AHEAD_ROWS)
            rows[ids[part], 0]
            take(ids[part], out[part])

    def small_slot(ids: NDArray[np.int64], out: Rows) -> None:
        step = BATCH_BYTES // out.shape[1]
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            take(part, out[: len(part)])

    return {
        "take": take,
        "two threads": two_threads,
        "in the file's order": lambda ids, out: take(np.sort(ids), out),
        "from huge pages": lambda ids, out: take(ids, out, huge),
        "read ahead": read_ahead,
        "a slot of 1 MiB": small_slot,
    }


def measure(row_bytes: int, total_bytes: int) -> dict[str, list[float]]:
    """GB/s of each way and of memcpy, of each turn."""
    count, slot_rows = total_bytes // row_bytes, SLOT_BYTES // row_bytes
    random = np.random.default_rng(0)
    with tempfile.NamedTemporaryFile() as file, ThreadPoolExecutor(2) as pool:
        random.integers(0, 256, total_bytes, np.uint8).tofile(file)
        file.flush()
        with open(file.name, "rb") as opened:
            rows = np.frombuffer(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        rows = rows.reshape(count, row_bytes)
        memory = mmap.mmap(-1, total_bytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        huge = np.frombuffer(memory, np.uint8).reshape(count, row_bytes)
        np.copyto(huge, rows)
        slots = np.zeros((SLOTS, slot_rows, row_bytes), np.uint8)
        rates: dict[str, list[float]] = {}
        for turn in range(TURNS + 1):
            for name, way in (ways(rows, huge, pool) | {"memcpy": None}).items():
                order = random.permutation(count)
                started = time.perf_counter()
                for number, start in enumerate(range(0, count, slot_rows)):
                    ids = order[start : start + slot_rows]
                    out = slots[number % SLOTS, : len(ids)]
                    if way is None:
                        np.copyto(out, rows[start : start + len(ids)])
                    else:
                        way(ids, out)
                if turn:
                    rates.setdefault(name, []).append(total_bytes / (time.perf_counter() - started) / 1e9)
    return rates


def main() -> None:
    print(machine())
    ratios = {}
    for row_bytes in (1 << 10, 64 << 10):
        for total_bytes in (64 << 20, 512 << 20):
            rates = measure(row_bytes, total_bytes)
            print(f"{row_bytes} bytes a row, {total_bytes >> 20} MiB")
            for name, each in rates.items():
                print(f"  {name:20} {statistics.median(each):6.2f} GB/s ({min(each):.2f} to {max(each):.2f})")
            pairs = zip(rates["take"], rates["memcpy"], strict=True)
            ratios[f"{row_bytes} bytes, {total_bytes >> 20} MiB: take over memcpy"] = [
                a / b for a, b in pairs
            ]
    remember("ceiling", ratios)


if __name__ == "__main__":
    main()
