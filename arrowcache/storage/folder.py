"""Folder: the only place where files of a cache appear, move, are synced and vanish.

Each method is one or few file calls, so a crash test can fail each of them in turn. No
decision is made here: who calls holds cache.lock where the protocol asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from arrowcache.errors import CacheFormatError
from arrowcache.storage import layout
from arrowcache.storage.layout import LockRecord, SegmentInfo, Settings
from arrowcache.storage.locks import LockFile

PART_SLACK_BYTES = 64 * 1024  # the file system's own bookkeeping for a file being written
_PIECES_A_CALL = 512  # below IOV_MAX
_BLOCK = 512  # what st_blocks counts


class Part:
    """A half-written file in incoming/, locked by this writer: not debris while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = LockFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if not self._file.try_exclusive():
            raise OSError(errno.EAGAIN, "a new file is locked by somebody else", str(path))

    def claim(self, nbytes: int) -> None:
        """Set the file's length, sparse: from now on it counts as so many bytes."""
        os.ftruncate(self._file.fd, nbytes)

    def reserve(self, nbytes: int) -> None:
        """Allocate the file's blocks; on failure the file keeps what it got: discard it."""
        os.posix_fallocate(self._file.fd, 0, nbytes)

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Write all pieces, one after another, from the file's start."""
        todo = list(pieces)
        while todo:
            written = os.writev(self._file.fd, todo[:_PIECES_A_CALL])
            while todo and written >= todo[0].nbytes:
                written -= todo.pop(0).nbytes
            if written:
                todo[0] = todo[0].cast("B")[written:]

    def sync(self) -> None:
        os.fsync(self._file.fd)

    def discard(self) -> None:
        """Unlink the part's name, if it still has one, and let go of the lock. Idempotent."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            pass  # unlocked it is debris: the next sweep tries again
        finally:
            self._file.close()


class RanksFile:
    """A file in ranks/, opened by one rank: not debris while any rank holds it."""

    def __init__(self, path: Path) -> None:
        self._file = LockFile(path)

    def is_held(self) -> bool:
        """Whether any other rank holds it, in this process or another."""
        return self._file.conflict(0, 1) is not None

    def hold(self) -> None:
        """Keep it from being debris until `close`; only under cache.lock, where it cannot conflict."""
        if not self._file.try_range(0, 1, exclusive=False):
            raise OSError(errno.EAGAIN, "it is being swept: cache.lock was not held", str(self._file.path))

    def read(self) -> bytes:
        return os.pread(self._file.fd, os.fstat(self._file.fd).st_size, 0)

    def append(self, line: bytes) -> None:
        """Write at the end; only under cache.lock."""
        os.pwrite(self._file.fd, line, os.fstat(self._file.fd).st_size)

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._file.close()


class Folder:
    """The files below one cache folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments = path / layout.SEGMENTS
        self._segments = os.fspath(self.segments)  # a Path costs as much as a stat
        self.incoming = path / layout.INCOMING
        self.quarantine = path / layout.QUARANTINE
        self.ranks = path / layout.RANKS
        self.pools = path / layout.POOLS
        self.cache_lock = path / layout.CACHE_LOCK
        self.lease_lock = path / layout.LEASE_LOCK

    def create(self) -> None:
        """Make the folder and all in it but cache.json; what exists already stays."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self.complete()

    def complete(self) -> None:
        """Make what a copy of an existing cache may have lost: empty folders, lock files."""
        for name in layout.FOLDERS:
            if not (self.path / name).exists():
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
        for lock in (self.cache_lock, self.lease_lock):
            if not lock.exists():
                lock.touch(mode=0o600)

    # settings and the lock's record

    def read_settings(self, known: Settings | None = None) -> Settings:
        """Read cache.json; `known` is returned if it says the same.

        Raises: FileNotFoundError: no such folder. CacheFormatError: not a cache, or of another format.
        """
        try:
            text = (self.path / layout.CACHE_JSON).read_text()
        except FileNotFoundError:
            if not self.path.exists():
                raise FileNotFoundError(
                    errno.ENOENT, "no cache here: make one with arrowcache.Cache.create", str(self.path)
                ) from None
            raise CacheFormatError(f"{self.path} is not a cache: it has no cache.json") from None
        except (NotADirectoryError, IsADirectoryError, UnicodeDecodeError) as error:
            raise CacheFormatError(f"{self.path} is not a cache: {error}") from None
        if known is not None and text == known.text:
            return known
        try:
            return Settings.from_json(text)
        except CacheFormatError as error:
            raise CacheFormatError(f"{self.path}: {error}") from None

    def write_settings(self, settings: Settings) -> None:
        """Replace cache.json atomically, synced."""
        part = self.new_part()
        try:
            part.write([memoryview(settings.text.encode())])
            part.sync()
            part.path.rename(self.path / layout.CACHE_JSON)
        finally:
            part.discard()
        self.sync_folder(self.path)

    def read_record(self) -> LockRecord:
        return LockRecord.unpack(self.cache_lock.read_bytes())

    def write_record(self, record: LockRecord) -> None:
        fd = os.open(self.cache_lock, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, record.pack(), 0)
        finally:
            os.close(fd)

    # what is there

    def names_in_segments(self) -> list[str]:
        """All names in segments/, in the folder's own order, which stays while nothing changes."""
        return os.listdir(self.segments)

    def segment_names(self) -> list[str]:
        """Names in segments/ that are segments, oldest first."""
        return sorted(name for name in self.names_in_segments() if layout.parse_segment_name(name))

    def segment_info(self, name: str) -> SegmentInfo | None:
        """The segment of a name; None: it is gone, or not a regular file."""
        parsed = layout.parse_segment_name(name)
        try:
            status = os.lstat(f"{self._segments}/{name}")
        except FileNotFoundError:
            return None
        if parsed is None or not stat.S_ISREG(status.st_mode):
            return None
        return SegmentInfo(*parsed, status.st_size, status.st_blocks * _BLOCK, status.st_mtime)

    def quarantined_names(self) -> list[str]:
        """Segments in quarantine/, oldest first."""
        return sorted(n for n in os.listdir(self.quarantine) if layout.parse_segment_name(n))

    def quarantined_bytes(self) -> int:
        """Allocated bytes of quarantine/."""
        return sum(allocated for _, allocated, _ in _files(self.quarantine))

    def incoming_bytes(self) -> int:
        """What everything in incoming/ takes or has claimed, with slack for each part."""
        return sum(
            max(allocated, length) + PART_SLACK_BYTES * name.endswith(layout.PART)
            for name, allocated, length in _files(self.incoming)
        )

    def other_bytes(self, foreign: Iterable[str]) -> int:
        """Allocated bytes of the folder but for segments and incoming files: what they cost too.

        `foreign` are the names in segments/ that are no segment's.
        """
        folders = [self.path, *(self.path / name for name in layout.FOLDERS)]
        total = sum(os.stat(folder).st_blocks * _BLOCK for folder in folders)
        total += sum(allocated for _, allocated, _ in _files(self.path))
        for name in (layout.QUARANTINE, layout.RANKS, layout.POOLS):
            total += sum(allocated for _, allocated, _ in _files(self.path / name))
        for name in foreign:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(self.segments / name).st_blocks * _BLOCK
        return total

    def locked_incoming(self, suffix: str) -> int:
        """How many files of incoming/ with a suffix are locked by a living writer."""
        names = [name for name, _ in _listed(self.incoming) if name.endswith(suffix)]
        return sum(not self._is_unlocked(self.incoming / name) for name in names)

    # publishing

    def new_part(self) -> Part:
        return Part(self.incoming / f"{uuid.uuid4().hex}{layout.PART}")

    def new_wait(self) -> Part:
        """The sign of a waiting writer: an empty, locked file."""
        return Part(self.incoming / f"{uuid.uuid4().hex}{layout.WAIT}")

    def link(self, part: Part, segment_name: str) -> None:
        """Make a part visible as a segment; FileExistsError rather than replacing one."""
        os.link(part.path, self.segments / segment_name)

    def sync_segments(self) -> None:
        self.sync_folder(self.segments)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # leaving

    def retire(self, segment_name: str) -> Path:
        """Move a victim out of segments/; its bytes count until `remove`."""
        retired = self.incoming / f"{uuid.uuid4().hex}{layout.PART}"
        os.rename(self.segments / segment_name, retired)
        return retired

    def remove(self, retired: Path) -> None:
        """Unlink what `retire` moved, or debris; somebody else may have swept it already."""
        retired.unlink(missing_ok=True)

    def sweep(self) -> int:
        """Unlink the debris of dead writers and ranks; returns how many files. Only under cache.lock."""
        debris = [
            folder / name
            for folder, ours in ((self.incoming, layout.INCOMING_NAME), (self.ranks, layout.RANKS_NAME))
            for name, _ in _listed(folder)
            if ours.fullmatch(name) and self._is_unlocked(folder / name)
        ]
        for path in debris:
            self.remove(path)
        return len(debris)

    def isolate(self, segment_name: str, reason: str) -> None:
        """Move a damaged segment to quarantine/ and write the reason beside it."""
        os.rename(self.segments / segment_name, self.quarantine / segment_name)
        (self.quarantine / f"{segment_name}{layout.REASON}").write_text(reason + "\n")

    def drop_quarantined(self, segment_name: str) -> None:
        """Unlink a quarantined segment; it goes last, so that no reason is left without one."""
        (self.quarantine / f"{segment_name}{layout.REASON}").unlink(missing_ok=True)
        (self.quarantine / segment_name).unlink(missing_ok=True)

    # sampler pools

    def claim_tasks(self, pool: str, count: int) -> int:
        """Advance a pool's next task number by `count`; returns the first. Only under cache.lock."""
        fd = os.open(self.pools / pool, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            data = os.pread(fd, 8, 0)
            first = int.from_bytes(data, "little") if len(data) == 8 else 0
            os.pwrite(fd, (first + count).to_bytes(8, "little"), 0)
        finally:
            os.close(fd)
        return first

    # ranks

    def open_ranks_file(self, name: str) -> RanksFile | None:
        """Open a file in ranks/; None: there is none."""
        try:
            return RanksFile(self.ranks / name)
        except FileNotFoundError:
            return None

    def link_ranks_file(self, name: str, data: bytes) -> RanksFile:
        """Make a file appear in ranks/, whole and held already; only under cache.lock.

        Raises: FileExistsError rather than replacing one.
        """
        part = self.new_part()
        try:
            part.write([memoryview(data)])
            file = RanksFile(part.path)
            try:
                file.hold()
                os.link(part.path, self.ranks / name)
            except BaseException:
                file.close()
                raise
        finally:
            part.discard()
        return file

    def drop_ranks_file(self, name: str) -> None:
        """Unlink a file in ranks/ unless some rank holds it; only under cache.lock."""
        path = self.ranks / name
        if self._is_unlocked(path):
            path.unlink(missing_ok=True)

    def _is_unlocked(self, path: Path) -> bool:
        """Whether a file is there and nobody holds a lock on it: neither a writer nor a rank."""
        try:
            file = LockFile(path)
        except FileNotFoundError:
            return False
        try:
            return file.try_exclusive() and file.try_range(0, 1, exclusive=True)
        finally:
            file.close()


def _listed(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    # Opened and read to its end in one call: a Ctrl-C between the two would leave the folder open.
    for entry in list(itertools.chain.from_iterable(map(os.scandir, (folder,)))):
        yield entry.name, entry


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """(name, allocated bytes, length) of the plain files of one folder."""
    for name, entry in _listed(folder):
        try:
            if not entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                yield name, status.st_blocks * _BLOCK, status.st_size
        except FileNotFoundError:
            pass
