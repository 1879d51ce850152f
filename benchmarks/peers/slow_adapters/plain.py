"""Nothing is kept: the same Dataset through the stock DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

from torch.utils.data import DataLoader

from benchmarks.peers.slow_items import BATCH, WORKERS, Batch, Slow


def epochs(_: Path) -> Iterator[Iterable[Batch]]:
    return repeat(DataLoader(Slow(), BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True))
