"""TFRecord: a cache's samples into TFRecord files, and such files into a cache.

For users of TFRecord pipelines, who move to this library, or compare. Files out are those of one
snapshot, one a segment; files in are read by processes (intake.py), each record once. examples.py
defines a sample's tf.train.Example. Framing and checksums are TensorFlow's.

Guarantees: a file under its name is complete, and was not there before; a value is read back unchanged.
Must never: overwrite a file, round a value, leave a record out without an error, or leave a process behind.
"""

from __future__ import annotations

import errno
import heapq
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, Schema, difference
from arrowcache.errors import SchemaError
from arrowcache.progress import progress_bar
from arrowcache.reading.row_filter import (
    ALL_ROWS,
    INCLUDED,
    ExcludedRows,
    chosen_of,
    require_rows,
    select_for_export,
)
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.recovery import HasStore, store_of
from arrowcache.storage.store import Store
from arrowcache.tensorflow.examples import EXCLUDED_FEATURE, encode_rows
from arrowcache.tensorflow.intake import Intake
from arrowcache.tensorflow.records import COMPRESSIONS, fingerprint_of
from arrowcache.units import format_count, parse_count

_MAX_WORKERS = 256
_END_BYTES = 64 << 10


def to_tfrecords(
    cache: HasStore | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    compression: str | None = None,
    rows: object = INCLUDED,
) -> list[Path]:
    """Write a cache's samples as TFRecord files, one a segment, named `<seq>.tfrecord`.

    They are of one snapshot. A segment's lease ends when its file is complete.

    Each sample is a tf.train.Example, with a feature a column: scalar integers, bool and timestamps
    (microseconds since 1970) as an int64_list, text and bytes as a bytes_list, all others as
    little-endian bytes in a bytes_list. `example_parser` reads them in tf.data.

    Args:
        folder: a new or empty folder.
        columns: names of the columns. None means all.
        compression: "GZIP", "ZLIB" or None.
        rows: as of a Loader: "included" leaves out what is excluded; "all", with a feature `_excluded` of 0
            or 1 in each sample if any is; a tag; ids, such as the result of a query with `_seq` and `_row`;
            a function of a segment's columns, or an expression.
    Returns: the files, oldest segment first, of the segments that have such rows; none of an empty cache.
    Blocks: while the files are written. After an error complete files stay.
    Raises: FileExistsError: the folder is not empty. CorruptSegmentError: a damaged segment, which
        was quarantined. tf.errors.OpError: a file cannot be written. ValueError: an unknown column, rows that
        choose none of a cache that has some. TypeError, ValueError: rows that say no rows; whatever a
        function of them raises.
    """
    store, folder, rows = store_of(cache), Path(folder), require_rows(rows)
    schema = store.settings.schema
    names = schema.select(columns, least=1)
    require_compression(compression)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            errno.EEXIST, "the folder holds files already: give a new or an empty one", str(folder)
        )
    written = []
    with Snapshot.take(store) as snapshot:
        select_for_export(snapshot, store, rows)
        marks = _marks_of(store, snapshot) if isinstance(rows, str) and rows == ALL_ROWS else None
        folder.mkdir(parents=True, exist_ok=True)
        start = 0
        for count, segment in enumerate(snapshot.segments, start=1):
            ids, chosen = np.arange(start, start + segment.rows), chosen_of(snapshot, segment)
            start += segment.rows
            ids = ids if chosen is None else ids[chosen]
            if not len(ids):
                snapshot.release_oldest(count)
                continue
            values = snapshot.gather(ids, names)
            path = folder / f"{segment.seq:020d}.tfrecord"
            part = path.with_suffix(".part")
            try:
                with tf.io.TFRecordWriter(str(part), options=compression) as writer:
                    for example in encode_rows(
                        schema, values, len(ids), None if marks is None else marks[ids]
                    ):
                        writer.write(example)
                part.rename(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            written.append(path)
            snapshot.release_oldest(count)
    return written


def _marks_of(store: Store, snapshot: Snapshot) -> NDArray[np.bool_] | None:
    """Tell which rows of a snapshot are excluded: (rows,). None: none is, or a column has the mark's name."""
    if EXCLUDED_FEATURE in store.settings.schema:
        return None
    excluded = ExcludedRows(store).of(snapshot)
    return excluded if excluded.any() else None


def from_tfrecords(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    schema: Schema | Mapping[str, FieldType],
    cache: HasStore | str | os.PathLike[str],
    *,
    workers: int = 2,
    compression: str | None = None,
    again: bool = False,
    progress: bool | None = None,
) -> int:
    """Import TFRecord files into a cache, in worker processes: every record once, in full segments.

    Each record is a tf.train.Example with a feature of each field's name; other features are left out.
    Numbers may be little-endian bytes, as `to_tfrecords` writes them, or an int64_list or float_list of as
    many values, in C order; they are converted only where that is exact, and floats never to integers.
    Timestamps are microseconds since 1970. Text and bytes are one value of a bytes_list. An empty feature is
    a ragged field of no entries.

    A worker reads whole files, in the order given. Only its last segment is not full, or one whose name has
    no place for another file. So several files keep several workers busy, and one file keeps one. A cache
    whose capacity is smaller than the files keeps the newest samples, and evicts older ones.

    The names of segments say which records of which file they have. A local file is known by its bytes, one
    in a remote store by its length and some of its bytes. Records that the cache has are left out. So after
    an interruption the same call goes on, and records that were evicted since are imported again.

    Args:
        files: a path, a glob pattern, or several of them, in any store of tf.io.gfile. A file
            with two names, or with a copy, is read once.
        schema: schema of the cache.
        workers: number of processes; at most one a file is started.
        compression: compression of the files: "GZIP", "ZLIB" or None.
        again: also import records that the cache has: it has them twice then.
        progress: show a bar. None shows one if stderr is a terminal.
    Returns: number of imported rows.
    Blocks: until all is published; while the cache's oldest segments are leased it waits for room.
    Raises: FileNotFoundError, IsADirectoryError: before a process starts. FileExistsError: the cache has all
        these records already; nothing was imported. SchemaError: another
        schema than the cache's; a feature is missing or does not fit. SamplerError: a damaged
        file. WorkerError: a worker was killed. These name the file and the record, numbered from 0, and how
        many rows were imported before; these stay, except those of the bad file. CacheFullError: no room,
        and only this process could make some. ValueError: an argument that does not fit, a row larger than
        a segment.
    """
    task = TFRecordImport(files, schema, cache, workers=workers, compression=compression, again=again)
    task.run(progress)
    return task.imported.rows


class TFRecordImport(Intake):
    """An import of files. Arguments and errors are those of `from_tfrecords`."""

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        schema: Schema | Mapping[str, FieldType],
        cache: HasStore | str | os.PathLike[str],
        *,
        workers: int = 2,
        compression: str | None = None,
        again: bool = False,
    ) -> None:
        store = store_of(cache)
        schema = Schema(schema)
        if dict(schema) != dict(store.settings.schema):
            raise SchemaError(
                f"{store.folder.path} has another schema: {difference(store.settings.schema, schema)}"
            )
        require_compression(compression)
        workers = parse_count(workers, "workers", most=_MAX_WORKERS)
        self._files = _distinct(find_files(files))
        self._cache = store.folder.path
        nonce = uuid.uuid4().hex[:8] if again else ""
        super().__init__(store, shares_of(self._files, workers), compression, nonce, self._say)
        self._bar: Any = None

    def run(self, progress: bool | None = None) -> None:
        """Import them. Called once; blocks until all is published, or an error, or Ctrl-C."""
        with progress_bar(progress, desc="importing", unit=" rows") as self._bar:
            super().run()
        if self.rows_there and not self.imported.rows:
            raise FileExistsError(
                errno.EEXIST,
                f"the cache has all {format_count(self.rows_there, 'row')} of "
                f"{format_count(len(self._files), 'file')} already: nothing was imported; again=True imports "
                "them once more",
                self._files[0] if len(self._files) == 1 else str(self._cache),
            )

    def _say(self, rows: int) -> None:
        self._bar.update(rows - self._bar.n)


