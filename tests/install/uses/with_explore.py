"""What the extra "explore" is for: look into a cache, from Python and by the command."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import arrowcache as ac
from arrowcache import explore

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache")
        schema = {"x": ac.Tensor("int64"), "image": ac.Tensor("float32", (8, 8))}
        with ac.Cache.create(path, schema, capacity="4MiB", segment_bytes="64KiB") as cache:
            with cache.writer() as writer:
                writer.extend(x=np.arange(640), image=np.zeros((640, 8, 8), np.float32))
            assert len(explore.head(cache, 5)) == 5
            assert explore.to_pandas(cache, columns=["x"])["x"].sum() == sum(range(640))
            assert explore.sql(cache, "select count(*) as n from cache")["n"].tolist() == [640]
            assert explore.gallery(cache, "image") is not None
            assert explore.plot_growth(cache) is not None
            assert explore.monitor is not None
        command = Path(sys.prefix, "bin", "arrowcache")
        told = subprocess.run([command, "info", path], capture_output=True, text=True, check=True).stdout
        assert "640" in told, told
