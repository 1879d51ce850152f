"""Plan: which rows an epoch has, in which order, and where it goes on. Plain values.

A plan names segments and their rows, never files or addresses, so it outlives the process: it is
what `Loader.state_dict()` holds, as plain ints, strings and lists. An epoch resumed from a plan
runs over the order of the *planned* segments; rows of those that have left the cache meanwhile are
passed over. Delivered rows and remaining rows together are the epoch, each exactly once, whatever
the batch size, workers and world size before and after.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.order import SHUFFLES, EpochOrder, Share
from arrowcache.storage.layout import MOST_SEQ, SegmentInfo
from arrowcache.units import MOST_COUNTED, parse_count

_FORMAT, _VERSION = "arrowcache.loader", 2
_OTHER_ORDER = 1  # the version of states, as of 0.1.0, whose shuffles gave another order
_MOST_SEGMENTS = 1 << 20  # what is read from a state is bounded before memory is taken for it
_CHUNK_STEPS_ROWS = 8192  # of the planned order, walked at once


class Order(Protocol):
    """Steps of an epoch, for one rank: row ids in the numbering of a snapshot."""

    steps: int

    def batches(self, first: int, last: int) -> NDArray[np.int64]:
        """Row ids of steps first..last-1, one after another."""

    def position_after(self, steps: int) -> int:
        """Where the epoch's stream goes on after so many steps of all ranks."""

    def segments_span(self, step: int) -> range:
        """Which segments hold the rows of this step; none before them is read by it or a later one."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """An epoch, from a position of its stream (of all ranks together) on.

    `seqs` and `rows` are of its segments, oldest first; `window_rows` and `block_rows` belong to
    the shuffles of these names.
    """

    epoch: int
    seed: int
    shuffle: str | None
    epoch_rows: int | None
    window_rows: int
    block_rows: int
    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    position: int = 0

    @property
    def stream_rows(self) -> int:
        """Rows of the whole epoch, of all ranks together."""
        return int(self.rows.sum()) if self.epoch_rows is None else self.epoch_rows

    @property
    def is_in_order(self) -> bool:
        """Whether segments are read one after another, oldest first."""
        return self.shuffle in ("window", None)

    def at(self, position: int) -> Plan:
        """The same epoch from another position on."""
        return replace(self, position=position)

    def includes(self, segment: SegmentInfo) -> bool:
        """Whether a segment is one of the planned ones."""
        index = int(self.seqs.searchsorted(segment.seq))
        return index < len(self.seqs) and self.seqs[index] == segment.seq and self.rows[index] == segment.rows

    def order(self, batch_size: int, share: Share, drop_last: bool) -> EpochOrder:
        """Its batches, every planned segment being there."""
        return EpochOrder(
            self.rows,
            batch_size,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=self.epoch,
            share=share,
            epoch_rows=self.epoch_rows,
            drop_last=drop_last,
            window_rows=self.window_rows,
            block_rows=self.block_rows,
            start=self.position,
        )

    def order_of(
        self, present: Sequence[SegmentInfo], batch_size: int, share: Share, drop_last: bool
    ) -> Order:
        """Its batches over the segments that are still there, in the numbering of a snapshot of these."""
        if len(present) == len(self.seqs):
            return self.order(batch_size, share, drop_last)
        return Survivors(self, present, batch_size, share, drop_last)

    def to_state(self) -> dict[str, Any]:
        """Plain ints, strings, lists and None; segments as runs of (first seq, how many, rows of each)."""
        breaks = np.flatnonzero((np.diff(self.seqs) != 1) | (np.diff(self.rows) != 0)) + 1
        firsts = np.concatenate(([0], breaks)).astype(np.int64) if len(self.seqs) else breaks
        counts = np.diff(np.append(firsts, len(self.seqs)))
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch_rows": self.epoch_rows,
            "window_rows": self.window_rows,
            "block_rows": self.block_rows,
            "segments": np.stack([self.seqs[firsts], counts, self.rows[firsts]], axis=1).tolist(),
        }

    @classmethod
    def from_state(cls, state: object, most_rows: int = MOST_COUNTED) -> Plan:
        """The inverse of `to_state`.

        Args:
            most_rows: of a segment of the cache that is read: whoever resumes walks what rows are planned.
        Raises: ValueError: it is no such state, or one of another version or cache; or rows are left of an
            epoch that was begun in an order of 0.1.0. Says what is wrong.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise ValueError("this is not a state of an arrowcache Loader: pass what state_dict() returned")
        if state.get("version") not in (_OTHER_ORDER, _VERSION):
            raise ValueError(
                f"the state has version {state.get('version')!r}, this arrowcache reads {_VERSION}: "
                "use the arrowcache that made it, or begin without it"
            )
        try:
            for run in state["segments"]:
                if not isinstance(run, list | tuple) or [type(number) for number in run] != [int] * 3:
                    raise TypeError(f"segments that are no runs of three ints: {run!r}")
            runs = np.array(state["segments"], np.int64).reshape(-1, 3)
            segments = sum(runs[:, 1].tolist())  # of Python's ints, which do not overflow
            rows = sum(count * rows for _, count, rows in runs.tolist())
            seq = max((first + count for first, count, _ in runs.tolist()), default=0)
            if (runs < 0).any() or segments > _MOST_SEGMENTS or rows > MOST_COUNTED or seq > MOST_SEQ:
                raise ValueError(f"{segments} segments of {rows} rows")
            seqs = [np.arange(first, first + count) for first, count, _ in runs.tolist()]
            epoch_rows = state["epoch_rows"]
            plan = cls(
                epoch=parse_count(state["epoch"], "epoch", least=0),
                seed=parse_count(state["seed"], "seed", least=0, most=None),
                shuffle=state["shuffle"],
                epoch_rows=None if epoch_rows is None else parse_count(epoch_rows, "epoch_rows"),
                window_rows=parse_count(state["window_rows"], "window_rows"),
                block_rows=parse_count(state["block_rows"], "block_rows"),
                seqs=np.concatenate([np.empty(0, np.int64), *seqs]),
                rows=np.repeat(runs[:, 2], runs[:, 1]),
                position=parse_count(state["position"], "position", least=0),
            )
        except (KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"the state is damaged: {error!r}") from None
        if plan.shuffle not in SHUFFLES:
            raise ValueError(f"the state is damaged: shuffle={plan.shuffle!r}")
        if (plan.rows < 1).any() or (np.diff(plan.seqs, prepend=-1) < 1).any():
            raise ValueError("the state is damaged: its segments cannot be")
        if (plan.rows > most_rows).any():
            raise ValueError(
                f"the state is of another cache: it has segments of {plan.rows.max()} rows, "
                f"this one has {most_rows} at most"
            )
        is_begun = len(plan.seqs) > 0 and plan.position < plan.stream_rows
        if state["version"] == _OTHER_ORDER and plan.shuffle is not None and is_begun:
            raise ValueError(
                f"the state is of epoch {plan.epoch}, of which {plan.stream_rows - plan.position} of "
                f"{plan.stream_rows} rows are left in an order of arrowcache 0.1.0, and shuffle="
                f"{plan.shuffle!r} gives another one now: finish that epoch with the arrowcache that made "
                f"the state, or begin the next one: state | {{'epoch': {plan.epoch + 1}, 'position': 0, "
                "'segments': []}"
            )
        if plan.position > plan.stream_rows:
            raise ValueError(
                f"the state is damaged: position={plan.position} of an epoch of {plan.stream_rows} rows"
            )
        return plan


