"""A fork in the middle of reads from the disk: parent and child both go on, and get the right rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import in_child, make_cache, mapped_seqs, segment_files
from page_cache import drop_from_memory
from plain_rows import threads
from quick import some_of

import arrowcache as ac
from arrowcache.reading.slots import Slots

ROWS = 256


@pytest.fixture
def cache(tmp_path: Path) -> ac.Cache:
    """Eight segments of 32 rows of 70 KiB, ids 0 to 255, that are on the disk only."""
    schema = ac.Schema(
        {"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (128, 128)), "name": ac.String()}
    )
    cache = make_cache(tmp_path / "cache", schema, capacity="64MiB", segment_bytes="4MiB", segment_rows=32)
    with cache.writer() as writer:
        for number in range(ROWS):
            image = np.full((128, 128), number, np.float32)
            writer.append(id=number, image=image, name=str(number) * 1000)
    drop_from_memory(*segment_files(cache))
    return cache


def drop(cache: ac.Cache) -> None:
    """What is mapped and was touched stays."""
    try:
        drop_from_memory(*segment_files(cache))
    except pytest.skip.Exception:
        pass


def checked(batch: Mapping[str, Any]) -> list[int]:
    """The ids of a batch, whose rows are right."""
    ids: list[int] = batch["id"].tolist()
    assert batch["image"][:, 0, 0].tolist() == batch["image"][:, 127, 127].tolist() == ids
    assert batch["name"] == [str(number) * 1000 for number in ids]
    return ids


def rows_of(batches: Any) -> list[int]:
    return sorted(number for batch in batches for number in checked(batch))


@pytest.mark.parametrize("shuffle", ["rows", "window", "blocks", None])
def test_a_fork_in_the_middle_of_an_epoch_from_the_disk(cache, shuffle):
    """The child begins an epoch of its own, of a loader that it inherits or makes."""
    with ac.Loader(cache, 8, shuffle=shuffle) as loader:
        for step in some_of((0, 1, 5)):
            drop(cache)
            epoch = iter(loader)
            came = [number for _ in range(step) for number in checked(next(epoch))]

            def body(epoch: Any = epoch) -> None:
                with pytest.raises(ValueError, match="the process that forked this one"):
                    next(epoch)
                with ac.Loader(cache, 8, shuffle=shuffle) as own:
                    assert rows_of(own) == list(range(ROWS))
                assert rows_of(loader) == list(range(ROWS))
                loader.close()

            with in_child(body):
                came += [number for batch in epoch for number in checked(batch)]
            assert sorted(came) == list(range(ROWS))
    del epoch
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


def take(begun: Any) -> None:
    while not begun.take(0.05):
        pass


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_fork_while_rows_are_asked_for_and_read_and_fetched(cache, count):
    ids = np.random.default_rng(0).permutation(ROWS)
    with threads(count), cache.snapshot() as snapshot:
        snapshot.map_all()
        for began in ("asks", "reads"):
            drop(cache)
            slot = Slots({"image": ((128, 128), np.dtype("float32"))}, ROWS).lend(ROWS)
            gather = snapshot.read(ids, snapshot.columns_of(["image", "name"]), slot)
            fetch = snapshot.fetch(0, ROWS, ["id", "image", "name"])
            if began == "reads":
                is_over = gather.take(0.001)  # all is asked for, and some read; the disk may have been quick
            else:
                is_over = False
            left = [fetch] if is_over else [gather, fetch]

            def body(gather: Any = gather, left: Any = left) -> None:
                for begun in left:
                    with pytest.raises(RuntimeError, match="ask again"):
                        take(begun)
                with cache.snapshot() as own:
                    assert checked(own.gather(ids)) == ids.tolist()

            with in_child(body):
                names = gather.result()["name"]
            assert checked({"id": ids, "name": names} | slot.arrays()) == ids.tolist()
            take(fetch)
            del gather, fetch, left, body, slot
    assert (cache.stats().leased_bytes, mapped_seqs(cache)) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["rows", "window"])
def test_workers_of_a_dataloader_are_forked_in_the_middle_of_reads_from_the_disk(cache, shuffle):
    """Some read by themselves, for a transform; others answer with row numbers, which the parent reads."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from arrowcache.torch import Loader, dataloader

    def same(batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    with Loader(cache, 8, shuffle=shuffle) as loader:
        for transform in (None, same):
            drop(cache)
            epoch = iter(loader)
            came = checked(next(epoch))
            workers = dataloader(
                cache, 8, num_workers=2, shuffle=shuffle, transform=transform, multiprocessing_context="fork"
            )
            theirs = iter(workers)
            others: list[int] = []
            for batch in theirs:
                others += checked(batch)
                if (mine := next(epoch, None)) is not None:
                    came += checked(mine)
            came += [number for batch in epoch for number in checked(batch)]
            assert sorted(came) == sorted(others) == list(range(ROWS))
            del theirs, workers
    assert cache.stats().leased_bytes == 0
