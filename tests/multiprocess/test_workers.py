"""Worker processes: what they make, and what happens when they, or the process they work for, die."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    ids_of,
    make_cache,
    names_in_dev_shm,
    open_files,
    publish,
    published_ids,
    sample,
    wait_until,
    worker_pids,
    worker_processes_run,
)
from processes import Script
from quick import first_is_quick

import arrowcache as ac


def loader_of(cache, batch_size=16, workers=2, **options):
    return ac.Loader(cache, batch_size, workers=workers, **options)


def in_shared_memory(batch):
    """Whether a process has made it."""
    address = batch["id"].ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return "/memfd:arrowcache (deleted)" in line
    return False


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_same(one, other):
    assert list(one) == list(other)
    for name, value in other.items():
        mine = one[name]
        assert type(mine) is type(value), name
        if isinstance(value, ac.Values):
            assert_same(mine._asdict(), value._asdict())
        elif isinstance(value, np.ndarray):
            assert mine.dtype == value.dtype, name
            assert mine.shape == value.shape, name
            assert mine.flags.writeable, name
            assert np.array_equal(mine, value), name
        else:
            assert mine == value, name


def assert_all_same(batches, others):
    for one, other in zip(batches, others, strict=True):
        assert_same(one, other)


def twice(batch):
    return batch | {"image": batch["image"] * 2}


def in_place(batch):
    batch["image"] += 1
    return batch


def swapped(batch):
    """Each of two columns of one kind lies where the other came from, and one lies within itself."""
    batch["other"] = batch["image"][::-1]
    batch["id"], batch["again"] = batch["id"][::-1], batch["id"]
    return batch


def reduced(batch):
    return {
        "mean": batch["image"].mean((1, 2)),
        "n": len(batch["id"]),
        "max": batch["id"].max(),
        "none": np.zeros(()),
    }


def some_rows(batch):
    keep = batch["id"] % 3 != 0
    return {name: column[keep] for name, column in batch.items()}


def varied(batch):
    lengths = batch["id"] % 5
    return {
        "texts": ["é" * int(n) for n in lengths],
        "raws": [b"x" * int(n * 100) for n in batch["id"]],
        "none": [],
        "values": ac.Values(np.repeat(batch["id"], lengths), np.concatenate(([0], np.cumsum(lengths)))),
        "words": np.array([f"row {i}" for i in batch["id"]], "U8"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform", first_is_quick([None, twice, in_place, swapped, reduced, some_rows, varied])
)
def test_worker_processes_yield_what_the_main_process_does(cache, transform):
    transform = by_value(transform)
    options = {"seed": 5, "transform": transform}
    with loader_of(cache, 13, **options) as loader, ac.Loader(cache, 13, **options) as plain:
        is_done = False  # without a transform the first epochs may be made here
        while not is_done:
            made, expected = list(loader), list(plain)
            assert len(made) == len(expected) == 24
            assert_all_same(made, expected)
            is_done = transform is not None or in_shared_memory(made[0])


@pytest.mark.slow
def test_small_batches_are_gathered_in_groups_and_are_the_same(cache):
    with loader_of(cache, 2, seed=1) as loader, ac.Loader(cache, 2, seed=1) as plain:
        batches: list = []
        while not batches or not in_shared_memory(batches[0]):
            batches, expected = list(loader), list(plain)
        assert_all_same(batches, expected)
    places = [batch["image"].ctypes.data for batch in batches]
    nbytes = batches[0]["image"].nbytes
    assert any(after == before + nbytes for before, after in itertools.pairwise(places)), "side by side"


@pytest.mark.slow
@pytest.mark.smoke
def test_epochs_follow_without_a_seam_and_have_new_segments(cache):
    with loader_of(cache, transform=by_value(twice)) as loader:
        epoch = loader.repeat()
        first = [next(epoch) for _ in range(20)]
        assert sorted(ids_of(first)) == list(range(320))
        second = [next(epoch) for _ in range(20)]
        assert sorted(ids_of(second)) == list(range(320))
        assert ids_of(first) != ids_of(second)
        epoch.close()


@pytest.mark.slow
def test_a_resumed_epoch_passes_over_segments_that_left(tmp_path):
    cache = make_cache(tmp_path / "cache")
    publish(cache, 10)
    with loader_of(cache) as loader:
        epoch = iter(loader)
        before = ids_of([next(epoch) for _ in range(3)])
        state = loader.state_dict()
    cache.evict(nbytes=cache.stats().published_bytes // 2)
    left = {*published_ids(cache)}
    with loader_of(cache, drop_last=False) as loader:
        loader.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="lost to it"):
            epoch = iter(loader)
        assert sorted(ids_of(epoch)) == sorted(left - set(before))


@pytest.mark.slow
def test_an_epoch_in_order_has_workers_let_go_of_what_it_has_passed(cache):
    with loader_of(cache, shuffle=None, workers=1, transform=by_value(twice)) as loader:
        epoch = iter(loader)
        everything = cache.stats().leased_bytes
        made = [next(epoch) for _ in range(14)]
        wait_until(lambda: cache.stats().leased_bytes < 0.6 * everything, "the oldest segments to be let go")
        assert ids_of(made + list(epoch)) == list(range(320))


# memory


@pytest.mark.slow
def test_nothing_that_is_kept_is_overwritten_and_memory_is_given_back(cache):
    with loader_of(cache, 8, transform=by_value(twice)) as loader:
        kept = [batch for _ in range(3) for batch in loader]
        labels = [batch["id"] for batch in kept]
        most = loader.stats().slot_bytes
        for batch in kept:
            assert (batch["image"] == 2 * np.stack([sample(i)["image"] for i in batch["id"].tolist()])).all()
        del kept, batch
        for batch in loader:
            del batch
        assert loader.stats().slot_bytes < most // 2
        assert sorted(i for label in labels for i in label.tolist()) == sorted(3 * list(range(320)))
    assert len(labels) == 120


@pytest.mark.slow
def test_nothing_is_in_dev_shm_or_has_a_name(cache, tmp_path):
    before = {*names_in_dev_shm([os.getpid()])}
    with loader_of(cache, transform=dict) as loader:
        epoch = iter(loader)
        next(epoch)
        for pid in [os.getpid(), *worker_pids()]:
            maps = Path(f"/proc/{pid}/maps")
            wait_until(lambda maps=maps: "/memfd:arrowcache (deleted)" in maps.read_text(), "the memory")
            if pid != os.getpid():  # this one may have other tests' things
                assert "/dev/shm" not in maps.read_text()
        assert not {*names_in_dev_shm([os.getpid(), *worker_pids()])} - before
        epoch.close()


@pytest.mark.slow
def test_without_memfd_an_unlinked_file_serves(cache, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with loader_of(cache, transform=by_value(twice)) as loader:
        assert sorted(ids_of(loader)) == list(range(320))
        for pid in worker_pids():
            maps = Path(f"/proc/{pid}/maps")
            wait_until(lambda maps=maps: f"{tmp_path}/#" in maps.read_text(), "the memory")
            assert "/memfd:" not in maps.read_text()
        assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.slow
def test_a_closed_loader_leaves_no_memory_and_no_descriptor(cache):
    def held():
        gc.collect()
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        return open_files() | {(0, inode) for *_, inode, name in maps if name.startswith("/memfd")}

    before = held()
    for _ in range(2):
        with loader_of(cache, transform=by_value(twice)) as loader:
            assert len(list(loader)) == 20
        del loader
    wait_until(lambda: held() <= before, "what the loaders had to be gone")


@pytest.mark.slow
def test_no_memory_is_an_error_that_says_so(cache, tmp_path):
    full = tmp_path / "full"

    def transform(batch):
        def refuse(*_):
            raise OSError(28, "No space left on device")

        reserve = os.__dict__.setdefault("_reserve", os.posix_fallocate)
        os.posix_fallocate = refuse if full.exists() else reserve
        return batch

    with loader_of(cache, transform=transform) as loader:
        epoch = iter(loader)
        kept = [next(epoch)]
        full.touch()
        with pytest.raises(MemoryError, match=r"of shared memory beside .*keep fewer or smaller batches"):
            kept += list(epoch)
        full.unlink()
        assert sorted(ids_of(loader)) == list(range(320))


@pytest.mark.slow
def test_workers_load_no_framework(cache):
    def frameworks(batch):
        import sys

        loaded = {"torch", "tensorflow", "pandas", "loky"} & set(sys.modules)
        return {"loaded": np.array([len(loaded)])}

    with loader_of(cache, transform=frameworks) as loader:
        assert [batch["loaded"].tolist() for batch in loader] == [[0]] * 20


# wrong transforms


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__("a text")
        self.lock = one, two


@pytest.mark.slow
def test_an_exception_that_cannot_be_pickled_arrives_as_text(cache):
    def transform(batch):
        raise Strange(print, 2)

    Strange = by_value(Odd)
    with loader_of(cache, transform=transform) as loader, pytest.raises(ac.WorkerError, match="a text"):
        next(iter(loader))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt])
def test_what_a_transform_raises_ends_neither_the_loop_nor_the_program_as_if_all_was_well(cache, kind):
    def transform(batch):
        raise kind

    with loader_of(cache, transform=transform) as loader, pytest.raises(RuntimeError, match=kind.__name__):
        next(iter(loader))


@pytest.mark.slow
def test_a_transform_that_returns_no_column_is_an_error_and_the_next_epoch_another(cache):
    """It hung, and left a loader that was short of memory, as it said. The processes stay."""
    with loader_of(cache, transform=lambda batch: {}) as loader:
        with pytest.raises(TypeError, match="at least one column"):
            next(iter(loader))
        workers = worker_pids()
        with pytest.raises(TypeError, match="at least one column"):
            next(iter(loader))
        assert worker_pids() == workers


@pytest.mark.slow
def test_an_exception_of_the_scripts_own_class_is_caught_by_it(cache):
    code = """
        import sys
        import arrowcache as ac

        class Mine(Exception):
            pass

        def transform(batch):
            raise Mine("well")

        with ac.Loader(sys.argv[1], 16, workers=1, transform=transform) as loader:
            try:
                next(iter(loader))
            except Mine as error:
                print(error, flush=True)
    """
    with Script(code, cache.path, new_interpreter=True) as script:
        assert script.line() == "well"
        assert script.end() == (0, "")


@pytest.mark.slow
def test_a_transform_may_return_something_else_for_every_batch(cache):
    """It was refused: slots were made before the batch, like the first one."""

    def transform(batch):
        number = int(batch["id"][0]) // 16
        forms = (
            {"x": np.full((4, 3), number)},
            {"x": np.full((900, 2, 2), number, np.float32)},
            {"y": number, "x": ["ä" * number] * number},
            {"x": [b"b" * number]},
            {"x": ac.Values(np.arange(number), np.array([0, number]))},
        )
        return forms[number % len(forms)]

    transform = by_value(transform)
    with (
        loader_of(cache, shuffle=None, transform=transform) as loader,
        ac.Loader(cache, 16, shuffle=None, transform=transform) as plain,
    ):
        for _ in range(2):
            assert_all_same(list(loader), list(plain))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b: None, "dict of columns.*not NoneType"),
        (lambda b: (b["id"], b["image"]), "not tuple"),
        (lambda b: {"x": 3j}, "'x' is complex.*worker_type='thread'"),
        (lambda b: {"x": 3**99}, "'x' has dtype object"),
        (lambda b: {"x": ["a", b"b"]}, "list with bytes in it"),
        (lambda b: {"x": [1, 2]}, "list with int in it"),
        (lambda b: {"x": np.array([None])}, "dtype object"),
        (lambda b: {"x": np.zeros(3, "i4,f8")}, "'x' has dtype"),
        (lambda b: {3: np.zeros(3)}, "names that are str"),
    ],
)
def test_a_result_that_cannot_travel_is_a_type_error_at_the_first_batch(cache, make, words):
    with loader_of(cache, transform=make) as loader, pytest.raises(TypeError, match=words):
        next(iter(loader))


@pytest.mark.slow
def test_a_transform_that_workers_cannot_import_is_told_so(cache, tmp_path, monkeypatch):
    (tmp_path / "vanishing.py").write_text("def transform(batch):\n    return batch\n")
    monkeypatch.syspath_prepend(tmp_path)
    import vanishing

    with loader_of(cache, transform=vanishing.transform) as loader:
        (tmp_path / "vanishing.py").unlink()
        for folder in tmp_path.glob("__pycache__"):
            for file in folder.iterdir():
                file.unlink()
        with pytest.raises(ac.WorkerError, match="No module named 'vanishing'"):
            next(iter(loader))


# the first batches, without a transform


def test_batches_without_a_transform_come_before_any_process_is_ready(cache, tmp_path, monkeypatch):
    """The first batch waited for the processes to import NumPy and Arrow: 230 ms, where 8 do."""
    go_on = tmp_path / "go on"
    waiting = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    worker_processes_run(monkeypatch, waiting)
    with loader_of(cache, seed=4) as loader, ac.Loader(cache, 16, seed=4) as plain:
        first, expected = iter(loader), [ids_of([batch]) for batch in plain]
        made = [ids_of([next(first)]) for _ in range(3)]
        go_on.touch()
        made += [ids_of([batch]) for batch in first]
        assert made == expected
        wait_until(lambda: in_shared_memory(next(iter(loader))), "a process to make batches")
        assert sorted(ids_of(loader)) == list(range(320))


# death


@pytest.mark.slow
@pytest.mark.parametrize(
    ("die", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"by signal 9 \(SIGKILL\)"),
        (lambda: os._exit(3), "with exit code 3"),
    ],
)
def test_a_step_that_kills_every_worker_is_given_up(cache, die, words):
    def transform(batch):
        if batch["id"][0] == 80:
            die()
        return batch

    with loader_of(cache, shuffle=None, transform=transform) as loader:
        epoch = iter(loader)
        assert ids_of([next(epoch) for _ in range(5)]) == list(range(80))
        with pytest.raises(ac.WorkerError, match=f"step 5 .* 3 worker processes .*{words}"):
            next(epoch)


@pytest.mark.slow
def test_a_stopped_worker_ends_in_a_timeout_and_close_ends_it(cache):
    with loader_of(cache, workers=1, transform=by_value(twice), timeout=0.5) as loader:

        def is_whole() -> bool:
            with suppress(ac.LoaderTimeoutError):  # the process starts
                return len(ids_of(loader)) == 320
            return False

        wait_until(is_whole, "an epoch whose batches come")
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ac.LoaderTimeoutError):
            list(loader)
    assert not is_alive(pid)
    assert cache.stats().leased_bytes == 0


# ends


@pytest.mark.slow
def test_close_in_the_middle_ends_the_workers_although_a_transform_blocks(cache, tmp_path):
    inside = tmp_path / "inside"

    def transform(batch):
        import time

        inside.touch()
        time.sleep(3600)

    loader = loader_of(cache, transform=transform)
    epoch = iter(loader)
    wait_until(inside.exists, "a transform to run")
    wait_until(lambda: loader.stats().transform_seconds > 0.1, "its time to be counted while it runs")
    workers = worker_pids()
    loader.close()
    assert not any(map(is_alive, workers))
    assert cache.stats().leased_bytes == 0
    with pytest.raises(RuntimeError, match="was closed"):
        next(epoch)
    with pytest.raises(ValueError, match="closed"):
        iter(loader)


END = """
    import sys, time
    import arrowcache as ac
    from helpers import wait_until, worker_pids

    loader = ac.Loader(sys.argv[1], 2, workers=2, transform=lambda batch: time.sleep(3600), prefetch=1)
    epoch = iter(loader)
    wait_until(worker_pids, "the processes")
    print(*worker_pids(), flush=True)
