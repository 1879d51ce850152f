"""Expression: a pyarrow.compute expression over rows: the type that it gives, its values, and what fails.

Of a cache an expression reads columns of one number, text or time a row, the ids of a row, and annotations.
Must never: accept one whose result depends on anything but these values of one row, since it is remembered.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from arrowcache.arrow.dtype import dtype_of
from arrowcache.arrow.schema import RESERVED_NAMES, Binary, FieldType, Schema, String, Tensor, Timestamp
from arrowcache.os_errors import importing
from arrowcache.units import did_you_mean, shortened

if TYPE_CHECKING:
    from pyarrow.compute import Expression

REPLACE_IT = (
    "replace what it cannot take, as pyarrow.compute.if_else(divisor == 0, 1, divisor) does, or cast to a "
    "wider type"
)
"""Advice on rows that an expression cannot take. `if_else` computes both of its answers, so it cannot go
around a division."""

WHERE_EXCLUDED = "where"  # the argument of `Cache.exclude`
_PLAIN: tuple[Any, ...] = (37, "37")
_SEQ, _ROW, _AGE = RESERVED_NAMES
_IDS = {_SEQ: pa.int64(), _ROW: pa.int64(), _AGE: pa.float64()}
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')  # in the words of an expression


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


def packed(expression: Expression) -> bytes:
    """Return an expression as bytes: equal ones have the same."""
    _, (content,) = expression.__reduce__()
    return bytes(content)


def unpacked(content: bytes) -> Expression:
    """Return the expression that `packed` has made bytes of. Raises: pa.ArrowException: it has not."""
    with importing():
        import pyarrow.compute as pc

    unpack, _ = pc.scalar(True).__reduce__()
    return unpack(pa.py_buffer(content))


# over rows of a cache


def is_expression(value: object) -> bool:
    """True for an expression of pyarrow.compute. Who made one has imported it."""
    module = sys.modules.get("pyarrow._compute")
    return module is not None and isinstance(value, module.Expression)


def require_expression(
    expression: Expression, what: str, schema: Schema, annotations: Sequence[str]
) -> tuple[list[str], pa.DataType]:
    """Check an expression, by the types that its columns have.

    Args:
        what: "rows", "weights" or "where".
        annotations: the names that there are, or are to come.
    Returns: the names that it reads, at least one, and the type of its result.
    Raises: ValueError: it reads what there is not, or no scalar; it calls `random`, a function of the user,
        or one of several rows; or Arrow cannot evaluate it. The message says why.
    """
    text = _TEXT.sub('""', str(expression))
    for name in _refused_functions():
        if re.search(rf"(?<![\w.]){re.escape(name)}\(", text):
            raise ValueError(
                f"{what}={shown(expression)} calls {name}: an expression may call pyarrow's own functions "
                f"of one row, and not random, since its answer is remembered; {otherwise(what)}"
            )
    if "FieldPath(" in text:
        raise ValueError(
            f"{what}={shown(expression)} reads a column by its number: write pyarrow.compute.field(name)"
        )
    fields = {name: kind for name in schema if (kind := _arrow_type(schema[name])) is not None}
    types = {name: pa.float64() for name in annotations} | _IDS | fields
    result = _result_type(expression, what, types, schema)
    candidates = [name for name in types if name in str(expression)]
    names = []
    for name in candidates:
        try:
            others = [(other, types[other]) for other in candidates if other != name]
            evaluated(expression, pa.schema(others).empty_table())
        except pa.ArrowException:
            names.append(name)
    return names or [_ROW], result


def table_function(expression: Expression, schema: Schema) -> Callable[[dict[str, Any]], pa.Array]:
    """Return the function of columns that an expression is: it gives one value a row, perhaps null.

    An annotation that is missing is null.
    """

    def function(columns: dict[str, Any]) -> pa.Array:
        arrays = {name: _as_arrow(values, schema.get(name)) for name, values in columns.items()}
        found = evaluated(expression, pa.table(arrays)).combine_chunks()
        return found if isinstance(found, pa.Array) else pa.concat_arrays(found.chunks)

    return function


def _result_type(
    expression: Expression, what: str, types: dict[str, pa.DataType], schema: Schema
) -> pa.DataType:
    try:
        return type_of(expression, pa.schema([*types.items()]))
    except pa.ArrowException as error:
        missing = re.match(r"No match for FieldRef\.Name\((.*)\) in ", str(error), re.DOTALL)
        if missing is None:
            raise ValueError(f"{what}={shown(expression)} cannot be evaluated: {reason_of(error)}") from None
    name = missing[1].split(") in ")[0]
    if (kind := schema.get(name)) is not None:
        raise ValueError(
            f"{what}={shown(expression)} reads {name!r}, which is {kind}: an expression reads columns of "
            f"one number, text or time a row, and Arrow has no complex numbers; {otherwise(what, name)}"
        )
    others = did_you_mean(name, types)
    later = f"pass expect={name!r} if rows are to get it"
    if what == WHERE_EXCLUDED:
        later = "annotate a row first"
    raise ValueError(
        f"{what}={shown(expression)} reads {name!r}, neither a column nor an annotation of any row: "
        f"{others}there are {', '.join(types)}; {later}"
    )


def otherwise(what: str, name: str = "") -> str:
    """The way out for who needs more than an expression, perhaps to read a column."""
    if what == WHERE_EXCLUDED:
        return "exclude such rows by their ids; cache.include(where=...) ends a rule"
    found = f"of columns, which finds it as columns[{name!r}]" if name else "instead"
    return f"give a Python function {found}"


def _refused_functions() -> list[str]:
    """The functions that an expression may not call: of several rows, of the user's, and `random`."""
    import pyarrow.compute as pc

    return _refused(tuple(pc.function_registry().list_functions()))


@functools.lru_cache(maxsize=1)  # until the user registers another one
def _refused(names: tuple[str, ...]) -> list[str]:
    import pyarrow.compute as pc

    registry = pc.function_registry()  # `random` is of no row, so pyarrow.compute has another under its name
    own = {getattr(each, "__arrow_compute_function__", {}).get("name") for each in vars(pc).values()}
    return [
        name
        for name in names
        if name != "cast" and (name not in own or registry.get_function(name).kind != "scalar")
    ]


def _arrow_type(kind: FieldType) -> pa.DataType | None:
    """The type of a column in an expression, or None: it has none. Small floats are float32, exactly."""
    match kind:
        case Timestamp() | String() | Binary():
            return kind.arrow_type
        case Tensor(dtype, ()) if dtype_of(dtype).kind != "c":
            if dtype_of(dtype).kind == "f" and kind.numpy_dtype.itemsize < np.dtype("f4").itemsize:
                return pa.float32()
            return pa.bool_() if dtype == "bool" else pa.from_numpy_dtype(kind.numpy_dtype)
    return None


def _as_arrow(values: Any, kind: FieldType | None) -> pa.Array:
    if kind is None:  # ids have no NaN
        return pa.array(values, from_pandas=True)
    if isinstance(kind, Tensor) and (bits := dtype_of(kind.dtype).bits) is not None:
        values = bits.to_float(values)
    arrow_type = _arrow_type(kind)
    if arrow_type == pa.float32():
        values = values.astype(np.float32, copy=False)
    return pa.array(values, arrow_type)
