"""EpochBatchSampler: draws the batches of epochs over snapshots, for a stock DataLoader.

It runs in the main process, and takes an epoch's snapshot when the first batch of an iterator is
asked for (torch makes an iterator too many in the first epoch, and drops it). It yields
`DrawnRows`, which name the snapshot, so no worker, however long it lives, can read another one. The
snapshot stays leased until the last batch has arrived, or the iterator is dropped.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from arrowcache.arguments import OF_DATALOADER, OF_ONCE, instead
from arrowcache.lifetimes import until_exit
from arrowcache.reading.batch_source import STOPPED, cut_short
from arrowcache.reading.epoch import Epochs
from arrowcache.reading.options import LoaderOptions, WeighedArguments, takes
from arrowcache.reading.plan import Plan
from arrowcache.reading.slots import Slots
from arrowcache.reading.stats import Meter
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.torch.distributed import membership_now
from arrowcache.torch.snapshots import DrawnRows, OwnedEpoch
from arrowcache.units import parse_count

if TYPE_CHECKING:
    from typing import Unpack


_OF_THE_DATASET = "it draws row numbers: give CacheDataset(cache, columns=..., transform=...) those"
_OF_THE_DATALOADER = "the DataLoader takes it, beside batch_sampler=EpochBatchSampler(...)"
_OF_LOADERS = "batches here have batch_size rows alone: for batch_tokens take arrowcache.torch.Loader"
INSTEAD = {
    **OF_ONCE,
    **OF_DATALOADER,
    **instead("workers", say="give the DataLoader num_workers=, beside batch_sampler=EpochBatchSampler(...)"),
    **instead("prefetch", say="give the DataLoader prefetch_factor=, beside batch_sampler="),
    **instead("worker_type", "multiprocessing_context", say=_OF_THE_DATALOADER),
    **instead("num_workers", "prefetch_factor", "pin_memory", "pin_memory_device", say=_OF_THE_DATALOADER),
    **instead("persistent_workers", "worker_init_fn", "in_order", say=_OF_THE_DATALOADER),
    **instead("columns", "transform", "collate_fn", say=_OF_THE_DATASET),
    **instead(
        "with_ids", say="a DataLoader's batches have no ids: take arrowcache.torch.Loader(with_ids=True)"
    ),
    **instead("batch_tokens", "length_of", say=_OF_LOADERS),
    **instead("device", say="move the DataLoader's batches by DevicePrefetcher(loader, device)"),
}


class EpochBatchSampler(Sampler[list[int]]):
    """Batches of row ids, to be a DataLoader's `batch_sampler` beside a `CacheDataset`.

    Each iteration is the next epoch (0, 1, 2, ...) over a new snapshot, which its first `next` takes;
    with `DataLoader` that happens in `iter`. Arguments and the order for given segments, seed and
    epoch are those of `arrowcache.Loader`.

    Args:
        cache: a Cache, or the path of one.
        batch_size: rows of a batch, of one rank.
        rank: None means that of torch.distributed, if it is initialized when the first epoch begins, else a
            single process.
        world_size: number of ranks. None with `rank`.
        timeout: seconds that an epoch waits for rows. None means no limit.

    Raises: ValueError, TypeError: an argument that does not fit. FileNotFoundError: no such cache.
        LoaderTimeoutError: in the first `next` of an epoch: too few rows came in time.
        ValueError: in `iter`: Accelerate prepared the DataLoader for several processes.
    """

    @takes("EpochBatchSampler", WeighedArguments, INSTEAD)
    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        batch_size: int = 64,
        shuffle: str | None = "rows",
        seed: int = 0,
        drop_last: bool = True,
        **options: Unpack[WeighedArguments],
    ) -> None:
        if isinstance(cache, Sampler):  # Lightning does this in `predict`
            raise TypeError(
                f"an EpochBatchSampler cannot be made around a {type(cache).__name__}: give Lightning an "
                "arrowcache.torch.Loader, which it leaves as it is"
            )
        self._store = store_of(cache)
        self._options = LoaderOptions(
            self._store.settings, batch_size, shuffle, seed, drop_last=drop_last, **options
        )
        self._made = Epochs(self._store, self._options, Meter())
        self._made.join(membership_now(self._options, begins=False))
        self._slots: dict[tuple[str, ...], Slots] = {}
        self._iterators = 0
        self._current: weakref.ref[EpochRows] | None = None  # the latest epoch

    @property
    def batch_size(self) -> int:
        return self._options.most_rows

    @property
    def drop_last(self) -> bool:
        return self._options.drop_last

    @property
    def epoch(self) -> int:
        """The number of the next epoch."""
        return self._epochs.next_number

    @property
    def left_out_rows(self) -> int:
        """Number of the oldest rows that the latest epoch leaves to samplers, as of `LoaderStats`."""
        progress = self._epochs.progress
        return 0 if progress is None else progress.snapshot.left_out_rows

    @property
    def unselected_rows(self) -> int:
        """Number of rows that the latest epoch leaves out by `rows`, or as excluded, as of `LoaderStats`."""
        progress = self._epochs.progress
        return 0 if progress is None else len(progress.snapshot) - progress.snapshot.selected.size

    def set_epoch(self, epoch: int) -> None:
        """Let the next epoch have this number: with the seed it selects the order.

        Not needed: epochs count by themselves. The one in progress goes on, and so does a resumed one of this
        number; another number drops the rest of a resumed one.
        """
        number = parse_count(epoch, "epoch", least=0)
        if number != self._epochs.next_number:
            self._epochs.next_number = number

    def __len__(self) -> int:
        """Return the batches of the epoch in progress, or of the next one if it began now.

        Those of a resumed epoch are all, with the ones that were delivered before, as trainers count.
        Blocks: for cache.lock. Segments published before the epoch begins may change the number.
        """
        current = None if self._current is None else self._current()
        plan = None if current is None else current.plan
        return self._epochs.expected_steps() if plan is None else self._made.steps_of(plan)

    def __iter__(self) -> EpochRows:
        """Return the next epoch. Its first `next` begins it, and blocks until `wait_rows` rows are there."""
        _refuse_shard(sys._getframe(1))
        self._iterators += 1
        return EpochRows(self, self._iterators)

    def close(self) -> None:
        """End the epoch in progress: release its lease, draw no more batches. Idempotent.

        For a `break` out of a DataLoader whose persistent workers keep its iterator: without this, the
        next `for` ends the epoch. The sampler can be iterated anew. Within an epoch some batches of which are
        not drawn yet, its consumer gets a RuntimeError.
        """
        current = None if self._current is None else self._current()
        if current is not None:
            current.cut_short()

    def __repr__(self) -> str:
        options = self._options
        return (
            f"<EpochBatchSampler of {self._store.folder.path}: batch_size={options.batch_size}, "
            f"shuffle={options.shuffle!r}>"
        )

    @property
    def _epochs(self) -> Epochs:
        """Return the epochs of the rank known now: torch.distributed may be initialized after the sampler."""
        self._made.join(membership_now(self._options))
        return self._made


class EpochRows(Iterator[list[int]]):
    """The batches of one epoch. Dropping it ends the epoch; it resumes from a state of its own.

    `state_dict` and `load_state_dict` are for torchdata's StatefulDataLoader, which distinguishes the states
    of delivered batches from those of batches on their way.
    """

    def __init__(self, sampler: EpochBatchSampler, number: int) -> None:
        self._sampler, self._number = sampler, number
        self._owned: OwnedEpoch | None = None  # once the epoch has begun
        self._has_stopped = self._was_cut_short = False
        self._told_before: dict[str, Any] = {}  # the state given out before the epoch began

    @property
    def plan(self) -> Plan | None:
        """The plan of this epoch, while some of its batches are to come or on their way."""
        return None if self._owned is None else self._owned.plan

    def __next__(self) -> DrawnRows:
        if self._was_cut_short:
            raise cut_short("its batch sampler was closed")
        if self._owned is not None:
            self._owned.origin.require("this epoch", "iterate anew here")
        if not self._has_stopped:
            rows = (self._owned or self._begin()).draw()
            if rows is not None:
                return rows
            self._has_stopped = True
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the batches not yielded yet: as of `arrowcache.Loader.state_dict`.

        A state taken before the epoch began is completed when it begins: StatefulDataLoader counts
        from that state until its next call, after `snapshot_every_n_steps`, and counts steps of this epoch.
        """
        if self._owned is not None:
            return self._sampler._made.to_state(self._owned.remaining())
        epochs = self._sampler._epochs
        self._told_before.update(epochs.to_state(epochs.planned))
        return self._told_before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; rows whose segments left the cache are skipped, with a warning.

        Raises: ValueError: not a valid state, or this epoch has begun.
        """
        if self._owned is not None:
            raise ValueError("this epoch has begun: load the state into a new iterator")
        plan = self._sampler._made.from_state(state)
        self._has_stopped = self._sampler._epochs.pass_over(plan)
        if not self._has_stopped:
            self._sampler._epochs.resume(plan, "skip")

    def cut_short(self) -> None:
        """End the epoch. Its consumer gets an error, unless all its batches are drawn."""
        self._was_cut_short |= not self._has_stopped and self._owned is not None and not self._owned.is_drawn
        self.close()

    def close(self) -> None:
        self._has_stopped = True
        if self._owned is not None:
            self._owned.close(is_stale=self._sampler._iterators > self._number)

    @until_exit
    def __del__(self) -> None:
        self.close()

    def _begin(self) -> OwnedEpoch:
        sampler, store = self._sampler, self._sampler._store
        try:
            epoch = sampler._epochs.begin()
        except StopIteration as error:
            raise RuntimeError(STOPPED) from error
        assert epoch is not None  # nothing cancels it
        try:
            self._owned = OwnedEpoch(store, epoch, sampler.batch_size, sampler._slots)
        except BaseException:
            epoch.end()
            raise
        if self._told_before:
            self._told_before.update(sampler._made.to_state(epoch.plan))
        sampler._current = weakref.ref(self)
        return self._owned


def _refuse_shard(caller: FrameType) -> None:
    """Raise ValueError for Accelerate's BatchSamplerShard: it drops batches, which an epoch here needs.

    Only the caller shows it: the batches that it keeps pass unchanged.
    """
    module, function = caller.f_globals.get("__name__"), caller.f_code.co_name
    if module == "accelerate.data_loader" and function.startswith("_iter_with_"):
        raise ValueError(
            "Accelerate's prepare() would divide the batches among its processes, and they are of one rank "
            "already: leave the DataLoader out of prepare(), and move its batches with "
            "DevicePrefetcher(loader, accelerator.device)"
        )
