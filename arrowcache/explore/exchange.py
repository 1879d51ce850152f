"""Exchange: a cache's rows as Parquet files for everybody, and Parquet files of anybody into a cache.

Export guarantees: a file under its name is complete, and was not there before; a value comes back as it was;
a row that is excluded is left out, or marked. It must never overwrite a file, round a value, or leave out a
row that was asked for without an error.

Import guarantees: each row comes once. A file that turns out to be bad leaves none of its rows, and no cache
if it was the first of one that was to be made; whatever else ends an import leaves rows of good files only,
and beginning again goes on from there. Nothing is made before the first segment is ready.

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
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arrowcache.arrow.dtype import bits_of
from arrowcache.arrow.foreign import kind_of, other_format, require_fields, values_of
from arrowcache.arrow.schema import (
    METADATA_KEY,
    RESERVED_NAMES,
    FieldType,
    Ragged,
    Schema,
    Tensor,
    Timestamp,
    difference,
)
from arrowcache.arrow.segment import row_bytes
from arrowcache.cache import Cache
from arrowcache.errors import ArrowCacheError, SamplerError, SchemaError
from arrowcache.explore.columns import (
    EXCLUDED,
    NOTE_KEY,
    REASON,
    TAGS,
    AnyCache,
    NotedRows,
    elements,
    keeps_nothing,
    nested,
    select_with_notes,
    walk,
)
from arrowcache.limits import Limits
from arrowcache.progress import progress_bar
from arrowcache.reading.row_filter import ALL_ROWS, INCLUDED, chosen_of, require_rows, select_for_export
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.ingest import Imported, Ingest, fingerprint
from arrowcache.storage.layout import CACHE_JSON, SegmentInfo
from arrowcache.storage.recovery import is_free, new_folders, remove_unused, require_settings, store_of
from arrowcache.storage.row_ids import ID_COLUMNS
from arrowcache.storage.settings import settings_of
from arrowcache.storage.store import Store
from arrowcache.units import format_count

SEQ = ID_COLUMNS[0]
_UTC = pa.timestamp("us", "UTC")
_GROUP_BYTES = 16 << 20  # of what is imported at a time
_OF_ROWS = (*RESERVED_NAMES, EXCLUDED, REASON, TAGS)  # what a DataFrame of another cache says of rows
_FAULTS = (SchemaError, SamplerError, ValueError)  # of a file; all else is no reason to take it back


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
        noted = NotedRows(store, snapshot)
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
    elif (bits := bits_of(kind.dtype)) is not None:
        values = pa.array(bits.to_float(values.to_numpy()))
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


class ParquetImport:
    """Files to be imported. What can be checked without reading a row is checked first, and nothing is made.

    Arguments and what is raised: as those of `import_parquet`. `store` is None before the cache is made;
    `was_made`: this import made it, and it is still there.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        cache: AnyCache,
        *,
        capacity: int | str | None = None,
        schema: Schema | Mapping[str, FieldType] | None = None,
        segment_bytes: int | str | None = None,
        again: bool = False,
    ) -> None:
        given = [files] if isinstance(files, str | os.PathLike) else files
        if not isinstance(given, Iterable):
            raise TypeError(f"files must be a path, or several, not {files!r}")
        found = _find(given)
        self._paths = list({os.path.realpath(path): path for path in found}.values())  # each once
        if not self._paths:
            raise ValueError("files is empty: name at least one")
        wanted = schema if schema is None or isinstance(schema, Schema) else Schema(schema)
        self.store: Store | None = None
        self.was_made = False
        self._create: partial[Cache] | None = None
        if isinstance(cache, str | os.PathLike) and capacity is not None:
            path = Path(cache).absolute()
            if not os.path.lexists(path / CACHE_JSON):
                is_free(path)
                wanted = wanted or _schema_of(self._paths[0])
                settings = settings_of(wanted, capacity, segment_bytes)
                self._create = partial(Cache.create, path, wanted, capacity, segment_bytes)
                self._folders = new_folders(path)
        if self._create is None:
            self.store = store_of(cache)
            require_settings(self.store, {"capacity_bytes": capacity, "segment_bytes": segment_bytes})
            settings = self.store.settings
            if wanted is not None and dict(wanted) != dict(settings.schema):
                differs = difference(settings.schema, wanted)
                raise SchemaError(f"{self.store.folder.path} has another schema: {differs}")
        self._schema = settings.schema
        self._rows = {path: _checked_rows(path, self._schema) for path in self._paths}
        nonce = uuid.uuid4().hex[:8] if again else ""
        self._ingest = Ingest(settings, self.open, "parquet", again=nonce)
        self.rows_there = 0  # that were in already
        self.rows_returned = 0  # that are imported, had been before, and had left

    @property
    def rows(self) -> int:
        """Of all the files."""
        return sum(self._rows[path] for path in self._paths)

    @property
    def imported(self) -> Imported:
        """What was published so far."""
        return self._ingest.published

    def open(self) -> Store:
        """The store of the cache, which is made now unless it is there."""
        if self.store is None:
            assert self._create is not None
            self.store = self._create().store
            self.was_made = True
        return self.store

    def _remove_if_unused(self) -> None:
        """Have what `open` made vanish, unless anything was published in it."""
        if self.was_made and self.store is not None and remove_unused(self.store, self._folders):
            self.store, self.was_made = None, False

    def run(self, progress: bool | None = None) -> None:
        """Import them. Called once; blocks until all is published, or an error, or Ctrl-C."""
        try:
            with self._ingest, progress_bar(progress, has_widget=True, desc="importing", unit=" rows") as bar:
                if self.store is not None:
                    self._ingest.open()
                for count, path in enumerate(self._paths):
                    digest = fingerprint(path)
                    try:
                        self._bring(path, digest, bar)
                    except _FAULTS as error:
                        raise self._given_up(path, digest, count, error) from None
                self._ingest.publish()
        except BaseException as error:
            self._remove_if_unused()
            if isinstance(error, ArrowCacheError | OSError) and not isinstance(error, _FAULTS):
                raise self._counted(error) from error.__cause__
            raise
        if self.rows and not self.imported.rows:
            self._refuse()

    def _bring(self, path: Path, digest: str, bar: Any) -> None:
        total = self._rows[path]
        missing = self._ingest.missing(digest, total)
        gaps = [(first, total if stop is None else stop) for first, stop in missing]
        if bar is not None:
            self.rows_there += total - sum(stop - first for first, stop in gaps)
            self.rows_returned += sum(stop - first for first, stop in gaps if stop < total)
        for first, stop in gaps:
            self._ingest.begin(digest, first)
            taken = 0
            for batch in _batches(path, self._schema, first, stop):
                samples = {
                    name: values_of(name, batch.column(name), kind) for name, kind in self._schema.items()
                }
                taken += self._ingest.take(samples, many=True)
                if bar is not None:
                    bar.n += batch.num_rows  # update() does nothing where no bar is shown
                    bar.update(0)
            if taken != stop - first:
                raise SamplerError(
                    f"it has {format_count(taken, 'row')} from row {first} on, not {stop - first}"
                )
            if stop == total:
                self._ingest.end()

    def _given_up(self, path: Path, digest: str, count: int, error: Exception) -> Exception:
        """What to raise for a bad file; its rows are taken back, and those of files before it are in."""
        leased = self._ingest.give_up(digest)
        for before in self._paths[:count]:
            self._bring(before, fingerprint(before), None)  # what shared a segment with it
        self._ingest.publish()
        self._ingest.close()  # else somebody writes to it
        self._remove_if_unused()
        text = f"{error}" if str(error).startswith(str(path)) else f"{path}: {error}"
        rows = format_count(sum(segment.rows for segment in leased), "row")
        stays = f", but for {rows} that a reader leases" if leased else ""
        kind = next(kind for kind in _FAULTS if isinstance(error, kind))
        return kind(
            f"{text}; {self._so_far()}, and none of this file stays{stays}: "
            "repair it or leave it out, and import again"
        )

    def _counted(self, error: ArrowCacheError | OSError) -> Exception:
        """The same error with what was imported before it."""
        more = ": import the same files again to go on with the others" if self.imported.rows else ""
        text = f"{self._so_far()}{more}"
        if isinstance(error, OSError) and error.errno is not None:
            return OSError(error.errno, f"{error.strerror}; {text}", error.filename)
        return type(error)(f"{error}; {text}")

    def _so_far(self) -> str:
        if self.imported.rows:
            return (
                f"{self.imported.rows:,} of {format_count(self.rows - self.rows_there, 'row')} were imported"
            )
        return "nothing was imported" + (", no cache was made" if self.store is None else "")

    def _refuse(self) -> None:
        files = "the file" if len(self._paths) == 1 else f"the {format_count(len(self._paths), 'file')}"
        raise FileExistsError(
            errno.EEXIST,
            f"the cache has all {format_count(self.rows, 'row')} of {files} already: nothing was imported; "
            "again=True imports them once more",
            str(self._paths[0] if len(self._paths) == 1 else self.open().folder.path),
        )


