"""litdata: chunks of a data set afar, of which `max_cache_size` bytes are kept.

https://github.com/Lightning-AI/litdata#readme, "Limit local cache space" and "Stream from S3-compatible
storage". It cannot read what is still being written, so the data set is complete before it begins, and
samples have no age.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.rolling_adapters import remote
from benchmarks.peers.stream import Plan, Running

WORKERS = 2


def _write(data: Path, plan: Plan) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(data), chunk_bytes=plan.segment_bytes)
    row = 0
    for xs, ys in remote.chunks(plan):
        for x, y in zip(xs, ys.tolist(), strict=True):
            cache[row] = {"x": x.copy(), "y": y}
            row += 1
    cache.done()
    cache.merge()


def running(folder: Path, plan: Plan, _: Any) -> AbstractContextManager[Running]:
    return remote.served(folder, plan, _write)


@contextmanager
def reader(handle: dict[str, str], plan: Plan) -> Iterator[remote.Reading]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    os.environ.update({name.upper(): value for name, value in remote.CREDENTIALS.items()})
    # litdata reads chunks by obstore, which refuses an endpoint without TLS, and has no option to allow it.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    dataset = StreamingDataset(
        remote.URI,
        cache_dir=handle["local"],
        max_cache_size=plan.capacity_bytes,
        shuffle=True,
        drop_last=True,
        storage_options={"endpoint_url": handle["endpoint"], **remote.CREDENTIALS},
    )
    yield remote.Reading(
        StreamingDataLoader(
            dataset,
            batch_size=plan.batch_rows,
            num_workers=WORKERS,
            prefetch_factor=plan.prefetch // WORKERS,
            drop_last=True,
        )
    )
