"""Map-style datasets for tests of `cached`, whose items tell whether they are right."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from nested import Pair, Scan
from torch.utils.data import Dataset


class Numbers(Dataset):
    """Items 0 to length - 1; `log` gets a line for each that is made, in whichever process."""

    def __init__(self, length, log=None, pause=0.0):
        self.length, self.log, self.pause = length, log, pause

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.log is not None:
            with open(self.log, "a") as file:  # one write of a line: whole, also beside other processes'
                file.write(f"{index}\n")
        time.sleep(self.pause)
        return {"x": torch.full((4, 64), float(index)), "y": index, "name": f"n{index}"}


class Items(Dataset):
    """The items of a list, whatever they are."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def made(log) -> Counter[int]:
    """How often each item was made."""
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()


def check(batch) -> list[int]:
    """The numbers of a batch whose items are what they should be."""
    numbers = batch["y"].tolist()
    assert torch.equal(batch["x"], batch["y"].float()[:, None, None].expand(-1, 4, 64))
    assert batch["name"] == [f"n{number}" for number in numbers]
    return numbers


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Scan):
        return same(one.image, other.image) and same(one.age, other.age)
    return bool(one == other)


def pairs(make) -> list[Any]:
    return [make(number) for number in range(3)]


KINDS = {
    "tensors": pairs(lambda n: torch.full((2, 3), float(n))),
    "bfloat16": pairs(lambda n: torch.full((2,), n, dtype=torch.bfloat16)),
    "complex": pairs(lambda n: torch.full((2,), complex(n, 1))),
    "conjugates": pairs(lambda n: torch.full((2,), complex(n, 1)).conj()),
    "flags": pairs(lambda n: torch.tensor([n > 1, True])),
    "tensors without dimensions": pairs(torch.tensor),
    "arrays": pairs(lambda n: np.full((2, 3), n, np.int16)),
    "arrays without dimensions": pairs(lambda n: np.array(float(n))),
    "scalars of NumPy": pairs(np.float32),
    "days": pairs(lambda n: np.datetime64("2026-01-01") + np.timedelta64(n, "D")),
    "ints": [2**60, 1, -5],
    "floats": [0.1, float("inf"), -3.0],
    "bools": [True, False, True],
    "complex numbers": [1j, 2 + 0j, 3 + 1j],
    "texts": ["", "a", "ä"],
    "texts of NumPy": [np.str_(""), np.str_("a"), np.str_("ää")],
    "bytes": [b"", b"\0a", b"b"],
    "moments": pairs(lambda n: dt.datetime(2026, 1, 1 + n, 12, 30)),  # noqa: DTZ001
    "lists of numbers": pairs(lambda n: [n, n + 1]),
    "tuples": pairs(lambda n: (torch.tensor([n]), n)),
    "lists": pairs(lambda n: [torch.tensor([n]), "a"]),
    "named tuples": pairs(lambda n: Pair(np.full(2, n), str(n))),
    "dicts": pairs(lambda n: {"b": n, "a": (n, {"c": torch.tensor([n])})}),
    "dataclasses": pairs(lambda n: Scan(torch.tensor([n]), n)),
}


def large(index):
    return torch.full((32, 1024), float(index))  # 128 KiB


class Large(Numbers):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"x": large(index)}


def there(train) -> list[int]:
    """The indices of the items in its cache."""
    with train.cache.snapshot() as snapshot:
        return snapshot.gather(range(len(snapshot)), ["_index"])["_index"].tolist()
