"""History: what the ratios of each benchmark were on this machine, and which of them moved.

`remember` is the last line of a benchmark. It compares its ratios with those that were recorded last on the
same machine, says which moved beyond noise, and records the new ones in history.jsonl. It fails nothing.

A ratio moved if its median lies outside the band of the last one: from the least to the largest of the
medians recorded before (the last ten) and of the inner half of the last one's turns, and at least a tenth
to either side, which this kind of machine varies by within one run; a third for one that has no turns, which
it varies by from run to run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.measure import hardware, machine

PATH = Path(__file__).parent / "history.jsonl"
_EARLIER = 10
_LEAST_BAND, _LEAST_BAND_ALONE = 0.1, 1 / 3

#: A ratio, or that of each turn.
Ratio = float | Sequence[float]


def remember(benchmark: str, ratios: Mapping[str, Ratio], path: Path = PATH) -> None:
    """Print what moved since the last time, and record the ratios of this one.

    Args:
        benchmark: its module's name.
        ratios: by case; what they are over is measured in the same run.
    """
    new = {case: turns(ratio) for case, ratio in ratios.items()}
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [entry for entry in map(json.loads, lines) if entry["benchmark"] == benchmark]
    known = [entry for entry in entries if entry["hardware"] == hardware()]
    for line in moves(known, new):
        print(line)
    entry = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "hardware": hardware(),
        "machine": machine(),
        "ratios": {case: [round(value, 4) for value in values] for case, values in new.items()},
    }
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def moves(known: Sequence[dict[str, Any]], new: Mapping[str, Sequence[float]]) -> list[str]:
    """What there is to say of new ratios, a line each; `known` are the entries before, oldest first."""
    if not known:
        return [f"recorded {len(new)} ratios: the first of this benchmark on this machine"]
    last, said = known[-1], []
    for case, values in new.items():
        earlier = [entry["ratios"][case] for entry in known[-_EARLIER:] if case in entry["ratios"]]
        if not earlier:
            said.append(f"  new: {case}: {statistics.median(values):.3g}")
            continue
        low, high = band(earlier)
        was, now = statistics.median(earlier[-1]), statistics.median(values)
        if not low <= now <= high:
            way = "up" if now > high else "DOWN"
            said.append(f"  {way}: {case}: {was:.3g} -> {now:.3g}, where noise is {low:.3g} to {high:.3g}")
    said += [f"  gone: {case}" for case in last["ratios"] if case not in new]
    moved = "nothing moved beyond noise" if not said else "moved beyond noise, new or gone:"
    return [f"{len(new)} ratios against those of {last['date']}: {moved}", *said]


def band(earlier: Sequence[Sequence[float]]) -> tuple[float, float]:
    """From where to where a ratio varies, of the turns of each time it was recorded, oldest first."""
    last = sorted(earlier[-1])
    quarter = len(last) // 4
    middle = statistics.median(last)
    values = [statistics.median(values) for values in earlier] + last[quarter : len(last) - quarter]
    margin = (_LEAST_BAND if len(last) > 1 else _LEAST_BAND_ALONE) * abs(middle)
    return min(*values, middle - margin), max(*values, middle + margin)


def turns(ratio: Ratio) -> list[float]:
    return list(ratio) if isinstance(ratio, Sequence) else [ratio]
