"""Control groups: the memory that the kernel lets this process have.

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
from collections.abc import Iterator

_GROUP = re.compile(r"^(\d+):([^:]*):(/.*)", re.MULTILINE)
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - (\S+) \S* (\S+)", re.MULTILINE)  # see `_mounts`
_OWN = re.compile(r"^Max (?:address space|data size) +(\d+)", re.MULTILINE)  # else "unlimited"
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in a path of mountinfo
_LIMITS = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}  # by the mount's type


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
