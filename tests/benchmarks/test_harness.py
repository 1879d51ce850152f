"""The harness of benchmarks: its turns and ratios; what it takes for noise, and what it says moved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.__main__ import MODULES, OWN, main
from benchmarks.cases import CASES
from benchmarks.harness import Figures, Options, Round, band, in_turns, moves, remember, run

ROOT = Path(__file__).parents[2]


def entries(*medians, case="a"):
    """Entries of one benchmark, each with one ratio, the same in two turns."""
    return [{"date": "2026-01-01", "ratios": {case: [median] * 2}} for median in medians]


@pytest.mark.parametrize(
    ("earlier", "low", "high"),
    [
        ([[1.0]], 2 / 3, 4 / 3),  # nothing is known of its noise
        ([[0.5], [1.0]], 0.5, 4 / 3),
        ([[0.7], [1.0, 1.0]], 0.7, 1.1),
        ([[0.1, 0.6, 1.0, 1.3, 9.0]], 0.6, 1.3),  # the inner half of the last one's turns
        ([[0.1, 1.0, 9.0], [1.0, 1.0, 1.0]], 0.9, 1.1),  # of the one before the median alone
    ],
)
def test_the_band_of_noise(earlier, low, high):
    assert band(earlier) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("now", "said"),
    [(0.95, None), (1.05, None), (0.8, "DOWN: a: 1 -> 0.8"), (1.3, "up: a: 1 -> 1.3")],
)
def test_only_what_leaves_the_band_is_told(now, said):
    lines = moves(entries(1.0), {"a": [now]})
    if said is None:
        assert lines == ["1 ratios against those of 2026-01-01: nothing moved beyond noise"]
    else:
        assert len(lines) == 2
        assert said in lines[1]


def test_cases_that_come_and_go_are_told():
    lines = moves(entries(1.0), {"b": [2.0]})
    assert lines[1:] == ["  new: b: 2", "  gone: a"]


def test_a_case_that_came_back_is_compared_with_what_is_known_of_it():
    known = entries(1.0) + entries(1.0, case="other")
    assert any("DOWN: a: 1 -> 0.5" in line for line in moves(known, {"a": [0.5]}))


def test_each_run_is_recorded_and_compared_with_the_one_before_on_the_same_machine(
    tmp_path, capsys, monkeypatch
):
    path = tmp_path / "history.jsonl"
    remember("gather", {"a": 1.0, "b": [0.5, 0.6]}, path)
    assert "first of this benchmark" in capsys.readouterr().out
    remember("gather", {"a": 0.5, "b": [0.5, 0.6]}, path)
    out = capsys.readouterr().out
    assert "DOWN: a: 1 -> 0.5" in out
    assert "b" not in out.split("\n", 1)[1]
    remember("loader", {"a": 3.0}, path)
    assert "first of this benchmark" in capsys.readouterr().out
    monkeypatch.setattr(os, "cpu_count", lambda: 1234)  # another machine
    remember("gather", {"a": 9.0}, path)
    assert "first of this benchmark" in capsys.readouterr().out
    assert [json.loads(line)["benchmark"] for line in path.read_text().splitlines()] == [
        "gather", "gather", "loader", "gather"
    ]  # fmt: skip


def test_ways_take_turns_and_the_first_ones_are_not_counted():
    ran = []
    ways = {"a": lambda: ran.append("a"), "b": lambda: ran.append("b") or 0.25}
    found = in_turns(ways, repeats=2, warm=1)
    assert ran == ["a", "b"] * 3
    assert found["b"].seconds == [0.25, 0.25]  # its own
    assert len(found["a"].seconds) == len(found["a"].cpu_seconds) == 2


def test_a_round_is_told_over_its_units_and_the_history_gets_the_ratios_to_the_first(capsys, monkeypatch):
    seconds = {"fast": 1.0, "slow": 2.0, "memcpy": 0.5}

    def benchmark(options):
        assert options.turns(9) == 9
        ways = {name: lambda name=name: seconds[name] for name in seconds}
        yield Round("rows", ways, ["memcpy", "slow"], amount=4.0, unit="GB")
        yield Figures("padding", {"share": "3%", "us": 12.345}, {"padded": 0.5})

    kept = {}
    monkeypatch.setattr("benchmarks.harness.remember", lambda name, ratios: kept.update({name: ratios}))
    told = run("any", benchmark, Options())["figures"]
    assert kept == {
        "any": {"rows: fast over memcpy": [0.5] * 9, "rows: slow over memcpy": [0.25] * 9, "padded": 0.5}
    }
    assert told[0]["ways"]["fast"]["rates"] == [4.0] * 9
    assert told[0]["ways"]["fast"]["over"]["slow"] == [2.0] * 9
    out = capsys.readouterr().out
    assert "over memcpy" in out
    assert "4 (4 to 4)" in out
    assert "padding: share 3%, us 12.3" in out


def test_a_small_run_leaves_the_history_alone_and_writes_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.harness.remember", lambda *_: pytest.fail("the history got something"))
    main(["shuffle", "--small", "--json", str(tmp_path / "all.json")])
    (found,) = json.loads((tmp_path / "all.json").read_text())
    assert found["benchmark"] == "shuffle"
    assert {"title": "rows", "values": {"spread", "segments a batch", "over uniform"}} in [
        {"title": each["title"], "values": {*each["values"]}} for each in found["figures"]
    ]
    assert "How well does each shuffle mix?" in capsys.readouterr().out


def test_a_benchmark_is_sent_the_figures_of_its_rounds_and_ways_may_do_more_than_others(capsys):
    def benchmark(options):
        ways = {"one": lambda: 1.0, "two": lambda: 1.0}
        told = yield Round("rows", ways, ["one"], {"one": 2.0, "two": 4.0}, turns=2)
        yield Figures("again", {"rate": told["ways"]["two"]["rates"][0]})

    rows, again = run("any", benchmark, Options(is_small=True))["figures"]
    assert rows["ways"]["two"] | {"cpu_seconds": 0} == {
        "rates": [4.0] * 2, "over": {"one": [2.0] * 2}, "cpu_seconds": 0,
    }  # fmt: skip
    assert again["values"] == {"rate": 4.0}


def test_make_bench_names_what_there_is():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    names = next(line for line in makefile.splitlines() if line.startswith("BENCH := ")).split()[2:]
    assert {*names} <= {*CASES, *MODULES, *OWN}
    assert {*CASES} <= {*names}
    for name, benchmark in CASES.items():
        assert (benchmark.__doc__ or "").splitlines()[0].endswith("?"), name
    for name in (*MODULES, *OWN):
        assert any((ROOT / "benchmarks" / name).with_suffix(end).exists() for end in ("", ".py")), name
    with pytest.raises(SystemExit):
        main(["no such benchmark"])
