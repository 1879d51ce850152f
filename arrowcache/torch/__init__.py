"""PyTorch: the same loaders, yielding tensors. Importing this package imports torch."""

from arrowcache.torch.dataset import CacheDataset, dataloader
from arrowcache.torch.device import DevicePrefetcher, PrefetcherStats
from arrowcache.torch.iterable import CacheIterableDataset
from arrowcache.torch.loader import Loader
from arrowcache.torch.sampler import EpochBatchSampler

__all__ = [
    "CacheDataset",
    "CacheIterableDataset",
    "DevicePrefetcher",
    "EpochBatchSampler",
    "Loader",
    "PrefetcherStats",
    "dataloader",
]
