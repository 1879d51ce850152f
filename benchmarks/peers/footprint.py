"""How much of the disk a folder takes, while others write and delete in it."""

from __future__ import annotations

import os
from pathlib import Path


class Footprint:
    """The allocated blocks of everything under a folder, the folders themselves included.

    A walk over a folder in use may count a file that is gone when it sees the one that took its place. So
    there are two, and what both saw counts: these files were all there at one time, between the walks; and a
    file counts once, whatever its names. What was made or deleted within some milliseconds is missed. Where
    the folder is a file system of its own, the kernel is asked, which misses nothing: files too that are
    deleted, but still open or mapped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_mount = os.path.ismount(folder)
        self._empty_bytes = self._mounted() if self._is_mount else 0

    def bytes(self) -> int:
        if self._is_mount:
            return self._mounted() - self._empty_bytes
        first, second = self._walk(), self._walk()
        return sum(min(size, second[inode]) for inode, size in first.items() if inode in second)

    def _mounted(self) -> int:
        stats = os.statvfs(self._folder)
        return (stats.f_blocks - stats.f_bfree) * stats.f_frsize

    def _walk(self) -> dict[int, int]:
        found: dict[int, int] = {}
        todo = [str(self._folder)]
        while todo:
            folder = todo.pop()
            try:
                status = os.stat(folder)
                found[status.st_ino] = status.st_blocks * 512
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
                            continue
                        try:
                            status = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        found[status.st_ino] = status.st_blocks * 512
            except FileNotFoundError:
                continue
        return found
