"""What the extra "jax" is for: batches of JAX arrays."""

import tempfile
from pathlib import Path

import jax
import numpy as np

import arrowcache as ac
from arrowcache.jax import Loader

if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        ac.Cache.create(
            Path(folder, "cache"), {"x": ac.Tensor("int64")}, capacity="4MiB", segment_bytes="64KiB"
        ) as cache,
    ):
        with cache.writer() as writer:
            writer.extend(x=np.arange(640))
        with Loader(cache, batch_size=64) as loader:
            batches = [batch["x"] for batch in loader]
        assert all(isinstance(batch, jax.Array) for batch in batches)
        assert sum(int(batch.sum()) for batch in batches) == sum(range(640))
