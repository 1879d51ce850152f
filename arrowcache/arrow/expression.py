"""Expression: a pyarrow.compute expression over rows: the type that it gives, its values, and what fails."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from arrowcache.os_errors import importing
from arrowcache.units import shortened

if TYPE_CHECKING:
    from pyarrow.compute import Expression

REPLACE_IT = (
    "replace what it cannot take, as pyarrow.compute.if_else(divisor == 0, 1, divisor) does, or cast to a "
    "wider type"
)
"""Advice on rows that an expression cannot take. `if_else` computes both of its answers, so it cannot go
around a division."""

_PLAIN: tuple[Any, ...] = (37, "37")


def shown(expression: Expression) -> str:
    """Print an expression in one line, for messages."""
    return shortened(" ".join(str(expression).split()), 80)


def mentions(expression: Expression, name: str) -> bool:
    """True if a name is among the words of an expression: it may be a field that it reads."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(expression)) is not None


def reason_of(error: pa.ArrowException) -> str:
    """Return what Arrow says of an expression, in one line, and what to do about time zones.

    Raises: the error, if it says nothing of the expression: there is no memory, or a signal came.
    """
    if isinstance(error, MemoryError | pa.ArrowCancelled):
        raise error
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
    if "timezone" in reason and "without" in reason:
        reason += ": a Timestamp column is in UTC without a time zone, so write the constant so"
    return reason


def evaluated(expression: Expression, table: pa.Table) -> pa.ChunkedArray:
    """Return the value of each row of a table. Raises: pa.ArrowException: Arrow cannot evaluate it."""
    with importing():
        from pyarrow import acero

    plan = [
        acero.Declaration("table_source", acero.TableSourceNodeOptions(table)),
        acero.Declaration("project", acero.ProjectNodeOptions([expression], ["found"])),
    ]
    return acero.Declaration.from_sequence(plan).to_table(use_threads=False).column(0)


def type_of(expression: Expression, fields: pa.Schema) -> pa.DataType:
    """Return the type of the value of rows that have these fields.

    Arrow looks at constants such as a regular expression or a time zone only where there is a row. So a row
    of nulls is tried, and one of plain values, since the expression may replace a null by what fails.
    Raises: pa.ArrowException: Arrow can evaluate neither, nor any other row.
    """
    try:
        return evaluated(expression, _row_of([pa.nulls(1, field.type) for field in fields], fields)).type
    except pa.ArrowException:
        return evaluated(expression, _row_of([_plain(field.type) for field in fields], fields)).type


def _row_of(values: list[pa.Array], fields: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays(values, names=fields.names)


def _plain(kind: pa.DataType) -> pa.Array:
    for value in _PLAIN:
        with suppress(pa.ArrowException):
            return pa.array([value]).cast(kind)
    return pa.nulls(1, kind)
