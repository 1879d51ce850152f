"""A slow Dataset that is read again and again: `cached` beside what else keeps its items.

Question: how long until 1, 2 and 5 epochs are done, each with every item once? Making the items counts, also
where a peer does it before the first epoch.
Method: 5,000 items of 150 KB, each of which takes 24 ms (a pause), two workers, batches of 64, shuffled. Each
peer as its documentation advises, in a process of its own, on a folder of the disk that is empty; the clock
begins when its libraries have been imported. Every batch is checked, and that each epoch has every item once.
Run: `python -m benchmarks.peers.slow`, some 20 minutes; words of `WAYS` after it for some of the ways.
Results: benchmarks/RESULTS.md, "cached".
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from benchmarks.fresh import fresh

EPOCHS, SHOWN = 5, (1, 2, 5)
_MAX_SECONDS = 900  # of one peer


@dataclass(frozen=True)
class Way:
    """One way to keep the items: its word in `slow_ways`, its environment, and the library that it shows."""

    word: str
    name: str
    environment: str = "peers"
    distribution: str = "torch"


WAYS = [
    Way("plain", "nothing kept, torch DataLoader"),
    Way("arrowcache", "arrowcache, `cached`, torch DataLoader", "newest", "arrowcache"),
    Way("arrowcache_loader", "arrowcache, `cached`, its Loader", "newest", "arrowcache"),
    Way("arrowcache_fill", "arrowcache, `cached`, `fill`, its Loader", "newest", "arrowcache"),
    Way("monai_persistent", "MONAI, PersistentDataset", distribution="monai"),
    Way("monai_smart", "MONAI, SmartCacheDataset, all in memory", distribution="monai"),
    Way("monai_smart_half", "MONAI, SmartCacheDataset, half in memory", distribution="monai"),
    Way("litdata", "litdata, `optimize`", distribution="litdata"),
    Way("hf_map", "HF datasets, `map`", distribution="datasets"),
]


def measure(word: str, distribution: str) -> tuple[str, list[float]]:
    """The version of what was measured, and the seconds until the end of each epoch."""
    from benchmarks.peers.slow_ways import WAYS, check

    with tempfile.TemporaryDirectory(prefix="slow-") as folder:
        started, seconds = time.perf_counter(), []
        for batches in islice(WAYS[word](Path(folder)), EPOCHS):
            check(batches)
            seconds.append(time.perf_counter() - started)
        return version(distribution), seconds


def main(words: list[str]) -> None:
    from benchmarks.harness import machine
    from benchmarks.peers.__main__ import interpreter

    print(machine())
    print("| kept by | version |", *(f"{number} done, s |" for number in SHOWN))
    print("|---|---|" + "---|" * len(SHOWN))
    for way in WAYS:
        if words and way.word not in words:
            continue
        number, seconds = fresh(
            "benchmarks.peers.slow:measure", way.word, way.distribution,
            python=interpreter(way.environment), timeout=_MAX_SECONDS,
        )  # fmt: skip
        cells = " | ".join(f"{seconds[epoch - 1]:.1f}" for epoch in SHOWN)
        print(f"| {way.name} | {number} | {cells} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
