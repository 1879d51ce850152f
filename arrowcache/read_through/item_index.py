"""ItemIndex: where each item of a dataset lies in its cache.

One int64 an item holds its place: the segment's number among those seen, and the row. Places come from the
column `_index` of the segments; nothing of them is stored. Of two copies of an item the one in the older
segment serves. The column is read once for each segment. A segment that leaves costs one more look at each
place. The index owns the snapshot that its rows are in: `release` ends its lease, and the next `refresh`
begins another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import CorruptSegmentError
from arrowcache.limits import Limits
from arrowcache.reading.gather import ReadMode
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.row_ids import are_among
from arrowcache.storage.store import Store

INDEX = "_index"  # the column that holds each row's item

_ROW_BITS = 31  # a segment has fewer rows than 2**31
_ROW = (1 << _ROW_BITS) - 1
_NONE = np.empty(0, np.int64)
_PIECE = 1 << 16  # items that are looked at together
_ATTEMPTS = 4  # to read the indices of segments, each time without those that turned out damaged


class ItemIndex:
    """The places of `length` items. Not safe to use from several threads at a time."""

    def __init__(self, store: Store, length: int) -> None:
        self._store = store
        self._places = np.full(length, -1, np.int64)  # by item: segment << _ROW_BITS | row
        self._seqs = _NONE  # of the segments seen, ascending, also of some that left; empty: none is known
        self._firsts = _NONE  # the first row of each in the snapshot; -1: it left
        self._copies = _NONE, _NONE  # items and places of copies that an older one serves for
        self._listed: tuple[SegmentInfo, ...] = ()  # as the snapshot was taken
        self.snapshot: Snapshot | None = None
        self.read_mode = ReadMode()  # of all its snapshots

    def refresh(self) -> bool:
        """Update it by the segments that came and went.

        Returns: True: there were some, or no snapshot was open.
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
            snapshot.read_mode = self.read_mode
            try:
                self._update(snapshot)
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

    def _update(self, snapshot: Snapshot) -> None:
        seqs, rows = snapshot.seqs, snapshot.segment_rows
        firsts = np.cumsum(rows) - rows
        known = self._seqs
        added = int(np.searchsorted(seqs, known[-1], "right")) if len(known) else 0
        if len(known) and not np.all(are_among(seqs[:added], known[self._firsts >= 0])):
            known, added = _NONE, 0  # an older one is back, as parts are whose merged segment was damaged
        indices, places = self._read(snapshot, added, len(known))
        self._seqs = _NONE  # until all is known: Ctrl-C may come anywhere
        if not len(known):
            self._places.fill(-1)
            self._copies = _NONE, _NONE
        all_firsts = np.full(len(known) + len(seqs) - added, -1, np.int64)
        all_firsts[np.searchsorted(known, seqs[:added])] = firsts[:added]
        all_firsts[len(known) :] = firsts[added:]
        if np.any((all_firsts[: len(known)] < 0) & (self._firsts[: len(known)] >= 0)):
            self._forget(all_firsts)
        self._put(indices, places)
        known, self._firsts = np.concatenate((known, seqs[added:])), all_firsts
        if len(known) > 2 * len(seqs) + Limits.current.left_segments:
            known = self._renumber(known)
        self._seqs = known

    def _read(self, snapshot: Snapshot, added: int, seen: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the items of the segments from number `added` on, and their places.

        Args:
            seen: number of segments that have numbers.
        """
        rows = snapshot.segment_rows
        first, counts = int(rows[:added].sum()), rows[added:]
        segments = np.repeat(np.arange(len(counts)), counts)
        if not len(segments):
            return _NONE, _NONE
        indices = snapshot.gather(np.arange(first, len(snapshot)), [INDEX])[INDEX]
        assert isinstance(indices, np.ndarray)
        within = np.arange(len(segments)) - (np.cumsum(counts) - counts)[segments]
        places = seen + segments << _ROW_BITS | within
        numbers = self._numbers_of(indices)
        is_item = numbers >= 0
        return numbers[is_item], places[is_item]

    def _numbers_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which item each value (n,) of the column is, or -1: none. Items that are new get a place."""
        return np.where(indices < len(self._places), indices, -1)

    def _forget(self, firsts: NDArray[np.int64]) -> None:
        """Give items of segments that left the places of their copies, if there are some."""
        is_there = np.append(firsts >= 0, True)  # the last: of items without a place
        for start in range(0, len(self._places), _PIECE):
            some = self._places[start : start + _PIECE]
            some[~is_there[some >> _ROW_BITS]] = -1
        indices, places = self._copies
        stays = is_there[places >> _ROW_BITS]
        self._copies = _NONE, _NONE
        self._put(indices[stays], places[stays])

    def _put(self, indices: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Give items (n,) places, oldest first, where they have none."""
        is_new = self._places[indices] < 0
        new, at = indices[is_new][::-1], places[is_new][::-1]  # of two the first is set last
        self._places[new] = at
        if (is_copy := self._places[indices] != places).any():
            both = zip(self._copies, (indices[is_copy], places[is_copy]), strict=True)
            before, now = (np.concatenate(each) for each in both)
            self._copies = before, now

    def _renumber(self, known: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leave out segments that left, and number the others anew. Returns: the others, of `known`."""
        is_there = self._firsts >= 0
        numbers = np.append(np.cumsum(is_there) - 1, -1)
        for start in range(0, len(self._places), _PIECE):
            some = self._places[start : start + _PIECE]
            some[:] = numbers[some >> _ROW_BITS] << _ROW_BITS | some & _ROW
        indices, places = self._copies
        self._copies = indices, numbers[places >> _ROW_BITS] << _ROW_BITS | places & _ROW
        self._firsts = self._firsts[is_there]
        return known[is_there]

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
