"""Plans: a task's windows and rows drawn at once, each piece fetched once, the same whatever `reads` is."""

from __future__ import annotations

import ast
import gc
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from drawing import fill, planned, require_pure, take
from helpers import DEADLINE_SECONDS, in_child, limit, wait_until

import arrowcache as ac
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form
from arrowcache.errors import SamplerError
from arrowcache.sampling.reads import Threads, held_bytes, is_hedge
from arrowcache.sampling.retries import Retries
from arrowcache.sampling.sources import ArrayWindows, Map, Mix, ParquetRows
from arrowcache.sampling.task import Task, fitted

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
LocalFileSystem = fsspec.get_filesystem_class("file")
FORMATS = ["npy", "h5", "zarr"]
AT_ONCE = Retries(4, 0.0)


class Counted(LocalFileSystem):
    """Counts the reads of each file, and their bytes; the first of each may fail, and some take a while."""

    cachable = False

    def __init__(self, is_failing: bool = False, seconds: float = 0.0) -> None:
        super().__init__()
        self.is_failing, self.seconds = is_failing, seconds
        self.lock, self.chance, self.failed = threading.Lock(), random.Random(0), set()
        self.gets: Counter[str] = Counter()
        self.nbytes = 0

    def cat_file(self, path, start=None, end=None, **options):
        with self.lock:
            fails = self.is_failing and (path, start) not in self.failed
            self.failed |= {(path, start)} if fails else set()
        time.sleep(self.seconds * self.chance.random())
        if fails:
            raise OSError("reset")
        data = super().cat_file(path, start, end, **options)
        with self.lock:
            self.gets[Path(path).name if "/c/" not in path else path.partition("/c/")[2]] += 1
            self.nbytes += len(data)
        return data


def zarr_array(path: Path, data: np.ndarray, chunks: tuple[int, ...], **options: Any) -> str:
    zarr = pytest.importorskip("zarr", "3.0")
    zarr.create_array(path, data=data, chunks=chunks, compressors=None, **options)
    return str(path)


def stored(folder: Path, kind: str, data: np.ndarray, chunks: tuple[int, ...] = ()) -> str:
    """An array in one of the formats."""
    if kind == "npy":
        np.save(folder / "x.npy", data)
        return str(folder / "x.npy")
    if kind == "zarr":
        return zarr_array(folder / "x.zarr", data, chunks or data.shape)
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=chunks or None)
    return f"{folder / 'x.h5'}#x"


def volume(shape: tuple[int, ...] = (40, 30, 5)) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def digest(source: Any, reads: int, number: int = 3, rows: int = 200) -> bytes:
    builder = SegmentBuilder(Form(source.schema, rows, 1 << 22))
    task = Task("", b"", "default.0", 7, number, token=0, ramp=False, reads=reads)
    threads = Threads(reads, AT_ONCE)
    fill(fitted(source, builder.form), task, builder, threads=threads)
    wait_until(lambda: not threads.are_reading, "the reads that the task had begun and does not need")
    assert builder.rows == rows or source.schema.variable or source.is_divided
    return b"".join(builder.encode().pieces)


@pytest.fixture(autouse=True)
def nothing_is_late(monkeypatch):
    """On a busy machine a read may be late, and its piece fetched twice."""
    limit(monkeypatch, late_read_seconds=1e9)


class Gated(Counted):
    """A fetch of a read waits until that read was begun again. `late` has it be late."""

    armed = False

    def __init__(self, late: Callable[[], None]) -> None:
        super().__init__()
        self.gate, self.late = threading.Event(), late

    def stop(self) -> None:
        with self.lock:
            is_first, self.armed = self.armed, False
        if is_first:
            time.sleep(0.1)  # those beside it end
            self.late()
            assert self.gate.wait(60)
        elif is_hedge():
            self.gate.set()

    def cat_file(self, path, start=None, end=None, **options):
        self.stop()
        return super().cat_file(path, start, end, **options)

    def open(self, path, mode="rb", **options):
        self.stop()
        return super().open(path, mode, **options)


@pytest.mark.parametrize("kind", FORMATS)
def test_reads_are_begun_again_but_for_hdf5_where_the_second_would_wait_for_the_first(tmp_path, kind):
    source = ArrayWindows(stored(tmp_path, kind, volume()), (4,))
    assert source.hedge == Map(source, dict).hedge == (kind != "h5")


# -- windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("chunks", [(7, 8, 5), (40, 30, 5), (3, 30, 2), ()])
def test_planned_windows_are_what_the_array_has_at_their_position(tmp_path, kind, chunks):
    array = volume()
    with ArrayWindows(stored(tmp_path, kind, array, chunks), (6, 5), with_position=True) as source:
        rows = planned(source, 300)
        assert rows["data"].shape == (300, 6, 5, 5)
        for (x, y), data in zip(rows["position"].tolist(), rows["data"], strict=True):
            assert np.array_equal(data, array[x : x + 6, y : y + 5])


