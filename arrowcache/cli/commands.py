"""Commands: what `arrowcache` can do, each a thin face over the library. __init__.py says the exit codes."""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

import arrowcache as ac
from arrowcache.arrow.notation import format_schema, type_name
from arrowcache.cache import marked_rows
from arrowcache.cli import INTERRUPTED, OK, USAGE, WRONG, changes, complain
from arrowcache.cli.app import AsJson, CachePath, Columns, app
from arrowcache.cli.printing import write, write_frame, write_json, write_table
from arrowcache.cli.wording import of_shell
from arrowcache.errors import ArrowCacheError, sentence_of
from arrowcache.explore.observation import Observation, observe
from arrowcache.explore.terminal import watch as watch_cache
from arrowcache.reading.selection import INCLUDED
from arrowcache.units import format_bytes, format_count

__all__ = ["app", "changes", "run"]

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException, wherever typer has it from


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
            "headroom": settings.headroom,
            "durable": settings.durable,
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
            ("full segment", f"{settings.full_rows} rows, at most {format_bytes(settings.segment_bytes)}"),
            ("headroom", f"{settings.headroom:.0%}"),
            ("durable", "yes" if settings.durable else "no"),
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
