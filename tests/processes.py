"""Real processes for tests: started from functions or scripts, watched and ended from outside."""

from __future__ import annotations

import atexit
import codecs
import functools
import io
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
from helpers import DEADLINE_SECONDS
from script_server import MAX_BYTES, SINGLE_THREADED

import arrowcache as ac

if TYPE_CHECKING:
    from typing import Self

METHODS = ("spawn", "fork", "forkserver")
_SERVER = multiprocessing.get_context("forkserver")
_OF_ARROWCACHE = ["arrowcache.cache", "arrowcache.reading.loader", "arrowcache.sampling.pool"]
_PRELOADED = [*_OF_ARROWCACHE, "pytest", "helpers", "processes"]
_SERVER.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Have a `Child` find these imported, too; before the first one is started."""
    _SERVER.set_forkserver_preload([*_PRELOADED, *modules])


class Child:
    """A function at work in a process of its own; a context manager that ends it.

    Args:
        function: sent by value, so it may be defined anywhere; what it prints goes to the test's output.
        args: picklable values, or events and barriers of `method`'s context.
        daemon: as a worker of `multiprocessing.Pool` is one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        method: str = "forkserver",
        daemon: bool | None = None,
    ) -> None:
        context = multiprocessing.get_context(method)
        self._results, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(_by_value(function), sender, args), daemon=daemon)
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


_LOOK_SECONDS = 0.05

#: What a shell starts in the background ignores SIGINT, and so would all its children.
_AS_IN_A_TERMINAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


_NAMESPACE = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]


def small_disk(folder: object, size: str) -> list[str]:
    """The beginning of a command which alone sees a tmpfs of this size there; skips where none can be."""
    mount = f'mount -t tmpfs -o size={size} tmpfs "{folder}" && exec "$@"'
    return _possible([*_NAMESPACE, "sh", "-c", mount, "sh"], "no tmpfs can be mounted here")


def small_ext4(folder: object, size: str) -> list[str]:
    """As `small_disk`, with a real file system; it goes with the command, and so does its loop device."""
    image = f"{folder}.image"
    made = f'truncate -s {size} "{image}" && mkfs.ext4 -q -F -m 0 "{image}"'
    mount = f'{made} && mount -o loop "{image}" "{folder}" && exec "$@"'
    return _possible([*_NAMESPACE, "sh", "-c", mount, "sh"], "no loop device can be mounted here")


def private_mounts() -> list[str]:
    """The beginning of a command whose mounts nobody else sees; skips where that cannot be."""
    return _possible(_NAMESPACE, "nothing can be mounted here")


_NOBODY = 65534
_AS_NOBODY = (  # but able to read what the interpreter is made of
    "setpriv", f"--reuid={_NOBODY}", "--clear-groups", "--inh-caps=-all,+dac_override",
    "--ambient-caps=-all,+dac_override",
)  # fmt: skip


def limited_by_ulimit_u() -> tuple[list[str], tempfile.TemporaryDirectory[str]]:
    """The beginning of a command to which the limit of processes applies, and a new folder for it.

    Root has no such limit, so that it is another user; skips where it cannot be.
    """
    command = [] if os.geteuid() else _possible([*_AS_NOBODY], "nobody else can be had")
    folder = tempfile.TemporaryDirectory(prefix="arrowcache-test-")
    if command:
        os.chown(folder.name, _NOBODY, -1)
    return command, folder


def _possible(command: list[str], otherwise: str) -> list[str]:
    try:
        tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        reason = tried.stderr.strip() if tried.returncode else ""
    except FileNotFoundError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"{otherwise}: {reason}")
    return command


LINE_SECONDS = 2 * DEADLINE_SECONDS


