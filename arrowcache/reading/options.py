"""Options: the user's arguments, checked, as they travel: those of epochs, and those of their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arrowcache.arrow.schema import Schema
from arrowcache.arrow.segment import row_bytes
from arrowcache.cgroup import memory_bytes
from arrowcache.reading.membership import Membership
from arrowcache.reading.plan import SHUFFLES
from arrowcache.storage.layout import SegmentInfo, Settings, Term
from arrowcache.storage.store import Store
from arrowcache.units import format_bytes, parse_bytes, parse_count, parse_seconds, require_function

WORKER_TYPES = ("process", "thread")
_MOST_BATCH_ROWS = (1 << 31) - 1
_MOST_WORKERS = 256
_MOST_PREFETCHED = 1 << 16
_TERMS = ("batch_size", "shuffle", "seed", "epoch_rows", "drop_last", "window_bytes")


@dataclass(frozen=True, slots=True)
class EpochOptions:
    """What decides which rows an epoch has, as of `Loader`; the same on all ranks. `names`: of columns."""

    batch_size: int
    shuffle: str | None
    seed: int
    epoch_rows: int | None
    drop_last: bool
    window_bytes: int
    wait_rows: int
    paced: bool
    where: Callable[[SegmentInfo], bool] | None = None
    timeout_seconds: float | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def checked(
        cls,
        settings: Settings,
        columns: Sequence[str] | None,
        batch_size: int,
        *,
        shuffle: str | None,
        seed: int,
        drop_last: bool,
        epoch_rows: int | None,
        wait_rows: int,
        window_bytes: int | str | None,
        paced: bool,
        where: Callable[[SegmentInfo], bool] | None,
        timeout: float | None,
    ) -> EpochOptions:
        """Check arguments.

        Raises: ValueError, TypeError: an argument that does not fit.
        """
        names = settings.schema.select(columns, least=1)
        require_function(where, "where")
        if shuffle not in SHUFFLES:
            raise ValueError(f"shuffle={shuffle!r} is unknown: use one of {SHUFFLES}")
        if window_bytes is not None and shuffle != "window":
            raise ValueError(f"window_bytes belongs to shuffle='window', not {shuffle!r}: leave it out")
        if window_bytes is None:
            window_bytes = min(memory_bytes(), settings.capacity_bytes) // 4
        return cls(
            batch_size=_batch_rows(batch_size, settings.schema, names),
            shuffle=shuffle,
            seed=parse_count(seed, "seed", least=0, most=None),
            epoch_rows=None if epoch_rows is None else parse_count(epoch_rows, "epoch_rows"),
            drop_last=parse_flag(drop_last, "drop_last"),
            window_bytes=parse_bytes(window_bytes, "window_bytes"),
            wait_rows=parse_count(wait_rows, "wait_rows"),
            paced=parse_flag(paced, "paced"),
            where=where,
            timeout_seconds=parse_seconds(timeout, "timeout"),
            names=names,
        )

    def terms(self) -> dict[str, Term]:
        """Those that decide an epoch's order: ranks agree on them."""
        return {name: getattr(self, name) for name in _TERMS}

    def step_rows(self, world_size: int) -> int:
        """Rows of one step of all ranks."""
        return self.batch_size * world_size

    def needed_rows(self, world_size: int) -> int:
        """Rows that an epoch waits for."""
        return max(self.wait_rows, self.step_rows(world_size) if self.drop_last else 1)

    def require_step(self, ranks: Membership | None) -> None:
        """Make sure that an epoch of given rows has a step of all ranks.

        Raises: ValueError: it has none.
        """
        world_size = ranks.world_size if ranks else 1
        step_rows = self.step_rows(world_size)
        if self.epoch_rows is not None and self.drop_last and self.epoch_rows < step_rows:
            raise ValueError(
                f"epoch_rows={self.epoch_rows} is less than one step of {step_rows} rows: "
                "raise it, or pass drop_last=False"
            )

    def require_fit(self, store: Store, ranks: Membership | None) -> None:
        """`require_step`, and the capacity, as it is now, may hold the rows that an epoch waits for.

        Raises: ValueError: it cannot. A cache that is to be resized later must be so before.
        """
        self.require_step(ranks)
        rows = self.needed_rows(ranks.world_size if ranks else 1)
        least = rows * row_bytes(store.settings.schema)  # variable-length data not counted
        if least <= store.settings.capacity_bytes:
            return
        store.refresh_settings()  # somebody may have resized it
        capacity_bytes = store.settings.capacity_bytes
        if least > capacity_bytes:
            fact, way = f"wait_rows={rows} take", "lower wait_rows"
            if rows > self.wait_rows:
                fact, way = f"one step of {rows} rows takes", "lower batch_size, pass drop_last=False"
            raise ValueError(
                f"{fact} {format_bytes(least)} or more, and the capacity is {format_bytes(capacity_bytes)} "
                f"now: {way}, or raise the capacity first"
            )


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How batches are made, as of `Loader`. `views`: they may be zero-copy views.

    Raises: ValueError, TypeError: an argument that does not fit.
    """

    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    with_ids: bool = False
    views: bool = False
    workers: int = 0
    worker_type: str = "thread"
    prefetch: int | None = None

    def __post_init__(self) -> None:
        require_function(self.transform, "transform")
        parse_flag(self.with_ids, "with_ids")
        if self.worker_type not in WORKER_TYPES:
            raise ValueError(f"worker_type={self.worker_type!r} is unknown: use one of {WORKER_TYPES}")
        workers, prefetch = parse_count(self.workers, "workers", least=0, most=_MOST_WORKERS), self.prefetch
        if prefetch is not None:
            prefetch = parse_count(prefetch, "prefetch", most=_MOST_PREFETCHED)
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "prefetch", prefetch)


def _batch_rows(batch_size: int, schema: Schema, names: Sequence[str]) -> int:
    rows = parse_count(batch_size, "batch_size", most=_MOST_BATCH_ROWS)
    nbytes = rows * sum(schema.fixed[name].row_bytes for name in names if name in schema.fixed)
    if nbytes > memory_bytes():
        raise ValueError(
            f"batch_size={batch_size} rows take {format_bytes(nbytes)}, and there are "
            f"{format_bytes(memory_bytes())} of memory: lower it, or name fewer columns"
        )
    return rows


def parse_flag(value: bool, name: str) -> bool:
    """Raises: TypeError: it is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value
