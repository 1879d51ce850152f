"""arrowcache itself: SamplerPool, and arrowcache.torch.Loader over a cache with the plan's headroom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.footprint import Footprint
from benchmarks.peers.stream import Plan, Running, Source
from benchmarks.peers.workload import Batch


class Sampler(Source):
    """The source as a sampler: it hands out rows in bulk."""

    def __call__(self, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        import arrowcache as ac

        for x, y in self.blocks(rng):
            yield ac.Rows(x=x, y=y)


@contextmanager
def running(folder: Path, plan: Plan, _: Any) -> Iterator[Running]:
    import arrowcache as ac

    schema = ac.Schema({"x": ac.Tensor("float32", (plan.columns,)), "y": ac.Tensor("int64")})
    with (
        ac.Cache.create(
            folder, schema, plan.capacity_bytes, plan.segment_bytes, headroom=plan.headroom
        ) as cache,
        ac.SamplerPool(cache, Sampler(plan), workers=plan.samplers, progress=False) as pool,
    ):

        def dropped() -> tuple[int, int]:
            stats = cache.stats()
            return stats.evicted_rows, stats.unread_rows

        def facts() -> dict[str, Any]:
            drawn = pool.stats()
            return {
                "retries": drawn.retries,
                "failures": drawn.failures,
                "problems": [str(problem) for problem in cache.verify(repair=False)],
            }

        yield Running(
            handle=str(folder),
            published_bytes=lambda: pool.stats().rows * plan.row_bytes,
            waited_seconds=lambda: pool.stats().waiting_seconds,
            used_bytes=Footprint(folder).bytes,
            limit_bytes=plan.capacity_bytes,
            dropped=dropped,
            facts=facts,
        )


class _Reading:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return ((batch["x"], batch["y"]) for batch in self._loader.repeat())

    def stall_seconds(self) -> float:
        return float(self._loader.stats().stall_seconds)


@contextmanager
def reader(handle: str, plan: Plan) -> Iterator[_Reading]:
    from arrowcache.torch import Loader

    with Loader(handle, plan.batch_rows, shuffle=plan.shuffle, prefetch=plan.prefetch) as loader:
        yield _Reading(loader)
