"""Changes: the commands that make, fill and empty a cache; they say what went and what came."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import arrowcache as ac
from arrowcache.arrow.notation import format_schema
from arrowcache.cli import complain
from arrowcache.cli.app import AsJson, CachePath, SchemaText, app, schema_of, share_of, size_of
from arrowcache.cli.printing import write_json, write_table
from arrowcache.storage.ingest import Imported
from arrowcache.storage.layout import SegmentInfo, Settings, UsageRecord
from arrowcache.storage.recovery import new_folders, remove_unused, require_as_said
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes

if TYPE_CHECKING:
    from arrowcache.explore.parquet import ParquetImport
    from arrowcache.tensorflow.tfrecord import TFRecordImport

_TFRECORD = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")
Amounts = tuple[int | None, int | None, int | None]  # rows, segments, bytes; None if not known

Capacity = Annotated[
    str | None,
    typer.Option("--capacity", metavar="SIZE", help="Of the new cache, such as 200GB.", show_default=False),
]
SegmentBytes = Annotated[
    str | None,
    typer.Option(
        "--segment-bytes",
        metavar="SIZE",
        help="Of the new cache: how large a segment's file may be; 64 MiB, or less in a small cache.",
        show_default=False,
    ),
]


@app.command()
def create(
    cache: CachePath,
    schema: SchemaText = None,
    capacity: Capacity = None,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like", metavar="CACHE", help="Another cache: its schema and settings.", show_default=False
        ),
    ] = None,
    segment_bytes: SegmentBytes = None,
    segment_rows: Annotated[
        int | None,
        typer.Option(
            "--segment-rows", min=1, metavar="N", help="Rows of a full segment.", show_default=False
        ),
    ] = None,
    headroom: Annotated[
        str | None,
        typer.Option(
            "--headroom",
            metavar="SHARE",
            help="Of the capacity, that an epoch leaves to samplers: 10% unless said.",
            show_default=False,
        ),
    ] = None,
    durable: Annotated[
        bool | None,
        typer.Option("--durable", help="Sync every segment: a power cut loses none.", show_default=False),
    ] = None,
    json: AsJson = False,
) -> None:
    """Make an empty cache: arrowcache create CACHE --capacity 200GB --schema 'x: float32[64], id: int64'."""
    if (schema is None) == (like is None):
        raise ValueError("say what a row holds: with --schema, or with --like as another cache, and not both")
    other = None if like is None else ac.Cache.open(like).store.settings
    if capacity is None and other is None:
        raise ValueError("say how large the cache may grow: --capacity, such as 200GB")
    size = size_of(capacity, "--capacity") if capacity is not None or other is None else other.capacity_bytes
    made = ac.Cache.create(
        cache,
        other.schema if other is not None else schema_of(schema or ""),
        size,
        *_segments(other, size, segment_bytes, segment_rows),
        share_of(headroom, "--headroom") if headroom is not None else other.headroom if other else 0.1,
        durable if durable is not None else other is not None and other.durable,
    )
    settings = made.store.settings
    if json:
        write_json(
            {
                "path": str(made.path),
                "capacity_bytes": settings.capacity_bytes,
                "segment_bytes": settings.segment_bytes,
                "full_rows": settings.full_rows,
                "headroom": settings.headroom,
                "durable": settings.durable,
                "schema": settings.schema.to_json(),
            }
        )
        return
    write_table(
        ["property", "value"],
        [
            ("path", str(made.path)),
            ("capacity", format_bytes(settings.capacity_bytes)),
            ("full segment", f"{settings.full_rows} rows, at most {format_bytes(settings.segment_bytes)}"),
            ("headroom", f"{settings.headroom:.0%}"),
            ("durable", "yes" if settings.durable else "no"),
            ("schema", format_schema(settings.schema)),
        ],
    )


def _segments(
    other: Settings | None, capacity: int, size: str | None, rows: int | None
) -> tuple[int | None, int | None]:
    """The bound and the rows of a segment: as said, else as another cache's, if the capacity holds four."""
    if other is not None and size is None and 4 * other.segment_bytes <= capacity:
        return other.segment_bytes, other.full_rows if rows is None else rows
    return None if size is None else size_of(size, "--segment-bytes"), rows


