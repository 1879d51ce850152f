"""Process: starts child processes, carries messages to and from them, and ends them. Nobody else starts one.

A child is started as `python -c`, whatever start method `multiprocessing` uses here. It imports no main
module, so scripts and notebooks need no precaution. It inherits no thread, no lock, no framework, and only
the named files. The thread that starts it must outlive it: the child is killed when that thread ends.

A `WorkerGroup` has all processes of one owner: it starts them, tells how one died, and ends them together.
Its owner has the messages, gives the work of one that died to another one, and says when that is started.

A message is a dict of plain values, as JSON, and perhaps bytes under "data", over a pair of sockets without a
name. Message boundaries are kept, the end of the other process is an end of file.

Guarantees: a child never sees Ctrl-C, which is for the main process, from its first moment on. It dies when
the main process dies, in whatever way. Nothing here is in /dev/shm, and a kill leaves nothing behind. A group
ends within the time that its owner gives it, though a process hangs.
"""

from __future__ import annotations

import _thread
import errno
import faulthandler
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from arrowcache import linux
from arrowcache.errors import WorkerError
from arrowcache.lifetimes import forgets_in_child, shielded
from arrowcache.limits import Limits
from arrowcache.os_errors import start

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from arrowcache.process import begin\n"
    "if begun := begin(): from {module} import main; main(*begun)"
)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_REAP_SECONDS = 5.0
_OVERDUE = "it did not end by itself"
LEAVE_ALONE = "functions that it calls must leave alone descriptors that are not their own"
_INLINE_BYTES = 32 << 10  # a longer message is sent as a file, so that sending never waits for the reader
_INLINE, _IN_FILE = b"I", b"F"
_LENGTH_BYTES = 4  # of the JSON's length; "data" follows the JSON
_FILE = struct.Struct("i")

Message = dict[str, Any]


def _file_of(data: bytes) -> int:
    """Return an anonymous file with these bytes; the caller closes it."""
    fd = linux.anonymous_file()
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return fd


def _bytes_of(fd: int) -> bytes:
    """Return the bytes of a file, which stays open; others may read it at the same time."""
    pieces, nbytes = [], 0
    while piece := os.pread(fd, 1 << 24, nbytes):
        pieces.append(piece)
        nbytes += len(piece)
    return b"".join(pieces)


class Channel:
    """One end of a channel. Owns its socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return this process' end, which never blocks, and the socket for the other process to inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, data: bytes = b"") -> None:
        """Send a message.

        Raises: BrokenPipeError, ConnectionResetError: the other process is gone. BlockingIOError: it has
            not read for long. OSError: the message cannot be sent now, for example without a free descriptor.
        """
        text = json.dumps(message).encode()
        content = len(text).to_bytes(_LENGTH_BYTES, "little") + text + data
        if len(content) <= _INLINE_BYTES:
            try:
                self._socket.send(_INLINE + content)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:  # of a socket whose buffer is small
                    raise
            else:
                return
        fd = _file_of(content)
        try:
            socket.send_fds(self._socket, [_IN_FILE], [fd])
        finally:
            os.close(fd)

    def receive(self) -> Message | None:
        """Return the next message, or None if the other process is gone.

        Raises: BlockingIOError: there is none, at an end that never blocks. ValueError: not a valid
            message. WorkerError: this process has no descriptor left for its file; the message is lost.
        """
        try:
            content, extra, flags, _ = self._socket.recvmsg(  # socket.recv_fds of Python 3.11 takes no flags
                _INLINE_BYTES + 1, socket.CMSG_LEN(_FILE.size), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # it died with messages unread: raised once, before its own messages
            return self.receive()
        if not content:
            return None
        if flags & socket.MSG_CTRUNC:
            raise WorkerError(
                f"process {os.getpid()} has no file descriptor left for what it was sent: raise the limit of "
                "open files (ulimit -n), or keep fewer open"
            )
        if not extra:
            return _message(content[1:])
        (fd,) = _FILE.unpack(extra[0][2])
        try:
            return _message(_bytes_of(fd))
        finally:
            os.close(fd)

    def say_no_more(self) -> None:
        """End this end's messages: the other process reads those sent before, then None."""
        with suppress(OSError):  # it is closed, or the other process is gone
            self._socket.shutdown(socket.SHUT_WR)

    def await_end(self) -> None:
        """Block until the other process says no more, or is gone. In any thread."""
        ends = select.poll()
        ends.register(self._socket, select.POLLRDHUP)
        ends.poll()

    def hang_up(self) -> None:
        """End the messages at both ends, also for a waiting thread."""
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _message(content: bytes) -> Message:
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    message = json.loads(content[_LENGTH_BYTES:end])
    if not isinstance(message, dict):
        raise ValueError(f"{type(message).__name__} in place of a dict")
    if len(content) > end:
        message["data"] = content[end:]
    return message


