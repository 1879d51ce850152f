"""`cached` and `Items` of what other libraries read data with: the real library, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawing import write_tar
from torch.utils.data import DataLoader

import arrowcache as ac
from arrowcache.sampling.sources import Items
from arrowcache.torch import CachedDataset, CachedStream, Loader, cached

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(  # of these libraries: files that stay open, read-only arrays, forks
        "ignore::ResourceWarning",
        "ignore::UserWarning",
        "ignore::DeprecationWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ),
]

ROWS = 40


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def of_hugging_face(_: Path) -> Any:
    columns = {"x": [[n, n + 1] for n in range(ROWS)], "y": [*range(ROWS)]}
    return library("datasets").Dataset.from_dict(columns).to_iterable_dataset(num_shards=5)


def mapped_of_hugging_face(folder: Path) -> Any:
    return of_hugging_face(folder).map(lambda item: item).shuffle(seed=3, buffer_size=10).with_format("torch")


def generated_of_hugging_face(_: Path) -> Any:
    def items(parts):
        for part in parts:
            yield from ({"y": 10 * part + n} for n in range(10))

    return library("datasets").IterableDataset.from_generator(items, gen_kwargs={"parts": [0, 1, 2, 3]})


def of_webdataset(folder: Path) -> Any:
    webdataset = library("webdataset")
    for part in range(4):
        files = {f"{10 * part + n:03d}.y": str(10 * part + n).encode() for n in range(10)}
        write_tar(folder / f"{part}.tar", files)
    return webdataset.WebDataset(f"{folder}/{{0..3}}.tar", shardshuffle=False)


def decoded_of_webdataset(folder: Path) -> Any:
    return of_webdataset(folder).map(lambda item: {"y": int(item["y"])})


def of_litdata(folder: Path) -> Any:
    litdata = library("litdata")
    litdata.optimize(
        item_of, [*range(ROWS)], f"{folder}/lit", num_workers=1, chunk_bytes="1KB", verbose=False
    )
    return litdata.StreamingDataset(f"{folder}/lit")


def item_of(number: int) -> dict[str, Any]:
    return {"x": np.full(8, number), "y": number}


def of_mosaicml(folder: Path) -> Any:
    streaming = library("streaming")
    with streaming.MDSWriter(
        out=f"{folder}/mds", columns={"x": "ndarray", "y": "int"}, size_limit=999
    ) as out:
        for number in range(ROWS):
            out.write(item_of(number))
    return streaming.StreamingDataset(local=f"{folder}/mds", batch_size=1, shuffle=False)


def of_lance(folder: Path) -> Any:
    import pyarrow as pa

    library("lance").write_dataset(pa.table({"x": [0.5] * ROWS, "y": [*range(ROWS)]}), f"{folder}/rows.lance")
    return library("lance.torch.data").SafeLanceDataset(f"{folder}/rows.lance")


def batches_of_lance(folder: Path) -> Any:
    of_lance(folder)
    return library("lance.torch.data").LanceDataset(f"{folder}/rows.lance", batch_size=8)


def of_monai(_: Path) -> Any:
    return library("monai.data").Dataset([{"y": n} for n in range(ROWS)], tensor_of)


def stream_of_monai(_: Path) -> Any:
    return library("monai.data").IterableDataset([{"y": n} for n in range(ROWS)], tensor_of)


def tensor_of(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"x": torch.full((3,), float(item["y"]))}


STREAMS: dict[Callable[[Path], Any], int] = {
    of_hugging_face: 5,
    mapped_of_hugging_face: 5,
    generated_of_hugging_face: 4,
    of_webdataset: 4,
    decoded_of_webdataset: 4,
    batches_of_lance: 1,
    stream_of_monai: 1,
}
MAP_STYLE = [of_litdata, of_mosaicml, of_lance, of_monai]


def numbers(items: Any) -> list[int]:
    return sorted(int(number) for item in items for number in np.ravel(item["y"]))


@pytest.mark.parametrize("make", [*STREAMS])
def test_a_stream_is_cached(tmp_path, make):
    with cached(make(tmp_path), tmp_path / "cache", capacity="64MiB") as train:
        assert isinstance(train, CachedStream)
        assert train.stats().shards == STREAMS[make]
        assert len([*islice(train, 3)]) == 3
        first = [*train]
        assert numbers(first) == [*range(ROWS)]
        assert train.stats().whole == STREAMS[make]
        streamed = train.stats().streamed
        for workers in (0, 2):
            assert numbers(DataLoader(train, None, num_workers=workers)) == [*range(ROWS)]
        assert train.stats().streamed == streamed
        for one, other in zip(first, train, strict=True):
            assert one.keys() == other.keys()
            assert [*map(type, one.values())] == [*map(type, other.values())]
            assert all(np.array_equal(one[name], other[name]) for name in one)
        with Loader(train, 4, workers=0) as loader:
            assert numbers(loader) == [*range(ROWS)]


@pytest.mark.parametrize("make", MAP_STYLE)
def test_a_map_style_dataset_is_cached(tmp_path, make):
    with cached(make(tmp_path), tmp_path / "cache", capacity="64MiB") as train:
        assert isinstance(train, CachedDataset)
        for workers in (0, 2):
            assert numbers(DataLoader(train, None, num_workers=workers)) == [*range(ROWS)]
        assert train.cached == ROWS


@pytest.mark.parametrize("make", MAP_STYLE)
def test_a_map_style_dataset_is_drawn_by_a_pool(tmp_path, make):
    source = Items(make(tmp_path))
    with ac.Cache.create(tmp_path / "cache", source.schema, capacity="64MiB") as cache:
        with ac.SamplerPool(cache, source, workers=1) as pool:
            pool.wait(timeout=120)
        with cache.snapshot() as snapshot:
            assert sorted(snapshot.gather(range(len(snapshot)))["y"].tolist()) == [*range(ROWS)]


def test_a_stream_is_no_source_of_items(tmp_path):
    with pytest.raises(TypeError, match="whose items have no numbers: write a sampler"):
        Items(stream_of_monai(tmp_path))


def test_a_stream_of_hugging_face_goes_on_behind_its_capacity(tmp_path):
    datasets = library("datasets")
    columns = {"x": np.zeros((300, 256)).tolist(), "y": [*range(300)]}
    stream = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=2).with_format("numpy")
    with cached(stream, tmp_path / "cache", capacity="256KiB") as train:
        for _ in range(3):
            assert numbers(train) == [*range(300)]
        assert 0 < train.cached < 300


@pytest.mark.parametrize("shards", [1, 5])
def test_a_stream_of_hugging_face_whose_epoch_is_set_is_refused(tmp_path, shards):
    rows = library("datasets").Dataset.from_dict({"y": [*range(ROWS)]})
    stream = rows.to_iterable_dataset(num_shards=shards).shuffle(seed=3, buffer_size=10)
    with cached(stream, tmp_path / "cache", capacity="64MiB") as train:
        assert numbers(train) == [*range(ROWS)]
        stream.set_epoch(1)
        with pytest.raises(ValueError, match=r"the stream's epoch is 1, and was 0"):
            list(train)


def test_a_part_for_a_node_is_refused(tmp_path):
    part = library("datasets.distributed").split_dataset_by_node(of_hugging_face(tmp_path), 0, 2)
    with pytest.raises(ValueError, match=r"give cached\(\) the whole stream"):
        cached(part, tmp_path / "cache", capacity="64MiB")


def test_an_endless_webdataset_is_refused(tmp_path):
    webdataset = library("webdataset")
    of_webdataset(tmp_path)
    endless = webdataset.WebDataset(f"{tmp_path}/0.tar", resampled=True, shardshuffle=False)
    for stream in (endless, of_webdataset(tmp_path).with_epoch(5), of_webdataset(tmp_path).repeat(2)):
        with pytest.raises(ValueError, match=r"does not repeat|leave out repeat"):
            cached(stream, tmp_path / "cache", capacity="64MiB")


@pytest.mark.parametrize("kind", ["take", "skip", "interleaved", "plain"])
def test_steps_over_all_shards_of_hugging_face_give_what_they_give_alone(tmp_path, kind):
    datasets = library("datasets")

    def of(lengths, first=0):
        def items(parts):
            for part in parts:
                yield from ({"n": first + 1000 * part + at} for at in range(lengths[part]))

        return datasets.IterableDataset.from_generator(items, gen_kwargs={"parts": [*range(len(lengths))]})

    stream = of([10, 3, 7, 9])
    if kind == "take":
        stream = stream.take(12)
    elif kind == "skip":
        stream = stream.skip(8)
    elif kind == "interleaved":
        stream = datasets.interleave_datasets([stream, of([5, 6], 10**6)])
    alone = [item["n"] for item in stream]
    train = cached(stream, tmp_path / "cache", capacity="16MiB")
    for _ in range(2):
        assert sorted(item["n"] for item in train) == sorted(alone)
    if kind != "plain":
        assert [item["n"] for item in train] == alone
