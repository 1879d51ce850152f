"""Mapped: the segments of a cache that are mapped in this process, each by itself, for all its snapshots.

Guarantees: mapped implies leased, by the caller of `acquire`; a mapped file's structure was checked; all
caches of a process together map at most half of vm.max_map_count segments. A segment for which no mapping is
left is checked and known, but not mapped: its rows are read from its file.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa

from arrowcache.arrow.segment import Layout
from arrowcache.arrow.template import KnownLayouts
from arrowcache.native import maps
from arrowcache.storage import mapping
from arrowcache.storage.layout import SegmentInfo, Settings
from arrowcache.storage.locks import file_identity
from arrowcache.storage.store import Store
from arrowcache.storage.verification import check_file, unfit

_most_mapped = mapping.most_mappings() // 2


class MappedSegment:
    """A segment's file. It is mapped if `file.address` is not 0.

    Once it was checked, `layout` tells where its buffers lie, and `words` are the arguments of `Rows.put`.
    """

    __slots__ = ("file", "layout", "was_read", "words")
    layout: Layout

    def __init__(self, path: bytes) -> None:
        self.file = maps.file(path)
        self.words: tuple[int, ...] = ()
        self.was_read = False  # its bytes were checked

    def is_ready(self, *, check_bytes: bool) -> bool:
        """True if `map` has nothing more to do for it."""
        is_mapped = self.file.address or maps.count() >= _most_mapped
        return bool(self.words and is_mapped and (self.was_read or not check_bytes))

    def know(self, layout: Layout) -> None:
        """Note that it was checked, and its layout."""
        self.layout = layout
        path, address, nbytes, device, inode = self.file.words()
        self.words = address, nbytes, layout.buffers.buffer_info()[0], path, device, inode


class Claim:
    """Segments that a reader needs mapped, oldest first. It gives them up from the oldest on.

    `released`: so many of the oldest are not claimed any more. Before `acquire` none is claimed.
    """

    def __init__(self, segments: Sequence[SegmentInfo]) -> None:
        self.segments = tuple(segments)
        self.released = len(self.segments)


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
        self._users: dict[int, int] = {}  # by seq: snapshots that may read it
        self._released: deque[tuple[Claim, int, Callable[[], None]]] = deque()
        self._opening: maps.File | None = None

    @classmethod
    def of(cls, store: Store) -> MappedSegments:
        """The mapped segments that all readers of a cache share in this process, however often it was opened.

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
        """Keep the claim's segments mapped, once they are; the caller leases them until it released them.

        It claims all of them or none, also when Ctrl-C comes in between: counts are replaced as a whole.
        """
        with self._lock:
            users = self._users.copy()
            for segment in claim.segments:
                users[segment.seq] = users.get(segment.seq, 0) + 1
            self._users, claim.released = users, 0
        self._let_go()

    def release(self, claim: Claim, count: int, then: Callable[[], None] = lambda: None) -> None:
        """Unmap the `count` oldest segments of a claim that no other claim has; then call `then`.

        `then` ends their lease, and may be called twice: a release that Ctrl-C cut short is done anew by the
        next call of any method. The garbage collector may call this at any point of any thread. Where that
        thread is at work here, it does the release when it is done. While the interpreter ends nothing is
        unmapped or unleased: a thread may still be copying, and the kernel does both.
        """
        self._released.append((claim, count, then))
        self._let_go()

    def _let_go(self) -> None:
        while self._released and not self._lock.locked() and not mapping.is_exiting():
            with self._lock:  # not a try to acquire it: Ctrl-C would come between that and its try block
                while self._released:
                    claim, count, then = self._released[0]
                    if count > claim.released:
                        users, unused = self._without(claim.segments[claim.released : count])
                        try:
                            self._unmap(unused)
                        except OSError:  # mapped implies leased: later, then
                            return
                        self._users, claim.released = users, count  # last: what is cut short is done anew
                    then()
                    self._released.popleft()

    def _without(self, segments: Sequence[SegmentInfo]) -> tuple[dict[int, int], list[int]]:
        """The users by segment, with one less of each of these, and those of them that nobody uses then."""
        users, unused = self._users.copy(), []
        for segment in segments:
            users[segment.seq] -= 1
            if not users[segment.seq]:
                del users[segment.seq]
                unused.append(segment.seq)
        return users, unused

    def _unmap(self, seqs: Sequence[int]) -> None:
        """Unmap those of these that are mapped. Raises: OSError: some are left, as they were."""
        found = {seq: self._segments[seq] for seq in seqs if seq in self._segments}
        try:
            maps.unmap([each.file for each in found.values()])
        finally:
            for seq, each in found.items():
                if not each.file.address:
                    del self._segments[seq]

    def map(self, segment: SegmentInfo, store: Store, *, check_bytes: bool) -> MappedSegment:
        """Map and check an acquired segment, if it is not yet. Where no mapping is left it is only checked.

        Args:
            store: the caller's: its folder has the file.
            check_bytes: check its bytes too, also where another reader has mapped it without that.
        Raises: CorruptSegmentError: it is damaged; it stays mapped only where others read it.
            OSError: the process has too little memory or too many files open.
        """
        found = self._segments.get(segment.seq)
        if found is None or not found.is_ready(check_bytes=check_bytes):
            with self._lock:
                found = self._map(segment, store, check_bytes)
            self._let_go()
        return found

    def _map(self, segment: SegmentInfo, store: Store, check_bytes: bool) -> MappedSegment:
        found = self._segments.get(segment.seq)
        if found is not None:
            if found.words and found.file.address:
                if check_bytes and not found.was_read:
                    self._check(found, segment, store, check_bytes)
                return found
            self._unmap([segment.seq])  # a map that Ctrl-C cut short, or one for which no mapping was left
        found = MappedSegment(os.fsencode(f"{store.folder.segments}/{segment.name}"))
        self._segments[segment.seq], self._opening = found, found.file
        try:
            self._open(found, segment, store, check_bytes)
        except (OSError, ValueError) as error:
            shown = mapping.explained_at_open(error)
            raise unfit(shown) or shown from None
        finally:
            found.file.close()
            if not found.words:
                self._unmap([segment.seq])
        return found

    def _open(self, found: MappedSegment, segment: SegmentInfo, store: Store, check_bytes: bool) -> None:
        """Map a segment and check it: by comparison where its layout is known."""
        file = found.file
        file.open(self._settings.segment_bytes, _most_mapped)
        read = partial(os.pread, file.fd)
        layout = None if check_bytes else self._known.find(read, file.nbytes, segment.rows)
        found.know(layout or self._check(found, segment, store, check_bytes))

    def _check(self, found: MappedSegment, segment: SegmentInfo, store: Store, check_bytes: bool) -> Layout:
        """Check a file by parsing it; it is mapped for as long as that takes."""
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
            self._let_go()  # releases that were cut short


def _after_fork_in_child() -> None:
    global _caches_lock
    _caches_lock = threading.Lock()
    for each in {id(each): each for each in [*_of_store.values(), *_of_identity.values()]}.values():
        each._forget_in_child()


_of_store: weakref.WeakKeyDictionary[Store, MappedSegments] = weakref.WeakKeyDictionary()
_of_identity: weakref.WeakValueDictionary[tuple[int, int], MappedSegments] = weakref.WeakValueDictionary()
_caches_lock = threading.Lock()
os.register_at_fork(after_in_child=_after_fork_in_child)
