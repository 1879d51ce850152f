"""What `make check` runs of tests with many cases, each of which takes long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_is_quick(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, all but the first of which are marked `slow`."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]
