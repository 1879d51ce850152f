"""Control groups: which limit of memory holds, as the kernel's own files say it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

import arrowcache as ac
from arrowcache.proc import memory_bytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1 << 20
UNLIMITED_V1 = "9223372036854771712"


class Tree:
    """Control groups, and what a process sees of them, as folders and files."""

    def __init__(self, folder: Path) -> None:
        self.process, self.folder = folder / "process", folder / "sys"
        self._groups, self._mounts = "", "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        self.process.mkdir()

    def v1(self, path: str, root: str = "/", at: str = "memory") -> Path:
        """The process is in a group of version 1; returns the folder that shows the group `root`."""
        self._groups = f"11:cpu,cpuacct:/other\n4:memory:{path}\n1:name=systemd:/other\n" + self._groups
        return self.mount("cgroup", root, at, "rw,memory")

    def v2(self, path: str, root: str = "/", at: str = "") -> Path:
        """Likewise of version 2."""
        self._groups += f"0::{path}\n"
        return self.mount("cgroup2", root, at, "rw,nsdelegate")

    def mount(self, kind: str, root: str, at: str, options: str) -> Path:
        folder = self.folder / at
        folder.mkdir(parents=True, exist_ok=True)
        shown = str(folder).replace(" ", r"\040")
        self._mounts += f"31 23 0:28 {root} {shown} rw,relatime shared:9 - {kind} {kind} {options}\n"
        return folder

    def bytes(self) -> int:
        (self.process / "cgroup").write_text(self._groups)
        (self.process / "mountinfo").write_text(self._mounts)
        return memory_bytes(self.process)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def limit(group: Path, value: object, name: str = "memory.max") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / name).write_text(f"{value}\n")


def limit_v1(group: Path, value: object) -> None:
    limit(group, value, "memory.limit_in_bytes")


@pytest.mark.parametrize(
    ("path", "root", "limits", "holds"),
    [
        ("/user.slice/session", "/", {"user.slice": "max"}, None),
        ("/pod/container", "/", {"pod": 200, "pod/container": 300}, 200),
        ("/pod/container", "/", {"pod": 300, "pod/container": 200}, 200),
        ("/docker/1f2e", "/docker/1f2e", {"": 200}, 200),  # a container without a namespace of its own
        ("/", "/", {"": 200}, 200),  # one with
        ("/system.slice/docker-1/job", "/system.slice/docker-1", {"": 300, "job": 200}, 200),
        ("/../outside", "/..", {"outside": 200}, 200),  # a process above its namespace
        # The names between are not to be known, but the group limits all that is in it.
        ("/task", "/../..", {"": 300, "task": 1}, 300),
        ("/job/gone (deleted)", "/", {"job": 200}, 200),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_around_a_process_holds_as_far_as_it_is_shown(
    tree, version, path, root, limits, holds
):
    shown = (tree.v1 if version == 1 else tree.v2)(path, root=root)
    for group, value in limits.items():
        value = value * MIB if value != "max" else UNLIMITED_V1 if version == 1 else value
        (limit_v1 if version == 1 else limit)(shown / group, value)
    assert tree.bytes() == (holds * MIB if holds else MACHINE)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["job", "job/step", "job/step/task"])
def test_the_limit_of_each_group_around_a_process_holds(tree, version, limited):
    write = limit_v1 if version == 1 else limit
    root = (tree.v1 if version == 1 else tree.v2)("/job/step/task")
    for group in ("job", "job/step", "job/step/task"):
        write(root / group, UNLIMITED_V1 if version == 1 else "max")
    write(root / limited, 300 * MIB)
    write(root / "job/step/another", MIB)
    assert tree.bytes() == 300 * MIB


def test_where_both_versions_are_mounted_each_limit_counts(tree):
    first, second = tree.v1("/a/b"), tree.v2("/c", at="unified")
    limit_v1(first / "a", 300 * MIB)
    limit(second / "c", 200 * MIB)
    assert tree.bytes() == 200 * MIB
    limit(second / "c", 400 * MIB)
    assert tree.bytes() == 300 * MIB


@pytest.mark.parametrize(
    ("path", "root"), [("/../other", "/"), ("/a", "/b"), ("/a", "/a/b"), ("/ab", "/a"), ("/x", "/../y")]
)
def test_a_group_that_is_not_around_the_process_does_not_count(tree, path, root):
    mounted = tree.v2(path, root=root)
    for group in (mounted, mounted.parent / "other", mounted / "b"):
        limit(group, MIB)
    assert tree.bytes() == MACHINE


def test_every_mount_of_a_hierarchy_is_looked_at(tree):
    limit(tree.v2("/a/b", at="all") / "a/b", 300 * MIB)
    limit(tree.mount("cgroup2", "/a", "a part", "rw"), 200 * MIB)
    assert tree.bytes() == 200 * MIB


def test_a_mount_that_another_one_hides_is_not_looked_at(tree):
    root = tree.v2("/a")
    limit(root / "a", MIB)
    tree.mount("tmpfs", "/", "", "rw")
    assert tree.bytes() == MACHINE


def test_other_hierarchies_of_version_1_have_no_limit_of_memory(tree):
    tree.v1("/a")
    limit_v1(tree.mount("cgroup", "/", "cpu", "rw,cpu,cpuacct") / "a", MIB)
    assert tree.bytes() == MACHINE


@pytest.mark.parametrize("content", ["", "max\n", "many\n", "-1\n"])
def test_a_limit_that_is_no_number_is_none(tree, content):
    root = tree.v2("/job")
    limit(root / "job", "")
    (root / "job/memory.max").write_text(content)
    assert tree.bytes() == MACHINE


@pytest.mark.parametrize(
    ("addresses", "data", "group", "holds"),
    [(300, "unlimited", 400, 300), ("unlimited", 200, 400, 200), (300, 200, 100, 100)],
)
def test_the_limits_of_the_process_itself_count_too(tree, addresses, data, group, holds):
    limit(tree.v2("/"), group)
    (tree.process / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max data size             {data:<20} unlimited            bytes     \n"
        "Max stack size            8                    unlimited            bytes     \n"
        f"Max address space         {addresses:<20} 10                   bytes     \n"
    )
    assert tree.bytes() == holds


def test_limits_that_cannot_be_read_are_none(tree, tmp_path):
    assert memory_bytes(tmp_path / "nowhere") == MACHINE
    root = tree.v2("/job")
    (root / "job/memory.max").mkdir(parents=True)
    limit(root, 200 * MIB)
    assert tree.bytes() == 200 * MIB


@pytest.mark.parametrize("content", ["nonsense\n", "1:2\n\n::\n", " - \n", "\0\xff"])
def test_files_of_another_form_are_no_limits(tree, content):
    (tree.process / "cgroup").write_text(content)
    (tree.process / "mountinfo").write_text(content)
    assert memory_bytes(tree.process) == MACHINE


def own_folder(version: int) -> Path:
    """Where this process' own group of memory is shown."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if version == 1 and "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
        folder = Path("/sys/fs/cgroup" + path)
        if version == 2 and not controllers and "memory" in _controllers(folder):
            return folder
    pytest.skip(f"this machine has no control groups of version {version} for memory")