def _find(files: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    for given in map(Path, files):
        if not given.is_dir():
            if not given.exists():
                raise FileNotFoundError(errno.ENOENT, "no such file", str(given))
            yield given
        elif found := sorted(given.glob("*.parquet")):
            yield from found
        else:
            raise FileNotFoundError(errno.ENOENT, "the folder has no *.parquet", str(given))


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> Exception:
    """What to raise instead: what the disk or the memory refuses is no damage."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        return error
    with path.open("rb") as file:
        why = other_format(file.read(512), "Parquet") or " ".join(str(error).split())
    return SamplerError(f"{path}: cannot be read as Parquet: {why}")


def _schema_of(path: Path) -> Schema:
    with _open(path) as file:
        try:
            return Schema({field.name: kind_of(field) for field in file.schema_arrow if _is_own(field)})
        except (SchemaError, ValueError) as error:
            raise SchemaError(f"{path}: {error}") from None


def _is_own(field: pa.Field) -> bool:
    """A column, also of such a name where a cache has exported it, and not a DataFrame's word on rows."""
    metadata = field.metadata or {}
    return NOTE_KEY not in metadata and (field.name not in _OF_ROWS or METADATA_KEY in metadata)


def _checked_rows(path: Path, schema: Schema) -> int:
    """How many rows a file has.

    Raises: SchemaError: it lacks a field of the schema, or has one of a type that does not fit.
    """
    with _open(path) as file:
        try:
            require_fields(file.schema_arrow, schema)
        except SchemaError as error:
            raise SchemaError(f"{path}: {error}") from None
        return int(file.metadata.num_rows)


def _batches(path: Path, schema: Schema, first: int, stop: int) -> Iterator[pa.RecordBatch]:
    """A file's rows from `first` to `stop`, some MB at a time."""
    with _open(path) as file:
        found = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        starts = np.cumsum([0, *(group.num_rows for group in found)])
        groups = [at for at in range(len(found)) if starts[at] < stop and starts[at + 1] > first]
        largest = max((found[at].total_byte_size / max(1, found[at].num_rows) for at in groups), default=1)
        rows = int(min(Limits.current.imported_rows, _GROUP_BYTES // max(1, row_bytes(schema), largest)))
        start = starts[groups[0]] if groups else 0
        try:
            for batch in file.iter_batches(max(1, rows), row_groups=groups, columns=list(schema)):
                wanted = batch.slice(max(0, first - start), max(0, stop - max(start, first)))
                start += batch.num_rows
                if wanted.num_rows:
                    yield wanted
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from None
