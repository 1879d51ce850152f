"""MosaicML Streaming: local shards in its MDS format, read by torch's DataLoader.

As its documentation says, `batch_size` goes to the dataset as well as to the DataLoader ("for optimal
performance and deterministic resumption"), shuffling is its default `py1e`, shards are of its default 64 MiB
and not compressed, and arrays have their type and shape in the column's encoding, so that none is stored a
row. Batches are made by the DataLoader's own collate. Its StreamingDataLoader is the DataLoader that can be
resumed, and so the one that is measured.

`import streaming` imports torchvision, whose released wheels are for torch with CUDA and do not import
beside a torch without: see `_streaming`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers import states
from benchmarks.peers.workload import Batch, Workload


def _streaming() -> Any:
    """The module, also where torchvision's operators cannot be loaded: none of them is called here."""
    try:
        import streaming
    except RuntimeError:
        import torch

        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
        import streaming
    return streaming


def write(folder: Path, workload: Workload) -> None:
    columns = {"x": f"ndarray:float32:{workload.columns}", "y": "int64"}
    with _streaming().MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for x, y in workload.samples():
            writer.write({"x": x, "y": y})


class _Epochs:
    """Each `iter` is an epoch of pairs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return ((batch["x"], batch["y"]) for batch in self._loader)


def _loader(folder: Path, workload: Workload, workers: int, *, shuffled: bool) -> Any:
    streaming = _streaming()
    dataset = streaming.StreamingDataset(
        local=str(folder / "mds"), batch_size=workload.batch_rows, shuffle=shuffled, num_canonical_nodes=1
    )
    return streaming.StreamingDataLoader(
        dataset,
        batch_size=workload.batch_rows,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    yield _Epochs(_loader(folder, workload, workers, shuffled=shuffled))


def resume(
    folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    epochs = _loader(folder, workload, workers, shuffled=True)
    return states.resume(epochs, lambda batch: batch["y"], state, batches)
