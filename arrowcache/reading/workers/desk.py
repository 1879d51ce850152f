"""Desk: the requests that no worker is at yet, and the slots they get.

It owns what waits, and the pattern that batches follow; the ring is the supervisor's. It knows no
process: whoever has a free worker asks for the next request, and comes back for another slot where
what was made outgrew the first one. Not thread-safe.

Guarantees: requests are begun in the order they were added, and one that must be made again before all
later ones; one that nobody wants any more is not begun. Nobody ever waits for a slot.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from arrowcache.reading.workers.packing import Described, Pattern
from arrowcache.reading.workers.request import Request
from arrowcache.reading.workers.shared import SharedRing, Slot

_MANY_BATCHES = 8  # and two for each one in flight: more than prefetching and one in hand need
_SPARE_SLOTS = 6  # whose memory is kept ready beside that of the slots in flight


class Desk:
    """Requests that wait.

    Args:
        batch_size: rows of a batch.
        in_flight: requests that workers have at a time.
        usual_slots: that are in use at a time, with those of the consumer.
    """

    def __init__(self, ring: SharedRing, batch_size: int, in_flight: int, usual_slots: int) -> None:
        self._ring = ring
        self._batch_size, self._in_flight, self._usual_slots = batch_size, in_flight, usual_slots
        self._waiting: list[Request] = []  # by serial
        self._serials = 0
        self.pattern: Pattern | None = None  # until the first batch was made

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_hoarded(self) -> bool:
        """Whether the consumer keeps so much that groups should be small."""
        of_batch = 1 + (self.pattern.arrays if self.pattern is not None else 1)
        return self._ring.in_use > (_MANY_BATCHES + 2 * self._usual_slots) * of_batch

    def add(self, request: Request) -> None:
        """One more, after all others."""
        self._serials += 1
        request.serial = self._serials
        self._waiting.append(request)

    def add_again(self, request: Request) -> None:
        """One that was begun, and has no slot any more: in its place."""
        bisect.insort(self._waiting, request, key=lambda other: other.serial)

    def next(self) -> Request | None:
        """The next one to be begun, with a slot if it is known what batches are like; None: there is none."""
        while self._waiting:
            request = self._waiting.pop(0)
            if request.future.done() or request.epoch <= self._ring.ended:
                request.skip()
                continue
            try:
                if self.pattern is not None:
                    slot = Slot(self._ring, self.pattern.sizes(request.rows))
                    self._ring.keep((self._in_flight + _SPARE_SLOTS) * slot.nbytes)
                    request.slots.append(slot)
            except MemoryError as error:
                request.fail(error)
                continue
            return request
        return None

    def grant(self, request: Request, columns: Sequence[Described]) -> None:
        """Give a request another slot, which has room for what was made.

        Raises: ValueError: a batch is not like the first one. MemoryError: there is none.
        """
        if self.pattern is None:
            self.pattern = Pattern(columns, request.rows, self._batch_size)
            self._ring.keep(self._usual_slots * self.pattern.nbytes())
        self.pattern.check(columns, request.rows)
        self.pattern.note(columns, request.rows)
        request.slots.append(Slot(self._ring, self.pattern.sizes_for(columns, request.rows)))

    def reject_all(self, error: BaseException) -> None:
        """Begin none of those that wait."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.fail(error)
