"""Hugging Face datasets, map-style: an Arrow file that is mapped, rows of a batch asked for at once.

Format "numpy" was several times faster than "torch" at rows of 64 KiB; a sampler of batches, and a batch size
and `__getitems__`, were as fast as each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Batch, Workload

_ROWS_A_RECORD_BATCH = 1000  # what datasets writes by default


def write(folder: Path, workload: Workload) -> None:
    import pyarrow as pa
    from datasets import Features, List, Value

    features = Features({"x": List(Value("float32"), length=workload.columns), "y": Value("int64")})
    schema = features.arrow_schema
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for x, y in workload.chunks():
            rows = pa.FixedSizeListArray.from_arrays(x.reshape(-1), type=schema.field("x").type)
            table = pa.table([rows, y], schema=schema)
            stream.write_table(table, max_chunksize=_ROWS_A_RECORD_BATCH)


def pair(batch: dict[str, Any]) -> Batch:
    """As tensors, which workers hand over in shared memory, where arrays would go through a pipe."""
    import torch

    return torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[Iterable[Batch]]:
    from datasets import Dataset
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    rows = Dataset.from_file(str(folder / "data.arrow")).with_format("numpy")
    order = RandomSampler(rows) if shuffled else SequentialSampler(rows)  # type: ignore[arg-type]
    yield DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=None,
        sampler=BatchSampler(order, workload.batch_rows, drop_last=True),
        num_workers=workers,
        collate_fn=pair,
        persistent_workers=workers > 0,
    )
