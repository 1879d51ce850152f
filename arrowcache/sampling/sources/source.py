"""Source: a ready sampler that knows its schema; and sources of sources.

`Mix` draws from several by weight, `Map` calls a function of each sample.

Each is a picklable callable `source(rng)`, to be given to `SamplerPool(cache, source)`. Its samples
depend on `rng` and on the store's content alone: lists of files are sorted, and fixed at construction.
It connects and opens files when it is called, keeps them open for the next call, and pickles without them.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError, SchemaError
from arrowcache.lifetimes import Closable
from arrowcache.native.order import KEYS, Pass, Stage
from arrowcache.sampling.mixture import Parts, streams_of
from arrowcache.sampling.reads import (
    Read,
    Rows,
    Sampler,
    Threads,
    go_on_alone,
    hedge_of,
    is_read,
    values_of,
)
from arrowcache.sampling.retries import Retries, mark_permanent
from arrowcache.sampling.samples import Fault, Samples, first_whole, leaves_out, made_or_fault, single
from arrowcache.sampling.task import fitted, require_policy
from arrowcache.units import format_count, require_function

T = TypeVar("T")


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
    is asked for; without end, where it cannot tell how many they will give. So a segment's rows are drawn at
    once, and fetched in the order and in the pieces in which they lie in the store. None: it draws one by
    one."""

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
        found = first_whole(partial(first_of, sample) for sample in samples)
    finally:
        samples.close()
    if found is None:
        raise SamplerError(f"{what} yielded nothing: it must yield at least one sample a call")
    return Schema.infer(found)


def first_of(sample: Any) -> Mapping[str, Any] | None:
    """Return a sample, or the first of `Rows`, or what a read gives. Raises: as the read."""
    found = values_of(sample) if is_read(sample) else sample
    return next(found.split(), None) if isinstance(found, Rows) else found


def shuffled(samples: Iterable[T], held: int, rng: np.random.Generator) -> Iterator[T]:
    """Yield samples in a somewhat random order: one of `held` + 1, at random, for each new one."""
    waiting: list[T] = []
    for sample in samples:
        waiting.append(sample)
        if len(waiting) > held:
            yield waiting.pop(int(rng.integers(len(waiting))))
    while waiting:
        yield waiting.pop(int(rng.integers(len(waiting))))


