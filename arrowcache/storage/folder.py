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
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from arrowcache import linux
from arrowcache.errors import CacheFormatError
from arrowcache.storage import layout
from arrowcache.storage.layout import LockRecord, SegmentInfo
from arrowcache.storage.locks import LockFile, flock_holders, holder_names, process_name
from arrowcache.storage.settings import PART_SLACK_BYTES, Settings

_PIECES_A_CALL = 512  # below IOV_MAX
_BLOCK = 512  # what st_blocks counts
_OWN = os.O_CLOEXEC | os.O_NOFOLLOW  # of our own files none is a link to elsewhere
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.EINVAL)  # a link, a socket, what `_read` finds
_MAX_RETURNED = 4095  # tasks of a pool that are to be drawn again: with its number they fill 32 KiB
_MAX_DIVISION_BYTES = 1000
_MAX_TASKS = 2**62
_RESERVE_ATTEMPTS = 10
_DAMAGED = ".damaged"  # behind the name of a file of notes
_MAX_WEIGHTS_BYTES = 1 << 40
_MAX_RANKS_BYTES = 64 << 20
_SETTLING_NS = 2_500_000_000  # some file systems tell whole seconds, FAT two
_MAX_SETTINGS_BYTES = 16 << 20  # what is cut off there is damage: its checksum, or its JSON, ends too soon


class Rights(NamedTuple):
    """Modes and group of new files and folders. The cache's own folder decides, not the umask."""

    file_mode: int
    folder_mode: int
    group: int | None  # None if any will do

    def give_group(self, target: int | Path) -> None:
        """Give a file of our own to the group. Without setgid it has its maker's.

        Raises: PermissionError: this user is not in the group.
        """
        if self.group is not None and os.stat(target).st_gid != self.group:
            os.chown(target, -1, self.group)


class PartFile:
    """A half-written file in incoming/, locked by this writer: not debris while it is open.

    Raises: BlockingIOError: it was made without cache.lock, and swept at once.
    """

    _has_other_name = False  # its bytes are published, or may be

    def __init__(self, path: Path, rights: Rights) -> None:
        self.path = path
        self.file = LockFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, rights.file_mode)
        try:
            rights.give_group(self.file.fd)
        except BaseException:
            self.discard()
            raise
        if not self.file.try_exclusive() or not os.fstat(self.file.fd).st_nlink:
            raise BlockingIOError(errno.EAGAIN, "a new file is locked by somebody else, or swept", str(path))

    def reserve(self, nbytes: int) -> None:
        """Set the file's length, sparse: from now on it counts as so many bytes."""
        os.ftruncate(self.file.fd, nbytes)

    def allocate(self, nbytes: int) -> None:
        """Allocate the file's blocks; on failure the file keeps what it got: discard it."""
        os.posix_fallocate(self.file.fd, 0, nbytes)

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Write all bytes, from the position of the file on. Blocks: for the disk."""
        todo = list(pieces)
        while todo:
            written = os.writev(self.file.fd, todo[:_PIECES_A_CALL])
            while todo and written >= todo[0].nbytes:
                written -= todo.pop(0).nbytes
            if written:
                todo[0] = todo[0].cast("B")[written:]

    def sync(self) -> None:
        """Write the bytes to the disk. Blocks: for the disk."""
        os.fsync(self.file.fd)

    def begin_anew(self) -> None:
        """Set the file's time to now."""
        os.utime(self.file.fd)

    def info(self, segment_name: str) -> SegmentInfo | None:
        """Return the segment of this name that the file would be, or None for another kind of name."""
        return _info(segment_name, os.fstat(self.file.fd))

    def link(self, path: Path) -> None:
        """Give the file another name; FileExistsError rather than replacing one."""
        self._has_other_name = True
        os.link(self.path, path)

    def rename(self, path: Path) -> None:
        """Give the file another name instead, replacing what has it."""
        self._has_other_name = True
        self.path.rename(path)

    def discard(self) -> None:
        """Unlink the part's name, if it still has one, and let go of the lock. Idempotent.

        What was not published is emptied first: bytes that are still open fill the disk, and without a
        name nobody counts them.
        """
        try:
            if not self._has_other_name and self.file.fd >= 0:
                os.ftruncate(self.file.fd, 0)
        except OSError:
            pass  # they go as the file is closed
        try:
            self.path.unlink()
        except OSError:
            pass  # it is gone; or else, unlocked, debris: the next sweep tries again
        finally:
            self.file.close()


