"""Locks: the kernel's locks on files, who holds them, and cache.lock as a thread holds it.

Two kinds, on purpose. `flock` guards a whole file: cache.lock, and each part by its writer.
Open-file-description (OFD) locks guard ranges of bytes: a lease is a shared one. Both belong to
the open file description, so each `LockFile` opens its own: locks of one description do not
conflict with each other, and unlocking through a shared one releases another lock's range.

A forked child shares the descriptions: an unlock there would drop the parent's lock, and its
life would prolong it. So in a child every inherited LockFile is closed, which unlocks nothing
while the parent lives. The kernel drops the locks of a process that dies, in whatever way.

cache.lock is polled with a deadline, never waited for blindly: a stopped process may hold it. A finalizer may
run while its thread holds cache.lock: what takes the lock itself is then deferred (`once_unlocked`).
"""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from arrowcache import linux
from arrowcache.errors import LockTimeoutError
from arrowcache.lifetimes import Closable, forgets_in_child, unforked, until_exit
from arrowcache.proc import OpenFile, command, open_files

_REFUSED = (errno.EAGAIN, errno.EACCES)
LOCK_TIMEOUT_SECONDS = 60.0
_jitter = random.SystemRandom()  # the generators with a state are the user's


def file_identity(status: os.stat_result) -> tuple[int, int]:
    """Device and inode: the same for every path of a file."""
    return status.st_dev, status.st_ino