def test_a_npy_opens_while_another_thread_parses_in_the_middle_of_its_header(tmp_path):
    path = stored(tmp_path, "npy", np.arange(40.0))
    begun, rounds = 0, 0

    def parse_once(phase: str, info: dict[str, int]) -> None:  # as another thread might that runs there
        nonlocal begun
        begun += phase == "start"
        if begun == 1 and phase == "start":
            ast.literal_eval("[0]")

    thresholds = gc.get_threshold()
    for allocations in range(1, 100):  # until the callback runs: some are the parser's, before Python 3.12
        gc.collect()
        begun = 0
        gc.callbacks.append(parse_once)
        gc.set_threshold(allocations)
        try:
            ArrayWindows(path, (2,))
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(parse_once)
        rounds += begun > 0
    assert rounds > 20


@pytest.mark.parametrize("order", ["C", "F"])
def test_planned_windows_of_a_npy_in_any_order_and_of_all_axes(tmp_path, order):
    array = np.asarray(volume(), dtype=">f4", order=order)
    np.save(tmp_path / "x.npy", array)
    for window in ((3,), (2, 3), (4, 4, 4), (40, 30, 5)):
        rows = planned(ArrayWindows(tmp_path / "x.npy", window, with_position=True), 50)
        for at, data in zip(rows["position"].tolist(), rows["data"], strict=True):
            box = tuple(slice(a, a + n) for a, n in zip(at, window, strict=True))
            assert np.array_equal(data, array[box])


def test_arrays_of_other_chunks_and_formats_are_cut_at_the_same_place(tmp_path):
    signal, label = volume((300, 4)), np.arange(300, dtype=np.int16)
    (tmp_path / "sub").mkdir()
    arrays = {
        "signal": stored(tmp_path, "zarr", signal, (32, 3)),
        "label": stored(tmp_path / "sub", "zarr", label, (50,)),
        "plain": stored(tmp_path, "npy", label * 2),
    }
    source = ArrayWindows(arrays, {"signal": (16,), "label": (1,), "plain": (20,)}, with_position=True)
    rows = planned(source, 400)
    at = rows["position"][:, 0]
    assert np.array_equal(rows["label"][:, 0], at)
    assert np.array_equal(rows["plain"], (at[:, None] + np.arange(20)) * 2)
    assert np.array_equal(rows["signal"], signal[at[:, None] + np.arange(16)])


