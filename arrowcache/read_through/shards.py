"""Shards: the items of a stream in its cache: of each shard the first ones, up to all of them.

An item is (shard, position), which the column `_index` has as one number. `ShardReader` finds, publishes and
counts items; its user iterates over the stream. Guarantees:
- what is published of a shard is a prefix: an item is taken in only behind the one before it, and a failure
  gives up all that came since the last segment. Where a damaged segment left a gap, it is closed first;
- one process at a time publishes items of a shard, so that none is there twice;
- a shard whose number of items is noted has them all, unless a segment was damaged since.
`WholeReader` reads a stream that is complete by one number an item, as a map-style dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import CorruptSegmentError
from arrowcache.read_through.item_index import ItemIndex
from arrowcache.read_through.publisher import Publisher
from arrowcache.read_through.read_through import ItemColumns, Make, ReadThrough
from arrowcache.reading.columns import ColumnData
from arrowcache.storage.claims import NoShardClaims, ShardClaims
from arrowcache.storage.store import Store
from arrowcache.units import format_count

_POSITION_BITS = 40
_POSITION = (1 << _POSITION_BITS) - 1
_CHUNK_BYTES = 4 << 20  # of items that are read together
_MAX_CHUNK = 256


def index_of(shard: int, position: int) -> int:
    """Return the value of `_index` of an item."""
    return shard << _POSITION_BITS | position


def named(index: int) -> str:
    """Return the name of an item in errors."""
    return f"item {index & _POSITION} of shard {index >> _POSITION_BITS}"


class ShardIndex(ItemIndex):
    """The places of items of a stream, by the values of `_index`. It grows as items come.

    The places of a shard lie one after another. A shard that outgrows its room moves to twice as much.
    """

    def __init__(self, store: Store, shards: int) -> None:
        super().__init__(store, 1)  # the first place stays empty: unknown items have its number
        self._begins, self._rooms = np.zeros((2, shards), np.int64)  # of each shard among the places
        self._stored: dict[int, int] = {}  # what `stored` has found

    def refresh(self) -> bool:
        if is_new := super().refresh():
            self._stored.clear()
        return is_new

    def stored(self, shard: int) -> int:
        """Return how many items of a shard are there, from the first on without a gap."""
        if shard not in self._stored:
            places = self._places_of(shard)
            missing = np.flatnonzero(places < 0)
            self._stored[shard] = int(missing[0]) if len(missing) else len(places)
        return self._stored[shard]

    def has_gaps(self, shard: int) -> bool:
        """True if there are items behind a gap."""
        return bool((self._places_of(shard)[self.stored(shard) :] >= 0).any())

    def _places_of(self, shard: int) -> NDArray[np.int64]:
        begin = int(self._begins[shard])
        return self._places[begin : begin + int(self._rooms[shard])]

    def rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return super().rows_of(self._known(indices))

    def _known(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        shards, positions = indices >> _POSITION_BITS, indices & _POSITION
        return np.where(positions < self._rooms[shards], self._begins[shards] + positions, 0)

    def _numbers_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        shards, positions = indices >> _POSITION_BITS, indices & _POSITION
        needed = np.zeros(len(self._rooms), np.int64)
        is_item = (shards >= 0) & (shards < len(needed))
        np.maximum.at(needed, shards[is_item], positions[is_item] + 1)
        for shard in np.flatnonzero(needed > self._rooms).tolist():
            self._move(shard, max(int(needed[shard]), 2 * int(self._rooms[shard])))
        return np.where(is_item, self._known(np.where(is_item, indices, 0)), -1)

    def _move(self, shard: int, room: int) -> None:
        old, begin, end = self._places_of(shard), int(self._begins[shard]), len(self._places)
        places = np.concatenate((self._places, old, np.full(room - len(old), -1, np.int64)))
        places[begin : begin + len(old)] = -1
        numbers, of_copies = self._copies
        is_here = (numbers >= begin) & (numbers < begin + len(old))
        self._copies = np.where(is_here, numbers - begin + end, numbers), of_copies
        self._places, self._begins[shard], self._rooms[shard] = places, end, room


class ShardPublisher(Publisher):
    """Publishes shards of a stream, each from its first item on.

    Args: as of `Publisher`.
    """

    _claims: ShardClaims | NoShardClaims
    _index: ShardIndex

    def __init__(self, *args: Any) -> None:
        self._next: dict[int, int] = {}  # of claimed shards: the position to be taken in next
        self._ended: dict[int, int | None] = {}  # shards that nobody iterates over, and their items
        self._with_gaps: set[int] = set()
        super().__init__(*args)

    def _open_claims(self, path: Path, mode: int) -> ShardClaims | NoShardClaims:
        assert self._store.settings.dataset is not None
        shards = self._store.settings.dataset.shards
        return NoShardClaims(path, shards) if self._store.is_frozen else ShardClaims(path, mode, shards)

    def lengths(self) -> NDArray[np.int64]:
        """Return the noted number of items of each shard (shards,), or -1."""
        return self._claims.lengths()

    def length(self, shard: int) -> int:
        """Return the noted number of items of a shard, or -1."""
        return self._claims.length(shard)

    def stores(self, shard: int) -> bool:
        """True as long as the items of a shard that are put are published."""
        return shard in self._claims.held

    def begin(self, shard: int) -> bool:
        """Claim a shard, to `put` its items from the first one that is missing on.

        Returns: False: another process or iterator has it, or nothing is stored now.
        Blocks: while what this process has still to publish of it is written.
        """
        if shard in self._ended:
            self.publish()
        with self.lock:
            if not self.can_store or not self._claims.claim(shard):
                return False
            self._ended.pop(shard, None)
            with self._storing():
                self.refresh()  # the process before may have published some
                self._next[shard] = self._index.stored(shard)
                if self._index.has_gaps(shard):
                    self._with_gaps.add(shard)
            return shard in self._claims.held

    def end(self, shard: int, length: int | None = None) -> None:
        """End the claim of a shard, once all that was put is published.

        Args:
            length: its number of items, where it came to its end.
        """
        with self.lock, self._storing():
            if shard in self._claims.held:
                self._ended[shard] = length
                self._release_published()

    def _claim_of(self, index: int) -> int:
        return index >> _POSITION_BITS

    def _may_take(self, index: int) -> bool:
        shard, position = index >> _POSITION_BITS, index & _POSITION
        if shard not in self._claims.held or self._next[shard] != position:
            return False
        if shard in self._with_gaps and self._index.rows_of(np.array([index]))[0] >= 0:
            self._took(index)  # it lies behind a gap that is closed by now
            return False
        return True

    def _took(self, index: int) -> None:
        self._next[index >> _POSITION_BITS] = (index & _POSITION) + 1

    def _release_published(self) -> None:
        for shard, length in [*self._ended.items()]:
            if shard in self._claims.held:
                if self._index.stored(shard) < self._next[shard]:
                    continue
                if length is not None and self._next[shard] == length:
                    self._claims.set_length(shard, length)
                self._claims.release([shard])
            del self._ended[shard]


class ShardReader(ReadThrough):
    """Finds and publishes items of a stream, in one process. Args, raises: as `ReadThrough`."""

    publisher: ShardPublisher
    _index: ShardIndex

    def _new_index(self) -> ShardIndex:
        assert self._store.settings.dataset is not None
        return ShardIndex(self._store, self._store.settings.dataset.shards)

    def _new_publisher(self) -> ShardPublisher:
        return ShardPublisher(self._store, self._index, self._backoff)

    def stored(self, shard: int) -> int:
        """Return how many items of a shard are in the cache, without a gap. 0: it cannot be read.

        Blocks: while new segments are read.
        """
        with self._lock:
            return self._index.stored(shard) if self._is_fresh() else 0

    def is_whole(self, shard: int, stored: int) -> bool:
        """True if a shard has so many items, and no more."""
        return self.publisher.length(shard) == stored

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of items of each shard (shards,) that is stored to its end, or -1."""
        with self._lock:
            self.publisher.refresh()
            noted = self.publisher.lengths()
            stored = np.array([self._index.stored(shard) for shard in range(len(noted))], np.int64)
            return np.where(noted == stored, noted, -1)

    def read(self, shard: int, start: int, stop: int) -> ItemColumns:
        """Gather items of a shard from `start` on, before `stop`: as many as are read together.

        Blocks, raises: as `find`.
        """
        with self._lock:
            snapshot = self._index.snapshot
            row_bytes = _CHUNK_BYTES if snapshot is None else snapshot.row_bytes
        stop = min(stop, start + max(1, min(_MAX_CHUNK, _CHUNK_BYTES // row_bytes)))
        return self.find(np.arange(index_of(shard, start), index_of(shard, stop)))

    def count_streamed(self) -> None:
        """Count an item that came from the stream."""
        self._counts[1] += 1


class WholeReader(ReadThrough):
    """Reads a stream that is complete: item n of all shards, one after another.

    Args:
        lengths: number of items of each shard (shards,).
        args: as of `ReadThrough`.
    """

    def __init__(self, lengths: NDArray[np.int64], *args: Any) -> None:
        self._lengths = lengths
        super().__init__(*args)

    def _new_index(self) -> ItemIndex:
        return _WholeIndex(self._store, self._lengths)

    def _new_publisher(self) -> Publisher:
        return ShardPublisher(self._store, self._index, self._backoff)

    def items(
        self,
        indices: NDArray[np.int64],
        items_of: Callable[[dict[str, ColumnData]], Iterable[Any]],
        make: Make,  # noqa: ARG002  # a stream makes no item by number
        at_once: int | None = 1,  # noqa: ARG002
    ) -> list[Any]:
        """Return items (n,) of the cache. Raises: CorruptSegmentError: some are not there any more."""
        positions, columns = self.find(indices)
        if missing := len(indices) - len(positions):
            raise CorruptSegmentError(
                f"{format_count(missing, 'item')} of a batch left the cache, such as with a damaged segment: "
                "iterate once over the stream, train, which stores them again"
            )
        return [*items_of(columns)]


class _WholeIndex(ItemIndex):
    def __init__(self, store: Store, lengths: NDArray[np.int64]) -> None:
        super().__init__(store, int(lengths.sum()))
        self._lengths, self._begins = lengths, np.cumsum(lengths) - lengths

    def _numbers_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        shards, positions = indices >> _POSITION_BITS, indices & _POSITION
        shards = np.where((shards >= 0) & (shards < len(self._lengths)), shards, 0)
        return np.where(positions < self._lengths[shards], self._begins[shards] + positions, -1)
