"""Explore: look into a cache, or into the cache at a path, while others write and read it.

    frames.py       head, sample, rows, to_pandas, to_polars: rows as DataFrames, shown with pictures
    query.py        sql: DuckDB over the mapped files
    summary.py      describe: what each column holds
    compare.py      duplicates, similar, map_of: rows with rows; drift: the oldest with the newest
    exchange.py     export_parquet, import_parquet
    columns.py      segments one after another, numbers of columns, notes: what these have in common
    pictures.py     picture, gallery: a value, drawn small; many of them, by the values of another column
    observation.py  observe: what one sees of a cache from outside; rates of many such looks
    plots.py        plot_...: growth, values, maps
    live_view.py    watch: live, in a terminal
    widget.py       monitor: live, in a notebook
    explorer.py     open: charts to brush, the rows behind them, each row large
    serving.py      the explorer in a browser without Jupyter

Looking never disturbs: segments are leased only while they are read, and what a function returns is a copy.
The names below are imported when they are first used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from arrowcache.os_errors import importing

if TYPE_CHECKING:
    from arrowcache.explore.compare import drift, duplicates, map_of, similar
    from arrowcache.explore.exchange import export_parquet, import_parquet
    from arrowcache.explore.explorer import open  # noqa: A004  # explore.open, as one says it
    from arrowcache.explore.frames import head, rows, sample, to_pandas, to_polars
    from arrowcache.explore.live_view import watch
    from arrowcache.explore.observation import Observation, observe
    from arrowcache.explore.pictures import gallery, picture
    from arrowcache.explore.plots import plot_growth, plot_map, plot_values
    from arrowcache.explore.query import sql
    from arrowcache.explore.summary import describe
    from arrowcache.explore.widget import monitor

__all__ = [
    "head", "sample", "rows", "to_pandas", "to_polars",
    "sql",
    "describe",
    "duplicates", "drift",
    "similar", "map_of",
    "export_parquet", "import_parquet",
    "picture",
    "gallery",
    "Observation", "observe",
    "plot_growth", "plot_values", "plot_map",
    "open",
    "monitor",
    "watch",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with importing():
            value = getattr(_home_of(name), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "arrowcache":
            raise
        way = "pip install 'arrowcache[explore]'"
        if error.name in ("duckdb", "mosaic_widget") and sys.version_info < (3, 11):
            way = "it needs Python 3.11 or newer"  # DuckDB 2 does
        raise ImportError(
            f"arrowcache.explore.{name} needs {error.name}, which is not installed: {way}"
        ) from error
    globals()[name] = value  # also over the module of that name, which the import has put there
    return value


def _home_of(name: str) -> ModuleType:
    home: ModuleType
    match name:
        case "head" | "sample" | "rows" | "to_pandas" | "to_polars":
            from arrowcache.explore import frames as home
        case "sql":
            from arrowcache.explore import query as home
        case "describe":
            from arrowcache.explore import summary as home
        case "duplicates" | "drift" | "similar" | "map_of":
            from arrowcache.explore import compare as home
        case "export_parquet" | "import_parquet":
            from arrowcache.explore import exchange as home
        case "picture" | "gallery":
            from arrowcache.explore import pictures as home
        case "observe" | "Observation":
            from arrowcache.explore import observation as home
        case "open":
            from arrowcache.explore import explorer as home
        case "monitor":
            from arrowcache.explore import widget as home
        case "watch":
            from arrowcache.explore import live_view as home
        case _:
            from arrowcache.explore import plots as home
    return home


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
