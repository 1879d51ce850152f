"""Use of the machine by processes and files: processor time, memory, the disk, and the page cache.

Nothing but NumPy and the standard library is imported here: peers use it where arrowcache is not installed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_TICKS = os.sysconf("SC_CLK_TCK")


# -- Processor time ------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """User and system time of this process, all its threads, and its ended children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def tree_cpu_seconds() -> float:
    """User and system time of this process, its children, and theirs, ended or not."""
    total, todo = cpu_seconds(), children(os.getpid())
    while todo:
        pid = todo.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / _TICKS
        todo += children(pid)
    return total


def children(pid: int | str = "self") -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def spin(take: Callable[[], object], rate: float, nbytes: int, seconds: float) -> tuple[float, float]:
    """Run pure Python for some seconds, taking `nbytes` whenever they are due at `rate` bytes a second.

    Returns: loops a second, and the GB/s that were delivered.
    """
    period, loops, taken = nbytes / rate, 0, 0
    started = now = time.perf_counter()
    while now - started < seconds:
        for _ in range(200):
            loops += 1
        now = time.perf_counter()
        if now - started >= taken * period:
            take()
            taken += 1
    passed = time.perf_counter() - started
    return loops / passed, taken * nbytes / passed / 1e9


# -- Memory --------------------------------------------------------------------------------------------


def status_bytes(name: str, pid: int | str = "self") -> int:
    """A count of /proc/<pid>/status: RssAnon is private memory that is no file's."""
    return 1024 * _count(Path(f"/proc/{pid}/status").read_text(), name)


def private_bytes(pid: int) -> int:
    """Pss_Anon of a process: pages that forked processes share are divided. 0 if it has ended."""
    try:
        return 1024 * _count(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss_Anon")
    except OSError:
        return 0


def shared_bytes() -> int:
    """Shmem of the whole machine: /dev/shm, memfd, tmpfs."""
    return 1024 * _count(Path("/proc/meminfo").read_text(), "Shmem")


def read_bytes() -> int:
    """What this process and its threads had the disk read so far."""
    return _count(Path("/proc/self/io").read_text(), "read_bytes")


@contextmanager
def peak(look: Callable[[], int], seconds: float = 0.02) -> Iterator[SimpleNamespace]:
    """Gives `most`, of a figure at which a thread looks every so often."""
    found, ended = SimpleNamespace(most=0), threading.Event()

    def watch() -> None:
        while not ended.wait(seconds):
            found.most = max(found.most, look())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _count(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


# -- Files ---------------------------------------------------------------------------------------------


def advise(path: Path, advice: int) -> None:
    """Tell the kernel of a file: POSIX_FADV_DONTNEED drops it from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, advice)


def drop(folder: Path) -> None:
    """Have no file of a folder in the page cache.

    Raises: RuntimeError: a twentieth of them or more still is.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        advise(path, os.POSIX_FADV_DONTNEED)
    total = sum(path.stat().st_size for path in files)
    if (resident := sum(map(resident_bytes, files))) > total / 20:
        raise RuntimeError(f"{resident} of {total} bytes stayed in the page cache: some process maps them")


def resident_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache, in whole pages."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        status = _LIBC.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del view
    if status:
        raise OSError(ctypes.get_errno(), "mincore")
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


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
        for folder, _, names in os.walk(self._folder):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with suppress(FileNotFoundError):
                    status = os.lstat(path)
                    found[status.st_ino] = status.st_blocks * 512
        return found