"""


@pytest.mark.slow
def test_a_process_may_end_while_its_transforms_hang(cache):
    with Script(END, cache.path, new_interpreter=True) as script:
        workers = script.line().split()
        assert script.end() == (0, "")
        assert not any(map(is_alive, workers))
        wait_until(lambda: not script.processes(), "the last thread of each process to end")
    assert cache.stats().leased_bytes == 0


RANKS = """
import multiprocessing
import sys
import arrowcache as ac

factor = 1

class Times:
    def __call__(self, batch):
        return {"x": batch["id"] * factor}

def sample(rng):
    yield {"id": 7, "image": rng.random((16, 16), dtype="float32")}

def rank(path):
    global factor
    factor = 3
    with ac.Loader(path, 16, workers=1, transform=Times()) as loader:
        print(sum(int(batch["x"].sum()) for batch in loader), flush=True)
    with ac.SamplerPool(path, sample, workers=1, segments=1) as pool:
        pool.wait(timeout=60)

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[2]).Process(target=rank, args=sys.argv[1:2])
    process.start()
    process.join()
    print(process.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_script_defines_works_in_processes_that_it_started(cache, tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(RANKS)
    done = subprocess.run(
        [sys.executable, str(script), str(cache.path), method],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [str(3 * sum(range(320))), "0"], done.stderr


def by_value(function):
    """A copy of a function of this module that other processes need not import."""
    if function in (None, dict):
        return function
    import cloudpickle

    module = __import__("sys").modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.loads(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


CLOSED = """
    import os, sys
    import arrowcache as ac

    for stream in map(int, sys.argv[2:]):
        os.close(stream)

    def same(batch):
        return batch

    with ac.Loader(sys.argv[1], 16, transform=same, workers=1) as loader:
        rows = sum(len(batch["id"]) for batch in loader)
    assert rows == 320, rows
"""


@pytest.mark.parametrize("streams", [(0,), (0, 1, 2)])
def test_a_process_whose_standard_streams_are_closed_has_workers(cache, streams):
    """Its memory got number 0, which the worker's own standard input then replaced: a daemon's."""
    code = textwrap.dedent(CLOSED)
    done = subprocess.run(
        [sys.executable, "-c", code, cache.path, *map(str, streams)], timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip
    assert done.returncode == 0
