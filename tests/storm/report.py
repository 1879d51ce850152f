"""Report: what a storm did, and what of it no storm may do."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from storm.content import ROW_BYTES

KILLS = ("kills", "kills of workers", "kills with cache.lock")
STOPS = ("stops", "stops of workers", "stops with cache.lock")


@dataclass
class Report:
    """One storm; of a `file_system` of its own, or 0 was measured there."""

    seed: int
    seconds: float = 0.0
    capacity: int = 0
    blows: Counter[str] = field(default_factory=Counter)
    processes: int = 0  # started by the storm itself; their workers come on top
    counts: dict[str, int] = field(default_factory=dict)  # of all tallies
    evicted: int = 0  # segments
    blocks: int = 0  # the most, in bytes
    file_system: int = 0  # the most, in bytes
    looks: dict[str, int] = field(default_factory=dict)  # how often each was measured
    kinds: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.blows[name] for name in KILLS)

    @property
    def stops(self) -> int:
        return sum(self.blows[name] for name in STOPS)

    def rate(self, rows: str) -> float:
        """GB/s."""
        return self.counts[rows] * ROW_BYTES / self.seconds / 1e9

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self)))

    @classmethod
    def load(cls, path: Path) -> Report:
        values = json.loads(path.read_text())
        return cls(**values | {"blows": Counter(values["blows"])})

    def table(self) -> str:
        counts = self.counts
        most = {"by st_blocks": self.blocks, "by statvfs": self.file_system}
        blows = ", ".join(f"{count} {name}" for name, count in sorted(self.blows.items()))
        looks = ", ".join(f"{how} {times:,} times" for how, times in self.looks.items())
        allocated = [f"{n:,} ({n / self.capacity:.3f}) {how}" for how, n in most.items() if n]
        lines = {
            "storm": f"seed {self.seed}, {self.seconds:.0f} s, readers: {', '.join(self.kinds)}",
            "befell": f"{self.kills} kills, {self.stops} stops: {blows}",
            "processes": f"{self.processes} started, without their own workers",
            "out": f"{self.rate('delivered_rows'):.2f} GB/s, {counts['delivered_rows']:,} rows checked, "
            f"{counts['epochs']:,} epochs",
            "held": f"{counts['held_rows']:,} rows read again, {counts['pressed_rows']:,} of them while a "
            "writer waited",
            "in": f"{self.rate('written_rows'):.3f} GB/s, {counts['written_rows']:,} rows, "
            f"{self.evicted:,} segments evicted",
            "allocated": f"at most {', '.join(allocated)} of {self.capacity:,}",
            "measured": looks,
            "waited": f"at most {counts['longest_ms'] / 1e3:.1f} s, a process at a time",
            "restarts": f"{counts['restarts']}, where one lost its own workers for good",
            "skipped": "; ".join(self.skipped) or "nothing",
            "defects": str(len(self.defects)),
        }
        return "\n".join(f"{name:10} {text}" for name, text in lines.items())
