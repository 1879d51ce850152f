"""Shown: rows as a DataFrame whose tensors, bytes and text are pictures in a notebook."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

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

    def to_parquet(self, path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As pandas does it. Tensors are nested lists, of a fixed size where all have one shape.

        `import_parquet` and `ParquetRows` have them back as tensors. A complex number is a list of two.
        `export_parquet(cache, folder, rows=frame)` writes the rows of a large result from the cache.
        """
        plain, types = pd.DataFrame(self), dict[str, pa.DataType]()
        for name in [name for name in self.columns if plain[name].dtype.kind in "Oc"]:
            values = [_in_pairs(value) for value in plain[name].to_numpy()]
            if (found := _list_type(values)) is not None:
                types[name] = found
                plain[name] = pd.Series([_as_lists(value) for value in values], plain.index, object)
        if types and "schema" not in kwargs:
            if kwargs.get("index") is None and not self.index.equals(pd.RangeIndex(len(self))):
                kwargs["index"] = True  # a schema of ours would lose it
            others = pa.Schema.from_pandas(plain.drop(columns=list(types)), kwargs.get("index"))
            fields = {field.name: field for field in others} | {
                name: pa.field(name, types[name]) for name in types
            }
            order = [*map(str, plain.columns), *(name for name in others.names if name not in plain.columns)]
            kwargs["schema"] = pa.schema([fields[name] for name in order])
        return plain.to_parquet(path, *args, **kwargs)

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


def _in_pairs(value: Any) -> Any:
    """Complex numbers as pairs; anything else as it is."""
    if isinstance(value, np.ndarray | np.complexfloating) and value.dtype.kind == "c":
        return np.stack([value.real, value.imag], axis=-1)
    return value


def _list_type(values: Sequence[Any]) -> pa.DataType | None:
    """The Arrow type of some arrays; None: they are none, or none that one type holds."""
    arrays = [value for value in values if value is not None]
    if not arrays or not all(type(value) is np.ndarray and value.ndim for value in arrays):
        return None
    first = max(arrays, key=lambda value: value.size > 0)  # an empty list of SQL has lost its dtype
    if first.dtype.kind not in "biuf" or any(value.size and value.dtype != first.dtype for value in arrays):
        return None
    shapes = {value.shape for value in arrays}
    inner = {shape[1:] for shape in shapes}
    if len(inner) > 1:
        return None
    found = pa.from_numpy_dtype(first.dtype)
    sizes = first.shape if len(shapes) == 1 else (0, *first.shape[1:])
    for size in reversed(sizes):
        found = pa.list_(found, size or -1)  # Parquet has no lists of a fixed size of 0
    return found


def _as_lists(value: Any) -> Any:
    """An array as lists of arrays of one axis, which Arrow takes."""
    return [_as_lists(part) for part in value] if isinstance(value, np.ndarray) and value.ndim > 1 else value