@pytest.mark.parametrize("options", [{}, {"windows_per_chunk": 3}])
@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_a_task_has_the_same_rows_whatever_reads_is_and_however_the_store_is(tmp_path, kind, options):
    if kind == "npy" and options:
        pytest.skip("it has no chunks")
    uri = stored(tmp_path, kind, volume(), (7, 8, 5))
    expected = digest(ArrayWindows(uri, (6, 5), with_position=True, **options), 1)
    for reads in (1, 8, 64):
        store = Counted(is_failing=True, seconds=0.003)
        source = ArrayWindows([uri], (6, 5), with_position=True, filesystem=store, retries=AT_ONCE, **options)
        assert digest(source, reads) == expected
        assert store.failed
    assert digest(ArrayWindows(uri, (6, 5), with_position=True, **options), 1, number=4) != expected


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations from what chance gives."""
    mean = counts.sum() / counts.size
    return float((((counts - mean) ** 2 / mean).sum() - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1)))


@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_every_place_is_equally_likely_in_a_plan(tmp_path, kind):
    x = ArrayWindows(stored(tmp_path, kind, volume((17, 13, 2)), (5, 4, 2)), (3, 4), with_position=True)
    position = planned(x, 30_000)["position"]
    assert abs(chi_square(np.bincount(position @ [10, 1], minlength=150))) < 4


def test_every_place_is_equally_likely_where_a_segment_is_full_before_the_plan_ends(tmp_path):
    """As under a `Map` whose rows are of variable length: a segment has room for a part of the plan."""
    source = ArrayWindows(stored(tmp_path, "npy", np.arange(40.0)), (1,), with_position=True)
    counts = np.zeros(40)
    for seed in range(400):
        reads = source.plan_reads(np.random.default_rng(seed), 20)
        found: list[int] = []
        for read in reads:
            found += read()["position"][:, 0].tolist()
        counts += np.bincount(found[:7], minlength=40)
    assert abs(chi_square(counts)) < 4


def test_recordings_are_planned_as_often_as_they_have_places_or_by_weight(tmp_path):
    for name, size in (("a", 310), ("b", 110)):
        np.save(tmp_path / f"{name}.npy", np.full(size, size, np.int32))
    uris = [str(tmp_path / "a.npy"), str(tmp_path / "b.npy")]
    for weights, share in ((None, 0.75), ([1, 3], 0.25)):
        rows = planned(ArrayWindows(uris, (11,), weights=weights, with_position=True), 2000)
        assert np.array_equal(rows["data"][:, 0], np.where(rows["recording"] == 0, 310, 110))
        assert abs(np.mean(rows["recording"] == 0) - share) < 0.06


def test_each_chunk_is_fetched_once_a_plan_also_where_windows_cross_borders(tmp_path):
    store = Counted()
    uri = stored(tmp_path, "zarr", volume((64, 64, 4)), (16, 16, 4))
    source = ArrayWindows([uri], (9, 9), filesystem=store, with_position=True)
    store.gets.clear()
    into = SegmentBuilder(Form(source.schema, 500, 1 << 23))
    for _ in range(2):
        fill(source, Task("", b"", "default.0", 0, 1, token=0, ramp=False, reads=8), into)
        assert set(store.gets.values()) == {1}
        assert len(store.gets) == 17  # and zarr.json, whenever an array is opened
        store.gets.clear()
        source.close()


@pytest.mark.parametrize("kind", ["npy", "h5"])
def test_windows_of_plain_cells_are_fetched_by_ranges_of_bytes_that_are_near_each_other(tmp_path, kind):
    store = Counted()
    uri = stored(tmp_path, kind, np.arange(1 << 20, dtype=np.float64))
    source = ArrayWindows([uri], (512,), filesystem=store)
    planned(source, 1)
    store.gets.clear()
    store.nbytes = 0
    rows = planned(source, 2000)["data"]
    assert np.array_equal(rows - rows[:, :1], np.tile(np.arange(512.0), (2000, 1)))
    assert 8 <= store.gets[f"x.{kind}"] < 12
    assert store.nbytes < 9 << 20  # of 8 MiB, and the windows are of 8


def test_a_plan_is_drawn_without_a_loop_over_windows(tmp_path):
    class Counting(np.random.Generator):
        calls = 0

        def integers(self, *given: Any, **options: Any) -> Any:
            Counting.calls += 1
            return super().integers(*given, **options)

    source = ArrayWindows(stored(tmp_path, "zarr", volume(), (7, 8, 5)), (6, 5))
    next(iter(source.plan_reads(Counting(np.random.PCG64(0)), 50_000)))
    assert Counting.calls < 10


def test_chunks_in_shards_are_read(tmp_path):
    array, store = volume((64, 8)), Counted()
    uri = zarr_array(tmp_path / "x.zarr", array, (4, 4), shards=(16, 8))
    source = ArrayWindows([uri], (3, 3), with_position=True, filesystem=store)
    store.gets.clear()
    rows = planned(source, 200)
    assert sum(store.gets.values()) == 1 + 4 + 32  # zarr.json, indices, chunks
    for (x, y), data in zip(rows["position"].tolist(), rows["data"], strict=True):
        assert np.array_equal(data, array[x : x + 3, y : y + 3])


HUNG = """
import sys, threading, time
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from arrowcache.sampling.sources import ArrayWindows

begun = threading.Event()

class Hung(LocalFileSystem):
    def cat_file(self, path, start=None, end=None, **options):
        if "/c/" in path:
            begun.set()
            time.sleep(1000)
        return super().cat_file(path, start, end, **options)

