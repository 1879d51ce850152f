"""Results: all measurements, in one JSON file of the repository. Each is written as soon as it is made.

`cases` has an entry a peer and case, `rolling` the figures of each run of the rolling case by its name,
`faults` the outcome of each fault by peer.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.harness import hardware, machine
from benchmarks.peers.case import Case
from benchmarks.peers.registry import by_kind

#: The sizes of a row that are compared, in bytes, and their names.
ROWS = {1 << 10: "1 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB"}
#: What a case is: warm, shuffled and copied; or in which of these it differs.
PLAIN, READ, IN_ORDER, COLD = "", " read", " in order", " cold"
PATH = Path(__file__).parent / "results.json"
#: Lists with a value a run, or one value.
FIGURES = (
    "gbps", "memcpy_gbps", "cpu_per_gb", "start", "first_batch", "spin_kept", "spin_gbps", "private_bytes",
    "shared_bytes",
)  # fmt: skip
_CASE = ("peer", "row", "workers", "consumer", "shuffled", "is_cold")
_TRAITS = ("kind", "is_packaged", "is_endless", "counts_cpu")


class Results:
    """The content of the file; each change writes it."""

    def __init__(self, path: Path = PATH) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.entries: list[dict[str, Any]] = known.get("cases", [])
        self.rolling: dict[str, dict[str, Any]] = known.get("rolling", {})
        self.faults: dict[str, dict[str, dict[str, Any]]] = known.get("faults", {})

    def add(self, peer: str, case: Case, figures: dict[str, Any]) -> None:
        """Take in an entry, in the place of an older one."""
        self.entries = [entry for entry in self.entries if not _is_of(entry, peer, case)]
        self.entries.append({"peer": peer, "case": asdict(case)} | circumstances() | figures)
        self.write()

    def has(self, peer: str, case: Case) -> bool:
        """True if this machine has an entry of the case, which did not fail."""
        return any(_is_of(entry, peer, case) and _is_done_here(entry) for entry in self.entries)

    def add_run(self, name: str, result: dict[str, Any]) -> None:
        """Take in a run of the rolling case; arrowcache's come first."""
        runs = self.rolling | {name: result | circumstances()}
        self.rolling = dict(sorted(runs.items(), key=lambda run: (run[1]["peer"] != "arrowcache", run[0])))
        self.write()

    def has_run(self, name: str) -> bool:
        return name in self.rolling and _is_done_here(self.rolling[name])

    def add_fault(self, peer: str, fault: str, outcome: dict[str, Any]) -> None:
        self.faults.setdefault(peer, {})[fault] = outcome
        self.write()

    def forget(self, peers: Collection[str] = (), runs: Collection[str] = ()) -> None:
        self.entries = [entry for entry in self.entries if entry["peer"] not in peers]
        self.rolling = {name: run for name, run in self.rolling.items() if name not in runs}

    def write(self) -> None:
        """A line an entry, a run, and the faults of a peer."""
        cases = ",\n".join(json.dumps(entry) for entry in self.entries)
        rolling, faults = (
            ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in part.items())
            for part in (self.rolling, self.faults)
        )
        text = f'"cases": [\n{cases}\n],\n"rolling": {{\n{rolling}\n}},\n"faults": {{\n{faults}\n}}'
        self._path.write_text(f"{{\n{text}\n}}\n")

    def frame(self) -> pd.DataFrame:
        """A row a case that did not fail, by kinds of peers: `what` it is, medians and
        runs of each figure, `over` memcpy, what its peer is.

        What the same consumer takes of rows that lie in memory is the median over all peers, not of the entry
        alone: some peers' threads and processes go on working while theirs is measured.
        """
        entries = [
            {**entry["case"], **entry, "row": entry["case"]["workload"]["row_bytes"]}
            for entry in self.entries
            if "failed" not in entry
        ]
        found = pd.DataFrame(entries).reindex(columns=[*_CASE, *FIGURES]).drop_duplicates([*_CASE])
        for figure in FIGURES:
            found[f"{figure} runs"] = found[figure]
            found[figure] = found[figure].map(median).astype(float)
        memcpy = found.groupby(["row", "consumer", "is_cold"])["memcpy_gbps"].transform("median")
        found["over"] = found["gbps"] / memcpy
        peers = pd.DataFrame(
            {"peer": peer.name} | {name: getattr(peer, name) for name in _TRAITS} for peer in by_kind()
        )
        kinds = [found["consumer"] == "read", found["shuffled"].ne(True), found["is_cold"].eq(True)]
        what = np.select(kinds, [READ, IN_ORDER, COLD], PLAIN)
        found["what"] = pd.Categorical(what, [PLAIN, READ, IN_ORDER, COLD], ordered=True)
        return peers.merge(found, on="peer")


def circumstances() -> dict[str, Any]:
    """When, where and of which commit something is measured."""
    day = datetime.now(timezone.utc).date().isoformat()
    return {"date": day, "machine": machine(), "commit": commit()}


def commit() -> str | None:
    """Of the checkout that is measured; None where git has none."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        said = subprocess.run(command, cwd=PATH.parent, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


def median(runs: Any) -> float | None:
    """Of a figure's runs, or its only value; None if there is none."""
    if isinstance(runs, list):
        return float(statistics.median(runs)) if runs else None
    return None if runs is None or pd.isna(runs) else float(runs)


def _is_of(entry: dict[str, Any], peer: str, case: Case) -> bool:
    return bool(entry["peer"] == peer and entry["case"] == asdict(case))


def _is_done_here(entry: dict[str, Any]) -> bool:
    return "failed" not in entry and str(entry.get("machine")).startswith(hardware())
