"""Arrays: N-dimensional arrays in files of a store. Metadata are read at once, cells when they are asked for.

    *.npy                       NumPy's file, one array
    *.h5, *.hdf5, *.nc          HDF5 (hdf5.py): "run.h5#group/signal" names the dataset
    any other path              Zarr (zarr3.py): a folder; "run.zarr#signal" or "run.zarr/signal"

An `Array` has a layout, reads boxes and many windows at once, and can be closed. Nothing here unpickles:
arrays of objects are refused. HDF5 and Zarr arrays have attributes: `Packing` says how some of them change
the stored numbers.
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from arrowcache.errors import SamplerError, SchemaError
from arrowcache.sampling.sources.object_store import ObjectStore, is_installed
from arrowcache.sampling.sources.pieces import Layout, Pieces, Places, Window, from_bytes, strides_of

_HDF5 = (".h5", ".hdf5", ".hdf", ".he5", ".nc")
_FILE = re.compile(r"(.*\.(?:h5|hdf5|hdf|he5|nc|zarr))#(.+)")
_HEADER_BYTES = 4096  # 128 in an array of numbers
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Array(Protocol):
    """One open array. Thread-safe."""

    layout: Layout

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        """Return the cells of a box, with a slice for each axis: a new array, of this dtype.

        Raises: OSError: an error of the store, after retries. SamplerError: damaged.
        """

    def cut(self, window: Window, starts: Places, pieces: Pieces | None) -> tuple[NDArray[Any], set[int]]:
        """Return windows by where they begin, (windows, *shape), and the numbers of the pieces they needed.

        Args:
            pieces: those that other windows need, too.
        Raises: as `read`.
        """

    def attribute(self, name: str) -> Any:
        """Return an attribute as the file has it. None: there is none. Raises: as `read`."""

    def close(self) -> None: ...


class Address(NamedTuple):
    """The address of an array: a file or folder, and a name in it."""

    path: str
    inner: str


def split_uri(uri: str) -> Address:
    """Split a URI or path from the name after its #.

    In a local path, which may have a # itself, only after run.h5 or run.zarr, or if what is before it exists
    and the whole path does not.
    """
    if "://" in uri:
        before, _, inner = uri.partition("#")
        return Address(before, inner)
    if match := _FILE.fullmatch(uri):
        return Address(match[1], match[2])
    before, _, inner = uri.rpartition("#")
    if before and inner and os.path.exists(before) and not os.path.exists(uri):
        return Address(before, inner)
    return Address(uri, "")


def open_array(store: ObjectStore, address: Address, decode: bool) -> Array:
    """Open an array, and read its metadata.

    Args:
        decode: have its numbers unpacked, if its attributes say how.

    Raises: FileNotFoundError, PermissionError, OSError: errors of the store. SamplerError: not an array of
        that format, or a damaged one. ImportError: says what to install. ValueError: an HDF5 file or group
        without a dataset's name. SchemaError: an attribute of packed numbers that is none.
    """
    array = _open(
        store, address, name := store.name(address.path) + f"#{address.inner}" * bool(address.inner)
    )
    if not decode:
        return array
    try:
        packing = packing_of(array.attribute, array.layout.dtype, name)
    except BaseException:
        array.close()
        raise
    return array if packing is None else _Unpacked(array, packing)


def _open(store: ObjectStore, address: Address, name: str) -> Array:
    path, inner = address
    if path.endswith(".npy"):
        if inner:
            raise ValueError(f"{name}: a .npy file has one array: leave out #{inner}")
        return NpyArray(store, path)
    if path.endswith(_HDF5):
        _require("h5py", name)
        from arrowcache.sampling.sources.hdf5 import Hdf5Array

        return Hdf5Array(store, path, inner, name)
    _require("zarr", name)
    from arrowcache.sampling.sources.zarr3 import ZarrArray

    return ZarrArray(store, path, inner, name)


def _require(package: str, name: str) -> None:
    if not is_installed(package):
        raise ModuleNotFoundError(
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
                shape, in_fortran_order, dtype = header(head)
            except (ValueError, KeyError) as error:
                raise self._damaged(f"its header cannot be read: {error}") from None
            if dtype.hasobject:
                raise self._damaged("it holds Python objects, which are pickled, and never read here")
            strides = strides_of(shape, dtype.itemsize, in_fortran_order=in_fortran_order)
            self.layout = Layout(shape, dtype, None, strides, (None,) * len(shape))
            self._start = head.tell()
            if nbytes < (expected := self._start + dtype.itemsize * math.prod(shape)):
                raise self._damaged(f"it has {nbytes} bytes, and should have {expected}")
        except BaseException:
            self.close()
            raise

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        one = np.array([[part.start for part in box]], np.int64)
        lengths = tuple(part.stop - part.start for part in box)
        cells: NDArray[Any] = from_bytes(self.layout, Window(lengths, ()), one, self._bytes)[0]
        return cells

    def cut(
        self,
        window: Window,
        starts: Places,
        pieces: Pieces | None,  # noqa: ARG002  # there are none
    ) -> tuple[NDArray[Any], set[int]]:
        return from_bytes(self.layout, window, starts, self._bytes), set()

    def attribute(self, name: str) -> None:  # noqa: ARG002  # a .npy has none
        return None

    def close(self) -> None:
        self._file.close()

    def _bytes(self, first: int, nbytes: int) -> bytes:
        if self._store.fsspec is not None:  # whose open files read one range at a time
            return self._store.fetch(self._path, self._start + first, nbytes)
        return self._store.read(self._file, nbytes, self._start + first, self._path)

    def _damaged(self, why: str) -> SamplerError:
        why = self._store.other_format(self._path, "npy") or why
        return SamplerError(f"{self._store.name(self._path)}: cannot be read as .npy: {why}")


@dataclass(frozen=True, slots=True)
class Packing:
    """The rule that unpacks numbers: stored * scale + offset, and NaN for a missing value.

    The attributes are `scale_factor`, `add_offset`, `_FillValue`, `missing_value`, and netCDF's `_Unsigned`,
    as in xarray and the Climate and Forecast (CF) Metadata Conventions 1.11, sections 2.5.1 and 8.1.
    `valid_range` is not used, nor Zarr's and HDF5's own fill value: that is the value of unwritten cells. In
    Zarr version 2 it is `_FillValue`, too, where `_ARRAY_DIMENSIONS` shows that xarray wrote the array.

    Args:
        dtype: of the unpacked numbers.
        stored: what the stored numbers are taken for: unsigned, perhaps, where the file has signed ones.
        missing: stored numbers that stand for a missing value.
    """

    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    missing: tuple[Any, ...] = ()
    scale: float | None = None
    offset: float | None = None

    def unpack(self, cells: NDArray[Any]) -> NDArray[Any]:
        """Return a new array of the same shape, of this dtype."""
        cells = cells.astype(self.stored, copy=False)
        unpacked = cells.astype(self.dtype)
        if self.scale is not None:
            unpacked *= self.scale
        if self.offset is not None:
            unpacked += self.offset
        for value in self.missing:
            unpacked[cells == value] = np.nan
        return unpacked


class _Unpacked:
    """An array whose numbers are unpacked as they are read."""

    def __init__(self, array: Array, packing: Packing) -> None:
        self._array, self._packing = array, packing
        self.layout = array.layout._replace(dtype=packing.dtype)
        self.attribute, self.close = array.attribute, array.close

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        return self._packing.unpack(self._array.read(box))

    def cut(self, window: Window, starts: Places, pieces: Pieces | None) -> tuple[NDArray[Any], set[int]]:
        cells, needed = self._array.cut(window, starts, pieces)
        return self._packing.unpack(cells), needed


def packing_of(attribute: Callable[[str], Any], dtype: np.dtype[Any], name: str) -> Packing | None:
    """Return how the numbers of an array are unpacked. None: they are as they are stored.

    Args:
        attribute: gives an attribute by its name, or None.
        dtype: of the stored numbers.
        name: the array's, for messages.
    Raises: SchemaError: an attribute that is no number, or none that fits.
    """

    def numbers(which: str) -> NDArray[Any] | None:
        value = attribute(which)
        try:
            return None if value is None else _numbers(value, dtype)
        except (ValueError, TypeError):
            raise _unusable(name, which, value, "numbers") from None

    scale, offset = numbers("scale_factor"), numbers("add_offset")
    for which, factor in (("scale_factor", scale), ("add_offset", offset)):
        if factor is not None and (factor.size != 1 or factor.dtype.kind not in "iuf"):
            raise _unusable(name, which, attribute(which), "one real number")
    stored = _stored_as(dtype, attribute("_Unsigned"))
    given = [values for which in ("_FillValue", "missing_value") if (values := numbers(which)) is not None]
    found = dict.fromkeys(value for values in given for value in values.ravel().tolist())
    missing = tuple(_as_stored(value, stored) for value in found if value == value)  # NaN is NaN anyway
    if scale is not None or offset is not None:
        unpacked = _float_of(stored, scale, offset)
    elif missing and stored.kind in "biu":
        unpacked = np.dtype(np.float32 if stored.itemsize <= 2 else np.float64)
    elif stored.kind in "iu" and _text(attribute("dtype")) == "bool":  # as xarray writes it into netCDF
        unpacked = np.dtype(np.bool_)
    else:
        unpacked = stored
    if not missing and unpacked == dtype and scale is offset is None:
        return None
    return Packing(
        unpacked,
        stored,
        missing,
        None if scale is None else scale.item(),
        None if offset is None else offset.item(),
    )


def _float_of(
    stored: np.dtype[Any], scale: NDArray[Any] | None, offset: NDArray[Any] | None
) -> np.dtype[Any]:
    """The dtype of unpacked numbers, as xarray has it: float32 if the attributes are, else float64.

    It is float64, too, if there is an offset alone, and for integers of 4 bytes with both.
    """
    is_short = scale is not None and scale.dtype.type is np.float32
    if is_short and offset is not None:
        is_short = offset.dtype.type is np.float32 and not (stored.kind in "iu" and stored.itemsize == 4)
    chosen: np.dtype[Any] = np.dtype(np.float32 if is_short else np.float64)
    return np.result_type(chosen, stored) if stored.kind == "c" else chosen


def _stored_as(dtype: np.dtype[Any], unsigned: Any) -> np.dtype[Any]:
    """Return the dtype of stored integers by netCDF's `_Unsigned`: netCDF-3 has only signed ones."""
    says = _text(unsigned)
    if dtype.kind == "i" and says == "true":
        return np.dtype(f"u{dtype.itemsize}")
    if dtype.kind == "u" and says == "false":
        return np.dtype(f"i{dtype.itemsize}")
    return dtype


