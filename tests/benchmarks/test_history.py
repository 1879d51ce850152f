"""The guard of `make bench`: what it takes for noise, and what it says moved."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.history import band, moves, remember


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
