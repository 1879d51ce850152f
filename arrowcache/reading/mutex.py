"""Mutex: a lock for work of many steps, which a signal handler must not wait for.

A handler runs in the thread that it interrupts. Where that thread is at the work, the handler would wait for
it for ever with a plain lock, and would see it half done with a reentrant one. Here it gets an error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Mutex:
    """One thread at a time is at the work.

    Args:
        work: for the message.
    """

    def __init__(self, work: str) -> None:
        self._work = work
        self._lock = threading.RLock()
        self.is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be at the work. Blocks: while another thread is.

        Raises: RuntimeError: this thread is at it already.
        """
        with self._lock:
            if self.is_held:
                raise RuntimeError(
                    f"a signal handler has interrupted {self._work}, which it cannot wait for: "
                    "do this once the handler has returned"
                )
            try:
                self.is_held = True
                yield
            finally:
                self.is_held = False
