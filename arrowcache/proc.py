"""Proc: other processes, and the memory that this one may have, as files of the kernel tell them.

Of processes that share a cache it tells the command, the start and the open files. Of other users' processes
it tells the command, and nothing that is open. Whatever ends while it is looked at is passed over.

A container, a batch job and a service each have a control group with a limit. Groups are nested like folders,
and the kernel shows them as folders: each group around a process' own limits it too. /proc/<pid>/cgroup has
the names of a process' groups, /proc/<pid>/mountinfo the folders that show groups. Both count from the
process' cgroup namespace: "/.." is the group around the namespace's own, whose name is unknown inside.

There are two versions, and a machine may have both at a time: a version 1 hierarchy for memory, version 2
for all. A process' own limits, of addresses and data (RLIMIT_AS, RLIMIT_DATA), are in /proc/<pid>/limits.
Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from arrowcache.units import shortened

_GROUP = re.compile(r"^(\d+):([^:]*):(/.*)", re.MULTILINE)
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - (\S+) \S* (\S+)", re.MULTILINE)  # see `_mounts`
_OWN = re.compile(r"^Max (?:address space|data size) +(\d+)", re.MULTILINE)  # else "unlimited"
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in a path of mountinfo
_LIMITS = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}  # by the mount's type

_MAX_SHOWN = 80
_MAX_HELPERS = 4  # that start one another
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
        return shortened(_shown(words), _MAX_SHOWN)
    owner, its_words = pid, words
    for _ in range(_MAX_HELPERS):
        owner = _parent(owner)
        its_words = _words(owner)
        if not _role(its_words):
            break
    if owner <= 1 or not its_words:
        return f"{role} of a process that has ended"
    whose = f" (pid {owner})"
    return f"{role} of {shortened(_shown(its_words), _MAX_SHOWN - len(role + ' of ' + whose))}{whose}"


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


def memory_bytes(process: str | os.PathLike[str] = "/proc/self") -> int:
    """Return the memory that a process may use: the machine's, or its least limit, or its control groups'.

    A limit that cannot be read is ignored. So is `memory.high`: above it the kernel slows a group
    down, and refuses nothing. Limits change while processes run, so each call reads them: less than 1 ms.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own = map(int, _OWN.findall(_read(os.path.join(process, "limits"))))
    return min([machine, *own, *_limits(process)])


def _limits(process: str | os.PathLike[str]) -> Iterator[int]:
    """Yield the limits of the process' own group, and of each mounted group around it."""
    own = _own_groups(process)
    for kind, root, folder in _mounts(process):
        inside = _inside(own[kind], root) if kind in own else None
        while inside is not None:
            limit = _read(os.path.join(folder, *inside, _LIMITS[kind])).strip()
            if limit.isdigit():  # else "max", or nothing
                yield int(limit)
            inside = inside[:-1] if inside else None


def _own_groups(process: str | os.PathLike[str]) -> dict[str, str]:
    """Return the group's path for each type of mount that shows a hierarchy with memory."""
    groups = {}
    for number, controllers, path in _GROUP.findall(_read(os.path.join(process, "cgroup"))):
        if number == "0":
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    return groups


def _mounts(process: str | os.PathLike[str]) -> list[tuple[str, str, str]]:
    """Return (type, group, folder that shows it) of mounts that may show limits of memory."""
    mounts = {}
    for found in _MOUNT.findall(_read(os.path.join(process, "mountinfo"))):
        root, folder, kind, options = map(_unescaped, found)
        is_shown = kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
        mounts[folder] = (kind, root, folder) if is_shown else None  # the last one there hides the others
    return [mount for mount in mounts.values() if mount is not None]


def _inside(path: str, root: str) -> list[str] | None:
    """Return the names from a mount's group down to a process', or None if it is not inside.

    The names end at the mount's own group if that is around the namespace's.
    """
    group, around = _parts(path), _parts(root)
    ups, ups_around = group.count(".."), around.count("..")
    if ups < ups_around == len(around):
        return []
    return group[len(around) :] if ups == ups_around and group[: len(around)] == around else None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _unescaped(word: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), word)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:  # a sandbox hides it, or this hierarchy has no such limit
        return ""