windows = ArrayWindows(sys.argv[1], (3, 3), filesystem=Hung())
threading.Thread(target=lambda: next(iter(windows(np.random.default_rng(0)))), daemon=True).start()
begun.wait()
"""


def test_a_process_ends_while_a_shard_is_read(tmp_path):
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    uri = zarr_array(tmp_path / "x.zarr", volume((64, 8)), (4, 4), shards=(16, 8))
    subprocess.run([sys.executable, "-c", HUNG, uri], timeout=DEADLINE_SECONDS, check=True)


CODECS = {
    "none": {"compressors": None}, "zstd": {}, "big": {"dtype": ">f4", "compressors": None},
    "gzip": {"compressors": [{"name": "gzip", "configuration": {"level": 1}}]},
    "blosc": {"compressors": [{"name": "blosc", "configuration": {"cname": "lz4"}}]},
    "two": {"compressors": [{"name": "zstd", "configuration": {}}, {"name": "gzip", "configuration": {}}]},
    "checked": {"compressors": [{"name": "zstd", "configuration": {}}, {"name": "crc32c"}]},
    "turned": {"filters": [{"name": "transpose", "configuration": {"order": [1, 0]}}]},
}  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_of_any_codec_are_decoded(tmp_path, codec):
    zarr = pytest.importorskip("zarr", "3.0")
    given, array = {"dtype": "<f4", **CODECS[codec]}, volume((40, 30))
    made = zarr.create_array(tmp_path / "x.zarr", shape=array.shape, chunks=(7, 8), **given)
    made[:] = array
    source = ArrayWindows(tmp_path / "x.zarr", (6, 5), where={0: slice(2, None)}, with_position=True)
    rows = planned(source, 300)
    for (x, y), data in zip(rows["position"].tolist(), rows["data"], strict=True):
        assert np.array_equal(data, array[x : x + 6, y : y + 5])
    for chunk in tmp_path.glob("x.zarr/c/*/*"):
        chunk.write_bytes(b"none")
    with pytest.raises(SamplerError, match=r"x\.zarr: cannot be read as Zarr"):
        planned(source, 10)


def test_a_planned_chunk_that_was_never_written_holds_the_fill_value(tmp_path):
    zarr = pytest.importorskip("zarr", "3.0")
    array = zarr.create_array(tmp_path / "x.zarr", shape=(10,), chunks=(5,), dtype="int32", fill_value=7)
    array[:5] = 1
    assert planned(ArrayWindows(tmp_path / "x.zarr", (10,)), 2)["data"].tolist() == [[1] * 5 + [7] * 5] * 2


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_planned_windows_of_packed_numbers_are_unpacked(tmp_path, kind):
    uri = stored(tmp_path, kind, np.arange(40, dtype=np.int16), (8,))
    path, _, inner = uri.partition("#")
    if kind == "h5":
        import h5py

        with h5py.File(path, "a") as file:
            file[inner].attrs["scale_factor"] = 0.5
    else:
        import zarr

        zarr.open_array(path, mode="r+").attrs["scale_factor"] = 0.5
    rows = planned(ArrayWindows(uri, (4,), with_position=True), 30)
    assert np.array_equal(rows["data"], (rows["position"] + np.arange(4)) * 0.5)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_store_fails_a_plan_with_its_name(tmp_path, kind):
    uri = stored(tmp_path, kind, volume(), (40, 30, 5))
    source = ArrayWindows(uri, (4,), retries=0)
    for file in [tmp_path / f"x.{kind}", *tmp_path.rglob("c/0/0/0")]:
        if file.is_file():
            file.write_bytes(b"nothing of the kind")
    with pytest.raises((SamplerError, OSError), match=rf"x\.{kind}"):
        planned(source, 10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_plans_are_the_same_in_another_process_and_in_a_forked_child(tmp_path, kind):
    source = ArrayWindows(stored(tmp_path, kind, volume(), (7, 8, 5)), (6, 5), with_position=True)
    require_pure(source)
    expected = digest(source, 4)
    assert digest(pickle.loads(pickle.dumps(source)), 4) == expected

    def body() -> None:
        assert digest(source, 4) == expected

    with in_child(body):
        pass


# -- whole chunks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_each_chunk_that_is_fetched_gives_so_many_windows_and_none_crosses_a_border(tmp_path, kind):
    uri = stored(tmp_path, kind, volume((64, 32, 2)), (16, 8, 2))
    with ArrayWindows(uri, (5, 4), windows_per_chunk=12, with_position=True) as source:
        assert source.ramp
        assert source.chunk_rows == 12, "whole chunks fill small segments, too"
        for seed in range(20):
            chunk = planned(source, 240, seed)["position"] // [16, 8] @ [4, 1]
            assert (np.bincount(chunk) % 12 == 0).all()
        position = planned(source, 24_000)["position"]
        assert (position // [16, 8] == (position + np.array([4, 3])) // [16, 8]).all()
        counts = np.bincount(position @ [32, 1])
        assert len(counts[counts > 0]) == 4 * 12 * 4 * 5
        assert chi_square(counts[counts > 0]) < 8  # evener than chance: none comes twice before all have


@pytest.mark.parametrize("asked", [12, 10**12])
def test_a_pools_first_segments_are_small_and_of_whole_chunks(tmp_path, asked):
    uri = stored(tmp_path, "zarr", volume((64, 32, 2)), (16, 8, 2))
    source = ArrayWindows(uri, (5, 4), windows_per_chunk=asked, with_position=True)
    cache = ac.Cache.create(tmp_path / "cache", source.schema, "4MiB", segment_rows=512)
    with ac.SamplerPool(cache, source, workers=1, segments=6, progress=False) as pool:
        pool.wait(timeout=DEADLINE_SECONDS)
    each = min(asked, 12 * 5)
    with cache.snapshot() as snapshot:
        rows = [segment.rows for segment in snapshot.segments]
        position = snapshot.gather(np.arange(sum(rows)))["position"]
    assert rows == [each * -(-max(1, 512 >> 10 - number) // each) for number in range(6)]
    for of_segment in np.split(position // [16, 8] @ [4, 1], np.cumsum(rows)[:-1]):
        assert (np.bincount(of_segment) % each == 0).all()
    row = next(iter(source(np.random.default_rng(0))))
    assert row["data"].shape == (5, 4, 2)


def test_windows_of_a_chunk_are_different(tmp_path):
    uri = stored(tmp_path, "zarr", np.arange(1000), (50,))
    source = ArrayWindows(uri, (10,), windows_per_chunk=30, with_position=True)
    for seed in range(20):
        at = planned(source, 30, seed)["position"][:, 0]
        assert len(set(at.tolist())) == 30
        assert len(set((at // 50).tolist())) == 1
    assert {len(row["data"]) for row in take(source, 100)} == {10}


@pytest.mark.parametrize("most", [3, 7, 16])
def test_a_chunk_that_is_drawn_again_gives_other_windows_until_it_has_given_all(tmp_path, most):
    uri, counts = stored(tmp_path, "zarr", np.arange(67), (20,)), np.zeros(67)
    source = ArrayWindows(uri, (5,), windows_per_chunk=most, with_position=True)
    for seed in range(300):
        times = np.bincount(planned(source, 41, seed)["position"][:, 0], minlength=67)
        counts += times
        for first, windows in ((0, 16), (20, 16), (40, 16), (60, 3)):
            of_chunk = times[first : first + windows]
            assert of_chunk.max() - of_chunk.min() <= 1
    possible = counts[counts > 0]
    assert len(possible) == 3 * 16 + 3
    assert possible.max() / possible.min() < 1.5


def test_a_chunk_with_fewer_windows_gives_all_and_each_is_equally_likely(tmp_path):
    """Chunks of 16 windows, and the last one of 3."""
    uri = stored(tmp_path, "zarr", np.arange(67), (20,))
    counts = np.zeros(67)
    source = ArrayWindows(uri, (5,), windows_per_chunk=10, with_position=True)
    for seed in range(300):
        counts += np.bincount(planned(source, 45, seed)["position"][:, 0], minlength=67)
    possible = np.flatnonzero(np.arange(67) % 20 <= np.where(np.arange(67) < 60, 15, 2))
    assert set(np.flatnonzero(counts)) == set(possible.tolist())
    last = counts[60:].sum() / counts.sum()
    assert abs(last - 3 / 51) < 0.01
    assert chi_square(counts[possible]) < 12  # ten at a time


def test_windows_that_tile_their_chunks_are_fetched_hardly_more_than_delivered(tmp_path):
    store = Counted()
    uri = stored(tmp_path, "zarr", volume((64, 32, 2)), (16, 16, 2))
    source = ArrayWindows([uri], (1, 16), filesystem=store, windows_per_chunk=16)
    store.nbytes = 0
    rows = planned(source, 64)["data"]
    assert store.nbytes <= 1.2 * rows.nbytes


def test_recordings_of_whole_chunks_come_by_weight(tmp_path):
    uris = []
    for name, size in (("a", 100), ("b", 60)):
        (tmp_path / name).mkdir()
        uris.append(stored(tmp_path / name, "zarr", np.arange(size), (10,)))
    for weights, share in ((None, 100 / 160), ([1, 3], 0.25)):
        source = ArrayWindows(uris, (4,), windows_per_chunk=3, weights=weights, with_position=True)
        assert abs(np.mean(planned(source, 6000)["recording"] == 0) - share) < 0.06


def test_no_chunk_that_holds_a_window_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"x\.npy: windows_per_chunk is of arrays in chunks"):
        ArrayWindows(stored(tmp_path, "npy", volume()), (3,), windows_per_chunk=2)
    with pytest.raises(ValueError, match=r"x\.h5#x: windows_per_chunk is of arrays in chunks"):
        ArrayWindows(stored(tmp_path, "h5", volume()), (3,), windows_per_chunk=2)
    uri = stored(tmp_path, "zarr", volume(), (7, 8, 5))
    with pytest.raises(ValueError, match="no chunk holds a window: it is 9 long on axis 1, and the chunks 8"):
        ArrayWindows(uri, (3, 9), windows_per_chunk=2)
    with pytest.raises(ValueError, match="no chunk holds a window"):
        ArrayWindows(uri, (3, 3), windows_per_chunk=2, where={0: slice(5, 9)})
    for wrong, error in ((0, ValueError), (1.5, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="windows_per_chunk"):
            ArrayWindows(uri, (3, 3), windows_per_chunk=wrong)


# -- a part of the array -----------------------------------------------------------------------------


def named(folder: Path, kind: str, data: np.ndarray) -> str:
    """An array whose axes are named time, lat and lon."""
    names = ("time", "lat", "lon")
    if kind == "zarr":
        return zarr_array(folder / "x.zarr", data, (7, 8, 5), dimension_names=names)
    if kind == "xarray":
        return zarr_array(folder / "x.zarr", data, (7, 8, 5), attributes={"_ARRAY_DIMENSIONS": list(names)})
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "x.h5", "w") as file:
        x = file.create_dataset("x", data=data, chunks=(7, 8, 5))
        for axis, name in enumerate(names):
            if kind == "labels":
                x.dims[axis].label = name
            else:
                file[name] = np.arange(data.shape[axis])
                file[name].make_scale()
                x.dims[axis].attach_scale(file[name])
    return f"{folder / 'x.h5'}#x"


@pytest.mark.parametrize("kind", ["npy", "zarr", "xarray", "h5", "labels"])
def test_windows_lie_in_the_part_of_an_axis_that_was_asked_for(tmp_path, kind):
    array = volume()
    uri = stored(tmp_path, "npy", array) if kind == "npy" else named(tmp_path, kind, array)
    parts = [slice(11, -9), slice(4, 16), slice(1, 3)]
    where = dict(zip(range(3) if kind == "npy" else ("time", "lat", "lon"), parts, strict=True))
    source = ArrayWindows(uri, (3, 5), where=where, with_position=True)
    assert source.schema["data"] == ac.Tensor("float32", (3, 5, 2))
    rows = planned(source, 1000)
    for sample in take(source, 20) + [{name: rows[name][at] for name in rows} for at in range(40)]:
        x, y = sample["position"].tolist()
        assert np.array_equal(sample["data"], array[x : x + 3, y : y + 5, 1:3])
    assert rows["position"].min(axis=0).tolist() == [11, 4]
    assert rows["position"].max(axis=0).tolist() == [28, 11]
    by_number = ArrayWindows(
        uri, (3, 5), where={0: slice(11, 31), np.int64(1): slice(4, 16), 2: slice(1, 3)}, with_position=True
    )
    assert digest(by_number, 4) == digest(source, 4)


def test_a_part_is_of_all_arrays_that_are_cut_at_the_same_place(tmp_path):
    arrays = {"x": named(tmp_path, "zarr", volume()), "y": stored(tmp_path, "npy", np.arange(40))}
    source = ArrayWindows(arrays, {"x": (6, 2), "y": (9,)}, where={"time": slice(10, 25)}, with_position=True)
    rows = planned(source, 500)
    assert (rows["y"].min(), rows["y"].max()) == (10, 24)
    assert np.array_equal(rows["y"][:, 0], rows["position"][:, 0])


def test_chunks_at_the_end_of_a_part_give_the_windows_that_lie_in_both(tmp_path):
    uri = stored(tmp_path, "zarr", np.arange(100), (20,))
    source = ArrayWindows(uri, (4,), where={0: slice(15, 65)}, windows_per_chunk=50, with_position=True)
    at = set(planned(source, 500)["position"][:, 0].tolist())
    assert at == {15, 16, *range(20, 37), *range(40, 57), 60, 61}


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        (
            {"tmie": slice(3)},
            ValueError,
            r"'tmie', which is not there; did you mean 'time'\? it has 'time', ",
        ),
        ({3: slice(3)}, ValueError, "an axis 3, which is not there; .* or by number 0 to 2"),
        ({-1: slice(3)}, ValueError, "counted from 0"),
        ({True: slice(3)}, TypeError, "a number, or a name"),
        (
            {"time": slice(5, 5)},
            ValueError,
            r"where\['time'\] is slice\(5, 5, None\), which is none of the 40",
        ),
        ({"time": slice(50, None)}, ValueError, "none of the 40 cells"),
        ({"time": slice(0, 2)}, ValueError, "has 2 cells of axis 0, 0 to 2, and the window is 3 long"),
        ({"time": slice(0, 20, 2)}, ValueError, "no steps: leave out 2"),
        ({"time": slice(0, 20, -1)}, ValueError, "no steps"),
        ({"time": (0, 20)}, TypeError, r"must be a slice, such as slice\(0, 2016\)"),
        ({"time": slice("2020", None)}, TypeError, "numbers of cells, not '2020'"),
        ({"time": slice(0, 20), 0: slice(0, 20)}, ValueError, "both 'time' and 0, which is the same axis"),
        ([("time", slice(3))], TypeError, "must be a mapping"),
    ],
)
def test_a_part_that_cannot_be_is_refused(tmp_path, where, error, says):
    uri = named(tmp_path, "zarr", volume())
    with pytest.raises(error, match=says):
        ArrayWindows(uri, (3, 5), where=where)


def test_a_name_of_an_axis_is_refused_where_the_store_has_none(tmp_path):
    with pytest.raises(ValueError, match=r"x\.npy: .*no names of axes, so give a number: 0 to 2"):
        ArrayWindows(stored(tmp_path, "npy", volume()), (3,), where={"time": slice(3)})


# -- rows of Parquet ---------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path) -> Path:
    for name, first, rows in (("a", 0, 100), ("b", 100, 110)):
        table = pa.table({"id": range(first, first + rows), "x": np.arange(rows) * 0.5})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20)
    return tmp_path


class Unreliable(LocalFileSystem):
    """Opens every third file only when asked again."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)
        self.opened = self.failures = 0

    def open(self, path, mode="rb", **options):
        time.sleep(0.002 * self.chance.random())
        self.opened += 1
        if self.opened % 3 == 0:
            self.failures += 1
            raise OSError("reset")
        return super().open(path, mode, **options)


