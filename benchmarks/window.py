"""How fast is the window order from a cold disk?

Question: an epoch of shuffle="window" over a cache whose files are not in memory, against `dd` of the
same files one after another, in the same run, both with the page cache emptied of them before.
Method: 3 GiB of 64 KiB rows in 64 MiB segments, window_bytes=512 MiB; POSIX_FADV_DONTNEED on every
file before each turn (after a sync); the cases take turns; medians and the median of the ratios of each
turn. dd reads with the kernel's read-ahead (`bs=1M`, as `cat` would), and for comparison with WILLNEED
of the next file, so that the disk reads ahead of it, as the loader has it do.
Run: `python -m benchmarks.window`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import filled_cache, machine

TOTAL_BYTES = 3 << 30
ROW_BYTES = 65536
REPEATS = 5


def forget(files: list[Path]) -> None:
    """Empty the page cache of some files."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def dd(files: list[Path]) -> float:
    """Seconds that dd takes for all files, one after another."""
    started = time.perf_counter()
    names = " ".join(map(str, files))
    command = f"for file in {names}; do dd if=$file of=/dev/null bs=1M status=none; done"
    subprocess.run(["sh", "-c", command], check=True)
    return time.perf_counter() - started


def dd_with_read_ahead(files: list[Path]) -> float:
    """The same, the kernel being told of the next file while one is read."""
    started = time.perf_counter()
    for number, path in enumerate(files):
        for ahead in files[number : number + 2]:
            fd = os.open(ahead, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            os.close(fd)
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"], check=True)
    return time.perf_counter() - started


def epoch(loader: ac.Loader) -> float:
    """Seconds of one epoch."""
    started = time.perf_counter()
    for batch in loader:
        del batch
    return time.perf_counter() - started


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        cache = filled_cache(Path(folder) / "cache", ROW_BYTES, TOTAL_BYTES)
        files = sorted((cache.path / "segments").iterdir())
        nbytes = sum(path.stat().st_size for path in files)
        os.sync()
        cases = {"dd": dd, "dd, read-ahead": dd_with_read_ahead}
        seconds: dict[str, list[float]] = {name: [] for name in (*cases, "window", "None", "rows")}
        for _ in range(REPEATS):
            for name, run in cases.items():
                forget(files)
                seconds[name].append(run(files))
            for shuffle in ("window", None, "rows"):
                options = {"window_bytes": "512MiB"} if shuffle == "window" else {}
                with ac.Loader(cache, 64, shuffle=shuffle, **options) as loader:  # type: ignore[arg-type]
                    forget(files)
                    seconds[str(shuffle)].append(epoch(loader))
        cache.close()
    print(f"{'':>16} {'GB/s':>6} {'over dd':>8} {'over dd with read-ahead':>24}")
    found = {}
    for name, times in seconds.items():
        turns = [[b / own for b, own in zip(seconds[case], times, strict=True)] for case in cases]
        ratios = [statistics.median(each) for each in turns]
        found[f"{name} over dd with read-ahead"] = turns[1]
        rate = nbytes / statistics.median(times) / 1e9
        print(f"{name:>16} {rate:6.2f} {ratios[0]:8.2f} {ratios[1]:24.2f}")
    remember("window", found)


if __name__ == "__main__":
    main()
