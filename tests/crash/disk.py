"""Disk: one that forgets what was not synced.

It records what this process does to files below a folder, where storage/folder.py meets the operating
system, and makes what may be there after a power cut at any moment of it. Assumed of a file system is
only what POSIX says, and that a page is written whole or not at all:
- fsync of a file keeps its length and bytes, fsync of a folder its names; of what was done before;
- everything else may be there or not, in any order: each name of each folder by itself (so a rename may
  have happened at one end only), a file's length, and each page of it, old, new or zero.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

PAGE = 4096
T = TypeVar("T")


class History(Generic[T]):
    """The values that something had, and when each came."""

    def __init__(self, when: int, value: T) -> None:
        self._times, self._values = [when], [value]

    def add(self, when: int, value: T) -> None:
        self._times.append(when)
        self._values.append(value)

    def possible(self, synced: int, cut: int) -> list[T]:
        """What it may be after a cut, oldest first, if it was last synced then; empty: it came later."""
        first = max(0, bisect_right(self._times, synced) - 1)
        return self._values[first : bisect_right(self._times, cut)]


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever names it has."""

    is_folder: bool
    made: int
    syncs: list[int] = field(default_factory=list)
    names: dict[str, History[Node | None]] = field(default_factory=dict)  # of a folder
    content: History[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.content = History(self.made, b"")

    def synced(self, cut: int) -> int:
        """When it was last synced before a cut."""
        return self.syncs[at - 1] if (at := bisect_right(self.syncs, cut)) else -1

    def child(self, name: str) -> Node | None:
        history = self.names.get(name)
        return None if history is None else history.possible(1 << 60, 1 << 60)[-1]

    def set(self, when: int, name: str, node: Node | None) -> None:
        self.names.setdefault(name, History(-1, None)).add(when, node)


@dataclass(frozen=True)
class Fate:
    """Which of n possible values, oldest first, become of a name, a length and a page."""

    names: Callable[[int], int]
    lengths: Callable[[int], int]
    pages: Callable[[int], int]


def _oldest(_: int) -> int:
    return 0


def _newest(count: int) -> int:
    return count - 1


def chance(seed: object) -> Fate:
    choose = random.Random(str(seed)).randrange
    return Fate(choose, choose, choose)


FATES = {
    "nothing unsynced": Fate(_oldest, _oldest, _oldest),
    "everything": Fate(_newest, _newest, _newest),
    "names and lengths, no bytes": Fate(_newest, _newest, _oldest),
    "names of empty files": Fate(_newest, _oldest, _oldest),
    "bytes without names": Fate(_oldest, _newest, _newest),
}
"""What file systems were seen to do. `chance` is what they may do."""


class Call(NamedTuple):
    """What was done to which files, named as they were then."""

    what: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.what, *self.paths))


Tree = dict[str, tuple[int, bytes | None]]
"""Relative path -> which file, its bytes or None for a folder; parents come before children."""


LOST_SYNCS: dict[str, str] = {}
"""Ends of paths whose syncs the disk loses, and why: for a test of what finds a broken promise."""


