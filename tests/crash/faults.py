"""Faults: every call by which an operation meets the file system is a point at which it can fail.

Calls are met where the library meets the operating system, so nothing depends on how its methods are
cut. What cannot fail on its own, such as closing a file of a local disk, is no point.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

from arrowcache.native import maps
from arrowcache.storage import folder

CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES)
CHANGING = (
    "posix_fallocate", "ftruncate", "writev", "fsync", "pwrite", "link", "rename", "unlink", "mkdir", "chmod",
)  # fmt: skip
READING = ("pread", "lstat", "stat", "fstat", "statvfs", "listdir")
_PACKAGE = str(Path(folder.__file__).parents[1])


class Point(NamedTuple):
    """One call: which, from where in the package, and the how many-th from there."""

    name: str
    where: str
    nth: int

    @property
    def is_change(self) -> bool:
        return self.name in (*CHANGING, "create")

    @property
    def is_lock(self) -> bool:
        return self.name in ("flock", "fcntl")


def error_of(name: str, code: int, path: object = None) -> OSError:
    """What a call fails with; EACCES of a lock call would say that somebody else has it."""
    if name in ("flock", "fcntl") and code == errno.EACCES:
        code = errno.ENOLCK
    return OSError(code, os.strerror(code), *([os.fspath(path)] if isinstance(path, str | Path) else []))


class Faults:
    """Counts calls, and does something at one of them, or from that one on until `heal`.

    Args:
        at: the number of a call, or what it was in another run; None: at none.
        act: given the call's name and arguments; what it raises, the call raises.
        lasting: not only once.
        only: which calls count at all.
    """

    def __init__(
        self,
        at: int | Point | None,
        act: Callable[[str, tuple[Any, ...]], None],
        *,
        lasting: bool = False,
        only: Callable[[Point], bool] = lambda point: True,
    ) -> None:
        self.points: list[Point] = []
        self.reached = False
        self._at, self._act, self._lasting, self._only = at, act, lasting, only
        self._healed = False
        self._seen: Counter[tuple[str, str]] = Counter()
        self._thread = threading.get_ident()

    @property
    def calls(self) -> list[str]:
        return [point.name for point in self.points]

    def heal(self) -> None:
        """What lasted is over."""
        self._healed = True

    def meet(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """A call is made; whether it is one that counts."""
        if threading.get_ident() != self._thread:
            return False
        where = _where(sys._getframe(1))
        point = Point(name, where, self._seen[name, where])
        if not where or not self._only(point):
            return False
        self._seen[name, where] += 1
        self.points.append(point)
        is_it = self._at in (point, len(self.points) - 1)
        self.reached = self.reached or is_it
        if is_it or (self._lasting and self.reached and not self._healed):
            self._act(name, arguments)
        return True

    @contextmanager
    def active(self) -> Iterator[Faults]:
        with ExitStack() as stack:
            for name in (*CHANGING, *READING):
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, getattr(os, name))))
            for name in ("flock", "fcntl"):
                stack.enter_context(mock.patch.object(fcntl, name, self._wrapped(name, getattr(fcntl, name))))
            for name in ("read_text",):
                stack.enter_context(mock.patch.object(Path, name, self._wrapped(name, getattr(Path, name))))
            for name in ("open", "map"):  # of C, which maps segments
                wrapped = self._wrapped(f"maps.{name}", getattr(maps.File, name))
                stack.enter_context(mock.patch.object(maps.File, name, wrapped))
            stack.enter_context(mock.patch.object(os, "open", self._os_open(os.open)))
            stack.enter_context(mock.patch.object(os, "scandir", self._scandir(os.scandir)))
            yield self

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.meet(name, arguments)
            return original(*arguments, **options)

        return call

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            self.meet("create" if flags & os.O_CREAT else "open", (path, flags))
            return original(path, flags, *arguments, **options)

        return call

    def _scandir(self, original: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
        def call(*arguments: Any) -> Iterable[Any]:
            if self.meet("scandir", arguments):
                return [_Entry(self, entry) for entry in original(*arguments)]
            return original(*arguments)

        return call


class _Entry:
    """As an entry of os.scandir, whose `stat` is a call of its own."""

    def __init__(self, faults: Faults, entry: Any) -> None:
        self._faults, self._entry, self.name = faults, entry, entry.name

    def stat(self, **options: Any) -> os.stat_result:
        self._faults.meet("entry.stat", (self._entry.path,))
        return self._entry.stat(**options)  # type: ignore[no-any-return]

    def is_file(self, **options: Any) -> bool:
        return bool(self._entry.is_file(**options))

    def is_dir(self, **options: Any) -> bool:
        return bool(self._entry.is_dir(**options))


@functools.cache
def _module(filename: str) -> str:
    """The name of a module of the package; empty for any other file."""
    return Path(filename).stem if filename.startswith(_PACKAGE) else ""


def _where(frame: FrameType | None) -> str:
    """The package's own frames, innermost first."""
    found = []
    while frame is not None:
        if module := _module(frame.f_code.co_filename):
            found.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)


def worth_trying(points: list[Point], known: set[tuple[str, str]]) -> list[Point]:
    """The first and the last call from each place: those between are alike; the last one if it is `known`.

    What was not known becomes so.
    """
    last: dict[tuple[str, str], Point] = {}
    for point in points:
        last[point[:2]] = point
    chosen = [p for p in points if p is last[p[:2]] or (p.nth == 0 and p[:2] not in known)]
    known |= set(last)
    return chosen
