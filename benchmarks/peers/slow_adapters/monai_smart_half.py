"""MONAI's SmartCacheDataset with room for half of the items, which is what it is for.

Its own epoch has the items that it holds, and a part of them is replaced before the next one. With
`replace_rate=1` all are: two of its epochs have each item once, and are counted as one. The next half is made
by two threads meanwhile. Its documentation rules out persistent workers: they would keep the first half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from monai.data import SmartCacheDataset
from torch.utils.data import DataLoader

from benchmarks.peers.slow_adapters.monai_persistent import Load
from benchmarks.peers.slow_items import BATCH, ITEMS, WORKERS, Batch


def epochs(_: Path) -> Iterator[Iterable[Batch]]:
    train = SmartCacheDataset(
        list(range(ITEMS)),
        Load(),
        replace_rate=1.0,
        cache_rate=0.5,
        num_init_workers=WORKERS,
        num_replace_workers=WORKERS,
        progress=False,
        copy_cache=False,
    )
    train.start()
    loader = DataLoader(train, BATCH, shuffle=True, num_workers=WORKERS)

    def halves(*, is_first: bool) -> Iterator[Batch]:
        if not is_first:
            train.update_cache()
        yield from loader
        train.update_cache()
        yield from loader

    yield halves(is_first=True)
    while True:
        yield halves(is_first=False)
