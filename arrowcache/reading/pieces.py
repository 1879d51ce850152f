"""Pieces: NumPy work on many elements, cut so that the GIL is not handed over on the way."""

from __future__ import annotations

from collections.abc import Iterator

_ELEMENTS_UNDER_GIL = 500


def pieces(count: int) -> Iterator[slice]:
    """Slices of at most 500 elements: NumPy hands the GIL over in operations on more.

    Beside a thread that never yields, it takes 5 ms to come back each time: a dozen small operations
    in pieces cost less than one of them in one go.
    """
    for start in range(0, count, _ELEMENTS_UNDER_GIL):
        yield slice(start, min(start + _ELEMENTS_UNDER_GIL, count))
