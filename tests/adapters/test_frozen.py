"""Frozen caches on a read-only mount: whatever reads one writes nothing there, and locks nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import numpy as np
import pyarrow.compute as pc
from helpers import make_cache, publish
from torch.utils.data import Dataset
from tracing import writes_and_locks

import arrowcache as ac
from arrowcache.torch import CachedDataset, Loader, cached

READERS = {
    "Loader": """
        import sys, arrowcache as ac

        for options in ({}, {"weights": "loss"}, {"rank": 1, "world_size": 2}, {"shuffle": "blocks"}):
            with ac.Loader(sys.argv[1], 8, **options) as loader:
                assert len([*loader]) == loader.steps > 0
                endless = loader.repeat()
                for _ in range(loader.steps + 1):
                    next(endless)
                loader.load_state_dict(loader.state_dict())
                assert [*loader]
        """,
    "workers": """
        import sys, arrowcache as ac

        with ac.Loader(sys.argv[1], 8, transform=lambda batch: batch, workers=2) as loader:
            assert len([*loader]) == 19
        """,
    "torch.Loader": """
        import sys
        from arrowcache.torch import Loader

        with Loader(sys.argv[1], 8) as loader:
            assert len([*loader]) == 19
        """,
    "DataLoader": """
        import sys
        from arrowcache.torch import CacheDataset, EpochBatchSampler, dataloader
        from torch.utils.data import DataLoader

        path = sys.argv[1]
        for transform in (None, lambda batch: {"id": batch["id"]}):
            dataset, sampler = CacheDataset(path, transform=transform), EpochBatchSampler(path, 8)
            batches = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
            assert len([*batches]) == len(batches) == 19
        assert len([*dataloader(path, 8, num_workers=1)]) == 19
        """,
    "explore": """
        import sys, arrowcache as ac
        from arrowcache import explore

        with ac.Cache.open(sys.argv[1]) as cache:
            counted = explore.sql(cache, "select count(*), sum(loss) from cache where not _excluded")
            assert counted.iloc[0, 0] == 158
            assert len(explore.to_pandas(cache)) == 160
            explore.describe(cache)
            assert len(cache.dataset().to_table()) == 160
            with cache.snapshot() as snapshot:
                assert len(snapshot.table()) == 160
            explore.open(cache).close()
            cache.stats(), repr(cache), cache.verify(repair=False)
        """,
    "the command": """
        import sys
        from arrowcache.cli import main

        path = sys.argv[1]
        for command, *more in (
            ["info"], ["info", "--json"], ["ls"], ["head"], ["describe"], ["watch", "--once"],
            ["sql", "select count(*) from cache"], ["verify", "--report-only"], ["export", sys.argv[2]],
        ):
            assert main([command, path, *more]) == 0, command
        for command in (["evict", path, "1MiB"], ["resize", path, "1GiB"], ["verify", path]):
            assert main(command) == 1
        """,
}


@pytest.fixture
def frozen(tmp_path: Path) -> ac.Cache:
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    ids = np.array([(number // 16, number % 16) for number in range(160)])
    cache.exclude(ids[[3]])
    cache.exclude(where=pc.field("id") == 50)
    cache.annotate(ids, loss=np.arange(160) + 1)
    cache.freeze()
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_on_a_read_only_mount_writes_nothing_and_locks_nothing(frozen, tmp_path, reader):
    assert writes_and_locks(READERS[reader], frozen.path, tmp_path / "exported") == []


@pytest.mark.slow
def test_nor_does_one_that_might(frozen, tmp_path):
    code = READERS["Loader"] + READERS["DataLoader"]
    assert writes_and_locks(code, frozen.path, mounted=False) == []


@pytest.mark.slow
def test_what_a_cache_that_is_not_frozen_is_asked_for_is_seen(frozen):
    """The test above can fail."""
    with pytest.warns(RuntimeWarning):
        frozen.thaw()
    assert len(writes_and_locks(READERS["torch.Loader"], frozen.path, mounted=False)) > 10


# a dataset's


class Squares(Dataset[Any]):
    """Counts what it makes."""

    made = 0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.made += 1
        return {"square": np.full(4, index**2)}


@pytest.fixture
def squares(tmp_path: Path) -> Path:
    """The frozen cache of 40 of its items."""
    path = tmp_path / "cache"
    with cached(Squares(), path, capacity="16MiB") as train:
        for index in range(40):
            train[index]
        train.cache.freeze()
    return path


def files_of(path: Path) -> list[tuple[str, int]]:
    paths = [path, *path.rglob("*")]
    return sorted((str(each), os.stat(each).st_mtime_ns) for each in paths)


def require_items(train: CachedDataset) -> None:
    for index in range(50):
        assert train[index]["square"][0] == index**2
    with Loader(train, 10, workers=0) as loader:
        found = np.concatenate([batch["square"][:, 0].numpy() for batch in loader])
    assert sorted(found) == [index**2 for index in range(50)]


def test_the_frozen_cache_of_a_dataset_is_read_and_what_is_missing_made_and_not_stored(squares):
    before, dataset = files_of(squares), Squares()
    with cached(dataset, squares, capacity="32MiB", replace=0.5) as train:
        dataset.made = 0
        require_items(train)
        assert dataset.made == 20
        assert train.cached == 40
        assert "made, and not stored" in train.stats().trouble
        assert not train.stats().is_full
        assert train.turn_over() == 0
        with pytest.raises(ac.CacheFrozenError, match="thaw"):
            train.fill(workers=0)
    assert files_of(squares) == before


def test_a_dataset_that_was_open_before_a_freeze_reads_on(tmp_path):
    with cached(Squares(), tmp_path / "cache", capacity="16MiB") as train:
        for index in range(40):
            train[index]
        train.cache.freeze()
        require_items(train)
        assert train.cached == 40


@pytest.mark.slow
def test_a_dataset_on_a_read_only_mount_writes_nothing_and_locks_nothing(squares):
    code = """
        import sys
        import numpy as np
        from arrowcache.torch import Loader, cached
        from torch.utils.data import DataLoader

        class Squares:
            def __len__(self):
                return 50

            def __getitem__(self, index):
                return {"square": np.full(4, index**2)}

        train = cached(Squares(), sys.argv[1], capacity="16MiB")
        assert [train[index]["square"][0] for index in range(50)] == [index**2 for index in range(50)]
        assert len([*Loader(train, 10)]) == 5
        assert len([*DataLoader(train, 10, num_workers=2)]) == 5
        assert train.cached == 40
        train.close()
        """
    assert writes_and_locks(code, squares) == []


def test_a_damaged_segment_of_a_frozen_dataset_is_an_error(squares):
    path = min(squares.joinpath("segments").iterdir())
    path.write_bytes(b"no Arrow" + path.read_bytes()[8:])
    with pytest.raises(ac.CorruptSegmentError, match=path.name):
        cached(Squares(), squares, capacity="16MiB")
    assert path.exists()
