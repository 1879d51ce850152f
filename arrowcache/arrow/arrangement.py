"""Arrangement: where in a segment's file the buffers of its columns begin. Pure arithmetic.

A disk is read in pages of 4 KiB, so a row should meet as few of them as it can. The values of a column of
fixed width begin at a multiple of the largest power of two that divides both a row and a page, at a cache
line at least, after a gap of zeros. Those of rows of 8 bytes or fewer, and all other buffers, follow at once.

What that saves where rows are read one by one: half of what is read at 4 KiB, a third at 8 KiB, 6 percent at
64 KiB, 0.4 percent at 1 MiB. Arrow, DuckDB, Polars and tensorflow-io read files with gaps as any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arrowcache.arrow.schema import Binary, FixedType, Ragged, Schema, String

FILE_PAGE_BYTES = 4096  # on machines of larger pages, too
CACHE_LINE_BYTES = 64  # and more than any Arrow writer pads a buffer
_WORD_BYTES = 8  # Arrow's own alignment

Span = tuple[int, int]
"""The begin of a buffer in the file, and its bytes."""


def alignments_of(schema: Schema) -> list[int]:
    """Return the alignment in bytes of each column's values, in physical order."""
    return [*map(_alignment, schema.fixed.values())] + [_WORD_BYTES] * len(schema.variable)


def buffer_alignments(schema: Schema) -> list[int]:
    """Return the alignment in bytes of each of Arrow's buffers, validity and offsets included."""
    alignments = []
    kinds = [*schema.fixed.values(), *schema.variable.values()]
    for kind, alignment in zip(kinds, alignments_of(schema), strict=True):
        if isinstance(kind, String | Binary):
            before = 2  # validity, offsets
        elif isinstance(kind, Ragged) or kind.is_list:
            before = 3  # and the validity of what the lists hold
        else:
            before = 1
        alignments += [_WORD_BYTES] * before + [alignment]
    return alignments


def is_arranged(schema: Schema, columns: Sequence[Sequence[Span]], stop: int) -> bool:
    """True if buffers follow one another up to `stop`, with the gaps that alignments need and no others.

    Args:
        columns: the buffers of each column, its values last, in physical order. Empty buffers are ignored.
    """
    end = None
    for spans, alignment in zip(columns, alignments_of(schema), strict=True):
        for number, (start, size) in enumerate(spans):
            unit = alignment if number == len(spans) - 1 else _WORD_BYTES
            if size:
                if start % unit or (end is not None and start != end + -end % unit):
                    return False
                end = start + size + -size % _WORD_BYTES
    return end is None or end == stop


def _alignment(kind: FixedType) -> int:
    width = kind.row_bytes
    return max(CACHE_LINE_BYTES, math.gcd(FILE_PAGE_BYTES, width)) if width > _WORD_BYTES else _WORD_BYTES
