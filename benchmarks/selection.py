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
Run: `python -m benchmarks selection`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

import arrowcache as ac
from benchmarks.harness import Figures, Options, begun, scratch, seconds_of, written
from benchmarks.usage import advise, status_bytes

TURNS, BATCH = 7, 64
ROWS, INTERVALS = 10_000_000, (100_000, 1_000_000)


def selection(options: Options) -> Iterator[Figures]:
    with scratch(options.folder) as folder:
        for shuffle in ("rows", "window", "blocks"):
            for row_bytes, rows in ((8, 2_000_000), (1024, 400_000), (65536, 12_000)):
                place = folder / f"{shuffle}-{row_bytes}"
                yield compare_selected(place, shuffle, row_bytes, options.of(rows), options)
    for question in (replay, note, choose):
        with scratch(options.folder) as folder:
            yield from question(folder, options)


def compare_selected(folder: Path, shuffle: str, row_bytes: int, rows: int, options: Options) -> Figures:
    schema = ac.Schema({"x": ac.Tensor("uint8", (row_bytes,)), "label": ac.Tensor("int64")})
    labels = np.arange(rows) % 4
    both = {}
    for name, some in (("all", labels), ("own", labels[labels != 3])):
        labelled = (some[first : first + 4096] for first in range(0, len(some), 4096))
        parts = ({"x": np.zeros((len(each), row_bytes), np.uint8), "label": each} for each in labelled)
        both[name] = written(folder / name, schema, parts, "4GB", "16MiB")
    with (
        ac.Loader(both["all"], BATCH, shuffle=shuffle, rows=lambda columns: columns["label"] != 3) as masked,
        ac.Loader(both["own"], BATCH, shuffle=shuffle) as own,
    ):
        pairs = [(seconds_a_step(masked), seconds_a_step(own)) for _ in range(options.turns(TURNS) + 1)][1:]
    ratio = statistics.median(alone / beside for beside, alone in pairs)
    alone = statistics.median(alone for _, alone in pairs)
    values = {"own, us a batch": 1e6 * alone, "rows=mask over own": ratio}
    return Figures(f"{shuffle}, rows of {row_bytes} bytes", values)


def seconds_a_step(loader: ac.Loader, step: Callable[[Any], object] = lambda _: None) -> float:
    """Seconds of an epoch, with its beginning, over its steps."""
    steps, started = 0, time.perf_counter()
    for batch in loader:
        step(batch)
        steps += 1
    return (time.perf_counter() - started) / steps


