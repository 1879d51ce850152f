"""What does a busy training thread keep of its speed while the loader delivers?

Question: a pure-Python loop in the main thread that takes a batch from a Loader at a fixed rate
(0.6 and 2 GB/s), against the same loop while *another process* copies as much from the same
files: the difference is the time for which the loader holds the GIL; memory traffic and the
machine's noise are in both.
Method: 64 KiB rows, batches of 64, page cache warm; half a second a turn, turns interleaved, medians: the
other process is there all the time, and rests in the loader's turns. Also printed: the rate that was really
delivered.
Run: `python -m benchmarks.gil`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import arrowcache as ac
import arrowcache.torch
from benchmarks.history import remember
from benchmarks.measure import filled_cache, machine, mapped_files, random_blocks
from benchmarks.spinning import spin

if TYPE_CHECKING:
    from typing import Self

TOTAL_BYTES = 1 << 30
ROW_BYTES, BATCH_ROWS = 65536, 64
BATCH_BYTES = ROW_BYTES * BATCH_ROWS
TURN_SECONDS = 0.5
REPEATS = 31


class Copying:
    """Another process, which copies blocks of the same files at a rate while it may; a context manager."""

    def __init__(self, folder: str, rate: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._is_ready, self._may_copy, self._is_over = context.Event(), context.Event(), context.Event()
        events = self._is_ready, self._may_copy, self._is_over
        self._process = context.Process(target=copy_at_rate, args=(folder, rate, *events))

    def spin_beside(self, rate: float) -> tuple[float, float]:
        """See `spin`: of a loop that takes nothing, while the process copies."""
        self._may_copy.set()
        try:
            return spin(lambda: None, rate, BATCH_BYTES, TURN_SECONDS)
        finally:
            self._may_copy.clear()

    def __enter__(self) -> Self:
        self._process.start()
        self._is_ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._may_copy.set()
        self._process.join()


def copy_at_rate(folder: str, rate: float, is_ready: Event, may_copy: Event, is_over: Event) -> None:
    with ac.Cache.open(folder) as cache:
        blocks = random_blocks(mapped_files(cache), BATCH_BYTES, TOTAL_BYTES // 2)
    slot = np.empty(BATCH_BYTES, np.uint8)
    for block in blocks:
        np.copyto(slot, block)
    is_ready.set()
    while not is_over.is_set():
        may_copy.wait()
        begun, number = time.perf_counter(), 0
        while may_copy.is_set() and not is_over.is_set():
            np.copyto(slot, blocks[number % len(blocks)])
            number += 1
            time.sleep(max(0.0, begun + number * BATCH_BYTES / rate - time.perf_counter()))


def batches(loader: ac.Loader) -> Iterator[Any]:
    while True:
        yield from loader


def measure(rate: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cache")
        cache = filled_cache(Path(path), ROW_BYTES, TOTAL_BYTES)
        loader = arrowcache.torch.Loader(cache, BATCH_ROWS, epoch_rows=10**9)
        stream = batches(loader)
        for _ in range(TOTAL_BYTES // BATCH_BYTES):
            next(stream)
        kept, delivered = [], []
        with Copying(path, rate) as copying:
            for _ in range(REPEATS):
                with_copy, _ = copying.spin_beside(rate)
                with_loader, gigabytes = spin(lambda: next(stream), rate, BATCH_BYTES, TURN_SECONDS)
                kept.append(with_loader / with_copy)
                delivered.append(gigabytes)
        stream.close()
        loader.close()
        cache.close()
    return {"kept": statistics.median(kept), "delivered": statistics.median(delivered)}


def main() -> None:
    print(machine())
    print(f"{'asked GB/s':>10} {'delivered GB/s':>15} {'loop kept':>10}")
    ratios = {}
    for rate in (0.6e9, 2e9):
        result = measure(rate)
        print(f"{rate / 1e9:10.1f} {result['delivered']:15.2f} {result['kept']:10.3f}")
        ratios[f"at {rate / 1e9:g} GB/s: what the loop kept"] = result["kept"]
    remember("gil", ratios)


if __name__ == "__main__":
    main()
