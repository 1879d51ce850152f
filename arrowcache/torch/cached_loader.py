"""CachedLoader: the fast way through a CachedDataset: each item once an epoch, in batches.

It stands in for `DataLoader(train, batch_size, shuffle=True)`: the same items, the same batches of them. This
module is the face. cached_epoch.py makes the batches of one epoch; collation.py puts them together; makers.py
has worker processes make what is missing; reading/order.py says which items a batch has.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch.distributed

from arrowcache.arguments import OF_DATALOADER, face, instead
from arrowcache.errors import ArrowCacheError, warn
from arrowcache.lifetimes import Closable, Origin, at_exit, call_all, until_exit
from arrowcache.reading.iterator import CLOSED, LOADED, NEWER, Batches, EpochIterator, cut_short
from arrowcache.reading.memory import page_aligned
from arrowcache.reading.options import MOST_BATCH_ROWS, MOST_PREFETCHED, MOST_WORKERS
from arrowcache.reading.order import EpochOrder, Shard
from arrowcache.reading.plan import Plan
from arrowcache.reading.slots import Slots
from arrowcache.reading.stats import LoaderStats, Meter
from arrowcache.sampling.options import MOST_READS
from arrowcache.storage.counters import CounterPage
from arrowcache.torch.cached_dataset import CachedDataset
from arrowcache.torch.cached_epoch import CachedEpoch
from arrowcache.torch.collation import collated
from arrowcache.torch.delivery import Delivery
from arrowcache.torch.device import Device, DevicePrefetcher, PrefetcherStats
from arrowcache.torch.makers import Makers
from arrowcache.torch.randomness import seeds_of_workers
from arrowcache.units import MOST_COUNTED, format_count, parse_count, require_function

_LOADERS = 1  # seeds of the workers of loaders begin with it
_numbers = itertools.count()  # of the loaders of this process

_CLOSED = "the loader is closed: make a new one"
_SHUFFLES = {True: "rows", "rows": "rows", False: None, None: None}

#: Options of others that the loader of a finite dataset has no use for, and what to do instead.
_INSTEAD = {
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
    "run_id": "ranks need no agreement on a dataset's order: leave it out",
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


class CachedLoader(Closable):
    """Batches of a CachedDataset, each item once an epoch; each `for` is an epoch in another order.

    `arrowcache.torch.Loader(train, 64)` makes one. Batches are those of `DataLoader(train, 64)`: what torch's
    default_collate makes of the items, after the dataset's transform. What that refuses comes as `Loader`
    gives it: values of varying length as a nested tensor of jagged layout, moments as int64 microseconds
    since 1970, images as arrays of their pixels, complex numbers as a tensor.

    Batches whose items are all in the cache are gathered by native threads, straight into the batch, some
    ahead. Where items are missing, worker processes make them, in their places of the order, and publish
    them; they start when the first is missing, or where there is a transform or a collate_fn, which they run.

    Args:
        train: a CachedDataset. It stays open when the loader is closed.
        batch_size: items of a batch.
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
        prefetch: number of batches to begin ahead where no worker makes them. None means two to eight, as
            many as the processor's cache holds; while items come from the disk, as many as have 256 items,
            but at most 64 MiB.
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

    @face("Loader of a dataset", _INSTEAD)
    def __init__(
        self,
        train: CachedDataset,
        batch_size: int = 64,
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
        self._closed = True  # until there is something to close
        if not isinstance(train, CachedDataset):
            raise TypeError(f"a CachedLoader is of a CachedDataset, not of a {type(train).__name__}")
        self._train = train
        self._batch_size = parse_count(batch_size, "batch_size", most=MOST_BATCH_ROWS)
        if not isinstance(shuffle, bool | str | None) or shuffle not in _SHUFFLES:
            raise ValueError(f"shuffle={shuffle!r} of a dataset must be True ('rows') or False (None)")
        self._shuffle = _SHUFFLES[shuffle]
        self._seed = parse_count(seed, "seed", least=0, most=None)
        if not isinstance(drop_last, bool):
            raise TypeError(f"drop_last must be True or False, not {drop_last!r}")
        self._drop_last = drop_last
        self._workers = parse_count(workers, "workers", least=0, most=MOST_WORKERS)
        self._reads = parse_count(reads, "reads", most=MOST_READS)
        if prefetch is not None:
            prefetch = parse_count(prefetch, "prefetch", least=0, most=MOST_PREFETCHED)
        self._prefetch = prefetch
        require_function(collate_fn, "collate_fn")
        self._collate = collated if collate_fn is None and train.transforms else collate_fn
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank!r} and world_size={world_size!r} go together: pass both")
        self._shard = None if rank is None or world_size is None else _shard(rank, world_size)
        self._prefetcher = None if device is None else DevicePrefetcher((), device)
        self._makers: Makers | None = None
        self._number = next(_numbers)
        self._meter = Meter(self._workers, self._shuffle)
        self._slots = self._new_slots()
        self._is_shown = False  # the counts, to other processes
        self._planned = self._plan_of(0)  # the next epoch, or the rest of one
        self._is_first = True
        self._epoch: CachedEpoch | None = None  # in progress, or the last one
        self._origin = Origin()
        self._closed = False
        _living.add(self)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch. An epoch still in progress ends.

        Blocks: where worker processes start, or are at an item of an epoch that was left.
        Raises: ValueError: closed; the items are fewer than one step of all ranks, and drop_last leaves them
            out.
        """
        if self._closed:
            raise ValueError(_CLOSED)
        if not len(self):
            step_rows = self._batch_size * self._shard_now().world_size
            raise ValueError(
                f"no epoch has a batch: the dataset's {format_count(len(self._train), 'item')} are fewer "
                f"than one step of {step_rows}, which drop_last=True leaves out: lower batch_size, or pass "
                "drop_last=False"
            )
        if not self._origin.is_here:
            self._begin_in_child()
        self._end_current(NEWER)
        plan = self._planned
        if not self._is_first and not plan.position:
            try:
                self._train.turn_over()
            except (ArrowCacheError, OSError) as error:
                warn(f"no items were replaced: {error}")
        self._is_first = False
        order = EpochOrder(plan, self._batch_size, self._shard_now(), self._drop_last)
        if not self._is_shown:
            self._meter.show_on(CounterPage.open(self._train.path, self._workers, self._shuffle))
            self._is_shown = True
        epoch = CachedEpoch(
            self._train,
            plan,
            order,
            self._slots if self._collate is None else None,
            self._prefetch,
            self._collate,
            self._makers_now(),
            self._meter,
            self._reads,
        )
        self._epoch, self._planned = epoch, self._plan_of(plan.epoch + 1)
        if self._prefetcher is None:
            return EpochIterator(epoch, None, self._finish)
        return self._prefetcher.over(Delivery(epoch, None, self._finish))

    def repeat(self) -> Batches:
        """Give batches without end, for step-based training: one epoch after another.

        `steps`, `stats` and `state_dict` tell of the epoch that is being delivered.
        Threads that share it take turns. Blocks, Raises: as `iter`, with the first batch of each epoch.
        """
        return _Repeated(self)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, of this rank."""
        return EpochOrder(self._plan_of(0), self._batch_size, self._shard_now(), self._drop_last).steps

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: object) -> NoReturn:
        """Raises: TypeError: a loader has no items by number."""
        raise TypeError(
            "a Loader of a dataset is no dataset: it has batches, and no items by number. Ask the dataset, "
            "train[index], and give DataLoader(train, ...) the dataset, too"
        )

    @property
    def steps(self) -> int:
        """Batches of the epoch in progress, or of the last one; those of a whole one before the first."""
        return len(self) if self._epoch is None else self._epoch.order.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state: what was delivered of the epoch, without batches on their way.

        Returns: plain ints, strings and lists: the same on all ranks, and loadable with
            `torch.load(weights_only=True)`. After a `break` it is the state of the epoch that was left; after
            the end of an epoch, of the next one.
        """
        epoch = self._epoch
        if epoch is None or (epoch.has_stopped and epoch.delivered >= epoch.order.steps):
            return self._planned.to_state()
        return epoch.rest().to_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `for` finish the epoch of a saved state, then go on with the one after it.

        The rest of the epoch has the items that were not delivered, each once, in the order of the state (its
        seed and shuffle), whatever this loader's batch_size, workers and ranks.
        Raises: ValueError: not a valid state, or one of a dataset of another length.
        """
        if self._closed:
            raise ValueError(_CLOSED)
        plan, length = Plan.from_state(state, MOST_COUNTED), len(self._train)
        if plan.stream_rows != length or len(plan.rows) != 1:
            raise ValueError(f"the state is of {plan.stream_rows} rows, and the dataset has {length} items")
        self._end_current(LOADED)
        self._planned, self._epoch = plan, None

    def stats(self) -> LoaderStats:
        """Return counts of delivered batches, and of waits for them.

        "transform" counts the time that batches took whose items are made, or pass a transform.
        """
        return self._meter.stats(self._slots.allocated_bytes, self._slots.growths)

    def device_stats(self) -> PrefetcherStats | None:
        """Return counts of the copies to the device, or None without a device."""
        return None if self._prefetcher is None else self._prefetcher.stats()

    def close(self) -> None:
        """End the epoch and the worker processes, which publish what they made. Idempotent.

        The next `next` of an epoch whose last batch was not delivered raises RuntimeError.
        Blocks: until each worker has made the item that it is at, but some seconds at most.
        """
        self._closed = True
        calls: list[Callable[[], object]] = [partial(self._end_current, CLOSED)]
        if self._makers is not None:
            calls.append(self._makers.close)
        if self._prefetcher is not None:
            calls.append(self._prefetcher.close)
        calls += [self._train.rest, lambda: self._meter.show_on(None)]
        call_all(calls)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a CachedLoader cannot be pickled or copied: its processes are children of this one. Pass on the "
            "dataset, and make a loader where its batches are used"
        )

    @until_exit
    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._origin.is_here:
            self.close()

    def __repr__(self) -> str:
        left_out = self._meter.left_out_items
        skipped = f", left out {format_count(left_out, 'item')}" if left_out else ""
        return (
            f"<CachedLoader of {self._train.path}: batch_size={self._batch_size}, "
            f"shuffle={self._shuffle!r}, epoch {self._planned.epoch}{skipped}>"
        )

    def _finish(self, batch: Any) -> Any:
        """Return a batch as it is. An iterator that has this method keeps its loader alive."""
        return batch

    def _plan_of(self, number: int) -> Plan:
        """Return the plan of an epoch. To the order a dataset is one segment."""
        return Plan(
            epoch=number,
            seed=self._seed,
            shuffle=self._shuffle,
            epoch_rows=None,
            window_rows=1,
            block_rows=1,
            seqs=np.zeros(1, np.int64),
            rows=np.array([len(self._train)], np.int64),
        )

    def _shard_now(self) -> Shard:
        distributed = torch.distributed
        if self._shard is None and distributed.is_available() and distributed.is_initialized():
            return Shard(distributed.get_rank(), distributed.get_world_size())
        return self._shard or Shard()

    def _makers_now(self) -> Makers | None:
        """Return the workers, if the next epoch needs them; else end them."""
        if self._workers and (self._collate is not None or not self._train.is_complete()):
            self._train.rest()  # before they are forked: they make and publish what is missing
            if self._makers is None:
                seeds = seeds_of_workers(_LOADERS, self._number, self._seed, self._shard_now().rank)
                self._makers = Makers(self._train, self._workers, self._collate, seeds, self._reads)
            return self._makers
        if self._makers is not None:
            self._makers.close()
            self._makers = None
        return None

    def _new_slots(self) -> Slots:
        fixed = self._train.form.schema.fixed.items()
        columns = {name: (kind.shape, kind.numpy_dtype) for name, kind in fixed}
        allocate = page_aligned if self._prefetcher is None else self._prefetcher.host_memory
        return Slots(columns, self._batch_size, 2, allocate)

    def _begin_in_child(self) -> None:
        """Have nothing of the process that forked this one."""
        self._origin, self._epoch, self._makers, self._is_shown = Origin(), None, None, False
        if self._prefetcher is not None:
            self._prefetcher = DevicePrefetcher((), self._prefetcher.devices[0])
        self._slots = self._new_slots()

    def _end_current(self, because: str) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        if not epoch.was_asked:  # it was never begun
            self._planned, self._epoch = epoch.plan, None
            self._meter.take_back_epoch()
        epoch.close(because)


