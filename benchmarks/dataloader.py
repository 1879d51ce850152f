"""How fast is a stock torch DataLoader over a cache, without a transform, beside our own Loader?

Question: batches of 64 rows of 64 KiB, shuffled by rows, through `DataLoader(CacheDataset)` with two
workers and with none, against `arrowcache.torch.Loader` (without workers) in the same run; and
against the same DataLoader whose workers return tensors (an identity transform), as others do.
Method: 1 GiB in 64 MiB segments, page cache warm; one epoch a turn, after one that is not counted;
cases take turns; medians. The consumer takes each batch, reads one value per 4 KiB, and drops it.
Run: `python -m benchmarks.dataloader`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from arrowcache.torch import Loader, dataloader
from benchmarks.history import remember
from benchmarks.measure import filled_cache, interleaved, machine

TOTAL_BYTES = 1 << 30
ROW_BYTES, BATCH_ROWS = 65536, 64
REPEATS = 7


def identity(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def epoch(loader: Iterable[dict[str, Any]]) -> None:
    for batch in loader:
        batch["x"].view(-1)[::1024].sum()


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        cache = filled_cache(Path(folder) / "cache", ROW_BYTES, TOTAL_BYTES)
        with Loader(cache, BATCH_ROWS) as own:
            loaders: dict[str, Iterable[dict[str, Any]]] = {
                "arrowcache.torch.Loader": own,
                "DataLoader, 2 workers": dataloader(cache, BATCH_ROWS, 2),
                "DataLoader, no workers": dataloader(cache, BATCH_ROWS, 0),
                "DataLoader, 2 workers, returning tensors": dataloader(
                    cache, BATCH_ROWS, 2, transform=identity
                ),
            }
            cases: dict[str, Callable[[], None]] = {
                name: partial(epoch, loader) for name, loader in loaders.items()
            }
            for run in cases.values():
                run()
            seconds = interleaved(cases, REPEATS)
            del loaders, cases
        cache.close()
    print(f"{'':42} {'GB/s':>6} {'ratio':>6}")
    unit = seconds["arrowcache.torch.Loader"]
    for name, taken in seconds.items():
        print(f"{name:42} {TOTAL_BYTES / taken / 1e9:6.2f} {unit / taken:6.2f}")
    remember("dataloader", {f"{name} over Loader": unit / taken for name, taken in seconds.items()})


if __name__ == "__main__":
    main()
