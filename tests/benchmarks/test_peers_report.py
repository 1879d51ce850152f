"""What `make peers` runs, and what it tells of that."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("psutil", reason="psutil is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from benchmarks.peers import report
from benchmarks.peers.__main__ import parse
from benchmarks.peers.case import Case
from benchmarks.peers.registry import IN_PLACE, PEERS, STREAMED
from benchmarks.peers.results import Results
from benchmarks.peers.workload import Workload


def test_all_is_run_unless_a_part_or_a_peer_is_named():
    everything = parse([])
    assert everything.parts == ["cases", "rolling", "faults"]
    assert everything.peers == [peer.name for peer in PEERS]
    assert parse(["--report"]).parts == []
    some = parse(["--parts", "rolling", "--peers", "memmap,Ray Data"])
    assert (some.parts, some.peers) == (["rolling"], ["torch DataLoader, np.memmap", "Ray Data"])
    with pytest.raises(SystemExit):
        parse(["--parts", "case"])


def test_only_what_was_measured_is_told(tmp_path):
    results = Results(tmp_path / "results.json")
    assert "GB/s" not in report.everything(results)
    figures = {"gbps": [2.0], "memcpy_gbps": [4.0], "private_bytes": 1 << 20, "shared_bytes": 0}
    for peer, rate in (
        ("arrowcache", 3.0),
        ("litdata", 1.0),
        ("Ray Data", 2.0),
        ("torch DataLoader, np.memmap", 9.0),
    ):
        case = Case(Workload(64 << 10, rows=64, batch_rows=8), workers=2)
        results.add(peer, case, figures | {"gbps": [rate], "cpu_per_gb": [rate]})
    results.add("Lance", case, {"failed": "no word"})
    told = report.everything(results)
    row = next(
        line for line in report.beside(results.frame(), STREAMED).splitlines() if line.startswith("| 64 KiB")
    )
    assert "Ray Data: 2.0 (2.0 to 2.0)" in row  # np.memmap is of the other kind
    assert "| 1.5 |" in row
    by_hand = report.beside(results.frame(), IN_PLACE).splitlines()
    assert any("torch DataLoader, np.memmap: 9.0 (9.0 to 9.0)" in line for line in by_hand)
    assert "- *torch DataLoader, np.memmap*: GB/s 64 KiB x 2 (9.0 / 3.0)" in told
    assert "- litdata: CPU s a GB 64 KiB x 2 (1.0 / 3.0)" in told
    asked = next(line for line in report.targets(results.frame()).splitlines() if line.startswith("| 64 KiB"))
    assert "| 5 | 1.5, not reached | Ray Data | 0.5 | 3.0, not reached | litdata |" in asked
    assert "litdata: 1.0" in row  # what Ray takes is not known
    assert "- Lance, 64 KiB, 2 workers, copy: no word" in report.everything(results)


def test_readme_gets_one_sentence_with_the_fastest_of_each_kind(tmp_path):
    results = Results(tmp_path / "results.json")
    assert report.foremost(results) == ""
    for peer, rate in (("arrowcache", 3.0), ("litdata", 1.0), ("Grain", 2.0), ("SPDL", 4.0)):
        case = Case(Workload(64 << 10, rows=64, batch_rows=8))
        results.add(peer, case, {"gbps": [rate], "memcpy_gbps": [4.0]})
    sentence = report.foremost(results).splitlines()[0]
    assert "3.0 arrowcache, 2.0 the fastest of streaming data sets and caches (Grain)" in sentence
    assert "4.0 the fastest of memory indexed in place (SPDL)" in sentence


def test_a_rate_is_over_the_median_of_all_memcpys_of_its_kind(tmp_path):
    """Some peers work on in other threads while theirs is measured."""
    results, case = Results(tmp_path / "results.json"), Case(Workload(1 << 10, rows=64, batch_rows=8))
    for peer, memcpy in (("arrowcache", 10.0), ("litdata", 9.0), ("Grain", 1.0)):
        results.add(peer, case, {"gbps": [1.0, 4.0, 2.0], "memcpy_gbps": [memcpy]})
    read = Case(case.workload, consumer="read")
    results.add("arrowcache", read, {"gbps": [2.0], "memcpy_gbps": [20.0]})
    over = results.frame().set_index(["peer", "consumer"])["over"]
    assert over["Grain", "copy"] == pytest.approx(2 / 9)
    assert over["arrowcache", "read"] == pytest.approx(0.1)


def test_only_what_lies_between_the_marks_of_a_file_is_replaced(tmp_path):
    path = tmp_path / "file.md"
    path.write_text("a\n<!-- peers: written by make peers -->\nold\n<!-- end of peers -->\nb\n")
    report.replace(path, "new\n")
    expected = "a\n<!-- peers: written by make peers -->\nnew\n<!-- end of peers -->\nb\n"
    assert path.read_text() == expected
    report.replace(path, "new\n")
    assert path.read_text() == expected
    path.write_text("a\n")
    with pytest.raises(ValueError, match="put them where the tables belong"):
        report.replace(path, "new\n")


def test_faults_are_told_with_what_they_mean_and_why_one_failed(tmp_path):
    outcomes = {
        "worker": {"verdict": "pass", "detail": "everything came", "processes": [], "left": {}},
        "shm": {"verdict": "fail", "detail": "Bus error", "processes": ["a", "b"],
                "left": {"shm": {"x": 2_000_000, "y": 0}}},
        "disk": {"verdict": "evicts", "detail": "exit 0; 9 MiB there, read: exit 0; 1024 rows",
                 "processes": [], "left": {}, "date": "2026-11-23"},
    }  # fmt: skip
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"faults": {"litdata": outcomes}}))
    told = report.everything(Results(path))
    assert "| litdata | pass |" in told
    assert "fail (2 processes, 2 MB shm)" in told
    assert "- litdata, shm: Bus error; left: shm x\n" in told
    assert "| no error; 1,024 of 6,144 rows came back |" in told
    assert "One trial each on 2026-11-23. Date, versions and commit of 2 were not recorded." in told
    assert "everything came" not in told
    assert "`kill -9` of a worker process" in told


def test_runs_of_the_rolling_case_that_were_not_made_or_never_filled_are_named(tmp_path):
    results = Results(tmp_path / "results.json")
    nan = float("nan")
    of_both = {"in_mbps": 300.0, "out_mbps": 300.0, "limit_bytes": 4_001_000_000, "over_bytes": 0, "rows": 7}
    of_both |= {"processors": 1.0, "rows_wrong": 0, "rows_torn": 0, "facts": {"remote_bytes": 1}}
    of_both |= {"age_mean": nan, "age_worst": nan, "sampler_waiting_seconds": nan, "unread_share": nan}
    of_both |= {"plan": {"in_rate": 600e6, "capacity_bytes": 4_000_000_000}, "stall_share": 0.001}
    litdata = {"peer": "litdata", "most_bytes": 2_000_000_000, "fill_seconds": 120.1}
    results.add_run("litdata, 60 s", of_both | litdata | {"waited_share": 0.05, "own_stall_share": 0.01})
    told = report.everything(results)
    assert "| never: 50% at most | 0 |" in told
    assert "| 0.10% | 5.00% | 1.00% |" in told
    assert "- litdata, 60 s: never filled, at most 2.00 of 4.00 GB in 120 s\n" in told
    assert "1.00 bytes came by the link for each that was delivered, at 0.50 of the link's rate" in told
    assert "its limit was 1,000,000 bytes above the others'" in told
    not_run = told.partition("Not run:")[2]
    assert "- 600 MB/s, 10 min\n" in not_run
    assert "- litdata, 60 s\n" not in not_run


def test_memory_that_a_peer_does_not_share_is_less_than_what_arrowcache_does(tmp_path):
    results, case = (
        Results(tmp_path / "results.json"),
        Case(Workload(1 << 10, rows=64, batch_rows=8), workers=2),
    )
    for peer, nbytes in (("arrowcache", 3 << 20), ("litdata", 0), ("Grain", 4 << 20)):
        results.add(peer, case, {"gbps": [1.0], "memcpy_gbps": [2.0], "shared_bytes": nbytes})
    assert "- litdata: shared MiB 1 KiB x 2 (0 / 3.0)" in report.as_good(results.frame(), ["shared_bytes"])
    assert "Grain" not in report.as_good(results.frame(), ["shared_bytes"])
    assert results.entries[0]["commit"] == results.entries[1]["commit"]


def test_one_file_keeps_cases_runs_and_faults_and_a_peer_that_is_measured_anew_loses_its_own(tmp_path):
    path = tmp_path / "results.json"
    case = Case(Workload(1 << 10, rows=64, batch_rows=8))
    Results(path).add("Grain", case, {"gbps": [1.0]})
    Results(path).add_fault("Grain", "disk", {"verdict": "pass"})
    Results(path).add_run("Grain, 60 s", {"peer": "Grain"})
    known = Results(path)
    assert known.has("Grain", case)
    assert known.has_run("Grain, 60 s")
    assert known.faults == {"Grain": {"disk": {"verdict": "pass"}}}
    known.forget(["Grain"], ["Grain, 60 s"])
    known.write()
    assert (Results(path).entries, Results(path).rolling) == ([], {})
    assert Results(path).faults


def test_what_is_in_the_repository_is_told_in_every_part():
    told = report.everything(Results())
    assert "### Faults" in told
    assert "### Rolling" in told
    assert "${" not in told
