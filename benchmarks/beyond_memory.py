"""What do epochs over a cache that is larger than memory reach of what the disk gives?

Question: each shuffle of `arrowcache.torch.Loader`, over a cache of 2.5 times the memory that a control
group allows, with rows of 4 KiB, 64 KiB, 1 MiB and ragged ones of about 64 KiB: cold; with about half of
the files in memory; and beside samplers that write 300 MB/s into the same cache. Beside it np.memmap by
batch, HF datasets, LitData and MosaicML Streaming in the same group. All over the disk's own rates for the
same files: such rows at random, 64 at a time, past the page cache; and in order, asked for in pieces of 128
KiB, 8 MiB ahead.
Method: a process a measurement, in one group of 1.2 GiB, which takes batches of 4 MiB for 10 s, however few
they are; before each the files are dropped from the page cache. The disk's rates are taken before and after
those of each row size, and are the means. Half resident: of the cache so much as is twice the page cache
that the group has room for, read once before. Samplers: a writer in the same group, in its own process,
held to 300 MB/s; what it keeps is over what it writes alone; its segments are unlinked afterwards. GB/s are
of batches as they are delivered; "read" is bytes read from the disk for one delivered, "gap s" the longest
wait.
Peers (`--peers`) run in what `make peers` made of environments; one that is not there is left out, with a
line.
Run: `python -m benchmarks beyond_memory`, as root; `--help` has what can be made smaller. It takes 12 GB of
disk and half an hour, with peers an hour.
Last result: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from arrowcache.units import format_bytes, parse_bytes
from benchmarks.bounded import START, ControlGroup
from benchmarks.fresh import fresh
from benchmarks.harness import filled_cache, machine, remember
from benchmarks.peers.registry import PEERS, Peer
from benchmarks.peers.workload import Workload
from benchmarks.usage import drop

ROOT = Path(__file__).parents[1]
ROWS, SHUFFLES = "4KiB,64KiB,1MiB,ragged", "rows,window,blocks,None"
SIZE, GROUP, SECONDS = "3GiB", "1.2GiB", 10.0
STATES = "cold,half,samplers"
RAGGED, RAGGED_BYTES = "ragged", 64 << 10
BATCH_BYTES = 4 << 20
SAMPLERS_RATE = 300e6
BESIDE = ("memmap_batched", "hf_datasets", "litdata", "streaming")
_MORE_SECONDS = 120.0  # than it is to measure, for a process to import, open and end

Figures = dict[str, Any]


class Bench:
    """One data set, and the group in which processes measure it."""

    def __init__(self, group: ControlGroup, group_bytes: int, folder: Path, seconds: float) -> None:
        self._group, self._group_bytes, self._folder, self._seconds = group, group_bytes, folder, seconds

    @contextmanager
    def opened(self, python: str, role: str, **request: Any) -> Iterator[subprocess.Popen[str]]:
        """A process in the group that is ready to measure."""
        text = json.dumps({
            "role": role, "folder": str(self._folder), "seconds": self._seconds,
            "group_bytes": self._group_bytes, **request,
        })  # fmt: skip
        pipe = subprocess.PIPE
        with (
            tempfile.TemporaryFile("w+") as said,
            subprocess.Popen(
                [python, "-c", START, self._group.entrance, text],
                cwd=ROOT, stdin=pipe, stdout=pipe, stderr=said, text=True,
            ) as process,
        ):  # fmt: skip
            try:
                assert process.stdout is not None
                while (line := process.stdout.readline()) != "READY\n":
                    if not line:
                        said.seek(0)
                        words = said.read().strip().splitlines() or [f"exit {process.wait()}"]
                        raise RuntimeError(words[-1])
                yield process
            finally:
                process.kill()

    def result(self, process: subprocess.Popen[str], begun: bool = False) -> Figures:
        """Have a process measure, unless it does; what it found, or {"failed": why}."""
        if not begun:
            begin(process)
        try:
            output, _ = process.communicate(timeout=self._seconds + _MORE_SECONDS)
        except subprocess.TimeoutExpired:
            return {"failed": f"no batch in {self._seconds + _MORE_SECONDS:.0f} s"}
        lines = output.strip().splitlines()
        return json.loads(lines[-1]) if lines and not process.returncode else {"failed": "it was killed"}

    def measure(self, role: str, *, python: str = sys.executable, **request: Any) -> Figures:
        """Measure one thing alone, of cold files."""
        try:
            drop(self._folder)
            with self.opened(python, role, **request) as process:
                return self.result(process)
        except RuntimeError as error:
            return {"failed": str(error)}

    def beside_samplers(self, **request: Any) -> tuple[Figures, Figures]:
        """What a loader and a sampler reach side by side; what the sampler published is unlinked again."""
        try:
            drop(self._folder)
            with ExitStack() as opened:
                sampler = opened.enter_context(self.opened(sys.executable, "sampler", **request))
                loader = opened.enter_context(self.opened(sys.executable, "cache", **request))
                begin(sampler)
                begin(loader)
                return self.result(loader, begun=True), self.result(sampler, begun=True)
        except RuntimeError as error:
            return {"failed": str(error)}, {"failed": str(error)}
        finally:
            self.forget_from(request["stop"])

    def forget_from(self, seq: int) -> None:
        """Unlink the segments from a number on."""
        for path in (self._folder / "segments").iterdir():
            if int(path.name.partition("-")[0]) >= seq:
                path.unlink()


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def make_cache(folder: Path, rows: str, size_bytes: int, seconds: float) -> int:
    """A cache of incompressible rows, with room for what samplers add; returns how many segments it has.

    Ragged rows have 32 to 96 KiB.
    """
    if rows != RAGGED:
        cache = filled_cache(folder, parse_bytes(rows, "rows"), size_bytes)
    else:
        schema = ac.Schema({"x": ac.Ragged("float32"), "y": ac.Tensor("int64")})
        cache = ac.Cache.create(folder, schema, 2 * size_bytes + (1 << 30))
        rng = np.random.default_rng(0)
        with cache.writer() as writer:
            for number in range(size_bytes // RAGGED_BYTES):
                length = int(rng.integers(RAGGED_BYTES // 8, 3 * RAGGED_BYTES // 8))
                writer.append(x=rng.random(length, np.float32), y=number)
    with cache:
        cache.resize(cache.stats().capacity_bytes + 2 * int(seconds * SAMPLERS_RATE))
        return cache.stats().next_seq


def row_bytes_of(rows: str) -> int:
    return RAGGED_BYTES if rows == RAGGED else parse_bytes(rows, "rows")


def rates_of(bench: Bench, row_bytes: int) -> tuple[float, float]:
    """The disk's rates now: of such rows at random, and in order.

    Raises: RuntimeError: one cannot be measured.
    """
    found = []
    for role in ("random", "sequential"):
        figures = bench.measure(role, row_bytes=row_bytes)
        if "failed" in figures:
            raise RuntimeError(f"the disk's {role} rate could not be measured: {figures['failed']}")
        if not figures.get("is_direct", True):
            print("no O_DIRECT here: rows are dropped from the page cache before each read")
        found.append(figures["rate"])
    return found[0], found[1]


def measured(bench: Bench, rows: str, segments: int, options: argparse.Namespace) -> dict[str, Figures]:
    """All cases of one cache, by name."""
    row_bytes = row_bytes_of(rows)
    request: Figures = {"row_bytes": row_bytes, "batch_rows": batch_rows_of(row_bytes)}
    found: dict[str, Figures] = {}

    def told(name: str, figures: Figures) -> None:
        found[name] = figures
        tell(name, figures)

    for shuffle in options.shuffles:
        name = str(shuffle)
        if "cold" in options.states:
            told(name, bench.measure("cache", shuffle=shuffle, **request))
        if "half" in options.states:
            told(f"{name}, half resident", bench.measure("cache", shuffle=shuffle, is_half=True, **request))
    if "samplers" in options.states:
        more = {"stop": segments, "wanted": SAMPLERS_RATE, **request}
        alone = bench.measure("sampler", **more)
        bench.forget_from(segments)
        told("samplers alone", alone)
        for shuffle in options.shuffles:
            loader, sampler = bench.beside_samplers(shuffle=shuffle, **more)
            if "rate" in alone and "rate" in sampler:
                loader["samplers_kept"] = sampler["rate"] / alone["rate"]
            told(f"{shuffle}, beside samplers", loader)
    return found


def tell(name: str, figures: Figures) -> None:
    print(f"  {name}: {figures.get('failed') or format(figures['rate'] / 1e9, '.3f') + ' GB/s'}", flush=True)


def batch_rows_of(row_bytes: int) -> int:
    return max(1, BATCH_BYTES // row_bytes)


def interpreter_of(peer: Peer) -> str | None:
    """Of the peer's environment, or this one if it has the peer; None: it is not installed."""
    python = ROOT / ".envs" / peer.environment / "bin" / "python"
    if python.exists():
        return str(python)
    try:
        version(peer.distribution)
    except PackageNotFoundError:
        return None
    return sys.executable


