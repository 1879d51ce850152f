"""Process: one child: how it is started, watched and ended.

It is started as `python -c`, whatever start method `multiprocessing` uses here: it imports no main
module, so neither scripts nor notebooks need any precaution, and inherits no thread, no lock, no
framework, and no file but those named. A process must be launched by a thread that outlives it: it
is killed when that thread ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from arrowcache import linux
from arrowcache.reading.workers.channel import Channel

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from arrowcache.reading.workers.worker import main; main(*map(int, sys.argv[2:]))"
)
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_REAP_SECONDS = 5.0


def _beyond_standard(fd: int, own: ExitStack) -> int:
    """The descriptor, or a copy that `own` closes: a child's numbers 0 to 2 are its standard streams.

    A process whose own are closed, such as a daemon, gets these numbers for whatever it opens.
    """
    if fd > 2:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    own.callback(os.close, copy)
    return copy


class WorkerProcess:
    """A process that runs `worker.main`, or what `start` says.

    Owns the process, our end of its channel, and what tells its end.

    Args:
        memory, plan: descriptors of memory that both have, and of what to do.
        start: Python code that takes the same words as `_START`.
        environment: what it has beside, or instead of, this process' variables.
    Raises: OSError: no process, or no descriptor, can be had.
    """

    def __init__(
        self,
        memory: int,
        plan: int,
        *,
        start: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.channel, theirs = Channel.pair()
        path = [entry or os.getcwd() for entry in sys.path]
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        executable = multiprocessing.spawn.get_executable() or sys.executable
        try:
            with ExitStack() as own:
                fds = [_beyond_standard(fd, own) for fd in (theirs.fileno(), memory, plan)]
                words = [json.dumps(path), *map(str, fds), str(os.getpid())]
                self._process = subprocess.Popen(
                    [executable, *flags, "-c", start or _START, *words],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    env={**dict.fromkeys(_THREADS, "1"), **os.environ, **(environment or {})},
                )
            self.pid = self._process.pid
            try:
                self.watch = _watch(self.pid)
            except BaseException:
                self.end()
                raise
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()

    @property
    def has_ended(self) -> bool:
        """As far as anybody has waited for it."""
        return self._process.returncode is not None

    def kill(self) -> None:
        """SIGKILL."""
        with suppress(OSError):
            self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most so long; whether it has come."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        return self.has_ended

    def end(self) -> None:
        """Kill it, if it lives, and wait: it writes nothing more."""
        self.kill()
        self.wait(_REAP_SECONDS)  # in vain if it hangs in the kernel

    def close(self) -> None:
        """Give up the descriptors."""
        os.close(self.watch)
        self.channel.close()

    def forget(self) -> None:
        """It is the child of the process that forked this one."""
        self.close()
        self._process.returncode = 0  # nobody warns of it

    def how_it_ended(self) -> str:
        """For messages: what came of it."""
        code = self._process.returncode
        if code is None:
            return "was killed and does not end"
        if code == -signal.SIGKILL:
            return "was killed by signal 9 (SIGKILL), as the kernel's out-of-memory killer does"
        if code < 0:
            with suppress(ValueError):  # a real-time signal
                return f"was killed by signal {-code} ({signal.Signals(-code).name})"
            return f"was killed by signal {-code}"
        return f"ended with exit code {code}"


def _watch(pid: int) -> int:
    """A descriptor that is readable once the process has ended."""
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
