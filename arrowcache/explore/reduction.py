"""Reduction: large arrays to as few numbers as a small picture has pixels. Pure.

What is no finite number is NaN here. Nothing raises, whatever the numbers are: the callers ignore
floating-point errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from arrowcache.explore.drawing import COLORS, FLATTEST, GAP, NAN

_DENSE = 4  # numbers a side that a pixel is the mean of, at most: of more, some are left out
_HUGE = 1e300  # sums of more overflow
_PERCENTILES = (1, 99)
_BETWEEN = 2  # pixels between the slices of a volume


def envelope(signal: NDArray[Any], most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lowest and highest of at most so many stretches of a 1-D array: peaks stay.

    NaN only where a stretch has no finite number.
    """
    if len(signal) <= most:
        low = finite(signal)
        return low, low
    edges = np.arange(most) * len(signal) // most
    low, high = (ufunc.reduceat(signal, edges).astype(np.float64) for ufunc in (np.fmin, np.fmax))
    if signal.dtype.kind == "f" and not (np.isfinite(low).all() and np.isfinite(high).all()):
        signal = np.where(np.isfinite(signal), signal, np.nan)
        low, high = (ufunc.reduceat(signal, edges).astype(np.float64) for ufunc in (np.fmin, np.fmax))
    factor = 2.0**-100 if max(abs(extent(low)[0]), abs(extent(high)[1])) > _HUGE else 1.0
    return low * factor, high * factor


def finite(values: NDArray[Any]) -> NDArray[np.float64]:
    """As float64, NaN for what is no finite number; huge numbers all smaller by one factor."""
    numbers = values.astype(np.float64)
    numbers[~np.isfinite(numbers)] = np.nan
    lowest, highest = extent(numbers)
    return numbers * 2.0**-100 if max(-lowest, highest) > _HUGE else numbers


def extent(values: NDArray[Any]) -> tuple[float, float]:
    """Lowest and highest number that is no NaN, ints exactly; NaN if there is none."""
    flat = values.reshape(-1)
    if not flat.size:
        return np.nan, np.nan
    return np.fmin.reduce(flat).item(), np.fmax.reduce(flat).item()


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


def limits(values: NDArray[np.float64]) -> tuple[float, float]:
    """The range that colors stand for: percentiles 1 to 99, or all if most numbers are the same.

    There is a finite number among the values.
    """
    numbers = values[np.isfinite(values)]
    low, high = np.percentile(numbers, _PERCENTILES).tolist()
    return (low, high) if low < high else extent(numbers)


def scaled(values: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    """`low` to `high` as 0 to 1, with what is outside at the ends; 1/2 if they are the same."""
    if not low < high:
        return values * 0 + 0.5
    return np.clip((values - low) / (high - low), 0, 1)


def colored(plane: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Numbers as indices into the palette."""
    indices = scaled(plane, low, high) * (COLORS - 1)
    return np.where(np.isfinite(indices), indices.round(), NAN).astype(np.uint8)


def side_by_side(planes: list[NDArray[np.uint8]], tile: int) -> NDArray[np.uint8]:
    """Maps beside each other, each made `tile` long by repeating pixels, none of them flat."""
    fitted = []
    for plane in planes:
        longest = max(plane.shape)
        rows, columns = (max(tile // FLATTEST, round(tile * n / longest)) for n in plane.shape)
        at = np.arange(rows)[:, None] * plane.shape[0] // rows, np.arange(columns) * plane.shape[1] // columns
        fitted.append(plane[at])
    height = max(len(plane) for plane in fitted)
    width = sum(plane.shape[1] for plane in fitted) + _BETWEEN * (len(fitted) - 1)
    canvas = np.full((height, width), GAP, np.uint8)
    left = 0
    for plane in fitted:
        top = (height - len(plane)) // 2
        canvas[top : top + len(plane), left : left + plane.shape[1]] = plane
        left += plane.shape[1] + _BETWEEN
    return canvas
