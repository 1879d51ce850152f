"""Rows of an `.npy` file that is mapped, one at a time, through torch's DataLoader.

The rows are views of a tensor of the whole mapping: at rows of 1 KiB that was several times as fast as views
of NumPy's, which collation has to wrap one by one; at 64 KiB the two were near each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.workload import Batch, Workload


def write(folder: Path, workload: Workload) -> None:
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (workload.rows, workload.columns))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int64, (workload.rows,))
    for xs, ys in workload.chunks():
        x[ys[0] : ys[-1] + 1], y[ys[0] : ys[-1] + 1] = xs, ys
    x.flush()
    y.flush()


class Rows:
    """A map-style dataset. The mappings are private, so that torch need not warn that they are read-only."""

    def __init__(self, folder: Path) -> None:
        import torch

        self.x = torch.from_numpy(np.load(folder / "x.npy", mmap_mode="c"))
        self.y = torch.from_numpy(np.load(folder / "y.npy", mmap_mode="c"))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.x[row], self.y[row]


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[Iterable[Batch]]:
    from torch.utils.data import DataLoader

    yield DataLoader(
        Rows(folder),  # type: ignore[arg-type]
        workload.batch_rows,
        shuffle=shuffled,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )
