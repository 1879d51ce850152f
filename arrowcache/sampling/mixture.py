"""Mixture: the samples of several samplers, by weight, whose reads run at the same time.

Each part has a stream of its own, with a generator that is spawned from the task's. So what a part yields
does not depend on how far the others have been read. Which part the next rows come from is drawn from the
task's generator as they are taken. Rows that a read returned and whose turn has not come wait. So the weights
are those of the rows that are had, whatever a filter or a fault leaves out.

`streams_of` makes the streams of any sampler, at any depth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import SamplerError, log, sentence_of
from arrowcache.lifetimes import call_all
from arrowcache.sampling.reads import (
    Rows,
    Sampler,
    Threads,
    Values,
    held,
    nbytes_of,
    rows_in,
)
from arrowcache.sampling.samples import MAX_EMPTY_CALLS, NOTHING, Stream, Streams, yielded_nothing
from arrowcache.units import format_count

_BLOCK_ROWS = 256  # whose parts are drawn at a time, at most
_BLOCK_SHARE = 16  # of the rows before it: where a segment ends within a block, little of a part is cut off
_PASS_ROWS = 1 << 20  # of which each part has its share


class Parts(NamedTuple):
    """The samplers that another one draws from, as its attribute `parts`.

    Args:
        skips: a part that fails is left out.
        owner: who mixes. An error that has it in `outside` is none of a part: see `Map`.
    """

    samplers: Sequence[Sampler]
    names: Sequence[str]
    weights: Sequence[float]
    skips: bool
    owner: object


class _Rest(NamedTuple):
    """Rows of a part that wait, from the row `first` on, of `total`."""

    rows: Rows
    first: int
    total: int
    nbytes: int


class Mixture(Streams):
    """The samples of several streams. Used in one thread.

    Args:
        rows: of the task, for parts that plan. None: they do not, and rows of a part come one at a time.
    """

    def __init__(
        self,
        parts: Parts,
        rng: np.random.Generator,
        threads: Threads,
        most_bytes: int,
        rows: int | None,
        *,
        skips: bool,
        place: tuple[int, ...],
    ) -> None:
        self._of, self._rng = parts, rng
        self._block_rows = 1 if rows is None else _BLOCK_ROWS
        self._rows = _PASS_ROWS if rows is None else min(rows, _PASS_ROWS)
        self._given = 0  # rows
        self._weights = np.array(parts.weights, np.float64)
        rngs = rng.spawn(len(self._weights))
        # Drawn now, and not when a part is called: how many parts are left by then depends on the reads.
        self._left = self._shares(self._rows)
        self._parts = [
            streams_of(
                sampler,
                own,
                threads,
                most_bytes,
                None if rows is None else max(1, share),
                skips=skips,
                place=(*place, number),
            )
            for number, (sampler, own, share) in enumerate(
                zip(parts.samplers, rngs, self._left.tolist(), strict=True)
            )
        ]
        self._runs: deque[tuple[int, int]] = deque()  # of the block: part, rows
        self._rests: dict[int, _Rest] = {}
        self._empty_calls = [0] * len(self._parts)
        self._taken_from = self._parts[0]
        self._draw_block()

    @property
    def drawn(self) -> str:  # type: ignore[override]  # never set here
        return self._taken_from.drawn

    @property
    def due(self) -> Stream | None:
        number, _ = self._runs[0]
        return None if number in self._rests else self._parts[number].due

    @property
    def covered(self) -> float:
        waiting = sum(rest.total - rest.first for rest in self._rests.values())
        return waiting + sum(part.covered for part in self._parts)

    @property
    def reads(self) -> int:
        return sum(part.reads for part in self._parts)

    @property
    def has_reads(self) -> bool | None:
        of_parts = [part.has_reads for part in self._parts]
        return True if any(of_parts) else None if None in of_parts else False

    def behind(self, wanted_rows: float, *, is_due: bool = True) -> Stream | None:
        due = self.due if is_due else None
        if due is not None and not due.entries:
            return due
        if self.has_reads is False:
            return None
        first, _ = self._runs[0]
        owed = self._left.tolist()
        for number, rows in self._runs:
            owed[number] += rows
        share = min(1.0, wanted_rows / sum(owed))
        lacks = []
        for number, part in enumerate(self._parts):
            rest = self._rests.get(number)
            here = 0 if rest is None else rest.total - rest.first
            wanted = share * owed[number] - here
            if wanted > 0:
                lacks.append((part.covered / wanted, number, wanted))
        for _, number, wanted in sorted(lacks):
            found = self._parts[number].behind(wanted, is_due=is_due and number == first)
            if found is not None:
                return found
        return None

    def taken(self, most_rows: int | None = None) -> Values | Exception | None:
        number, room = self._runs[0]
        if most_rows is not None:
            room = min(room, most_rows)
        rest = self._rests.pop(number, None)
        if rest is None:
            try:
                values = self._parts[number].taken(room)
                if values is None:
                    self._end_call(number)
            except Exception as error:
                self.read_failed = self._parts[number].read_failed
                is_of_part = self._of.owner not in getattr(error, "outside", ())
                if not (self._of.skips and is_of_part) or self.read_failed:
                    raise
                self._leave_out(number, error)
                return NOTHING
            if values is None or values is NOTHING:
                return NOTHING
            self._taken_from, self._empty_calls[number] = self._parts[number], -1  # this call is not empty
            if isinstance(values, Exception):
                return values
            count = rows_in(values)
            if not isinstance(values, Rows) or count <= room:
                self._count(number, count)
                return values
            rest = _Rest(values, 0, count, nbytes_of(values))
            held.add(rest.nbytes)
        self._taken_from = self._parts[number]
        first, last = rest.first, min(rest.first + room, rest.total)
        if last < rest.total:
            self._rests[number] = rest._replace(first=last)
        else:
            held.add(-rest.nbytes)
        self._count(number, last - first)
        return Rows({name: column[first:last] for name, column in rest.rows.items()})

    def close(self) -> None:
        for rest in self._rests.values():
            held.add(-rest.nbytes)
        self._rests.clear()
        call_all(part.close for part in self._parts)

    def _shares(self, rows: int) -> NDArray[np.int64]:
        return self._rng.multinomial(rows, self._weights / self._weights.sum())

    def _draw_block(self) -> None:
        """Draw the parts of the next rows."""
        if not self._left.any():
            self._left = self._shares(self._rows)
        size = max(1, min(self._block_rows, self._given // _BLOCK_SHARE, int(self._left.sum())))
        counts = self._rng.multivariate_hypergeometric(self._left, size)
        self._left = self._left - counts
        found = [(number, rows) for number, rows in enumerate(counts.tolist()) if rows]
        self._runs.extend(found[at] for at in self._rng.permutation(len(found)))

    def _count(self, number: int, rows: int) -> None:
        """Note that rows of the part that was due are taken."""
        self._given += rows
        _, due = self._runs.popleft()
        if rows < due:
            self._runs.appendleft((number, due - rows))
        elif not self._runs:
            self._draw_block()

    def _end_call(self, number: int) -> None:
        self._empty_calls[number] += 1
        if self._empty_calls[number] >= MAX_EMPTY_CALLS:
            raise yielded_nothing(self._of.names[number])

    def _leave_out(self, number: int, error: Exception) -> None:
        """Draw from the other parts from now on. Raises: SamplerError: there is none."""
        why = sentence_of(error)
        log(f"{self._of.names[number]} failed and is left out of this task: {why}")
        self._parts[number].close()
        self._weights[number] = 0
        if not self._weights.any():
            all_of = f"all {format_count(len(self._parts), 'source')}"
            raise SamplerError(f"{all_of} failed, the last with: {why}") from error
        self._left = self._shares(int(self._left.sum()) + sum(rows for _, rows in self._runs))
        self._runs.clear()
        self._draw_block()


def streams_of(
    sampler: Sampler,
    rng: np.random.Generator,
    threads: Threads,
    most_bytes: int,
    rows: int | None,
    *,
    skips: bool = False,
    place: tuple[int, ...] = (),
) -> Streams:
    """Return the stream of a sampler, or those of what it draws from; none is drawn from yet.

    Args: as of `Stream`.
    """
    parts = getattr(sampler, "parts", None)
    if isinstance(parts, Parts):
        return Mixture(parts, rng, threads, most_bytes, rows, skips=skips, place=place)
    return Stream(sampler, rng, threads, most_bytes, rows, skips=skips, place=place)
