"""What does `cached` cost in the first epoch, and what does it save in the others?

Question 1: epoch 1 of a slow Dataset, read through a new cache, over the same without; epochs 2 to 4,
over that. Question 2: with a capacity of four fifths of the data: a later epoch, over the share that is
missing times an epoch without. Question 3: everything cached, through the stock DataLoader, over a
TensorDataset of the same items in memory. Question 4: items made twice, by two ranks of four workers each
in three epochs.
Method: 5,000 items of 150 KB, each of which takes 24 ms; DataLoader, two workers, batches of 64, shuffled.
Question 3 takes turns, and its figure is the median of nine.
Run: `python -m benchmarks.cached`, some five minutes. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from arrowcache.torch import CachedDataset, cached
from benchmarks.history import remember
from benchmarks.measure import machine

ITEMS, NUMBERS, SECONDS = 5000, 37_500, 0.024  # of float32: 150 KB
TURNS = 9
RANKS, RANK_WORKERS, RANK_EPOCHS = 2, 4, 3


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """Items of their own number; `log` gets a line for each that is made."""

    def __init__(self, log: Path | None = None) -> None:
        self._log = log

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{index}\n")
        time.sleep(SECONDS)
        return torch.full((NUMBERS,), float(index)), index


def epoch(dataset: Dataset[Any], workers: int = 2) -> float:
    """Seconds of one epoch, each of whose items is checked."""
    started, count = time.perf_counter(), 0
    for values, numbers in DataLoader(dataset, 64, shuffle=True, num_workers=workers):
        if not torch.equal(values[:, 0], numbers.float()):
            raise SystemExit("an item is wrong")
        count += len(numbers)
    if count != ITEMS:
        raise SystemExit(f"{count} items came")
    return time.perf_counter() - started


def over_tensor_dataset(train: CachedDataset) -> list[float]:
    """Items a second over those of a TensorDataset, of each turn."""
    numbers = torch.arange(ITEMS)
    in_memory = TensorDataset(numbers.float()[:, None].repeat(1, NUMBERS), numbers)
    return [epoch(in_memory) / epoch(train) for _ in range(TURNS)]


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
        ratios["all cached, over a TensorDataset"] = over_tensor_dataset(train)
        train.close()
        part = cached(Slow(), folder / "part", capacity=int(0.8 * ITEMS * NUMBERS * 4))
        epoch(part)
        missing = 1 - part.cached / ITEMS
        ratios["larger than the capacity: over the missing share"] = epoch(part) / (missing * without)
        print(f"{missing:.0%} of the items are missing where the capacity is 80 % of the data")
        part.close()
        ratios["items made twice, share"] = made_twice(folder)
    for case, ratio in ratios.items():
        value = statistics.median(ratio) if isinstance(ratio, list) else ratio
        print(f"{case:50} {value:8.3f}")
    remember("cached", ratios)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
