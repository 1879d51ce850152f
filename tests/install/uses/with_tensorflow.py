"""What the extra "tensorflow" is for: batches as a tf.data.Dataset."""

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import arrowcache as ac
from arrowcache.tensorflow import dataset

if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        ac.Cache.create(
            Path(folder, "cache"), {"x": ac.Tensor("int64")}, capacity="4MiB", segment_bytes="64KiB"
        ) as cache,
    ):
        with cache.writer() as writer:
            writer.extend(x=np.arange(640))
        batches = [batch["x"] for batch in dataset(cache, 64)]
        assert all(isinstance(batch, tf.Tensor) for batch in batches)
        assert sum(int(tf.reduce_sum(batch)) for batch in batches) == sum(range(640))
