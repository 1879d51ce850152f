"""Cache lock: cache.lock as a thread holds it, and what waits until the thread has let go of it.

A finalizer may run where its thread holds the lock: what takes the lock itself is done later then.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from arrowcache.errors import LockTimeoutError
from arrowcache.storage.locks import LockFile, flock_holders

LOCK_TIMEOUT_SECONDS = 60.0
_jitter = random.SystemRandom()  # the generators with a state are the user's


@contextmanager
def held(path: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold cache.lock, polled until the deadline, then do what had to wait for it.

    Raises: LockTimeoutError: names the holder. OSError: the file cannot be opened.
    """
    before = _here.lock
    file = LockFile(path)
    try:
        _here.lock = weakref.ref(file)
        _wait_for(file, timeout_seconds)
        yield
    finally:
        try:
            file.close()
        finally:  # Ctrl-C may have come before it did anything
            file.close()
            _here.lock = before
        _do_errands()


def _wait_for(file: LockFile, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    pause = 0.0005
    while not file.try_exclusive():
        if time.monotonic() > deadline:
            holders = ", ".join(map(str, flock_holders(file.path))) or "an unseen process"
            raise LockTimeoutError(
                f"{file.path} was held for over {timeout_seconds:g} s by {holders}: "
                "continue it (kill -CONT) or end it"
            )
        time.sleep(pause * _jitter.uniform(0.5, 1))
        pause = min(2 * pause, 0.02)


class _Here(threading.local):
    #: It holds this cache.lock, or waits for it. Weak: one whose closing Ctrl-C cut short closes as it goes.
    lock: Callable[[], LockFile | None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.errands: deque[Callable[[], None]] = deque()

    @property
    def is_locked(self) -> bool:
        file = self.lock()
        return file is not None and not file.is_closed


_here = _Here()


def once_unlocked(errand: Callable[[], None]) -> None:
    """Do what takes cache.lock itself: at once, or as soon as this thread has let go of every one.

    So a finalizer may, which the garbage collector calls at any point of any thread.
    """
    _here.errands.append(errand)
    _do_errands()


def _do_errands() -> None:
    while not _here.is_locked:
        try:
            errand = _here.errands.popleft()  # not "if there is one": the collector may come in between
        except IndexError:
            return
        errand()
