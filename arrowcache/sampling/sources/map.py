"""Map: applies a function to each sample of a source, as for augmentation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from arrowcache.arrow.schema import FieldType, Schema
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError
from arrowcache.sampling.options import fitted
from arrowcache.sampling.reads import Read, Sampler, hedge_of, is_read, made_or_fault, single, values_of
from arrowcache.sampling.retries import settled
from arrowcache.sampling.rows import Rows
from arrowcache.sampling.sources.source import Source, chunk_rows_of, ramp_of, schema_of
from arrowcache.units import require_function


class Map(Source):
    """Draws from a source, and changes its samples.

        Map(ParquetRows(uri), lambda sample, rng: {**sample, "x": sample["x"] + rng.normal()})

    Args:
        source: a source, or any sampler.
        function: takes a sample, or a sample and a generator of its own if it has two parameters: all its
            randomness must come from that. Returns a sample; it may change its argument, but not the arrays
            in it. If the source yields reads, or plans, it runs in the threads that read, several
            at a time.
        schema: schema of its results. None means that of the first sample, drawn here. A ragged
            field cannot be inferred from one sample.
    Raises: TypeError: not a function. Errors of the source or the function.
    """

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
    def plans_exactly(self) -> bool:  # type: ignore[override]  # never set here
        return getattr(self._source, "plans_exactly", True)

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
        if not isinstance(values, Rows):
            return self._changed(values, own)
        changed = [self._changed(sample, own) for sample in values.split()]
        names = changed[0] if changed else self.schema
        return Rows({name: [each[name] for each in changed] for name in names})

    def _changed(self, sample: Mapping[str, Any], own: list[np.random.Generator]) -> Mapping[str, Any]:
        changed = self._function(dict(sample), *own)
        if not isinstance(changed, Mapping):
            raise settled(
                SamplerError(
                    f"{self!r}: the function must return a sample, a mapping of field names to values, not "
                    f"{type(changed).__name__}"
                ),
                is_fault=changed is None,
            )
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
