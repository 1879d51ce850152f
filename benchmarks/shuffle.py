"""How well does each shuffle mix?

Question 1 (spread): how far do the rows of one segment lie from each other in an epoch? The mean
distance of two of them, over that of two rows of a uniform shuffle (a third of the epoch): 1 is
perfect, 1 / segments is no shuffle at all. Question 2 (company): how many segments does a batch
have rows of, over what a uniform shuffle gives?
Method: computed from the orders themselves, as a loader asks them: 64 segments of 1,024 rows, batches
of 64; the mean over all segments, batches and 5 epochs. No data is read, so this is exact and depends
on nothing but the seed.
Run: `python -m benchmarks.shuffle`. Results: benchmarks/RESULTS.md and README.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arrowcache.reading.order import EpochOrder, Shard
from arrowcache.reading.plan import Plan

SEGMENTS, ROWS, BATCH, EPOCHS = 64, 1024, 64, 5


def segments_by_position(shuffle: str | None, window: float, epoch: int) -> NDArray[np.int64]:
    """Of which segment the row at each position of an epoch is."""
    plan = Plan(
        epoch=epoch,
        seed=0,
        shuffle=shuffle,
        epoch_rows=None,
        window_rows=max(1, round(window * SEGMENTS * ROWS)),
        block_rows=BATCH,
        seqs=np.arange(SEGMENTS),
        rows=np.full(SEGMENTS, ROWS),
    )
    order = EpochOrder(plan, BATCH, Shard(), drop_last=True)
    return order.batches(0, order.steps) // ROWS


def spread(segments: NDArray[np.int64]) -> float:
    """Mean distance of two rows of one segment, over a third of the epoch."""
    places = np.argsort(segments, kind="stable").reshape(SEGMENTS, ROWS)  # ascending in each segment
    weights = 2 * np.arange(ROWS) - (ROWS - 1)  # sum over pairs of a sorted list's differences
    distances = (places * weights).sum(axis=1) / (ROWS * (ROWS - 1) / 2)
    return float(distances.mean() / (len(segments) / 3))


def company(segments: NDArray[np.int64]) -> float:
    """Mean number of segments that a batch has rows of."""
    return float(np.mean([len(np.unique(batch)) for batch in segments.reshape(-1, BATCH)]))


def main() -> None:
    cases: list[tuple[str, str | None, float]] = [("rows", "rows", 1.0)]
    cases += [(f"window, {share:.3g} of the cache", "window", share) for share in (0.5, 0.25, 0.125, 1 / 16)]
    cases += [("blocks", "blocks", 1.0), ("None", None, 1.0)]
    uniform = company(segments_by_position("rows", 1.0, 0))
    print(f"{'shuffle':>26} {'spread':>7} {'segments a batch':>17} {'over uniform':>13}")
    for name, shuffle, window in cases:
        epochs = [segments_by_position(shuffle, window, epoch) for epoch in range(EPOCHS)]
        far = np.mean([spread(epoch) for epoch in epochs])
        mixed = np.mean([company(epoch) for epoch in epochs])
        print(f"{name:>26} {far:7.3f} {mixed:17.1f} {mixed / uniform:13.2f}")


if __name__ == "__main__":
    main()
