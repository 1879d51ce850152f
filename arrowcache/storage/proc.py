"""Proc: what /proc tells of processes that share a cache: their commands, starts and open files.

Of other users' processes the kernel shows the command, and nothing that is open. Whatever ends while it
is looked at is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from arrowcache.units import shortened

_MOST_SHOWN = 80
_MOST_HELPERS = 4  # that start one another
# How those begin that start others to help them: a module, or what is in the code of `python -c`.
_MODULES = (("joblib.externals.loky", "worker"), ("loky.backend.popen_loky", "sampler"))
_CODES = (
    ("arrowcache.sampling.workers", "sampler"),
    ("arrowcache.tensorflow.intake", "import worker"),
    ("arrowcache.reading.workers", "loader worker"),
    ("multiprocessing.spawn", "worker"),
    ("multiprocessing.forkserver", "worker"),
)


class OpenFile(NamedTuple):
    """A descriptor of a process, and what its link in /proc says: a path, or what else it is."""

    pid: int
    fd: str
    link: str


def command(pid: int) -> str:
    """The name that a person gives a process, or "unknown" if it is gone.

    The words of its command, of its program only the name, shortened. A process that others start to help
    them, whose own command tells nobody anything, is called by its role and by whom it helps: "sampler of
    python train.py (pid 4121)".
    """
    words = _words(pid)
    role = _role(words)
    if not role:
        return shortened(_shown(words), _MOST_SHOWN)
    owner, its_words = pid, words
    for _ in range(_MOST_HELPERS):
        owner = _parent(owner)
        its_words = _words(owner)
        if not _role(its_words):
            break
    if owner <= 1 or not its_words:
        return f"{role} of a process that has ended"
    whose = f" (pid {owner})"
    return f"{role} of {shortened(_shown(its_words), _MOST_SHOWN - len(role + ' of ' + whose))}{whose}"


def _role(words: Sequence[str]) -> str:
    """The work of a helper process, from its command. Empty for a command that people know."""
    rest = iter(words[1:])
    for word in rest:
        if word in ("-W", "-X"):
            next(rest, "")  # what belongs to it
        elif not word.startswith("-"):
            break  # a script, whose own words follow
        elif word[-1] in "mc":
            what = next(rest, "")
            return next(
                (role for sign, role in (_MODULES if word[-1] == "m" else _CODES) if sign in what), ""
            )
    return ""


def _words(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    return [word for word in words if word]


def _shown(words: Sequence[str]) -> str:
    if not words:
        return "unknown"
    program, *rest = words
    if program.startswith("/") and " " not in program:  # else it is what the process calls itself
        program = program.rpartition("/")[2]
    return " ".join([program, *rest])


def _parent(pid: int) -> int:
    """Return the number of the parent process. 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def started(pid: int) -> float | None:
    """Return the start of a process, in seconds since 1970. None if it is gone."""
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
