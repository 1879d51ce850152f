"""Worker handle: one worker process as the main process deals with it.

It owns the process and the memory that both have. It knows which requests the worker is to answer, in which
order, and which of its slots are in use here: the next request names those that have come back. A message
that cannot be sent or understood ends the process, with a reason; `how_it_ended` tells it then. One thread
listens; any may tell it something.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.process import Message, WorkerProcess, one_thread
from arrowcache.reading.future import Future
from arrowcache.reading.memory import SharedMemory
from arrowcache.reading.slots import Loan, array_over, lent
from arrowcache.reading.workers.packing import unpack
from arrowcache.reading.workers.worker_slots import ENDED, PROGRESS, STAGES_OF_WORKERS
from arrowcache.shortage import explained

_MAIN = "arrowcache.reading.workers.worker"
_MEDDLING = "a transform must leave alone descriptors that are not its own"


class Finished(NamedTuple):
    """The answer to a request: its batches lie in slots, which return with the last array over them.

    `seconds` are those of each stage in the worker; `nbytes` are the bytes that it gathered.
    """

    columns: list[tuple[str, str, list[NDArray[Any]]]]
    nbytes: int
    seconds: dict[str, float]

    @property
    def arrays(self) -> int:
        return sum(len(arrays) for _, _, arrays in self.columns)

    def batch(self, rows: slice | None = None) -> dict[str, Any]:
        """The batch, or some rows of it, if it is several batches."""
        return {
            name: unpack(kind, arrays if rows is None else [array[rows] for array in arrays])
            for name, kind, arrays in self.columns
        }


class Request(Future[Finished]):
    """Rows to be made into batches. It ends once: delivered, failed or skipped.

    `serial` is its place in the order of all requests. Segments of the epoch before `oldest` may be let go.
    `deaths` are of workers, while they made it.
    """

    def __init__(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int, serial: int) -> None:
        super().__init__()
        self.epoch, self.step, self.ids, self.oldest, self.serial = epoch, step, ids, oldest, serial
        self.deaths = 0

    def deliver(self, finished: Finished) -> None:
        """End it with its batches."""
        if self.begin():
            self.set_result(finished)

    def fail(self, error: BaseException) -> None:
        """End it with an error, though a worker may be at it still."""
        if self.begin():
            self.set_exception(error)


class WorkerHandle:
    """A worker process.

    Args:
        workers: how many there are to be.
    Raises: OSError: no process, or no descriptor, can be had.
    """

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory.create(workers)
        self._words = self._memory.words
        self.process = WorkerProcess(_MAIN, self._memory.fd, environment=one_thread())
        self.asked: deque[Request] = deque()
        self.drops: deque[Future[None]] = deque()  # of those who wait until it has let go
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

    def drop(self) -> Future[None]:
        """Have it let go of epochs that have ended. Returns: what ends when it has, or has ended itself."""
        done: Future[None] = Future()
        self.drops.append(done)
        self.tell({"do": "drop"})
        return done

    def finished(self, answer: Message) -> Finished:
        """The batches that it has made. It leaves them alone until it is told that all arrays are gone."""
        self.allocated_bytes, self.growths = answer["memory"]
        columns = [
            (name, kind, [self._array(*place) for place in places])
            for name, kind, places in answer["columns"]
        ]
        return Finished(columns, answer["nbytes"], answer["seconds"])

    def tell(self, message: Message, data: bytes = b"") -> None:
        """Send a message. Where that fails, the process has ended, or is ended here."""
        try:
            self.process.channel.send(message, data)
        except (BrokenPipeError, ConnectionResetError):  # it has died: its watch tells
            pass
        except BlockingIOError:  # it has stopped, or is at one batch for very long
            self._end("it had read none of hundreds of messages")
        except OSError as error:
            self._lose(WorkerError(f"a worker process could not be told what to do: {explained(error)}"))

    def hear(self) -> Message | None:
        """The next message of it; None: there is no other: it has ended, or is to be ended.

        Blocks: until then.
        """
        try:
            received = self.process.hear()
            if received is not None and "say" not in received:
                raise ValueError("a dict that says nothing")
        except WorkerError as error:  # it may have been about anything
            self._lose(error)
            return None
        except ValueError as error:
            self._lose(WorkerError(f"a worker process said what is no message ({error}): {_MEDDLING}"))
            return None
        return received

    def end(self, seconds: float) -> None:
        """End it, unless it does so by itself in this time; give up its descriptors."""
        if not (self.process.wait(seconds) or self._trouble):
            self._trouble = f"was ended here: it closed its connection: {_MEDDLING}"
        self.process.end()
        self.process.close()

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
        for request in list(self.asked):  # others may ask meanwhile
            request.fail(error)
        self._end(str(error))

    def _end(self, because: str) -> None:
        self._trouble = f"was ended here: {because}"
        self.process.kill()
