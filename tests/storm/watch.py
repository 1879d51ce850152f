"""Watch: what is measured from outside while the storm goes on, and what must never be seen."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from storm.usage import nobody_reads_memory, read_memory_file

if TYPE_CHECKING:
    from typing import Self


def blocks_on_disk(path: Path) -> int:
    """Allocated bytes of the tree, each file once, at a moment when nobody begins or ends anything."""
    with open(path / "cache.lock") as lock:
        while True:  # as the library does: polled
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)
        blocks = {0: os.lstat(path).st_blocks}
        for folder, folders, files in os.walk(path):
            for name in (*folders, *files):
                try:
                    status = os.lstat(os.path.join(folder, name))
                except FileNotFoundError:  # a retired segment is unlinked without the lock
                    continue
                blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def used_of_file_system(path: Path) -> int:
    """Allocated bytes of all its files, of those too that have no name any more."""
    with nobody_reads_memory:
        status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def evicted_but_mapped(cache: Path) -> list[str]:
    """Segments that a process of this session maps and that are not published: their lease was in vain.

    A process unmaps before it lets go of its lease, and so does the kernel when it dies. So at each moment
    what is mapped has its name in segments/.
    """
    found, published = [], f"{cache / 'segments'}{os.sep}"
    for pid in session_pids():
        for line in read_memory_file(pid, "maps").splitlines():
            name = "".join(line.split(None, 5)[5:])
            is_listed = name.startswith(published) and not name.endswith(" (deleted)")
            if name.startswith(f"{cache}{os.sep}") and not is_listed:
                found.append(f"process {pid} maps {name}")
    return found


def session_pids() -> list[int]:
    """Processes of this session, but for this one."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and int(name) != os.getpid() and os.getsid(int(name)) == os.getsid(0):
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found


class Watch:
    """A thread that measures again and again: how often, and the most it ever found.

    Args:
        measure: its value, or what must never be: a list with something in it.
        pause_seconds: between two measurements.
    """

    def __init__(self, measure: Callable[[], int | list[str]], pause_seconds: float) -> None:
        self.times, self.most = 0, 0
        self.found: list[str] = []
        self._measure, self._pause_seconds = measure, pause_seconds
        self._stop = Event()
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(self._pause_seconds):
            value = self._measure()
            if isinstance(value, int):
                self.most = max(self.most, value)
            else:
                self.found += value
            self.times += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
