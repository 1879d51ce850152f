"""CacheIterableDataset: a cache as an IterableDataset, whose workers split each epoch.

For code that wants one, and for torchdata's StatefulDataLoader. The workers agree on an epoch's
snapshot through the cache's `ranks/`, as ranks do (reading/ranks.py): worker w of W reads steps
w, w + W, w + 2 W, ... of its rank's order. A DataLoader takes from its workers in turn, so it yields
the same batches as `arrowcache.torch.Loader`, in the same order, for any number of workers.

Workers gather, and their tensors travel in shared memory without a name. `dataloader()` moves no
sample's bytes between processes, and is several times faster without a transform.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from arrowcache.arguments import OF_DATALOADER, instead
from arrowcache.errors import LoaderTimeoutError, warn
from arrowcache.lifetimes import Origin
from arrowcache.pickling import unpickled
from arrowcache.reading.epoch import Epoch, Epochs
from arrowcache.reading.membership import Membership
from arrowcache.reading.options import LoaderOptions, WeighedArguments, takes
from arrowcache.reading.order import ResumedSteps, Shard
from arrowcache.reading.plan import Plan
from arrowcache.reading.stats import Meter
from arrowcache.reading.supply import Supply
from arrowcache.reading.weights_file import plan_of, state_of
from arrowcache.storage.recovery import HasStore, open_store, store_of
from arrowcache.torch.batch_sampler import INSTEAD as OF_SAMPLER
from arrowcache.torch.dataset import Transform, packed, tensors_of
from arrowcache.torch.distributed import membership_now
from arrowcache.torch.epoch_counter import EpochCounter, Turn
from arrowcache.torch.transport import SentBatch, made, sendable
from arrowcache.units import parse_count

if TYPE_CHECKING:
    from typing import Unpack

_OF_THE_DATALOADER = (
    "the DataLoader takes it: DataLoader(CacheIterableDataset(cache, 64), batch_size=None, ...)"
)
_INSTEAD = {
    **OF_DATALOADER,
    **instead("workers", say="give num_workers= to the DataLoader"),
    **instead("prefetch", say="give prefetch_factor= to the DataLoader"),
    **instead(
        "worker_type", "multiprocessing_context", say="give multiprocessing_context= to the DataLoader"
    ),
    **instead("num_workers", "prefetch_factor", "pin_memory", "pin_memory_device", say=_OF_THE_DATALOADER),
    **instead("persistent_workers", "worker_init_fn", "in_order", say=_OF_THE_DATALOADER),
    **instead("with_ids", say="its batches have no ids: take arrowcache.torch.Loader(with_ids=True)"),
    **instead("batch_tokens", "length_of", say=OF_SAMPLER["batch_tokens"]),
    **instead("device", say=OF_SAMPLER["device"]),
}
_FORMAT = "arrowcache.iterable"
_POLL_SECONDS = 0.005

_datasets: Counter[str] = Counter()  # number of datasets, by the path of their cache


class _IteratorState(NamedTuple):
    """The state of an iterator: the plan, and the number of its share's steps that were made."""

    plan: Plan
    made: int
    workers: int


class _WorkerBatches(Iterator[dict[str, Any]]):
    """The batches of one iteration. Dropping it ends the epoch.

    Args:
        batches: yields once when the epoch has begun, then the batches.
    """

    def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
        self._batches = batches
        self._has_begun = False

    def begin(self) -> None:
        """Begin the epoch; the first `next` does it otherwise. Blocks, Raises: as that. Idempotent."""
        if not self._has_begun:
            self._has_begun = True
            next(self._batches)

    def __next__(self) -> dict[str, Any]:
        try:
            self.begin()
            return next(self._batches)
        except Exception as error:  # StopIteration, too
            if get_worker_info() is None or (sent := sendable(error)) is error:
                raise
            raise sent from error


