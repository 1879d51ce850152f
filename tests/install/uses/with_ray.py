"""What the extra "ray" is for: samplers and a cache in a cluster, here of this machine alone."""

import tempfile
from pathlib import Path

import ray

import arrowcache as ac
from arrowcache.ray import NodeCaches, SamplerPool


def sample(rng):
    while True:
        yield {"x": int(rng.integers(10))}


if __name__ == "__main__":
    import ray.train

    assert ray.train.ScalingConfig(num_workers=1).num_workers == 1
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False)
        path = Path(folder, "cache")
        caches = NodeCaches(path, {"x": ac.Tensor("int64")}, capacity="4MiB", segment_bytes="64KiB")
        with SamplerPool(caches, sample, workers=1, segments=3, progress=False) as pool:
            pool.wait()
        with ac.Cache.open(path) as cache:
            assert cache.stats().rows > 0
        ray.shutdown()
