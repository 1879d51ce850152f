"""How long until the first row: importing, opening, taking a snapshot, mapping it?

Question: `import arrowcache` beyond NumPy and pyarrow, without and with the first use of Cache, Loader and
SamplerPool; a snapshot of 16,000 segments, listed before and not; mapping them, for the first time and
again, and how much of that is C; from `iter(loader)` to the first batch in a fresh process, its imports done,
without workers and with two worker processes.
Method: 16,000 files of one small segment each under consecutive names; 256 MiB of 64 KiB rows in batches of
64; page cache warm; medians of several, each in a fresh process, interleaved; with each time that of the
processor, of the process that asks.
Run: `python -m benchmarks.startup`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import arrowcache as ac
from arrowcache.native import maps
from benchmarks.measure import MANY_SEGMENTS, filled_cache, machine, many_segments

REPEATS = 9
PACKAGES = "import numpy, pyarrow"
OURS = f"{PACKAGES}, arrowcache"
USED = f"{PACKAGES}, arrowcache as ac; ac.Cache, ac.Loader, ac.SamplerPool"
MAPPING = ("take", "map", "its C", "take again", "map again", "close")


def import_seconds(statement: str) -> float:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


class Clock:
    """Times of one process after another, each of the clock and of the processor."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def time(self, work: Callable[[], object]) -> None:
        started = time.perf_counter(), time.process_time()
        work()
        self.seconds += [time.perf_counter() - started[0], time.process_time() - started[1]]


def time_first_batch(folder: str, workers: int) -> None:
    """Print the times from `iter` to the first batch, of this fresh process."""
    if workers:
        import arrowcache.reading.workers.remote  # noqa: F401
    clock = Clock()
    with ac.Cache.open(folder) as cache, ac.Loader(cache, 64, workers=workers) as loader:
        batches = []
        clock.time(lambda: batches.append(next(iter(loader))))
    print(*clock.seconds)


def time_mapping(folder: str) -> None:
    """Print the times of `MAPPING`, of this fresh process."""
    clock, opened, real = Clock(), Clock(), maps.open_alike

    def timed(*arguments: object) -> object:
        told: list[object] = []
        opened.time(lambda: told.append(real(*arguments)))  # type: ignore[arg-type]
        return told[0]

    maps.open_alike = timed  # type: ignore[assignment]
    snapshots: list[ac.Snapshot] = []
    with ac.Cache.open(folder) as cache:
        for _ in range(2):
            clock.time(lambda: snapshots.append(cache.snapshot()))
            clock.time(snapshots[-1].map_all)
        snapshots[1].close()
        clock.time(snapshots[0].close)
    in_c = [sum(opened.seconds[::2]), sum(opened.seconds[1::2])]
    print(*clock.seconds[:4], *in_c, *clock.seconds[4:])


def in_fresh_processes(name: str, commands: dict[str, list[str]]) -> dict[str, list[float]]:
    """Medians of what each command of this module prints; the cases take turns."""
    printed: dict[str, list[list[float]]] = {case: [] for case in commands}
    for _ in range(REPEATS):
        for case, arguments in commands.items():
            command = [sys.executable, "-m", "benchmarks.startup", name, *arguments]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            printed[case].append([float(word) for word in text.split()])
    return {case: [*map(statistics.median, zip(*rows, strict=True))] for case, rows in printed.items()}


def shown(what: str, seconds: float, cpu_seconds: float) -> None:
    print(f"{what}: {1e3 * seconds:.1f} ms, {1e3 * cpu_seconds:.1f} of the processor")


def main() -> None:
    if sys.argv[1:2] == ["first"]:
        time_first_batch(sys.argv[2], int(sys.argv[3]))
        return
    if sys.argv[1:2] == ["map"]:
        time_mapping(sys.argv[2])
        return
    print(machine())
    bare, ours, used = [], [], []
    for _ in range(REPEATS):
        bare.append(import_seconds(PACKAGES))
        ours.append(import_seconds(OURS))
        used.append(import_seconds(USED))
    for what, seconds in (("import arrowcache", ours), ("that, and its Cache, Loader and SamplerPool", used)):
        beyond = statistics.median(seconds) - statistics.median(bare)
        print(f"{what}, beyond numpy and pyarrow: {1e3 * beyond:.1f} ms")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        filled_cache(path, 65536, 256 << 20).close()
        commands = {str(workers): [str(path), str(workers)] for workers in (0, 2)}
        for workers, times in in_fresh_processes("first", commands).items():
            shown(f"from iter to the first batch in a fresh process, workers={workers}", *times)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        many_segments(path)
        firsts, agains = [], []
        for _ in range(REPEATS):
            started = time.perf_counter()
            cache = ac.Cache.open(path)
            with cache.snapshot():
                firsts.append(time.perf_counter() - started)
            started = time.perf_counter()
            with cache.snapshot():
                agains.append(time.perf_counter() - started)
            cache.close()
        print(
            f"open and first snapshot of {MANY_SEGMENTS} segments: {1e3 * statistics.median(firsts):.0f} ms"
        )
        print(f"snapshot of them, listed before: {1e3 * statistics.median(agains):.0f} ms")
        times = in_fresh_processes("map", {"map": [str(path)]})["map"]
        for number, what in enumerate(MAPPING):
            shown(f"{MANY_SEGMENTS} segments in a fresh process, {what}", *times[2 * number : 2 * number + 2])


if __name__ == "__main__":
    main()
