"""Mapped: the segments of a cache that are mapped in this process, each by itself, for all its snapshots.

Guarantees: mapped implies leased, by whoever called `acquire`; a mapped file's structure was
checked; all caches of a process together map at most half of vm.max_map_count segments and,
where addresses are limited (RLIMIT_AS), half of those that the rest of the process leaves. A segment
for which no mapping is left is known, and read without one.

All full segments of a cache have the same layout, and so does everything that `read_structure`
looks at: headers, footer and offsets of tensors. A `Template` is that part of one file which
passed the complete check: every byte but the values of its columns and the digits of their
checksums. Another file of as many bytes and rows in which all those bytes are equal would pass
with the same `Layout`; for any other file a template says nothing.

That needs a file whose headers do not reach into its values or digits, which a crafted file's
might. So a template is made only of a file that this Arrow would write bit by bit like that:
its record batch is written again, by reference, and compared. Files of another writer or with
variable-length columns, whose offsets are data, have no template.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from arrowcache.arrow.schema import Schema
from arrowcache.arrow.segment import Layout, rewrite
from arrowcache.lifetimes import Mutex, forgets_in_child, is_exiting, unforked, until_exit
from arrowcache.limits import Limits
from arrowcache.linux import most_mappings
from arrowcache.native import maps
from arrowcache.native.engine import entries_of
from arrowcache.native.maps import FileKind
from arrowcache.storage import mapping
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.row_ids import are_among
from arrowcache.storage.settings import Settings
from arrowcache.storage.store import Store
from arrowcache.storage.verification import check_file, unfit

_HALF = most_mappings() // 2
_MAPPED_A_CALL = 128  # segments: some 2 ms, while other threads wait for the GIL


def _most_mapped() -> int:
    most = Limits.current.mapped_segments
    return _HALF if most is None else most


class SegmentArrays(NamedTuple):
    """Segments, oldest first, and an array (n,) of each fact; read-only."""

    segments: tuple[SegmentInfo, ...]
    seqs: NDArray[np.int64]
    rows: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    published: NDArray[np.float64]

    @classmethod
    def of(cls, segments: Sequence[SegmentInfo], before: SegmentArrays | None = None) -> SegmentArrays:
        """Return the arrays of some segments.

        Args:
            before: arrays of an earlier list; reused where its newest segments are the oldest of this one.
        """
        segments = tuple(segments)
        if before is not None and segments:
            first = int(before.seqs.searchsorted(segments[0].seq))
            count = len(before.seqs) - first
            if segments[:count] == before.segments[first:]:
                pairs = zip(before[1:], cls.of(segments[count:])[1:], strict=True)
                return cls(segments, *[np.concatenate((kept[first:], new)) for kept, new in pairs])
        seqs, rows, nbytes = [_array(segments, name, np.int64) for name in ("seq", "rows", "nbytes")]
        return cls(segments, seqs, rows, nbytes, _array(segments, "published", np.float64))


def _array(segments: Sequence[SegmentInfo], name: str, dtype: type[Any]) -> NDArray[Any]:
    return np.fromiter(map(attrgetter(name), segments), dtype, len(segments))


class _MappedTable(NamedTuple):
    """All mapped segments, by number. The table is replaced as a whole; lines change in place.

    `layouts` are addresses of where a segment's buffers lie, as of `entries_of`; 0 means unchecked: nobody
    may read that segment. `keeps` has its layout, and the owner of its path.
    """

    seqs: NDArray[np.int64]  # ascending
    words: NDArray[np.int64]  # of `maps.Files`
    layouts: NDArray[np.int64]
    was_read: NDArray[np.bool_]  # True if its bytes were checked
    keeps: NDArray[np.object_]  # (n, 2)

    @classmethod
    def of(cls, seqs: NDArray[np.int64], files: maps.Files) -> _MappedTable:
        """Return a table of segments of which none is mapped."""
        count = len(seqs)
        keeps = np.full((count, 2), None, object)
        for line in range(count):
            keeps[line, 1] = files.paths
        return cls(seqs, files.words, np.zeros(count, np.int64), np.zeros(count, np.bool_), keeps)

    def lines(self, seqs: ArrayLike) -> NDArray[np.int64]:
        """Return the lines of segments that are in the table, in the given order."""
        wanted = np.asarray(seqs, np.int64)
        return self.seqs.searchsorted(wanted[are_among(wanted, self.seqs)])

    def entries(self, lines: NDArray[np.int64]) -> NDArray[np.int64]:
        return entries_of(self.words[lines], self.layouts[lines])

    def files(self, lines: NDArray[np.int64]) -> maps.Files:
        return maps.Files(self.words, lines, self)

    def some(self, lines: NDArray[Any]) -> _MappedTable:
        return _MappedTable(*[column[lines] for column in self])

    def plus(self, more: _MappedTable) -> _MappedTable:
        """Return this table with the lines of another one; they have no segment in common."""
        pairs = [*zip(self, more, strict=True)]
        both = _MappedTable(*[np.concatenate(pair) for pair in pairs])
        return both if (np.diff(both.seqs) > 0).all() else both.some(both.seqs.argsort())


class Hold:
    """Segments that a reader needs mapped, oldest first; it releases them from the oldest on.

    `seqs`: their numbers, ascending. `released`: number of the oldest that are not held any more. Before
    `acquire` none is held.
    """

    def __init__(self, seqs: NDArray[np.int64]) -> None:
        self.seqs = seqs
        self.released = len(seqs)
        self.keeps: list[object] = []  # memory that `SegmentRows` may refer to, and the table no longer keeps


class MappedSegments:
    """The mapped segments of one cache in this process. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._kind = settings, (settings.schema, settings.segment_bytes)
        self._known = KnownLayouts(settings.schema)
        self._mutex = Mutex("the mapping of segments")
        self._table = _MappedTable.of(np.zeros(0, np.int64), maps.files("/", ()))
        self._holds: list[Hold] = []  # of snapshots that may read the segments; replaced as a whole
        self._doubted: set[int] = set()  # seqs whose read failed, until they are checked again
        self._arrays: SegmentArrays | None = None  # of the last snapshot
        forgets_in_child(self)

    @classmethod
    def of(cls, store: Store) -> MappedSegments:
        """Return the mapped segments that all readers of a cache share in this process.

        A cache is known by its `identity`, not by its path.
        """
        try:
            identity = store.identity
        except OSError:  # the folder is gone: mapped segments can still be read
            identity = None
        with unforked:  # and no other thread comes in between
            found = _of_store.get(store) if identity is None else _of_identity.get(identity)
            if found is None or found._kind != (store.settings.schema, store.settings.segment_bytes):
                found = cls(store.settings)
                if identity is not None:
                    _of_identity[identity] = found
            if _of_store.get(store) is not found:
                _of_store[store] = found  # it lives as long as a store of the cache
            return found

    def arrays_of(self, segments: Sequence[SegmentInfo]) -> SegmentArrays:
        """Return facts of a snapshot's segments as arrays. Those of the snapshot before it are reused."""
        self._arrays = arrays = SegmentArrays.of(segments, self._arrays)
        return arrays

    def acquire(self, hold: Hold) -> None:
        """Keep a hold's segments mapped, once they are. The caller leases them until it has released them.

        All segments are held or none, also when Ctrl-C comes in between.
        """
        with self._mutex.held():
            hold.released, self._holds = 0, [*self._holds, hold]
        self._drain()

    def release(self, hold: Hold, count: int, then: Callable[[], None] = lambda: None) -> None:
        """Unmap the `count` oldest segments of a hold that no other hold has; then call `then`.

        `then` ends their lease, and may be called twice: the next call here repeats a release that Ctrl-C cut
        short. The garbage collector may call this at any point of any thread. A thread that is at work here
        completes the release when it is done. While the interpreter
        ends nothing is unmapped or unleased: a thread may still be copying, and the kernel does both.
        """
        self._mutex.tell((hold, count, then), self._handle)

    def _drain(self) -> None:
        self._mutex.drain(self._handle)

    def _handle(self, released: tuple[Hold, int, Callable[[], None]]) -> bool:
        hold, count, then = released
        if is_exiting():
            return False
        if count > hold.released:
            try:
                self._unmap(self._unused(hold, count))
            except OSError:  # mapped implies leased: try later
                return False
            hold.released = count  # last: a release that was cut short is repeated
        if hold.released == len(hold.seqs):
            self._holds = [each for each in self._holds if each is not hold]
        then()
        return True

    def _unused(self, hold: Hold, count: int) -> NDArray[np.int64]:
        """Return the segments that no other hold has, of the `count` oldest that a hold still has."""
        seqs = hold.seqs[hold.released : count]
        for other in self._holds:
            if other is not hold and len(seqs):
                seqs = seqs[~are_among(seqs, other.seqs[other.released :])]
        return seqs

    def _unmap(self, seqs: ArrayLike) -> None:
        """Unmap those that are mapped. Raises: OSError: some stay mapped, as they were."""
        table = self._table
        lines = table.lines(seqs)
        if not len(lines):
            return
        layouts, table.layouts[lines] = table.layouts[lines], 0  # first: Ctrl-C may come next
        try:
            maps.unmap(table.files(lines))
        finally:
            is_left = table.words[lines, maps.ADDRESS] != 0
            table.layouts[lines[is_left]] = layouts[is_left]
            is_kept = np.ones(len(table.seqs), np.bool_)
            is_kept[lines[~is_left]] = False
            self._table = table.some(is_kept)

    def known(
        self, seqs: NDArray[np.int64], *, check_bytes_below: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Tell which acquired segments are known. `map` maps or checks the others.

        Args:
            seqs: (n,) their numbers, ascending.
            check_bytes_below: segments below this number are known only if their bytes were checked.
        Returns: a mask (n,), and the entries for `SegmentRows.put` of the known ones.
        """
        table = self._table
        is_known = are_among(seqs, table.seqs)
        lines = table.seqs.searchsorted(seqs[is_known])
        doubted = np.array(sorted(self._doubted), np.int64)
        is_right = (table.layouts[lines] != 0) & ~are_among(table.seqs[lines], doubted)
        is_right &= (table.seqs[lines] >= check_bytes_below) | table.was_read[lines]
        has_none = table.words[lines, maps.ADDRESS] == 0  # and stay so, but for those that there is room for
        room = maps.room() if has_none.any() and maps.count() < _most_mapped() else 0
        is_right &= ~(has_none & (np.cumsum(table.words[lines, maps.NBYTES] * has_none) <= room))
        is_known[is_known] = is_right
        return is_known, table.entries(lines[is_right])

    def layout_of(self, seq: int) -> Layout:
        table = self._table
        layout: Layout = table.keeps[table.lines([seq])[0], 0]
        return layout

    def doubt(self, seq: int) -> None:
        """Note that a read of a segment failed: the next `map` checks it anew."""
        with self._mutex.held():
            self._doubted.add(seq)
        self._drain()

    def map_alike(self, segments: Sequence[SegmentInfo], store: Store) -> None:
        """Map acquired segments whose layout is known, if they are not mapped yet; see `known`.

        A segment that has another layout, cannot be opened or is damaged is left to `map`.

        Args:
            segments: segments whose bytes need no check.
        """
        kinds: dict[tuple[int, int], list[SegmentInfo]] = {}
        for segment in segments:
            kinds.setdefault((segment.nbytes, segment.rows), []).append(segment)
        with self._mutex.held():
            for (nbytes, rows), some in kinds.items():
                template = self._known.find(nbytes, rows)
                if template is not None:
                    some = [segment for segment in some if segment.seq not in self._doubted]
                    self._map_alike(some, store, template)
        self._drain()

    def _map_alike(self, segments: Sequence[SegmentInfo], store: Store, template: Template) -> None:
        added = self._add(segments, store)
        try:
            for start in range(0, len(added), _MAPPED_A_CALL):
                lines = self._table.lines(added[start : start + _MAPPED_A_CALL])
                alike = maps.open_alike(self._table.files(lines), template.kind, _most_mapped())
                self._know(lines[alike], template.layout)
        finally:
            unknown = added[self._table.layouts[self._table.lines(added)] == 0]
            if len(unknown):
                self._unmap(unknown)

    def _add(self, segments: Sequence[SegmentInfo], store: Store) -> NDArray[np.int64]:
        seqs = np.array([segment.seq for segment in segments], np.int64)
        is_new = ~are_among(seqs, self._table.seqs)
        if some := [segment for segment, new in zip(segments, is_new.tolist(), strict=True) if new]:
            files = maps.files(*store.files_of(some))
            self._table = self._table.plus(_MappedTable.of(seqs[is_new], files))
        return seqs[is_new]

    def _know(self, lines: NDArray[np.int64], layout: Layout) -> None:
        for line in lines.tolist():
            self._table.keeps[line, 0] = layout
        self._table.layouts[lines] = layout.buffers.buffer_info()[0]  # last: now readers may use them

    def map(self, segment: SegmentInfo, store: Store, *, check_bytes: bool) -> NDArray[np.int64]:
        """Map and check an acquired segment, if it is not mapped yet; only check it where no mapping is left.

        Args:
            check_bytes: check its bytes too, also if another reader mapped it without.
        Returns: the entry for `SegmentRows.put`.
        Raises: CorruptSegmentError: says what is wrong; only other readers may have it mapped then.
            OSError: the process has too little memory or too many files open.
        """
        with self._mutex.held():
            self._map(segment, store, check_bytes)
            told = self._table.entries(self._table.lines([segment.seq]))
        self._drain()
        return told

    def _map(self, segment: SegmentInfo, store: Store, check_bytes: bool) -> None:
        table = self._table
        for line in table.lines([segment.seq]).tolist():
            file = table.files(np.array([line]))[0]
            if segment.seq in self._doubted:
                self._read_again(file, segment, store)
            if table.layouts[line] and file.address:
                if check_bytes and not table.was_read[line]:
                    self._check(line, file, segment, store, check_bytes)
                return
            for hold in self._holds:
                hold.keeps.append(table.keeps[line].copy())  # `SegmentRows` may know it without a mapping
            self._unmap([segment.seq])  # also one that Ctrl-C left, or that has no mapping
        self._add([segment], store)
        (line,) = self._table.lines([segment.seq]).tolist()
        file = self._table.files(np.array([line]))[0]
        try:
            self._open(line, file, segment, store, check_bytes)
        except (OSError, ValueError) as error:
            shown = mapping.explained_at_open(error)
            raise unfit(shown) or shown from None
        finally:
            file.close()
            if not self._table.layouts[line]:
                self._unmap([segment.seq])

    def _open(
        self, line: int, file: maps.File, segment: SegmentInfo, store: Store, check_bytes: bool
    ) -> None:
        """Map a segment and check it: by comparison where its layout is known."""
        file.open(self._settings.segment_bytes, _most_mapped())
        if segment.seq in self._doubted:
            self._check_read(file, segment, store)
            self._doubted.discard(segment.seq)
        template = None if check_bytes else self._known.find(file.nbytes, segment.rows)
        if template is not None and template.kind.has(file):
            layout = template.layout
        else:
            layout = self._check(line, file, segment, store, check_bytes)
        self._know(np.array([line]), layout)

    def _read_again(self, known: maps.File, segment: SegmentInfo, store: Store) -> None:
        """Check a file by reading. Its mapping may be longer than the file, and others may use it."""
        (file,) = maps.files(*store.files_of([segment]))
        try:
            file.open(self._settings.segment_bytes, 0)
            if (file.nbytes, file.device, file.inode) != (known.nbytes, known.device, known.inode):
                raise ValueError(
                    f"{segment.name} has changed since it was mapped: it has {file.nbytes} bytes"
                )
            self._check_read(file, segment, store)
        except (OSError, ValueError) as error:
            shown = mapping.explained_at_open(error)
            raise unfit(shown) or shown from None
        finally:
            file.close()
        self._doubted.discard(segment.seq)

    def _check_read(self, file: maps.File, segment: SegmentInfo, store: Store) -> None:
        """Check all bytes of an open file by reading, so that a disk failure is an OSError."""
        with open(file.fd, "rb", buffering=0, closefd=False) as whole:
            data = pa.py_buffer(whole.read())
        check_file(data, store, segment, check_bytes=True)

    def _check(
        self, line: int, file: maps.File, segment: SegmentInfo, store: Store, check_bytes: bool
    ) -> Layout:
        """Check a file completely; an open file is mapped for as long as the check takes."""
        was_mapped = file.address
        file.map()
        try:
            if check_bytes:
                mapping.will_read_on(file.address, file.nbytes)
            buffer = pa.foreign_buffer(file.address, file.nbytes)
            layout = check_file(buffer, store, segment, check_bytes=check_bytes)
            self._known.learn(buffer, layout)
            self._table.was_read[line] |= check_bytes
        finally:
            if was_mapped and check_bytes:
                mapping.will_read_pages(file.address, file.nbytes)
            elif not was_mapped:
                maps.unmap([file])
        return layout

    def forget_in_child(self) -> None:
        """Drop all: a forked child inherits no mapping and no lease."""
        for file in self._table.files(np.flatnonzero(self._table.words[:, maps.FD] >= 0)):
            file.close()  # a thread was about to map it
        self.__init__(self._settings)  # type: ignore[misc]  # anew, at the same place

    @until_exit
    def __del__(self) -> None:
        if hasattr(self, "_doubted"):
            self._drain()  # a release that was cut short


_of_store: weakref.WeakKeyDictionary[Store, MappedSegments] = weakref.WeakKeyDictionary()
_of_identity: weakref.WeakValueDictionary[object, MappedSegments] = weakref.WeakValueDictionary()


_MAX_SEEN = 64


class Template(NamedTuple):
    """The bytes that files of one layout have in common.

    `kind` is of the files that have this layout, if they are of as many rows.
    """

    layout: Layout
    kind: FileKind


def make_template(file: pa.Buffer, schema: Schema, layout: Layout) -> Template | None:
    """The template of a file that passed `read_structure` with `layout`, or None.

    Args:
        file: the whole file, mapped; nothing of it is kept.
    """
    if schema.variable:
        return None
    values = {
        start: layout.rows * kind.row_bytes
        for start, kind in zip(layout.fixed, schema.fixed.values(), strict=True)
    }
    if file.size - sum(values.values()) > Limits.current.template_bytes:
        return None
    pieces, checksums = rewrite(file, schema)
    parts: list[tuple[int, bytes]] = []
    position = 0
    for piece in pieces:
        if position not in values:
            if parts and parts[-1][0] + len(parts[-1][1]) == position:
                parts[-1] = (parts[-1][0], parts[-1][1] + bytes(piece))
            else:
                parts.append((position, bytes(piece)))
        elif values.pop(position) != piece.nbytes:
            return None
        position += piece.nbytes
    same = all(bytes(memoryview(file)[at : at + len(part)]) == part for at, part in parts)
    if values or position != file.size or not same or not checksums:
        return None
    start, footer = parts.pop()
    if footer.count(checksums) != 1:
        return None
    at = footer.index(checksums)
    end = at + len(checksums)
    return Template(layout, FileKind(file.size, [*parts, (start, footer[:at]), (start + end, footer[end:])]))


class KnownLayouts:
    """The templates of the layouts that are met most, bounded in number. Not thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._templates: dict[tuple[int, int], Template] = {}  # by (bytes, rows), last used last
        self._seen: dict[tuple[int, int], None] = {}  # met once, oldest first: many never come again

    def find(self, nbytes: int, rows: int) -> Template | None:
        """Return the template for files of this length and number of rows, or None.

        Without one, a file must be checked completely, like a file of another kind.
        """
        template = self._templates.pop((nbytes, rows), None)
        if template is not None:
            self._templates[nbytes, rows] = template
        return template

    def learn(self, file: pa.Buffer, layout: Layout) -> None:
        """Remember the layout of a mapped file that was checked the complete way."""
        key = file.size, layout.rows
        if key in self._templates:
            return
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _MAX_SEEN:
                del self._seen[next(iter(self._seen))]
            return
        del self._seen[key]
        template = make_template(file, self._schema, layout)
        if template is not None:
            self._templates[key] = template
            if len(self._templates) > Limits.current.templates:
                del self._templates[next(iter(self._templates))]
