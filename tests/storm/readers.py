"""Readers: the kinds of them, each as something that gives one epoch after another."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import numpy as np
from storm.content import Batch

import arrowcache as ac
from arrowcache.reading.columns import Values

HAS_TORCH = find_spec("torch") is not None
WAIT_SECONDS = 150.0  # for room, rows and batches: longer than anybody is stopped, and than anything is held
BATCH_ROWS = (32, 64)  # they divide a segment's: so batches can be views


class Reader:
    """Epochs of one kind; `close` ends all that it began."""

    def __init__(self, cache: ac.Cache, chance: random.Random) -> None:
        self.cache, self.chance = cache, chance
        self.rows = chance.choice(BATCH_ROWS)
        self.seed = chance.randrange(1000)

    def epoch(self) -> Iterator[Batch]:
        """One pass over what the cache holds now."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything; idempotent."""


class LoaderReader(Reader):
    def __init__(self, cache: ac.Cache, chance: random.Random, **options: Any) -> None:
        super().__init__(cache, chance)
        self.loader = self.make(
            drop_last=False, with_ids=True, seed=self.seed, timeout=WAIT_SECONDS, **options
        )

    def make(self, **options: Any) -> ac.Loader:
        return ac.Loader(self.cache, self.rows, **options)

    def epoch(self) -> Iterator[Batch]:
        return iter(self.loader)

    def close(self) -> None:
        self.loader.close()


class TorchReader(LoaderReader):
    def make(self, **options: Any) -> ac.Loader:
        import arrowcache.torch

        return arrowcache.torch.Loader(self.cache, self.rows, **options)


class WorkersReader(LoaderReader):
    """Processes that make batches, with a transform."""

    def __init__(self, cache: ac.Cache, chance: random.Random) -> None:
        super().__init__(cache, chance, workers=2, transform=_copied)


class RanksReader(LoaderReader):
    """Two ranks of a job in one process, in step."""

    def __init__(self, cache: ac.Cache, chance: random.Random) -> None:
        Reader.__init__(self, cache, chance)
        run = f"job{chance.randrange(1 << 40)}"
        self.loaders = [
            self.make(
                with_ids=True, seed=self.seed, timeout=WAIT_SECONDS, rank=rank, world_size=2, run_id=run
            )
            for rank in range(2)
        ]

    def epoch(self) -> Iterator[Batch]:
        for pair in zip(*self.loaders, strict=True):
            yield from pair

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


class DataLoaderReader(Reader):
    """The stock DataLoader: its workers have a transform, or send row ids."""

    def __init__(self, cache: ac.Cache, chance: random.Random) -> None:
        import arrowcache.torch

        super().__init__(cache, chance)
        self.loader: Any = arrowcache.torch.dataloader(
            cache, self.rows, 2, seed=self.seed, drop_last=False, timeout=WAIT_SECONDS,
            transform=chance.choice((None, _copied)),
        )  # fmt: skip

    def epoch(self) -> Iterator[Batch]:
        return iter(self.loader)

    def close(self) -> None:
        if self.loader is not None:
            self.loader.batch_sampler.close()
            self.loader = None


class SnapshotReader(Reader):
    """Snapshots: rows gathered, views, tables and datasets of them."""

    def __init__(self, cache: ac.Cache, chance: random.Random) -> None:
        super().__init__(cache, chance)
        self.ways = itertools.cycle(("gather", "views", "table", "dataset"))

    def epoch(self) -> Iterator[Batch]:
        how = next(self.ways)
        if how == "dataset":
            yield _of_table(self.cache.dataset().to_table())
            return
        with closing(self.cache.snapshot()) as snapshot:
            if how == "gather":
                ids = np.random.default_rng(self.chance.randrange(1 << 30)).permutation(len(snapshot))
                for first in range(0, len(ids), 256):
                    yield snapshot.gather(ids[first : first + 256])
            elif how == "views":
                yield from snapshot.views()
            else:
                table = snapshot.table()
                snapshot.close()  # what is left of it are the table's own leases
                for batch in table.to_batches():
                    yield _of_record_batch(batch)


def _copied(batch: Batch) -> Batch:
    """The transform."""
    values = batch["tail"]
    return batch | {"words": batch["words"].copy(), "tail": Values(values.data.copy(), values.offsets)}


def _of_table(table: Any) -> Batch:
    (batch,) = table.combine_chunks().to_batches()
    return _of_record_batch(batch)


def _of_record_batch(batch: Any) -> Batch:
    """Arrays over a record batch's buffers."""
    tail = batch.column("tail")
    return {
        "id": batch.column("id").to_numpy(),
        "words": batch.column("words").to_numpy_ndarray(),
        "tail": Values(tail.values.to_numpy(), tail.offsets.to_numpy().astype(np.int64)),
    }


def _loader(**options: Any) -> Callable[[ac.Cache, random.Random], Reader]:
    return lambda cache, chance: LoaderReader(cache, chance, **options)


KINDS: dict[str, Callable[[ac.Cache, random.Random], Reader]] = {
    "rows": _loader(shuffle="rows"),
    "window": _loader(shuffle="window", window_bytes="1MiB"),
    "blocks": _loader(shuffle="blocks"),
    "in order": _loader(shuffle=None),
    "workers": WorkersReader,
    "ranks": RanksReader,
    "snapshots": SnapshotReader,
    "torch": TorchReader,
    "dataloader": DataLoaderReader,
}
OF_TORCH = ("torch", "dataloader")


def kinds() -> list[str]:
    """Those that can be had here."""
    return [kind for kind in KINDS if HAS_TORCH or kind not in OF_TORCH]


def is_by_its_workers(error: BaseException | None) -> bool:
    """Whether a reader failed as it may whose own workers were killed.

    torch raises "DataLoader worker (pid 4121) is killed by signal: Killed." in the main thread, wherever that
    is, or there is nobody any more who would hand over a batch.
    """
    while error is not None:
        is_told = isinstance(error, ac.WorkerError | ConnectionError | EOFError)
        if is_told or "DataLoader worker" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
