"""Shown: rows as a DataFrame whose tensors, bytes and text are pictures in a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from arrowcache.arrow.schema import FieldType
from arrowcache.display import shorten
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.numbers import has_axes

_MOST_TEXT = 200
_SIZE = 96  # pixels a side of a picture in a cell


class Rows(pd.DataFrame):  # type: ignore[misc]  # pandas ships no type information
    """A DataFrame that shows tensors, bytes and text small in a notebook; else it is like any other."""

    _metadata = ["kinds"]  # noqa: RUF012  # pandas' own way to have an attribute passed on
    kinds: Mapping[str, FieldType]

    @property
    def _constructor(self) -> Callable[..., Rows]:
        return Rows

    def _repr_html_(self) -> str | None:
        kinds = getattr(self, "kinds", {})
        if not pd.get_option("display.notebook_repr_html"):
            return None
        shown = self.head(pd.get_option("display.max_rows") or len(self))
        labels = {"index": _escaped, "columns": _escaped}
        shown = shown.rename(**labels).rename_axis(**labels)
        formatters = [_formatter(kinds.get(name)) for name in self.columns]
        text: str = pd.DataFrame(shown).to_html(escape=False, formatters=formatters, border=0)
        if len(shown) < len(self):
            text += f"<p>{len(shown)} of {len(self)} rows</p>"
        return text


def _escaped(label: Any) -> str | None:
    return None if label is None else html.escape(str(label))


def _formatter(kind: FieldType | None) -> Callable[[Any], str]:
    """How the values of a column show in HTML; None: of one that the cache does not have, such as a renamed.

    What has axes, bytes and text are pictures, which are small however large the value is. What cannot be
    drawn, such as what a user has put there, says so: a table is never half a table.
    """

    def cell(value: Any) -> str:
        if not isinstance(value, np.ndarray | bytes | bytearray | str) and (
            value is None or not has_axes(kind)
        ):
            return html.escape(shorten(str(value), _MOST_TEXT))
        from arrowcache.explore.pictures import picture  # matplotlib's colours, for those who look

        try:
            return picture(value, kind, _SIZE)._repr_html_()
        except (ArrowCacheError, TypeError, ValueError) as error:
            return html.escape(shorten(f"cannot be drawn: {sentence_of(error)}", _MOST_TEXT))

    return cell
