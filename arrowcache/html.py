"""HTML: the escaped pieces of which every `_repr_html_` is made.

No script and nothing from elsewhere; the style is inline, so that it meets no other output's. Text
takes the notebook's own color, lines and grounds JupyterLab's variables, with colors that are seen on
white and on black where those are not: a document of its own, another front end.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from arrowcache.text import printable

#: Of Okabe and Ito (2008): told apart by the color-blind, too; seen on white and on black.
BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY = (
    "#2f7fc1", "#e69f00", "#009e73", "#b66dbd", "#56b4e9", "#d55e00", "#c9b800", "#8c8c8c",
)  # fmt: skip
LINE = "var(--jp-border-color2, rgba(128, 128, 128, 0.35))"
_WIDTH = "max-width: 46em"


class Markup(str):
    """Text that is HTML already; all other is escaped where it becomes part of one."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """Any text, such as a user's or a file's name, so that it shows as itself."""
    return value if isinstance(value, Markup) else Markup(html.escape(printable(value)))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Parts one after another, each escaped unless it is Markup."""
    return Markup(escape(between).join(map(escape, parts)))


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """An element; `_` in an attribute's name is `-`, and one of None is left out."""
    return Markup(f"{empty_element(tag, **attributes)}{join(content)}</{tag}>")


def empty_element(tag: str, **attributes: object) -> Markup:
    """One without an end, such as an image."""
    shown = "".join(
        f' {name.replace("_", "-")}="{html.escape(printable(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{shown}>")


def card(title: str, subtitle: str, *parts: object) -> Markup:
    """What an object shows: its name, what it is of, and its parts below each other."""
    head = element(
        "div",
        element("b", title),
        " ",
        element("span", subtitle, style="opacity: 0.75; font-family: monospace; overflow-wrap: anywhere"),
    )
    style = f"{_WIDTH}; line-height: 1.45; font-size: var(--jp-content-font-size1, 14px)"
    return element("div", head, *parts, style=style)


def note(*content: object) -> Markup:
    """A line in small print."""
    return element("div", *content, style="font-size: 0.87em; opacity: 0.85; margin: 0.15em 0")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], right: Sequence[object] = ()) -> Markup:
    """A table; columns whose head is named in `right` are aligned to the right."""
    cell = f"padding: 0.15em 0.9em 0.15em 0; border: 0; border-bottom: 1px solid {LINE}"
    styles = [f"text-align: {'right' if name in right else 'left'}; {cell}" for name in head]
    headers = [element("th", name, style=style) for name, style in zip(head, styles, strict=True)]
    body = (
        element("tr", *(element("td", value, style=s) for value, s in zip(row, styles, strict=True)))
        for row in rows
    )
    style = "border-collapse: collapse; margin: 0.4em 0; font-size: 0.93em; border: 0"
    return element("table", element("thead", element("tr", *headers)), element("tbody", *body), style=style)


def facts(rows: Iterable[tuple[str, object]]) -> Markup:
    """Names and values, aligned, without lines."""
    cell = "text-align: left; padding: 0.05em 0.9em 0.05em 0; border: 0; vertical-align: top"
    lines = (
        element(
            "tr",
            element("td", name, style=f"{cell}; opacity: 0.75; white-space: nowrap"),
            element("td", value, style=cell),
            style="background: none",
        )
        for name, value in rows
    )
    return element("table", element("tbody", *lines), style="border-collapse: collapse; margin: 0.3em 0")


def bar(parts: Iterable[tuple[str, float, str, str]], whole: float) -> Markup:
    """A bar of colored parts, and below it what they are.

    Args:
        parts: (name, amount, amount as text, color); what is nothing is left out.
        whole: the amount of the bar's whole length; what is free of it stays empty.
    """
    shown = [part for part in parts if part[1] > 0]
    whole = max(whole, sum(amount for _, amount, _, _ in shown)) or 1
    pieces = (
        element(
            "div",
            title=f"{name} {text}",
            style=f"width: {100 * amount / whole:.3f}%; min-width: 2px; background: {color}",
        )
        for name, amount, text, color in shown
    )
    frame = f"display: flex; height: 0.9em; margin: 0.3em 0 0.1em; border: 1px solid {LINE}; {_WIDTH}"
    names = legend((f"{name} {text}", color) for name, _, text, color in shown)
    return join([element("div", *pieces, style=frame), names])


def legend(names: Iterable[tuple[str, str]]) -> Markup:
    """What colors stand for: (name, color)."""
    square = (
        "display: inline-block; width: 0.7em; height: 0.7em; margin-right: 0.35em; box-sizing: border-box"
    )
    entries = (
        element(
            "span",
            element("span", style=f"{square}; background: {color}; border: 1px solid {LINE}"),
            name,
            style="margin-right: 1.2em; white-space: nowrap",
        )
        for name, color in names
    )
    return note(*entries)


def page(title: str, body: Markup) -> str:
    """A document of its own, in the reader's choice of light or dark."""
    head = element("title", title) + Markup('<meta charset="utf-8">')
    style = "color-scheme: light dark; background: Canvas; color: CanvasText; font-family: sans-serif"
    return f"<!DOCTYPE html>\n<html><head>{head}</head>{element('body', body, style=style)}</html>\n"
