"""Handles: the few files that a source keeps open between two reads. Each process has its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from arrowcache.lifetimes import call_all, forgets_in_child
from arrowcache.sampling.reads import is_hedge


class _Closable(Protocol):
    def close(self) -> None: ...


M = TypeVar("M")
T = TypeVar("T", bound=_Closable)


class Once(Generic[M]):
    """A thing that several reads need: the first to ask makes it, and others wait, but for hedges."""

    def __init__(self) -> None:
        self.thing: M | None = None
        self._changed, self._makers = threading.Condition(), 0

    @property
    def is_busy(self) -> bool:
        """True if a thread makes it."""
        return self._makers > 0

    def get(self, make: Callable[[], M], keeps: Callable[[M], bool] = lambda _: True) -> M:
        """Return the thing, made if there is none. Blocks: while another thread makes it. Raises: as `make`.

        Args:
            keeps: False: it is not kept, and whoever waits makes it anew.
        """
        with self._changed:
            while self.thing is None and self._makers and not is_hedge():
                self._changed.wait()
            if self.thing is not None:
                return self.thing
            self._makers += 1
        made: M | None = None
        try:
            made = make()
            return made
        finally:
            with self._changed:
                self._makers -= 1
                if self.thing is None and made is not None and keeps(made):
                    self.thing = made
                self._changed.notify_all()


class _Kept(Once[T]):
    """A thing, and the number of threads that use it. The last of them closes it, once it was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.is_given_up = 0, False


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
        used: T | None = None
        kept, unused = self._taken(key)
        try:
            call_all(thing.close for thing in unused)
            used = kept.get(make)
            yield used
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
            if used is not None and used is not kept.thing:  # another was made first
                used.close()
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
