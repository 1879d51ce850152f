"""Complaints about memory: /dev/shm, growth, copies; and about pickle. Rows 9, 10 and 20, and the rest."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import make_cache, mapped_seqs, publish, segment_files
from processes import Script, small_disk

import arrowcache as ac

WIDE = ac.Schema({"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (64, 64))})


@pytest.fixture
def wide_cache(tmp_path):
    """640 rows of 16 KiB: a batch of 64 is 1 MiB."""
    cache = ac.Cache.create(tmp_path / "cache", WIDE, capacity="64MiB", segment_bytes="2MiB")
    with cache.writer() as writer:
        images = np.arange(640, dtype=np.float32)[:, None, None] + np.zeros((64, 64), np.float32)
        writer.extend(id=np.arange(640), image=images)
    return cache


NO_SHM = """
    import faulthandler, os, signal, sys
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(100)
    import arrowcache as ac

    def changed(batch):
        return batch | {"image": batch["image"] + 1}

    def draws(rng):
        while True:
            yield {"id": 0, "image": rng.random((64, 64), "float32")}

    def check(batches, more):
        seen = []
        for batch in batches:
            assert (batch["image"][:, 5, 5] == batch["id"] + more).all()
            seen += batch["id"].tolist()
        assert sorted(seen) == list(range(640)), len(seen)

    if __name__ == "__main__":
        path = sys.argv[1]
        assert os.statvfs("/dev/shm").f_blocks <= 64  # a quarter of a batch; torch has semaphores there
        with ac.Loader(path, 64, workers=2, transform=changed) as loader:
            check(loader, 1)
        if sys.argv[2] == "torch":
            import torch
            from arrowcache.torch import Loader, dataloader

            with Loader(path, 64, workers=2, transform=changed) as loader:
                check(loader, 1)
            check(dataloader(path, 64, 2), 0)
            check(dataloader(path, 64, 2, transform=changed), 1)
        with ac.SamplerPool(path, draws, workers=2, segments=3, progress=False) as pool:
            pool.wait(timeout=60)
        print(len(os.listdir("/dev/shm")), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["core", "torch"])
def test_complaint_09_dev_shm_may_be_as_small_as_it_likes(wide_cache, how):
    if how == "torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    with Script(NO_SHM, wide_cache.path, how, within=small_disk("/dev/shm", "256k")) as script:
        assert script.line() == "0"
        assert script.end() == (0, "")


GROWTH = """
    import sys
    from pathlib import Path
    import arrowcache as ac
    from arrowcache.torch import dataloader

    def private(batch):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
        return {"kib": kib["Private_Dirty"] + kib["Private_Clean"], "rows": len(batch["id"])}

    if __name__ == "__main__":
        most = []
        for path in sys.argv[1:]:
            loader = dataloader(path, 1 << 15, 2, transform=private, multiprocessing_context="fork")
            made = [batch for _ in range(3) for batch in loader]
            most.append(max(batch["kib"] for batch in made))
            print(sum(batch["rows"] for batch in made), flush=True)
        print(most[1] - most[0], flush=True)
"""


@pytest.mark.slow
def test_complaint_10_no_object_a_row_so_forked_workers_do_not_grow(tmp_path):
    """A million Python ints are 32 MB, which counting references would copy into every forked worker."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    schema = ac.Schema({"id": ac.Tensor("int64")})
    few, cache = (
        ac.Cache.create(tmp_path / name, schema, capacity="64MiB", segment_bytes="1MiB")
        for name in ("few", "cache")
    )
    for each, rows in ((few, 1 << 15), (cache, 1 << 20)):
        with each.writer() as writer:
            writer.extend(id=np.arange(rows))

    gc.collect()
    before = sys.getallocatedblocks()
    with ac.Loader(cache, 4096) as loader:
        for _ in range(2):
            assert sum(len(batch["id"]) for batch in loader) == 1 << 20
        epoch = iter(loader)
        batches = [next(epoch) for _ in range(4)]
        assert sys.getallocatedblocks() - before < 100_000
        del batches
        epoch.close()
    with Script(GROWTH, few.path, cache.path) as script:
        assert [script.line(), script.line()] == [str(3 << 15), str(3 << 20)]
        assert int(script.line()) < 16 * 1024
        assert script.end() == (0, "")


@pytest.mark.slow
def test_complaint_20_zero_copy_is_none_and_is_told_from_memory_of_its_own(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="64MiB", segment_bytes="4MiB", segment_rows=2048)
    publish(cache, 6, rows=2048)
    with ac.Loader(cache, 1024, shuffle=None) as loader:
        loader.assert_zero_copy()
        unread = loader.stats()
        batches = list(loader)
        stats = loader.stats()
        assert stats.copied_bytes == 0
        assert stats.slot_bytes == 0
        touched = sum(int(batch["image"].sum() > 0) for batch in batches)
        assert touched == 12
        with open(segment_files(cache)[0], "r+b") as file:  # which nobody may do: to see it through the view
            data = file.read()
            position = data.index(batches[0]["image"][7].tobytes())
            file.seek(position)
            file.write(np.float32(-1).tobytes())
        assert batches[0]["image"][7, 0, 0] == -1, "a copy"
        stats = loader.stats()
        assert stats.file_bytes > 12 << 20
        assert stats.private_bytes - unread.private_bytes < 6 << 20, "what was mapped counts as memory"
        kept = batches[3]["image"][5:6]
        del batches
        gc.collect()
    assert mapped_seqs(cache) == [1], "what a slice needs, and no more"
    del kept
    assert mapped_seqs(cache) == []
    assert cache.stats().leased_bytes == 0
    with ac.Loader(cache, 1024, shuffle="rows") as loader, pytest.raises(ValueError, match="shuffle"):
        loader.assert_zero_copy()
    with ac.Loader(cache, 1000, shuffle=None) as loader, pytest.raises(ValueError, match="divide"):
        loader.assert_zero_copy()


class Bomb:
    """What a hostile file would hold."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self):
        return os.mkdir, (str(self.sign),)


