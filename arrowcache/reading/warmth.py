"""Warmth: having the pages of a snapshot's mapped segments in memory ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from arrowcache.reading.mapped import MappedSegment
from arrowcache.storage.mapping import populate, will_need, will_read_on

_TOUCH_BYTES = 8 << 20  # between two looks whether it is still wanted


class Warmed:
    """What a snapshot can be asked to have in memory."""

    _found: list[MappedSegment | None]
    _closed: bool
    _released: int

    def warm(self, index: int, is_wanted: Callable[[], bool]) -> bool:
        """Have a mapped segment's pages in memory and in the page tables, ahead of their use.

        Blocks: while the disk reads; ends early when `is_wanted` says no more, or the snapshot is closed.
        Returns: whether it did not.
        """
        address, nbytes = self._memory_of(index)
        will_read_on(address, nbytes)
        is_warm = True
        for start in range(0, nbytes, _TOUCH_BYTES):
            if not is_wanted() or self._closed or index < self._released:
                return False
            is_warm &= populate(address + start, min(_TOUCH_BYTES, nbytes - start))
        if (found := self._found[index]) is not None:
            found.warm[0] = is_warm
        return True

    def announce(self, index: int) -> None:
        """Have the disk begin to read a mapped segment."""
        address, nbytes = self._memory_of(index)
        if nbytes and index >= self._released:
            will_need(address, nbytes)

    def _note_cold(self, indices: Iterable[int]) -> None:
        """They were read; the next epoch may have them mapped when the kernel took their pages back."""
        for index in indices:
            if (found := self._found[index]) is not None:
                found.warm[0] = False

    def _memory_of(self, index: int) -> tuple[int, int]:
        found = self._found[index]
        return (0, 0) if found is None or not found.file.address else (found.file.address, found.file.nbytes)
