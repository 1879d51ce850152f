"""Remainder: the steps of a planned epoch of which segments have left the cache.

A step keeps its number, whatever is gone. So workers that resume an epoch need not know of each other how
far each had come: none takes a row that another one has delivered. Of a step of which rows are gone, the
others are dealt out among the ranks anew, evenly; a step that has fewer rows than there are ranks is left
out by all. So ranks have equally many steps, if they agree on what is there. Pure: values in, row ids out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.order import EpochOrder, Present, Shard
from arrowcache.reading.plan import Plan
from arrowcache.storage.layout import SegmentInfo

_CHUNK_ROWS = 8192  # of the order, looked at at once


class Remainder:
    """What is left of each step, in the numbering of a snapshot of what is there.

    Args:
        plan: of the epoch, from its beginning.
        present: its segments that are there, oldest first.
        batch_size, shard, drop_last: of its order.
    """

    def __init__(
        self, plan: Plan, present: Sequence[SegmentInfo], batch_size: int, shard: Shard, drop_last: bool
    ) -> None:
        self._order = EpochOrder(plan, batch_size, shard, drop_last)
        self._of_all_ranks = EpochOrder(plan, batch_size * shard.world_size, Shard(), drop_last)
        self._batch_size, self._shard = batch_size, shard
        self._present = Present(plan, present)
        self.gone = len(plan.seqs) - len(present)  # planned segments that are not there

    def rows_of(self, step: int) -> NDArray[np.int64]:
        """This rank's row ids of a step; none: it is left out."""
        if not self.gone:
            return self._order.batches(step, step + 1)
        size, world = self._batch_size, self._shard.world_size
        ids, _ = self._present.renumber(self._of_all_ranks.batches(step, step + 1))
        if len(ids) < world:
            return ids[:0]
        if len(ids) == size * world:
            return ids[self._shard.rank * size : (self._shard.rank + 1) * size]
        return np.array_split(ids, world)[self._shard.rank]

    def first_segment(self, step: int) -> int:
        """No segment before this one of the snapshot is read by this step or a later one."""
        return int(self._present.segments_before[self._order.segments_span(step).start])

    def lost_rows(self, steps: range) -> int:
        """Rows of this rank's part of these steps whose segments are gone. Walks the order, if any are."""
        if not self.gone:
            return 0
        size, lost = self._batch_size, 0
        at_once = max(1, _CHUNK_ROWS // size)
        for first in range(steps.start, steps.stop, at_once):
            ids = self._order.batches(first, min(first + at_once, steps.stop))
            step = first + np.arange(len(ids)) // size
            mine = (step - steps.start) % steps.step == 0
            lost += int((mine & ~self._present.renumber(ids)[1]).sum())
        return lost
