"""Mapping: the mapped segment files that views and tables keep. native/maps.py maps them.

Guarantees: no mapping survives into a forked child, so that a child never prolongs the life of a file that
its parent gave up; nothing is unmapped at interpreter exit, when a daemon thread may still be copying: the
kernel does it.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from arrowcache import linux
from arrowcache.lifetimes import Origin, at_exit, interrupt_again, until_exit
from arrowcache.linux import PAGE_BYTES
from arrowcache.native import maps
from arrowcache.os_errors import explained

_UNREADABLE = (errno.EFAULT, linux.EHWPOISON)  # what madvise says where a touch would be a SIGBUS
_ANY_LENGTH = 2**63 - 1
_KEPT_GIL_BYTES = 8 << 20  # unmapping so much takes some 0.1 ms


def _takes_long(nbytes: int) -> bool:
    """True if unmapping so many bytes takes longer than handing over the GIL, if their pages are mapped."""
    return nbytes >= _KEPT_GIL_BYTES


def populate(address: int, nbytes: int) -> bool:
    """Read mapped pages from the disk, if they are not in memory, and enter them into the page tables.

    A hint: pages that cannot be read now are read at the first touch. Blocks while the disk reads; other
    threads go on. Returns: True if they are in memory now.
    """
    start = address // PAGE_BYTES * PAGE_BYTES
    if nbytes and linux.advise(start, address + nbytes - start, linux.MADV_POPULATE_READ, keep_gil=False):
        will_need(address, nbytes)  # an older kernel
        return False
    return True


def will_need(address: int, nbytes: int) -> None:
    """Ask the disk for mapped pages. Returns at once."""
    start = address // PAGE_BYTES * PAGE_BYTES
    linux.advise(start, address + nbytes - start, mmap.MADV_WILLNEED, keep_gil=False)


def will_read_on(address: int, nbytes: int) -> None:
    """Let a touch of a part of a sparse mapping read what is around it too, as ever."""
    start = address // PAGE_BYTES * PAGE_BYTES
    linux.advise(start, address + nbytes - start, mmap.MADV_NORMAL)


def will_read_pages(address: int, nbytes: int) -> None:
    """Let a touch of a mapping read its page alone from the disk: it is sparse again."""
    linux.advise(address, nbytes, mmap.MADV_RANDOM)


def is_readable(address: int, nbytes: int) -> bool:
    """Read mapped pages from the disk. Returns: False: to touch them would end the process by SIGBUS.

    Lets go of the GIL only where it waits for the disk.
    """
    start = address // PAGE_BYTES * PAGE_BYTES
    nbytes += address - start
    keep_gil = not _takes_long(nbytes) and linux.are_in_memory(start, nbytes)
    if not keep_gil:
        will_need(start, nbytes)  # else a sparse mapping is read page by page
    for _ in range(2):  # what failed once may have been chance
        refused = linux.advise(start, nbytes, linux.MADV_POPULATE_READ, keep_gil=keep_gil)
        if refused not in _UNREADABLE:  # else an older kernel, or no memory for page tables
            return True
    return False


class FileMapping:
    """A private mapping of one whole file; unmapped when the last view of it dies.

    Args:
        on_unmap: called once the file is unmapped: mapped implies leased, so the lease ends then.
            Twice, if Ctrl-C comes in between.
        limit: of its bytes. A longer file is not mapped: there may not be as many addresses.
        least: bytes that it had when it was published.
        writable: what is written through it is seen through it alone, never in the file.
        sparse: a touch reads its page alone from the disk, not megabytes around it; whoever needs more
            says so by `will_need` or `will_read_on`.
    Raises: OSError: it cannot be opened or mapped; EIO: it is shorter now. ValueError: empty, or longer than
        `limit`.
    """

    _file: maps.File | None = None  # nothing is mapped yet
    _on_unmap: Callable[[], None] | None = None

    def __init__(
        self,
        path: Path | str,
        on_unmap: Callable[[], None] | None = None,
        *,
        limit: int = _ANY_LENGTH,
        least: int = 1,
        writable: bool = False,
        sparse: bool = False,
    ) -> None:
        self._origin, self._touched_bytes = Origin(), 0
        self._file = file = maps.File.at(path)  # first: it knows what Ctrl-C has left
        try:
            file.open(limit, 0)
            if file.nbytes < least:
                raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
            file.map()
            self.address, self.nbytes = file.address, file.nbytes
            if writable:
                linux.make_writable(self.address, self.nbytes)
            if not sparse:
                will_read_on(self.address, self.nbytes)
            _live[self.address] = self.nbytes if writable else 0
            self._on_unmap = on_unmap
        except OSError as error:
            self._unmap()
            raise explained_at_open(error) from None
        except BaseException:
            self._unmap()
            raise
        finally:
            file.close()

    def populate(self, start: int, nbytes: int) -> None:
        """`populate` for bytes of the file.

        Raises: OSError: EIO: the file has not these bytes any more, or the disk does not give them; touching
            them would end the process by SIGBUS.
        """
        self._touched_bytes += nbytes
        address = self.address + start
        if not populate(address, nbytes) and not is_readable(address, nbytes):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def buffer(self) -> pa.Buffer:
        """The file's bytes, read-only; the mapping lives as long as the buffer or a slice of it."""
        self._touched_bytes = self.nbytes
        return pa.foreign_buffer(self.address, self.nbytes, base=self)

    @until_exit
    def __del__(self) -> None:
        if self._file is None:
            return
        try:
            self._unmap()
        except KeyboardInterrupt:  # would be lost here: an exception cannot leave a finalizer
            self._unmap()
            interrupt_again()

    def _unmap(self) -> None:
        """Unmap the file, if it is mapped. After an interrupt a second call completes it."""
        if self._file is None:
            return
        _live.pop(self._file.address, None)  # first: once unmapped, the address is anybody's
        if not self._origin.is_here:  # a forked child has no such mapping
            return
        maps.unmap([self._file], self._touched_bytes)
        if self._on_unmap is not None:
            self._on_unmap()


def explained_at_open(error: Exception) -> Exception:
    """An error of opening or mapping a file of a cache, with what to do; its path is in it."""
    what = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ENOMEM)
    if not isinstance(error, OSError) or error.errno not in what:
        return error
    return explained(error, Path(error.filename or "").parent)


def room_of_data(quarters: int) -> int:
    """Return how many bytes may be mapped writable still, as `maps.room`: they are data of the process.

    The kernel counts all of a private mapping as data (RLIMIT_DATA) once it is writable.
    """
    try:
        left = linux.left_bytes(resource.RLIMIT_DATA)
    except OSError:  # no descriptor is left, nor would there be one for a file
        return 0
    ours = sum(list(_live.values()))
    return _ANY_LENGTH if left is None else max(0, (left + ours) * quarters // 4 - ours)


def live_mappings() -> int:
    """Return the number of living mappings in this process."""
    return len(_live)


def _drain() -> None:
    """At exit: let Arrow's threads finish with what a dataset scanned.

    They drop their last buffers a moment after the scan has returned; one that waits for the GIL
    while the interpreter ends aborts the process.
    """
    before, now = -1, len(_live)
    while now and now != before:
        time.sleep(0.005)
        before, now = now, len(_live)


_live: dict[int, int] = {}  # address -> its writable bytes; single operations, which no thread can tear
at_exit(_drain)
