"""What the comparison with peers rests on: that a wrong epoch is refused, and that its cases run."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from page_cache import counts_pages

from benchmarks import usage
from benchmarks.fresh import fresh
from benchmarks.harness import hardware
from benchmarks.peers import rolling, slow
from benchmarks.peers.case import Case, adapter_of, check, consumer_of
from benchmarks.peers.registry import PEERS
from benchmarks.peers.results import Results
from benchmarks.peers.workload import Workload
from benchmarks.usage import Footprint

ROOT = Path(__file__).parents[2]
WORKLOAD = Workload(1024, rows=64, batch_rows=8)


def epoch(order=None, change=lambda batches: None):
    """Batches of the workload's rows, changed."""
    x, y = (np.concatenate(arrays) for arrays in zip(*WORKLOAD.chunks(), strict=True))
    order = np.random.default_rng(0).permutation(64) if order is None else order
    batches = [(x[rows].copy(), y[rows].copy()) for rows in order.reshape(-1, 8)]
    change(batches)
    return batches


def test_the_samples_of_a_workload_are_its_chunks_row_by_row():
    x, y = next(WORKLOAD.chunks())
    rows = list(WORKLOAD.samples())
    assert [int(label) for _, label in rows] == y.tolist() == list(range(64))
    assert np.array_equal(np.stack([row for row, _ in rows]), x)
    assert np.array_equal(x[:, 0], y)
    assert np.array_equal(x[:, -1], y)


def test_an_epoch_that_is_what_was_asked_passes():
    check(epoch(), WORKLOAD, shuffled=True)
    check(epoch(np.arange(64)), WORKLOAD, shuffled=False)
    most = np.random.default_rng(0).permutation(62)[:56]
    check(epoch(most), Workload(1024, rows=62, batch_rows=8), shuffled=True)


def twice(batches):
    batches[0] = batches[1]


def torn(batches):
    batches[3][0][2, -1] += 1


def torn_within(batches):
    batches[3][0][2, 100] += 1


def mislabelled(batches):
    batches[3][1][:2] = batches[3][1][1::-1]


def of_no_row(batches):
    batches[0][1][0] = 64


def missing(batches):
    del batches[:2]


def short(batches):
    batches[0] = tuple(array[:7] for array in batches[0])


def doubled(batches):
    batches[0] = (batches[0][0].astype(np.float64), batches[0][1])


WRONG = [twice, torn, torn_within, mislabelled, of_no_row, missing, short, doubled]


@pytest.mark.parametrize("change", WRONG)
def test_an_epoch_that_is_not_is_refused(change):
    with pytest.raises(AssertionError):
        check(epoch(change=change), WORKLOAD, shuffled=True)


def test_an_order_that_is_not_shuffled_is_refused():
    with pytest.raises(AssertionError, match="not shuffled"):
        check(epoch(np.arange(64)), WORKLOAD, shuffled=True)


@pytest.mark.parametrize("kind", ["copy", "read"])
def test_consumers_take_whole_batches(kind, monkeypatch):
    """What a consumer that copies has taken is seen in its slot, of one that reads in what it computes."""
    taken = []
    copyto, reduce = np.copyto, np.bitwise_xor.reduce

    def copied(slot, x):
        copyto(slot, x)
        taken.append(slot.copy())

    monkeypatch.setattr(np, "copyto", copied)
    monkeypatch.setattr(np, "bitwise_xor", SimpleNamespace(reduce=lambda x: taken.append(x) or reduce(x)))
    x, _ = next(WORKLOAD.chunks())
    consumer_of(kind, WORKLOAD)(x[:8])
    assert np.array_equal(taken[0].reshape(-1).view(np.float32), x[:8].reshape(-1))


