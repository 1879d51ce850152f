"""ItemSource: the map-style dataset inside a CachedDataset, asked for items that are not in the cache.

It asks for `dataset[index]`, or by `__getitems__` for several items at once, in this thread or in several.
Global generators draw from states apart meanwhile (randomness.py), so that the user draws the same numbers
whether items are read or made. The first item shows the columns. It is compared with what `__getitems__`
gives, which is not asked again if it gives other items.

Guarantees: items come in the order of their indices, one for each; an error of the dataset is raised in place
of its item, or an item that is to be left out becomes a `LeftOut`. A MemoryError and an error of this library
leave out no item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

from arrowcache.arrow.items import getter_of_items, is_map_style, item_of
from arrowcache.errors import ArrowCacheError, SchemaError, called, warn
from arrowcache.lifetimes import forgets_in_child
from arrowcache.read_through.read_through import LeftOut
from arrowcache.sampling.reads import Threads
from arrowcache.sampling.retries import Retries
from arrowcache.torch.codecs import ExactForm
from arrowcache.torch.randomness import RandomStates, drawing_apart, random_states, set_random_states
from arrowcache.units import format_count, shortened

_NEVER_SKIPPED = (MemoryError, ArrowCacheError)
_MAX_TRIED = 100  # items at the dataset's begin, to find one that can be made


class Unwanted(Exception):
    """Nobody waits any more for the items that were to be made."""


class ItemSource:
    """Makes items of a dataset. Any thread may ask it. Pickles without its threads.

    Args:
        dataset: a map-style one.
        skips: what cannot be made becomes a `LeftOut`, and so does None. False: its error is raised.
    Raises: TypeError: no map-style dataset. ValueError: it is empty.
    """

    def __init__(self, dataset: object, *, skips: bool) -> None:
        self.dataset: Any = dataset
        self.skips = skips
        self.length = _length_of(dataset)
        self.asks_for_many = getter_of_items(dataset) is not None  # looks through all that the dataset holds
        self._threads: Threads | None = None
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Have no threads: they are the parent's."""
        self._threads = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_threads": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        forgets_in_child(self)

    def items(
        self, indices: list[int], is_wanted: Callable[[], bool], threads: int
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield indices and their items, or `LeftOut` for an item, in order.

        Args:
            is_wanted: asked before each item is made, and while threads make some.
            threads: number of items to make at a time.
        Raises: the error of the dataset. Unwanted.
        """

        def look() -> None:
            if not is_wanted():
                raise Unwanted

        if not indices:
            return
        look()
        with drawing_apart(), closing(self._given(indices, threads, look)) as items:
            for number, item in enumerate(items, 1):
                yield item
                if number < len(indices):
                    look()

    def _given(
        self, indices: list[int], threads: int, look: Callable[[], None]
    ) -> Generator[tuple[int, Any], None, None]:
        many = self.dataset.__getitems__ if self.asks_for_many else None

        def given(some: list[int]) -> Iterable[tuple[int, Any]]:
            items: Iterable[Any]
            if self.skips:
                items = _made_or_left_out(self.dataset, many, some)
            elif many is None:
                items = (item_of(self.dataset, index) for index in some)
            else:
                items = _many_items(many, some)
            return zip(some, items, strict=True)

        if threads == 1 or len(indices) == 1:
            yield from given(indices)
            return
        if self._threads is None or self._threads.count != threads:
            self._threads = Threads(threads, Retries(0))
        size = 1 if many is None else math.ceil(len(indices) / threads)
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        with closing(self._threads.results((partial(_listed, given, part) for part in parts), look)) as lists:
            for some in lists:
                yield from some

    # its first item

    def first(self) -> tuple[int, Any, RandomStates]:
        """Return an item that can be made, its index, and the random states that it was made with.

        Raises: the error of the first, or with `skips` of the first of many, none of which can be made.
        """
        with drawing_apart():
            states = random_states()
            if self.skips:
                return *self._first_that_can_be_made(), states
            return 0, item_of(self.dataset, 0), states

    def _first_that_can_be_made(self) -> tuple[int, Any]:
        failed: list[LeftOut] = []
        for index in range(min(self.length, _MAX_TRIED)):
            (item,) = _made_or_left_out(self.dataset, None, [index])
            if not isinstance(item, LeftOut):
                return index, item
            failed.append(item)
        raise failed[0].error

    def compare_getitems(self, form: ExactForm, index: int, item: Any, states: RandomStates) -> None:
        """Ask no more for many items at once, with a warning, where that gives other items.

        Args:
            index, item, states: as `first` returned them.
        """
        if not self.asks_for_many or self._gives_the_same(form, index, item, states):
            return
        warn(
            f"{type(self.dataset).__name__}.__getitems__ gives other items than dataset[index], as for "
            f"{[(index + 1) % self.length, index]}: items are made one by one, by index; mend "
            "__getitems__, or set it to None"
        )
        self.asks_for_many = False

    def _gives_the_same(self, form: ExactForm, index: int, item: Any, states: RandomStates) -> bool:
        """True if `__getitems__` gives what dataset[index] gives, as far as two items tell: also in order.

        Each time both are asked with the same random states. Of a dataset with other randomness nothing is
        known.
        """

        def tried(make: Callable[[list[int]], Any], indices: list[int]) -> list[Any] | None:
            set_random_states(states)
            try:
                return [*make(indices)]
            except Exception:  # noqa: BLE001  # such as of an item that cannot be made
                return None

        def one_by_one(indices: list[int]) -> list[Any]:
            return [self.dataset[each] for each in indices]

        def are_same(some: list[Any], others: list[Any] | None) -> bool:
            return (
                others is not None and len(some) == len(others) and all(map(form.is_same_item, some, others))
            )

        many = self.dataset.__getitems__
        with drawing_apart():
            for indices in ([(index + 1) % self.length, index], [index]):
                found = tried(many, indices)
                before = tried(one_by_one, indices[:-1])
                if before is not None and are_same([*before, item], found):
                    return True
                wanted = tried(one_by_one, indices)
                if wanted is not None:
                    return are_same(wanted, found) or not are_same(wanted, tried(one_by_one, indices))
            return True


def _many_items(many: Callable[[list[int]], Iterable[Any]], indices: list[int]) -> list[Any]:
    """Return the items that `__getitems__` gives, one for each index.

    Raises: SchemaError: they are fewer or more. RuntimeError: it raised StopIteration.
    """
    items = called("__getitems__ of the dataset", lambda: [*many(indices)])
    if len(items) != len(indices):
        raise SchemaError(
            f"__getitems__ of the dataset gave {format_count(len(items), 'item')} for the indices "
            f"{shortened(str(indices), 60)}: give one for each, in their order, and None for one that cannot "
            'be had, with cached(..., on_error="skip")'
        )
    return items


def _made_or_left_out(
    inner: Any, many: Callable[[list[int]], Any] | None, indices: list[int]
) -> Iterator[Any]:
    """Yield the items of a dataset, or `LeftOut` in place of one that it cannot make."""
    if many is not None:
        try:
            items = _many_items(many, indices)
        except _NEVER_SKIPPED:
            raise
        except Exception:  # noqa: BLE001  # which of them failed is seen one by one
            pass
        else:
            yield from (_unless_none(index, item) for index, item in zip(indices, items, strict=True))
            return
    for index in indices:
        try:
            item = item_of(inner, index)
        except _NEVER_SKIPPED:
            raise
        except Exception as error:  # noqa: BLE001  # it is counted, or raised where its user asks for it
            yield LeftOut(index, error)
        else:
            yield _unless_none(index, item)


def _listed(given: Callable[[list[int]], Iterable[Any]], indices: list[int]) -> list[Any]:
    return [*given(indices)]


def _unless_none(index: int, item: Any) -> Any:
    return LeftOut(index, SchemaError(f"item {index} is None")) if item is None else item


def _length_of(dataset: object) -> int:
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"a map-style Dataset has items by index; got a {type(dataset).__name__}: give one of its values"
        )
    if not is_map_style(dataset) or isinstance(dataset, str | bytes):
        raise TypeError(
            f"a map-style Dataset has a length and items by index, and a stream is an iterable or a function "
            f"that makes one, or shards= are such functions; got {type(dataset).__name__}"
        )
    length: int = len(dataset)  # type: ignore[arg-type]  # it has one
    if not length:
        raise ValueError("the dataset is empty: its items' columns cannot be told")
    return length
