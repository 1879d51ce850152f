"""Commands: what `arrowcache` can do, each a thin face over the library. __init__.py says the exit codes.

Those that make, fill and empty a cache come first: they say what went and what came.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.util
import inspect
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import arrowcache as ac
from arrowcache.arrow.schema import format_schema, parse_schema, type_name
from arrowcache.cache import marked_rows
from arrowcache.cli import INTERRUPTED, OK, USAGE, WRONG, complain, of_shell
from arrowcache.cli.printing import write, write_frame, write_json, write_table
from arrowcache.errors import ArrowCacheError, SchemaError, sentence_of
from arrowcache.explore.live_view import watch as watch_cache
from arrowcache.explore.observation import Observation, observe
from arrowcache.reading.row_filter import INCLUDED
from arrowcache.storage.ingest import Imported
from arrowcache.storage.layout import SegmentInfo, UsageRecord
from arrowcache.storage.recovery import new_folders, remove_unused, require_settings
from arrowcache.storage.settings import OPTIONS, Settings
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    from arrowcache.explore.exchange import ParquetImport
    from arrowcache.tensorflow.tfrecord import TFRecordImport

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever typer has it from

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

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look into a rolling cache of samples, and look after it. "
    "Exit codes: 0 all is well; 1 something is wrong with the cache, or an operation on it failed; 2 wrong "
    "usage, such as a path where nothing is, or a query that fails; 130 Ctrl-C. Errors are one sentence on "
    "stderr. Where the output is no terminal, tables are tab-separated.",
)
CachePath = Annotated[Path, typer.Argument(metavar="CACHE", help="The cache's folder.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", "-c", metavar="NAME", help="Only this; may be repeated.", show_default=False),
]
SchemaText = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="SCHEMA",
        help="What a row holds, such as 'image: float32[64, 64], label: int64, name: string, tokens: ragged "
        "int32', or a file with such a text, or with what `info --json` prints.",
        show_default=False,
    ),
]


def size_of(text: str | None, name: str) -> int:
    """A size in bytes; digits alone are bytes.

    Args:
        name: as the user knows it, such as "--capacity".
    """
    text = text or ""
    try:
        return parse_bytes(int(text) if text.isascii() and text.isdecimal() else text, name)
    except ValueError as error:
        why = "must be more than 0" if "positive" in str(error) else "is not a size"
        raise ValueError(
            f"{name} {text!r} {why}: say bytes as a number, or a size such as 64MiB or 200GB"
        ) from None


def schema_of(given: str) -> ac.Schema:
    """The schema that --schema means: the text itself, or that of a file.

    Raises: SchemaError: it describes none. FileNotFoundError: neither a text nor a file.
    """
    if ":" in given and not Path(given).is_file():
        try:
            return parse_schema(given)
        except SchemaError as error:
            raise ValueError(f"--schema: {error}") from None
    path = Path(given)
    if not given or not path.exists():
        raise FileNotFoundError(
            f"--schema {given!r} is no file, and no schema, such as 'image: float32[64, 64], label: int64'"
        )
    if path.is_dir():
        raise ValueError(f"--schema {given!r} is a folder: for a cache's schema give its cache.json")
    try:
        text = path.read_text(encoding="utf-8")
        return _schema_in(json.loads(text)) if text.lstrip()[:1] in ("{", "[") else parse_schema(text)
    except (SchemaError, ValueError) as error:
        raise ValueError(f"{given}: {error}") from None


def _schema_in(described: Any) -> ac.Schema:
    """Of what `info --json` prints, of a cache.json, or of the list of fields in them."""
    if isinstance(described, dict):
        if "schema" not in described:
            raise SchemaError("the JSON has no schema: it has " + (", ".join(described) or "nothing"))
        described = described["schema"]
    return ac.Schema.from_json(described)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each setting that stands by itself, in place of its `**options`."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    for name, option in OPTIONS.items():
        said = typer.Option(_flag(name), metavar=option.metavar or None, help=option.help, show_default=False)
        value: Any = bool if option.parse_text is None else str
        kind: Any = Annotated[value | None, said]
        own.insert(-1, Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind))
        command.__annotations__[name] = kind
    command.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]  # typer reads it
    return command


@app.command()
@_with_options
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
    json: AsJson = False,
    **options: Any,
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
        **_options(other, options),
    )
    settings = made.store.settings
    if json:
        write_json(
            {
                "path": str(made.path),
                "capacity_bytes": settings.capacity_bytes,
                "segment_bytes": settings.segment_bytes,
                "full_rows": settings.full_rows,
                **settings.options,
                "schema": settings.schema.to_json(),
            }
        )
        return
    write_table(
        ["property", "value"],
        [
            ("path", str(made.path)),
            ("capacity", format_bytes(settings.capacity_bytes)),
            (
                "full segment",
                f"{format_count(settings.full_rows, 'row')}, at most {format_bytes(settings.segment_bytes)}",
            ),
            *settings.table,
            ("schema", format_schema(settings.schema)),
        ],
    )


def _options(other: Settings | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that stand by themselves: as said, else as another cache's."""
    options = {} if other is None else other.options
    for name, text in given.items():
        if text is not None:
            parse = OPTIONS[name].parse_text
            options[name] = text if parse is None else parse(text, _flag(name))
    return options


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


