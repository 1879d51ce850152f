"""Request: rows that workers are asked to make into batches, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from arrowcache.reading.workers.channel import Message
from arrowcache.reading.workers.packing import Described, unpack
from arrowcache.reading.workers.shared import Block, Slot


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
    """Rows to be made into batches. `ids` is where they stand."""

    serial: int
    epoch: int
    step: int
    rows: int
    oldest: int
    ids: Block
    future: Future[Finished]
    deaths: int = 0
    slots: list[Slot] = field(default_factory=list)  # the last one is to be used