def one_thread() -> dict[str, str]:
    """Return variables for a process that works beside others like it: numeric libraries use one thread.

    Variables set in this process' environment keep their values.
    """
    return {name: os.environ.get(name, "1") for name in _THREADS}


class WorkerProcess:
    """A process that runs a module's `main`, with its end of the channel and the descriptors.

    Owns the process, this end of its channel, and a descriptor that is readable at its end (`watch`).

    Raises: OSError: no process, or no descriptor, is available.
    """

    watch = -1
    _because = ""  # this process ended it

    def __init__(self, module: str, *descriptors: int, environment: Mapping[str, str] | None = None) -> None:
        self.channel, theirs = Channel.pair()
        path = [entry or os.getcwd() for entry in sys.path]
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        spawn = sys.modules.get("multiprocessing.spawn")  # if it is not loaded, nobody has set another one
        executable = (spawn.get_executable() if spawn is not None else None) or sys.executable
        try:
            with ExitStack() as own, shielded():  # `begin` unblocks Ctrl-C there, once it is ignored
                fds = [_beyond_standard(fd, own) for fd in (theirs.fileno(), *descriptors)]
                words = [json.dumps(path), str(os.getpid()), *map(str, fds)]
                self._process = subprocess.Popen(
                    [executable, *flags, "-c", _START.replace("{module}", module), *words],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    env={**os.environ, **(environment or {})},
                )
                self.pid = self._process.pid
                try:
                    self.watch = _watch(self.pid)
                except BaseException:
                    self.end()
                    raise
                self._coming = select.poll()
                for what in (self.watch, self.channel):
                    self._coming.register(what, select.POLLIN)
                forgets_in_child(self)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()

    def send(self, message: Message, data: bytes = b"") -> None:
        """Send it a message, unless it has died: `hear` tells that. Raises: as `Channel.send`."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(message, data)

    def hear(self) -> Message | None:
        """Return its next message, or None once it has ended and all its messages were read.

        Blocks: until then. Raises: as `Channel.receive`.
        """
        self._coming.poll()
        try:
            return self.channel.receive()
        except BlockingIOError:  # its end
            return None

    def kill(self, because: str = "") -> None:
        """Kill it, if it lives. The first cause that is given is told as that of its end."""
        self._because = self._because or because
        with suppress(OSError):
            self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most this many seconds. Returns: True if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self._process.returncode is not None

    def end(self, seconds: float = 0.0) -> None:
        """Wait so long for its end, else kill it; close the descriptors. Idempotent.

        Afterwards it writes nothing more, unless it hangs in the kernel.
        """
        if not self.wait(seconds):
            self.kill(f"it closed its connection: {LEAVE_ALONE}" if seconds else "")
            self.wait(_REAP_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        if self.watch >= 0:
            fd, self.watch = self.watch, -1
            os.close(fd)
        self.channel.close()

    def forget_in_child(self) -> None:
        """Close the descriptors: the process is the parent's."""
        self.close()
        self._process.returncode = 0  # suppresses a warning

    def how_it_ended(self) -> str:
        """Return the end of the process in words, for messages."""
        because = self._because
        return f"was ended here: {because}" if because else end_in_words(self._process.returncode)


def end_in_words(code: int | None) -> str:
    """Return the end of a process that has this exit code: minus a signal, or None while it lives."""
    if code is None:
        return "was killed and does not end"
    if code == -signal.SIGKILL:
        return "was killed by signal 9 (SIGKILL), as the kernel's out-of-memory killer does"
    if code < 0:
        with suppress(ValueError):  # a real-time signal
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


