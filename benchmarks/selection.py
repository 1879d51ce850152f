"""What does it cost to leave rows out, and to draw them by weights?

Question 1: how fast is `Loader(rows=mask)` over a Loader of the same rows in a cache of their own? A mask of
three rows in four, by a column; rows of 8 bytes to 64 KiB, batches of 64, page cache warm; seconds an epoch,
in turns, median of the ratios.
Question 2: how long does one step of prioritized replay take at 10^7 rows, of which `epoch_rows` is the
interval at which new priorities hold: to draw a batch by weight, and to note its new priorities? Loader and
`Cache.annotate`; seconds of an epoch with its beginning, less those of a Loader of as many rows without
weights, which gathers as well. Beside it torchrl's PrioritizedSampler, which only draws indices: `sample` and
`update_priority`, in a process of its own where its library loads.
Question 3: how long does `annotate` take for 64 scattered rows, of a batch?
Question 4: what do notes on 10^7 rows of 12 bytes take on the disk, how long does it take to exclude half of
them, and how much memory beyond the ids? A random half, in order, and then shuffled; then the older half, so
that both are merged. How long does an epoch's beginning take then?
Question 5: how long does an epoch of 10^7 rows take to begin where a function, or an expression, of an int64
column chooses half of them: its files dropped from the page cache, in memory, and as a loader's second one?
How long is the longest step of `repeat()`?
Run: `python -m benchmarks.selection`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

import arrowcache as ac

TURNS, BATCH = 7, 64
ROWS, INTERVALS = 10_000_000, (100_000, 1_000_000)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'shuffle':>8} {'row':>7} {'own, us a batch':>16} {'rows=mask over own':>19}")
        for shuffle in ("rows", "window", "blocks"):
            for row_bytes, rows in ((8, 2_000_000), (1024, 400_000), (65536, 12_000)):
                compare_selected(Path(folder, f"{shuffle}-{row_bytes}"), shuffle, row_bytes, rows)
    with tempfile.TemporaryDirectory() as folder:
        replay(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        note(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        choose(Path(folder))


def compare_selected(folder: Path, shuffle: str, row_bytes: int, rows: int) -> None:
    schema = ac.Schema({"x": ac.Tensor("uint8", (row_bytes,)), "label": ac.Tensor("int64")})
    labels = np.arange(rows) % 4
    both = {}
    for name, some in (("all", labels), ("own", labels[labels != 3])):
        cache = ac.Cache.create(folder / name, schema, capacity="4GB", segment_bytes="16MiB")
        with cache.writer() as writer:
            for first in range(0, len(some), 4096):
                part = some[first : first + 4096]
                writer.extend(x=np.zeros((len(part), row_bytes), np.uint8), label=part)
        both[name] = cache
    with (
        ac.Loader(both["all"], BATCH, shuffle=shuffle, rows=lambda columns: columns["label"] != 3) as masked,
        ac.Loader(both["own"], BATCH, shuffle=shuffle) as own,
    ):
        pairs = [(seconds_a_step(masked), seconds_a_step(own)) for _ in range(TURNS + 1)][1:]
    ratio = statistics.median(alone / beside for beside, alone in pairs)
    alone = statistics.median(alone for _, alone in pairs)
    print(f"{shuffle:>8} {row_bytes:7d} {1e6 * alone:16.1f} {ratio:19.2f}")


def seconds_a_step(loader: ac.Loader, step: Callable[[Any], object] = lambda _: None) -> float:
    """Seconds of an epoch, with its beginning, over its steps."""
    steps, started = 0, time.perf_counter()
    for batch in loader:
        step(batch)
        steps += 1
    return (time.perf_counter() - started) / steps


def replay(folder: Path) -> None:
    cache = ac.Cache.create(folder / "cache", {"x": ac.Tensor("float32")}, "8GB", segment_bytes="4MiB")
    with cache.writer() as writer:
        for _ in range(20):
            writer.extend(x=np.zeros(ROWS // 20, np.float32))
    with cache.snapshot() as snapshot:
        for first in range(0, ROWS, 1_000_000):
            ids = snapshot.locate(np.arange(first, min(first + 1_000_000, ROWS)))
            cache.annotate(ids, priority=np.random.default_rng(first).random(len(ids["_seq"])))
    theirs = torchrl_seconds()
    titles = ("weights, us", "without", "draw and note", "torchrl", "over")
    print(f"{'batch':>6} {'interval':>9} {' '.join(f'{title:>13}' for title in titles)}")
    noted: list[float] = []
    for batch in (64, 256):
        for interval in INTERVALS:
            options = {"epoch_rows": interval, "with_ids": True}
            rng = np.random.default_rng(0)

            def note(found: Any, rng: np.random.Generator = rng) -> None:
                priorities = rng.random(len(found["_seq"]))
                started = time.perf_counter()
                cache.annotate(found, priority=priorities)
                noted.append(time.perf_counter() - started)

            with (
                ac.Loader(cache, batch, weights="priority", **options) as weighed,
                ac.Loader(cache, batch, **options) as plain,
            ):
                pairs = [(seconds_a_step(weighed, note), seconds_a_step(plain)) for _ in range(TURNS)][2:]
            ours, without = (1e6 * statistics.median(each) for each in zip(*pairs, strict=True))
            other = 1e6 * theirs.get(batch, float("nan"))
            print(
                f"{batch:6d} {interval:9d} {ours:13.1f} {without:13.1f} {ours - without:13.1f} {other:13.1f} "
                f"{other / (ours - without):13.1f}"
            )
        print(f"annotate of {batch} rows: {1e6 * statistics.median(noted):.1f} us")
        noted.clear()
    cache.close()


def note(folder: Path) -> None:
    cache = ac.Cache.create(folder / "cache", {"x": ac.Tensor("float32", (3,))}, "1GB", segment_bytes="6MiB")
    with cache.writer() as writer:
        for _ in range(20):
            writer.extend(x=np.zeros((ROWS // 20, 3), np.float32))
    rng = np.random.default_rng(0)
    with cache.snapshot() as snapshot:
        found = snapshot.locate(np.arange(ROWS))
    ids = np.stack([found["_seq"], found["_row"]], axis=1)
    half = ids[rng.random(ROWS) < 0.5]
    for which, rows in (
        ("half", half),
        ("again, shuffled", rng.permutation(half)),
        ("the older half", ids[: ROWS // 2]),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured anew
        before, started, busy = memory("VmRSS"), time.perf_counter(), time.process_time()
        cache.exclude(rows)
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
        print(
            f"exclude {which}: {seconds:.2f} s ({busy:.2f} of a processor), "
            f"{(memory('VmHWM') - before) / 1e6:.0f} MB of memory, "
            f"{8 * bytes_of(cache, 'marks') / ROWS:.2f} bits a row"
        )
    with ac.Loader(cache, BATCH) as loader:
        started = time.perf_counter()
        next(iter(loader))
        print(f"an epoch begins in {time.perf_counter() - started:.2f} s")
    for kind in ("float32", "float64"):
        for first in range(0, ROWS, 1_000_000):
            rows = ids[first : first + 1_000_000]
            cache.annotate(rows, **{kind: rng.random(len(rows)).astype(kind)})
        cache.close()
        cache = ac.Cache.open(cache.path)
        print(f"annotations, {kind}: {(bytes_of(cache, 'values')) / ROWS:.2f} bytes a row, of all so far")
    cache.close()


def choose(folder: Path) -> None:
    cache = ac.Cache.create(folder / "cache", {"x": ac.Tensor("int64")}, "400MB", segment_bytes="4MiB")
    with cache.writer() as writer:
        for first in range(0, ROWS, ROWS // 20):
            writer.extend(x=np.arange(first, first + ROWS // 20))
    titles = ("cold, s", "warm, s", "again, s", "longest step, ms", "median, ms")
    print(f"{'rows=':>10} {' '.join(f'{title:>16}' for title in titles)}")
    for name, options in {
        "all": {},
        "function": {"rows": lambda columns: columns["x"] % 2 == 0},
        "expression": {"rows": pc.equal(pc.bit_wise_and(pc.field("x"), 1), 0)},
    }.items():
        for file in cache.path.glob("segments/*.arrow"):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        new, again = [], []  # seconds of a loader's first epoch, and of its second one
        for _ in range(1 + TURNS):  # the first one is cold
            with ac.Loader(cache, 16384, **options) as loader:
                for seconds in (new, again):
                    started = time.perf_counter()
                    next(iter(loader))
                    seconds.append(time.perf_counter() - started)
        with ac.Loader(cache, 16384, **options) as loader:
            batches, steps = loader.repeat(), []
            next(batches)
            for _ in range(3 * loader.steps):
                started = time.perf_counter()
                next(batches)
                steps.append(time.perf_counter() - started)
        warm = (new[0], statistics.median(new[1:]), statistics.median(again))
        found = (*warm, 1e3 * max(steps), 1e3 * statistics.median(steps))
        print(f"{name:>10} {' '.join(f'{value:16.2f}' for value in found)}")
    cache.close()


def memory(what: str) -> int:
    """A count of this process' memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))


def bytes_of(cache: ac.Cache, kind: str) -> int:
    return sum(file.stat().st_size for file in (cache.path / "notes").glob(f"*.{kind}.arrow"))


def torchrl_seconds() -> dict[int, float]:
    """Seconds to draw and update, by batch size; empty where torchrl is not installed, or does not load."""
    try:
        import torch
        from torchrl.data import LazyTensorStorage
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        sampler = PrioritizedSampler(ROWS, alpha=0.7, beta=0.5)
    except (ImportError, RuntimeError, OSError) as error:
        print(f"torchrl: {error}")
        return {}
    storage = LazyTensorStorage(ROWS)
    storage.set(range(ROWS), torch.zeros(ROWS))
    sampler.update_priority(torch.arange(ROWS), torch.rand(ROWS))
    found = {}
    for batch in (64, 256):
        seconds = []
        for _ in range(1000):
            priorities = torch.rand(batch)
            started = time.perf_counter()
            index, _ = sampler.sample(storage, batch)
            sampler.update_priority(index, priorities)
            seconds.append(time.perf_counter() - started)
        found[batch] = statistics.median(seconds)
    return found


if __name__ == "__main__":
    main()
