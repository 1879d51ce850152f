"""CachedDataset and `cached`: a Dataset, read through a cache of its items on the local disk.

`CachedDataset` is of a map-style one; of a stream `cached` makes a CachedStream (cached_stream.py).
It has the length and the items of the dataset inside. An item that is in the cache is gathered
from there, a batch of items by one job; one that is missing is made by the dataset inside, in the process
that asked, returned at once, and published for all processes of the machine. Order and shuffling are the
user's.

A cache belongs to one dataset: its cache.json has the length, the user's `version` and the columns, and
anything else at the path is refused. What is in stays in, also where the dataset is larger than the capacity:
each epoch then makes the same share anew, and no more.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import compress
from multiprocessing.sharedctypes import RawValue
from operator import index as as_index
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset

from arrowcache.arguments import face, instead
from arrowcache.arrow.items import overrides_getitem_alone
from arrowcache.arrow.schema import FieldType
from arrowcache.display import Card, Facts, Part, Shown, printable
from arrowcache.errors import ArrowCacheError, SchemaError
from arrowcache.progress import progress_bar
from arrowcache.read_through.publisher import IDLE_SECONDS
from arrowcache.read_through.read_through import LeftOut, Put, ReadThrough
from arrowcache.read_through.shards import WholeReader
from arrowcache.reading.options import parse_ranks
from arrowcache.sampling.dispatcher import MAX_READS
from arrowcache.sampling.task import require_policy
from arrowcache.storage.claims import TURNING_OVER, the_only_one
from arrowcache.storage.settings import CachedItems, require_share
from arrowcache.storage.store import Store
from arrowcache.torch.cached_stream import CachedStream, cached_stream
from arrowcache.torch.collation import batch_of, collated, columns_of
from arrowcache.torch.item_cache import ItemCache, kept, require_texts, spec_of
from arrowcache.torch.item_source import ItemSource, Unwanted
from arrowcache.torch.randomness import seeds_of_workers
from arrowcache.torch.stream_shards import StreamShards, WholeStream, is_stream
from arrowcache.torch.worker_processes import end_workers, starting_workers
from arrowcache.units import (
    format_bytes,
    format_count,
    format_share,
    parse_count,
)

_IN_LOADER = "an item has no batches: give it to Loader(train, batch_size, ...) or DataLoader(train, ...)"
_INSTEAD = {
    **instead(
        "batch_size", "shuffle", "seed", "workers", "num_workers", "drop_last", "device", say=_IN_LOADER
    ),
    **instead("segment_bytes", "segment_rows", say="segments follow from the capacity and the first item"),
    **instead("headroom", say="nothing is evicted but by replace=, so leave it out"),
    **instead("exist_ok", "overwrite", say="a cache of this dataset is opened, another one is refused"),
}
_FILLED_AT_ONCE = 8  # items, for each that is made at a time
_CLAIMED_AHEAD = 4  # likewise: threads find something to do until the last of them
_FILLS = 0  # seeds of workers that fill; those of a loader's begin with another number
_fills = itertools.count()
_TURN_SECONDS = IDLE_SECONDS + 0.5  # in which processes that read no more end their leases
_TRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CachedStats(Shown):
    """A dataset's cache at one moment, and the use that this process and its workers made of it.

    `cached` of `length` items are published, and take `published_bytes`; `hits` were read from the cache, and
    `made` made by the dataset inside, in this process and all that it started with the dataset, without the
    one that `cached` itself makes to see its form. `left_out` counts how often an item could not be made,
    with on_error="skip". `is_full`: no more fits into the capacity. `trouble` says why this process can store
    nothing now; it is empty if it can.
    """

    length: int
    cached: int
    published_bytes: int
    capacity_bytes: int
    is_full: bool
    hits: int
    made: int
    trouble: str = ""
    left_out: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of items that an epoch finds in the cache, in [0, 1]."""
        return self.cached / self.length

    def _card(self) -> Card:
        return Card("CachedStats", "", self.parts())

    def parts(self) -> list[Part]:
        """Describe what is in the cache, its size, and what this process did."""
        full = "; it is full, so an epoch makes the others each time" if self.is_full else ""
        items = f"{self.cached} of {format_count(self.length, 'item')}"
        share = f"{items} ({format_share(self.cached, self.length)}){full}"
        size = f"{format_bytes(self.published_bytes)} of {format_bytes(self.capacity_bytes)}"
        use = f"{format_count(self.hits, 'item')} read from the cache, {self.made} made"
        facts = [("in the cache", share), ("on the disk", size), ("with its workers", use)]
        if self.left_out:
            facts.append(("left out", f"{format_count(self.left_out, 'time')} an item could not be made"))
        if self.trouble:
            facts.append(("not stored now", printable(self.trouble)))
        return [Facts(facts)]


