"""Segments' files as the engine gets them, and a plain reader that knows what it has to give."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from arrowcache.native import engine
from arrowcache.native.engine import CopiedColumn, Found, Job, Read, SegmentRows
from arrowcache.native.engine import threads as of_process
from arrowcache.native.library import library

STOP_NANOSECONDS = 60_000_000_000
Array = np.ndarray[Any, Any]
J = TypeVar("J", Job, Read, Found)


def entry(base: int, nbytes: int, layout: int, path: int = 0, device: int = 0, inode: int = 0) -> Array:
    """What `SegmentRows.put` is told of a file: where it is mapped, where int64 of its places are."""
    return np.array([base, nbytes, layout, 0, path, device, inode], np.int64)


class Files:
    """Fixed columns of some widths, then a variable one; each anywhere in its file. They go with it.

    Args:
        folder: where to make them; None: somewhere.
        values: numbers of elements that a value may have.
        begin_at: each column begins at a multiple of so many bytes; 0: anywhere.
    """

    def __init__(
        self,
        rows: Sequence[int],
        widths: Sequence[int],
        element_bytes: int = 1,
        seed: int = 0,
        *,
        folder: Path | None = None,
        values: tuple[int, int] = (0, 40),
        begin_at: int = 0,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        weakref.finalize(self, shutil.rmtree, self.folder)
        self._rng = np.random.default_rng(seed)
        self._lengths, self._begin_at = values, begin_at
        self.widths, self.element_bytes = list(widths), element_bytes
        self.fixed: list[list[Array]] = [[] for _ in widths]
        self.values: list[bytes] = []
        self.paths: list[Path] = []
        self.layouts: list[Array] = []
        for count in rows:
            self._add(count)
        self.starts = np.concatenate(([0], np.cumsum(rows))).astype(np.int64)

    def _add(self, rows: int) -> None:
        data, layout = bytearray(), []
        for number, width in enumerate(self.widths):
            column = self._rng.integers(0, 256, (rows, width), np.uint8)
            self.fixed[number].append(column)
            layout.append(self._place(data, column.tobytes()))
        lengths = self._rng.integers(*self._lengths, rows)
        ends, width = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), self.element_bytes
        values = self._rng.bytes(int(ends[-1]) * width)
        self.values += [values[a * width : b * width] for a, b in itertools.pairwise(ends)]
        layout += [self._place(data, ends.tobytes()), self._place(data, values)]
        path = self.folder / str(len(self.paths))
        path.write_bytes(data)
        self.paths.append(path)
        self.layouts.append(np.array(layout, np.int64))

    def _place(self, data: bytearray, column: bytes) -> int:
        gap = -len(data) % self._begin_at if self._begin_at else int(self._rng.integers(0, 9))
        data += bytes(gap) + column
        return len(data) - len(column)

    def table(
        self,
        *,
        unmapped: Collection[int] = (),
        without_path: Collection[int] = (),
        unknown: Collection[int] = (),
    ) -> Table:
        """The rows, as the engine gets them; all segments are mapped and have a path, but for these."""
        table = Table(self.starts)
        for number, path in enumerate(self.paths):
            if number not in unknown:
                layout, is_mapped = self.layouts[number], number not in unmapped
                table.add(number, path, layout, is_mapped=is_mapped, has_path=number not in without_path)
        table.files = self
        return table

    def column(self, number: int, ids: Array) -> Array:
        return np.concatenate(self.fixed[number])[ids]

    def outputs(self, count: int) -> list[Array]:
        return [np.zeros((count, width), np.uint8) for width in self.widths]

    def drop(self, numbers: Collection[int]) -> None:
        """Have these leave the page cache, as far as that can be."""
        for number in numbers:
            with self.paths[number].open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Table(SegmentRows):
    """`SegmentRows`, and what they need."""

    files: Files

    def __init__(self, starts: Array) -> None:
        super().__init__(starts)
        self.kept: list[object] = []

    def add(
        self, number: int, path: Path, layout: Array, *, is_mapped: bool = True, has_path: bool = True
    ) -> None:
        """Make a file known, which is there."""
        base, name, status = 0, np.frombuffer(os.fsencode(path) + b"\0", np.uint8), path.stat()
        if is_mapped:
            with path.open("rb") as file:
                data = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
            base = data.ctypes.data
            self.kept.append(data)
        self.kept += [layout, name]
        address = name.ctypes.data if has_path else 0
        told = entry(base, status.st_size, layout.ctypes.data, address, status.st_dev, status.st_ino)
        self.put([number], [told])


def columns_of(arrays: Sequence[Array]) -> list[CopiedColumn]:
    return [(number, array.shape[1], array.ctypes.data) for number, array in enumerate(arrays)]


def begun(rows: SegmentRows, ids: Array, arrays: Sequence[Array]) -> Job:
    """A copy of all columns."""
    return engine.copy_rows(rows, ids, columns_of(arrays), (arrays, rows))


def begun_read(rows: SegmentRows, ids: Array, arrays: Sequence[Array], *, drops: bool = False) -> Read:
    """A read of all columns."""
    return engine.read_rows(rows, ids, columns_of(arrays), (arrays, rows), drops=drops)


def ended(job: J) -> J:
    """The same, once it has ended."""
    try:
        while not job.take(0.05):
            pass
    finally:
        job.cancel()
    return job


def checked(
    files: Files, ids: Array, rows: Table | None = None, *, reads: bool = False, drops: bool = False
) -> int:
    """Bring all columns of these rows, by copying or reading, and compare them. Returns: what was missed."""
    rows, arrays = files.table() if rows is None else rows, files.outputs(len(ids))
    fixed = begun_read(rows, ids, arrays, drops=drops) if reads else begun(rows, ids, arrays)
    found = engine.find_values(rows, ids, len(files.widths), files.element_bytes, on_disk=reads)
    assert ended(fixed).refused == -1
    assert fixed.failure is None
    for number, array in enumerate(arrays):
        assert np.array_equal(array, files.column(number, ids))
    assert ended(found).refused == found.damaged == -1
    assert found.failure is None
    wanted = [files.values[row] for row in ids.tolist()]
    assert np.diff(found.offsets).tolist() == [len(value) for value in wanted]
    out = np.zeros(int(found.offsets[-1]), np.uint8)
    values = engine.read_values(found, out, drops=drops) if reads else engine.copy_values(found, out)
    assert ended(values).refused == -1
    assert values.failure is None
    assert out.tobytes() == b"".join(wanted)
    for job in (fixed, found, values):
        assert job.take(0)
        assert job.cancel()
    return fixed.missed + found.missed + values.missed


@contextmanager
def threads(count: int) -> Iterator[None]:
    """The engine has so many, at most, and none before the next job."""
    before = of_process.most
    _stop()
    of_process.most = count
    try:
        yield
    finally:
        of_process.most = before
        _stop()


def _stop() -> None:
    """Wait for the engine's threads, whatever a test says of how long they may take."""
    of_process.stop()
    assert not library.engine_stop(of_process.handle, STOP_NANOSECONDS)
