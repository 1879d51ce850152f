"""Control groups: how much memory the kernel lets this process have.

A container, a batch job and a service each have a control group with a limit. Groups are nested like folders,
and the kernel shows them as folders: each group around a process' own limits it too. /proc/<pid>/cgroup says
which group a process is in, /proc/<pid>/mountinfo where groups are shown. Both count from the process' cgroup
namespace: "/.." is the group around the namespace's own, whose name nobody inside can know.

There are two versions, and a machine may have both at a time: a version 1 hierarchy for memory, version 2
for all. Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_GROUP = re.compile(r"^(\d+):([^:]*):(/.*)", re.MULTILINE)
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - (\S+) \S* (\S+)", re.MULTILINE)  # see `_mounts`
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a blank in a path of mountinfo
_LIMITS = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}  # by the mount's type


def memory_bytes(process: str | os.PathLike[str] = "/proc/self") -> int:
    """Memory that a process may use: the machine's, or the least that one of its control groups allows.

    A limit that cannot be read is none. `memory.high` is none either: above it the kernel slows a group
    down, and refuses it nothing. Limits change while processes run, so each call reads them: less than 1 ms.

    Args:
        process: its folder in /proc.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(process)])


def _limits(process: str | os.PathLike[str]) -> Iterator[int]:
    """Of the process' own group, and of each around it that is mounted somewhere."""
    own = _own_groups(process)
    for kind, root, folder in _mounts(process):
        inside = _inside(own[kind], root) if kind in own else None
        while inside is not None:
            limit = _read(os.path.join(folder, *inside, _LIMITS[kind])).strip()
            if limit.isdigit():  # else "max", or nothing
                yield int(limit)
            inside = inside[:-1] if inside else None


def _own_groups(process: str | os.PathLike[str]) -> dict[str, str]:
    """The type of mount that shows a hierarchy with memory -> the group's path in it."""
    groups = {}
    for number, controllers, path in _GROUP.findall(_read(os.path.join(process, "cgroup"))):
        if number == "0":
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    return groups


def _mounts(process: str | os.PathLike[str]) -> list[tuple[str, str, str]]:
    """(type, group, folder that shows it) of the mounts where limits of memory may be."""
    mounts = {}
    for found in _MOUNT.findall(_read(os.path.join(process, "mountinfo"))):
        root, folder, kind, options = map(_unescaped, found)
        is_shown = kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))
        mounts[folder] = (kind, root, folder) if is_shown else None  # the last one there hides the others
    return [mount for mount in mounts.values() if mount is not None]


def _inside(path: str, root: str) -> list[str] | None:
    """The way from a mount's group down to a process'; None: that is not within it.

    As far down as names are known: to the mount's own group, where that is around the namespace's.
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
