"""The first example of the README, with no framework."""

import sys
import tempfile
from pathlib import Path

import numpy as np

import arrowcache as ac


def sample(rng):
    while True:
        number = int(rng.integers(10))
        yield {"image": np.full((8, 8), number, np.float32), "label": number}


if __name__ == "__main__":
    assert Path(ac.__file__).is_relative_to(sys.prefix), f"{ac.__file__} is not of this environment"
    schema = ac.Schema({"image": ac.Tensor("float32", (8, 8)), "label": ac.Tensor("int64")})
    with (
        tempfile.TemporaryDirectory() as folder,
        ac.Cache.create(Path(folder, "cache"), schema, capacity="4MiB", segment_bytes="64KiB") as cache,
        ac.SamplerPool(cache, sample, workers=1, progress=False),
        ac.Loader(cache, batch_size=64) as loader,
    ):
        rows = 0
        for batch in loader:
            assert (batch["image"] == batch["label"][:, None, None]).all()
            rows += len(batch["label"])
    assert rows >= 64, rows
