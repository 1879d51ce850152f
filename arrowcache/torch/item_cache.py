"""ItemCache: the cache of items of a dataset or a stream, opened or made, pickled, read, drained and closed.

cached_dataset.py and cached_stream.py are its two faces.

A cache belongs to one dataset or stream: its cache.json has the length or the number of shards, the user's
`version` and the columns, and anything else at the path is refused. A cache that cannot be used stops no
training: `reader_here` is None then, and a warning says why.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch

from arrowcache.arrow.schema import FieldType, Ragged, Schema, Tensor, difference
from arrowcache.cache import Cache
from arrowcache.display import Shown
from arrowcache.errors import ArrowCacheError, CacheFormatError, LockTimeoutError, SchemaError
from arrowcache.lifetimes import Closable, finalizer, forgets_in_child
from arrowcache.pickling import pickled, unpickled
from arrowcache.read_through.item_index import INDEX
from arrowcache.read_through.publisher import FailureBackoff
from arrowcache.read_through.read_through import Put, ReadThrough
from arrowcache.reading.batch_source import STOPPED
from arrowcache.storage.recovery import create_store, is_free, open_store
from arrowcache.storage.settings import CachedItems, Settings, settings_of_items
from arrowcache.storage.store import Store
from arrowcache.torch.codecs import ExactForm
from arrowcache.torch.collation import columns_of
from arrowcache.torch.lazy_batch import shared_numbers
from arrowcache.units import parse_bytes, require_function

Reader = TypeVar("Reader", bound=ReadThrough)

_COUNTING = 4096  # rows of counts, one of which a process has; many, so that few share one

UNUSABLE = (OSError, LockTimeoutError)


@dataclass(frozen=True)
class Spec:
    """The arguments of `cached`, checked, with the form of an item: what travels to a worker.

    `source` gives the items: an `ItemSource`, a `WholeStream` or `StreamShards`.
    """

    source: Any
    path: Path
    settings: Settings
    form: ExactForm
    transform: Callable[[Any], Any] | None
    replace: float = 0.0
    first: tuple[int, dict[str, Any]] | None = None  # of a stream: a shard, and the row of its first item


_FROZEN = "the cache is frozen: items that are missing are made, and not stored"


class Contents(NamedTuple):
    """The content of a cache now."""

    cached: int
    published_bytes: int
    capacity_bytes: int
    has_room: bool
    trouble: str  # why nothing is stored now


class ItemCache(Shown, Closable, Generic[Reader]):
    """A cache of items, opened when it is first needed. Pickles as its spec; a forked child opens it anew.

    Args:
        counts: of all processes, as of `ReadThrough`.
    """

    _inside: ClassVar[str]  # the property that has what is cached

    def __init__(self, spec: Spec, counts: torch.Tensor | None = None) -> None:
        self._spec = spec
        self._counts = _shared_counts() if counts is None else counts  # shared with its workers
        self._names = tuple(leaf.name for leaf in spec.form.leaves)
        self._store: Store | None = None
        self._reader: Reader | None = None
        self._backoff = FailureBackoff()
        self._is_closed = False
        self._lock = threading.RLock()  # while the cache is opened
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Have no reader: it is the parent's."""
        self._reader, self._lock = None, threading.RLock()

    @property
    def path(self) -> Path:
        """The folder of the cache."""
        return self._spec.path

    def __getattr__(self, name: str) -> NoReturn:
        """Raises: AttributeError: says where it is, if what is cached has it."""
        own = type(self)
        says = f"a {own.__name__} has no attribute {name!r}"
        if not name.startswith("_") and hasattr(getattr(self, own._inside), name):
            says += (
                f", and the {own._inside} inside has: use train.{own._inside}.{name}, for train = cached(...)"
            )
        raise AttributeError(says, name=name, obj=self)

    def transformed(self, items: list[Any]) -> list[Any]:
        """Return items with the transform applied, for the package's own use."""
        transform = self._spec.transform
        try:
            return items if transform is None else [transform(item) for item in items]
        except StopIteration as error:
            raise RuntimeError(STOPPED) from error

    def open_at_once(self) -> Store | None:
        """Open the cache or make it, with the capacity that was asked for.

        Returns: None: it cannot be used, with a warning.
        Raises: CacheFormatError, FileExistsError: something else is at the path.
        """
        capacity = self._spec.settings.capacity_bytes
        try:
            store = self._opened()
            if not store.is_frozen:
                store.have_capacity(capacity)
            return store
        except (FileExistsError, NotADirectoryError):
            raise
        except UNUSABLE as error:
            self._backoff.note(error)
            return None

    @property
    def form(self) -> ExactForm:
        """The form of an item, for the package's own use."""
        return self._spec.form

    def drain(self) -> None:
        """Publish what this process made, and end its lease, for the package's own use."""
        if self._reader is not None:
            self._reader.publisher.drain()

    @property
    def transforms(self) -> bool:
        """True if items pass a transform as they are read, for the package's own use."""
        return self._spec.transform is not None

    @property
    def cache(self) -> Cache:
        """The cache of the items, with columns of the names of their leaves, and `_index`.

        What this process made is published, and it leases nothing until it asks for the next item: so `evict`
        and `resize` find it free.
        Blocks: while that is published, and small segments are merged.
        Raises: OSError: it cannot be used, such as on a read-only disk.
        """
        self.drain()  # to end the lease alone is not enough: the thread that publishes begins another one
        return Cache(self._opened())

    def _opened(self) -> Store:
        if self._store is None:
            self._store = _open(self._spec)
        return self._store

    def _new_reader(self, store: Store) -> Reader:
        raise NotImplementedError

    def reader_here(self) -> Reader | None:
        """The reader of this process, for the package's own use. None while the cache cannot be used."""
        if self._is_closed:
            raise ValueError(f"the {self._inside} is closed: make it again with arrowcache.torch.cached")
        if self._reader is not None:
            return self._reader
        with self._lock:
            if self._reader is None and not self._backoff.why:
                try:
                    self._reader = reader = self._new_reader(self._opened())
                    finalizer(self, reader.publisher.close_soon)  # which publishes what was made
                except UNUSABLE as error:
                    self._backoff.note(error)
            return self._reader

    @property
    def cached(self) -> int:
        """The number of items that are in the cache.

        What is made and not yet published counts, too, as it is published at once. Blocks: for a moment.
        """
        reader = self.reader_here()
        if reader is None:
            return 0
        reader.publisher.flush()
        return reader.cached

    def _contents(self, reader: Reader | None) -> Contents:
        """Return what the cache holds. Raises nothing: what fails is noted."""
        if reader is not None:
            cached = reader.cached
            try:
                store = self._opened()
                found = store.stats()
                has_room, trouble = (True, _FROZEN) if store.is_frozen else (store.has_room(), "")
                nbytes = found.published_bytes, found.capacity_bytes
                return Contents(cached, *nbytes, has_room, self._backoff.why or trouble)
            except (ArrowCacheError, OSError) as error:
                self._backoff.note(error)
                return Contents(cached, 0, self._spec.settings.capacity_bytes, True, self._backoff.why)
        return Contents(0, 0, self._spec.settings.capacity_bytes, True, self._backoff.why)

    def close(self) -> None:
        """Publish what was made, and end. Idempotent."""
        self._is_closed = True
        if self._reader is not None:
            self._reader.publisher.close()

    def _spec_to_send(self) -> Spec:
        return self._spec

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        spec, transform = self._spec_to_send(), self._spec.transform
        functions = None if transform is None else pickled(transform, "the transform", "use forked workers")
        return _unpickled, (type(self), replace(spec, transform=None), functions, self._counts)


