"""Choice: draws one of several numbers at random, by their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Choice:
    """Draws numbers from 0 to n - 1 in proportion to their weights, by one random number a draw."""

    def __init__(self, weights: Sequence[float] | NDArray[np.float64]) -> None:
        self._ends = np.cumsum(np.asarray(weights, np.float64))

    def draw(self, rng: np.random.Generator) -> int:
        return int(self.draw_many(rng, 1)[0])

    def draw_many(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        at = np.searchsorted(self._ends, rng.random(count) * self._ends[-1], side="right")
        chosen: NDArray[np.int64] = np.minimum(at, len(self._ends) - 1)  # the product may round up to the end
        return chosen


def parse_weights(weights: Sequence[float], names: Sequence[str]) -> list[float]:
    """Check weights, one for each name.

    Raises: ValueError: the wrong number of them; a weight that is zero, negative, infinite or not a number;
        or so large that their sum is infinite. TypeError: a weight that is no number.
    """
    if len(weights) != len(names):
        raise ValueError(f"there are {len(weights)} weights for {len(names)}: {', '.join(names)}")
    for weight, name in zip(weights, names, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.integer | np.floating):
            raise TypeError(f"the weight of {name} must be a number, not {weight!r}")
        if not 0 < weight < math.inf:
            raise ValueError(
                f"the weight of {name} is {weight!r}: it must be positive and finite; leave out what is "
                "not to be drawn"
            )
    try:
        total = math.fsum(weights)
    except OverflowError:
        total = math.inf
    if math.isinf(total):
        raise ValueError("the weights are so large that their sum is infinite: divide all by one number")
    return [float(weight) for weight in weights]
