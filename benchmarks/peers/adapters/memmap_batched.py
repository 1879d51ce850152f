"""A mapped `.npy` file, a whole batch by one `np.take`, in torch's `__getitems__`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.peers import states
from benchmarks.peers.adapters import memmap
from benchmarks.peers.workload import Batch, Workload

write = memmap.write


class Rows:
    """A map-style dataset that is asked for all rows of a batch at once."""

    def __init__(self, folder: Path) -> None:
        # np.asarray: indexing the subclass np.memmap costs more, and gives that subclass.
        self.x, self.y = (np.asarray(np.load(folder / name, mmap_mode="r")) for name in ("x.npy", "y.npy"))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Batch:
        return self.x[row], self.y[row]

    def __getitems__(self, rows: list[int]) -> Batch:
        return np.take(self.x, rows, axis=0), np.take(self.y, rows)


def tensors(batch: Batch) -> Batch:
    import torch

    x, y = batch
    return torch.from_numpy(x), torch.from_numpy(y)


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[Iterable[Batch]]:
    from torch.utils.data import DataLoader

    yield DataLoader(
        Rows(folder),  # type: ignore[arg-type]
        workload.batch_rows,
        shuffle=shuffled,
        num_workers=workers,
        collate_fn=tensors,
        drop_last=True,
        persistent_workers=workers > 0,
    )


def resume(
    folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    """With torchdata's StatefulDataLoader in place of torch's DataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    epochs: StatefulDataLoader[Batch] = StatefulDataLoader(
        Rows(folder),  # type: ignore[arg-type]
        workload.batch_rows,
        shuffle=True,
        num_workers=workers,
        collate_fn=tensors,
        drop_last=True,
    )
    return states.resume(epochs, lambda batch: batch[1], state, batches)