class Choice:
    """Draws numbers from 0 to n - 1 in proportion to their weights, by one random number a draw."""

    def __init__(self, weights: Sequence[float] | NDArray[np.float64]) -> None:
        self._ends = np.cumsum(np.asarray(weights, np.float64))

    def draw(self, rng: np.random.Generator) -> int:
        return int(self.draw_many(rng, 1)[0])

    def draw_many(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        at = np.searchsorted(self._ends, rng.random(count) * self._ends[-1], side="right")
        chosen: NDArray[np.int64] = np.minimum(at, len(self._ends) - 1)  # the product may round up to the end
        return chosen


def parse_weights(weights: Sequence[float], names: Sequence[str]) -> list[float]:
    """Check weights, one for each name.

    Raises: ValueError: the wrong number of them; a weight that is zero, negative, infinite or not a number;
        or so large that their sum is infinite. TypeError: a weight that is no number.
    """
    if len(weights) != len(names):
        raise ValueError(
            f"weights= has {format_count(len(weights), 'weight')} for {len(names)}: {', '.join(names)}"
        )
    for weight, name in zip(weights, names, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
            raise TypeError(f"the weight of {name} must be a number, not {weight!r}")
        if not 0 < weight < math.inf:
            raise ValueError(
                f"the weight of {name} is {weight!r}: it must be positive and finite; leave out what is "
                "not to be drawn"
            )
    try:
        total = math.fsum(weights)
    except OverflowError:
        total = math.inf
    if math.isinf(total):
        raise ValueError("the weights are so large that their sum is infinite: divide all by one number")
    return [float(weight) for weight in weights]


class Mix(Source):
    """Draws each sample from one of several sources.

        Mix({ArrayWindows("s3://eu/a.zarr", (256,)): 3, ArrayWindows("s3://us/b.zarr", (256,)): 1})

    Args:
        sources: source -> weight, or pairs of both. Any sampler is a source. A sample is drawn from a source
            without a schema, to infer it.
        on_error: "raise"; or "skip": a source that fails is left out until the task's segment is full, with a
            logged warning, and is tried again in the next task. A task's content then also depends on which
            sources failed. A sample that cannot be had is the pool's to skip, see its `on_error`, and so is
            a read that a sampler of yours yields.
    Raises: ValueError: no source; a weight that is zero, negative, infinite or not a number. SchemaError:
        sources whose schemas differ: names source and field.

    A pool has `reads` reads of all sources together at work, and each source plans that can. The weights are
    those of rows, also where a source gives many at once, a filter leaves some out, or one cannot be had.
    """

    def __init__(
        self, sources: Mapping[Any, float] | Iterable[tuple[Any, float]], *, on_error: str = "raise"
    ) -> None:
        require_policy(on_error)
        pairs = list(sources.items() if isinstance(sources, Mapping) else sources)
        if not pairs:
            raise ValueError("there is no source: give at least one")
        self._sources: list[Sampler] = [source for source, _ in pairs]
        if divided := [source for source in self._sources if getattr(source, "is_divided", False)]:
            raise TypeError(
                f"{divided[0]!r} is drawn once, and a mix draws without end: give it to a pool alone"
            )
        self._names = [f"sources[{number}], {source!r}," for number, source in enumerate(self._sources)]
        self._weights = parse_weights([weight for _, weight in pairs], self._names)
        self._skips = on_error == "skip"
        # A share of a small segment is no multiple of what a source reads at once.
        self.ramp = all(ramp_of(source) and chunk_rows_of(source) == 1 for source in self._sources)
        schemas = [schema_of(source, name) for source, name in zip(self._sources, self._names, strict=True)]
        for name, schema in zip(self._names, schemas, strict=True):
            _require_same(name, schema, schemas[0])
        self.schema = schemas[0]

    def __repr__(self) -> str:
        return f"Mix of {len(self._sources)}: {', '.join(map(repr, self._sources))}"

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        """Draw samples one by one, and read them here; a pool reads those of all sources at a time."""
        threads, skips = Threads(0, Retries(0)), leaves_out()
        samples = Samples(streams_of(self, rng, threads, 0, None, skips=skips), threads)
        try:
            while True:
                sample = samples.take(1, lambda: None)
                yield Fault(sample) if isinstance(sample, Exception) else sample
        finally:
            samples.close()

    @property
    def parts(self) -> Parts:
        """Its sources, for the pool, which draws from each of them as it does from one alone."""
        return Parts(self._sources, self._names, self._weights, self._skips, self)

    def close(self) -> None:
        for source in self._sources:
            if isinstance(source, Source):
                source.close()


def _require_same(name: str, schema: Schema, first: Schema) -> None:
    for field in {**first, **schema}:
        found, wanted = schema.get(field), first.get(field)
        if found != wanted:
            raise SchemaError(
                f"{name} has field {field!r} as {found}, and the first source as {wanted}: sources must "
                "agree; Map one to make it so"
            )


class Map(Source):
    """Draws from a source, and changes its samples.

        Map(ParquetRows(uri), lambda sample, rng: {**sample, "x": sample["x"] + rng.normal()})

    Args:
        source: a source, or any sampler.
        function: takes a sample, or a sample and a generator of its own if it has two parameters: all its
            randomness must come from that. Returns a sample; it may change its argument, but not the arrays
            in it. If the source yields reads, or plans, it runs in the threads that read, several
            at a time, and once for each sample, also where a read is begun again.
        schema: schema of its results. None means that of the first sample, drawn here. A ragged
            field cannot be inferred from one sample.
    Raises: TypeError: not a function. Errors of the source or the function.
    """

    _outside: tuple[object, ...] = ()  # mixes of whose parts this is one: an error of its is none of a part

    def __init__(
        self,
        source: Sampler,
        function: Callable[..., Mapping[str, Any]],
        *,
        schema: Schema | Mapping[str, FieldType] | None = None,
    ) -> None:
        if function is None:
            raise TypeError("function must be a function of a sample, not None")
        require_function(function, "function")
        if not callable(source):
            raise TypeError(f"source must be a source or a sampler, a function of rng, not {source!r}")
        self._source = source
        self.ramp, self.chunk_rows = ramp_of(source), chunk_rows_of(source)
        self.is_divided = getattr(source, "is_divided", False)
        self._function = function
        self._with_rng = _takes_two(function)
        self.schema = schema_of(self._draw, repr(self)) if schema is None else Schema(schema)

    def __repr__(self) -> str:
        return f"Map({self._source!r}, {getattr(self._function, '__qualname__', self._function)})"

    def __call__(self, rng: np.random.Generator) -> Iterator[Mapping[str, Any]]:
        return self._draw(rng)

    def fitted(self, form: Form) -> Map:
        changed = copy.copy(self)
        changed._source = fitted(self._source, form)
        changed.tasks = getattr(changed._source, "tasks", None)
        changed.division = getattr(changed._source, "division", "")
        return changed

    @property
    def plan_reads(self) -> Callable[[np.random.Generator, int], Iterator[Read]] | None:  # type: ignore[override]  # never set here
        return None if getattr(self._source, "plan_reads", None) is None else self._planned

    @property
    def hedge(self) -> bool:  # type: ignore[override]  # never set here
        return hedge_of(self._source)

    @property
    def parts(self) -> Parts | None:
        """Those of a mix, each with this function."""
        parts = getattr(self._source, "parts", None)
        if not isinstance(parts, Parts):
            return None
        return parts._replace(samplers=[self._around(each, parts.owner) for each in parts.samplers])

    def _around(self, part: Sampler, mix: object) -> Map:
        changed = copy.copy(self)
        changed._source, changed._outside = part, (*self._outside, mix)
        return changed

    def _planned(self, rng: np.random.Generator, rows: int) -> Iterator[Read]:
        for read in self._source.plan_reads(rng, rows):  # type: ignore[attr-defined]  # one that plans
            yield partial(self._read, read, self._own(rng))

    @property
    def drawn(self) -> str:  # type: ignore[override]  # never set here
        return getattr(self._source, "drawn", "")

    def close(self) -> None:
        if isinstance(self._source, Source):
            self._source.close()

    def _draw(self, rng: np.random.Generator) -> Iterator[Any]:
        samples = single(self._source(rng), rng)
        try:
            for sample in samples:
                own = self._own(rng)
                changed = partial(self._read if is_read(sample) else self._changed, sample, own)
                yield changed if is_read(sample) else made_or_fault(changed)
        finally:
            samples.close()

    def _own(self, rng: np.random.Generator) -> list[np.random.Generator]:
        return rng.spawn(1) if self._with_rng else []

    def _read(self, read: Read, own: list[np.random.Generator]) -> Mapping[str, Any]:
        values, own = values_of(read), copy.deepcopy(own)  # it may be tried again
        go_on_alone()
        if not isinstance(values, Rows):
            return self._changed(values, own)
        changed = [self._changed(sample, own) for sample in values.split()]
        names = changed[0] if changed else self.schema
        return Rows({name: [each[name] for each in changed] for name in names})

    def _changed(self, sample: Mapping[str, Any], own: list[np.random.Generator]) -> Mapping[str, Any]:
        try:
            changed = self._function(dict(sample), *own)
            if not isinstance(changed, Mapping):
                raise mark_permanent(
                    SamplerError(
                        f"{self!r}: the function must return a sample, a mapping of field names to values, "
                        f"not {type(changed).__name__}"
                    ),
                    is_fault=changed is None,
                )
        except Exception as error:
            if self._outside:
                error.outside = self._outside  # type: ignore[attr-defined]
            raise
        return changed


def _takes_two(function: Callable[..., Any]) -> bool:
    """True if a function has a second parameter without a default, or one named rng."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (
        positional[1].default is inspect.Parameter.empty or positional[1].name == "rng"
    )