def _controllers(folder: Path) -> list[str]:
    """What a group of version 2 limits for those in it; a folder of something else: nothing."""
    try:
        return (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_a_loader_in_a_nested_group_of_the_kernel_keeps_to_the_outer_ones_limit(tmp_path, version):
    """The real thing: a group with a limit, one without in it, and a loader in that one."""
    outer = own_folder(version) / f"arrowcache-{uuid.uuid4().hex}"
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    schema = {"x": ac.Tensor("int64", (1024,))}
    ac.Cache.create(tmp_path / "cache", schema, capacity="1MiB", segment_bytes="64KiB").close()
    with ExitStack() as made:
        try:
            for group in (outer, outer / "inner"):
                group.mkdir()
                made.callback(group.rmdir)
                if version == 2 and group is outer:
                    (outer / "cgroup.subtree_control").write_text("+memory")
            (outer / name).write_text(str(512 * MIB))
        except OSError as error:
            pytest.skip(f"no control group of version {version} can be made here: {error}")
        script = (
            "import sys\n"
            f"open({str(outer / 'inner' / 'cgroup.procs')!r}, 'w').write('0')\n"
            "import arrowcache as ac\n"
            "from arrowcache.proc import memory_bytes\n"
            "print(memory_bytes())\n"
            "try:\n"
            f"    ac.Loader({str(tmp_path / 'cache')!r}, 100_000)\n"
            "except ValueError as error:\n"
            "    print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    limited, message = done.stdout.splitlines()
    assert int(limited) == 512 * MIB
    assert "512.0 MiB of memory" in message
