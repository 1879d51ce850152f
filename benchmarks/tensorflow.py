"""How fast does a cache feed TensorFlow, beside what TensorFlow's users have?

Question: GB/s and CPU seconds a GB of `arrowcache.tensorflow.dataset`, each backend and shuffle, against
TFRecordDataset (interleave, a shuffle buffer, parse, decode_raw), `from_generator` over np.memmap, and
tensorflow-io's ArrowFeatherDataset; and what a thread that runs pure Python keeps of its speed while it takes
a batch from each at the same rate.
Method: rows of incompressible float32 and an int64 label in 8 segments, page cache warm, batches of 4 MiB
(1 MiB for rows of 1 KiB). Whole epochs, as many a turn as take about a second, after one that is not
counted; the cases take turns; medians. A tf.function consumes: it reads one value per 4 KiB. Peers: TFRecord
as TensorFlow's guide to performance says (8 files in a parallel interleave, a shuffle buffer of 64 MiB,
batch, then parse a batch at once, prefetch; "parse each" parses before it batches); `from_generator` yields
row by row in random order; Feather files are read in order, since that dataset cannot shuffle.
A thread that spins: two seconds a turn, in which it takes a batch whenever one is due, at half the rate that
TFRecord holds when it takes one at once again; `kept` is its loops over those of a turn that takes nothing.
Run: `python -m benchmarks tensorflow` in an environment with TensorFlow. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray
from pyarrow import feather

import arrowcache as ac
from arrowcache.tensorflow import dataset, to_tfrecords
from arrowcache.tensorflow.arrow_backend import find_reader
from benchmarks.harness import Cases, Figures, Options, Round, Way, filled_cache, memcpy, scratch, seconds_of
from benchmarks.usage import spin

SIZES = (  # bytes of a row, rows of a batch, bytes in all
    (1 << 10, 1024, 32 << 20),
    (1 << 16, 64, 512 << 20),
    (1 << 20, 4, 512 << 20),
)
SHUFFLES = ("rows", "window", "blocks", None)
SHUFFLE_BUFFER_BYTES = 64 << 20
TURN_SECONDS = 1.0
SPIN_SECONDS = 2.0
REPEATS = 5
AUTOTUNE = tf.data.AUTOTUNE


def tfrecord(files: list[str], floats: int, batch: int, *, parse_each: bool) -> Any:
    features = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([], tf.int64)}

    def parse(example: Any) -> dict[str, Any]:
        one_or_all = tf.io.parse_single_example if parse_each else tf.io.parse_example
        found = one_or_all(example, features)
        shape = [floats] if parse_each else [batch, floats]
        return {"x": tf.reshape(tf.io.decode_raw(found["x"], tf.float32), shape), "y": found["y"]}

    records = (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(len(files))
        .interleave(
            tf.data.TFRecordDataset,
            cycle_length=len(files),
            num_parallel_calls=AUTOTUNE,
            deterministic=False,
        )
        .shuffle(SHUFFLE_BUFFER_BYTES // (4 * floats))
    )
    if parse_each:
        parsed = records.map(parse, num_parallel_calls=AUTOTUNE).batch(batch, drop_remainder=True)
    else:
        parsed = records.batch(batch, drop_remainder=True).map(parse, num_parallel_calls=AUTOTUNE)
    return parsed.prefetch(AUTOTUNE)


def from_generator(x: NDArray[np.float32], batch: int) -> Any:
    def rows() -> Iterator[tuple[NDArray[np.float32], int]]:
        for row in np.random.default_rng().permutation(len(x)):
            yield x[row], row

    signature = (tf.TensorSpec(x.shape[1:], tf.float32), tf.TensorSpec((), tf.int64))
    return (
        tf.data.Dataset.from_generator(rows, output_signature=signature)
        .map(lambda x, y: {"x": x, "y": y})
        .batch(batch, drop_remainder=True)
        .prefetch(AUTOTUNE)
    )


def arrow_feather(files: list[str], floats: int, batch: int) -> Any:
    from tensorflow_io.arrow import ArrowFeatherDataset

    found = ArrowFeatherDataset(
        files,
        columns=(0, 1),
        output_types=(tf.float32, tf.int64),
        output_shapes=([floats], []),
        batch_size=batch,
        batch_mode="drop_remainder",
    )
    return found.map(lambda x, y: {"x": x, "y": y}).prefetch(AUTOTUNE)


def peers(cache: ac.Cache, folder: Path, row_bytes: int, batch: int, rows: int) -> dict[str, Any]:
    floats, chunk = row_bytes // 4, max(1, (64 << 20) // row_bytes)
    records = [str(path) for path in to_tfrecords(cache, folder / "records")]
    x: NDArray[np.float32] = np.memmap(folder / "x", np.float32, "w+", shape=(rows, floats))
    with cache.snapshot() as snapshot:
        for start in range(0, rows, chunk):
            ids = np.arange(start, min(rows, start + chunk))
            x[ids[0] : ids[-1] + 1] = snapshot.gather(ids, ["x"])["x"]
    cases = {
        "TFRecord": tfrecord(records, floats, batch, parse_each=False),
        "TFRecord, parse each": tfrecord(records, floats, batch, parse_each=True),
        "from_generator": from_generator(x, batch),
    }
    if io_version() is None:
        return cases
    files = []
    for number, part in enumerate(np.array_split(np.arange(rows), len(records))):
        lists = pa.ListArray.from_arrays(
            np.arange(len(part) + 1, dtype=np.int32) * floats, x[part[0] : part[-1] + 1].reshape(-1)
        )
        files.append(str(folder / f"{number}.feather"))
        feather.write_feather(pa.table({"x": lists, "y": part}), files[-1], "uncompressed")
    return cases | {"ArrowFeatherDataset, in order": arrow_feather(files, floats, batch)}


def io_version() -> str | None:
    try:
        return version("tensorflow-io")
    except PackageNotFoundError:
        return None


def ours(cache: ac.Cache, batch: int) -> dict[str, Any]:
    try:
        find_reader()
        backends = ("native", "arrow")
    except ImportError:
        backends = ("native",)
    return {
        f"ours, {backend}, {shuffle}": dataset(cache, batch, backend=backend, shuffle=shuffle)
        for backend in backends
        for shuffle in SHUFFLES
    }


@tf.function(reduce_retracing=True)
def consume(batches: Any) -> Any:
    """The sum of some values of each batch."""
    total = tf.constant(0.0)
    for batch in batches:
        total += tf.reduce_sum(tf.reshape(batch["x"], [-1])[::1024]) + tf.cast(batch["y"][0], tf.float32)
    return total


def throughput(title: str, cases: dict[str, Any], nbytes: int, copy: Way) -> Round:
    """Whole epochs of each case, as many a turn as take about a second."""
    amounts, ways = {"memcpy": nbytes / 1e9}, {"memcpy": copy}
    for name, batches in cases.items():
        consume(batches)
        epochs = 1 + int(TURN_SECONDS / seconds_of(partial(consume, batches)))
        amounts[name], ways[name] = epochs * nbytes / 1e9, partial(consumed, batches.repeat(epochs))
    over = ["memcpy", *(name for name in cases if "TFRecord" in name)]
    key = f"tensorflow-cpu {version('tensorflow-cpu')}, {{title}}: {{way}} over {{over}}"
    return Round(title, ways, over, amounts, turns=REPEATS, warm=0, key=key)


def consumed(batches: Any) -> None:
    consume(batches)


def spinning(cases: dict[str, Any], batch_bytes: int, options: Options) -> Iterator[Figures]:
    """What a thread that runs pure Python keeps, at half the rate that TFRecord holds beside it."""
    streams = {name: iter(batches.repeat()) for name, batches in cases.items()}
    for stream in streams.values():
        next(stream)
    _, fastest = spin(lambda: next(streams["TFRecord"]), 1e12, batch_bytes, SPIN_SECONDS)
    rate = fastest * 1e9 / 2
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in streams}
    for _ in range(options.turns(REPEATS)):
        alone, _ = spin(lambda: None, rate, batch_bytes, SPIN_SECONDS)
        for name, stream in streams.items():
            loops, delivered = spin(partial(next, stream), rate, batch_bytes, SPIN_SECONDS)
            found[name].append((loops / alone, delivered))
    for name, figures in found.items():
        kept, delivered = (statistics.median(column) for column in zip(*figures, strict=True))
        title = f"beside a thread that spins, at {rate / 1e9:.2f} GB/s, {name}"
        yield Figures(title, {"kept": kept, "GB/s": delivered})


def tensorflow(options: Options) -> Cases:
    print(f"tensorflow-cpu {version('tensorflow-cpu')}, tensorflow-io {io_version() or 'is not there'}")
    for row_bytes, batch, all_bytes in SIZES:
        rows = min(all_bytes, max(options.of(all_bytes), 32 << 20)) // row_bytes
        total_bytes, title = rows * row_bytes, f"{row_bytes >> 10} KiB"
        with (
            scratch(options.folder) as folder,
            filled_cache(folder / "cache", row_bytes, total_bytes, "128MiB", rows // 8) as cache,
        ):
            cases = peers(cache, folder, row_bytes, batch, rows) | ours(cache, batch)
            yield throughput(title, cases, total_bytes, memcpy(cache, batch * row_bytes, total_bytes))
            if row_bytes == 1 << 16:
                of = {name: cases[name] for name in cases if "parse" not in name}
                yield from spinning(of, batch * row_bytes, options)
            del cases
