"""SamplerPool of a cluster: samplers anywhere, each training node's cache on its own disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray

from arrowcache.arguments import face, instead
from arrowcache.arrow.segment import Form
from arrowcache.ray.caches import NodeCaches
from arrowcache.ray.engine import RayEngine
from arrowcache.sampling.options import PoolOptions, fitted
from arrowcache.sampling.pool import Pool, PoolStats
from arrowcache.sampling.reads import Sampler
from arrowcache.units import parse_bytes

_INSTEAD = instead(
    "executor", say="Ray runs its tasks; arrowcache.SamplerPool takes an executor of this host"
) | instead("every_rank", say="one pool fills the caches of all nodes: make it in the driver")
_SHARES = ("split", "replicate")


class SamplerPool(Pool):
    """Samplers at work all over a Ray cluster, from construction until `stop()`. A context manager.

    Needs `ray.init()` before. The caches are made, or opened, on their nodes; a full one slows the samplers
    down. Task k's segment is the one that `arrowcache.SamplerPool` publishes for (sample, seed, k), and no
    task is repeated by a later pool of the same name and seed as long as one of the nodes lives on. Of
    `Items` and `ParquetRows(passes=1)` a later pool draws what was left undone, as `arrowcache.SamplerPool`
    does; with share="replicate" a driver that is killed may leave a task on some nodes only.
    A worker or node that is lost while it draws costs nothing: Ray has the task drawn elsewhere. A training
    node that is lost takes its cache with it, and the others go on. `stop()` has Ray raise KeyboardInterrupt
    in the samplers, so that their generators end; one that waits within a call for 4 s more is killed. The
    other arguments are those of `arrowcache.SamplerPool`.

    Args:
        caches: the caches of the cluster's nodes.
        sample: `sample(rng) -> iterable of samples`, as for `arrowcache.SamplerPool`.
        share: "split": every node gets different samples, in the order of requests; "replicate": all nodes
            get the same, at the pace of the slowest.
        workers: number of tasks drawn at a time, in the whole cluster, limited by its processors.
        retries: as for `arrowcache.SamplerPool`, and the number of times that Ray repeats a lost task.
        in_flight: bytes that drawn segments may take in Ray's object stores, all together, until they are
            published; each node may always have one segment. None means half of the smallest object store.
        options: Ray's options of a drawing task, such as {"num_cpus": 2} or a `runtime_env`; one processor
            each, spread over the cluster, unless said otherwise.
    Blocks: until all caches are open: some seconds, while workers start.
    Raises: ValueError, TypeError, SchemaError, CacheFormatError: an argument does not fit. RuntimeError: Ray
        is not running.
    """

    @face("SamplerPool of a cluster", _INSTEAD)
    def __init__(
        self,
        caches: NodeCaches,
        sample: Sampler,
        *,
        share: str = "split",
        workers: int = 4,
        seed: int = 0,
        name: str = "default",
        segments: int | None = None,
        retries: int = 3,
        in_flight: int | str | None = None,
        options: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        reads: int = 16,
        on_error: str = "raise",
    ) -> None:
        if not isinstance(caches, NodeCaches):
            raise TypeError(f"caches must be arrowcache.ray.NodeCaches, not {caches!r}")
        if share not in _SHARES:
            raise ValueError(f"share={share!r} is unknown: use {' or '.join(map(repr, _SHARES))}")

        def fit(form: Form) -> PoolOptions:
            return PoolOptions(
                fitted(sample, form), workers, seed, name, segments, retries, progress, reads, on_error
            )

        drawn = fit(caches.form)
        in_flight_bytes = None if in_flight is None else parse_bytes(in_flight, "in_flight")
        if not ray.is_initialized():
            raise RuntimeError("Ray is not running: call ray.init() first, in a cluster with its address")
        self._engine = RayEngine(
            caches,
            drawn,
            fit,
            replicate=share == "replicate",
            in_flight_bytes=in_flight_bytes,
            ray_options=options or {},
        )
        super().__init__(self._engine, self._engine.options)

    def stats(self) -> PoolStats:
        """Return counts of published segments, and their cost; a segment on several nodes counts once."""
        return super().stats()

    def node_stats(self) -> dict[str, PoolStats]:
        """Return counts of published segments on each node, by its id, also on nodes that were lost since.

        Retries, failures and samples left out are of tasks, which belong to no node: 0.
        """
        seconds = time.monotonic() - self._started
        return {
            name: PoolStats(node.segments, node.rows, node.nbytes, seconds, node.waiting_seconds, 0, 0)
            for name, node in self._engine.nodes.items()
        }