def replay(folder: Path, options: Options) -> Iterator[Figures]:
    count = options.of(ROWS)
    parts = [{"x": np.zeros(count // 20, np.float32)}] * 20
    cache = written(folder / "cache", {"x": ac.Tensor("float32")}, parts, "8GB", "4MiB")
    with cache.snapshot() as snapshot:
        for first in range(0, count, 1_000_000):
            ids = snapshot.locate(np.arange(first, min(first + 1_000_000, count)))
            cache.annotate(ids, priority=np.random.default_rng(first).random(len(ids["_seq"])))
    theirs = torchrl_seconds(count)
    noted: list[float] = []
    for batch in (64, 256):
        for interval in map(options.of, INTERVALS):
            how = {"epoch_rows": interval, "with_ids": True}
            rng = np.random.default_rng(0)

            def note(found: Any, rng: np.random.Generator = rng) -> None:
                priorities = rng.random(len(found["_seq"]))
                noted.append(seconds_of(lambda: cache.annotate(found, priority=priorities)))

            with (
                ac.Loader(cache, batch, weights="priority", **how) as weighed,
                ac.Loader(cache, batch, **how) as plain,
            ):
                turns = range(2 + options.turns(TURNS - 2))
                pairs = [(seconds_a_step(weighed, note), seconds_a_step(plain)) for _ in turns][2:]
            ours, without = (1e6 * statistics.median(each) for each in zip(*pairs, strict=True))
            other = 1e6 * theirs.get(batch, float("nan"))
            own = ours - without
            values = {"weights": ours, "without": without, "draw and note": own, "torchrl": other}
            yield Figures(f"batch {batch}, interval {interval}, us", values | {"over": other / own})
        yield Figures(f"annotate of {batch} rows", {"us": 1e6 * statistics.median(noted)})
        noted.clear()
    cache.close()


def note(folder: Path, options: Options) -> Iterator[Figures]:
    count = options.of(ROWS)
    parts = [{"x": np.zeros((count // 20, 3), np.float32)}] * 20
    cache = written(folder / "cache", {"x": ac.Tensor("float32", (3,))}, parts, "1GB", "6MiB")
    rng = np.random.default_rng(0)
    with cache.snapshot() as snapshot:
        found = snapshot.locate(np.arange(count))
    ids = np.stack([found["_seq"], found["_row"]], axis=1)
    half = ids[rng.random(count) < 0.5]
    for which, rows in (
        ("half", half),
        ("again, shuffled", rng.permutation(half)),
        ("the older half", ids[: count // 2]),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured anew
        before, started, busy = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
        cache.exclude(rows)
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
        values = {"s": seconds, "s of a processor": busy}
        values["MB of memory"] = (status_bytes("VmHWM") - before) / 1e6
        yield Figures(f"exclude {which}", values | {"bits a row": 8 * bytes_of(cache, "marks") / count})
    with ac.Loader(cache, BATCH) as loader:
        yield Figures("an epoch begins in", {"s": begun(loader)[0]})
    for kind in ("float32", "float64"):
        for first in range(0, count, 1_000_000):
            rows = ids[first : first + 1_000_000]
            cache.annotate(rows, **{kind: rng.random(len(rows)).astype(kind)})
        cache.close()
        cache = ac.Cache.open(cache.path)
        values = {"bytes a row, of all so far": bytes_of(cache, "values") / count}
        yield Figures(f"annotations, {kind}", values)
    cache.close()


def choose(folder: Path, options: Options) -> Iterator[Figures]:
    count = options.of(ROWS)
    parts = ({"x": np.arange(first, first + count // 20)} for first in range(0, count, count // 20))
    cache = written(folder / "cache", {"x": ac.Tensor("int64")}, parts, "400MB", "4MiB")
    titles = ("cold, s", "warm, s", "again, s", "longest step, ms", "median, ms")
    for name, how in {
        "all": {},
        "function": {"rows": lambda columns: columns["x"] % 2 == 0},
        "expression": {"rows": pc.equal(pc.bit_wise_and(pc.field("x"), 1), 0)},
    }.items():
        for file in cache.path.glob("segments/*.arrow"):
            advise(file, os.POSIX_FADV_DONTNEED)
        new, again = [], []  # seconds of a loader's first epoch, and of its second one
        for _ in range(1 + options.turns(TURNS)):  # the first one is cold
            with ac.Loader(cache, 16384, **how) as loader:
                for seconds in (new, again):
                    seconds.append(begun(loader)[0])
        with ac.Loader(cache, 16384, **how) as loader:
            batches = loader.repeat()
            next(batches)
            steps = [seconds_of(partial(next, batches)) for _ in range(3 * loader.steps)]
        warm = (new[0], statistics.median(new[1:]), statistics.median(again))
        found = (*warm, 1e3 * max(steps), 1e3 * statistics.median(steps))
        yield Figures(f"rows={name}", dict(zip(titles, found, strict=True)))
    cache.close()


def bytes_of(cache: ac.Cache, kind: str) -> int:
    return sum(file.stat().st_size for file in (cache.path / "notes").glob(f"*.{kind}.arrow"))


def torchrl_seconds(count: int) -> dict[int, float]:
    """Seconds to draw and update, by batch size; empty where torchrl is not installed, or does not load."""
    try:
        import torch
        from torchrl.data import LazyTensorStorage
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        sampler = PrioritizedSampler(count, alpha=0.7, beta=0.5)
    except (ImportError, RuntimeError, OSError) as error:
        print(f"torchrl: {error}")
        return {}
    storage = LazyTensorStorage(count)
    storage.set(range(count), torch.zeros(count))
    sampler.update_priority(torch.arange(count), torch.rand(count))
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
