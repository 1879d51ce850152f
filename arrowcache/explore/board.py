"""Board: what a monitor shows, as numbers and short texts: the same in a notebook and in a terminal.

It is made of plain lists, dicts, numbers and strings, so that it may be sent as JSON. Texts come from other
processes, too: whoever shows them must not take them for markup.
"""

from __future__ import annotations

import time
from typing import Any

from arrowcache.explore.history import History
from arrowcache.explore.observation import FIRST_SEEN, Observation
from arrowcache.units import format_bytes, format_count

RATES = ("published", "evicted", "delivered")
LEASE_COLUMNS = ["process", "command", "segments", "bytes", "since"]
WAITING_COLUMNS = ["process", "command", "waiting", "why"]
LOADER_COLUMNS = [
    "process", "command", "epochs", "batches", "delivered", "now", "stall", "stall now", "bottleneck",
]  # fmt: skip
SAMPLER_COLUMNS = ["process", "command", "task", "drawn, not published", "last row"]
_POINTS = 120


def board_of(history: History, error: str | None = None, path: object = "") -> dict[str, Any]:
    """Everything to be shown, of the last look.

    Args:
        error: why that look failed; then the rest is of the one before it.
        path: of the cache; shown if there was no look yet.
    Returns: `path`, `time`, `looks`, `is_live` (whoever shows it goes on looking), `error`, `fill` (None
        before the first look), `rates` (of RATES, with `values` in bytes a second, oldest first; the first
        look knows none), and the tables `leases`, `samplers` (with `drawn_rows`, not published yet),
        `waiting` and `loaders`, of `columns` and `rows`.
    """
    seen = history.last
    return {
        "path": str(path if seen is None else seen.path),
        "time": time.strftime("%H:%M:%S", time.localtime(seen.time if seen and not error else None)),
        "looks": len(history),
        "is_live": True,
        "error": error,
        "fill": None if seen is None else _fill(seen),
        "rates": _rates(history),
        "leases": {"columns": LEASE_COLUMNS, "rows": [] if seen is None else _leases(seen)},
        "samplers": {
            "columns": SAMPLER_COLUMNS,
            "rows": [] if seen is None else _samplers(seen),
            "drawn_rows": 0 if seen is None else sum(sampler.rows for sampler in seen.samplers),
        },
        "waiting": {"columns": WAITING_COLUMNS, "rows": [] if seen is None else _waiting(seen)},
        "loaders": {"columns": LOADER_COLUMNS, "rows": [] if seen is None else _loaders(history, seen)},
    }


def _fill(seen: Observation) -> dict[str, Any]:
    stats = seen.stats
    capacity = max(1, stats.capacity_bytes)
    text = (
        f"{format_bytes(stats.allocated_bytes)} of {format_bytes(stats.capacity_bytes)}, "
        f"{format_count(stats.segments, 'segment')}, {format_count(stats.rows, 'row')}"
    )
    if stats.items:
        text = f"{stats.hits}; {text}"
    if stats.leased_bytes:
        text += f"; {format_bytes(stats.leased_bytes)} leased"
    if stats.quarantined:
        text += f"; {stats.quarantined} quarantined"
    return {
        "share": min(1.0, stats.allocated_bytes / capacity),
        "leased_share": min(1.0, stats.leased_bytes / capacity),
        "text": text,
    }


def _rates(history: History) -> list[dict[str, Any]]:
    moments = [moment for moment in history if moment.seconds][-_POINTS:]
    values = {
        "published": [moment.published_bytes_per_second for moment in moments],
        "evicted": [moment.evicted_bytes_per_second for moment in moments],
        "delivered": [moment.delivered_bytes_per_second for moment in moments],
    }
    return [
        {"name": name, "text": f"{format_bytes(values[name][-1])}/s" if moments else "unknown",
         "values": [round(value) for value in values[name]]}
        for name in RATES
    ]  # fmt: skip


def _leases(seen: Observation) -> list[list[str]]:
    return [
        [
            "?" if lease.pid is None else str(lease.pid),
            lease.command,
            f"{lease.segments} ({_range(lease.first_seq, lease.last_seq)})",
            format_bytes(lease.nbytes),
            f"{format_seconds(seen.time - lease.since)}{'' if lease.since_is == FIRST_SEEN else ' at most'}",
        ]
        for lease in seen.leases
    ]


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _waiting(seen: Observation) -> list[list[str]]:
    return [
        [str(writer.pid), writer.command, format_seconds(seen.time - writer.since), writer.why]
        for writer in seen.waiting
    ]


def _samplers(seen: Observation) -> list[list[str]]:
    return [
        [
            str(sampler.pid),
            sampler.command,
            f"{sampler.pool}.{sampler.task}",
            f"{sampler.rows} of {format_count(sampler.full_rows, 'row')}"
            + ("; waits to publish" if sampler.is_waiting else ""),
            "none" if sampler.last_row_seconds is None else f"{format_seconds(sampler.last_row_seconds)} ago",
        ]
        for sampler in seen.samplers
    ]


def _loaders(history: History, seen: Observation) -> list[list[str]]:
    rates = {loader.key: loader for loader in history.moments[-1].loaders}
    rows = []
    for loader in seen.loaders:
        now = rates.get(loader.key)
        rows.append(
            [
                str(loader.pid),
                loader.command,
                str(loader.epochs),
                str(loader.batches),
                format_bytes(loader.bytes),
                "" if now is None else f"{format_bytes(now.bytes_per_second)}/s",
                f"{loader.stall_seconds / loader.seconds:.0%}" if loader.seconds else "",
                "" if now is None else f"{now.stall_share:.0%}",
                loader.bottleneck if now is None else now.bottleneck,
            ]
        )
    return rows


def format_seconds(seconds: float) -> str:
    """A time in one unit, or two: 75 -> "1 min 15 s"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
