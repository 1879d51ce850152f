"""The harness of all benchmarks: caches to measure on, turns, ratios, tables, and what moved since the last
run.

A benchmark is a generator: it makes the data, and yields a `Round` of ways that take turns, or `Figures`
that it found itself. `run` times the rounds, prints each as it comes, sends its figures back, and compares
the ratios with the history. A figure is the median of the turns, in which the machine's noise hits all ways
alike; most are also ratios to a copy of the same bytes (memcpy) in the same turns.

The history (history.jsonl) has the ratios of each run. A ratio moved if its median lies outside the band of
the last one: from the least to the largest of the medians recorded before (the last ten) and of the inner
half of the last one's turns, and at least a tenth to either side, which this kind of machine varies by
within one run; a third for one that has no turns, which it varies by from run to run. It fails nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from arrowcache.reading.slots import page_aligned
from arrowcache.storage.layout import segment_name
from benchmarks.usage import cpu_seconds

GIB = 1 << 30
MIDDLE = 65536, 64  # bytes of a row, rows of a batch
SHM = "/dev/shm"
MANY_SEGMENTS = 16_000
MANY_ROWS = 100  # of each
HISTORY = Path(__file__).with_name("history.jsonl")
_EARLIER = 10
_MIN_BAND, _MIN_BAND_ALONE = 0.1, 1 / 3

#: A ratio, or that of each turn.
Ratio = float | Sequence[float]
Way = Callable[[], float | None]


def hardware() -> str:
    """The machine, whatever runs on it."""
    found = re.search(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = found[1] if found else "unknown CPU"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {memory:.0f} GiB"


def machine() -> str:
    """One line that names where a figure was measured."""
    versions = {"arrowcache": ac.__version__} | {name: version(name) for name in ("numpy", "pyarrow")}
    libraries = " ".join(f"{name} {number}" for name, number in versions.items())
    return f"{hardware()}, Linux {platform.release()}, Python {platform.python_version()}, {libraries}"


def written(
    folder: Path,
    schema: Mapping[str, Any] | ac.Schema,
    parts: Iterable[Mapping[str, Any]],
    capacity: int | str,
    segment_bytes: int | str = "64MiB",
    segment_rows: int | None = None,
) -> ac.Cache:
    """A new cache of some rows, which come in parts."""
    cache = ac.Cache.create(folder, schema, capacity, segment_bytes, segment_rows)
    with cache.writer() as writer:
        for part in parts:
            writer.extend(part)
    return cache


def filled_cache(
    folder: Path,
    row_bytes: int,
    total_bytes: int,
    segment_bytes: str = "64MiB",
    segment_rows: int | None = None,
) -> ac.Cache:
    """A cache of incompressible rows: `x`, row_bytes of float32, and a label `y`."""
    schema = ac.Schema({"x": ac.Tensor("float32", (row_bytes // 4,)), "y": ac.Tensor("int64")})
    rng, chunk = np.random.default_rng(0), max(1, (16 << 20) // row_bytes)
    parts = (
        {"x": rng.random((chunk, row_bytes // 4), dtype=np.float32), "y": np.arange(start, start + chunk)}
        for start in range(0, total_bytes // row_bytes, chunk)
    )
    return written(folder, schema, parts, 2 * total_bytes + (1 << 30), segment_bytes, segment_rows)


def many_segments(path: Path) -> bytes:
    """A cache whose one published segment stands there 16,000 times. Returns: the bytes of its file."""
    schema = ac.Schema({"x": ac.Tensor("float32", (16,))})
    with ac.Cache.create(path, schema, capacity="10GB", segment_bytes="16KiB") as cache:
        with cache.writer() as writer:
            writer.extend(x=np.zeros((MANY_ROWS, 16), np.float32))
        data = next((path / "segments").iterdir()).read_bytes()
        for seq in range(1, MANY_SEGMENTS):
            (path / "segments" / segment_name(seq, MANY_ROWS, "")).write_bytes(data)
    return data


def mapped_files(cache: ac.Cache) -> list[np.ndarray[Any, Any]]:
    """The segments' files as bytes, mapped: where a memcpy of the same bytes reads."""
    return [np.memmap(path, np.uint8, "r") for path in sorted((cache.path / "segments").iterdir())]