EACH_FOURTH = pc.bit_wise_and(pc.field("id"), 3) == 0


@pytest.mark.parametrize("options", [{}, {"rows_per_group": 7}, {"filter": EACH_FOURTH}, {"passes": 1}])
def test_rows_of_parquet_are_the_same_whatever_reads_is(parquet, options):
    expected = digest(ParquetRows(parquet, **options), 1, number=2)
    for reads in (1, 8, 64):
        assert digest(ParquetRows(parquet, **options), reads, number=2) == expected
        store = Unreliable()
        source = ParquetRows([str(parquet)], filesystem=store, retries=Retries(30, 0.0), **options)
        assert digest(source, reads, number=2) == expected
        assert store.failures


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_group", [None, 13])
@pytest.mark.parametrize("condition", [None, EACH_FOURTH])
def test_every_row_is_equally_likely_in_a_plan(parquet, rows_per_group, condition):
    source = ParquetRows(parquet, ["id"], condition, rows_per_group=rows_per_group)
    counts = np.zeros(210)
    for seed in range(300):
        found: list[int] = []
        for read in source.plan_reads(np.random.default_rng(seed), 25):
            found += read()["id"].tolist()
            if len(found) >= 25:
                break
        counts += np.bincount(found[:25], minlength=210)
    kept = np.arange(0, 210, 1 if condition is None else 4)
    assert counts[kept].sum() == counts.sum()
    assert abs(chi_square(counts[kept])) < 8  # a group at a time


