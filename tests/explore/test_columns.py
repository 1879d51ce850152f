from __future__ import annotations

import sys

import pytest
from helpers import make_cache, publish, seqs
from processes import Script

from arrowcache.arrow.schema import Binary, Ragged, Tensor, type_name
from arrowcache.explore.columns import numbers, walk
from arrowcache.reading.snapshot import Snapshot
from arrowcache.storage.mapping import live_mappings


def test_what_was_passed_is_evicted_while_one_walks_on(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="512KiB")
    publish(cache, segments=14)
    with Snapshot.take(cache.store) as snapshot:
        seen = []
        for segment, batch in walk(snapshot, ["id"], "", progress=False):
            seen.append((segment.seq, batch.column("id")[0].as_py()))
            del batch
            if segment.seq:
                publish(cache, segments=1)  # on_full="raise": it finds room, or fails
    assert seen == [(seq, 16 * seq) for seq in range(14)]
    assert seqs(cache)[0] > 6


def test_what_is_still_used_stays_leased(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=3)
    with cache.snapshot() as snapshot:
        kept = [batch for _, batch in walk(snapshot, ["id"], "", progress=False)]
        del kept[1:]
        cache.evict("1GB")
        assert seqs(cache) == [0, 1, 2]
        assert kept[0].column("id").to_pylist() == list(range(16))
        del kept
        cache.evict("1GB")
        assert seqs(cache) == []


def test_few_segments_are_mapped_at_a_time(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=8)
    before = live_mappings()
    with cache.snapshot() as snapshot:
        most = max(
            live_mappings() - before + (batch is None)
            for _, batch in walk(snapshot, ["id", "image"], "", progress=False)
        )
    assert 2 <= most <= 3
    assert live_mappings() == before


def test_a_walk_that_is_left_early_leaves_no_lease(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=3)
    with cache.snapshot() as snapshot:
        for _, batch in walk(snapshot, ["id"], "", progress=False):
            del batch
            break
    assert cache.stats().leased_bytes == 0


def test_a_bar_is_shown_if_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # others have imported it: this is no notebook yet
    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=2)
    for progress in (True, False, None):
        with cache.snapshot() as snapshot:
            list(walk(snapshot, ["id"], "looking", progress=progress))
        assert ("looking: 100%" in capsys.readouterr().err) is (progress is True)


@pytest.mark.slow
def test_a_notebook_shows_a_bar_and_not_as_an_error(tmp_path):
    for needed in ("pandas", "ipykernel"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    publish(make_cache(tmp_path / "cache"), segments=2)
    code = """
        import sys
        import ipykernel.zmqshell  # as a kernel has
        from arrowcache import explore
        explore.describe(sys.argv[1])
    """
    with Script(code, tmp_path / "cache", new_interpreter=True) as script:
        assert "describing" in script.line()
        assert script.end() == (0, "")  # stderr is what a notebook shows on red


def test_numbers_are_the_files_own_memory(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=1)
    with cache.snapshot() as snapshot:
        batch = snapshot.table().to_batches()[0]
        found = numbers(batch.column("image"), cache.schema["image"])
        assert found.shape == (16 * 256,)
        assert found.ctypes.data == batch.column("image").storage.values.buffers()[1].address
        del batch, found


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Tensor("int64"), "int64"),
        (Tensor("float32", (3, 4)), "float32[3, 4]"),
        (Ragged("int8"), "ragged int8"),
        (Ragged("int8", (4,)), "ragged int8[4]"),
        (Binary(), "binary"),
    ],
)
def test_types_have_short_names(kind, name):
    assert type_name(kind) == name
