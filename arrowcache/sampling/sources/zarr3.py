"""Zarr v3: an array of a Zarr hierarchy on any store, through zarr, which this module imports.

zarr's store reads through pyarrow.fs, all chunks of a box at the same time. fsspec's wrapper
of such a file system does not work asynchronously (2026.9: it asks any for the host that only HDFS has), and
would not try again.
Zarr v2 is refused: its filters may unpickle the content of a chunk.
"""

from __future__ import annotations

import asyncio
import errno
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import zarr
from numpy.typing import NDArray
from pyarrow import fs
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype

from arrowcache.errors import SamplerError
from arrowcache.sampling.sources.object_store import ObjectStore, at_once, names_in, read_at

T = TypeVar("T")

_METADATA = "zarr.json"
_OF_VERSION_2 = (".zarray", ".zgroup", ".zmetadata")
_MOST_LOOKED = 256  # folders, for the names of arrays
_CHUNKS_AT_ONCE = 8
_DAMAGED = (ValueError, RuntimeError, TypeError, KeyError, EOFError, zlib.error)  # of codecs and metadata


class ZarrArray:
    """An array. It keeps nothing open but threads, which wait for the store.

    Raises: FileNotFoundError: no array of Zarr v3 there; says which there are, or that it is Zarr v2.
        SamplerError: a group, of which it names the arrays; another file; invalid metadata.
    """

    def __init__(self, store: ObjectStore, path: str, inner: str, name: str) -> None:
        folder = path
        path = f"{folder}/{inner}" if inner else folder
        if not store.is_file(f"{path}/{_METADATA}"):
            raise _missing(store, folder, path, name)
        if _metadata(store, path).get("node_type") == "group":
            names = [f"{inner}/{array}" if inner else array for array in _arrays_in(store, path)]
            which = names_in("it", names)
            raise SamplerError(f"{name}: cannot be read as Zarr v3: it is a group: say which array; {which}")
        self._name = name
        self._store = _ReadOnlyStore(store, path)
        try:
            self._array: Any = self._run(lambda: zarr.open_array(self._store, mode="r", zarr_format=3))
        except BaseException:
            self.close()
            raise
        self.shape: tuple[int, ...] = self._array.shape
        self.dtype: np.dtype[Any] = self._array.dtype

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        return self._run(lambda: np.asarray(self._array[tuple(box)]))

    def attribute(self, name: str) -> Any:
        return self._array.metadata.attributes.get(name)

    def close(self) -> None:
        self._store.close()

    def _run(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except _DAMAGED as error:
            why = " ".join(str(error).split())
            raise SamplerError(f"{self._name}: cannot be read as Zarr v3: {why}") from error


def _missing(store: ObjectStore, folder: str, path: str, name: str) -> Exception:
    """Return the error of a path without an array: of version 2, another file, or misspelt.

    A group's arrays are named from the folder that was given, or from a group above it.
    """
    asked = path
    with suppress(OSError):  # of folders above it, which may be another's
        while path:
            if store.is_file(path):
                what = store.other_format(path, "Zarr") or "it is a file, and an array is a folder"
                return SamplerError(f"{name}: cannot be read as Zarr v3: {what}")
            if any(store.is_file(f"{path}/{part}") for part in _OF_VERSION_2):
                what = (
                    "no array of Zarr v3: it is Zarr version 2, whose filters may run code of the file: "
                    "convert it, such as by xarray's to_zarr(zarr_format=3) or by `zarr migrate v3`"
                )
                return FileNotFoundError(errno.ENOENT, what, name)
            if path != asked and len(path) <= len(folder) and store.is_file(f"{path}/{_METADATA}"):
                names, inner = _arrays_in(store, path), asked[len(path) + 1 :]
                what = names_in(store.name(path), names, inner)
                return FileNotFoundError(errno.ENOENT, f"no array {inner!r} of Zarr v3: {what}", name)
            path = path.rpartition("/")[0]
    return FileNotFoundError(errno.ENOENT, f"no array of Zarr v3, which would have a {_METADATA}", name)


def _arrays_in(store: ObjectStore, group: str) -> list[str]:
    """The arrays of a group and the groups in it, by their ways; of a very large one not all."""
    described = _metadata(store, group)
    with suppress(AttributeError, KeyError, TypeError):
        known = described["consolidated_metadata"]["metadata"]
        return sorted(way for way, node in known.items() if node.get("node_type") == "array")
    arrays, looked, groups = [], 0, [""]
    while groups and looked < _MOST_LOOKED:
        way = groups.pop(0)
        selector = fs.FileSelector(f"{group}/{way}" if way else group)
        infos = store.run(lambda at=selector: store.filesystem.get_file_info(at), group)  # type: ignore[misc]  # mypy cannot infer lambdas with defaults
        folders = sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)
        inside = [f"{way}/{name}" if way else name for name in folders[: _MOST_LOOKED - looked]]
        looked += len(inside)
        found = at_once(lambda inner: _metadata(store, f"{group}/{inner}").get("node_type"), inside)
        arrays += [inner for inner, kind in zip(inside, found, strict=True) if kind == "array"]
        groups += [inner for inner, kind in zip(inside, found, strict=True) if kind == "group"]
    return arrays


def _metadata(store: ObjectStore, path: str) -> Mapping[str, Any]:
    """Return the content of a zarr.json; nothing of one that is not there, or damaged."""
    try:
        with store.run(lambda: store.open(f"{path}/{_METADATA}"), path) as file:
            found = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


class _ReadOnlyStore(ZarrStore):
    """A folder of a store, read only."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        super().__init__(read_only=True)
        self._files, self._path = store, path
        self._threads = ThreadPoolExecutor(_CHUNKS_AT_ONCE, thread_name_prefix="arrowcache-zarr")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        super().close()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        path = f"{self._path}/{key}"
        try:
            data = await self._wait(lambda: self._read(path, byte_range), path)
        except FileNotFoundError:  # a chunk that was never written holds the fill value
            return None
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    async def exists(self, key: str) -> bool:
        path = f"{self._path}/{key}"
        info = await self._wait(lambda: self._files.filesystem.get_file_info(path), path)
        return bool(info.is_file)

    async def _wait(self, read: Callable[[], T], path: str) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: self._files.run(read, path))

    def _read(self, path: str, part: ByteRequest | None) -> bytes:
        with self._files.open(path) as file:
            size = file.size()
            start, stop = 0, size
            if isinstance(part, RangeByteRequest):
                start, stop = part.start, min(part.end, size)
            elif isinstance(part, OffsetByteRequest):
                start = part.offset
            elif isinstance(part, SuffixByteRequest):
                start = max(0, size - part.suffix)
            return read_at(file, stop - start, start)

    # Methods that only a writable or listed store needs.

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return False

    async def set(self, key: str, value: Buffer) -> None:
        raise NotImplementedError("this store is read only")

    async def delete(self, key: str) -> None:
        raise NotImplementedError("this store is read only")

    def list(self) -> AsyncIterator[str]:
        raise NotImplementedError("this store does not list")

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("this store does not list")

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("this store does not list")
