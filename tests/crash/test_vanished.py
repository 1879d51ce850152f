"""A folder that is moved, removed or read-only while everything is at work on it.

What is open goes on to its end, whatever is new is an error that says what to do, and if the folder
comes back all goes on in the same process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from helpers import (
    ids_of,
    in_child,
    make_cache,
    publish,
    sample,
    wait_until,
    worker_pids,
    worker_processes_run,
)
from processes import Script, private_mounts

import arrowcache as ac

AT_WORK = """
    import os, pathlib, sys
    import numpy as np
    import arrowcache as ac
    from helpers import append_rows, ids_of, sample, wait_until, worker_pids

    def same(batch):
        return batch

    def met(batch):  # once there is a place to meet: both processes have begun the epoch, and mapped it
        if os.path.isdir(place):
            open(f"{place}/{os.getpid()}", "w").close()
            wait_until(lambda: len(os.listdir(place)) == 2, "the other process")
        return batch

    def draws(rng):
        while True:
            yield sample(int(rng.integers(1 << 20)))

    def fails(call, words):
        try:
            call()
        except Exception as error:
            text = str(error)
            assert isinstance(error, (OSError, ac.ArrowCacheError)), repr(error)
            assert all(word in text for word in words), text
        else:
            raise AssertionError("it did not fail")

    if __name__ == "__main__":
        path, words = sys.argv[1], sys.argv[2:]
        place = path + ".place"
        cache = ac.Cache.open(path)
        snapshot = cache.snapshot()
        snapshot.gather([0, 319])
        table = snapshot.table()
        loaders = {
            "plain": ac.Loader(cache, 16),
            "window": ac.Loader(cache, 16, shuffle="window", window_bytes=1 << 16),
            "threads": ac.Loader(cache, 16, workers=2, worker_type="thread", transform=same),
            "processes": ac.Loader(cache, 16, workers=2, transform=met),
        }
        for loader in loaders.values():
            assert len(ids_of(loader)) == 320
        wait_until(lambda: len(worker_pids()) == 2, "the processes")
        os.mkdir(place)
        epochs = {name: iter(loader) for name, loader in loaders.items()}
        made = {name: ids_of([next(epoch)]) for name, epoch in epochs.items()}
        writer = cache.writer("raise")
        for number in range(320, 335):
            writer.append(sample(number))
        maps = lambda pid: pathlib.Path(f"/proc/{pid}/maps").read_text().count(path + "/segments")
        wait_until(lambda: min(map(maps, worker_pids())) >= 20, "the processes to have mapped all")
        print("ready", flush=True)
        sys.stdin.readline()

        for name, epoch in epochs.items():
            assert sorted(made[name] + ids_of(epoch)) == list(range(320)), name
        assert table["id"].to_pylist() == list(range(320))
        assert snapshot.gather(np.arange(320))["id"].tolist() == list(range(320))
        writer.append(sample(335))  # the sixteenth is taken, and cannot be published yet
        fails(lambda: writer.append(sample(336)), words)
        for call in (cache.stats, cache.verify, cache.snapshot):
            fails(call, words)
        fails(lambda: cache.evict(1), words)
        fails(lambda: cache.resize("2MiB"), words)
        fails(lambda: ac.SamplerPool(cache, draws, workers=1, progress=False), words)
        for name, loader in loaders.items():
            fails(lambda: next(iter(loader)), words)
        print("through", flush=True)
        if sys.stdin.readline() == "back\\n":
            append_rows(cache, range(336, 352))
            writer.close()
            snapshot.close()
            for name, loader in loaders.items():
                assert sorted(ids_of(loader)) == list(range(352)), name
            assert cache.verify() == []
            with ac.SamplerPool(cache, draws, workers=1, segments=1, progress=False) as pool:
                pool.wait(timeout=60)
        writer.abort()
        snapshot.close()
        for loader in loaders.values():
            loader.close()
        del table
        print("well", flush=True)
