"""When a test runs that takes long: in `make test`, in each commit's CI, or in `make nightly` alone.

A test is marked `slow`, and one case of it `smoke`: `make test` runs that. `nightly` leaves a test to
`make nightly`, but for the folders that it names: it also runs where one of these has changed since the last
nightly run. Of what is beyond `make test`, a commit's CI runs one test in some, by `--share`.

Of the quick tests a few hundred functions take most of the time. `make check`, which is for each change,
leaves these out, by `--quickest`; a new test runs until the next nightly run has measured it.

nightly.json records the last nightly run: the folders' digests and the functions that took most of the time.
`python tests/quick.py` writes that file.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("nightly.json")
SEED = int(os.environ.get("TESTS_SEED", "0"), 16)
"""Of the commit, which make gives: it selects those of many cases that a run of it has."""
NIGHTLY = "TESTS_NIGHTLY"
"""The variable that `--nightly` sets, for the processes that share the tests."""


def first_is_quick(values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, all but the first of which are marked `slow`."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.slow) for value in others)]


def one_in(share: int, values: Iterable[Any], *folders: str, seed: int = SEED) -> list[Any]:
    """Values of a parameter, one in `share` of which each run has, and all of them `make nightly`.

    Args:
        values: also as `pytest.param`; a tuple has those of several parameters.
        folders: all run where one of these has changed, too.
        seed: selects them.
    """
    left_out = pytest.mark.nightly(*folders)
    return [
        value if number % share == seed % share else with_mark(value, left_out)
        for number, value in enumerate(values)
    ]


def with_mark(value: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)


def in_part(number: int, share: int = 3) -> int:
    """Return a share of a number of examples, one at least; in `make nightly` all of them."""
    return number if NIGHTLY in os.environ else max(1, number // share)


def some_of(values: Sequence[T], share: int = 3, seed: int = SEED) -> Sequence[T]:
    """Return one value in so many, from a first that the seed draws; in `make nightly` all of them."""
    every = 1 if NIGHTLY in os.environ else min(share, len(values))
    return values[seed % every :: every] if every else values


def is_drawn(name: str, share: int, seed: int = SEED) -> bool:
    """True for the names of one test in so many: others with another seed."""
    return zlib.crc32(f"{seed} {name}".encode()) % share == 0


def function_of(test: str) -> str:
    """Return the name of a test's function, which its cases share."""
    return test.partition("[")[0]


def longest(seconds: Mapping[str, float], share: float = 0.9) -> list[str]:
    """Return the fewest functions that took this share of the time of all, or more; sorted by name."""
    left, names = share * sum(seconds.values()), list[str]()
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        if left <= 0:
            break
        left -= seconds[name]
        names.append(name)
    return sorted(names)


def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"folders": {}, "longest": []}


def digest(folder: str) -> str:
    """Of the sources in a folder of the repository."""
    found = hashlib.sha256()
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".c", ".h"):
            found.update(f"{path.relative_to(ROOT)}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def changed(folders: Iterable[str]) -> bool:
    """True if one of these folders is not as the last nightly run had it."""
    before = recorded()["folders"]
    return any(before.get(folder) != digest(folder) for folder in folders)


FOLDERS = (
    "arrowcache/native", "arrowcache/storage", "arrowcache/torch", "benchmarks", "tests/gpu", "tests/native",
)  # fmt: skip
"""All that tests name in their marks."""

SECONDS = "quick/seconds"
"""The name in pytest's cache of each function's seconds: those of its cases that are quick, together."""

if __name__ == "__main__":
    measured = json.loads((ROOT / ".pytest_cache/v" / SECONDS).read_text())
    record = {"folders": {folder: digest(folder) for folder in FOLDERS}, "longest": longest(measured)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
