"""Zero-copy views: their content, their privacy, and how long they live."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from helpers import limit, make_cache, publish, published_ids, sample, wait_until

import arrowcache as ac
from arrowcache import Loader
from arrowcache.storage.mapping import live_mappings

ROWS = 96  # six segments
BASE = np.arange(256, dtype=np.float32).reshape(16, 16)


def images(ids):
    return BASE + np.asarray(ids, np.float32)[:, None, None]


def mapped_segments(cache) -> int:
    """Mappings of this process over segments of a cache that can be written to: those of views."""
    folder = str(cache.path / "segments")
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(folder in line and line.split()[1].startswith("rw-p") for line in lines)


def leased(cache) -> bool:
    gc.collect()
    return cache.stats().leased_bytes > 0


# what they hold


@pytest.mark.parametrize("batch_rows", [None, 1, 4, 16])
def test_views_of_a_snapshot_are_its_rows_in_order(cache, batch_rows):
    with cache.snapshot() as snapshot:
        views = list(snapshot.views(batch_rows))
    assert [len(v["id"]) for v in views] == [batch_rows or 16] * (96 // (batch_rows or 16))
    ids = np.concatenate([v["id"] for v in views])
    assert ids.tolist() == published_ids(cache)
    assert np.array_equal(np.concatenate([v["image"] for v in views]), images(ids))
    assert all(v["image"].flags.writeable and v["image"].flags.c_contiguous for v in views)


def test_ragged_columns_are_views_too_with_offsets_of_their_own(tmp_path):
    ragged = {"r": ac.Ragged("float32", (2,)), "c": ac.Ragged("complex64")}
    schema = ac.Schema({**ragged, "id": ac.Tensor("int64")})
    rows = [np.full((n % 4, 2), n, np.float32) for n in range(12)]
    cache = make_cache(tmp_path / "cache", schema, segment_rows=6)
    with cache.writer() as writer:
        for n, row in enumerate(rows):
            writer.append(r=row, c=np.full(n, 1j * n, np.complex64), id=n)
    with cache.snapshot() as snapshot:
        for first, view in zip(range(0, 12, 3), snapshot.views(3), strict=True):
            for i in range(3):
                start, stop = view["r"].offsets[i : i + 2]
                assert np.array_equal(view["r"].data[start:stop], rows[first + i])
                start, stop = view["c"].offsets[i : i + 2]
                assert view["c"].data[start:stop].tolist() == [1j * (first + i)] * (first + i)
    with Loader(cache, 3, shuffle="blocks") as loader:
        loader.assert_zero_copy()
        seen = []
        for batch in loader:
            for i, n in enumerate(batch["id"].tolist()):
                start, stop = batch["r"].offsets[i : i + 2]
                assert np.array_equal(batch["r"].data[start:stop], rows[n])
                seen.append(n)
        assert sorted(seen) == list(range(12))


def test_text_is_gathered_beside_views(tmp_path):
    schema = ac.Schema({"x": ac.Tensor("int64"), "t": ac.String()})
    cache = make_cache(tmp_path / "cache", schema, segment_rows=4)
    with cache.writer() as writer:
        for n in range(8):
            writer.append(x=n, t=f"row {n}")
    with Loader(cache, 2, shuffle="blocks") as loader:
        batches = list(loader)
    assert sorted((x, t) for b in batches for x, t in zip(b["x"].tolist(), b["t"], strict=True)) == [
        (n, f"row {n}") for n in range(8)
    ]
    assert [list(batch) for batch in batches] == [["x", "t"]] * 4


# where a copy would happen


def test_views_refuse_what_would_be_copied(tmp_path):
    schema = ac.Schema({"x": ac.Tensor("int64"), "t": ac.String()})
    texts = make_cache(tmp_path / "texts", schema)
    with texts.writer() as writer:
        writer.append(x=1, t="a")
    with texts.snapshot() as snapshot:
        with pytest.raises(ValueError, match=r"\['t'\]"):
            snapshot.views()
        assert [v["x"].tolist() for v in snapshot.views(columns=["x"])] == [[1]]
    with Loader(texts, 1, shuffle=None) as loader, pytest.raises(ValueError, match=r"\['t'\]"):
        loader.assert_zero_copy()
    with Loader(texts, 1, shuffle=None, columns=["x"]) as loader:
        loader.assert_zero_copy()


def test_a_short_segment_that_comes_after_the_assertion_raises_in_its_step(cache):
    with Loader(cache, 8, shuffle=None) as loader:
        loader.assert_zero_copy()
        with cache.writer() as writer:
            for n in range(96, 96 + 12):
                writer.append(sample(n))
        publish(cache, 1, first=200)
        delivered = []
        with pytest.raises(ValueError, match="needs a copy"):
            delivered.extend(i for batch in loader for i in batch["id"].tolist())
        assert delivered == list(range(96 + 8))


@pytest.mark.parametrize("shuffle", ["blocks", None])
def test_batches_that_are_no_run_are_copied_and_counted(cache, shuffle):
    with Loader(cache, 7, shuffle=shuffle, drop_last=False) as loader:
        batches = list(loader)
        stats = loader.stats()
    ids = np.concatenate([batch["id"] for batch in batches])
    assert sorted(ids.tolist()) == published_ids(cache)
    assert all(np.array_equal(b["image"], images(b["id"])) for b in batches)
    assert 0 < stats.copied_bytes < stats.bytes == 96 * (8 + 1024)


def test_more_views_than_mappings_allow_become_copies(cache, monkeypatch):
    limit(monkeypatch, mapped_views=live_mappings() + 2)
    with Loader(cache, 8, shuffle="blocks") as loader:
        batches = list(loader)
        assert mapped_segments(cache) == 2
        assert all(np.array_equal(b["image"], images(b["id"])) for b in batches)
        assert sorted(i for b in batches for i in b["id"].tolist()) == published_ids(cache)
        loader.assert_zero_copy()
        with pytest.raises(ValueError, match="too many views are alive"):
            list(loader)


# how long they live


def test_a_view_keeps_its_segment_mapped_and_leased_and_no_older_one(cache):
    with cache.snapshot() as snapshot:
        views = list(snapshot.views())
    kept = views[3]["image"][5:7, 2]
    del views
    gc.collect()
    assert mapped_segments(cache) == 1
    assert cache.evict("1GB") > 0
    assert published_ids(cache) == list(range(48, 96)), "the lease starts with the kept segment"
    assert np.array_equal(kept, images([53, 54])[:, 2])
    del kept
    assert not leased(cache)
    assert mapped_segments(cache) == 0


@pytest.mark.parametrize("shuffle", ["blocks", None])
def test_a_tensor_of_a_kept_slice_keeps_what_it_needs_alone(cache, shuffle, torch):
    from arrowcache.torch import Loader as TorchLoader

    with TorchLoader(cache, 8, shuffle=shuffle) as loader:
        batches = list(loader)
    kept = [batch["image"][1, 3] for batch in batches]
    numbers = [int(batch["id"][1]) for batch in batches]
    del batches
    assert torch.equal(torch.stack(kept), torch.from_numpy(images(numbers)[:, 3]))
    assert leased(cache)
    copies = [tensor.clone() for tensor in kept]
    del kept
    assert not leased(cache)
    assert torch.equal(torch.stack(copies), torch.from_numpy(images(numbers)[:, 3]))


@pytest.mark.parametrize("shuffle", ["blocks", None])
def test_dropped_batches_are_unmapped(cache, shuffle):
    with Loader(cache, 4, shuffle=shuffle, prefetch=1) as loader:
        for batch in loader:
            assert len(batch["id"]) == 4
        del batch
        wait_until(lambda: mapped_segments(cache) == 0, "the last view to be unmapped")


def test_an_odd_batch_among_views_takes_no_more_memory_than_it_has(cache):
    """A group's memory would be 64 MiB, of which it used a kilobyte."""
    with Loader(cache, 7, shuffle=None, drop_last=False, prefetch=1) as loader:
        batch_bytes = 7 * (8 + 1024)
        for batch in loader:
            del batch
        assert 0 < loader.stats().slot_bytes <= 32 * batch_bytes


def test_a_numpy_int_is_a_number_of_rows_and_a_closed_snapshot_says_so_at_once(cache):
    with cache.snapshot() as snapshot:
        assert [len(view["id"]) for view in snapshot.views(np.int64(8))][:2] == [8, 8]
    with pytest.raises(ValueError, match="closed"):
        snapshot.views(8)


def test_segments_for_which_no_mapping_is_left_are_viewed_all_the_same(cache, monkeypatch):
    limit(monkeypatch, mapped_segments=2)
    again = ac.Cache.open(cache.path)
    with Loader(again, 8, shuffle="blocks") as loader:
        loader.assert_zero_copy()
        batches = list(loader)
        assert loader.stats().copied_bytes == 0
    assert all(np.array_equal(b["image"], images(b["id"])) for b in batches)
    with again.snapshot() as snapshot:
        assert sum(len(view["id"]) for view in snapshot.views()) == len(snapshot)
