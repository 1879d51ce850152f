"""Board: what a monitor shows of the last look, and of those before: a card, as HTML and as text.

Texts come from other processes, too: the card shows them as they are, and never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from arrowcache.display import Card, Curves, Part, Table
from arrowcache.explore.history import History, LoaderRate
from arrowcache.explore.observation import (
    FIRST_SEEN,
    HeldLease,
    Observation,
    SamplerAtWork,
    SeenLoader,
    WaitingWriter,
)
from arrowcache.units import format_bytes, format_count, format_seconds, format_share

_LEASE = ("pid", "leased", "segments", "bytes", "for", "by")
_SAMPLER = ("pid", "task", "rows drawn", "last row", "waits", "sampler")
_WAITING = ("pid", "waits for", "because", "writer")
_LOADER = ("pid", "epochs", "batches", "delivered", "now", "stall", "now", "bottleneck", "loader")
_RIGHT = {"pid", "leased", "bytes", "for", "rows drawn", "last row", "waits for"}
_RIGHT |= {"epochs", "batches", "delivered", "now", "stall"}


def board_of(history: History, error: str | None = None, path: object = "", is_live: bool = True) -> Card:
    """Everything to be shown, of the last look; leases come last, since a small window cuts what does.

    Args:
        error: why that look failed; then the rest is of the one before it.
        path: of the cache.
        is_live: whoever shows it goes on looking.
    """
    seen = history.last
    parts: list[Part] = [f"{'' if is_live else 'stopped, '}{_clock(seen, error)}"]
    if error is not None:
        parts.append(error)
    if seen is not None:
        curves = [(name, _newest(rates), rates) for name, rates in _rates(history).items()]
        parts += [*seen.stats.parts(), Curves(curves)]
        loaders = {rate.key: rate for rate in history.moments[-1].loaders}
        for title, head, rows in (
            ("Loaders: none", _LOADER, [_loader(each, loaders.get(each.key)) for each in seen.loaders]),
            ("Samplers at work: none", _SAMPLER, [_sampler(sampler) for sampler in seen.samplers]),
            ("Waiting writers: none", _WAITING, [_waiting(writer, seen) for writer in seen.waiting]),
            ("Leases: none", _LEASE, [_lease(lease, seen) for lease in seen.leases]),
        ):
            parts.append(Table(head, rows, right=_RIGHT) if rows else title)
    return Card("Cache", str(path if seen is None else seen.path), parts)


def line_of(history: History, error: str | None = None) -> str:
    """The same in one line."""
    seen = history.last
    if error is not None or seen is None:
        return f"{_clock(seen, error)} {error}"
    rates = ", ".join(f"{name} {_newest(values)}" for name, values in _rates(history).items())
    counts = (
        f"{len(seen.leases)} leases, {len(seen.waiting)} waiting, {len(seen.loaders)} loaders, "
        f"{len(seen.samplers)} samplers"
    )
    rows = sum(sampler.rows for sampler in seen.samplers)
    drawn = f" ({format_count(rows, 'row')} drawn)" if rows else ""
    return f"{_clock(seen, error)} {seen.stats.parts()[0]}; {rates}; {counts}{drawn}"


def _clock(seen: Observation | None, error: str | None) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seen.time if seen and not error else None))


def _rates(history: History) -> dict[str, list[float]]:
    """Bytes a second, oldest first; the first look knows none."""
    moments = [moment for moment in history if moment.seconds]
    return {
        "published": [moment.published_bytes_per_second for moment in moments],
        "evicted": [moment.evicted_bytes_per_second for moment in moments],
        "delivered": [moment.delivered_bytes_per_second for moment in moments],
    }


def _newest(rates: Sequence[float]) -> str:
    return f"{format_bytes(round(rates[-1]))}/s" if rates else "unknown"


def _lease(lease: HeldLease, seen: Observation) -> tuple[object, ...]:
    on = str(lease.first_seq) if lease.segments == 1 else f"{lease.first_seq} to {lease.last_seq}"
    held = format_seconds(seen.time - lease.since) + ("" if lease.since_is == FIRST_SEEN else " at most")
    pid = "?" if lease.pid is None else lease.pid
    return pid, f"{lease.segments:,}", on, format_bytes(lease.nbytes), held, lease.command


def _sampler(sampler: SamplerAtWork) -> tuple[object, ...]:
    last = "" if sampler.last_row_seconds is None else f"{format_seconds(sampler.last_row_seconds)} ago"
    drawn = f"{sampler.rows:,} of {sampler.full_rows:,}"
    task = f"{sampler.pool}.{sampler.task}"
    return sampler.pid, task, drawn, last, "to publish" if sampler.is_waiting else "", sampler.command


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
