"""ParquetRows: random rows of a Parquet dataset on any store.

Parquet is read by row groups: the requested columns of each drawn group, their pieces joined into few
reads, and nothing else. All footers are read when the source is made, so that a schema that drifts
and a missing column are errors then.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import NativeFile

from arrowcache import linux
from arrowcache.arrow.expression import REPLACE_IT, reason_of, shown, type_of
from arrowcache.arrow.foreign import kind_of, plain, plain_type, require_fields, values_of
from arrowcache.arrow.schema import FieldType, Schema, Tensor, Timestamp
from arrowcache.arrow.segment import Form, row_bytes
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.limits import Limits
from arrowcache.pickling import pickled
from arrowcache.sampling.reads import Read, Rows, at_once
from arrowcache.sampling.retries import Retries, in_place_of, is_of_decoder, mark_permanent, tally
from arrowcache.sampling.samples import Fault, made_or_fault
from arrowcache.sampling.sources.object_store import (
    URI,
    Handles,
    ListedFile,
    ObjectStore,
    Once,
    Unopened,
    locate,
    read_at,
)
from arrowcache.sampling.sources.source import Choice, Source, of_task, shuffle_of
from arrowcache.units import format_count, parse_count

if TYPE_CHECKING:
    import pyarrow.dataset as pads

_SUFFIXES = (".parquet", ".parq", ".pq")
_MAX_OPEN = 128  # files, with their footers
_READ_BYTES = 8 << 20  # of the rows of a read
_FOOTER_BYTES = 64 << 10
_GAP_BYTES, _PIECE_BYTES = 8 << 10, 16 << 20  # between columns that one request gets; of a request
_PAD_BYTES = 100  # that a column may have more than its footer says, as old writers had it
_MAX_EMPTY = 1000  # row groups in a row of which the filter keeps nothing
_VARIABLE_SHARE = 2  # of a segment, that rows of variable length fill, as far as footers tell
_TEXT_BYTES = 32  # of a text, where the file has less: it may be there once for many rows
_SHARING = {"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"}  # encodings of equal texts, once
_DICTIONARY_BYTES = 1 << 20  # up to which writers put equal texts there once
_STATISTICS_BYTES = 4096  # of a text, above which pyarrow writes no statistics


class _RowGroup(NamedTuple):
    """A row group: the number of its file, its number in the file, its rows, and about their bytes.

    Or every `parts`-th row of one that no segment holds, from row `part` on.
    """

    file: int
    number: int
    rows: int
    nbytes: int
    part: int = 0
    parts: int = 1


class _DrawnRows(NamedTuple):
    """The columns of a row group, and the numbers of the rows that were drawn from them."""

    columns: dict[str, NDArray[Any] | pa.Array]
    rows: NDArray[np.int64]


class _Empty:
    """The numbers of the drawn row groups of which the filter kept no row.

    Threads share it: row groups are read in any order, and some twice.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()

    def note(self, number: int) -> int:
        """Note a row group, and return how many in a row are empty, with it."""
        self._numbers.add(number)
        first = last = number
        while first - 1 in self._numbers:
            first -= 1
        while last + 1 in self._numbers:
            last += 1
        return last - first + 1


class _SharedGroup:
    """Rows drawn from a row group, for reads of pieces of them, by the first row of each.

    So of large row groups fewer are read at a time.
    """

    def __init__(self, draw: Callable[[], _DrawnRows], pieces: Iterable[int]) -> None:
        self._draw, self._pieces, self._once = draw, set(pieces), Once[_DrawnRows]()

    def get(self) -> _DrawnRows:
        return self._once.get(self._draw, lambda _: bool(self._pieces))

    def leave(self, piece: int) -> None:
        """Note that a read is done; after the last one nothing is kept. Idempotent."""
        self._pieces.discard(piece)
        if not self._pieces:
            self._once.thing = None