@app.command()
def freeze(cache: CachePath, json: AsJson = False) -> None:
    """Have nothing of a cache change any more, so that it can be read anywhere: read-only, copied, shared.

    Refused while somebody writes. `arrowcache thaw` ends it.
    """
    opened = ac.Cache.open(cache)
    opened.freeze()
    _report(opened.store, {}, json)


@app.command()
def thaw(cache: CachePath, json: AsJson = False) -> None:
    """Have a frozen cache change again, once nobody reads it elsewhere; copies stay frozen."""
    opened = ac.Cache.open(cache)
    opened.thaw()
    _report(opened.store, {}, json)


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
    from arrowcache.explore.exchange import ParquetImport

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
        require_settings(opened.store, {"capacity_bytes": capacity, "segment_bytes": segment_bytes})
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
    of_all = format_count(rows, "row") if total is None else f"{rows:,} of {format_count(total, 'row')}"
    removed = f", `rm -r {shlex.quote(str(cache))}` removes the cache" if was_made else ""
    kept = f"interrupted: imported {of_all}, which the cache keeps"
    return f"{kept}; the same command goes on with the others{removed}"


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


def run(arguments: Sequence[str]) -> int:
    """Run one command; errors become a sentence on stderr and an exit code.

    Raises: BrokenPipeError: nobody reads the output any more.
    """
    try:
        code = app(list(arguments) or ["--help"], prog_name="arrowcache", standalone_mode=False)
    except typer.Abort:  # Ctrl-C, where it is no exit code
        return INTERRUPTED
    except SystemExit as end:  # what becomes of a broken pipe
        raise BrokenPipeError from end
    except _USAGE_ERROR as error:
        said = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
        return _fail(f"{said}. See 'arrowcache --help'.", USAGE)
    except (ValueError, TypeError, IndexError, FileNotFoundError, FileExistsError, ImportError) as error:
        is_query = arguments[:1] == ["sql"] and isinstance(error, ValueError)  # an answer in DuckDB's words
        said = sentence_of(error)
        return _fail(said if is_query else of_shell(said, known_to(arguments[0])), USAGE)
    except (ArrowCacheError, OSError) as error:
        return _fail(of_shell(sentence_of(error), known_to(arguments[0])), WRONG)
    return code if isinstance(code, int) else OK


def known_to(command: str) -> set[str]:
    """The options and arguments of a command, as its help names them. Empty: there is no such command."""
    found = getattr(typer.main.get_command(app), "commands", {}).get(command)
    return {
        name
        for parameter in getattr(found, "params", ())
        for name in (parameter.metavar, *parameter.opts)
        if name is not None
    }


def _fail(sentence: str, code: int) -> int:
    complain(sentence)
    return code


def _version(asked: bool) -> None:
    if asked:
        write(f"arrowcache {ac.__version__}")
        raise typer.Exit