"""


@pytest.fixture
def cache(tmp_path):
    """Twenty segments of 16 rows, ids 0 to 319."""
    cache = make_cache(tmp_path / "cache")
    publish(cache, 20)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moved and put back", "moved", "removed"])
def test_what_is_at_work_on_a_folder_that_vanishes_ends_well_and_the_rest_says_so(cache, tmp_path, how):
    with Script(AT_WORK, cache.path, "moved or removed", "put it back") as script:
        assert script.line() == "ready"
        if how == "removed":
            shutil.rmtree(cache.path)
        else:
            cache.path.rename(tmp_path / "elsewhere")
        script.say("gone")
        assert script.line() == "through"
        if how == "moved and put back":
            (tmp_path / "elsewhere").rename(cache.path)
            script.say("back")
        else:
            script.say("gone for good")
        assert script.line() == "well"
        assert script.end() == (0, "")
    assert cache.path.exists() == (how == "moved and put back"), "somebody made it anew"
    if how == "moved":
        with ac.Cache.open(tmp_path / "elsewhere") as moved:
            assert moved.stats().leased_bytes == 0
            assert moved.verify() == []


def test_whoever_first_lists_a_folder_that_vanished_says_so(cache, tmp_path):
    loader = ac.Loader(cache, 16, shuffle=None)
    cache.path.rename(tmp_path / "elsewhere")
    for call in (
        lambda: iter(ac.Loader(cache, 16)),
        lambda: iter(ac.Loader(cache, 16, rank=0, world_size=1, run_id="job")),
        loader.assert_zero_copy,
        cache.verify,
    ):
        with pytest.raises(FileNotFoundError, match="moved or removed while in use: put it back"):
            call()


@pytest.mark.slow
def test_a_read_only_disk_ends_nothing_that_is_open_and_the_error_says_what_to_do(cache, tmp_path):
    with Script(AT_WORK, cache.path, "Read-only", "mount it anew", within=private_mounts()) as script:
        assert script.line() == "ready"
        within = ["nsenter", "--mount", f"--target={script.pid}"]
        aside = tmp_path / "aside"  # where nobody opens a file for writing, which would keep it writable
        aside.mkdir()
        for command in (
            ["mount", "--bind", cache.path, aside],
            ["mount", "-o", "remount,bind,ro", aside],
            ["mount", "--move", aside, cache.path],
        ):
            subprocess.run([*within, *command], check=True)
        script.say("read-only")
        assert script.line() == "through"
        subprocess.run([*within, "umount", "--lazy", cache.path], check=True)
        script.say("back")
        assert script.line() == "well"
        assert script.end() == (0, "")


def test_a_folder_without_rights_says_whose_it_is(tmp_path):
    """Root may do all, and so becomes somebody else."""

    def as_somebody_else() -> None:
        if owner == 0:
            os.setgroups([])
            os.setuid(65534)
        mine = os.geteuid()
        with pytest.raises(PermissionError, match=rf"the cache is user {owner}'s, .* user {mine}: .*chmod"):
            cache.stats()
        with pytest.raises(PermissionError, match=r"chmod"):
            ac.Cache.open(cache.path)

    owner = os.geteuid()
    with tempfile.TemporaryDirectory(prefix="arrowcache-test-") as name:
        os.chmod(name, 0o711)
        cache = make_cache(Path(name) / "cache")
        publish(cache, 20)
        snapshot = cache.snapshot()
        for lock in ("cache.lock", "lease.lock"):
            (cache.path / lock).chmod(0o400)
        with in_child(as_somebody_else):
            pass
        assert snapshot.gather(range(320))["id"].tolist() == list(range(320))
        snapshot.close()


def test_rows_that_were_taken_before_an_error_are_counted_in_it(cache, tmp_path):
    """It was not said, so whoever gave them all again had some of them twice."""
    import numpy as np

    writer = cache.writer("raise")
    elsewhere = tmp_path / "elsewhere"
    cache.path.rename(elsewhere)
    rows = [sample(number) for number in range(320, 360)]
    columns = {name: np.stack([row[name] for row in rows]) for name in ("id", "image")}
    with pytest.raises(FileNotFoundError, match=r"16 of 40 samples were taken.*moved or removed"):
        writer.extend(columns)
    elsewhere.rename(cache.path)
    writer.extend({name: column[16:] for name, column in columns.items()})
    writer.close()
    with ac.Loader(cache, 16, drop_last=False) as loader:
        assert sorted(ids_of(loader)) == list(range(360))


@pytest.mark.slow
def test_a_folder_that_goes_while_workers_start_is_said_by_them(cache, tmp_path, monkeypatch):
    go_on = tmp_path / "go on"
    waiting = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    worker_processes_run(monkeypatch, waiting)
    with ac.Loader(cache, 16, workers=2, transform=dict, timeout=60) as loader:
        epoch = iter(loader)
        shutil.rmtree(cache.path)
        go_on.touch()
        with pytest.raises(FileNotFoundError, match=r"no cache here|moved or removed"):
            list(epoch)


TORCH = """
    import faulthandler, signal, sys
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(100)
    import arrowcache as ac
    from helpers import ids_of
    from torch.utils.data import DataLoader
    from arrowcache.torch import CacheDataset, EpochBatchSampler, Loader, dataloader

    def through(epoch):
        try:
            return ids_of(epoch)
        except (OSError, ac.ArrowCacheError) as error:
            assert "moved or removed" in str(error) or "no cache here" in str(error), error
            return None

    if __name__ == "__main__":
        cache = ac.Cache.open(sys.argv[1])
        kinds = {
            "loader": Loader(cache, 16),
            "dataloader": dataloader(cache, 16, 2),
            "sampler": DataLoader(
                CacheDataset(cache), batch_sampler=EpochBatchSampler(cache, 16), num_workers=1,
                persistent_workers=True,
            ),
        }
        for loader in kinds.values():
            assert sorted(ids_of(loader)) == list(range(320))
        epochs = {name: iter(loader) for name, loader in kinds.items()}
        made = {name: ids_of([next(epoch) for _ in range(4)]) for name, epoch in epochs.items()}
        print("ready", flush=True)
        sys.stdin.readline()
        ended = {name: through(epoch) for name, epoch in epochs.items()}
        for name, rest in ended.items():
            assert rest is None or sorted(made[name] + rest) == list(range(320)), name
        print(*(name for name, rest in ended.items() if rest is not None), flush=True)
        for name, loader in kinds.items():
            assert through(loader) is None, name
        print("through", flush=True)
        sys.stdin.readline()
        for name, loader in kinds.items():
            assert sorted(ids_of(loader)) == list(range(320)), name
        print("well", flush=True)
