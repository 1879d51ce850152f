"""ItemWorkers: worker processes that make the missing items of a CachedDataset.

They are those of a stock DataLoader, so that a dataset finds what it is used to: `get_worker_info`, seeds, a
forked copy of this process, unless the user set another start method. The process that trains asks for one
batch after another. A worker that finds all items of a batch in the cache says so, and no more: the process
that trains gathers them itself. Else it makes what is missing, publishes it, and sends the whole batch in
memory without a name.

Guarantees: batches come in order; a worker that dies is replaced, and its batches are made again, up to some
deaths at one batch; another epoch, or the end, waits for one item of each worker, not for batches; at the end
of an epoch each worker has published what it made, and leases nothing. Workers do not see Ctrl-C, and end
with this process.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from arrowcache.errors import WorkerError, warn
from arrowcache.lifetimes import Origin, forgets_in_child, shielded
from arrowcache.pickling import pickled, unpickled
from arrowcache.process import end_in_words
from arrowcache.read_through.read_through import LeftOut
from arrowcache.torch.cached_dataset import CachedDataset
from arrowcache.torch.item_source import Unwanted
from arrowcache.torch.lazy_batch import SentResult, failure
from arrowcache.torch.worker_processes import (
    ParentWatch,
    end_workers,
    is_death,
    is_late,
    leave_to_parent,
    raise_deaths_in_next,
    set_timeout,
    starting_workers,
)

Collate = Callable[[list[Any]], Any]
BatchIndices = Callable[[int], Iterator[NDArray[np.int64]]]
"""Returns the indices of each batch of an epoch, from a step on."""

_LOOK_SECONDS = 1.0  # between two looks, while it waits for a batch, for a worker's death or the epoch's end
_CLOSE_SECONDS = 5.0
_DEATH_SECONDS = 1.0  # between the end of a worker's connection and that of its process
_MAX_DEATHS = 3  # at one batch


class Answer(NamedTuple):
    """A batch that a worker made, of so many items. None: all of them were left out."""

    batch: Any
    rows: int
    left_out: int = 0
    error: str = ""  # the last one of those that were left out


def answer_of(
    train: CachedDataset,
    indices: NDArray[np.int64],
    collate: Collate | None,
    is_wanted: Callable[[], bool] = lambda: True,
    reads: int = 1,
) -> Answer:
    """Return a batch of items (n,), each read or made by this process.

    Args, raises: as `CachedDataset.batch`.
    """
    left_out: list[LeftOut] = []
    batch = train.batch(indices, collate, is_wanted, left_out, reads)
    error = f"item {left_out[-1].number}: {left_out[-1].error!r}" if left_out else ""
    return Answer(batch, len(indices) - len(left_out), len(left_out), error)


class _Request(NamedTuple):
    """A batch of an epoch to make. Indices of None: publish what was made, and end the lease."""

    epoch: int
    indices: NDArray[np.int64] | None


class _Requests:
    """The batch sampler: the requests of the epoch that began last, then one to drain for each worker."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._epoch = 0
        self._batches: Callable[[], Iterator[NDArray[np.int64]]] = lambda: iter(())

    def begin(self, epoch: int, batches: Callable[[], Iterator[NDArray[np.int64]]]) -> None:
        self._epoch, self._batches = epoch, batches

    def __iter__(self) -> Iterator[_Request]:
        for indices in self._batches():
            yield _Request(self._epoch, indices)
        for _ in range(self._workers):  # the DataLoader asks its workers in turn
            yield _Request(self._epoch, None)


class _Making(Dataset[Any]):
    """The dataset of the DataLoader: it answers a request in a worker.

    Args:
        wanted: number of the epoch whose batches are wanted, in memory that all processes share.
        reads: as of `CachedDataset.batch`.
    """

    def __init__(self, train: CachedDataset, collate: Collate | None, wanted: Any, reads: int) -> None:
        self._train, self._collate, self._wanted, self._reads = train, collate, wanted, reads

    def __getitem__(self, request: _Request) -> Any:
        return self.__getitems__(request)

    def __getitems__(self, request: _Request) -> SentResult | None:
        """Return None where there is nothing to send, else a message that becomes an `Answer`."""
        epoch, indices = request
        if self._wanted.value != epoch:
            return None
        try:
            if indices is None:
                self._train.drain()
                return None
            if self._collate is None and self._train.has(indices):
                return None
            is_wanted = self._is_wanted(epoch)
            return SentResult(answer_of(self._train, indices, self._collate, is_wanted, self._reads))
        except Unwanted:
            return None
        except Exception:  # noqa: BLE001  # travels as torch's own do
            return SentResult(failure("in a loader's worker process"))

    def _is_wanted(self, epoch: int) -> Callable[[], bool]:
        return lambda: bool(self._wanted.value == epoch)

    def __reduce__(self) -> tuple[Callable[..., _Making], tuple[Any, ...]]:
        collate = self._collate
        functions = None if collate is None else pickled(collate, "collate_fn", "use forked workers")
        return _unpickled, (self._train, functions, self._wanted, self._reads)


def _unpickled(train: CachedDataset, collate: bytes | None, wanted: Any, reads: int) -> _Making:
    return _Making(train, None if collate is None else unpickled(collate), wanted, reads)


def _as_it_is(answer: Any) -> Any:
    return answer


