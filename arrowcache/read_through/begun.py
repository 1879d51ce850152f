"""Begun: items that are being gathered into a slot, for a loader that begins some batches ahead.

It keeps its snapshot open until the rows are there, or it is cancelled. It does not wait until somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from arrowcache.reading.gather import Gather
from arrowcache.reading.slots import Slot
from arrowcache.reading.temperature import Temperature
from arrowcache.reading.values import ColumnData


class Begun:
    """Some items on their way.

    Args:
        gather: brings the columns of variable length, and those of fixed width into the slot.
        names: the columns, in order.
        temperature: learns how many rows were not in memory.
        published: mean time at which the items were published, in seconds since 1970.
    """

    def __init__(
        self,
        gather: Gather,
        slot: Slot,
        names: Sequence[str],
        temperature: Temperature,
        rows: int,
        published: float,
    ) -> None:
        self._gather, self._slot, self._names = gather, slot, names
        self._temperature, self.rows, self.published = temperature, rows, published

    def is_ready(self) -> bool:
        """True if `columns` would not wait. Raises: as `columns`."""
        if self._gather.is_in_parts:
            self._gather.go_on()
        return self._gather.take(0)

    def columns(self) -> dict[str, ColumnData]:
        """Return the items' columns: name -> (n, *shape), a list of texts or bytes, or `Values`.

        Blocks: while rows come from the disk.
        Raises: CorruptSegmentError: a segment is damaged. OSError: its file cannot be opened.
        """
        self._gather.wait()
        self._temperature.note(self.rows, self._gather.missed)
        found = self._slot.arrays() | self._gather.values()
        return {name: found[name] for name in self._names}

    def cancel(self, seconds: float | None = None) -> bool:
        """End it. Returns, blocks: as `Gather.cancel`."""
        return self._gather.cancel(seconds)