class LockFile(Closable):
    """One open file description that holds locks; `close()` drops them all.

    Never blocks: whoever must wait polls, with a deadline.
    """

    fd = -1  # closed, being closed, or not opened yet
    is_closed = False  # all locks are dropped
    _keeper = -1  # see `outlast_mappings`

    def __init__(self, path: Path, flags: int = os.O_RDWR, mode: int = 0o600) -> None:
        self.path = path
        with unforked:  # no child inherits one that is not to be told
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            forgets_in_child(self)
        try:
            status = os.fstat(self.fd)
            if flags & os.O_CREAT and status.st_mode & mode != mode:  # a umask took it
                os.fchmod(self.fd, mode)
            self.identity = file_identity(status)
        except BaseException:
            self.close()
            raise

    def try_exclusive(self) -> bool:
        """Take the whole file's flock, if nobody has it."""
        try:
            linux.lock_file(self.fd)
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            raise
        return True

    def try_range(self, start: int, length: int, *, exclusive: bool) -> bool:
        """Lock a range of bytes, if no other description's lock conflicts."""
        kind = linux.EXCLUSIVE if exclusive else linux.SHARED
        try:
            linux.set_lock(self.fd, kind, start, length)
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            raise
        return True

    def outlast_mappings(self) -> None:
        """Let the kernel free all mapped files of this process, when it dies, before it drops the locks.

        A process that is killed lets go of the files it mapped and of those it has open in no order that
        one could count on: Linux unmaps first, but frees what was unmapped last. So this description
        is also put on its way through a socket, which never arrives: it goes a round later than
        everything else, when the socket is freed. Costs a descriptor.

        Raises: OSError: none is left.
        """
        with unforked:
            sender, keeper = socket.socketpair()
            with sender, keeper:
                socket.send_fds(sender, [b"-"], [self.fd])
                self._keeper = keeper.detach()

    def unlock_range(self, start: int, length: int) -> None:
        """Unlock `length` bytes from `start` on."""
        linux.set_lock(self.fd, linux.UNLOCKED, start, length)

    def conflict(self, start: int, length: int) -> range | None:
        """A range within the given one that another description has locked, or None if it is free."""
        found = linux.conflicting_lock(self.fd, start, length)
        if found is None:
            return None
        first, size = found
        stop = start + length if size == 0 else min(first + size, start + length)
        return range(max(first, start), stop)

    def close(self) -> None:
        """Drop the locks. Never fails: what was done under them is done. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            try:
                with suppress(OSError):  # closing does as well, unless a child forked meanwhile shares it
                    linux.unlock_file(fd)
                with suppress(OSError):
                    linux.set_lock(fd, linux.UNLOCKED, 0, 0)
            finally:
                os.close(fd)
                self.is_closed = True
                self._close_keeper()

    def forget_in_child(self) -> None:
        """Close it without unlocking."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._close_keeper()
            self.is_closed = True

    def _close_keeper(self) -> None:
        if self._keeper >= 0:
            keeper, self._keeper = self._keeper, -1
            os.close(keeper)

    @until_exit
    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a lock: of a whole file, or of the bytes in `locked`."""

    pid: int
    command: str
    locked: range

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})"


UNSEEN = "an unseen process"


def process_name(pid: int) -> str:
    """Return a process in words."""
    return str(Holder(pid, command(pid), range(0)))


def flock_holders(path: Path) -> list[Holder]:
    """Processes that hold the flock of a file, from /proc/locks."""
    try:
        wanted = _lock_identity(os.stat(path))
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == wanted:
            found.append(Holder(int(fields[4]), command(int(fields[4])), range(0)))
    return found


def range_holders(path: Path, files: Iterable[OpenFile] | None = None, kind: str = " READ ") -> list[Holder]:
    """Processes that share locks on ranges of a file, from /proc/*/fdinfo. Those of other users stay unseen.

    An exclusive lock is an evictor's, for a moment.

    Args:
        files: files that processes have open. None means that they are looked up.
        kind: of the locks, as the kernel writes it. Empty means any.
    """
    try:
        wanted = _lock_identity(os.stat(path))
    except OSError:
        return []
    return [
        Holder(file.pid, command(file.pid), locked)
        for file in (open_files() if files is None else files)
        if os.path.basename(file.link) == path.name
        for locked in _ranges_of(file, wanted, kind)
    ]


def holder_names(path: Path, byte: int | None = None) -> str:
    """Return the holders of a file's flock, or of the lock of a byte of it, for a message."""
    if byte is None:
        found = flock_holders(path)
    else:
        found = [holder for holder in range_holders(path, kind="") if byte in holder.locked]
    return " and ".join(dict.fromkeys(map(str, found))) or UNSEEN


def _ranges_of(file: OpenFile, wanted: str, kind: str) -> list[range]:
    try:
        lines = Path(f"/proc/{file.pid}/fdinfo/{file.fd}").read_text().splitlines()
    except OSError:  # closed meanwhile
        return []
    ranges = []
    for line in lines:
        if line.startswith("lock:") and "OFDLCK" in line and kind in line and f" {wanted} " in line:
            start, stop = line.split()[-2:]
            ranges.append(range(int(start), 2**63 - 1 if stop == "EOF" else int(stop) + 1))
    return ranges


def _lock_identity(status: os.stat_result) -> str:
    device = status.st_dev
    return f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"


# cache.lock


@contextmanager
def held(path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold cache.lock, polled until the deadline; then call what was deferred until it is free.

    Raises: LockTimeoutError: names the holder. OSError: the file cannot be opened.
    """
    before = _here.lock
    file = LockFile(path)
    try:
        _here.lock = weakref.ref(file)
        _wait_for(file, timeout_seconds)
        yield
    finally:
        try:
            file.close()
        finally:  # Ctrl-C may have come before it did anything
            file.close()
            _here.lock = before
        _call_deferred()


def _wait_for(file: LockFile, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    pause = 0.0005
    while not file.try_exclusive():
        if time.monotonic() > deadline:
            raise LockTimeoutError(
                f"{file.path} was held for over {timeout_seconds:g} s by {holder_names(file.path)}: "
                "continue it (kill -CONT) or end it"
            )
        time.sleep(pause * _jitter.uniform(0.5, 1))
        pause = min(2 * pause, 0.02)


class _Here(threading.local):
    #: It holds this cache.lock, or waits for it. Weak: one whose closing Ctrl-C cut short closes as it goes.
    lock: Callable[[], LockFile | None] = staticmethod(lambda: None)

    @property
    def deferred(self) -> deque[Callable[[], None]]:
        """Made where it is asked for: the garbage collector may ask while a thread's first one is made."""
        found: deque[Callable[[], None]] = self.__dict__.setdefault("own_deferred", deque())
        return found

    @property
    def is_locked(self) -> bool:
        file = self.lock()
        return file is not None and not file.is_closed


_here = _Here()


def once_unlocked(function: Callable[[], None]) -> None:
    """Call a function that takes cache.lock: at once, or as soon as this thread holds none any more.

    So a finalizer may take the lock, though the garbage collector calls it at any point of any thread.
    """
    _here.deferred.append(function)
    _call_deferred()


def _call_deferred() -> None:
    while not _here.is_locked:
        try:
            function = _here.deferred.popleft()  # not "if there is one": the collector may come in between
        except IndexError:
            return
        function()
