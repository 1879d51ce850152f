"""Lance: a random `take` a batch; in order and without workers, its own torch dataset, which was faster.

Its SafeLanceDataset takes as here, but makes Python lists of the numbers, which was several times slower; and
its torch dataset shuffles no more than the order of batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Batch, Workload


def write(folder: Path, workload: Workload) -> None:
    import pyarrow as pa
    from lance import write_dataset

    schema = pa.schema({"x": pa.list_(pa.float32(), workload.columns), "y": pa.int64()})
    batches = (
        pa.record_batch(
            [pa.FixedSizeListArray.from_arrays(x.reshape(-1), workload.columns), y], schema=schema
        )
        for x, y in workload.chunks()
    )
    write_dataset(pa.RecordBatchReader.from_batches(schema, batches), folder / "data.lance")


class Rows:
    """SafeLanceDataset, but for its conversion to Python lists."""

    def __init__(self, uri: str, rows: int) -> None:
        self._uri, self._rows, self._dataset = uri, rows, None

    def __len__(self) -> int:
        return self._rows

    def __getitems__(self, rows: list[int]) -> Batch:
        """As tensors, which workers hand over in shared memory, where arrays would go through a pipe."""
        import lance
        import torch

        if self._dataset is None:  # opened in the worker: Lance is not fork-safe
            self._dataset = lance.dataset(self._uri)
        table = self._dataset.take(rows)
        x = table["x"].combine_chunks().flatten().to_numpy()
        return torch.from_numpy(x.reshape(len(rows), -1)), torch.from_numpy(table["y"].to_numpy())


def same(batch: Any) -> Any:
    return batch


class _Ordered:
    """Whole batches of Lance's torch dataset."""

    def __init__(self, batches: Iterable[dict[str, Any]], batch_rows: int) -> None:
        self._batches, self._batch_rows = batches, batch_rows

    def __iter__(self) -> Iterator[Batch]:
        return ((batch["x"], batch["y"]) for batch in self._batches if len(batch["y"]) == self._batch_rows)


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[Iterable[Batch]]:
    import torch
    from lance.torch.data import LanceDataset

    if not (shuffled or workers):
        yield _Ordered(LanceDataset(str(folder / "data.lance"), workload.batch_rows), workload.batch_rows)
        return
    yield torch.utils.data.DataLoader(
        Rows(str(folder / "data.lance"), workload.rows),  # type: ignore[arg-type]
        workload.batch_rows,
        shuffle=shuffled,
        num_workers=workers,
        collate_fn=same,
        drop_last=True,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
    )
