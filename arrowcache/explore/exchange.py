"""Exchange: a cache's rows as Parquet files for everybody, and Parquet files of anybody into a cache.

Guarantees: a file under its name is complete, and was not there before; a value comes back as it was; a row
that is excluded is left out, or marked.
Must never: overwrite a file, round a value, or leave out a row that was asked for without an error.

Columns are written in types that every reader of Parquet knows; arrow/foreign.py has them back:

    Tensor(dtype, shape)         the dtype's own type, or fixed_size_list<T>[elements of a row], in C order
    Ragged(dtype, inner_shape)   list<T>, or list<fixed_size_list<T>[elements of an entry]>
    bool, bfloat16               bool, float32; a complex number is two elements
    Timestamp()                  timestamp[us, UTC]

A field's metadata says, as in a segment, which type it was, or that it is a row's id or a note.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arrowcache.arrow.schema import FieldType, Ragged, Schema, Tensor, Timestamp
from arrowcache.explore.noted import EXCLUDED, NOTE_KEY, Noted, select_with_notes
from arrowcache.explore.numbers import bfloat16_values, elements, nested
from arrowcache.explore.parquet import ParquetImport
from arrowcache.explore.walk import AnyCache, keeps_nothing, walk
from arrowcache.limits import Limits
from arrowcache.reading.selection import ALL_ROWS, INCLUDED, chosen_of, require_rows, select_for_export
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import SegmentInfo
from arrowcache.storage.recovery import store_of
from arrowcache.storage.row_ids import ID_COLUMNS

SEQ = ID_COLUMNS[0]
_UTC = pa.timestamp("us", "UTC")


@keeps_nothing
def export_parquet(
    cache: AnyCache,
    folder: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    progress: bool | None = None,
    *,
    rows: object = INCLUDED,
) -> list[Path]:
    """Write rows of a cache as Parquet files, one a segment, named `<seq>.parquet`.

    It is one snapshot, also of the oldest segments that an epoch would leave to the samplers.
    A segment's lease ends when its file is complete. Any reader of Parquet reads them: their types are
    plain; `import_parquet` has the tensors back.

    Args:
        folder: a new or empty one, outside of the cache's.
        columns: which, in this order; `_seq`, `_row` and notes can be named, too, as in `to_pandas`. None
            for all that the cache has, and with rows="all" the notes behind them, if there are any. Where
            rows="all" has excluded rows, `_excluded` comes behind the columns that are named, too.
        progress: show a bar; None: in a terminal or a notebook.
        rows: as of a Loader: "included" leaves out what is excluded; "all", with `_excluded`, `_reason`,
            `_tags` and annotations as columns; a tag; ids, such as the result of `sql` with `_seq` and
            `_row`; or a function of a segment's columns.
    Returns: the files, oldest segment first, of the segments that have such rows; none of an empty cache.
    Blocks: while it is written. After an error complete files stay.
    Raises: FileExistsError: the folder holds something. OSError: a file cannot be written.
        CorruptSegmentError: a damaged segment, which was quarantined. ValueError: an unknown column, a
        folder within the cache's, rows that choose none of a cache that has some. TypeError, ValueError: rows
        that say no rows; whatever a function of them raises.
    """
    store, folder, rows = store_of(cache), Path(folder).absolute(), require_rows(rows)
    schema = store.settings.schema
    if folder.resolve().is_relative_to(store.folder.path.resolve()):
        raise ValueError(f"{folder} is in the cache's own folder: give another one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "the folder holds files already" if folder.is_dir() else "a file, and no folder"
        raise FileExistsError(errno.EEXIST, f"{what}: give a new or an empty one", str(folder))
    written = []
    with Snapshot.take(store) as snapshot:
        noted = Noted(store, snapshot)
        are_all = isinstance(rows, str) and rows == ALL_ROWS
        given = (*schema, *noted.names) if columns is None and are_all else columns
        names = select_with_notes(schema, noted, given)
        if are_all and EXCLUDED in noted.kinds and EXCLUDED not in names and noted.column(EXCLUDED).any():
            names = (*names, EXCLUDED)  # no excluded row without its mark
        notes = {name: noted.arrow(name) for name in names if name in noted.kinds}
        select_for_export(snapshot, store, rows)
        folder.mkdir(parents=True, exist_ok=True)
        own, start = [name for name in names if name in schema], 0
        for segment, batch in walk(snapshot, own or list(schema)[:1], "exporting", progress):
            fields, arrays = [], []
            for name in names:
                if name in schema:
                    array, metadata = (
                        _plain(batch.column(name), schema[name]),
                        schema.arrow.field(name).metadata,
                    )
                else:
                    array, metadata = _of_rows(name, notes, segment, start), {NOTE_KEY: b""}
                fields.append(pa.field(name, array.type, nullable=name in notes, metadata=metadata))
                arrays.append(array)
            table = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
            if (chosen := chosen_of(snapshot, segment)) is not None:
                table = table.filter(pa.array(chosen))
            if len(table):
                path = folder / f"{segment.seq:020d}.parquet"
                _write(table, path)
                written.append(path)
            start += segment.rows
            del batch, array, arrays, table
    return written


def _of_rows(name: str, notes: Mapping[str, pa.Array], segment: SegmentInfo, start: int) -> pa.Array:
    """Ids or notes of a segment's rows, whose first is row `start` of the snapshot."""
    if name in notes:
        return notes[name].slice(start, segment.rows)
    return pa.array(
        np.full(segment.rows, segment.seq) if name == SEQ else np.arange(segment.rows), pa.int64()
    )


