"""File rows: which rows of which files an imported segment holds, as its task's name tells.

    <kind>.<fingerprint>-<first>-<rows>[e]{.<the next file's>}[.again-<n>]

kind is "parquet" or "tfrecord". The fingerprint is of a file's bytes, so it is the same wherever the file
lies and whatever it is called. The segment holds `rows` of the file's rows, from row `first` on, then those
of the next file; "e": the file has no more. "again-<n>" tells apart what was imported once more on purpose.

So the folder alone says which rows of a file are in a cache: importing a file again adds only what is
missing, also after an import that was killed; and publishing, which refuses a task that is listed, refuses a
second copy of a segment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from arrowcache.storage.layout import SegmentInfo

_MOST_CHARACTERS = 200  # of a task's name: a file's name ends at 255
_MOST_DIGITS = 10  # of the rows of a segment
_PIECE_BYTES = 1 << 20
_TASK = re.compile(
    r"(parquet|tfrecord)((?:\.[0-9a-f]{16}-\d{1,18}-\d{1,18}e?)+)(\.again-[0-9a-f]{8})?", re.ASCII
)
_ENTRY = re.compile(r"\.([0-9a-f]{16})-(\d+)-(\d+)(e?)")


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of one file: `rows` of them, from `first` on. `is_last`: the file has no more."""

    fingerprint: str
    first: int
    rows: int
    is_last: bool = False

    def __str__(self) -> str:
        return f"{self.fingerprint}-{self.first}-{self.rows}{'e' if self.is_last else ''}"


def task_of(kind: str, origins: Iterable[FileRows], again: str = "") -> str:
    """The task's name of a segment of these rows, in this order.

    Args:
        again: 8 hex digits, for rows that are imported once more.
    """
    return ".".join([kind, *map(str, origins), *([f"again-{again}"] if again else [])])


def file_rows_of(task: str) -> tuple[FileRows, ...]:
    """Return the file rows of a segment of this task. Empty if it was not imported."""
    match = _TASK.fullmatch(task)
    if match is None:
        return ()
    return tuple(
        FileRows(fingerprint, int(first), int(rows), bool(last))
        for fingerprint, first, rows, last in _ENTRY.findall(match[2])
    )


def has_place(kind: str, origins: Sequence[FileRows], first: int, again: str = "") -> bool:
    """True if the name of a segment of these rows can name one more file's, from its row `first` on."""
    longest = FileRows("0" * 16, first, 10**_MOST_DIGITS - 1, is_last=True)
    return len(task_of(kind, [*origins, longest], again)) <= _MOST_CHARACTERS


def kind_of_import(task: str) -> str:
    """ "parquet" or "tfrecord"; "" for what was not imported."""
    match = _TASK.fullmatch(task)
    return match[1] if match else ""


def sampler_of(task: str) -> str:
    """The publisher of a segment of this task: a pool as "<name>.<seed>", an import, or a writer."""
    if kind := kind_of_import(task):
        return kind
    sampler = task.rpartition(".")[0]
    if sampler.startswith("tfrecord.") and sampler.count(".") == 2:
        return sampler[: len("tfrecord.") + 8]  # all workers of one import
    return sampler or task or "writer"


class Coverage:
    """The rows of files that a cache has."""

    def __init__(self, segments: Iterable[SegmentInfo] = ()) -> None:
        self._runs: dict[str, list[FileRows]] = {}
        for segment in segments:
            for origin in file_rows_of(segment.task):
                self.add(origin)

    def add(self, origin: FileRows) -> None:
        """Note rows of a file that the cache has."""
        self._runs.setdefault(origin.fingerprint, []).append(origin)

    def forget(self, origin: FileRows) -> None:
        """Note that rows left the cache. They need not be known."""
        runs = self._runs.get(origin.fingerprint, [])
        self._runs[origin.fingerprint] = [run for run in runs if run != origin]

    def missing(
        self, fingerprint: str, total: int | None = None, pending: Iterable[FileRows] = ()
    ) -> list[tuple[int, int | None]]:
        """The rows of a file that are not there, as (first, stop).

        Args:
            total: the number of the file's rows. None means unknown. The last stop is None then, unless the
                file's last row was seen here.
            pending: rows that count as present.
        """
        runs = self._of(fingerprint, pending)
        if total is None:
            total = next((run.first + run.rows for run in runs if run.is_last), None)
        there = _merged(runs)
        starts = [0, *(stop for _, stop in there)]
        stops = [*(start for start, _ in there), total]
        gaps = zip(starts, stops, strict=True)
        return [(start, stop) for start, stop in gaps if stop is None or start < stop]

    def rows(self, fingerprint: str, pending: Iterable[FileRows] = ()) -> int:
        """Count the rows of a file that are there, each once."""
        return sum(stop - start for start, stop in _merged(self._of(fingerprint, pending)))

    def _of(self, fingerprint: str, pending: Iterable[FileRows]) -> list[FileRows]:
        return [*self._runs.get(fingerprint, ()), *(o for o in pending if o.fingerprint == fingerprint)]


def _merged(runs: Iterable[FileRows]) -> list[tuple[int, int]]:
    """Rows as (first, stop) that ascend, and neither touch nor overlap."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((run.first, run.first + run.rows) for run in runs if run.rows):
        if merged and start <= merged[-1][1]:
            start, stop = merged[-1][0], max(merged.pop()[1], stop)
        merged.append((start, stop))
    return merged


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the fingerprint of a file: 16 hex digits, from all of its bytes.

    All of them, since a part would not do: files of numbers that are stored as they are may have one length,
    and footers that are equal to the byte.

    Blocks: while the file is read, which the page cache then has.
    Raises: OSError: it cannot be.
    """
    digest = xxhash.xxh3_64()
    piece = memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
