"""Widget: the live view of a cache in a notebook.

A thread looks and sets the HTML of one widget to the card of a `Board`. The thread is a daemon, waits for
nothing but its turn, and ends with `stop()`, `close()` or the kernel.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import ipywidgets

from arrowcache.display import Card
from arrowcache.errors import sentence_of
from arrowcache.explore.columns import AnyCache
from arrowcache.explore.live_view import Board, parse_interval
from arrowcache.explore.observation import History
from arrowcache.lifetimes import Closable
from arrowcache.limits import Limits
from arrowcache.os_errors import start


def monitor(cache: AnyCache, interval: float = 1.0) -> Monitor:
    """Show a cache in a notebook while others use it: fill, rates, leases, waiting samplers, loaders.

    Nothing is leased. If the cache vanishes, the widget says so, and goes on when it is back. It moves until
    `stop()`, which leaves what it showed last, or `close()`, or the end of the kernel.

    Args:
        interval: seconds between two looks, at least 0.05.
    Raises: FileNotFoundError, CacheFormatError: no such cache, at first.
    """
    return Monitor(cache, interval)


class Monitor(ipywidgets.HTML, Closable):  # type: ignore[misc]  # ipywidgets ships no type information
    """The widget that `monitor` makes; a context manager. A saved notebook has its first look as text."""

    _thread: threading.Thread | None = None

    def __init__(self, cache: AnyCache, interval: float = 1.0) -> None:
        self._stopped = threading.Event()  # first: what fails below is closed, too
        self._interval = parse_interval(interval)
        self._board = Board(cache)
        self._pid = os.getpid()
        super().__init__()
        self.add_class("arrowcache-monitor")
        self._look()
        thread = threading.Thread(target=self._run, name="arrowcache-monitor", daemon=True)
        start(thread)
        self._thread = thread

    @property
    def history(self) -> History:
        """What it has seen, for plots."""
        return self._board.history

    def stop(self) -> None:
        """Look once more, then never again. Waits 5 s at most, for a look in progress.

        What was seen last stays in the notebook.
        """
        if self._end_thread():
            self._look()

    def close(self) -> None:
        """Look no more, take the widget out of the notebook. Waits 5 s at most, for a look in progress."""
        self._end_thread()
        super().close()

    def _end_thread(self) -> bool:
        """Whether this call was what ended it."""
        thread = self._thread
        was_stopped = self._stopped.is_set()
        self._stopped.set()
        if thread is not None and self._pid == os.getpid() and threading.current_thread() is not thread:
            thread.join(Limits.current.join_seconds)
        return not was_stopped

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {**super()._repr_mimebundle_(**options), "text/plain": self._card.as_text()}

    def _look(self) -> None:
        self._board.look()
        self._card = self._board.card(not self._stopped.is_set())
        self.value = self._card.as_html()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                self._look()
            except Exception as error:
                ended = f"the monitor ended: {sentence_of(error)}"
                self.value = Card("Cache", str(self._board.path), [ended]).as_html()
                raise
