"""Which peers there are: where each one's advice for speed is written, and which environment has it."""

from __future__ import annotations

from dataclasses import dataclass

STREAMED = "streaming data sets and caches"  # with a format of their own
IN_PLACE = "memory indexed in place"  # arrays that are whole on this machine
OWN = "arrowcache"  # the peer that is set beside all others


@dataclass(frozen=True)
class Peer:
    """A library that people use today.

    Args:
        name: in tables.
        module: the word for it on command lines, and of its class in `adapters.ADAPTERS`.
        environment: of `constraints/`.
        distribution: whose version is told.
        advice: where its documentation says how it is fast.
        how: what the adapter does of that, in one line.
        kind: STREAMED or IN_PLACE, as which it is used here; arrowcache is set beside both.
        workers: counts that it can be given.
        is_packaged: a data loader, not a yardstick written by hand.
        has_epochs: it delivers every row once. One that has none samples with replacement: its epochs are
            as many rows as there are, drawn at random, and it has no unshuffled ones.
        is_rolling: it drops its oldest rows when there is no room, and says so.
        is_endless: its stream goes on from epoch to epoch, so that no epoch's first batch is waited for.
        counts_cpu: its processes end as children of one that waits for them, so that their time is known.
    """

    name: str
    module: str
    environment: str
    distribution: str
    advice: str
    how: str
    kind: str = STREAMED
    workers: tuple[int, ...] = (0, 1, 2)
    is_packaged: bool = True
    has_epochs: bool = True
    is_rolling: bool = False
    is_endless: bool = False
    counts_cpu: bool = True


PEERS = [
    Peer(
        "arrowcache", "arrowcache", "newest", "arrowcache", "README.md",
        "arrowcache.torch.Loader(shuffle='rows'), its defaults, worker processes", is_rolling=True,
    ),
    Peer(
        "MosaicML Streaming", "streaming", "streaming", "mosaicml-streaming",
        "https://docs.mosaicml.com/projects/streaming/en/stable/getting_started/faqs_and_tips.html",
        "MDS shards, local; batch_size given to StreamingDataset, too; py1e shuffle; StreamingDataLoader",
    ),
    Peer(
        "tf.data TFRecord", "tfrecord", "tensorflow", "tensorflow-cpu",
        "https://www.tensorflow.org/guide/data_performance",
        "parallel interleave, shuffle buffer, batch before parse, prefetch; workers are threads, 0: AUTOTUNE",
    ),
    Peer(
        "Ray Data", "ray", "newest", "ray", "https://docs.ray.io/en/latest/data/performance-tips.html",
        "Parquet, not compressed; files shuffled, 64 MiB local shuffle buffer; never without processes",
        workers=(1, 2), counts_cpu=False,
    ),
    Peer(
        "Reverb", "reverb", "reverb", "dm-reverb", "https://github.com/google-deepmind/reverb",
        "in memory, sampling with replacement, TrajectoryDataset; workers: threads, 0 and 1 the same",
        has_epochs=False, is_endless=True,
    ),
    Peer(
        "torch DataLoader, np.memmap", "memmap", "peers", "torch",
        "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        "a row at a time, persistent worker processes", kind=IN_PLACE, is_packaged=False,
    ),
    Peer(
        "torch DataLoader, np.memmap by batch", "memmap_batched", "peers", "torch",
        "https://docs.pytorch.org/docs/stable/data.html",
        "__getitems__: one np.take a batch, persistent worker processes", kind=IN_PLACE, is_packaged=False,
    ),
    Peer(
        "litdata", "litdata", "peers", "litdata", "https://github.com/Lightning-AI/litData",
        "optimize into chunks of 64 MiB (256 for rows of 1 MiB), StreamingDataLoader, chunks mapped in place",
    ),
    Peer(
        "WebDataset", "webdataset", "peers", "webdataset",
        "https://webdataset.github.io/webdataset/sharding/",
        "16 shards of arrays as bytes, a decoder for them, shuffle buffer, batched in the workers, WebLoader",
    ),
    Peer(
        "HF datasets, map", "hf_datasets", "peers", "datasets",
        "https://huggingface.co/docs/datasets/use_with_pytorch",
        "Arrow file, a batch of rows asked for at once, numpy format",
    ),
    Peer(
        "HF datasets, iterable", "hf_datasets_iterable", "peers", "datasets",
        "https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable",
        "to_iterable_dataset of 16 shards, shuffle buffer, numpy format",
    ),
    Peer(
        "SPDL", "spdl", "peers", "spdl",
        "https://facebookresearch.github.io/spdl/latest/getting_started/index.html",
        "its threads np.take batches of a mapped .npy file: it has no format; workers are threads, 0 is one",
        kind=IN_PLACE, workers=(0, 2), is_endless=True,
    ),
    Peer(
        "Grain", "grain", "peers", "grain",
        "https://developers.googleblog.com/en/building-high-performance-data-pipelines-with-grain-and-arrayrecord",
        "ArrayRecord of a record a group, MapDataset, read threads; workers by mp_prefetch", is_endless=True,
    ),
    Peer(
        "Lance", "lance", "peers", "pylance", "https://lancedb.github.io/lance/integrations/pytorch",
        "a take a batch; its torch dataset in order; workers are spawned, as Lance is not fork-safe",
    ),
    Peer(
        "torchrl", "torchrl", "peers", "torchrl", "https://docs.pytorch.org/rl/stable/reference/data.html",
        "SamplerWithoutReplacement; no worker processes: workers are batches that threads sample ahead",
        kind=IN_PLACE,
    ),
    Peer(
        "tensordict", "tensordict", "peers", "tensordict",
        "https://docs.pytorch.org/tensordict/main/data_loading.html",
        "memory-mapped, one index a batch, torch DataLoader", kind=IN_PLACE,
    ),
]  # fmt: skip


def by_kind() -> list[Peer]:
    """All peers: arrowcache, then one kind after the other."""
    return sorted(PEERS, key=lambda peer: (peer.name != OWN, peer.kind != STREAMED))


#: Those that could not be had, and why.
ABSENT: dict[str, str] = {}
