"""The part of the tests that a commit runs."""

from __future__ import annotations

import pytest
from quick import is_drawn

NAMES = [f"tests/test_any.py::test[{number}]" for number in range(3000)]


@pytest.mark.parametrize("share", [1, 3, 10])
def test_a_share_of_the_tests_is_drawn_and_another_one_by_another_seed(share):
    drawn = [{name for name in NAMES if is_drawn(name, share, seed)} for seed in range(100)]
    assert all(abs(len(each) * share - len(NAMES)) <= len(NAMES) / 5 for each in drawn)
    assert set().union(*drawn) == {*NAMES}
    assert drawn[0] == {name for name in NAMES if is_drawn(name, share, 0)}
    assert len({*map(frozenset, drawn)}) == (1 if share == 1 else 100)