class _Repeated(Iterator[Any]):
    """One epoch of a loader after another, to its consumer as one: see `reading.iterator`."""

    def __init__(self, loader: CachedLoader) -> None:
        self._loader, self._origin, self._turn = loader, Origin(), threading.RLock()
        self._batches: Any = None  # the iterator of the epoch in progress
        self._epoch: CachedEpoch | None = None  # that epoch, or the last one
        self._is_over = False

    def __next__(self) -> Any:
        self._origin.require("this epoch", "iterate anew here")  # first: the turn may be taken for ever
        with self._turn:
            while True:
                if self._batches is None:
                    self._begin()
                try:
                    return next(self._batches)
                except StopIteration:
                    if self._is_over:
                        raise
                    self._batches = None
                except BaseException:
                    self._is_over = True
                    raise

    def _begin(self) -> None:
        """Begin the next epoch. Raises: as `iter`; RuntimeError: others cut this short after its last one."""
        loader = self._loader
        if self._is_over:
            raise StopIteration
        if self._epoch is not None and loader._epoch is not self._epoch:
            raise cut_short(LOADED if loader._epoch is None else NEWER)
        if self._epoch is not None and loader._closed:
            raise cut_short(CLOSED)
        self._batches = iter(loader)
        self._epoch = loader._epoch

    def close(self) -> None:
        """End it: drop its batches. Does not wait. Idempotent."""
        self._is_over = True
        if (batches := self._batches) is not None:
            batches.close()


def _shard(rank: int, world_size: int) -> Shard:
    world_size = parse_count(world_size, "world_size")
    return Shard(parse_count(rank, "rank", least=0), world_size)


def _close_all() -> None:
    call_all([loader.close for loader in _living if loader._origin.is_here])


_living: weakref.WeakSet[CachedLoader] = weakref.WeakSet()
at_exit(_close_all)
