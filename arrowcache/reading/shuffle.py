"""Row orders: one pass over all rows. Pure: positions in, row ids out, no clock.

Every order here is a bijection of positions [0, rows) to row ids [0, rows), a function of (segment
sizes, seed, key) alone, and can be asked about any positions without those before them. Rows are
numbered oldest segment first. What is kept beside that is what was already computed; several
threads may ask at once.

- `Sequential`: row i at position i.
- `Permutation`: uniform over all orders. Up to 2**20 rows a table: a permutation of the next power
  of two, of which the elements below `rows` are taken, in order. What that leaves is uniform as
  well, and the table can be drawn before the number of rows is known (`prepare`). Beyond, an
  `IndexShuffle`: evaluated where it is asked for, so no array of all rows is ever made.
- `Window`: sliding over the segments, oldest first, so that leases end as an epoch moves on.
- `Blocks`: runs of contiguous rows in random order, which are read at the speed of memory.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_TABLE_ROWS = 1 << 20  # 4 MiB, drawn in 24 ms
_FIRST_FOUND = 4096
_PREPARED_TABLES = 3
_ROUNDS = 12
_ROUND_TABLES_ROWS = 1 << 34  # 12 MiB; 5 MiB for 2**31
_ORDER_KEY = 0x6F72646572  # keeps our streams apart from a user's default_rng(seed)


class RowOrder(Protocol):
    """One pass over `rows` rows: a bijection of positions to row ids."""

    rows: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row ids at (n,) positions in [0, rows)."""

    def span(self, position: int) -> range:
        """Indices of the segments in use at a position in [0, rows).

        No segment before `start` has a row at this position or later: its lease can end. No segment
        from `stop` on has a row at this position or before.
        """


class Sequential:
    """Row i at position i: oldest segment first."""

    def __init__(self, segment_rows: NDArray[np.int64]) -> None:
        self._starts = _starts(segment_rows).tolist()
        self.rows: int = self._starts[-1]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions

    def span(self, position: int) -> range:
        after = bisect_right(self._starts, position)
        return range(after - 1, after)


class Permutation:
    """All rows, shuffled uniformly: a function of (rows, seed, key) alone.

    Args:
        rows: how many, at most 2**62.
        seed: any non-negative int.
        key: further non-negative ints that select one permutation, such as epoch and pass.
        segments: how many the rows are of.
    """

    def __init__(self, rows: int, seed: int, key: tuple[int, ...] = (), segments: int = 1) -> None:
        self.rows = rows
        self._segments = segments
        self._row_ids: Callable[[NDArray[np.int64]], NDArray[np.int64]]
        if rows <= _TABLE_ROWS:
            self._row_ids = _Below(rows, _table(rows, seed, key))
        else:
            self._row_ids = IndexShuffle(rows, _sequence(seed, key))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._row_ids(positions)

    def span(self, position: int) -> range:  # noqa: ARG002 - the same everywhere
        return range(self._segments)


# Replaced as a whole, without a lock that a fork could find held: a race costs drawing a table again.
_prepared: tuple[tuple[tuple[int, int, tuple[int, ...]], NDArray[np.uint32]], ...] = ()


def prepare(rows: int, seed: int, key: tuple[int, ...] = ()) -> None:
    """Draw ahead what a Permutation of (rows, seed, key) starts with, on any thread.

    It serves any number of rows between the same powers of two. The last three are kept.
    """
    global _prepared
    if rows <= _TABLE_ROWS:
        name, table = (_bits(rows), seed, key), _table(rows, seed, key)
        others = tuple(one for one in _prepared if one[0] != name)
        _prepared = (*others[-_PREPARED_TABLES + 1 :], (name, table))


def _table(rows: int, seed: int, key: tuple[int, ...]) -> NDArray[np.uint32]:
    """A permutation of the next power of two from `rows`."""
    for name, table in _prepared:
        if name == (_bits(rows), seed, key):
            return table
    drawn = np.arange(1 << _bits(rows), dtype=np.uint32)
    np.random.default_rng(_sequence(seed, key)).shuffle(drawn)  # without the GIL
    return drawn


