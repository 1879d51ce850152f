"""How long does an epoch take to begin, and is there a seam between two?

Question 1: from `iter` to the first batch in hand, data ready: of the first epoch of a loader, and
of later ones. Question 2: in `repeat()`, the gap between the last batch of an epoch and the first of
the next, over the usual gap between two batches, for a consumer that waits 3 ms a step, as for a GPU,
and for one that spins in Python for as long and never lets go of the GIL. Question 3: the same of 16,000
small segments, of which 100 are new in each epoch: the first batch of later epochs, and the worst gap in
`repeat()`.
Method: caches of 1 GiB, page cache warm: 64 KiB rows in batches of 64, and 1 KiB rows (10^6 of them)
in batches of 64 and 1,024; medians of several epochs. The usual gap is the median of `next` plus the step;
a seam's is that at an epoch's first batch. 16,000 segments are files of 100 rows of 64 bytes, read in
batches of 64, and of 1,024 without a pause: 100 files are written and the 100 oldest unlinked in the middle
of each epoch; the time of the processor stands beside that of the clock.
Run: `python -m benchmarks.epochs`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import arrowcache as ac
from arrowcache.storage.layout import segment_name
from benchmarks.history import remember
from benchmarks.measure import MANY_ROWS, MANY_SEGMENTS, filled_cache, machine, many_segments

TOTAL_BYTES = 1 << 30
EPOCHS = 9
NEW_SEGMENTS = 100
STEP_SECONDS = 0.003


def first_batch(cache: ac.Cache, batch_rows: int, shuffle: str | None) -> tuple[float, float]:
    """Milliseconds from `iter` to the first batch: of the first epoch, and the median of later ones."""
    times = []
    with ac.Loader(cache, batch_rows, shuffle=shuffle) as loader:
        for _ in range(EPOCHS):
            started = time.perf_counter()
            iterator = iter(loader)
            next(iterator)
            times.append(time.perf_counter() - started)
            for _ in zip(range(100), iterator, strict=False):
                pass
            del iterator
    return times[0] * 1e3, statistics.median(times[1:]) * 1e3


def seam(
    cache: ac.Cache, batch_rows: int, shuffle: str | None, *, is_busy: bool
) -> tuple[float, float, float]:
    """Milliseconds of the usual gap between two batches, of the median seam and of the longest."""
    usual: list[float] = []
    seams: list[float] = []
    with ac.Loader(cache, batch_rows, shuffle=shuffle) as loader:
        iterator = loader.repeat()
        next(iterator)
        steps, step = loader.steps or 0, 1
        began = time.perf_counter()
        while len(seams) < EPOCHS:
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


def roll(folder: Path, data: bytes, epoch: int) -> None:
    """The newest segments come, and as many of the oldest go."""
    first = epoch * NEW_SEGMENTS
    for seq in range(first, first + NEW_SEGMENTS):
        (folder / segment_name(MANY_SEGMENTS + seq, MANY_ROWS, "")).write_bytes(data)
        (folder / segment_name(seq, MANY_ROWS, "")).unlink()


def worst_gaps(path: Path, data: bytes) -> tuple[float, float]:
    """Milliseconds of the longest `next` of an epoch, and of the processor in it: medians of later epochs."""
    worst = []
    with ac.Cache.open(path) as cache, ac.Loader(cache, 1024) as loader:
        iterator = loader.repeat()
        next(iterator)
        steps = loader.steps or 0
        for epoch in range(EPOCHS):
            gaps = []
            for step in range(steps):
                if step == steps // 2:
                    roll(path / "segments", data, epoch)
                started = time.perf_counter(), time.process_time()
                next(iterator)
                gaps.append((time.perf_counter() - started[0], time.process_time() - started[1]))
            worst.append(max(gaps))
        iterator.close()
    seconds, cpu_seconds = zip(*worst[1:], strict=True)
    return statistics.median(seconds) * 1e3, statistics.median(cpu_seconds) * 1e3


def main() -> None:
    print(machine())
    print("milliseconds")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        data = many_segments(path)
        with ac.Cache.open(path) as cache:
            first, later = first_batch(cache, 64, "rows")
        print(f"{MANY_SEGMENTS} segments, first batch of an epoch: {first:.1f}, of later ones: {later:.1f}")
        gap, of_processor = worst_gaps(path, data)
        print(
            f"{MANY_SEGMENTS} segments, {NEW_SEGMENTS} of them new in an epoch, worst gap in repeat(): "
            f"{gap:.1f}, {of_processor:.1f} of the processor"
        )
    header = ("row", "batch", "shuffle", "first epoch", "later", "gap", "seam", "ratio", "worst")
    print(" ".join(f"{name:>11}" for name in (*header, "busy: gap", "seam", "ratio", "worst")))
    ratios = {}
    for row_bytes, batch_rows in ((65536, 64), (1024, 64), (1024, 1024)):
        with tempfile.TemporaryDirectory() as folder:
            cache = filled_cache(Path(folder) / "cache", row_bytes, TOTAL_BYTES)
            for batch in ac.Loader(cache, 1024):  # touch every page once
                del batch
            for shuffle in ("rows", "window", "blocks", None):
                figures = [*first_batch(cache, batch_rows, shuffle)]
                for is_busy in (False, True):
                    usual, at_seam, worst = seam(cache, batch_rows, shuffle, is_busy=is_busy)
                    figures += [usual, at_seam, at_seam / usual, worst]
                    consumer = "spinning" if is_busy else "waiting"
                    name = f"{row_bytes} bytes, {batch_rows} rows, {shuffle}, {consumer}: gap over the seam"
                    ratios[name] = usual / at_seam
                text = " ".join(f"{figure:11.2f}" for figure in figures)
                print(f"{row_bytes:11} {batch_rows:11} {shuffle!s:>11} {text}")
            cache.close()
    remember("epochs", ratios)


if __name__ == "__main__":
    main()