class CachedDataset(ItemCache[ReadThrough], Dataset[Any]):
    """A Dataset of the same length and items as the one inside, read through a cache. Made by `cached`.

    Any number of DataLoader workers, ranks and jobs of this machine share the cache. Each access gives new
    objects, whose memory is their own.
    Pickles as its arguments; the dataset inside has to pickle where DataLoader workers are not forked.
    """

    _inside = "dataset"

    @property
    def dataset(self) -> Dataset[Any]:
        """The dataset inside."""
        dataset: Dataset[Any] = self._spec.source.dataset
        return dataset

    def __len__(self) -> int:
        length: int = self._spec.source.length
        return length

    def __iter__(self) -> Iterator[Any]:
        """Yield all items in their order. No error of an item ends this as if there were no more."""
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice | Sequence[int] | NDArray[np.integer] | torch.Tensor) -> Any:
        """Return one item, with the transform applied, or a batch of several.

        Args:
            index: a number. A slice, or a list, array or tensor of numbers, as a BatchSampler gives to
                `DataLoader(train, batch_size=None, sampler=...)`, is a batch, as of `Loader(train)`.
        Blocks: while the item is made, or read from the disk.
        Raises: IndexError: outside [-len, len). SchemaError: an item does not fit the columns of the first.
            What the dataset inside or the transform raises. ValueError: closed.
        """
        several = _several(index, len(self))
        if several is not None:
            return self.batch(self._numbers(several))
        return self._items_at([index])[0]  # type: ignore[list-item]  # or it says so

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several items, as a DataLoader asks for a batch of them: those that are there by one job.

        Blocks, raises: as `__getitem__`.
        """
        if overrides_getitem_alone(type(self)):
            return [self[index] for index in indices]
        return self._items_at(indices)

    def _items_at(self, indices: Sequence[int]) -> list[Any]:
        return self.transformed(self.items_of(self._numbers(indices)))

    def transformed(self, items: list[Any]) -> list[Any]:
        """Return items with the transform applied, for the package's own use."""
        for item in items if self._spec.source.skips else ():
            if isinstance(item, LeftOut):
                raise item.error
        return super().transformed(items)

    def batch(
        self,
        indices: NDArray[np.int64],
        collate: Callable[[list[Any]], Any] | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        left_out: list[LeftOut] | None = None,
        reads: int = 1,
    ) -> Any:
        """Return a batch of items (n,) in [0, len), read or made by this process, for the package's own use.

        Args:
            collate: called with the items, after the transform. None makes what torch's default_collate does,
                or `Loader` in place of it.
            is_wanted: asked before each item is made.
            left_out: gets those that could not be made, and are left out. None: the first raises its error.
            reads: number of items to make at a time, in threads.
        Returns: None: all are left out.
        Raises: Unwanted. What the dataset inside, its transform or `collate` raise. SchemaError: an item does
            not fit.
        """
        items = self.items_of(indices, is_wanted, reads)
        if left_out is not None and self._spec.source.skips:
            left_out += (item for item in items if isinstance(item, LeftOut))
            is_there = [not isinstance(item, LeftOut) for item in items]
            items, indices = [*compress(items, is_there)], indices[is_there]
            if not items:
                return None
        if collate is None and not self.transforms:
            self.transformed(items)  # the error of the first that is left out
            return batch_of(self.form, columns_of(self.form, items, indices))
        return (collate or collated)(self.transformed(items))

    def _numbers(self, indices: Sequence[int]) -> NDArray[np.int64]:
        length, numbers = len(self), []
        for given in indices:
            try:
                number = as_index(given)
            except TypeError:
                raise TypeError(f"an item's index is an integer, not {given!r}") from None
            if not -length <= number < length:
                raise IndexError(f"item {number} is outside [0, {length})")
            numbers.append(number % length)
        return np.array(numbers, np.int64)

    def items_of(
        self, wanted: NDArray[np.int64], is_wanted: Callable[[], bool] = lambda: True, reads: int = 1
    ) -> list[Any]:
        """Return items (n,) in [0, len) without the transform, for the package's own use.

        Args:
            is_wanted, reads: as of `batch`.
        Raises: as `__getitem__`; Unwanted.
        """
        reader, make = self.reader_here(), partial(self._made, is_wanted, reads)
        if reader is None:
            with closing(make(wanted.tolist(), None)) as items:
                return [*items]
        at_once = None if self._spec.source.asks_for_many else reads * _CLAIMED_AHEAD
        return reader.items(wanted, self._spec.form.items, make, at_once)

    def _made(
        self, is_wanted: Callable[[], bool], reads: int, indices: list[int], put: Put | None
    ) -> Generator[Any, None, None]:
        """Yield what `columns` keeps of items that the dataset inside makes, or `LeftOut`, in order.

        Args:
            put: publishes each item. None: it is only checked.
        Raises: as `ItemSource.items`. SchemaError: names the item, and says what may help.
        """
        form = self._spec.form
        with closing(self._spec.source.items(indices, is_wanted, reads)) as items:
            for index, item in items:
                yield item if isinstance(item, LeftOut) else kept(form, index, item, put)

    # the cache

    def _begin(self, index: int, item: Any) -> None:
        """Open the cache or make it, and publish an item, the first that could be made, if it is missing.

        Raises: CacheFormatError, FileExistsError: something else is at the path. Warns: it cannot be used.
        """
        if self.open_at_once() is not None and (reader := self.reader_here()) is not None:
            first, publisher = np.array([index]), reader.publisher
            if not len(reader.find(first).positions) and publisher.claim(first).all():
                kept(self._spec.form, index, item, publisher.put)
            publisher.drain()

    def has(self, wanted: NDArray[np.int64]) -> bool:
        """True if all items (n,) are in the cache, for the package's own use."""
        reader = self.reader_here()
        return reader is not None and reader.has(wanted)

    def is_complete(self) -> bool:
        """True if all items are in the cache, for the package's own use. Raises nothing."""
        if (reader := self.reader_here()) is None:
            return False
        reader.publisher.flush()
        return reader.has(np.arange(len(self)))

    def drain_if_it_turns_over(self) -> None:
        """Drain where `turn_over` evicts: other ranks do so, too. For the package's own use."""
        if self._spec.replace:
            self.drain()

    def _new_reader(self, store: Store) -> ReadThrough:
        source, counts = self._spec.source, self._counts.numpy()
        if isinstance(source, WholeStream):
            return WholeReader(source.lengths, store, self._names, self._backoff, counts)
        return ReadThrough(store, self._names, self._backoff, counts)

    def stats(self) -> CachedStats:
        """Count the items that are in the cache now, and what this process and its workers did."""
        hits, made, left_out = self._counts.sum(0).tolist()
        found = self._contents(self.reader_here())
        misses = found.cached < len(self)
        return CachedStats(
            len(self),
            found.cached,
            found.published_bytes,
            found.capacity_bytes,
            misses and not found.has_room,
            hits,
            made,
            found.trouble if misses else self._backoff.why,
            left_out,
        )

    @face("fill()")
    def fill(self, workers: int = 8, progress: bool | None = None, reads: int = 1) -> int:
        """Make and publish all items that are missing, now.

        Args:
            workers: number of processes, which are forked: a script needs no main guard. 0 means this one.
                They have random seeds of their own, as of `seeds_of_workers`.
            progress: show a bar. None shows one if stderr is a terminal.
            reads: number of items that each makes at a time, in threads, for a dataset inside that waits, as
                for a store, and that may be asked by several threads at once. Many are not made for that.
        Blocks: until it is done, or the cache is full.
        Returns: the number of items in the cache.
        Raises: the error of the dataset inside. CacheFrozenError: items are missing from a frozen cache.
        """
        workers = parse_count(workers, "workers", least=0)
        reads = parse_count(reads, "reads", most=MAX_READS)
        reader = self.reader_here()
        if reader is None:
            return 0
        reader.publisher.flush()
        missing = reader.missing
        reader.publisher.drain()
        if len(missing):
            self._opened().require_thawed()
        workers = min(workers, len(missing))
        filling = _Filling(self, missing, reads)
        with starting_workers(workers):
            making = DataLoader(
                filling,
                batch_size=_FILLED_AT_ONCE * reads,
                num_workers=workers,
                generator=seeds_of_workers(_FILLS, next(_fills)),
                collate_fn=list,
                multiprocessing_context="fork" if workers else None,
            )
            stored_of_each = iter(making)  # before the bar, whose text a fork writes out
        try:
            with progress_bar(progress, total=len(missing), unit=" items", desc="filling") as bar:
                for stored in stored_of_each:
                    bar.update(len(stored))
                    if not all(stored):
                        break  # no more fits
        finally:
            filling.stop()  # else torch waits 5 s for each worker, and kills one that is at its items longer
            end_workers(stored_of_each)
        cached = self.cached
        reader.publisher.drain()  # which merges small segments
        return cached

    def turn_over(self) -> int:
        """Evict the oldest items of a full cache: a share of `replace` of the capacity.

        For between two epochs: other items take their room as they are asked for. Items that another process
        reads stay. Of several ranks that call it after an epoch one does it.

        Blocks: for some more than a second while others lease: the lease of a DataLoader's worker ends a
            second after its last request.
        Returns: the number of items that left.
        """
        reader = self.reader_here()
        if reader is None or not self._spec.replace or not self.stats().is_full:  # nor is a frozen one
            return 0
        reader.publisher.drain()
        store, deadline = self._opened(), time.monotonic() + _TURN_SECONDS
        nbytes = int(self._spec.replace * store.settings.capacity_bytes)
        with the_only_one(store.folder, TURNING_OVER) as is_alone:
            if not is_alone or store.has_room():  # another rank does it, or just did
                return 0
            while not (gone := store.evict(nbytes)) and time.monotonic() < deadline:
                time.sleep(_TRY_SECONDS)
        return sum(segment.rows for segment in gone)

    def __repr__(self) -> str:
        left_out = int(self._counts[:, 2].sum())
        skipped = f", left out {format_count(left_out, 'time')}" if left_out else ""
        return (
            f"<CachedDataset of {format_count(len(self), 'item')} at {printable(self._spec.path)}{skipped}>"
        )

    def _card(self) -> Card:
        try:
            parts = self.stats().parts()
        except (ArrowCacheError, OSError, ValueError) as error:
            parts = [str(error)]
        return Card("CachedDataset", str(self._spec.path), parts)