class Disk:
    """Everything below a folder that exists, and is synced, when recording begins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[Call] = []
        self._lock = threading.RLock()
        self._nodes: dict[int, Node] = {}  # by inode number
        self._root = self._new(root, is_folder=True)
        self._root.syncs.append(0)
        for path in sorted(root.rglob("*")):
            node = self._new(path, is_folder=path.is_dir())
            node.syncs.append(0)
            if not node.is_folder:
                node.content.add(0, path.read_bytes())
            self._put(path, node)

    @property
    def now(self) -> int:
        """How many calls there were: a cut at this time has them all done."""
        return len(self.calls)

    # recording

    @contextmanager
    def recording(self) -> Iterator[Disk]:
        originals = {name: getattr(os, name) for name in _RECORDED}

        def wrapper(name: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                with self._lock:
                    return _RECORDED[name](self, originals[name], *arguments, **options)

            return call

        for name in _RECORDED:
            setattr(os, name, wrapper(name))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(os, name, original)

    def damage(self, path: Path, data: bytes) -> None:
        """Have other bytes in a file, synced: what a disk itself may do."""
        with self._lock, open(path, "r+b") as file:
            file.truncate(0)
            file.write(data)
            file.flush()
            self._note("damage", path)
            node = self._get(path)
            node.content.add(self.now, data)
            node.syncs.append(self.now)

    def _new(self, path: Path, *, is_folder: bool) -> Node:
        node = self._nodes[os.lstat(path).st_ino] = Node(is_folder, self.now)
        return node

    def _at(self, path: Any) -> tuple[Node, str]:
        """The folder of a path, and its name there."""
        *folders, name = self._relative(path).split("/")
        node = self._root
        for each in folders:
            below = node.child(each)
            assert below is not None, f"{path}: {each} was not seen to be made"
            node = below
        return node, name

    def _relative(self, path: Any) -> str:
        return os.path.relpath(os.fspath(path), self.root)

    def _note(self, what: str, *paths: Any) -> None:
        """Time goes on by one call."""
        self.calls.append(Call(what, tuple(map(self._relative, paths))))

    def _put(self, path: Any, node: Node | None) -> None:
        folder, name = self._at(path)
        folder.set(self.now, name, node)

    def _get(self, path: Any) -> Node:
        folder, name = self._at(path)
        node = folder.child(name)
        assert node is not None, f"{path} was not seen to be made"
        return node

    def _is_ours(self, path: Any) -> bool:
        return Path(os.path.abspath(path)).is_relative_to(self.root)

    def _open(self, do: Any, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        is_new = bool(flags & os.O_CREAT) and self._is_ours(path) and not os.path.lexists(path)
        fd: int = do(path, flags, *arguments, **options)
        if is_new:
            self._note("create", path)
            self._put(path, self._new(Path(path), is_folder=False))
        return fd

    def _write(self, do: Any, fd: int, *arguments: Any) -> Any:
        done = do(fd, *arguments)
        path = _path_of(fd)
        if self._is_ours(path):
            self._note("write", path)
            self._nodes[os.fstat(fd).st_ino].content.add(self.now, Path(f"/proc/self/fd/{fd}").read_bytes())
        return done

    def _fsync(self, do: Any, fd: int) -> None:
        path = _path_of(fd)
        if not self._is_ours(path):
            do(fd)
        elif not path.endswith(tuple(LOST_SYNCS)):  # this disk is a simulated one
            self._note("sync", path)
            self._nodes[os.fstat(fd).st_ino].syncs.append(self.now)

    def _link(self, do: Any, source: Any, target: Any) -> None:
        do(source, target)
        self._note("link", source, target)
        self._put(target, self._get(source))

    def _rename(self, do: Any, source: Any, target: Any) -> None:
        do(source, target)
        self._note("rename", source, target)
        self._put(target, self._get(source))
        self._put(source, None)

    def _unlink(self, do: Any, path: Any) -> None:
        do(path)
        if self._is_ours(path):
            self._note("unlink", path)
            self._put(path, None)

    def _mkdir(self, do: Any, path: Any, *arguments: Any, **options: Any) -> None:
        do(path, *arguments, **options)
        if self._is_ours(path):
            self._note("mkdir", path)
            self._put(path, self._new(Path(path), is_folder=True))

    # forgetting

    def after_a_cut(self, cut: int, fate: Fate) -> Tree:
        """What is there when the power failed after so many calls."""
        tree: Tree = {}
        self._collect(self._root, "", cut, fate, tree, {})
        return tree

    def _collect(
        self, folder: Node, path: str, cut: int, fate: Fate, tree: Tree, known: dict[int, bytes]
    ) -> None:
        synced = folder.synced(cut)
        for name, history in folder.names.items():
            possible = history.possible(synced, cut)
            node = possible[fate.names(len(possible))] if possible else None
            if node is None:
                continue
            tree[path + name] = (id(node), None)
            if node.is_folder:
                self._collect(node, f"{path}{name}/", cut, fate, tree, known)
            else:
                if id(node) not in known:
                    known[id(node)] = _content(node, cut, fate)
                tree[path + name] = (id(node), known[id(node)])


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def _content(node: Node, cut: int, fate: Fate) -> bytes:
    versions = node.content.possible(node.synced(cut), cut)
    if len(versions) == 1:
        return versions[0]
    lengths = list(dict.fromkeys(map(len, versions)))
    length = lengths[fate.lengths(len(lengths))]
    pages = []
    for start in range(0, length, PAGE):
        contents = [version[start : start + PAGE].ljust(PAGE, b"\0") for version in versions]
        contents = list(dict.fromkeys(contents))
        pages.append(contents[fate.pages(len(contents))])
    return b"".join(pages)[:length]


def lay_out(tree: Tree, folder: Path) -> None:
    """Make these files in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    made: dict[int, Path] = {}
    for name, (node, content) in tree.items():
        path = folder / name
        if content is None:
            path.mkdir(mode=0o700)
        elif node in made:
            os.link(made[node], path)
        else:
            path.write_bytes(content)
            made[node] = path


_RECORDED: dict[str, Callable[..., Any]] = {
    "open": Disk._open,
    "posix_fallocate": Disk._write,
    "ftruncate": Disk._write,
    "writev": Disk._write,
    "pwrite": Disk._write,
    "fsync": Disk._fsync,
    "link": Disk._link,
    "rename": Disk._rename,
    "unlink": Disk._unlink,
    "mkdir": Disk._mkdir,
}
"""What changes files. Whatever else did would not be seen: `test_power` looks for it."""
