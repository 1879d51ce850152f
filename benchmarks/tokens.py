"""What do batches by tokens save, and what do they cost?

Question 1 (padding): the share of a padded batch that is padding, by `batch_tokens` and by `batch_size`.
Question 2 (rate): tokens a second that a loader delivers so, over the same rows by a `batch_size` of as many
rows as a batch by tokens has on average. Question 3 (begin): microseconds a row from `iter` to the first
batch, of the first epoch, which reads all lengths, and of a later one.
Method: 200,000 documents of int32 tokens, their lengths log-normal (median 150, sigma 0.8, at most 4,096),
16,384 tokens a batch, page cache warm; 5 epochs of each kind, in turns, with a consumer that does nothing.
The padding is that of one epoch, and depends on the seed alone.
Run: `python -m benchmarks.tokens`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import machine

DOCUMENTS, MEDIAN, SIGMA, MOST = 200_000, 150, 0.8, 4096
BUDGET, TURNS, CHUNK = 16_384, 5, 4096


def filled(folder: Path) -> ac.Cache:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, DOCUMENTS), 1, MOST).astype(np.int64)
    cache = ac.Cache.create(folder, {"tokens": ac.Ragged("int32")}, "4GB", "16MiB")
    with cache.writer() as writer:
        for start in range(0, DOCUMENTS, CHUNK):
            some = lengths[start : start + CHUNK]
            tokens = rng.integers(0, 50_000, int(some.sum()), np.int32)
            writer.extend(tokens=np.split(tokens, np.cumsum(some)[:-1]))
    return cache


def lengths_of(batches: Iterator[dict[str, ac.Values]]) -> list[NDArray[np.int64]]:
    return [np.diff(batch["tokens"].offsets) for batch in batches]


def padding(lengths: list[NDArray[np.int64]]) -> float:
    """The share of padded batches that is padding."""
    return 1 - sum(int(each.sum()) for each in lengths) / sum(len(each) * int(each.max()) for each in lengths)


def epoch(loader: ac.Loader) -> tuple[float, float]:
    """Seconds of the next epoch, and those up to its first batch."""
    started = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - started
    for _ in batches:
        pass
    return time.perf_counter() - started, first


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder, filled(Path(folder) / "cache") as cache:
        with ac.Loader(cache, batch_tokens=BUDGET, length_of="tokens") as loader:
            begun = epoch(loader)[1]
            by_tokens = lengths_of(iter(loader))
        size = DOCUMENTS // len(by_tokens)
        with ac.Loader(cache, size) as loader:
            by_size = lengths_of(iter(loader))
        tokens = sum(int(each.sum()) for each in by_tokens)
        print(
            f"padding: {padding(by_tokens):.1%} by tokens, {padding(by_size):.1%} by rows ({size} a batch); "
            f"the budget is used to {tokens / BUDGET / len(by_tokens):.1%}"
        )
        rates, ratios, begins = [], [], []
        with (
            ac.Loader(cache, batch_tokens=BUDGET, length_of="tokens") as budget,
            ac.Loader(cache, size) as rows,
        ):
            epoch(budget), epoch(rows)
            for _ in range(TURNS):
                (seconds, first), (other, _) = epoch(budget), epoch(rows)
                rates.append(tokens / seconds)
                ratios.append(other / seconds)
                begins.append(first / DOCUMENTS * 1e6)
        print(
            f"rate: {statistics.median(rates) / 1e6:.0f} million tokens a second, "
            f"{statistics.median(ratios):.2f} of that by rows ({min(ratios):.2f} to {max(ratios):.2f})"
        )
        print(
            f"begin: {begun / DOCUMENTS * 1e6:.2f} us a row of the first epoch, "
            f"{statistics.median(begins):.2f} of a later one"
        )
        remember(
            "tokens",
            {
                "tokens a second, over batches by rows": ratios,
                "padded size, over batches by rows": (1 - padding(by_size)) / (1 - padding(by_tokens)),
            },
        )


if __name__ == "__main__":
    main()