def peers_measured(
    group: ControlGroup, rows: str, options: argparse.Namespace, folder: Path
) -> dict[str, Figures]:
    """What peers reach with rows of a fixed size, each with its data set on the disk alone."""
    row_bytes = row_bytes_of(rows)
    workload = Workload(row_bytes, options.size_bytes // row_bytes, batch_rows_of(row_bytes))
    found: dict[str, Figures] = {}
    for module in BESIDE:
        peer = next(peer for peer in PEERS if peer.module == module)
        python = interpreter_of(peer)
        if python is None:
            print(f"  {peer.name}: left out: .envs/{peer.environment} is not there; `make peers` makes it")
            continue
        with tempfile.TemporaryDirectory(dir=folder) as name:
            try:
                fresh("benchmarks.peers.case:write", peer.name, name, workload.to_json(), python=python)
                bench = Bench(group, options.group_bytes, Path(name), options.seconds)
                figures = bench.measure("peer", python=python, peer=peer.name, workload=workload.to_json())
            except subprocess.CalledProcessError as error:
                figures = {"failed": f"could not be written: {error}"}
        found[peer.name] = figures
        tell(peer.name, figures)
    return found


def ratios_of(found: dict[str, Figures], disk: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """Over the disk's random rate and that in order, of each case that has a rate."""
    return {
        name: (figures["rate"] / disk[0], figures["rate"] / disk[1])
        for name, figures in found.items()
        if "rate" in figures
    }


def table(found: dict[str, Figures], disk: tuple[float, float]) -> list[str]:
    """A line a case: GB/s, over both rates of the disk, over cold, and what else is known."""
    names = [("", 36), ("GB/s", 7), ("/random", 8), ("/in order", 9), ("/cold", 6), ("read", 6), ("gap s", 6)]
    lines = [" ".join(f"{name:>{width}}" for name, width in [*names, ("kept", 5)])]
    for name, figures in found.items():
        if "failed" in figures:
            lines.append(f"{name:>36} {figures['failed']}")
            continue
        rate, cold = figures["rate"], found.get(name.partition(",")[0], {}).get("rate")
        values = [
            (rate / 1e9, 7, 3), (rate / disk[0], 8, 2), (rate / disk[1], 9, 2),
            (rate / cold if cold and "," in name else None, 6, 2), (figures.get("read_for_one"), 6, 2),
            (figures.get("worst_gap"), 6, 2), (figures.get("samplers_kept"), 5, 2),
        ]  # fmt: skip
        cells = (
            " " * width if value is None else f"{value:{width}.{digits}f}" for value, width, digits in values
        )
        lines.append(" ".join([f"{name:>36}", *cells, figures.get("bottleneck", "")]).rstrip())
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def size(text: str) -> int:
        return parse_bytes(text, "a size")

    def rows(text: str) -> list[str]:
        return [each for each in text.split(",") if row_bytes_of(each)]

    def some(known: str, text: str) -> list[str | None]:
        if unknown := {*text.split(",")} - {*known.split(",")}:
            raise argparse.ArgumentTypeError(f"unknown: {sorted(unknown)}: use some of {known}")
        return [None if each == "None" else each for each in text.split(",")]

    parser = argparse.ArgumentParser(description="Measure epochs over a cache that is larger than memory.")
    add = parser.add_argument
    add("--rows", type=rows, default=ROWS, help=f"bytes of a row, or {RAGGED}; separated by commas: {ROWS}")
    add("--shuffles", type=partial(some, SHUFFLES), default=SHUFFLES, help=f"some of {SHUFFLES}")
    add("--states", type=partial(some, STATES), default=STATES, help=f"some of {STATES}")
    add("--size", dest="size_bytes", type=size, default=SIZE, help=f"of the cache: {SIZE}")
    add("--group", dest="group_bytes", type=size, default=GROUP, help=f"memory of the control group: {GROUP}")
    add("--seconds", type=float, default=SECONDS, help=f"of each measurement: {SECONDS:g}")
    add("--peers", action="store_true", help="measure peers, too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        group = ControlGroup(options.group_bytes)
    except OSError as error:
        raise SystemExit(
            f"beyond_memory needs a control group of memory, and none can be made here: {error}"
        ) from None
    print(machine())
    print(
        f"caches of {format_bytes(options.size_bytes)}, a group of {format_bytes(options.group_bytes)}, "
        f"{options.seconds:g} s each"
    )
    remembered = {}
    with group, tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        for rows in options.rows:
            print(f"rows: {rows}", flush=True)
            folder = Path(name) / "cache"
            segments = make_cache(folder, rows, options.size_bytes, options.seconds)
            os.sync()
            bench = Bench(group, options.group_bytes, folder, options.seconds)
            before = rates_of(bench, row_bytes_of(rows))
            found = measured(bench, rows, segments, options)
            after = rates_of(bench, row_bytes_of(rows))
            subprocess.run(["rm", "-r", folder], check=True)
            if options.peers and rows != RAGGED:
                found |= peers_measured(group, rows, options, Path(name))
            disk = statistics.mean((before[0], after[0])), statistics.mean((before[1], after[1]))
            for kind, one, other in zip(("random", "in order"), before, after, strict=True):
                print(f"the disk, {kind}: {one / 1e9:.3f} GB/s before, {other / 1e9:.3f} after")
            print("\n".join(table(found, disk)), flush=True)
            for case, (random, in_order) in ratios_of(found, disk).items():
                # Others than "rows" and peers are set over the disk's rate in order.
                is_random = not case.startswith(("window", "blocks", "None", "samplers"))
                remembered[f"{rows}, {case}"] = random if is_random else in_order
    if (options.size_bytes, options.group_bytes) == (parse([]).size_bytes, parse([]).group_bytes):
        remember("beyond_memory", remembered)


if __name__ == "__main__":
    main()
