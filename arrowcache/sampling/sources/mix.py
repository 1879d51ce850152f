"""Mix: samples of several sources, each as often as its weight says."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from arrowcache.arrow.schema import Schema
from arrowcache.errors import SamplerError, SchemaError, log, sentence_of
from arrowcache.lifetimes import call_all
from arrowcache.sampling.options import require_policy
from arrowcache.sampling.reads import Fault, Sampler, single
from arrowcache.sampling.retries import settled
from arrowcache.sampling.sources.choice import Choice, parse_weights
from arrowcache.sampling.sources.source import Source, ramp_of, schema_of

_EMPTY_CALLS = 3  # of a source in a row, as in a task


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
        self.ramp = all(map(ramp_of, self._sources))
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

    def close(self) -> None:
        for source in self._sources:
            if isinstance(source, Source):
                source.close()

    def _stream(self, number: int, rng: np.random.Generator) -> Generator[Mapping[str, Any], None, None]:
        """Yield a source's samples without end: a source that ends is called again."""
        empty = 0
        while empty < _EMPTY_CALLS:
            empty += 1
            for sample in single(self._sources[number](rng), rng):
                empty = 0
                yield sample
        raise settled(
            SamplerError(
                f"{self._names[number]} yielded nothing in {_EMPTY_CALLS} calls: it must yield a sample a "
                "call"
            )
        )


def _require_same(name: str, schema: Schema, first: Schema) -> None:
    for field in {**first, **schema}:
        found, wanted = schema.get(field), first.get(field)
        if found != wanted:
            raise SchemaError(
                f"{name} has field {field!r} as {found}, and the first source as {wanted}: sources must "
                "agree; Map one to make it so"
            )
