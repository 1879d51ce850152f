"""Text: aligned tables and bars for terminals, of which every `__str__` of several lines is made."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def printable(value: object) -> str:
    """Text with all that is not to be seen, or would move the rest, as escapes: line ends, controls."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, most: int) -> str:
    """At most so many characters, the last of them "…" if some are left out."""
    return text if len(text) <= most else text[: most - 1] + "…"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> str:
    """Rows in columns, two blanks between them; those named in `right` end where their head ends."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            " " * (width - _width(cell)) + cell if name in right else cell + " " * (width - _width(cell))
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def bar(share: float, width: int = 20) -> str:
    """A bar of so many characters, filled by a share in [0, 1] to an eighth of one."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0))
    full, rest = divmod(eighths, 8)
    return ("█" * full + _EIGHTHS[rest] * (full < width)).ljust(width)


def stacked(parts: Iterable[tuple[float, str]], whole: float, width: int) -> str:
    """A bar of so many characters: (amount, character) one after another, to half a character."""
    drawn, upto = "", 0.0
    for amount, character in parts:
        upto += amount
        drawn += character * (round(width * upto / whole) - len(drawn))
    return drawn[:width].ljust(width)


def _width(text: str) -> int:
    """Columns of a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )
