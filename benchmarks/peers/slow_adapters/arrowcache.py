"""arrowcache: `cached`, and the stock DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

from torch.utils.data import DataLoader

from arrowcache.torch import cached
from benchmarks.peers.slow_items import BATCH, WORKERS, Batch, Slow


def epochs(folder: Path) -> Iterator[Iterable[Batch]]:
    train = cached(Slow(), folder / "cache", capacity="4GB")
    return repeat(DataLoader(train, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True))