def test_a_large_row_group_is_read_once_for_the_reads_of_its_pieces(tmp_path):
    rows = 4000
    table = pa.table({"id": range(rows), "x": pa.FixedSizeListArray.from_arrays(np.zeros(rows * 2048), 2048)})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    source = ParquetRows([str(tmp_path / "x.parquet")], filesystem=fsspec.filesystem("file"))
    reads = list(source.plan_reads(np.random.default_rng(0), rows - 10))
    assert len(reads) > 5
    (tmp_path / "x.parquet").rename(tmp_path / "y.parquet")
    with pytest.raises(FileNotFoundError):
        reads[0]()
    (tmp_path / "y.parquet").rename(tmp_path / "x.parquet")
    ids = reads[2]()["id"].tolist()
    (tmp_path / "x.parquet").unlink()
    for read in reads[:2] + reads[3:]:
        ids += read()["id"].tolist()
    assert len(set(ids)) == len(ids) == rows - 10


def test_a_filter_that_keeps_nothing_ends_a_plan(tmp_path):
    pq.write_table(pa.table({"x": [0, 2]}), tmp_path / "a.parquet")
    source = ParquetRows(tmp_path, filter=pc.field("x") == 1)
    with pytest.raises(SamplerError, match="keeps no row"):
        digest(source, 8)


