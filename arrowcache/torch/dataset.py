"""CacheDataset and `dataloader`: a cache through torch.utils.data.DataLoader.

No sample's bytes pass between processes where there is no transform: a worker answers with row ids,
and the process that receives them gathers (lazy_batch.py). With a transform a worker maps the cache
itself, gathers, transforms, and its tensors travel in shared memory without a name.

The dataset reads the rows that an EpochBatchSampler has drawn, and nothing else: it has no rows of its own,
since the rows of a rolling cache differ in each epoch. It pickles as its settings.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, default_convert, get_worker_info

from arrowcache.arguments import OF_ONCE, face, instead
from arrowcache.pickling import pickled, unpickled
from arrowcache.reading.assembly import ReadyBatch
from arrowcache.reading.batch_source import LOADED, NEWER, STOPPED, EpochIterator
from arrowcache.reading.epoch import Epoch
from arrowcache.reading.row_filter import INCLUDED
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import HasStore, open_store, store_of
from arrowcache.torch import snapshots
from arrowcache.torch.batch_sampler import INSTEAD, EpochBatchSampler
from arrowcache.torch.device import Iterated, as_it_is
from arrowcache.torch.lazy_batch import LazyBatch, SentResult, failure, wrapped
from arrowcache.torch.snapshots import DrawnRows
from arrowcache.torch.tensors import tensors_of
from arrowcache.torch.worker_processes import ParentWatch
from arrowcache.units import parse_count, require_function, shortened

Transform = Callable[[dict[str, Any]], Any]

_WAY_OUT = (
    "rows of a rolling cache have no numbers of their own, so only an EpochBatchSampler can draw them: "
    "use arrowcache.torch.dataloader(cache, batch_size, ...), or DataLoader(CacheDataset(cache), "
    "batch_sampler=EpochBatchSampler(cache, batch_size, shuffle='rows')) without batch_size, shuffle, "
    "sampler and drop_last"
)
_OF_SAMPLERS = (
    "batch_size", "shuffle", "seed", "drop_last", "where", "rows", "weights", "rank", "world_size", "run_id",
    "epoch_rows", "wait_rows", "timeout", "window_bytes", "paced",
)  # fmt: skip
_OF_WORKERS = (
    "num_workers", "workers", "prefetch", "prefetch_factor", "pin_memory", "persistent_workers",
    "worker_init_fn", "multiprocessing_context", "worker_type",
)  # fmt: skip
_BESIDE = "beside batch_sampler=EpochBatchSampler(cache, ...)"
_INSTEAD = {
    **OF_ONCE,
    **instead(
        *_OF_SAMPLERS, say="give EpochBatchSampler(cache, ...) such, the batch_sampler= beside this dataset"
    ),
    **instead("sampler", "batch_sampler", "generator", say=f"{_WAY_OUT}. Its seed= draws the order"),
    **instead("drop_remainder", say="give EpochBatchSampler(cache, ...) drop_last="),
    **instead(*_OF_WORKERS, say=f"give the DataLoader such, by its own name, {_BESIDE}"),
    **instead("with_ids", say=INSTEAD["with_ids"]),
    **instead("device", say=INSTEAD["device"]),
}
_OF_DATALOADER = [*inspect.signature(DataLoader).parameters]
_OURS = ("batch_sampler", "dataset", "sampler", "collate_fn", "generator")
_IN_DATALOADER = {
    **INSTEAD,
    **instead("batch_sampler", "sampler", say="rows=, where= and shuffle= choose the rows and their order"),
    **instead("dataset", say="it makes a CacheDataset of the cache: leave it out"),
    **instead("collate_fn", say="batches are made already; pass transform=, which gets them"),
    **instead("generator", say="use seed="),
    **instead("workers", say="use num_workers="),
    **instead("prefetch", say="use prefetch_factor="),
    **instead("worker_type", say="its workers are processes; for threads take arrowcache.torch.Loader"),
    **instead("device", say="use pin_memory=True, or DevicePrefetcher(dataloader(...), device)"),
}


class CacheDataset(Dataset[dict[str, Any]]):
    """A cache, as a DataLoader's dataset beside an `EpochBatchSampler` of the same cache.

    The DataLoader yields a batch as `dict[str, torch.Tensor]` on the CPU, (batch_size, *shape), of the types
    that `arrowcache.torch.Loader` yields: copies, which are not overwritten while they live. With no
    transform the gather runs where a worker's answer is received: in the consumer's thread, or with
    `pin_memory=True` in torch's pin-memory thread; workers then only save the drawing of row ids. No
    collate_fn is needed: a transform does more. A collate_fn gets the batch as a dict, or in a worker without
    a transform as a dict-like object, which gathers there when it is looked into. The arrival of its result
    is not noticed, so segments are leased until the epoch's iterator ends.

    Args:
        cache: a Cache, or the path of one.
        columns: names of the columns. None means all.
        transform: called with each batch as `dict[str, ndarray]`, in the worker, or without workers in
            the consumer's thread. A mapping that it returns becomes a dict of tensors; any other result
            goes through torch's `default_convert`. Pickled by cloudpickle, so a lambda works.

    Raises: ValueError: an unknown column. FileNotFoundError, CacheFormatError: no such cache.
    """

    @face("CacheDataset", _INSTEAD)
    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
    ) -> None:
        self._store = store_of(cache)
        self._names = self._store.settings.schema.select(columns, least=1)
        require_function(transform, "transform")
        self._transform = transform

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch, or in a worker its message, for the DataLoader's collate function.

        Args:
            indices: the `DrawnRows` that an EpochBatchSampler yielded.
        Returns: the batch. In a worker it may be a message that becomes the batch on arrival; torch's
            default_collate accepts it.
        """
        rows = self._checked(indices)
        worker = get_worker_info()
        if worker is None:
            return wrapped(self._make(rows), rows.arrival)
        if self._transform is None:
            return LazyBatch(rows, self._names, self._store)
        try:
            return wrapped(self._make(rows), rows.arrival)
        except Exception:  # noqa: BLE001  # travels as torch's own do, and counts as delivered
            return SentResult(failure(f"in DataLoader worker process {worker.id}"), rows.arrival)

    def __getitem__(self, index: Sequence[int]) -> Any:
        """Return a batch, for a DataLoader of `sampler=EpochBatchSampler(...), batch_size=None`.

        Args:
            index: as of `__getitems__`; the errors, too.
        """
        if get_worker_info() is not None:
            return self.__getitems__(index)
        return self._make(self._checked(index))

    def __len__(self) -> int:
        """Raises: TypeError: the dataset has no length; says what to do instead."""
        raise TypeError(
            f"a CacheDataset has no length: {_WAY_OUT}; in Lightning's distributed training pass "
            "Trainer(use_distributed_sampler=False), too: an EpochBatchSampler has its rank already"
        )

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[Callable[..., CacheDataset], tuple[Any, ...]]:
        transform = None if self._transform is None else packed(self._transform)
        return _opened, (str(self._store.folder.path), self._store.check, self._names, transform)

    def __repr__(self) -> str:
        return f"<CacheDataset of {self._store.folder.path}: columns {list(self._names)}>"

    def _checked(self, indices: object) -> DrawnRows:
        if isinstance(indices, DrawnRows):
            if indices.snapshot.path == str(self._store.folder.path):
                return indices
            raise ValueError(
                f"the sampler draws rows of {indices.snapshot.path}, and the dataset is of "
                f"{self._store.folder.path}: give both the same cache"
            )
        raise TypeError(f"a CacheDataset was asked for {shortened(repr(indices), 60)}: {_WAY_OUT}")

    def _make(self, rows: DrawnRows) -> Any:
        if self._transform is None:
            return LazyBatch(rows, self._names, self._store).make()
        try:
            result = self._transform(rows.read(self._names, self._store))
            if isinstance(result, Mapping):
                return tensors_of(result, self._store.settings.schema)
            return default_convert(result)  # type: ignore[no-untyped-call]
        except StopIteration as error:
            raise RuntimeError(STOPPED) from error
        finally:
            snapshots.delivered(*rows.arrival)  # a worker cannot tell


