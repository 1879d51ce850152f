"""Writer: user code's way to append samples; it turns them into published segments.

Guarantees: an `append` that raises has not taken its sample, and nothing taken before is lost;
a full segment is published at once, a part-filled one after `max_delay` seconds or at close.
Must never: publish half a sample, or keep a thread that outlives `close()`, `abort()` or itself.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from arrowcache.arrow.builder import (
    LARGER_SEGMENTS,
    LARGER_SEGMENTS_OF_ITEMS,
    ConvertedRows,
    SegmentBuilder,
)
from arrowcache.arrow.convert import are_many
from arrowcache.errors import ArrowCacheError, CacheFullError, SchemaError, warn
from arrowcache.lifetimes import Origin
from arrowcache.os_errors import start
from arrowcache.storage.store import Cancelled, RoomPolicy, Store
from arrowcache.units import format_count, parse_seconds

if TYPE_CHECKING:
    from typing import Self

ON_FULL = ("wait", "raise")

_UNPUBLISHED = (ArrowCacheError, OSError, MemoryError)  # what a publish raises: its rows are kept


class Writer:
    """Appends samples to a cache. Made by `Cache.writer()`; a context manager.

    Safe to use from several threads. Closing publishes the rest; leaving a `with` block by an
    exception publishes it only if there is room at once, so that Ctrl-C never waits.
    """

    def __init__(self, store: Store, *, on_full: str, timeout: float | None, max_delay: float | None) -> None:
        if on_full not in ON_FULL:
            raise ValueError(f"on_full={on_full!r} is unknown: use {' or '.join(map(repr, ON_FULL))}")
        settings = store.settings
        self._store = store
        way_out = LARGER_SEGMENTS if settings.dataset is None else LARGER_SEGMENTS_OF_ITEMS
        self._builder = SegmentBuilder(settings.form, way_out)
        self._aborted = threading.Event()
        timeout = parse_seconds(timeout, "timeout")
        self._policy = RoomPolicy(on_full, timeout, is_cancelled=self._aborted.is_set)
        self._max_delay = parse_seconds(max_delay, "max_delay")
        self._oldest_sample = 0.0  # monotonic time of the first sample in the builder
        self._lock = threading.RLock()
        self._closed = False
        self._flusher: threading.Thread | None = None
        self._wake: SimpleQueue[object] = SimpleQueue()  # unlike a condition, whole wherever Ctrl-C comes
        self._origin = Origin()
        self._sign = store.show_writing()  # loaders see it until this ends or is gone

    def append(self, sample: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Append one sample, given as keyword arguments or as one mapping.

        Blocks: while a full segment is written, and as `on_full` says while there is no room.
        Raises: SchemaError, ValueError: the sample does not fit; CacheFullError: no room. The
            sample is not taken then, the writer stays usable and keeps what it had.
        """
        self._take(_one_mapping(sample, fields), many=False)

    def extend(self, samples: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Append many samples: each field has a leading axis of the same length.

        Raises: as append(). All samples are checked before the first is taken; CacheFullError
            says how many were taken.
        """
        self._take(_one_mapping(samples, fields), many=True)

    def flush(self) -> None:
        """Publish what is not yet published, now.

        Blocks, raises: as append() for CacheFullError; the samples are kept then.
        """
        self._origin.require("the writer", "make a new one here")
        with self._lock:
            self._require_open()
            try:
                self._publish(self._policy)
            except Cancelled:
                raise ValueError("the writer was aborted while this call waited for room") from None

    @property
    def rows(self) -> int:
        """Samples that were taken and are not yet published."""
        return self._builder.rows

    def close(self) -> None:
        """Publish the rest and end. Idempotent; after a CacheFullError it may be called again.

        In a forked child this and `abort` do nothing: the samples are the parent's.
        """
        if not self._origin.is_here:
            return
        with self._lock:
            if not self._closed:
                try:
                    self._publish(self._policy)
                except Cancelled:
                    raise ValueError("the writer was aborted while close() waited for room") from None
                self._end()
        self._join()

    def abort(self) -> None:
        """Discard what is not yet published and end; another thread's wait for room ends too. Idempotent."""
        if not self._origin.is_here:
            return
        self._aborted.set()
        with self._lock:
            self._builder.clear()
            self._end()
        self._join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not self._origin.is_here:
            self.close()
            return
        try:
            with self._lock:
                rows = self._builder.rows
                try:
                    if not self._closed:
                        self._publish(RoomPolicy("raise"))
                except _UNPUBLISHED as why:
                    warn(f"discarded {format_count(rows, 'sample')} as an exception passed: {why}")
        finally:
            self.abort()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._builder.rows and self._origin.is_here:
            self._closed = True  # else its thread could publish, meanwhile, what is said to be lost
            message = f"a writer with {format_count(self._builder.rows, 'unpublished sample')} was not closed"
            warnings.warn(message, ResourceWarning, stacklevel=2)

    def _take(self, sample: Mapping[str, Any], *, many: bool) -> None:
        self._origin.require("the writer", "make a new one here")
        with self._lock:
            self._require_open()
            try:
                rows = self._builder.convert(sample, many=many)
            except SchemaError as error:
                if many or not are_many(self._store.settings.schema, sample):
                    raise
                raise SchemaError(f"{error}; many samples: extend()") from None
            self._start_flusher()  # before a sample is taken: it may fail
            taken = 0
            try:
                while taken < rows.count:
                    taken += self._take_some(rows, taken)
            except CacheFullError as error:
                if many:
                    raise CacheFullError(
                        f"{taken:,} of {format_count(rows.count, 'sample')} were taken: {error}"
                    ) from error
                raise
            except OSError as error:
                if many and taken and error.errno is not None:
                    text = f"{taken:,} of {format_count(rows.count, 'sample')} were taken: {error.strerror}"
                    raise OSError(error.errno, text, error.filename) from error
                raise
            except Cancelled:
                raise ValueError("the writer was aborted while this call waited for room") from None
            if self._builder.is_full:
                try:
                    self._publish(RoomPolicy("raise"))
                except _UNPUBLISHED:
                    pass  # every sample is taken: the next append or close waits, or reports it

    def _take_some(self, rows: ConvertedRows, start: int) -> int:
        if self._builder.rows == 0:  # before one is taken: Ctrl-C may come after it
            self._oldest_sample = time.monotonic()
            self._wake_flusher()
        count = 0 if self._builder.is_full else self._builder.take(rows, start)
        if count == 0:
            self._publish(self._policy)
        return count

    def _publish(self, policy: RoomPolicy) -> None:
        if self._builder.rows:
            self._store.publish(self._builder.encode(), policy=policy, on_visible=self._builder.clear)

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the writer is closed: make a new one with cache.writer()")

    def _end(self) -> None:
        self._closed = True
        self._wake_flusher()
        self._sign.close()

    # max_delay

    def _start_flusher(self) -> None:
        if self._max_delay is not None and self._flusher is None:
            mine = weakref.ref(self, self._wake.put)
            flusher = threading.Thread(
                target=_flush, args=(mine, self._wake), name="arrowcache-flush", daemon=True
            )
            start(flusher)
            self._flusher = flusher

    def _wake_flusher(self) -> None:
        if self._flusher is not None:  # else nobody empties the queue
            self._wake.put(None)

    def _flush_due(self) -> float | None:
        """Publish a part-filled segment whose first sample is `max_delay` old.

        Returns: seconds to the next look, or None to wait for a sample.
        """
        assert self._max_delay is not None
        with self._lock:
            if self._closed or self._builder.rows == 0:
                return None
            due = self._oldest_sample + self._max_delay - time.monotonic()
            if due > 0:
                return due
            try:
                self._publish(RoomPolicy("raise"))
            except _UNPUBLISHED:
                return max(self._max_delay, 0.1)  # append waits as it was told to
            return None

    def _join(self) -> None:
        if self._flusher is not None and self._flusher is not threading.current_thread():
            self._flusher.join()


def _flush(reference: weakref.ref[Writer], wake: SimpleQueue[object]) -> None:
    """The thread of `max_delay`. It refers to no writer while it waits, and ends with one that is dropped."""
    seconds: float | None = None
    while True:
        with suppress(Empty):
            wake.get(timeout=seconds)
        writer = reference()
        if writer is None or writer._closed:
            wake.put(None)  # for another one, which there is where Ctrl-C came as this one started
            return
        seconds = writer._flush_due()
        del writer


def _one_mapping(sample: Mapping[str, Any] | None, fields: dict[str, Any]) -> Mapping[str, Any]:
    if sample is None:
        return fields
    if fields:
        raise TypeError("give a sample as one mapping or as keyword arguments, not both")
    if not isinstance(sample, Mapping):
        raise TypeError(f"a sample is a mapping of field names to values, not {type(sample).__name__}")
    return sample
