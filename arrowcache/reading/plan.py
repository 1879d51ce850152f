"""Plan: the rows of an epoch, their order, and the position where it goes on. Plain values.

A plan names segments and their rows, never files or addresses, so it outlives the process.
`Loader.state_dict()` holds a plan as plain ints, strings and lists. An epoch resumed from a plan
runs over the order of the *planned* segments; rows of those that have left the cache meanwhile are
passed over. Delivered rows and remaining rows together are the epoch, each exactly once, whatever
the batch size, workers and world size before and after.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.packing import Packing, Within, require_packing
from arrowcache.reading.row_filter import Bitmaps, Selected, are_fit
from arrowcache.reading.row_weights import Draws, Weights
from arrowcache.reading.shuffle import RowOrder, Shuffle
from arrowcache.storage.layout import MAX_SEQ, SegmentInfo
from arrowcache.storage.row_ids import NumberedRows, are_among
from arrowcache.units import MAX_COUNTED, format_count, parse_count

_FORMAT, _VERSION = "arrowcache.loader", 6  # 1 to 5 are of 0.1.0 and what followed it
_PLAIN = ("epoch", "position", "seed", "epoch_rows", "window_rows", "block_rows")
_MAX_SEGMENTS = 1 << 20  # bounds what is read from a state before memory is taken for it


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """An epoch, from a position of its stream (of all ranks together) on.

    `seqs` and `rows` describe its segments, oldest first. It reads the rows that `bitmaps` (row_filter.py)
    select: all where there is no bitmap. `shuffle` is "rows" (all of them,
    uniformly), "window" (of about `window_rows`), "blocks" (runs of `block_rows`, the batch size at its
    begin), or None (oldest first). `epoch_rows` below the number of rows takes the first of a pass (if
    "rows", a draw without replacement); above, reshuffled passes. None means one pass. With `weights` of the
    selected rows it is as many draws with replacement.

    `buckets` are the parts of the stream whose rows are sorted by length (budget.py); 0 where batches have
    equally many rows. `taken` has a bit for each row of the bucket at the position, 1 if it was delivered: so
    many rows lie between the bucket's begin and the position. It is empty where no row is. An epoch of
    sequences has a place `within` its rows from the position on.
    """

    epoch: int
    seed: int
    shuffle: Shuffle
    epoch_rows: int | None
    window_rows: int
    block_rows: int
    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    position: int = 0
    buckets: int = 0
    taken: bytes = b""
    within: Within | None = None
    bitmaps: Bitmaps = field(default_factory=dict)
    weights: Weights | None = None
    selected: Selected = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "selected", Selected(self.seqs, self.rows, self.bitmaps))

    @property
    def counts(self) -> NDArray[np.int64]:
        """The rows of each segment that it reads: (n,)."""
        return self.selected.counts

    @property
    def stream_rows(self) -> int:
        """Return the rows of the whole epoch, of all ranks together."""
        return int(self.counts.sum()) if self.epoch_rows is None else self.epoch_rows

    @property
    def pass_rows(self) -> int:
        """Return the rows of one pass. Draws by weights are all of one."""
        return int(self.counts.sum()) if self.weights is None else self.stream_rows

    def are_present(self, present: Sequence[SegmentInfo]) -> NDArray[np.bool_]:
        """True for each of its segments (n,) that is present."""
        return are_among(self.seqs, np.array([segment.seq for segment in present], np.int64))

    def among(self, present: Sequence[SegmentInfo]) -> Plan:
        """Return the plan of draws from those segments that are present; of no draws, if these weigh nothing.

        Another plan stays as it is.
        """
        if self.weights is None or len(present) == len(self.seqs):
            return self
        gone = ~self.are_present(present)
        weights = Weights(self.weights.of_rows[~np.repeat(gone, self.counts)])
        seqs, rows = self.seqs[~gone], self.rows[~gone]
        bitmaps = {seq: self.bitmaps[seq] for seq in seqs.tolist() if seq in self.bitmaps}
        draws = self.stream_rows if weights.table.total else self.position
        return replace(self, seqs=seqs, rows=rows, bitmaps=bitmaps, weights=weights, epoch_rows=draws)

    def probabilities(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability (n,) of rows (n, 2) to be what one draw gives; 0 of other epochs' rows."""
        assert self.weights is not None
        numbers, is_there = NumberedRows.of_counts(self.seqs, self.rows).numbers(ids)
        numbers, is_selected = self.selected.numbers(numbers)
        found = np.zeros(len(ids))
        found[np.flatnonzero(is_there)[is_selected]] = self.weights.probabilities(numbers)
        return found

    def row_order(self, number: int) -> RowOrder:
        """Return the order of a pass over all selected rows: the first one has the number 0."""
        key = (self.epoch, number)
        if self.weights is not None:
            return Draws(self.weights, len(self.counts), self.stream_rows, self.seed, key)
        return self.shuffle.order(self.counts, self.seed, key, self.window_rows, self.block_rows)

    def at(self, position: int, *, taken: bytes = b"", within: Within | None = None) -> Plan:
        """Return the plan from a position on."""
        return replace(self, position=position, taken=taken, within=within)

    def bucket_edge(self, number: int) -> int:
        """Return the position at which a bucket begins, or the last one ends."""
        return self.stream_rows * number // self.buckets

    def bucket_at(self, position: int) -> int:
        """Return the bucket that has a position."""
        return ((position + 1) * self.buckets - 1) // self.stream_rows

    def includes(self, segment: SegmentInfo) -> bool:
        """True if the planned epoch reads this segment, with so many rows."""
        index = int(self.seqs.searchsorted(segment.seq))
        return index < len(self.seqs) and self.seqs[index] == segment.seq and self.rows[index] == segment.rows

    def to_state(self) -> dict[str, Any]:
        """Return plain ints, strings, lists and None; segments as runs."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        segments = runs_of(self.seqs, self.rows).tolist()
        selected = [[seq, base64.b64encode(bits).decode()] for seq, bits in self.bitmaps.items()]
        weights = None if self.weights is None else self.weights.name
        state = {"format": _FORMAT, "version": _VERSION, **plain, "shuffle": self.shuffle.value}
        state |= {"segments": segments, "selected": selected, "weights": weights}
        if self.within is not None:
            state |= {"within": self.within.to_state()}
        elif self.buckets:
            taken = base64.b64encode(self.taken).decode()
            state |= {"buckets": self.buckets, "taken": taken}
        return state

    @classmethod
    def from_state(
        cls,
        state: object,
        most_rows: int = MAX_COUNTED,
        *,
        has_buckets: bool = False,
        packing: Packing | None = None,
        weights: Weights | None = None,
    ) -> Plan:
        """The inverse of `to_state`.

        Args:
            most_rows: most rows of a segment in the cache; bounds the work of a resume.
            has_buckets: True if the epoch is to go on with batches by length.
            packing: sequences that the reader makes. None means batches of rows.
            weights: those that the state names.
        Raises: ValueError: not a valid state, or one of another version or cache, or one with rows left of an
            epoch begun in batches of the other kind, or of other sequences, or by weights that are not given.
            The message says what is wrong.
        """
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise ValueError("this is not a state of an arrowcache Loader: pass what state_dict() returned")
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the state has version {state.get('version')!r}, and this arrowcache reads {_VERSION}: "
                "use the arrowcache that made it, or begin without it"
            )
        if weights is None and state.get("weights") and state.get("segments"):
            raise ValueError(
                "the state is of an epoch that draws rows by weights, which this reader does not: go on with "
                "a Loader, or begin the next epoch: state | {'epoch': state['epoch'] + 1, 'position': 0, "
                "'segments': [], 'weights': None}"
            )
        try:
            for run in state["segments"]:
                if not isinstance(run, list | tuple) or [type(number) for number in run] != [int] * 3:
                    raise TypeError(f"segments that are no runs of three ints: {run!r}")
            runs = np.array(state["segments"], np.int64).reshape(-1, 3)
            segments = sum(runs[:, 1].tolist())  # of Python's ints, which do not overflow
            rows = sum(count * rows for _, count, rows in runs.tolist())
            seq = max((first + count for first, count, _ in runs.tolist()), default=0)
            if (runs < 0).any() or segments > _MAX_SEGMENTS or rows > MAX_COUNTED or seq > MAX_SEQ:
                raise ValueError(f"{format_count(segments, 'segment')} of {format_count(rows, 'row')}")
            seqs, rows_of_each = segments_of(runs)
            epoch_rows, within = state["epoch_rows"], state.get("within")
            least_draws = 1 if weights is None else 0  # none, where all that weighs has left: see `among`
            plan = cls(
                epoch=parse_count(state["epoch"], "epoch", least=0),
                seed=parse_count(state["seed"], "seed", least=0, most=None),
                shuffle=Shuffle.named(state["shuffle"]),
                epoch_rows=None if epoch_rows is None else parse_count(epoch_rows, "epoch_rows", least_draws),
                window_rows=parse_count(state["window_rows"], "window_rows"),
                block_rows=parse_count(state["block_rows"], "block_rows"),
                seqs=seqs,
                rows=rows_of_each,
                position=parse_count(state["position"], "position", least=0),
                within=None if within is None else Within.from_state(within),
                bitmaps={
                    parse_count(seq, "seq", least=0): base64.b64decode(bits, validate=True)
                    for seq, bits in (state["selected"] if len(seqs) else ())
                },
                weights=weights,
            )
            if "buckets" in state and len(seqs):
                buckets = parse_count(state["buckets"], "buckets", most=max(1, plan.stream_rows))
                plan = replace(plan, buckets=buckets, taken=base64.b64decode(state["taken"], validate=True))
        except (KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"the state is damaged: {error!r}") from None
        if (plan.rows < 1).any() or (np.diff(plan.seqs, prepend=-1) < 1).any():
            raise ValueError("the state is damaged: its segments cannot be")
        if (plan.rows > most_rows).any():
            raise ValueError(
                f"the state is of another cache: it has segments of {format_count(plan.rows.max(), 'row')}, "
                f"this one has {most_rows} at most"
            )
        is_begun = len(plan.seqs) > 0 and plan.position < plan.stream_rows
        if weights is not None and len(weights.of_rows) != plan.counts.sum():
            raise ValueError(
                f"the state is damaged: it has {format_count(len(weights.of_rows), 'weight')} of other rows"
            )
        if not are_fit(plan.bitmaps, plan.seqs, plan.rows):
            raise ValueError("the state is damaged: the rows that are selected do not fit its segments")
        if plan.position + (0 if plan.within is None else len(plan.within.lengths)) > plan.stream_rows:
            raise ValueError(
                f"the state is damaged: position={plan.position} of an epoch of "
                f"{format_count(plan.stream_rows, 'row')}"
            )
        if not plan._has_fit_bits():
            raise ValueError("the state is damaged: the rows that were taken do not fit its position")
        require_packing(packing, plan.within)
        if is_begun and has_buckets != (plan.buckets > 0):
            which, way = (
                ("batch_tokens", "in a Loader with batch_tokens")
                if plan.buckets
                else ("batch_size", "without batch_tokens")
            )
            left = plan.stream_rows - plan.position
            raise ValueError(
                f"the state is of epoch {plan.epoch}, with {left:,} of "
                f"{format_count(plan.stream_rows, 'row')} left in batches by {which}: resume it {way}, or "
                f"begin the next one: state | {{'epoch': {plan.epoch + 1}, 'position': 0, 'segments': []}}"
            )
        return plan

    def _has_fit_bits(self) -> bool:
        """True if `taken` has as many rows as the position is into its bucket."""
        if not self.buckets or self.position == self.stream_rows:
            return not self.taken
        bucket = self.bucket_at(self.position)
        first, stop = self.bucket_edge(bucket), self.bucket_edge(bucket + 1)
        count = int.from_bytes(self.taken, "big").bit_count()
        nbytes = -(-(stop - first) // 8) if self.position > first else 0
        return len(self.taken) == nbytes and count == self.position - first


def runs_of(seqs: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return segments, oldest first, as runs: (n, 3) int64 of first seq, number of segments, rows of each."""
    firsts = np.flatnonzero((np.diff(seqs, prepend=-2) != 1) | (np.diff(rows, prepend=-1) != 0))
    counts = np.diff(np.append(firsts, len(seqs)))
    return np.stack([seqs[firsts], counts, rows[firsts]], axis=1)


def segments_of(runs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The inverse of `runs_of`. Returns the seq and the rows of each segment."""
    firsts, counts, rows = runs.T
    before = np.cumsum(counts) - counts
    return np.repeat(firsts - before, counts) + np.arange(counts.sum()), np.repeat(rows, counts)
