"""Worker processes: those of a stock DataLoader: how they start, end and die.

This module has all that the library knows of torch's private names about them.

A worker ends with its parent process, however early that dies. torch's own workers compare their parent every
few seconds with the first one they saw. A worker whose parent was killed before its first look takes the
adopting process for its parent, and waits for ever. Here the kernel tells: the pipe that multiprocessing
keeps to each parent ends with the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch._C import _remove_worker_pids

from arrowcache.os_errors import start
from arrowcache.progress import flushable_stderr
from arrowcache.torch.lazy_batch import RECEIVING
from arrowcache.units import format_count

_LATE = "DataLoader timed out"  # so torch's error begins
_DIED = "DataLoader worker (pid"  # so torch's error begins; one of the dataset begins otherwise
_LOST = (
    ConnectionError,
    EOFError,
    FileNotFoundError,
)  # of a message whose sender died before it was received


class ParentWatch:
    """A `worker_init_fn`: it makes the worker end with its parent, then calls the user's function."""

    def __init__(self, then: Callable[[int], object] | None = None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        parent = parent_process()
        if parent is not None:
            ending = threading.Thread(
                target=_end_after, args=(parent.sentinel,), name="arrowcache-parent", daemon=True
            )
            start(ending)
        if self._then is not None:
            self._then(worker_id)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


class without_worker_info:  # noqa: N801  # a context manager, as short as can be
    """While code runs that would divide its items by `torch.utils.data.get_worker_info`."""

    def __enter__(self) -> None:
        self._info = torch_worker._worker_info
        torch_worker._worker_info = None

    def __exit__(self, *_: object) -> None:
        torch_worker._worker_info = self._info


@contextmanager
def starting_workers(workers: int) -> Iterator[None]:
    """While a DataLoader is made, and starts its worker processes.

    Raises: ValueError: this process may have none.
    """
    if workers and multiprocessing.current_process().daemon:
        raise ValueError(
            "a daemonic process, such as a worker of a DataLoader or of multiprocessing.Pool, can start no "
            f"{format_count(workers, 'worker')}: pass workers=0"
        )
    with warnings.catch_warnings(), flushable_stderr():
        # Workers wait for the source of items: torch advises as many as there are processors.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


def end_workers(answers: Iterator[Any]) -> None:
    """End the processes of a DataLoader's iterator, of which an error's traceback may hold a reference.

    torch ends them as the iterator is deleted, in whichever process that happens. Idempotent.
    """
    if hasattr(answers, "_shutdown_workers"):
        answers._shutdown_workers()


def leave_to_parent(answers: Any) -> None:
    """In a forked child: torch would end the parent's processes where the child drops this, or exits."""
    if hasattr(answers, "_shutdown"):
        answers._shutdown = True


def set_timeout(answers: Any, seconds: float) -> None:
    """Have torch wait so long for a batch, then raise: see `is_late`. 0: for ever, also after all deaths."""
    answers._timeout = seconds


def raise_deaths_in_next(answers: Any) -> None:
    """Keep a worker's death from raising anywhere in the main thread, as in the user's training step.

    torch raises it there from a handler of SIGCHLD. `next` finds it, too.
    """
    if getattr(answers, "_worker_pids_set", False):
        _remove_worker_pids(id(answers))
        answers._worker_pids_set = False


def is_late(error: Exception) -> bool:
    """True if no batch came in time."""
    return _begins(error, _LATE)


def is_death(error: Exception) -> bool:
    """True if a worker died."""
    return RECEIVING in str(error) if isinstance(error, _LOST) else _begins(error, _DIED)


def _begins(error: Exception, text: str) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(text)