# -- Map and Mix -------------------------------------------------------------------------------------


def test_a_map_adds_fields_also_where_a_filter_leaves_no_row_of_a_row_group(parquet):
    rows = ParquetRows(parquet, ["id"], pc.bit_wise_and(pc.field("id"), 63) == 1)
    source = Map(rows, lambda sample: {**sample, "twice": 2 * sample["id"]})
    assert digest(source, 8) == digest(source, 1)


def test_a_map_of_what_plans_plans(tmp_path):
    def noisy(sample, rng):
        return {**sample, "noise": rng.random()}

    windows = ArrayWindows(stored(tmp_path, "zarr", volume(), (7, 8, 5)), (6, 5), with_position=True)
    source = Map(windows, noisy)
    expected = digest(source, 1)
    assert digest(source, 64) == expected
    rows = planned(source, 100)
    assert len(set(rows["noise"].tolist())) == 100
    assert (
        rows["position"].tolist() == planned(windows, 100)["position"].tolist()
        or len(rows["position"]) == 100
    )
    assert Map(lambda rng: iter([{"x": 1}]), dict).plan_reads is None


def test_a_map_to_rows_of_variable_length_fills_a_segment(tmp_path):
    windows = ArrayWindows(stored(tmp_path, "npy", np.arange(5000.0)), (64,), with_position=True)

    def cut(sample):
        return {"values": sample["data"][: 1 + int(sample["data"][0]) % 64]}

    source = Map(windows, cut, schema={"values": ac.Ragged("float64")})
    assert digest(source, 8, rows=100_000) == digest(source, 1, rows=100_000)


def of_zeros(rng):
    while True:
        yield {"data": np.full(1, rng.random())}


