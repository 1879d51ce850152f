"""Parent watch: a DataLoader's worker ends with its parent process, however early that dies.

torch's own workers compare their parent every few seconds with the first one they saw. A worker whose
parent was killed before its first look takes the adopting process for its parent, and waits for ever.
Here the kernel tells: the pipe that multiprocessing keeps to each parent ends with the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait

from arrowcache.os_errors import start


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
