"""Cache: the public face over the store, snapshots and writers. It decides nothing by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from arrowcache.arrow import segment as segment_file
from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage import verification
from arrowcache.storage.layout import SegmentInfo, Settings
from arrowcache.storage.recovery import create_store, open_store
from arrowcache.storage.store import CacheStats, Store, room_of_two
from arrowcache.storage.verification import Problem
from arrowcache.storage.writer import Writer
from arrowcache.units import format_bytes, parse_bytes, parse_count

if TYPE_CHECKING:
    from typing import Self

    import pyarrow.dataset

_LEAST_SEGMENTS = 4


class Cache:
    """A rolling cache: a local folder of segments with a byte budget that drops its oldest.

    Made by `Cache.create` or `Cache.open`. Safe to use from several threads and processes;
    pickles as its path. Sizes are bytes as int, or text with kB MB GB TB or KiB MiB GiB TiB.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = False

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        schema: Schema | Mapping[str, FieldType],
        capacity: int | str,
        segment_bytes: int | str = "64MiB",
        segment_rows: int | None = None,
        headroom: float = 0.1,
        durable: bool = False,
        exist_ok: bool = False,
    ) -> Cache:
        """Make a cache in a new or empty folder (mode 0700).

        Args:
            path: the folder, on a local disk.
            schema: what a sample holds.
            capacity: the budget in bytes for everything under the folder.
            segment_bytes: upper bound on a segment's file.
            segment_rows: rows of a full segment; None: as many as segment_bytes allows.
            headroom: share of the capacity, in [0, 1), that snapshots leave unleased when the cache
                is nearly full, so that samplers go on; at least two segments.
            durable: sync each segment before it is published.
            exist_ok: open a cache that is there already; another capacity resizes it, its other
                settings stay.
        Raises: ValueError: sizes that do not fit together. FileExistsError: a cache is there.
            CacheFormatError: the folder holds something else. SchemaError: exist_ok and another
            schema.
        """
        if not isinstance(schema, Schema):
            schema = Schema(schema)
        settings = _settings(schema, capacity, segment_bytes, segment_rows, headroom, durable)
        return cls(create_store(Path(path).absolute(), settings, exist_ok=exist_ok))

    @classmethod
    def open(cls, path: str | os.PathLike[str], check: str = "structure") -> Cache:
        """Open a cache.

        Args:
            path: its folder.
            check: what is checked when a segment is first mapped: "structure", or "bytes" too.
        Raises: FileNotFoundError: no folder. CacheFormatError: not a cache, or a newer format.
        """
        return cls(open_store(Path(path).absolute(), check=check))

    @property
    def path(self) -> Path:
        return self._store.folder.path

    @property
    def schema(self) -> Schema:
        return self._store.settings.schema

    @property
    def store(self) -> Store:
        """The layer below, for the package's own use."""
        if self._closed:
            raise ValueError("the cache is closed: open it again with Cache.open")
        return self._store

    def writer(
        self, on_full: str = "wait", timeout: float | None = None, max_delay: float | None = None
    ) -> Writer:
        """A writer of samples; use it in a `with` block, or close it.

        Args:
            on_full: "wait" for room (a warning after 30 s names what it waits for), or "raise".
            timeout: seconds to wait at most; None: no bound.
            max_delay: seconds after which a part-filled segment is published.
        """
        return Writer(self.store, on_full=on_full, timeout=timeout, max_delay=max_delay)

    def snapshot(self, where: Callable[[SegmentInfo], bool] | None = None) -> Snapshot:
        """Lease what is published now; use it in a `with` block, or close it.

        Args:
            where: which segments, by SegmentInfo(seq, rows, task, nbytes, ...); None for all.
        """
        return Snapshot.take(self.store, where)

    def stats(self) -> CacheStats:
        """What the cache holds at this moment, of all processes."""
        return self.store.stats()

    def verify(self, repair: bool = True) -> list[Problem]:
        """Check every segment's structure and bytes, names, tasks and the capacity.

        Blocks: reads the whole cache; nobody waits for it.
        Returns: the problems, empty when all is well. What fails is quarantined if `repair`.
        """
        return verification.verify(self.store, repair=repair)

    def dataset(self) -> pyarrow.dataset.Dataset:
        """A pyarrow dataset over the mapped files, without a copy; leases them while it lives."""
        import pyarrow.dataset  # 20 ms that few need

        with self.snapshot() as snapshot:
            return pyarrow.dataset.dataset(snapshot.table())

    def evict(self, nbytes: int | str) -> int:
        """Evict the oldest segments until `nbytes` are freed, or up to the first leased one.

        Returns: the bytes freed.
        """
        return self.store.evict(parse_bytes(nbytes, "nbytes"))

    def resize(self, capacity: int | str) -> None:
        """Change the capacity for all processes; what no longer fits is evicted.

        Raises: ValueError: under four segments. CacheFullError: leased segments do not fit.
        """
        capacity_bytes = parse_bytes(capacity, "capacity")
        _require_capacity(capacity_bytes, self.store.settings.segment_bytes)
        self.store.resize(capacity_bytes)

    def close(self) -> None:
        """Refuse further use through this object; open snapshots go on. Idempotent."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Cache], tuple[str, str]]:
        check = "bytes" if self._store.check_bytes else "structure"
        return Cache.open, (str(self.path), check)

    def __repr__(self) -> str:
        capacity = format_bytes(self._store.settings.capacity_bytes)
        return f"<Cache {self.path}: {len(self.schema)} columns, capacity {capacity}>"


def _settings(
    schema: Schema,
    capacity: int | str,
    segment_bytes: int | str,
    segment_rows: int | None,
    headroom: float,
    durable: bool,
) -> Settings:
    """Check that sizes fit together."""
    capacity_bytes = parse_bytes(capacity, "capacity")
    bound = parse_bytes(segment_bytes, "segment_bytes")
    if not isinstance(headroom, int | float) or not 0 <= headroom < 1:
        raise ValueError(f"headroom={headroom!r} is a share of the capacity: give 0 <= headroom < 1")
    rows = segment_file.max_rows(schema, bound)
    if rows < 1:
        needed = segment_file.encoded_bytes_bound(schema, 1)
        raise ValueError(
            f"a row needs a segment of {format_bytes(needed)}, and segment_bytes is "
            f"{format_bytes(bound)}: raise segment_bytes"
        )
    if segment_rows is not None:
        segment_rows = parse_count(segment_rows, "segment_rows")
        if segment_rows > rows:
            needed = segment_file.encoded_bytes_bound(schema, segment_rows)
            raise ValueError(
                f"{segment_rows} rows need segments of {format_bytes(needed)}, and segment_bytes is "
                f"{format_bytes(bound)}: raise segment_bytes, or lower segment_rows to {rows}"
            )
        rows = segment_rows
        if not schema.variable:
            bound = segment_file.encoded_bytes_bound(schema, rows)
    _require_capacity(capacity_bytes, bound)
    return Settings(schema, capacity_bytes, bound, rows, float(headroom), bool(durable))


def _require_capacity(capacity_bytes: int, segment_bytes: int) -> None:
    least = max(_LEAST_SEGMENTS * segment_bytes, room_of_two(segment_bytes))
    if capacity_bytes < least:
        raise ValueError(
            f"a capacity of {format_bytes(capacity_bytes)} is under {_LEAST_SEGMENTS} segments of "
            f"{format_bytes(segment_bytes)}: raise capacity to {format_bytes(least)}, "
            "or lower segment_bytes"
        )
