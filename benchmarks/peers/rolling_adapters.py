"""Adapters of the rolling case: a class a peer that drops its oldest rows, by its own documented means.

`ADAPTERS` has them by the key of `registry`. Each imports its peer inside its functions, and has:
- `running(folder, plan, counters)`, in the driver's process: make what the peer needs, and begin to publish;
- `reader(handle, plan)`, in the trainer's: open it for reading;
- `writer(handle, plan)`, if the peer brings no samplers' processes: see `stream.publish`.
All are context managers. Two peers cannot read data that is still being written: they get it whole, and
afar, so that its rows have no age.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.adapters import (
    pair,
    reverb_append,
    reverb_batches,
    reverb_table,
    streaming_module,
    tensordict_of,
    write_mds,
)  # fmt: skip
from benchmarks.peers.stream import Plan, Running, Source, fill, pool_of, publishing
from benchmarks.peers.workload import Batch
from benchmarks.usage import Footprint, status_bytes

Put = Callable[[NDArray[np.float32], NDArray[np.int64]], None]


@dataclass(frozen=True)
class Reading:
    """Batches without end, and the peer's own account of stalls: NaN if it has none."""

    batches: Iterator[Batch]
    stall_seconds: Callable[[], float] = lambda: math.nan


class Sampler(Source):
    """The source as a sampler: it hands out rows in bulk."""

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        import arrowcache as ac

        for x, y in self.blocks(rng):
            yield ac.Rows(x=x, y=y)


class Arrowcache:
    """arrowcache itself: SamplerPool, and arrowcache.torch.Loader over a cache with the plan's headroom."""

    @staticmethod
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
                drawn, problems = pool.stats(), cache.verify(repair=False)
                told = {"retries": drawn.retries, "failures": drawn.failures}
                return told | {"problems": [str(problem) for problem in problems]}

            yield Running(
                handle=str(folder),
                published_bytes=lambda: pool.stats().rows * plan.row_bytes,
                waited_seconds=lambda: pool.stats().waiting_seconds,
                used_bytes=Footprint(folder).bytes,
                limit_bytes=plan.capacity_bytes,
                dropped=dropped,
                facts=facts,
            )

    @staticmethod
    @contextmanager
    def reader(handle: str, plan: Plan) -> Iterator[Reading]:
        from arrowcache.torch import Loader

        with Loader(handle, plan.batch_rows, shuffle=plan.shuffle, prefetch=plan.prefetch) as loader:
            yield Reading(map(pair, loader.repeat()), lambda: float(loader.stats().stall_seconds))


class Reverb:
    """dm-reverb: a server whose table holds so many rows and drops the oldest; others are its clients.

    https://github.com/google-deepmind/reverb#readme: `remover=Fifo`, `sampler=Uniform`, no rate limit but one
    row; a TrajectoryWriter a sampler, a row an item; the trainer's rows come by TrajectoryDataset, with three
    batches in flight, batched by tf.data. The server has no limit in bytes: its process, here the driver's,
    may get as much memory as `max_size` rows of the capacity take.
    """

    @staticmethod
    @contextmanager
    def running(_: Path, plan: Plan, counters: Any) -> Iterator[Running]:
        max_rows = plan.capacity_bytes // plan.row_bytes
        table = reverb_table(max_rows, plan.columns)
        import reverb

        server = reverb.Server([table])
        before = status_bytes("RssAnon")
        try:
            address = f"127.0.0.1:{server.port}"
            with publishing("reverb", address, plan, counters) as published_bytes:
                yield Running(
                    handle=address,
                    published_bytes=published_bytes,
                    waited_seconds=None,
                    used_bytes=lambda: max(0, status_bytes("RssAnon") - before),
                    limit_bytes=max_rows * plan.row_bytes,
                    facts=lambda: {
                        "rows_in_table": server.localhost_client().server_info()["rows"].current_size
                    },
                )
        finally:
            server.stop()

    @staticmethod
    @contextmanager
    def writer(handle: str, _: Plan) -> Iterator[Put]:
        import reverb

        with reverb.Client(handle).trajectory_writer(num_keep_alive_refs=1) as rows:

            def put(xs: NDArray[np.float32], ys: NDArray[np.int64]) -> None:
                for x, y in zip(xs, ys, strict=True):
                    reverb_append(rows, x, y)
                rows.flush(block_until_num_items=len(xs))  # rows on their way are bounded

            yield put

    @staticmethod
    @contextmanager
    def reader(handle: str, plan: Plan) -> Iterator[Reading]:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        yield Reading(reverb_batches(handle, plan.batch_rows, plan.prefetch))