class _Filling(Dataset[bool]):
    """The items that are missing, each made and published, as whether it was stored."""

    def __init__(self, train: CachedDataset, missing: NDArray[np.int64], reads: int) -> None:
        self._train, self._missing, self._reads = train, missing, reads
        self._wanted = RawValue("b", True)

    def __len__(self) -> int:
        return len(self._missing)

    def __getitems__(self, places: list[int]) -> list[bool]:
        try:
            self._train.items_of(self._missing[places], lambda: bool(self._wanted.value), self._reads)
        except Unwanted:
            return []
        reader = self._train.reader_here()
        return [reader is not None and reader.publisher.can_store] * len(places)

    def stop(self) -> None:
        """Have no more items made; each worker ends after the one that it is at."""
        self._wanted.value = False


@overload
def cached(  # type: ignore[overload-overlap]  # an IterableDataset with items by number is rare
    dataset: IterableDataset[Any] | None,
    path: str | os.PathLike[str],
    *,
    capacity: int | str,
    version: str = ...,
    columns: Sequence[str | int] | None = ...,
    transform: Callable[[Any], Any] | None = ...,
    schema: Mapping[str, FieldType] | None = ...,
    shards: Sequence[Callable[[], Iterable[Any]]] | None = ...,
    rank: int | None = ...,
    world_size: int | None = ...,
) -> CachedStream: ...
@overload
def cached(
    dataset: Dataset[Any],
    path: str | os.PathLike[str],
    *,
    capacity: int | str,
    version: str = ...,
    columns: Sequence[str | int] | None = ...,
    transform: Callable[[Any], Any] | None = ...,
    schema: Mapping[str, FieldType] | None = ...,
    replace: float = ...,
    on_error: str = ...,
) -> CachedDataset: ...
@overload
def cached(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    capacity: int | str,
    version: str = ...,
    columns: Sequence[str | int] | None = ...,
    transform: Callable[[Any], Any] | None = ...,
    schema: Mapping[str, FieldType] | None = ...,
    replace: float = ...,
    on_error: str = ...,
    rank: int | None = ...,
    world_size: int | None = ...,
) -> CachedDataset | CachedStream: ...
@face("cached()", _INSTEAD)
def cached(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    capacity: int | str,
    version: str = "",
    columns: Sequence[str | int] | None = None,
    transform: Callable[[Any], Any] | None = None,
    schema: Mapping[str, FieldType] | None = None,
    replace: float = 0.0,
    on_error: str = "raise",
    shards: Sequence[Callable[[], Iterable[Any]]] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> CachedDataset | CachedStream:
    """Return a Dataset of the same items, which are read through a cache on the local disk.

    An item is made once, by the dataset inside, and stored; from then on it is read. So what is random in an
    item, such as augmentation, belongs into `transform`, or it would be the same in all epochs. The first
    item is made here: it shows the columns. Of a dataset with `__getitems__` the first two are asked of that,
    too, and compared.

    An item comes back as it was made, or is refused with what to give in its place. So a subclass of what is
    named below is refused, unless named itself. What is not quite as it was:
    - values that share memory, or are one object, come back apart, but for an attribute that is a value
      beside it; each owns its memory, which may be written to, on the CPU and neither shared nor pinned;
    - dimensions lie in memory as those of the first item (channels_last, Fortran's order), without gaps; an
      item whose dimensions lie otherwise is refused. Conjugates are resolved;
    - a tensor that requires a gradient, or has one, is refused. One made in inference mode, and one that
      autograd knows to be zero, come back as any other; a read-only array comes back as one to be written to;
    - keys of a mapping come in the order of the first item. An OrderedDict of another order is refused;
    - an image has its pixels, info and EXIF; its format and its file's class with all attributes go, so that
      files of several formats are alike. Files of several frames are refused, but of an MPO, as phones write
      it, the picture shown is stored;
    - classes, and the default_factory of a defaultdict, are those of this process' first item. A factory with
      a state of its own is refused;
    - a batch lies in memory in C's order, and has ints as int64, as default_collate does; those of a column
      of uint64, as of a first item of 2**63 or more, as uint64.

    A cache that was frozen (`train.cache.freeze()`) is read, also where it is read-only; its items that are
    missing are made, and not stored.

    Of a stream, which has no items by index, this returns a `CachedStream`: an IterableDataset of the same
    items. Each pass gives, of each shard, what is stored from the cache, then what the stream has behind it,
    and stores that as long as there is room. So a stream has to give the same items in the same order each
    time: shuffle behind `cached`, or by `Loader(train)` once all is stored. Each shard is iterated over by
    one rank and one worker of a DataLoader. A stream's first item is made here, and again in the first pass.

    Args:
        dataset: a map-style Dataset: `len`, and items by index. Else a stream: anything that can be iterated
            over again, as an IterableDataset, or a function that returns an iterable anew. A stream of
            Hugging Face has its own shards, and a WebDataset those of its URLs; any other is one shard. An
            item is an array, a tensor, a number,
            text, bytes, a datetime, a PIL image, a list of numbers, or a dict, list, tuple, named tuple or
            dataclass of such, nested at will, or a mapping that derives from dict or UserDict, as
            OrderedDict, defaultdict, Counter, BatchEncoding and ModelOutput do; objects with all their
            attributes. All items are of one form, of the same keys, classes and dtypes. Only attributes may
            be None, in all items.
        path: the cache's folder, new or of this dataset, on a local disk.
        capacity: the budget in bytes for everything in the folder. Once it is full, the other items are made
            at each access. Another capacity than before resizes the cache.
        version: name of the present content of the dataset. Change it when the dataset makes other items.
        columns: keys of a mapping, or positions in a tuple or list, to keep of each item. None means all. Of
            any mapping, a dict is kept.
        transform: called with each item, in the process that asks for it.
        schema: types of leaves by name, such as {"tokens": Ragged("int64")}, of values whose length differs.
        replace: the share of a full cache, in [0, 1), that leaves at each `turn_over`. Not of a stream.
        on_error: "raise" an error where the dataset inside raises one, or gives None for an item. "skip" has
            `Loader(train)` and `fill` leave such an item out, and count it in their stats; each epoch tries
            it again. Accesses by index, as of a DataLoader, raise it in any case. A MemoryError, an item
            that does not fit the first, and errors of a transform are never skipped.
        shards: functions, each of which returns an iterable of the items of one shard, anew at each call.
            `dataset` is None then.
        rank: rank of this process, of a stream. None means that of torch.distributed, if it is initialized.
        world_size: number of ranks. None with `rank`.
    Warns: RuntimeWarning: the folder cannot be used, as on a read-only disk: then all items are made. The
        dataset has a `__getitems__` that gives other items than `dataset[index]`: then it is not asked.
    Raises: TypeError: neither a map-style dataset nor a stream. CacheFormatError: the folder holds something
        else, such as items of another version, length, columns or classes. SchemaError: an item that no
        columns hold, or that they would not give back as it was. ValueError: an argument that does not fit.
        CacheFullError: a smaller capacity than before, which what other processes read does not fit.
    """
    if isinstance(dataset, CachedDataset | CachedStream):
        inside = "dataset" if isinstance(dataset, CachedDataset) else "stream"
        raise TypeError(f"the {inside} is cached already: give the one inside, {inside}.{inside}")
    require_policy(on_error)
    require_texts(version, transform)
    require_share(replace, "replace")
    if shards is not None or is_stream(dataset):
        if on_error != "raise" or replace:
            name, why = ("replace", "what is stored of a stream is its beginning, and stays")
            if on_error != "raise":
                name, why = "on_error", "have the stream itself go on behind an error, and leave the item out"
            raise ValueError(f"{name}= is of a map-style dataset: {why}")
        source = StreamShards(dataset, shards, parse_ranks(rank, world_size))
        return cached_stream(source, path, capacity, version, columns, transform, schema)
    if rank is not None or world_size is not None:
        raise ValueError("rank= is of a stream: a loader or a sampler divides a map-style dataset")
    items = ItemSource(dataset, skips=on_error == "skip")
    index, item, states = items.first()
    try:
        described = CachedItems(items.length, version)
        spec = spec_of(items, item, path, capacity, schema, columns, transform, described)
    except SchemaError as error:
        raise SchemaError(f"item {index}: {error}") from None
    items.compare_getitems(spec.form, index, item, states)
    train = CachedDataset(dataclasses.replace(spec, replace=float(replace)))
    train._begin(index, item)
    return train


def _several(index: object, length: int) -> Sequence[int] | None:
    """Return the numbers of a batch, or None: the index is of one item, or of none.

    Raises: TypeError: a mask. IndexError: it is empty.
    """
    if isinstance(index, torch.Tensor):
        index = index.numpy()
    if isinstance(index, np.ndarray):
        if index.ndim != 1:
            return None
        if index.dtype.kind not in "iu":
            raise TypeError(f"an index is a whole number, not {index.dtype}: of a mask give its nonzero()")
        index = index.tolist()
    if isinstance(index, slice):
        index = range(*index.indices(length))
    if not isinstance(index, list | range):
        return None
    if isinstance(index, list) and any(isinstance(each, bool | np.bool_) for each in index):
        raise TypeError("an index is a whole number, not bool: of a mask give numpy.flatnonzero(mask)")
    if not index:
        raise IndexError("a batch has at least one item: the list of indices is empty")
    return index