def in_a_mix(folder: Path, kind: str, store: Any) -> Mix | Map:
    """A mix of this kind, of files that a store reads."""
    for number in range(2):
        np.save(folder / f"{number}.npy", np.arange(300.0) + 1000 * number)
        table = pa.table({"id": range(400), "text": [f"{number} of {'x' * (at % 7)}" for at in range(400)]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=20)
    retries = Retries(30, 0.0)

    def windows(number: int) -> ArrayWindows:
        return ArrayWindows(f"{folder}/{number}.npy", (1,), filesystem=store, retries=retries)

    def rows(number: int, *given: Any) -> ParquetRows:
        return ParquetRows(f"{folder}/{number}.parquet", *given, filesystem=store, retries=retries)

    if kind == "text":
        return Mix({rows(0): 3, rows(1): 1})
    if kind == "filter":
        return Mix({rows(0, ["id"]): 1, rows(1, ["id"], EACH_FOURTH): 1})
    two = [(windows(0), 3), (windows(1), 1)]
    return {
        "planned": lambda: Mix(two),
        "skip": lambda: Mix(two, on_error="skip"),
        "own": lambda: Mix([*two, (of_zeros, 2)]),
        "nested": lambda: Mix([(Mix(two), 1), (Map(Mix([*two, (of_zeros, 2)]), dict), 1)]),
        "mapped": lambda: Map(Mix(two), lambda sample, rng: {"data": sample["data"] + rng.random()}),
    }[kind]()


@pytest.mark.parametrize("kind", ["planned", "skip", "own", "nested", "mapped", "text", "filter"])
def test_a_mix_has_the_same_rows_whatever_reads_is(tmp_path, kind):
    expected = digest(in_a_mix(tmp_path, kind, LocalFileSystem()), 1)
    for reads in (1, 8, 64):
        store = Unreliable()
        assert digest(in_a_mix(tmp_path, kind, store), reads) == expected
        assert store.failures
    wait_until(lambda: held_bytes() == 0, "the reads")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npy", "zarr"])
def test_a_pool_publishes_planned_windows(tmp_path, kind):
    array = volume()
    source = ArrayWindows(stored(tmp_path, kind, array, (7, 8, 5)), (6, 5), with_position=True)
    with ac.Cache.create(tmp_path / "cache", source.schema, "8MiB", "64KiB") as cache:
        with ac.SamplerPool(cache, source, workers=2, segments=8, progress=False) as pool:
            pool.wait()
        with cache.snapshot() as snapshot:
            rows = snapshot.gather(np.arange(len(snapshot)))
    for (x, y), data in zip(rows["position"].tolist(), rows["data"], strict=True):
        assert np.array_equal(data, array[x : x + 6, y : y + 5])


@pytest.mark.parametrize("kind", ["zarr", "parquet"])
def test_a_plans_late_read_is_begun_again_though_others_wait_for_its_piece(tmp_path, monkeypatch, kind):
    store = Gated(lambda: limit(monkeypatch, late_read_seconds=0.0))
    if kind == "zarr":
        uri = stored(tmp_path, "zarr", volume(), (4, 4, 5))
        source: Any = ArrayWindows([uri], (3, 3), filesystem=store, with_position=True)
    else:
        for number in range(24):
            part = pa.table({"x": np.arange(10) + 10 * number})
            pq.write_table(part, tmp_path / f"{number:02d}.parquet")
        source = ParquetRows(str(tmp_path), filesystem=store)
    expected = digest(source, 16)
    for _ in range(3):
        limit(monkeypatch, late_read_seconds=1e9)
        store.armed = True
        if kind == "parquet":  # its files are opened in reads, those of Zarr before
            source.close()
        assert digest(source, 16) == expected
        assert store.gate.is_set()
        assert not store.armed
        store.gate.clear()


@pytest.mark.parametrize("kind", ["npy", "h5", "h5 in chunks", "zarr", "parquet"])
def test_a_plan_tells_how_many_bytes_it_fetched(tmp_path, kind):
    if kind == "parquet":
        pq.write_table(pa.table({"x": np.arange(4000.0)}), tmp_path / "x.parquet", row_group_size=1000)
        source: Any = ParquetRows(tmp_path / "x.parquet", rows_per_group=10)
    else:
        chunks = () if kind == "h5" else (1000,)
        uri = stored(tmp_path, kind[:2] if "h5" in kind else kind, np.arange(4000.0), chunks)
        source = ArrayWindows(uri, (5,), filesystem=Counted())
    threads = Threads(4, AT_ONCE)
    into = SegmentBuilder(Form(source.schema, 40, 1 << 20))
    fill(source, Task("", b"", "default.0", 0, 0, token=0, ramp=False, reads=4), into, threads=threads)
    fetched = threads.counts.copy()[0]["fetched_bytes"]
    buffers = 3 if "h5" in kind else 0  # of 64 KiB, for HDF5: up to the end of the file
    assert (8 * 1000 if kind != "npy" else 8 * 5) < fetched <= 8 * 4000 * (1.2 + buffers)