class CacheIterableDataset(IterableDataset[dict[str, Any]]):
    """A cache as an iterable of batches: `DataLoader(CacheIterableDataset(cache, 64), batch_size=None)`.

    Each iteration is the next epoch over a new snapshot, which the workers take together when the
    first batch is asked for; with StatefulDataLoader that is within `iter`. An epoch is resumed by as many
    workers as it began with: each has a state of its own, of its own steps. With `snapshot_every_n_steps`
    above 1 StatefulDataLoader repeats the steps since its last state, and drops them. Rows of these steps
    that left the cache meanwhile count as lost, too; if a whole step is gone, the next one is dropped in its
    place. After a `break`, workers that live on (persistent_workers) keep their leases until the next
    `for`. Batches are of the types that
    `arrowcache.torch.Loader` yields. Arguments are those of `arrowcache.Loader`; `transform` runs in the
    worker, gets `dict[str, ndarray]`, and may return anything; arrays in the dict that it returns become
    tensors.

    Args:
        cache: a Cache, or the path of one.
        batch_size: rows of a batch.
        rank: None means that of torch.distributed, if it is initialized when workers start. Ranks make their
            datasets in one order, and iterate with equally many workers.
        world_size: number of ranks. None with `rank`.
        timeout: seconds that an epoch waits for rows, and at its end a worker for others that have not
            begun it. None means no limit.

    Raises: ValueError, TypeError: an argument that does not fit. FileNotFoundError: no such cache.
        LoaderTimeoutError: in an iteration. ValueError: a DataLoader that batches again, or has
        more than 992 workers.
    """

    @takes("CacheIterableDataset", WeighedArguments, _INSTEAD)
    def __init__(
        self,
        cache: HasStore | str | os.PathLike[str],
        batch_size: int = 64,
        shuffle: str | None = "rows",
        seed: int = 0,
        drop_last: bool = True,
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | None = None,
        **options: Unpack[WeighedArguments],
    ) -> None:
        self._store = store_of(cache)
        self._options = LoaderOptions(
            self._store.settings, batch_size, shuffle, seed, columns, drop_last, transform, **options
        )
        self._known = Supply(self._store, self._options, Meter()).names  # its workers may find others
        self._rank = membership_now(self._options, begins=False)  # this process' rank
        self._options.require_fit(self._store, self._rank.world_size if self._rank else 1)
        path = str(self._store.folder.path)
        self._ordinal = _datasets[path]  # tells datasets of one job apart, alike on all ranks
        _datasets[path] += 1
        self._name = uuid.uuid4().hex
        self._counter = EpochCounter()
        self._iterations = 0
        self._place: _IteratorState | None = None
        self._resumed: _IteratorState | None = None
        self._pass: weakref.ref[_WorkerBatches] | None = None  # the last iteration
        self._epochs: Epochs | None = None  # of this process
        self._epochs_key, self._epochs_origin = (0, 0), Origin()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be epoch `epoch`, also in workers that live on.

        Not needed: epochs count by themselves.
        """
        self._counter.set(parse_count(epoch, "epoch", least=0))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return this worker's batches of the next epoch, or of the epoch of a loaded state."""
        turn = self._turn()
        self._iterations += 1
        resumed, self._resumed = self._resumed, None
        epochs = self._epochs_of(turn)
        if resumed is not None and resumed.workers != turn.workers and len(resumed.plan.seqs):
            same = "num_workers=0 or 1" if resumed.workers == 1 else f"num_workers={resumed.workers}"
            raise ValueError(
                f"the state is of one of {resumed.workers} workers, whose steps are not those of one of "
                f"{turn.workers}: resume with {same}; states of arrowcache.torch.Loader fit any number"
            )
        size = self._options.most_rows
        if resumed is not None and len(resumed.plan.seqs) and (counted := resumed.plan.block_rows) != size:
            raise ValueError(
                f"the state counts batches of {counted} rows, not of {size}: resume with "
                f"batch_size={counted}; states of arrowcache.torch.Loader fit any batch size"
            )
        with self._store.locked():
            if resumed is None:
                place = _IteratorState(epochs.plan_of(self._counter.take(turn)), 0, turn.workers)
            else:
                place = resumed
                self._counter.raise_to(place.plan.epoch + 1)
        self._place = place
        batches = _WorkerBatches(self._batches(epochs, turn, place))
        self._pass = weakref.ref(batches)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process' last iterator: plain ints, strings and lists.

        For StatefulDataLoader, which asks each worker. The state counts the batches made here. A worker
        begins its epoch before it answers, so its batches until the next state are of the snapshot in this
        state.
        """
        current = None if self._pass is None else self._pass()
        if current is not None and self._place and not len(self._place.plan.seqs) and get_worker_info():
            current.begin()
        place = self._place or self._resumed
        if place is None:
            return {"format": _FORMAT, "plan": None, "made": 0, "workers": 1}
        state = state_of(self._store, place.plan)
        return {"format": _FORMAT, "plan": state, "made": place.made, "workers": place.workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration of this process go on from a state, with the same number of workers.

        Rows whose segments have left the cache before their delivery are skipped, with a warning that
        counts them: their batches are short, or left out if no row is left.

        Raises: ValueError: not a valid state. The iteration raises ValueError if there are more or fewer
            workers, or another batch size.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise ValueError("this is not a state of a CacheIterableDataset: pass what state_dict() returned")
        resumed = None
        try:
            if state["plan"] is not None:
                made = parse_count(state["made"], "made", least=0)
                workers = parse_count(state["workers"], "workers")
                plan = plan_of(self._store, state["plan"])
                resumed = _IteratorState(plan, made, workers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the state is damaged: {error!r}") from None
        self._place, self._resumed = None, resumed

    def __reduce__(self) -> tuple[Callable[..., CacheIterableDataset], tuple[Any, ...]]:
        attributes = dict(self.__dict__)
        del attributes["_store"], attributes["_counter"]
        attributes |= {"_epochs": None, "_place": None, "_pass": None}
        attributes["_rank"] = self._found_rank()
        store = self._store
        return _opened, (str(store.folder.path), store.check, packed(attributes), self._counter.table)

    def __repr__(self) -> str:
        return f"<CacheIterableDataset of {self._store.folder.path}: batch_size={self._options.batch_size}>"

    def _turn(self) -> Turn:
        worker = get_worker_info()
        if worker is None:
            return Turn(0, 1, 0, self._iterations)
        return Turn(worker.id, worker.num_workers, worker.seed - worker.id, self._iterations)

    def _epochs_of(self, turn: Turn) -> Epochs:
        """Return the epochs of this process, as one worker of several."""
        key = turn.worker, turn.workers
        if self._epochs is None or not self._epochs_origin.is_here or self._epochs_key != key:
            ranks = self._found_rank()
            self._epochs = Epochs(self._store, self._options, Meter(), self._known)
            shard = Shard(ranks.rank, ranks.world_size) if ranks else Shard()
            self._epochs.join(self._member(ranks, turn), shard)
            self._epochs_key, self._epochs_origin = key, Origin()
        return self._epochs

    def _found_rank(self) -> Membership | None:
        """Find the rank before the dataset goes to a worker, where torch.distributed is not initialized."""
        return self._rank or membership_now(self._options)

    def _member(self, ranks: Membership | None, turn: Turn) -> Membership | None:
        """Return this worker's membership: for the agreement on snapshots ranks and workers are one."""
        if ranks is None:
            if turn.workers == 1:
                return None
            return Membership(turn.worker, turn.workers, self._name, turn.workers)
        return Membership(
            ranks.rank * turn.workers + turn.worker,
            ranks.world_size * turn.workers,
            f"{ranks.run}/iterable-{self._ordinal}",
            ranks.local_world_size * turn.workers,
        )

    def _batches(self, epochs: Epochs, turn: Turn, place: _IteratorState) -> Iterator[dict[str, Any]]:
        epochs.resume(place.plan, "keep")
        mine = slice(turn.worker + place.made * turn.workers, None, turn.workers)
        self._counter.recall(epochs.supply)
        may_warn = epochs.supply.warns
        epoch = epochs.begin(made=mine)
        assert epoch is not None  # nothing cancels it
        self._counter.remember(epochs.supply, warned=may_warn and not epochs.supply.warns)
        with epoch:
            self._place = place = place._replace(plan=epoch.plan)
            order, steps = epoch.order, range(epoch.order.steps)[mine]
            self._warn_of_lost_rows(epoch, steps, turn)
            yield {}
            for step in steps:
                rows = order.batches(step, step + 1)
                batch = self._make(epoch, rows) if len(rows) else None
                self._place = place = place._replace(made=place.made + 1)
                epoch.deliver(0 if batch is None else 1, min(step + turn.workers, order.steps))
                if batch is not None:
                    yield batch
        self._wait_for_others(epochs, epoch, turn)

    def _warn_of_lost_rows(self, epoch: Epoch, steps: range, turn: Turn) -> None:
        plan, order = epoch.plan, epoch.order
        if isinstance(order, ResumedSteps) and (lost := order.lost_rows(steps)):
            who = "" if turn.workers == 1 else f" and to worker {turn.worker} of {turn.workers}"
            gone = len(plan.seqs) - len(epoch.snapshot.seqs)
            warn(
                f"{lost} rows of epoch {plan.epoch} are lost to it{who}: {gone} of its {len(plan.seqs)} "
                "segments have left the cache since the state was saved; the others are delivered"
            )

    def _make(self, epoch: Epoch, rows: NDArray[np.int64]) -> Any:
        result: Any = epoch.snapshot.gather(rows, self._options.names)
        if self._options.transform is not None:
            result = self._options.transform(result)
        result = made(tensors_of(result, self._store.settings.schema))
        return result if isinstance(result, SentBatch) or get_worker_info() else result.result

    def _wait_for_others(self, epochs: Epochs, epoch: Epoch, turn: Turn) -> None:
        """Wait until all workers have begun this epoch: a slow one then still finds its snapshot."""
        started, timeout_seconds = time.monotonic(), self._options.timeout
        for _ in itertools.count():
            if not epochs.settle():
                return
            if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                raise LoaderTimeoutError(
                    f"worker {turn.worker} of {turn.workers} has ended epoch {epoch.plan.epoch}, and waited "
                    f"{timeout_seconds:g} s for others that have not begun it: use as many workers on all "
                    "ranks, and set LOCAL_WORLD_SIZE to the ranks on this node"
                )
            time.sleep(_POLL_SECONDS)


def _opened(path: str, check: str, settings: bytes, table: torch.Tensor) -> CacheIterableDataset:
    dataset = CacheIterableDataset.__new__(CacheIterableDataset)
    dataset._store = open_store(Path(path), check=check)
    dataset.__dict__.update(unpickled(settings))
    dataset._counter = EpochCounter(table)
    return dataset
