"""How many tokens a second do packed sequences have, and how much of them is padding?

Method: 100 million tokens of int32 in documents with lengths as texts have: log-normal, with a mean of some
680 and a median of 330, one in 15 longer than a sequence of 2,048. They are in memory, on a tmpfs. Whole
epochs of `arrowcache.torch.packed`, each batch with positions, documents, mask and boundaries: cut
(`split=True`) and by best fit, batches of 16 and of 64 sequences. Beside it, in turns: a copy of the same
tokens out of the mapped files (memcpy), and the plain Loader, whose batches are 48 documents, as jagged
tensors. Tokens are those of documents, over the wall time of an epoch after a first one, and over the
processor seconds of all threads: the median, the least and the most of the turns. A second table has best fit
by itself, for which lengths are all it needs: tokens per processor second, and the share of padding.
Run: `python -m benchmarks.packed`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

import arrowcache as ac
from arrowcache.reading.packing import best_fit
from arrowcache.torch import Loader, packed
from benchmarks.history import remember
from benchmarks.measure import cpu_seconds, machine, mapped_files

TOKENS, LENGTH, REPEATS = 100_000_000, 2048, 9
SCRATCH = "/dev/shm"
MILLION = 1e6


def lengths(tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths of documents, as many as have so many tokens."""
    drawn = np.random.default_rng(seed).lognormal(5.8, 1.2, tokens // 500).astype(np.int64) + 1
    return drawn[: int(np.cumsum(drawn).searchsorted(tokens)) + 1]


def documents(folder: Path) -> tuple[ac.Cache, int]:
    """A cache of documents of random tokens, and the number of these."""
    cache = ac.Cache.create(folder, ac.Schema({"tokens": ac.Ragged("int32")}), "2GB", "64MiB")
    rng, counts = np.random.default_rng(1), lengths(TOKENS)
    with cache.writer() as writer:
        for some in np.array_split(counts, 100):
            values = rng.integers(0, 1 << 17, int(some.sum()), np.int32)
            writer.extend(tokens=np.split(values, np.cumsum(some)[:-1]))
    return cache, int(counts.sum())


def epoch(loader: Loader) -> Callable[[], None]:
    def run() -> None:
        for _ in loader:
            pass

    return run


def padding(loader: Loader) -> float:
    """The share of padding in an epoch."""
    kept = total = 0
    for batch in loader:
        kept += int(batch["loss_mask"].sum())
        total += batch["loss_mask"].numel()
    return 1 - kept / total


def packing_rate(length: int) -> tuple[float, float]:
    """(tokens a second that best fit packs where lengths are all it has, share of padding)."""
    counts, most, rates, shares = lengths(TOKENS), 4 << 20, [], []
    for some in np.array_split(counts, int(counts.sum()) // max(most, 256 * length)):
        started = time.process_time()
        pieces = best_fit(some, length)
        rates.append(some.sum() / (time.process_time() - started))
        shares.append(1 - some.sum() / (pieces.sequences * length))
    return float(np.median(rates)), float(np.mean(shares))


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        cache, tokens = documents(Path(folder) / "cache")
        files = mapped_files(cache)
        out = np.empty(max(file.nbytes for file in files), np.uint8)

        def memcpy() -> None:
            for file in files:
                out[: file.nbytes] = file

        loaders: dict[str, Loader] = {
            f"{'cut' if split else 'best fit'}, {size} sequences": packed(
                cache, "tokens", LENGTH, batch_size=size, split=split
            )
            for split in (True, False)
            for size in (16, 64)
        }
        loaders["Loader, 48 documents"] = Loader(cache, 48)
        cases = {"memcpy": memcpy} | {name: epoch(loader) for name, loader in loaders.items()}
        for run in cases.values():
            run()
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for _ in range(REPEATS):
            for name, run in cases.items():
                started, used = time.perf_counter(), cpu_seconds()
                run()
                rates[name].append(
                    (
                        tokens / MILLION / (time.perf_counter() - started),
                        tokens / MILLION / (cpu_seconds() - used),
                    )
                )
        print(f"{'case':>24} {'M tokens/s':>24} {'over memcpy':>12} {'M a CPU s':>10} {'padding':>9}")
        ratios = {}
        for name, turns in rates.items():
            walls, busy = zip(*turns, strict=True)
            share = padding(loaders[name]) if "sequences" in name else 0.0
            ratios[name] = [wall / copied for wall, (copied, _) in zip(walls, rates["memcpy"], strict=True)]
            rate = f"{median(walls):.0f} ({min(walls):.0f} to {max(walls):.0f})"
            print(f"{name:>24} {rate:>24} {median(ratios[name]):12.3f} {median(busy):10.0f} {share:9.3%}")
        for loader in loaders.values():
            loader.close()
        cache.close()
    print(f"{'best fit alone, length':>24} {'M a CPU s':>10} {'padding':>9}")
    for length in (512, 2048, 8192, 32768):
        rate, share = packing_rate(length)
        print(f"{length:>24} {rate / MILLION:10.0f} {share:9.3%}")
    remember("packed", {name: ratio for name, ratio in ratios.items() if name != "memcpy"})


if __name__ == "__main__":
    main()
