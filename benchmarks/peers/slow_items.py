"""The items of a slow Dataset: 5,000 of 150 KB, each of which takes 24 ms to make, and their check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

ITEMS, NUMBERS, SECONDS = 5000, 37_500, 0.024  # of float32: 150 KB
BATCH, WORKERS = 64, 2

#: Values (n, NUMBERS) float32, all of which are the item's number; and the numbers (n,) int64.
Batch = tuple[torch.Tensor, torch.Tensor]
#: An adapter's `epochs`: what it prepares in a folder, then batches with every item once, again and again.
Epochs = Callable[[Path], Iterator[Iterable[Batch]]]


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """Each item is its own number, many times. It sleeps where a real one decodes.

    NumPy makes it: in processes that are no DataLoader's workers torch's threads would spin after each.
    """

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(SECONDS)
        return torch.from_numpy(np.full(NUMBERS, index, np.float32)), index


def check(batches: Iterable[Batch]) -> None:
    """Raises: SystemExit: an item is wrong, is missing, or came twice."""
    times = torch.zeros(ITEMS, dtype=torch.int64)
    for values, numbers in batches:
        ends = values[:, [0, -1]]
        if values.shape != (len(numbers), NUMBERS) or not bool((ends == numbers.float()[:, None]).all()):
            raise SystemExit("an item is wrong")
        times += torch.bincount(numbers, minlength=ITEMS)
    if not bool((times == 1).all()):
        raise SystemExit(f"{int((times == 0).sum())} items are missing, {int((times > 1).sum())} came twice")