class WorkerGroup:
    """The worker processes of one owner, and the threads that supervise them. Thread-safe.

    A thread of `supervise`, or the owner's only thread, starts a process, hears its messages, and ends it. To
    replace it the thread starts another one.

    Guarantees: no process is started once the group is closed. None is left when `close` returns, unless it
    hangs in the kernel. A forked child has none of them. `close` takes no lock: finalizers may call it.

    Args:
        module: its `main` runs in each process.
        environment: variables of the processes, beside those of this process.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._module, self._environment = module, environment
        self._processes: set[WorkerProcess] = set()
        self._threads: list[threading.Thread] = []
        self._closed = _thread.allocate_lock()  # taken until then
        self._closed.acquire()
        self.is_closed = False
        forgets_in_child(self)

    # the threads of an owner

    @property
    def threads(self) -> int:
        """The number of threads that supervise processes."""
        return len(self._threads)

    @property
    def is_here(self) -> bool:
        """True in a thread that supervises a process."""
        here = threading.get_ident()  # current_thread() may take a lock
        return any(thread.ident == here for thread in self._threads.copy())

    def supervise(self, run: Callable[[], object], threads: int) -> None:
        """Have so many threads call a function, which starts processes; those that are missing are started.

        Only one thread may call this at a time.
        Raises: WorkerError: a thread cannot be started. The next call tries again.
        """
        while len(self._threads) < threads:
            thread = threading.Thread(target=run, name="arrowcache-process", daemon=True)
            self._threads.append(thread)
            try:
                start(thread)
            except BaseException:
                if thread.ident is None:
                    self._threads.remove(thread)
                raise

    def leave(self) -> None:
        """Count this thread no more: it supervises no process from now on."""
        with suppress(ValueError):  # it has left
            self._threads.remove(threading.current_thread())

    def pause(self, seconds: float) -> None:
        """Wait so long, at most until the group is closed."""
        if self._closed.acquire(timeout=max(0.0, seconds)):
            self._release()  # for others who wait

    # a process

    def start(self, *descriptors: int) -> WorkerProcess:
        """Start a process, with these descriptors.

        Raises: WorkerError: the group is closed. OSError: no process, or no descriptor, is available.
        """
        if self.is_closed:
            raise WorkerError("its worker processes were ended before one began it")
        with shielded():  # until the process is recorded
            process = WorkerProcess(self._module, *descriptors, environment=self._environment)
            self._processes.add(process)
        if self.is_closed:  # meanwhile
            process.channel.say_no_more()
        return process

    def end(self, process: WorkerProcess, seconds: float = 0.0) -> str:
        """Wait so many seconds for a process to end, then kill it. Idempotent.

        Blocks: so long, and then some seconds at most. Returns: its end, in words.
        """
        process.end(seconds)
        self._processes.discard(process)
        return process.how_it_ended()

    # all of them

    def close(self, seconds: float = 0.0, *, hears: bool = False, waits: bool = True) -> None:
        """End all processes: kill those that have not ended by themselves within so many seconds. Idempotent.

        Args:
            hears: the threads still hear the messages of each process until it ends.
            waits: False: leave the rest to the threads, as a call from one of them does.
        Blocks: so long, and then some seconds at most.
        """
        self.is_closed = True
        self._release()
        for process in self._processes.copy():
            if not seconds:
                process.kill(_OVERDUE)
            elif hears:
                process.channel.say_no_more()
            else:
                process.channel.hang_up()
        if self.is_here or not waits:
            return
        self._join(seconds)
        for process in self._processes.copy():
            process.kill(_OVERDUE)
        self._join(Limits.current.join_seconds)
        if not self._threads:
            for process in self._processes.copy():
                self.end(process)

    def forget_in_child(self) -> None:
        """Close it in a forked child, which has neither the threads nor the processes."""
        self.is_closed = True
        self._release()
        self._processes, self._threads = set(), []

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads.copy():
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _release(self) -> None:
        with suppress(RuntimeError):  # it was, or somebody who waited was faster
            self._closed.release()


def begin() -> tuple[Any, ...]:
    """Begin as such a child: leave Ctrl-C to the main process, and die with it.

    Returns: this end of the channel, and the descriptors; none if the main process has died already.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    linux.die_with_parent()
    linux.save_addresses()
    linux.fill_standard_streams()
    with suppress(OSError, RuntimeError, ValueError):  # no stderr
        faulthandler.enable()
    parent, *fds = map(int, sys.argv[2:])
    sys.argv = sys.argv[:1]
    if os.getppid() != parent:
        return ()
    for fd in fds:
        os.set_inheritable(fd, False)
    return Channel(socket.socket(fileno=fds[0])), *fds[1:]


def _beyond_standard(fd: int, own: ExitStack) -> int:
    """Return the descriptor, or a copy that `own` closes: a child's numbers 0 to 2 are its standard streams.

    A process without standard streams, such as a daemon, gets these numbers for its own files.
    """
    if fd > 2:
        return fd
    copy = linux.copy_beyond(fd, 2)
    own.callback(os.close, copy)
    return copy


def _watch(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended."""
    try:
        return linux.process_file(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        raise OSError(
            error.errno,
            f"pidfd_open: {error.strerror}: this kernel ({os.uname().release}) is older than Linux 5.3, or a "
            "sandbox forbids the call",
        ) from error
