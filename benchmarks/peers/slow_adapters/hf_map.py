"""Hugging Face datasets: `map` in two processes makes every item and writes an Arrow file, which is mapped.

Format "numpy", and the rows of a batch asked for at once: `peers.adapters.hf_datasets` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value, disable_progress_bars
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from benchmarks.peers.adapters.hf_datasets import pair
from benchmarks.peers.slow_items import BATCH, ITEMS, NUMBERS, WORKERS, Batch, Slow


def made(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": Slow()[row["y"]][0].numpy()}


def epochs(folder: Path) -> Iterator[Iterable[Batch]]:
    disable_progress_bars()
    numbers = Dataset.from_dict({"y": list(range(ITEMS))})
    features = Features({"y": Value("int64"), "x": List(Value("float32"), length=NUMBERS)})
    rows = numbers.map(made, num_proc=WORKERS, features=features, cache_file_name=str(folder / "items.arrow"))
    rows = rows.with_format("numpy")
    return repeat(
        DataLoader(
            rows,  # type: ignore[arg-type]
            batch_size=None,
            sampler=BatchSampler(RandomSampler(rows), BATCH, drop_last=False),  # type: ignore[arg-type]
            num_workers=WORKERS,
            collate_fn=pair,
            persistent_workers=True,
        )
    )