class RanksFile:
    """A file in ranks/, opened by one rank: not debris while any rank holds it."""

    def __init__(self, path: Path) -> None:
        self._file = LockFile(path)

    def is_held(self) -> bool:
        """True if any other rank holds it, in this process or another."""
        return self._file.conflict(0, 1) is not None

    def hold(self) -> None:
        """Keep it from being debris until `close`; only under cache.lock, where it cannot conflict."""
        if not self._file.try_range(0, 1, exclusive=False):
            raise OSError(errno.EAGAIN, "it is being swept: cache.lock was not held", str(self._file.path))

    def read(self) -> bytes:
        """Return the content, of a bounded length."""
        return os.pread(self._file.fd, min(os.fstat(self._file.fd).st_size, _MAX_RANKS_BYTES), 0)

    def append(self, line: bytes) -> None:
        """Write at the end; only under cache.lock."""
        os.pwrite(self._file.fd, line, os.fstat(self._file.fd).st_size)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._file.close()


class Folder:
    """The files below one cache folder."""

    def __init__(self, path: Path) -> None:
        linux.fill_standard_streams()  # no file of a cache becomes anybody's stderr
        self.path = path
        self.segments = path / layout.SEGMENTS
        self._path, self._segments = map(os.fspath, (path, self.segments))  # a Path costs as much as a stat
        self.incoming = path / layout.INCOMING
        self.quarantine = path / layout.QUARANTINE
        self.ranks = path / layout.RANKS
        self.pools = path / layout.POOLS
        self.notes = path / layout.NOTES
        self.cache_lock = path / layout.CACHE_LOCK
        self.lease_lock = path / layout.LEASE_LOCK
        self.usage = path / layout.USAGE

    def create(self) -> None:
        """Make the folder and all in it but cache.json, synced; what exists already stays.

        It gets mode 0700, unless it was made for a group.
        """
        new = [self.path, *itertools.takewhile(lambda parent: not parent.exists(), self.path.parents)]
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(self.path)
        mode = stat.S_IMODE(status.st_mode)
        is_shared = layout.shared_on_purpose(mode)
        wanted = mode & ~stat.S_IRWXO if is_shared else 0o700
        if mode != wanted and not (is_shared and status.st_uid != os.geteuid()):
            self.path.chmod(wanted)
        self.complete()
        for path in new:
            with contextlib.suppress(PermissionError):  # of a parent that this user may not list
                self.sync_folder(path.parent)

    def complete(self) -> None:
        """Make what a copy of an existing cache may have lost: empty folders, lock files, counts.

        Raises: CacheFormatError: something else has the name of one, such as a link to elsewhere.
        """
        rights = self.rights()
        for name in layout.FOLDERS:
            if not self._is_there(self.path / name, stat.S_ISDIR):
                self._make_folder(self.path / name)
        for file in (self.cache_lock, self.lease_lock, self.usage):
            if not self._is_there(file, stat.S_ISREG):
                with _opened(file, os.O_RDWR, rights):
                    pass

    def _make_folder(self, path: Path) -> None:
        with contextlib.suppress(FileExistsError):  # another process was first
            path.mkdir(mode=0o700)
            rights = self.rights()
            rights.give_group(path)
            path.chmod(rights.folder_mode)  # whatever the umask

    def rights(self) -> Rights:
        """Rights of a new file. Asked anew for each, since a cache may become shared while it is used."""
        status = os.stat(self.path)
        file_mode, folder_mode = layout.modes(status.st_mode)
        return Rights(file_mode, folder_mode, status.st_gid if file_mode & stat.S_IRWXG else None)

    def is_bare(self) -> bool:
        """True if it holds only cache.json and the files that `complete` makes."""
        ours = {layout.CACHE_JSON, layout.CACHE_LOCK, layout.LEASE_LOCK, layout.USAGE, *layout.FOLDERS}
        return set(os.listdir(self.path)) <= ours and not any(
            os.listdir(self.path / name) for name in layout.FOLDERS
        )

    def dismantle(self, folders: Iterable[Path]) -> None:
        """Remove what `complete` makes, cache.json first, so that it is no cache from then on.

        Only of a bare one, and under cache.lock.

        Args:
            folders: the folder and those above it, if they are to go, too, the innermost first.
        """
        for file in (self.path / layout.CACHE_JSON, self.lease_lock, self.usage, self.cache_lock):
            file.unlink(missing_ok=True)
        for folder in [*(self.path / name for name in layout.FOLDERS), *folders]:
            with contextlib.suppress(OSError):  # somebody's file is in it by now
                folder.rmdir()

    def _is_there(self, path: Path, is_right: Callable[[int], bool]) -> bool:
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return False
        if not is_right(mode):
            raise CacheFormatError(
                f"{path} is a {_what(mode)}: a cache's own files and folders are plain ones; remove it"
            )
        return True

    def free_bytes(self) -> int:
        """Bytes that the disk has left for this user, where the folder is or would be made."""
        status = os.statvfs(next(path for path in (self.path, *self.path.parents) if path.exists()))
        return status.f_bavail * status.f_frsize

    # settings and the lock's record

    def read_settings(self, known: Settings | None = None) -> Settings:
        """Read cache.json; `known` is returned if it says the same.

        Raises: FileNotFoundError: no such folder. CacheFormatError: not a cache, or of another format.
        """
        try:
            text = _read(self.path / layout.CACHE_JSON, _MAX_SETTINGS_BYTES).decode()
        except FileNotFoundError:
            if not self.path.exists():
                if known is not None:
                    raise  # it is gone: `explaining` says so
                raise FileNotFoundError(
                    errno.ENOENT, "no cache here: make one with arrowcache.Cache.create", str(self.path)
                ) from None
            raise CacheFormatError(f"{self.path} is not a cache: it has no cache.json") from None
        except NotADirectoryError:
            raise CacheFormatError(f"{self.path} is not a cache: a cache is a folder") from None
        except (IsADirectoryError, UnicodeDecodeError) as error:
            raise CacheFormatError(f"{self.path} is not a cache: its cache.json is none: {error}") from None
        except OSError as error:
            if error.errno not in _NO_PLAIN_FILE:
                raise
            raise CacheFormatError(f"{self.path} is not a cache: its cache.json is no plain file") from None
        if known is not None and text == known.text:
            return known
        try:
            return Settings.from_json(text)
        except CacheFormatError as error:
            raise CacheFormatError(f"{self.path}: {error}") from None

    def require_known(self) -> None:
        """Make sure that no newer release keeps something here.

        Raises: CacheFormatError: one does. OSError: the folder cannot be listed.
        """
        if unknown := layout.newer_names(os.listdir(self.path)):
            error = layout.newer_format(f"{self.path} has {', '.join(unknown[:3])}")
            raise CacheFormatError(f"{error}. What is your own there move elsewhere")

    def write_settings(self, settings: Settings) -> None:
        """Replace cache.json atomically, synced."""
        part = self.new_part()
        try:
            part.write([memoryview(settings.text.encode())])
            part.sync()
            part.rename(self.path / layout.CACHE_JSON)
        finally:
            part.discard()
        self.sync_folder(self.path)

    def read_record(self) -> LockRecord:
        """Read the record in cache.lock."""
        return LockRecord.unpack(_read(self.cache_lock, LockRecord.nbytes))

    def write_record(self, record: LockRecord) -> None:
        """Replace the record in cache.lock, in one call; only while holding the lock."""
        with _opened(self.cache_lock, os.O_WRONLY) as fd:
            os.pwrite(fd, record.pack(), 0)

    def sync_record(self) -> None:
        """Sync the record. Without it a power cut may undo the last changes, and tears none."""
        _sync(self.cache_lock, os.O_RDWR | _OWN)

    # the counts of what was served

    def read_usage(self, start: int, nbytes: int) -> bytes:
        """Bytes of `usage`; fewer, where it ends before."""
        with _opened(self.usage, os.O_RDONLY | os.O_NONBLOCK) as fd:
            return os.pread(fd, nbytes, start)

    def change_usage(self, start: int, nbytes: int, change: Callable[[bytes], bytes]) -> None:
        """Replace bytes of `usage` by what `change` makes of those that are there; under cache.lock."""
        fd = os.open(self.usage, os.O_RDWR | os.O_NONBLOCK | _OWN)
        try:
            os.pwrite(fd, change(os.pread(fd, nbytes, start)), start)
        finally:  # no call of Python's comes between it and the caller, who notes it: Ctrl-C would
            os.close(fd)

    def free_usage(self, start: int, nbytes: int) -> None:
        """Free the disk's blocks of a range, which then reads as zeros. No effect where the disk cannot."""
        with _opened(self.usage, os.O_RDWR | os.O_NONBLOCK) as fd, contextlib.suppress(OSError):
            linux.free_range(fd, start, nbytes)

    # what is there

    def names_in_segments(self) -> list[str]:
        """All names in segments/, in the folder's own order, which stays while nothing changes."""
        return os.listdir(self.segments)

    def segment_names(self) -> list[str]:
        """Names in segments/ that are segments, oldest first."""
        return sorted(name for name in self.names_in_segments() if layout.parse_segment_name(name))

    def segment_info(self, name: str) -> SegmentInfo | None:
        """The segment of a name, or None if it is gone or not a regular file.

        Raises: PermissionError: this user may not read it: nor then any of the cache.
        """
        path = f"{self._segments}/{name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        info = _info(name, status)
        if info is not None and not (status.st_mode & stat.S_IRUSR and status.st_uid == os.geteuid()):
            require_right(path, os.R_OK)
        return info

    def quarantined_names(self) -> list[str]:
        """Segments in quarantine/, oldest first."""
        return sorted(name for name in _plain(self.quarantine) if layout.parse_segment_name(name))

    def quarantined_bytes(self) -> int:
        """Allocated bytes of quarantine/, reasons included."""
        return sum(allocated for _, allocated, _ in _files(self.quarantine))

    def incoming_bytes(self) -> int:
        """Bytes that all files in incoming/ take or have reserved, with slack for each part.

        What is being unlinked counts once, as long as it is there or the part that stands for it.
        """
        nbytes: dict[str, int] = {}
        for name, allocated, length in _files(self.incoming):
            slack = PART_SLACK_BYTES if name.endswith(layout.PART) else 0
            stem = name.partition(".")[0]
            nbytes[stem] = max(nbytes.get(stem, 0), allocated + slack, length + slack)
        return sum(nbytes.values())

    def other_bytes(self, foreign: Iterable[str]) -> int:
        """Allocated bytes of the folder but for segments and incoming files: what they cost too.

        `foreign` are the names in segments/ that are no segment's.
        """
        folders = [self._path, *(f"{self._path}/{name}" for name in layout.FOLDERS)]
        total = sum(os.stat(folder).st_blocks * _BLOCK for folder in folders)
        total += sum(allocated for _, allocated, _ in _files(self.path))
        for name in (layout.QUARANTINE, layout.RANKS, layout.POOLS):
            total += sum(allocated for _, allocated, _ in _files(self.path / name))
        with contextlib.suppress(FileNotFoundError):  # before the first note
            total += os.stat(self.notes).st_blocks * _BLOCK
            total += sum(allocated for _, allocated, _ in _files(self.notes))
        for name in foreign:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(self.segments / name).st_blocks * _BLOCK
        return total

    def locked_incoming(self, suffix: str) -> int:
        """Count the files of incoming/ with a suffix that a living writer locks."""
        names = [name for name in _plain(self.incoming) if name.endswith(suffix)]
        return sum(not self._is_unlocked(self.incoming / name) for name in names)

    def waiting_since(self) -> float | None:
        """Return the begin of a writer's longest wait, in seconds since 1970. None if no writer waits.

        Reads /proc, without cache.lock. Trying a lock would disturb a writer that just begins.
        """
        since = []
        for name in _plain(self.incoming):
            if name.endswith(layout.WAIT) and flock_holders(self.incoming / name):
                with contextlib.suppress(FileNotFoundError):  # it has found room
                    since.append(os.stat(self.incoming / name).st_mtime)
        return min(since, default=None)

    # publishing

    def new_part(self) -> PartFile:
        """Create an empty part in incoming/, locked by this process."""
        return PartFile(self.incoming / f"{uuid.uuid4().hex}{layout.PART}", self.rights())

    def new_wait(self) -> PartFile:
        """The sign of a waiting writer: an empty, locked file."""
        return PartFile(self.incoming / f"{uuid.uuid4().hex}{layout.WAIT}", self.rights())

    def link(self, part: PartFile, segment_name: str) -> None:
        """Make a part visible as a segment; FileExistsError rather than replacing one."""
        part.link(self.segments / segment_name)

    def sync_segments(self) -> None:
        """Make the names in segments/ outlast a power cut. Blocks: for the disk."""
        self.sync_folder(self.segments)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder outlast a power cut. Blocks: for the disk."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def sync(self) -> None:
        """Sync all segments and notes, and the names of everything. Blocks: for the disk."""
        for folder in (self.segments, self.notes):
            for name in _plain(folder) if folder.is_dir() else ():
                with contextlib.suppress(FileNotFoundError):  # evicted, or merged
                    _sync(folder / name, os.O_RDONLY | _OWN)
            if folder.is_dir():
                self.sync_folder(folder)
        self.sync_record()
        self.sync_folder(self.path)

    def in_the_way(self) -> Iterator[str]:
        """Say who locks a file of incoming/ or ranks/, which a freeze does not allow; under cache.lock."""
        does = {
            self.incoming / name: "evicts" if name.endswith((layout.GONE, layout.FREED)) else "writes"
            for name in _plain(self.incoming)
        }
        for name in self._used_names():
            does[self.used_path(name)] = f"has the name {name!r} of Loader(once=...)"
        for path, what in does.items():
            if not self._is_unlocked(path) and path.exists():
                yield f"{holder_names(path)} {what}"
        for record in self.held_ranks():
            names = " and ".join(map(process_name, layout.joined_pids(record)))
            yield f"{names} is in an epoch that ranks have agreed on"

    # leaving

    def retire(self, segment_name: str) -> Path:
        """Move a victim out of segments/; its bytes count until `remove`."""
        retired = self.incoming / f"{uuid.uuid4().hex}{layout.GONE}"
        os.rename(self.segments / segment_name, retired)
        return retired

    def remove(self, retired: Path) -> None:
        """Unlink what `retire` moved, or debris, if it is still there; under cache.lock."""
        retired.unlink(missing_ok=True)

    def remove_unlocked(self, retired: Path) -> None:
        """As `remove`, without cache.lock: its bytes count until they are free.

        Unlinking takes the name at once, and then for milliseconds frees what nobody counts any more. So
        a part that reserves as many bytes, and takes none, counts meanwhile.
        """
        try:
            reserved = self._reserve_to_free(retired.with_suffix(layout.FREED))
        except OSError:  # no inode or descriptor is left: what is removed makes room
            self.remove(retired)
            return
        try:
            with contextlib.suppress(OSError):
                reserved.reserve(os.stat(retired).st_blocks * _BLOCK)
            self.remove(retired)
        finally:
            reserved.discard()

    def _reserve_to_free(self, path: Path) -> PartFile:
        """A part, made without cache.lock: a sweep that comes before it is locked takes it for debris."""
        for _ in range(_RESERVE_ATTEMPTS):
            try:
                return PartFile(path, self.rights())
            except BlockingIOError:
                pass
        return PartFile(path, self.rights())

    def sweep(self) -> int:
        """Unlink the debris of dead writers and ranks; returns how many files. Only under cache.lock."""
        debris = [
            folder / name
            for folder, ours in ((self.incoming, layout.INCOMING_NAME), (self.ranks, layout.RANKS_NAME))
            for name in _plain(folder)
            if ours.fullmatch(name) and self._is_unlocked(folder / name)
        ]
        for path in debris:
            self.remove(path)
        return len(debris)

    def isolate(self, segment_name: str, reason: str) -> None:
        """Move a damaged segment to quarantine/ and write the reason beside it, if the disk has room."""
        quarantined = self.quarantine / segment_name
        quarantined.unlink(missing_ok=True)  # a rename to another name of the same file does nothing
        os.rename(self.segments / segment_name, quarantined)
        path = self.quarantine / f"{segment_name}{layout.REASON}"
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # rather than to write to where a link leads
            with _opened(path, os.O_RDWR | os.O_EXCL, self.rights()) as fd:
                os.pwrite(fd, f"{reason}\n".encode(errors="backslashreplace"), 0)

    def sync_isolated(self) -> None:
        """Sync a move by `isolate`: the new name first, so that a power cut leaves at least one name."""
        self.sync_folder(self.quarantine)
        self.sync_folder(self.segments)

    def drop_quarantined(self, segment_name: str) -> None:
        """Unlink a quarantined segment; it goes last, so that no reason is left without one."""
        with contextlib.suppress(IsADirectoryError):  # of somebody else's
            (self.quarantine / f"{segment_name}{layout.REASON}").unlink(missing_ok=True)
        (self.quarantine / segment_name).unlink(missing_ok=True)

    # sampler pools

    def has_pool(self, pool: str) -> bool:
        """True if any of its tasks was taken before."""
        return os.path.lexists(self.pools / pool)

    def take_tasks(self, pool: str, count: int, least: int = 0, *, returned: bool = False) -> int:
        """Advance a pool's next task number by `count`; returns the first. Only under cache.lock.

        Args:
            least: a number that the first one is not below, whatever the file has lost.
            returned: put the tasks among those that are to be drawn again, in the same write.
        Raises: CacheFormatError: a number that no pool ever had, or too many tasks to be drawn again.
        """
        with _opened(self.pools / pool, os.O_RDWR, self.rights()) as fd:
            data = os.pread(fd, 8, 0)
            first = max(least, int.from_bytes(data, "little") if len(data) == 8 else 0)
            if first > _MAX_TASKS:
                raise CacheFormatError(
                    f"{self.pools / pool} is damaged: {first} tasks were never done; remove it, and take "
                    "another seed or name for the pool"
                )
            numbers = [first + count]
            if returned:
                numbers += [*reversed(range(first, first + count)), *_returned(fd)]
                if len(numbers) > _MAX_RETURNED + 1:
                    raise CacheFormatError(
                        f"{len(numbers) - 2} tasks of pool {pool} were begun and never published, the most "
                        "that are remembered: mend what makes them fail, and start the pool again"
                    )
            os.pwrite(fd, _packed(numbers), 0)
        return first

    def return_tasks(self, pool: str, numbers: Iterable[int]) -> None:
        """Put back the numbers of tasks, to be taken next: the lowest first. Under cache.lock.

        A task that is there already, and what goes beyond the most that are remembered, is left out.
        """
        with _opened(self.pools / pool, os.O_RDWR, self.rights()) as fd:
            numbers = sorted({*_returned(fd), *numbers}, reverse=True)[-_MAX_RETURNED:]
            os.pwrite(fd, _packed(numbers), 8)
            os.ftruncate(fd, 8 + 8 * len(numbers))

    def returned_tasks(self, pool: str) -> list[int]:
        """The tasks that are to be drawn again, the lowest first. Only under cache.lock."""
        with contextlib.suppress(FileNotFoundError), _opened(self.pools / pool, os.O_RDWR) as fd:
            return _returned(fd)[::-1]
        return []

    def end_task(self, pool: str, number: int) -> None:
        """Leave out a task of those that are to be drawn again, if it is there. Only under cache.lock."""
        with contextlib.suppress(FileNotFoundError), _opened(self.pools / pool, os.O_RDWR) as fd:
            numbers = _returned(fd)
            if number in numbers:
                numbers.remove(number)
                os.pwrite(fd, _packed(numbers), 8)  # who dies before the next call leaves the last one twice
                os.ftruncate(fd, 8 + 8 * len(numbers))

    def read_division(self, pool: str) -> str:
        """The division of a pool's samples among its tasks, as `write_division` has it; empty if none is."""
        with contextlib.suppress(FileNotFoundError):
            return _read(self._division(pool), _MAX_DIVISION_BYTES).decode(errors="replace").strip("\0")
        return ""

    def write_division(self, pool: str, division: str, *, durable: bool) -> None:
        """Record the division of a pool's samples. Only under cache.lock.

        Blocks: for the disk, if durable.
        """
        with _opened(self._division(pool), os.O_RDWR, self.rights()) as fd:
            os.pwrite(fd, division.encode(), 0)
            if durable:
                os.fsync(fd)

    def _division(self, pool: str) -> Path:
        return self.pools / f"{pool}{layout.DIVISION}"

    def sync_tasks(self, pool: str) -> None:
        """Sync the numbers that were taken: the file, then its name."""
        _sync(self.pools / pool, os.O_RDWR | _OWN)
        self.sync_folder(self.pools)

    # notes on rows

    def changed_ns(self, *folders: str) -> tuple[int, ...] | None:
        """The time of each of these folders, of which a later change of its names makes another one.

        Returns: nanoseconds; None: a name came or left just now, and the next one may have the same time.
        """
        times, now = [], time.time_ns()
        for name in folders:
            try:
                times.append(os.stat(f"{self._path}/{name}").st_mtime_ns)
            except FileNotFoundError:  # before the first note
                times.append(0)
        return None if max(times) > now - _SETTLING_NS else tuple(times)

    def note_files(self) -> list[layout.NoteFile]:
        """Files of notes, those of the lowest numbers first; of the same first number the longest."""
        found = [file for name in self._in_notes() if (file := layout.NoteFile.parse(name))]
        return sorted(found, key=lambda file: (file.kind, file.first, -file.last))

    def note_bytes(self, file: layout.NoteFile) -> int:
        """The length of a file of notes. Raises: FileNotFoundError: as `read_note`."""
        return os.stat(f"{self._path}/{layout.NOTES}/{file.name}").st_size

    def read_note(self, file: layout.NoteFile) -> bytes:
        """The bytes of a file of notes. Raises: FileNotFoundError: it was merged into another, or is gone."""
        return _read(self.notes / file.name, layout.MAX_NOTE_BYTES)

    def link_note(self, file: layout.NoteFile, data: bytes, *, syncs: bool) -> None:
        """Make a file of notes appear, whole; only under cache.lock.

        Args:
            syncs: it outlasts a power cut.
        """
        self._link_in_notes(file.name, data, syncs=syncs)

    def drop_notes_before(self, seq: int) -> None:
        """Unlink files of notes on rows of older segments only, damaged ones too; only under cache.lock."""
        for name in self._in_notes():
            file = layout.NoteFile.parse(name.removesuffix(_DAMAGED))
            if file is not None and file.newest < seq:
                (self.notes / name).unlink(missing_ok=True)

    def isolate_note(self, file: layout.NoteFile) -> None:
        """Give a damaged file of notes another name, which nobody reads; only under cache.lock."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.notes / file.name, self.notes / f"{file.name}{_DAMAGED}")

    def drop_note(self, file: layout.NoteFile, *, syncs: bool = False) -> None:
        """Unlink a file of notes, if it is still there; only under cache.lock.

        Args:
            syncs: it stays away after a power cut.
        """
        (self.notes / file.name).unlink(missing_ok=True)
        if syncs:
            self.sync_folder(self.notes)

    def touch_weights(self, name: str, *, of_ranks: bool) -> bool:
        """Mark a file of weights as used now by a state; not for ranks. Returns: False: there is none."""
        try:
            (os.stat if of_ranks else os.utime)(self.notes / name)
        except FileNotFoundError:
            return False
        return True

    def read_weights(self, name: str) -> bytes:
        """The bytes of a file of weights. Raises: FileNotFoundError: it left."""
        return _read(self.notes / name, _MAX_WEIGHTS_BYTES)

    def link_weights(self, name: str, data: memoryview, *, of_ranks: bool) -> None:
        """Make a file of weights appear, on the disk, in place of a damaged one; only under cache.lock.

        One that no state uses has the time 0.
        """
        (self.notes / name).unlink(missing_ok=True)
        self._link_in_notes(name, data, syncs=True)
        if of_ranks:
            os.utime(self.notes / name, (0, 0))

    def drop_weights(self, kept: int, held: Container[str]) -> None:
        """Unlink files of weights, but for the last few that states used, and those that ranks hold.

        Only under cache.lock.
        """
        times = {name: os.stat(self.notes / name).st_mtime_ns for name in self._weights()}
        of_states = sorted((name for name in times if times[name]), key=times.__getitem__)
        for name in times.keys() - of_states[max(0, len(of_states) - kept) :]:
            if name not in held:
                (self.notes / name).unlink(missing_ok=True)

    def weights_bytes(self) -> int:
        """The length of all files of weights; only under cache.lock."""
        return sum(os.stat(self.notes / name).st_size for name in self._weights())

    def used_path(self, name: str) -> Path:
        """The file of the rows that a name has used."""
        return self.notes / f"{name}{layout.USED}"

    def read_used(self, name: str) -> bytes:
        """The content of that file. Empty, if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return _read(self.used_path(name), layout.MAX_NOTE_BYTES)
        return b""

    def put_used(self, name: str, part: PartFile) -> None:
        """Let a part take the place of that file: its lock holds on; only under cache.lock."""
        self._complete_notes()
        part.rename(self.used_path(name))
        self.sync_folder(self.notes)

    def unheld_names(self) -> list[str]:
        """The names that have used rows, and that nobody holds; only under cache.lock."""
        return [name for name in self._used_names() if self._is_unlocked(self.used_path(name))]

    def drop_used(self, name: str) -> None:
        """Unlink the file of a name; only under cache.lock."""
        self.used_path(name).unlink(missing_ok=True)

    def _used_names(self) -> list[str]:
        return [name.removesuffix(layout.USED) for name in self._in_notes() if name.endswith(layout.USED)]

    def _weights(self) -> list[str]:
        return [name for name in self._in_notes() if layout.WEIGHTS_NAME.fullmatch(name)]

    def _in_notes(self) -> list[str]:
        try:
            return _plain(self.notes)
        except FileNotFoundError:  # before the first note
            return []

    def _complete_notes(self) -> None:
        if not self.notes.is_dir():
            self._make_folder(self.notes)
            self.sync_folder(self.path)

    def _link_in_notes(self, name: str, data: bytes | memoryview, *, syncs: bool) -> None:
        self._complete_notes()
        part = self.new_part()
        try:
            part.write([memoryview(data)])
            if syncs:
                part.sync()
            part.link(self.notes / name)
        finally:
            part.discard()
        if syncs:
            self.sync_folder(self.notes)

    # ranks

    def open_ranks_file(self, name: str) -> RanksFile | None:
        """Open a file in ranks/. None if there is none."""
        try:
            return RanksFile(self.ranks / name)
        except FileNotFoundError:
            return None

    def held_ranks(self) -> Iterator[bytes]:
        """The content of each file in ranks/ that some rank holds; only under cache.lock."""
        for name in _plain(self.ranks):
            file = self.open_ranks_file(name) if layout.RANKS_NAME.fullmatch(name) else None
            if file is not None:
                with contextlib.closing(file):
                    if file.is_held():
                        yield file.read()

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
                part.link(self.ranks / name)
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
        """True if a file is there and nobody locks it, neither a writer nor a rank."""
        try:
            file = LockFile(path)
        except (FileNotFoundError, PermissionError):  # gone; another user is just making it
            return False
        with file:
            return file.try_exclusive() and file.try_range(0, 1, exclusive=True)