def test_a_footprint_counts_each_file_once_and_not_what_came_and_went(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    empty = Footprint(tmp_path).bytes()
    file = tmp_path / "folder" / "file"
    file.write_bytes(bytes(1 << 20))
    (tmp_path / "second name").hardlink_to(file)
    footprint = Footprint(tmp_path)
    assert footprint.bytes() == empty + (1 << 20)
    scan, scans = os.scandir, []

    def busy(folder):
        scans.append(folder)
        if len(scans) == 3:  # as the second walk begins: each sees two folders
            (tmp_path / "new").write_bytes(bytes(1 << 20))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", busy)
    assert footprint.bytes() == empty + (1 << 20)


@counts_pages
def test_files_that_were_dropped_are_not_in_the_page_cache(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert usage.resident_bytes(path) == 1 << 20
    usage.drop(tmp_path)
    if usage.resident_bytes(path) == 1 << 20:
        pytest.skip("this file system has nothing but memory")
    assert usage.resident_bytes(path) == 0


def test_files_that_are_mapped_stay_and_that_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    mapped = np.memmap(path, np.uint8, "r")
    assert mapped.sum() == 0
    with pytest.raises(RuntimeError, match="stayed in the page cache"):
        usage.drop(tmp_path)


@pytest.mark.slow
def test_a_case_of_arrowcache_runs_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    workload = Workload(4096, rows=512, batch_rows=16)
    fresh("benchmarks.peers.case:write", "arrowcache", str(tmp_path), workload.to_json(), timeout=120)
    case = asdict(Case(workload, spins=True))
    figures = fresh("benchmarks.peers.case:measure", "arrowcache", str(tmp_path), case, timeout=120)
    assert all(len(figures[name]) == 5 for name in ("gbps", "memcpy_gbps", "cpu_per_gb", "first_batch"))
    assert all(value > 0 for name in ("gbps", "memcpy_gbps", "start", "spin_kept") for value in figures[name])


def test_what_another_machine_measured_is_measured_again(tmp_path):
    case = Case(WORKLOAD)
    results = Results(tmp_path / "results.json")
    results.add("litdata", case, {"gbps": [1.0]})
    assert Results(tmp_path / "results.json").has("litdata", case)
    assert not results.has("litdata", Case(WORKLOAD, workers=2))
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace(f'"{hardware()}', '"another machine'))
    assert not Results(tmp_path / "results.json").has("litdata", case)


def test_every_peer_has_its_adapter_and_its_environment():
    for peer in PEERS:
        adapter = adapter_of(peer.name)
        assert callable(adapter.write)
        assert callable(adapter.epochs)
        assert (ROOT / "constraints" / f"{peer.environment}.txt").exists()
    assert len({peer.name for peer in PEERS}) == len({peer.module for peer in PEERS}) == len(PEERS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values, numbers: None, None),
        (lambda values, numbers: numbers.__setitem__(3, 4), "an item is wrong"),
        (lambda values, numbers: values.__setitem__((3, -1), 7), "an item is wrong"),
        (
            lambda values, numbers: values.__setitem__(3, 4) or numbers.__setitem__(3, 4),
            "items missing: 1, twice: 1",
        ),
    ],
    ids=["right", "number", "value", "twice"],
)
def test_an_epoch_of_a_slow_dataset_has_each_item_once(monkeypatch, change, words):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from benchmarks.peers import slow_ways

    monkeypatch.setattr("benchmarks.peers.slow_ways.NUMBERS", 5)
    numbers = torch.randperm(slow_ways.ITEMS, generator=torch.Generator().manual_seed(0))
    values = numbers.float()[:, None].repeat(1, 5)
    change(values, numbers)
    batches = zip(values.split(64), numbers.split(64), strict=True)
    if words is None:
        slow_ways.check(batches)
        return
    with pytest.raises(SystemExit, match=words):
        slow_ways.check(batches)


def test_each_way_to_keep_the_items_has_a_function():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from benchmarks.peers import slow_ways

    assert [way.word for way in slow.WAYS] == [*slow_ways.WAYS]


def test_the_rolling_case_deletes_nothing_of_others(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match="not empty"):
        rolling.main(["--folder", str(tmp_path)])
    assert (tmp_path / "mine").exists()


def test_runs_of_the_rolling_case_that_failed_are_run_again_and_ours_are_told_first(tmp_path):
    path = tmp_path / "results.json"
    Results(path).add_run("litdata, 60 s", {"peer": "litdata", "failed": "not done"})
    Results(path).add_run("600 MB/s, 60 s", {"peer": "arrowcache", "rows": 1})
    read = Results(path)
    assert list(read.rolling) == ["600 MB/s, 60 s", "litdata, 60 s"]
    assert read.has_run("600 MB/s, 60 s")
    assert not read.has_run("litdata, 60 s")
