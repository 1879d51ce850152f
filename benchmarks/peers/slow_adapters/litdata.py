"""litdata: `optimize` makes every item and writes chunks of 64 MiB; then its own DataLoader streams them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize

from benchmarks.peers.slow_items import BATCH, ITEMS, WORKERS, Batch, Slow


def made(index: int) -> tuple[torch.Tensor, int]:
    return Slow()[index]


def epochs(folder: Path) -> Iterator[Iterable[Batch]]:
    chunks = str(folder / "chunks")
    optimize(
        made,
        inputs=list(range(ITEMS)),
        output_dir=chunks,
        chunk_bytes="64MB",
        num_workers=WORKERS,
        verbose=False,
    )
    train = StreamingDataset(chunks, shuffle=True)
    return repeat(StreamingDataLoader(train, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True))
