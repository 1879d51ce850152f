"""Sizing: which rows, segments, capacity and pace fit together. Pure. Its errors say which would fit."""

from __future__ import annotations

from arrowcache.arrow import segment as segment_file
from arrowcache.arrow.arrangement import needs_gaps
from arrowcache.arrow.schema import Schema
from arrowcache.storage.folder import PART_SLACK_BYTES
from arrowcache.storage.layout import DATASET_VERSION, FORMAT_VERSION, PAGED_VERSION, CachedItems, Settings
from arrowcache.storage.pace import Pace
from arrowcache.units import format_bytes, parse_bytes, parse_count

BOOKKEEPING_BYTES = 64 * 1024  # kept free for cache.json, pools/, ranks/ and folder blocks
_LEAST_SEGMENTS = 4


def settings_of(
    schema: Schema,
    capacity: int | str,
    segment_bytes: int | str,
    segment_rows: int | None,
    headroom: float,
    durable: bool,
    dataset: CachedItems | None = None,
) -> Settings:
    """The settings of a new cache; of the items of a dataset, if it is given.

    Raises: ValueError: sizes that do not fit together.
    """
    capacity_bytes = parse_bytes(capacity, "capacity")
    bound = parse_bytes(segment_bytes, "segment_bytes")
    require_share(headroom, "headroom")
    paged = needs_gaps(schema)
    rows = segment_file.max_rows(schema, bound, paged=paged)
    if rows < 1:
        needed = segment_file.encoded_bytes_bound(schema, 1, paged=paged)
        raise ValueError(
            f"a row needs a segment of {format_bytes(needed)}, and segment_bytes is "
            f"{format_bytes(bound)}: raise segment_bytes"
        )
    if segment_rows is not None:
        segment_rows = parse_count(segment_rows, "segment_rows")
        if segment_rows > rows:
            needed = segment_file.encoded_bytes_bound(schema, segment_rows, paged=paged)
            raise ValueError(
                f"{segment_rows} rows need segments of {format_bytes(needed)}, and segment_bytes is "
                f"{format_bytes(bound)}: raise segment_bytes, or lower segment_rows to {rows}"
            )
        rows = segment_rows
        if not schema.variable:
            bound = segment_file.encoded_bytes_bound(schema, rows, paged=paged)
    version = DATASET_VERSION if dataset else PAGED_VERSION if paged else FORMAT_VERSION
    settings = Settings(
        schema, capacity_bytes, bound, rows, float(headroom), bool(durable), version=version, dataset=dataset
    )
    require_capacity(settings)
    return settings


def require_share(share: float, name: str) -> None:
    """Make sure that an argument is a share of the capacity, less than all of it."""
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"{name}={share!r} is a share of the capacity: give 0 <= {name} < 1")


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


def require_capacity(settings: Settings) -> None:
    """Make sure that the capacity holds some segments, and the rows that the pace waits for."""
    least = max(_LEAST_SEGMENTS * settings.segment_bytes, room_of_two(settings.segment_bytes))
    if settings.capacity_bytes < least:
        raise ValueError(
            f"a capacity of {format_bytes(settings.capacity_bytes)} is under {_LEAST_SEGMENTS} segments of "
            f"{format_bytes(settings.segment_bytes)}: raise capacity to {format_bytes(least)}, "
            "or lower segment_bytes"
        )
    require_pace(settings.pace, settings)


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