"""


@pytest.mark.slow
def test_torch_delivers_the_epoch_or_says_so_when_the_folder_vanishes(cache, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    with Script(TORCH, cache.path) as script:
        assert script.line() == "ready"
        cache.path.rename(tmp_path / "elsewhere")
        script.say("gone")
        assert {"loader", "dataloader"} <= set(script.line().split())
        assert script.line() == "through"
        (tmp_path / "elsewhere").rename(cache.path)
        script.say("back")
        assert script.line() == "well"
        assert script.end()[0] == 0


@pytest.mark.slow
def test_worker_processes_have_an_epoch_mapped_before_they_need_it(cache):
    """They mapped each segment with its first batch, and failed in an epoch that had begun well."""

    def mapped(pid: int) -> int:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return len({line.rpartition("/")[2] for line in lines if "/segments/" in line})

    with ac.Loader(cache, 320, workers=2, drop_last=False, transform=dict) as loader:
        wait_until(lambda: next(iter(loader)) and len(worker_pids()) == 2, "both processes")
        publish(cache, 4)
        epoch = iter(loader)  # its one step is made by one of the two
        wait_until(lambda: [mapped(pid) for pid in worker_pids()] == [24, 24], "both to have mapped all")
        shutil.rmtree(cache.path)
        assert sorted(ids_of(epoch)) == list(range(384))
