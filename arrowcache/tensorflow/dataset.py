"""dataset: a cache as a `tf.data.Dataset`, each iteration of which is an epoch over a new snapshot.

The rows are chosen, leased and gathered by `arrowcache.Loader`, ahead of TensorFlow and in a thread of
its own; a backend brings its batches into TensorFlow. The loader lives as long as the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from arrowcache.reading.loader import Loader
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.tensorflow.arrow import MissingReader, arrow_dataset, find_reader
from arrowcache.tensorflow.columns import columns_of
from arrowcache.tensorflow.native import native_dataset

BACKENDS = ("auto", "arrow", "native")


def dataset(
    cache: HasStore | str | os.PathLike[str],
    batch_size: int = 64,
    *,
    columns: Sequence[str] | None = None,
    shuffle: str | None = "rows",
    seed: int = 0,
    drop_remainder: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    run_id: str | None = None,
    backend: str = "auto",
    timeout: float | None = 60.0,
    where: Callable[[SegmentInfo], bool] | None = None,
    with_ids: bool = False,
    epoch_rows: int | None = None,
    wait_rows: int = 1,
    window_bytes: int | str | None = None,
    prefetch: int = 2,
) -> Any:
    """A tf.data.Dataset of dicts of tensors, (batch_size, *shape).
    """
    loader = _Loader(
        cache,
        batch_size,
        columns=columns,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_remainder,
        rank=rank,
        world_size=world_size,
        run_id=run_id,
        timeout=timeout,
        where=where,
        with_ids=with_ids,
        epoch_rows=epoch_rows,
        wait_rows=wait_rows,
        window_bytes=window_bytes,
    )
    schema = store_of(cache).settings.schema
    found = columns_of(schema, schema.select(columns), batch_size if drop_remainder else None, with_ids=with_ids)
    if backend == "arrow":
        batches = arrow_dataset(loader, found, find_reader())
    else:
        batches = native_dataset(loader, found)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.dataset_name = f"arrowcache-{backend}"
    return batches.prefetch(prefetch).with_options(options)


class _Loader(Loader):
    _may_yield_views = False
