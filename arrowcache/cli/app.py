"""App: what the commands have in common: their application, arguments, and how these are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

import arrowcache as ac
from arrowcache.arrow.notation import parse_schema
from arrowcache.errors import SchemaError
from arrowcache.units import parse_bytes

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


def share_of(text: str, name: str) -> float:
    """A share of something: 0.1 or 10%."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if not 0 <= share < 1:
        raise ValueError(f"{name} {text!r} is no share of the capacity: say one such as 0.1 or 10%")
    return share


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