class ItemWorkers:
    """The worker processes of one loader. They start with its first epoch that needs them, and live on.

    After `close`, as when an epoch has failed, the next epoch starts others.

    One thread at a time asks them; any may `stop` or `close` them meanwhile. An epoch that a newer one
    replaced gets none of its batches.

    Args:
        workers: number of processes; at least 1.
        collate: as of `CachedDataset.batch`.
        seeds: the processes' random seeds are drawn from it, whenever they are started.
        reads: as of `CachedDataset.batch`.
    """

    def __init__(
        self,
        train: CachedDataset,
        workers: int,
        collate: Collate | None,
        seeds: torch.Generator,
        reads: int = 1,
    ) -> None:
        self._wanted = RawValue("q", 0)
        self._requests = _Requests(workers)
        self._making = _Making(train, collate, self._wanted, reads)
        self._workers, self._seeds = workers, seeds
        self._loader: DataLoader[Any] | None = None
        self._processes: list[BaseProcess] = []
        self._answers: Iterator[Any] = iter(())
        self._batches: BatchIndices = lambda _: iter(())
        self._epoch = self._given = self._deaths = 0
        self._is_whole = False  # nothing interrupted what the processes have to say
        self._turn = threading.RLock()  # to ask the processes; reentrant: a handler may close them
        self._origin = Origin()
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Leave the processes to the parent."""
        leave_to_parent(self._answers)

    def begin(self, batches: BatchIndices) -> int:
        """Have an epoch's batches made. Those of the one before are not made any more.

        Returns: its number, for `next`, `drain` and `stop`.
        Blocks: while processes start, or until each has made the item that it is at.
        """
        self.stop()  # first: a thread that waits for a batch of the epoch before leaves
        with self._turn:
            self._epoch += 1
            self._wanted.value = self._epoch
            self._batches, self._given, self._deaths = batches, 0, 0
            self._begin()
            return self._epoch

    def _begin(self) -> None:
        first = self._given
        self._requests.begin(self._epoch, lambda: self._batches(first))
        is_whole, self._is_whole = self._is_whole, False
        if not (is_whole and self._advance()):
            self._end()
            others = {*multiprocessing.active_children()}
            with starting_workers(self._workers), shielded():
                self._loader = DataLoader(
                    self._making,
                    batch_sampler=self._requests,  # type: ignore[arg-type]  # of requests
                    num_workers=self._workers,
                    generator=self._seeds,
                    collate_fn=_as_it_is,
                    persistent_workers=True,
                    worker_init_fn=ParentWatch(),
                    # Python 3.14 forks no more by itself, and a script would need a main guard.
                    multiprocessing_context=multiprocessing.get_start_method(allow_none=True) or "fork",
                )
                self._answers = iter(self._loader)
                raise_deaths_in_next(self._answers)
            self._processes = [each for each in multiprocessing.active_children() if each not in others]
        set_timeout(self._answers, _LOOK_SECONDS)
        self._is_whole = True

    def _advance(self) -> bool:
        """Have the processes that are there make the requests. Returns: False: none are, or one died."""
        if self._loader is None:
            return False
        set_timeout(self._answers, 0)  # until each worker is at its last item
        try:
            self._answers = iter(self._loader)
        except Exception as error:
            if not is_death(error):
                raise
            warn(f"{self._death(error)}: others make its items")
            return False
        return True

    def next(self, epoch: int) -> Answer | None:
        """Return an epoch's next batch. None: its items are in the cache, or the epoch was ended meanwhile.

        Blocks: until it is made.
        Raises: what the dataset raises. WorkerError: worker processes die, again and again.
        """
        with self._turn:
            while self._wanted.value == epoch:
                self._is_whole = False
                try:
                    answer: Answer | None = next(self._answers)
                except Exception as error:
                    if is_late(error):
                        self._is_whole = True
                        continue
                    if not is_death(error):
                        self._is_whole = True
                        raise
                    self._deaths += 1
                    if self._deaths > _MAX_DEATHS:
                        raise WorkerError(
                            f"{self._death(error)}, as did {_MAX_DEATHS} before it at this batch: look for "
                            "what kills it, such as a lack of memory, or pass workers=0"
                        ) from None
                    warn(f"{self._death(error)}: others make its items")
                    self._begin()
                else:
                    self._is_whole, self._deaths, self._given = True, 0, self._given + 1
                    return answer
            return None

    def drain(self, epoch: int) -> None:
        """Wait until all have published what they made of an epoch, after its last batch."""
        with suppress(StopIteration):
            while self._wanted.value == epoch:
                self.next(epoch)

    def stop(self, epoch: int | None = None) -> None:
        """Have no more batches of an epoch made, or of any; those at work end after an item.

        Does not wait.
        """
        if epoch in (None, self._wanted.value):
            self._wanted.value = 0

    def close(self) -> None:
        """End the processes, each after an item. Blocks: at most some seconds. Idempotent."""
        if self._origin.is_here:  # else they are the parent's, which may want their batches
            self.stop()
            has_turn = self._turn.acquire(timeout=_CLOSE_SECONDS)  # a thread that waits leaves by then
            try:
                self._end()
            finally:
                if has_turn:
                    self._turn.release()

    def _end(self) -> None:
        answers, self._answers, self._loader, self._is_whole = self._answers, iter(()), None, False
        end_workers(answers)

    def _death(self, error: Exception) -> str:
        """Return the end of each process that died, in words; torch's own if all of them live."""
        wait([process.sentinel for process in self._processes], _DEATH_SECONDS)
        ends = [
            f"process {process.pid} {end_in_words(process.exitcode)}"
            for process in self._processes
            if process.exitcode is not None
        ]
        return "; ".join(ends) or str(error).partition("\n")[0].removesuffix(".")
