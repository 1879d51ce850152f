"""Zarr, versions 3 and 2: an array of a Zarr hierarchy on any store, through zarr, which this module imports.

zarr's store reads through pyarrow.fs, all chunks of a box at the same time. fsspec's wrapper
of such a file system does not work asynchronously (2026.9: it asks any for the host that only HDFS has), and
would not try again.
Of Zarr v2 only codecs known to be safe are used: others may unpickle the content of a chunk.
"""

from __future__ import annotations

import asyncio
import errno
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from gzip import BadGzipFile
from typing import Any, TypeVar

import numpy as np
import zarr
from numcodecs import Blosc, GZip, Zlib, Zstd
from numpy.typing import NDArray
from pyarrow import fs
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype

from arrowcache.errors import SamplerError
from arrowcache.sampling.reads import Threads, at_once
from arrowcache.sampling.retries import Retries, in_place_of
from arrowcache.sampling.sources.arrays import ArrayLayout, Pieces, Places, Window, from_pieces, strides_of
from arrowcache.sampling.sources.object_store import ObjectStore, names_in

T = TypeVar("T")

_METADATA = "zarr.json"
_ARRAY_2, _GROUP_2, _CONSOLIDATED_2 = ".zarray", ".zgroup", ".zmetadata"  # of version 2
_DIMENSIONS = "_ARRAY_DIMENSIONS"  # by xarray, in version 2
_MAX_INDICES = 256  # of shards, that are kept
_MAX_LOOKED = 256  # folders, for the names of arrays
_CHUNKS_AT_ONCE = 32  # of a box of many chunks
_DAMAGED = (
    ValueError,
    RuntimeError,
    TypeError,
    LookupError,
    EOFError,
    zlib.error,
    BadGzipFile,
)  # of codecs and metadata


