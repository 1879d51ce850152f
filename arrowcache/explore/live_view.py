"""Live view: one cache, looked at again and again: a card, or a line, in a terminal by `watch`.

A `Board` looks and shows. Whatever becomes of the cache meanwhile, the board says. Texts come from other
processes, too: the card shows them as they are, and never as markup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from arrowcache.cache import Cache
from arrowcache.display import Card, Curves, Part, Table
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.columns import AnyCache
from arrowcache.explore.observation import (
    FIRST_SEEN,
    HeldLease,
    History,
    LoaderRate,
    Observation,
    SamplerAtWork,
    SeenLoader,
    WaitingWriter,
    observe,
)
from arrowcache.storage.locks import file_identity
from arrowcache.storage.recovery import store_of
from arrowcache.units import format_bytes, format_count, format_seconds, format_share, parse_seconds

_MIN_INTERVAL = 0.05
_LOCK_TIMEOUT_SECONDS = 2.0
_LEASE = ("pid", "leased", "segments", "bytes", "for", "by")
_SAMPLER = ("pid", "task", "rows drawn", "last row", "reads", "waits", "sampler")
_WAITING = ("pid", "waits for", "because", "writer")
_LOADER = ("pid", "epochs", "batches", "delivered", "now", "stall", "now", "bottleneck", "loader")
_RIGHT = {"pid", "leased", "bytes", "for", "rows drawn", "last row", "waits for"}
_RIGHT |= {"epochs", "batches", "delivered", "now", "stall"}


class Board:
    """The cache at a path, and what was seen of it.

    Args:
        cache: a Cache, or the path of one.
    Raises: FileNotFoundError, CacheFormatError: no such cache, at first.
    """

    def __init__(self, cache: AnyCache) -> None:
        self.path = store_of(cache).folder.path
        self.history = History()
        self.error: str | None = None  # why the last look failed
        self._cache: Cache | None = None  # one of its own, which nobody closes
        self._identity: tuple[int, int] | None = None

    def look(self) -> None:
        """Add an observation to the history, or say in `error` why not: the cache is gone, or its lock held.

        After an error the next look begins anew, so that it finds whatever is there by then.
        Blocks: while cache.lock is held by another, for 2 s.
        """
        try:
            identity = file_identity(os.stat(self.path))
            if self._cache is None or identity != self._identity:
                self._cache, self._identity = Cache.open(self.path), identity
            seen = observe(self._cache, self.history.last, lock_timeout=_LOCK_TIMEOUT_SECONDS)
        except (ArrowCacheError, OSError) as error:
            self._cache, self.error = None, sentence_of(error)
        else:
            self.history.add(seen)
            self.error = None

    def card(self, is_live: bool = True) -> Card:
        """All of the last look that succeeded; leases come last, since a small window cuts what does.

        Args:
            is_live: whoever shows it goes on looking.
        """
        seen = self.history.last
        parts: list[Part] = [f"{'' if is_live else 'stopped, '}{self._clock()}"]
        if self.error is not None:
            parts.append(self.error)
        if seen is not None:
            curves = [(name, _newest(rates), rates) for name, rates in _rates(self.history).items()]
            parts += [*seen.stats.parts(), Curves(curves)]
            loaders = {rate.key: rate for rate in self.history.moments[-1].loaders}
            for title, head, rows in (
                ("Loaders: none", _LOADER, [_loader(each, loaders.get(each.key)) for each in seen.loaders]),
                ("Samplers at work: none", _SAMPLER, [_sampler(sampler) for sampler in seen.samplers]),
                ("Waiting writers: none", _WAITING, [_waiting(writer, seen) for writer in seen.waiting]),
                ("Leases: none", _LEASE, [_lease(lease, seen) for lease in seen.leases]),
            ):
                parts.append(Table(head, rows, right=_RIGHT) if rows else title)
            if advice := _advice(seen):
                parts.append(f"Samplers: {advice}")
        return Card("Cache", str(self.path), parts)

    def line(self) -> str:
        """The same in one line."""
        seen = self.history.last
        if self.error is not None or seen is None:
            return f"{self._clock()} {self.error}"
        rates = ", ".join(f"{name} {_newest(values)}" for name, values in _rates(self.history).items())
        counts = (
            f"{format_count(len(seen.leases), 'lease')}, {len(seen.waiting):,} waiting, "
            f"{format_count(len(seen.loaders), 'loader')}, {format_count(len(seen.samplers), 'sampler')}"
        )
        rows = sum(sampler.rows for sampler in seen.samplers)
        drawn = f" ({format_count(rows, 'row')} drawn)" if rows else ""
        reads = [f"reads of {each.pid}: {each.reads.text}" for each in seen.samplers if each.reads.text]
        parts = [str(seen.stats.parts()[0]), rates, f"{counts}{drawn}", *reads]
        if advice := _advice(seen):
            parts.append(f"samplers: {advice}")
        return f"{self._clock()} {'; '.join(parts)}"

    def _clock(self) -> str:
        seen = None if self.error else self.history.last
        return time.strftime("%H:%M:%S", time.localtime(seen.time if seen else None))


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


def parse_interval(interval: float) -> float:
    """Seconds between two looks.

    Raises: ValueError, TypeError: no such time.
    """
    is_too_small = isinstance(interval, int | float) and not interval >= _MIN_INTERVAL
    seconds = None if is_too_small else parse_seconds(interval, "interval")
    if seconds is None:
        raise ValueError(f"interval={interval!r} must be seconds, {_MIN_INTERVAL} at least")
    return seconds


def _rates(history: History) -> dict[str, list[float]]:
    """Bytes a second, oldest first; the first look knows none."""
    moments = [moment for moment in history if moment.seconds]
    return {
        "published": [moment.published_bytes_per_second for moment in moments],
        "evicted": [moment.evicted_bytes_per_second for moment in moments],
        "delivered": [moment.delivered_bytes_per_second for moment in moments],
    }


def _advice(seen: Observation) -> str:
    """Return advice on how to draw faster. Empty: there is none."""
    return "; ".join(sorted({each.reads.advice for each in seen.samplers} - {""}))


def _newest(rates: Sequence[float]) -> str:
    return f"{format_bytes(round(rates[-1]))}/s" if rates else "unknown"


def _lease(lease: HeldLease, seen: Observation) -> tuple[object, ...]:
    on = str(lease.first_seq) if lease.segments == 1 else f"{lease.first_seq} to {lease.last_seq}"
    held = format_seconds(seen.time - lease.since) + ("" if lease.since_is == FIRST_SEEN else " at most")
    pid = "?" if lease.pid is None else lease.pid
    return pid, f"{lease.segments:,}", on, format_bytes(lease.nbytes), held, lease.command


def _sampler(sampler: SamplerAtWork) -> tuple[object, ...]:
    last = "" if sampler.last_row_seconds is None else f"{format_seconds(sampler.last_row_seconds)} ago"
    left_out = f", {sampler.skipped:,} left out" if sampler.skipped else ""
    drawn = f"{sampler.rows:,} of {sampler.full_rows:,}{left_out}"
    task = f"{sampler.pool}.{sampler.task}"
    waits = "to publish" if sampler.is_waiting else ""
    return sampler.pid, task, drawn, last, sampler.reads.text, waits, sampler.command


def _waiting(writer: WaitingWriter, seen: Observation) -> tuple[object, ...]:
    return writer.pid, format_seconds(seen.time - writer.since), writer.why, writer.command


def _loader(loader: SeenLoader, now: LoaderRate | None) -> tuple[object, ...]:
    return (
        loader.pid,
        f"{loader.epochs:,}",
        f"{loader.batches:,}",
        format_bytes(loader.bytes),
        "" if now is None else f"{format_bytes(round(now.bytes_per_second))}/s",
        format_share(loader.stall_seconds, loader.seconds),
        "" if now is None else format_share(now.stall_share, 1),
        loader.bottleneck if now is None else now.bottleneck,
        loader.command,
    )
