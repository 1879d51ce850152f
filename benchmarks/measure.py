"""What every benchmark shares: caches to measure on, medians, memcpy as the unit.

A figure is the median of several runs, interleaved so that the machine's noise hits all cases
alike, and printed as a ratio to a copy of the same bytes made in the same run.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from arrowcache.storage.layout import segment_name

MANY_SEGMENTS = 16_000
MANY_ROWS = 100  # of each


def hardware() -> str:
    """The machine, whatever runs on it."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {memory:.0f} GiB"


def machine() -> str:
    """One line that names where a figure was measured."""
    versions = {"arrowcache": ac.__version__} | {name: version(name) for name in ("numpy", "pyarrow")}
    libraries = " ".join(f"{name} {number}" for name, number in versions.items())
    return f"{hardware()}, Linux {platform.release()}, Python {platform.python_version()}, {libraries}"


def filled_cache(
    folder: Path,
    row_bytes: int,
    total_bytes: int,
    segment_bytes: str = "64MiB",
    segment_rows: int | None = None,
) -> ac.Cache:
    """A cache of incompressible rows: `x`, row_bytes of float32, and a label `y`."""
    schema = ac.Schema({"x": ac.Tensor("float32", (row_bytes // 4,)), "y": ac.Tensor("int64")})
    capacity = 2 * total_bytes + (1 << 30)
    cache = ac.Cache.create(folder, schema, capacity, segment_bytes, segment_rows)
    rng = np.random.default_rng(0)
    chunk = max(1, (16 << 20) // row_bytes)
    with cache.writer() as writer:
        for start in range(0, total_bytes // row_bytes, chunk):
            x = rng.random((chunk, row_bytes // 4), dtype=np.float32)
            writer.extend(x=x, y=np.arange(start, start + chunk))
    return cache


def many_segments(path: Path) -> bytes:
    """A cache whose one published segment stands there 16,000 times. Returns: the bytes of its file."""
    schema = ac.Schema({"x": ac.Tensor("float32", (16,))})
    with ac.Cache.create(path, schema, capacity="10GB", segment_bytes="16KiB") as cache:
        with cache.writer() as writer:
            writer.extend(x=np.zeros((MANY_ROWS, 16), np.float32))
        data = next((path / "segments").iterdir()).read_bytes()
        for seq in range(1, MANY_SEGMENTS):
            (path / "segments" / segment_name(seq, MANY_ROWS, "")).write_bytes(data)
    return data


def mapped_files(cache: ac.Cache) -> list[np.ndarray[Any, Any]]:
    """The segments' files as bytes, mapped: where a memcpy of the same bytes reads."""
    return [np.memmap(path, np.uint8, "r") for path in sorted((cache.path / "segments").iterdir())]


def random_blocks(
    files: list[np.ndarray[Any, Any]], block_bytes: int, total_bytes: int
) -> list[np.ndarray[Any, Any]]:
    """Contiguous blocks from random places of the full segments, `total_bytes` together."""
    rng = np.random.default_rng(2)
    large = [file for file in files if file.nbytes > 2 * block_bytes]
    blocks = []
    for _ in range(max(1, total_bytes // block_bytes)):
        file = large[int(rng.integers(len(large)))]
        start = int(rng.integers((file.nbytes - block_bytes) // 64)) * 64
        blocks.append(file[start : start + block_bytes])
    return blocks


def interleaved(cases: Mapping[str, Callable[[], None]], repeats: int = 9) -> dict[str, float]:
    """Median seconds of each case; the cases take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def cpu_seconds() -> float:
    """User and system time of this process, all its threads, and its ended children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
