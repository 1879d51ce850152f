"""Values: a batch of a column whose rows differ in length: the values, and the form that a user gets.

Ragged columns stay arrays; text and bytes become lists of Python objects, a copy each. Pure.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Ragged, String
from arrowcache.errors import CorruptSegmentError


class Values(NamedTuple):
    """Gathered values of a variable-length column: row i is data[offsets[i]:offsets[i + 1]].

    `offsets` counts entries along the ragged axis, (rows + 1,) int64; `data` is a copy:
    (entries, *inner_shape) for a ragged column, uint8 for text and bytes.
    """

    data: NDArray[Any]
    offsets: NDArray[np.int64]


#: One column of a batch.
ColumnData = NDArray[Any] | list[Any] | Values


def column_bytes(values: ColumnData) -> int:
    """Return the bytes of the values of one column, without offsets."""
    if isinstance(values, Values):
        return values.data.nbytes
    if isinstance(values, np.ndarray):
        return values.nbytes
    return sum(map(len, values))


def bytes_of(values: Values) -> list[bytes]:
    """Return each value of a one-dimensional column as bytes: copies."""
    data, ends = values.data.tobytes(), values.offsets.tolist()
    return [data[start:stop] for start, stop in itertools.pairwise(ends)]


def to_column(kind: object, values: Values) -> ColumnData:
    """Return a column of this type in its form for users: text as str, binary as bytes, ragged as it is.

    Raises: CorruptSegmentError: a text is not UTF-8.
    """
    if isinstance(kind, Ragged):
        return values
    pieces = bytes_of(values)
    if not isinstance(kind, String):
        return pieces
    try:
        return [piece.decode() for piece in pieces]
    except UnicodeDecodeError as error:
        raise CorruptSegmentError(
            f"a text is not valid UTF-8, so its bytes were altered ({error}): run cache.verify()"
        ) from None
