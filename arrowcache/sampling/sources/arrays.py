"""Arrays: N-dimensional arrays in files of a store. Metadata are read at once, cells when they are asked for.

    *.npy                       NumPy's file, one array
    *.h5, *.hdf5, *.nc          HDF5 (hdf5.py): "run.h5#group/signal" names the dataset
    any other path              Zarr v3 (zarr3.py): a folder; "run.zarr#signal" or "run.zarr/signal"

An `Array` has shape and dtype, reads boxes, and can be closed. Nothing here unpickles: arrays of objects are
refused.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from arrowcache.errors import SamplerError
from arrowcache.sampling.sources.object_store import ObjectStore

_HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".nc")
_FILE = re.compile(r"(.*\.(?:h5|hdf5|hdf|he5|nc|zarr))#(.+)")
_HEADER_BYTES = 4096  # 128 in an array of numbers
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Array(Protocol):
    """One open array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Return the cells of a box, with a slice for each axis: a new array, of this dtype.

        Raises: OSError: an error of the store, after retries. SamplerError: damaged.
        """

    def close(self) -> None: ...


class Address(NamedTuple):
    """The address of an array: a file or folder, and a name in it."""

    path: str
    inner: str


def split_uri(uri: str) -> Address:
    """Split a URI or path from the name after its #; in a local path only after run.h5 or run.zarr."""
    if "://" in uri:
        before, _, inner = uri.partition("#")
        return Address(before, inner)
    match = _FILE.fullmatch(uri)
    return Address(match[1], match[2]) if match else Address(uri, "")


def open_array(store: ObjectStore, address: Address) -> Array:
    """Open an array, and read its metadata.

    Raises: FileNotFoundError, PermissionError, OSError: errors of the store. SamplerError: not an array of
        that format, or a damaged one. ImportError: says what to install. ValueError: an HDF5 file without a
        dataset's name.
    """
    path, inner = address
    name = store.name(path) + (f"#{inner}" if inner else "")
    if path.endswith(".npy"):
        if inner:
            raise ValueError(f"{name}: a .npy file has one array: leave out #{inner}")
        return NpyArray(store, path)
    if path.endswith(_HDF5):
        try:
            from arrowcache.sampling.sources.hdf5 import Hdf5Array
        except ModuleNotFoundError as error:
            raise _missing(name, "h5py", error) from error
        return Hdf5Array(store, path, inner, name)
    try:
        from arrowcache.sampling.sources.zarr3 import ZarrArray
    except ModuleNotFoundError as error:
        raise _missing(name, "zarr", error) from error
    return ZarrArray(store, f"{path}/{inner}" if inner else path, name)


def _missing(name: str, package: str, error: ModuleNotFoundError) -> Exception:
    if error.name != package:
        return error
    return ModuleNotFoundError(
        f"{name} needs {package}: pip install 'arrowcache[sources]'"
        + (", with Python 3.11 or newer" if package == "zarr" else ""),
        name=package,
    )


class NpyArray:
    """A .npy file. A box is read in one piece, from its first cell in the file to its last.

    So cells between are read, too: few, if the box is cut along the first axis of an
    array in C order, else up to the whole file.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store, self._path = store, path
        self._file = store.run(lambda: store.open(path), path)
        try:
            head = io.BytesIO(store.run(lambda: self._file.read_at(_HEADER_BYTES, 0), path))
            nbytes = store.run(self._file.size, path)
            try:
                header = _HEADERS[npy.read_magic(head)]
                self.shape, in_fortran_order, self.dtype = header(head)
            except (ValueError, KeyError) as error:
                raise self._damaged(f"its header cannot be read: {error}") from None
            if self.dtype.hasobject:
                raise self._damaged("it holds Python objects, which are pickled, and never read here")
            size = self.dtype.itemsize
            self._strides = _strides(self.shape, size, in_fortran_order)
            self._start = head.tell()
            if nbytes < (expected := self._start + size * math.prod(self.shape)):
                raise self._damaged(f"it has {nbytes} bytes, and should have {expected}")
        except BaseException:
            self.close()
            raise

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        shape = tuple(part.stop - part.start for part in box)
        if 0 in shape:
            return np.empty(shape, self.dtype)
        first = sum(part.start * stride for part, stride in zip(box, self._strides, strict=True))
        last = sum((part.stop - 1) * stride for part, stride in zip(box, self._strides, strict=True))
        nbytes = last - first + self.dtype.itemsize
        data = self._store.read(self._file, nbytes, self._start + first, self._path)
        return np.ndarray(shape, self.dtype, data, strides=self._strides).copy()

    def close(self) -> None:
        self._file.close()

    def _damaged(self, why: str) -> SamplerError:
        return SamplerError(f"{self._store.name(self._path)}: cannot be read as .npy: {why}")


def _strides(shape: tuple[int, ...], itemsize: int, in_fortran_order: bool) -> tuple[int, ...]:
    strides, step = [], itemsize
    for size in shape if in_fortran_order else reversed(shape):
        strides.append(step)
        step *= size
    return tuple(strides if in_fortran_order else reversed(strides))
