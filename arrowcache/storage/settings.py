"""Settings: what a cache is made with. Pure.

A setting that stands by itself (`headroom`, `durable`) is a field of `Settings` with an `Option`, and an
argument of `Cache.create`: `cache.json`, `exist_ok`, `NodeCaches` and the command line take it from the
field. A kind of value that no setting has yet gets its parser in units.py. Capacity, segments, rows and pace
have to fit together: that is sized here, and errors say which would fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any

import numpy as np
import xxhash

from arrowcache.arrow import segment as segment_file
from arrowcache.arrow.schema import Schema
from arrowcache.errors import CacheFormatError, SchemaError
from arrowcache.lifetimes import cached_property
from arrowcache.storage.layout import FORMAT_VERSION, MAX_BYTES, MAX_ROWS, newer_format
from arrowcache.storage.pace import Pace
from arrowcache.units import format_bytes, format_count, format_enough, parse_bytes, parse_count

BOOKKEEPING_BYTES = 64 * 1024  # kept free for cache.json, pools/, ranks/ and folder blocks
PART_SLACK_BYTES = 64 * 1024  # the file system's own bookkeeping for a file being written
_MIN_SEGMENTS = 4
_DEFAULT_SEGMENTS = 16  # that the capacity holds
_MAX_DEFAULT_BYTES = 64 << 20  # of a segment
_SEGMENTS_OF_ITEMS = 64  # that the capacity of a dataset's cache holds
_MIN_SEGMENTS_OF_ITEMS = 6  # if items are large
_ITEMS = 4  # of the size of the first, that a segment holds
MAX_SHARDS = 1 << 20  # of a stream


@dataclass(frozen=True)
class Option:
    """A setting that stands by itself: how it is read, shown and asked for.

    Args:
        default: of `Cache.create`, where it is None.
        parse: an argument's value, or that of cache.json, and the setting's name -> the value. Raises:
            ValueError, TypeError: another kind of value.
        parse_text: what a user gave to the command line, and the option's name -> the value. Raises:
            ValueError. None: the option takes no value, and means True.
        format: the value -> text.
        help: a sentence of the command line.
        metavar: the name of the text there.
    """

    default: Any
    parse: Callable[[Any, str], Any]
    format: Callable[[Any], str]
    help: str
    parse_text: Callable[[str, str], Any] | None = None
    metavar: str = ""


def require_share(share: float, name: str) -> float:
    """Make sure that an argument is a share of the capacity, less than all of it; returns it as a float."""
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"{name}={share!r} is a share of the capacity: give 0 <= {name} < 1")
    return float(share)


def _parse_share(text: str, name: str) -> float:
    """A share of the capacity: 0.1 or 10%."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if not 0 <= share < 1:
        raise ValueError(f"{name} {text!r} is no share of the capacity: say one such as 0.1 or 10%")
    return share


def _require_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} is neither True nor False: give one of them")
    return bool(value)


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


@dataclass(frozen=True, slots=True)
class CachedItems:
    """The dataset whose items a cache holds.

    `length` is how many it has, `version` the user's name for its present content, and `values` the classes
    of an item's values, and the modes of its images, as a text that is compared. A stream has so many
    `shards`, at least one, and no length: that is 0.
    """

    length: int
    version: str
    values: str = ""
    shards: int = 0

    def __str__(self) -> str:
        has = format_count(self.shards, "shard") if self.shards else format_count(self.length, "item")
        return f"{has} of version {self.version!r}"

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads: of a dataset what releases before streams read, too."""
        described = asdict(self)
        del described["length" if self.shards else "shards"]
        return described

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> CachedItems:
        """Raises: KeyError, TypeError, ValueError: not what `to_json` gives."""
        version, values = described["version"], described["values"]
        if len(described) != 3 or not isinstance(version, str) or not isinstance(values, str):
            raise ValueError(f"a dataset of {described!r}")
        if "shards" in described:
            return cls(0, version, values, parse_count(described["shards"], "shards", 1, MAX_SHARDS))
        return cls(parse_count(described["length"], "length", 1, MAX_BYTES), version, values)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The mark of a frozen cache: an id that no other freeze has, and the digest of what is there.

    `digest` is that of `layout.listing_digest`: the same for all copies.
    """

    id: str
    digest: str

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Frozen:
        """Raises: KeyError, TypeError, ValueError: not what `dataclasses.asdict` gives."""
        found = cls(described["id"], described["digest"])
        if len(described) != 2 or not all(isinstance(text, str) and text for text in astuple(found)):
            raise ValueError(f"frozen as {described!r}")
        return found


