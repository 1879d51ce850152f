"""Subjects: small caches whose every row is known, and the check that nothing else is ever delivered."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from fuzz.mutation import Victim
from helpers import EVERY_TYPE, make_cache

import arrowcache as ac

ROWS, SEGMENTS, DAMAGED = 8, 4, 2  # of a segment, of a cache, and which of them is damaged
_FIXED = {"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (4, 4)), "flag": ac.Tensor("bool")}
SCHEMAS = {
    "fixed": ac.Schema(_FIXED),  # has templates
    "mixed": ac.Schema(
        _FIXED
        | {"z": ac.Tensor("complex64"), "when": ac.Timestamp(), "boxes": ac.Ragged("float32", (2,))}
        | {"name": ac.String(), "data": ac.Binary()}
    ),
    "text": ac.Schema({"name": ac.String(), "id": ac.Tensor("int64"), "r": ac.Ragged("int16")}),
    "wide": ac.Schema(_FIXED | {"a": ac.Tensor("uint8", (700,)), "b": ac.Tensor("float64", (33,))}),
    "every": EVERY_TYPE,
    "gaps": ac.Schema(
        {"id": ac.Tensor("int64"), "a": ac.Tensor("uint8", (4096,)), "b": ac.Tensor("int64", (576,))}
    ),
}

Row = tuple[bytes, ...]
Rows = dict[int, Row]  # by id


def _value(kind: object, chance: np.random.Generator) -> Any:
    if isinstance(kind, ac.String):
        return "äx€"[: chance.integers(0, 4)] * int(chance.integers(0, 4))
    if isinstance(kind, ac.Binary):
        return chance.bytes(int(chance.integers(0, 9)))
    if isinstance(kind, ac.Timestamp):
        return np.datetime64(int(chance.integers(0, 2**50)), "us")
    assert isinstance(kind, ac.Tensor | ac.Ragged)
    shape = kind.shape if isinstance(kind, ac.Tensor) else (int(chance.integers(0, 5)), *kind.inner_shape)
    return chance.integers(0, 2 if kind.dtype == "bool" else 100, shape).astype(kind.numpy_dtype)


def rows_of(batch: Mapping[str, Any]) -> Rows:
    """Each row's bytes, by its id; a batch of any shape that is not a batch's fails."""
    count = len(batch["id"])
    columns: list[list[bytes]] = []
    for name in sorted(batch):
        column = batch[name]
        if isinstance(column, np.ndarray):
            columns.append([np.ascontiguousarray(row).tobytes() for row in column])
        elif isinstance(column, list):
            columns.append([v.encode() if isinstance(v, str) else v for v in column])
        else:
            ends = column.offsets.tolist()
            columns.append([column.data[a:b].tobytes() for a, b in itertools.pairwise(ends)])
    assert all(len(column) == count for column in columns)
    return {int(number): row for number, row in zip(batch["id"], zip(*columns, strict=True), strict=True)}


class Subject:
    """A cache of `SEGMENTS` segments in a folder, which `restore` brings back to what it was."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.schema = name, SCHEMAS[name]
        self.folder = folder / name
        self._sound = folder / f"{name}.sound"
        chance = np.random.default_rng(len(name))
        samples = [
            {n: number if n == "id" else _value(kind, chance) for n, kind in self.schema.items()}
            for number in range(SEGMENTS * ROWS)
        ]
        bound = 512 * 1024
        cache = make_cache(
            self._sound, self.schema, capacity=16 * bound, segment_bytes=bound, segment_rows=ROWS
        )
        with cache.writer() as writer:
            for sample in samples:
                writer.append(sample)
        cache.close()
        shutil.copytree(self._sound, self.folder, symlinks=True)
        self.files = sorted(path.name for path in (self.folder / "segments").iterdir())
        assert len(self.files) == SEGMENTS
        self._cases = 0
        self.begin()
        with self.cache.snapshot() as snapshot:
            table = snapshot.table()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            del table
        self.table = pa.ipc.open_stream(sink.getvalue()).read_all()  # a copy
        self.table.to_pylist()
        self.rows = self._written(samples)
        data = [(self.folder / "segments" / name).read_bytes() for name in self.files]
        self.victim = Victim(self.schema, data[DAMAGED], data[DAMAGED - 1])
        self.sound = frozenset(n for n in self.rows if n // ROWS != DAMAGED)

    def _written(self, samples: list[dict[str, Any]]) -> Rows:
        def as_bytes(value: Any) -> bytes:
            if isinstance(value, bytes):
                return value
            return value.encode() if isinstance(value, str) else np.asarray(value).tobytes()

        return {s["id"]: tuple(as_bytes(s[name]) for name in sorted(s)) for s in samples}

    def begin(self) -> None:
        """Open the cache as those do who have it open for long: once that checks as usual, once bytes too."""
        self.cache = ac.Cache.open(self.folder)
        self.strict = ac.Cache.open(self.folder, check="bytes")

    def damage(self, data: bytes) -> None:
        """Have a new file with these bytes in the victim's place, under a name of its own."""
        (self.folder / "segments" / self.files[DAMAGED]).unlink(missing_ok=True)
        self._cases += 1
        self.files[DAMAGED] = f"{DAMAGED:020d}-{ROWS}-case{self._cases}.arrow"
        (self.folder / "segments" / self.files[DAMAGED]).write_bytes(data)

    def restore(self) -> None:
        """Everything as it was."""
        self.close()
        shutil.rmtree(self.folder)
        shutil.copytree(self._sound, self.folder, symlinks=True)
        self.files = sorted(os.listdir(self.folder / "segments"))
        self.begin()

    def close(self) -> None:
        self.cache.close()
        self.strict.close()

    def empty_quarantine(self) -> list[str]:
        """What was in quarantine, which is deleted."""
        names = os.listdir(self.folder / "quarantine")
        for name in names:
            (self.folder / "quarantine" / name).unlink()
        return names

    def differing(self, got: Rows) -> set[int]:
        """Ids of rows that are not what was written."""
        return {number for number, row in got.items() if self.rows.get(number) != row}


def shuffled(count: int, chance: random.Random) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(chance.sample(range(count), count), np.int64)


def batches_of(loader: ac.Loader) -> Iterator[dict[str, Any]]:
    with loader:
        yield from loader