@app.command()
def evict(
    cache: CachePath,
    size: Annotated[
        str, typer.Argument(metavar="SIZE", help="At least so much, such as 2GiB.", show_default=False)
    ],
    json: AsJson = False,
) -> None:
    """Evict the oldest segments, up to the first that is leased."""
    wanted = size_of(size, "SIZE")
    opened = ac.Cache.open(cache)
    gone = _sum(opened.store.evict(wanted))
    _report(opened.store, {"evicted": _row(gone)}, json)
    if gone.nbytes < wanted:
        held = "the next segment is leased" if opened.store.segments() else "there is no more"
        complain(f"{format_bytes(wanted)} were asked for, and {format_bytes(gone.nbytes)} were freed: {held}")


@app.command()
def resize(
    cache: CachePath,
    capacity: Annotated[str, typer.Argument(metavar="CAPACITY", help="Such as 200GB.", show_default=False)],
    json: AsJson = False,
) -> None:
    """Change the capacity; what no longer fits is evicted."""
    wanted = size_of(capacity, "CAPACITY")
    opened = ac.Cache.open(cache)
    _report(opened.store, {"evicted": _row(_sum(opened.store.resize(wanted)))}, json)


def _sum(segments: Sequence[SegmentInfo]) -> Imported:
    total = Imported()
    for segment in segments:
        total = total.plus(segment)
    return total


def _row(total: Imported) -> Amounts:
    return total.rows, total.segments, total.nbytes


def _report(store: Store, changes: Mapping[str, Amounts], json: bool) -> None:
    stats = store.stats()
    counts = {**changes, "held now": (stats.rows, stats.segments, stats.published_bytes)}
    columns = ("rows", "segments", "bytes")
    if not json:
        counts["capacity"] = (None, None, stats.capacity_bytes)
        shown = [(what, rows, segments, _shown(nbytes)) for what, (rows, segments, nbytes) in counts.items()]
        write_table(["what", *columns], shown)
        return
    facts = {
        what.replace(",", "").replace(" ", "_"): dict(zip(columns, count, strict=True))
        for what, count in counts.items()
    }
    write_json({**facts, "capacity_bytes": stats.capacity_bytes})


def _shown(nbytes: int | None) -> int | str | None:
    """A program gets bytes, a person what they come to."""
    return nbytes if nbytes is None or not sys.stdout.isatty() else format_bytes(nbytes)


