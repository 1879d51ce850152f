"""The interpreter ends with jobs on their way, of rows in memory or on the disk: no crash, no hang, no lease.

EXITS says how often; that of benchmarks/RESULTS.md is of 200, half of them cold.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from processes import Script

import arrowcache as ac

EXITS = int(os.environ.get("EXITS", "14"))

#: Each child ends as a script does, with everything that it left on its way.
SCRIPT = """
import os, sys, threading, time, warnings
import numpy as np
import arrowcache as ac
from arrowcache.reading.slots import Slots

path, exits = sys.argv[1], int(sys.argv[2])
ac.Cache.open(path).snapshot().close()
kept = []
warnings.simplefilter("ignore", ResourceWarning)  # nothing is closed

def gathers(cache, rng):
    snapshot = cache.snapshot()
    kept.append(snapshot)
    snapshot.map_all()
    for _ in range(4):
        ids = rng.integers(0, len(snapshot), 64)
        columns = {"image": ((128, 128), np.dtype(np.float32)), "id": ((), np.dtype(np.int64))}
        slot = Slots(columns, 64).lend(64)
        kept.append(snapshot.read(ids, snapshot.columns_of(["id", "image", "name"]), slot))
    kept.append(snapshot.fetch(0, len(snapshot), ["id", "image", "name"]))

def thread(cache, rng):
    is_begun = threading.Event()
    def work():
        with cache.snapshot() as snapshot:
            snapshot.map_all()  # by Arrow's C++: no daemon thread may be in it when the interpreter ends
            while True:
                snapshot.gather(rng.integers(0, len(snapshot), 64))
                is_begun.set()
    threading.Thread(target=work, daemon=True).start()
    is_begun.wait()
    time.sleep(rng.random() * 0.05)

def views(cache, rng):
    kept.append(list(cache.snapshot().views(columns=["image"])))
    gathers(cache, rng)

def loads(cache, rng, **options):
    loader = ac.Loader(cache, 16, **options)
    epoch = loader.repeat()
    kept.extend((loader, epoch, [next(epoch) for _ in range(int(rng.integers(1, 40)))]))

def threads(cache, rng):
    loads(cache, rng, workers=2, worker_type="thread", transform=dict)

def processes(cache, rng):
    loads(cache, rng, workers=1)

def in_cycle(cache, rng):
    loads(cache, rng, shuffle="window")
    cycle = [kept.copy()]
    cycle.append(cycle)
    kept[:] = [cycle]

SCENES = [gathers, thread, views, loads, threads, in_cycle, processes]

def drop(folder):
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

for number in range(exits):
    scene = SCENES[number % len(SCENES)]
    if number % 2:
        drop(os.path.join(path, "segments"))
    pid = os.fork()
    if not pid:
        scene(ac.Cache.open(path), np.random.default_rng(number))
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        sys.exit(f"exit {number}, {scene.__name__}: {status}")
    print(number, flush=True)
"""

#: One child each: as it exits, a daemon thread is in an epoch, or a tensor over a file outlives all modules.
OF_TORCH = """
import os, sys, threading
import numpy as np
import arrowcache as ac
from arrowcache.torch import Loader, cached
from torch.utils.data import Dataset

class Items(Dataset):
    def __len__(self): return 4096
    def __getitem__(self, index): return {"id": index}

path, faces = sys.argv[1], sys.argv[2].split(",")

def items():
    return cached(Items(), path + "-items", capacity="64MiB")

EPOCHS = {
    "numpy": lambda: ac.Loader(path, 1),
    "repeat": lambda: ac.Loader(path, 1).repeat(),
    "device": lambda: Loader(path, 1, device="cpu"),
    "items": lambda: Loader(items(), 1, workers=0),
    "items on a device": lambda: Loader(items(), 1, workers=0, device="cpu"),
}

def consumed(batches):
    begun = threading.Event()

    def consume():
        try:
            for batch in batches:
                begun.set()
            print("an epoch that looked whole", flush=True)
        except Exception:
            print("an error that a daemon thread would print", flush=True)
            raise

    threading.Thread(target=consume, daemon=True).start()
    begun.wait()

def keep_a_tensor():
    global loader, batch
    wide = path + "-wide"
    with ac.Cache.create(wide, ac.Schema({"x": ac.Tensor("float32", (8192,))}), "64MiB", "4MiB") as cache:
        with cache.writer() as writer:
            writer.extend(x=np.zeros((240, 8192), np.float32))
    with Loader(wide, 48, shuffle=None) as loader:
        for batch in loader:
            pass
    assert loader.stats().copied_bytes < loader.stats().bytes

for face in faces:
    pid = os.fork()
    if not pid:
        keep_a_tensor() if face == "a tensor" else consumed(EPOCHS[face]())
        print(face, flush=True)
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        sys.exit(f"{face}: {status}")
"""


@pytest.mark.slow
@pytest.mark.smoke
def test_an_exit_within_an_epoch_or_with_a_tensor_over_a_file_says_nothing(tmp_path):
    """Neither that the epoch of a daemon thread ended, nor an error of that."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    cache = ac.Cache.create(tmp_path / "cache", ac.Schema({"id": ac.Tensor("int64")}), "64MiB", "4MiB")
    with cache.writer() as writer:
        writer.extend(id=np.arange(200_000))
    faces = ["numpy", "repeat", "device", "items", "items on a device", "a tensor"]
    with Script(OF_TORCH, cache.path, ",".join(faces), new_interpreter=True) as script:
        assert [script.line() for _ in faces] == faces
        assert script.end() == (0, "")


@pytest.mark.slow
def test_interpreters_that_end_with_jobs_on_their_way_neither_crash_nor_hang(tmp_path: Path) -> None:
    schema = ac.Schema(
        {"id": ac.Tensor("int64"), "image": ac.Tensor("float32", (128, 128)), "name": ac.String()}
    )
    cache = ac.Cache.create(tmp_path / "cache", schema, "64MiB", "4MiB")
    with cache.writer() as writer:
        for number in range(512):
            writer.append(id=number, image=np.full((128, 128), number, np.float32), name=str(number))
    with Script(SCRIPT, cache.path, EXITS, new_interpreter=True) as script:
        for number in range(EXITS):
            assert script.line() == str(number)
        assert script.end() == (0, "")
    assert cache.stats().leased_bytes == 0
