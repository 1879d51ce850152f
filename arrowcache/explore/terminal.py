"""Terminal: the live view of a cache, in a terminal or as lines of a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from arrowcache.explore.board import Board, parse_interval
from arrowcache.explore.walk import AnyCache


def watch(
    cache: AnyCache,
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
    board = Board(cache)
    try:
        is_live = console.is_terminal and not console.is_dumb_terminal  # one that can draw over what is there
        if once or not is_live:
            while True:
                console.print(look(board, is_live), soft_wrap=not is_live)
                if once:
                    return
                time.sleep(seconds)  # Ctrl-C in the wait of an Event may come out as a RuntimeError
        live = Live(look(board), console=console, auto_refresh=False, screen=False)
        try:
            live.start(refresh=True)
            while True:
                time.sleep(seconds)
                live.update(look(board), refresh=True)
        finally:  # of Ctrl-C while it starts, too: the cursor comes back
            live.stop()
    except KeyboardInterrupt:
        pass


def look(board: Board, is_whole: bool = True) -> Text:
    board.look()
    return Text(board.card().as_text() if is_whole else board.line())
