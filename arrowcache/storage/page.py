"""Page: memory in which a process shows figures to other processes of the same user.

One page of memory without a name, a memfd, which goes when its process does: a kill leaves nothing. Who
looks finds it among the descriptors in /proc/<pid>/fd, under its link's name; what it says of itself is
not to be trusted more than any process of the same user is.

    byte 0      head: magic, version, pid, device and inode of the cache's folder; then what never changes
    byte 128    what changes, written in one call of C, which no other thread and no signal handler of the
                process come between. Readers read until two times agree
    byte 1024   path of the cache's folder

A forked child shares the page: it closes it at once, and makes its own.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from arrowcache import linux
from arrowcache.lifetimes import forgets_in_child
from arrowcache.storage.proc import OpenFile, open_files

if TYPE_CHECKING:
    from typing import Self

SHOWN_BYTES = 4096  # of a page, on machines of larger pages, too
RECORD_AT, PATH_AT = 128, 1024
HEAD = struct.Struct("<16sqqQQ")
_SPARE_DESCRIPTORS = 32  # a process that is nearly out of them needs them itself
_TRIES = 100


class PageKind(NamedTuple):
    """A kind of page: `name` is the memfd's, `magic` and `version` are in the head."""

    name: str
    magic: bytes
    version: int

    @property
    def link(self) -> str:
        """The text of the descriptor's link in /proc."""
        return f"/memfd:{self.name} (deleted)"


class Page:
    """A page of this process. Writing never fails, and does nothing once it is closed."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page: mmap.mmap | None = page  # its last reference unmaps it and closes the descriptor
        forgets_in_child(self)

    @classmethod
    def create(cls, kind: PageKind, folder: Path, identity: bytes) -> Self | None:
        """A page about the cache in a folder, or None if no memory or descriptor is left.

        Args:
            identity: follows the head.
        """
        try:
            status = os.stat(folder)
            fd = linux.memory_file(kind.name)
            try:
                if fd + _SPARE_DESCRIPTORS >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                    return None
                os.posix_fallocate(fd, 0, SHOWN_BYTES)
                page = mmap.mmap(fd, SHOWN_BYTES)  # which has a descriptor of its own
            finally:
                os.close(fd)
        except OSError:
            return None
        page[PATH_AT:SHOWN_BYTES] = os.fsencode(folder)[: SHOWN_BYTES - PATH_AT].ljust(
            SHOWN_BYTES - PATH_AT, b"\0"
        )
        page[HEAD.size : HEAD.size + len(identity)] = identity
        HEAD.pack_into(page, 0, kind.magic, kind.version, os.getpid(), status.st_dev, status.st_ino)
        return cls(page)

    @property
    def is_open(self) -> bool:
        return self._page is not None

    def close(self) -> None:
        """Show nothing any more. Idempotent."""
        self._page = None

    def forget_in_child(self) -> None:
        self.close()


def path_of(page: bytes) -> str:
    """Return the folder that a page names."""
    return os.fsdecode(page[PATH_AT:].rstrip(b"\0"))


def read_page(path: str | os.PathLike[str]) -> bytes | None:
    """The content of a page by its file, such as /proc/<pid>/fd/<n>. None if it cannot be read.

    Blocks: never, whatever is there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        page = os.pread(fd, SHOWN_BYTES, 0)
        for _ in range(_TRIES):  # after which each number is one that was there, if not at the same time
            before, page = page, os.pread(fd, SHOWN_BYTES, 0)
            if before == page:
                break
    except OSError:
        return None
    finally:
        os.close(fd)
    return page


class SeenPage(NamedTuple):
    """A page of some process; `key` tells it from others."""

    key: int
    pid: int
    data: bytes


def seen_pages(
    kind: PageKind, cache: tuple[int, int], files: Iterable[OpenFile] | None = None
) -> list[SeenPage]:
    """The pages of a kind about one cache, by process.

    Args:
        cache: device and inode of its folder.
        files: files that processes have open. None means that they are looked up.
    """
    found: dict[int, SeenPage] = {}
    for file in open_files() if files is None else files:
        if file.link != kind.link:
            continue
        path = f"/proc/{file.pid}/fd/{file.fd}"
        data = read_page(path)
        if data is None or len(data) != SHOWN_BYTES:
            continue
        magic, version, pid, *about = HEAD.unpack_from(data)
        if (magic.rstrip(b"\0"), version) != (kind.magic, kind.version) or tuple(about) != cache:
            continue
        try:
            key = os.stat(path).st_ino
        except OSError:  # closed meanwhile
            continue
        if key not in found or file.pid == pid:  # a process forked by C shares its parent's
            found[key] = SeenPage(key, file.pid, data)
    return sorted(found.values(), key=lambda page: (page.pid, page.key))