class Torchrl:
    """torchrl: samplers' processes extend one shared replay buffer, in memory-mapped files of fixed size.

    LazyMemmapStorage under ReplayBuffer(shared=True), as
    https://docs.pytorch.org/rl/stable/reference/data.html has it for several processes; prefetch is refused
    by shared buffers. The oldest row is overwritten by the next one. Sampling is torchrl's default, with
    replacement. It has as many rows as fit into the capacity beside the files that it keeps with them, to
    which 1 MiB is left.
    """

    @staticmethod
    @contextmanager
    def running(folder: Path, plan: Plan, counters: Any) -> Iterator[Running]:
        from torchrl.data import LazyMemmapStorage, ReplayBuffer

        max_rows = (plan.capacity_bytes - (1 << 20)) // (plan.row_bytes + 8)
        storage = LazyMemmapStorage(max_rows, scratch_dir=folder / "storage")
        buffer = ReplayBuffer(storage=storage, batch_size=plan.batch_rows, shared=True)
        x, y = np.empty((1, plan.columns), np.float32), np.zeros(1, np.int64)
        fill(x, y, pool_of(plan), 0.0)
        buffer.extend(tensordict_of(x, y))  # makes the files, which all processes then map
        with publishing("torchrl", buffer, plan, counters) as published_bytes:
            yield Running(
                handle=buffer,
                published_bytes=published_bytes,
                waited_seconds=None,
                used_bytes=Footprint(folder).bytes,
                limit_bytes=plan.capacity_bytes,
            )

    @staticmethod
    @contextmanager
    def writer(handle: Any, _: Plan) -> Iterator[Put]:
        import torch

        torch.set_num_threads(1)
        yield lambda x, y: handle.extend(tensordict_of(x, y))

    @staticmethod
    @contextmanager
    def reader(handle: Any, _: Plan) -> Iterator[Reading]:
        yield Reading(pair(handle.sample()) for _ in itertools.count())


# -- Data sets afar: an S3 endpoint on loopback, no faster than samplers publish -------------------------

BUCKET, PREFIX = "bucket", "data"
URI = f"s3://{BUCKET}/{PREFIX}"
LATENCY_SECONDS = 0.02  # of each answer
CREDENTIALS = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
WORKERS = 2


class Afar:
    """A peer that keeps `capacity_bytes` of a data set in a store: tests/object_store.py, in a thread.

    Its answers share `in_rate`. A reader needs boto3 or obstore in its environment, the endpoint, and any
    key.
    """

    @staticmethod
    def write(data: Path, plan: Plan) -> None:
        """Write the data set, in the peer's own format."""
        raise NotImplementedError

    @staticmethod
    def loader(handle: dict[str, str], plan: Plan) -> Iterable[dict[str, Any]]:
        """Epochs of the data set."""
        raise NotImplementedError

    @classmethod
    @contextmanager
    def running(cls, folder: Path, plan: Plan, _: Any) -> Iterator[Running]:
        """Write the data set, and serve it; the peer keeps a part in folder/local."""
        from tests.object_store import serve

        data, local = folder / "remote" / BUCKET / PREFIX, folder / "local"
        data.parent.mkdir(parents=True)
        local.mkdir()
        cls.write(data, plan)
        with serve(folder / "remote", LATENCY_SECONDS, bytes_per_second=plan.in_rate) as store:
            yield Running(
                handle={"endpoint": f"http://127.0.0.1:{store.port}", "local": str(local)},
                published_bytes=store.read_bytes,
                waited_seconds=None,
                used_bytes=Footprint(local).bytes,
                limit_bytes=plan.capacity_bytes,
                facts=lambda: {
                    "requests": len(store.requests), "remote_bytes": Footprint(data).bytes(),
                },
            )  # fmt: skip

    @classmethod
    @contextmanager
    def reader(cls, handle: dict[str, str], plan: Plan) -> Iterator[Reading]:
        os.environ.update({name.upper(): value for name, value in CREDENTIALS.items()})
        epochs = itertools.repeat(cls.loader(handle, plan))
        yield Reading(map(pair, itertools.chain.from_iterable(epochs)))


