"""ArrayWindows: random windows of N-dimensional arrays on any store, several arrays cut at the same place."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arrowcache.arrow.schema import Schema, Tensor
from arrowcache.errors import SchemaError
from arrowcache.sampling.retries import Retries
from arrowcache.sampling.sources.arrays import Address, Array, open_array, split_uri
from arrowcache.sampling.sources.choice import Choice, parse_weights
from arrowcache.sampling.sources.handles import Handles
from arrowcache.sampling.sources.object_store import URI, at_once, locate
from arrowcache.sampling.sources.source import Source
from arrowcache.units import parse_count

Arrays = URI | Mapping[str, URI]
Window = Sequence[int]

_MOST_OPEN = 64
_FIELD = "data"
POSITION_FIELDS = ("recording", "position")


class _Metadata(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Recording(NamedTuple):
    """Arrays that are cut at the same place; `starts`: number of places along each axis that is cut."""

    addresses: dict[str, Address]
    shapes: dict[str, tuple[int, ...]]
    starts: tuple[int, ...]


class ArrayWindows(Source):
    """Draws windows: every place where one fits is equally likely.

        ArrayWindows("s3://bucket/volume.zarr", window=(32, 64, 64))
        ArrayWindows({"signal": "run.h5#signal", "label": "run.h5#label"}, window=(256,))

    Args:
        arrays: the array, with "data" as its field; or field name -> array: all of them are cut at the
            same place. Or a list of either, as of several recordings: each window is of one of them.
            "x.npy", "x.h5#dataset", else a Zarr v3 array; arrays.py has the details.
        window: lengths along the first axes of an array, in cells; further axes are
            taken whole. A mapping field name -> window, if they differ: all begin at the same
            place, so `{"signal": (256,), "label": (1,)}` is 256 values and the label of the first.
        weights: relative frequency of each of `arrays`. None means in proportion to its places.
        decode: unpack the numbers of HDF5 and Zarr arrays (netCDF-4 too) by their attributes, as CF says:
            stored * scale_factor + add_offset; NaN for _FillValue and missing_value; unsigned by _Unsigned.
            The dtype is a float, chosen as xarray does: that of both attributes if they are alike (but
            float64 for integers of 4 bytes), or of a scale_factor alone, else float64; with missing values
            alone float32 for integers of 1 or 2 bytes, float64 for larger ones, and floats keep theirs.
            False: as stored. Times ("days since 1900-01-01") and flags are numbers in both cases.
        with_position: add "recording", the number in `arrays`, and "position", the window's begin
            along each axis that is cut.
        filesystem: of pyarrow.fs or fsspec; the URIs are paths on it. None means the URI's own.
        retries: number of further attempts at a read before its error is raised.
    Raises: FileNotFoundError, PermissionError, OSError: the store, or no such array; says which there are.
        ValueError: a window that is larger than the array: names array, axis and sizes; a weight that is not
        positive and finite; an HDF5 file or group without a dataset's name. SchemaError: arrays that differ
        from those before them, or whose axes differ where they are cut at the same place; an attribute that
        cannot be used to decode. SamplerError: a damaged file, one of another format, or a Zarr group.
        ModuleNotFoundError: says what to install.
    """

    def __init__(
        self,
        arrays: Arrays | Sequence[Arrays],
        window: Window | Mapping[str, Window],
        *,
        weights: Sequence[float] | None = None,
        decode: bool = True,
        with_position: bool = False,
        filesystem: Any = None,
        retries: int | Retries = 4,
    ) -> None:
        given = [arrays] if isinstance(arrays, str | os.PathLike | Mapping) else list(arrays)
        sets = [dict(each) if isinstance(each, Mapping) else {_FIELD: each} for each in given]
        if not sets or not sets[0]:
            raise ValueError("there is no array: give at least one")
        self._windows = _windows(list(sets[0]), window)
        for number, fields in enumerate(sets):
            if list(fields) != list(self._windows):
                raise ValueError(
                    f"arrays[{number}] has {', '.join(fields)}, and the first {', '.join(self._windows)}: "
                    "name the same fields, in the same order"
                )
        if with_position and (taken := set(POSITION_FIELDS) & set(self._windows)):
            raise ValueError(f"with_position adds {', '.join(taken)}, which an array has as its name")
        if not isinstance(decode, bool):
            raise TypeError(f"decode must be True or False, not {decode!r}")
        self._with_position, self._decode = with_position, decode
        self._kept: Handles[Array] = Handles(_MOST_OPEN)
        split = [split_uri(os.fspath(uri)) for fields in sets for uri in fields.values()]
        self._store, paths = locate([address.path for address in split], filesystem, retries)
        addresses = [Address(path, address.inner) for path, address in zip(paths, split, strict=True)]
        found = at_once(self._look, addresses)
        width = len(self._windows)
        self._recordings = []
        for at in range(0, len(found), width):
            named = dict(zip(self._windows, addresses[at : at + width], strict=True))
            shapes = dict(zip(self._windows, (each.shape for each in found[at : at + width]), strict=True))
            self._recordings.append(_Recording(named, shapes, self._starts(named, shapes)))
        self.schema = self._schema(found)
        if weights is None:
            chosen = [float(math.prod(recording.starts)) for recording in self._recordings]
        else:
            names = [f"arrays[{number}]" for number in range(len(sets))]
            chosen = parse_weights(list(weights), names)
        self._choice = Choice(chosen)

    def __repr__(self) -> str:
        first = self._name(next(iter(self._recordings[0].addresses.values())))
        return f"ArrayWindows({first!r} and {len(self._recordings) - 1} other recordings, {self._windows})"

    def __call__(self, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        while True:
            number = self._choice.draw(rng)
            recording = self._recordings[number]
            start = [int(rng.integers(count)) for count in recording.starts]
            sample: dict[str, Any] = {
                field: self._read(address, self._box(field, recording.shapes[field], start))
                for field, address in recording.addresses.items()
            }
            if self._with_position:
                sample["recording"] = np.int64(number)
                sample["position"] = np.array(start, np.int64)
            yield sample

    def close(self) -> None:
        self._kept.close()

    def _name(self, address: Address) -> str:
        return self._store.name(address.path) + (f"#{address.inner}" if address.inner else "")

    def _open(self, address: Address) -> Array:
        return open_array(self._store, address, self._decode)

    def _look(self, address: Address) -> _Metadata:
        array = self._open(address)
        try:
            return _Metadata(tuple(array.shape), np.dtype(array.dtype))
        finally:
            array.close()

    def _box(self, field: str, shape: tuple[int, ...], start: Sequence[int]) -> list[slice]:
        window = self._windows[field]
        cut = [slice(at, at + length) for at, length in zip(start, window, strict=False)]
        return cut + [slice(0, size) for size in shape[len(window) :]]

    def _read(self, address: Address, box: Sequence[slice]) -> NDArray[Any]:
        try:
            return self._kept.get(address, lambda: self._open(address)).read(box)
        except BaseException:
            self._kept.drop(address)
            raise

    def _starts(
        self, addresses: Mapping[str, Address], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Return the number of places along each axis.

        Raises: ValueError, SchemaError: there are none, or arrays do not fit each other.
        """
        starts: list[int] = []
        for axis in range(max(map(len, self._windows.values()))):
            cut = {field: window[axis] for field, window in self._windows.items() if axis < len(window)}
            sizes: dict[str, int] = {}
            for field, length in cut.items():
                shape, name = shapes[field], self._name(addresses[field])
                if axis >= len(shape):
                    raise ValueError(
                        f"{name}: the window of {field!r}, {self._windows[field]}, has more axes than the "
                        f"array, {shape}"
                    )
                if length > shape[axis]:
                    raise ValueError(
                        f"{name}: the window of {field!r} is {length} long on axis {axis}, and the array "
                        f"{shape[axis]}, its shape being {shape}: use a smaller window, or leave it out"
                    )
                sizes[field] = shape[axis]
                first = next(iter(sizes))
                if shape[axis] != sizes[first]:
                    raise SchemaError(
                        f"{name}: field {field!r} has {shape[axis]} cells on axis {axis}, and {first!r} "
                        f"{sizes[first]}: arrays that are cut at the same place have the same length there"
                    )
            starts.append(next(iter(sizes.values())) - max(cut.values()) + 1)
        return tuple(starts)

    def _schema(self, found: Sequence[_Metadata]) -> Schema:
        kinds: dict[str, Tensor] = {}
        first: dict[str, str] = {}
        fields = [
            (f, address) for recording in self._recordings for f, address in recording.addresses.items()
        ]
        for (field, address), (shape, dtype) in zip(fields, found, strict=True):
            window = self._windows[field]
            name = self._name(address)
            try:
                kind = Tensor(dtype.name, (*window, *shape[len(window) :]))
            except ValueError as error:
                raise SchemaError(f"{name}: field {field!r}: {error}") from None
            if kinds.setdefault(field, kind) != kind:
                raise SchemaError(
                    f"{name}: field {field!r} is {kind}, and {kinds[field]} in {first[field]}: arrays of one "
                    "field must agree; make a source of each, Map them alike, and Mix them"
                )
            first.setdefault(field, name)
        if self._with_position:
            axes = len(self._recordings[0].starts)
            return Schema({**kinds, "recording": Tensor("int64"), "position": Tensor("int64", (axes,))})
        return Schema(kinds)


def _windows(fields: Sequence[str], window: Window | Mapping[str, Window]) -> dict[str, tuple[int, ...]]:
    if not isinstance(window, Mapping):
        window = dict.fromkeys(fields, window)
    if set(window) != set(fields):
        raise ValueError(f"window is of {', '.join(window)}, and the arrays are {', '.join(fields)}")
    windows = {}
    for field in fields:
        lengths = window[field]
        if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
            raise ValueError(
                f"the window of {field!r} must be a tuple of lengths, such as (256,), not {lengths!r}"
            )
        windows[field] = tuple(
            parse_count(length, f"a length of the window of {field!r}") for length in lengths
        )
    return windows
