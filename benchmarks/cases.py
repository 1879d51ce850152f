"""The benchmarks that fit the harness: a table of what is made and what is timed.

Each docstring has the question and the method. Unless said otherwise a cache has 1 GiB of rows in segments of
64 MiB and lies in the page cache, the ways take turns after one that is not counted, and figures are medians.
memcpy copies as many bytes, contiguous, in blocks of a batch's size from random places of the same mapped
files into one slot.
Run: `python -m benchmarks NAME`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import arrowcache as ac
from arrowcache.reading.order import EvenOrder, Shard
from arrowcache.reading.packing import best_fit
from arrowcache.reading.plan import Plan
from arrowcache.reading.shuffle import Shuffle
from benchmarks import gil, latencies, publishing
from benchmarks.harness import (
    GIB,
    MIDDLE,
    SHM,
    Benchmark,
    Figures,
    Options,
    Round,
    Way,
    begun,
    epoch,
    filled,
    mapped_files,
    memcpy,
    named,
    scratch,
    seconds_of,
    written,
)
from benchmarks.latencies import ROWS, labelled_rows
from benchmarks.usage import advise, children, status_bytes

SHAPES = (
    (65536, 64),
    (65536, 256),
    (1024, 64),
    (1024, 1024),
    (1024, 4096),
)  # bytes of a row, rows of a batch


def gathering(snapshot: ac.Snapshot, batch_rows: int, rows: int, columns: list[str] | None = None) -> Way:
    """Gather random batches into one slot, so many rows a call; all is mapped and was read once."""
    snapshot.map_all()
    ids = np.random.default_rng(1).integers(0, len(snapshot), (rows // batch_rows, batch_rows))
    out: dict[str, Any] = snapshot.gather(np.arange(batch_rows), columns)
    for first in range(0, len(snapshot), 1000):
        snapshot.gather(np.arange(first, min(first + 1000, len(snapshot))), columns)

    def gather() -> None:
        for batch in ids:
            snapshot.gather(batch, columns, out)

    return gather


# -- Rates ---------------------------------------------------------------------------------------------


def gather(options: Options) -> Iterator[Round]:
    """How close does `snapshot.gather(out=)` come to memcpy?

    Method: shuffled rows, 512 MiB a turn in batches. Both write into a slot that begins at a page.
    """
    for row_bytes, batch_rows in SHAPES:
        with filled(options, row_bytes) as cache, cache.snapshot() as snapshot:
            nbytes = options.of(GIB) // 2
            ways = {
                "gather": gathering(snapshot, batch_rows, nbytes // row_bytes, ["x"]),
                "memcpy": memcpy(cache, batch_rows * row_bytes, nbytes),
            }
            yield Round(named(row_bytes, batch_rows), ways, ["memcpy"], nbytes / 1e9, turns=11)


def loader(options: Options) -> Iterator[Round]:
    """How fast does `arrowcache.torch.Loader` deliver shuffled batches, and at what CPU cost?

    Method: an epoch a turn, shuffle="rows". CPU seconds are those of the whole process.
    """
    from arrowcache.torch import Loader

    for row_bytes, batch_rows in SHAPES:
        with filled(options, row_bytes) as cache, Loader(cache, batch_rows) as batches:
            nbytes = options.of(GIB)
            ways = {
                "loader": partial(epoch, batches),
                "memcpy": memcpy(cache, batch_rows * row_bytes, nbytes),
            }
            yield Round(named(row_bytes, batch_rows), ways, ["memcpy"], nbytes / 1e9)


def threads(options: Options) -> Iterator[Round]:
    """Do thread workers change the rate where there is no transform?

    Method: batches of 1 KiB rows, up to 64 MiB a batch, and of 64 KiB rows. The engine's threads copy the
    rows, and share a large batch; thread workers run transforms only. So all ratios should be 1.
    """
    for row_bytes, batch_rows in ((1024, 64), (1024, 1024), (1024, 4096), (1024, 65536), (65536, 64)):
        with filled(options, row_bytes) as cache, ExitStack() as stack:
            ways = {
                name: partial(
                    epoch,
                    stack.enter_context(ac.Loader(cache, batch_rows, workers=workers, worker_type="thread")),
                )
                for name, workers in (("default", 0), ("one thread", 1), ("two threads", 2))
            }
            title = named(row_bytes, batch_rows)
            yield Round(title, ways, ["one thread"], options.of(GIB) / 1e9, turns=7)


def dataloader(options: Options) -> Iterator[Round]:
    """How fast is a stock torch DataLoader over a cache, without a transform, beside our own Loader?

    Method: `DataLoader(CacheDataset)` with two workers and with none, against `arrowcache.torch.Loader`
    without workers, and against the same DataLoader whose workers return tensors (an identity transform),
    as others do. The consumer reads a value per 4 KiB.
    """
    from arrowcache.torch import Loader
    from arrowcache.torch import dataloader as stock

    row_bytes, batch_rows = MIDDLE
    with filled(options, row_bytes) as cache, Loader(cache, batch_rows) as own:
        loaders: dict[str, Iterable[Any]] = {
            "Loader": own,
            "DataLoader, 2 workers": stock(cache, batch_rows, 2),
            "DataLoader, no workers": stock(cache, batch_rows, 0),
            "DataLoader, 2 workers, returning tensors": stock(
                cache, batch_rows, 2, transform=lambda batch: batch
            ),
        }
        ways = {name: partial(epoch, batches, read=True) for name, batches in loaders.items()}
        title = named(row_bytes, batch_rows)
        yield Round(title, ways, ["Loader"], options.of(GIB) / 1e9, turns=7, key="{way} over {over}")


def pace(options: Options) -> Iterator[Round | Figures]:
    """What does keeping a pace cost a loader?

    Method: segments of 8 MiB; a consumer that copies each batch and works on it until it takes 2 GB/s, and
    never makes up for a wait; a loader that keeps a pace that never makes it wait, and one with
    paced=False, 8 epochs a turn. The overhead is the ratio of the pairs' times less 1: its mean, and the 95
    % interval of that (Student's t of 10 turns).
    """
    row_bytes, batch_rows = MIDDLE
    epochs, bytes_per_second, t_of_10 = 8, 2e9, 2.262
    taken: dict[str, list[float]] = {"with a pace": [], "without": []}
    with filled(options, row_bytes, segment_bytes="8MiB") as cache:
        cache.set_pace(ac.Pace(min_rows=1, samples_per_insert=1, max_reuse=10**6, tolerance=1e12))
        with ac.Loader(cache, batch_rows) as paced, ac.Loader(cache, batch_rows, paced=False) as free:
            target = np.empty((batch_rows, row_bytes // 4), np.float32)

            def run(name: str, loader: ac.Loader) -> float:
                started = time.perf_counter()
                for _ in range(epochs):
                    for batch in loader:
                        came = time.perf_counter()
                        np.copyto(target, batch["x"])
                        while time.perf_counter() - came < target.nbytes / bytes_per_second:
                            pass
                taken[name].append(time.perf_counter() - started)
                return taken[name][-1]

            ways = {
                "with a pace": partial(run, "with a pace", paced),
                "without": partial(run, "without", free),
            }
            key = "rate {way} over {over}"
            nbytes = epochs * options.of(GIB)
            yield Round("a loader at 2 GB/s", ways, ["without"], nbytes / 1e9, turns=10, key=key)
    pairs = [*zip(*taken.values(), strict=True)][1:]
    overhead = [100 * (with_pace / without - 1) for with_pace, without in pairs]
    interval = t_of_10 * statistics.stdev(overhead) / len(overhead) ** 0.5
    yield Figures("overhead", {"%": f"{statistics.mean(overhead):+.2f} +- {interval:.2f} (95 %)"})


def segments(options: Options) -> Iterator[Round]:
    """What do many, short or oddly shaped segments cost?

    Method: shuffled rows of 1 KiB and a label from (a) 2,000 short segments of differing lengths, as
    `max_delay` makes them, and (b) 2,000 full segments of 512 KiB, each over the same rows in segments of
    64 MiB; (c) columns of 1001, 501 and 2001 floats together over memcpy; by `snapshot.gather(out=)` and by
    a whole epoch of `arrowcache.Loader`, its beginning included; 256 MiB a turn.
    """
    count = options.of(2000)
    lengths = np.random.default_rng(3).integers(8, 249, count).tolist()
    blocks = [5000] * (count // 10)  # 512 KiB hold 502 rows
    kib = ac.Schema({"x": ac.Tensor("float32", (256,)), "y": ac.Tensor("int64")})
    odd = ac.Schema({f"x{size}": ac.Tensor("float32", (size,)) for size in (1001, 501, 2001)})
    with scratch(options.folder) as folder:
        short = random_rows(folder / "short", kib, "64MiB", lengths, publish_each=True)
        large = random_rows(folder / "large", kib, "64MiB", [sum(lengths)])
        yield from compared("short", {"short": short, "64 MiB": large}, (64, 1024), options)
    with scratch(options.folder) as folder:
        small = random_rows(folder / "small", kib, "512KiB", blocks)
        large = random_rows(folder / "large", kib, "64MiB", blocks)
        yield from compared("512 KiB", {"512 KiB": small, "64 MiB": large}, (64, 1024), options)
    with scratch(options.folder) as folder:
        cache = random_rows(folder / "odd", odd, "64MiB", [4500] * options.of(12))
        yield from compared("odd", {"odd": cache}, (64, 256), options)


def random_rows(
    folder: Path, schema: ac.Schema, segment_bytes: str, parts: Sequence[int], *, publish_each: bool = False
) -> ac.Cache:
    """A cache of random rows, written in parts; if `publish_each`, each becomes a segment."""
    cache = ac.Cache.create(folder, schema, capacity="8GiB", segment_bytes=segment_bytes)
    rng = np.random.default_rng(0)
    writer = cache.writer()
    for rows in parts:
        writer.extend(
            {
                name: rng.integers(0, 1 << 20, (rows, *kind.shape)).astype(kind.numpy_dtype)
                for name, kind in schema.fixed.items()
            }
        )
        if publish_each:
            writer.close()
            writer = cache.writer()
    writer.close()
    return cache


def compared(
    name: str, caches: Mapping[str, ac.Cache], batches: Sequence[int], options: Options
) -> Iterator[Round]:
    """The first cache over the last, or over memcpy if it is the only one."""
    last = [*caches.values()][-1]
    row_bytes = sum(kind.row_bytes for kind in last.schema.fixed.values())
    for batch_rows in batches:
        rows = options.of(256 << 20) // row_bytes // batch_rows * batch_rows
        with ExitStack() as stack:
            for kind in ("gather", "loader"):
                ways: dict[str, Way] = {}
                for of, cache in caches.items():
                    if kind == "gather":
                        snapshot = stack.enter_context(cache.snapshot())
                        ways[of] = gathering(snapshot, batch_rows, rows)
                    else:
                        loader = stack.enter_context(ac.Loader(cache, batch_rows, epoch_rows=rows))
                        ways[of] = partial(epoch, loader)
                if len(caches) == 1:
                    ways["memcpy"] = memcpy(last, batch_rows * row_bytes, rows * row_bytes)
                title = f"{name}, {batch_rows} rows: {kind}"
                amount = rows * row_bytes / 1e9
                yield Round(title, ways, [[*ways][-1]], amount, turns=7, key="{title}")
    for cache in caches.values():
        cache.close()


def window(options: Options) -> Iterator[Round]:
    """How fast is the window order from a cold disk?

    Method: an epoch of shuffle="window" (window_bytes=512 MiB), of None and of "rows" over 3 GiB, against
    `dd` of the same files one after another; POSIX_FADV_DONTNEED on every file before each turn. dd reads
    with the kernel's read-ahead (`bs=1M`, as `cat` would), and with WILLNEED of the next file, so that the
    disk reads ahead of it, as the loader has it do. BENCH_DIR says on which disk.
    """
    row_bytes, batch_rows = MIDDLE
    with filled(options, row_bytes, 3 * GIB) as cache:
        files = sorted((cache.path / "segments").iterdir())
        os.sync()

        def load(shuffle: str | None) -> float:
            more = {"window_bytes": "512MiB"} if shuffle == "window" else {}
            with ac.Loader(cache, batch_rows, shuffle=shuffle, **more) as loader:  # type: ignore[arg-type]
                return cold(files, partial(epoch, loader))

        ways: dict[str, Way] = {
            "dd": partial(cold, files, partial(dd, files)),
            "dd with read-ahead": partial(cold, files, partial(dd_with_read_ahead, files)),
            **{str(shuffle): partial(load, shuffle) for shuffle in ("window", None, "rows")},
        }
        nbytes = sum(path.stat().st_size for path in files)
        over, key = ["dd with read-ahead", "dd"], "{way} over {over}"
        yield Round("from a cold disk", ways, over, nbytes / 1e9, turns=5, warm=0, key=key)


def cold(files: Sequence[Path], read: Callable[[], object]) -> float:
    """Seconds of a read of files that are dropped from the page cache before."""
    for path in files:
        advise(path, os.POSIX_FADV_DONTNEED)
    return seconds_of(read)


def dd(files: Sequence[Path]) -> None:
    command = f"for file in {' '.join(map(str, files))}; do dd if=$file of=/dev/null bs=1M status=none; done"
    subprocess.run(["sh", "-c", command], check=True)


def dd_with_read_ahead(files: Sequence[Path]) -> None:
    for number, path in enumerate(files):
        for ahead in files[number : number + 2]:
            advise(ahead, os.POSIX_FADV_WILLNEED)
        dd([path])


def tokens(options: Options) -> Iterator[Round | Figures]:
    """What do batches by tokens save, and what do they cost?

    Question 1 (padding): the share of a padded batch that is padding, by `batch_tokens` and by
    `batch_size`.
    Question 2 (rate): tokens a second that a loader delivers so, over the same rows by a `batch_size` of as
    many rows as a batch by tokens has on average. Question 3 (begin): microseconds a row from `iter` to the
    first batch, of the first epoch, which reads all lengths, and of a later one.
    Method: 200,000 documents of int32 tokens, their lengths log-normal (median 150, sigma 0.8, at most
    4,096), 16,384 tokens a batch. The padding is that of one epoch, and depends on the seed alone.
    """
    budget, documents = 16_384, options.of(200_000)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(150), 0.8, documents), 1, 4096).astype(np.int64)
    with scratch(options.folder) as folder, documents_cache(folder, lengths, "16MiB", 50_000, 4096) as cache:
        begins: list[float] = []

        def timed(loader: ac.Loader) -> None:
            seconds, batches = begun(loader)
            begins.append(seconds / documents * 1e6)
            epoch(batches)

        with ac.Loader(cache, batch_tokens=budget, length_of="tokens") as by_tokens:
            timed(by_tokens)
            of_tokens = lengths_of(by_tokens)
            size = documents // len(of_tokens)
            with ac.Loader(cache, size) as by_rows:
                padded = padding(of_tokens), padding(lengths_of(by_rows))
                ratio = (1 - padded[1]) / (1 - padded[0])
                total = sum(int(each.sum()) for each in of_tokens)
                yield Figures(
                    "padding",
                    {
                        "by tokens": f"{padded[0]:.1%}",
                        f"by rows ({size} a batch)": f"{padded[1]:.1%}",
                        "the budget is used to": f"{total / budget / len(of_tokens):.1%}",
                    },
                    {"padded size, over batches by rows": ratio},
                )
                ways = {"by tokens": partial(timed, by_tokens), "by rows": partial(epoch, by_rows)}
                key = "tokens a second, over batches by rows"
                yield Round("batches", ways, ["by rows"], total / 1e6, "M tokens", turns=5, key=key)
        first, *later = begins
        yield Figures(
            "begin, us a row", {"of the first epoch": first, "of a later one": statistics.median(later)}
        )


def lengths_of(batches: Iterable[Mapping[str, Any]]) -> list[NDArray[np.int64]]:
    return [np.diff(batch["tokens"].offsets) for batch in batches]


def padding(lengths: Sequence[NDArray[np.int64]]) -> float:
    """The share of padded batches that is padding."""
    return 1 - sum(int(each.sum()) for each in lengths) / sum(len(each) * int(each.max()) for each in lengths)


def documents_cache(
    folder: Path, lengths: NDArray[np.int64], segment_bytes: str, words: int, chunk: int
) -> ac.Cache:
    """A cache of documents of random tokens below `words`, written so many at a time."""
    rng = np.random.default_rng(1)
    chunks = (lengths[start : start + chunk] for start in range(0, len(lengths), chunk))
    documents = (
        np.split(rng.integers(0, words, int(some.sum()), np.int32), np.cumsum(some)[:-1]) for some in chunks
    )
    parts = ({"tokens": each} for each in documents)
    return written(folder / "cache", {"tokens": ac.Ragged("int32")}, parts, "4GB", segment_bytes)


def packed(options: Options) -> Iterator[Round | Figures]:
    """How many tokens a second do packed sequences have, and how much of them is padding?

    Method: 100 million tokens of int32 in documents with lengths as texts have: log-normal, with a mean of
    some 680 and a median of 330, one in 15 longer than a sequence of 2,048. They are in memory, on a tmpfs.
    Whole epochs of `arrowcache.torch.packed`, each batch with positions, documents, mask and boundaries:
    cut (`split=True`) and by best fit, batches of 16 and of 64 sequences; a copy of the same tokens out of
    the mapped files (memcpy); the plain Loader, whose batches are 48 documents, as jagged tensors. Tokens
    are those of documents. Then best fit by itself, for which lengths are all it needs: tokens per
    processor second, and the share of padding.
    """
    from arrowcache.torch import Loader
    from arrowcache.torch import packed as packed_loader

    total, length = options.of(100_000_000), 2048
    lengths = np.random.default_rng(0).lognormal(5.8, 1.2, total // 500).astype(np.int64) + 1
    lengths = lengths[: int(np.cumsum(lengths).searchsorted(total)) + 1]
    with scratch(SHM) as folder, documents_cache(folder, lengths, "64MiB", 1 << 17, 1500) as cache:
        files = mapped_files(cache)
        out = np.empty(max(file.nbytes for file in files), np.uint8)

        def copy() -> None:
            for file in files:
                out[: file.nbytes] = file

        with ExitStack() as stack:
            loaders: dict[str, Any] = {
                f"{'cut' if split else 'best fit'}, {size} sequences": stack.enter_context(
                    packed_loader(cache, "tokens", length, batch_size=size, split=split)
                )
                for split in (True, False)
                for size in (16, 64)
            }
            plain = stack.enter_context(Loader(cache, 48))
            ways: dict[str, Way] = {"memcpy": copy}
            ways |= {name: partial(epoch, loader) for name, loader in loaders.items()}
            ways["Loader, 48 documents"] = partial(epoch, plain)
            amount = int(lengths.sum()) / 1e6
            yield Round("sequences of 2,048 tokens", ways, ["memcpy"], amount, "M tokens", key="{way}")
            for name, loader in loaders.items():
                masks = [batch["loss_mask"] for batch in loader]
                kept = sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
                yield Figures(f"padding, {name}", {"share": f"{1 - kept:.3%}"})
    for length in (512, 2048, 8192, 32768):
        rates, shares = [], []
        for some in np.array_split(lengths, max(1, int(lengths.sum()) // max(4 << 20, 256 * length))):
            started = time.process_time()
            pieces = best_fit(some, length)
            rates.append(some.sum() / (time.process_time() - started) / 1e6)
            shares.append(1 - some.sum() / (pieces.sequences * length))
        values = {"M tokens a CPU s": statistics.median(rates), "padding": f"{np.mean(shares):.3%}"}
        yield Figures(f"best fit alone, length {length}", values)


def workers(options: Options) -> Iterator[Round | Figures]:
    """What do process workers cost, and what do they give?

    Questions, each against the same in the same run:
    - rate: `Loader(workers=0, 1 and 2)` with an identity transform and without one, over memcpy; the
      consumers read a value per 4 KiB;
    - python: a transform that holds the GIL for 10 ms of pure Python a batch, with two worker processes and
      with two threads, over the default;
    - start: seconds from `iter` to the first batch of a new loader of two workers, and of its later epochs;
    - memory: private memory (RssAnon) of a worker that has read 16,000 segments, above that of an
      interpreter that has imported NumPy and nothing else, and above a worker's over 16 segments.
    Method: an epoch a turn, after two that are not counted (in the first two slots get their memory).
    Workers start as `python -c`, whatever the start method of `multiprocessing`: as slow as its spawn,
    without importing the main module.
    """
    row_bytes, batch_rows = MIDDLE
    batch_bytes, nbytes = row_bytes * batch_rows, options.of(GIB)

    def identity(batch: Any) -> Any:  # here, so that it goes to workers by value
        return batch

    def busy(batch: Any) -> Any:
        end = time.thread_time() + 0.010
        while time.thread_time() < end:
            pass
        return batch

    with filled(options, row_bytes) as cache, ExitStack() as stack:
        ways: dict[str, Way] = {"memcpy": memcpy(cache, batch_bytes, nbytes, read=True)}
        for count, name in enumerate(("workers=0", "1 process", "2 processes")):
            for transform, of in ((None, "no transform"), (identity, "identity")):
                batches = ac.Loader(cache, batch_rows, workers=count, transform=transform)
                ways[f"{name}, {of}"] = partial(epoch, stack.enter_context(batches), read=True)
        key = "{way}, over {over}"
        yield Round("rate", ways, ["memcpy"], nbytes / 1e9, turns=7, warm=2, key=key)
    with filled(options, row_bytes) as cache, ExitStack() as stack:
        kinds: dict[str, dict[str, Any]] = {"workers=0": {}, "2 processes": {"workers": 2}}
        kinds["2 threads"] = {"workers": 2, "worker_type": "thread"}
        ways = {
            name: partial(epoch, stack.enter_context(ac.Loader(cache, batch_rows, transform=busy, **kind)))
            for name, kind in kinds.items()
        }
        steps, key = nbytes / batch_bytes, "python, {way} over default"
        yield Round("python, 10 ms a batch", ways, ["workers=0"], steps, "batches", turns=7, key=key)
    with filled(options, row_bytes) as cache:
        firsts, laters = [], []
        for _ in range(options.turns(7)):
            with ac.Loader(cache, batch_rows, workers=2, transform=identity) as loader:
                for number in range(4):
                    took, rest = begun(loader)
                    (laters if number else firsts).append(took)
                    epoch(rest)
    for name, seconds in (("first batch", firsts), ("of later epochs", laters)):
        values = {"s": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
        yield Figures(f"start, 2 workers: {name}", values)
    code = "import numpy; print(next(line for line in open('/proc/self/status') if 'RssAnon' in line))"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    interpreter = int(bare.stdout.split()[1]) / 1e3
    yield Figures("memory of an interpreter with NumPy", {"MB": interpreter})
    for segment_rows in (4000, 4):
        with (
            scratch(SHM) as folder,
            ac.Cache.open(labelled_rows(folder, segment_rows, options.of(ROWS))) as cache,
            ac.Loader(cache, 64, workers=2) as loader,
        ):
            for _ in range(3):
                epoch(loader)
            above = max(status_bytes("RssAnon", pid) for pid in children()) / 1e6 - interpreter
        yield Figures(f"a worker over {options.of(ROWS) // segment_rows} segments, above it", {"MB": above})


# -- How well a shuffle mixes --------------------------------------------------------------------------


def shuffle(options: Options) -> Iterator[Figures]:
    """How well does each shuffle mix?

    Question 1 (spread): how far do the rows of one segment lie from each other in an epoch? The mean
    distance of two of them, over that of two rows of a uniform shuffle (a third of the epoch): 1 is
    perfect, 1 / segments is no shuffle at all. Question 2 (company): how many segments does a batch have
    rows of, over what a uniform shuffle gives?
    Method: computed from the orders themselves, as a loader asks them: 64 segments of 1,024 rows, batches
    of 64; the mean over all segments, batches and 5 epochs. No data is read, so this is exact and depends
    on nothing but the seed.
    """
    kinds: list[tuple[str, str | None, float]] = [("rows", "rows", 1.0)]
    kinds += [(f"window, {share:.3g} of the cache", "window", share) for share in (0.5, 0.25, 0.125, 1 / 16)]
    kinds += [("blocks", "blocks", 1.0), ("None", None, 1.0)]
    uniform = company(segments_by_position("rows", 1.0, 0))
    for name, kind, window in kinds:
        found = [segments_by_position(kind, window, number) for number in range(options.turns(5))]
        far, mixed = (float(np.mean([of(each) for each in found])) for of in (distance, company))
        values = {"spread": far, "segments a batch": mixed, "over uniform": mixed / uniform}
        yield Figures(name, values)


SEGMENTS, SEGMENT_ROWS, BATCH = 64, 1024, 64


def segments_by_position(shuffle: str | None, window: float, epoch: int) -> NDArray[np.int64]:
    """The segment of the row at each position of an epoch."""
    plan = Plan(
        epoch=epoch,
        seed=0,
        shuffle=Shuffle(shuffle),
        epoch_rows=None,
        window_rows=max(1, round(window * SEGMENTS * SEGMENT_ROWS)),
        block_rows=BATCH,
        seqs=np.arange(SEGMENTS),
        rows=np.full(SEGMENTS, SEGMENT_ROWS),
    )
    order = EvenOrder(plan, BATCH, Shard(), drop_last=True)
    return order.batches(0, order.steps) // SEGMENT_ROWS


def distance(segments: NDArray[np.int64]) -> float:
    """Mean distance of two rows of one segment, over a third of the epoch."""
    places = np.argsort(segments, kind="stable").reshape(SEGMENTS, SEGMENT_ROWS)  # ascending in each segment
    weights = 2 * np.arange(SEGMENT_ROWS) - (
        SEGMENT_ROWS - 1
    )  # sum over pairs of a sorted list's differences
    distances = (places * weights).sum(axis=1) / (SEGMENT_ROWS * (SEGMENT_ROWS - 1) / 2)
    return float(distances.mean() / (len(segments) / 3))


def company(segments: NDArray[np.int64]) -> float:
    """Mean number of segments that a batch has rows of."""
    return float(np.mean([len(np.unique(batch)) for batch in segments.reshape(-1, BATCH)]))


CASES: dict[str, Benchmark] = {
    each.__name__: each
    for each in (
        gather, loader, segments, threads, window, shuffle, dataloader, workers, packed, tokens, pace,
        latencies.views, latencies.epochs, latencies.memory, gil.gil, latencies.startup,
        publishing.ingest, publishing.durable, publishing.engines,
    )
}  # fmt: skip
