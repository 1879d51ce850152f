"""Order: which rows go into which batch. Pure: values in, row ids out, no clock.

An order is a function of (segment sizes, seed, epoch, rank, world size): any part of an epoch can
be computed without what came before, so resuming anywhere costs nothing. An epoch is a stream of
positions 0, 1, 2, ...: passes over all rows, one after another, each with a row order of its own
(shuffle.py). Step `s` of rank `r` takes positions [start + (s * world_size + r) * batch_size, ... +
batch_size). The stream itself depends on neither batch size (but see `block_rows`) nor ranks: both
may be others after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.shuffle import Blocks, Permutation, RowOrder, Sequential, Window

SHUFFLES = ("rows", "window", "blocks", None)


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of each step one rank takes."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size):
            raise ValueError(f"rank={self.rank} must lie in [0, world_size={self.world_size})")


class EpochOrder:
    """The batches of one epoch, for one rank. Several threads may ask at once.

    Args:
        segment_rows: of the snapshot's segments, oldest first, each at least 1.
        batch_size: of one rank.
        shuffle: "rows" (all of them, uniformly), "window", "blocks", or None (oldest first).
        seed, epoch: select the shuffle.
        share: this rank's.
        epoch_rows: exactly so many rows: fewer than there are are the first of a pass (if "rows", a
            draw without replacement), more are reshuffled passes. None: one pass.
        drop_last: leave out an incomplete last step; else it is short (one rank) or padded by
            wrapping around to the epoch's first rows (several).
        window_rows: what a "window" spans, about.
        block_rows: of a run of "blocks"; None: batch_size. A resume needs that of the epoch's begin.
        start: the position of the stream to go on from; steps count from there.

    Raises: ValueError: no such shuffle, no `window_rows` for it, or no such position.
    """

    def __init__(
        self,
        segment_rows: Sequence[int] | NDArray[np.int64],
        batch_size: int,
        *,
        shuffle: str | None,
        seed: int,
        epoch: int,
        share: Share | None = None,
        epoch_rows: int | None = None,
        drop_last: bool = True,
        window_rows: int | None = None,
        block_rows: int | None = None,
        start: int = 0,
    ) -> None:
        segments = np.asarray(segment_rows, np.int64)
        self._segments = range(len(segments))
        self.rows = int(segments.sum())
        self.batch_size = batch_size
        self.epoch_rows = self.rows if epoch_rows is None else epoch_rows
        if shuffle not in SHUFFLES:
            raise ValueError(f"shuffle={shuffle!r} is unknown: use one of {SHUFFLES}")
        if shuffle == "window" and window_rows is None:
            raise ValueError('shuffle="window" needs window_rows')
        if not (0 <= start <= self.epoch_rows):
            raise ValueError(f"start={start} must lie in [0, epoch_rows={self.epoch_rows}]")
        self._share = share or Share()
        self._start = start
        self._step_rows = batch_size * self._share.world_size
        whole, rest = divmod(self.epoch_rows - start, self._step_rows)
        self.steps = whole if drop_last else whole + (rest > 0)

        def row_order(number: int) -> RowOrder:  # without self: a cycle would keep it for longer
            key = (epoch, number)
            if shuffle == "rows":
                return Permutation(int(segments.sum()), seed, key, len(segments))
            if shuffle == "window":
                assert window_rows is not None
                return Window(segments, window_rows, seed, key)
            if shuffle == "blocks":
                return Blocks(segments, block_rows or batch_size, seed, key)
            return Sequential(segments)

        self._pass = lru_cache(maxsize=2)(row_order)  # the current and the next one

    def batches(self, first: int, last: int) -> NDArray[np.int64]:
        """Row ids of steps first..last-1, one after another.

        Returns: ((last - first) * batch_size,), less if the epoch's very last batch is short.
        """
        size, apart = self.batch_size, self._step_rows
        steps = max(0, min(last, self.steps) - first)
        if not steps:
            return np.empty(0, np.int64)
        start = self._start + first * apart + self._share.rank * size
        stop = start + (steps - 1) * apart + size
        number, place = divmod(start, self.rows)
        if stop <= min((number + 1) * self.rows, self.epoch_rows):
            return self._pass(number)(place, size, steps, apart)
        positions = range(start, stop, apart)
        ids = [
            self._pass(number)(place, count)
            for each in positions
            for number, place, count in self._parts(each)
        ]
        return np.concatenate(ids)

    def position_after(self, steps_done: int) -> int:
        """The stream's position after so many steps of all ranks: the `start` of a resume."""
        return min(self.epoch_rows, self._start + steps_done * self._step_rows)

    def segments_span(self, step: int) -> range:
        """Indices of the segments in use at a step, of all ranks together.

        Segments before `start` are not read by this step or later ones; those from `stop` on not by
        this step or earlier ones of its pass. All, while a later pass or padding is to read them.
        """
        if step >= self.steps:
            return self._segments[len(self._segments) :]
        first, last = self.position_after(step), self.position_after(step + 1) - 1
        number = first // self.rows
        end = self._start + self.steps * self._step_rows
        is_padded = end > self.epoch_rows and self._share.world_size > 1
        if is_padded or min(end, self.epoch_rows) > (number + 1) * self.rows:
            return self._segments
        order, before = self._pass(number), number * self.rows
        return self._segments[order.span(first - before).start : order.span(last - before).stop]

    def _parts(self, position: int) -> Iterator[tuple[int, int, int]]:
        """(pass, place in it, how many) of a batch, which several ranks wrap around at the epoch's end."""
        left = self.batch_size
        if self._share.world_size == 1:
            left = min(left, self.epoch_rows - position)
        while left:
            position %= self.epoch_rows
            number, place = divmod(position, self.rows)
            count = min(left, self.rows - place, self.epoch_rows - position)
            yield number, place, count
            position, left = position + count, left - count