def _unpickled(
    kind: type[ItemCache[Any]], spec: Spec, functions: bytes | None, counts: torch.Tensor
) -> ItemCache[Any]:
    spec = spec if functions is None else replace(spec, transform=unpickled(functions))
    is_shared = counts.is_shared()  # type: ignore[no-untyped-call]  # False: of a copy, which counts for itself
    return kind(spec, counts if is_shared else None)


def _shared_counts() -> torch.Tensor:
    """Return counts that all processes of a dataset add to, each in a row of its own, as of `ReadThrough`."""
    try:
        return shared_numbers(_COUNTING, 3)
    except OSError:  # no memory or descriptor is left: each process counts for itself
        return torch.zeros(_COUNTING, 3, dtype=torch.int64)


def require_texts(version: object, transform: object) -> None:
    """Raises: TypeError: `version` is no text, or `transform` no function."""
    require_function(transform, "transform")
    if not isinstance(version, str):
        raise TypeError(f"version must be a text, not {version!r}")


def spec_of(
    source: Any,
    item: Any,
    path: str | os.PathLike[str],
    capacity: int | str,
    schema: Mapping[str, FieldType] | None,
    columns: Any,
    transform: Callable[[Any], Any] | None,
    items: CachedItems,
) -> Spec:
    """Return the spec of a cache.

    Args:
        item: the first one.
        items: of the cache; its `values` follow from the item.
    Raises: SchemaError: the item does not fit, or would not come back as it was. ValueError: a capacity of
        too few items.
    """
    form = ExactForm(item, schema, columns)
    row, nbytes = form.row(item), parse_bytes(capacity, "capacity")
    if INDEX in form.schema:
        raise SchemaError(f"an item has a value named {INDEX!r}, which is the name of its index: rename it")
    form.require(row)
    with_index = Schema({**form.schema, INDEX: Tensor("int64")})
    items = replace(items, values=form.classes)
    settings = settings_of_items(with_index, nbytes, form.variable_bytes(row), items)
    first = form.chosen(item)
    form.require_return(first, form.items(columns_of(form, [first], np.zeros(1, np.int64)))[0])
    return Spec(source, Path(path).absolute(), settings, form, transform)