@app.callback()
def _arrowcache(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def info(cache: CachePath, json: AsJson = False) -> None:
    """Show the content of a cache, its schema and settings, and its users."""
    opened = ac.Cache.open(cache)
    seen, settings = observe(opened), opened.store.settings
    stats, row_bytes = seen.stats, seen.stats.published_bytes // max(1, seen.stats.rows)
    users = {
        "leases": [dataclasses.asdict(lease) for lease in seen.leases],
        "samplers": [dataclasses.asdict(sampler) for sampler in seen.samplers],
        "waiting": [dataclasses.asdict(writer) for writer in seen.waiting],
        "loaders": [dataclasses.asdict(loader) for loader in seen.loaders],
    }
    if json:
        facts = {
            "path": str(seen.path),
            **dataclasses.asdict(stats),
            "segment_bytes": settings.segment_bytes,
            "full_rows": settings.full_rows,
            **settings.options,
            "frozen": None if settings.frozen is None else settings.frozen.id,
            "row_bytes": row_bytes,
            "oldest_published": seen.segments[0].published if seen.segments else None,
            "newest_published": seen.segments[-1].published if seen.segments else None,
            "schema": opened.schema.to_json(),
            **users,
        }
        write_json(facts)
        return
    share = stats.allocated_bytes / stats.capacity_bytes
    span = f"{stats.oldest_seq} to {seen.segments[-1].seq}" if seen.segments else "none"
    write_table(
        ["property", "value"],
        [
            ("path", str(seen.path)),
            ("allocated", f"{format_bytes(stats.allocated_bytes)} ({share:.0%} of the capacity)"),
            ("capacity", format_bytes(stats.capacity_bytes)),
            ("segments", f"{stats.segments} ({span})"),
            ("rows", f"{stats.rows} of {format_bytes(row_bytes)}"),
            *(("notes", says) for says in marked_rows(opened.store, seen.segments)),
            *([("dataset", stats.hits)] if stats.items else []),
            (
                "full segment",
                f"{format_count(settings.full_rows, 'row')}, at most {format_bytes(settings.segment_bytes)}",
            ),
            *settings.table,
            ("leased", f"{format_bytes(stats.leased_bytes)}, {format_count(len(seen.leases), 'lease')}"),
            ("samplers at work", len(seen.samplers)),
            ("waiting writers", len(seen.waiting)),
            ("loaders", len(seen.loaders)),
            ("quarantined", stats.quarantined),
            *_users(seen),
            *((f"column {name}", type_name(kind)) for name, kind in opened.schema.items()),
            ("schema", format_schema(opened.schema)),
        ],
    )


def _users(seen: Observation) -> Iterator[tuple[str, str]]:
    for lease in seen.leases:
        who = lease.command if lease.pid is None else f"pid {lease.pid} ({lease.command})"
        count = format_count(lease.segments, "segment")
        yield "lease", f"{who}: {count} ({lease.first_seq} to {lease.last_seq})"
    for writer in seen.waiting:
        yield "waiting writer", f"pid {writer.pid} ({writer.command}): {writer.why}"
    for sampler in seen.samplers:
        drawn = f"{sampler.rows} of {format_count(sampler.full_rows, 'row')} of {sampler.pool}.{sampler.task}"
        left_out = f", and left out {format_count(sampler.skipped, 'sample')}" if sampler.skipped else ""
        reads = f"; reads: {sampler.reads.text}" if sampler.reads.text else ""
        yield "sampler", f"pid {sampler.pid} ({sampler.command}): has drawn {drawn}{left_out}{reads}"
    for loader in seen.loaders:
        batches = format_count(loader.batches, "batch", "batches")
        yield "loader", f"pid {loader.pid} ({loader.command}): {batches}, bottleneck {loader.bottleneck}"


@app.command()
def ls(cache: CachePath, json: AsJson = False) -> None:
    """The segments of a cache, oldest first."""
    survey = ac.Cache.open(cache).store.survey()
    leased = {segment.seq for segment in survey.leased}
    columns = ["seq", "rows", "bytes", "allocated_bytes", "published", "leased", "task"]
    rows = [
        [s.seq, s.rows, s.nbytes, s.allocated_bytes, _moment(s.published), s.seq in leased, s.task]
        for s in survey.segments
    ]
    if json:
        write_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        write_table(columns, rows)


@app.command()
def head(
    cache: CachePath,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows.")] = 5,
    column: Columns = None,
    json: AsJson = False,
) -> None:
    """The oldest rows, with their ids, `_seq` and `_row`, and what was noted of them."""
    from arrowcache.explore import frames

    write_frame(frames.head(ac.Cache.open(cache), rows, column or None), json)


@app.command()
def sql(
    cache: CachePath,
    query: Annotated[
        str, typer.Argument(help="SQL of DuckDB; the table is named cache.", show_default=False)
    ],
    json: AsJson = False,
) -> None:
    """Ask a cache a question: arrowcache sql CACHE 'select label, count(*) from cache group by 1'."""
    from arrowcache.explore import sql as ask  # which says what it needs

    write_frame(ask(ac.Cache.open(cache), query), json)


@app.command()
def describe(cache: CachePath, column: Columns = None, json: AsJson = False) -> None:
    """Count, least, most, mean and so on of each column."""
    from arrowcache.explore.summary import describe as summarize

    write_frame(summarize(ac.Cache.open(cache), column or None), json)


@app.command()
def verify(
    cache: CachePath,
    report_only: Annotated[bool, typer.Option("--report-only", help="Change nothing.")] = False,
    json: AsJson = False,
) -> int:
    """Check every byte of a cache; what is damaged is quarantined. Exit code 1 if anything was wrong."""
    opened = ac.Cache.open(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # each problem is printed below
        problems = opened.verify(repair=not report_only)
    if json:
        write_json([dataclasses.asdict(problem) for problem in problems])
    elif problems:
        write_table(["name", "problem"], [(problem.name, problem.reason) for problem in problems])
    else:
        write(f"all is well: {format_count(opened.stats().segments, 'segment')}")
    return WRONG if problems else OK


@app.command()
def watch(
    cache: CachePath,
    interval: Annotated[float, typer.Option("--interval", "-i", help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
) -> None:
    """Show a cache live: fill, rates, leases, waiting samplers, loaders. Ctrl-C ends it, with exit code 0."""
    watch_cache(cache, interval, once=once)


@app.command()
def metrics(cache: CachePath) -> None:
    """Print what a cache, its loaders and samplers do, as OpenMetrics text, for Prometheus."""
    write(ac.metrics(cache).rstrip("\n"))


@app.command()
def explore(
    cache: CachePath,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address only.")] = False,
) -> None:
    """Brush charts of a cache in a browser, see the rows behind, tag or exclude them.

    Ctrl-C ends it, with exit code 0.
    """
    from arrowcache.explore.serving import serve

    def say(url: str) -> None:
        write(url)
        sys.stdout.flush()

    serve(ac.Cache.open(cache), say, opens=not no_browser)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def demo(context: typer.Context) -> None:
    """Train on a cache that grows meanwhile, and print what happens. --help: its options."""
    for module in ("torch", "sklearn"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                f"the demo needs {module}, which is not installed: pip install 'arrowcache[demo]'"
            )
    sys.stdout.flush()
    # In place of this process: it gets Ctrl-C alone, and its exit code is the job's.
    os.execv(sys.executable, [sys.executable, "-m", "arrowcache.demo", *context.args])


@app.command()
def export(
    cache: CachePath,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new or an empty folder.", show_default=False)
    ],
    column: Columns = None,
    rows: Annotated[
        str,
        typer.Option(
            "--rows",
            metavar="ROWS",
            help="'included': what is not excluded; 'all': also that, marked; a tag; or a row's id, 83:26.",
        ),
    ] = INCLUDED,
) -> None:
    """Write rows of a cache as Parquet files, which need no arrowcache."""
    from arrowcache.explore.exchange import export_parquet

    opened = ac.Cache.open(cache)
    files = export_parquet(opened, folder, column or None, rows=rows)
    write(f"wrote {format_count(len(files), 'file')} to {folder}")


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc).isoformat(timespec="seconds")
