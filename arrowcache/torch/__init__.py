"""PyTorch: the same loaders, yielding tensors. Importing this package imports torch."""

from arrowcache.torch.device import DevicePrefetcher, PrefetcherStats
from arrowcache.torch.loader import Loader

__all__ = ["DevicePrefetcher", "Loader", "PrefetcherStats"]
