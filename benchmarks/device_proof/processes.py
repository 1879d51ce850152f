"""Processes that run checks: one after another in the same, until one hangs or dies, or asks to be alone.

A check that is not over in its time is ended with its process; the next one gets a new process. So no check
can take the time of the others, and a device that failed is left behind.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.device_proof.check import FAILED, GPU, Check, Outcome, run

_START_SECONDS = 60.0  # torch and a context on the device
_END_SECONDS = 10.0
_LAST_LINES = -12


class Processes:
    """At most one process at a time.

    Args:
        make_target: in the process, what the checks run on. It and the checks are pickled.
    """

    def __init__(self, make_target: Callable[[], Any]) -> None:
        self._make_target = make_target
        self._process: Any = None
        self._context = multiprocessing.get_context("spawn")

    def run(self, check: Check, seconds: float) -> Outcome:
        """Run a check, for at most so long, once its process is there. Blocks: until then."""
        if check.is_alone or self._process is None or not self._process.is_alive():
            self.close()
            if (trouble := self._start()) is not None:
                return self._failed(check, trouble, 0.0)
        self._connection.send((check, seconds))
        try:
            if self._connection.poll(seconds):
                outcome: Outcome = self._connection.recv()
            else:
                outcome = self._failed(check, f"not over after {seconds:.0f} s", seconds)
                self._kill()
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            outcome = self._failed(check, f"its process died: exit code {self._process.exitcode}", seconds)
        if check.is_alone or outcome.state == FAILED:  # its device may not be what it was
            self.close()
        return outcome

    def close(self) -> None:
        """End the process. Blocks: some seconds at most."""
        if self._process is not None:
            self._connection.close()  # which it waits for
            self._process.join(_END_SECONDS)
            self._kill()
            self._process.close()
            self._process = None
            self._words.close()

    def _start(self) -> str | None:
        """Returns: what went wrong."""
        self._connection, theirs = self._context.Pipe()
        self._words = tempfile.NamedTemporaryFile("r", prefix="device-proof-", suffix=".log")  # noqa: SIM115
        self._process = self._context.Process(
            target=_serve, args=(self._make_target, theirs, self._words.name)
        )
        self._process.start()
        theirs.close()
        try:
            if self._connection.poll(_START_SECONDS):
                return self._connection.recv()  # type: ignore[no-any-return]  # of _serve
        except EOFError:
            pass
        self._kill()
        return "its process did not start"

    def _failed(self, check: Check, what: str, seconds: float) -> Outcome:
        last = "\n".join(self._words.read().splitlines()[_LAST_LINES:])
        return Outcome(check.name, check.proves, GPU, FAILED, f"{what}\n{last}".rstrip(), seconds)

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(make_target: Callable[[], Any], connection: Connection, words: str) -> None:
    """In the process: run what comes. What it writes to stderr is told if it does not answer."""
    with open(words, "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        target = make_target()
    except Exception as error:  # noqa: BLE001  # it is told
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            check, seconds = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.9 * seconds)  # where it hangs
        outcome = run(check, target, GPU)
        faulthandler.cancel_dump_traceback_later()
        connection.send(outcome)
