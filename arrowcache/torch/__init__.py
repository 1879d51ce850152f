"""PyTorch: the same loaders, yielding tensors. Importing this package imports torch."""

try:
    from arrowcache.torch.batch_sampler import EpochBatchSampler
    from arrowcache.torch.cached_dataset import CachedDataset, CachedStats, cached
    from arrowcache.torch.cached_stream import CachedStream, StreamStats
    from arrowcache.torch.dataset import CacheDataLoader, CacheDataset, dataloader
    from arrowcache.torch.device import DevicePrefetcher, PrefetcherStats
    from arrowcache.torch.loader import CachedLoader, Loader
    from arrowcache.torch.packed_loader import PackedLoader, packed
except ModuleNotFoundError as error:
    raise ImportError(
        f"arrowcache.torch needs {error.name}, which is not installed: pip install 'arrowcache[torch]'"
    ) from error

__all__ = [
    "CacheDataLoader",
    "CacheDataset",
    "CachedDataset",
    "CachedLoader",
    "CachedStats",
    "CachedStream",
    "DevicePrefetcher",
    "EpochBatchSampler",
    "Loader",
    "PackedLoader",
    "PrefetcherStats",
    "StreamStats",
    "cached",
    "dataloader",
    "packed",
]
