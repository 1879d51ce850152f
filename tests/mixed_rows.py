"""A cache with columns of four kinds: six segments of 16 rows of 21 KiB, ids 0 to 95. Also for scripts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import make_cache

import arrowcache as ac

ROWS, SEGMENT_ROWS, DAMAGED = 96, 16, 3
"""`DAMAGED` is the segment that tests damage."""
FIXED, VARIABLE = ["id", "image"], ["id", "name", "boxes"]
"""Columns that are read together."""
SCHEMA = ac.Schema(
    {
        "id": ac.Tensor("int64"),
        "image": ac.Tensor("float32", (64, 64)),
        "name": ac.String(),
        "boxes": ac.Ragged("float32", (4,)),
    }
)
WHOLE = list(range(ROWS))
BAD = WHOLE[DAMAGED * SEGMENT_ROWS : (DAMAGED + 1) * SEGMENT_ROWS]
"""Rows of the damaged segment."""
OTHERS = [row for row in WHOLE if row not in BAD]


def mixed_cache(path: Path) -> ac.Cache:
    """Each row's values tell its id."""
    cache = make_cache(path, SCHEMA, capacity="16MiB", segment_bytes="1MiB")
    with cache.writer() as writer:
        for number in range(ROWS):
            image = np.full((64, 64), number, np.float32)
            boxes = np.full((200, 4), number, np.float32)
            writer.append(id=number, image=image, name=str(number) * 500, boxes=boxes)
    return cache


def checked(batch: Any) -> list[int]:
    """The ids of a batch whose other columns are right, those that it has."""
    ids: list[int] = batch["id"].tolist()
    if "image" in batch:
        assert (batch["image"] == batch["id"][:, None, None]).all()
    if "name" in batch:
        assert batch["name"] == [str(number) * 500 for number in ids]
        assert (batch["boxes"].data == np.repeat(batch["id"], 200)[:, None]).all()
    return ids


def rows_of(batches: Iterable[Any]) -> list[int]:
    """The ids of all, in order."""
    return sorted(number for batch in batches for number in checked(batch))