class Script:
    """A user's script: the leader of a session of its own; a context manager that ends it.

    It is forked off a process that has imported Arrow, and PyTorch if it names that: see script_server.py.

    Args:
        within: the beginning of its command, such as that of a `small_disk`; of a new interpreter.
        new_interpreter: where `__main__`, an import or the interpreter's own end is what a test is about.
    """

    def __init__(
        self, code: str, *arguments: object, within: Sequence[str] = (), new_interpreter: bool = False
    ) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths}
        code, words = textwrap.dedent(code), [str(argument) for argument in arguments]
        its_input, input_ = os.pipe()
        self._input: int | None = input_
        self._output, its_output = os.pipe()
        self._errors = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115  # its own: see __exit__
        self._said = ""
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), True)
        streams = [its_input, its_output, self._errors.fileno()]
        try:
            self._process: subprocess.Popen[bytes] | _Forked
            if within or new_interpreter or os.environ.get("FRESH"):
                command = [*within, sys.executable, "-W", "error", "-c", _AS_IN_A_TERMINAL + code, *words]
                self._process = subprocess.Popen(
                    command, stdin=its_input, stdout=its_output, stderr=self._errors, start_new_session=True,
                    env=environment,
                )  # fmt: skip
            else:
                self._process = _Forked(streams, code=code, arguments=words, environment=environment)
        finally:
            os.close(its_input)
            os.close(its_output)
        self.pid = self._process.pid

    def line(self, timeout: float = LINE_SECONDS) -> str:
        """Its next line of output; fails if it ended instead, or is silent for so long."""
        deadline = time.monotonic() + timeout
        while "\n" not in self._said and self._hears(deadline):
            pass
        text, newline, self._said = self._said.partition("\n")
        assert text or newline, f"the script ended:\n{self._complaints()}"
        return text.strip()

    def say(self, text: str) -> None:
        """A line of input for it."""
        assert self._input is not None
        os.write(self._input, f"{text}\n".encode())

    def end(self, timeout: float = DEADLINE_SECONDS) -> tuple[int, str]:
        """Wait for its end: (exit code, what it wrote to stderr)."""
        deadline = time.monotonic() + timeout
        self._close_input()
        while self._hears(deadline):
            pass
        return self._process.wait(max(0.0, deadline - time.monotonic())), self._complaints()

    def printed(self) -> str:
        """What it has printed beyond the lines that were asked for, once it has ended."""
        return self._said

    def _hears(self, deadline: float) -> bool:
        """Wait for more of its output; False at the end of that."""
        seconds = max(0.0, deadline - time.monotonic())
        assert select.select([self._output], [], [], seconds)[0], (
            f"the script neither ends nor says more than {self._said!r}:\n{self._complaints()}"
        )
        part = os.read(self._output, 1 << 16)
        self._said += self._decoder.decode(part, final=not part)
        return bool(part)

    def _complaints(self) -> str:
        """What it has written to stderr so far."""
        self._errors.seek(0)
        return self._errors.read()

    def end_awake(self, seconds: float) -> tuple[int, str]:
        """As `end`; fails if none of its session has anything to do for so long, all together.

        So it says on a busy machine, too, whether something waits in vain.
        """
        self._wait_awake(lambda: self._process.poll() is not None, seconds)
        return self.end()

    def all_end_awake(self, seconds: float) -> None:
        """Wait for the end of its whole session; fails as `end_awake`."""
        self._wait_awake(lambda: not self.processes(), seconds)

    def _wait_awake(self, has_ended: Callable[[], bool], seconds: float) -> None:
        asleep = 0.0
        while not has_ended():
            time.sleep(_LOOK_SECONDS)
            asleep += 0.0 if _is_at_work(self.pid) else _LOOK_SECONDS
            assert asleep < seconds, f"it slept for {seconds} s in place of ending: {self.processes()}"

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
        self._close_input()
        os.close(self._output)
        self._errors.close()

    def _close_input(self) -> None:
        if self._input is not None:
            os.close(self._input)
            self._input = None


class _Forked:
    """A process of the server of scripts, with what `Script` asks of a `subprocess.Popen`."""

    def __init__(self, streams: Sequence[int], code: str, **request: object) -> None:
        self._told, its_end = os.pipe()
        sent = json.dumps({**request, "code": code, "folder": os.getcwd()}).encode()
        assert len(sent) < MAX_BYTES, "more than the server takes"
        server = _script_server("torch" in code)
        socket.send_fds(server, [sent], [*streams, its_end])
        os.close(its_end)
        self._file = os.fdopen(self._told)
        self.pid = int(self._file.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("script", timeout)
            self.returncode = int(self._file.readline())
            self._file.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


_AT_IMPORT = {
    **os.environ,
    **SINGLE_THREADED,
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}


@functools.cache
def _script_server(has_torch: bool) -> socket.socket:
    """To which requests are sent; started with the first one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        more = ["arrowcache.torch"] if has_torch else []
        code = f"from script_server import serve; serve({its.fileno()}, *{more})"
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True, pass_fds=[its.fileno()], env=_AT_IMPORT,
        )  # fmt: skip
    atexit.register(process.wait)
    atexit.register(process.kill)  # before that
    return ours


def session_processes(session: int) -> list[str]:
    """Commands of the live processes of one session, read from /proc and not from the library."""
    # A killed process is a zombie already when another of its threads is still closing its files.
    return [command for command, states in _session(session) if not set(states) <= set("ZX")]


def _is_at_work(session: int) -> bool:
    """Whether any thread of a session runs, may run as soon as a processor is free, or waits for a disk."""
    return any(set(states) & set("RD") for _, states in _session(session))


def _session(session: int) -> Iterator[tuple[str, list[str]]]:
    """Of each process of a session: its pid and command, and its threads' states."""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if int(_stat(process)[3]) != session:
                continue
            states = _states(process)
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield f"{process.name} {command}", states


def _states(process: Path) -> list[str]:
    """Of its threads; one that ends meanwhile has none."""
    states = []
    for task in (process / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(_stat(task)[0])
    return states


def _stat(process: Path) -> list[str]:
    """State, parent, group, session, ... of a process or thread in /proc."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def hold_snapshot(path: Path, ready: Path) -> None:
    """For a `Child`: lease all of a cache from when a file is there until the process ends."""
    with ac.Cache.open(path).snapshot() as snapshot:
        assert snapshot.gather([0])["id"].tolist() == [0]
        ready.touch()
        Event().wait()
