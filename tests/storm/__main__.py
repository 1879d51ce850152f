"""A storm over a small cache: `PYTHONPATH=tests python -m storm --minutes 10`; see course.py.

It writes into a tmpfs of its own, or with `--here` into the folder for temporary files.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import pytest
from storm.launch import run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="decides what befalls whom, but not when")
    parser.add_argument("--here", action="store_true", help="mount no disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="arrowcache-disk-") as name:
        try:
            report = run(Path(name), 60 * options.minutes, options.seed, on_tmpfs=not options.here)
        except pytest.skip.Exception as reason:
            print(f"{reason}: pass --here")
            return 2
    for defect in report.defects[:20]:
        print(defect, "\n")
    print(report.table())
    return bool(report.defects)


if __name__ == "__main__":
    sys.exit(main())
