"""MONAI's PersistentDataset: a file of `torch.save` an item, made when the item is first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

import torch
from monai.data import PersistentDataset
from monai.transforms import Transform
from torch.utils.data import DataLoader

from benchmarks.peers.slow_items import BATCH, ITEMS, WORKERS, Batch, Slow


class Load(Transform):
    """Makes an item from its number; MONAI keeps what such a transform returns."""

    def __call__(self, index: int) -> tuple[torch.Tensor, int]:
        return Slow()[index]


def epochs(folder: Path) -> Iterator[Iterable[Batch]]:
    train = PersistentDataset(range(ITEMS), Load(), cache_dir=folder / "items")
    return repeat(DataLoader(train, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True))
