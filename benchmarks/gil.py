"""What does a busy training thread keep of its speed while the loader delivers?

Question: a pure-Python loop in the main thread that takes a batch from a Loader at a fixed rate
(0.6 and 2 GB/s), against the same loop while *another process* copies as much from the same
files: the difference is the time for which the loader holds the GIL; memory traffic and the
machine's noise are in both.
Method: 64 KiB rows, batches of 64, page cache warm; 2 s a turn, turns interleaved, medians. Also
printed: the rate that was really delivered.
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
from typing import Any

import numpy as np

import arrowcache as ac
import arrowcache.torch
from benchmarks.history import remember
from benchmarks.measure import filled_cache, machine, mapped_files, random_blocks
from benchmarks.spinning import spin

TOTAL_BYTES = 1 << 30
ROW_BYTES, BATCH_ROWS = 65536, 64
BATCH_BYTES = ROW_BYTES * BATCH_ROWS
TURN_SECONDS = 2.0
REPEATS = 7


def copy_at_rate(folder: str, rate: float, started: Event, stopped: Event) -> None:
    """Another process: copies blocks of the same files at a rate, until stopped."""
    with ac.Cache.open(folder) as cache:
        blocks = random_blocks(mapped_files(cache), BATCH_BYTES, TOTAL_BYTES // 2)
    slot = np.empty(BATCH_BYTES, np.uint8)
    for block in blocks:
        np.copyto(slot, block)
    started.set()
    begun, number = time.perf_counter(), 0
    while not stopped.is_set():
        np.copyto(slot, blocks[number % len(blocks)])
        number += 1
        time.sleep(max(0.0, begun + number * BATCH_BYTES / rate - time.perf_counter()))


def beside_a_copy(folder: str, rate: float) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    started, stopped = context.Event(), context.Event()
    process = context.Process(target=copy_at_rate, args=(folder, rate, started, stopped))
    process.start()
    started.wait()
    try:
        return spin(lambda: None, rate, BATCH_BYTES, TURN_SECONDS)
    finally:
        stopped.set()
        process.join()


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
        for _ in range(REPEATS):
            with_copy, _ = beside_a_copy(path, rate)
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
