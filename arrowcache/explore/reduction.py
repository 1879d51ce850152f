"""Reduction: large arrays to as few numbers as a small picture has pixels. Pure.

What is no finite number is NaN here. Nothing raises, whatever the numbers are: the callers ignore
floating-point errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.explore.drawing import FLATTEST

_DENSE = 4  # numbers a side that a pixel is the mean of, at most: of more, some are left out
_PERCENTILES = (1, 99)


def extent(values: NDArray[Any]) -> tuple[float, float]:
    """Lowest and highest number that is no NaN, ints exactly; NaN if there is none."""
    flat = values.reshape(-1)
    if not flat.size:
        return np.nan, np.nan
    return np.fmin.reduce(flat).item(), np.fmax.reduce(flat).item()


def scaled(values: NDArray[Any], low: float, high: float) -> NDArray[np.float64]:
    """`low` to `high` as 0 to 1, with what is outside at the ends; 1/2 if they are the same; NaN stays."""
    numbers = np.where(np.isfinite(values), values, np.nan).astype(np.float64) / 2  # no difference overflows
    if not low < high:
        return numbers * 0 + 0.5
    return np.clip((numbers - low / 2) / (high / 2 - low / 2), 0, 1)


def contrasted(planes: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Planes with percentiles 1 to 99 of all of them as 0 to 1, or all if most numbers are the same."""
    numbers = np.concatenate([plane.reshape(-1) for plane in planes])
    numbers = numbers[np.isfinite(numbers)]
    low, high = np.percentile(numbers, _PERCENTILES).tolist() if len(numbers) else (0.0, 1.0)
    low, high = (low, high) if low < high else extent(numbers)
    return [scaled(plane, low, high) for plane in planes]


def envelope(signal: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lowest and highest of at most so many stretches of a 1-D array: peaks stay.

    NaN only where a stretch has no number.
    """
    if len(signal) <= most:
        return signal, signal
    edges = np.arange(most) * len(signal) // most
    return np.fmin.reduceat(signal, edges), np.fmax.reduceat(signal, edges)


def fitted(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """Rows and columns of a picture whose longer side has at most `size`, and the other not much fewer."""
    longest = max(shape)
    rows, columns = (min(n, max(round(n * size / longest), size // FLATTEST)) for n in shape)
    return rows, columns


def thinned(array: NDArray[Any], target: tuple[int, int]) -> NDArray[Any]:
    """Every so many-th along the first two axes: of those that are many times the target."""
    steps = (max(1, n // (_DENSE * pixels)) for n, pixels in zip(array.shape, target, strict=False))
    return array[tuple(slice(None, None, step) for step in steps)]


def reduced(plane: NDArray[np.float64], target: tuple[int, int]) -> NDArray[np.float64]:
    """A 2-D array of so many rows and columns, each the mean of those in its block but for NaN."""
    for axis, pixels in enumerate(target):
        if plane.shape[axis] > pixels:
            edges = np.arange(pixels) * plane.shape[axis] // pixels
            is_there = np.isfinite(plane)
            sums = np.add.reduceat(np.where(is_there, plane, 0), edges, axis=axis)
            plane = sums / np.add.reduceat(is_there, edges, axis=axis, dtype=np.int64)
    return plane
