"""How fast do sources fill a cache, against reading the same without one, and do more samplers help?

Question 1, parquet: ParquetRows from local files into a cache, by one process, against pyarrow.dataset, which
reads the same row groups' columns into memory and keeps nothing. Method: uncompressed and zstd files of
float32 vectors and labels, page cache warm; the same process runs the tasks of a pool, drawing, encoding and
publishing on tmpfs or disk, then `fragment.to_table()` of just those row groups, and then write()s as many
bytes to plain files where the cache is. CPU seconds of all threads, too, which other work on the machine
changes less.

Question 2, s3: samples a second by 1, 2, 4 and 8 sampler processes, from a store that answers after 20 ms
(tests/object_store.py, a process of its own): windows of 4 KiB of .npy, and row groups of 16 KiB. Method: a
pool on as many loky processes, which have all drawn before the clock; a fixed number of segments a process.
Run: `python -m benchmarks sources`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import loky
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq

import arrowcache as ac
from arrowcache.pickling import pickled
from arrowcache.sampling.sources import ArrayWindows, ParquetRows
from arrowcache.sampling.task import Task, run
from arrowcache.storage.locks import LockFile
from benchmarks.harness import SHM, Cases, Figures, Options, Round, Way, scratch
from benchmarks.publishing import seconds_of_a_pool

VECTOR = 1024  # float32: 4 KiB a row
GROUP_ROWS = 1024
FILES, GROUPS_A_FILE = 2, 32  # 256 MiB
SEGMENT_ROWS = 8 * GROUP_ROWS
SEGMENT_BYTES = SEGMENT_ROWS * (4 * VECTOR + 8)
TASKS = 3
REPEATS = 7

LATENCY_SECONDS = 0.02
PROCESSES = (1, 2, 4, 8)
SEGMENTS_A_PROCESS, ROWS_A_SEGMENT, TURNS = 4, 32, 2
SERVER = Path(__file__).parents[1] / "tests" / "object_store.py"


def write_files(folder: Path, compression: str) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(FILES):
        rows = GROUP_ROWS * GROUPS_A_FILE
        values = rng.integers(0, 1 << 12, (rows, VECTOR)).astype(np.float32)  # as of a 12-bit sensor
        vectors = pa.FixedSizeListArray.from_arrays(values.ravel(), VECTOR)
        table = pa.table({"x": vectors, "y": np.arange(rows)})
        pq.write_table(
            table, folder / f"{number}.parquet", row_group_size=GROUP_ROWS, compression=compression,
            use_dictionary=False,
        )  # fmt: skip


def parquet(options: Options) -> Cases:
    """Question 1."""
    for compression in ("none", "zstd"):
        for on, parent in (("tmpfs", SHM), ("disk", options.folder)):
            with scratch() as files, scratch(parent) as folder:
                write_files(files / "files", compression)
                yield from reading(f"{compression}, {on}", files / "files", folder, options)


def reading(title: str, files: Path, folder: Path, options: Options) -> Cases:
    """The same rows: into the cache, into memory; and as many bytes of plain writing."""
    source = ParquetRows(files)
    data = np.random.default_rng(0).integers(0, 255, SEGMENT_BYTES, np.uint8)
    fragments = {each.path: each for each in pads.dataset(files, format="parquet").get_fragments()}
    turns = [range(turn * TASKS, (turn + 1) * TASKS) for turn in range(1 + options.turns(REPEATS))]
    tasks, groups = iter(turns), iter([drawn_groups(source, numbers) for numbers in turns])
    packed = pickled(source, "{!r}")

    def fill() -> None:
        for number in next(tasks):
            done = run(Task(str(cache.path), packed, "default.0", 0, number, 0, ramp=False))
            assert done.rows == SEGMENT_ROWS, done

    def read() -> None:
        for path, number in next(groups):
            assert fragments[path].subset(row_group_ids=[number]).to_table().num_rows == GROUP_ROWS

    def write() -> float:
        started = time.perf_counter()
        for number in range(TASKS):
            with (folder / f"{number}.bin").open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, SEGMENT_BYTES)
                file.write(data.data)
        seconds = time.perf_counter() - started
        for path in folder.glob("*.bin"):
            path.unlink()
        return seconds

    schema, place = source.schema, folder / "cache"
    with ac.Cache.create(place, schema, "1GB", "64MiB", SEGMENT_ROWS) as cache:
        cache.store.folder.take_tasks("default.0", 1)
        with closing(LockFile(cache.path / "pools" / "default.0")) as lock:
            lock.try_range(0, 1, exclusive=True)
            ways: dict[str, Way] = {"ParquetRows": fill, "pyarrow.dataset": read, "write": write}
            amount, key = TASKS * SEGMENT_BYTES / 1e9, "{title}: {way} over {over}"
            yield Round(title, ways, ["pyarrow.dataset"], amount, turns=REPEATS, key=key)


def drawn_groups(source: ParquetRows, numbers: range) -> list[tuple[str, int]]:
    """The row groups that these tasks read, by their own draws."""
    drawn = []
    for number in numbers:
        rng = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(number,)))
        for _ in range(SEGMENT_ROWS // GROUP_ROWS):
            group = source._groups[source._choice.draw(rng)]
            rng.choice(GROUP_ROWS, GROUP_ROWS, replace=False)
            drawn.append((source._files[group.file].path, group.number))
    return drawn


# -- the store that answers late -----------------------------------------------------------------------


def warm(_: int) -> int:
    time.sleep(0.5)
    return os.getpid()


def scaling(make: Callable[[str], Any], uri: str, folder: Path, options: Options) -> dict[int, float]:
    """Samples a second by so many processes; means of turns, which alternate."""
    source = make(uri)
    rates: dict[int, list[float]] = {count: [] for count in PROCESSES}
    source.ramp = False  # as many rows a task
    for _ in range(options.turns(TURNS)):
        for count in PROCESSES:
            with loky.ProcessPoolExecutor(count) as executor:
                list(executor.map(warm, range(2 * count)))
                place, schema = folder / "cache", source.schema
                with ac.Cache.create(place, schema, "1GB", "4MiB", ROWS_A_SEGMENT) as cache:
                    for segments in (2 * count, SEGMENTS_A_PROCESS * count):  # the first connects
                        seconds = seconds_of_a_pool(cache, source, count, executor, segments)
                rates[count].append(SEGMENTS_A_PROCESS * count * ROWS_A_SEGMENT / seconds)
                shutil.rmtree(folder / "cache")
    return {count: statistics.mean(found) for count, found in rates.items()}


def fill_store(folder: Path) -> None:
    (folder / "bucket").mkdir()
    np.save(folder / "bucket" / "x.npy", np.random.default_rng(0).random((4096, 512)))  # rows of 4 KiB
    x = np.random.default_rng(0).random((4096, 512)).astype(np.float32)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(x.ravel(), 512)})
    pq.write_table(table, folder / "bucket" / "x.parquet", row_group_size=8, use_dictionary=False)


def s3(options: Options) -> Cases:
    """Question 2."""
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    cases: dict[str, tuple[str, Callable[[str], Any]]] = {
        "windows": ("x.npy", lambda uri: ArrayWindows(uri, (1,))),
        "row groups": ("x.parquet", lambda uri: ParquetRows(uri, rows_per_group=1)),
    }
    with scratch() as folder:
        fill_store(folder)
        command = [sys.executable, str(SERVER), str(folder), str(LATENCY_SECONDS)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for case, (key, make) in cases.items():
                how = f"endpoint_override=127.0.0.1%3A{port}&scheme=http&region=us-east-1"
                rates = scaling(make, f"s3://key:secret@bucket/{key}?{how}", folder, options)
                title, ratio = f"S3, {case}: eight processes over one", rates[8] / rates[1]
                values = {f"{count} processes": rate for count, rate in rates.items()} | {"8 over 1": ratio}
                yield Figures(f"S3, 20 ms, {case}, samples/s", values, {title: ratio})
            server.communicate()  # closes its input, which ends it


def sources(options: Options) -> Cases:
    yield from parquet(options)
    yield from s3(options)
