"""Timeline: published segments side by side, oldest first: how old, how many rows, by which sampler. Pure.

Neighbours share a cell where there are more than can be drawn.
"""

from __future__ import annotations

import itertools
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from arrowcache import html
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.origin import kind_of_import
from arrowcache.text import shorten
from arrowcache.units import format_bytes, format_count, format_seconds, format_share

MOST_CELLS = 100
_TEXT_CELLS = 64
_HEIGHT = 40.0
_COLORS = (html.BLUE, html.GREEN, html.PURPLE, html.SKY, html.RED, html.YELLOW)
_MOST_NAME = 40


@dataclass(frozen=True, slots=True)
class Cell:
    """Neighbouring segments."""

    first: SegmentInfo
    last: SegmentInfo
    segments: int
    rows: int
    nbytes: int
    rows_of: dict[str, int]  # by sampler


def sampler_of(task: str) -> str:
    """Who published a segment of this task: a pool as "<name>.<seed>", an import, or a writer."""
    if kind := kind_of_import(task):
        return kind
    sampler = task.rpartition(".")[0]
    if sampler.startswith("tfrecord.") and sampler.count(".") == 2:
        return sampler[: len("tfrecord.") + 8]  # all workers of one import
    return sampler or task or "writer"


def cells(segments: Sequence[SegmentInfo], most: int = MOST_CELLS) -> list[Cell]:
    """At most so many cells, each of equally many segments but for one."""
    count = min(len(segments), most)
    ends = [len(segments) * cell // count for cell in range(count + 1)] if count else [0]
    return [_cell(segments[start:stop]) for start, stop in itertools.pairwise(ends)]


def _cell(segments: Sequence[SegmentInfo]) -> Cell:
    rows_of: dict[str, int] = {}
    for segment in segments:
        sampler = sampler_of(segment.task)
        rows_of[sampler] = rows_of.get(sampler, 0) + segment.rows
    rows, nbytes = sum(rows_of.values()), sum(segment.nbytes for segment in segments)
    return Cell(segments[0], segments[-1], len(segments), rows, nbytes, rows_of)


def samplers_of(drawn: Sequence[Cell]) -> list[tuple[str, int]]:
    """Samplers and their rows, most rows first; those without a color of their own as one."""
    total: Counter[str] = Counter()
    for cell in drawn:
        total.update(cell.rows_of)
    ranked = sorted(total.items(), key=lambda entry: (-entry[1], entry[0]))
    if len(ranked) <= len(_COLORS):
        return ranked
    shown, others = ranked[: len(_COLORS)], ranked[len(_COLORS) :]
    return [*shown, (f"{len(others)} others", sum(rows for _, rows in others))]


def span(segments: Sequence[SegmentInfo], now: float) -> str:
    """Numbers and ages of the first and the last segment; there is one at least."""
    first, last = segments[0], segments[-1]
    if first.seq == last.seq:
        return f"seq {first.seq}, published {_age(first, now)} ago"
    return f"seq {first.seq} to {last.seq}, published {_age(first, now)} to {_age(last, now)} ago"


def _age(segment: SegmentInfo, now: float) -> str:
    return format_seconds(max(0.0, now - segment.published))


def as_text(segments: Sequence[SegmentInfo]) -> str:
    """One line: who published them, and, of several samplers, where in the order."""
    drawn = cells(segments, _TEXT_CELLS)
    samplers = samplers_of(drawn)
    rows = sum(cell.rows for cell in drawn)
    if len(samplers) == 1:
        return f"by {_name(samplers[0][0])}"
    letters = {name: letter for (name, _), letter in zip(samplers, string.ascii_uppercase, strict=False)}
    line = "".join(letters.get(max(c.rows_of, key=lambda name: c.rows_of[name]), "·") for c in drawn)
    names = (f"{letters[name]} {_name(name)} ({format_share(n, rows)})" for name, n in samplers)
    return f"by {', '.join(names)}\n{line}"


def as_html(segments: Sequence[SegmentInfo], now: float) -> html.Markup:
    """Cells as high as they have rows, in the colors of their samplers; ages below, and who is who."""
    drawn = cells(segments)
    samplers = samplers_of(drawn)
    colors = dict(zip((name for name, _ in samplers), (*_COLORS, html.GREY), strict=False))
    highest = max((cell.rows / cell.segments for cell in drawn), default=1)
    pieces = [_drawn(at, cell, highest, colors, now) for at, cell in enumerate(drawn)]
    picture = html.element(
        "svg",
        *pieces,
        viewBox=f"0 0 {len(drawn)} {_HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label="segments, oldest first",
        style=f"display: block; width: {min(100, 4 * len(drawn))}%; height: {_HEIGHT:g}px; "
        f"border-bottom: 1px solid {html.LINE}",
    )
    rows = sum(cell.rows for cell in drawn)
    names = [(f"{_name(name)} {format_share(n, rows)}", colors.get(name, html.GREY)) for name, n in samplers]
    ages = [
        html.element("span", f"{_age(cell.first, now)} old") for cell in drawn[:: max(1, len(drawn) // 4)]
    ]
    axis = html.element("div", *ages, style="display: flex; justify-content: space-between")
    if len(drawn) >= MOST_CELLS // 4:
        picture = html.join([picture, html.note(axis)])
    return html.element("div", picture, html.legend(names), style="margin: 0.5em 0")


def _drawn(at: int, cell: Cell, highest: float, colors: dict[str, str], now: float) -> html.Markup:
    bottom, parts = _HEIGHT, []
    for sampler, rows in sorted(cell.rows_of.items()):
        height = _HEIGHT * rows / cell.segments / highest
        bottom -= height
        color = colors.get(sampler, html.GREY)
        parts.append(
            f'<rect x="{at + 0.05}" y="{bottom:.2f}" width="0.9" height="{height:.2f}" fill="{color}"/>'
        )
    title = html.element("title", _title(cell, now))
    return html.Markup(f"<g>{title}{''.join(parts)}</g>")


def _title(cell: Cell, now: float) -> str:
    size = f"{format_count(cell.rows, 'row')}, {format_bytes(cell.nbytes)}, {_age(cell.last, now)} old"
    if cell.segments == 1:
        return f"segment {cell.first.seq}: {size}, task {shorten(cell.first.task, 100) or 'of a writer'}"
    names = ", ".join(f"{_name(name)} {format_share(rows, cell.rows)}" for name, rows in cell.rows_of.items())
    return f"{cell.segments} segments, {cell.first.seq} to {cell.last.seq}: {size}, by {names}"


def _name(sampler: str) -> str:
    return shorten(sampler, _MOST_NAME)
