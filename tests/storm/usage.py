"""Usage: what a process holds of the kernel's things, read from /proc and not from the library."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

MAX_GROWTH_BYTES = 48 << 20  # of private memory: allocators keep some; a storm delivers gigabytes
MAX_NEW_MAPPINGS = 64  # without a file: allocators' own, a few a thread
_NUMBER = re.compile(r":\[\d+\]$|\d+")


@dataclass(frozen=True)
class Usage:
    """Of one process at one moment."""

    files: Counter[str]  # open ones, by name or kind
    mapped: Counter[str]  # mapped ones, but for libraries
    anonymous: Counter[str]  # mapped memory without a file, by permissions and size
    locks: int
    children: int
    private_bytes: int

    @classmethod
    def of(cls, pid: int | str = "self") -> Usage:
        process = Path("/proc") / str(pid)
        files: Counter[str] = Counter()
        locks = 0
        for entry in os.listdir(process / "fd"):
            try:
                files[_NUMBER.sub("", os.readlink(process / "fd" / entry))] += 1
                locks += (process / "fdinfo" / entry).read_text().count("lock:")
            except FileNotFoundError:  # what listed them
                continue
        mapped: Counter[str] = Counter()
        anonymous: Counter[str] = Counter()
        for line in (process / "maps").read_text().splitlines():
            addresses, permissions, *_, inode, name = f"{line} ".split(" ", 5)
            start, stop = (int(address, 16) for address in addresses.split("-"))
            if inode == "0":
                anonymous[f"{permissions} {(stop - start) // 1024} KiB"] += 1
            elif ".so" not in name:
                mapped[name.strip()] += 1
        rollup = (process / "smaps_rollup").read_text()
        private = sum(int(number) for number in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE))
        return cls(files, mapped, anonymous, locks, len(children_of(pid)), private * 1024)

    def growth_since(self, before: Usage) -> list[str]:
        """What this process holds more of than before, beyond what allocators keep."""
        found = [
            f"{count} more of {what} {name}"
            for what, now, then in (
                ("open file", self.files, before.files), ("mapping of", self.mapped, before.mapped)
            )
            for name, count in (now - then).items()
        ]  # fmt: skip
        for what, now, then, most in (
            ("locks", self.locks, before.locks, 0),
            ("children", self.children, before.children, 0),
            ("anonymous mappings", self.anonymous.total(), before.anonymous.total(), MAX_NEW_MAPPINGS),
            ("private bytes", self.private_bytes, before.private_bytes, MAX_GROWTH_BYTES),
        ):
            if now > then + most:
                found.append(f"{now} {what}, and {then} before")
                if what == "anonymous mappings":
                    found[-1] += f": {(self.anonymous - before.anonymous).most_common(8)}"
        return found


def children_of(pid: int | str) -> list[int]:
    """The processes that one started, whichever thread did."""
    found = []
    for task in (Path("/proc") / str(pid) / "task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            continue
    return found


def read_memory_file(process: int, name: str) -> str:
    """What /proc tells of a process' memory, such as `maps`; "" if it has ended.

    While such a file is read the kernel keeps the memory, and the files mapped there, for a process that
    dies meanwhile: so nobody measures disks then.
    """
    with nobody_reads_memory:
        try:
            return Path(f"/proc/{process}/{name}").read_text(errors="replace")
        except OSError:
            return ""


nobody_reads_memory = threading.Lock()