class Litdata(Afar):
    """litdata: chunks of a data set afar, of which `max_cache_size` bytes are kept.

    https://github.com/Lightning-AI/litdata#readme, "Limit local cache space" and "Stream from S3-compatible
    storage".
    """

    @staticmethod
    def write(data: Path, plan: Plan) -> None:
        from litdata.streaming import Cache

        cache = Cache(str(data), chunk_bytes=plan.segment_bytes)
        for x, y in plan.samples():
            cache[int(y)] = {"x": x, "y": int(y)}
        cache.done()
        cache.merge()

    @staticmethod
    def loader(handle: dict[str, str], plan: Plan) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset
        from litdata.streaming import downloader

        # litdata reads chunks by obstore, which refuses an endpoint without TLS, with no option to allow it.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        dataset = StreamingDataset(
            URI, cache_dir=handle["local"], max_cache_size=plan.capacity_bytes, shuffle=True, drop_last=True,
            storage_options={"endpoint_url": handle["endpoint"], **CREDENTIALS},
        )  # fmt: skip
        return StreamingDataLoader(
            dataset, batch_size=plan.batch_rows, num_workers=WORKERS, drop_last=True,
            prefetch_factor=plan.prefetch // WORKERS,
        )  # fmt: skip


class Streaming(Afar):
    """MosaicML Streaming: shards of a data set afar, of which `cache_limit` bytes are kept.

    https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shard_retrieval.html:
    `cache_limit` evicts the coldest shard. With its defaults the shuffle spreads each shard over a block of
    at least 262,144 samples, and where these are more than the cache holds, a shard is fetched anew for
    nearly every sample; so the block, and the rows fetched ahead, are a quarter of the cache
    (`shuffle_block_size`).

    Used plainly it delivers wrong rows here (127 of 25,792 in one run, by one worker none): the dataset's S3
    client fetches the index before the DataLoader forks, and workers that inherit its open connection get
    each other's answers. Under TLS the connection would fail instead. The client is dropped before the fork,
    so that the rest can be measured.
    """

    @staticmethod
    def write(data: Path, plan: Plan) -> None:
        write_mds(data, plan, size_limit=plan.segment_bytes)

    @staticmethod
    def loader(handle: dict[str, str], plan: Plan) -> Any:
        from torch.utils.data import DataLoader

        os.environ["S3_ENDPOINT_URL"] = handle["endpoint"]
        block = plan.capacity_bytes // plan.row_bytes // 4
        dataset = streaming_module().StreamingDataset(
            remote=URI, local=handle["local"], cache_limit=plan.capacity_bytes, shuffle=True,
            shuffle_block_size=block, num_canonical_nodes=1, predownload=block // WORKERS,
            batch_size=plan.batch_rows,
        )  # fmt: skip
        for source in dataset.streams:
            source._downloader.clean_up()
        return DataLoader(
            dataset, batch_size=plan.batch_rows, num_workers=WORKERS, drop_last=True,
            prefetch_factor=plan.prefetch // WORKERS,
        )  # fmt: skip


ADAPTERS: dict[str, Any] = {
    "arrowcache": Arrowcache, "torchrl": Torchrl, "reverb": Reverb, "streaming": Streaming,
    "litdata": Litdata,
}  # fmt: skip
