"""Sizing: which rows, segments, capacity and pace fit together. Pure. Its errors say which would fit."""

from __future__ import annotations

from arrowcache.arrow import segment as segment_file
from arrowcache.arrow.schema import Schema
from arrowcache.storage.folder import PART_SLACK_BYTES
from arrowcache.storage.layout import CachedItems, Settings
from arrowcache.storage.pace import Pace
from arrowcache.units import format_bytes, format_enough, parse_bytes, parse_count

BOOKKEEPING_BYTES = 64 * 1024  # kept free for cache.json, pools/, ranks/ and folder blocks
_HEADROOM = 0.1
_LEAST_SEGMENTS = 4
_DEFAULT_SEGMENTS, _DEFAULT_BYTES = (
    16,
    64 << 20,
)  # a default segment is the lesser of a share and so many bytes
_SEGMENTS_OF_ITEMS, _LEAST_OF_ITEMS = (
    64,
    6,
)  # that the capacity of a dataset's cache holds; if items are large
_MOST_OF_ITEMS_BYTES = 64 << 20  # of such a segment
_ITEMS = 4  # of the size of the first, that it holds


def settings_of(
    schema: Schema,
    capacity: int | str,
    segment_bytes: int | str | None,
    segment_rows: int | None,
    headroom: float | None,
    durable: bool | None,
    dataset: CachedItems | None = None,
) -> Settings:
    """The settings of a new cache; of the items of a dataset, if it is given.

    Args:
        segment_bytes, headroom, durable: None means as of `Cache.create`.
    Raises: ValueError: sizes that do not fit together.
    """
    capacity_bytes = parse_bytes(capacity, "capacity")
    headroom = _HEADROOM if headroom is None else headroom
    require_share(headroom, "headroom")
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
                f"{segment_rows} rows need segments of {format_bytes(needed)}, and segment_bytes is "
                f"{format_bytes(bound)}: raise segment_bytes, or lower segment_rows to {rows}"
            )
        rows = segment_rows
        if not schema.variable:
            bound = segment_file.encoded_bytes_bound(schema, rows)
    settings = Settings(schema, capacity_bytes, bound, rows, float(headroom), bool(durable), dataset=dataset)
    require_capacity(settings)
    return settings


def _default_bytes(schema: Schema, capacity_bytes: int, rows: int) -> int:
    """The size of a segment where none is said: it holds so many rows, and the capacity holds four.

    Raises: ValueError: the capacity is too little for segments of so many rows.
    """
    needed = segment_file.encoded_bytes_bound(schema, rows)
    most = min(capacity_bytes // _LEAST_SEGMENTS, (capacity_bytes - room_of_two(0)) // 2)
    if needed > most:
        what = "a row needs" if rows == 1 else f"{rows} rows need"
        fewer = segment_file.max_rows(schema, most) if most > 0 else 0
        way = f", or lower segment_rows to {fewer}" if 0 < fewer < rows else ""
        raise ValueError(
            f"{what} a segment of {format_bytes(needed)}, and a capacity of {format_bytes(capacity_bytes)} "
            f"does not hold {_LEAST_SEGMENTS} of them and what the cache itself needs: raise capacity to "
            f"{format_enough(_least_capacity(needed))}{way}"
        )
    return min(most, max(needed, min(capacity_bytes // _DEFAULT_SEGMENTS, _DEFAULT_BYTES)))


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
        capacity_bytes // _LEAST_OF_ITEMS, (capacity_bytes - room_of_two(0)) // 2, _MOST_OF_ITEMS_BYTES
    )
    wanted = max(capacity_bytes // _SEGMENTS_OF_ITEMS, _ITEMS * of_one)
    bound = max(of_one, min(wanted, most))
    return settings_of(schema, capacity_bytes, bound, None, 0.0, durable=False, dataset=dataset)


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
            f"a capacity of {format_bytes(settings.capacity_bytes)} is under {_LEAST_SEGMENTS} segments of "
            f"{format_bytes(settings.segment_bytes)}: raise capacity to {format_enough(least)}, or {instead}"
        )
    require_pace(settings.pace, settings)


def _least_capacity(segment_bytes: int) -> int:
    return max(_LEAST_SEGMENTS * segment_bytes, room_of_two(segment_bytes))


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
