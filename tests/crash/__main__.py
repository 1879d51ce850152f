"""Every call of every operation fails in every way: `PYTHONPATH=tests python -m crash`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

from crash.matrix import Templates, all_cases, little_to_collect, points_of, try_all
from crash.operations import OPERATIONS


def run(operation: str, scratch: str | None) -> tuple[int, int, list[str]]:
    """(calls, failures tried, what went wrong)."""
    warnings.simplefilter("error", ResourceWarning)
    with tempfile.TemporaryDirectory(dir=scratch) as name, little_to_collect():
        folder = Path(name)
        templates = Templates(folder)
        points = points_of(operation, templates, folder / "probe")
        cases = list(all_cases(points))
        defects = try_all(operation, cases, templates, folder)
    return len(points), len(cases), defects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operation", action="append", choices=OPERATIONS)
    parser.add_argument("--scratch", help="where the caches are made; a folder in memory is fastest")
    options = parser.parse_args()
    tried, defects = 0, []
    for operation in options.operation or OPERATIONS:
        calls, count, found = run(operation, options.scratch)
        print(f"{operation:40} {calls:4} calls, {count:5} failures, {len(found)} defects", flush=True)
        tried += count
        defects += found
    print(f"{tried} failures, {len(defects)} defects")
    for defect in defects[:20]:
        print(defect)
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