class ZarrArray:
    """An array. It keeps nothing open but threads, which wait for the store.

    Raises: FileNotFoundError: no array of Zarr there; says which there are.
        SamplerError: a group, of which it names the arrays; another file; invalid metadata; an unsafe codec.
    """

    def __init__(self, store: ObjectStore, path: str, inner: str, name: str) -> None:
        folder = path
        path = f"{folder}/{inner}" if inner else folder
        file, described = _described(store, path)
        files = {file: described}
        if not file:  # a group above it may hold what describes it
            files = {each: json.dumps(of).encode() for each, of in _nodes(store, folder, inner)[""].items()}
            file = next((each for each in (_METADATA, _ARRAY_2, _GROUP_2) if each in files), "")
        if not file:
            raise _missing(store, folder, path, name)
        described = files[file]
        if _kind(file, described) == "group":
            names = [f"{inner}/{array}" if inner else array for array in _arrays_in(store, folder, inner)]
            which = names_in("it", names)
            raise SamplerError(f"{name}: cannot be read as Zarr: it is a group: say which array; {which}")
        self._name = name
        codecs = _codecs(file, _parsed(described), name)
        self._store = _ReadOnlyStore(store, path, files)
        version: Any = 3 if file == _METADATA else 2
        try:
            self._array: Any = self._run(lambda: zarr.open_array(self._store, mode="r", zarr_format=version))
            self.layout = self._run(self._layout)
        except BaseException:
            self.close()
            raise
        self._decode = _decoder(codecs, self.layout.dtype)

    def read(self, box: Sequence[slice]) -> NDArray[Any]:
        where = ", ".join(f"{part.start}:{part.stop}" for part in box)
        return self._run(lambda: np.asarray(self._array[tuple(box)]), f"cells [{where}]: ")

    def cut(self, window: Window, starts: Places, pieces: Pieces | None) -> tuple[NDArray[Any], set[int]]:
        return from_pieces(self.layout, window, starts, self._read_chunk, pieces)

    def _read_chunk(self, box: Sequence[slice]) -> NDArray[Any]:
        """Read a box. If it is of one chunk, this thread fetches and decodes it: zarr's has one for all."""
        chunks = self._array.chunks
        first = [part.start // size for part, size in zip(box, chunks, strict=True)]
        last = [(part.stop - 1) // size for part, size in zip(box, chunks, strict=True)]
        if first != last or self._array.shards is not None:
            return self.read(box)
        decode = self._decode
        key = self._array.metadata.encode_chunk_key(tuple(first))
        with self._store.fetched(key) as data:
            if data is None or decode is None:
                return self.read(box)
            whole = self._run(lambda: decode(data).reshape(chunks), f"chunk {key}: ")
        return whole[
            tuple(
                slice(part.start - at * size, part.stop - at * size)
                for part, at, size in zip(box, first, chunks, strict=True)
            )
        ]

    def _layout(self) -> ArrayLayout:
        shape, dtype = self._array.shape, self._array.dtype
        strides = strides_of(shape, dtype.itemsize)
        return ArrayLayout(shape, dtype, self._array.chunks, strides, self._names())

    def _names(self) -> tuple[str | None, ...]:
        """The names of the axes: of version 3, or as xarray writes them into version 2."""
        axes: int = self._array.ndim
        names = getattr(self._array.metadata, "dimension_names", None) or self.attribute(_DIMENSIONS)
        if not isinstance(names, list | tuple) or len(names) != axes:
            return (None,) * axes
        return tuple(name if isinstance(name, str) else None for name in names)

    def attribute(self, name: str) -> Any:
        """As of `Array`. xarray writes `_FillValue` into version 2 as the array's own fill value."""
        metadata = self._array.metadata
        if name == "_FillValue" and metadata.zarr_format == 2 and _DIMENSIONS in metadata.attributes:
            fill = metadata.fill_value
            if fill is not None and np.asarray(fill).dtype.kind in "iufc":
                return fill
        return metadata.attributes.get(name)

    def close(self) -> None:
        self._store.close()

    def _run(self, read: Callable[[], T], where: str = "") -> T:
        try:
            return read()
        except _DAMAGED as error:
            why = " ".join(str(error).split())
            raise in_place_of(
                error, SamplerError(f"{self._name}: cannot be read as Zarr: {where}{why}")
            ) from error


def _missing(store: ObjectStore, folder: str, path: str, name: str) -> Exception:
    """Return the error of a path without an array: another file, or misspelt.

    A group's arrays are named from the folder that was given, or from a group above it.
    """
    asked = path
    with suppress(OSError):  # of folders above it, which may be another's
        while path:
            if store.is_file(path):
                what = store.other_format(path, "Zarr") or "it is a file, and an array is a folder"
                return SamplerError(f"{name}: cannot be read as Zarr: {what}")
            if (
                path != asked
                and len(path) <= len(folder)
                and (_described(store, path)[0] or _nodes(store, path)[""])
            ):
                names, inner = _arrays_in(store, path), asked[len(path) + 1 :]
                what = names_in(store.name(path), names, inner)
                return FileNotFoundError(errno.ENOENT, f"no array {inner!r} of Zarr: {what}", name)
            path = path.rpartition("/")[0]
    return FileNotFoundError(
        errno.ENOENT, f"no array of Zarr, which would have a {_METADATA} or .zarray", name
    )


def _arrays_in(store: ObjectStore, folder: str, inner: str = "") -> list[str]:
    """The arrays of a group and the groups in it, by their ways; of a very large one not all."""
    nodes = _nodes(store, folder, inner)
    if nodes[""]:
        return sorted(
            way
            for way, node in nodes.items()
            if way and (_ARRAY_2 in node or node.get(_METADATA, {}).get("node_type") == "array")
        )
    group = f"{folder}/{inner}" if inner else folder
    arrays, looked, groups = [], 0, [""]
    while groups and looked < _MAX_LOOKED:
        way = groups.pop(0)
        selector = fs.FileSelector(f"{group}/{way}" if way else group)
        infos = store.run(lambda at=selector: store.filesystem.get_file_info(at), group)  # type: ignore[misc]  # mypy cannot infer lambdas with defaults
        folders = sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)
        inside = [f"{way}/{name}" if way else name for name in folders[: _MAX_LOOKED - looked]]
        looked += len(inside)
        found = at_once(lambda inner: _kind(*_described(store, f"{group}/{inner}")), inside)
        arrays += [inner for inner, kind in zip(inside, found, strict=True) if kind == "array"]
        groups += [inner for inner, kind in zip(inside, found, strict=True) if kind == "group"]
    return arrays


def _nodes(store: ObjectStore, folder: str, inner: str = "") -> dict[str, dict[str, Any]]:
    """Return the nodes from `inner` on that consolidated metadata describe, by their ways from there.

    Of each its files by name, parsed. The metadata are those of the nearest group, from `inner` up to the
    folder. The node of "" is empty if none has it.
    """
    group, way = f"{folder}/{inner}" if inner else folder, ""
    while True:
        found = _consolidated(store, group)
        nodes = {
            each[len(way) + 1 :] if way else each: node
            for each, node in found.items()
            if f"{each}/".startswith(f"{way}/") or not way
        }
        if nodes.get("") or len(group) <= len(folder):
            return {"": {}, **nodes}
        group, _, last = group.rpartition("/")
        way = f"{last}/{way}" if way else last


def _consolidated(store: ObjectStore, group: str) -> dict[str, dict[str, Any]]:
    """Return the files of each node, parsed, of a group's own consolidated metadata. Empty: it has none."""
    nodes: dict[str, dict[str, Any]] = {}
    not_there = FileNotFoundError, NotADirectoryError
    with suppress(AttributeError, KeyError, TypeError, *not_there):
        described = _parsed(store.fetch(f"{group}/{_METADATA}"))
        known = described["consolidated_metadata"]["metadata"].items()
        nodes = {way: {_METADATA: node} for way, node in known if isinstance(node, Mapping)}
        return {"": {_METADATA: described}, **nodes}
    with suppress(AttributeError, KeyError, TypeError, *not_there):
        for key, content in _parsed(store.fetch(f"{group}/{_CONSOLIDATED_2}"))["metadata"].items():
            way, _, file = key.rpartition("/")
            nodes.setdefault(way, {})[file] = content
    return nodes


def _described(store: ObjectStore, path: str) -> tuple[str, bytes]:
    """Return the name and the content of the file that describes an array or a group. Empty: none does."""
    for file in (_METADATA, _ARRAY_2, _GROUP_2):
        with suppress(FileNotFoundError, NotADirectoryError):
            return file, store.fetch(f"{path}/{file}")
    return "", b""


def _kind(file: str, described: bytes) -> str:
    """The kind of node that a file describes: "array", "group", or another text."""
    return {_ARRAY_2: "array", _GROUP_2: "group"}.get(file) or str(_parsed(described).get("node_type"))


def _codecs(file: str, described: Mapping[str, Any], name: str) -> Any:
    """Return the codecs of an array, as version 3 has them. None: they have no such form.

    Raises: SamplerError: a codec of version 2 that may run code of the file, or is not supported.
    """
    if file == _METADATA:
        return described.get("codecs")
    compressor, filters = described.get("compressor"), described.get("filters") or []
    used = [each.get("id") for each in [*filters, compressor or {"id": None}] if isinstance(each, Mapping)]
    if unknown := [each for each in used if each is not None and each not in _SAFE]:
        why = "may run code of the file" if unknown[0] in _RUNS_CODE else "is not supported"
        raise SamplerError(
            f"{name}: cannot be read as Zarr: version 2, and its codec {unknown[0]!r} {why}: those supported "
            f"are {', '.join(sorted(_SAFE))}; convert it, such as by xarray's to_zarr(zarr_format=3)"
        )
    if filters or described.get("order") != "C":
        return None
    endian = "big" if str(described.get("dtype")).startswith(">") else "little"
    return [
        {"name": "bytes", "configuration": {"endian": endian}},
        *({"name": each} for each in used if each),
    ]


def _parsed(described: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(described)
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


_DECOMPRESS: dict[str, Callable[[bytes], Any]] = {
    "blosc": Blosc().decode, "gzip": GZip().decode, "zlib": Zlib().decode, "zstd": Zstd().decode,
}  # fmt: skip
_SAFE = {
    *_DECOMPRESS, "adler32", "astype", "bitround", "bz2", "crc32", "crc32c", "delta", "fixedscaleoffset",
    "fletcher32", "jenkins_lookup3", "lz4", "lzma", "packbits", "quantize", "shuffle",
}  # fmt: skip
"""Codecs of numcodecs that make numbers of bytes, and call nothing that the bytes name."""
_RUNS_CODE = ("pickle",)


def _decoder(codecs: Any, dtype: np.dtype[Any]) -> Callable[[bytes], NDArray[Any]] | None:
    """Return a function that decodes chunks of numbers, plain or compressed in a usual way. None: zarr does.

    zarr decodes in one thread for all, and takes a millisecond a chunk.
    """
    try:
        names = [each["name"] for each in codecs]
        endian = codecs[0].get("configuration", {}).get("endian", "little")
    except (TypeError, LookupError, AttributeError):
        return None
    if names[0] != "bytes" or not set(names[1:]) <= _DECOMPRESS.keys() or dtype.kind not in "biufc":
        return None
    stored = dtype.newbyteorder("<" if endian == "little" else ">")

    def decode(data: Any) -> NDArray[Any]:
        for name in reversed(names[1:]):
            data = _DECOMPRESS[name](data)
        return np.frombuffer(data, stored).astype(dtype, copy=False)

    return decode


_fetched: ContextVar[tuple[_ReadOnlyStore, str, bytes | None] | None] = ContextVar("fetched", default=None)
"""A chunk that this thread has read. What zarr does for a thread, in others, has the thread's context."""


class _ReadOnlyStore(ZarrStore):
    """A folder of a store, read only.

    Args:
        described: the files that describe it, as far as they were read, and their content.
    """

    def __init__(self, store: ObjectStore, path: str, described: Mapping[str, bytes]) -> None:
        super().__init__(read_only=True)
        self._files, self._path, self._described = store, path, described
        self._indices: dict[str, asyncio.Future[bytes]] = {}  # in zarr's thread
        self._threads = Threads(_CHUNKS_AT_ONCE, Retries(0))  # nobody waits for them, as one may hang

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        fetched, data = _fetched.get(), None
        if key in self._described:
            data = self._described[key]
        elif fetched is not None and fetched[:2] == (self, key) and byte_range is None:
            data = fetched[2]
        else:
            is_index = isinstance(byte_range, SuffixByteRequest)
            with suppress(FileNotFoundError):  # a chunk that was never written holds the fill value
                data = await (self._index if is_index else self._wait)(key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    @contextmanager
    def fetched(self, key: str) -> Iterator[bytes | None]:
        """Read a chunk in this thread. Reads of it inside, which zarr makes for this thread, have it."""
        data: bytes | None = None
        with suppress(FileNotFoundError):
            data = self._read(key, None)
        token = _fetched.set((self, key, data))
        try:
            yield data
        finally:
            _fetched.reset(token)

    async def exists(self, key: str) -> bool:
        return await asyncio.wrap_future(
            self._threads.begin(partial(self._files.is_file, f"{self._path}/{key}"))
        )

    async def _index(self, key: str, part: ByteRequest | None) -> bytes:
        """Read the index of a shard once for all of its chunks, each of which asks for it."""
        index = self._indices.get(key)
        if index is None:
            while len(self._indices) >= _MAX_INDICES:
                del self._indices[next(iter(self._indices))]
            index = self._indices[key] = asyncio.ensure_future(self._wait(key, part))
        try:
            return await asyncio.shield(index)
        except BaseException:
            self._indices.pop(key, None)
            raise

    async def _wait(self, key: str, part: ByteRequest | None) -> bytes:
        return await asyncio.wrap_future(self._threads.begin(partial(self._read, key, part)))

    def _read(self, key: str, part: ByteRequest | None) -> bytes:
        path = f"{self._path}/{key}"
        if isinstance(part, RangeByteRequest):
            return self._files.fetch(path, part.start, part.end - part.start)
        if isinstance(part, OffsetByteRequest):
            return self._files.fetch(path, part.offset)
        if isinstance(part, SuffixByteRequest):
            return self._files.fetch(path, -part.suffix)
        return self._files.fetch(path)

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
