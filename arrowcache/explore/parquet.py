"""Parquet: files of anybody on their way into a cache, each row once.

Guarantees: a file that turns out to be bad leaves none of its rows, and no cache if it was the first of one
that was to be made; whatever else ends an import leaves rows of good files only, and beginning again goes on
from there. Nothing is made before the first segment is ready.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arrowcache.arrow.foreign import kind_of, other_format, require_fields, values_of
from arrowcache.arrow.notation import difference
from arrowcache.arrow.schema import METADATA_KEY, RESERVED_NAMES, FieldType, Schema
from arrowcache.arrow.segment import row_bytes
from arrowcache.cache import Cache
from arrowcache.errors import ArrowCacheError, SamplerError, SchemaError
from arrowcache.explore.noted import EXCLUDED, NOTE_KEY, REASON, TAGS
from arrowcache.explore.walk import AnyCache
from arrowcache.limits import Limits
from arrowcache.progress import progress_bar
from arrowcache.storage.file_rows import fingerprint
from arrowcache.storage.ingest import Imported, Ingest
from arrowcache.storage.layout import CACHE_JSON
from arrowcache.storage.recovery import is_free, new_folders, remove_unused, require_as_said, store_of
from arrowcache.storage.sizing import settings_of
from arrowcache.storage.store import Store
from arrowcache.units import format_count, parse_bytes

_GROUP_BYTES = 16 << 20  # of what is imported at a time
_OF_ROWS = (*RESERVED_NAMES, EXCLUDED, REASON, TAGS)  # what a DataFrame of another cache says of rows
_FAULTS = (SchemaError, SamplerError, ValueError)  # of a file; all else is no reason to take it back


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
                settings = settings_of(wanted, capacity, segment_bytes, None, None, None)
                self._create = partial(Cache.create, path, wanted, capacity, segment_bytes)
                self._folders = new_folders(path)
        if self._create is None:
            self.store = store_of(cache)
            said = {
                "capacity_bytes": ("capacity", capacity),
                "segment_bytes": ("segment_bytes", segment_bytes),
            }
            require_as_said(
                self.store,
                {key: parse_bytes(size, name) for key, (name, size) in said.items() if size is not None},
            )
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
                raise SamplerError(f"it has {taken} rows from row {first} on, not {stop - first}")
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
            return f"{self.imported.rows:,} of {self.rows - self.rows_there:,} rows were imported"
        return "nothing was imported" + (", no cache was made" if self.store is None else "")

    def _refuse(self) -> None:
        files = "the file" if len(self._paths) == 1 else f"the {len(self._paths)} files"
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
