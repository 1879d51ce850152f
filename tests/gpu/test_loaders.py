"""Loaders: the kinds beside the plain one, each batch beside that of a loader without a device."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu.trials import BATCH_ROWS, CACHE_ROWS, WIDTH, Saw, Target, Trial, cache_of_numbers

import arrowcache as ac
from arrowcache.torch import Loader, cached, packed

EPOCHS = 3
ITEMS, MAKERS = 200, 2
DOCUMENTS, LONGEST, LENGTH, SEQUENCES = 400, 2048, 1024, 16
BATCH_TOKENS = 16 << 10
EXCLUDED = range(0, CACHE_ROWS, 5)

Batch = Any


class Items(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Item i is a row of i, and i."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((WIDTH,), float(index)), index


def test_items_of_a_slow_dataset_arrive_made_or_cached(target: Target, saw: Saw) -> None:
    """A slow dataset's items, which worker processes make in the first epoch."""
    with target.trial() as trial, tempfile.TemporaryDirectory(prefix="device-proof-") as folder:
        with (
            cached(Items(), Path(folder) / "cache", capacity="256MiB") as train,
            Loader(train, 32, device=trial.device, workers=MAKERS) as ours,
            Loader(train, 32, workers=0) as plain,
        ):
            count = _alike(trial, ours, plain, lambda batch: batch)
            if (made := train.stats().cached) != ITEMS:
                raise AssertionError(f"{made} items are in the cache, of {ITEMS}")
        saw(f"{count} batches of {EPOCHS} epochs, in the host's order; the first made the items")


def test_packed_and_ragged_batches_arrive(target: Target, saw: Saw) -> None:
    """Documents, packed both ways, and in batches of as many tokens."""
    with target.trial() as trial, _documents() as cache:
        count = 0
        for split in (True, False):
            options = {"batch_size": SEQUENCES, "split": split}
            with (
                packed(cache, "tokens", LENGTH, device=trial.device, **options) as ours,
                packed(cache, "tokens", LENGTH, **options) as plain,
            ):
                count += _alike(trial, ours, plain, dict.values)
        jagged = {"batch_tokens": BATCH_TOKENS, "length_of": "tokens"}
        with Loader(cache, device=trial.device, **jagged) as ours, Loader(cache, **jagged) as plain:
            count += _alike(trial, ours, plain, lambda batch: (batch["tokens"].values(), batch["number"]))
        saw(f"{count} batches: sequences cut and whole, and documents by their tokens")


def test_rows_that_are_excluded_or_weigh_nothing_do_not_arrive(target: Target, saw: Saw) -> None:
    """Rows that are drawn by what the loop annotates, from tensors where they are, and none excluded."""
    with target.trial() as trial, cache_of_numbers() as cache:
        _exclude(cache, target.device if target.is_gpu else None)
        options = {
            "weights": "priority",
            "expect": "priority",
            "epoch_rows": 4 * BATCH_ROWS,
            "with_ids": True,
        }
        ours = Loader(cache, BATCH_ROWS, device=trial.device, **options)
        with ours, Loader(cache, BATCH_ROWS, **options) as plain:
            unwanted = set(EXCLUDED)
            for _ in range(EPOCHS):
                seen: set[int] = set()
                for batch, expected in zip(ours, plain, strict=True):
                    rows = expected["y"].clone()
                    trial.sleep(1e-3)
                    trial.read(batch["x"], rows)
                    trial.read(batch["y"], rows)
                    told = batch if target.is_gpu else expected
                    cache.annotate(told, priority=(told["y"] % 2).float())
                    seen.update(rows.tolist())
                if wrong := sorted(seen & unwanted):
                    raise AssertionError(f"rows {wrong[:5]} were drawn, which are excluded or weigh nothing")
                unwanted |= {row for row in seen if row % 2 == 0}
            del batch, told
            trial.finish()
    saw(f"{EPOCHS} epochs of 4 batches; {len(unwanted)} of {CACHE_ROWS} rows were to be left out, and were")


def _exclude(cache: ac.Cache, device: str | None) -> None:
    """Exclude the rows that hold numbers of EXCLUDED, as tensors of a device name them."""
    with Loader(cache, BATCH_ROWS, device=device, with_ids=True) as batches:
        for batch in batches:
            ids = torch.stack([batch["_seq"], batch["_row"]], 1)
            cache.exclude(ids[batch["y"] % EXCLUDED.step == EXCLUDED.start])


def _alike(
    trial: Trial,
    ours: Iterable[Batch],
    plain: Iterable[Batch],
    tensors: Callable[[Batch], Iterable[torch.Tensor]],
) -> int:
    """Read some epochs of a loader beside those of the other. Returns: the number of batches."""
    count = 0
    for _ in range(EPOCHS):
        for batch, expected in zip(ours, plain, strict=True):
            wanted = [each.clone() for each in tensors(expected)]
            trial.sleep(1e-3)
            for tensor, rows in zip(tensors(batch), wanted, strict=True):
                trial.read(tensor, rows)
            count += 1
        del batch
    trial.finish()
    return count


@contextmanager
def _documents() -> Iterator[ac.Cache]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST, DOCUMENTS)
    schema = ac.Schema({"tokens": ac.Ragged("int32"), "number": ac.Tensor("int64")})
    with tempfile.TemporaryDirectory(prefix="device-proof-") as folder:
        cache = ac.Cache.create(Path(folder) / "cache", schema, "256MiB", segment_bytes="1MiB")
        with cache, cache.writer() as writer:
            tokens = [rng.integers(0, 1 << 17, length, np.int32) for length in lengths]
            writer.extend(tokens=tokens, number=np.fromiter(itertools.count(), np.int64, DOCUMENTS))
            writer.close()
            yield cache
