"""Shuffle: the orders of one pass over all rows. Pure: places in, row ids out, no clock.

Every order here is a bijection of places [0, rows) to row ids [0, rows), a function of (segment sizes,
seed, key) alone, and can be asked about any places without those before them. Rows are numbered oldest
segment first. The C code of native/order.h computes rows when they are asked for: nothing is drawn
when a pass begins, and no array of all rows is made. Several threads may ask at once.

- `Sequential`: row i at place i.
- `Permutation`: all rows, shuffled uniformly.
- `Window`: sliding over the segments, oldest first, so that leases end as an epoch moves on.
- `Blocks`: runs of contiguous rows in random order, which are read at the speed of memory.

`Shuffle` is the choice among these, by the name that users give. All that follows from the choice is asked of
it: a new shuffle is a class here and a member there.

A change of any order raises ORDER_VERSION, and the version of states in plan.py: an epoch is
always finished in the order in which it was begun. Ranks agree on the version.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from enum import Enum

import numpy as np
from numpy.random import SeedSequence  # here: NumPy loads it late, and the first batch would wait
from numpy.typing import ArrayLike, NDArray

from arrowcache.native.order import KEYS, Drawn, Pass, Runs, Stage

ORDER_VERSION = 3  # raised where plans give another order
_ORDER_KEY = 0x6F72646572  # keeps our streams apart from a user's default_rng(seed)


class Shuffle(Enum):
    """The order of an epoch's rows, by the name that users give."""

    ROWS = "rows"
    WINDOW = "window"
    BLOCKS = "blocks"
    NONE = None

    @classmethod
    def named(cls, name: object) -> Shuffle:
        """Return the shuffle of a name. Raises: ValueError: there is none."""
        for each in cls:
            if name == each.value:
                return each
        hint = ", such as 'rows' for True and None for False" if isinstance(name, bool) else ""
        raise ValueError(f"shuffle={name!r} is unknown: use one of {tuple(each.value for each in cls)}{hint}")

    def __repr__(self) -> str:
        return repr(self.value)

    @property
    def is_in_order(self) -> bool:
        """True if segments are read one after another, oldest first: leases end as an epoch moves on."""
        return self in (Shuffle.WINDOW, Shuffle.NONE)

    @property
    def has_runs(self) -> bool:
        """True if the rows of a batch are a run of a segment's, and may be a view of its file."""
        return self in (Shuffle.BLOCKS, Shuffle.NONE)

    @property
    def is_uniform(self) -> bool:
        """True if a row may be anywhere in an epoch: the disk is never asked ahead."""
        return self is Shuffle.ROWS

    def order(
        self, counts: NDArray[np.int64], seed: int, key: tuple[int, ...], window_rows: int, block_rows: int
    ) -> RowOrder:
        """Return the order of one pass over segments with `counts` rows."""
        match self:
            case Shuffle.ROWS:
                return Permutation(int(counts.sum()), seed, key, len(counts))
            case Shuffle.WINDOW:
                return Window(counts, window_rows, seed, key)
            case Shuffle.BLOCKS:
                return Blocks(counts, block_rows, seed, key)
        return Sequential(counts)


class RowOrder(Pass):
    """One pass over all rows of some segments: a bijection of places to row ids."""

    def __init__(
        self,
        segments: int,
        rows: int,
        *stages: Stage,
        runs: Runs | None = None,
        drawn: Drawn | None = None,
    ) -> None:
        super().__init__(rows, *stages, runs=runs, drawn=drawn)
        self._segments = segments

    def span(self, place: int) -> range:  # noqa: ARG002 - here the same everywhere
        """Indices of the segments in use at a place in [0, rows).

        No segment before `start` has a row at this place or later: its lease can end. No segment
        from `stop` on has a row at this place or before.
        """
        return range(self._segments)


class Sequential(RowOrder):
    """Row i at place i: oldest segment first."""

    def __init__(self, segment_rows: NDArray[np.int64]) -> None:
        self._starts = starts_of(segment_rows).tolist()
        super().__init__(len(segment_rows), self._starts[-1])

    def span(self, place: int) -> range:
        after = bisect_right(self._starts, place)
        return range(after - 1, after)


class Permutation(RowOrder):
    """All rows, shuffled uniformly: a function of (rows, seed, key) alone.

    Args:
        rows: number of rows, at most 2**62.
        seed: any non-negative int.
        key: further non-negative ints that select one permutation, such as epoch and pass.
        segments: number of segments with these rows.
    """

    def __init__(self, rows: int, seed: int, key: tuple[int, ...] = (), segments: int = 1) -> None:
        super().__init__(segments, rows, _stage([0, rows], _sequence(seed, key)))


