"""The part of the tests that a commit runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from quick import is_drawn, longest, recorded

NAMES = [f"tests/test_any.py::test[{number}]" for number in range(3000)]


@pytest.mark.parametrize("share", [1, 3, 10])
def test_a_share_of_the_tests_is_drawn_and_another_one_by_another_seed(share):
    drawn = [{name for name in NAMES if is_drawn(name, share, seed)} for seed in range(100)]
    assert all(abs(len(each) * share - len(NAMES)) <= len(NAMES) / 5 for each in drawn)
    assert set().union(*drawn) == {*NAMES}
    assert drawn[0] == {name for name in NAMES if is_drawn(name, share, 0)}
    assert len({*map(frozenset, drawn)}) == (1 if share == 1 else 100)


def test_the_longest_are_the_fewest_that_take_the_share():
    seconds = {"a": 5.0, "b": 1.0, "c": 3.0, "d": 1.0}
    assert longest(seconds, 0.0) == []
    assert longest(seconds, 0.5) == ["a"]
    assert longest(seconds, 0.8) == ["a", "c"]
    assert longest(seconds, 0.81) == ["a", "b", "c"]
    assert longest(seconds, 1.0) == ["a", "b", "c", "d"]
    assert longest({}) == []


def test_the_record_names_functions_that_there_are():
    tests = Path(__file__).parents[1]
    names, gone = recorded()["longest"], []
    for name in names:
        file, contract = tests.parent / name.partition("::")[0], tests / "reader_contract.py"
        text = "".join(each.read_text() for each in (file, contract) if each.exists())
        if not file.exists() or f"def {name.rpartition('::')[2]}(" not in text:
            gone.append(name)
    assert len(gone) <= len(names) / 5, "make nightly measures the quick tests anew"
