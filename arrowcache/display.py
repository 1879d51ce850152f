"""Display: shows values as text in a terminal and as HTML in a notebook. Nobody else lays out either.

A class describes itself once: a `Card` of sentences, facts, tables, bars, curves and timelines. `Shown` makes
its `__str__` and its `_repr_html_` of the card. No other module lays out text or writes HTML.

A user's or a file's name shows as itself and moves nothing. The HTML has no script and no external resource,
and its style is inline, so that it does not affect other output. Text takes the notebook's own color, lines
JupyterLab's variables, with colors visible on white and on black as a fallback.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from arrowcache.units import format_bytes, format_count, format_seconds, format_share

#: From Okabe and Ito (2008): distinct for the color-blind, too, and visible on white and on black.
COLORS = ("#2f7fc1", "#e69f00", "#b66dbd", "#009e73", "#56b4e9", "#d55e00")
BLUE = COLORS[0]
GREY = "#8c8c8c"
_BARS = "▁▂▃▄▅▆▇█"
_FILLS = "█▓▒░▚▞"  # a terminal's characters for COLORS
_LINE = "1px solid var(--jp-border-color2, rgba(128, 128, 128, 0.35))"
_WIDTH = "max-width: 46em"
_TEXT_WIDTH = 40  # characters of a bar
_CELL_HEIGHT = 40
_MAX_NAME = 40
_MAX_OPEN = 20  # rows of a table; a notebook shows the total of a longer one first


# Text


def printable(value: object) -> str:
    """Return text with escapes for characters that are invisible or move others: line ends, controls."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters, the last of them "…" if some are left out."""
    return text if len(text) <= most else text[: most - 1] + "…"


def bars(amounts: Sequence[float]) -> str:
    """Amounts from 0 on as bars, a character each: the highest fills its line, any above 0 is seen."""
    highest = max(amounts, default=0) or 1
    return "".join(_BARS[math.ceil(amount / highest * (len(_BARS) - 1))] for amount in amounts)


def _columns(rows: Iterable[Sequence[object]], right: Iterable[int] = ()) -> str:
    """Lay out rows in columns, two blanks between them; columns in `right` are aligned to the right."""
    lines = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]

    def padded(at: int, cell: str) -> str:
        blank = " " * (widths[at] - _width(cell))
        return blank + cell if at in right else cell + blank

    return "\n".join("  ".join(padded(*entry) for entry in enumerate(line)).rstrip() for line in lines)


def _width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


# HTML


class Markup(str):
    """Text that is HTML already; other text is escaped when it becomes part of some."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Escape a text, such as a user's or a file's name, so that it shows as itself."""
    return value if isinstance(value, Markup) else Markup(html.escape(printable(value)))


def join(parts: Iterable[object]) -> Markup:
    """Join parts, each escaped unless it is Markup."""
    return Markup("".join(map(escape, parts)))


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Make an element; `_` in an attribute's name becomes `-`, and an attribute of None is left out."""
    return Markup(f"{empty_element(tag, **attributes)}{join(content)}</{tag}>")


