"""Plots of what was measured: throughput by row size, CPU seconds a GB, a rolling cache over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.peers.registry import PEERS
from benchmarks.peers.results import ROWS, Results, Rolling, median

PICTURES = Path(__file__).parents[1] / "pictures"


def draw(results: Results) -> None:
    """Write the plots into PICTURES."""
    mpl.use("Agg")
    if results.entries:
        throughput(results)
        cpu(results)
    if runs := Rolling().results:
        rolling(runs)


def throughput(results: Results) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
    for panel, workers in zip(panels, (0, 2), strict=True):
        for number, peer in enumerate(PEERS):
            points = [
                (row, over)
                for row in ROWS
                if (over := results.ratio(results.find(peer.name, row, workers=workers))) is not None
            ]
            if not points:
                continue
            own = peer.name == "arrowcache"
            panel.plot(
                *zip(*points, strict=True), label=peer.name, marker="o^vs"[number // 5],
                markersize=5 if own else 4,
                color="black" if own else f"C{number % 5}", linewidth=2.5 if own else 1,
                linestyle="-" if peer.is_packaged else ":",
            )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(list(ROWS), list(ROWS.values()))
        panel.set_title("no workers" if not workers else f"{workers} workers", fontsize=10)
        panel.grid(alpha=0.3)
        panel.set_xlabel("row", fontsize=9)
    panels[0].set_ylabel("GB/s over memcpy", fontsize=9)
    never = ", ".join(peer.name for peer in PEERS if min(peer.workers))
    figure.supxlabel(f"Never without workers: {never}.", fontsize=8)
    entries = {
        label: line
        for panel in panels
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=7)
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / "peers-throughput.png", dpi=110)
    plt.close(figure)


def cpu(results: Results) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(10, 4), sharex=True, sharey=True, layout="constrained")
    names = [peer.name for peer in PEERS if peer.counts_cpu]
    for panel, row in zip(panels, ROWS, strict=True):
        for offset, workers in ((-0.2, 0), (0.2, 2)):
            values = [median(results.find(name, row, workers=workers), "cpu_per_gb") or 0.0 for name in names]
            places = [place + offset for place in range(len(names))]
            panel.barh(places, values, height=0.38, label=f"{workers} workers")
        panel.set_xscale("log")
        panel.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"], fontsize=8)
        panel.set_title(f"{ROWS[row]} rows", fontsize=10)
        panel.set_xlabel("CPU seconds a GB", fontsize=9)
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.grid(alpha=0.3, axis="x")
    panels[0].invert_yaxis()
    panels[0].legend(fontsize=7)
    unknown = ", ".join(peer.name for peer in PEERS if not peer.counts_cpu)
    figure.supxlabel(f"Not here: {unknown}, whose processes' time is not known.", fontsize=8)
    figure.savefig(PICTURES / "peers-cpu.png", dpi=110)
    plt.close(figure)


def rolling(runs: dict[str, dict[str, Any]]) -> None:
    """Of each run of arrowcache: the capacity used, and what came in and went out."""
    import matplotlib.pyplot as plt

    own = {name: run for name, run in runs.items() if run["peer"] == "arrowcache" and "failed" not in run}
    if not own:
        return
    figure, panels = plt.subplots(2, len(own), figsize=(3 * len(own), 4), layout="constrained", squeeze=False)
    for (above, below), (name, result) in zip(panels.T, own.items(), strict=True):
        seconds, used, came, went = zip(*result["timeline"], strict=True)
        above.plot(seconds, [nbytes / 2**30 for nbytes in used], linewidth=1)
        above.axhline(result["limit_bytes"] / 2**30, color="black", linestyle="--", linewidth=1)
        above.set_ylim(bottom=0)
        above.set_title(name, fontsize=9)
        for values, label in ((came, "in"), (went, "out")):
            below.plot(seconds, [nbytes / 1e6 for nbytes in values], linewidth=1, label=label)
        below.set_ylim(bottom=0)
        below.set_xlabel("seconds", fontsize=8)
        for panel in (above, below):
            panel.tick_params(labelsize=7)
    panels[0, 0].set_ylabel("GiB on the disk; dashed: capacity", fontsize=8)
    panels[1, 0].set_ylabel("MB/s", fontsize=8)
    panels[1, 0].legend(fontsize=7)
    figure.savefig(PICTURES / "peers-rolling.png", dpi=110)
    plt.close(figure)
