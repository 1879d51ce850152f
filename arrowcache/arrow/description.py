"""Description: a schema's columns as people read them, in a terminal and in a notebook. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from arrowcache import html, text
from arrowcache.arrow.schema import FieldType, Ragged, Tensor, Timestamp
from arrowcache.units import format_bytes, format_count

HEAD = ("column", "type", "dtype", "shape", "bytes a row")
_RIGHT = HEAD[-1:]
_MOST_OPEN = 20  # more columns than that are folded away in a notebook


def rows_of(fields: Mapping[str, FieldType]) -> list[tuple[str, ...]]:
    """A row of text for each column, under HEAD."""
    return [(name, type(kind).__name__, *_described(kind)) for name, kind in fields.items()]


def _described(kind: FieldType) -> tuple[str, str, str]:
    if isinstance(kind, Tensor):
        return kind.dtype, str(kind.shape), format_bytes(kind.row_bytes)
    if isinstance(kind, Timestamp):
        return kind.numpy_dtype.name, str(kind.shape), format_bytes(kind.row_bytes)
    if isinstance(kind, Ragged):
        shape = ", ".join(["any", *map(str, kind.inner_shape)])
        return kind.dtype, f"({shape})", f"{format_bytes(kind.item_bytes)} each"
    return "", "", "any"


def total(fields: Mapping[str, FieldType]) -> str:
    """One sentence: how many bytes a row has."""
    fixed = [kind.row_bytes for kind in fields.values() if isinstance(kind, Tensor | Timestamp)]
    variable = len(fields) - len(fixed)
    more = f", and what {format_count(variable, 'column')} of any length hold" if variable else ""
    return f"{format_count(len(fields), 'column')}, {format_bytes(sum(fixed))} a row{more}"


def as_text(fields: Mapping[str, FieldType]) -> str:
    """A table, and the total below it."""
    return f"{text.table(HEAD, rows_of(fields), _RIGHT)}\n{total(fields)}"


def as_html(fields: Mapping[str, FieldType]) -> html.Markup:
    """The same; many columns are folded away behind the total."""
    table = html.table(HEAD, rows_of(fields), _RIGHT)
    is_open = "" if len(fields) <= _MOST_OPEN else None
    summary = html.element("summary", total(fields), style="cursor: pointer")
    return html.element("details", summary, table, open=is_open, style="margin: 0.4em 0")