def empty_element(tag: str, **attributes: object) -> Markup:
    """Make an element without an end tag, such as an image."""
    shown = "".join(
        f' {name.replace("_", "-")}="{html.escape(printable(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{shown}>")


def note(*content: object) -> Markup:
    return element("div", *content, style="font-size: 0.87em; opacity: 0.85; margin: 0.15em 0")


def page(title: str, body: Markup) -> str:
    """Make a document of its own, in the reader's choice of light or dark."""
    head = element("title", title) + Markup('<meta charset="utf-8">')
    style = "color-scheme: light dark; background: Canvas; color: CanvasText; font-family: sans-serif"
    return f"<!DOCTYPE html>\n<html><head>{head}</head>{element('body', body, style=style)}</html>\n"


def _rows(rows: Iterable[Sequence[object]], styles: Sequence[str], tag: str = "td") -> Markup:
    return join(
        element(
            "tr",
            *(element(tag, cell, style=style) for cell, style in zip(row, styles, strict=True)),
            style="background: none",
        )
        for row in rows
    )


def _legend(names: Iterable[tuple[str, str]]) -> Markup:
    square = f"display: inline-block; width: 0.7em; height: 0.7em; margin-right: 0.35em; border: {_LINE}"
    entries = (
        element(
            "span",
            element("span", style=f"{square}; background: {color}"),
            name,
            style="margin-right: 1.2em; white-space: nowrap",
        )
        for name, color in names
    )
    return note(*entries)


# What is shown, in both forms


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one a line."""

    rows: Sequence[tuple[str, object]]

    def as_text(self) -> str:
        return _columns(self.rows)

    def as_html(self) -> Markup:
        cell = "text-align: left; padding: 0.05em 0.9em 0.05em 0; border: 0; vertical-align: top"
        styles = (f"{cell}; opacity: 0.75; white-space: nowrap", cell)
        return element("table", _rows(self.rows, styles), style="border-collapse: collapse; margin: 0.3em 0")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a head, at least one; `right` names columns of numbers.

    `total` is a sentence about all of them; with it a notebook can fold the table.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    total: str = ""
    right: Collection[str] = ()

    def as_text(self) -> str:
        right = [at for at, name in enumerate(self.head) if name in self.right]
        return f"{_columns((self.head, *self.rows), right)}\n{printable(self.total)}".rstrip()

    def as_html(self) -> Markup:
        cell = f"padding: 0.15em 0.9em 0.15em 0; border: 0; border-bottom: {_LINE}"
        number = "text-align: right; white-space: nowrap"
        styles = [f"{number if name in self.right else 'text-align: left'}; {cell}" for name in self.head]
        lines = _rows([self.head], styles, "th"), _rows(self.rows, styles)
        table = element(
            "table", *lines, style="border-collapse: collapse; margin: 0.4em 0; font-size: 0.93em"
        )
        if not self.total:
            return table
        is_open = "" if len(self.rows) <= _MAX_OPEN else None
        summary = element("summary", self.total, style="cursor: pointer")
        return element("details", summary, table, open=is_open, style="margin: 0.4em 0")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of parts, with a legend.

    Args:
        parts: (name, amount), at most as many as COLORS; parts of 0 are left out.
        format_amount: function that makes text of an amount.
        whole: the amount of the bar's whole length. 0 means all parts together.
        rest: the name of the rest of the whole.
    """

    parts: Sequence[tuple[str, float]]
    format_amount: Callable[[float], str]
    whole: float = 0
    rest: str = ""

    def _shown(self) -> list[tuple[float, str, str, str]]:
        """Return (share of the length, name with amount, color, character) of each part above 0."""
        whole = max(self.whole, sum(amount for _, amount in self.parts)) or 1
        shown = [
            (amount / whole, f"{name} {self.format_amount(amount)}", color, fill)
            for (name, amount), color, fill in zip(self.parts, COLORS, _FILLS, strict=False)
            if amount > 0
        ]
        left = whole - sum(amount for _, amount in self.parts)
        if self.rest and left > 0:
            shown.append((left / whole, f"{self.rest} {self.format_amount(left)}", "transparent", " "))
        return shown

    def as_text(self) -> str:
        drawn, upto, shown = "", 0.0, self._shown()
        for share, _, _, fill in shown:
            upto += share
            drawn += fill * (round(_TEXT_WIDTH * upto) - len(drawn))
        names = ", ".join(f"{fill} {name}".lstrip() for _, name, _, fill in shown)
        return f"[{drawn.ljust(_TEXT_WIDTH)}] {printable(names)}"

    def as_html(self) -> Markup:
        shown = self._shown()
        pieces = (
            element(
                "div", title=name, style=f"width: {100 * share:.3f}%; min-width: 2px; background: {color}"
            )
            for share, name, color, _ in shown
        )
        frame = f"display: flex; height: 0.9em; margin: 0.3em 0 0.1em; border: {_LINE}; {_WIDTH}"
        names = _legend((name, color) for _, name, color, _ in shown)
        return join([element("div", *pieces, style=frame), names])


@dataclass(frozen=True, slots=True)
class Curves:
    """Amounts over time, side by side: (name, the newest as text, amounts of at least 0, oldest first)."""

    curves: Sequence[tuple[str, str, Sequence[float]]]

    def as_text(self) -> str:
        return _columns((name, bars(amounts[-_TEXT_WIDTH:]), newest) for name, newest, amounts in self.curves)

    def as_html(self) -> Markup:
        drawn = (
            element("div", name, " ", element("b", newest), _curve(amounts), style="flex: 1; min-width: 8em")
            for name, newest, amounts in self.curves
        )
        return element("div", *drawn, style=f"display: flex; gap: 2em; margin: 0.6em 0; {_WIDTH}")


def _curve(amounts: Sequence[float]) -> Markup:
    most, last = max(amounts, default=0) or 1, max(1, len(amounts) - 1)
    points = " ".join(f"{at},{100 * (1 - amount / most):.1f}" for at, amount in enumerate(amounts))
    line = {"points": points, "fill": "none", "stroke": BLUE, "vector_effect": "non-scaling-stroke"}
    return element(
        "svg",
        element("polygon", points=f"0,100 {points} {last},100", fill=BLUE, opacity=0.2),
        element("polyline", **line, stroke_width=1.5),
        viewBox=f"0 -4 {last} 104",
        preserveAspectRatio="none",
        style=f"display: block; width: 100%; height: {_CELL_HEIGHT}px; border-bottom: {_LINE}",
    )


class Cell(NamedTuple):
    """Neighbouring segments of a timeline, at least one.

    `first` and `last` are (seq, age in seconds); `rows` those of each sampler; `task` is the first one's.
    """

    first: tuple[int, float]
    last: tuple[int, float]
    segments: int
    nbytes: int
    rows: Counter[str]
    task: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Segments side by side, oldest first: their ages, rows and samplers. At least one cell."""

    cells: Sequence[Cell]

    def samplers(self) -> list[tuple[str, str]]:
        """Return each sampler, most rows first, and its share of them; those without a color are summed."""
        total: Counter[str] = Counter()
        for cell in self.cells:
            total.update(cell.rows)
        ranked = sorted(total.items(), key=lambda entry: (-entry[1], entry[0]))
        if len(ranked) > len(COLORS):
            others = ranked[len(COLORS) :]
            ranked[len(COLORS) :] = [(format_count(len(others), "other"), sum(rows for _, rows in others))]
        return [(name, format_share(rows, total.total())) for name, rows in ranked]

    def span(self) -> str:
        """Describe the numbers and ages of the first and the last segment."""
        (first, first_age), (last, last_age) = self.cells[0].first, self.cells[-1].last
        if first == last:
            return f"seq {first}, published {_age(first_age)} ago"
        return f"seq {first} to {last}, published {_age(first_age)} to {_age(last_age)} ago"

    def as_text(self) -> str:
        by = ", ".join(f"{shorten(name, _MAX_NAME)} {share}" for name, share in self.samplers())
        return f"{self.span()}\nby {printable(by)}"

    def as_html(self) -> Markup:
        cells, samplers = self.cells, self.samplers()
        colors = dict(zip((name for name, _ in samplers), (*COLORS, GREY), strict=False))
        highest = max(cell.rows.total() / cell.segments for cell in cells)
        picture = element(
            "svg",
            *(_drawn(at, cell, highest, colors) for at, cell in enumerate(cells)),
            viewBox=f"0 0 {len(cells)} {_CELL_HEIGHT}",
            preserveAspectRatio="none",
            role="img",
            aria_label="segments, oldest first",
            style=f"display: block; width: {min(100, 4 * len(cells))}%; height: {_CELL_HEIGHT}px; "
            f"border-bottom: {_LINE}; margin-top: 0.5em",
        )
        names = _legend((f"{shorten(name, _MAX_NAME)} {share}", colors[name]) for name, share in samplers)
        return join([picture, names, note(self.span())])


def _age(seconds: float) -> str:
    return format_seconds(max(0.0, seconds))  # negative if a clock was set back


def _drawn(at: int, cell: Cell, highest: float, colors: dict[str, str]) -> Markup:
    bottom, parts, total = float(_CELL_HEIGHT), [], cell.rows.total()
    for sampler, rows in sorted(cell.rows.items()):
        height = _CELL_HEIGHT * rows / cell.segments / highest
        bottom -= height
        color = colors.get(sampler, GREY)
        place = {"x": at + 0.05, "y": f"{bottom:.2f}", "width": 0.9, "height": f"{height:.2f}"}
        parts.append(element("rect", **place, fill=color))
    (first, _), (last, age) = cell.first, cell.last
    size = f"{format_count(total, 'row')}, {format_bytes(cell.nbytes)}, {_age(age)} old"
    if cell.segments == 1:
        title = f"segment {first}: {size}, task {shorten(cell.task, 100) or 'of a writer'}"
    else:
        names = ", ".join(
            f"{shorten(name, _MAX_NAME)} {format_share(rows, total)}" for name, rows in cell.rows.items()
        )
        title = f"{format_count(cell.segments, 'segment')}, {first} to {last}: {size}, by {names}"
    return element("g", element("title", title), *parts)


Part = str | Facts | Table | Bar | Curves | Timeline


@dataclass(frozen=True, slots=True)
class Card:
    """The description of an object: its kind, perhaps its name, and its parts below each other."""

    title: str
    subtitle: str
    parts: Sequence[Part] = ()

    def as_text(self) -> str:
        head = [f"{self.title} {printable(self.subtitle)}"] if self.subtitle else []
        parts = (printable(part) if isinstance(part, str) else part.as_text() for part in self.parts)
        return "\n".join([*head, *parts])

    def as_html(self) -> Markup:
        subtitle = "opacity: 0.75; font-family: monospace; overflow-wrap: anywhere"
        head = element("b", self.title), " ", element("span", self.subtitle, style=subtitle)
        parts = (
            part if isinstance(part, Markup) else note(part) if isinstance(part, str) else part.as_html()
            for part in self.parts
        )
        style = f"{_WIDTH}; line-height: 1.45; font-size: var(--jp-content-font-size1, 14px)"
        return element("div", element("div", *head), *parts, style=style)


class Shown:
    """Base class of objects that show a card when they are printed, and in a notebook."""

    __slots__ = ()

    def _card(self) -> Card:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._card().as_text()

    def _repr_html_(self) -> str:
        return self._card().as_html()
