"""Report: a loader's figures as people read them, in a terminal and in a notebook. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arrowcache import html, text
from arrowcache.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from arrowcache.reading.stats import LoaderStats

_COLORS = {
    "samplers": html.RED,
    "pace": html.RED,
    "store": html.ORANGE,
    "gather": html.BLUE,
    "transform": html.PURPLE,
    "start": html.GREY,
}


def as_text(stats: LoaderStats) -> str:
    """One sentence, and a few lines of what is behind it."""
    rate = format_bytes(stats.bytes / stats.seconds) if stats.seconds else "0 B"
    lines = [
        (
            f"{format_count(stats.batches, 'batch', 'batches')}, {format_count(stats.rows, 'row')}, "
            f"{format_bytes(stats.bytes)} in {stats.seconds:.1f} s ({rate}/s), stalled "
            f"{stats.stall_seconds:.1f} s in {format_count(stats.stalls, 'step')}; "
            f"bottleneck {stats.bottleneck}: {stats.advice}"
        )
    ]
    if stats.seconds:
        share = stats.stall_seconds / stats.seconds
        lines.append(f"stalled   [{text.bar(share)}] {format_share(share, 1)} of the time")
    if spent := _stages(stats):
        lines.append("seconds   " + ", ".join(f"{name} {format_seconds(s)}" for name, s in spent.items()))
    return "\n".join([*lines, *(f"{name:<9} {words}" for name, words in _facts(stats))])


def as_html(stats: LoaderStats) -> str:
    """What was delivered, the share of stall, where the seconds went, and what to do."""
    rate = f": {format_bytes(stats.bytes / stats.seconds)}/s" if stats.seconds else ""
    rows = f", {stats.rows / stats.seconds:,.0f} rows/s" if stats.seconds else ""
    delivered = (
        f"{format_count(stats.batches, 'batch', 'batches')}, {format_count(stats.rows, 'row')}, "
        f"{format_bytes(stats.bytes)} in {format_count(stats.epochs, 'epoch')}{rate}{rows}"
    )
    working = max(0.0, stats.seconds - stats.stall_seconds)
    stall = [
        ("stalled", stats.stall_seconds, format_seconds(stats.stall_seconds), html.RED),
        ("busy with batches", working, format_seconds(working), html.GREEN),
    ]
    stages = [(name, s, format_seconds(s), _COLORS[name]) for name, s in _stages(stats).items()]
    share = format_share(stats.stall_seconds, stats.seconds)
    parts = [
        html.note(delivered),
        html.note(f"The consumer stalled {share} of the time, in {format_count(stats.stalls, 'step')}:"),
        html.bar(stall, stats.seconds),
    ]
    if stages:
        parts += [
            html.note("Where the waiting consumer, and workers, spent their time:"),
            html.bar(stages, 0),
        ]
    advice = html.join([html.element("b", stats.bottleneck), f": {stats.advice}"])
    return html.card("LoaderStats", "", *parts, html.facts([("bottleneck", advice), *_facts(stats)]))


def _stages(stats: LoaderStats) -> dict[str, float]:
    spent = {name: float(getattr(stats, f"{name}_seconds")) for name in _COLORS}
    return {name: seconds for name, seconds in spent.items() if seconds > 0}


def _facts(stats: LoaderStats) -> list[tuple[str, str]]:
    memory = (
        f"{format_bytes(stats.slot_bytes)} for batches, grown "
        f"{format_count(stats.slot_growths, 'time')}; of the process {format_bytes(stats.private_bytes)} "
        f"private, {format_bytes(stats.file_bytes)} of mapped files"
    )
    age = [("age", f"{format_seconds(stats.age_seconds)} since rows were published, on average")]
    facts = [*(age if stats.rows else []), ("memory", memory)]
    if stats.left_out_rows:
        rows = format_count(stats.left_out_rows, "row")
        facts.append(("left out", f"the oldest {rows} of the last epoch, to samplers"))
    if stats.held_up_seconds:
        facts.append(("held up", f"samplers, for {format_seconds(stats.held_up_seconds)}, by its lease"))
    return facts