class Window(RowOrder):
    """Shuffled within a window that slides over the segments, oldest first.

    Whole segments are put together in blocks of half a window. Rows are shuffled within each block, and
    then once more within blocks that are shifted by half: from the middle of one to the
    middle of the next. So a row is anywhere from the middle of the block before its own to the middle
    of the one after. A window that covers everything is a uniform shuffle.

    Args:
        window_rows: rows that a window spans, roughly; at least 1.
    """

    def __init__(
        self, segment_rows: NDArray[np.int64], window_rows: int, seed: int, key: tuple[int, ...] = ()
    ) -> None:
        starts = starts_of(segment_rows).tolist()
        rows = starts[-1]
        self._first_segments = _cut(starts, rows if window_rows >= rows else max(1, window_rows // 2))
        edges = [starts[segment] for segment in self._first_segments]
        self._shifted = [0, *((start + stop) // 2 for start, stop in itertools.pairwise(edges)), rows]
        first, second = (_sequence(seed, (*key, number)) for number in range(2))
        super().__init__(len(segment_rows), rows, _stage(self._shifted, first), _stage(edges, second))

    def span(self, place: int) -> range:
        block = bisect_right(self._shifted, place) - 1  # a shifted block overlaps two others
        first, last = max(block - 1, 0), min(block, len(self._first_segments) - 2)
        return range(self._first_segments[first], self._first_segments[last + 1])


def _cut(starts: list[int], block_rows: int) -> list[int]:
    """Cut segments into blocks. Returns the first segment of each block, then the number of segments.

    A block ends where it is nearest to an even part of the remaining rows, of at most `block_rows`.
    """
    cuts, segments = [0], len(starts) - 1
    while cuts[-1] < segments:
        start = starts[cuts[-1]]
        left = starts[-1] - start
        if not left:  # no row of the last segments is selected
            cuts.append(segments)
            break
        target = start + left // -(-left // block_rows)
        cut = bisect_left(starts, target, cuts[-1] + 1)
        if cut - 1 > cuts[-1] and target - starts[cut - 1] < starts[cut] - target:
            cut -= 1
        cuts.append(cut)
    return cuts


class Blocks(RowOrder):
    """Runs of `block_rows` contiguous rows of one segment, in random order.

    Each segment is cut into runs at a random phase. The rows before its first and after its last run
    are joined to those of the others, in random order, and cut into mixed runs. All runs are shuffled
    together; an incomplete mixed one comes last. Memory is of the order of segments.

    Args:
        block_rows: rows of a run, at least 1.
    """

    def __init__(
        self, segment_rows: NDArray[np.int64], block_rows: int, seed: int, key: tuple[int, ...] = ()
    ) -> None:
        starts, segments = starts_of(segment_rows), len(segment_rows)
        rows = int(starts[-1])
        rest = segment_rows % block_rows
        phases = _sequence(seed, (*key, 1)).generate_state(segments, np.uint64)
        heads = (phases % (rest + 1).astype(np.uint64)).astype(np.int64)
        tails = rest - heads
        # Runs of all segments laid out one after another, then heads and tails: place to row id is
        # one step function.
        mixed = Permutation(2 * segments, seed, (*key, 2))(0, 2 * segments)
        lengths = np.concatenate((segment_rows - rest, np.concatenate((heads, tails))[mixed]))
        firsts = np.concatenate(
            (starts[:-1] + heads, np.concatenate((starts[:-1], starts[1:] - tails))[mixed])
        )
        chosen = np.flatnonzero(lengths)
        places = starts_of(lengths[chosen])[:-1]
        runs = Runs(block_rows, places, firsts[chosen] - places)
        super().__init__(
            segments, rows, _stage([0, rows // block_rows], _sequence(seed, (*key, 0))), runs=runs
        )


def starts_of(counts: ArrayLike) -> NDArray[np.int64]:
    """Return the sum before each of n counts, then that of all: (n + 1,). Of rows: where segments begin."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def key_of(seed: int, key: tuple[int, ...]) -> np.uint64:
    """Return one number that selects a stream of numbers, as `Permutation` takes `seed` and `key`."""
    number: np.uint64 = _sequence(seed, key).generate_state(1, np.uint64)[0]
    return number


def _sequence(seed: int, key: tuple[int, ...]) -> SeedSequence:
    return SeedSequence(seed, spawn_key=(_ORDER_KEY, *key))


def _stage(edges: list[int], sequence: SeedSequence) -> Stage:
    return Stage(np.array(edges, np.int64), np.asarray(sequence.generate_state(KEYS, np.uint64), np.uint64))
