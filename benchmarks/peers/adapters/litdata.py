"""litdata: `optimize` into chunks, read in place from a local folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import states
from benchmarks.peers.workload import Batch, Workload

_CHUNK_BYTES = 64 << 20  # the default
_LARGE_CHUNK_BYTES = 256 << 20  # the FAQ advises 256 to 512 MB for samples of some megabytes


def _samples(workload: Workload, _: int) -> Iterator[tuple[Any, int]]:
    import torch

    for x, y in workload.samples():
        yield torch.from_numpy(x), int(y)


def write(folder: Path, workload: Workload) -> None:
    from litdata import optimize

    optimize(
        partial(_samples, workload),
        inputs=[0],
        output_dir=str(folder / "chunks"),
        chunk_bytes=_LARGE_CHUNK_BYTES if workload.row_bytes >= 1 << 20 else _CHUNK_BYTES,
        num_workers=1,
        verbose=False,
    )


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[Iterable[Batch]]:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(folder / "chunks"), shuffle=shuffled, drop_last=False)
    yield StreamingDataLoader(
        dataset,
        batch_size=workload.batch_rows,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )


def resume(
    folder: Path, workload: Workload, *, workers: int, state: bytes | None, batches: int | None
) -> tuple[list[int], bytes]:
    with loader(folder, workload, workers=workers, shuffled=True) as epochs:
        return states.resume(epochs, lambda batch: batch[1], state, batches)
