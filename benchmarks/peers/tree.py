"""What a measured process and its children hold of the machine's memory, looked at from outside.

Private memory is the sum of their Pss_Anon: what forked processes share counts once. Shared memory is what
the whole machine has more of than before (Shmem: /dev/shm, memfd, tmpfs), so nothing else may run.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from typing import Self

_EVERY_SECONDS = 0.2


class Watch:
    """Watches a process tree in a thread, as a context manager; then has the peaks, in bytes."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = shared_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.private_bytes = self.shared_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            try:
                processes = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            private = sum(private_bytes(process.pid) for process in processes)
            self.private_bytes = max(self.private_bytes, private)
            self.shared_bytes = max(self.shared_bytes, shared_bytes() - self._before)


def private_bytes(pid: int) -> int:
    """0 if the process has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss_Anon: +(\d+)", rollup, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def shared_bytes() -> int:
    found = re.search(r"^Shmem: +(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
