"""MosaicML Streaming: shards of a data set afar, of which `cache_limit` bytes are kept.

https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shard_retrieval.html:
`cache_limit` evicts the coldest shard. With its defaults the shuffle spreads each shard over a block of at
least 262,144 samples, and where these are more than the cache holds, a shard is fetched anew for nearly every
sample; so the block, and what is fetched ahead, are a quarter of the cache (`shuffle_block_size`). It cannot
read what is still being written, so the data set is complete before it begins, and samples have no age.

Used plainly it delivers wrong rows here (127 of 25,792 in one run, by one worker none): the dataset's S3
client fetches the index before the DataLoader forks, and workers that inherit its open connection get each
other's answers. Under TLS the connection would fail instead. The client is dropped before the fork, so that
the rest can be measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters.streaming import _streaming as imported
from benchmarks.peers.rolling_adapters import remote
from benchmarks.peers.stream import Plan, Running

WORKERS = 2


def _write(data: Path, plan: Plan) -> None:
    columns = {"x": f"ndarray:float32:{plan.columns}", "y": "int"}
    with imported().MDSWriter(out=str(data), columns=columns, size_limit=plan.segment_bytes) as writer:
        for xs, ys in remote.chunks(plan):
            for x, y in zip(xs, ys.tolist(), strict=True):
                writer.write({"x": x, "y": y})


def running(folder: Path, plan: Plan, _: Any) -> AbstractContextManager[Running]:
    return remote.served(folder, plan, _write)


@contextmanager
def reader(handle: dict[str, str], plan: Plan) -> Iterator[remote.Reading]:
    from torch.utils.data import DataLoader

    os.environ["S3_ENDPOINT_URL"] = handle["endpoint"]
    os.environ.update({name.upper(): value for name, value in remote.CREDENTIALS.items()})
    dataset = imported().StreamingDataset(
        remote=remote.URI,
        local=handle["local"],
        cache_limit=plan.capacity_bytes,
        shuffle=True,
        shuffle_block_size=plan.capacity_bytes // plan.row_bytes // 4,
        num_canonical_nodes=1,
        predownload=plan.capacity_bytes // plan.row_bytes // 4 // WORKERS,
        batch_size=plan.batch_rows,
    )
    for source in dataset.streams:
        source._downloader.clean_up()
    yield remote.Reading(
        DataLoader(
            dataset,
            batch_size=plan.batch_rows,
            num_workers=WORKERS,
            prefetch_factor=plan.prefetch // WORKERS,
            drop_last=True,
        )
    )