def _option(*args: Any) -> Any:
    return field(metadata={"option": Option(*args)})


@dataclass(frozen=True)
class Settings:
    """The content of cache.json. `full_rows` is the rows of a full segment.

    `dataset` is None in a rolling cache. The cache of a dataset keeps what it has where room is short.
    `frozen` is None while the cache may change.
    """

    schema: Schema
    capacity_bytes: int
    segment_bytes: int
    full_rows: int
    headroom: float = _option(
        0.1,
        require_share,
        "{:.0%}".format,
        "Of the capacity, that an epoch leaves to samplers: 10% unless said.",
        _parse_share,
        "SHARE",
    )
    durable: bool = _option(False, _require_flag, _yes_no, "Sync every segment: a power cut loses none.")
    pace: Pace | None = None
    dataset: CachedItems | None = None
    frozen: Frozen | None = None

    @property
    def form(self) -> segment_file.Form:
        """The form of this cache's segments."""
        return segment_file.Form(self.schema, self.full_rows, self.segment_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Bytes that a loader's snapshot leaves to writers: at least two segments, or 0 if headroom is 0."""
        return max(int(self.headroom * self.capacity_bytes), 2 * self.segment_bytes) if self.headroom else 0

    @property
    def notes_bytes(self) -> int:
        """The most bytes that notes of a kind take, or files of weights: an eighth of the capacity."""
        return self.capacity_bytes // 8

    @property
    def options(self) -> dict[str, Any]:
        """The settings that stand by themselves, by name."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def table(self) -> list[tuple[str, str]]:
        """The settings that stand by themselves, in words: name and value."""
        table = [
            (name.replace("_", " "), OPTIONS[name].format(value)) for name, value in self.options.items()
        ]
        return table if self.frozen is None else [*table, ("frozen", f"as {self.frozen.id}")]

    def with_capacity(self, capacity_bytes: int) -> Settings:
        return replace(self, capacity_bytes=capacity_bytes)

    @cached_property
    def text(self) -> str:
        """The content of cache.json; `from_json` is the inverse."""
        record = {
            "format": "arrowcache",
            "version": FORMAT_VERSION,
            "schema": self.schema.to_json(),
            "capacity_bytes": self.capacity_bytes,
            "segment_bytes": self.segment_bytes,
            "full_rows": self.full_rows,
            **self.options,
        }
        if self.pace is not None:
            record["pace"] = self.pace.to_json()
        if self.dataset is not None:
            record["dataset"] = self.dataset.to_json()
        if self.frozen is not None:
            record["frozen"] = asdict(self.frozen)
        return json.dumps(record | {"checksum": _checksum(record)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read cache.json.

        Raises: CacheFormatError: not ours, damaged, or of another format version. Under a checksum that fits
            nothing is damaged: what cannot be read there is a newer format.
        """
        is_sound = False
        try:
            record: dict[str, Any] = json.loads(text)
            if record["format"] != "arrowcache":
                raise CacheFormatError(f"cache.json is of format {record['format']!r}, not 'arrowcache'")
            if record["version"] != FORMAT_VERSION:
                raise CacheFormatError(
                    f"the cache has format version {record['version']}, and this arrowcache reads "
                    f"{FORMAT_VERSION}: use the release that made it, or make a new one. Nothing was touched"
                )
            checksum = record.pop("checksum", None)
            is_sound = checksum == _checksum(record)
            if unknown := set(record) - {"format", "version", *cls.__dataclass_fields__}:
                raise newer_format(f"cache.json has {', '.join(map(repr, sorted(unknown)))}")
            if not is_sound:
                raise ValueError("its checksum does not fit its content")
            settings = cls(
                Schema.from_json(record["schema"]),
                parse_count(record["capacity_bytes"], "capacity_bytes", -MAX_BYTES, MAX_BYTES),
                parse_count(record["segment_bytes"], "segment_bytes", -MAX_BYTES, MAX_BYTES),
                parse_count(record["full_rows"], "full_rows", -MAX_BYTES, MAX_ROWS),
                pace=None if record.get("pace") is None else Pace.from_json(record["pace"]),
                dataset=None if record.get("dataset") is None else CachedItems.from_json(record["dataset"]),
                frozen=None if record.get("frozen") is None else Frozen.from_json(record["frozen"]),
                **{name: option.parse(record[name], name) for name, option in OPTIONS.items()},
            )
            if min(settings.capacity_bytes, settings.segment_bytes, settings.full_rows) <= 0:
                raise CacheFormatError("cache.json has a size that is not positive")
            if settings.full_rows * segment_file.row_bytes(settings.schema) > settings.segment_bytes:
                raise ValueError(f"segments of {format_count(settings.full_rows, 'row')}, which do not fit")
            return settings
        except (KeyError, TypeError, ValueError, OverflowError, SchemaError, RecursionError) as error:
            if is_sound:
                found = "a form without" if isinstance(error, KeyError) else "a value:"
                raise newer_format(f"cache.json has {found} {error}") from error
            raise CacheFormatError(
                f"cache.json is damaged: {error!r}. The segments beside it are plain Arrow files, and may be "
                "whole: put back a copy of cache.json, or that of a new cache of the same schema and sizes"
            ) from error


OPTIONS: dict[str, Option] = {
    each.name: each.metadata["option"] for each in fields(Settings) if "option" in each.metadata
}


def _checksum(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(record).encode())


def settings_of(
    schema: Schema,
    capacity: int | str,
    segment_bytes: int | str | None = None,
    segment_rows: int | None = None,
    dataset: CachedItems | None = None,
    **options: Any,
) -> Settings:
    """The settings of a new cache; of the items of a dataset, if it is given.

    Args:
        segment_bytes, options: None means as of `Cache.create`. Options are those of `OPTIONS`.
    Raises: ValueError: sizes that do not fit together, or a value that an option does not take.
    """
    capacity_bytes = parse_bytes(capacity, "capacity")
    given = {name: option.default for name, option in OPTIONS.items()}
    given |= {name: OPTIONS[name].parse(value, name) for name, value in options.items() if value is not None}
    if segment_rows is not None:
        segment_rows = parse_count(segment_rows, "segment_rows")
    if segment_bytes is None:
        bound = _default_bytes(schema, capacity_bytes, segment_rows or 1)
    else:
        bound = parse_bytes(segment_bytes, "segment_bytes")
    rows = segment_file.max_rows(schema, bound)
    if rows < 1:
        needed = segment_file.encoded_bytes_bound(schema, 1)
        raise ValueError(
            f"a row needs a segment of {format_bytes(needed)}, and segment_bytes is "
            f"{format_bytes(bound)}: raise segment_bytes"
        )
    if segment_rows is not None:
        if segment_rows > rows:
            needed = segment_file.encoded_bytes_bound(schema, segment_rows)
            raise ValueError(
                f"segment_rows={segment_rows} needs segments of {format_bytes(needed)}, and segment_bytes is "
                f"{format_bytes(bound)}: raise segment_bytes, or lower segment_rows to {rows}"
            )
        rows = segment_rows
        if not schema.variable:
            bound = segment_file.encoded_bytes_bound(schema, rows)
    settings = Settings(schema, capacity_bytes, bound, rows, dataset=dataset, **given)
    require_capacity(settings)
    return settings


def _default_bytes(schema: Schema, capacity_bytes: int, rows: int) -> int:
    """The size of a segment where none is said: it holds so many rows, and the capacity holds four.

    Raises: ValueError: the capacity is too little for segments of so many rows.
    """
    needed = segment_file.encoded_bytes_bound(schema, rows)
    most = min(capacity_bytes // _MIN_SEGMENTS, (capacity_bytes - room_of_two(0)) // 2)
    if needed > most:
        what = "a row needs" if rows == 1 else f"{rows} rows need"
        fewer = segment_file.max_rows(schema, most) if most > 0 else 0
        way = f", or lower segment_rows to {fewer}" if 0 < fewer < rows else ""
        raise ValueError(
            f"{what} a segment of {format_bytes(needed)}, and a capacity of {format_bytes(capacity_bytes)} "
            f"does not hold {_MIN_SEGMENTS} of them and what the cache itself needs: raise capacity to "
            f"{format_enough(_least_capacity(needed))}{way}"
        )
    return min(most, max(needed, min(capacity_bytes // _DEFAULT_SEGMENTS, _MAX_DEFAULT_BYTES)))


def settings_of_items(schema: Schema, capacity_bytes: int, item_bytes: int, dataset: CachedItems) -> Settings:
    """The settings of a new cache of a dataset: many segments of some items each.

    Args:
        schema: the columns of an item, with that of its index.
        item_bytes: of the values of variable length of its first item.
    Raises: ValueError: the capacity is less than some segments of one item.
    """
    of_one = segment_file.encoded_bytes_bound(schema, 1) + item_bytes
    least = _least_capacity(of_one)
    if capacity_bytes < least:
        raise ValueError(
            f"a capacity of {format_bytes(capacity_bytes)} is too little for items of "
            f"{format_bytes(of_one)}: raise capacity to {format_enough(least)}"
        )
    most = min(
        capacity_bytes // _MIN_SEGMENTS_OF_ITEMS, (capacity_bytes - room_of_two(0)) // 2, _MAX_DEFAULT_BYTES
    )
    wanted = max(capacity_bytes // _SEGMENTS_OF_ITEMS, _ITEMS * of_one)
    bound = max(of_one, min(wanted, most))
    return settings_of(schema, capacity_bytes, bound, headroom=0.0, dataset=dataset)


def require_pace(pace: Pace | None, settings: Settings) -> None:
    """Make sure that a pace is one, and that the capacity holds the rows that it waits for."""
    if pace is None:
        return
    if not isinstance(pace, Pace):
        raise TypeError(f"pace must be an arrowcache.Pace or None, not {pace!r}")
    least = pace.min_rows * segment_file.row_bytes(settings.schema)
    if least > settings.capacity_bytes:
        raise ValueError(
            f"min_rows={pace.min_rows} take {format_bytes(least)} or more, and the capacity is "
            f"{format_bytes(settings.capacity_bytes)}: lower min_rows, or raise the capacity"
        )


def require_capacity(settings: Settings, is_new: bool = True) -> None:
    """Make sure that the capacity holds some segments, and the rows that the pace waits for.

    Args:
        is_new: of a cache that is being made: its segments can still be smaller.
    """
    least = _least_capacity(settings.segment_bytes)
    if settings.capacity_bytes < least:
        smaller = "lower segment_bytes" if is_new else "make a new cache of smaller segments"
        instead = "give a new folder" if settings.dataset else smaller
        raise ValueError(
            f"a capacity of {format_bytes(settings.capacity_bytes)} is under {_MIN_SEGMENTS} segments of "
            f"{format_bytes(settings.segment_bytes)}: raise capacity to {format_enough(least)}, or {instead}"
        )
    require_pace(settings.pace, settings)


def _least_capacity(segment_bytes: int) -> int:
    return max(_MIN_SEGMENTS * segment_bytes, room_of_two(segment_bytes))


def beyond_disk(capacity_bytes: int, allocated_bytes: int, free_bytes: int) -> str:
    """Return the warning of a capacity that is more than its disk holds. Empty if it is not."""
    holds = allocated_bytes + free_bytes
    if capacity_bytes <= holds:
        return ""
    return (
        f"the capacity is {format_bytes(capacity_bytes)}, and the disk has {format_bytes(holds)} for the "
        f"cache ({format_bytes(free_bytes)} free): it will fill the disk, and then its oldest segments leave "
        "as if that were the capacity. Lower the capacity, or free space on the disk"
    )


def room_of_one(segment_bytes: int) -> int:
    """Bytes that a writer needs for a segment of this size."""
    return segment_bytes + PART_SLACK_BYTES + BOOKKEEPING_BYTES


def room_of_two(segment_bytes: int) -> int:
    """Bytes that two writers need at once. With less, samplers would stand still beside an epoch."""
    return 2 * (segment_bytes + PART_SLACK_BYTES) + BOOKKEEPING_BYTES
