"""A process whose addresses are limited (ulimit -v, h_vmem): a share is mapped, and the rest is read."""

from __future__ import annotations

import gc
import itertools
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import in_child, limited, mapped_seqs
from processes import Child

import arrowcache as ac
from arrowcache.native import maps

MIB = 1 << 20
SEGMENTS, ROWS = 24, 64  # of 64 KiB: segments of 4 MiB
WIDTH = 16384
ORDERS = [
    {"shuffle": "rows"}, {"shuffle": "window", "window_bytes": "16MiB"}, {"shuffle": "blocks"},
    {"shuffle": None},
    {"shuffle": "rows", "columns": ["tokens"]}, {"shuffle": None, "drop_last": True, "with_ids": True},
]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("limited") / "cache"
    schema = {"x": ac.Tensor("float32", (WIDTH,)), "tokens": ac.Ragged("int64")}
    with ac.Cache.create(path, schema, "256MiB", "6MiB", ROWS) as cache, cache.writer() as writer:
        for number in range(SEGMENTS * ROWS):
            writer.append(x=np.full(WIDTH, number, np.float32), tokens=np.full(number % 5, number))
    return path


def in_limited_child(body: Callable[[], None], more: int = 64 * MIB) -> None:
    def child() -> None:
        with limited(more):
            body()

    with in_child(child):
        pass


def numbers_of(batches) -> list[int]:
    """Which rows came, each as it was made."""
    found: list[int] = []
    for batch in batches:
        if "x" in batch:
            assert (batch["x"] == batch["x"][:, :1]).all()
            found += batch["x"][:, 0].astype(int).tolist()
        if "tokens" in batch:
            values = batch["tokens"]
            for row, (start, stop) in enumerate(itertools.pairwise(values.offsets.tolist())):
                tokens = set(values.data[start:stop].tolist())
                assert len(tokens) < 2
                assert "x" not in batch or tokens <= {int(batch["x"][row, 0])}
            if "x" not in batch:
                found += values.data.tolist()
    return sorted(found)


ALL = list(range(SEGMENTS * ROWS))
ALL_TOKENS = sorted(number for number in ALL for _ in range(number % 5))


@pytest.mark.parametrize("options", ORDERS, ids=lambda options: "-".join(map(str, options.values())))
def test_an_epoch_has_all_rows_and_maps_a_share(path, options):
    options = {"drop_last": False} | options

    def body() -> None:
        with ac.Loader(path, 64, **options) as loader:
            for _ in range(2):
                got = numbers_of(loader)
                assert got == (ALL_TOKENS if options.get("columns") else ALL)
                assert len(mapped_seqs(ac.Cache.open(path))) * 4 * MIB <= 48 * MIB

    in_limited_child(body)


def test_a_function_of_rows_reads_a_wide_column_again_that_there_is_no_room_to_remember(path):
    def child() -> None:
        with ac.Loader(path, 16, rows=lambda columns: columns["x"][:, 0] >= 0, drop_last=False) as loader:
            for _ in range(2):
                assert numbers_of(loader) == ALL

    in_limited_child(child)


@pytest.mark.parametrize(("workers", "more"), [(1, 192 * MIB), (2, 512 * MIB)])
def test_worker_processes_inherit_the_limit(path, workers, more):
    def body() -> None:
        options = {"workers": workers, "transform": lambda batch: batch, "columns": ["x"]}
        with ac.Loader(path, 64, **options) as loader:
            for _ in range(2):
                assert numbers_of(loader) == ALL

    in_limited_child(body, more)


def test_a_batch_that_a_worker_has_no_addresses_for_says_to_have_fewer_under_way(path):
    def body() -> None:
        options = {"workers": 2, "transform": lambda batch: batch, "columns": ["x"]}
        says = r"beside those that are kept or under way.*\(ulimit -v\).* or lower prefetch or workers"
        with ac.Loader(path, 256, **options) as loader, pytest.raises(MemoryError, match=says):
            next(iter(loader))

    in_limited_child(body, 128 * MIB)