class Survivors:
    """The rest of a planned epoch, over the segments that are still there. Batches come forward only.

    The planned order is walked, rows of segments that are gone are passed over, and what remains is
    cut into full steps anew, so that all ranks have equally many. Counting them walks what is left of
    the order's first pass, and its last pass, in the constructor. `drop_last` as of EpochOrder; padding
    repeats the first rows.
    """

    def __init__(
        self, plan: Plan, present: Sequence[SegmentInfo], batch_size: int, share: Share, drop_last: bool
    ) -> None:
        self._plan, self._share, self._batch_size = plan, share, batch_size
        self._planned = plan.order(1, Share(), drop_last=False)  # row by row
        self._starts = np.concatenate(([0], np.cumsum(plan.rows)))
        self._kept = np.isin(plan.seqs, [segment.seq for segment in present])
        self._kept_before = np.concatenate(([0], np.cumsum(self._kept)))  # segments, of each planned one
        kept_rows = plan.rows * self._kept
        self._shift = np.cumsum(kept_rows) - kept_rows - self._starts[:-1]  # of row ids, to present ones
        self._step_rows = batch_size * share.world_size
        self._kept_rows = int(kept_rows.sum())
        self.rows = self._count()
        self._first = np.empty(0, np.int64)
        for ids, _ in self._walk() if self.rows else ():
            self._first = np.concatenate([self._first, ids])[: self._step_rows]
            if len(self._first) == min(self.rows, self._step_rows):
                break
        whole, rest = divmod(self.rows, self._step_rows)
        self.steps = whole if drop_last else whole + (rest > 0)
        self._source = self._walk()
        self._ids, self._places = np.empty(0, np.int64), np.empty(0, np.int64)
        self._step = 0
        self._positions = array("q", [plan.position])  # after each step that was made

    @property
    def missing(self) -> int:
        """Rows of the rest of the epoch whose segments have left the cache."""
        return self._plan.stream_rows - self._plan.position - self.rows

    def batches(self, first: int, last: int) -> NDArray[np.int64]:
        """As EpochOrder's; steps are asked for once, one after another."""
        assert first == self._step, "survivors are walked forward"
        world, size = self._share.world_size, self._batch_size
        taken = []
        for _ in range(first, min(last, self.steps)):
            ids = self._take(self._step_rows)
            if world > 1:
                if len(ids) < self._step_rows:
                    ids = np.concatenate([ids, np.resize(self._first, self._step_rows - len(ids))])
                ids = ids[self._share.rank * size : (self._share.rank + 1) * size]
            taken.append(ids)
            self._step += 1
        return np.concatenate([np.empty(0, np.int64), *taken])

    def position_after(self, steps: int) -> int:
        """As EpochOrder's, of steps that were made; several threads may ask."""
        return self._positions[steps]

    def segments_span(self, step: int) -> range:
        """As EpochOrder's. Of a step that was not made yet, as if nothing were passed over until then.

        So its segments may be later ones than these, but none before them.
        """
        if self.steps * self._step_rows > self.rows and self._share.world_size > 1:
            return range(int(self._kept_before[-1]))  # the padding reads the first rows once more
        first, last = self._planned_row(step), self._planned_row(step + 1) - 1
        spans = [
            self._planned.segments_span(row) for row in (first, max(first, last))
        ]  # of one pass, or of two
        start, stop = min(span.start for span in spans), max(span.stop for span in spans)
        return range(int(self._kept_before[start]), int(self._kept_before[stop]))

    def _planned_row(self, step: int) -> int:
        """Where a step begins in the planned rest of the epoch, or at the least."""
        known = min(step, len(self._positions) - 1)
        return self._positions[known] - self._plan.position + (step - known) * self._step_rows

    def _take(self, count: int) -> NDArray[np.int64]:
        while len(self._ids) < count:
            found = next(self._source, None)
            if found is None:
                break
            self._ids = np.concatenate([self._ids, found[0]])
            self._places = np.concatenate([self._places, found[1]])
        ids, self._ids = self._ids[:count], self._ids[count:]
        places, self._places = self._places[:count], self._places[count:]
        self._positions.append(int(places[-1]) + 1 if len(places) else self._positions[-1])
        return ids

    def _count(self) -> int:
        """Rows still to be delivered, by all ranks: only passes that are not whole are walked."""
        rows, stop, begin = int(self._starts[-1]), self._plan.stream_rows, self._plan.position
        if not self._kept_rows:
            return 0
        first_stop = min(stop, (begin // rows + 1) * rows)
        whole = (stop - first_stop) // rows
        parts = ((begin, first_stop), (first_stop + whole * rows, stop))
        walked = sum(len(ids) for a, b in parts for ids, _ in self._walk(a - begin, b - begin))
        return walked + whole * self._kept_rows

    def _walk(
        self, first: int = 0, stop: int | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """(present row ids, their positions in the planned stream) in pieces, of some of what is left."""
        stop = self._planned.steps if stop is None else stop
        for start in range(first, stop, _CHUNK_STEPS_ROWS):
            ids = self._planned.batches(start, min(stop, start + _CHUNK_STEPS_ROWS))
            segments = self._starts.searchsorted(ids, side="right") - 1
            kept = self._kept[segments]
            places = np.flatnonzero(kept) + self._plan.position + start
            yield ids[kept] + self._shift[segments[kept]], places
