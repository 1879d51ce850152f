"""Access: a cache is used whole or not at all.

Who reads must write too, since leases are locks and locks are files of the folder. So a cache is its
owner's alone, or a group's whose members may do all: the mode of its own folder decides (`layout.modes`). A
user who may do only some of it would train on a part, call the rest damaged, or keep others waiting: for him
the cache is refused as a whole. What is checked changes nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from arrowcache.storage import layout
from arrowcache.storage.folder import require_right
from arrowcache.storage.store import Store

_STICKY = "its sticky bit lets nobody but its owner evict here: have the owner take it away (chmod -R -t)"


def require_access(store: Store) -> None:
    """Make sure that this user may read and change all of a cache, each segment included.

    What is missing, or of another kind, is no matter here. Nor is a read-only file system, which is an error
    of its own.

    Raises: PermissionError: not; its path is the first thing that he may not use. OSError: as `segments`.
    """
    folder = store.folder
    if os.statvfs(folder.path).f_flag & os.ST_RDONLY:
        return
    for path in (folder.path, *(folder.path / name for name in layout.FOLDERS)):
        if stat.S_ISDIR(mode := _mode(path)):
            require_right(path, os.R_OK | os.W_OK | os.X_OK)
            if mode & stat.S_ISVTX and os.geteuid() not in (0, os.stat(path).st_uid):
                raise PermissionError(errno.EPERM, _STICKY, os.fspath(path))
    for path in (folder.cache_lock, folder.lease_lock, folder.usage):
        if stat.S_ISREG(_mode(path)):
            require_right(path, os.R_OK | os.W_OK)
    if stat.S_ISDIR(_mode(folder.segments)):
        store.segments()


def _mode(path: Path) -> int:
    """Of what is there; 0: nothing is. No link is followed."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0
