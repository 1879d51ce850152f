"""arrowcache: `cached`, whose `fill` makes every item before the first epoch, then its own Loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

from arrowcache.torch import Loader, cached
from benchmarks.peers.slow_items import BATCH, WORKERS, Batch, Slow


def epochs(folder: Path) -> Iterator[Iterable[Batch]]:
    train = cached(Slow(), folder / "cache", capacity="4GB")
    train.fill(workers=WORKERS)
    return repeat(Loader(train, BATCH, workers=WORKERS))
