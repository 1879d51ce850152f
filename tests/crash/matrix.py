"""Matrix: which failures are tried at which call of which operation, and trying one."""

from __future__ import annotations

import errno
import gc
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from crash.faults import CODES, Faults, Point, error_of, worth_trying
from crash.operations import OPERATIONS, check_sound, failing_once, held, quiet, sound_segments
from helpers import read_ids, segment_files

import arrowcache as ac


class Case(NamedTuple):
    """One failure: at which call, with which error, and whether all calls after it fail, too."""

    point: Point
    code: int
    lasting: bool


class Templates:
    """A prepared cache for each operation, to be copied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy(self, operation: str, path: Path) -> None:
        """Make the cache of an operation, to which nothing that was mapped before is known.

        A cache that waits for the garbage collector would lend its mapped segments to one with its inode.
        """
        gc.collect()
        template = self._folder / operation.replace(" ", "-")
        if operation == "create":
            return
        if not template.exists():
            OPERATIONS[operation].prepare(template)
        shutil.copytree(template, path)


@contextmanager
def little_to_collect() -> Iterator[None]:
    """Have the garbage collector look at nothing that is there already: it took most of the time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def nothing(name: str, arguments: tuple[Any, ...]) -> None:
    pass


def points_of(operation: str, templates: Templates, path: Path) -> list[Point]:
    """All calls of an operation in which nothing fails."""
    templates.copy(operation, path)
    faults, what = Faults(None, nothing), OPERATIONS[operation]
    subject = what.begin(path)
    with quiet(), faults.active():
        what.do(subject, failing_once(faults))
    assert OPERATIONS[operation].expected <= set(faults.calls), "it does not do what it is tested for"
    return faults.points


def all_cases(points: list[Point]) -> Iterator[Case]:
    for point in points:
        for code in CODES:
            for lasting in (False, True):
                yield Case(point, code, lasting)


def some_cases(points: Mapping[str, list[Point]]) -> dict[str, list[Case]]:
    """For each operation: every place from which a call is made, with one failure after another.

    So each call fails in every way in some operation; where there are too few of it, the last one does.
    Of a place that an operation before had, too, only its last call is failed.
    """
    ways = [(code, lasting) for lasting in (False, True) for code in CODES]
    met: Counter[str] = Counter()
    last: dict[str, tuple[str, Point]] = {}
    cases: dict[str, list[Case]] = {operation: [] for operation in points}
    known: set[tuple[str, str]] = set()
    for operation, its_points in points.items():
        for point in worth_trying(its_points, known):
            cases[operation].append(Case(point, *ways[met[point.name] % len(ways)]))
            met[point.name] += 1
            last[point.name] = operation, point
    for name, (operation, point) in last.items():
        cases[operation] += [Case(point, *way) for way in ways[met[name] :]]
    return cases


def attempt(operation: str, case: Case, templates: Templates, path: Path) -> None:
    """Fail a call of an operation on a new cache, make what failed again, and look at what is left."""
    templates.copy(operation, path)
    what, before = OPERATIONS[operation], sound_segments(path, OPERATIONS[operation])

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        raise error_of(name, case.code, arguments[0] if arguments else None)

    faults = Faults(case.point, fail, lasting=case.lasting)
    subject = what.begin(path)
    with quiet(), faults.active():
        what.do(subject, failing_once(faults))
    del subject
    assert faults.reached
    if held(path):
        gc.collect()  # what could not be unmapped goes with the cache that it was of
    assert not held(path), "a descriptor or a mapping leaked"
    if what.publishes:
        assert read_ids(segment_files(ac.Cache.open(path))[-1])[0] >= 10**5, "what was taken is lost"
    check_sound(path, before, what, was_full=case.code == errno.ENOSPC)
    shutil.rmtree(path)


def try_all(operation: str, cases: list[Case], templates: Templates, folder: Path) -> list[str]:
    """What went wrong, a text each."""
    defects = []
    for number, case in enumerate(cases):
        path = folder / str(number)
        try:
            attempt(operation, case, templates, path)
        except Exception as error:
            defects.append(f"{operation}: {case}\n    {type(error).__name__}: {error}")
            shutil.rmtree(path, ignore_errors=True)
    return defects
