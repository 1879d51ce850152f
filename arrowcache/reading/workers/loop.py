"""Loop: one thread that does what comes: errands, and what descriptors have to say.

It owns the thread and what wakes it. Whatever works on what the loop works on holds the loop: the
thread, but for its waiting, and others for a short call, `with loop.held()`. An errand may be left at
any point of any thread, by a finalizer in the midst of a held call too: that takes no lock.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from arrowcache import linux
from arrowcache.shortage import start

_JOIN_SECONDS = 5.0


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Loop:
    """The thread. `close` it also if it was never started.

    Args:
        turn: called before each wait; returns for how many seconds to wait at most.
        last: called at the end, with what ended it; None: it was stopped.
    Raises: OSError: no descriptor can be had.
    """

    def __init__(self, name: str, turn: Callable[[], float], last: Callable[[BaseException | None], None]):
        self._turn, self._last = turn, last
        self._errands: deque[Callable[[], None]] = deque()
        self._mutex = threading.Lock()
        self._holder = 0  # the other thread that holds it
        self.is_stopping = False
        self._bell = linux.event()
        try:
            self._selector = selectors.DefaultSelector()
        except BaseException:
            os.close(self._bell)
            raise
        self.watch(self._bell, self._unring)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        start(self._thread)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the thread out."""
        with self._mutex:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0

    @property
    def is_here(self) -> bool:
        """Whether this thread has it, so that waiting for it would be for ever: a finalizer asks."""
        return threading.get_ident() in (self._thread.ident, self._holder)

    def leave(self, errand: Callable[[], None]) -> None:
        """Have something done soon, or never: after the end, and in a forked child."""
        self._errands.append(errand)
        self.wake()

    def wake(self) -> None:
        """Have a turn soon."""
        with suppress(OSError):  # closed, or full: it rings already
            linux.add_event(self._bell)

    def watch(self, what: int | HasFileno, action: Callable[[], object]) -> None:
        """Call `action` whenever a descriptor has something to read, or has ended."""
        self._selector.register(what, selectors.EVENT_READ, action)

    def unwatch(self, what: int | HasFileno) -> None:
        self._selector.unregister(what)

    def do_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def stop(self) -> None:
        """End the thread. Idempotent. Blocks: until it has ended, at most 5 s."""
        self.is_stopping = True
        self.wake()
        if not self.is_here and self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def close(self) -> None:
        """Give up the descriptors: at the end, where the thread never ran, and in a forked child."""
        self._selector.close()
        os.close(self._bell)
        self._errands = deque()
        del self._turn, self._last  # a cycle

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as its children do, until they ignore it
        failure: BaseException | None = None
        try:
            while not self.is_stopping:
                with self._mutex:
                    self.do_errands()
                    wait_seconds = self._turn()
                ready = self._selector.select(wait_seconds)
                with self._mutex:
                    for key, _ in ready:
                        key.data()
        except BaseException as error:  # noqa: BLE001  # whoever waits is told
            failure = error
        finally:
            with self._mutex:
                self._last(failure)

    def _unring(self) -> None:
        with suppress(BlockingIOError):
            linux.take_event(self._bell)
