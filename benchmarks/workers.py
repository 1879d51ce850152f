"""What do process workers cost, and what do they give?

Questions, each against the same in the same run:
- rate: `Loader(workers=1 and 2)` with an identity transform and without one, batches of 64 rows of
  64 KiB, over a memcpy of as many bytes; workers=0 beside them;
- python: a transform that holds the GIL for 10 ms of pure Python a batch, with two worker processes
  and with two threads, over the default; the consumer only takes the batches;
- start: seconds from `iter` to the first batch of a new loader of two workers, and of its later epochs;
- memory: private memory (RssAnon) of a worker that has read 16,000 segments, above that of an
  interpreter that has imported NumPy and nothing else, and above a worker's over 16 segments.
Method: 1 GiB in 64 MiB segments, page cache warm; an epoch a turn, after two that are not counted (in
the first two slots get their memory); cases take turns; medians. The consumer of "rate" reads a value
per 4 KiB, as that of benchmarks.dataloader does. Workers start as `python -c`, whatever the start method of
`multiprocessing`: as slow as its spawn, without importing the main module.
Run: `python -m benchmarks.workers`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import filled_cache, interleaved, machine, mapped_files, random_blocks
from benchmarks.memory import fill

TOTAL_BYTES = 1 << 30
ROW_BYTES, BATCH_ROWS = 65536, 64
BATCH_BYTES = ROW_BYTES * BATCH_ROWS
REPEATS = 7

Batch = Mapping[str, Any]


def identity(batch: Batch) -> Batch:
    return batch


def busy(batch: Batch) -> Batch:
    """10 ms of this thread's time, in pure Python."""
    end = time.thread_time() + 0.010
    while time.thread_time() < end:
        pass
    return batch


def epoch(loader: ac.Loader, *, read: bool) -> None:
    for batch in loader:
        if read:
            batch["x"].reshape(-1)[::1024].sum()


def copy(blocks: list[np.ndarray[Any, Any]], slot: np.ndarray[Any, Any]) -> None:
    """memcpy as much as an epoch delivers, and read it as the consumer does."""
    for block in blocks:
        np.copyto(slot, block)
        slot.view(np.float32)[::1024].sum()


def rates(cache: ac.Cache) -> dict[str, float]:
    """What each delivers over memcpy."""
    loaders = {
        "workers=0, no transform": ac.Loader(cache, BATCH_ROWS),
        "workers=0, identity": ac.Loader(cache, BATCH_ROWS, transform=identity),
        "1 process, no transform": ac.Loader(cache, BATCH_ROWS, workers=1),
        "1 process, identity": ac.Loader(cache, BATCH_ROWS, workers=1, transform=identity),
        "2 processes, no transform": ac.Loader(cache, BATCH_ROWS, workers=2),
        "2 processes, identity": ac.Loader(cache, BATCH_ROWS, workers=2, transform=identity),
    }
    blocks = random_blocks(mapped_files(cache), BATCH_BYTES, TOTAL_BYTES)
    cases: dict[str, Callable[[], None]] = {
        "memcpy": partial(copy, blocks, np.empty(BATCH_BYTES, np.uint8)),
        **{name: partial(epoch, loader, read=True) for name, loader in loaders.items()},
    }
    for run in [*cases.values()] * 2:
        run()
    seconds = interleaved(cases, REPEATS)
    print(f"\nrate: {'':32} {'GB/s':>6} {'of memcpy':>10}")
    for name, taken in seconds.items():
        print(f"{name:38} {TOTAL_BYTES / taken / 1e9:6.2f} {seconds['memcpy'] / taken:10.2f}")
    for loader in loaders.values():
        loader.close()
    return {f"{name}, over memcpy": seconds["memcpy"] / taken for name, taken in seconds.items()}


def python(cache: ac.Cache) -> dict[str, float]:
    """What each makes of a transform in Python over the default."""
    loaders = {
        "workers=0": ac.Loader(cache, BATCH_ROWS, transform=busy),
        "2 threads": ac.Loader(cache, BATCH_ROWS, workers=2, worker_type="thread", transform=busy),
        "2 processes": ac.Loader(cache, BATCH_ROWS, workers=2, transform=busy),
    }
    cases = {name: partial(epoch, loader, read=False) for name, loader in loaders.items()}
    for run in cases.values():
        run()
    seconds = interleaved(cases, REPEATS)
    print(f"\npython, 10 ms a batch: {'':15} {'batches/s':>9} {'over default':>13}")
    for name, taken in seconds.items():
        steps = TOTAL_BYTES // BATCH_BYTES
        print(f"{name:38} {steps / taken:9.0f} {seconds['workers=0'] / taken:13.2f}")
    for loader in loaders.values():
        loader.close()
    unit = seconds["workers=0"]
    return {f"python, {name} over default": unit / taken for name, taken in seconds.items()}


def start(cache: ac.Cache) -> None:
    firsts, laters = [], []
    for _ in range(REPEATS):
        with ac.Loader(cache, BATCH_ROWS, workers=2, transform=identity) as loader:
            for number in range(4):
                started = time.perf_counter()
                batches = iter(loader)
                next(batches)
                (laters if number else firsts).append(time.perf_counter() - started)
                for _ in batches:
                    pass
    first, later = statistics.median(firsts), statistics.median(laters)
    print(f"\nstart, 2 workers: first batch {first:.2f} s ({min(firsts):.2f} to {max(firsts):.2f});", end=" ")
    print(f"of later epochs {1e3 * later:.1f} ms ({1e3 * min(laters):.1f} to {1e3 * max(laters):.1f})")


def private_mb(pid: int | str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("RssAnon"))


def children() -> list[str]:
    return " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()


def memory() -> None:
    code = "import numpy; print(next(line for line in open('/proc/self/status') if 'RssAnon' in line))"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    interpreter = int(bare.stdout.split()[1]) / 1e3
    print(f"\nmemory: an interpreter with NumPy {interpreter:.1f} MB")
    for segment_rows in (4000, 4):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            fill(Path(folder) / "cache", segment_rows)
            cache = ac.Cache.open(Path(folder) / "cache")
            with ac.Loader(cache, 64, workers=2) as loader:
                for _ in range(3):
                    for _ in loader:
                        pass
                workers = [private_mb(pid) - interpreter for pid in children()]
            cache.close()
        print(f"{64_000 // segment_rows:6} segments: {max(workers):.1f} MB a worker above it")


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        cache = filled_cache(Path(folder) / "cache", ROW_BYTES, TOTAL_BYTES)
        ratios = rates(cache) | python(cache)
        start(cache)
        cache.close()
    memory()
    remember("workers", ratios)


if __name__ == "__main__":
    main()
