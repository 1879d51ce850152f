"""Board: what a monitor shows of the last look, and of those before: a card, as HTML and as text.

Texts come from other processes, too: the card shows them as they are, and never as markup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from arrowcache.display import Card, Facts, Part
from arrowcache.explore.distribution import bars
from arrowcache.explore.history import History, LoaderRate
from arrowcache.explore.observation import FIRST_SEEN, HeldLease, Observation, SamplerAtWork, SeenLoader
from arrowcache.units import format_bytes, format_count, format_seconds, format_share

_BARS_SHOWN = 40


def board_of(history: History, error: str | None = None, path: object = "", is_live: bool = True) -> Card:
    """Everything to be shown, of the last look.

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
        rates = _rates(history).items()
        facts = [(name, f"{bars(values)}  {_newest(values)}".lstrip()) for name, values in rates]
        parts += [*seen.stats.parts(), Facts(facts)]
        for title, nothing, rows in (
            ("Leases", "nothing is leased", [_lease(lease, seen) for lease in seen.leases]),
            ("Samplers at work", "no sampler is seen at work", [*map(_sampler, seen.samplers)]),
            ("Waiting samplers", "no writer waits for room", _waiting(seen)),
            ("Loaders", "no loader is seen", _loaders(history, seen)),
        ):
            parts += [f"{title}:", Facts(rows)] if rows else [f"{title}: {nothing}"]
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
    moments = [moment for moment in history if moment.seconds][-_BARS_SHOWN:]
    return {
        "published": [moment.published_bytes_per_second for moment in moments],
        "evicted": [moment.evicted_bytes_per_second for moment in moments],
        "delivered": [moment.delivered_bytes_per_second for moment in moments],
    }


def _newest(rates: Sequence[float]) -> str:
    return f"{format_bytes(round(rates[-1]))}/s" if rates else "unknown"


def _lease(lease: HeldLease, seen: Observation) -> tuple[str, str]:
    on = str(lease.first_seq) if lease.segments == 1 else f"{lease.first_seq} to {lease.last_seq}"
    most = "" if lease.since_is == FIRST_SEEN else " at most"
    return "?" if lease.pid is None else str(lease.pid), (
        f"{lease.command}: {format_count(lease.segments, 'segment')} ({on}), {format_bytes(lease.nbytes)}, "
        f"for {format_seconds(seen.time - lease.since)}{most}"
    )


def _waiting(seen: Observation) -> list[tuple[str, str]]:
    return [
        (
            str(writer.pid),
            f"{writer.command}: for {format_seconds(seen.time - writer.since)}, since {writer.why}",
        )
        for writer in seen.waiting
    ]


def _sampler(sampler: SamplerAtWork) -> tuple[str, str]:
    last = sampler.last_row_seconds
    drawn = f"{sampler.rows} of {format_count(sampler.full_rows, 'row')} drawn, not published"
    last_row = "" if last is None else f", the last {format_seconds(last)} ago"
    waits = "; waits to publish" if sampler.is_waiting else ""
    return str(
        sampler.pid
    ), f"{sampler.command}: task {sampler.pool}.{sampler.task}, {drawn}{last_row}{waits}"


def _loaders(history: History, seen: Observation) -> list[tuple[str, str]]:
    rates = {rate.key: rate for rate in history.moments[-1].loaders}
    return [(str(loader.pid), _loader(loader, rates.get(loader.key))) for loader in seen.loaders]


def _loader(loader: SeenLoader, now: LoaderRate | None) -> str:
    delivered, stall = format_bytes(loader.bytes), format_share(loader.stall_seconds, loader.seconds)
    if now is not None:
        delivered += f", now {format_bytes(round(now.bytes_per_second))}/s"
        stall += f", now {format_share(now.stall_share, 1)}"
    return (
        f"{loader.command}: {format_count(loader.epochs, 'epoch')}, "
        f"{format_count(loader.batches, 'batch', 'batches')}, {delivered}; stall {stall}; "
        f"bottleneck {loader.bottleneck if now is None else now.bottleneck}"
    )
