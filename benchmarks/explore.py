"""Looking at a cache: how long does it take, and what does it need?

Question: `import arrowcache.explore`; the HTML of a cache of 16,000 segments, first and again; `describe` of
10 GB of float32, its speed, processor time and private memory; how many pages a DuckDB group-by over labels
reads of 1,000,000 rows of 64 KiB.
Method: imports in fresh processes. The HTML as a notebook asks for it, of a cache just opened and of
one that was shown before. `describe` in a fresh process, its RssAnon sampled every 20 ms; the
files are read once before, and lie in the page cache as far as they fit. The rows of the group-by stand in
files with holes, 1,000 of 64 MB that take no room on the disk: all zeros but for the labels; after it
`mincore` tells which of their pages are in memory.
Run: `python -m benchmarks.explore [FOLDER]`, a folder on a disk. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import arrowcache as ac
from arrowcache.storage.layout import segment_name
from benchmarks.measure import cpu_seconds, filled_cache, machine
from benchmarks.startup import import_seconds, many_segments

REPEATS = 9
DESCRIBED_BYTES = 10 * 10**9
GROUPED_ROWS, ROWS_A_FILE, ROW_BYTES = 1_000_000, 1000, 65536
LABELS = 10


def html_seconds(path: Path) -> tuple[float, float]:
    """Median seconds for the HTML of a cache that was just opened, and of one shown before."""
    firsts, agains = [], []
    for _ in range(REPEATS):
        with ac.Cache.open(path) as cache:
            for seconds in (firsts, agains):
                started = time.perf_counter()
                cache._repr_html_()
                seconds.append(time.perf_counter() - started)
    return statistics.median(firsts), statistics.median(agains)


def anonymous_bytes() -> int:
    """This process's private memory that is no file's."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def describe(path: Path) -> dict[str, float]:
    """In a process of its own: seconds, processor seconds and the most private memory."""
    from arrowcache import explore

    explore.describe  # noqa: B018  # loads what it needs
    most, done = anonymous_bytes(), threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, anonymous_bytes())

    sampling = threading.Thread(target=sample)
    sampling.start()
    started, cpu = time.perf_counter(), cpu_seconds()
    frame = explore.describe(path, columns=["x"], progress=False)
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    done.set()
    sampling.join()
    return {"seconds": seconds, "cpu": cpu, "private": most, "count": int(frame["count"]["x"])}


def sparse_cache(path: Path) -> ac.Cache:
    """A cache of GROUPED_ROWS rows that are zeros, in files with holes; labels count up."""
    schema = ac.Schema({"x": ac.Tensor("float32", (ROW_BYTES // 4,)), "label": ac.Tensor("int64")})
    cache = ac.Cache.create(path, schema, "100GB", "64MiB", ROWS_A_FILE)
    labels = np.arange(ROWS_A_FILE) % LABELS
    with cache.writer() as writer:
        writer.extend(x=np.zeros((ROWS_A_FILE, ROW_BYTES // 4), np.float32), label=labels)
    (first,) = (path / "segments").iterdir()
    data = first.read_bytes()
    for seq in range(1, GROUPED_ROWS // ROWS_A_FILE):
        with (path / "segments" / segment_name(seq, ROWS_A_FILE, "")).open("wb") as file:
            for start in range(0, len(data), mmap.PAGESIZE):
                page = data[start : start + mmap.PAGESIZE]
                if page.strip(b"\0"):
                    file.seek(start)
                    file.write(page)
            file.truncate(len(data))
    return cache


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
        memory = np.frombuffer(mapped, np.uint8)
        code = libc.mincore(*map(ctypes.c_size_t, (memory.ctypes.data, len(mapped), pages.ctypes.data)))
        del memory
        if code:
            raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum()) * mmap.PAGESIZE


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def group_by(folder: Path) -> None:
    from arrowcache import explore

    with sparse_cache(folder / "sparse") as cache:
        paths = sorted((cache.path / "segments").iterdir())
        forget(paths)
        before = sum(map(resident_bytes, paths))
        started = time.perf_counter()
        frame = explore.sql(cache, "select label, count(*) as n from cache group by 1")
        seconds = time.perf_counter() - started
        assert frame["n"].tolist() == [GROUPED_ROWS // LABELS] * LABELS
        touched = sum(map(resident_bytes, paths)) - before
        total = sum(path.stat().st_size for path in paths)
    print(
        f"group-by over {GROUPED_ROWS} rows, {total / 1e9:.1f} GB, from a cold disk: {seconds:.2f} s, "
        f"{touched / 1e6:.1f} MB in memory after it ({before / 1e6:.1f} MB more before), "
        f"labels are {GROUPED_ROWS * 8 / 1e6:.1f} MB"
    )


def main(folder: str | None = None) -> None:
    print(machine())
    for statement in ("import arrowcache", "import arrowcache.explore"):
        seconds = statistics.median(import_seconds(statement) for _ in range(REPEATS))
        print(f"{statement}: {1e3 * seconds:.0f} ms")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "many"
        many_segments(path)
        first, again = html_seconds(path)
        print(f"HTML of 16,000 segments: {1e3 * first:.0f} ms, again {1e3 * again:.0f} ms")
        group_by(Path(name))
    with tempfile.TemporaryDirectory(dir=folder) as name:
        filled_cache(Path(name) / "cache", ROW_BYTES, DESCRIBED_BYTES).close()
        os.sync()
        for path in (Path(name) / "cache" / "segments").iterdir():
            path.read_bytes()
        for _ in range(3):
            command = [sys.executable, "-m", "benchmarks.explore", "--describe", f"{name}/cache"]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            got = json.loads(text)
            gigabytes = got["count"] * 4 / 1e9
            print(
                f"describe {gigabytes:.1f} GB of float32: {gigabytes / got['seconds']:.2f} GB/s, "
                f"{got['cpu'] / gigabytes:.2f} CPU s a GB, private memory {got['private'] / 1e6:.0f} MB"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--describe"]:
        print(json.dumps(describe(Path(sys.argv[2]))))
    else:
        main(*sys.argv[1:2])
