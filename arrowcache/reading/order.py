"""Order: the rows of each batch. Pure: values in, row ids out, no clock.

An order is a function of (segment sizes, seed, epoch, rank, world size): any part of an epoch can
be computed without what came before, so resuming anywhere costs nothing. An epoch is a stream of
positions 0, 1, 2, ...: passes over all selected rows (selected.py), one after another, each with a row
order of its own (shuffle.py). Step `s` of rank `r` takes positions [start + (s * world_size + r) *
batch_size, ... + batch_size). The stream itself depends on neither batch size (but see `Plan.block_rows`)
nor ranks: both may be others after a resume. budget.py has the order whose steps differ in their number of
rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.plan import Plan
from arrowcache.reading.segment_arrays import are_among
from arrowcache.reading.selected import Selected
from arrowcache.reading.shuffle import starts_of
from arrowcache.storage.layout import SegmentInfo

_CHUNK_ROWS = 8192  # of the planned order, looked at at once


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each step that one rank takes."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size):
            raise ValueError(f"rank={self.rank} must lie in [0, world_size={self.world_size})")


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
    def rest(self, steps: int) -> Plan:
        """Return the part of the plan after a number of steps of all ranks, where a resume goes on."""

    @abstractmethod
    def segments_span(self, step: int) -> range:
        """Return indices of the segments in use at a step, of all ranks together.

        Segments before `start` are not read by this step or later ones; segments from `stop` on not by this
        step or earlier ones of its pass. It is all segments while a later pass or padding will read them.
        """


class EvenOrder(Order):
    """An order whose steps all have `batch_size` rows of each rank.

    Args:
        rows: rows that are left, of all ranks together.
        drop_last: leave out an incomplete last step. Otherwise it is short (one rank), or padded by wrapping
            around to the first rows (several).
    """

    def __init__(self, plan: Plan, rows: int, batch_size: int, shard: Shard, drop_last: bool) -> None:
        self._plan, self.rows, self.batch_size, self._shard = plan, rows, batch_size, shard
        self.step_rows = batch_size * shard.world_size  # of all ranks together
        whole, rest = divmod(rows, self.step_rows)
        self.steps = whole if drop_last else whole + (rest > 0)
        self._is_padded = shard.world_size > 1 and self.steps * self.step_rows > rows

    def numbers(self, first: int, last: int) -> NDArray[np.int64]:
        """The rows of steps first..last-1, one after another, as numbers among the selected rows.

        Returns: ((last - first) * batch_size,), less if the epoch's very last batch is short.
        """
        steps, shard = max(0, min(last, self.steps) - first), self._shard
        start, stop = first * self.step_rows, (first + steps) * self.step_rows
        if shard.world_size == 1:
            return self._stream(start, min(stop, self.rows))
        ids = self._stream(start, stop).reshape(steps, shard.world_size, self.batch_size)
        return ids[:, shard.rank].ravel()

    def rows_of(self, steps: range) -> int:
        rows = len(steps) * self.batch_size
        is_short = self._shard.world_size == 1 and self.steps - 1 in steps
        return rows - max(0, self.steps * self.batch_size - self.rows) if is_short else rows

    def rest(self, steps: int) -> Plan:
        return self._plan.at(self.position_after(steps))

    @abstractmethod
    def _stream(self, first: int, last: int) -> NDArray[np.int64]:
        """Return rows first..last-1 of the remaining stream, and after its end the padding rows."""

    @abstractmethod
    def positions(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the positions in the planned stream of rows first..last-1 of the remaining one."""

    @abstractmethod
    def position_after(self, steps: int) -> int:
        """Return the epoch's position after a number of steps of all ranks."""


class EpochOrder(EvenOrder):
    """The order of a plan whose segments are all present; padding repeats the epoch's first rows."""

    def __init__(self, plan: Plan, batch_size: int, shard: Shard, drop_last: bool) -> None:
        super().__init__(plan, plan.stream_rows - plan.position, batch_size, shard, drop_last)
        self.selected = plan.selected
        self._segments = range(len(plan.rows))
        self._pass_rows = plan.pass_rows
        self._start, self._end = plan.position, plan.stream_rows
        self._pass = lru_cache(maxsize=2)(plan.row_order)  # the current and the next one

    def numbers(self, first: int, last: int) -> NDArray[np.int64]:
        steps, size, apart = max(0, min(last, self.steps) - first), self.batch_size, self.step_rows
        start = self._start + first * apart + self._shard.rank * size
        stop = start + (steps - 1) * apart + size
        number, place = divmod(start, self._pass_rows)
        if steps and stop <= min((number + 1) * self._pass_rows, self._end):
            if apart == size:
                return self._pass(number)(place, size * steps)  # one run of places takes less time
            return self._pass(number)(place, size, steps, apart)
        return super().numbers(first, last)

    def _stream(self, first: int, last: int) -> NDArray[np.int64]:
        pieces = [np.empty(0, np.int64)]
        while first < last:
            position = (self._start + first) % self._end
            number, place = divmod(position, self._pass_rows)
            count = min(last - first, self._pass_rows - place, self._end - position)
            pieces.append(self._pass(number)(place, count))
            first += count
        return np.concatenate(pieces)

    def positions(self, first: int, last: int) -> NDArray[np.int64]:
        return np.arange(self._start + first, self._start + last)

    def position_after(self, steps: int) -> int:
        return min(self._end, self._start + steps * self.step_rows)

    def segments_span(self, step: int) -> range:
        if step >= self.steps:
            return self._segments[len(self._segments) :]
        first, last = self.position_after(step), self.position_after(step + 1) - 1
        number = first // self._pass_rows
        if self._is_padded or self.position_after(self.steps) > (number + 1) * self._pass_rows:
            return self._segments
        order, before = self._pass(number), number * self._pass_rows
        return self._segments[order.span(first - before).start : order.span(last - before).stop]