def _as_stored(value: Any, stored: np.dtype[Any]) -> Any:
    """A missing value of an integer array as its numbers are taken: -1 is 255 of unsigned bytes."""
    if stored.kind not in "iu" or value != int(value):
        return value
    bits = 8 * stored.itemsize
    least = 0 if stored.kind == "u" else -(1 << (bits - 1))
    turned = (int(value) - least) % (1 << bits) + least
    return turned if abs(int(value)) < 1 << bits else value


def _numbers(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The numbers of an attribute. xarray writes a float into Zarr as base64 of 8 bytes: JSON has no NaN."""
    if dtype.kind == "c" and isinstance(value, list) and len(value) == 2:  # as xarray writes a complex one
        return np.array(complex(*(_numbers(part, np.dtype(np.float64)).item() for part in value)))
    array = np.asarray(value)
    if array.dtype.kind in "SUOT":
        array = np.array([_number(text) for text in array.ravel().tolist()])
    if array.dtype.kind not in "biufc":
        raise ValueError(f"{value!r} is no number")
    return array


def _number(text: Any) -> float:
    if not isinstance(text, str | bytes):
        raise TypeError(f"{text!r} is no number")
    try:
        return float(text)
    except ValueError:
        return float(np.frombuffer(base64.b64decode(text, validate=True), "<f8").item())


def _text(value: Any) -> str:
    """An attribute of text or a truth value, in lower case; empty if there is none."""
    found = np.asarray("" if value is None else value)
    word = found.item() if found.size == 1 else ""
    return (word.decode(errors="replace") if isinstance(word, bytes) else str(word)).lower()


def _unusable(name: str, attribute: str, value: Any, wanted: str) -> SchemaError:
    return SchemaError(
        f"{name}: its attribute {attribute} is {value!r}, which should be {wanted}: pass decode=False to "
        "have the numbers as they are stored"
    )
