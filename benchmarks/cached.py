"""What does `cached` cost in the first epoch, and what does it save in the others?

Question 1: epoch 1 of a slow Dataset, read through a new cache, over the same without; epochs 2 to 4,
over that. Question 2: with a capacity of four fifths of the data: a later epoch, over the share that is
missing times an epoch without, through the stock DataLoader and through `Loader`. Question 3: everything
cached, through both, over a TensorDataset of the same items in memory. Question 4: items made twice, by two
ranks of four workers each in three epochs. Question 5: items lost of those that were published, and items
wrong, where a job is killed in mid-epoch, again and again.
Method: 5,000 items of 150 KB, each of which takes 24 ms; DataLoader, two workers, batches of 64, shuffled.
Question 3 takes turns, and its figure is the median of nine. Question 5: an item takes 2 ms; a job and its
workers get SIGKILL at a random moment of its first seconds, in turns through a DataLoader and a `Loader`; a
folder with nearly all items gives way to a new one; after each kill every item is compared, and every
checksum.
Run: `python -m benchmarks cached`, some five minutes; `python -m benchmarks cached --kills 200`, some ten.
Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import arrowcache as ac
from arrowcache.torch import CachedDataset, Loader, cached
from benchmarks.harness import machine, remember, seconds_of
from benchmarks.peers import slow_ways
from benchmarks.peers.slow_ways import ITEMS, NUMBERS, check

TURNS = 9
RANKS, RANK_WORKERS, RANK_EPOCHS = 2, 4, 3
KILLED_SECONDS = 0.002  # an item, where its maker is killed
MAX_LIFE_SECONDS, ENOUGH = 2.0, 0.95  # of a job; share of the items


class Slow(slow_ways.Slow):
    """The slow items; `log` gets a line for each that is made."""

    def __init__(self, log: Path | None = None, seconds: float = slow_ways.SECONDS) -> None:
        super().__init__(seconds)
        self._log = log

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{index}\n")
        return super().__getitem__(index)


def epoch(dataset: Dataset[Any]) -> float:
    """Seconds of one epoch through a stock DataLoader."""
    return epoch_of(DataLoader(dataset, 64, shuffle=True, num_workers=2))


def epoch_of(loader: Iterable[Any]) -> float:
    """Seconds of one epoch, which is checked."""
    return seconds_of(lambda: check(loader))


def over_tensor_dataset(train: CachedDataset) -> tuple[list[float], list[float]]:
    """Items a second over those of a TensorDataset, of each turn: through a DataLoader, and a `Loader`."""
    numbers = torch.arange(ITEMS)
    in_memory = TensorDataset(numbers.float()[:, None].repeat(1, NUMBERS), numbers)
    stock, ours = [], []
    with Loader(train, 64) as loader:
        for _ in range(TURNS):
            seconds = epoch(in_memory)
            stock.append(seconds / epoch(train))
            ours.append(seconds / epoch_of(loader))
    print(f"Loader: {ITEMS * TURNS / loader.stats().seconds:,.0f} items a second")
    return stock, ours


def made_twice(folder: Path) -> float:
    """Share of items that ranks made twice."""
    log = folder / "log"
    command = [sys.executable, "-m", "benchmarks.cached", str(folder / "shared"), str(log)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
    if any(rank.wait() for rank in ranks):
        raise SystemExit("a rank failed")
    counts = Counter(map(int, log.read_text().split()))
    return sum(count - 1 for count in counts.values()) / ITEMS


def be_rank(path: str, log: str, rank: int) -> None:
    train = cached(Slow(Path(log)), path, capacity="4GB")
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(train, RANKS, rank)
    loader = DataLoader(train, 64, sampler=sampler, num_workers=RANK_WORKERS, persistent_workers=True)
    for number in range(RANK_EPOCHS):
        sampler.set_epoch(number)
        for values, numbers in loader:
            if not torch.equal(values[:, 0], numbers.float()):
                raise SystemExit("an item is wrong")
    train.close()


def killed(count: int) -> None:
    """Kill jobs in mid-epoch. Prints: what was lost of what they had published, and what is wrong."""
    draw, lost, wrong, published = random.Random(0), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name) / str(number) for number in range(count))
        path, before = next(folders), set[int]()
        for number in range(count):
            job = os.fork()
            if not job:
                be_job(path, through_loader=number % 2 > 0)
            with suppress(OSError):  # the job was first
                os.setpgid(job, job)
            time.sleep(draw.uniform(0.1, MAX_LIFE_SECONDS))
            os.killpg(job, signal.SIGKILL)
            os.waitpid(job, 0)
            if not (path / "cache.json").exists():
                continue  # it was killed before it had made the cache
            now, bad = looked_at(path)
            lost, wrong, published = lost + len(before - now), wrong + bad, published + len(now - before)
            before = now
            if not (number + 1) % 20:
                print(f"{number + 1} kills: {lost} lost, {wrong} wrong", flush=True)
            if len(now) > ENOUGH * ITEMS:
                shutil.rmtree(path)
                path, before = next(folders), set()
    print(f"{count} kills, {published:,} items published: {lost} lost, {wrong} wrong")


def be_job(path: Path, *, through_loader: bool) -> NoReturn:
    """Train until somebody kills this process and its workers."""
    os.setpgid(0, 0)
    train = cached(Slow(seconds=KILLED_SECONDS), path, capacity="1GB")
    stock = DataLoader(train, 64, shuffle=True, num_workers=2)
    loader = Loader(train, 64, workers=2, seed=os.getpid()) if through_loader else stock
    while True:
        epoch_of(loader)


def looked_at(path: Path) -> tuple[set[int], int]:
    """Return the items in a cache, and how many of them, or of its segments, are not what they should be."""
    cache = ac.Cache.open(path)
    problems = len(cache.verify(repair=False))
    with cache.snapshot() as snapshot:
        items = snapshot.gather(range(len(snapshot)))
    indices, values = np.asarray(items["_index"]), np.asarray(items["0"])
    wrong = np.count_nonzero((values != indices[:, None]).any(axis=1) | (items["1"] != indices))
    return {*indices.tolist()}, int(wrong) + problems


def main() -> None:
    print(machine())
    ratios: dict[str, float | list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        without = epoch(Slow())
        print(f"an epoch without: {without:.1f} s")
        train = cached(Slow(), folder / "all", capacity="4GB")
        ratios["epoch 1 over without"] = epoch(train) / without
        later = [without / epoch(train) for _ in range(3)]
        ratios["epochs 2 to 4, times as fast as without"] = statistics.median(later)
        stock, ours = over_tensor_dataset(train)
        ratios["all cached, over a TensorDataset"] = stock
        ratios["all cached, through Loader, over a TensorDataset"] = ours
        train.close()
        part = cached(Slow(), folder / "part", capacity=int(0.8 * ITEMS * NUMBERS * 4))
        epoch(part)
        missing = 1 - part.cached / ITEMS
        ratios["larger than the capacity: over the missing share"] = epoch(part) / (missing * without)
        with Loader(part, 64, workers=2) as loader:
            ratios["the same, through Loader"] = epoch_of(loader) / (missing * without)
        print(f"{missing:.0%} of the items are missing where the capacity is 80 % of the data")
        part.close()
        ratios["items made twice, share"] = made_twice(folder)
    for case, ratio in ratios.items():
        value = statistics.median(ratio) if isinstance(ratio, list) else ratio
        print(f"{case:50} {value:8.3f}")
    remember("cached", ratios)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=0, help="kill so many jobs, and measure nothing")
    parser.add_argument("rank", nargs="*", help="of question 4: path, log and number")
    arguments = parser.parse_args()
    if arguments.rank:
        be_rank(arguments.rank[0], arguments.rank[1], int(arguments.rank[2]))
    elif arguments.kills:
        killed(arguments.kills)
    else:
        main()
