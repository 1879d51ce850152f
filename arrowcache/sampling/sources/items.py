"""Items: each item of a map-style dataset once a pass, divided among the tasks of a pool.

A pass is a shuffled order of all items, another one each time, and task k has its own places of it. So no
item comes twice, whichever workers and executors there are. A pool that is started again draws the tasks
that were begun and not published, however the earlier ones ended, and goes on: see sampling/executors.py.
Early tasks have few items, so that training begins soon.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.items import ItemForm, is_map_style, item_of
from arrowcache.arrow.schema import FieldType
from arrowcache.arrow.segment import Form, row_bytes
from arrowcache.errors import SchemaError
from arrowcache.sampling.retries import mark_permanent
from arrowcache.sampling.samples import first_whole, made_or_fault
from arrowcache.sampling.sources.source import Source, of_task
from arrowcache.sampling.task import size_of
from arrowcache.units import format_count, parse_count

_VARIABLE_SHARE = 4  # of a segment, that items like the first one fill: others may be larger


class Items(Source):
    """Draws each item of a map-style dataset once a pass; the pool ends after the last pass.

        source = Items(dataset)
        cache = ac.Cache.create("/data/cache", source.schema, capacity="200GB")
        ac.SamplerPool(cache, source, workers=8).wait()

    Any of torch's map-style datasets will do, or a list. Where workers are processes, it has to pickle.

    Each item of a pass is published once, by all pools of one name and seed on a cache together: one after
    the other or at once, left early, stopped, killed, or with tasks that were given up, which the next pool
    tries again. A pool ends once nothing is left that no other pool draws. Items whose segments were evicted
    were drawn, and are not drawn again. There are three exceptions. A worker that is killed in the very
    moment in which its segment appears may leave its items to be drawn twice, if that segment is evicted
    before the next pool. A power cut may take items with it, unless the cache is durable. Segments that are
    damaged, or on a node of a cluster that is lost, are not drawn again. The pools need the same division: a
    dataset of another length, or another `segment_items`, is refused, and needs another name of the pool.

    Args:
        dataset: `len`, and items by index: dicts, tuples, dataclasses and others, nested, of arrays, tensors,
            numbers, text, bytes and images. A column is named by the way to it: `image`, `0`, `meta.age`.
        passes: number of times that each item is drawn. None means no end.
        columns: keys of a dict, or positions in a tuple, to keep of each item. None means all.
        schema: types of columns that the first item does not tell, such as Ragged ones: the first one that
            can be read, of the first hundred.
        segment_items: items of a segment. None means as many as fit; if their length varies, as many as fill
            a quarter of it if all are like the first one. Give it where the first item is random.
    Raises: TypeError, ValueError: no map-style dataset, or an argument that does not fit. SchemaError: an
        item that no columns hold.
    """

    ramp = False
    is_divided = True
    _starts: NDArray[np.int64] | None = None  # the first place of each task of a pass, and the end

    def __init__(
        self,
        dataset: Any,
        passes: int | None = 1,
        *,
        columns: Sequence[str | int] | None = None,
        schema: Mapping[str, FieldType] | None = None,
        segment_items: int | None = None,
    ) -> None:
        is_stream = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)
        if is_stream and not is_map_style(dataset):  # it may have a length
            raise TypeError(
                f"{type(dataset).__name__} is an IterableDataset, whose items have no numbers: write a "
                "sampler that draws them, for arrowcache.SamplerPool"
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"a map-style dataset has a length and items by index; got {dataset!r}")
        self._dataset, self._length = dataset, len(dataset)
        if not self._length:
            raise ValueError("the dataset is empty: its items' columns cannot be told")
        self._passes = None if passes is None else parse_count(passes, "passes")
        self._segment_items = None if segment_items is None else parse_count(segment_items, "segment_items")
        found = first_whole(partial(_form_of, dataset, at, schema, columns) for at in range(self._length))
        assert found is not None  # it is not empty
        self._form, first = found
        self.schema = self._form.schema
        self._first_bytes = self._form.variable_bytes(self._form.row(first))

    def __repr__(self) -> str:
        return f"Items({type(self._dataset).__name__} of {self._length})"

    def fitted(self, form: Form) -> Items:
        """Return these items, divided for segments of a form."""
        full = form.full_rows
        if self._segment_items is not None:
            full = min(full, self._segment_items)
        elif self.schema.variable:
            like_the_first = row_bytes(self.schema) + self._first_bytes
            full = min(full, max(1, form.segment_bytes // _VARIABLE_SHARE // like_the_first))
        early = [size_of(number, full, form.segment_bytes).rows for number in range(min(self._length, 64))]
        sizes = early + [full] * math.ceil(max(0, self._length - sum(early)) / full)
        starts = np.minimum(np.cumsum([0, *sizes]), self._length)
        fitted = copy.copy(self)
        fitted._starts = starts[: int(np.searchsorted(starts, self._length)) + 1]
        tasks = len(fitted._starts) - 1
        fitted.tasks = None if self._passes is None else self._passes * tasks
        fitted.division = (
            f"{format_count(self._length, 'item')} in {format_count(tasks, 'segment')} of at most "
            f"{format_count(int(np.diff(fitted._starts).max()), 'item')}"
        )
        return fitted

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        """Draw the items of one task; all of them, where no pool has divided them."""
        for index in of_task(rng, self._length, self._starts).tolist():
            self.drawn = f"item {index}"
            yield made_or_fault(partial(self._row, index))

    def _row(self, index: int) -> dict[str, Any]:
        item = item_of(self._dataset, index)
        with _none_is_a_fault(item):
            return self._form.row(item)


def _form_of(
    dataset: Any, index: int, schema: Mapping[str, FieldType] | None, columns: Sequence[str | int] | None
) -> tuple[ItemForm, Any]:
    item = item_of(dataset, index)
    with _none_is_a_fault(item):
        return ItemForm(item, schema, columns), item


@contextmanager
def _none_is_a_fault(item: object) -> Iterator[None]:
    """Mark the error of an item that is None as a fault: see `is_fault`."""
    try:
        yield
    except SchemaError as error:
        if item is None:
            mark_permanent(error, is_fault=True)
        raise