def kept(
    form: ExactForm, index: int, item: Any, put: Put | None, named: Callable[[int], str] = "item {}".format
) -> Any:
    """Return what `columns` keeps of an item, after it was `put`; without that it is only checked.

    Args:
        named: gives the item's name, for an error.
    Raises: SchemaError: names the item, and says what may help.
    """
    row: dict[str, Any] = {}
    try:
        kept = form.chosen(item)
        row = form.row_of_chosen(kept)
        if put is None:
            form.require(row)
        else:
            put(index, row)
        return kept
    except SchemaError as error:
        raise SchemaError(f"{named(index)}: {error}{_way_out(form, row)}") from None


def _way_out(form: ExactForm, row: Mapping[str, Any]) -> str:
    """Return the end of an error: what may help where values have other shapes than their columns."""
    ragged, others = [], []
    for name, value in row.items():
        kind, shape = form.schema[name], _shape_of(value)
        if isinstance(kind, Ragged):
            if not shape or shape[1:] != kind.inner_shape:
                others.append(name)
        elif isinstance(kind, Tensor) and shape != kind.shape:
            if shape and kind.shape and shape[1:] == kind.shape[1:]:
                ragged.append(f"{name!r}: Ragged({kind.dtype!r}, {shape[1:]})")
            else:
                others.append(name)
    if others:
        return "; give all items one shape in the dataset, such as by a resize, a crop or padding"
    return f"; where lengths differ, pass schema={{{', '.join(ragged)}}}" if ragged else ""


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a value. None: a list whose parts have different lengths, or no array at all."""
    try:
        return tuple(np.shape(value))
    except (ValueError, TypeError):
        return None


def _open(spec: Spec) -> Store:
    """Open the dataset's cache, or make it.

    Raises: CacheFormatError: something else is there. OSError: the folder cannot be used.
    """
    try:
        if is_free(spec.path):
            store = create_store(spec.path, spec.settings, exist_ok=True)
        else:
            store = open_store(spec.path, check="structure")
    except SchemaError as error:  # another process was first
        raise CacheFormatError(str(error)) from None
    _require_fit(store.settings, spec)
    return store


def _require_fit(found: Settings, spec: Spec) -> None:
    wanted = spec.settings
    assert wanted.dataset is not None
    if found.dataset is None:
        why = "is a rolling cache, which samplers fill"
    elif replace(found.dataset, values="") != replace(wanted.dataset, values=""):
        this = "stream" if wanted.dataset.shards else "dataset"
        why = f"holds {found.dataset}, and this {this} has {wanted.dataset}"
    elif found.schema != wanted.schema:
        why = f"holds items of other columns: {difference(found.schema, wanted.schema)}"
    elif found.dataset.values != wanted.dataset.values:
        why = f"holds items of {found.dataset.values}, and this dataset has {wanted.dataset.values}"
    else:
        return
    raise CacheFormatError(f"{spec.path} {why}: give another path, or remove the folder if nobody needs it")
