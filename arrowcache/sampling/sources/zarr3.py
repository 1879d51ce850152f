"""Zarr v3: an array of a Zarr hierarchy on any store, through zarr, which this module imports.

zarr's store reads through pyarrow.fs, all chunks of a box at the same time. fsspec's wrapper
of such a file system does not work asynchronously (2026.9: it asks any for the host that only HDFS has), and
would not try again.
Zarr v2 is refused: its filters may unpickle the content of a chunk.
"""

from __future__ import annotations

import asyncio
import errno
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.abc.store import Store as ZarrStore
from zarr.core.buffer import Buffer, BufferPrototype

from arrowcache.errors import SamplerError
from arrowcache.sampling.sources.object_store import ObjectStore, read_at

T = TypeVar("T")

_CHUNKS_AT_ONCE = 8
_DAMAGED = (ValueError, RuntimeError, TypeError, KeyError, EOFError, zlib.error)  # of codecs and metadata


class ZarrArray:
    """An array. It keeps nothing open but threads, which wait for the store.

    Raises: FileNotFoundError: no array of Zarr v3 there. SamplerError: its metadata are invalid.
    """

    def __init__(self, store: ObjectStore, path: str, name: str) -> None:
        described = f"{path}/zarr.json"
        if not store.run(lambda: store.filesystem.get_file_info(described), described).is_file:
            raise FileNotFoundError(errno.ENOENT, "no array of Zarr v3, which would have a zarr.json", name)
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

    def close(self) -> None:
        self._store.close()

    def _run(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except _DAMAGED as error:
            why = " ".join(str(error).split())
            raise SamplerError(f"{self._name}: cannot be read as Zarr v3: {why}") from error


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
