"""Tens of thousands of damaged files: `PYTHONPATH=tests python -m fuzz --cases 50000`, or `--exhaustive`.

One case again:
`PYTHONPATH=tests python -m fuzz --kind word --subject mixed --first 4711 --cases 1 --seed 0`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fuzz.campaign import OTHER_KINDS, SEGMENT_KINDS, SUBJECTS, all_cases, exhaustive_cases, run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument(
        "--exhaustive", action="store_true", help="every byte of header and footer, and every length"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of each kind's first case")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kind", action="append", choices=[*SEGMENT_KINDS, *OTHER_KINDS])
    parser.add_argument("--subject", action="append", choices=SUBJECTS)
    parser.add_argument("--found", type=Path, default=Path("fuzz-found"), help="where what did harm is kept")
    options = parser.parse_args()
    kinds = tuple(options.kind or (*SEGMENT_KINDS, *OTHER_KINDS))
    subjects = tuple(options.subject or SUBJECTS)
    if options.exhaustive:
        cases = exhaustive_cases(subjects)
    else:
        cases = all_cases(options.cases, kinds, subjects, options.first)
    print(f"{len(cases)} cases", flush=True)
    report = run(cases, seed=options.seed, workers=options.workers, found=options.found)
    for defect in report.defects[:20]:
        print(defect, "\n")
    print(report.table())
    return bool(report.defects)


if __name__ == "__main__":
    sys.exit(main())
