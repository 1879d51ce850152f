"""What a program leaves behind: processes of its tree that live on, and files. Linux only."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

#: Set in the environment of a program that is watched, so that its children are known as its own.
MARK = "ARROWCACHE_WATCHED"
#: Helpers of Python's multiprocessing and of Ray, which are no workers.
_HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker", "Agent")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: int  # ticks since boot: with the pid, nobody else's
    command: str


class Tree:
    """All processes of a program that `alive` ever saw: those below it, and those that carry its mark."""

    def __init__(self, root: int, mark: str) -> None:
        self._root = root
        self._mark = f"{MARK}={mark}".encode()
        self._seen: set[tuple[int, int]] = set()

    def alive(self) -> list[Process]:
        """Those that live, the root among them. Once its parent is dead, one without the mark is only found
        if it was seen before."""
        parents: dict[int, int] = {}
        known: dict[int, Process] = {}
        for folder in Path("/proc").iterdir():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ValueError):
                continue
            if folder.name.isdigit() and fields[0] not in "ZX":
                pid = int(folder.name)
                parents[pid] = int(fields[1])
                known[pid] = Process(pid, int(fields[19]), command.strip())
        for pid, process in known.items():
            if self._is_below(pid, parents) or self._is_marked(pid):
                self._seen.add((pid, process.started))
        return [process for pid, process in sorted(known.items()) if (pid, process.started) in self._seen]

    def workers(self) -> list[Process]:
        """Those that do the work: below the root, nobody's parent, and no helper.

        Where there are Ray's, only its workers that have something to do.
        """
        alive = [process for process in self.alive() if process.pid != self._root]
        parents = {_parent(process.pid) for process in alive}
        leaves = [
            process
            for process in alive
            if process.pid not in parents and not any(name in process.command for name in _HELPERS)
        ]
        of_ray = [process for process in leaves if process.command.startswith("ray::")]
        busy = [process for process in of_ray if "IDLE" not in process.command]
        return (busy or of_ray or leaves) if any("raylet" in p.command for p in alive) else leaves

    def kill(self) -> None:
        for process in self.alive():
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _is_below(self, pid: int, parents: dict[int, int]) -> bool:
        while pid > 1:
            if pid == self._root:
                return True
            pid = parents.get(pid, 0)
        return False

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def in_short(found: dict[str, int], most: int = 8) -> dict[str, int]:
    """The same, where there are many: a line for each entry of the folder itself."""
    if len(found) <= most:
        return found
    sums: dict[str, int] = {}
    for name, nbytes in found.items():
        top, slash, _ = name.partition("/")
        sums[top + slash] = sums.get(top + slash, 0) + nbytes
    return sums


def files(folder: Path) -> dict[str, int]:
    """Bytes on the disk of each file below a folder, and 0 for what is neither file nor folder."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                found[str(path.relative_to(folder))] = path.lstat().st_blocks * 512
            except OSError:
                continue
    return found


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
