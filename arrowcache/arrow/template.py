"""Template: recognizes the layout of a file by comparing bytes, without parsing it again.

All full segments of a cache have the same layout, and so does everything that `read_structure`
looks at: headers, footer and offsets of tensors. A template is that part of one file which
passed the complete check: every byte but the values of its columns and the digits of their
checksums. Another file of as many bytes and rows in which all those bytes are equal would pass
with the same `Layout`; for any other file a template says nothing.

That needs a file whose headers do not reach into its values or digits, which a crafted file's
might. So a template is made only of a file that this Arrow would write bit by bit like that:
its record batch is written again, by reference, and compared. Files of another writer or with
variable-length columns, whose offsets are data, have no template.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from arrowcache.arrow.schema import Schema
from arrowcache.arrow.segment import Layout, rewrite
from arrowcache.limits import Limits
from arrowcache.native.maps import FileKind

_MOST_SEEN = 64


class Template(NamedTuple):
    """The bytes that files of one layout have in common.

    `kind` is of the files that have this layout, if they are of as many rows.
    """

    layout: Layout
    kind: FileKind


def make_template(file: pa.Buffer, schema: Schema, layout: Layout) -> Template | None:
    """The template of a file that passed `read_structure` with `layout`, or None.

    Args:
        file: the whole file, mapped; nothing of it is kept.
    """
    if schema.variable:
        return None
    values = {
        start: layout.rows * kind.row_bytes
        for start, kind in zip(layout.fixed, schema.fixed.values(), strict=True)
    }
    if file.size - sum(values.values()) > Limits.current.template_bytes:
        return None
    pieces, checksums = rewrite(file, schema)
    parts: list[tuple[int, bytes]] = []
    position = 0
    for piece in pieces:
        if position not in values:
            if parts and parts[-1][0] + len(parts[-1][1]) == position:
                parts[-1] = (parts[-1][0], parts[-1][1] + bytes(piece))
            else:
                parts.append((position, bytes(piece)))
        elif values.pop(position) != piece.nbytes:
            return None
        position += piece.nbytes
    same = all(bytes(memoryview(file)[at : at + len(part)]) == part for at, part in parts)
    if values or position != file.size or not same or not checksums:
        return None
    start, footer = parts.pop()
    if footer.count(checksums) != 1:
        return None
    at = footer.index(checksums)
    end = at + len(checksums)
    return Template(layout, FileKind(file.size, [*parts, (start, footer[:at]), (start + end, footer[end:])]))


class KnownLayouts:
    """The templates of the layouts that are met most, bounded in number. Not thread-safe."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._templates: dict[tuple[int, int], Template] = {}  # by (bytes, rows), last used last
        self._seen: dict[tuple[int, int], None] = {}  # met once, oldest first: many never come again

    def find(self, nbytes: int, rows: int) -> Template | None:
        """Return the template for files of this length and number of rows, or None.

        Without one, a file must be checked completely, like a file of another kind.
        """
        template = self._templates.pop((nbytes, rows), None)
        if template is not None:
            self._templates[nbytes, rows] = template
        return template

    def learn(self, file: pa.Buffer, layout: Layout) -> None:
        """Remember the layout of a mapped file that was checked the complete way."""
        key = file.size, layout.rows
        if key in self._templates:
            return
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            return
        del self._seen[key]
        template = make_template(file, self._schema, layout)
        if template is not None:
            self._templates[key] = template
            if len(self._templates) > Limits.current.templates:
                del self._templates[next(iter(self._templates))]
