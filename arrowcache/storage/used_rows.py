"""Used rows: the rows that one name has had, of `Loader(once=name)`, in a file of its own.

`notes/<name>.used` is a log: a record for each batch, by one write, behind those before it. A record has its
length, a checksum and runs of rows. The file is made anew, without rows whose segments have left, when it is
opened, and when it has grown to a multiple of what it says. Its bytes count in the capacity: blocks are taken
for some hundred batches at once, under cache.lock.

Guarantees: a name has one holder at a time, which the kernel's lock on the file says; a process that dies in
whatever way loses no batch that `add` has returned for. A batch whose write was cut short is not used: its
rows come again. A power cut may lose the last batches, unless the cache is durable.
Must never: take a row for used that no `add` named.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from arrowcache.errors import CacheFormatError, warn
from arrowcache.lifetimes import Closable, Origin
from arrowcache.limits import Limits
from arrowcache.storage.folder import PartFile
from arrowcache.storage.layout import TASK_NAME, SegmentInfo, newer_format
from arrowcache.storage.locks import LockFile, holder_names
from arrowcache.storage.store import Store

_MAGIC = b"ACused01"
_HEAD = struct.Struct("<QQ")  # the bytes of a record's runs, and their xxh3_64
_GROWTH_BYTES = 64 << 10  # taken at once

_Mask = NDArray[np.bool_]
_Runs = NDArray[np.int64]  # (n, 3): number of a segment, first row, count of rows


class RowsOf(NamedTuple):
    """Some rows of a segment: their places there, (n,) int64, ascending."""

    segment: SegmentInfo
    rows: NDArray[np.int64]


def require_name_of_rows(name: object) -> str:
    """Return the argument `once` of a loader. Raises: TypeError, ValueError: it is no name."""
    if not isinstance(name, str):
        raise TypeError(f"once={name!r} must be a name, such as 'learner': the rows that it has had are kept")
    if not TASK_NAME.fullmatch(name):
        raise ValueError(
            f"once={name!r} is a file's name in the cache: use 1 to 100 letters, digits, '_', '-' and '.', "
            "with no '-' first"
        )
    return name


class UsedRows(Closable):
    """The rows that a name has used. It holds the name until `close`. One thread at a time uses it.

    Raises: ValueError: another loader holds the name; the cache is of a dataset. CacheFormatError: its file
        is of a newer format. CacheFullError: what is leased leaves no room for it. LockTimeoutError, OSError:
        as `Store.locked`.
    """

    def __init__(self, store: Store, name: str) -> None:
        if store.settings.dataset is not None:
            raise ValueError(
                f"once={name!r} is for rows that stay in their segments, and the cache of a dataset merges "
                "them: read it by arrowcache.torch.Loader(train), each item once an epoch"
            )
        self._store, self._name, self._origin = store, name, Origin()
        self._masks: dict[int, _Mask] = {}  # by the number of a segment; missing: none is used
        self._file: PartFile | None = None
        self._is_closed = self._is_torn = False
        self._end = self._taken = self._least = 0  # bytes written, bytes with blocks, bytes when it was new
        with store.locked():
            self._require_free()
            for info, runs in _by_segment(self._records(name), store.segments()):
                mask = self._mask_of(info)
                for first, count in runs.tolist():
                    mask[max(0, first) : max(0, first + count)] = True
            self._drop_others()
            self._write_anew()

    def of(self, segment: SegmentInfo) -> _Mask | None:
        """The mask of a segment's rows that are used: (rows,), not to be changed. None: none is."""
        return self._masks.get(segment.seq)

    def add(self, used: Sequence[RowsOf]) -> None:
        """Take rows for used, by one write: all of them, or none if this process dies meanwhile.

        Blocks: for cache.lock, now and then; for the disk, if the cache is durable.
        Raises: CacheFullError: there is no room. LockTimeoutError, OSError. None is used then.
        """
        runs = np.concatenate([_runs_of(*each) for each in used])
        record = _record(runs)
        if self._is_torn or self._end > 2 * self._least + Limits.current.used_bytes:
            with self._store.locked():
                self._write_anew(len(record))
        elif self._end + len(record) > self._taken:
            with self._store.locked():
                self._take(len(record))
        assert self._file is not None
        try:
            self._file.write([memoryview(record)])
            if self._store.settings.durable:
                self._file.sync()
        except BaseException:  # a part of it may be there: what is behind it would never be read
            self._is_torn = True
            raise
        self._end += len(record)
        for segment, rows in used:
            self._mask_of(segment)[rows] = True

    def forget(self, seq: int) -> None:
        """Drop the rows of a segment that has left."""
        self._masks.pop(seq, None)

    def require_open(self) -> None:
        """Raises: ValueError: it was closed, or this is a forked child, whose parent holds the name."""
        self._origin.require(f"the name {self._name!r} of Loader(once=...)", "take another one here")
        if self._is_closed:
            raise ValueError("the loader is closed: make a new one")

    def close(self) -> None:
        """Let go of the name. Idempotent."""
        self._is_closed = True
        if self._file is not None and self._origin.is_here:
            self._file.discard()
        self._file = None

    def _mask_of(self, segment: SegmentInfo) -> _Mask:
        mask = self._masks.get(segment.seq)
        if mask is None:
            mask = self._masks[segment.seq] = np.zeros(segment.rows, np.bool_)
        return mask

    def _require_free(self) -> None:
        """Raises: ValueError: somebody holds the name. Under cache.lock: nobody takes it meanwhile."""
        path = self._store.folder.used_path(self._name)
        try:
            file = LockFile(path)
        except FileNotFoundError:
            return
        with file:
            if not file.try_exclusive():
                raise ValueError(
                    f"once={self._name!r} is in use by {holder_names(path)}: a name has one loader at a "
                    "time. Close that one, or take another name, which has each row anew"
                )

    def _drop_others(self) -> None:
        """Drop the files of names that nobody holds, and of whose rows none is there; under cache.lock."""
        folder, segments = self._store.folder, self._store.segments()
        for name in folder.unheld_names():
            with suppress(CacheFormatError):
                if name != self._name and not any(True for _ in _by_segment(self._records(name), segments)):
                    folder.drop_used(name)

    def _records(self, name: str) -> Iterator[_Runs]:
        """Yield what a name's file says, up to the first record that is not whole."""
        path = self._store.folder.used_path(name)
        data = self._store.folder.read_used(name)
        if not data:
            return
        if data[: len(_MAGIC)] != _MAGIC:
            raise newer_format(f"{path} is none that this release knows")
        at = len(_MAGIC)
        while at + _HEAD.size <= len(data):
            nbytes, checksum = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            record = data[at : at + nbytes]
            if not nbytes or nbytes % 24 or xxhash.xxh3_64_intdigest(record) != checksum:
                if nbytes and any(data[at + nbytes :]):  # no write that was cut short
                    warn(f"{path} is damaged from byte {at} on: rows that were used since come again")
                return
            yield np.frombuffer(record, np.int64).reshape(-1, 3)
            at += nbytes

    def _write_anew(self, more: int = 0) -> None:
        """Put a file in place that says no more than is known, with room for more; under cache.lock."""
        folder, before = self._store.folder, self._file
        data = _MAGIC + (_record(np.concatenate(runs)) if (runs := [*self._all_runs()]) else b"")
        taken = self._room_for(len(data) + more)
        part = folder.new_part()
        try:
            part.allocate(taken)
            part.write([memoryview(data)])
            part.sync()  # before it takes the place of one that may be on the disk
            folder.put_used(self._name, part)
        except BaseException:
            part.discard()
            raise
        self._file, self._end, self._taken, self._least = part, len(data), taken, len(data)
        self._is_torn = False
        if before is not None:
            before.discard()

    def _all_runs(self) -> Iterator[_Runs]:
        for info in self._store.segments():
            if (mask := self._masks.get(info.seq)) is not None:
                yield _runs_of(info, mask.nonzero()[0])

    def _take(self, nbytes: int) -> None:
        """Take blocks for so many bytes more, and some; under cache.lock."""
        assert self._file is not None
        more = self._room_for(nbytes)
        self._file.allocate(self._taken + more)
        self._taken += more

    def _room_for(self, nbytes: int) -> int:
        """Make room for so many bytes, and some. Returns: their number."""
        nbytes = -(-nbytes // _GROWTH_BYTES) * _GROWTH_BYTES
        self._store.folder.sweep()  # rather debris than segments
        self._store.require_room(nbytes)
        return nbytes


def _runs_of(segment: SegmentInfo, rows: NDArray[np.int64]) -> _Runs:
    """The runs of rows (n,), ascending."""
    if len(rows) and int(rows[-1]) - int(rows[0]) == len(rows) - 1:  # as usual
        return np.array([[segment.seq, rows[0], len(rows)]], np.int64)
    edges = np.flatnonzero(np.diff(rows, prepend=-2, append=segment.rows + 2) != 1)
    firsts = rows[edges[:-1]]
    return np.stack([np.full(len(firsts), segment.seq), firsts, np.diff(edges)], axis=1).astype(np.int64)


def _record(runs: _Runs) -> bytes:
    data = runs.tobytes()
    return _HEAD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data


def _by_segment(
    records: Iterable[_Runs], segments: Sequence[SegmentInfo]
) -> Iterator[tuple[SegmentInfo, NDArray[np.int64]]]:
    """Yield the runs (n, 2) of each of these segments: first row and count of rows."""
    by_seq = {segment.seq: segment for segment in segments}
    runs = np.concatenate([np.empty((0, 3), np.int64), *records])
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    for part in np.split(runs, np.flatnonzero(np.diff(runs[:, 0])) + 1):
        if len(part) and (info := by_seq.get(int(part[0, 0]))) is not None:
            yield info, part[:, 1:]
