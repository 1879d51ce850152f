"""Handles: the few files that a source keeps open between two reads. Each process has its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from arrowcache.lifetimes import call_all, forgets_in_child


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class _Kept(Generic[T]):
    """A thing, and the number of threads that use it. The last of them closes it, once it was given up."""

    __slots__ = ("is_given_up", "making", "thing", "users")

    def __init__(self) -> None:
        self.thing: T | None = None
        self.users, self.is_given_up, self.making = 0, False, threading.Lock()


class Handles(Generic[T]):
    """Open things by their keys; the least recently used is closed first.

    Several threads use a thing at a time, so things are thread-safe. One that is in use is closed after it.
    Pickled without its things. A forked child begins with none, and closes none of its parent's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._things: OrderedDict[Hashable, _Kept[T]] = OrderedDict()
        self._lock = threading.Lock()
        forgets_in_child(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._most,)

    def forget_in_child(self) -> None:
        self._inherited = self._things  # kept alive, or they would be closed here
        self._things, self._lock = OrderedDict(), threading.Lock()

    @contextmanager
    def use(self, key: Hashable, make: Callable[[], T]) -> Iterator[T]:
        """Give the open thing of a key, made if there is none. One whose use fails is given up.

        Blocks: while another thread makes it.
        """
        kept, unused = self._taken(key)
        try:
            call_all(thing.close for thing in unused)
            with kept.making:
                if kept.thing is None:
                    kept.thing = make()
            yield kept.thing
        except BaseException:
            with self._lock:
                if self._things.get(key) is kept:
                    del self._things[key]
                kept.is_given_up = True
            raise
        finally:
            with self._lock:
                kept.users -= 1
                is_last = kept.is_given_up and not kept.users
            if is_last and kept.thing is not None:
                kept.thing.close()

    def close(self) -> None:
        """Close all, those in use after it. Idempotent; things can be made again."""
        with self._lock:
            unused = self._given_up(0)
        call_all(thing.close for thing in unused)

    def _taken(self, key: Hashable) -> tuple[_Kept[T], list[T]]:
        """Return a key's thing, for one user more, and things to close for it."""
        with self._lock:
            unused = [] if key in self._things else self._given_up(self._most - 1)
            kept = self._things.setdefault(key, _Kept())
            self._things.move_to_end(key)
            kept.users += 1
        return kept, unused

    def _given_up(self, most: int) -> list[T]:
        """Give up all but so many, the least recently used first; return those that nobody uses."""
        unused = []
        while len(self._things) > most:
            kept = self._things.popitem(last=False)[1]
            kept.is_given_up = True
            if not kept.users and kept.thing is not None:
                unused.append(kept.thing)
        return unused
