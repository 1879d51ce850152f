"""Exchange: a cache's rows as Parquet files for everybody, and Parquet files of anybody into a cache.

Guarantees: a file under its name is complete, and was not there before; a value comes back as it was.
Must never: overwrite a file, round a value, or leave out a row without an error.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from arrowcache.arrow.foreign import kind_of, require_fields, values_of
from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.arrow.segment import row_bytes
from arrowcache.cache import Cache
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.explore.plain import plain, plain_schema
from arrowcache.explore.traceback import keeps_nothing
from arrowcache.explore.walk import AnyCache, progress_bar, walk
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.layout import CACHE_JSON
from arrowcache.storage.recovery import store_of

_GROUP_BYTES = 16 << 20  # of a row group, and of what is imported at a time
_MOST_ROWS = 1 << 16


@keeps_nothing
def export_parquet(
    cache: AnyCache,
    folder: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    progress: bool | None = None,
) -> list[Path]:
    """Write what a cache holds as Parquet files, one a segment, named `<seq>.parquet`.

    It is one snapshot of everything, also of the oldest segments that an epoch would leave to the samplers.
    A segment's lease ends when its file is complete. Any reader of Parquet reads them: plain.py says in
    which types; `import_parquet` has the tensors back.

    Args:
        folder: a new or empty one, outside of the cache's.
        columns: which; None for all.
        progress: show a bar; None: in a terminal or a notebook.
    Returns: the files, oldest segment first; none of an empty cache.
    Blocks: while it is written. After an error complete files stay.
    Raises: FileExistsError: the folder holds something. OSError: a file cannot be written.
        CorruptSegmentError: a damaged segment, which was quarantined. ValueError: an unknown column, a
        folder within the cache's.
    """
    store, folder = store_of(cache), Path(folder).absolute()
    schema = store.settings.schema
    names = schema.select(columns, least=1)
    if folder.resolve().is_relative_to(store.folder.path.resolve()):
        raise ValueError(f"{folder} is in the cache's own folder: give another one")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(errno.EEXIST, "a file, and no folder: give a new or an empty one", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(
            errno.EEXIST, "the folder holds files already: give a new or an empty one", str(folder)
        )
    written = []
    with Snapshot.take(store) as snapshot:
        for segment, batch in walk(snapshot, names, "exporting", progress):
            arrays = [plain(batch.column(name), schema[name]) for name in names]
            table = pa.RecordBatch.from_arrays(arrays, names=list(names))
            path = folder / f"{segment.seq:020d}.parquet"
            _write(table.cast(plain_schema(table, schema)), path)
            written.append(path)
            del batch, arrays, table
    return written


def _write(table: pa.RecordBatch, path: Path) -> None:
    part = path.with_suffix(".part")
    rows = max(1, _GROUP_BYTES * len(table) // max(1, table.nbytes))
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
    segment_bytes: int | str = "64MiB",
    progress: bool | None = None,
) -> int:
    """Bring the rows of Parquet files into a cache, in their order.

    Numbers, bool, text, bytes, timestamps and dates become scalars, lists of a fixed size tensors, other
    lists ragged; what `export_parquet` wrote becomes what it was. Numbers are converted to the column's
    type where that is exact. Fields that the schema lacks are left out. A cache of less capacity than the
    files hold keeps the newest rows, and evicts those that came before them.

    Args:
        files: a file, a folder of *.parquet in the order of their names, or several of either.
        cache: a cache, or the path of one; it is made there if `capacity` is given, unless it is there.
        capacity, segment_bytes: of a cache that is made, as in `Cache.create`.
        schema: what to import; None: what the cache has, or of a new one what the first file has.
        progress: show a bar; None: in a terminal or a notebook.
    Returns: how many rows were imported.
    Blocks: until all is published; while the cache's oldest segments are leased it waits for room.
    Raises: SchemaError: another schema than the cache's; a field that is missing, that no column can hold
        or whose values do not fit: names the file and the field. What the files say of their fields is
        checked before a row is imported; rows that were imported before another error stay, and it says
        how many. SamplerError: a file that is no Parquet, or damaged. FileNotFoundError: no such file; no
        such cache, and no capacity to make it.
        ValueError: an argument that does not fit, a row larger than a segment.
    """
    paths = list(_find([files] if isinstance(files, str | os.PathLike) else files))
    if not paths:
        raise ValueError("files is empty: name at least one")
    wanted = schema if schema is None or isinstance(schema, Schema) else Schema(schema)
    target = _target(cache, paths[0], wanted, capacity, segment_bytes)
    has = target.store.settings.schema
    if wanted is not None and dict(wanted) != dict(has):
        raise SchemaError(f"{target.store.folder.path} has another schema: {has!r}, not {wanted!r}")
    for path in paths:
        _require_fields(path, has)
    with target.writer() as writer, progress_bar(progress, desc="importing", unit=" rows") as bar:
        for path in paths:
            for batch in _batches(path, has):
                try:
                    writer.extend(
                        {name: values_of(name, batch.column(name), kind) for name, kind in has.items()}
                    )
                except (SchemaError, ValueError) as error:
                    kind = SchemaError if isinstance(error, SchemaError) else ValueError
                    raise kind(f"{path}: {error}; {bar.n} rows before were imported") from None
                bar.n += batch.num_rows  # update() does nothing where no bar is shown
                bar.update(0)
        return int(bar.n)


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


def _target(
    cache: AnyCache, first: Path, schema: Schema | None, capacity: int | str | None, segment_bytes: int | str
) -> Cache:
    """The cache to write into, made if it is to be."""
    if not isinstance(cache, str | os.PathLike):
        return Cache(store_of(cache))
    if capacity is None or (Path(cache) / CACHE_JSON).exists():
        return Cache.open(cache)
    return Cache.create(cache, schema or _schema_of(first), capacity, segment_bytes)


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> SamplerError:
    why = " ".join(str(error).split())
    return SamplerError(f"{path}: cannot be read as Parquet: {why}; get the file anew, or leave it out")


def _schema_of(path: Path) -> Schema:
    with _open(path) as file:
        try:
            return Schema({field.name: kind_of(field) for field in file.schema_arrow})
        except (SchemaError, ValueError) as error:
            raise SchemaError(f"{path}: {error}") from None


def _require_fields(path: Path, schema: Schema) -> None:
    with _open(path) as file:
        try:
            require_fields(file.schema_arrow, schema)
        except SchemaError as error:
            raise SchemaError(f"{path}: {error}") from None


def _batches(path: Path, schema: Schema) -> Iterator[pa.RecordBatch]:
    """A file's rows, some MB at a time."""
    rows = max(1, min(_MOST_ROWS, _GROUP_BYTES // max(1, row_bytes(schema))))
    with _open(path) as file:
        largest = max(
            (file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)), default=0
        )
        rows = max(1, min(rows, file.metadata.num_rows * _GROUP_BYTES // max(1, largest)))
        try:
            yield from file.iter_batches(batch_size=rows, columns=list(schema))
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from None
