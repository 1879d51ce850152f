"""Loader for PyTorch: the batches of `arrowcache.Loader` as tensors over the same memory, or on a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from arrowcache.arrow.schema import Ragged
from arrowcache.reading.assembly import Assembly, Batch
from arrowcache.reading.iterator import Batches
from arrowcache.reading.loader import Loader as NumpyLoader
from arrowcache.reading.stream import Stream
from arrowcache.reading.window import WindowAssembly
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import HasStore
from arrowcache.torch.delivery import Delivery
from arrowcache.torch.device import Device, DevicePrefetcher, PrefetcherStats
from arrowcache.torch.distributed import Ranks
from arrowcache.torch.tensors import import_nested, to_tensor
from arrowcache.torch.window import Ring, WindowDelivery, WindowEpoch

if TYPE_CHECKING:
    from arrowcache.reading.workers.remote import RemoteAssembly


class Loader(NumpyLoader):
    """Batches as `dict[str, torch.Tensor]`: each `for` is an epoch over a new snapshot.

    Arguments, epochs, waiting and errors are those of `arrowcache.Loader`; `transform` is called
    with NumPy arrays, ahead, in a thread or process of a worker. Where torch.distributed is initialized
    when an epoch begins, rank and world_size are its, unless given. Tensors are (batch_size, *shape).

    Args:
        device: None: tensors are on the CPU and share memory with the loader's slots. Else such as "cuda":
            the next two batches are copied there while this one trains, as `DevicePrefetcher` does;
            a batch counts as delivered, in `stats` and `state_dict`, when the consumer gets it. Rows are
            gathered, also by worker processes, into memory from which the device copies large columns itself;
            small ones, and what lies elsewhere (views, results of transforms), are copied into such first.
            Only time that the consumer waits for rows is stall, and has a timeout: a busy device is none.
            With shuffle="window" and `window_bytes`, without a transform or workers, rows go there in the
            order of their files and are shuffled there: the same batches, bit for bit. That takes memory of
            two windows on the device, at once, and each rank brings there the rows of all. Other columns than
            those of fixed width are gathered on the host.

    Keeping a tensor is safe: nothing overwrites it while it or a view of it lives.
    Raises: as `arrowcache.Loader`; ValueError: a device that does not exist here. A step raises
        torch.OutOfMemoryError where the device has no memory for two windows, or for a batch.

    Text and bytes come as lists; a ragged column as a nested tensor of jagged layout;
    timestamps as int64 microseconds since 1970; bfloat16 as torch.bfloat16.
    """

    _prefetcher: DevicePrefetcher | None = None  # also where the constructor fails
    _ring: Ring | None = None  # where the device shuffles
    _may_shuffle = False

    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        batch_size: int = 64,
        *,
        shuffle: str | None = "rows",
        seed: int = 0,
        columns: Sequence[str] | None = None,
        drop_last: bool = True,
        transform: Callable[[Batch], Batch] | None = None,
        workers: int = 0,
        worker_type: str = "process",
        prefetch: int | None = None,
        where: Callable[[SegmentInfo], bool] | None = None,
        with_ids: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        run_id: str | None = None,
        epoch_rows: int | None = None,
        wait_rows: int = 1,
        timeout: float | None = 60.0,
        window_bytes: int | str | None = None,
        paced: bool = True,
        device: Device | None = None,
    ) -> None:
        if device is not None:
            self._prefetcher = DevicePrefetcher((), device)
            self._may_shuffle = shuffle == "window" and window_bytes is not None
        super().__init__(
            cache,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            columns=columns,
            drop_last=drop_last,
            transform=transform,
            workers=workers,
            worker_type=worker_type,
            prefetch=prefetch,
            where=where,
            with_ids=with_ids,
            rank=rank,
            world_size=world_size,
            run_id=run_id,
            epoch_rows=epoch_rows,
            wait_rows=wait_rows,
            timeout=timeout,
            window_bytes=window_bytes,
            paced=paced,
        )
        if self._prefetcher is not None:
            self._assembly.gather_into(self._prefetcher.host_memory)
            self._make_ring(self._prefetcher)
        schema = self._store.settings.schema
        if any(isinstance(schema.get(name), Ragged) for name in self._options.names):
            import_nested()  # here, or the first batch would wait for it

    def device_stats(self) -> PrefetcherStats | None:
        """What the copies to the device took so far; None without a device.

        Where it shuffles, `device_bytes` has the two windows, and `bytes` counts rows as they go there.
        """
        if self._prefetcher is None:
            return None
        stats, ring = self._prefetcher.stats(), self._ring
        if ring is None:
            return stats
        return replace(
            stats,
            batches=ring.batches,
            device_bytes=stats.device_bytes + ring.nbytes,
            device_allocations=stats.device_allocations + ring.allocations,
        )

    def close(self) -> None:
        """End the epoch, the threads and processes of workers, and let go of device memory. Idempotent.

        Blocks: at most some seconds, for a transform that runs, or a device that still copies.
        """
        try:
            super().close()
        finally:
            if self._ring is not None:
                self._ring.drop()
            if self._prefetcher is not None:
                self._prefetcher.close()

    def _kind_of_assembly(self) -> type[Assembly | RemoteAssembly]:
        making, fixed = self._making, self._store.settings.schema.fixed.keys()
        is_plain = making.transform is None and not making.workers
        if self._may_shuffle and is_plain and fixed & {*self._options.names}:
            return WindowAssembly
        return super()._kind_of_assembly()

    def _make_ring(self, prefetcher: DevicePrefetcher) -> None:
        if isinstance(self._assembly, WindowAssembly):
            self._ring = Ring(prefetcher.backend, self._assembly.ring_rows)

    def _find_rank(self) -> tuple[int | None, int | None]:
        now = Ranks(*self._given, self._run_id).now()  # Lightning initializes torch.distributed in `fit`
        return now.rank, now.world_size

    def _hand_out(self, stream: Stream) -> Batches:
        if self._prefetcher is None:
            return super()._hand_out(stream)
        if self._prefetcher.is_inherited():  # its devices are those of the process that forked this one
            self._prefetcher = DevicePrefetcher((), self._prefetcher.devices[0])
            self._make_ring(self._prefetcher)
        seconds, ring = self._options.timeout_seconds, self._ring
        if ring is None:
            return self._prefetcher.over(Delivery(stream, seconds, self._finish))
        delivery = WindowDelivery(stream, seconds, self._finish)
        return WindowEpoch(delivery, self._prefetcher.over(delivery), ring, self._options.names)

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
