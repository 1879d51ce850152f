"""Mix: samples of several sources, each as often as its weight says."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from arrowcache.arrow.schema import Schema
from arrowcache.errors import SamplerError, SchemaError, log, sentence_of
from arrowcache.lifetimes import call_all
from arrowcache.sampling.options import require_policy
from arrowcache.sampling.reads import (
    MOST_EMPTY_CALLS,
    Fault,
    Read,
    Sampler,
    hedge_of,
    single,
    yielded_nothing,
)
from arrowcache.sampling.sources.choice import Choice, parse_weights
from arrowcache.sampling.sources.source import Source, chunk_rows_of, ramp_of, schema_of


class Mix(Source):
    """Draws each sample from one of several sources.

        Mix({ArrayWindows("s3://eu/a.zarr", (256,)): 3, ArrayWindows("s3://us/b.zarr", (256,)): 1})

    Args:
        sources: source -> weight, or pairs of both. Any sampler is a source. A sample is drawn from a source
            without a schema, to infer it.
        on_error: "raise"; or "skip": a source that fails is left out until the task's segment is full, with
            a logged warning, and is tried again in the next task. A task's content then also depends on which
            sources failed. A read that fails is the pool's to skip, see its `on_error`.
    Raises: ValueError: no source; a weight that is zero, negative, infinite or not a number. SchemaError:
        sources whose schemas differ: names source and field.
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

    def __call__(self, rng: np.random.Generator) -> Iterator[Mapping[str, Any]]:
        """Draw samples one by one; each source goes on after its last sample."""
        streams = [self._stream(number, rng) for number in range(len(self._sources))]
        left = list(range(len(streams)))
        choice = Choice(self._weights)
        try:
            while True:
                number = left[choice.draw(rng)]
                try:
                    sample = next(streams[number])
                    if self._skips and isinstance(sample, Fault):
                        raise sample.error
                except Exception as error:
                    if not self._skips:
                        raise
                    why = sentence_of(error)
                    log(f"{self._names[number]} failed and is left out of this task: {why}")
                    left = [other for other in left if other != number]
                    if not left:
                        message = f"all {len(streams)} sources failed, the last with: {why}"
                        raise SamplerError(message) from error
                    choice = Choice([self._weights[other] for other in left])
                else:
                    yield sample
        finally:
            call_all(stream.close for stream in streams)

    @property
    def plan_reads(self) -> Callable[[np.random.Generator, int], Iterator[Read]] | None:  # type: ignore[override]  # never set here
        """A plan of shares, as they come by chance. None if a source does not plan, or one may be left out.

        Nor with a schema of variable length: a segment that is full before would lack the last source.
        """
        plans = all(
            getattr(source, "plan_reads", None) is not None and getattr(source, "plans_exactly", True)
            for source in self._sources
        )
        return self._planned if plans and not self._skips and not self.schema.variable else None

    def _planned(self, rng: np.random.Generator, rows: int) -> Iterator[Read]:
        shares = rng.multinomial(rows, np.array(self._weights) / math.fsum(self._weights))
        for source, share in zip(self._sources, shares.tolist(), strict=True):
            if share:
                yield from source.plan_reads(rng, share)  # type: ignore[attr-defined]  # one that plans

    @property
    def hedge(self) -> bool:  # type: ignore[override]  # never set here
        return all(map(hedge_of, self._sources))

    def close(self) -> None:
        for source in self._sources:
            if isinstance(source, Source):
                source.close()

    def _stream(self, number: int, rng: np.random.Generator) -> Generator[Mapping[str, Any], None, None]:
        """Yield a source's samples without end: a source that ends is called again."""
        empty = 0
        while empty < MOST_EMPTY_CALLS:
            empty += 1
            for sample in single(self._sources[number](rng), rng):
                empty = 0
                yield sample
        raise yielded_nothing(self._names[number])


def _require_same(name: str, schema: Schema, first: Schema) -> None:
    for field in {**first, **schema}:
        found, wanted = schema.get(field), first.get(field)
        if found != wanted:
            raise SchemaError(
                f"{name} has field {field!r} as {found}, and the first source as {wanted}: sources must "
                "agree; Map one to make it so"
            )
