"""Pipeline: a cache as a `tf.data.Dataset`, each iteration of which is an epoch over a new snapshot.

`arrowcache.Loader` chooses, leases and gathers the rows; one of TensorFlow's threads drives it, ahead. A
backend (native_backend.py, arrow_backend.py) brings its batches into TensorFlow. The loader lives as long
as the dataset and the datasets derived from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from arrowcache.arguments import OF_DATALOADER, OF_ONCE, instead
from arrowcache.arrow.schema import Schema
from arrowcache.limits import Limits
from arrowcache.reading.assembly import Memory
from arrowcache.reading.loader import Loader
from arrowcache.reading.options import DatasetArguments, LoaderArguments, takes
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.tensorflow.arrow_backend import PaddedBuffers, arrow_dataset, find_reader
from arrowcache.tensorflow.columns import columns_of
from arrowcache.tensorflow.native_backend import native_dataset
from arrowcache.units import parse_count

if TYPE_CHECKING:
    from typing import Unpack


_MAPPED = "map the result: dataset(...).map(function, num_parallel_calls=...)"
_INSTEAD = {
    **OF_ONCE,
    **OF_DATALOADER,
    **instead("transform", "collate_fn", "map_fn", "workers", "num_workers", "worker_type", say=_MAPPED),
    **instead("num_parallel_calls", say=_MAPPED),
    **instead("pin_memory", "device", say="TensorFlow places the tensors: leave it out"),
    **instead(
        "cycle_length",
        "block_length",
        "compression_type",
        say="there are no files to read here: leave it out",
    ),
}
_BACKENDS = ("auto", "arrow", "native")
_MAX_PREFETCH = 1 << 16


@takes("dataset()", DatasetArguments, _INSTEAD)
def dataset(
    cache: HasStore | str | os.PathLike[str],
    batch_size: int | None = None,
    *,
    columns: Sequence[str] | None = None,
    shuffle: str | None = "rows",
    seed: int = 0,
    drop_remainder: bool = True,
    backend: str = "auto",
    with_ids: bool = False,
    prefetch: int = 2,
    **options: Unpack[DatasetArguments],
) -> Any:
    """Batches of a cache as dicts of tensors, for `model.fit(dataset, epochs=N)` or a loop of your own.

    Each iteration is an epoch over a new snapshot, leased while it is read: until its end, or until the
    iterator is dropped. Only one is in progress: a newer one ends it, with an error if it is asked on.
    The number of batches is not known before an epoch begins, so the dataset has no length.

    Tensors are (batch_size, *shape), copies, of the columns' dtypes; timestamps are int64 microseconds
    since 1970, text and bytes tf.string, ragged columns tf.RaggedTensor. With `drop_remainder=False`, or
    `batch_tokens`, the first dimension is None.

    The other arguments are those of `arrowcache.Loader`. TensorFlow's own sharding is off: also under
    tf.distribute give `rank` and `world_size`, and this process reads its part of the rows.

    Args:
        batch_size: rows of a batch. None means 64, or as many as `batch_tokens` allows.
        drop_remainder: leave out a last batch of fewer rows.
        backend: "auto", the default, takes "native" in every TensorFlow: the faster one in all measurements
            (benchmarks/RESULTS.md), except for rows of 1 MiB by "window", where both are even. "native"
            hands over the gathered arrays; "arrow" has tensorflow-io's C++ code read them, which takes the
            GIL less often. The attribute `backend` of the result names the backend in use.
        timeout: seconds without rows or batches before an iteration fails. None means never. Ctrl-C and the
            end of a dropped iterator wait, as in all of tf.data, until TensorFlow has its next batch, or
            for `timeout` seconds.
        prefetch: number of batches that TensorFlow keeps ready, beside those of the loader.
    Raises: ValueError, TypeError: an argument that does not fit. SchemaError: a column that TensorFlow
        cannot hold. ImportError: backend="arrow" without a tensorflow-io for this TensorFlow.
        FileNotFoundError: no such cache. An error in an iteration, such as a timeout, is
        a tf.errors.OpError that contains this library's message.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: use one of {_BACKENDS}")
    if not isinstance(drop_remainder, bool):
        raise TypeError(f"drop_remainder must be True or False, not {drop_remainder!r}")
    if isinstance(columns, Mapping):
        columns = store_of(cache).settings.schema.select(columns)  # no functions, whose types are not known
    read = find_reader() if backend == "arrow" else None
    prefetch = parse_count(prefetch, "prefetch", least=0, most=_MAX_PREFETCH)
    rooms = PaddedBuffers()
    loader = _CopyingLoader(
        cache,
        batch_size,
        None if read is None else rooms,
        columns=columns,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_remainder,
        with_ids=with_ids,
        **options,
    )
    rows = loader.batch_size if drop_remainder else None
    found = columns_of(loader.schema, loader.schema.select(columns), rows, with_ids=with_ids)
    if read is None:
        batches = native_dataset(loader, found)
    else:
        batches = arrow_dataset(loader, found, [*loader.schema.fixed], rooms, read)
    unsharded = tf.data.Options()
    unsharded.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    batches = batches.prefetch(prefetch).with_options(unsharded)
    # not in the options, as dataset_name: almost every transformation would log an error
    batches.backend = "native" if read is None else "arrow"
    return batches


class _CopyingLoader(Loader):
    """A loader whose batches are never views: TensorFlow may keep them for long: see native_backend.py."""

    _may_yield_views = False

    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        batch_size: int | None,
        rooms: PaddedBuffers | None,
        **options: Unpack[LoaderArguments],
    ) -> None:
        self._rooms = rooms
        super().__init__(cache, batch_size, **options)

    def _memory(self) -> Memory:
        if self._rooms is None:
            return super()._memory()
        return Memory(self._rooms.allocate, Limits.current.frame_bytes)

    @property
    def batch_size(self) -> int | None:
        """Rows of each batch. None with `batch_tokens`."""
        return self._options.batch_size

    @property
    def schema(self) -> Schema:
        return self._store.settings.schema
