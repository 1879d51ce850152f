"""Arrangement: where in a segment's file the buffers of its columns begin. Pure arithmetic.

A disk is read in pages of 4 KiB, so a row should meet as few of them as it can. There are two arrangements.

Packed: there is no gap between buffers, and padding in the record batch's header has the values of the widest
column begin at a page, or at a multiple of what its rows and a page have in common, which is as good.
Paged: so do the values of each wide column, after a gap. All other buffers follow the one before them.

What a page saves where rows are read one by one: half of what is read at 4 KiB, a third at 8 KiB, 6 percent
at 64 KiB, 0.4 percent at 1 MiB. Where rows and pages have less than 512 bytes in common, next to nothing:
such a column is not wide. Arrow, DuckDB, Polars and tensorflow-io read both. arrowcache 0.1.0 takes a file
with gaps for damaged, wherever they are, so only caches that it refuses have paged files: see layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arrowcache.arrow.schema import Binary, FixedType, Ragged, Schema, String

FILE_PAGE_BYTES = 4096  # of a paged file, on machines of larger pages, too
CACHE_LINE_BYTES = 64  # and more than any Arrow writer pads a buffer
_LEAST_COMMON_BYTES = 512
_WORD_BYTES = 8  # Arrow's own alignment

Span = tuple[int, int]
"""The begin of a buffer in the file, and its bytes."""


def needs_gaps(schema: Schema) -> bool:
    """True if a packed file would begin some wide column off a page: it has several wide columns."""
    widest, _ = widest_column(schema)
    return any(_is_wide(kind) for number, kind in enumerate(schema.fixed.values()) if number != widest)


def widest_column(schema: Schema) -> tuple[int, int]:
    """Return (physical number, bytes of a row) of the fixed-width column with the largest rows.

    The number is -1 if no column has a fixed width.
    """
    widths = [kind.row_bytes for kind in schema.fixed.values()]
    return (widths.index(max(widths)), max(widths)) if widths else (-1, 1)


def packed_alignment(width: int) -> int:
    """Return the alignment in bytes of the widest column's values in a packed file."""
    return max(CACHE_LINE_BYTES, math.gcd(FILE_PAGE_BYTES, width)) if width > _WORD_BYTES else _WORD_BYTES


def paged_alignments(schema: Schema) -> list[int]:
    """Return the alignment in bytes of each column's values in a paged file, in physical order."""
    fixed = [FILE_PAGE_BYTES if _is_wide(kind) else _WORD_BYTES for kind in schema.fixed.values()]
    return fixed + [_WORD_BYTES] * len(schema.variable)


def paged_buffers(schema: Schema) -> list[int]:
    """Return the alignment in bytes of each of Arrow's buffers, validity and offsets included."""
    alignments = []
    kinds = [*schema.fixed.values(), *schema.variable.values()]
    for kind, alignment in zip(kinds, paged_alignments(schema), strict=True):
        if isinstance(kind, String | Binary):
            before = 2  # validity, offsets
        elif isinstance(kind, Ragged) or kind.is_list:
            before = 3  # and the validity of what the lists hold
        else:
            before = 1
        alignments += [_WORD_BYTES] * before + [alignment]
    return alignments


def is_packed(columns: Sequence[Sequence[Span]], stop: int) -> bool:
    """True if buffers follow one another without a gap, the last one up to `stop`.

    Args:
        columns: the buffers of each column, its values last, in physical order. Empty buffers are ignored.
    """
    return _follow(((*span, _WORD_BYTES) for spans in columns for span in spans), stop)


def is_paged(schema: Schema, columns: Sequence[Sequence[Span]], stop: int) -> bool:
    """True if buffers follow one another with the gaps of a paged file, and no others."""
    alignments = zip(columns, paged_alignments(schema), strict=True)
    return _follow(
        (
            (*span, alignment if number == len(spans) - 1 else _WORD_BYTES)
            for spans, alignment in alignments
            for number, span in enumerate(spans)
        ),
        stop,
    )


def _is_wide(kind: FixedType) -> bool:
    width = kind.row_bytes
    return width >= FILE_PAGE_BYTES and math.gcd(FILE_PAGE_BYTES, width) >= _LEAST_COMMON_BYTES


def _follow(spans: Iterable[tuple[int, int, int]], stop: int) -> bool:
    """True if each (start, bytes, alignment) begins at the next such multiple and all end at `stop`."""
    end = None
    for start, size, alignment in spans:
        if size:
            if start % alignment or (end is not None and start != end + -end % alignment):
                return False
            end = start + size + -size % _WORD_BYTES
    return end is None or end == stop
