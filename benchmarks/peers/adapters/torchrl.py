"""torchrl: a ReplayBuffer over LazyMemmapStorage, sampled without replacement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Batch, Workload


def _storage(folder: Path, workload: Workload) -> Any:
    from torchrl.data import LazyMemmapStorage

    return LazyMemmapStorage(workload.rows, scratch_dir=folder / "storage")


def write(folder: Path, workload: Workload) -> None:
    import torch
    from tensordict import TensorDict
    from torchrl.data import TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=_storage(folder, workload), batch_size=workload.batch_rows)
    for x, y in workload.chunks():
        buffer.extend(TensorDict({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, batch_size=[len(y)]))
    buffer.storage.dumps(folder / "storage")  # where it is already: only its metadata


class _Epochs:
    """Each `iter` samples anew: a buffer goes on where the last iteration of it was left."""

    def __init__(self, storage: Any, batch_rows: int, batches_ahead: int, shuffled: bool) -> None:
        self._storage, self._batch_rows = storage, batch_rows
        self._batches_ahead, self._shuffled = batches_ahead, shuffled

    def __iter__(self) -> Iterator[Batch]:
        from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

        buffer = ReplayBuffer(
            storage=self._storage,
            sampler=SamplerWithoutReplacement(drop_last=True, shuffle=self._shuffled),
            batch_size=self._batch_rows,
            prefetch=self._batches_ahead or None,
        )
        return ((batch["x"], batch["y"]) for batch in buffer)


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    storage = _storage(folder, workload)
    storage.loads(folder / "storage")
    yield _Epochs(storage, workload.batch_rows, workers, shuffled)
