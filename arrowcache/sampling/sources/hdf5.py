"""HDF5: a dataset of an HDF5 file on any store, through h5py, which this module imports.

A local file is read by HDF5 itself. Any other file is read through a Python file object, which repeats reads
that fail in the store. HDF5 looks for its metadata in many small reads, so they are buffered. Where the
file has the cells of a dataset plain, they are read past HDF5, as those of a .npy: many windows at once.

libhdf5 closes the files that are left open once the interpreter is gone. To call a Python file object then
would crash the process. So they are closed at exit before it, in a forked child too: that asks no store.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import h5py
import numpy as np
from numpy.typing import NDArray

from arrowcache.errors import SamplerError, SchemaError
from arrowcache.lifetimes import Origin, at_exit, call_all, exit_has_begun
from arrowcache.sampling.retries import in_place_of
from arrowcache.sampling.sources.arrays import (
    ArrayLayout,
    Pieces,
    Places,
    Window,
    box_from_bytes,
    from_bytes,
    from_pieces,
    strides_of,
)
from arrowcache.sampling.sources.object_store import ObjectStore, StoreFile, names_in

T = TypeVar("T")

_BUFFER_BYTES = 64 << 10
_EXIT_SECONDS = 10.0  # for the end of another thread's read at exit


class Hdf5Array:
    """A dataset of an open file. HDF5 reads in one thread at a time, what is past it in any.

    Raises: FileNotFoundError: no such file. ValueError: no dataset of that name. SamplerError: not HDF5.
    """

    layout: ArrayLayout

    def __init__(self, store: ObjectStore, path: str, inner: str, name: str) -> None:
        self._store, self._path, self._name = store, path, name
        self._remote: StoreFile | None = None
        self._file: Any = None
        self._lock, self._origin = threading.RLock(), Origin()
        try:
            with self._lock:
                self._file = self._opened()
            self._dataset = self._run(lambda: self._find(inner))
            self.layout = self._run(lambda: _layout(self._dataset))
            self._start = None if store.is_local else self._run(lambda: _start(self._file, self._dataset))
        except BaseException:
            self.close()
            raise

    def _opened(self) -> Any:
        if self._store.is_local:
            self._store.run(lambda: self._store.open(self._path).close(), self._path)  # h5py names no file
            return self._run(lambda: h5py.File(self._path, "r", locking="best-effort"))
        _remote[id(self)] = self
        if exit_has_begun():
            raise RuntimeError(f"{self._name} is not opened: the process ends")
        self._remote = StoreFile(self._store, self._path)
        file = io.BufferedReader(self._remote, _BUFFER_BYTES)
        return self._run(lambda: h5py.File(file, "r", locking="best-effort"))

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        if self._start is not None:
            return box_from_bytes(self.layout, box, self._bytes)
        return self._run(lambda: np.asarray(self._dataset[tuple(box)]))

    def cut(self, window: Window, starts: Places, pieces: Pieces | None) -> tuple[NDArray[Any], set[int]]:
        if self.layout.chunks is not None:
            is_tallied = self._remote is not None
            return from_pieces(self.layout, window, starts, self.read, pieces, is_tallied=is_tallied)
        if self._start is not None:
            return from_bytes(self.layout, window, starts, self._bytes), set()
        return np.stack([self.read(window.box(start)) for start in starts.tolist()]), set()

    def attribute(self, name: str) -> Any:
        return self._run(lambda: self._dataset.attrs.get(name))

    def close(self) -> None:
        if self._remote is not None and self._remote.is_over:  # closed at exit
            return
        if self._file is not None:
            self._file.close()
        if self._remote is not None:
            self._remote.close()

    def close_at_exit(self) -> None:
        """Close HDF5's part, also while a daemon thread reads: its read fails.

        A forked child waits for no lock: a thread of its parent may have it, but h5py lets none fork in HDF5.
        """
        _closed_at_exit.append(self)  # h5py ends without its lock: no thread may free its objects then
        if self._remote is not None:
            self._remote.is_over = True
        is_here = self._origin.is_here
        if not is_here or self._lock.acquire(timeout=_EXIT_SECONDS):
            if self._file is not None:
                self._file.close()
            if is_here:
                self._lock.release()

    def _bytes(self, first: int, nbytes: int) -> bytes:
        assert self._remote is not None
        assert self._start is not None
        return self._remote.fetch(nbytes, self._start + first)

    def _find(self, inner: str) -> Any:
        found = self._file.get(inner) if inner else None
        if isinstance(found, h5py.Dataset) and found.shape is not None:
            return found
        if isinstance(found, h5py.Dataset):
            raise SchemaError(f"{self._name}: the dataset {inner!r} is empty: it has no shape")
        what = f"no dataset {inner!r}" if inner else "say which dataset"
        group, before = self._file, ""
        if isinstance(found, h5py.Group):
            what, group, before = f"{inner!r} is a group: say which dataset", found, f"{inner.strip('/')}/"
        names: list[str] = []
        group.visititems(
            lambda name, thing: names.append(before + name) if isinstance(thing, h5py.Dataset) else None
        )
        raise ValueError(f"{self._name}: {what}; {names_in('the file', names, inner)}")

    def _run(self, read: Callable[[], T]) -> T:
        try:
            with self._lock:
                if self._remote is not None:
                    self._remote.require_open()
                return read()
        except (OSError, RuntimeError, KeyError) as error:
            if self._remote is not None:
                self._remote.require_open()
                if self._remote.error is not None:
                    raise self._remote.error from None
            why = self._store.other_format(self._path, "HDF5") or " ".join(str(error).split())
            raise in_place_of(error, SamplerError(f"{self._name}: cannot be read as HDF5: {why}")) from None


def _layout(dataset: Any) -> ArrayLayout:
    strides = strides_of(dataset.shape, dataset.dtype.itemsize)
    names = tuple(_axis_name(dataset, axis) for axis in range(len(dataset.shape)))
    return ArrayLayout(dataset.shape, dataset.dtype, dataset.chunks, strides, names)


def _start(file: Any, dataset: Any) -> int | None:
    """Return where in the file a dataset's cells begin. None: they do not lie there as NumPy has them."""
    is_plain = (
        dataset.id.get_create_plist().get_layout() == h5py.h5d.CONTIGUOUS
        and dataset.external is None
        and not file.userblock_size
        and dataset.dtype.kind in "iuf"
        and dataset.dtype.isnative
        and dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))  # also in its bits
    )
    start: int | None = dataset.id.get_offset() if is_plain else None  # None, too, if nothing was written
    return start


def _axis_name(dataset: Any, axis: int) -> str | None:
    """The name of an axis: of its dimension scale, as netCDF-4 has it, or its label."""
    with suppress(OSError, RuntimeError, LookupError, TypeError, ValueError, AttributeError):  # others' files
        attached = dataset.dims[axis]
        scale = dataset if dataset.is_scale else attached[0] if len(attached) else None
        name: str = attached.label if scale is None else scale.name.rpartition("/")[2]
        return name or None
    return None


def _close_all() -> None:
    call_all(array.close_at_exit for each in _remote.valuerefs() if (array := each()) is not None)


_remote: WeakValueDictionary[int, Hdf5Array] = WeakValueDictionary()  # by id
_closed_at_exit: list[Hdf5Array] = []
at_exit(_close_all)
