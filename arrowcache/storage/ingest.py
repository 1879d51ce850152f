"""Ingest: rows of files on their way into a cache, each once, in segments that say where they come from.

The names of segments say which rows of which files are in a cache, a file being known by its bytes. So an
import adds only rows that are missing, also after one that was killed.

Guarantees: a file that turns out to be bad leaves none of its rows behind, but for those that a reader leases
at that moment; a segment's rows follow each other as in the files. What was published of a good file stays,
however an import ends.
Must never: publish rows under the name of a file that they are not of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.lifetimes import Closable
from arrowcache.storage.layout import (
    FileRows,
    SegmentInfo,
    file_rows_of,
    has_place,
    import_task,
)
from arrowcache.storage.settings import Settings
from arrowcache.storage.store import RoomPolicy, Store

_PIECE_BYTES = 1 << 20  # of a file that is read for its fingerprint


@dataclass(frozen=True, slots=True)
class Imported:
    """Counts of what an import published: rows, segments and their allocated bytes."""

    rows: int = 0
    segments: int = 0
    nbytes: int = 0

    def plus(self, segment: SegmentInfo) -> Imported:
        """Return the counts with a segment added."""
        nbytes = self.nbytes + segment.allocated_bytes
        return Imported(self.rows + segment.rows, self.segments + 1, nbytes)

    def minus(self, segment: SegmentInfo) -> Imported:
        nbytes = self.nbytes - segment.allocated_bytes
        return Imported(self.rows - segment.rows, self.segments - 1, nbytes)


class Ingest(Closable):
    """One import's builder, and what is known of its files; a context manager that discards what is pending.

    Args:
        store: opens the cache, or makes it: called when the first segment is ready, or it is asked what is
            there.
        kind: of the files: "parquet" or "tfrecord".
        again: 8 hex digits: take in also what is there; "": only what is missing.
        before: called before each publish; what it raises ends the import.
    """

    def __init__(
        self,
        settings: Settings,
        store: Callable[[], Store],
        kind: str,
        *,
        again: str = "",
        policy: RoomPolicy | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._open, self._kind, self._again = store, kind, again
        self._policy = policy or RoomPolicy()
        self._before = before
        self._builder = SegmentBuilder(settings.form)
        self._pending: list[FileRows] = []  # of the rows in the builder
        self.store: Store | None = None  # while it was not needed
        self._sign = ExitStack()  # shows that somebody writes
        self._own: set[int] = set()  # seqs of what this import published
        self._coverage = Coverage()  # of the cache, or of what was imported again
        self.published = Imported()

    def open(self) -> Store:
        """The cache, which is opened or made now unless it was before."""
        if self.store is None:
            self.store = self._open()
            self._sign = self.store.show_writing()
            if not self._again:
                self._coverage = Coverage(self.store.segments())
        return self.store

    def missing(self, fingerprint: str, total: int | None = None) -> list[tuple[int, int | None]]:
        """Return the rows of a file to import, as `Coverage.missing`; pending rows count as present."""
        return self._coverage.missing(fingerprint, total, self._pending)

    def rows_of(self, fingerprint: str) -> int:
        """Count the rows of a file that are published or pending."""
        return self._coverage.rows(fingerprint, self._pending)

    def begin(self, fingerprint: str, first: int) -> None:
        """Rows of a file follow, from its row `first` on.

        Blocks, raises: as `take`.
        """
        if self._pending and not has_place(self._kind, self._pending, first, self._again):
            self.publish()
        self._pending.append(FileRows(fingerprint, first, 0))

    def take(self, samples: Mapping[str, Any], *, many: bool) -> int:
        """Take one sample, or many along a leading axis; returns how many.

        Blocks: while a full segment is written, and while there is no room for it.
        Raises: SchemaError, ValueError: they do not fit; what `Store.publish` raises.
        """
        rows = self._builder.convert(samples, many=many)
        taken = 0
        while taken < rows.count:
            count = 0 if self._builder.is_full else self._builder.take(rows, taken)
            if not count:
                self.publish()
                continue
            last = self._pending[-1]
            self._pending[-1] = replace(last, rows=last.rows + count)
            taken += count
        return taken

    def end(self) -> None:
        """The file that was begun has no more rows."""
        self._pending[-1] = replace(self._pending[-1], is_last=True)

    def publish(self) -> None:
        """Publish what is pending, full or not.

        Blocks, raises: as `Store.publish`.
        """
        last = self._pending[-1] if self._pending else None
        origins = [origin for origin in self._pending if origin.rows]
        if origins:
            self._before()
            task = import_task(self._kind, origins, self._again)
            store = self.open()
            came = store.publish(self._builder.encode(), task, self._policy, self._builder.clear)
            self._builder.clear()  # another import may have published it
            if came.segment is not None:
                self.published = self.published.plus(came.segment)
                self._own.add(came.segment.seq)
            for origin in origins:
                self._coverage.add(origin)
        if last is not None:
            self._pending = [] if last.is_last else [FileRows(last.fingerprint, last.first + last.rows, 0)]

    def give_up(self, fingerprint: str) -> list[SegmentInfo]:
        """A file is bad: forget its rows, and take back what was published of them.

        Rows of files before it, in the same segments, leave too: ask again which are missing.

        Returns: the segments that stay, since somebody leases them.
        """
        self._builder.clear()
        self._pending = []
        if self.store is None:
            return []
        gone, leased = self.store.take_back(
            lambda listed: [segment for segment in listed if self._is_of(segment, fingerprint)]
        )
        for segment in gone:
            if segment.seq in self._own:
                self.published = self.published.minus(segment)
            for origin in file_rows_of(segment.task):
                self._coverage.forget(origin)
        return leased

    def _is_of(self, segment: SegmentInfo, fingerprint: str) -> bool:
        if self._again and not segment.task.endswith(self._again):
            return False
        return any(origin.fingerprint == fingerprint for origin in file_rows_of(segment.task))

    def close(self) -> None:
        """Discard what is pending. Idempotent."""
        self._builder.clear()
        self._pending = []
        self._sign.close()


class Coverage:
    """The rows of files that a cache has."""

    def __init__(self, segments: Iterable[SegmentInfo] = ()) -> None:
        self._runs: dict[str, list[FileRows]] = {}
        for segment in segments:
            for origin in file_rows_of(segment.task):
                self.add(origin)

    def add(self, origin: FileRows) -> None:
        """Note rows of a file that the cache has."""
        self._runs.setdefault(origin.fingerprint, []).append(origin)

    def forget(self, origin: FileRows) -> None:
        """Note that rows left the cache. They need not be known."""
        runs = self._runs.get(origin.fingerprint, [])
        self._runs[origin.fingerprint] = [run for run in runs if run != origin]

    def missing(
        self, fingerprint: str, total: int | None = None, pending: Iterable[FileRows] = ()
    ) -> list[tuple[int, int | None]]:
        """The rows of a file that are not there, as (first, stop).

        Args:
            total: the number of the file's rows. None means unknown. The last stop is None then, unless the
                file's last row was seen here.
            pending: rows that count as present.
        """
        runs = self._of(fingerprint, pending)
        if total is None:
            total = next((run.first + run.rows for run in runs if run.is_last), None)
        there = _merged(runs)
        starts = [0, *(stop for _, stop in there)]
        stops = [*(start for start, _ in there), total]
        gaps = zip(starts, stops, strict=True)
        return [(start, stop) for start, stop in gaps if stop is None or start < stop]

    def rows(self, fingerprint: str, pending: Iterable[FileRows] = ()) -> int:
        """Count the rows of a file that are there, each once."""
        return sum(stop - start for start, stop in _merged(self._of(fingerprint, pending)))

    def _of(self, fingerprint: str, pending: Iterable[FileRows]) -> list[FileRows]:
        return [*self._runs.get(fingerprint, ()), *(o for o in pending if o.fingerprint == fingerprint)]


def _merged(runs: Iterable[FileRows]) -> list[tuple[int, int]]:
    """Rows as (first, stop) that ascend, and neither touch nor overlap."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((run.first, run.first + run.rows) for run in runs if run.rows):
        if merged and start <= merged[-1][1]:
            start, stop = merged[-1][0], max(merged.pop()[1], stop)
        merged.append((start, stop))
    return merged


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the fingerprint of a file: 16 hex digits, from all of its bytes.

    All of them, since a part would not do: files of numbers that are stored as they are may have one length,
    and footers that are equal to the byte.

    Blocks: while the file is read, which the page cache then has.
    Raises: OSError: it cannot be.
    """
    digest = xxhash.xxh3_64()
    piece = memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
