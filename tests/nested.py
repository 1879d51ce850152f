"""Items of datasets that have parts: a named tuple and a dataclass, for those who take such apart."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Scan:
    image: Any
    age: int = 3
