"""Worker handle: one worker process as the main process deals with it.

It owns the process and the memory that both have. It knows which requests the worker is to answer, in which
order, and which of its slots are in use here: the next request names those that have come back. A message
that cannot be sent or understood ends the process, with a reason; `how_it_ended` tells it then.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.process import Message, WorkerProcess
from arrowcache.reading.future import Future
from arrowcache.reading.memory import SharedMemory
from arrowcache.reading.slots import Loan, array_over, lent
from arrowcache.reading.workers.packing import unpack
from arrowcache.reading.workers.worker_slots import ENDED, PROGRESS, STAGES_OF_WORKERS
from arrowcache.shortage import explained

_DYING_SECONDS = 1.0
_MEDDLING = "a transform must leave alone descriptors that are not its own"


class Finished:
    """The answer to a request: its batches lie in slots, which return with the last array over them.

    `seconds` are those of each stage in the worker; `nbytes` are the bytes that it gathered.
    """

    def __init__(self, answer: Message, columns: Sequence[tuple[str, str, list[NDArray[Any]]]]) -> None:
        self._columns = columns
        self.arrays = sum(len(arrays) for _, _, arrays in columns)
        self.nbytes: int = answer["nbytes"]
        self.seconds: dict[str, float] = answer["seconds"]

    def batch(self, rows: slice | None = None) -> dict[str, Any]:
        """The batch, or some rows of it, if it is a group of batches."""
        return {
            name: unpack(kind, arrays if rows is None else [array[rows] for array in arrays])
            for name, kind, arrays in self._columns
        }


@dataclass(slots=True, eq=False)
class Request:
    """Rows to be made into batches. It ends once: delivered, failed or skipped.

    `serial` is its place in the order of all requests. Segments of the epoch before `oldest` may be let go.
    """

    epoch: int
    step: int
    ids: NDArray[np.int64]
    oldest: int
    serial: int = 0
    deaths: int = 0  # of workers, while they made it
    future: Future[Finished] = field(default_factory=Future)

    def deliver(self, finished: Finished) -> None:
        """End it with its batches."""
        if self.future.begin():
            self.future.set_result(finished)

    def fail(self, error: BaseException) -> None:
        """End it with an error, though a worker may be at it still."""
        if self.future.begin():
            self.future.set_exception(error)


class WorkerHandle:
    """A worker process.

    Args:
        workers: how many there are to be.
    Raises: OSError: no process, or no descriptor, can be had.
    """

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory.create(workers)
        self._words = self._memory.words
        self.process = WorkerProcess(self._memory.fd)
        self.asked: deque[Request] = deque()
        self.drops: deque[threading.Semaphore] = deque()  # of those who wait until it has let go
        self.is_ready = False
        self.allocated_bytes = self.growths = 0
        self._lent: set[Loan] = set()
        self._returned: deque[Loan] = deque()  # the only thing that the end of an array touches
        self._trouble = ""  # why it was ended here

    def ask(self, request: Request) -> None:
        """Have it make the batches of a request."""
        returned = []
        with suppress(IndexError):
            while True:
                loan = self._returned.popleft()
                self._lent.discard(loan)
                returned.append(loan.buffer)
        message = {
            "do": "make",
            "id": request.serial,
            "epoch": request.epoch,
            "released": request.oldest,
            "returned": returned,
        }
        self.asked.append(request)
        self.tell(message, request.ids.tobytes())

    def finished(self, answer: Message) -> Finished:
        """The batches that it has made. It leaves them alone until it is told that all arrays are gone."""
        self.allocated_bytes, self.growths = answer["memory"]
        return Finished(
            answer,
            [
                (name, kind, [self._array(*place) for place in places])
                for name, kind, places in answer["columns"]
            ],
        )

    def tell(self, message: Message, data: bytes = b"") -> bool:
        """Send a message. Returns: False: it was not sent: the process has ended, or is ended here."""
        try:
            self.process.channel.send(message, data)
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
        """The next message of it; None: there is none.

        Raises: EOFError: it has ended, or is ended here.
        """
        try:
            received = self.process.channel.receive()
            if received is not None and "say" not in received:
                raise ValueError("a dict that says nothing")
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
        return received

    def end_epoch(self, epoch: int) -> None:
        """Have it make nothing more for an epoch, or for one before it; it sees that at once."""
        self._words[ENDED] = epoch

    @property
    def stage(self) -> tuple[str, float] | None:
        """The stage that it is at, and since when, by `time.perf_counter`; None: none."""
        word = int(self._words[PROGRESS])
        return (STAGES_OF_WORKERS[word % 4], word // 4 / 1e9) if word else None

    @property
    def arrays_in_use(self) -> int:
        """The number of arrays over its slots that are alive here."""
        return len(self._lent) - len(self._returned)

    def how_it_ended(self) -> str:
        """Its end in words, for messages."""
        return self._trouble or self.process.how_it_ended()

    def _array(self, dtype: str, shape: list[int], offset: int) -> NDArray[Any]:
        kind = np.dtype(dtype)
        if not offset:
            return np.empty(shape, kind)
        nbytes = kind.itemsize * math.prod(shape)
        self._memory.parts[offset] = max(nbytes, self._memory.parts.get(offset, 0))
        owner, loan = lent(self._memory, offset, nbytes, offset, self._returned.append)
        self._lent.add(loan)
        return array_over(owner, kind, shape)

    def _lose(self, error: WorkerError) -> None:
        for request in self.asked:
            request.fail(error)
        self._end(str(error))

    def _end(self, because: str) -> None:
        self._trouble = f"was ended here: {because}"
        self.process.kill()
