"""Terminal: the live view of a cache, in a terminal or as lines of a log."""

from __future__ import annotations

import os
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from arrowcache.explore.board import board_of, line_of
from arrowcache.explore.lookout import Lookout
from arrowcache.storage.recovery import HasStore
from arrowcache.units import parse_seconds

_LEAST_INTERVAL = 0.05


def watch(
    cache: HasStore | str | os.PathLike[str],
    interval: float = 1.0,
    *,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Show a cache while others use it, until Ctrl-C: fill, rates, leases, waiting samplers, loaders.

    Nothing is leased. If the cache vanishes, this says so, and goes on when it is back. Where the output is
    no terminal, or one that cannot move its cursor (TERM=dumb), each look is one line. Of what a window is
    too small for, `...` stands at its end; loaders come first, leases last.

    Args:
        interval: seconds between two looks, at least 0.05.
        once: look once and return; a terminal gets the whole view.
    Raises: FileNotFoundError, CacheFormatError: no such cache, at first.
    """
    seconds = parse_interval(interval)
    console = console or Console()
    lookout = Lookout(cache)
    try:
        is_live = console.is_terminal and not console.is_dumb_terminal  # one that can draw over what is there
        if once or not is_live:
            while True:
                console.print(view(lookout) if is_live else line(lookout), soft_wrap=not is_live)
                if once:
                    return
                time.sleep(seconds)  # Ctrl-C in the wait of an Event may come out as a RuntimeError
        live = Live(view(lookout), console=console, auto_refresh=False, screen=False)
        try:
            live.start(refresh=True)
            while True:
                time.sleep(seconds)
                live.update(view(lookout), refresh=True)
        finally:  # of Ctrl-C while it starts, too: the cursor comes back
            live.stop()
    except KeyboardInterrupt:
        pass


def parse_interval(interval: float) -> float:
    """Seconds between two looks.

    Raises: ValueError, TypeError: no such time.
    """
    is_too_small = isinstance(interval, int | float) and not interval >= _LEAST_INTERVAL
    seconds = None if is_too_small else parse_seconds(interval, "interval")
    if seconds is None:
        raise ValueError(f"interval={interval!r} must be seconds, {_LEAST_INTERVAL} at least")
    return seconds


def view(lookout: Lookout) -> Text:
    error = lookout.look()
    return Text(board_of(lookout.history, error, lookout.path).as_text())


def line(lookout: Lookout) -> Text:
    error = lookout.look()
    return Text(line_of(lookout.history, error))
