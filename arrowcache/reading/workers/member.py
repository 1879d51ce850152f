"""Member of the crew: one worker process as the main process deals with it.

It owns the process, and knows what it is to answer, in which order. Whatever cannot be said to it or
understood of it ends it here, with a reason; how it ended is told once it has.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from arrowcache.errors import WorkerError
from arrowcache.reading.workers.channel import Message
from arrowcache.reading.workers.launch import WorkerProcess
from arrowcache.reading.workers.packing import Pattern
from arrowcache.reading.workers.request import Request
from arrowcache.shortage import explained

_DYING_SECONDS = 1.0
_MEDDLING = "a transform must leave alone descriptors that are not its own"


class Member:
    """A worker process.

    Args: as WorkerProcess's. Raises: OSError: no process, or no descriptor, can be had.
    """

    def __init__(self, memory: int, plan: int, number: int) -> None:
        self.process = WorkerProcess(memory, plan, number)
        self.number = number
        self.asked: deque[Request] = deque()
        self.is_ready = False
        self._knows = 0  # version of the pattern
        self._trouble = ""  # why it was ended here

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, request: Request, pattern: Pattern | None) -> None:
        """Have it make what a request asks for."""
        message = request.message()
        if pattern is not None and self._knows != pattern.version:
            self._knows = pattern.version
            message["pattern"] = pattern.message()
        self.asked.append(request)
        self.tell(message)

    def tell(self, message: Message, files: Sequence[int] = ()) -> bool:
        """Whether it was sent; if not, the process has ended, or is ended here."""
        try:
            self.process.channel.send(message, files)
        except (BrokenPipeError, ConnectionResetError):  # it has died: its watch tells
            return False
        except BlockingIOError:  # it has stopped, or is at one batch for very long
            self._end("it had read none of hundreds of messages")
            return False
        except OSError as error:
            self._lose(WorkerError(f"a worker process could not be told what to do: {explained(error)}"))
            return False
        return True

    def hear(self) -> Message | None:
        """What it says next; None: nothing.

        Raises: EOFError: it has ended, or is ended here.
        """
        try:
            received = self.process.channel.receive()
        except BlockingIOError:
            return None
        except WorkerError as error:  # it may have been about anything
            self._lose(error)
            raise EOFError from error
        except ValueError as error:
            self._lose(WorkerError(f"a worker process said what is no message ({error}): {_MEDDLING}"))
            raise EOFError from error
        if received is None:
            if not self.process.wait(_DYING_SECONDS):  # else it closed its files as it died
                self._end(f"it closed its connection: {_MEDDLING}")
            raise EOFError
        message, files = received
        for fd in files:  # of a later version, perhaps
            os.close(fd)
        return message

    def how_it_ended(self) -> str:
        """For messages."""
        return self._trouble or self.process.how_it_ended()

    def _lose(self, error: WorkerError) -> None:
        for request in self.asked:
            request.reject(error)
        self._end(str(error))

    def _end(self, because: str) -> None:
        self._trouble = f"was ended here: {because}"
        self.process.kill()
