"""Places: where each item of a dataset lies in its cache.

One int64 an item: the segment's position among those seen, and the row. It comes from the column `_index` of
the segments; nothing of it is stored. Of two copies of an item the one in the older segment serves.
It owns the snapshot that it finds rows in: `release` ends its lease, and the next `refresh` begins another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import CorruptSegmentError
from arrowcache.reading.segment_arrays import are_among
from arrowcache.reading.snapshot import Snapshot
from arrowcache.reading.temperature import Temperature
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.store import Store

INDEX = "_index"  # the column that holds each row's item

_ROW_BITS = 31  # a segment has fewer rows than 2**31
_ROW = (1 << _ROW_BITS) - 1
_ATTEMPTS = 4  # to read the indices of segments, each time without those that turned out damaged


class Places:
    """The places of `length` items. Not safe to use from several threads at a time."""

    def __init__(self, store: Store, length: int) -> None:
        self._store = store
        self._places = np.full(length, -1, np.int64)  # by item: segment << _ROW_BITS | row
        self._seqs = np.empty(0, np.int64)  # of the segments seen, ascending
        self._firsts = np.empty(0, np.int64)  # the first row of each in the snapshot
        self._listed: tuple[SegmentInfo, ...] = ()  # as the snapshot was taken
        self.snapshot: Snapshot | None = None
        self.temperature = Temperature()  # of all its snapshots

    def refresh(self) -> bool:
        """Take in the segments that came and went. Returns: True if there were any, or no snapshot was open.

        Blocks: while the indices of new segments are read.
        Raises: OSError, LockTimeoutError: as `Snapshot.take`. CorruptSegmentError: the disk does not give a
            segment's bytes, again and again.
        """
        listed = tuple(self._store.segments())
        if self.snapshot is not None and listed == self._listed:
            return False
        for left in reversed(range(_ATTEMPTS)):
            self.release()
            snapshot = Snapshot.take(self._store)
            snapshot.temperature = self.temperature
            try:
                self._take_in(snapshot)
                self._listed, self.snapshot = listed, snapshot  # only now: its rows are known
                break
            except CorruptSegmentError:  # it is quarantined by now
                self._store.look_anew()
                if not left:
                    raise
            finally:
                if self.snapshot is None:
                    snapshot.close()
        return True

    def _take_in(self, snapshot: Snapshot) -> None:
        seqs, rows = snapshot.seqs, snapshot.segment_rows
        if not np.all(are_among(self._seqs, seqs)):  # one left: a copy elsewhere may serve instead
            self._places.fill(-1)
            self._seqs = seqs[:0]
        seen = len(self._seqs)  # the oldest: new ones have higher numbers
        firsts = np.cumsum(rows) - rows
        if seen < len(seqs):
            ids = np.arange(firsts[seen], len(snapshot))
            indices = snapshot.gather(ids, [INDEX])[INDEX]
            assert isinstance(indices, np.ndarray)
            segments = np.repeat(np.arange(seen, len(seqs)), rows[seen:])
            places = segments << _ROW_BITS | ids - firsts[segments]
            is_item = (indices >= 0) & (indices < len(self._places))
            indices, places = indices[is_item][::-1], places[is_item][::-1]  # of two the first is set last
            is_new = self._places[indices] < 0
            self._places[indices[is_new]] = places[is_new]
        self._seqs, self._firsts = seqs, firsts

    def rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each item (n,) in the snapshot, or -1 where it is not there, of indices (n,)."""
        places = self._places[indices]
        if self.snapshot is None or not len(self._firsts):
            return np.full(len(indices), -1, np.int64)
        firsts: NDArray[np.int64] = self._firsts[places >> _ROW_BITS]  # of -1: any
        return np.where(places < 0, -1, firsts + (places & _ROW))

    @property
    def count(self) -> int:
        """The number of items that are there; each once."""
        return int(np.count_nonzero(self._places >= 0))

    @property
    def missing(self) -> NDArray[np.int64]:
        """Indices (n,) of the items that are not there, ascending."""
        return np.flatnonzero(self._places < 0)

    def release(self) -> None:
        """End the lease; the places stay known. Idempotent."""
        if self.snapshot is not None:
            self.snapshot.close()
            self.snapshot = None
