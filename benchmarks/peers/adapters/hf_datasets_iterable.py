"""Hugging Face datasets, iterable: the same Arrow file read in order through a shuffle buffer.

Format "numpy" was faster than "torch". `set_epoch` moves the first shard of an epoch even where nothing is
shuffled, so only a shuffled data set is told its epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.peers import states
from benchmarks.peers.adapters import hf_datasets
from benchmarks.peers.workload import Batch, Workload

_SHARDS = 16
_BUFFER_ROWS, _BUFFER_BYTES = 1000, 256 << 20  # whichever is less

write = hf_datasets.write


class _Epochs:
    def __init__(self, batches: Any, loader: Any, shuffled: bool) -> None:
        self._batches, self._loader, self._shuffled = batches, loader, shuffled
        self._epochs = count()

    def __iter__(self) -> Iterator[Batch]:
        if self._shuffled:
            self._batches.set_epoch(next(self._epochs))
        return iter(self._loader)


def _loader(kind: Any, folder: Path, workload: Workload, workers: int, *, shuffled: bool) -> tuple[Any, Any]:
    from datasets import Dataset

    rows = Dataset.from_file(str(folder / "data.arrow")).to_iterable_dataset(num_shards=_SHARDS)
    if shuffled:
        buffer_rows = max(2, min(_BUFFER_ROWS, _BUFFER_BYTES // workload.row_bytes))
        rows = rows.shuffle(seed=0, buffer_size=buffer_rows)
    batches = rows.with_format("numpy").batch(workload.batch_rows, drop_last_batch=True)
    return batches, kind(
        batches,
        batch_size=None,
        num_workers=workers,
        collate_fn=hf_datasets.pair,
        persistent_workers=workers > 0,
    )


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    from torch.utils.data import DataLoader

    yield _Epochs(*_loader(DataLoader, folder, workload, workers, shuffled=shuffled), shuffled)


def resume(
    folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    """With torchdata's StatefulDataLoader, as its documentation says."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    _, epochs = _loader(StatefulDataLoader, folder, workload, workers, shuffled=True)
    return states.resume(epochs, lambda batch: batch[1], state, batches)
