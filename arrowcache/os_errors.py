"""OS errors: advice where the kernel refuses files, mappings, threads or room on the disk.

An error of the operating system keeps its class, number and path, so that handlers still match; its
text gains the numbers and the advice.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from arrowcache.errors import WorkerError
from arrowcache.linux import most_mappings, save_addresses

MORE_ROOM = "free space on it, or cache.evict() some and cache.resize() to less"
"""Advice for a full disk: deleting needs no room, all other work may."""


def explained(error: OSError, folder: Path | None = None) -> OSError:
    """Return the same error with advice; itself, if it has some already, or if there is none."""
    if error.errno is None or error.strerror != os.strerror(error.errno):
        return error
    if error.errno in (errno.EACCES, errno.EPERM):
        advice = _rights(folder)
    elif error.errno in _ADVICE:
        advice = _ADVICE[error.errno]()
    else:
        return error
    names = [name for name in (error.filename, error.filename2) if name is not None]
    where = names[:1] + [None] * len(names[1:]) + names[1:]  # OSError's third is for another system
    better = OSError(error.errno, f"{error.strerror}: {advice}", *where)
    return better.with_traceback(error.__traceback__)


@contextmanager
def explaining(folder: Path | None = None) -> Iterator[None]:
    """Add advice to errors of the operating system from the block, for a cache in this folder."""
    try:
        yield
    except OSError as error:
        better = explained(error, folder)
        try:
            if better is error:
                raise
            raise better from None
        finally:
            del better  # its traceback has this frame


@contextmanager
def importing() -> Iterator[None]:
    """Add advice to the error of a first import in the block that finds no descriptor left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise  # the advice of others is about a cache
        raise explained(error) from error


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises: WorkerError: the kernel refuses more threads; it can be tried again.
    """
    save_addresses()
    try:
        thread.start()
    except RuntimeError as error:
        if thread.ident is not None:
            raise  # it was started before
        raise WorkerError(f"no thread can be started: {_threads()}") from error


def _threads() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        f"this process has {threading.active_count()}, and the limits are {shown} processes and threads of "
        f"this user (ulimit -u), {_most_mappings()} mappings of this process (vm.max_map_count), and those "
        "of its control group: raise what is too low, or use fewer workers"
    )


def _most_mappings() -> str:
    with suppress(OSError):  # such as without a free descriptor
        return str(most_mappings())
    return "?"


def _files() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process may have {limit}; raise the limit of open files (ulimit -n), or keep fewer open"


def out_of_memory() -> str:
    """Return what a process that gets no memory may do, with its limits."""
    limits = f"{_limit(resource.RLIMIT_AS, 'ulimit -v')}, {_limit(resource.RLIMIT_DATA, 'ulimit -d')}"
    return (
        f"this process has no memory, no addresses ({limits}) or none of its {_most_mappings()} mappings "
        "(sysctl vm.max_map_count) left: raise the limit, keep fewer batches, tables and snapshots alive, or "
        "lower a loader's prefetch or workers"
    )


def _limit(kind: int, name: str) -> str:
    limit = resource.getrlimit(kind)[0]
    return name if limit == resource.RLIM_INFINITY else f"{name} is {limit // 1024} kB"


def _file_bytes() -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    shown = "any number of" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        f"a file of this process may have {shown} bytes (ulimit -f), if its file system allows that: raise "
        "the limit, for worker processes to 256 MiB or more"
    )


def _rights(folder: Path | None) -> str:
    owner = "another user's"
    if folder is not None:
        with suppress(OSError):
            owner = f"user {os.stat(folder).st_uid}'s"
    return (
        f"the cache is {owner}, and this process runs as user {os.geteuid()}: use it as its owner "
        "(chmod -R u+rwX), or have the owner share it with a group (chgrp -R GROUP and chmod -R g+rwX). "
        "Who reads a cache must be able to write all of it, but for a frozen one: chmod -R a+rX"
    )


_ADVICE: dict[int, Callable[[], str]] = {
    errno.EMFILE: _files,
    errno.ETOOMANYREFS: _files,
    errno.ENFILE: lambda: "the whole machine has too many files open: raise fs.file-max",
    errno.EFBIG: _file_bytes,
    errno.ENOMEM: out_of_memory,
    errno.EAGAIN: _threads,
    errno.EROFS: lambda: (
        "readers lock the cache's files, too, so its disk must be writable, unless cache.freeze() was called "
        "before: see why it is not (dmesg), and mount it anew, or copy the cache elsewhere; snapshots that "
        "are open go on"
    ),
    errno.ENOSPC: lambda: f"the disk is full: {MORE_ROOM}",
    errno.EDQUOT: lambda: MORE_ROOM,
    errno.EIO: lambda: "the disk failed: see dmesg; what else is published can be read still",
    errno.ENOENT: lambda: (
        "the cache's folder was moved or removed while in use: put it back, or open the cache where it is now"
    ),
}