class ParquetRows(Source):
    """Draws row groups at random, and rows of each, such that every row is equally likely.

    Args:
        uri: a file, a folder with all below it, or several of either, on one store.
        columns: names of the columns. None means all.
        filter: a pyarrow.compute expression: only rows for which it is true. Row groups whose statistics
            rule it out are never read. If it keeps many rows of some row groups and few of others, a
            segment that holds less than a row group has somewhat more of the latter.
        rows_per_group: number of rows of each drawn row group, before the filter. None means all of
            them, in random order, which reads each byte once, and makes neighbours in the file neighbours in
            the cache. A row group is read as a whole anyway.
        passes: number of times that each row is drawn, in another order each time; then the pool ends. As
            with `Items`, that holds over all pools of one name and seed on a cache, however they end, and
            other files, another filter or another form of segments are refused. A task has whole row groups,
            before the filter, as many as fit: segments may be less than full. A row group that no segment
            holds is read once for each of its parts. None means rows at random, without end.
        schema: types of the columns, where the files do not determine them: `{"x": Tensor("float32",
            (64, 64))}` of lists that all have 4096 values. Fields that it lacks are left out.
        fill: name -> the value in place of nulls of that column. Without it a null is a SchemaError.
        filesystem: of pyarrow.fs or fsspec; the URIs are paths on it. None means the URI's own.
        retries: number of further attempts at a read before its error is raised.
    Raises: FileNotFoundError, PermissionError, OSError: the store. SchemaError: a field that drifts between
        files, that no column can hold, or that is not there; a `fill` or `filter` that does not fit; names
        the file. SamplerError: a file that is no Parquet. ValueError: no row, or the filter leaves no row
        group; an argument that does not fit.

    A pool reads as many row groups at a time as it has `reads`, of large ones fewer.
    Whole row groups come at once, so a pool's first segments are full ones; not with rows_per_group, where a
    full segment takes many reads.

    Numbers, bool, text, bytes, timestamps and dates become scalars, lists of a fixed size tensors, other
    lists ragged. Names of a partitioned folder's parts are not columns.
    """

    hedge = True

    _shares: list[list[_RowGroup]] | None = None  # of the tasks of a pass, in the order of its places
    _starts: NDArray[np.int64] | None = None

    def __init__(
        self,
        uri: URI | Iterable[URI],
        columns: Sequence[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002  # its name in pyarrow
        *,
        rows_per_group: int | None = None,
        passes: int | None = None,
        schema: Schema | Mapping[str, FieldType] | None = None,
        fill: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        retries: int | Retries = 4,
    ) -> None:
        if filter is not None and not isinstance(filter, pc.Expression):
            raise TypeError(
                f"filter must be an expression, such as pyarrow.compute.field('x') > 0, not {filter!r}"
            )
        if isinstance(columns, str) or columns == []:
            raise TypeError(f"columns must be a list of names, at least one, not {columns!r}")
        self._rows_per_group = (
            None if rows_per_group is None else parse_count(rows_per_group, "rows_per_group")
        )
        self.ramp = rows_per_group is not None
        self._passes = None if passes is None else parse_count(passes, "passes")
        self.is_divided = passes is not None
        if self.ramp and self.is_divided:
            raise ValueError("passes= draws all rows of each row group: leave rows_per_group= out")
        self._filter = filter
        self._plans_exactly = filter is None and not self.is_divided
        self._fill = dict(fill or {})
        self._kept: Handles[_Open] = Handles(_MAX_OPEN)
        self._store, paths = locate(uri, filesystem, retries)
        self._files = [file for path in paths for file in self._store.find(path, _SUFFIXES)]
        if self.is_divided:  # each once, whatever names it
            self._files = sorted(set(self._files))
        sized = list(schema or columns or []) if self.is_divided else None
        footers = at_once(partial(self._footer, sized), self._files)
        self.schema = _schema(self._names(), [fields for fields, _ in footers], columns, schema)
        if unknown := [name for name in self._fill if name not in self.schema]:
            raise ValueError(f"fill has {', '.join(map(repr, unknown))}, which is no column: {self.schema!r}")
        for file, (fields, _) in zip(self._names(), footers, strict=True):
            _require_fill(file, fields, self._fill)
        self._piece_rows = max(1, Limits.current.parquet_bytes // row_bytes(self.schema))
        is_variable = bool(self.schema.variable)
        self._groups = [
            _RowGroup(file, number, rows, max(rows * row_bytes(self.schema), nbytes * is_variable))
            for file, (_, groups) in enumerate(footers)
            for number, rows, nbytes in groups
            if rows
        ]
        if not self._groups:
            what = "no rows" if filter is None else f"no row group that may have rows with {filter}"
            raise ValueError(f"{self._names()[0]} and what else was named: there is {what}")
        taken = [self._taken(group) for group in self._groups]
        # A row group is drawn the more often, the smaller the share of it that is taken each time.
        self._choice = Choice([group.rows / part for group, part in zip(self._groups, taken, strict=True)])
        # The first by its rows: see `_parts`. If all give the same number, a cut-off rest is even.
        self._first = Choice([group.rows for group in self._groups]) if len(set(taken)) > 1 else None

    def __repr__(self) -> str:
        rows = sum(group.rows for group in self._groups)
        return (
            f"ParquetRows({self._names()[0]!r} and {format_count(len(self._files) - 1, 'other file')}, "
            f"{format_count(rows, 'row')}, {', '.join(self.schema)})"
        )

    def fitted(self, form: Form) -> ParquetRows:
        """Return this source; if it is divided, by segments of a form: each task has as much as one holds."""
        if self._passes is None:
            return self
        is_variable = bool(form.schema.variable)
        most = form.segment_bytes // _VARIABLE_SHARE if is_variable else form.full_rows

        def size(group: _RowGroup) -> int:
            return max(group.nbytes * is_variable, -(-group.rows * most // form.full_rows))

        shares: list[list[_RowGroup]] = []
        room = 0
        for number in shuffle_of(len(self._groups), np.random.SeedSequence(0))(0, len(self._groups)).tolist():
            whole = self._groups[number]
            parts = min(whole.rows, math.ceil(size(whole) / most))
            for part in range(parts):
                rows = len(range(part, whole.rows, parts))
                group = whole._replace(rows=rows, nbytes=whole.nbytes // parts, part=part, parts=parts)
                if not shares or size(group) > room:
                    shares.append([])
                    room = most
                shares[-1].append(group)
                room -= size(group)
        fitted = copy.copy(self)
        fitted._shares, fitted._starts = shares, np.arange(len(shares) + 1)
        fitted.tasks = self._passes * len(shares)
        known = [[(*self._files[group.file], *group[1:]) for group in share] for share in shares]
        digest = hashlib.blake2b(
            repr(known).encode() + pickled(self._filter, "the filter {!r}"), digest_size=8
        )
        fitted.division = (
            f"{format_count(sum(group.rows for group in self._groups), 'row')} of "
            f"{format_count(len(self._files), 'file')} in {format_count(len(shares), 'segment')}, and files, "
            f"filter and segments with the digest {digest.hexdigest()}"
        )
        return fitted

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        """Draw rows, some of one row group at a time, in random order."""
        empty = _Empty()
        for number, (group, taken) in enumerate(self._parts(rng)):
            drawn = made_or_fault(partial(self._drawn, rng, group, taken, partial(empty.note, number)))
            if isinstance(drawn, Fault):
                yield drawn
                continue
            for first in range(0, len(drawn.rows), self._piece_rows):
                yield self._piece(group, drawn, first, first + self._piece_rows)

    def plan_reads(self, rng: np.random.Generator, rows: int) -> Iterator[Read]:
        """Yield reads of row groups that give so many rows together; without end if there is a filter.

        If it is divided, of those of the task, whatever they give.
        """
        empty = _Empty()
        for number, (group, taken) in enumerate(self._parts(rng)):
            if self._plans_exactly:
                taken = min(taken, rows)
                rows -= taken
            # A number, and no generator of its own: what is tried again draws the same.
            seed, note = int(rng.integers(1 << 63)), partial(empty.note, number)
            draw = partial(self._drawn_anew, seed, group, taken, note)
            most = max(1, _READ_BYTES // max(1, group.nbytes // group.rows))
            firsts = range(0, taken, most)
            once = _SharedGroup(draw, firsts)
            for first in firsts:
                yield partial(self._read_piece, once, group, first, first + most)
            if not rows:
                return

    def close(self) -> None:
        self._kept.close()

    def _taken(self, group: _RowGroup) -> int:
        return group.rows if self._rows_per_group is None else min(self._rows_per_group, group.rows)

    def _parts(self, rng: np.random.Generator) -> Iterator[tuple[_RowGroup, int]]:
        """Yield row groups, and the number of rows of each, before the filter.

        A segment may be full before the first row group ends. If this group were drawn like the others, rows
        of small row groups would come more often. So it is begun at a random place, as if the draws had gone
        on for ever before.
        """
        if self.is_divided:
            shares = self._shares or [[group] for group in self._groups]
            for number in of_task(rng, len(shares), self._starts).tolist():
                yield from ((group, group.rows) for group in shares[number])
            return
        if self._first is not None:
            group = self._groups[self._first.draw(rng)]
            yield group, int(rng.integers(self._taken(group))) + 1
        while True:
            group = self._groups[self._choice.draw(rng)]
            yield group, self._taken(group)

    def _draw(self, rng: np.random.Generator, group: _RowGroup, taken: int, found: int) -> NDArray[np.int64]:
        """Draw from the rows that a filter left, each as likely as it would be without the filter."""
        if self.is_divided:
            return rng.permutation(np.arange(group.part, found, group.parts))
        if found != group.rows:
            taken = int(rng.hypergeometric(found, group.rows - found, taken))
        if taken == found:
            return rng.permutation(found)
        return rng.choice(found, taken, replace=False)

    def _drawn(
        self, rng: np.random.Generator, group: _RowGroup, taken: int, note_empty: Callable[[], int]
    ) -> _DrawnRows:
        """Read a row group, and draw from it. Raises: SamplerError: the filter keeps nothing, ever again."""
        table = self._read(group)
        tally.fetched_bytes += group.nbytes * group.parts
        if not table.num_rows and not self.is_divided and (count := note_empty()) >= _MAX_EMPTY:
            raise mark_permanent(
                SamplerError(
                    f"{self._names()[group.file]}: one of {format_count(count, 'row group')} in a row of "
                    f"which the filter {self._filter} keeps no row; use one that keeps more"
                )
            )
        rows = self._draw(rng, group, taken, table.num_rows)
        with self._naming(group):
            return _DrawnRows({name: self._column(name, table.column(name)) for name in self.schema}, rows)

    def _drawn_anew(
        self, seed: int, group: _RowGroup, taken: int, note_empty: Callable[[], int]
    ) -> _DrawnRows:
        return self._drawn(np.random.default_rng(seed), group, taken, note_empty)

    def _read_piece(self, once: _SharedGroup, group: _RowGroup, first: int, last: int) -> Rows:
        rows = self._piece(group, once.get(), first, last)
        once.leave(first)
        return rows

    def _piece(self, group: _RowGroup, drawn: _DrawnRows, first: int, last: int) -> Rows:
        """Return some of the rows that were drawn, in their order."""
        rows, piece = Rows(), drawn.rows[first:last]
        with self._naming(group):
            for name, column in drawn.columns.items():
                if isinstance(column, np.ndarray):
                    rows[name] = np.take(column, piece, axis=0)
                else:
                    rows[name] = values_of(name, column.take(pa.array(piece)), self.schema[name])
        return rows

    @contextmanager
    def _naming(self, group: _RowGroup) -> Iterator[None]:
        """Name the file in the error of a value."""
        try:
            yield
        except (SchemaError, pa.ArrowException) as error:
            raise SchemaError(f"{self._names()[group.file]}: {error}") from None

    def _column(self, name: str, chunks: pa.ChunkedArray) -> NDArray[Any] | pa.Array:
        """Return a fixed-width column as an array, without a copy if possible; any other unchanged."""
        column, kind = plain(_joined(chunks)), self.schema[name]
        if name in self._fill and column.null_count:
            column = pc.fill_null(column, self._fill[name])
        if isinstance(kind, Tensor | Timestamp):
            array: NDArray[Any] = values_of(name, column, kind)
            return array
        return column

    def _names(self) -> list[str]:
        return [self._store.name(file.path) for file in self._files]

    def _footer(self, sized: Sequence[str] | None, file: ListedFile) -> _Footer:
        try:
            return self._store.run(lambda: _footer(self._store, file, self._filter, sized), file.path)
        except pa.ArrowException as error:
            raise self._damaged(file, error) from None

    def _read(self, group: _RowGroup) -> pa.Table:
        """Read a row group of an open file; a file that failed is opened again."""
        file = self._files[group.file]

        def make() -> _Open:
            return _Open(self._store, file, list(self.schema), self._filter)

        def read() -> pa.Table:
            with self._kept.use(group.file, make) as opened:
                if opened.part_rows(group) != group.rows:
                    raise mark_permanent(
                        SamplerError(
                            f"{self._store.name(file.path)}: has changed since ParquetRows was made: it has "
                            "other row groups; make ParquetRows anew, and write new files beside those that "
                            "are read"
                        )
                    )
                return opened.read(group.number)

        try:
            return self._store.run(read, file.path)
        except pa.ArrowException as error:
            raise self._damaged(file, error, group) from None
        except OSError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and is_of_decoder(cause):
                raise self._damaged(file, cause, group) from None
            raise

    def _damaged(self, file: ListedFile, error: Exception, group: _RowGroup | None = None) -> SamplerError:
        where = "" if group is None else f"row group {group.number}: "
        why = self._store.other_format(file.path, "Parquet")
        if not why:
            why = where + " ".join(str(error).split()) + "; get the file anew, or leave it out"
        name = self._store.name(file.path)
        return in_place_of(error, SamplerError(f"{name}: cannot be read as Parquet: {why}"))


_Footer = tuple[pa.Schema, list[tuple[int, int, int]]]
"""The needed part of a file's footer: its fields; number, rows and bytes of row groups to draw from."""


def _footer(
    store: ObjectStore, file: ListedFile, condition: pc.Expression | None, sized: Sequence[str] | None
) -> _Footer:
    import pyarrow.dataset as pads  # which imports pandas; workers do not need it

    fragment = pads.ParquetFileFormat().make_fragment(file.path, store.filesystem, file_size=file.nbytes)
    fragment.ensure_complete_metadata()
    fields = fragment.physical_schema
    if condition is not None:
        try:
            _filtered(fields.empty_table(), condition)  # `subset` accepts other objects, too
            type_of(condition, pa.schema([(each.name, plain_type(each.type)) for each in fields]))
        except pa.ArrowException as error:
            raise SchemaError(
                f"{store.name(file.path)}: the filter {shown(condition)} does not fit: {reason_of(error)}"
            ) from None
        with suppress(pa.ArrowException):  # of a column of views: what statistics say cannot be asked
            fragment = fragment.subset(condition)

    taken = {each.name: each.type for each in fields if each.name in (sized or [each.name])}
    is_of_pyarrow = str(fragment.metadata.created_by).startswith("parquet-cpp")
    return fields, [
        (
            each.id,
            each.num_rows,
            each.total_byte_size if sized is None else _nbytes(each, taken, is_of_pyarrow),
        )
        for each in fragment.row_groups
    ]


def _nbytes(group: pads.RowGroupInfo, taken: Mapping[str, pa.DataType], is_of_pyarrow: bool) -> int:
    """About the bytes of columns of a row group once they are read: files may have equal values once."""
    nbytes = 0
    for column in map(group.metadata.column, range(group.metadata.num_columns)):
        path = column.path_in_schema.split(".list.")[0]
        name = path if path in taken else path.partition(".")[0]
        if name in taken:
            value_bytes = _width(taken[name]) or _text_bytes(column, is_of_pyarrow)
            nbytes += max(column.total_uncompressed_size, column.num_values * value_bytes)
    return nbytes


def _width(found: pa.DataType) -> int:
    """The bytes of a value, also of one in lists. 0: of any width."""
    while hasattr(found, "value_type"):
        found = found.value_type
    try:
        return -(-int(found.bit_width) // 8)
    except ValueError:
        return 0


def _text_bytes(column: pq.ColumnChunkMetaData, is_of_pyarrow: bool) -> int:
    """About the bytes of a text once it is read. Where a file has equal ones once, its statistics tell.

    They have the first and the last text in order. The mean of both is at least half of the longer one.
    """
    known, nbytes = column.statistics, column.total_uncompressed_size
    is_shared = nbytes <= _DICTIONARY_BYTES + 4 * column.num_values and not _SHARING.isdisjoint(
        column.encodings
    )
    if not is_shared or known is None:
        return _TEXT_BYTES
    if known.has_min_max:
        return max(_TEXT_BYTES, -(-(len(known.min_raw) + len(known.max_raw)) // 2))
    is_long = is_of_pyarrow and known.has_null_count and known.null_count < column.num_values
    return max(_TEXT_BYTES, min(nbytes, _STATISTICS_BYTES)) if is_long else _TEXT_BYTES


class _Open:
    """An open file, with its footer, from which several threads read at a time.

    Each read has a ParquetFile of its own, which is not thread-safe: it takes 20 us. A file of a file system
    in Python reads one piece at a time, so it is opened anew. Of one that a getter reads, without opening it,
    the needed bytes are put in their places of an empty file.
    Not a fragment of pyarrow.dataset, which takes twice the time for a small row group, and whose threads
    read where no others may: they would still hold a file of a file system in Python as the process ends.
    """

    def __init__(
        self, store: ObjectStore, file: ListedFile, names: list[str], condition: pc.Expression | None
    ) -> None:
        self._names, self._condition, self._store, self._path = names, condition, store, file.path
        self._file = store.open(file.path)
        if isinstance(self._file, Unopened):
            self._metadata = _metadata_of(self._file, file.nbytes)
        else:
            self._metadata = pq.ParquetFile(self._file).metadata
        self._read_names = names
        if condition is not None:
            self._read_names = names + _needed(condition, self._metadata.schema.to_arrow_schema(), names)

    def part_rows(self, group: _RowGroup) -> int:
        """Return the number of rows that a row group, or a part of it, has in the file now."""
        if group.number >= self._metadata.num_row_groups:
            return 0
        return len(range(group.part, self._metadata.row_group(group.number).num_rows, group.parts))

    def read(self, number: int) -> pa.Table:
        if isinstance(self._file, Unopened):
            with pa.BufferReader(self._fetched(self._file, number)) as file:
                return self._read(file, number, in_threads=True)
        if not self._store.is_in_python:
            return self._read(self._file, number, in_threads=True)
        with self._store.open_native(self._path) as file:
            return self._read(file, number, in_threads=False)

    def _fetched(self, file: Unopened, number: int) -> pa.Buffer:
        """Return the bytes of a row group's columns, as far as they are needed, with zeros around them."""
        group, spans = self._metadata.row_group(number), []
        for column in map(group.column, range(group.num_columns)):
            path = f"{column.path_in_schema}."
            if any(path.startswith(f"{name}.") for name in self._read_names):
                begin = column.data_page_offset
                first = min(column.dictionary_page_offset or begin, begin)
                spans.append((first, min(file.size(), first + column.total_compressed_size + _PAD_BYTES)))
        pieces: list[list[int]] = []
        for first, last in sorted(spans):
            if pieces and first <= pieces[-1][1] + _GAP_BYTES and last - pieces[-1][0] <= _PIECE_BYTES:
                pieces[-1][1] = max(pieces[-1][1], last)
            else:
                pieces += [[at, min(at + _PIECE_BYTES, last)] for at in range(first, last, _PIECE_BYTES)]
        space = linux.sparse_memory(max(last for _, last in pieces))

        def fetch(piece: list[int]) -> None:
            first, last = piece
            space[first:last] = read_at(file, last - first, first)

        at_once(fetch, pieces)
        return pa.py_buffer(space)

    def _read(self, file: NativeFile, number: int, *, in_threads: bool) -> pa.Table:
        parquet = pq.ParquetFile(file, metadata=self._metadata, pre_buffer=in_threads)
        table = parquet.read_row_group(number, columns=self._read_names, use_threads=in_threads)
        if self._condition is None:
            return table
        try:
            return _filtered(table, self._condition).select(self._names)
        except pa.ArrowException as error:
            raise SchemaError(
                f"{self._store.name(self._path)}: the filter {shown(self._condition)} does not fit some row "
                f"of row group {number}: {reason_of(error)}; {REPLACE_IT}"
            ) from None

    def close(self) -> None:
        self._file.close()


def _metadata_of(file: Unopened, nbytes: int) -> pq.FileMetaData:
    """Read a file's footer, mostly in one request, which also tells its size if that is another by now."""
    wanted = _FOOTER_BYTES
    while True:
        start = max(0, nbytes - wanted)
        tail = file.read_at(nbytes - start, start)
        changed, nbytes = file.size() != nbytes, file.size()
        needed = int.from_bytes(tail[-8:-4], "little") + 8
        if not changed and (needed <= wanted or not start):
            return pq.read_metadata(pa.BufferReader(tail))
        wanted = max(wanted, needed)


def _filtered(table: pa.Table, condition: pc.Expression) -> pa.Table:
    """Return the rows for which a condition is true, in order and plain. As Table.filter, in this thread."""
    columns = [pa.chunked_array(map(plain, each.chunks), plain_type(each.type)) for each in table.columns]
    table = pa.table(columns, table.column_names)
    from pyarrow import acero  # as pyarrow.dataset

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    chosen = acero.Declaration("filter", acero.FilterNodeOptions(condition))
    return acero.Declaration.from_sequence([source, chosen]).to_table(use_threads=False)


def _needed(condition: pc.Expression, fields: pa.Schema, names: Sequence[str]) -> list[str]:
    """Return the fields that a condition needs, beside those in `names`."""
    empty, needed = fields.empty_table(), []
    for name in fields.names:
        if name not in names:
            try:
                _filtered(empty.drop_columns([name]), condition)
            except pa.ArrowException:
                needed.append(name)
    return needed


def _schema(
    names: Sequence[str],
    files: Sequence[pa.Schema],
    columns: Sequence[str] | None,
    wanted: Schema | Mapping[str, FieldType] | None,
) -> Schema:
    """Return the schema of all files: `wanted`, or that of the first; the others must have it, too."""
    if wanted is None:
        schema = _inferred(names[0], files[0], columns)
    else:
        chosen = Schema(wanted).select(columns, least=1)
        schema = Schema({name: wanted[name] for name in chosen})
    for file, fields in zip(names, files, strict=True):
        try:
            require_fields(fields, schema)
            if wanted is None:
                _require_same(fields, schema, names[0])
        except SchemaError as error:
            raise SchemaError(f"{file}: {error}") from None
    return schema


def _inferred(file: str, fields: pa.Schema, columns: Sequence[str] | None) -> Schema:
    if columns is not None and len(set(columns)) != len(columns):
        raise ValueError(f"columns {columns} names a column twice")
    try:
        # require_fields finds duplicate names
        kinds = {field.name: kind_of(field) for field in fields if columns is None or field.name in columns}
        for name in columns or ():
            if name not in kinds:
                require_fields(fields, Schema({name: Tensor("bool")}))
        return Schema(kinds if columns is None else {name: kinds[name] for name in columns})
    except (SchemaError, ValueError) as error:
        raise SchemaError(f"{file}: {error}") from None


def _require_same(fields: pa.Schema, schema: Schema, first: str) -> None:
    for name, kind in schema.items():
        if (found := kind_of(fields.field(name))) != kind:
            raise SchemaError(
                f"field {name!r} is {found}, and {kind} in {first}: files must agree; pass schema= to have "
                "all of them converted to one type, where that is exact"
            )


def _require_fill(file: str, fields: pa.Schema, fill: Mapping[str, Any]) -> None:
    """Check that a file's columns can hold the fill values, rounded as pyarrow does."""
    for name, value in fill.items():
        found = fields.field(name).type
        found = found.value_type if pa.types.is_dictionary(found) else found
        plain = value.as_py() if isinstance(value, pa.Scalar) else value
        try:
            held = pa.scalar(plain, found)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise SchemaError(f"{file}: field {name!r} cannot be filled with {value!r}: {error}") from None
        if not held.is_valid or (pa.types.is_integer(found) and held.as_py() != plain):
            raise SchemaError(
                f"{file}: field {name!r} is {found}, and cannot be filled with {value!r}: give a value "
                "of that type"
            )


def _joined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
