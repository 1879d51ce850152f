"""Typed use of the public API: checked by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import arrowcache as ac
import arrowcache.jax
from arrowcache.sampling.sources import ArrayWindows, Map, Mix, ParquetRows, Retries, WebDatasetShards
from arrowcache.torch import (
    CacheDataLoader,
    CacheDataset,
    CachedLoader,
    CachedStream,
    DevicePrefetcher,
    EpochBatchSampler,
    Loader,
    PackedLoader,
    PrefetcherStats,
    cached,
    dataloader,
    packed,
)


def sample(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    yield {"signal": rng.random((64, 1024), np.float32), "label": 3, "name": "a"}


def schema() -> ac.Schema:
    declared = ac.Schema(
        {
            "signal": ac.Tensor("float32", (64, 1024)),
            "label": ac.Tensor("int64"),
            "name": ac.String(),
            "raw": ac.Binary(),
            "at": ac.Timestamp(),
            "points": ac.Ragged("float32", (3,)),
        }
    )
    assert_type(ac.Schema.infer({"x": 3}), ac.Schema)
    assert_type(list(declared), list[str])
    return declared


def storage(path: Path) -> None:
    cache = ac.Cache.create(
        path, schema(), capacity="200GB", segment_bytes="64MiB", segment_rows=None, headroom=0.1,
        durable=False, exist_ok=False,
    )  # fmt: skip
    cache = ac.Cache.create(str(path), {"x": ac.Tensor("int8")}, capacity=10**9)
    cache = ac.Cache.open(path, check="structure")
    with cache.writer(on_full="wait", timeout=None, max_delay=None) as writer:
        assert_type(writer, ac.Writer)
        writer.append(signal=np.zeros(3), label=3, name="a")
        writer.append({"signal": 1})
        writer.extend(signal=np.zeros((2, 3)), label=[1, 2], name=["a", "b"])
        writer.close()
        writer.abort()
    stats = cache.stats()
    assert_type(stats, ac.CacheStats)
    assert_type(stats.capacity_bytes, int)
    assert_type(stats.oldest_seq, int | None)
    assert_type(cache.verify(repair=True), list[ac.Problem])
    assert_type(cache.evict(nbytes="10GB"), int)
    cache.resize("400GB")
    assert_type(cache.exclude(where=pc.field("label") == 3, reason="withdrawn"), int)
    assert_type(cache.rules(), list[tuple[pc.Expression, str]])
    cache.freeze()
    cache.thaw()
    assert_type(cache.path, Path)
    assert_type(cache.schema, ac.Schema)
    with cache as same:
        assert_type(same, ac.Cache)
    cache.close()


def reading(cache: ac.Cache) -> None:
    def every_tenth(segment: ac.SegmentInfo) -> bool:
        return segment.seq % 10 != 0 and segment.rows > 0 and segment.task != ""

    with cache.snapshot(where=every_tenth) as snapshot:
        assert_type(snapshot, ac.Snapshot)
        assert_type(len(snapshot), int)
        assert_type(snapshot.segments, tuple[ac.SegmentInfo, ...])
        assert_type(snapshot.nbytes, int)
        out: dict[str, NDArray[Any]] = {"signal": np.empty(3)}
        rows = snapshot.gather([1, 2], columns=["signal"], out=out)
        column = rows["points"]
        if isinstance(column, ac.Values):
            assert_type(column.offsets, NDArray[np.int64])
        snapshot.gather(np.arange(3))
        snapshot.table(columns=["signal"])
    loader = ac.Loader(
        cache, batch_size=64, shuffle="rows", seed=0, columns=["signal"], drop_last=True, transform=None,
        prefetch=4, where=every_tenth, with_ids=False, epoch_rows=None, wait_rows=1, timeout=60.0,
    )  # fmt: skip
    for batch in loader:
        assert_type(batch, dict[str, Any])
    ac.Loader("path", 64)
    ac.Loader("path", batch_tokens=16_384, length_of="tokens")
    ac.Loader("path", 64, columns={"signal": np.negative, "label": None})
    ac.Loader(Path("path"), 64)
    assert_type(loader.steps, int | None)
    assert_type(loader.stats(), ac.LoaderStats)
    assert_type(loader.stats().bottleneck, str)
    loader.close()


def row_ids() -> None:
    row = ac.RowId.parse("83:26")
    assert_type(row, ac.RowId)
    assert_type(row.seq, int)
    seq, place = row
    assert_type((seq, str(row)), tuple[int, str])
    assert_type(ac.RowId(seq, place).row, int)


def sampling(cache: ac.Cache) -> None:
    with ac.SamplerPool(
        cache,
        sample,
        workers=4,
        seed=0,
        name="default",
        executor=None,
        segments=None,
        retries=3,
        progress=None,
        reads=32,
        on_error="skip",
    ) as pool:
        assert_type(pool, ac.SamplerPool)
        assert_type(pool.stats(), ac.PoolStats)
        assert_type(pool.stats().skipped, int)
        pool.wait(segments=10, timeout=60)
        pool.stop()


def many(rng: np.random.Generator) -> Iterator[ac.Rows]:
    yield ac.Rows(signal=rng.random((5, 3)), label=[1, 2, 3, 4, 5], name=["a"] * 5)


def ready_samplers(path: Path, rng: np.random.Generator) -> None:
    rows = ParquetRows(
        path, ["x"], None, rows_per_group=8, schema={"x": ac.Tensor("int8")}, fill={"x": 0},
        filesystem=None, retries=4,
    )  # fmt: skip
    windows = ArrayWindows(
        [{"x": "s3://bucket/x.zarr", "y": path}], {"x": (3,), "y": (1,)}, weights=[1.0], with_position=True
    )
    ArrayWindows("x.zarr", (3,), windows_per_chunk=8, where={"time": slice(0, 2016), 1: slice(None, -3)})
    ArrayWindows("x.npy", (3, 4), retries=Retries(2, first_seconds=0.1))
    shards = WebDatasetShards(["a.tar"], lambda field, data: data, fields=["cls"], shuffle=10)
    mixed = Mix({rows: 1, windows: 2.5}, on_error="skip")
    mapped = Map(Mix([(many, 1), (shards, 2)]), lambda sample, rng: {"x": rng.random()})
    assert_type(mixed.schema, ac.Schema)
    for sample in mapped(rng):
        assert_type(sample, Mapping[str, Any])
    with rows as same:
        assert_type(same, ParquetRows)
    with ac.SamplerPool("cache", mapped):
        pass


def torch_adapters(cache: ac.Cache) -> None:
    sampler = EpochBatchSampler(cache, 64, shuffle="rows", seed=0, drop_last=True)
    sampler.set_epoch(3)
    assert_type(len(sampler), int)
    dataset = CacheDataset(cache, columns=["signal"], transform=lambda batch: batch["signal"])
    spelled_out = DataLoader(dataset, batch_sampler=sampler, num_workers=4, persistent_workers=True)
    assert_type(spelled_out, DataLoader[dict[str, Any]])
    assert_type(dataloader("path", 64, num_workers=4, pin_memory=True), CacheDataLoader)
    train = cached(TensorDataset(torch.arange(3)), "path", capacity="1GB")
    assert_type(train.fill(workers=2, reads=16), int)
    stream = cached(None, "path", capacity="1GB", shards=[lambda: iter([1])], rank=0, world_size=2)
    assert_type(stream, CachedStream)
    assert_type(stream.stats().whole, int)
    stream.load_state_dict(stream.state_dict())
    assert_type(CachedLoader(stream, 64), CachedLoader)
    with CachedLoader(train, 64, collate_fn=list, workers=2, reads=16) as batches:
        batches.load_state_dict(batches.state_dict())
        assert_type(len(batches), int)
        assert_type(next(iter(batches)), Any)


def sequences(cache: ac.Cache) -> None:
    loader = packed(cache, "tokens", 2048, batch_size=16, seed=1, split=False, shuffle="window", where=None)
    assert_type(loader, PackedLoader)
    for batch in loader:
        assert_type(batch, dict[str, Any])
    assert_type(loader.steps, int | None)
    loader.load_state_dict(loader.state_dict(), missing="raise")
    packed("path", "tokens", 2048, batch_size=16, device="cuda", rank=0, world_size=2, run_id="job").close()
    packed(ac.Loader(cache, 64), "tokens", 2048, batch_size=16).close()


def errors() -> None:
    for kind in (
        ac.SchemaError,
        ac.CacheFullError,
        ac.CacheFormatError,
        ac.CorruptSegmentError,
        ac.SamplerError,
    ):
        assert_type(kind("why").args, tuple[Any, ...])
    try:
        pass
    except (ac.LoaderTimeoutError, ac.LockTimeoutError) as error:
        timeout: TimeoutError = error
        base: ac.ArrowCacheError = error
        print(timeout, base)


def devices(cache: ac.Cache) -> None:
    with arrowcache.jax.Loader(cache, 64, device=None, sharding=None, shuffle="window", seed=1) as arrays:
        assert_type(arrays, arrowcache.jax.Loader)
        for batch in arrays:
            assert_type(batch, dict[str, Any])
    arrowcache.jax.Loader(cache, 64, devise=None)  # type: ignore[call-arg]
    with Loader(cache, 64, device="cuda") as loader:
        for batch in loader:
            assert_type(batch, dict[str, Any])
        for batch in loader.repeat():
            assert_type(batch, dict[str, Any])
        assert_type(loader.device_stats(), PrefetcherStats | None)
    with DevicePrefetcher([3], torch.device("cuda", 1), depth=2) as prefetcher:
        assert_type(prefetcher, DevicePrefetcher)
        assert_type(prefetcher.stats().device_bytes, int)
        assert_type(prefetcher.devices, list[torch.device])
        print(list(prefetcher), len(prefetcher))
    DevicePrefetcher(iter([3]), devices=["cuda:0", "cuda:1"]).close()


def mistakes(cache: ac.Cache) -> None:
    """Each of these lines is wrong, and mypy says so: an unused ignore is an error."""
    cache.evict(None)  # type: ignore[arg-type]
    cache.writer(on_full=3)  # type: ignore[arg-type]
    ac.Loader()  # type: ignore[call-arg]
    ac.Loader(cache, 64, shufle="rows")  # type: ignore[call-arg]
    packed(cache, "tokens", 2048)  # type: ignore[call-arg]
    packed(cache, "tokens", 2048, batch_size=16, transform=dict)  # type: ignore[call-arg]
    ac.Tensor("float32", "shape")  # type: ignore[arg-type]
    cache.stats().rows = 3  # type: ignore[misc]
    cache.path = Path()  # type: ignore[misc]


def a_name_that_is_none_is_found_by_the_type_checker() -> None:
    _ = ac.Cach  # type: ignore[attr-defined]  # proves that names which are imported late are known all the same
    assert_type(ac.__version__, str)
