"""Loader for PyTorch: the batches of `arrowcache.Loader` as tensors over the same memory, or on a device.

`CachedLoader` is the fast way through a CachedDataset: each item once an epoch. It stands in for
`DataLoader(train, batch_size, shuffle=True)`: the same items, the same batches of them. It is a loader like
the others, whose epochs and batches cached_epochs.py makes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from arrowcache.arguments import OF_DATALOADER, OF_ONCE, face, instead
from arrowcache.arrow.items import with_article
from arrowcache.arrow.schema import Ragged
from arrowcache.lifetimes import at_exit
from arrowcache.reading.assembly import Batch, Memory
from arrowcache.reading.batch_source import Batches
from arrowcache.reading.loader import Loader as NumpyLoader
from arrowcache.reading.loader import close_all
from arrowcache.reading.options import LoaderArguments, RankInfo, parse_ranks, takes
from arrowcache.reading.order import Shard
from arrowcache.reading.stream import BatchStream
from arrowcache.storage.recovery import HasStore
from arrowcache.torch.cached_dataset import CachedDataset
from arrowcache.torch.cached_epochs import CachedEpochs, ItemAssembly
from arrowcache.torch.cached_stream import CachedStream
from arrowcache.torch.device import Device, DevicePrefetcher, PrefetcherStats
from arrowcache.torch.distributed import membership_now, rank_now
from arrowcache.torch.tensors import import_nested, tensors_of
from arrowcache.units import format_count

if TYPE_CHECKING:
    from typing import Self, Unpack


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

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Make the loader of a cache, or of a CachedDataset: a CachedLoader."""
        source = given[0] if given else named.get("cache")
        is_of_dataset = cls is Loader and isinstance(source, CachedDataset | CachedStream)
        return super().__new__(CachedLoader if is_of_dataset else cls)  # type: ignore[return-value]

    @takes("Loader", LoaderArguments, _INSTEAD)
    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str] | CachedDataset | CachedStream,
        batch_size: int | None = None,
        *,
        device: Device | None = None,
        **options: Unpack[LoaderArguments],
    ) -> None:
        if isinstance(cache, CachedDataset | CachedStream):  # `__new__` has seen to that, but for subclasses
            raise TypeError(f"{with_article(type(self).__name__)} is of a cache: derive it from CachedLoader")
        if device is not None:
            self._prefetcher = DevicePrefetcher((), device)
        super().__init__(cache, batch_size, **options)
        schema = self._store.settings.schema
        if any(isinstance(schema.get(name), Ragged) for name in self._options.names):
            import_nested(on_device=device is not None)  # or the first batch would wait for it

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

    def _rank_info(self, *, begins: bool) -> RankInfo | None:
        return membership_now(self._options, begins=begins)

    def _hand_out(self, stream: BatchStream) -> Batches:
        if self._prefetcher is None:
            return super()._hand_out(stream)
        if self._prefetcher.is_inherited():  # the devices belong to the process that forked this one
            self._prefetcher = DevicePrefetcher((), self._prefetcher.devices[0])
        return self._prefetcher.over(stream, self._timeout_seconds, self._finish)

    def _finish(self, batch: Batch) -> Batch:
        if type(batch) is not dict and not isinstance(batch, Mapping):
            raise TypeError(
                f"the transform returned {type(batch).__name__}, not a dict of columns: return one, or use "
                "arrowcache.Loader, which passes on whatever it is"
            )
        return tensors_of(batch, self._store.settings.schema)


Loader.__new__.__signature__ = inspect.signature(Loader.__init__)  # type: ignore[attr-defined]  # `help` shows it