def random_blocks(
    files: list[np.ndarray[Any, Any]], block_bytes: int, total_bytes: int
) -> list[np.ndarray[Any, Any]]:
    """Contiguous blocks from random places of the full segments, `total_bytes` together."""
    rng = np.random.default_rng(2)
    large = [file for file in files if file.nbytes > 2 * block_bytes]
    blocks = []
    for _ in range(max(1, total_bytes // block_bytes)):
        file = large[int(rng.integers(len(large)))]
        start = int(rng.integers((file.nbytes - block_bytes) // 64)) * 64
        blocks.append(file[start : start + block_bytes])
    return blocks


def memcpy(cache: ac.Cache, batch_bytes: int, nbytes: int, *, read: bool = False) -> Way:
    blocks, slot = random_blocks(mapped_files(cache), batch_bytes, nbytes), page_aligned(batch_bytes)

    def copy() -> None:
        for block in blocks:
            np.copyto(slot, block)
            if read:
                slot.view(np.float32)[::1024].sum()

    return copy


@contextmanager
def scratch(folder: str | Path | None = None) -> Iterator[Path]:
    """A new folder in `folder`, or where BENCH_DIR or TMPDIR says, which goes at the end."""
    with tempfile.TemporaryDirectory(dir=folder or os.environ.get("BENCH_DIR")) as name:
        yield Path(name)


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def begun(batches: Iterable[Any]) -> tuple[float, Iterator[Any]]:
    """Seconds from `iter` to the first batch, which is dropped, and the iterator over the others."""
    started = time.perf_counter()
    iterator = iter(batches)
    next(iterator)
    return time.perf_counter() - started, iterator


@dataclass(slots=True)
class Turns:
    """The times of one way, a value a turn."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


def in_turns(ways: Mapping[str, Way], repeats: int = 9, warm: int = 0) -> dict[str, Turns]:
    """Run each way once a turn. The first `warm` turns are not counted."""
    found = {name: Turns() for name in ways}
    for turn in range(warm + repeats):
        for name, way in ways.items():
            started, used = time.perf_counter(), cpu_seconds()
            own = way()
            seconds, used = time.perf_counter() - started, cpu_seconds() - used
            if turn >= warm:
                found[name].seconds.append(seconds if own is None else own)
                found[name].cpu_seconds.append(used)
    return found


def interleaved(ways: Mapping[str, Way], repeats: int = 9) -> dict[str, float]:
    """Median seconds of each way; they take turns."""
    return {name: statistics.median(turns.seconds) for name, turns in in_turns(ways, repeats).items()}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a run.

    Args:
        is_small: caches and turns are few: the figures mean nothing, and the history does not get them.
        folder: of caches; None: see `scratch`.
    """

    is_small: bool = False
    folder: Path | None = None

    def of(self, count: int) -> int:
        """The count, or an eighth of it."""
        return max(1, count // 8) if self.is_small else count

    def turns(self, count: int) -> int:
        return min(2, count) if self.is_small else count


@dataclass(frozen=True, slots=True)
class Round:
    """Ways to do the same, which take turns.

    Args:
        title: names the input of all ways.
        ways: by name; each runs once a turn. A way that returns a number says its seconds itself.
        over: the ways whose rates are the units; the history gets the ratios to the first.
        amount: of the work of a turn, in `unit`; of each way, if they differ.
        turns: that are counted, after `warm` others.
        key: of a ratio in the history.
    """

    title: str
    ways: Mapping[str, Way]
    over: Sequence[str]
    amount: float | Mapping[str, float]
    unit: str = "GB"
    turns: int = 9
    warm: int = 1
    key: str = "{title}: {way} over {over}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that a benchmark found itself; `ratios` go to the history."""

    title: str
    values: Mapping[str, float | str] = field(default_factory=dict)
    ratios: Mapping[str, Ratio] = field(default_factory=dict)


@contextmanager
def filled(options: Options, row_bytes: int, nbytes: int = GIB, **more: Any) -> Iterator[ac.Cache]:
    """A cache of so many bytes, or less if the run is small."""
    with (
        scratch(options.folder) as folder,
        filled_cache(folder / "cache", row_bytes, options.of(nbytes), **more) as cache,
    ):
        yield cache


def named(row_bytes: int, batch_rows: int) -> str:
    return f"{row_bytes} bytes, {batch_rows} rows"


def epoch(loader: Iterable[Any], *, read: bool = False) -> None:
    """Take an epoch's batches and drop them. read: a value per 4 KiB, too."""
    for batch in loader:
        if read:
            batch["x"].reshape(-1)[::1024].sum()


#: The rounds and figures of a benchmark; it is sent the figures of each, as JSON has them.
Cases = Generator[Any, Any, None]
Benchmark = Callable[[Options], Cases]


def run(name: str, benchmark: Benchmark, options: Options) -> dict[str, Any]:
    """Measure and print; the history gets the ratios. Returns: all figures, as JSON has them."""
    print(machine(), flush=True)
    ratios: dict[str, Ratio] = {}
    told: list[dict[str, Any]] = []
    cases, entry = benchmark(options), None
    while True:
        try:
            each = cases.send(entry)
        except StopIteration:
            break
        entry, more = timed(each, options) if isinstance(each, Round) else shown(each)
        told.append(entry)
        ratios |= more
    if ratios and not options.is_small:
        remember(name, ratios)
    return {"benchmark": name, "machine": machine(), "figures": told}


def timed(given: Round, options: Options) -> tuple[dict[str, Any], dict[str, Ratio]]:
    """Time a round and print its table. Returns: its figures, and its ratios by their keys."""
    found = in_turns(given.ways, options.turns(given.turns), given.warm)
    amount = given.amount
    amounts = amount if isinstance(amount, Mapping) else dict.fromkeys(found, amount)
    all_rates = {name: [amounts[name] / each for each in turns.seconds] for name, turns in found.items()}
    units = "".join(f" {'over ' + name:>25}" for name in given.over)
    print(f"{given.title:40} {given.unit + '/s':>10} {'in brackets: all turns':>24}{units} {'CPU s':>8}")
    ways: dict[str, Any] = {}
    ratios: dict[str, Ratio] = {}
    for name, turns in found.items():
        rates = all_rates[name]
        over = {
            unit: [own / one for one, own in zip(all_rates[unit], rates, strict=True)] for unit in given.over
        }
        cpu = statistics.median(turns.cpu_seconds) / amounts[name]
        units = "".join(f" {spread(each):>25}" for each in over.values())
        print(f"  {name:38} {spread(rates):>35}{units} {short(cpu):>8}", flush=True)
        ways[name] = {"rates": rates, "over": over, "cpu_seconds": cpu}
        if name != (unit := given.over[0]):
            ratios[given.key.format(title=given.title, way=name, over=unit)] = over[unit]
    return {"title": given.title, "unit": given.unit, "ways": ways}, ratios


def shown(given: Figures) -> tuple[dict[str, Any], Mapping[str, Ratio]]:
    """Print figures in a line. Returns: them, and their ratios."""
    values = (
        f"{name} {value if isinstance(value, str) else short(value)}" for name, value in given.values.items()
    )
    print(f"{given.title}: {', '.join(values)}", flush=True)
    return {"title": given.title, "values": {**given.values}}, given.ratios


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most."""
    return f"{short(statistics.median(values))} ({short(min(values))} to {short(max(values))})"


def short(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def remember(benchmark: str, ratios: Mapping[str, Ratio], path: Path = HISTORY) -> None:
    """Print what moved since the last time, and record the ratios of this one.

    Args:
        benchmark: its module's name.
        ratios: by case; both rates of a ratio are from the same run.
    """
    new = {case: turns(ratio) for case, ratio in ratios.items()}
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [entry for entry in map(json.loads, lines) if entry["benchmark"] == benchmark]
    known = [entry for entry in entries if entry["hardware"] == hardware()]
    for line in moves(known, new):
        print(line)
    entry = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "hardware": hardware(),
        "machine": machine(),
        "ratios": {case: [round(value, 4) for value in values] for case, values in new.items()},
    }
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def moves(known: Sequence[dict[str, Any]], new: Mapping[str, Sequence[float]]) -> list[str]:
    """Describe new ratios, a line each. `known` are the entries before, oldest first."""
    if not known:
        return [f"recorded {len(new)} ratios: the first of this benchmark on this machine"]
    last, said = known[-1], []
    for case, values in new.items():
        earlier = [entry["ratios"][case] for entry in known[-_EARLIER:] if case in entry["ratios"]]
        if not earlier:
            said.append(f"  new: {case}: {statistics.median(values):.3g}")
            continue
        low, high = band(earlier)
        was, now = statistics.median(earlier[-1]), statistics.median(values)
        if not low <= now <= high:
            way = "up" if now > high else "DOWN"
            said.append(f"  {way}: {case}: {was:.3g} -> {now:.3g}, where noise is {low:.3g} to {high:.3g}")
    said += [f"  gone: {case}" for case in last["ratios"] if case not in new]
    moved = "nothing moved beyond noise" if not said else "moved beyond noise, new or gone:"
    return [f"{len(new)} ratios against those of {last['date']}: {moved}", *said]


def band(earlier: Sequence[Sequence[float]]) -> tuple[float, float]:
    """From where to where a ratio varies, of the turns of each time it was recorded, oldest first."""
    last = sorted(earlier[-1])
    quarter = len(last) // 4
    middle = statistics.median(last)
    values = [statistics.median(values) for values in earlier] + last[quarter : len(last) - quarter]
    margin = (_MIN_BAND if len(last) > 1 else _MIN_BAND_ALONE) * abs(middle)
    return min(*values, middle - margin), max(*values, middle + margin)


def turns(ratio: Ratio) -> list[float]:
    return list(ratio) if isinstance(ratio, Sequence) else [ratio]