@app.command("import")
def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES... CACHE",
            help="Parquet or TFRecord files, or folders of such; then the cache's folder.",
            show_default=False,
        ),
    ],
    capacity: Capacity = None,
    schema: SchemaText = None,
    segment_bytes: SegmentBytes = None,
    again: Annotated[
        bool, typer.Option("--again", help="Import also rows that the cache has: they come twice.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Bring Parquet or TFRecord files into a cache, each row once; it is made if there is none.

    A file is known by its bytes: what the cache has of it is left out, so that after an interruption the same
    command goes on. A file that turns out to be bad leaves none of its rows.
    """
    *given, cache = paths
    if not given:
        raise ValueError(f"{cache} is taken for the cache, and no file is left: say files, then the cache")
    files = [file for path in given for file in _files_of(path)]
    of_tfrecord = {file.name.endswith(_TFRECORD) for file in files}
    if len(of_tfrecord) > 1:
        raise ValueError("some files are TFRecord and some are not: import them one kind after the other")
    wanted = None if schema is None else schema_of(schema)
    size = None if capacity is None else size_of(capacity, "--capacity")
    bound = None if segment_bytes is None else size_of(segment_bytes, "--segment-bytes")
    is_new = not cache.exists() or (cache.is_dir() and not any(cache.iterdir()))
    if of_tfrecord == {True}:
        _import_tfrecords(files, cache, size, wanted, bound, again, json)
        return
    if size is None and is_new:
        raise FileNotFoundError(
            f"there is no cache at {cache}: to make one, say its --capacity, such as 200GB"
        )
    from arrowcache.explore.parquet import ParquetImport

    task = ParquetImport(files, cache, capacity=size, schema=wanted, segment_bytes=bound, again=again)
    before = UsageRecord() if task.store is None else task.store.usage.record()
    try:
        task.run()
    except KeyboardInterrupt:
        complain(_interrupted(task.imported.rows, task.rows - task.rows_there, cache, task.was_made))
        raise
    if task.store is None:  # of files without a row
        task.open()
    assert task.store is not None
    _report_import(task.store, task, before, json)


def _files_of(given: Path) -> list[Path]:
    """A file is itself; a folder is its TFRecord files, or itself where it has none: of Parquet files."""
    found = sorted(given.iterdir()) if given.is_dir() else []
    return [file for file in found if file.name.endswith(_TFRECORD)] or [given]


def _import_tfrecords(
    files: Sequence[Path],
    cache: Path,
    capacity: int | None,
    schema: ac.Schema | None,
    segment_bytes: int | None,
    again: bool,
    json: bool,
) -> None:
    is_there = cache.exists()
    if not is_there and (capacity is None or schema is None):
        raise FileNotFoundError(
            f"there is no cache at {cache}, and TFRecord files do not say what is in them: to make one, say "
            "its --capacity and --schema, such as 200GB and 'image: float32[64, 64], label: int64'"
        )
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "TFRecord files need tensorflow, which is not installed: pip install 'arrowcache[tensorflow]'"
        )
    compressions = {"GZIP" if file.name.endswith(".gz") else None for file in files}
    if len(compressions) > 1:
        raise ValueError("some files are compressed and some are not: import them one kind after the other")
    from arrowcache.tensorflow.tfrecord import TFRecordImport

    made = new_folders(cache.absolute())
    if is_there or capacity is None or schema is None:
        opened = ac.Cache.open(cache)
        said = {"capacity_bytes": capacity, "segment_bytes": segment_bytes}
        require_as_said(opened.store, {name: size for name, size in said.items() if size is not None})
    else:
        opened = ac.Cache.create(cache, schema, capacity, segment_bytes)
    before, task = opened.store.usage.record(), None
    try:
        task = TFRecordImport(
            files, schema or opened.schema, opened, compression=compressions.pop(), again=again
        )
        task.run()
    except BaseException as error:
        is_gone = not is_there and remove_unused(opened.store, made)
        if isinstance(error, KeyboardInterrupt) and task is not None:
            complain(_interrupted(task.imported.rows, None, cache, not is_there and not is_gone))
        raise
    _report_import(opened.store, task, before, json)


def _interrupted(rows: int, total: int | None, cache: Path, was_made: bool) -> str:
    if not rows:
        return "interrupted: nothing was imported"
    of_all = "" if total is None else f" of {total:,}"
    removed = f", `rm -r {shlex.quote(str(cache))}` removes the cache" if was_made else ""
    return (
        f"interrupted: {rows:,}{of_all} rows were imported and stay; the same command goes on with the others"
        f"{removed}"
    )


def _report_import(
    store: Store, task: ParquetImport | TFRecordImport, before: UsageRecord, json: bool
) -> None:
    now = store.usage.record()
    evicted = (now.evicted_rows - before.evicted_rows, now.evicted_segments - before.evicted_segments)
    changes = {
        "imported": _row(task.imported),
        "there already": (task.rows_there, None, None),
        "back after eviction": (task.rows_returned, None, None),
        "evicted meanwhile": (*evicted, None),
    }
    shown = {what: counts for what, counts in changes.items() if counts[0] or what == "imported"}
    _report(store, changes if json else shown, json)
