"""Loader for PyTorch: the batches of `arrowcache.Loader` as tensors over the same memory, or on a device."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from arrowcache.arguments import OF_DATALOADER, instead
from arrowcache.arrow.schema import Ragged
from arrowcache.reading.assembly import Batch, Memory
from arrowcache.reading.iterator import Batches
from arrowcache.reading.loader import Loader as NumpyLoader
from arrowcache.reading.membership import Membership
from arrowcache.reading.options import LoaderArguments, takes
from arrowcache.reading.stream import BatchStream
from arrowcache.storage.recovery import HasStore
from arrowcache.torch.cached_dataset import CachedDataset
from arrowcache.torch.cached_loader import CachedLoader
from arrowcache.torch.delivery import Delivery
from arrowcache.torch.device import Device, DevicePrefetcher, PrefetcherStats
from arrowcache.torch.distributed import membership_now
from arrowcache.torch.tensors import import_nested, to_tensor

if TYPE_CHECKING:
    from typing import Unpack


_ON_A_DEVICE = (
    "device='cuda' has batches in pinned memory, and copies them ahead; without a device leave it out"
)
_INSTEAD = {
    **OF_DATALOADER,
    **instead("pin_memory", say=_ON_A_DEVICE),
    **instead("devices", say="DevicePrefetcher(loader, devices=...) divides its batches among devices"),
}


class Loader(NumpyLoader):
    """Batches as `dict[str, torch.Tensor]`: each `for` is an epoch over a new snapshot.

    Arguments, epochs, waiting and errors are those of `arrowcache.Loader`; `transform` is called with NumPy
    arrays, ahead, in a worker thread or process. If torch.distributed is initialized when an epoch begins, it
    gives rank and world_size, unless they are arguments. Tensors are (batch_size, *shape).

    Args:
        device: device of the tensors. None means the CPU, in memory shared with the loader's slots. On "cuda"
            and others the next two batches are copied there while this one trains, as `DevicePrefetcher`
            does; a batch counts as delivered, in `stats` and `state_dict`, when the consumer gets it. Rows
            are gathered, also by worker processes, into memory from which the device copies large columns
            itself; small ones, and columns elsewhere (views, results of transforms), are copied to such
            memory first. Only waits for rows count as stall, and have a timeout; waits for a busy device do
            not.

    Keeping a tensor is safe: it is not overwritten while it or a view of it lives.
    Raises: as `arrowcache.Loader`; ValueError: a device that does not exist here. A step raises
        torch.OutOfMemoryError where the device has no memory for a batch.

    Text and bytes come as lists; a ragged column as a nested tensor of jagged layout;
    timestamps as int64 microseconds since 1970; bfloat16 as torch.bfloat16.

    Of a `CachedDataset` this makes a `CachedLoader`, which see: each item once an epoch.
    """

    _prefetcher: DevicePrefetcher | None = None  # also if the constructor fails

    def __new__(  # noqa: PYI034  # of a CachedDataset it is a CachedLoader
        cls,
        cache: HasStore | str | os.PathLike[str] | CachedDataset,
        batch_size: int | None = None,
        *positional: Any,
        device: Device | None = None,
        **options: Any,
    ) -> Loader:
        """Make the loader of a cache, or of a CachedDataset: a CachedLoader."""
        if isinstance(cache, CachedDataset):
            rows = 64 if batch_size is None else batch_size
            return CachedLoader(cache, rows, *positional, device=device, **options)  # type: ignore[return-value]  # it stands in
        return super().__new__(cls)

    @takes("Loader", LoaderArguments, _INSTEAD)
    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str] | CachedDataset,
        batch_size: int | None = None,
        *,
        device: Device | None = None,
        **options: Unpack[LoaderArguments],
    ) -> None:
        if device is not None:
            self._prefetcher = DevicePrefetcher((), device)
        assert not isinstance(cache, CachedDataset)  # `__new__` has seen to that
        super().__init__(cache, batch_size, **options)
        schema = self._store.settings.schema
        if any(isinstance(schema.get(name), Ragged) for name in self._options.names):
            import_nested()  # or the first batch would wait for it

    def device_stats(self) -> PrefetcherStats | None:
        """Return counts of the copies to the device, or None without a device."""
        return None if self._prefetcher is None else self._prefetcher.stats()

    def close(self) -> None:
        """End the epoch, the threads and processes of workers, and release device memory. Idempotent.

        Blocks: at most some seconds, for a running transform, or copies of the device.
        """
        try:
            super().close()
        finally:
            if self._prefetcher is not None:
                self._prefetcher.close()

    def _memory(self) -> Memory:
        return super()._memory() if self._prefetcher is None else Memory(self._prefetcher.host_memory)

    def _membership(self, *, begins: bool) -> Membership | None:
        return membership_now(self._options, begins=begins)

    def _hand_out(self, stream: BatchStream) -> Batches:
        if self._prefetcher is None:
            return super()._hand_out(stream)
        if self._prefetcher.is_inherited():  # the devices belong to the process that forked this one
            self._prefetcher = DevicePrefetcher((), self._prefetcher.devices[0])
        return self._prefetcher.over(Delivery(stream, self._options.timeout, self._finish))

    def _finish(self, batch: Batch) -> Batch:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"the transform returned {type(batch).__name__}, not a dict of columns: return one, or use "
                "arrowcache.Loader, which passes on whatever it is"
            )
        schema, tensors = self._store.settings.schema, {}
        for name, values in batch.items():
            try:
                tensors[name] = to_tensor(values, schema.get(name))
            except TypeError as error:  # such as an array of Python objects
                raise TypeError(f"column {name!r} cannot become a tensor: {error}") from None
        return tensors


Loader.__new__.__signature__ = inspect.signature(Loader.__init__)  # type: ignore[attr-defined]  # `help` shows it
