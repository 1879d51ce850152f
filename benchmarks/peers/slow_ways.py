"""The items of a slow Dataset: 5,000 of 150 KB, each of which takes 24 ms to make; and ways to keep them.

A way prepares in a folder, and gives batches with every item once, again and again. It imports its peer
inside its function.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from benchmarks.peers.adapters import pair_of_tensors

ITEMS, NUMBERS, SECONDS = 5000, 37_500, 0.024  # of float32: 150 KB
BATCH, WORKERS = 64, 2

#: Values (n, NUMBERS) float32, all of which are the item's number; and the numbers (n,) int64.
Batch = tuple[torch.Tensor, torch.Tensor]
Epochs = Iterator[Iterable[Batch]]


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """Each item is its own number, many times. It sleeps where a real one decodes.

    NumPy makes it: in processes that are no DataLoader's workers torch's threads would spin after each.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._seconds)
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
        raise SystemExit(f"items missing: {int((times == 0).sum())}, twice: {int((times > 1).sum())}")


def stock(dataset: Any) -> Epochs:
    """torch's DataLoader."""
    return repeat(DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True))


def plain(_: Path) -> Epochs:
    """Nothing is kept: the same Dataset through the stock DataLoader."""
    return stock(Slow())


def cached(folder: Path) -> Any:
    from arrowcache.torch import cached

    return cached(Slow(), folder / "cache", capacity="4GB")


def arrowcache(folder: Path) -> Epochs:
    """arrowcache: `cached`, and the stock DataLoader."""
    return stock(cached(folder))


def arrowcache_loader(folder: Path, *, is_filled: bool = False) -> Epochs:
    """arrowcache: `cached`, and its own Loader: workers make missing items, then it gathers whole batches."""
    from arrowcache.torch import Loader

    train = cached(folder)
    if is_filled:
        train.fill(workers=WORKERS)
    return repeat(Loader(train, BATCH, workers=WORKERS))


def arrowcache_fill(folder: Path) -> Epochs:
    """arrowcache: `cached`, whose `fill` makes every item before the first epoch, then its own Loader."""
    return arrowcache_loader(folder, is_filled=True)


def monai_load() -> Any:
    """Makes an item from its number; MONAI keeps the results of such a transform."""
    from monai.transforms import Transform

    class Load(Transform):
        def __call__(self, index: int) -> tuple[torch.Tensor, int]:
            return Slow()[index]

    return Load()


def monai_persistent(folder: Path) -> Epochs:
    """MONAI's PersistentDataset: a file of `torch.save` an item, made when the item is first asked for."""
    from monai.data import PersistentDataset

    return stock(PersistentDataset(range(ITEMS), monai_load(), cache_dir=folder / "items"))


def monai_smart(_: Path) -> Epochs:
    """MONAI's SmartCacheDataset with room for every item: all are made before the first batch, and then stay.

    It keeps them in the memory of this process, as its CacheDataset does, which it falls back to. Nothing is
    left when the process ends. `copy_cache=False` is its own advice where nothing changes the kept items.
    """
    from monai.data import SmartCacheDataset

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cache_num is greater or equal")
        return stock(SmartCacheDataset(
            list(range(ITEMS)), monai_load(), num_init_workers=WORKERS, progress=False, copy_cache=False
        ))  # fmt: skip


def monai_smart_half(_: Path) -> Epochs:
    """MONAI's SmartCacheDataset with room for half of the items, which is its purpose.

    Its own epoch has the items that it holds, and a part of them is replaced before the next one. With
    `replace_rate=1` all are: two of its epochs have each item once, and are counted as one. The next half is
    made by two threads meanwhile. Its documentation rules out persistent workers: they would keep the first
    half.
    """
    from monai.data import SmartCacheDataset

    train = SmartCacheDataset(
        list(range(ITEMS)), monai_load(), replace_rate=1.0, cache_rate=0.5, num_init_workers=WORKERS,
        num_replace_workers=WORKERS, progress=False, copy_cache=False,
    )  # fmt: skip
    train.start()
    loader = DataLoader(train, BATCH, shuffle=True, num_workers=WORKERS)

    def halves(*, is_first: bool) -> Iterator[Batch]:
        if not is_first:
            train.update_cache()
        yield from loader
        train.update_cache()
        yield from loader

    return chain([halves(is_first=True)], (halves(is_first=False) for _ in repeat(None)))


def item(index: int) -> tuple[torch.Tensor, int]:
    return Slow()[index]


def litdata(folder: Path) -> Epochs:
    """litdata: `optimize` makes every item and writes chunks of 64 MiB; its own DataLoader streams them."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    chunks = str(folder / "chunks")
    optimize(
        item, inputs=list(range(ITEMS)), output_dir=chunks, chunk_bytes="64MB", num_workers=WORKERS,
        verbose=False,
    )  # fmt: skip
    train = StreamingDataset(chunks, shuffle=True)
    return repeat(StreamingDataLoader(train, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True))


def with_item(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": Slow()[row["y"]][0].numpy()}


def hf_map(folder: Path) -> Epochs:
    """Hugging Face datasets: `map` in two processes makes every item and writes an Arrow file, to be mapped.

    Format "numpy", and the rows of a batch asked for at once: `adapters.HfDatasets` says why.
    """
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    numbers = Dataset.from_dict({"y": list(range(ITEMS))})
    features, file = (
        Features({"y": Value("int64"), "x": List(Value("float32"), length=NUMBERS)}),
        "items.arrow",
    )
    made = numbers.map(with_item, num_proc=WORKERS, features=features, cache_file_name=str(folder / file))
    rows: Any = made.with_format("numpy")
    return repeat(DataLoader(
        rows, batch_size=None, sampler=BatchSampler(RandomSampler(rows), BATCH, drop_last=False),
        num_workers=WORKERS, collate_fn=pair_of_tensors, persistent_workers=True,
    ))  # fmt: skip


WAYS: dict[str, Callable[[Path], Epochs]] = {
    each.__name__: each
    for each in (
        plain, arrowcache, arrowcache_loader, arrowcache_fill, monai_persistent, monai_smart,
        monai_smart_half, litdata, hf_map,
    )
}  # fmt: skip
