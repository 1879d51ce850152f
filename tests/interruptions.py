"""An error at any step of some code, as Ctrl-C and signal handlers come: a line, a call or an instruction."""

from __future__ import annotations

import inspect
import itertools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest
from quick import SEED, in_part

import arrowcache

if TYPE_CHECKING:
    from typing import Self

Code = Callable[[CodeType], bool]
_PACKAGE = os.path.join(os.path.dirname(arrowcache.__file__), "")  # a checkout may be called so, too


def library(code: CodeType) -> bool:
    """All of arrowcache, and the locks of `threading`; a lock in C has no step where a thread waits again."""
    if code.co_filename.endswith("threading.py"):
        return code.co_name != "_acquire_restore"
    return code.co_filename.startswith(_PACKAGE)


def files(*names: str, functions: tuple[str, ...] = ()) -> Code:
    """The code in files whose names end so; of these functions, where some are named."""
    return lambda code: code.co_filename.endswith(names) and (not functions or code.co_name in functions)


class Interruption:
    """A context in which this thread's n-th step raises; it takes that error, and no other.

    A trace that raises at a `with`, `try` or `finally` passes over the block's end, where the interpreter
    lets no signal in: those lines are no steps. Nor is any in a finalizer, where Python would lose the error.

    Args:
        number: steps before it.
        code: whose steps count.
        events: kinds of steps: "call", "return", "line", "opcode".
        error: what is raised; a function is called in its place.
        finalizers: steps there count, too.
        blocks: lines where a block begins count, too: what was called before them has returned.
    """

    def __init__(
        self,
        number: int,
        code: Code = library,
        events: tuple[str, ...] = ("call",),
        error: Any = KeyboardInterrupt,
        *,
        finalizers: bool = False,
        blocks: bool = False,
    ) -> None:
        self._left, self._code, self._events, self._error = number, code, events, error
        self._finalizers, self._blocks = finalizers, blocks
        self.where = ""
        """At which step it came; empty where it did not."""
        self._before: Any = None  # such as a measurement of coverage

    def __enter__(self) -> Self:
        if "opcode" in self._events and sys.version_info[:2] == (3, 12):
            pytest.skip("Python 3.12 traces no instruction of a frame that asks for it while it is traced")
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self._before)
        return bool(self.where) and isinstance(self._error, type) and kind is self._error

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if self.where or not self._code(code) or (not self._finalizers and _is_in_a_finalizer(frame)):
            return None
        frame.f_trace_opcodes = "opcode" in self._events
        if event == "call" and "return" in self._events and code.co_flags & inspect.CO_GENERATOR:
            return None  # where it goes on, an error of a trace passes over its `finally`
        if event in self._events and (self._blocks or event != "line" or not _is_a_block(frame)):
            if self._left == 0:
                self.where = f"{code.co_filename}:{frame.f_lineno}: {code.co_name}"
                if isinstance(self._error, type):
                    raise self._error
                sys.settrace(None)
                self._error()
                return None
            self._left -= 1
        return self._trace if set(self._events) - {"call"} else None


def interruptions(least: int, *args: Any, every: int = 1, **options: Any) -> Iterator[Interruption]:
    """One at each step, until one does not come for there are no more; `least` steps there must be.

    Or at one in `every` steps, each commit at others; and at one in three of these, but in `make nightly`.
    """
    every *= 3 // in_part(3)
    for number in itertools.count(SEED % every, every):
        interruption = Interruption(number, *args, **options)
        yield interruption
        if not interruption.where:
            break
    assert number > least, f"{number} steps only: too little is interrupted"


def _is_a_block(frame: FrameType) -> bool:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line.startswith(("with ", "try:", "finally:"))


def _is_in_a_finalizer(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