def test_several_caches_share_what_there_is(path, tmp_path):
    schema = {"x": ac.Tensor("float32", (WIDTH,))}
    with (
        ac.Cache.create(tmp_path / "other", schema, "64MiB", "5MiB", ROWS) as other,
        other.writer() as writer,
    ):
        writer.extend(x=np.repeat(np.arange(512, dtype=np.float32), WIDTH).reshape(512, WIDTH))

    def body() -> None:
        with ac.Cache.open(path).snapshot() as one, ac.Cache.open(tmp_path / "other").snapshot() as two:
            one.map_all()
            two.map_all()
            assert 0 < maps.room(3) < 40 * MIB
            assert two.gather([0, 511])["x"][:, 0].tolist() == [0, 511]
            assert one.gather([5, 1535])["x"][:, 0].tolist() == [5, 1535]
        assert maps.room() > 20 * MIB, "what was mapped is given back"
        with ac.Cache.open(tmp_path / "other").snapshot() as two:
            two.map_all()
            assert len(mapped_seqs(other)) > 4

    in_limited_child(body)


def test_a_limit_that_is_raised_later_lets_the_next_epoch_map_more(path):
    def body() -> None:
        with ac.Loader(path, 64, columns=["x"]) as loader:
            assert numbers_of(loader) == ALL
            few = len(mapped_seqs(ac.Cache.open(path)))
            with limited(1024 * MIB):
                assert numbers_of(loader) == ALL
                assert few < len(mapped_seqs(ac.Cache.open(path))) == SEGMENTS

    in_limited_child(body)


def test_where_hardly_anything_is_left_nothing_is_mapped_and_all_is_read(path):
    def body() -> None:
        with ac.Cache.open(path).snapshot() as snapshot:
            snapshot.gather([0])  # its layout is known by now
            with limited(10 * MIB):
                assert maps.room() < 5 * MIB
                assert snapshot.gather([5, 1535], ["x"])["x"][:, 0].tolist() == [5, 1535]

    in_limited_child(body)


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_views_leave_room_for_all_else(path, kind):
    """Writable mappings count as data, each with all of its segment."""

    def body() -> None:
        with ac.Cache.open(path).snapshot() as snapshot:
            snapshot.map_all()
            with limited(32 * MIB, kind):
                views = []
                with pytest.raises(ValueError, match="ulimit -v, ulimit -d"):
                    views.extend(snapshot.views(ROWS, ["x"]))  # all are kept
                assert np.zeros(4 * MIB, np.uint8).nbytes == 4 * MIB
        with limited(32 * MIB, kind), ac.Loader(path, 64, shuffle="blocks", columns=["x"]) as loader:
            epoch = iter(loader)
            kept = [next(epoch), next(epoch)]
            assert sorted(numbers_of(epoch) + numbers_of(kept)) == ALL

    with in_child(body):
        pass


def test_a_table_that_cannot_be_mapped_names_the_limit_and_the_loader_goes_on(path):
    def table() -> None:
        with ac.Cache.open(path).snapshot() as snapshot:
            snapshot.table()

    def body() -> None:
        cache = ac.Cache.open(path)
        with cache.snapshot(lambda segment: segment.seq == 0) as one:
            one.table()
        cache.dataset()  # by now Arrow has what addresses it takes
        with limited(64 * MIB):
            for read in (table, cache.dataset):
                with pytest.raises(OSError, match=r"ulimit -v is \d+ kB.*raise the limit"):
                    read()
            gc.collect()
            with ac.Loader(cache, 64, columns=["x"]) as loader:
                assert numbers_of(loader) == ALL

    with in_child(body):
        pass


def test_a_batch_that_gets_no_memory_names_the_limit(path):
    def body() -> None:
        with (
            ac.Loader(path, len(ALL), columns=["x"]) as loader,
            limited(32 * MIB),
            pytest.raises(MemoryError, match=r"for a batch: .*ulimit -v is \d+ kB.*raise the limit.* lower"),
        ):
            next(iter(loader))

    Child(body).result()  # others of this process left memory in its heap, which needs no addresses