def require_compression(compression: object) -> None:
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression!r} is unknown: use one of {COMPRESSIONS}")


def find_files(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the files of paths and patterns, each once."""
    found: dict[str, str] = {}
    for given in [files] if isinstance(files, str | os.PathLike) else files:
        path = os.fspath(given)
        paths = [path] if tf.io.gfile.exists(path) else sorted(tf.io.gfile.glob(path))
        if not paths:
            raise FileNotFoundError(errno.ENOENT, "no such file, and no file matches", path)
        for path in paths:
            is_remote = "://" in path
            found.setdefault(
                path if is_remote else os.path.realpath(path),  # the same for all its links
                path if is_remote else os.path.join(os.getcwd(), path),  # workers look there
            )
    if not found:
        raise ValueError("files is empty: name at least one")
    for path in found.values():
        if tf.io.gfile.isdir(path):
            raise IsADirectoryError(
                errno.EISDIR, f"a folder: name its files, such as {path}/*.tfrecord", path
            )
    return list(found.values())


def _distinct(files: Sequence[str]) -> list[str]:
    """Return the files without copies of earlier ones; two workers would read both at once."""
    alike: dict[tuple[int, str], list[str]] = {}
    for path in files:
        alike.setdefault((tf.io.gfile.stat(path).length, _ends(path)), []).append(path)
    known: set[str] = set()
    kept = []
    for paths in alike.values():
        for path in paths:
            digest = fingerprint_of(path) if len(paths) > 1 else path
            if digest not in known:
                known.add(digest)
                kept.append(path)
    order = {path: number for number, path in enumerate(files)}
    return sorted(kept, key=order.__getitem__)


def _ends(path: str) -> str:
    with tf.io.gfile.GFile(path, "rb") as file:
        begins = file.read(_END_BYTES)
        file.seek(max(0, file.size() - _END_BYTES))
        return str(xxhash.xxh3_64_hexdigest(begins + file.read(_END_BYTES)))


def shares_of(files: Sequence[str], workers: int) -> list[list[str]]:
    """Divide files among workers, as evenly by their bytes as the largest first allows."""
    sizes = {path: tf.io.gfile.stat(path).length for path in files}
    loads = [(0, number) for number in range(min(workers, len(files)))]
    owners = {}
    for path in sorted(files, key=lambda path: -sizes[path]):
        load, owner = heapq.heappop(loads)
        owners[path] = owner
        heapq.heappush(loads, (load + max(1, sizes[path]), owner))
    return [[path for path in files if owners[path] == number] for number in range(len(loads))]
