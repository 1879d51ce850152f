"""Terminal: the live view of a cache, in a terminal or as lines of a log."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from arrowcache.explore.board import board_of
from arrowcache.explore.lookout import Lookout
from arrowcache.storage.recovery import HasStore
from arrowcache.units import format_count, parse_seconds

_BAR_WIDTH = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARKS_SHOWN = 40
_LEAST_INTERVAL = 0.05
_LEAST_CELL = 12  # characters that a longer cell can be broken into, and still be read


def watch(
    cache: HasStore | str | os.PathLike[str],
    interval: float = 1.0,
    *,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Show a cache while others use it, until Ctrl-C: fill, rates, leases, waiting samplers, loaders.

    Nothing is leased. If the cache vanishes, this says so, and goes on when it is back. Where the output is
    no terminal, or one that cannot move its cursor (TERM=dumb), each look is one line.

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
                board = board_of(lookout.history, lookout.look(), lookout.path)
                console.print(render(board) if is_live else line_of(board), soft_wrap=not is_live)
                if once:
                    return
                time.sleep(seconds)  # Ctrl-C in the wait of an Event may come out as a RuntimeError
        board = board_of(lookout.history, lookout.look(), lookout.path)
        with Live(render(board), console=console, auto_refresh=False, screen=False) as live:
            while True:
                time.sleep(seconds)
                board = board_of(lookout.history, lookout.look(), lookout.path)
                live.update(render(board), refresh=True)
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


def render(board: dict[str, Any]) -> RenderableType:
    """A board for a terminal."""
    parts: list[RenderableType] = [Text(f"{board['path']}  {board['time']}", style="bold")]
    if board["error"] is not None:
        parts.append(Text(board["error"], style="red"))
    if board["fill"] is not None:
        parts += [_bar(board["fill"]), _rates(board["rates"])]
        parts += [
            _table(title, board[name], nothing)
            for name, title, nothing in (
                ("leases", "Leases", "nothing is leased"),
                ("samplers", "Samplers at work", "no sampler is seen at work"),
                ("waiting", "Waiting samplers", "no writer waits for room"),
                ("loaders", "Loaders", "no loader is seen"),
            )
        ]
    return Group(*parts)


def line_of(board: dict[str, Any]) -> Text:
    """A board in one line."""
    if board["error"] is not None or board["fill"] is None:
        return Text(f"{board['time']} {board['error']}")
    rates = ", ".join(f"{rate['name']} {rate['text']}" for rate in board["rates"])
    counts = ", ".join(
        f"{len(board[name]['rows'])} {name}" for name in ("leases", "waiting", "loaders", "samplers")
    )
    rows = board["samplers"]["drawn_rows"]
    drawn = f" ({format_count(rows, 'row')} drawn)" if rows else ""
    return Text(f"{board['time']} {board['fill']['text']}; {rates}; {counts}{drawn}")


def _bar(fill: dict[str, Any]) -> Text:
    taken, leased = (round(_BAR_WIDTH * fill[name]) for name in ("share", "leased_share"))
    text = Text()
    text.append("█" * min(leased, taken), style="blue")
    text.append("▓" * max(0, taken - leased), style="cyan")
    text.append("░" * (_BAR_WIDTH - taken), style="dim")
    text.append(f" {fill['share']:.0%} {fill['text']}")
    return text


def _rates(rates: Sequence[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for rate in rates:
        table.add_row(Text(rate["name"]), Text(rate["text"], justify="right"), Text(sparks(rate["values"])))
    return table


def sparks(values: Sequence[float]) -> str:
    """The newest numbers as bars, of which the highest fills its line."""
    shown = values[-_SPARKS_SHOWN:]
    most = max(shown, default=0) or 1
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(len(_SPARKS) * max(0, v) / most))] for v in shown)


def _table(title: str, content: dict[str, Any], nothing: str) -> RenderableType:
    if not content["rows"]:
        return Text(f"{title}: {nothing}", style="dim")
    return _Rows(title, content["columns"], content["rows"])


class _Rows:
    """A table, or where the window is too narrow for it, a paragraph a row."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._title, self._columns, self._rows = title, columns, rows

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        if fits([self._columns, *self._rows], options.max_width):
            table = Table(title=self._title, title_justify="left", expand=True)
            for name in self._columns:
                table.add_column(Text(name), overflow="fold")
            for row in self._rows:
                table.add_row(*map(Text, row))
            yield table
            return
        yield Text(self._title, style="italic")
        for row in self._rows:
            cells = zip(self._columns, row, strict=True)
            yield Text("- " + ", ".join(f"{name} {cell}" for name, cell in cells if cell), overflow="fold")


def fits(table: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table, its head first, can still be read where it is drawn so many characters wide."""
    widths = [min(_LEAST_CELL, max(map(len, column))) for column in zip(*table, strict=True)]
    return sum(widths) + 3 * len(widths) + 1 <= width  # as rich draws a table