class Present:
    """The segments of a plan that are still present, and the numbers of their selected rows."""

    def __init__(self, plan: Plan, present: Sequence[SegmentInfo]) -> None:
        self._starts = starts_of(plan.counts)
        self._is_there = are_among(plan.seqs, np.array([segment.seq for segment in present], np.int64))
        self.segments_before = starts_of(self._is_there)  # number of present segments before each planned one
        self.selected = Selected(plan.seqs[self._is_there], plan.rows[self._is_there], plan.bitmaps)
        rows = plan.counts * self._is_there
        self.starts = starts_of(rows)  # of each planned segment, in numbers of present rows
        self.rows = int(self.starts[-1])
        self._shift = self.starts[:-1] - self._starts[:-1]
        self._are_all = bool(self._is_there.all())

    def renumber(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the numbers of the planned rows that are present, among present ones, and a mask of them."""
        if self._are_all:
            return ids, np.ones(len(ids), np.bool_)
        segments = self._starts.searchsorted(ids, side="right") - 1
        is_there = self._is_there[segments]
        return (ids + self._shift[segments])[is_there], is_there


class ResumedOrder(EvenOrder):
    """The order of a plan over its segments that are still present.

    Rows of missing segments are skipped, and the remaining rows are cut into full steps anew, so that all
    ranks have the same number. Every whole pass has the same number of present rows. A pass is taken in
    chunks, when it is reached. Padding repeats the first rows.
    """

    def __init__(
        self, plan: Plan, segments: Sequence[SegmentInfo], batch_size: int, shard: Shard, drop_last: bool
    ) -> None:
        self._present = Present(plan, segments)
        self.selected = self._present.selected
        self._planned = EpochOrder(plan.at(0), 1, Shard(), drop_last=False)  # steps are positions
        planned, present, pass_rows = self._planned, self._present, int(plan.counts.sum())

        @lru_cache(maxsize=4)
        def chunk(first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            """Return the rows present in a part of the planned stream, and their positions."""
            ids, is_there = present.renumber(planned.numbers(first, stop))
            return ids, is_there.nonzero()[0] + first

        @lru_cache(maxsize=3)  # the first, the current and the next pass
        def chunks(number: int) -> tuple[list[int], NDArray[np.int64]]:
            """Return the bounds of a pass' chunks, and the number of present rows before each."""
            first = max(number * pass_rows, plan.position)
            stop = min((number + 1) * pass_rows, plan.stream_rows)
            edges = [*range(first, stop, _CHUNK_ROWS), stop]
            counts = [len(chunk(*some)[0]) for some in pairwise(edges)]
            return edges, starts_of(counts)

        self._chunk, self._chunks, self._pass_rows = chunk, chunks, pass_rows
        rows = self._first_rows = 0  # rows of the position's pass
        if self._present.rows and plan.position < plan.stream_rows:
            self._first_pass, last_pass = plan.position // pass_rows, (plan.stream_rows - 1) // pass_rows
            rows = self._first_rows = int(self._chunks(self._first_pass)[1][-1])
            if last_pass > self._first_pass:
                rows += (last_pass - self._first_pass - 1) * self._present.rows
                rows += int(self._chunks(last_pass)[1][-1])
        super().__init__(plan, rows, batch_size, shard, drop_last)

    @property
    def missing(self) -> int:
        return self._plan.stream_rows - self._plan.position - self.rows

    def _from(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return some of the remaining rows, from one on, and their positions."""
        number, place = self._first_pass, row
        if row >= self._first_rows:
            later, place = divmod(row - self._first_rows, self._present.rows)
            number += 1 + later
        edges, before = self._chunks(number)
        index = int(before.searchsorted(place, side="right")) - 1
        ids, positions = self._chunk(edges[index], edges[index + 1])
        return ids[place - before[index] :], positions[place - before[index] :]

    def _stream(self, first: int, last: int) -> NDArray[np.int64]:
        return self._stream_and_positions(first, last)[0]

    def _stream_and_positions(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows first..last-1 of the remaining stream, as of `_stream`, and their positions."""
        ids, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while first < last:
            some, their_positions = self._from(first % self.rows)
            ids.append(some[: last - first])
            positions.append(their_positions[: last - first])
            first += len(ids[-1])
        return np.concatenate(ids), np.concatenate(positions)

    def positions(self, first: int, last: int) -> NDArray[np.int64]:
        return self._stream_and_positions(first, last)[1]

    def position_after(self, steps: int) -> int:
        rows = min(steps * self.step_rows, self.rows)
        return int(self._from(rows - 1)[1][0]) + 1 if rows else self._plan.position

    def segments_span(self, step: int) -> range:
        before = self._present.segments_before
        if self._is_padded:
            return range(int(before[-1]))
        first, last = self.position_after(step), self.position_after(step + 1) - 1
        spans = [self._planned.segments_span(position) for position in (first, max(first, last))]
        start, stop = min(span.start for span in spans), max(span.stop for span in spans)  # of two passes
        return range(int(before[start]), int(before[stop]))


def order_of(
    plan: Plan, present: Sequence[SegmentInfo], batch_size: int, shard: Shard, drop_last: bool
) -> EvenOrder:
    """Return the order of a plan over the segments still present, with row ids of a snapshot of these."""
    plan = plan.among(present)
    if len(present) == len(plan.seqs):
        return EpochOrder(plan, batch_size, shard, drop_last)
    return ResumedOrder(plan, present, batch_size, shard, drop_last)
