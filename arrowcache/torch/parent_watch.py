"""Parent watch: a DataLoader's worker ends with the process that it works for, however early that dies.

torch's own workers look every few seconds whether they still have the parent that they began with. One whose
parent was killed before that first look takes whoever adopted it for its parent, and waits for ever for what
nobody will ask. Here the kernel tells: the pipe that multiprocessing keeps to each parent ends with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait


class ParentWatch:
    """A `worker_init_fn`: it has the worker end when its parent does, then calls another one.

    Args:
        then: the user's; None: no other one.
    """

    def __init__(self, then: Callable[[int], object] | None = None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        parent = parent_process()
        if parent is not None:
            ending = threading.Thread(
                target=_end_after, args=(parent.sentinel,), name="arrowcache-parent", daemon=True
            )
            ending.start()
        if self._then is not None:
            self._then(worker_id)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
