"""Mapped: the segments of a cache that are mapped in this process, each by itself, for all its snapshots.

Guarantees: mapped implies leased, by whoever called `acquire`; a mapped file's structure was
checked; all caches of a process together map at most half of vm.max_map_count segments. One for
which there is no mapping left is known, and not mapped.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from arrowcache.arrow.segment import Layout
from arrowcache.arrow.template import KnownLayouts, Template
from arrowcache.native import maps
from arrowcache.native.rows import entries_of, entry
from arrowcache.storage import mapping
from arrowcache.storage.layout import SegmentInfo, Settings
from arrowcache.storage.locks import file_identity
from arrowcache.storage.store import Store
from arrowcache.storage.verification import check_file, unfit

_most_mapped = mapping.most_mappings() // 2
_KNOWN = 3  # of a `maps_file`, from here on: its length, device and inode


class MappedSegment:
    """A segment's file, mapped where `file.address` says so.

    Once it was checked, `layout` tells where its buffers lie, and `entry` is its line in the table of `Rows`.
    """

    __slots__ = ("entry", "file", "is_doubted", "is_mapped", "layout", "was_read")
    layout: Layout

    def __init__(self, file: maps.File) -> None:
        self.file = file
        self.entry = b""
        self.is_mapped = False  # and checked
        self.was_read = False  # its bytes were checked
        self.is_doubted = False  # a read of it failed since

    def know(self, layout: Layout, entry: bytes) -> None:
        """Note that it was checked, and its layout."""
        self.layout, self.entry, self.is_mapped = layout, entry, bool(self.file.address)


class Claim:
    """Segments that a reader needs mapped, oldest first, and gives up from the oldest on.

    `seqs`: their numbers, which rise. `released`: so many of the oldest are not claimed any more. Before
    `acquire` none is claimed.
    """

    def __init__(self, seqs: NDArray[np.int64]) -> None:
        self.seqs = seqs
        self.released = len(seqs)


class MappedSegments:
    """The mapped segments of one cache in this process. Thread-safe.

    Args:
        settings: of the cache.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._kind = settings, (settings.schema, settings.segment_bytes)
        self._known = KnownLayouts(settings.schema)
        self._lock = threading.Lock()
        self._segments: dict[int, MappedSegment] = {}  # by seq: whatever is mapped is here
        self._claims: list[Claim] = []  # of snapshots that may read them; replaced as a whole
        self._released: deque[tuple[Claim, int, Callable[[], None]]] = deque()
        self._opening: maps.File | None = None
        self._doubted: set[int] = set()  # by seq: a read of it failed, and it is not mapped since

    @classmethod
    def of(cls, store: Store) -> MappedSegments:
        """Those that all readers of a cache share in this process, however often it was opened.

        A cache is known by its lease.lock, not by its path. Whatever is mapped is leased, which keeps that
        file open: while anything is mapped, no other cache can get its identity.
        """
        try:
            identity = file_identity(os.stat(store.folder.lease_lock))
        except OSError:  # the folder is gone: what is mapped of it can be read still
            identity = None
        with _caches_lock:
            found = _of_store.get(store) if identity is None else _of_identity.get(identity)
            if found is None or found._kind != (store.settings.schema, store.settings.segment_bytes):
                found = cls(store.settings)
                if identity is not None:
                    _of_identity[identity] = found
            if _of_store.get(store) is not found:
                _of_store[store] = found  # it lives as long as a store of it
            return found

    def acquire(self, claim: Claim) -> None:
        """Keep its segments mapped, once they are; the caller leases them until it released them.

        It claims all of them or none, also when Ctrl-C comes in between.
        """
        with self._lock:
            claim.released, self._claims = 0, [*self._claims, claim]
        self._let_go()

    def release(self, claim: Claim, count: int, then: Callable[[], None] = lambda: None) -> None:
        """Unmap the `count` oldest segments of a claim that no other one has; then call `then`.

        `then` ends their lease, and may be called twice: what Ctrl-C cuts short is done anew, by whatever
        is asked of this next. The garbage collector may call this at any point of any thread, also of one
        that is just at work here: that thread does it then, as soon as it is done. While the interpreter
        ends nothing is unmapped or unleased: a thread may still be copying, and the kernel does both.
        """
        self._released.append((claim, count, then))
        self._let_go()

    def _let_go(self) -> None:
        while self._released and not self._lock.locked() and not mapping.is_exiting():
            with self._lock:  # not a try to acquire it: Ctrl-C would come between that and its try block
                while self._released:
                    claim, count, then = self._released[0]
                    if count > claim.released:
                        try:
                            self._unmap(self._unused(claim, count))
                        except OSError:  # mapped implies leased: later, then
                            return
                        claim.released = count  # after it: what is cut short is done anew
                    if claim.released == len(claim.seqs):
                        self._claims = [each for each in self._claims if each is not claim]
                    then()
                    self._released.popleft()

    def _unused(self, claim: Claim, count: int) -> list[int]:
        """What nobody else claims of the `count` oldest segments of a claim, those that it still has."""
        seqs = claim.seqs[claim.released : count]
        for other in self._claims:
            if other is not claim and len(seqs):
                seqs = seqs[~np.isin(seqs, other.seqs[other.released :])]
        return [*map(int, seqs)]

    def _unmap(self, seqs: Sequence[int]) -> None:
        """Unmap what is mapped of these. Raises: OSError: not all; what is left is as it was."""
        found = {seq: self._segments[seq] for seq in seqs if seq in self._segments}
        for each in found.values():
            each.is_mapped = False  # first: what Ctrl-C leaves here may not be any more
        try:
            maps.unmap([each.file for each in found.values()])
        finally:
            for seq, each in found.items():
                each.is_mapped = bool(each.file.address and each.entry)
                if not each.file.address:
                    self._doubted.update([seq] if each.is_doubted else ())
                    del self._segments[seq]

    def found(self, seqs: Sequence[int], *, check_bytes_below: int) -> list[MappedSegment | None]:
        """What there is of acquired segments; None: it is to be mapped, or checked, by `map`.

        Args:
            seqs: their numbers, which rise.
            check_bytes_below: below this number their bytes were to be checked, too.
        """
        is_full = maps.count() >= _most_mapped  # then those without a mapping stay so

        def is_ready(each: MappedSegment) -> bool:
            return bool(each.is_mapped or (is_full and each.entry)) and not each.is_doubted

        found = [
            each if each is not None and is_ready(each) else None for each in map(self._segments.get, seqs)
        ]
        if seqs and seqs[0] < check_bytes_below:
            for index, each in enumerate(found):
                if each is not None and seqs[index] < check_bytes_below and not each.was_read:
                    found[index] = None
        return found

    def map_alike(self, segments: Sequence[SegmentInfo], store: Store) -> None:
        """Map acquired segments whose layout is known, if they are not yet; see `found`.

        What is of another layout, cannot be opened or is damaged is left to `map`.

        Args:
            segments: few enough that the GIL is kept for as long; their bytes need no check.
            store: who asks: its folder has the files.
        """
        kinds: dict[tuple[int, int], list[SegmentInfo]] = {}
        for segment in segments:
            kinds.setdefault((segment.nbytes, segment.rows), []).append(segment)
        with self._lock:
            for (nbytes, rows), some in kinds.items():
                template = self._known.find(nbytes, rows)
                known, doubted = self._segments, self._doubted
                new = [each for each in some if each.seq not in known and each.seq not in doubted]
                if template is not None and new:
                    self._map_alike(new, store, template)
        self._let_go()

    def _map_alike(self, segments: Sequence[SegmentInfo], store: Store, template: Template) -> None:
        files = maps.files(os.fspath(store.folder.segments), [segment.name for segment in segments])
        made = {segment.seq: MappedSegment(file) for segment, file in zip(segments, files, strict=True)}
        self._segments.update(made)
        try:
            alike = maps.open_alike(files, template.kind, _most_mapped)
            entries = entries_of(files, template.layout.buffers.buffer_info()[0])
            for each, told, is_alike in zip(made.values(), entries, alike, strict=True):
                if is_alike:
                    each.know(template.layout, told)
        finally:
            if others := [seq for seq, each in made.items() if not each.entry]:
                self._unmap(others)

    def map(self, segment: SegmentInfo, store: Store, *, check_bytes: bool) -> MappedSegment:
        """Map and check an acquired segment, if it is not yet; where no mapping is left it is only checked.

        Args:
            store: who asks: its folder has the file.
            check_bytes: check its bytes too, also where another reader has mapped it without.
        Raises: CorruptSegmentError: what is wrong; it is not mapped then, but for others who read it.
            OSError: the process has too little memory or too many files open.
        """
        with self._lock:
            found = self._map(segment, store, check_bytes)
        self._let_go()
        return found

    def _map(self, segment: SegmentInfo, store: Store, check_bytes: bool) -> MappedSegment:
        found = self._segments.get(segment.seq)
        if found is not None:
            if found.is_doubted:
                self._read_again(found, segment, store)
            if found.is_mapped:
                if check_bytes and not found.was_read:
                    self._check(found, segment, store, check_bytes)
                return found
            self._unmap([segment.seq])  # what Ctrl-C has left, or found no mapping
        (file,) = maps.files(os.fspath(store.folder.segments), [segment.name])
        found = MappedSegment(file)
        self._segments[segment.seq], self._opening = found, file
        try:
            self._open(found, segment, store, check_bytes)
        except (OSError, ValueError) as error:
            shown = mapping.explained_at_open(error)
            raise unfit(shown) or shown from None
        finally:
            file.close()
            if not found.entry:
                self._unmap([segment.seq])
        return found

    def _open(self, found: MappedSegment, segment: SegmentInfo, store: Store, check_bytes: bool) -> None:
        """Map a segment and check it: by comparison where its layout is known."""
        file = found.file
        file.open(self._settings.segment_bytes, _most_mapped)
        if segment.seq in self._doubted:
            self._check_read(file, segment, store)
            self._doubted.discard(segment.seq)
        template = None if check_bytes else self._known.find(file.nbytes, segment.rows)
        if template is not None and template.kind.has(file):
            layout = template.layout
        else:
            layout = self._check(found, segment, store, check_bytes)
        ((path, _, address, nbytes, device, inode),) = maps.words_of(file).tolist()
        found.know(layout, entry(address, nbytes, layout.buffers.buffer_info()[0], path, device, inode))

    def _read_again(self, found: MappedSegment, segment: SegmentInfo, store: Store) -> None:
        """Check a file without its mapping, which may end before its address says: others may read that."""
        (file,) = maps.files(os.fspath(store.folder.segments), [segment.name])
        try:
            file.open(self._settings.segment_bytes, 0)
            if maps.words_of(file)[0, _KNOWN:].tolist() != maps.words_of(found.file)[0, _KNOWN:].tolist():
                raise ValueError(
                    f"{segment.name} has changed since it was mapped: it has {file.nbytes} bytes"
                )
            self._check_read(file, segment, store)
        except (OSError, ValueError) as error:
            shown = mapping.explained_at_open(error)
            raise unfit(shown) or shown from None
        finally:
            file.close()
        found.is_doubted = False

    def _check_read(self, file: maps.File, segment: SegmentInfo, store: Store) -> None:
        """Check all bytes of an open file, past its mapping: what the disk does not give is an OSError."""
        with open(file.fd, "rb", buffering=0, closefd=False) as whole:
            data = pa.py_buffer(whole.read())
        check_file(data, store, segment, check_bytes=True)

    def _check(self, found: MappedSegment, segment: SegmentInfo, store: Store, check_bytes: bool) -> Layout:
        """Check a file the complete way; one that is open is mapped for as long as that takes."""
        file, was_mapped = found.file, found.file.address
        file.map()
        try:
            mapping.will_read_on(file.address, file.nbytes)
            buffer = pa.foreign_buffer(file.address, file.nbytes)
            layout = check_file(buffer, store, segment, check_bytes=check_bytes)
            self._known.learn(buffer, layout)
            found.was_read |= check_bytes
        finally:
            if was_mapped:
                mapping.will_read_pages(file.address, file.nbytes)
            else:
                maps.unmap([file])
        return layout

    def _forget_in_child(self) -> None:
        """A forked child inherits no mapping and no lease."""
        if self._opening is not None:
            self._opening.close()
        self.__init__(self._settings)  # type: ignore[misc]  # anew, at the same place

    def __del__(self) -> None:
        if hasattr(self, "_opening"):
            self._let_go()  # what was cut short


def _after_fork_in_child() -> None:
    global _caches_lock
    _caches_lock = threading.Lock()
    for each in {id(each): each for each in [*_of_store.values(), *_of_identity.values()]}.values():
        each._forget_in_child()


_of_store: weakref.WeakKeyDictionary[Store, MappedSegments] = weakref.WeakKeyDictionary()
_of_identity: weakref.WeakValueDictionary[tuple[int, int], MappedSegments] = weakref.WeakValueDictionary()
_caches_lock = threading.Lock()
os.register_at_fork(after_in_child=_after_fork_in_child)
