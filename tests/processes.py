"""Real processes for tests: started from functions or scripts, watched and ended from outside."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle
from helpers import DEADLINE_SECONDS

if TYPE_CHECKING:
    from typing import Self

METHODS = ("spawn", "fork", "forkserver")
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["arrowcache", "pytest", "helpers", "processes"])


class Child:
    """A function at work in a process of its own; a context manager that ends it.

    Args:
        function: sent by value, so it may be defined anywhere; what it prints goes to the test's output.
        args: picklable values, or events and barriers of `method`'s context.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, method: str = "forkserver") -> None:
        context = multiprocessing.get_context(method)
        self._results, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(_by_value(function), sender, args))
        self._process.start()
        sender.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def result(self, timeout: float = DEADLINE_SECONDS) -> Any:
        """What the function returned, or an AssertionError with its traceback."""
        assert self._results.poll(timeout), f"process {self.pid} did not end in {timeout} s"
        try:
            value, error = self._results.recv()
        except EOFError:
            self._process.join(timeout)
            raise AssertionError(f"process {self.pid} died with exit code {self._process.exitcode}") from None
        self._process.join(timeout)
        assert not error, f"in process {self.pid}:\n{error}"
        return value

    def exit_code(self, timeout: float = DEADLINE_SECONDS) -> int | None:
        """Wait for the end, however it comes; -9 after SIGKILL."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel is done with it."""
        self._process.kill()
        self._process.join(DEADLINE_SECONDS)

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._results.close()


def _by_value(function: Callable[..., Any]) -> bytes:
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _run(function: bytes, sender: Connection, args: tuple[Any, ...]) -> None:
    try:
        sender.send((cloudpickle.loads(function)(*args), ""))
    except BaseException:
        sender.send((None, traceback.format_exc()))


#: What a shell starts in the background ignores SIGINT, and so would all its children.
_AS_IN_A_TERMINAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


class Script:
    """A user's script: a new interpreter, leader of a session of its own; a context manager that ends it."""

    def __init__(self, code: str, *arguments: object) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        code = _AS_IN_A_TERMINAL + textwrap.dedent(code)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        self.pid = self._process.pid

    def line(self) -> str:
        """Its next line of output; fails if it ended instead."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        assert text, f"the script ended:\n{self._process.communicate()[1]}"
        return text.strip()

    def end(self, timeout: float = DEADLINE_SECONDS) -> tuple[int, str]:
        """Wait for its end: (exit code, what it wrote to stderr)."""
        _, errors = self._process.communicate(timeout=timeout)
        return self._process.returncode, errors

    def signal_group(self, number: signal.Signals) -> None:
        """What a terminal does: every process of the job gets the signal."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the script alone, not to the processes it started."""
        self._process.kill()
        self._process.wait(DEADLINE_SECONDS)

    def processes(self) -> list[str]:
        """Commands of what still lives of its session."""
        return session_processes(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(DEADLINE_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def session_processes(session: int) -> list[str]:
    """Commands of the live processes of one session, read from /proc and not from the library."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            stat = (process / "stat").read_text()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, its_session = stat.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state not in "ZX":
            found.append(f"{process.name} {command}")
    return found
