"""MONAI's SmartCacheDataset with room for every item: all are made before the first batch, and then stay.

It keeps them in the memory of this process, as its CacheDataset does, which it falls back to. Nothing is left
when the process ends. `copy_cache=False` is its own advice where nothing changes what is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

from monai.data import SmartCacheDataset
from torch.utils.data import DataLoader

from benchmarks.peers.slow_adapters.monai_persistent import Load
from benchmarks.peers.slow_items import BATCH, ITEMS, WORKERS, Batch


def epochs(_: Path) -> Iterator[Iterable[Batch]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cache_num is greater or equal")
        train = SmartCacheDataset(
            list(range(ITEMS)), Load(), num_init_workers=WORKERS, progress=False, copy_cache=False
        )
    return repeat(DataLoader(train, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True))
