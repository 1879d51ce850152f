"""Looking at a cache: how long does it take, and what does it need?

Question: `import arrowcache.explore`; the HTML of a cache of 16,000 segments, first and again; `describe` of
10 GB of float32, its speed, processor time and private memory; how many pages a DuckDB group-by over labels
reads of 1,000,000 rows of 64 KiB.
Method: imports in fresh processes. The HTML as a notebook asks for it, of a cache just opened and of
one that was shown before. `describe` in a fresh process, its RssAnon sampled every 20 ms; the
files are read once before, and lie in the page cache as far as they fit. The rows of the group-by stand in
files with holes, 1,000 of 64 MB that take no room on the disk: all zeros but for the labels; after it
`mincore` tells which of their pages are in memory.
Run: `python -m benchmarks explore --folder FOLDER`, a folder on a disk. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

import arrowcache as ac
from arrowcache.storage.layout import segment_name
from benchmarks.fresh import fresh
from benchmarks.harness import Figures, Options, filled, many_segments, scratch, seconds_of
from benchmarks.latencies import import_seconds
from benchmarks.usage import advise, cpu_seconds, peak, resident_bytes, status_bytes

REPEATS = 9
DESCRIBED_BYTES = 10 * 10**9
GROUPED_ROWS, ROWS_A_FILE, ROW_BYTES = 1_000_000, 1000, 65536
LABELS = 10


def html_seconds(path: Path, turns: int) -> tuple[float, float]:
    """Median seconds for the HTML of a cache that was just opened, and of one shown before."""
    firsts, agains = [], []
    for _ in range(turns):
        with ac.Cache.open(path) as cache:
            for seconds in (firsts, agains):
                seconds.append(seconds_of(cache._repr_html_))
    return statistics.median(firsts), statistics.median(agains)


def describe(path: str) -> dict[str, float]:
    """In a process of its own: seconds, processor seconds and the most private memory."""
    from arrowcache import explore

    explore.describe  # noqa: B018  # loads what it needs
    with peak(partial(status_bytes, "RssAnon")) as private:
        started, cpu = time.perf_counter(), cpu_seconds()
        frame = explore.describe(path, columns=["x"], progress=False)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    return {"seconds": seconds, "cpu": cpu, "private": private.most, "count": int(frame["count"]["x"])}


def sparse_cache(path: Path, rows: int) -> ac.Cache:
    """A cache of so many rows that are zeros, in files with holes; labels count up."""
    schema = ac.Schema({"x": ac.Tensor("float32", (ROW_BYTES // 4,)), "label": ac.Tensor("int64")})
    cache = ac.Cache.create(path, schema, "100GB", "64MiB", ROWS_A_FILE)
    labels = np.arange(ROWS_A_FILE) % LABELS
    with cache.writer() as writer:
        writer.extend(x=np.zeros((ROWS_A_FILE, ROW_BYTES // 4), np.float32), label=labels)
    (first,) = (path / "segments").iterdir()
    data = first.read_bytes()
    for seq in range(1, rows // ROWS_A_FILE):
        with (path / "segments" / segment_name(seq, ROWS_A_FILE, "")).open("wb") as file:
            for start in range(0, len(data), mmap.PAGESIZE):
                page = data[start : start + mmap.PAGESIZE]
                if page.strip(b"\0"):
                    file.seek(start)
                    file.write(page)
            file.truncate(len(data))
    return cache


def group_by(folder: Path, rows: int) -> Figures:
    from arrowcache import explore

    with sparse_cache(folder / "sparse", rows) as cache:
        paths = sorted((cache.path / "segments").iterdir())
        os.sync()
        for path in paths:
            advise(path, os.POSIX_FADV_DONTNEED)
        before = sum(map(resident_bytes, paths))
        started = time.perf_counter()
        frame = explore.sql(cache, "select label, count(*) as n from cache group by 1")
        seconds = time.perf_counter() - started
        assert frame["n"].tolist() == [rows // LABELS] * LABELS
        touched = sum(map(resident_bytes, paths)) - before
        total = sum(path.stat().st_size for path in paths)
    values = {"s": seconds, "MB in memory after it": touched / 1e6, "MB more before": before / 1e6}
    title = f"group-by over {rows} rows, {total / 1e9:.1f} GB, from a cold disk"
    return Figures(title, values | {"MB of labels": rows * 8 / 1e6})


def explore(options: Options) -> Iterator[Figures]:
    for statement in ("import arrowcache", "import arrowcache.explore"):
        seconds = statistics.median(import_seconds(statement) for _ in range(options.turns(REPEATS)))
        yield Figures(statement, {"ms": 1e3 * seconds})
    with scratch(options.folder) as folder:
        many_segments(folder / "many")
        first, again = html_seconds(folder / "many", options.turns(REPEATS))
        yield Figures("HTML of 16,000 segments", {"ms": 1e3 * first, "again, ms": 1e3 * again})
        yield group_by(folder, options.of(GROUPED_ROWS))
    with filled(options, ROW_BYTES, DESCRIBED_BYTES) as cache:
        os.sync()
        for path in (cache.path / "segments").iterdir():
            path.read_bytes()
        for _ in range(options.turns(3)):
            got = fresh("benchmarks.explore:describe", str(cache.path))
            gigabytes = got["count"] * 4 / 1e9
            yield Figures(
                f"describe {gigabytes:.1f} GB of float32",
                {
                    "GB/s": gigabytes / got["seconds"], "CPU s a GB": got["cpu"] / gigabytes,
                    "private memory, MB": got["private"] / 1e6,
                },
            )  # fmt: skip
