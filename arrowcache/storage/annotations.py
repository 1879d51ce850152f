"""Annotations: values on their way into the notes, so that a training loop need not wait for the disk.

`add` keeps them in memory; a thread writes each second, and ends when nothing comes. All users of one cache
in a process share them. `flush` writes them at once, as does the end of the process; a killed one loses those
of its last second.

Guarantees: `add` waits for no disk and no lock of another process, unless a million rows wait already; what
cannot be written now is kept, and tried again, up to a million rows: then the oldest are lost.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import ArrowCacheError, WorkerError, sentence_of, warn
from arrowcache.lifetimes import at_exit, at_worker_exit, call_all, forgets_in_child, unforked
from arrowcache.os_errors import explaining, start
from arrowcache.storage.locks import file_identity
from arrowcache.storage.note_lines import Rows
from arrowcache.storage.notes import VALUES, Notes
from arrowcache.storage.row_ids import found
from arrowcache.storage.store import Store
from arrowcache.units import format_count

_SECONDS = 1.0  # between two writes
_MOST_WAITING = 1 << 20  # rows in memory


_Values = tuple[NDArray[np.int64], Mapping[str, NDArray[np.float64]]]


class Annotations:
    """Values that are not written yet, of one cache and process. Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        self._store, self.notes = store, Notes(store)
        self.forget_in_child()
        forgets_in_child(self)

    def forget_in_child(self) -> None:
        """Begin anew: what waits is the parent's to write."""
        self._waiting: list[_Values] = []
        self._rows = 0
        #: The segments of the last look: their numbers, their rows, and the number of the next one.
        self._seen: tuple[NDArray[np.int64], NDArray[np.int64], int] | None = None
        self._adding, self._writing = threading.RLock(), threading.RLock()  # the second is taken first
        self._thread: threading.Thread | None = None
        self._ends_with_worker = False

    @classmethod
    def of(cls, store: Store) -> Annotations:
        """Those of a cache, shared by all its users in this process. Raises: OSError: its folder is gone."""
        with explaining(store.folder.path):
            status = os.stat(store.folder.lease_lock)  # never written to: its time tells reused inodes apart
        identity = store.folder.path, *file_identity(status), status.st_mtime_ns
        with unforked:  # and no other thread comes in between
            found = _living.get(identity)
            if found is None:
                found = _living[identity] = cls(store)
            return found

    def add(self, ids: NDArray[np.int64], values: Mapping[str, NDArray[np.float64]]) -> None:
        """Take a value of each name for each row (n, 2).

        Blocks: as `flush`, if a million rows wait already.
        Warns: RuntimeWarning, once: older ones left for want of room, or could not be written.
        Raises: ValueError: they are more than there may be. IndexError: a row that never was.
        """
        with suppress(ArrowCacheError, OSError):  # then it is passed over as the values are written
            self._require_known(ids)
        count = len(ids) * len(values)
        if count > self.notes.most_values and not self.notes.has_grown(count):
            raise ValueError(
                f"{count} values are more than an eighth of the cache's capacity holds, "
                f"{self.notes.most_values}: annotate fewer rows, or raise the capacity"
            )
        self.notes.warn_of_loss()
        if not self._ends_with_worker:
            self._ends_with_worker = True
            at_worker_exit(self._flush_last)
        with self._adding:
            self._waiting.append((ids, values))
            self._rows += len(ids)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="arrowcache-annotate", daemon=True)
                try:
                    start(self._thread)
                except WorkerError:  # it is tried again
                    self._thread = None
        if self._rows > _MOST_WAITING:
            try:
                self.flush()
            except (ArrowCacheError, OSError) as error:  # which ends no training
                self._forget_oldest(sentence_of(error))

    def _require_known(self, ids: NDArray[np.int64]) -> None:
        """Look for rows (n, 2) among the segments of the last look, and anew if one is of none of them."""
        for is_new in (False, True):
            if is_new or self._seen is None:
                rows = Rows.of(self._store.segments())
                self._seen = rows.seqs, np.diff(rows.starts), self._store.folder.read_record().next_seq
            try:
                found(ids, *self._seen)
            except IndexError:
                if is_new:
                    raise
            else:
                return

    def flush(self) -> None:
        """Write what waits. Blocks: for cache.lock. Raises: LockTimeoutError, CacheFullError, OSError."""
        with self._writing:
            with self._adding:
                todo = self._waiting.copy()
            if todo:
                names = dict.fromkeys(name for _, values in todo for name in values)
                self.notes.annotate({name: _joined(name, todo) for name in names})
            with self._adding:
                del self._waiting[: len(todo)]
                self._rows -= sum(len(ids) for ids, _ in todo)

    def _forget_oldest(self, why: str) -> None:
        with self._writing, self._adding:
            before = self._rows
            while self._rows > _MOST_WAITING // 2:
                ids, _ = self._waiting.pop(0)
                self._rows -= len(ids)
        rows = format_count(before, "row")
        lost = before - self._rows
        self.notes.lose(
            f"of {rows} whose annotations wait to be written, the oldest {lost:,} are lost: {why}"
        )

    def close(self) -> None:
        """As `flush`, for one who asked for it. Warns: RuntimeWarning, once: as `add`."""
        self.flush()
        self.notes.warn_of_loss()

    def flush_or_warn(self) -> None:
        """As `flush`, where older values will do. Warns: RuntimeWarning: what waits cannot be written."""
        try:
            self.close()
        except (ArrowCacheError, OSError) as error:
            warn(f"annotations of {format_count(self._rows, 'row')} wait: {sentence_of(error)}")

    def names(self, expected: Iterable[str] = ()) -> list[str]:
        """The names of all annotations, those that wait and those expected included, in order."""
        with self._adding:
            waiting = {name for _, values in self._waiting for name in values}
        return sorted({*self.notes.names(), *waiting, *expected})

    def _run(self) -> None:
        try:
            while True:
                time.sleep(_SECONDS)
                with suppress(ArrowCacheError, OSError):  # tried again; `flush` raises it, the exit tells it
                    self.flush()
                self.notes.merge(VALUES)
                with self._adding:
                    if not self._waiting:
                        self._thread = None
                        return
        except BaseException:  # such as MemoryError: the next value starts a thread anew
            with self._adding:
                self._thread = None
            raise

    def _flush_last(self) -> None:
        try:
            self.close()
        except (ArrowCacheError, OSError) as error:
            warn(f"annotations of {format_count(self._rows, 'row')} are lost: {sentence_of(error)}")


def _joined(name: str, all_values: list[_Values]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    some = [(ids, values[name]) for ids, values in all_values if name in values]
    return np.concatenate([ids for ids, _ in some]), np.concatenate([values for _, values in some])


def _flush_all() -> None:
    call_all([annotations._flush_last for annotations in [*_living.values()]])


_living: weakref.WeakValueDictionary[object, Annotations] = weakref.WeakValueDictionary()
at_exit(_flush_all)
