"""Processes: what /proc tells of those that share a cache: their commands, starts and open files.

Of other users' processes the kernel shows the command, and nothing that is open. Whatever ends while it
is looked at is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MOST_SHOWN = 80


class OpenFile(NamedTuple):
    """A descriptor of a process, and what its link in /proc says: a path, or what else it is."""

    pid: int
    fd: str
    link: str


def command(pid: int) -> str:
    """The words of a process' command, of its program only the name, shortened; "unknown" if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "unknown"
    if words[0].startswith("/") and " " not in words[0]:  # else it is what the process calls itself
        words[0] = words[0].rpartition("/")[2]
    text = " ".join(word for word in words if word)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def started(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None: it is gone."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return boot + ticks / os.sysconf("SC_CLK_TCK")


def open_files() -> Iterator[OpenFile]:
    """All descriptors of all processes of this user."""
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        folder = f"/proc/{name}/fd"
        try:
            numbers = os.listdir(folder)
        except OSError:  # not ours to read, or gone meanwhile
            continue
        for fd in numbers:
            try:
                link = os.readlink(f"{folder}/{fd}")
            except OSError:  # closed meanwhile: in our own case at least the one that listed them
                continue
            yield OpenFile(int(name), fd, link)
