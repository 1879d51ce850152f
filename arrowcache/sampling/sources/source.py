"""Source: a ready sampler that knows its schema.

Each is a picklable callable `source(rng)`, to be given to `SamplerPool(cache, source)`. Its samples
depend on `rng` and on the store's content alone: lists of files are sorted, and fixed at construction.
It connects and opens files when it is called, keeps them open for the next call, and pickles without them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError
from arrowcache.lifetimes import Closable
from arrowcache.native.order import KEYS, Pass, Stage
from arrowcache.sampling.reads import Read, first_whole, is_read, single, values_of
from arrowcache.sampling.rows import Rows


class Source(Closable, ABC):
    """Base class of sources. A context manager: leaving it closes its files."""

    schema: Schema
    """The schema of its samples: `Cache.create(path, source.schema, ...)`."""

    ramp: bool = True
    """Early tasks of a pool fill small segments; False: full ones from the start, of whole groups that were
    read. One that is made of other sources asks for full ones if any of them does."""

    chunk_rows: int = 1
    """Small segments have a multiple of so many rows, such as of what is read at once."""

    tasks: int | None = None
    """The number of a pool's tasks that draw all there is. None means no end."""

    is_divided: bool = False
    """A call yields what is of its task alone, once: its segment ends with it, full or not."""

    division: str = ""
    """The division of the samples among tasks, in words, once it is made. Pools of one name share it."""

    def fitted(self, form: Form) -> Source:  # noqa: ARG002  # one that is not divided fits any
        """Return this source for segments of a form; pools ask for it."""
        return self

    drawn: str = ""
    """The sample that was drawn last, in words, for the error of one that does not fit."""

    plan_reads: Callable[[np.random.Generator, int], Iterator[Read]] | None = None
    """Yields reads, of the same distribution as the samples of a call, which give as many rows together as it
    is asked for. So a segment's rows are drawn at once, and fetched in the order and in the pieces in which
    they lie in the store. None: it draws one by one."""

    plans_exactly: bool = True
    """False: a plan does not know how many rows its reads will give, and goes on without end."""

    hedge: bool = False
    """True: a read that takes unusually long is begun again in another thread, and the first success counts.
    So reads must be pure: they change nothing but what they return."""

    @abstractmethod
    def __call__(self, rng: np.random.Generator) -> Iterator[Mapping[str, Any]]:
        """Draw samples, without end."""

    def close(self) -> None:  # a source that opens nothing has nothing to close
        """Close files and connections of this process. Idempotent; the next call opens them again."""


def shuffle_of(length: int, sequence: np.random.SeedSequence) -> Pass:
    """Return a shuffled order of the numbers below `length`."""
    keys = sequence.generate_state(KEYS, np.uint64).astype(np.uint64)
    return Pass(length, Stage(np.array([0, length], np.int64), keys))


def of_task(rng: np.random.Generator, length: int, starts: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return those of the numbers below `length` that the task of `rng` draws, in the order of its pass.

    Args:
        starts: the first place of each task of a pass, and the end. None: a task draws all of them.
    """
    sequence = rng.bit_generator.seed_seq
    if starts is None or not isinstance(sequence, np.random.SeedSequence) or not sequence.spawn_key:
        return rng.permutation(length)
    number, task = divmod(int(sequence.spawn_key[0]), len(starts) - 1)
    first, last = starts[task : task + 2].tolist()
    order = shuffle_of(length, np.random.SeedSequence(sequence.entropy, spawn_key=(number, 0)))
    return order(first, last - first)


def ramp_of(source: object) -> bool:
    """True if early tasks of a sampler fill small segments."""
    return bool(getattr(source, "ramp", True))


def chunk_rows_of(source: object) -> int:
    """Return the number of which the rows of small segments are a multiple."""
    return int(getattr(source, "chunk_rows", 1))


def schema_of(source: Callable[[np.random.Generator], Any], what: str) -> Schema:
    """Return the schema of a source, or of its first whole sample if it has none: see `first_whole`.

    Raises: TypeError: not a sampler. SamplerError: it yields nothing. Its own errors.
    """
    schema = getattr(source, "schema", None)
    if isinstance(schema, Schema):
        return schema
    if not callable(source):
        raise TypeError(f"{what} must be a source or a sampler, a function of rng, not {source!r}")
    rng = np.random.default_rng(0)
    samples = single(source(rng), rng)
    try:
        found = first_whole(partial(_first_of, sample) for sample in samples)
    finally:
        samples.close()
    if found is None:
        raise SamplerError(f"{what} yielded nothing: it must yield at least one sample a call")
    return Schema.infer(found)


def _first_of(sample: Any) -> Mapping[str, Any] | None:
    found = values_of(sample) if is_read(sample) else sample
    return next(found.split(), None) if isinstance(found, Rows) else found


def shuffled(
    samples: Iterable[dict[str, Any]], held: int, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Yield samples in a somewhat random order: one of `held` + 1, at random, for each new one."""
    waiting: list[dict[str, Any]] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) > held:
            yield waiting.pop(int(rng.integers(len(waiting))))
    while waiting:
        yield waiting.pop(int(rng.integers(len(waiting))))
