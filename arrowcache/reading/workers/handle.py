"""Worker handle: the main process' side of one worker process.

It owns the process and the memory that they share. It knows the worker's open requests in their
order, and the slots in use here: the next request names the slots that have come back. A message
that cannot be sent or understood ends the process, with a reason, which `how_it_ended` returns. One thread
listens; any may send a message.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import WorkerError
from arrowcache.os_errors import explained
from arrowcache.process import Message, WorkerProcess, one_thread
from arrowcache.reading.future import Future
from arrowcache.reading.memory import SharedMemory
from arrowcache.reading.slots import Loan, array_over, lent
from arrowcache.reading.workers.packing import unpack
from arrowcache.reading.workers.worker_slots import ENDED, PROGRESS, STAGES_OF_WORKERS

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
        """The number of arrays of the batch."""
        return sum(len(arrays) for _, _, arrays in self.columns)

    def batch(self, rows: slice | None = None) -> dict[str, Any]:
        """The batch, or some rows of it, if it is several batches."""
        return {
            name: unpack(kind, arrays if rows is None else [array[rows] for array in arrays])
            for name, kind, arrays in self.columns
        }


class Request(Future[Finished]):
    """Rows to be made into batches. A request ends once: delivered, failed or skipped.

    `serial` is its place in the order of all requests. Segments of the epoch before `oldest` may be released.
    `deaths` are deaths of workers that were making it.
    """

    def __init__(self, epoch: int, step: int, ids: NDArray[np.int64], oldest: int, serial: int) -> None:
        super().__init__()
        self.epoch, self.step, self.ids, self.oldest, self.serial = epoch, step, ids, oldest, serial
        self.deaths = 0

    def deliver(self, finished: Finished) -> None:
        """End it with a batch, unless it has ended."""
        if self.begin():
            self.set_result(finished)

    def fail(self, error: BaseException) -> None:
        """End it with an error, even if a worker is still making it."""
        if self.begin():
            self.set_exception(error)


class WorkerHandle:
    """A worker process.

    Raises: OSError: no process, or no descriptor, is available.
    """

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory.create(workers)
        self._words = self._memory.words
        self.process = WorkerProcess(_MAIN, self._memory.fd, environment=one_thread())
        self.asked: deque[Request] = deque()
        self.drops: deque[Future[None]] = deque()  # futures of `drop`, in order
        self.is_ready = False
        self.allocated_bytes = self.growths = 0
        self._lent: set[Loan] = set()
        self._returned: deque[Loan] = deque()  # the end of an array touches this alone
        self._trouble = ""  # why this process ended it

    def ask(self, request: Request) -> None:
        """Send a request to the worker, and the slots that it may use again."""
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
        """Let the worker release epochs that have ended. Returns: a future that ends then, or at its end."""
        done: Future[None] = Future()
        self.drops.append(done)
        self.tell({"do": "drop"})
        return done

    def finished(self, answer: Message) -> Finished:
        """Return the batches of an answer. The worker does not touch them while arrays over them live."""
        self.allocated_bytes, self.growths = answer["memory"]
        columns = [
            (name, kind, [self._array(*place) for place in places])
            for name, kind, places in answer["columns"]
        ]
        return Finished(columns, answer["nbytes"], answer["seconds"])

    def tell(self, message: Message, data: bytes = b"") -> None:
        """Send a message. If that fails, the process has ended, or is ended here."""
        try:
            self.process.channel.send(message, data)
        except (BrokenPipeError, ConnectionResetError):  # it has died: its watch reports that
            pass
        except BlockingIOError:  # it has stopped, or is at one batch for very long
            self._end("it had read none of hundreds of messages")
        except OSError as error:
            self._lose(WorkerError(f"a worker process could not be told what to do: {explained(error)}"))

    def hear(self) -> Message | None:
        """Return its next message, or None if it has ended, or is to be ended.

        Blocks: until a message or the end.
        """
        try:
            received = self.process.hear()
            if received is not None and "say" not in received:
                raise ValueError("a dict that says nothing")
        except WorkerError as error:  # its request is unknown
            self._lose(error)
            return None
        except ValueError as error:
            self._lose(WorkerError(f"a worker process said what is no message ({error}): {_MEDDLING}"))
            return None
        return received

    def end(self, seconds: float) -> None:
        """End it, unless it ends by itself in this time; close its descriptors."""
        if not (self.process.wait(seconds) or self._trouble):
            self._trouble = f"was ended here: it closed its connection: {_MEDDLING}"
        self.process.end()
        self.process.close()

    def end_epoch(self, epoch: int) -> None:
        """Stop it from making batches for an epoch, and for all before it; the worker sees this at once."""
        self._words[ENDED] = epoch

    @property
    def stage(self) -> tuple[str, float] | None:
        """Return its stage and since when, by `time.perf_counter`, or None."""
        word = int(self._words[PROGRESS])
        return (STAGES_OF_WORKERS[word % 4], word // 4 / 1e9) if word else None

    @property
    def arrays_in_use(self) -> int:
        """Return the number of living arrays over its slots in this process."""
        return len(self._lent) - len(self._returned)

    def how_it_ended(self) -> str:
        """Return the cause of its end, for messages."""
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
        for request in list(self.asked):  # others may add requests meanwhile
            request.fail(error)
        self._end(str(error))

    def _end(self, because: str) -> None:
        self._trouble = f"was ended here: {because}"
        self.process.kill()