NO_PICKLE = """
    import os, sys

    def refuse(event, arguments):
        if event == "pickle.find_class":
            os.write(2, f"{event} {arguments}".encode())
            os._exit(9)

    sys.addaudithook(refuse)
    import warnings
    import numpy as np
    import arrowcache as ac
    from helpers import ids_of, publish

    cache = ac.Cache.open(sys.argv[1])
    publish(cache, 2, first=160)
    warnings.simplefilter("ignore", RuntimeWarning)  # what is quarantined
    for options in ({}, {"workers": 2}, {"shuffle": None}, {"rank": 0, "world_size": 1, "run_id": "job"}):
        with ac.Loader(cache, 8, **options) as loader:
            epoch = iter(loader)
            next(epoch)
            state = loader.state_dict()
            assert len(ids_of(epoch)) > 100
            loader.load_state_dict(state)
            list(loader)
    with cache.snapshot() as snapshot:
        snapshot.gather([0])
        snapshot.table()
    cache.dataset().to_table()
    cache.verify()
    ac.Cache.open(sys.argv[1], check="bytes").stats()
    print("well", flush=True)
"""


@pytest.mark.slow
def test_complaint_also_no_pickle_on_the_data_path(tmp_path, monkeypatch):
    """An audit hook ends the process, and each of its workers, that looks a class up for a pickle."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(
        "import os, sys\nsys.addaudithook(lambda event, _: event == 'pickle.find_class' and os._exit(9))\n"
    )
    monkeypatch.syspath_prepend(hooks)
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    sign = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(sign))
    target = segment_files(cache)[0]
    for name in ("00000000000000000900-16-.arrow", target.name):
        (cache.path / "segments" / name).write_bytes(bomb)
    for name in ("pools/default.0", "ranks/job-0-0", "incoming/x.part", "lease.lock"):
        (cache.path / name).write_bytes(bomb)
    with Script(NO_PICKLE, cache.path, new_interpreter=True) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")
    assert not sign.exists()
    for state in (bomb, {"format": bomb}, {"plan": bomb}, bomb.hex()):
        with ac.Loader(cache, 8) as loader, pytest.raises((ValueError, TypeError)):
            loader.load_state_dict(state)
    (cache.path / "cache.json").write_bytes(bomb)
    with pytest.raises(ac.CacheFormatError):
        ac.Cache.open(cache.path)
    assert not sign.exists()


def test_complaint_also_views_are_copy_on_write_and_none_is_not_writable(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from arrowcache.torch import Loader

    cache = make_cache(tmp_path / "cache")
    publish(cache, 4)
    before = [path.read_bytes() for path in segment_files(cache)]
    for loader in (Loader(cache, 16, shuffle=None), Loader(cache, 16, shuffle="blocks")):
        with loader:
            loader.assert_zero_copy()
            for _ in range(2):
                for batch in loader:
                    base = torch.arange(256.0).reshape(16, 16)
                    assert torch.equal(batch["image"], base + batch["id"][:, None, None])
                    batch["image"].div_(0)
                    batch["id"].zero_()
    with cache.snapshot() as snapshot:
        for view in snapshot.views():
            torch.from_numpy(view["image"]).fill_(-1)  # warns of an array that is not writable
    assert [path.read_bytes() for path in segment_files(cache)] == before
    assert cache.verify() == []
