"""The benchmarks of times and memory that fit the harness: of a batch, an epoch and a process.

Each docstring has the question and the method; see `cases`.
Run: `python -m benchmarks NAME`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import arrowcache as ac
from arrowcache.native import maps
from arrowcache.reading.stats import resident_bytes
from arrowcache.storage.layout import segment_name
from benchmarks.fresh import fresh
from benchmarks.harness import (
    MANY_ROWS,
    MANY_SEGMENTS,
    SHM,
    Figures,
    Options,
    begun,
    epoch,
    filled,
    filled_cache,
    many_segments,
    named,
    scratch,
    written,
)

if TYPE_CHECKING:
    pass

ROWS = 64_000  # of the caches whose memory is measured


def labelled_rows(folder: Path, segment_rows: int, rows: int) -> Path:
    """A new cache of rows of 1 KiB and a label."""
    schema = ac.Schema({"x": ac.Tensor("float32", (256,)), "y": ac.Tensor("int64")})
    segment_bytes = 1200 * segment_rows + 8192
    x = np.ones((4000, 256), np.float32)
    parts = ({"x": x, "y": np.arange(first, first + 4000)} for first in range(0, rows, 4000))
    with written(folder / "cache", schema, parts, "2GiB", segment_bytes, segment_rows) as cache:
        return cache.path


def views(options: Options) -> Iterator[Figures]:
    """What does a batch cost that is a zero-copy view?

    Question: bytes copied, and time of a batch, of shuffle="blocks" and None where batches are runs of
    rows, for a consumer that only takes and drops them: inside `next`, and in all; and the time of one of
    `snapshot.views(batch_rows)`, which one thread makes and drops. A batch of views should cost the same
    whatever its bytes.
    Method: segments whose rows the batch divides; an epoch a turn; the first turn is left out. `next`: the
    median of all batches. In all: from the first batch of an epoch in hand to its last, over the batches
    between, the median of all turns; likewise the views.
    """
    turns = options.turns(6)
    for row_bytes, batch_rows in ((65536, 64), (65536, 320), (1024, 1024), (1024, 64)):
        rows = 960 if row_bytes == 65536 else 61440
        title = named(row_bytes, batch_rows)
        with filled(options, row_bytes, segment_rows=rows) as cache:
            for shuffle in ("blocks", None):
                inside, whole, copied = time_views(cache, rows, batch_rows, shuffle, turns)
                values = {"us in next": inside, "us a batch": whole, "bytes copied": copied}
                yield Figures(f"{title}, {shuffle}", values)
            taken = []
            with cache.snapshot(lambda s: s.rows == rows) as snapshot:  # noqa: B023  # asked at once
                for _ in range(turns):
                    started = time.perf_counter()
                    for view in snapshot.views(batch_rows):
                        del view
                    taken.append((time.perf_counter() - started) / (len(snapshot) // batch_rows))
            values = {"us a batch": 1e6 * statistics.median(taken[1:]), "bytes copied": 0}
            yield Figures(f"{title}, views()", values)


def time_views(
    cache: ac.Cache, rows: int, batch_rows: int, shuffle: str | None, turns: int
) -> tuple[float, float, int]:
    """(microseconds in `next`, in all, bytes copied)."""
    inside: list[float] = []
    whole: list[float] = []
    with ac.Loader(cache, batch_rows, shuffle=shuffle, where=lambda s: s.rows == rows) as loader:
        loader.assert_zero_copy()
        for turn in range(turns):
            iterator = iter(loader)
            batch = next(iterator)
            started = time.perf_counter()
            while True:
                del batch
                before = time.perf_counter()
                batch = next(iterator, None)
                if batch is None:
                    break
                if turn:
                    inside.append(time.perf_counter() - before)
            if turn:
                assert loader.steps
                whole.append((time.perf_counter() - started) / (loader.steps - 1))
        copied = loader.stats().copied_bytes
    return statistics.median(inside) * 1e6, statistics.median(whole) * 1e6, copied


def memory(options: Options) -> Iterator[Figures]:
    """How much private memory does a loader need, over 16,000 segments and with large batches?

    Question: growth of the process' private resident memory (RssAnon) over what it was after `import
    arrowcache` and opening the cache: with all segments mapped, and after each of three epochs; beyond the
    loader's slots, which are what the same loader takes for the same rows in 16 segments; and with batches
    of 4 MiB, 64 rows of 64 KiB, of 256 MiB in 4 segments.
    Method: 64,000 rows of 1 KiB and a label, in 16,000 segments of 4 and in 16 of 4,000, in memory
    (/dev/shm); a fresh process each; every epoch reads all. The page cache is not private memory.
    """
    needs = []
    for segment_rows in (4, 4000):
        with scratch(SHM) as folder:
            path = labelled_rows(folder, segment_rows, options.of(ROWS))
            needs.append(fresh("benchmarks.latencies:private_growth", str(path)))
    for name, many, few in zip(("mapped", "epoch 0", "epoch 1", "epoch 2"), *needs, strict=True):
        yield Figures(f"{name}, MB", {"16,000 segments": many, "16": few, "difference": many - few})
    with scratch(SHM) as folder:
        filled_cache(folder / "cache", 65536, options.of(256 << 20)).close()
        grown = fresh("benchmarks.latencies:private_growth", str(folder / "cache"))
    yield Figures("batches of 4 MiB", {"MiB": max(grown) * 1e6 / 2**20})


def private_growth(folder: str) -> list[float]:
    """The private memory of this fresh process, in MB: with all mapped, and after each of three epochs."""
    cache = ac.Cache.open(folder)
    before = resident_bytes()[0]
    with cache.snapshot() as snapshot:
        snapshot.map_all()
        grown = [resident_bytes()[0] - before]
    with ac.Loader(cache, 64) as loader:
        for _ in range(3):
            assert sum(len(batch["y"]) for batch in loader) == len(snapshot)
            grown.append(resident_bytes()[0] - before)
    return [nbytes / 1e6 for nbytes in grown]


def startup(options: Options) -> Iterator[Figures]:
    """How long until the first row: importing, opening, taking a snapshot, mapping it?

    Question: `import arrowcache` beyond NumPy and pyarrow, without and with the first use of Cache, Loader
    and SamplerPool; a snapshot of 16,000 segments, listed before and not; mapping them, for the first time
    and again, and how much of that is C; from `iter(loader)` to the first batch in a fresh process, its
    imports done, without workers and with two worker processes.
    Method: 16,000 files of one small segment each under consecutive names; 256 MiB of 64 KiB rows in
    batches of 64; medians of several, each in a fresh process, in turns; with each time that of the
    processor, of the process that asks.
    """
    repeats, packages = options.turns(9), "import numpy, pyarrow"
    statements = {
        "beyond numpy and pyarrow": f"{packages}, arrowcache",
        "that, and its Cache, Loader and SamplerPool": (
            f"{packages}, arrowcache as ac; ac.Cache, ac.Loader, ac.SamplerPool"
        ),
    }
    times = [[import_seconds(each) for each in (packages, *statements.values())] for _ in range(repeats)]
    bare, *ours = (statistics.median(each) for each in zip(*times, strict=True))
    for name, seconds in zip(statements, ours, strict=True):
        yield Figures(f"import arrowcache, {name}", {"ms": 1e3 * (seconds - bare)})
    with scratch(options.folder) as folder:
        filled_cache(folder / "cache", 65536, options.of(256 << 20)).close()
        for workers in (0, 2):
            turns = [
                fresh("benchmarks.latencies:time_first_batch", str(folder / "cache"), workers)
                for _ in range(repeats)
            ]
            yield from clocked([f"from iter to the first batch in a fresh process, workers={workers}"], turns)
    with scratch(options.folder) as folder:
        path = folder / "cache"
        many_segments(path)
        firsts, agains = [], []
        for _ in range(repeats):
            started = time.perf_counter()
            cache = ac.Cache.open(path)
            for seconds in (firsts, agains):
                with cache.snapshot():
                    seconds.append(time.perf_counter() - started)
                started = time.perf_counter()
            cache.close()
        yield Figures(
            f"snapshot of {MANY_SEGMENTS} segments",
            {
                "with opening, ms": 1e3 * statistics.median(firsts),
                "listed before, ms": 1e3 * statistics.median(agains),
            },
        )
        turns = [fresh("benchmarks.latencies:time_mapping", str(path)) for _ in range(repeats)]
        names = ("take", "map", "its C", "take again", "map again", "close")
        yield from clocked([f"{MANY_SEGMENTS} segments in a fresh process, {name}" for name in names], turns)


def import_seconds(statement: str) -> float:
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def clocked(names: Sequence[str], turns: Sequence[Sequence[float]]) -> Iterator[Figures]:
    """Medians of what a `Clock` has in each turn."""
    medians = [1e3 * statistics.median(each) for each in zip(*turns, strict=True)]
    for number, name in enumerate(names):
        yield Figures(name, {"ms": medians[2 * number], "ms of the processor": medians[2 * number + 1]})


class Clock:
    """Times of one piece of work after another, each of the clock and of the processor."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def time(self, work: Callable[[], object]) -> None:
        started = time.perf_counter(), time.process_time()
        work()
        self.seconds += [time.perf_counter() - started[0], time.process_time() - started[1]]


def time_first_batch(folder: str, workers: int) -> list[float]:
    """The times from `iter` to the first batch, of this fresh process."""
    if workers:
        import arrowcache.reading.workers.pool  # noqa: F401
    clock = Clock()
    with ac.Cache.open(folder) as cache, ac.Loader(cache, 64, workers=workers) as loader:
        batches = []
        clock.time(lambda: batches.append(next(iter(loader))))
    return clock.seconds


def time_mapping(folder: str) -> list[float]:
    """The times of taking and mapping a snapshot, and how much of that is C, of this fresh process."""
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
    return [*clock.seconds[:4], *in_c, *clock.seconds[4:]]


EPOCHS, STEP_SECONDS, NEW_SEGMENTS = 9, 0.003, 100


def epochs(options: Options) -> Iterator[Figures]:
    """How long does an epoch take to begin, and is there a seam between two?

    Question 1: from `iter` to the first batch in hand, data ready: of the first epoch of a loader, and of
    later ones. Question 2: in `repeat()`, the gap between the last batch of an epoch and the first of the
    next, over the usual gap between two batches, for a consumer that waits 3 ms a step, as for a GPU, and
    for one that spins in Python for as long and never lets go of the GIL. Question 3: the same of 16,000
    small segments, of which 100 are new in each epoch: the first batch of later epochs, and the worst gap
    in `repeat()`.
    Method: 64 KiB rows in batches of 64, and 1 KiB rows (10^6 of them) in batches of 64 and 1,024; medians
    of several epochs. The usual gap is the median of `next` plus the step; a seam's is that at an epoch's
    first batch. 16,000 segments are files of 100 rows of 64 bytes, read in batches of 64, and of 1,024
    without a
    pause: 100 files are written and the 100 oldest unlinked in the middle of each epoch; the time of the
    processor stands beside that of the clock.
    """
    turns = options.turns(EPOCHS)
    with scratch(options.folder) as folder:
        data = many_segments(folder / "cache")
        with ac.Cache.open(folder / "cache") as cache:
            first, later = first_batch(cache, 64, "rows", turns)
        title = f"{MANY_SEGMENTS} segments"
        yield Figures(f"{title}, first batch, ms", {"of an epoch": first, "of later ones": later})
        gap, of_processor = worst_gaps(folder / "cache", data, turns)
        title = f"{title}, {NEW_SEGMENTS} of them new in an epoch, worst gap in repeat(), ms"
        yield Figures(title, {"of the clock": gap, "of the processor": of_processor})
    for row_bytes, batch_rows in ((65536, 64), (1024, 64), (1024, 1024)):
        with filled(options, row_bytes) as cache:
            epoch(ac.Loader(cache, 1024))  # touch every page once
            for shuffle in ("rows", "window", "blocks", None):
                title = f"{named(row_bytes, batch_rows)}, {shuffle}"
                first, later = first_batch(cache, batch_rows, shuffle, turns)
                yield Figures(f"{title}, first batch, ms", {"of an epoch": first, "of later ones": later})
                for consumer in ("waiting", "spinning"):
                    is_busy = consumer == "spinning"
                    usual, seam, worst = gaps(cache, batch_rows, shuffle, turns, is_busy=is_busy)
                    values = {"gap": usual, "seam": seam, "ratio": seam / usual, "worst": worst}
                    ratios = {f"{title}, {consumer}: gap over the seam": usual / seam}
                    yield Figures(f"{title}, {consumer}, ms", values, ratios)


def first_batch(cache: ac.Cache, batch_rows: int, shuffle: str | None, turns: int) -> tuple[float, float]:
    """Milliseconds from `iter` to the first batch: of the first epoch, and the median of later ones."""
    times = []
    with ac.Loader(cache, batch_rows, shuffle=shuffle) as loader:
        for _ in range(turns):
            seconds, batches = begun(loader)
            times.append(seconds)
            epoch(itertools.islice(batches, 100))
            del batches
    return times[0] * 1e3, statistics.median(times[1:]) * 1e3


def gaps(
    cache: ac.Cache, batch_rows: int, shuffle: str | None, turns: int, *, is_busy: bool
) -> tuple[float, float, float]:
    """Milliseconds of the usual gap between two batches, of the median seam and of the longest."""
    usual: list[float] = []
    seams: list[float] = []
    with ac.Loader(cache, batch_rows, shuffle=shuffle) as loader:
        iterator = loader.repeat()
        next(iterator)
        steps, step = loader.steps or 0, 1
        began = time.perf_counter()
        while len(seams) < turns:
            if is_busy:
                while time.perf_counter() - began < STEP_SECONDS:
                    pass  # it holds the GIL throughout
            else:
                time.sleep(max(0.0, began + STEP_SECONDS - time.perf_counter()))  # as for a GPU
            next(iterator)
            now = time.perf_counter()
            (seams if step % steps == 0 else usual).append(now - began)
            began = now
            step += 1
        iterator.close()
    return statistics.median(usual) * 1e3, statistics.median(seams) * 1e3, max(seams) * 1e3


def worst_gaps(path: Path, data: bytes, turns: int) -> tuple[float, float]:
    """Milliseconds of the longest `next` of an epoch, and of the processor in it: medians of later epochs."""
    worst = []
    folder = path / "segments"
    with ac.Cache.open(path) as cache, ac.Loader(cache, 1024) as loader:
        iterator = loader.repeat()
        next(iterator)
        steps = loader.steps or 0
        for number in range(turns):
            found = []
            for step in range(steps):
                if step == steps // 2:  # the newest segments come, and as many of the oldest go
                    for seq in range(number * NEW_SEGMENTS, (number + 1) * NEW_SEGMENTS):
                        (folder / segment_name(MANY_SEGMENTS + seq, MANY_ROWS, "")).write_bytes(data)
                        (folder / segment_name(seq, MANY_ROWS, "")).unlink()
                started = time.perf_counter(), time.process_time()
                next(iterator)
                found.append((time.perf_counter() - started[0], time.process_time() - started[1]))
            worst.append(max(found))
        iterator.close()
    seconds, of_processor = zip(*worst[1:], strict=True)
    return statistics.median(seconds) * 1e3, statistics.median(of_processor) * 1e3
