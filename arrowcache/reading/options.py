"""Options: the arguments of a loader, checked, as one frozen value.

`Loader` documents each argument. All faces take keyword arguments of the types below; `takes` has `help()`
and completion show them one by one, and refuses others. Code behind a face never takes a single option: it
takes the value. `rank_info` finds a loader's rank and job, from its arguments and the environment.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from inspect import Parameter
from typing import Any, TypedDict

from arrowcache.arguments import Face, face
from arrowcache.arrow.expression import is_expression
from arrowcache.arrow.schema import Schema
from arrowcache.arrow.segment import row_bytes
from arrowcache.proc import memory_bytes
from arrowcache.reading.budget import Budget
from arrowcache.reading.columns import ColumnFunctions, Columns
from arrowcache.reading.packing import Packing
from arrowcache.reading.row_filter import INCLUDED, require_expected, require_rows, rows_term
from arrowcache.reading.row_weights import require_weights
from arrowcache.reading.shuffle import Shuffle
from arrowcache.storage.layout import SegmentInfo, Term
from arrowcache.storage.settings import Settings
from arrowcache.storage.store import Store
from arrowcache.storage.used_rows import require_name_of_rows
from arrowcache.units import (
    as_int,
    format_bytes,
    format_count,
    parse_bytes,
    parse_count,
    parse_seconds,
    require_function,
)

WORKER_TYPES = ("process", "thread")
MAX_BATCH_ROWS = (1 << 31) - 1
MAX_WORKERS = 256
MAX_PREFETCHED = 1 << 16
_BATCH_SIZE = 64  # where nothing else is said
_FROZEN_WINDOW_BYTES = 2 << 30  # of a frozen cache: the order is the same on all machines
_TERMS = (
    "batch_size", "batch_tokens", "length_of", "shuffle", "seed", "epoch_rows", "drop_last", "window_bytes",
)  # fmt: skip


class EpochArguments(TypedDict, total=False):
    """Keyword arguments of all that make epochs, as of `Loader`."""

    where: Callable[[SegmentInfo], bool] | None
    rows: object
    rank: int | None
    world_size: int | None
    run_id: str | None
    epoch_rows: int | None
    wait_rows: int
    timeout: float | None
    window_bytes: int | str | None
    paced: bool
    expect: str | Sequence[str]


class WeighedArguments(EpochArguments, total=False):
    """Keyword arguments of all that make epochs which may draw rows by weights, as of `Loader`."""

    weights: object


class DatasetArguments(WeighedArguments, total=False):
    """Keyword arguments of `arrowcache.tensorflow.dataset` that are those of `Loader`."""

    batch_tokens: int | None
    length_of: str | None


class PackedArguments(EpochArguments, total=False):
    """Keyword arguments of `arrowcache.torch.packed` that are those of `Loader`."""

    shuffle: str | None
    prefetch: int | None


class LoaderArguments(DatasetArguments, total=False):
    """All keyword arguments of `Loader`."""

    shuffle: str | None
    seed: int
    columns: Sequence[str] | Mapping[str, Callable[[Any], Any] | None] | None
    drop_last: bool
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None
    workers: int
    worker_type: str
    prefetch: int | None
    with_ids: bool
    once: str | None
    acknowledge: bool


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The arguments of `Loader`, with its defaults, and values derived from them for a cache.

    Args:
        may_view: batches may be views of the cache's files.
        packing: sequences that batches are made of, in place of rows. The rows are documents, one a step of
            the order, and all ranks have the same order.
    Raises: ValueError, TypeError: an argument that does not fit.
    """

    settings: InitVar[Settings]
    batch_size: int | None = None
    shuffle: str | None = "rows"
    seed: int = 0
    columns: Sequence[str] | Mapping[str, Callable[[Any], Any] | None] | None = None
    drop_last: bool = True
    transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    workers: int = 0
    worker_type: str = "process"
    prefetch: int | None = None
    where: Callable[[SegmentInfo], bool] | None = None
    rows: object = INCLUDED
    with_ids: bool = False
    rank: int | None = None
    world_size: int | None = None
    run_id: str | None = None
    epoch_rows: int | None = None
    wait_rows: int = 1
    timeout: float | None = 60.0
    window_bytes: int | str | None = None
    paced: bool = True
    batch_tokens: int | None = None
    length_of: str | None = None
    weights: object = None
    expect: str | Sequence[str] = ()
    once: str | None = None
    acknowledge: bool = False
    may_view: bool = True
    packing: Packing | None = None
    names: tuple[str, ...] = field(init=False)  # of the columns
    shuffling: Shuffle = field(init=False)
    budget: Budget | None = field(init=False)  # of a batch, in place of batch_size
    most_rows: int = field(init=False)  # of a batch: batch_size, or as many as a budget has tokens
    window_nbytes: int = field(init=False)  # of a window
    is_frozen: bool = field(init=False)  # the cache: its ranks agree on nothing

    def __post_init__(self, settings: Settings) -> None:
        transform, functions = self.transform, dict[str, Callable[[Any], Any]]()
        require_function(transform, "transform")
        columns: object = self.columns
        if isinstance(columns, Mapping) and not isinstance(columns, Schema):
            for name, function in columns.items():
                require_function(function, f"columns[{name!r}]")
            functions = {name: function for name, function in columns.items() if function is not None}
            columns = tuple(columns)
        names = settings.schema.select(columns, least=1)
        if functions:
            transform = ColumnFunctions(functions, transform)
        require_weights(self.weights, settings.schema)
        require_function(self.where, "where")
        shuffling = Shuffle.named(self.shuffle)
        if self.worker_type not in WORKER_TYPES:
            raise ValueError(f"worker_type={self.worker_type!r} is unknown: use one of {WORKER_TYPES}")
        if self.weights is not None and not shuffling.is_uniform:
            raise ValueError(
                f"weights= draws rows from everywhere, which is not the order of shuffle={self.shuffle!r}: "
                "leave shuffle out"
            )
        if self.window_bytes is not None and shuffling is not Shuffle.WINDOW:
            raise ValueError(f"window_bytes belongs to shuffle='window', not {self.shuffle!r}: leave it out")
        for flag in ("drop_last", "with_ids", "paced", "acknowledge"):
            if not isinstance(value := getattr(self, flag), bool):
                raise TypeError(f"{flag} must be True or False, not {value!r}")
        require_name(self.run_id)
        budget = self._parsed_budget(settings.schema, names)
        batch_size = self.batch_size
        if budget is None:
            batch_size = _batch_rows(
                _BATCH_SIZE if batch_size is None else batch_size, settings.schema, names
            )
        window_bytes = self.window_bytes
        if window_bytes is None:
            most = memory_bytes() if settings.frozen is None else 4 * _FROZEN_WINDOW_BYTES
            window_bytes = min(most, settings.capacity_bytes) // 4
        parsed = {
            "batch_size": batch_size,
            "budget": budget,
            "most_rows": batch_size if budget is None else budget.tokens,
            "seed": parse_count(self.seed, "seed", least=0, most=None),
            "workers": parse_count(self.workers, "workers", least=0, most=MAX_WORKERS),
            "wait_rows": parse_count(self.wait_rows, "wait_rows"),
            "timeout": _timeout_seconds(self.timeout),
            "names": names,
            "columns": names,  # with the transform, so that `replace` calls no function twice
            "transform": transform,
            "shuffling": shuffling,
            "rows": require_rows(self.rows),
            "expect": require_expected(self.expect, self.rows, self.weights, self.once is not None),
            "window_nbytes": parse_bytes(window_bytes, "window_bytes"),
            "is_frozen": settings.frozen is not None,
        }
        if self.epoch_rows is not None:
            parsed["epoch_rows"] = parse_count(self.epoch_rows, "epoch_rows")
        if self.prefetch is not None:
            parsed["prefetch"] = parse_count(self.prefetch, "prefetch", least=0, most=MAX_PREFETCHED)
        if self.once is not None:
            self._require_fit_for_once()
            # nothing is ahead of the consumer, who says by their ids which rows are done
            parsed |= {"prefetch": 0, "may_view": False, "with_ids": self.with_ids or self.acknowledge}
            parsed |= {"shuffle": None, "shuffling": Shuffle.named(None)}
        elif self.acknowledge:
            raise ValueError("acknowledge=True belongs to once='a name': give both, or none")
        for name, value in parsed.items():
            object.__setattr__(self, name, value)

    @property
    def chosen_by(self) -> tuple[str, ...]:
        """The arguments that look at all rows, or segments, as an epoch begins."""
        given = {
            "where": self.where is not None,
            "rows": callable(self.rows),
            "an expression in rows": is_expression(self.rows),
            "weights": self.weights is not None,
            "batch_tokens": self.budget is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    @property
    def views(self) -> bool:
        """True if batches that are one run of rows are views."""
        return self.may_view and self.shuffling.has_runs and self.budget is None

    @property
    def rank_info(self) -> RankInfo | None:
        """Return the rank and job of the arguments, or None for a single process.

        Raises: ValueError, TypeError: an argument does not fit, or is missing.
        """
        return self.rank_info_of(self.rank, self.world_size)

    def rank_info_of(self, rank: int | None, world_size: int | None) -> RankInfo | None:
        """Return the rank info of a rank that is known otherwise. Raises: as `rank_info`."""
        return rank_info(rank, world_size, self.run_id, needs_run=not self.is_frozen)

    def terms(self) -> dict[str, Term]:
        """Return the options that decide an epoch's order: ranks agree on them."""
        terms = {name: getattr(self, name) for name in _TERMS}
        weights = None if self.weights is None else rows_term(self.weights)
        terms |= {"window_bytes": self.window_nbytes, "rows": rows_term(self.rows), "weights": weights}
        return terms if self.packing is None else terms | self.packing.terms()

    def step_rows(self, world_size: int) -> int:
        """Return the rows of one step of all ranks together; with a budget the least."""
        return (self.batch_size or 1) * world_size

    def needed_rows(self, world_size: int) -> int:
        """Return the number of rows that an epoch waits for."""
        return max(self.wait_rows, self.step_rows(world_size) if self.drop_last else 1)

    def require_fit(self, store: Store, world_size: int) -> None:
        """Check that `epoch_rows` has a step of all ranks, and the capacity the rows that an epoch waits for.

        Raises: ValueError: it has not. Resize the cache first, if it is to have more room.
        """
        step_rows = self.step_rows(world_size)
        if self.epoch_rows is not None and self.drop_last and self.epoch_rows < step_rows:
            raise ValueError(
                f"epoch_rows={self.epoch_rows} is less than one step of {format_count(step_rows, 'row')}: "
                "raise it, or pass drop_last=False"
            )
        rows = self.needed_rows(world_size)
        least = rows * row_bytes(store.settings.schema)  # variable-length data not counted
        if least <= store.settings.capacity_bytes:
            return
        store.refresh_settings()  # another process may have resized it
        capacity_bytes = store.settings.capacity_bytes
        if least > capacity_bytes:
            fact, way = f"wait_rows={rows} takes", "lower wait_rows"
            if rows > self.wait_rows:
                fact, way = (
                    f"one step of {format_count(rows, 'row')} takes",
                    "lower batch_size, pass drop_last=False",
                )
            raise ValueError(
                f"{fact} {format_bytes(least)} or more, and the capacity is {format_bytes(capacity_bytes)} "
                f"now: {way}, or raise the capacity first"
            )

    def _require_fit_for_once(self) -> None:
        """Raises: ValueError, TypeError: `once` is no name, or another option does not go with it."""
        require_name_of_rows(self.once)
        has_ranks = self.rank is not None or self.world_size is not None
        unfit = {
            "epoch_rows": (self.epoch_rows is not None, "it has no epochs"),
            "weights": (self.weights is not None, "each row comes once"),
            "batch_tokens": (self.batch_tokens is not None, "a batch is the oldest rows"),
            "packed()": (self.packing is not None, "a batch is the oldest rows"),
            "shuffle": (self.shuffle not in ("rows", None), "a batch is the oldest rows"),
            "wait_rows": (self.wait_rows != 1, "a batch waits for its own rows"),
            "workers": (self.workers != 0, "nothing is begun ahead"),
            "prefetch": (self.prefetch not in (None, 0), "nothing is begun ahead"),
            "world_size": (
                has_ranks and parse_ranks(self.rank, self.world_size) != (0, 1),
                "give each rank a name of its own, and where=lambda segment: segment.seq % ranks == rank",
            ),
        }
        for name, (is_given, why) in unfit.items():
            if is_given:
                raise ValueError(f"{name} does not go with once={self.once!r}: {why}; leave it out")

    def _parsed_budget(self, schema: Schema, names: Sequence[str]) -> Budget | None:
        """Return the budget of a batch, or None: batches have `batch_size` rows."""
        if self.batch_tokens is None:
            if self.length_of is not None:
                raise ValueError(f"length_of={self.length_of!r} belongs to batch_tokens: give both, or none")
            return None
        if self.batch_size is not None:
            raise ValueError(
                f"batch_tokens={self.batch_tokens!r} takes the place of batch_size={self.batch_size!r}: "
                "leave one out"
            )
        if self.weights is not None:
            raise ValueError("batch_tokens has each row once, and weights draws rows: leave one out")
        if self.shuffle not in ("rows", None):
            raise ValueError(
                f"batch_tokens sorts rows by length, which is not the order of shuffle={self.shuffle!r}: "
                "pass 'rows' or None"
            )
        return Budget.of(self.batch_tokens, self.length_of, schema, names)


def takes(name: str, arguments: type[EpochArguments], instead: Mapping[str, str]) -> Callable[[Face], Face]:
    """Decorate a face that passes on such keyword arguments, as `arrowcache.arguments.face`."""
    known, names = inspect.signature(LoaderOptions).parameters, arguments.__annotations__
    passed = [known[name].replace(kind=Parameter.KEYWORD_ONLY) for name in known if name in names]
    return face(name, instead, passed)


def _batch_rows(batch_size: int, schema: Schema, names: Sequence[str]) -> int:
    rows = parse_count(batch_size, "batch_size", most=MAX_BATCH_ROWS)
    nbytes = rows * Columns.of(schema, names).row_bytes
    if nbytes > memory_bytes():
        raise ValueError(
            f"batch_size={batch_size} takes {format_bytes(nbytes)}, and there are "
            f"{format_bytes(memory_bytes())} of memory: lower it, or name fewer columns"
        )
    return rows


def _timeout_seconds(timeout: float | None) -> float | None:
    if (seconds := parse_seconds(timeout, "timeout")) == 0:
        raise ValueError(f"timeout={timeout!r} leaves no time for any batch: give seconds > 0, or None")
    return seconds


_MAX_RANKS = 1 << 20  # a step of all of them is counted in 64 bits
_NO_ELASTIC_RUN = "none"  # torchrun's TORCHELASTIC_RUN_ID without --rdzv-id


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of a loader in its run. `local_world_size` ranks read on this node."""

    rank: int
    world_size: int
    run: str
    local_world_size: int


def rank_info(
    rank: int | None, world_size: int | None, run_id: str | None, *, needs_run: bool = True
) -> RankInfo | None:
    """Return the rank and run of a loader, from its arguments and the environment.

    The run is `run_id`, else TORCHELASTIC_RUN_ID (not torchrun's "none"), else
    MASTER_ADDR:MASTER_PORT; the local ranks are LOCAL_WORLD_SIZE, else all.

    Args:
        needs_run: False if the ranks agree on nothing: the run is empty.
    Returns: None for a loader without others to agree with: no rank, or a world of one.
    Raises: ValueError, TypeError: an argument does not fit, or is missing.
    """
    require_name(run_id)
    ranks = parse_ranks(rank, world_size)
    if ranks is None:
        if run_id is not None:
            raise ValueError(f"run_id={run_id!r} is given without a rank: pass rank and world_size, too")
        return None
    if ranks[1] == 1:
        return None
    return RankInfo(*ranks, _run(run_id) if needs_run else "", _local_world_size(ranks[1]))


def parse_ranks(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Check a rank and the number of ranks. None: neither is given.

    Raises: ValueError, TypeError: one does not fit, or is missing.
    """
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        raise ValueError(f"rank={rank!r} and world_size={world_size!r} go together: pass {missing}, too")
    rank, world_size = _integer(rank, "rank"), _integer(world_size, "world_size")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: ranks count from 0 to world_size - 1")
    return rank, parse_count(world_size, "world_size", most=_MAX_RANKS)


def require_name(run_id: str | None) -> None:
    """Raises: TypeError: not a text."""
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(f"run_id must be a str, not {run_id!r}")


def _integer(value: int, name: str) -> int:
    if not isinstance(value, bool):
        try:
            return as_int(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int or None, not {value!r}")


def _run(run_id: str | None) -> str:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    elastic = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None:
        run: str | None = run_id
    elif elastic and elastic != _NO_ELASTIC_RUN:
        run = elastic
    else:
        run = f"{address}:{port}" if address and port else None
    if not run:
        missing = "neither TORCHELASTIC_RUN_ID nor MASTER_ADDR and MASTER_PORT give one"
        raise ValueError(
            f"the ranks of one job need a name in common, and {'run_id is empty' if run == '' else missing}: "
            "pass run_id=, the same text on all ranks and another one for each job"
        )
    return run


def _local_world_size(world_size: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"LOCAL_WORLD_SIZE={text!r} must be the number of ranks on this node, or unset")
    return min(int(text), world_size)  # more processes than ranks: some of them read the same rows
