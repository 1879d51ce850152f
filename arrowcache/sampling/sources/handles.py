"""Handles: the few files that a source keeps open between two reads. Each process has its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from arrowcache.lifetimes import Origin


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Handles(Generic[T]):
    """Open things by their keys; the least recently used is closed first.

    Pickled without its things. A forked child begins with none, and closes none of its parent's.
    Not thread-safe: each thread of an executor unpickles a sampler of its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: OrderedDict[Hashable, T] = OrderedDict()
        self._origin = Origin()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._most,)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the open thing of a key, made if there is none."""
        if not self._origin.is_here:
            self._inherited = self._things  # kept alive, or they would be closed here
            self._things, self._origin = OrderedDict(), Origin()
        if key not in self._things:
            while len(self._things) >= self._most:
                self._things.popitem(last=False)[1].close()
            self._things[key] = make()
        self._things.move_to_end(key)
        return self._things[key]

    def drop(self, key: Hashable) -> None:
        """Close a failed or unused thing, if it is open: the next `get` makes it anew."""
        thing = self._things.pop(key, None)
        if thing is not None:
            thing.close()

    def close(self) -> None:
        """Close all. Idempotent; things can be made again."""
        if self._origin.is_here:
            while self._things:
                self._things.popitem()[1].close()
