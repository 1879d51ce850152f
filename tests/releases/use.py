"""Makes, reads and writes caches of every type, in any release: run with that release on PYTHONPATH.

`python use.py VERB CACHE`: "make" a cache, "append" to one, "read" one; "make-wide" and "append-wide" do so
with columns of several pages a row; each prints a line of JSON: the
release's folder, how many rows there are, what `verify` found, and a digest of all that is read.
"states" prints the release's folder and, of each shuffle, a loader's state within an epoch and after it.
"rank0" and "rank1" print an error, or how many steps their epoch has, which ends with the input.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

import arrowcache as ac

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
SCHEMA = ac.Schema(
    {"id": ac.Tensor("int64"), "name": ac.String(), "data": ac.Binary(), "when": ac.Timestamp()}
    | {f"scalar_{dtype}": ac.Tensor(dtype) for dtype in DTYPES}
    | {f"tensor_{dtype}": ac.Tensor(dtype, (2, 3)) for dtype in DTYPES}
    | {f"ragged_{dtype}": ac.Ragged(dtype, (2,)) for dtype in DTYPES}
)
PACE = ac.Pace(min_rows=1, samples_per_insert=8.0, max_reuse=100)
WIDE = ac.Schema(
    {"id": ac.Tensor("int64"), "name": ac.String(), "odd": ac.Tensor("uint8", (5000,))}
    | {"image": ac.Tensor("uint8", (64, 64)), "mask": ac.Tensor("float32", (2, 1024))}
)
ROWS = 10


def numbers(dtype: str, shape: tuple[int, ...], first: int) -> np.ndarray:
    stored = {"bfloat16": "uint16", "bool": "uint8"}.get(dtype, dtype)
    values = (np.arange(np.prod(shape)) + first) % 2 if dtype == "bool" else np.arange(np.prod(shape)) + first
    return values.reshape(shape).astype(stored).astype(bool if dtype == "bool" else stored)


def append(path: str, first: int) -> None:
    """ROWS rows, whose values are functions of their ids."""
    with ac.Cache.open(path) as cache, cache.writer(on_full="raise") as writer:
        for number in range(first, first + ROWS):
            row: dict[str, Any] = {
                "id": number, "name": f"näme {number}", "data": bytes(number % 5),
                "when": np.datetime64("2026-01-01", "us") + np.timedelta64(number, "us"),
            }  # fmt: skip
            for dtype in DTYPES:
                row[f"scalar_{dtype}"] = numbers(dtype, (), number)[()]
                row[f"tensor_{dtype}"] = numbers(dtype, (2, 3), number)
                row[f"ragged_{dtype}"] = numbers(dtype, (number % 3, 2), number)
            writer.append(row)


def append_wide(path: str, first: int) -> None:
    """ROWS rows of several pages."""
    with ac.Cache.open(path) as cache, cache.writer(on_full="raise") as writer:
        for number in range(first, first + ROWS):
            values = {name: np.full(kind.shape, number, kind.dtype) for name, kind in WIDE.fixed.items()}
            writer.append(values | {"name": "ä" * number})


def digest(columns: dict[str, Any]) -> str:
    """Of every value, in the order of the rows."""
    whole = hashlib.sha256()
    for name in sorted(columns):
        for value in columns[name]:
            text = value.encode() if isinstance(value, str) else value
            whole.update(text if isinstance(text, bytes) else np.asarray(text).tobytes())
    return whole.hexdigest()


def seen(path: str) -> dict[str, Any]:
    with ac.Cache.open(path) as cache, cache.snapshot() as snapshot:
        columns = snapshot.gather(np.arange(len(snapshot)))
        with ac.Loader(cache, 5, shuffle=None) as loader:
            trained = sum(len(batch["id"]) for batch in loader)
        return {
            "release": ac.__file__.rpartition("/")[0], "ids": columns["id"].tolist(), "trained": trained,
            "digest": digest(columns), "problems": [str(problem) for problem in cache.verify(repair=False)],
            "pace": None if cache.pace is None else cache.pace.to_json(), "rows": cache.stats().rows,
            "served": cache.stats().served_rows > 0, "capacity": cache.stats().capacity_bytes,
            "schema": repr(cache.schema), "pool": next_task(cache),
        }  # fmt: skip


def states(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"release": ac.__file__.rpartition("/")[0]}
    for shuffle in ("rows", "window", "blocks", None):
        with ac.Loader(path, 5, shuffle=shuffle) as loader:
            epoch = iter(loader)
            delivered = next(epoch)["id"].tolist()
            within = loader.state_dict()
            for _ in epoch:
                pass
            found[str(shuffle)] = [delivered, within, loader.state_dict()]
    return found


def begin(path: str, rank: int) -> None:
    with ac.Loader(path, 5, rank=rank, world_size=2, run_id="job") as loader:
        epoch = iter(loader)
        print(json.dumps({"steps": loader.steps}), flush=True)
        sys.stdin.read()
        del epoch


def next_task(cache: ac.Cache, count: int = 0) -> int:
    """The next task of the pool "default.0", as a pool claims them."""
    with cache.store.locked():
        first: int = cache.store.folder.claim_tasks("default.0", count)
    return first


def main(verb: str, path: str) -> None:
    if verb.startswith("rank"):
        try:
            begin(path, int(verb[-1]))
        except ValueError as error:
            print(json.dumps({"error": str(error)}))
        return
    if verb == "states":
        print(json.dumps(states(path)))
        return
    if verb == "make":
        ac.Cache.create(path, SCHEMA, "4MiB", "64KiB", ROWS, 0.1, durable=True, pace=PACE).close()
        with ac.Cache.open(path) as cache:
            next_task(cache, 3)
        append(path, 0)
        append(path, ROWS)
    elif verb == "make-wide":
        ac.Cache.create(path, WIDE, "4MiB", "100KiB").close()
        append_wide(path, 0)
    elif verb == "append-wide":
        append_wide(path, max(seen(path)["ids"]) + 1)
    elif verb == "append":
        append(path, max(seen(path)["ids"]) + 1)
    print(json.dumps(seen(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