def _plain(column: pa.Array, kind: FieldType) -> pa.Array:
    """A column of a snapshot's record batch in plain types; a view, but for bool and bfloat16."""
    if isinstance(kind, Timestamp):
        return column.view(_UTC)
    if not isinstance(kind, Tensor | Ragged):
        return column
    values = elements(column, kind)
    if kind.dtype == "bool":
        values = values.cast(pa.bool_())
    elif kind.dtype == "bfloat16":
        values = pa.array(bfloat16_values(values.to_numpy()))
    is_list = kind.is_list if isinstance(kind, Tensor) else kind.elements > 1
    return nested(values, column, kind, [kind.elements] * is_list)


def _write(table: pa.RecordBatch, path: Path) -> None:
    part = path.with_suffix(".part")
    rows = max(1, Limits.current.exported_bytes * len(table) // max(1, table.nbytes))
    words = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_binary(f.type)]
    try:
        pq.write_table(
            pa.Table.from_batches([table]), part, row_group_size=rows, use_dictionary=words or False
        )
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def import_parquet(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    cache: AnyCache,
    *,
    capacity: int | str | None = None,
    schema: Schema | Mapping[str, FieldType] | None = None,
    segment_bytes: int | str | None = None,
    again: bool = False,
    progress: bool | None = None,
) -> int:
    """Bring the rows of Parquet files into a cache, in their order, each once.

    Numbers, bool, text, bytes, timestamps and dates become scalars, lists of a fixed size tensors, other
    lists ragged; what `export_parquet` wrote becomes what it was. Numbers are converted to the column's
    type where that is exact. Fields that the schema lacks are left out; without one also what a DataFrame
    says of rows of another cache: `_seq`, `_row`, `_age_seconds`, `_excluded`, `_reason` and `_tags`. Columns
    of such names come back from `export_parquet`. A cache of less capacity than the files hold keeps the
    newest rows, and evicts those that came before them.

    The names of segments say which rows of which file they hold, a file being known by its bytes. Rows that
    the cache has are left out. So after an interruption the same call goes on; and rows that were evicted
    since come again.

    Args:
        files: a file, a folder of *.parquet in the order of their names, or several of either.
        cache: a cache, or the path of one; it is made there if `capacity` is given, unless it is there.
        capacity: of a cache that is made, as in `Cache.create`; one that is there has to have it.
        segment_bytes: likewise.
        schema: what to import; None: what the cache has, or of a new one what the first file has.
        again: import also rows that the cache has: they come twice then.
        progress: show a bar; None: in a terminal or a notebook.
    Returns: how many rows were imported.
    Blocks: until all is published; while the cache's oldest segments are leased it waits for room.
    Raises: FileExistsError: the cache has all these rows already; nothing was imported. SchemaError: another
        schema than the cache's; a field that is missing, that no column can hold or whose values do not
        fit: names the file and the field. What the files say of their fields is checked before a row is
        imported. SamplerError: a file that is no Parquet, or damaged. FileNotFoundError: no such file; no
        such cache, and no capacity to make it.
        ValueError: an argument that does not fit, a row larger than a segment.
        After an error of a file the cache has the rows of the files before it, and none of its own; if
        there are none before, a cache that this call made is removed. After Ctrl-C, or what a full disk
        raises, rows that were published stay.
    """
    task = ParquetImport(
        files, cache, capacity=capacity, schema=schema, segment_bytes=segment_bytes, again=again
    )
    task.run(progress)
    return task.imported.rows