class _Below:
    """The elements of a table below `rows`, in its order; found as far as they were asked for.

    All of 10**6 take 2 ms, for which the first batch would wait.
    """

    def __init__(self, rows: int, table: NDArray[np.uint32]) -> None:
        self._rows, self._table = rows, table
        self._found = (0, table[:0])  # as one: threads may overwrite each other's, and lose but work

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        scanned, found = self._found
        if len(found) < self._rows and positions.size:
            last = int(positions.max())
            while len(found) <= last and scanned < len(self._table):
                chunk = self._table[scanned : max(4 * scanned, _FIRST_FOUND)]
                scanned += len(chunk)
                found = np.concatenate((found, chunk[chunk < self._rows]))
            self._found = scanned, found
        return found[positions].astype(np.int64)


class IndexShuffle:
    """A random bijection of [0, rows), evaluated at any positions: tables for rows**0.5 values.

    A Feistel network over 2**half x right_size >= rows (the generalized one of Black and Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002), each round of which is a random function
    of its own (Luby and Rackoff, "How to construct pseudorandom permutations", 1988). Less than
    2**half values are outside; they are mapped again until they are not. 12 rounds by measurement: of
    a few rows 4 are visibly non-uniform, and 8 are for pairs of rows.

    The functions are tables up to 2**34 rows, and hashes beyond, which are several times slower.
    """

    def __init__(self, rows: int, sequence: np.random.SeedSequence) -> None:
        self._rows = rows
        self._half = _bits(rows) // 2
        self._sizes = -(-rows >> self._half), 1 << self._half  # of right and left
        self._keys = sequence.generate_state(_ROUNDS, np.uint64)
        self._tables: list[NDArray[np.int64]] = []
        if rows <= _ROUND_TABLES_ROWS:
            random, (right, left) = np.random.default_rng(sequence), self._sizes
            for _ in range(0, _ROUNDS, 2):
                self._tables += random.integers(0, left, right), random.integers(0, right, left)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        ids = self._network(positions)
        outside = np.flatnonzero(ids >= self._rows)
        while outside.size:
            ids[outside] = self._network(ids[outside])
            outside = outside[ids[outside] >= self._rows]
        return ids

    def _network(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        right_size, left_size = self._sizes
        right, left = values >> self._half, values & (left_size - 1)
        drawn = np.empty_like(right)
        unsigned_right, unsigned_drawn = right.view(np.uint64), drawn.view(np.uint64)
        for number in range(0, _ROUNDS, 2):
            self._draw(number, right, left_size, drawn)
            left ^= drawn
            self._draw(number + 1, left, right_size, drawn)
            right += drawn
            np.subtract(right, right_size, out=drawn)
            np.minimum(unsigned_right, unsigned_drawn, out=unsigned_right)  # a negative one is huge
        return right << self._half | left

    def _draw(self, number: int, values: NDArray[np.int64], size: int, out: NDArray[np.int64]) -> None:
        """The random function of one round, into [0, size)."""
        if self._tables:
            self._tables[number].take(values, out=out, mode="clip")  # "raise" would copy twice
        else:
            out[:] = _mix(values.view(np.uint64) ^ self._keys[number]) % np.uint64(size)


class Window:
    """Shuffled within a window that slides over the segments, oldest first.

    Whole segments are grouped into blocks of half a window. Rows are shuffled within each block, and
    what that gives once more within blocks that are shifted by half: from the middle of one to the
    middle of the next. So a row is anywhere from the middle of the block before its own to the middle
    of the one after. A window that covers everything is a uniform shuffle.

    Args:
        segment_rows: of each segment, oldest first.
        window_rows: what a window is to span, about; at least 1.
        seed, key: select one shuffle.
    """

    def __init__(
        self, segment_rows: NDArray[np.int64], window_rows: int, seed: int, key: tuple[int, ...] = ()
    ) -> None:
        starts = _starts(segment_rows).tolist()
        self.rows: int = starts[-1]
        block_rows = self.rows if window_rows >= self.rows else max(1, window_rows // 2)
        self._first_segments = _group(starts, block_rows)
        edges = [starts[segment] for segment in self._first_segments]
        middles = [(start + stop) // 2 for start, stop in itertools.pairwise(edges)]
        self._edges = stages = edges, [0, *middles, self.rows]

        def permutation(stage: int, block: int) -> Permutation:
            rows = stages[stage][block + 1] - stages[stage][block]
            return Permutation(rows, seed, (*key, stage, block))

        self._permutation = lru_cache(maxsize=6)(permutation)  # two or three a stage are in use
        self._seed, self._key = seed, key

    def prepare(self) -> None:
        """Draw ahead what the first positions need: see the function `prepare`."""
        for stage, edges in enumerate(self._edges):
            prepare(edges[1] - edges[0], self._seed, (*self._key, stage, 0))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._shuffled(0, self._shuffled(1, positions))

    def span(self, position: int) -> range:
        edges, shifted = self._edges
        block = bisect_right(shifted, position) - 1  # of the second stage, over two of the first
        first, last = max(block - 1, 0), min(block, len(edges) - 2)
        return range(self._first_segments[first], self._first_segments[last + 1])

    def _shuffled(self, stage: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Each place's block shuffled."""
        if not places.size:
            return places
        edges = self._edges[stage]
        first, last = (bisect_right(edges, int(place)) - 1 for place in (places.min(), places.max()))
        if first == last:
            shuffled: NDArray[np.int64] = self._permutation(stage, first)(places - edges[first])
            shuffled += edges[first]
            return shuffled
        shuffled = np.empty_like(places)
        for block in range(first, last + 1):
            chosen = np.flatnonzero((places >= edges[block]) & (places < edges[block + 1]))
            if chosen.size:
                within = self._permutation(stage, block)(places[chosen] - edges[block])
                shuffled[chosen] = within + edges[block]
        return shuffled


def _group(starts: list[int], block_rows: int) -> list[int]:
    """Cut segments into blocks: the first segment of each, and the number of segments.

    A block ends where it is nearest to an even part of what is left, of at most `block_rows`.
    """
    cuts, segments = [0], len(starts) - 1
    while cuts[-1] < segments:
        start = starts[cuts[-1]]
        left = starts[-1] - start
        target = start + left // -(-left // block_rows)
        cut = bisect_left(starts, target, cuts[-1] + 1)
        if cut - 1 > cuts[-1] and target - starts[cut - 1] < starts[cut] - target:
            cut -= 1
        cuts.append(cut)
    return cuts


class Blocks:
    """Runs of `block_rows` contiguous rows of one segment, in random order.

    Each segment is cut into runs at a random phase. The rows before its first and after its last run
    are joined to those of the others, in random order, and cut into mixed runs. All runs are shuffled
    together; an incomplete mixed one comes last. Memory is of the order of segments and runs.

    Args:
        segment_rows: of each segment, oldest first.
        block_rows: of a run, at least 1.
        seed, key: select one shuffle.
    """

    def __init__(
        self, segment_rows: NDArray[np.int64], block_rows: int, seed: int, key: tuple[int, ...] = ()
    ) -> None:
        starts = _starts(segment_rows)
        self.rows = int(starts[-1])
        self._segments = len(segment_rows)
        self._block_rows = block_rows
        self._runs = Permutation(self.rows // block_rows, seed, (*key, 0))
        random = np.random.default_rng(_sequence(seed, (*key, 1)))
        rest = segment_rows % block_rows
        heads = random.integers(0, rest, endpoint=True)
        tails = rest - heads
        # Runs of all segments laid out one after another, then heads and tails: place to row id is
        # one step function.
        mixed = random.permutation(2 * self._segments)
        lengths = np.concatenate((segment_rows - rest, np.concatenate((heads, tails))[mixed]))
        firsts = np.concatenate(
            (starts[:-1] + heads, np.concatenate((starts[:-1], starts[1:] - tails))[mixed])
        )
        chosen = np.flatnonzero(lengths)
        self._places = _starts(lengths[chosen])[:-1]
        self._shifts = firsts[chosen] - self._places

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        run, row = np.divmod(positions, self._block_rows)
        whole = run < self._runs.rows
        if whole.all():
            places = self._runs(run) * self._block_rows + row
        else:
            places = positions.copy()
            places[whole] = self._runs(run[whole]) * self._block_rows + row[whole]
        return places + self._shifts[self._places.searchsorted(places, "right") - 1]

    def span(self, position: int) -> range:  # noqa: ARG002 - the same everywhere
        return range(self._segments)


def _starts(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n + 1,) the first row of each, and the number of all."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(rows)))


def _bits(rows: int) -> int:
    return (rows - 1).bit_length()


def _sequence(seed: int, key: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(_ORDER_KEY, *key))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
