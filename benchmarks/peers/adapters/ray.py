"""Ray Data over Parquet files, in a Ray of this machine alone.

As its tips on performance say: blocks between 1 and 128 MiB, here of 16; the order of files and a local
shuffle buffer in place of a full shuffle; batches prefetched. Columns are Arrow's fixed-shape tensors, not
compressed, of which batches are NumPy views. Rows are read anew each epoch: `materialize`, its advice for
what fits into its object store, would keep a second copy of everything in /dev/shm.

Ray Data works in processes of its own, always: `workers` is how many it may run at a time (`num_cpus`), and
there is no case without. Its object store is 1 GiB of /dev/shm.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import Batch, Workload

_FILE_BYTES = 16 << 20
_SHUFFLE_BYTES = 64 << 20
_STORE_BYTES = 1 << 30


def write(folder: Path, workload: Workload) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows_per_file = max(1, min(_FILE_BYTES, workload.nbytes // 4) // workload.row_bytes)
    columns = pa.fixed_shape_tensor(pa.float32(), (workload.columns,))
    schema = pa.schema({"x": columns, "y": pa.int64()})
    for x, y in workload.chunks():
        for start in range(0, len(y), rows_per_file):
            rows = slice(start, start + rows_per_file)
            x_column = pa.FixedShapeTensorArray.from_numpy_ndarray(x[rows])
            table = pa.table([x_column, pa.array(y[rows])], schema=schema)
            path = folder / f"{int(y[start]):09}.parquet"
            pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)


class _Epochs:
    """Each `iter` is an epoch of pairs of ndarrays."""

    def __init__(self, folder: Path, workload: Workload, *, shuffled: bool) -> None:
        self._folder, self._workload, self._shuffled = folder, workload, shuffled

    def __iter__(self) -> Iterator[Batch]:
        from ray import data

        buffer = None
        if self._shuffled:
            buffer = max(2 * self._workload.batch_rows, _SHUFFLE_BYTES // self._workload.row_bytes)
        rows = data.read_parquet(
            str(self._folder), shuffle="files" if self._shuffled else None, file_extensions=["parquet"]
        )
        for batch in rows.iter_batches(
            batch_size=self._workload.batch_rows,
            batch_format="numpy",
            drop_last=True,
            prefetch_batches=2,
            local_shuffle_buffer_size=buffer,
        ):
            yield batch["x"], batch["y"]


@contextmanager
def loader(folder: Path, workload: Workload, *, workers: int, shuffled: bool) -> Iterator[_Epochs]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    temporary = tempfile.mkdtemp(prefix="ray")  # not a long one: paths of sockets have 107 characters at most
    options: dict[str, Any] = {"num_cpus": max(1, workers), "object_store_memory": _STORE_BYTES}
    ray.init(
        **options,
        _temp_dir=temporary,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = not shuffled
    try:
        yield _Epochs(folder, workload, shuffled=shuffled)
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)