#: Options of others that the loader of a finite dataset has no use for, and what to do instead.
_OF_DATASET = {
    **OF_ONCE,
    **OF_DATALOADER,
    **instead(
        "sampler", "batch_sampler", say="give DataLoader(train, sampler=...) or batch_sampler= an own order"
    ),
    **instead("pin_memory", say="device='cuda' copies from pinned memory; without a device leave it out"),
    **instead(
        "worker_init_fn", say="the dataset inside has to set itself up, at its first item in a process"
    ),
    **instead(
        "multiprocessing_context", say="its workers are forked, as those of a DataLoader: leave it out"
    ),
    "columns": "give columns= to cached(), which then stores no others",
    "transform": "give transform= to cached(), which calls it with each item, or collate_fn= here",
    **{
        name: f"give {name}= to cached()" for name in ("on_error", "version", "replace", "schema", "capacity")
    },
    **instead("replacement", say="an epoch is each item once; for draws give DataLoader(train, sampler=...)"),
    "worker_type": "its workers are processes, as those of a DataLoader: leave it out",
    "where": "take a Subset of the dataset before cached()",
    "with_ids": "have the dataset give each item's number",
    "run_id": "ranks need no shared_plan on a dataset's order: leave it out",
    "epoch_rows": "an epoch is each item once",
    "wait_rows": "what is missing is made, so nobody waits for it",
    "timeout": "an item takes as long as the dataset inside takes",
    "window_bytes": "items are shuffled as a whole",
    "paced": "a dataset's cache has no pace",
    "rows": "take a Subset of the dataset before cached()",
    "expect": "items have no tags and annotations",
    "weights": "an epoch is each item once; for other shares give DataLoader(train, sampler=...)",
    "batch_tokens": "give DataLoader(train, batch_sampler=...)",
    "length_of": "give DataLoader(train, batch_sampler=...)",
}


