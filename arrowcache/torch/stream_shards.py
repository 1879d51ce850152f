"""StreamShards: a stream as a list of shards, each of which can be iterated over again.

A shard is a part of the stream that has its own order: one of Hugging Face's `shard(num_shards, index)`, one
URL of a WebDataset, or one of the user's own functions. Any other stream is one shard. Shards are divided
among ranks and workers here, so the stream does not see torch's worker info, by which it would divide itself
once more.

To begin within a shard, the stream's own `skip(n)` is used; else its state, of which one is noted each
second; else it is iterated over. A state comes second: that of a shuffled stream leaves items out, so the
user compares one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from arrowcache.arrow.items import is_map_style
from arrowcache.errors import warn
from arrowcache.limits import Limits
from arrowcache.pickling import pickled, unpickled
from arrowcache.storage.settings import MAX_SHARDS
from arrowcache.torch.distributed import rank_now
from arrowcache.torch.worker_processes import without_worker_info
from arrowcache.units import format_count

_MAX_STATES = 64  # of a shard: then every second one goes
_OF_ALL_SHARDS = ("Take", "Skip", "Cycling")  # in names of Hugging Face's steps
_SPLITTERS = ("split_by_node", "split_by_worker", "single_node_only", "check_empty")  # stages of WebDataset


class WholeStream(NamedTuple):
    """In place of the source of items of a stream all of whose items are in the cache.

    Args:
        lengths: number of items of each shard (shards,).
    """

    dataset: Any
    lengths: NDArray[np.int64]
    skips: bool = False
    asks_for_many: bool = False

    @property
    def length(self) -> int:
        """The number of items of all shards."""
        return int(self.lengths.sum())


def is_stream(dataset: object) -> bool:
    """True if a dataset has items one after another, and none by number."""
    if is_map_style(dataset) or isinstance(dataset, Mapping | str | bytes | type):
        return False
    return hasattr(dataset, "__iter__") or callable(dataset)


class StreamShards:
    """The shards of a stream, and those that a process iterates over. Pickles if the stream does.

    Args:
        stream: anything that can be iterated over again and again, or a function that returns it.
        shards: functions in place of it, each of which returns an iterable of its items, anew.
        ranks: rank and number of ranks. None means those of torch.distributed, if it is initialized.
    Raises: TypeError, ValueError: a stream that cannot be iterated over again, or divided.
    """

    def __init__(
        self,
        stream: Any,
        shards: Sequence[Callable[[], Any]] | None = None,
        ranks: tuple[int, int] | None = None,
    ) -> None:
        self.stream, self.ranks = stream, ranks
        self._functions = None if shards is None else _require_functions(stream, shards)
        self._urls = [] if self._functions else _urls_of(stream)
        self.count = len(self._functions or self._urls) or _shards_of(stream)
        if self.count > MAX_SHARDS:
            raise ValueError(f"{format_count(self.count, 'shard')} are more than {MAX_SHARDS}: give fewer")
        self._epoch = _epoch_of(stream)
        self._has_warned = False
        self._first: Iterator[Any] | None = None  # over the stream
        self.gave_the_same = False  # iterator again: it may have begun anew, or be the rest of the first one
        self._states: dict[int, list[tuple[int, Any]]] = {}  # by shard: how many items came before, and it

    def __getstate__(self) -> dict[str, Any]:
        functions = self._functions or (self.stream if _is_function(self.stream) else None)
        if functions is None:
            return vars(self) | {"_states": {}, "_first": None}
        sent = pickled(functions, "the stream", "use forked workers")
        return vars(self) | {"_states": {}, "_first": None, "stream": None, "_functions": None, "sent": sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        sent = state.pop("sent", None)
        vars(self).update(state)
        if sent is not None:
            functions = unpickled(sent)
            self.stream, self._functions = (None, functions) if type(functions) is list else (functions, None)

    def of_ranks(self, ranks: tuple[int, int] | None) -> StreamShards:
        """Return these shards for a rank and number of ranks."""
        shards = copy.copy(self)
        shards.ranks = ranks
        return shards

    def ranks_now(self) -> tuple[int, int] | None:
        """Return rank and number of ranks, if there are some."""
        return self.ranks or rank_now()

    def mine(self) -> range:
        """Return the shards that this rank and this worker of a DataLoader iterate over.

        Raises: ValueError: the stream's epoch was set, which changes its order.
        """
        if (epoch := _epoch_of(self.stream)) != self._epoch:
            raise ValueError(
                f"the stream's epoch is {epoch}, and was {self._epoch} when cached() was called: what is "
                "stored keeps the order of that epoch. Leave out set_epoch(), and shuffle behind cached(), "
                "such as by Loader(train)"
            )
        rank, ranks = self.ranks_now() or (0, 1)
        if self.count < ranks and not self._has_warned:
            self._has_warned = True
            warn(
                f"the stream has {format_count(self.count, 'shard')}, and there are "
                f"{format_count(ranks, 'rank')}: {ranks - self.count} of them have no items: give it more "
                "shards, such as by shards="
            )
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(rank * workers + worker, self.count, ranks * workers)

    def first(self) -> tuple[int, Any]:
        """Return the first item, and its shard. Raises: ValueError: there is none. What the stream raises."""
        for shard in range(self.count):
            items = self._items(shard, self._opened(shard), 0, 0)
            for item in items:
                items.close()
                return shard, item
        raise ValueError("the stream is empty: its items' columns cannot be told")

    def ways(self, shard: int, first: int) -> Iterator[Generator[Any, None, None]]:
        """Yield ways to iterate over a shard from item `first` on: the surest last.

        One that gives no items came to the end of the shard before. Raises: what the stream raises.
        """
        stream = self._opened(shard)
        states = [each for each in self._states.get(shard, ()) if 0 < each[0] <= first]
        if first and callable(skip := getattr(stream, "skip", None)):
            yield self._items(shard, skip(first), first, first)
            stream = self._opened(shard)
        elif states:
            position, state = states[-1]
            stream.load_state_dict(copy.deepcopy(state))
            yield self._items(shard, stream, position, first)
            stream = self._opened(shard)
        yield self._items(shard, stream, 0, first)

    def _opened(self, shard: int) -> Any:
        """Return a new iterable of the items of a shard."""
        with without_worker_info():
            if self._functions is not None:
                return self._functions[shard]()
            if self._urls:
                return _of_url(self.stream, self._urls[shard])
            if self.count > 1:
                return self.stream.shard(num_shards=self.count, index=shard)
            if _is_function(self.stream):
                return self.stream()
            return (
                copy.copy(self.stream) if _has_state(self.stream) else self.stream
            )  # whose state is its own

    def _items(self, shard: int, stream: Any, at: int, first: int) -> Generator[Any, None, None]:
        """Yield items from `first` on of an iterable that begins with item `at`."""
        has_state, hidden, noted = _has_state(stream), without_worker_info(), time.monotonic()
        with hidden:
            try:
                items = iter(stream)
            except TypeError as error:
                raise TypeError(f"the stream gives no iterable of its items: {error}") from None
        self.gave_the_same = self.gave_the_same or items is self._first
        self._first = self._first or items
        try:
            while True:
                with hidden:
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    at += 1
                    if has_state and time.monotonic() - noted >= Limits.current.state_seconds:
                        self._note(shard, at, stream.state_dict())
                        noted = time.monotonic()
                if at > first:
                    yield item
        finally:
            if hasattr(items, "close"):
                items.close()

    def _note(self, shard: int, at: int, state: Any) -> None:
        known = [each for each in self._states.get(shard, ()) if each[0] < at]
        self._states[shard] = [*(known[::2] if len(known) >= _MAX_STATES else known), (at, state)]


def _has_state(stream: object) -> bool:
    return callable(getattr(stream, "state_dict", None)) and hasattr(stream, "load_state_dict")


def _epoch_of(stream: object) -> int | None:
    """Return the epoch of a stream whose order depends on it, as one of Hugging Face. None: it has none."""
    epoch = getattr(stream, "epoch", None) if hasattr(stream, "set_epoch") else None
    return epoch if type(epoch) is int else None


def _is_function(stream: object) -> bool:
    return not hasattr(stream, "__iter__")


def _require_functions(stream: object, shards: Any) -> list[Callable[[], Any]]:
    if stream is not None:
        raise TypeError("give a stream or its shards, not both: cached(None, path, shards=[...])")
    if not isinstance(shards, list | tuple) or not shards or not all(map(callable, shards)):
        raise TypeError(
            f"shards={shards!r} is no list of functions: give one for each shard, which returns an iterable "
            "of its items, anew at each call"
        )
    return [*shards]


def _shards_of(stream: Any) -> int:
    """Return the number of shards that a stream divides itself into. 1: it does not."""
    if isinstance(stream, Iterator) and not isinstance(stream, IterableDataset):
        raise TypeError(
            f"a {type(stream).__name__} can be iterated over once: give the function that makes it, as in "
            "cached(make, path, ...)"
        )
    if getattr(stream, "_distributed", None) is not None:  # by Hugging Face's split_dataset_by_node
        raise ValueError(
            "the stream is one node's part: give cached() the whole stream, which it divides among ranks"
        )
    count = getattr(stream, "num_shards", getattr(stream, "n_shards", 1))
    is_divisible = (
        callable(getattr(stream, "shard", None)) and type(count) is int and _is_of_its_shards(stream)
    )
    return max(1, count) if is_divisible else 1


def _is_of_its_shards(stream: Any) -> bool:
    """True if the items of Hugging Face's stream are those of its shards: no step looks at all of them."""
    steps = [getattr(stream, "_ex_iterable", None)]
    while steps:
        step = steps.pop()
        if any(word in type(step).__name__ for word in _OF_ALL_SHARDS):
            return False
        inner = [getattr(step, "ex_iterable", None), *(getattr(step, "ex_iterables", None) or ())]
        steps += [each for each in inner if each is not None]
    return True


def _urls_of(stream: Any) -> list[Any]:
    """Return the URLs of a WebDataset. Empty: it is none. Raises: ValueError: it is endless."""
    stages = getattr(stream, "pipeline", None)
    if not isinstance(stages, list) or not stages or not hasattr(stages[0], "urls"):
        return []
    if type(stages[0]).__name__ != "SimpleShardList":
        raise ValueError(
            f"a WebDataset whose URLs come from {type(stages[0]).__name__} does not repeat: leave out "
            "resampled=True, and shuffle behind cached()"
        )
    if getattr(stream, "repetitions", 1) != 1 or getattr(stream, "nsamples", -1) > 0:
        raise ValueError("a pass has each item once: leave out repeat and with_epoch of the WebDataset")
    return [*stages[0].urls]


def _of_url(stream: Any, url: Any) -> Any:
    """Return the WebDataset of one URL, which neither divides itself nor misses others."""
    first, *others = stream.pipeline
    first, stream = copy.copy(first), copy.copy(stream)
    first.urls = [url]
    stream.pipeline = [first, *(each for each in others if getattr(each, "__name__", "") not in _SPLITTERS)]
    return stream
