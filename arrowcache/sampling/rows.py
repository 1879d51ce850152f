"""Rows: many samples that a sampler yields at once, for stores that return many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Rows(dict[str, Any]):
    """Many samples: each field has a leading axis of the same length.

    `yield Rows(image=images, label=labels)` in a sampler is the same as yielding each row by itself, and
    takes a fraction of the time. Numbers are arrays `(n, *shape)`; text, bytes and ragged fields are lists of
    n values. A segment that has room for some of them takes the first ones and drops the rest, as it
    drops a single sample that no longer fits: the next task draws anew.
    """

    def split(self) -> Iterator[dict[str, Any]]:
        """Yield each sample by itself, with views of the arrays."""
        names = list(self)
        for values in zip(*self.values(), strict=True):
            yield dict(zip(names, values, strict=True))