class CachedLoader(Loader):
    """Batches of a CachedDataset, each item once an epoch; each `for` is an epoch in another order.

    `arrowcache.torch.Loader(train, 64)` makes one. Batches are those of `DataLoader(train, 64)`: what torch's
    default_collate makes of the items, after the dataset's transform. What that refuses comes as `Loader`
    gives it: values of varying length as a nested tensor of jagged layout, moments as int64 microseconds
    since 1970, images as arrays of their pixels, complex numbers as a tensor.

    Batches whose items are all in the cache are gathered by native threads, straight into the batch, some
    ahead. Where items are missing, worker processes make them, in their places of the order, and publish
    them; they start when the first is missing, or where there is a transform or a collate_fn, which they run.

    Args:
        train: a CachedDataset, or a CachedStream that is stored to the end. It stays open when the loader is
            closed.
        batch_size: items of a batch. None means 64.
        shuffle: True or "rows": all items, uniformly. False or None: in the order of the dataset.
        seed: selects the order, together with the epoch's number and the number of items.
        drop_last: leave out an incomplete last batch. Otherwise it is short, or padded with the epoch's first
            items if there are several ranks.
        workers: number of processes that make what is missing, at most 256. 0 means this process. Their
            random seeds differ by worker, loader and rank, and follow from `torch.manual_seed`; their
            generators go on from epoch to epoch. The generators of this process are left alone.
        reads: number of items that each worker, or with workers=0 this process, makes at a time, in threads:
            for a dataset inside that waits, as for a store, and that may be asked by several threads at once.
            Many are not made for that. Items, their order and errors are the same; what a dataset draws from
            generators that its threads share comes in any order.
        prefetch: number of batches to begin ahead where no worker makes them. 0 means none: each is begun as
            it is asked for. None means two to eight, as many as the processor's cache holds; while items come
            from the disk, as many as have 256 items, but at most 64 MiB.
        collate_fn: called with a list of items in place of default_collate. Batches are what it returns.
        device: device of the tensors, as of `Loader`. None means the CPU.
        rank: rank of this process. None means that of torch.distributed, if it is initialized when an epoch
            begins. Each step has batch_size items a rank, and all ranks have equally many steps.
        world_size: number of ranks. None with `rank`.

    Of a dataset with on_error="skip" an item that cannot be made is left out of its batch, which is shorter
    then, and a batch of such items alone is left out; `stats` counts them. With several ranks, which have
    equally many steps, it has one item of another batch. An epoch of such items alone is a RuntimeError.

    Tensors are over reused memory that is not overwritten while one of them or a view of it lives. Where the
    dataset was made with `replace`, `train.turn_over()` is called between two epochs.
    Raises: ValueError, TypeError: an argument that does not fit.
    """

    _epochs: CachedEpochs

    @face("Loader of a dataset", _OF_DATASET, same={"cache": "train"})
    def __init__(
        self,
        train: CachedDataset | CachedStream,
        batch_size: int | None = None,
        *,
        shuffle: bool | str | None = True,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 4,
        reads: int = 1,
        prefetch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Device | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if isinstance(train, CachedStream):
            train = CachedDataset(train.whole(), train.counts)
        shard_now = partial(_shard_now, parse_ranks(rank, world_size))  # which does not keep this loader
        epochs = CachedEpochs(
            train, batch_size, shuffle, seed, drop_last, workers, reads, collate_fn, shard_now
        )
        if device is not None:
            self._prefetcher = DevicePrefetcher((), device)
        self._train = train
        assembly = ItemAssembly(epochs, prefetch, self._memory().allocate)
        self._open(train.path, epochs, assembly, None)

    def __iter__(self) -> Any:
        """Begin the next epoch. An epoch still in progress ends.

        Blocks: where worker processes start, or are at an item of an epoch that was left.
        Raises: ValueError: closed; the items are fewer than one step of all ranks, and drop_last leaves them
            out.
        """
        return super().__iter__()

    def repeat(self) -> Any:
        """Give batches without end, for step-based training: one epoch after another.

        `steps`, `stats` and `state_dict` tell of the epoch that is being delivered.
        Threads that share it take turns; on a device one thread takes all. Blocks, Raises: as `iter`, with
        the first batch of each epoch.
        """
        return super().repeat()

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, of this rank."""
        return self._epochs.steps

    def __getitem__(self, index: object) -> NoReturn:
        """Raises: TypeError: a loader has no items by number."""
        raise TypeError(
            "a Loader of a dataset is no dataset: it has batches, and no items by number. Ask the dataset, "
            "train[index], and give DataLoader(train, ...) the dataset, too"
        )

    @property
    def steps(self) -> int:
        """Batches of the epoch in progress, or of the last one; those of a whole one before the first."""
        steps = super().steps
        return len(self) if steps is None else steps

    def load_state_dict(self, state: dict[str, Any], missing: str = "skip") -> None:
        """Let the next `for` finish the epoch of a saved state, then go on with the one after it.

        The rest of the epoch has the items that were not delivered, each once, in the order of the state (its
        seed and shuffle), whatever this loader's batch_size, workers and ranks. No item is ever `missing`.
        Raises: ValueError: not a valid state, or one of a dataset of another length.
        """
        super().load_state_dict(state, missing)

    def assert_zero_copy(self) -> None:
        """Raises: ValueError: items are put together, which copies."""
        self._assembly.require_views()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a CachedLoader cannot be pickled or copied: its processes are children of this one. Pass on the "
            "dataset, and make a loader where its batches are used"
        )

    def __repr__(self) -> str:
        left_out = self._meter.left_out_items
        skipped = f", left out {format_count(left_out, 'item')}" if left_out else ""
        return (
            f"<CachedLoader of {self._train.path}: batch_size={self._epochs.batch_size}, "
            f"shuffle={self._meter.shuffle!r}, epoch {self._epochs.next_number}{skipped}>"
        )

    def _rank_info(self, *, begins: bool) -> RankInfo | None:  # noqa: ARG002
        return None  # each epoch asks by itself

    def _finish(self, batch: Any) -> Any:
        return batch


def _shard_now(given: tuple[int, int] | None) -> Shard:
    """Return the part of a loader whose ranks need not agree: their order is that of the dataset.

    Args:
        given: its rank and number of ranks. None means those of torch.distributed, if it is initialized.
    """
    ranks = given or rank_now()
    return Shard() if ranks is None else Shard(*ranks)


at_exit(close_all)  # before the modules imported here end what its loaders use
