"""Order: the rows of each batch. Pure: values in, row ids out, no clock.

An order is a function of (segment sizes, seed, epoch, rank, world size): any part of an epoch can
be computed without what came before, so resuming anywhere costs nothing. An epoch is a stream of
positions 0, 1, 2, ...: passes over all selected rows (row_filter.py), one after another, each with a row
order of its own (shuffle.py). `Stream` is what is left of it: from the plan's position on, without the rows
of segments that have left the cache. It depends on neither batch size (but see `Plan.block_rows`) nor
ranks: both may be others after a resume. `EvenOrder` cuts it: step `s` of rank `r` takes rows
[(s * world_size + r) * batch_size, ... + batch_size). budget.py has the order whose steps differ in their
number of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arrowcache.lifetimes import cached_property
from arrowcache.reading.plan import Plan
from arrowcache.reading.row_filter import Selected
from arrowcache.reading.shuffle import RowOrder, starts_of
from arrowcache.storage.layout import SegmentInfo

_PART_ROWS = 8192  # of the planned stream, looked at at once where rows are missing


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each step that one rank takes."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size):
            raise ValueError(f"rank={self.rank} must lie in [0, world_size={self.world_size})")


class Stream:
    """The rows of an epoch that are left: which of them comes when, and from which position.

    Nothing is missing of a fresh epoch. Where segments are missing, a pass is looked at in parts, once it is
    reached. Rows are numbers among the selected rows of the segments that are present. Several threads may
    ask.

    Args:
        present: those of the plan's segments that are present, oldest first. None means all.
    """

    def __init__(self, plan: Plan, present: Sequence[SegmentInfo] | None = None) -> None:
        self._first, self._end, self._pass_rows = plan.position, plan.stream_rows, plan.pass_rows
        self._pass = lru_cache(maxsize=2)(plan.row_order)  # the current and the next one
        self.selected, self.segments = plan.selected, len(plan.rows)
        self.is_whole = present is None or len(present) == len(plan.seqs)
        if present is None or self.is_whole:
            return
        is_there = plan.are_present(present)
        self.selected = Selected(plan.seqs[is_there], plan.rows[is_there], plan.bitmaps)
        self.segments = len(present)
        starts, present_starts = starts_of(plan.counts), starts_of(plan.counts * is_there)
        self._present_rows = int(present_starts[-1])  # of a pass
        self._segments_before = starts_of(is_there)  # present ones before each planned one
        shift, of_pass, pass_rows = (present_starts - starts)[:-1], self._pass, self._pass_rows

        @lru_cache(maxsize=4)
        def part(first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            ids = _planned(of_pass, pass_rows, first, stop)
            segments = starts.searchsorted(ids, side="right") - 1
            found = is_there[segments]
            return (ids + shift[segments])[found], found.nonzero()[0] + first

        @lru_cache(maxsize=3)  # the first, the current and the next pass
        def parts(number: int) -> tuple[list[int], NDArray[np.int64]]:
            """Return the edges of a pass' parts, and the number of present rows before each."""
            first = max(number * pass_rows, plan.position)
            stop = min((number + 1) * pass_rows, plan.stream_rows)
            edges = [*range(first, stop, _PART_ROWS), stop]
            return edges, starts_of([len(part(*some)[0]) for some in pairwise(edges)])

        self._part, self._parts = part, parts

    @cached_property
    def rows(self) -> int:
        """Return the number of rows that are left, of all ranks together."""
        if self.is_whole:
            return self._end - self._first
        if not self._present_rows or self._first >= self._end:
            return 0
        first_pass, last_pass = self._first // self._pass_rows, (self._end - 1) // self._pass_rows
        rows = self._first_pass_rows
        if last_pass > first_pass:
            rows += (last_pass - first_pass - 1) * self._present_rows + int(self._parts(last_pass)[1][-1])
        return rows

    @cached_property
    def _first_pass_rows(self) -> int:
        return int(self._parts(self._first // self._pass_rows)[1][-1])

    def part(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows present at positions first..stop-1 of the planned stream, and their positions."""
        if not self.is_whole:
            return self._part(first, stop)
        return _planned(self._pass, self._pass_rows, first, stop), np.arange(first, stop)

    def runs(self, first: int, size: int, count: int, apart: int) -> NDArray[np.int64] | None:
        """Return `count` runs of `size` rows whose begins are so far apart; None where that takes longer."""
        number, place = divmod(self._first + first, self._pass_rows)
        stop = self._first + first + (count - 1) * apart + size
        if not self.is_whole or not count or stop > min((number + 1) * self._pass_rows, self._end):
            return None
        if apart == size:
            return self._pass(number)(place, size * count)  # one run of places takes less time
        return self._pass(number)(place, size, count, apart)

    def ids(self, first: int, last: int) -> NDArray[np.int64]:
        """Return rows first..last-1 of those left. After the last one comes the first one again.

        Of a whole epoch that is the first row of the epoch.
        """
        pieces = [np.empty(0, np.int64)]
        while first < last:
            if self.is_whole:
                position = (self._first + first) % self._end
                stop = min(position + last - first, self._end)
                pieces.append(_planned(self._pass, self._pass_rows, position, stop))
            else:
                pieces.append(self._from(first % self.rows)[0][: last - first])
            first += len(pieces[-1])
        return np.concatenate(pieces)

    def positions(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions in the planned stream of rows first..last-1 of those left."""
        if self.is_whole:
            return np.arange(self._first + first, self._first + last)
        pieces = [np.empty(0, np.int64)]
        while first < last:
            pieces.append(self._from(first)[1][: last - first])
            first += len(pieces[-1])
        return np.concatenate(pieces)

    def position_after(self, rows: int) -> int:
        """Return the position in the planned stream after a number of rows."""
        rows = min(rows, self.rows)
        if self.is_whole:
            return self._first + rows
        return int(self._from(rows - 1)[1][0]) + 1 if rows else self._first

    def segments_span(self, first: int, last: int, end: int) -> range:
        """Return indices of the present segments in use at positions first..last, if `end` is the last one.

        It is all segments while a later pass will read them.
        """
        number = first // self._pass_rows
        before = number * self._pass_rows
        if end > before + self._pass_rows:
            return range(self.segments)
        order = self._pass(number)
        start, stop = order.span(first - before).start, order.span(last - before).stop
        if self.is_whole:
            return range(start, stop)
        return range(int(self._segments_before[start]), int(self._segments_before[stop]))

    def _from(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return some of the rows that are left, from one on, and their positions."""
        number, place = self._first // self._pass_rows, row
        if row >= self._first_pass_rows:
            later, place = divmod(row - self._first_pass_rows, self._present_rows)
            number += 1 + later
        edges, before = self._parts(number)
        index = int(before.searchsorted(place, side="right")) - 1
        ids, positions = self._part(edges[index], edges[index + 1])
        return ids[place - before[index] :], positions[place - before[index] :]


def _planned(of_pass: Callable[[int], RowOrder], pass_rows: int, first: int, stop: int) -> NDArray[np.int64]:
    """Return the planned rows at positions first..stop-1."""
    pieces = [np.empty(0, np.int64)]
    while first < stop:
        number, place = divmod(first, pass_rows)
        pieces.append(of_pass(number)(place, min(stop - first, pass_rows - place)))
        first += len(pieces[-1])
    return np.concatenate(pieces)


class Order(ABC):
    """The remaining steps of one rank in an epoch: row ids of a snapshot. Several threads may ask.

    `steps` is their number, the same for all ranks.
    """

    steps: int
    selected: Selected  # of the segments that are present

    @property
    def missing(self) -> int:
        """Rows of the rest of the epoch whose segments have left the cache."""
        return 0

    def batches(self, first: int, last: int) -> NDArray[np.int64]:
        """Row ids of steps first..last-1 of this rank, one after another."""
        return self.selected.ids(self.numbers(first, last))

    @abstractmethod
    def numbers(self, first: int, last: int) -> NDArray[np.int64]:
        """The rows of steps first..last-1, as numbers among the selected rows."""

    @abstractmethod
    def rows_of(self, steps: range) -> int:
        """Return the number of rows of some steps of this rank."""

    @abstractmethod
    def remaining(self, steps: int) -> Plan:
        """Return the part of the plan after a number of steps of all ranks, where a resume goes on."""

    @abstractmethod
    def segments_span(self, step: int) -> range:
        """Return indices of the segments in use at a step, of all ranks together.

        Segments before `start` are not read by this step or later ones; segments from `stop` on not by this
        step or earlier ones of its pass. It is all segments while a later pass or padding will read them.
        """


class EvenOrder(Order):
    """An order whose steps all have `batch_size` rows of each rank.

    Rows of missing segments are skipped, and the others are cut into full steps, so that all ranks have the
    same number.

    Args:
        drop_last: leave out an incomplete last step. Otherwise it is short (one rank), or padded by wrapping
            around to the first rows (several).
        present: the plan's segments that are present, oldest first. None means all.
    """

    def __init__(
        self,
        plan: Plan,
        batch_size: int,
        shard: Shard,
        drop_last: bool,
        present: Sequence[SegmentInfo] | None = None,
    ) -> None:
        self._plan = plan = plan if present is None else plan.among(present)
        self.batch_size, self._shard = batch_size, shard
        self._stream = Stream(plan, present)
        self.selected, self.rows = self._stream.selected, self._stream.rows
        self.is_whole = self._stream.is_whole
        self.step_rows = batch_size * shard.world_size  # of all ranks together
        whole, rest = divmod(self.rows, self.step_rows)
        self.steps = whole if drop_last else whole + (rest > 0)
        self._is_padded = shard.world_size > 1 and self.steps * self.step_rows > self.rows
        self._end = self.position_after(self.steps)

    @property
    def missing(self) -> int:
        return self._plan.stream_rows - self._plan.position - self.rows

    def numbers(self, first: int, last: int) -> NDArray[np.int64]:
        """The rows of steps first..last-1, one after another, as numbers among the selected rows.

        Returns: ((last - first) * batch_size,), less if the epoch's very last batch is short.
        """
        steps, shard, size = max(0, min(last, self.steps) - first), self._shard, self.batch_size
        start, stop = first * self.step_rows, (first + steps) * self.step_rows
        runs = self._stream.runs(start + shard.rank * size, size, steps, self.step_rows)
        if runs is not None:
            return runs
        if shard.world_size == 1:
            return self._stream.ids(start, min(stop, self.rows))
        ids = self._stream.ids(start, stop).reshape(steps, shard.world_size, size)
        return ids[:, shard.rank].ravel()

    def rows_of(self, steps: range) -> int:
        rows = len(steps) * self.batch_size
        is_short = self._shard.world_size == 1 and self.steps - 1 in steps
        return rows - max(0, self.steps * self.batch_size - self.rows) if is_short else rows

    def remaining(self, steps: int) -> Plan:
        return self._plan.at(self.position_after(steps))

    def positions(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions in the planned stream of rows first..last-1 of those left."""
        return self._stream.positions(first, last)

    def position_after(self, steps: int) -> int:
        """Return the epoch's position after a number of steps of all ranks."""
        return self._stream.position_after(steps * self.step_rows)

    def segments_span(self, step: int) -> range:
        segments = self._stream.segments
        if step >= self.steps:
            return range(segments, segments)
        if self._is_padded:
            return range(segments)
        first, last = self.position_after(step), self.position_after(step + 1) - 1
        return self._stream.segments_span(first, last, self._end)
