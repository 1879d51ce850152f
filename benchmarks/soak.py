"""Does anything grow over 2,000 epochs of a cache that rolls on?

Question: private memory, open descriptors, mappings and held locks of a process that reads epoch
after epoch, each over another snapshot, and of its worker processes: are they flat?
Method: a cache of 64 segments of 64 KiB; before each epoch as much is published as makes it evict two
segments or more. A fresh process a kind of reader; every 20 epochs it counts, in the midst of its work
(the loader is open, views and tables are held), over itself and its workers: Private_Dirty of
smaps_rollup (clean private pages are those of libraries that no other process happens to use), entries of
/proc/pid/fd, lines of maps, locks in fdinfo. The table has the medians of the first and the last
tenth of the samples, and the slope a line through the later three quarters has, in units a 1,000 epochs.
Run: `python -m benchmarks soak`; the plot is benchmarks/pictures/soak.png.
Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from benchmarks.fresh import fresh
from benchmarks.harness import Figures, Options, scratch
from benchmarks.usage import children

EPOCHS, EVERY = 2000, 20
SCHEMA = ac.Schema({"x": ac.Tensor("float32", (256,)), "y": ac.Tensor("int64"), "name": ac.String()})
ROWS, SEGMENTS, HELD = 60, 64, 8  # of a segment, of the cache, batches that are kept
FIGURES = ("private MiB", "descriptors", "mappings", "locks")
PICTURE = Path(__file__).parent / "pictures" / "soak.png"

Epochs = Iterator[Any]  # batches of one epoch after another


def of_loader(make: Callable[[], ac.Loader]) -> Iterator[Epochs]:
    with make() as loader:
        while True:
            yield iter(loader)


def in_workers(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"x": batch["x"] * 2}


def of_torch(cache: ac.Cache) -> ac.Loader:
    import arrowcache.torch

    return arrowcache.torch.Loader(cache, 20)


def of_snapshots(cache: ac.Cache) -> Iterator[Epochs]:
    while True:
        newest = [segment.seq for segment in cache.store.segments()][-SEGMENTS * 6 // 10 :]
        with cache.snapshot(where=lambda segment: segment.seq >= newest[0]) as snapshot:  # noqa: B023
            ids = np.random.default_rng(0).permutation(len(snapshot))
            yield iter([snapshot.gather(ids[:1000]), *snapshot.views(columns=["x", "y"]), snapshot.table()])


KINDS: dict[str, Callable[[ac.Cache], Iterator[Epochs]]] = {
    "Loader": lambda cache: of_loader(lambda: ac.Loader(cache, 20)),
    "views, in order": lambda cache: of_loader(
        lambda: ac.Loader(cache, 20, shuffle=None, columns=["x", "y"])
    ),
    "views, blocks": lambda cache: of_loader(
        lambda: ac.Loader(cache, 20, shuffle="blocks", columns=["x", "y"])
    ),
    "2 processes": lambda cache: of_loader(lambda: ac.Loader(cache, 20, workers=2, transform=in_workers)),
    "torch.Loader": lambda cache: of_loader(lambda: of_torch(cache)),
    "snapshots, tables": of_snapshots,
}


def count() -> list[float]:
    """FIGURES of this process and those that it started."""
    totals = [0.0] * len(FIGURES)
    for process in (Path(f"/proc/{pid}") for pid in ("self", *children())):
        rollup, locks, files = (process / "smaps_rollup").read_text(), 0, 0
        for info in (process / "fdinfo").iterdir():
            try:
                locks += info.read_text().count("lock:")
                files += 1
            except FileNotFoundError:  # what lists them
                continue
        private = sum(int(kib) for kib in re.findall(r"^Private_Dirty: +(\d+)", rollup, re.MULTILINE))
        mappings = (process / "maps").read_text().count("\n")
        totals = [a + b for a, b in zip(totals, (private / 1024, files, mappings, locks), strict=True)]
    return totals


def read(kind: str, folder: str, epochs: int) -> list[list[float]]:
    """Read so many epochs while the cache rolls; what was counted, every EVERY."""
    bound = 1200 * ROWS
    cache = ac.Cache.create(folder, SCHEMA, SEGMENTS * bound, bound, ROWS, headroom=0.4)
    held: deque[Any] = deque(maxlen=HELD)
    samples, number, oldest = [], 0, -1
    readers = KINDS[kind](cache)
    with cache.writer() as writer:  # open all the time: epochs leave the headroom to it
        for epoch in range(epochs):
            for _ in range(SEGMENTS if epoch == 0 else 3):
                ids = np.arange(number, number + ROWS)
                writer.extend(x=np.ones((ROWS, 256), np.float32), y=ids, name=[str(i) for i in ids])
                number += ROWS
            stats = cache.stats()
            assert stats.oldest_seq is not None
            assert epoch < 10 or stats.oldest_seq > oldest, "nothing was evicted: the cache is to roll on"
            oldest = stats.oldest_seq
            for index, batch in enumerate(next(readers)):
                if index % 16 == 0 or not isinstance(batch, dict):  # a table
                    held.append(batch)
                del batch
            while len(held) > HELD // 2:  # what is held is leased: let the cache roll on
                held.popleft()
            if (epoch + 1) % EVERY == 0:
                samples.append(count())
    return samples


def slope(values: list[float]) -> float:
    """Of a line through the later three quarters, a 1,000 epochs."""
    later = values[len(values) // 4 :]
    if len(later) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(later)) * EVERY / 1000, later, 1)[0])


def plot(samples: dict[str, list[list[float]]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(8, 5), sharex=True, layout="constrained")
    for number, (name, panel) in enumerate(zip(FIGURES, axes.flat, strict=True)):
        for kind, rows in samples.items():
            epochs = EVERY * np.arange(1, len(rows) + 1)
            panel.plot(epochs, [row[number] for row in rows], linewidth=1, label=kind)
        panel.set_title(name, fontsize=9)
        panel.set_ylim(bottom=0)
        panel.tick_params(labelsize=8)
    for panel in axes[1]:
        panel.set_xlabel("epochs", fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=7)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=100)


def soak(options: Options) -> Iterator[Figures]:
    """The first, the last and the slope of each."""
    epochs = 2 * EVERY if options.is_small else EPOCHS
    samples: dict[str, list[list[float]]] = {}
    for kind in KINDS:
        with scratch(options.folder) as folder:
            samples[kind] = rows = fresh("benchmarks.soak:read", kind, str(folder / "cache"), epochs)
        tenth, told = max(1, len(rows) // 10), {}
        for name, values in zip(FIGURES, zip(*rows, strict=True), strict=True):
            first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
            told[name] = f"{first:.1f} to {last:.1f}, {slope(list(values)):+.2f}"
        yield Figures(f"{kind}, {epochs} epochs: first to last, slope a 1,000 epochs", told)
    if not options.is_small:
        plot(samples)
        print(PICTURE)
