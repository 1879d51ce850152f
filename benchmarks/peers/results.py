"""Results: what was measured, in a file of the repository, which has every case as soon as it is done."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Collection
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.measure import hardware, machine
from benchmarks.peers.case import Case
from benchmarks.peers.workload import Workload

#: The sizes of a row that are compared, in bytes, and their names.
ROWS = {1 << 10: "1 KiB", 64 << 10: "64 KiB", 1 << 20: "1 MiB"}
PATH = Path(__file__).parent / "results.json"
ROLLING_PATH = PATH.with_name("rolling.json")


class Results:
    """One entry a peer and case."""

    def __init__(self, path: Path = PATH) -> None:
        self._path = path
        self.entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def add(self, peer: str, case: Case, figures: dict[str, Any]) -> None:
        """Take in an entry, in the place of an older one, and write the file."""
        self.entries = [entry for entry in self.entries if not _is_of(entry, peer, case)]
        when = datetime.now(timezone.utc).date().isoformat()
        self.entries.append(
            {"peer": peer, "case": asdict(case), "date": when, "machine": machine(), "commit": commit()}
            | figures
        )
        lines = ",\n".join(json.dumps(entry) for entry in self.entries)
        self._path.write_text(f"[\n{lines}\n]\n")

    def has(self, peer: str, case: Case) -> bool:
        """Whether there is an entry of this machine, of a case that did not fail."""
        return any(
            _is_of(entry, peer, case) and _is_of_here(entry) and "failed" not in entry
            for entry in self.entries
        )

    def forget(self, peers: Collection[str]) -> None:
        self.entries = [entry for entry in self.entries if entry["peer"] not in peers]

    def find(self, peer: str, row_bytes: int, **case: object) -> dict[str, Any] | None:
        """The entry of a case: warm, shuffled, copied and without workers unless said."""
        wanted = asdict(Case(Workload(row_bytes, 0, 0), **case))  # type: ignore[arg-type]
        for entry in self.entries:
            found = entry["case"]
            same = all(found[name] == wanted[name] for name in wanted if name not in ("workload", "spins"))
            if entry["peer"] == peer and same and found["workload"]["row_bytes"] == row_bytes:
                return entry
        return None

    def ratio(self, entry: dict[str, Any] | None) -> float | None:
        """What the median run of a warm case delivered, over `memcpy`."""
        rate = median(entry, "gbps")
        return None if rate is None or entry is None else rate / self.memcpy(entry)

    def memcpy(self, entry: dict[str, Any]) -> float:
        """GB/s at which the same consumer takes rows that lie in memory: the median over all peers.

        Not of the entry alone: some peers' threads and processes go on working while theirs is measured.
        """
        return statistics.median(
            rate
            for other in self.entries
            if (rate := median(other, "memcpy_gbps")) and _kind(other) == _kind(entry)
        )


class Rolling:
    """What the runs of the rolling case came to, by their names."""

    def __init__(self, path: Path = ROLLING_PATH) -> None:
        self._path = path
        self.results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, result: dict[str, Any]) -> None:
        when = datetime.now(timezone.utc).date().isoformat()
        self.results[name] = result | {"date": when, "machine": machine(), "commit": commit()}
        self.results = dict(sorted(self.results.items(), key=_own_first))
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(result)}" for name, result in self.results.items()
        )
        self._path.write_text(f"{{\n{lines}\n}}\n")

    def has(self, name: str) -> bool:
        found = self.results.get(name)
        return found is not None and _is_of_here(found) and "failed" not in found

    def forget(self, names: Collection[str]) -> None:
        self.results = {name: result for name, result in self.results.items() if name not in names}


def commit() -> str | None:
    """Of the checkout that is measured; None where git has none."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        said = subprocess.run(command, cwd=PATH.parent, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()


def median(entry: dict[str, Any] | None, figure: str) -> float | None:
    """Of an entry's runs, or its only value; None if it has no such figure."""
    value = None if entry is None else entry.get(figure)
    if value is None or value == []:
        return None
    return float(statistics.median(value) if isinstance(value, list) else value)


def _own_first(run: tuple[str, dict[str, Any]]) -> tuple[bool, str]:
    name, result = run
    return result["peer"] != "arrowcache", name


def _kind(entry: dict[str, Any]) -> tuple[object, ...]:
    """What the memcpy of an entry's case depends on."""
    case = entry["case"]
    return case["workload"]["row_bytes"], case["consumer"], case["is_cold"]


def _is_of(entry: dict[str, Any], peer: str, case: Case) -> bool:
    return bool(entry["peer"] == peer and entry["case"] == asdict(case))


def _is_of_here(entry: dict[str, Any]) -> bool:
    return str(entry.get("machine")).startswith(hardware())
