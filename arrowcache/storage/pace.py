"""Pace: how far training and sampling may run ahead of each other. Pure.

After the rate limiter of Reverb (`SampleToInsertRatio`; Cassirer et al., "Reverb: A Framework for
Experience Replay", 2021): a ratio of samples served to samples inserted, held within a tolerance. What
differs: an epoch is served as a whole, so the loader is asked where one begins, while it leases nothing; and
samplers never wait while a loader does, so that the two cannot wait for each other, whatever the numbers.

Without a tolerance of the user's, call `lag` the rows that are due: samples_per_insert times those inserted,
less those served. An epoch of n rows begins once n / 2 are due, so that it ends as far ahead as it began
behind. A sampler waits once half of the cache's rows are due, and a little more, so that one side need not
wait for each jitter of the other: it goes on wherever an epoch has to wait. While the cache has room, and
nothing leaves it, samplers do not wait: a cache that is filled before training begins is the common start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from arrowcache.units import format_count, parse_count

_SLACK = 0.03  # of all that was inserted: samplers may be so much further ahead than half an epoch
_MAX_SLACK = 1 / 8  # of the cache's rows: however long it runs


class Flow(NamedTuple):
    """Rows that came and went since the pace was set, and that are here.

    `inserted_rows` were published, `served_rows` are those of epochs that began, a row of two epochs twice;
    `rows` are in the cache now. `fills`: a segment finds room, so nothing has to leave for it.
    """

    inserted_rows: int
    served_rows: int
    rows: int
    fills: bool = False


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits on how far training and sampling run ahead of each other; set with `cache.set_pace`.

    Args:
        min_rows: no epoch begins, and no sampler waits for training, before the cache holds so many rows.
        samples_per_insert: how often training is to serve a sample, on average: so many rows served for
            each row that is published. None means that neither side waits for the other.
        max_reuse: how many epochs may read the same segment; then it is left out, and an epoch waits until
            there are others. None means no limit. It is an upper bound, by segments: a segment counts as
            read once an epoch of it has begun and served a row, whichever of its rows that epoch delivers.
            So with max_reuse=1 rows are never served where an epoch ends early (`break`), is shorter than
            the snapshot (`epoch_rows`), or leaves out its last batch (`drop_last=True`); the error of a wait
            says how many, unless `rows`, `weights` or exclusions choose among them. To use each row once, by
            rows, is for `Loader(once=...)`.
        tolerance: by how many served rows training may lag behind `samples_per_insert` before samplers wait,
            and be ahead of it before epochs do. None means that rows served for each row published
            stay within 10 % of samples_per_insert, and a segment a sampler.

    The 10 % hold after the start, which is over once training served (10 + samples_per_insert) times the rows
    of the full cache: samplers fill the cache first, and then wait until training has caught up; and half an
    epoch more or less is much beside the first few. They hold while both sides are able to go on: a cache
    that is not full yet keeps no sampler, and training that is slow or over is behind.

    It is asked when an epoch begins and when a segment is published. An epoch counts from its beginning on,
    with all its rows. With a tolerance, an epoch may overshoot it by its rows, and each sampler by a segment.
    For samples_per_insert counts what was served and published since it was set, or since the last
    `cache.evict()` or `cache.resize()` that evicted; for max_reuse every epoch counts.
    Raises: ValueError, TypeError: a number that does not fit.
    """

    min_rows: int = 1
    samples_per_insert: float | None = None
    max_reuse: int | None = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        keep = partial(object.__setattr__, self)  # plain numbers, as JSON takes them, instead of NumPy's
        keep("min_rows", parse_count(self.min_rows, "min_rows"))
        if self.max_reuse is not None:
            keep("max_reuse", parse_count(self.max_reuse, "max_reuse"))
        ratio = _number(self.samples_per_insert, "samples_per_insert")
        keep("samples_per_insert", ratio)
        if ratio is not None and ratio <= 0:
            raise ValueError(f"samples_per_insert={ratio} must be above 0: so often is each sample served")
        tolerance = _number(self.tolerance, "tolerance")
        keep("tolerance", tolerance)
        if tolerance is not None and tolerance < 0:
            raise ValueError(f"tolerance={tolerance} is a number of rows: give one >= 0")
        if tolerance is not None and ratio is None:
            raise ValueError(f"tolerance={tolerance} is one of samples_per_insert: give that, too")
        if ratio is not None and self.max_reuse is not None and ratio > self.max_reuse:
            raise ValueError(
                f"samples_per_insert={ratio} can never be reached with max_reuse={self.max_reuse}: "
                "raise max_reuse, or lower samples_per_insert"
            )

    def keeps_sampler(self, flow: Flow) -> str:
        """The reason why a sampler waits while no loader does. Empty if it goes on."""
        if self.samples_per_insert is None or flow.rows < self.min_rows:
            return ""
        lag, most = self._lag(flow), self._most_lag(flow)
        if lag <= most:
            return ""
        return (
            f"training is {format_count(round(lag), 'served row')} behind "
            f"samples_per_insert={self.samples_per_insert:g}, "
            f"and {'it may be' if self.tolerance is None else 'the tolerance is'} {most:,.0f}"
        )

    def keeps_loader(self, flow: Flow, epoch_rows: int | None = None) -> str:
        """The reason why no epoch may begin yet. Empty if one may.

        Args:
            epoch_rows: rows that it serves. None means each row of the cache once.
        """
        if flow.rows < self.min_rows:
            return f"the cache holds {format_count(flow.rows, 'row')} of min_rows={self.min_rows}"
        if self.samples_per_insert is None:
            return ""
        lag = self._lag(flow)
        if self.tolerance is not None:
            if -lag <= self.tolerance:
                return ""
            return (
                f"training is {format_count(round(-lag), 'served row')} ahead of samples_per_insert="
                f"{self.samples_per_insert:g}, and the tolerance is {self.tolerance:,.0f}"
            )
        # Not above half of the cache's rows: where that is due, a sampler may wait.
        needed = min(flow.rows, flow.rows if epoch_rows is None else epoch_rows) / 2
        if lag >= needed or flow.served_rows <= 0:
            return ""
        return (
            f"samples_per_insert={self.samples_per_insert:g} has "
            f"{format_count(round(max(0.0, lag)), 'served row')} due, and an epoch begins at "
            f"{needed:,.0f}, half of its own"
        )

    def _lag(self, flow: Flow) -> float:
        """Rows still to be served of those inserted. Negative if training is ahead."""
        assert self.samples_per_insert is not None
        return self.samples_per_insert * flow.inserted_rows - flow.served_rows

    def _most_lag(self, flow: Flow) -> float:
        """The lag at which a sampler goes on still."""
        if self.tolerance is not None:
            return self.tolerance
        if flow.fills:
            return math.inf
        assert self.samples_per_insert is not None
        slack = min(_SLACK * flow.inserted_rows, _MAX_SLACK * flow.rows)
        return flow.rows / 2 + self.samples_per_insert * slack

    def to_json(self) -> dict[str, Any]:
        """A record of plain numbers, for the package's own use; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Pace:
        """Read a record, for the package's own use.

        Raises: TypeError, ValueError: it is no pace's.
        """
        if unknown := set(record) - set(cls.__slots__):
            raise ValueError(f"a pace with {', '.join(map(repr, sorted(unknown)))}")
        return cls(**record)


def _number(value: float | None, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or None, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={value} must be a finite number")
    return number
