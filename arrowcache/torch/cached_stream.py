"""CachedStream: an IterableDataset, read through a cache of its items on the local disk.

A pass gives, of each shard, what is stored from the cache, then the stream behind it. This is the one rule
for cuts, kills, a full cache and later passes: what is stored of a shard is a prefix, and grows as long as
there is room. A shard that another process stores is streamed, and not stored.

Guarantees: each pass has each item once, in the order of its shard; a stream that gives another item than the
last stored one, where it is asked again, is an error. Whoever iterates over it again repeats what no state
covered.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from arrowcache.arguments import face
from arrowcache.arrow.schema import FieldType
from arrowcache.display import Card, Facts, Part, Shown, printable
from arrowcache.errors import ArrowCacheError, CacheFormatError, SchemaError
from arrowcache.lifetimes import Origin
from arrowcache.progress import progress_bar
from arrowcache.read_through.shards import ShardReader, index_of, named
from arrowcache.storage.settings import CachedItems
from arrowcache.storage.store import Store
from arrowcache.torch.item_cache import ItemCache, Spec, kept, spec_of
from arrowcache.torch.randomness import seeds_of_workers
from arrowcache.torch.stream_shards import StreamShards, WholeStream
from arrowcache.torch.worker_processes import end_workers, starting_workers
from arrowcache.units import format_bytes, format_count, parse_count

_FILLS = 2  # seeds of workers that fill a stream's cache begin with it
_FILLED_AT_ONCE = 16  # items between two steps of the bar
_NOTHING = object()
_OF_WORKERS = (
    "the workers of a DataLoader deliver the items, and their states stay with them: use torchdata's "
    "StatefulDataLoader, and its state_dict() and load_state_dict()"
)
_fills = itertools.count()


@dataclass(frozen=True, slots=True)
class StreamStats(Shown):
    """A stream's cache at one moment, and the use that this process and its workers made of it.

    `cached` items are published, and take `published_bytes`; `whole` of `shards` are stored to their end.
    `hits` items were read from the cache, and `streamed` came from the stream. `is_full`: no more fits into
    the capacity. `trouble` says why this process can store nothing now; it is empty if it can.
    """

    shards: int
    whole: int
    cached: int
    published_bytes: int
    capacity_bytes: int
    is_full: bool
    hits: int
    streamed: int
    trouble: str = ""

    def _card(self) -> Card:
        return Card("StreamStats", "", self.parts())

    def parts(self) -> list[Part]:
        """Describe what is in the cache, its size, and what this process did."""
        full = "; it is full, so a pass streams the others each time" if self.is_full else ""
        shards = f"{self.whole} of {format_count(self.shards, 'shard')} stored to the end"
        size = f"{format_bytes(self.published_bytes)} of {format_bytes(self.capacity_bytes)}"
        use = f"{format_count(self.hits, 'item')} read from the cache, {self.streamed} streamed"
        facts = [
            ("in the cache", f"{format_count(self.cached, 'item')}, {shards}{full}"),
            ("on the disk", size),
            ("with its workers", use),
        ]
        if self.trouble:
            facts.append(("not stored now", printable(self.trouble)))
        return [Facts(facts)]


class CachedStream(ItemCache[ShardReader], IterableDataset[Any]):
    """An IterableDataset of the items of the stream inside, read through a cache. Made by `cached`.

    Each `for` is a pass over the shards of this rank and worker. It has no length. Any number of DataLoader
    workers, ranks and jobs of this machine share the cache. Once all shards are stored to their end,
    `Loader(train)` reads them shuffled.
    Pickles as its arguments; the stream inside has to pickle where DataLoader workers are not forked.
    """

    _inside = "stream"

    def __init__(self, spec: Spec, counts: Any = None) -> None:
        super().__init__(spec, counts)
        self._source: StreamShards = spec.source
        self._pass, self._delivered = -1, self._none_delivered()
        self._loaded: tuple[int, list[int]] | None = None  # a state, for the next pass
        self._loaded_in: Origin | None = None  # the process in which the user loaded it

    @property
    def stream(self) -> Any:
        """The stream inside."""
        return self._source.stream

    def _none_delivered(self) -> list[int]:
        return [0] * self._source.count

    def _new_reader(self, store: Store) -> ShardReader:
        return ShardReader(store, self._names, self._backoff, self._counts.numpy())

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass, or go on with that of a state that was loaded.

        Blocks: each step while an item is read from the disk, or the stream makes it.
        Raises: a step: CacheFormatError: the stream gives another item than the one stored. SchemaError: an
            item does not fit the columns of the first. What the stream or the transform raises. ValueError:
            closed, the state is of a longer shard, or the stream's epoch was set.
        """
        if self._loaded_in is not None and not self._loaded_in.is_here and get_worker_info() is not None:
            raise RuntimeError(_OF_WORKERS)
        self._loaded_in = None
        self.reader_here()
        self._pass, self._delivered = self._loaded or (self._pass + 1, self._none_delivered())
        self._loaded = None
        return self._items(self._pass, self._delivered, self._source.mine())

    def _items(self, number: int, delivered: list[int], shards: range) -> Iterator[Any]:
        transform, is_worker = self._spec.transform, get_worker_info() is not None
        for shard in shards:
            with closing(self._of_shard(shard, delivered[shard])) as items:
                for item in items:
                    delivered[shard] += 1
                    if is_worker:
                        self._counts[0, 2] = 1
                    yield item if transform is None else self.transformed([item])[0]
        self.drain()
        if delivered is self._delivered and get_worker_info() is None:  # a worker's others go on
            self._loaded = number + 1, self._none_delivered()

    def _of_shard(self, shard: int, at: int, *, fills: bool = False) -> Generator[Any, None, None]:
        """Yield items of a shard from position `at` on.

        Args:
            fills: only as long as they are stored.
        """
        reader = self.reader_here()
        stored, is_storing, length = 0, False, None
        try:
            while reader is not None:
                stored = reader.stored(shard)
                while at < stored:
                    positions, columns = reader.read(shard, at, stored)
                    if not len(positions) or positions[-1] != len(positions) - 1:
                        break  # some are damaged
                    for item in self.form.items(columns):
                        at += 1
                        yield item
                if reader.is_whole(shard, at):
                    return
                if is_storing or not reader.publisher.begin(shard):
                    break
                is_storing = True  # from now on nobody else stores more: read what others stored meanwhile
            if fills and not is_storing:
                return
            length = yield from self._streamed(shard, at, stored, reader, is_storing, fills)
        finally:
            if reader is not None and is_storing:
                reader.publisher.end(shard, length)

    def _streamed(
        self, shard: int, at: int, stored: int, reader: ShardReader | None, is_storing: bool, fills: bool
    ) -> Generator[Any, None, int | None]:
        """Yield items of the stream from position `at` on, and have those stored that are missing.

        Returns: the number of items of the shard.
        """
        first = min(at, stored)
        with closing(self._behind(shard, first, reader)) as items:
            for position, item in enumerate(items, first):
                put = None
                if reader is not None:
                    reader.count_streamed()
                    if is_storing:
                        if fills and not reader.publisher.stores(shard):
                            return None
                        put = reader.publisher.put
                item = kept(self.form, index_of(shard, position), item, put, named)
                first = position + 1
                if position >= at:
                    yield item
        if first < at:
            raise ValueError(
                f"the state is behind item {at - 1} of shard {shard}, which has "
                f"{format_count(first, 'item')}: it is a state of another stream, or of one that was longer"
            )
        return first

    def _behind(self, shard: int, first: int, reader: ShardReader | None) -> Generator[Any, None, None]:
        """Return the items of the stream from position `first` on, before which all are stored.

        Raises: CacheFormatError: the item before it is in the cache, and the stream has another one there.
        """
        last: dict[str, Any] | None = None
        if reader is not None and first:
            positions, columns = reader.read(shard, first - 1, first)
            if len(positions):
                last = self.form.row_of_chosen(self.form.items(columns)[0])
        for items in self._source.ways(shard, first if last is None else first - 1):
            if last is None:
                return self._repeating(shard, items) if first == 0 else items
            if self._is_same(next(items, _NOTHING), last):
                return items
            items.close()
        raise self._another(shard, first - 1)

    def _repeating(self, shard: int, items: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Yield all items of a shard. Raises: CacheFormatError: its iterator goes on with the first one."""
        with closing(items):
            item = next(items, _NOTHING)
            if self._source.gave_the_same and self._spec.first is not None:
                of, row = self._spec.first
                if of == shard and not self._is_same(item, row):
                    raise CacheFormatError(
                        "the stream gives the same iterator each time, which goes on, and does not begin "
                        "anew: give a function that makes it, as in cached(make, path, ...)"
                    )
            if item is not _NOTHING:
                yield item
                yield from items

    def _is_same(self, item: Any, row: dict[str, Any]) -> bool:
        try:
            return item is not _NOTHING and self.form.is_same_row(self.form.row(item), row)
        except SchemaError:
            return False

    def _another(self, shard: int, position: int) -> CacheFormatError:
        return CacheFormatError(
            f"{named(index_of(shard, position))} is not the one that is stored in {self.path}: this stream "
            "does not repeat: shuffle behind cached(), or give another version= if its content has changed"
        )

    # its state

    def state_dict(self) -> dict[str, Any]:
        """Return the pass, and how many items of each shard were delivered in it, by this process.

        A DataLoader's workers have states of their own: torchdata's StatefulDataLoader keeps them.
        Raises: RuntimeError: workers of a DataLoader have delivered items.
        """
        if get_worker_info() is None and self._counts[0, 2]:
            raise RuntimeError(_OF_WORKERS)
        number, delivered = self._loaded or (max(self._pass, 0), self._delivered)
        return {"pass": number, "delivered": [*delivered]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `for` finish the pass of a saved state.

        Raises: ValueError: not a valid state, or one of another number of shards.
        """
        try:
            number = parse_count(state["pass"], "pass", least=0)
            delivered = [parse_count(each, "delivered", least=0) for each in state["delivered"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of a cached stream: {error!r}") from None
        if len(delivered) != self._source.count:
            raise ValueError(
                f"the state is of {format_count(len(delivered), 'shard')}, and the stream has "
                f"{self._source.count}"
            )
        self._loaded, self._loaded_in = (number, delivered), Origin()

    # its cache

    def stats(self) -> StreamStats:
        """Count the items that are in the cache now, and what this process and its workers did."""
        reader = self.reader_here()
        hits, streamed, _ = self._counts.sum(0).tolist()
        found = self._contents(reader)
        shards = self._source.count
        whole = 0 if reader is None else int((reader.lengths() >= 0).sum())
        misses = whole < shards
        return StreamStats(
            shards,
            whole,
            found.cached,
            found.published_bytes,
            found.capacity_bytes,
            misses and not found.has_room,
            hits,
            streamed,
            found.trouble if misses else self._backoff.why,
        )

    @face("fill()")
    def fill(self, workers: int = 8, progress: bool | None = None) -> int:
        """Stream and publish what is missing of the shards of this rank, now.

        Args:
            workers: number of processes, which are forked, at most one a shard. 0 means this one.
            progress: show a bar. None shows one if stderr is a terminal.
        Blocks: until it is done, or the cache is full.
        Returns: the number of items in the cache.
        Raises: as a pass.
        """
        workers = min(parse_count(workers, "workers", least=0), len(self._source.mine()))
        self.drain()
        with starting_workers(workers):
            making = DataLoader(
                _Filling(self),
                batch_size=None,
                num_workers=workers,
                generator=seeds_of_workers(_FILLS, next(_fills)),
                multiprocessing_context="fork" if workers else None,
            )
            counts = iter(making)
        try:
            with progress_bar(progress, total=None, unit=" items", desc="filling") as bar:
                for count in counts:
                    bar.update(count)
        finally:
            end_workers(counts)
        cached = self.cached
        self.drain()
        return cached

    def filled(self) -> Iterator[int]:
        """Stream and store what is missing, for the package's own use. Yields: numbers of items."""
        reader = self.reader_here()
        if reader is None:
            return
        for shard in self._source.mine():
            with closing(self._of_shard(shard, reader.stored(shard), fills=True)) as items:
                while count := sum(1 for _ in itertools.islice(items, _FILLED_AT_ONCE)):
                    yield count
        self.drain()

    def whole(self) -> Spec:
        """Return the spec of the stream as a map-style dataset, for the package's own use.

        Raises: ValueError: not all is in the cache.
        """
        reader = self.reader_here()
        if reader is not None:
            reader.publisher.flush()
        lengths = np.full(self._source.count, -1) if reader is None else reader.lengths()
        if missing := int((lengths < 0).sum()):
            full = ", and the cache is full: raise its capacity" * self.stats().is_full
            raise ValueError(
                f"of {format_count(len(lengths), 'shard')} of the stream {missing} are not stored to the end"
                f"{full}. A Loader shuffles all items: iterate over the stream once before, as "
                "DataLoader(train, ...) does, or call train.fill()"
            )
        return replace(self._spec, source=WholeStream(self.stream, lengths))

    @property
    def counts(self) -> Any:
        """The counts that all processes share, for the package's own use."""
        return self._counts

    def _spec_to_send(self) -> Spec:
        if self._loaded_in is not None:
            raise RuntimeError(_OF_WORKERS)
        ranks = self._source.ranks_now()
        if ranks == self._source.ranks:
            return self._spec
        return replace(self._spec, source=self._source.of_ranks(ranks))

    def __repr__(self) -> str:
        return f"<CachedStream of {format_count(self._source.count, 'shard')} at {printable(self.path)}>"

    def _card(self) -> Card:
        try:
            parts: list[Any] = [*self.stats().parts()]
        except (ArrowCacheError, OSError, ValueError) as error:
            parts = [str(error)]
        return Card("CachedStream", str(self.path), parts)


def cached_stream(
    source: StreamShards,
    path: str | os.PathLike[str],
    capacity: int | str,
    version: str,
    columns: Sequence[str | int] | None,
    transform: Callable[[Any], Any] | None,
    schema: Mapping[str, FieldType] | None,
) -> CachedStream:
    """Return a stream that is read through a cache. Args, raises: as of `cached`."""
    shard, item = source.first()
    try:
        items = CachedItems(0, version, shards=source.count)
        spec = spec_of(source, item, path, capacity, schema, columns, transform, items)
        spec = replace(spec, first=(shard, spec.form.row(item)))
    except SchemaError as error:
        raise SchemaError(f"item 0 of shard {shard}: {error}") from None
    train = CachedStream(spec)
    train.open_at_once()
    return train


class _Filling(IterableDataset[int]):
    """The items that are missing, streamed and published, as numbers of items."""

    def __init__(self, train: CachedStream) -> None:
        self._train = train

    def __iter__(self) -> Iterator[int]:
        return self._train.filled()