class CacheDataLoader(DataLoader[dict[str, Any]]):
    """A DataLoader over a cache, with a state; `dataloader` makes it: each `for` is an epoch.

    An epoch begins with the first `next`, which takes its snapshot; `iter` alone begins nothing. An error in
    place of a batch ends it.
    """

    batch_sampler: EpochBatchSampler
    _latest: _Delivery | None = None  # of the epoch that began last

    def __iter__(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # torch says which class
        return EpochIterator(_Delivery(self), None, as_it_is)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this loader: the rows that the loop got, without batches on their way.

        It is one of `arrowcache.torch.Loader.state_dict`, which may go on with it, and the reverse. With the
        last batch it is the state of the next epoch: a loop that knows `len(loader)` asks for no end.
        Raises: ValueError: another DataLoader reads this one's batch_sampler, such as what Accelerate's
            prepare() made of it; or in_order=False, within an epoch. As of `Loader`.
        """
        epochs = self.batch_sampler._made
        epoch, plan = epochs.progress, epochs.planned
        if epoch is not None:
            steps = None if self._latest is None else self._latest.steps_of(epoch)
            if steps is None:
                raise ValueError(
                    "another DataLoader reads the batch_sampler of this one, such as what Accelerate's "
                    "prepare() made of it, and this one cannot tell which batches it has delivered: leave "
                    "this one out of prepare() and iterate it, or give Accelerator() "
                    "DataLoaderConfiguration(use_stateful_dataloader=True)"
                )
            if steps < epoch.order.steps:
                if steps and self.num_workers and not getattr(self, "in_order", True):  # torch 2.6
                    raise ValueError(
                        "with in_order=False batches come in any order, so their number does not tell which "
                        "are left of an epoch: leave it out"
                    )
                plan = epoch.order.remaining(steps)
        return epochs.to_state(plan)

    def load_state_dict(self, state: dict[str, Any], missing: str = "skip") -> None:
        """Let the next `for` finish the epoch of a saved state, then go on with the one after it.

        Args, Raises: as of `arrowcache.torch.Loader.load_state_dict`.
        """
        epochs = self.batch_sampler._made
        plan = epochs.to_resume(state, missing)
        self._end_shared(LOADED)
        epochs.resume(plan, missing)

    def _end_shared(self, because: str) -> None:
        """End the epoch in progress, if its workers live on: they make the batches of one at a time."""
        if self.persistent_workers and self._latest is not None:
            self._latest.close(because)

    def _begin(self) -> Iterator[dict[str, Any]]:
        return super().__iter__()


class _Delivery(Iterated):
    """The batches of one epoch of a DataLoader, counted as the loop gets them."""

    def __init__(self, loader: CacheDataLoader) -> None:
        super().__init__(iter(()), is_ours=True)
        self._loader: CacheDataLoader | None = loader  # until the epoch begins
        self._its_epoch: Epoch | None = None
        self._steps = 0
        self._before: tuple[Epoch | None, _Delivery | None] | None = None  # while its first batch is made

    def steps_of(self, epoch: Epoch) -> int | None:
        """Return how many batches of an epoch the loop got. None: it is of another DataLoader."""
        if self._before is None:
            return self._steps if self._its_epoch is epoch else None
        before, delivery = self._before
        if epoch is not before:
            return 0
        return None if delivery is None else delivery.steps_of(epoch)

    def _next(self) -> ReadyBatch | None:
        loader, self._loader = self._loader, None
        if loader is None:
            return super()._next()
        epochs, latest = loader.batch_sampler._made, loader._latest
        before = epochs.progress
        try:
            loader._end_shared(NEWER)
            self._before, loader._latest = (before, latest), self
            self._iterator = loader._begin()
            return super()._next()
        finally:
            self._its_epoch, self._before = epochs.progress, None
            if self._its_epoch is before:  # none began
                self._its_epoch, loader._latest = None, latest

    def _count(self, made: ReadyBatch) -> None:
        super()._count(made)
        self._steps += 1


@face("dataloader()", _IN_DATALOADER, others=[name for name in _OF_DATALOADER if name not in _OURS])
def dataloader(
    cache: HasStore | str | os.PathLike[str],
    batch_size: int = 64,
    num_workers: int = 4,
    *,
    shuffle: str | None = "rows",
    seed: int = 0,
    columns: Sequence[str] | None = None,
    drop_last: bool = True,
    transform: Transform | None = None,
    where: Callable[[SegmentInfo], bool] | None = None,
    rows: object = INCLUDED,
    rank: int | None = None,
    world_size: int | None = None,
    run_id: str | None = None,
    epoch_rows: int | None = None,
    wait_rows: int = 1,
    timeout: float | None = 60.0,
    window_bytes: int | str | None = None,
    paced: bool = True,
    weights: object = None,
    expect: str | Sequence[str] = (),
    **options: Any,
) -> CacheDataLoader:
    """Return a DataLoader over a cache: each `for` is an epoch over a new snapshot.

    The snapshot is leased until the epoch's last batch has arrived, or after a `break` until the iterator is
    dropped. A DataLoader with persistent workers, the default here, keeps its iterator until the next `for`:
    `loader.batch_sampler.close()` ends the epoch at once. Workers with a transform release their own lease
    after a second without requests.

    The other arguments are those of `CacheDataset` and `EpochBatchSampler`.

    Args:
        num_workers: number of processes. 0 means the consumer's thread. They live on between epochs, and end
            with this process, also when it is killed.
        timeout: seconds that an epoch waits for rows. None means no limit.
        options: other options of DataLoader, such as pin_memory, prefetch_factor,
            multiprocessing_context, worker_init_fn, persistent_workers.
    Returns: a `torch.utils.data.DataLoader` with `state_dict` and `load_state_dict`; its `batch_sampler` has
        `set_epoch` and `close`.
    Raises: TypeError: an option that this function sets itself. ValueError: an argument that does not fit.
    """
    num_workers = parse_count(num_workers, "num_workers", least=0)
    sampler = EpochBatchSampler(
        cache,
        batch_size,
        shuffle,
        seed,
        drop_last,
        where=where,
        rows=rows,
        expect=expect,
        rank=rank,
        world_size=world_size,
        run_id=run_id,
        epoch_rows=epoch_rows,
        wait_rows=wait_rows,
        timeout=timeout,
        window_bytes=window_bytes,
        paced=paced,
        weights=weights,
    )
    options.setdefault("persistent_workers", num_workers > 0)
    if num_workers:
        options["worker_init_fn"] = ParentWatch(options.get("worker_init_fn"))
    dataset = CacheDataset(cache, columns, transform)
    return CacheDataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, **options)


def packed(functions: object) -> bytes:
    """Pickle a user's functions for a worker.

    Raises: TypeError: they cannot be pickled.
    """
    return pickled(functions, "transform, where or rows", "pass multiprocessing_context='fork'")


def _opened(path: str, check: str, names: tuple[str, ...], transform: bytes | None) -> CacheDataset:
    dataset = CacheDataset.__new__(CacheDataset)
    dataset._store, dataset._names = open_store(Path(path), check=check), names
    dataset._transform = None if transform is None else unpickled(transform)
    return dataset
