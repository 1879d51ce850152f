"""Request: rows that workers are asked to make into batches, and what came of it.

It owns the memory that it takes: where its row ids stand, and the slots that it was given, the last of
which is to be used. It ends once: delivered, failed or skipped, and gives its memory back then; but
what a worker may still write into is never given back before that has said so or is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.future import Future
from arrowcache.reading.workers.channel import Message
from arrowcache.reading.workers.packing import Described, unpack
from arrowcache.reading.workers.shared import Block, SharedRing, Slot


class Finished:
    """What came of a request: its batches lie in a slot.

    `seconds` are those of each stage in the worker; `nbytes` what it gathered.
    """

    def __init__(self, answer: Message, columns: Sequence[Described], slot: Slot) -> None:
        self._columns, self._slot = columns, slot
        self.nbytes: int = answer["nbytes"]
        self.seconds: dict[str, float] = answer["seconds"]
        self.is_cold: bool = answer["cold"]

    def batch(self, rows: slice) -> dict[str, Any]:
        """Some rows as a batch, whose arrays own their part of the slot. All before `close`."""
        batch = {}
        for name, kind, arrays in self._columns:
            views = [self._slot.array(name, i, dtype, shape, rows) for i, (dtype, shape) in enumerate(arrays)]
            batch[name] = unpack(kind, views)
        return batch

    def close(self) -> None:
        """Every batch was handed out."""
        self._slot.close()


@dataclass(slots=True, eq=False)
class Request:
    """Rows to be made into batches.

    `serial` is its place in the order of all; `oldest`: segments of the epoch before that may be let go.
    """

    epoch: int
    step: int
    rows: int
    oldest: int
    ring: SharedRing
    ids: Block
    future: Future[Finished] = field(default_factory=Future)
    serial: int = 0
    deaths: int = 0  # of workers, while they made it
    slots: list[Slot] = field(default_factory=list)

    @classmethod
    def of(cls, ring: SharedRing, epoch: int, step: int, ids: NDArray[np.int64], oldest: int) -> Request:
        """A request for some rows.

        Raises: MemoryError: there is none for their ids.
        """
        block = ring.take(ids.nbytes)
        ring.array(block, np.int64, ids.shape)[:] = ids
        return cls(epoch, step, len(ids), oldest, ring, block)

    def message(self) -> Message:
        """What a worker is told."""
        return {
            "do": "make",
            "id": self.serial,
            "epoch": self.epoch,
            "ids": (self.ids.offset, self.rows),
            "released": self.oldest,
            "slot": self.slots[-1].places() if self.slots else None,
        }

    def deliver(self, answer: Message) -> None:
        """It was made, into its last slot."""
        columns = [Described.from_message(text) for text in answer["columns"]]
        slot = self.slots.pop()
        self._give_back()
        if not self.future.done() and self.future.begin():
            self.future.set_result(Finished(answer, columns, slot))
        else:
            slot.close()

    def skip(self) -> None:
        """It is not wanted any more."""
        self._give_back()
        self.future.cancel()

    def fail(self, error: BaseException) -> None:
        """It is not made."""
        self.reject(error)
        self._give_back()

    def reject(self, error: BaseException) -> None:
        """It is not made, but a worker is at it still."""
        if not self.future.done() and self.future.begin():
            self.future.set_exception(error)

    def free_slots(self) -> None:
        """Nobody writes into them any more."""
        for slot in self.slots:
            slot.close()
        self.slots.clear()

    def abandon_slots(self) -> None:
        """Somebody may write into them for ever."""
        for slot in self.slots:
            slot.abandon()
        self.slots.clear()

    def _give_back(self) -> None:
        self.free_slots()
        self.ring.give(self.ids)
