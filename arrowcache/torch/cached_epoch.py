"""CachedEpoch: one pass over the items of a CachedDataset, batch by batch. Its consumer drives it.

Batches whose items are all in the cache are gathered here, some ahead, each by one job into a slot: no Python
touches an item. Where items are missing, worker processes (makers.py) make the batches, in the same order;
without workers this process makes them. It has no thread.

Guarantees: each batch is that of its place in the order, whoever made it; a batch that is kept is never
overwritten; whoever ends it, nothing of it is under way afterwards.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import CorruptSegmentError
from arrowcache.lifetimes import Origin
from arrowcache.read_through.begun import Begun
from arrowcache.reading.gather import abandon
from arrowcache.reading.iterator import cut_short
from arrowcache.reading.order import EpochOrder
from arrowcache.reading.plan import Plan
from arrowcache.reading.portion import ReadyBatch
from arrowcache.reading.slots import Slots
from arrowcache.reading.stats import Meter
from arrowcache.reading.values import ColumnData, column_bytes
from arrowcache.torch.cached_dataset import CachedDataset
from arrowcache.torch.collation import batch_of
from arrowcache.torch.makers import Answer, Collate, Makers, answer_of
from arrowcache.torch.structure import take_apart


class CachedEpoch:
    """The batches of an epoch, as `iterator.Stream`. Any thread may end it, also within `take`.

    Args:
        plan: the epoch, from a position on.
        order: this rank's steps of it.
        slots: lends memory for batches that are gathered here. None: all batches are made item by item.
        prefetch: batches to have under way here beside the next one. None means as many as usual.
        collate: as of `CachedDataset.batch`.
        makers: make the batches. None: this process does.
        reads: as of `CachedDataset.batch`.
    """

    def __init__(
        self,
        train: CachedDataset,
        plan: Plan,
        order: EpochOrder,
        slots: Slots | None,
        prefetch: int | None,
        collate: Collate | None,
        makers: Makers | None,
        meter: Meter,
        reads: int = 1,
    ) -> None:
        self._reads = reads
        self._train, self.plan, self.order = train, plan, order
        self._slots, self._prefetch, self._collate = slots, prefetch, collate
        self._makers, self._meter, self._waiting = makers, meter, meter.waiting()
        self._origin = Origin()
        self._under_way: deque[tuple[NDArray[np.int64], Begun | None]] = deque()
        self._begun = self._taken = self.delivered = 0  # steps
        fixed = train.form.schema.fixed.values() if slots is not None else ()
        #: Of the last batch; at first what its columns of fixed width have at least.
        self._batch_bytes = max(1, order.batch_size * sum(kind.row_bytes for kind in fixed))
        self._empty_steps = 0  # since the last batch: all their items were left out
        self._error = ""  # of the last item that was left out, until a batch is made
        self._stands_in: int | None = None  # an item of a batch that was made
        self.was_asked = self.has_stopped = self.has_ended = False
        self._lock = threading.RLock()  # reentrant: the garbage collector may end an epoch anywhere
        self._user = 0  # the thread that makes batches, or abandons them
        self._because: str | None = None
        meter.begin_run(self)
        meter.begin_epoch()
        if makers is not None:
            with self._waiting, meter.stage("start"):
                makers.begin(self._batches_from)

    def _batches_from(self, step: int) -> Iterator[NDArray[np.int64]]:
        return (self._indices(each) for each in range(step, self.order.steps))

    def _indices(self, step: int) -> NDArray[np.int64]:
        return self.order.batches(step, step + 1)

    def rest(self) -> Plan:
        """Return the part that was not delivered yet."""
        return self.plan.at(self.order.position_after(self.delivered))

    # as a stream

    def require_own(self) -> None:
        """Raises: ValueError: this process was forked from the one that makes the batches."""
        self._origin.require("this epoch", "iterate anew here")

    def waiting(self) -> AbstractContextManager[None]:
        """Count the time inside as the consumer's wait for a batch."""
        self.was_asked = True
        return self._waiting

    def take(self, timeout_seconds: float | None = None) -> ReadyBatch | None:  # noqa: ARG002
        """Return the next batch, or None at the end, where all that was made is published.

        Raises: what the dataset inside, its transform or the collate function raise. WorkerError. Then the
            makers have ended.
        """
        self.require_own()
        if not self._enter():
            return None
        try:
            return self._next()
        except Exception:
            if self.has_ended:  # which may be why: nobody asks for the batch
                return None
            if self._makers is not None:
                self._makers.close()  # now: the error's traceback may keep them until Python looks for cycles
            raise
        finally:
            self._leave()

    def _next(self) -> ReadyBatch | None:
        while not self.has_ended and self._taken < self.order.steps:
            made = self._made_here() if self._makers is None else self._made_by(self._makers)
            if self.has_ended:
                return None
            if made is None and self.order.step_rows > self.order.batch_size:
                made = self._instead()
            self._taken += 1
            if made is not None:
                empty, self._empty_steps = self._empty_steps, 0
                self._batch_bytes = max(1, made.nbytes)
                return made._replace(steps=1 + empty)
            self._empty_steps += 1
        if self.has_ended:
            return None
        if self._empty_steps == self.order.steps and self._error:
            raise RuntimeError(f"none of the epoch's items could be made; {self._error}")
        if self._makers is not None:
            self._makers.rest()
        self._train.rest_if_it_turns_over()
        return None

    def is_ready(self) -> bool:
        """True if `take` would return at once, as far as is known."""
        if self._makers is not None or self._taken == self.order.steps or not self._enter():
            return True
        try:
            with suppress(CorruptSegmentError, OSError):  # which `take` finds, too
                self._begin_ahead()
                begun = self._under_way[0][1]
                return begun is None or begun.is_ready()
            return True
        finally:
            self._leave()

    def _enter(self) -> bool:
        """Make this thread the only one at the batches under way. Returns: False: the epoch has ended."""
        with self._lock:
            if self.has_ended:
                return False
            self._user = threading.get_ident()
            return True

    def _leave(self) -> None:
        """Abandon the batches under way if the epoch was closed meanwhile."""
        with self._lock:
            is_over = self.has_ended
            if not is_over:
                self._user = 0
        if is_over:
            self._abandon()

    def _abandon(self) -> None:
        try:
            while self._under_way:
                begun = self._under_way[0][1]
                if begun is not None:
                    abandon(begun)
                self._under_way.popleft()  # now: where Ctrl-C came before, `close` does it again
        finally:
            self._user = 0

    def deliver(self, made: ReadyBatch | None) -> None:
        """Count a batch that the consumer gets now, or, with None, the end.

        Raises: StopIteration: it has ended. RuntimeError: it was cut short.
        """
        if made is None or self.has_ended:
            if self._because is not None and self.delivered < self.order.steps:
                raise cut_short(self._because)
            self.has_stopped = True
            if not self.has_ended:
                self.delivered += self._empty_steps
            self.close()
            raise StopIteration
        self.delivered += made.steps
        self._meter.deliver(made)

    def fail(self) -> None:
        """End it, as the consumer gets an error in place of a batch."""
        if self._user == threading.get_ident():  # Ctrl-C came as it left
            self._user = 0
        self.close()

    def drop(self) -> None:
        """End it, as its consumer is gone."""
        self.has_stopped = True
        self.close()

    def close(self, because: str | None = None) -> None:
        """End it: no more batches are made. Idempotent. Does not wait.

        Args:
            because: its consumer gets this reason in place of a StopIteration. None: it closed this itself.
        """
        if not self.has_ended:
            self._because = because
        self._meter.end_run(self)
        if not self._origin.is_here:  # the lock may be held for ever in a forked child
            self.has_ended = True
            return
        with self._lock:
            self.has_ended = True
            if is_free := not self._user:  # else who makes a batch abandons the others, as it leaves
                self._user = threading.get_ident()
        if self._makers is not None and self._taken < self.order.steps:
            self._makers.stop()
        if is_free:
            self._abandon()

    # batches

    def _made_here(self) -> ReadyBatch | None:
        self._begin_ahead()
        indices, begun = self._under_way[0]
        made = None if begun is None else self._gathered(begun)
        if made is None:
            with self._meter.stage("transform"):
                made = self._whole(self._answer(indices), indices)
        self._under_way.popleft()  # now: where Ctrl-C came before, `_abandon` ends it
        return made

    def _begin_ahead(self) -> None:
        ahead = self._prefetch
        if ahead is None:
            reader = self._train.reader_here()
            size = self.order.batch_size
            ahead = 0 if reader is None else reader.temperature.batches_ahead(size, self._batch_bytes)
        while self._begun < self.order.steps and len(self._under_way) <= ahead:
            indices = self._indices(self._begun)
            self._under_way.append((indices, self._begin(indices)))
            self._begun += 1

    def _begin(self, indices: NDArray[np.int64]) -> Begun | None:
        reader = None if self._slots is None else self._train.reader_here()
        return None if reader is None or self._slots is None else reader.begin(indices, self._slots)

    def _gathered(self, begun: Begun) -> ReadyBatch | None:
        """Return a batch of items that are in the cache. None: they cannot be read after all."""
        started = self._meter.enter("gather")
        try:
            columns: dict[str, ColumnData] = begun.columns()
        except (CorruptSegmentError, OSError):
            return None
        finally:
            self._meter.leave({"gather": time.perf_counter() - started})
        nbytes = sum(map(column_bytes, columns.values()))
        batch = batch_of(self._train.form, columns)
        return ReadyBatch(batch, begun.rows, nbytes, nbytes, begun.published, None)

    def _made_by(self, makers: Makers) -> ReadyBatch | None:
        with self._meter.stage("transform"):
            answer = makers.next()
        if self.has_ended:
            return None
        indices = self._indices(self._taken)
        if answer is not None:
            return self._whole(answer, indices)
        begun = self._begin(indices)
        made = None if begun is None else self._gathered(begun)
        return made or self._whole(self._answer(indices), indices)

    def _instead(self) -> ReadyBatch | None:
        """Return a batch of one item of another step, as all ranks have equally many steps.

        None: none of this rank's items can be made.
        """
        before = [] if self._stands_in is None else [np.array([self._stands_in])]
        steps = itertools.chain(before, self._batches_from(self._taken + 1), self._batches_from(0))
        for indices in steps:
            for index in indices:
                one = np.array([index])
                if (made := self._whole(self._answer(one), one)) is not None:
                    return made
        return None

    def _answer(self, indices: NDArray[np.int64]) -> Answer:
        return answer_of(self._train, indices, self._collate, reads=self._reads)

    def _whole(self, answer: Answer, indices: NDArray[np.int64]) -> ReadyBatch | None:
        """A batch that was made of items, which count as published now. None: all were left out."""
        self._meter.leave_out(answer.left_out)
        if not answer.rows:
            self._error = answer.error
            return None
        if not answer.left_out:
            self._stands_in = int(indices[0])
        leaves: list[Any] = []
        take_apart(answer.batch, leaves)
        nbytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        return ReadyBatch(answer.batch, answer.rows, nbytes, nbytes, time.time(), None)