def require_right(path: Path | str, right: int) -> None:
    """Make sure that this user has a right, as `os.access` names it, to a path.

    Raises: PermissionError: not.
    """
    if not os.access(path, right, effective_ids=True) and os.path.lexists(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


def _returned(fd: int) -> list[int]:
    """Numbers of a pool's file that are to be drawn again, the highest first; none, if they make no sense."""
    data = os.pread(fd, 8 * (_MAX_RETURNED + 1), 0)
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]
    next_number, *returned = numbers or [0]
    while len(returned) > 1 and returned[-1] == returned[-2]:  # `end_task` was cut short
        returned.pop()
    is_sound = all(high > low for high, low in itertools.pairwise([next_number, *returned]))
    return returned if is_sound else []


def _packed(numbers: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


@contextlib.contextmanager
def _opened(path: Path, flags: int, rights: Rights | None = None) -> Iterator[int]:
    """The descriptor of a file of our own, made if it is to have rights and is not there; of no link."""
    fd = os.open(path, flags | _OWN | (os.O_CREAT if rights else 0), rights.file_mode if rights else 0)
    try:
        if rights and (status := os.fstat(fd)).st_uid == os.geteuid():  # else another user made it
            rights.give_group(fd)
            if status.st_mode & rights.file_mode != rights.file_mode:  # a umask took it
                os.fchmod(fd, rights.file_mode)
        yield fd
    finally:
        os.close(fd)


def _info(name: str, status: os.stat_result) -> SegmentInfo | None:
    parsed = layout.parse_segment_name(name)
    if parsed is None or not stat.S_ISREG(status.st_mode):
        return None
    return SegmentInfo(*parsed, status.st_size, status.st_blocks * _BLOCK, status.st_mtime)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)  # a cache's own folder may be a link
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _listed(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    # Opened and read to its end in one call: a Ctrl-C between the two would leave the folder open.
    for entry in list(itertools.chain.from_iterable(map(os.scandir, (folder,)))):
        yield entry.name, entry


def _plain(folder: Path) -> list[str]:
    """Names of the plain files of one folder: no links, folders, pipes or sockets."""
    return [name for name, entry in _listed(folder) if entry.is_file(follow_symlinks=False)]


def _read(path: Path, most: int) -> bytes:
    """A plain file's content, `most` bytes of it; waits for nobody, whatever has its name.

    Raises: OSError: a link (ELOOP), a socket (ENXIO), a pipe or another thing (EINVAL).
    """
    with _opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return os.pread(fd, min(status.st_size, most), 0)


def _what(mode: int) -> str:
    kinds = {stat.S_IFLNK: "link", stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe"}
    return kinds.get(stat.S_IFMT(mode), "socket or device")


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """(name, allocated bytes, length) of the plain files of one folder."""
    for name, entry in _listed(folder):
        try:
            if not entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                yield name, status.st_blocks * _BLOCK, status.st_size
        except FileNotFoundError:
            pass
