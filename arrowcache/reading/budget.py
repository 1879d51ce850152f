"""Budget: batches of rows of similar length, each padded to at most so many tokens.

The padded size of a batch is its rows times the length of its longest row; an empty row counts as one token.
The epoch's stream (order.py) is cut into buckets of about a hundred batches. The rows of a bucket are sorted
by length, the longest first, and cut into batches, each with as many rows as the budget allows. Then the
batches of a bucket are shuffled. So rows meet others of their length, other ones in each epoch, and batches
come in no order of length. With shuffle=None nothing is shuffled: a bucket has the oldest rows that are left.

Source: `pool` in torchtext/data/iterator.py sorts within chunks of 100 batches, then shuffles the batches;
`get_length_grouped_indices` in transformers/trainer_pt_utils.py makes at least four chunks, of at most 50
batches; `batch_by_size` in fairseq/data/data_utils.py cuts by `--max-tokens`.

Batch `b` goes to rank `b % world_size` in step `b // world_size`. If ranks are left without a batch in the
last step, its batches are cut into one part for each rank. So all ranks have equally many steps, and no row
is left out or repeated, unless the last step has fewer rows than ranks.

A bucket is made of its rows alone, when it is reached. So a resume needs the stream's position, and which
rows of one bucket were delivered, but the length of no row whose segment has left the cache. If the budget
is the same and nothing is missing, the batches of the rest are those of the epoch that went on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heapify, heappush, heapreplace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import Ragged, Schema, Tensor
from arrowcache.proc import memory_bytes
from arrowcache.reading.order import Order, Shard, Stream
from arrowcache.reading.plan import Plan
from arrowcache.reading.row_filter import bitmap, mask_of
from arrowcache.reading.shuffle import Permutation, Shuffle, starts_of
from arrowcache.storage.layout import SegmentInfo
from arrowcache.units import format_bytes, parse_count

_MAX_TOKENS = (1 << 31) - 1
_BUCKET_BATCHES, _MIN_BATCHES, _MIN_BUCKETS = 100, 25, 4
_BATCHES_KEY = 3  # keeps the order of batches apart from those of rows


class Budget(NamedTuple):
    """The most tokens of a padded batch, and the column that tells the length of each row."""

    tokens: int
    column: str

    @classmethod
    def of(cls, batch_tokens: int, length_of: str | None, schema: Schema, names: Sequence[str]) -> Budget:
        """Return the checked budget of a loader.

        Args:
            names: columns of the batches.
        Raises: ValueError, TypeError: it does not fit. The message says what would.
        """
        tokens = parse_count(batch_tokens, "batch_tokens", most=_MAX_TOKENS)
        if length_of is None:
            raise ValueError(
                "batch_tokens needs length_of: the name of the column whose rows are to be padded, or of "
                "one with their lengths"
            )
        if not isinstance(length_of, str):
            raise TypeError(f"length_of must be the name of a column, not {length_of!r}")
        (column,) = schema.select([length_of])
        kind = schema[column]
        if not isinstance(kind, Ragged) and not is_count(kind):
            raise ValueError(
                f"length_of={column!r} is {kind}, which tells no length: name a Ragged column, or an integer "
                "column of shape ()"
            )
        if (
            isinstance(kind, Ragged)
            and column in names
            and (nbytes := tokens * kind.item_bytes) > memory_bytes()
        ):
            raise ValueError(
                f"batch_tokens={tokens} of {column!r} take {format_bytes(nbytes)}, and there are "
                f"{format_bytes(memory_bytes())} of memory: lower it"
            )
        return cls(tokens, column)


def is_count(kind: object) -> bool:
    """True for the type of a column of integers, one a row."""
    return isinstance(kind, Tensor) and kind.shape == () and dtype_of(kind.dtype).kind in "iu"


def bucket_count(stream_rows: int, lengths: NDArray[np.int32], tokens: int) -> int:
    """Return the number of buckets for a stream of rows, drawn from rows of these lengths."""
    batches = stream_rows * int(lengths.sum(dtype=np.int64)) // max(1, len(lengths) * tokens)
    few = min(_MIN_BUCKETS, batches // _MIN_BATCHES)
    return max(1, few, min(batches // _BUCKET_BATCHES, stream_rows))


def batched(lengths: NDArray[np.int32], tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut rows, sorted by length, into batches within the budget, the longest rows first.

    Args:
        lengths: (n,), each at least 1 and at most `tokens`.
    Returns: (n,) places of the rows, batch after batch; (batches + 1,) begins of the batches, and the end.
    """
    places = _longest_first(lengths)
    longest, starts = lengths[places], [0]
    while starts[-1] < len(lengths):
        starts.append(starts[-1] + tokens // int(longest[starts[-1]]))
    starts[-1] = len(lengths)
    return places, np.array(starts, np.int64)


def _longest_first(lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the places (n,) of lengths, the longest first, equal ones in their order.

    NumPy sorts numbers of 16 bits by radix, which takes a twentieth of the time; larger ones go in two turns.
    """
    shorter = lengths.max(initial=0) - lengths
    places = np.argsort((shorter & 0xFFFF).astype(np.uint16), kind="stable")
    if shorter.max(initial=0) > 0xFFFF:
        places = places[np.argsort((shorter >> 16).astype(np.uint16)[places], kind="stable")]
    return places


class _Batches(NamedTuple):
    """The batches of a bucket that are left, one after another: batch `i` begins at `starts[i]`.

    `ids` are rows of the snapshot, `places` the same rows in the bucket; `starts` ends with their number.
    """

    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    starts: NDArray[np.int64]


def _buckets(
    plan: Plan, stream: Stream, lengths: NDArray[np.int32], tokens: int
) -> Callable[[int], _Batches]:
    """Return a function that makes the batches of a bucket of a plan."""

    @lru_cache(maxsize=2)
    def batches(number: int) -> _Batches:
        first, stop = plan.bucket_edge(number), plan.bucket_edge(number + 1)
        ids, positions = stream.part(first, stop)
        order, starts = batched(lengths[ids], tokens)
        sizes, begins = np.diff(starts), starts[:-1]
        if plan.shuffle is not Shuffle.NONE:
            shuffle = Permutation(len(sizes), plan.seed, (plan.epoch, number, _BATCHES_KEY))(0, len(sizes))
            sizes, begins = sizes[shuffle], begins[shuffle]
        batch = np.repeat(np.arange(len(sizes)), sizes)
        order = order[np.arange(len(order)) + (begins - starts_of(sizes)[:-1])[batch]]
        places = positions[order] - first
        is_left = ~_taken(plan, number)[places]
        left = np.bincount(batch[is_left])
        return _Batches(ids[order[is_left]], places[is_left], starts_of(left[left > 0]))

    return batches


def _taken(plan: Plan, bucket: int) -> NDArray[np.bool_]:
    """Return which rows of a bucket were delivered, of a plan's first bucket or a later one."""
    rows = plan.bucket_edge(bucket + 1) - plan.bucket_edge(bucket)
    if not plan.taken or bucket != plan.bucket_at(plan.position):
        return np.zeros(rows, np.bool_)
    return mask_of(plan.taken, rows)


class BudgetOrder(Order):
    """The order of a plan that has buckets, over its segments that are still present.

    Its memory is of the order of batches. To make it takes about 0.1 us a row.

    Args:
        present: segments of the plan.
        lengths: of the rows of a snapshot of these; each at least 1, and at most `tokens`.
        drop_last: leave out a last step of fewer rows than ranks. Otherwise ranks repeat its rows.
    """

    def __init__(
        self,
        plan: Plan,
        present: Sequence[SegmentInfo],
        lengths: NDArray[np.int32],
        tokens: int,
        shard: Shard,
        drop_last: bool,
    ) -> None:
        self._plan, self._shard, self._stream = plan, shard, Stream(plan, present)
        self.selected = self._stream.selected
        self._batches = _buckets(plan, self._stream, lengths, tokens)
        is_over = plan.position >= plan.stream_rows
        self._first_bucket = plan.buckets if is_over else plan.bucket_at(plan.position)
        sizes = [np.diff(self._batches(number).starts) for number in range(self._first_bucket, plan.buckets)]
        self._sizes = np.concatenate([np.empty(0, np.int64), *sizes])  # rows of each batch, of all ranks
        self._firsts = starts_of([len(each) for each in sizes]).tolist()  # the first batch of each bucket
        self._whole, left = divmod(len(self._sizes), shard.world_size)  # steps; batches of the last one
        self._last = _dealt(self._sizes[len(self._sizes) - left :], shard, drop_last)
        self.steps = self._whole + (len(self._last) > 0)

    @property
    def missing(self) -> int:
        return self._plan.stream_rows - self._plan.position - int(self._sizes.sum())

    def numbers(self, first: int, last: int) -> NDArray[np.int64]:
        steps = [self._step(step) for step in range(first, min(last, self.steps))]
        return np.concatenate([np.empty(0, np.int64), *steps])

    def rows_of(self, steps: range) -> int:
        size, rank = self._shard.world_size, self._shard.rank
        first, stop = steps.start * size + rank, min(steps.stop, self._whole) * size
        rows = int(self._sizes[first : stop : steps.step * size].sum())
        return rows + (len(self._last) if self._whole in steps else 0)

    def remaining(self, steps: int) -> Plan:
        plan, number = self._plan, steps * self._shard.world_size
        if number >= len(self._sizes):
            return plan.at(plan.stream_rows)
        bucket, index = self._find(number)
        batches, is_taken = self._batches(bucket), _taken(plan, bucket).copy()
        is_taken[batches.places[: batches.starts[index]]] = True
        count = int(is_taken.sum())
        return plan.at(plan.bucket_edge(bucket) + count, taken=bitmap(is_taken) if count else b"")

    def segments_span(self, step: int) -> range:
        segments, world_size = self._stream.segments, self._shard.world_size
        if step >= self.steps:
            return range(segments, segments)
        last = min((step + 1) * world_size, len(self._sizes)) - 1
        first, stop = self._find(step * world_size)[0], self._find(last)[0] + 1
        edges = self._plan.bucket_edge(first), self._plan.bucket_edge(stop) - 1
        return self._stream.segments_span(*edges, self._plan.stream_rows)

    def _find(self, number: int) -> tuple[int, int]:
        """Return the bucket of a batch, and its index among the batches of the bucket that are left."""
        index = bisect_right(self._firsts, number) - 1
        return self._first_bucket + index, number - self._firsts[index]

    def _step(self, step: int) -> NDArray[np.int64]:
        first = step * self._shard.world_size
        if step < self._whole:
            return self._batch(first + self._shard.rank)
        rows = [self._batch(number) for number in range(first, len(self._sizes))]
        return np.concatenate(rows)[self._last.start : self._last.stop]

    def _batch(self, number: int) -> NDArray[np.int64]:
        bucket, index = self._find(number)
        batches = self._batches(bucket)
        return batches.ids[batches.starts[index] : batches.starts[index + 1]]


def _dealt(sizes: NDArray[np.int64], shard: Shard, drop_last: bool) -> range:
    """Return the part of a rank in batches that are fewer than ranks, as a range of their rows.

    Batches are halved, the one with most rows first, until there are as many as ranks. If there are fewer
    rows than ranks, a rank has one row, or none with `drop_last`.
    """
    rows, starts = int(sizes.sum()), starts_of(sizes).tolist()
    if rows < shard.world_size:
        row = shard.rank % rows if rows else 0
        return range(row, row + (rows > 0 and not drop_last))
    parts = [(start - stop, start) for start, stop in pairwise(starts)]
    heapify(parts)
    while len(parts) < shard.world_size:
        size, start = -parts[0][0], parts[0][1]
        heapreplace(parts, (-(size // 2), start))
        heappush(parts, (size // 2 - size, start + size // 2))
    start, size = sorted((start, -size) for size, start in parts)[shard.rank]
    return range(start, start + size)
