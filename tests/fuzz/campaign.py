"""Campaign: thousands of cases over some worker processes, which are watched from outside.

A worker that dies takes down only the case it was at: that is noted, with the file that did it, and
another worker goes on behind it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.mutation import exhaustive
from fuzz.subjects import Subject

CASE_SECONDS = 60.0  # a case takes some ten milliseconds: one that takes so long hangs
SEGMENT_KINDS = (
    "one_byte", "length", "word", "field", "overlap", "offset", "values", "noise", "footers", "foreign",
)  # fmt: skip
OTHER_KINDS = ("settings", "lock", "names", "ranks", "state")
SUBJECTS = ("fixed", "mixed", "text", "wide", "every", "gaps")
_CASES_A_WORKER = 2000
_WEIGHTS = {"one_byte": 4, "word": 3, "field": 3, "every": 1, "fixed": 6, "mixed": 6}  # of the cases

Case = tuple[str, str, int]  # kind, subject, number


@dataclass
class Report:
    """What came of a campaign: how many cases came to what, and what no case may come to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)  # by a signal, or an exit
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # wrong rows, an untyped error, too much memory
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())

    @property
    def defects(self) -> list[str]:
        return [*self.crashes, *self.hangs, *self.wrong]

    def table(self) -> str:
        words = sorted({key.split()[1] for key in self.outcomes})
        kinds = [
            kind
            for kind in (*SEGMENT_KINDS, *OTHER_KINDS)
            if any(k.split()[0] == kind for k in self.outcomes)
        ]
        lines = [f"{'':12}" + "".join(f"{word:>11}" for word in ("cases", *words))]
        for kind in kinds:
            counts = [self.outcomes[f"{kind} {word}"] for word in words]
            lines.append(f"{kind:12}" + "".join(f"{count:11}" for count in (sum(counts), *counts)))
        wrong = sum(count for key, count in self.outcomes.items() if key.endswith(" wrong"))
        harm = f"{len(self.crashes)} crashes, {len(self.hangs)} hangs, {wrong} wrong"
        lines.append(f"{self.cases} cases in {self.seconds:.0f} s: {harm}")
        return "\n".join(lines)


def all_cases(count: int, kinds: tuple[str, ...], subjects: tuple[str, ...], first: int = 0) -> list[Case]:
    """So many cases, spread over kinds and subjects; exhaustive kinds count from `first`."""
    pairs = [
        (kind, subject)
        for kind in kinds
        for subject in (subjects if kind in SEGMENT_KINDS else subjects[:2])
        for _ in range(_WEIGHTS.get(kind, 2) * _WEIGHTS.get(subject, 3))
    ]
    numbers = Counter[tuple[str, str]]()
    cases = []
    for index in range(count):
        pair = pairs[index * len(pairs) // count]
        cases.append((*pair, first + numbers[pair]))
        numbers[pair] += 1
    return cases


def exhaustive_cases(subjects: tuple[str, ...]) -> list[Case]:
    """Each byte of header and footer changed, and each length to which a file can be cut, once."""
    cases = []
    for subject in subjects:
        with tempfile.TemporaryDirectory() as folder, closing(Subject(Path(folder), subject)) as made:
            for kind, count in exhaustive(made.victim).items():
                cases += [(kind, subject, number) for number in range(count)]
    return cases


def run(
    cases: list[Case], *, seed: int, workers: int, found: Path, case_seconds: float = CASE_SECONDS
) -> Report:
    """Run cases.

    Args:
        case_seconds: a case that takes longer hangs.
        found: a folder for what did harm; made if there is any.
    """
    report, started = Report(), time.perf_counter()
    a_worker = min(_CASES_A_WORKER, -(-len(cases) // workers))
    stretches = [cases[at : at + a_worker] for at in range(0, len(cases), a_worker)]
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(
            lambda stretch: _run_stretch(stretch, seed, found, case_seconds, report), stretches
        ):
            pass
    report.seconds = time.perf_counter() - started
    return report


def _run_stretch(cases: list[Case], seed: int, found: Path, case_seconds: float, report: Report) -> None:
    while cases:
        with tempfile.TemporaryDirectory() as folder:
            progress = Path(folder) / "progress"
            progress.touch()
            job = {
                "cases": cases,
                "seed": seed,
                "folder": folder,
                "progress": str(progress),
                "case_seconds": case_seconds,
            }
            done = subprocess.run(
                [sys.executable, "-m", "fuzz.worker", _job_file(folder, job)],
                capture_output=True, text=True, check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip
            messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            at = int(progress.read_text() or 0)
            harmful = Path(folder) / "caches" / cases[at][1] / "segments"
            for message in messages:
                if "error" in message:
                    report.wrong.append(f"{message['case']}: {message['error']}")
                else:
                    report.outcomes.update(message["outcomes"])
            if done.returncode:
                text = f"{cases[at]}: exit code {done.returncode}\n{done.stderr[-3000:]}"
                hung = "Timeout (" in done.stderr
                (report.hangs if hung else report.crashes).append(text)
                report.outcomes[f"{cases[at][0]} {'hang' if hung else 'crash'}"] += 1
                report.outcomes.update(f"{kind} unreported" for kind, _, _ in cases[:at])
                _keep(harmful, found, cases[at])
            cases = cases[at + 1 :] if done.returncode else []


def _job_file(folder: str, job: dict[str, Any]) -> str:
    path = Path(folder) / "job.json"
    path.write_text(json.dumps(job))
    return str(path)


def _keep(segments: Path, found: Path, case: Case) -> None:
    """Save the segments as they were when a process died."""
    target = found / "-".join(map(str, case))
    target.mkdir(parents=True, exist_ok=True)
    if segments.is_dir():
        for path in segments.iterdir():
            if path.is_file() and not path.is_symlink():
                (target / path.name).write_bytes(path.read_bytes())
