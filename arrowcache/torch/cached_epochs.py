"""Cached epochs: the items of a CachedDataset as the epochs and batches of a loader.

`CachedEpochs` begins the epochs, each of which has each item once; reading/order.py says which items a batch
has. `ItemAssembly` makes the batches. Those whose items are all in the cache are gathered here, some ahead,
each by one job into a slot: no Python touches an item. Where items are missing, worker processes
(item_workers.py) make the batches, in the same order; without workers this process makes them. collation.py
puts them together. There is no thread here; reading/stream.py is the loop.

Guarantees: each batch is that of its place in the order, whichever process made it; an epoch that has ended,
in whatever way, has no items made; at its end all that was made is published.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, CorruptSegmentError, warn
from arrowcache.lifetimes import Origin, call_all
from arrowcache.reading.assembly import Assembly, BatchGroup, ReadyBatch
from arrowcache.reading.available_rows import Wait
from arrowcache.reading.columns import Columns, column_bytes
from arrowcache.reading.epoch import EpochProgress, EpochSource
from arrowcache.reading.gather import PendingRead, abandon
from arrowcache.reading.options import MAX_BATCH_ROWS, MAX_PREFETCHED, MAX_WORKERS
from arrowcache.reading.order import EvenOrder, Shard
from arrowcache.reading.plan import Plan
from arrowcache.reading.shuffle import Shuffle
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.stats import Meter
from arrowcache.sampling.dispatcher import MAX_READS
from arrowcache.torch.cached_dataset import CachedDataset
from arrowcache.torch.collation import batch_of, collated
from arrowcache.torch.item_workers import Answer, Collate, ItemWorkers, answer_of
from arrowcache.torch.randomness import seeds_of_workers
from arrowcache.torch.structure import take_apart
from arrowcache.units import MAX_COUNTED, format_count, parse_count, require_function

_BATCH_SIZE = 64
_LOADERS = 1  # seeds of the workers of loaders begin with it
_numbers = itertools.count()  # of the loaders of this process
_SHUFFLES = {True: "rows", "rows": "rows", False: None, None: None}


class CachedEpoch(EpochProgress):
    """One pass over a dataset: each item of its plan once.

    Args:
        item_workers: make the batches. None: this process does.
    """

    order: EvenOrder

    def __init__(self, plan: Plan, order: EvenOrder, item_workers: ItemWorkers | None) -> None:
        super().__init__(plan)
        self.plan, self.order, self.item_workers = plan, order, item_workers
        self.requested = 0  # its number in `item_workers`
        self.has_ended = False
        self.taken = 0  # steps whose batches are made
        self.empty_steps = 0  # since the last batch: all their items were left out
        self.last_steps = 0  # such steps behind the epoch's last batch, once that is known
        self.error = ""  # of the last item that was left out, until a batch is made
        self.made_item: int | None = None  # an item of a batch that was made

    @property
    def is_delivered(self) -> bool:
        return self.delivered + self.last_steps >= self.order.steps

    def indices(self, step: int) -> NDArray[np.int64]:
        """Return the items of a step."""
        return self.order.batches(step, step + 1)

    def batches_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        return (self.indices(each) for each in range(step, self.order.steps))

    def end(
        self,
        leave_to: Callable[[Snapshot], None] = Snapshot.close,  # noqa: ARG002  # it has none
        *,
        may_deliver: bool = False,  # noqa: ARG002
    ) -> None:
        self.has_ended = True
        if self.item_workers is not None and self.taken < self.order.steps:
            self.item_workers.stop(self.requested)


class CachedEpochs(EpochSource[CachedEpoch]):
    """Begins one epoch of a dataset after another. It owns the worker processes that make items.

    Args:
        shard_now: asked as each epoch begins, those of `repeat` too.
        others: as of `CachedLoader`.
    """

    parks = False

    def __init__(
        self,
        train: CachedDataset,
        batch_size: int | None,
        shuffle: bool | str | None,
        seed: int,
        drop_last: bool,
        workers: int,
        reads: int,
        collate: Collate | None,
        shard_now: Callable[[], Shard],
    ) -> None:
        if not isinstance(train, CachedDataset):
            raise TypeError(f"a CachedLoader is of a CachedDataset, not of a {type(train).__name__}")
        self.train = train
        size = _BATCH_SIZE if batch_size is None else batch_size
        self.batch_size = parse_count(size, "batch_size", most=MAX_BATCH_ROWS)
        if not isinstance(shuffle, bool | str | None) or shuffle not in _SHUFFLES:
            raise ValueError(f"shuffle={shuffle!r} of a dataset must be True ('rows') or False (None)")
        self._shuffle = Shuffle(_SHUFFLES[shuffle])
        self._seed = parse_count(seed, "seed", least=0, most=None)
        if not isinstance(drop_last, bool):
            raise TypeError(f"drop_last must be True or False, not {drop_last!r}")
        self._drop_last = drop_last
        self._workers = parse_count(workers, "workers", least=0, most=MAX_WORKERS)
        self.reads = parse_count(reads, "reads", most=MAX_READS)
        require_function(collate, "collate_fn")
        self.collate = collated if collate is None and train.transforms else collate
        super().__init__(Meter(self._workers, self._shuffle.value))
        self._shard_now = shard_now
        self._item_workers: ItemWorkers | None = None
        self._number = next(_numbers)
        self._is_first = True
        self._origin = Origin()

    def plan_of(self, number: int) -> Plan:
        """Return the plan of an epoch. To the order a dataset is one segment."""
        return Plan(
            epoch=number,
            seed=self._seed,
            shuffle=self._shuffle,
            epoch_rows=None,
            window_rows=1,
            block_rows=1,
            seqs=np.zeros(1, np.int64),
            rows=np.array([len(self.train)], np.int64),
        )

    @property
    def steps(self) -> int:
        """The steps of a whole epoch, if it began now."""
        return self._order_of(self.plan_of(0), self._shard_now()).steps

    def _order_of(self, plan: Plan, shard: Shard) -> EvenOrder:
        return EvenOrder(plan, self.batch_size, shard, self._drop_last)

    def from_state(self, state: dict[str, Any]) -> Plan:
        plan, length = Plan.from_state(state, MAX_COUNTED), len(self.train)
        if plan.stream_rows != length or len(plan.rows) != 1:
            raise ValueError(
                f"the state is of {format_count(plan.stream_rows, 'row')}, and the dataset has "
                f"{format_count(length, 'item')}"
            )
        return plan

    def _begin(
        self,
        planned: Plan,
        wait: Wait | None,
        *,
        ahead: bool = False,  # noqa: ARG002  # nothing is leased
    ) -> CachedEpoch | None:
        """Begin an epoch; one after another begins when all batches before it are made.

        Blocks: where worker processes start, or are at an item of an epoch that was left.
        Raises: ValueError: the items are fewer than one step of all ranks, and drop_last leaves them out.
        """
        train = self.train
        if wait is None:
            return None
        shard = self._shard_now()
        if not self._order_of(self.plan_of(0), shard).steps:
            step_rows = self.batch_size * shard.world_size
            raise ValueError(
                f"no epoch has a batch: the dataset's {format_count(len(train), 'item')} are fewer "
                f"than one step of {step_rows}, which drop_last=True leaves out: lower batch_size, or pass "
                "drop_last=False"
            )
        if not self._is_first and not planned.position:
            try:
                train.turn_over()
            except (ArrowCacheError, OSError) as error:
                warn(f"no items were replaced: {error}")
        self._is_first = False
        workers = self._workers_now(shard.rank)
        epoch = CachedEpoch(planned, self._order_of(planned, shard), workers)
        if workers is not None:
            with self.meter.stage("start"):
                epoch.requested = workers.begin(epoch.batches_from)
        return epoch

    def _workers_now(self, rank: int) -> ItemWorkers | None:
        """Return the workers, if the next epoch needs them; else end them."""
        train = self.train
        if self._workers and (self.collate is not None or not train.is_complete()):
            train.drain()  # before they are forked: they make and publish what is missing
            if self._item_workers is None:
                seeds = seeds_of_workers(_LOADERS, self._number, self._seed, rank)
                self._item_workers = ItemWorkers(train, self._workers, self.collate, seeds, self.reads)
            return self._item_workers
        if self._item_workers is not None:
            self._item_workers.close()
            self._item_workers = None
        return None

    def after_fork(self) -> None:
        self._item_workers, self._origin = None, Origin()

    def close(self) -> None:
        """End the worker processes, and publish what was made. Idempotent; in a forked child does nothing.

        Blocks: until each worker has made the item that it is at, but some seconds at most.
        """
        if not self._origin.is_here:  # what the child makes of the dataset's items is no concern of this
            return
        workers = self._item_workers
        call_all([*([] if workers is None else [workers.close]), self.train.drain])


class ItemAssembly(Assembly):
    """Makes the batches of epochs of a dataset.

    Args:
        epochs: the epochs.
        prefetch: as of `CachedLoader`.
        allocate: the memory of batches that are gathered here, as of `Slots`.
    """

    def __init__(
        self, epochs: CachedEpochs, prefetch: int | None, allocate: Callable[[int], NDArray[np.uint8]]
    ) -> None:
        self._epochs, self._train, self.meter = epochs, epochs.train, epochs.meter
        if prefetch is not None:
            prefetch = parse_count(prefetch, "prefetch", least=0, most=MAX_PREFETCHED)
        self._prefetch, size = prefetch, epochs.batch_size
        schema = self._train.form.schema
        fixed = Columns.of(schema, [*schema.fixed])
        self._lend_slots(fixed.memory, size, 2, allocate)
        self._is_made_elsewhere = False  # by worker processes
        #: Of the last batch; at first what its columns of fixed width have at least.
        self._batch_bytes = max(1, size * fixed.row_bytes)

    def wanted(self) -> int:
        """As of `Assembly`: as many as usual, but where workers make them one."""
        if self._is_made_elsewhere:
            return 1
        ahead = self._prefetch
        if ahead is None:
            reader, size = self._train.reader_here(), self._epochs.batch_size
            ahead = 0 if reader is None else reader.read_mode.batches_ahead(size, self._batch_bytes)
        return 1 + ahead

    def groups(self, epoch: CachedEpoch, *, awaited: bool) -> Iterator[BatchGroup]:  # noqa: ARG002
        self._is_made_elsewhere = epoch.item_workers is not None
        return (_ItemGroup(self, epoch, step) for step in range(epoch.order.steps + 1))

    def require_views(self) -> None:
        """Raises: ValueError: items are put together, which copies."""
        raise ValueError(
            "a Loader of a dataset puts items together, which copies them: nothing can be a view"
        )

    # batches

    def begin(self, indices: NDArray[np.int64]) -> PendingRead | None:
        """Begin to gather items (n,). None: they are not all in the cache, or come one by one."""
        reader = None if self._epochs.collate is not None else self._train.reader_here()
        return None if reader is None else reader.begin(indices, self.slots)

    def made(
        self, epoch: CachedEpoch, step: int, indices: NDArray[np.int64], begun: PendingRead | None
    ) -> ReadyBatch | None:
        """Return the batch of a step, of items (n,). None: all are left out, or the epoch has ended.

        Args:
            begun: its items, if they have been gathered.
        Raises: what the dataset inside, its transform or the collate function raise. WorkerError.
        """
        answer: Answer | None = None
        if epoch.item_workers is not None:
            with self.meter.stage("transform"):
                answer = epoch.item_workers.next(epoch.requested)
            if epoch.has_ended:
                return None
            if answer is None:
                begun = self.begin(indices)
        made = None if begun is None else self._gathered(epoch, begun)
        if made is None:
            made = self._to_batch(epoch, answer or self._answer(indices), indices)
        if made is None and not epoch.has_ended and epoch.order.step_rows > epoch.order.batch_size:
            made = self._stand_in(epoch, step)
        if made is not None:
            self._batch_bytes = max(1, made.nbytes)
        return made

    def end(self, epoch: CachedEpoch) -> None:
        """Publish all that was made of an epoch. Raises: RuntimeError: none of its items could be made."""
        if epoch.empty_steps == epoch.order.steps and epoch.error:
            raise RuntimeError(f"none of the epoch's items could be made; {epoch.error}")
        epoch.last_steps = epoch.empty_steps
        if epoch.item_workers is not None:
            epoch.item_workers.drain(epoch.requested)
        self._train.drain_if_it_turns_over()

    def _gathered(self, epoch: CachedEpoch, begun: PendingRead) -> ReadyBatch | None:
        """Return a batch of items that are in the cache. None: they cannot be read after all."""
        try:
            with self.meter.stage("gather"):
                columns = begun.result()
        except (CorruptSegmentError, OSError):
            return None
        nbytes = sum(map(column_bytes, columns.values()))
        batch = batch_of(self._train.form, columns)
        return ReadyBatch(batch, begun.rows, nbytes, nbytes, begun.published, epoch)

    def _answer(self, indices: NDArray[np.int64]) -> Answer:
        with self.meter.stage("transform"):
            return answer_of(self._train, indices, self._epochs.collate, reads=self._epochs.reads)

    def _to_batch(self, epoch: CachedEpoch, answer: Answer, indices: NDArray[np.int64]) -> ReadyBatch | None:
        """A batch that was made of items, which count as published now. None: all were left out."""
        self.meter.leave_out(answer.left_out)
        if not answer.rows:
            epoch.error = answer.error
            return None
        if not answer.left_out:
            epoch.made_item = int(indices[0])
        leaves: list[Any] = []
        take_apart(answer.batch, leaves)
        nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return ReadyBatch(answer.batch, answer.rows, nbytes, nbytes, time.time(), epoch)

    def _stand_in(self, epoch: CachedEpoch, step: int) -> ReadyBatch | None:
        """Return a batch of one item of another step, as all ranks have equally many steps.

        None: none of this rank's items can be made.
        """
        before = [] if epoch.made_item is None else [np.array([epoch.made_item])]
        for indices in itertools.chain(before, epoch.batches_from(step + 1), epoch.batches_from(0)):
            for index in indices:
                one = np.array([index])
                if (made := self._to_batch(epoch, self._answer(one), one)) is not None:
                    return made
        return None


class _ItemGroup(BatchGroup):
    """The batch of a step, whose items are being gathered if all are in the cache; then the epoch's end."""

    epoch: CachedEpoch

    def __init__(self, assembly: ItemAssembly, epoch: CachedEpoch, step: int) -> None:
        self._is_end = step == epoch.order.steps
        super().__init__(epoch, 0 if self._is_end else 1)
        self._assembly, self._step, self._indices = assembly, step, epoch.indices(step)
        is_begun_here = epoch.item_workers is None and not self._is_end
        self._begun = assembly.begin(self._indices) if is_begun_here else None
        self.is_in_parts = self._begun is not None and self._begun.is_in_parts

    @property
    def is_made_by_consumer(self) -> bool:  # type: ignore[override]
        return self._begun is None

    def advance(self) -> None:
        with suppress(CorruptSegmentError, OSError):  # which `take` finds, too
            if self._begun is not None:
                self._begun.advance()

    def take(self, seconds: float) -> bool:
        if self._begun is None:
            return True
        try:
            if self._begun.take(0):
                return True
            with self._assembly.meter.stage("gather"):
                return self._begun.take(seconds)
        except (CorruptSegmentError, OSError):
            self._begun = None  # its items are made
            return True

    def made(self) -> Iterable[ReadyBatch]:
        """Return the batch, if there is one.

        Raises: as `ItemAssembly.made`. The worker processes have ended then, since the error's traceback may
            keep them until the next collection.
        """
        epoch, begun, self._begun = self.epoch, self._begun, None
        try:
            if self._is_end:
                self._assembly.end(epoch)
                return ()
            made = self._assembly.made(epoch, self._step, self._indices, begun)
        except Exception:
            if epoch.has_ended:  # which may be why: nobody asks for the batch
                return ()
            if epoch.item_workers is not None:
                epoch.item_workers.close()
            raise
        epoch.taken += 1
        if made is None:
            epoch.empty_steps += 1
            return ()
        empty, epoch.empty_steps = epoch.empty_steps, 0
        return (made._replace(steps=1 + empty),)

    def cancel(self, seconds: float | None = None) -> bool:
        """End it: reads that the disk holds for longer than a moment end by themselves."""
        if self._begun is None:
            return True
        if seconds is not None:
            return self._begun.cancel(seconds)
        abandon(self._begun)
        return True
