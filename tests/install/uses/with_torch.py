"""What the extra "torch" is for: batches of tensors, by our loader and by torch's."""

import tempfile
from pathlib import Path

import numpy as np
import torch

import arrowcache as ac
from arrowcache.torch import Loader, dataloader

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
        assert all(isinstance(batch, torch.Tensor) for batch in batches)
        assert sum(int(batch.sum()) for batch in batches) == sum(range(640))
        assert sum(int(batch["x"].sum()) for batch in dataloader(cache, batch_size=64)) == sum(range(640))
