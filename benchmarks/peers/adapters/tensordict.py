"""tensordict: memory-mapped tensors, from which torch's DataLoader reads each batch by one index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Batch, Workload


def write(folder: Path, workload: Workload) -> None:
    import torch
    from tensordict import TensorDict

    row = {"x": torch.zeros(workload.columns), "y": torch.zeros((), dtype=torch.int64)}
    rows = TensorDict(row, batch_size=[]).expand(workload.rows).memmap_like(folder / "rows")
    for x, y in workload.chunks():
        chunk = TensorDict({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, batch_size=[len(y)])
        rows[int(y[0]) : int(y[-1]) + 1] = chunk


def pair(batch: Any) -> Batch:
    return batch["x"], batch["y"]


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[Iterable[Batch]]:
    from tensordict import TensorDict
    from torch.utils.data import DataLoader

    yield DataLoader(
        TensorDict.load_memmap(folder / "rows"),  # type: ignore[arg-type]
        workload.batch_rows,
        shuffle=shuffled,
        num_workers=workers,
        collate_fn=pair,
        drop_last=True,
        persistent_workers=workers > 0,
    )
