"""Printing: what commands print: for a person where that is a terminal, for a program elsewhere.

In a terminal a table has lines and colours and fits the window; where the window is too narrow for it, it is
a list, a line a cell. Elsewhere it is tab-separated, a header line first, nothing shortened. A missing value
is empty. --json is JSON on both.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arrowcache.display import printable

_SHOWN_ELEMENTS = 6
_MIN_CELL = 12  # characters that a longer cell can be broken into, and still be read


def write(text: str) -> None:
    """A line on stdout, as it is.

    Raises: BrokenPipeError: nobody reads on. OSError: it cannot be written; says that it is the output.
    """
    try:
        sys.stdout.write(f"{text}\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "the output") from None


def write_json(value: Any) -> None:
    write(json.dumps(to_json(value), indent=1, allow_nan=False))


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; cells are shown by `to_text`."""
    texts = [[to_text(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in [list(columns), *texts]:
            write("\t".join(_one_line(cell) for cell in row))
        return
    console = Console()
    shown = [[printable(cell) for cell in row] for row in ([str(name) for name in columns], *texts)]
    if not _fits(shown, console.width):
        _print_list(console, shown)
        return
    table = Table()
    for name in shown[0]:
        table.add_column(Text(name), overflow="fold")
    for row in shown[1:]:
        table.add_row(*map(Text, row))
    console.print(table)


def _fits(table: Sequence[Sequence[str]], width: int) -> bool:
    """Tell if a table, its head first, can still be read where it is drawn so many characters wide."""
    widths = [min(_MIN_CELL, max(map(len, column))) for column in zip(*table, strict=True)]
    return sum(widths) + 3 * len(widths) + 1 <= width  # as rich draws a table


def _print_list(console: Console, table: list[list[str]]) -> None:
    columns, *rows = table
    for number, row in enumerate(rows):
        if number:
            console.print()
        for name, cell in zip(columns, row, strict=True):
            console.print(Text.assemble((name, "bold"), f": {cell}"), overflow="fold")


def write_frame(frame: Any, as_json: bool) -> None:
    """A pandas DataFrame, without its index unless that has a name."""
    if frame.index.name is not None:
        frame = frame.reset_index()
    columns = [str(name) for name in frame.columns]
    has_floats = [dtype.kind == "f" for dtype in frame.dtypes]
    rows = [
        [_present(cell, of_floats) for cell, of_floats in zip(row, has_floats, strict=True)]
        for row in frame.itertuples(index=False, name=None)
    ]
    if as_json:
        write_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        write_table(columns, rows)


def _present(cell: Any, of_floats: bool) -> Any:
    """None for what pandas, not imported here, has in its place: NA, NaT, and NaN in a column of others."""
    is_nan = not of_floats and isinstance(cell, float) and math.isnan(cell)
    return None if is_nan or type(cell).__name__ in ("NAType", "NaTType") else cell


def to_json(value: Any) -> Any:
    """A value for JSON: tensors are lists, bytes base64, times ISO 8601, and what is not finite is null."""
    match value:
        case None | bool() | str() | int():
            return value
        case float() | np.floating():
            return float(value) if math.isfinite(value) else None
        case bytes() | bytearray():
            return base64.b64encode(value).decode()
        case dict():
            return {str(name): to_json(item) for name, item in value.items()}
        case complex() | np.complexfloating():
            return [to_json(value.real), to_json(value.imag)]
        case np.datetime64() | np.timedelta64():
            return str(value)
        case np.generic():
            return to_json(value.item())
        case np.ma.MaskedArray():
            return to_json(value.tolist())  # None for what is missing
        case np.ndarray():
            return [to_json(item) for item in value]
        case list() | tuple():
            return [to_json(item) for item in value]
        case dt.datetime() | dt.date():
            return value.isoformat()
    return str(value)


def to_text(value: object) -> str:
    """A cell: a large tensor shows its dtype, its shape and where its values begin; a list all its items."""
    if value is None:
        return ""
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return ", ".join(map(to_text, value))
    if isinstance(value, np.ndarray) and value.ndim:
        shown = " ".join(to_text(item) for item in value.reshape(-1)[:_SHOWN_ELEMENTS])
        more = " ..." if value.size > _SHOWN_ELEMENTS else ""
        return f"{value.dtype} {list(value.shape)}: {shown}{more}"
    if isinstance(value, float | np.floating):
        return f"{value:.6g}"
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return str(value)


def _one_line(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
