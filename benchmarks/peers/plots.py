"""Plots of the measured figures: throughput by kind and row size, CPU seconds a GB, a rolling cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

from benchmarks.peers.registry import IN_PLACE, OWN, PEERS, STREAMED, Peer
from benchmarks.peers.results import PLAIN, ROWS, Results

KINDS = (STREAMED, IN_PLACE)
PICTURES = Path(__file__).parents[1] / "pictures"


def draw(results: Results) -> None:
    """Write the plots into PICTURES."""
    mpl.use("Agg")
    if results.entries:
        found = results.frame()
        throughput(found)
        cpu(found)
    if results.rolling:
        rolling(results.rolling)


def throughput(found: pd.DataFrame) -> None:
    """A line a peer, by kind; a mark a row size."""
    import matplotlib.pyplot as plt

    groups = [(kind, [peer for peer in PEERS if peer.kind == kind and peer.name != OWN]) for kind in KINDS]
    lines: list[tuple[str, Peer | None]] = [(OWN, PEERS[0])]
    for kind, peers in groups:
        lines += [(kind, None), *((peer.name, peer) for peer in peers)]
    places = {name: place for place, (name, _) in enumerate(lines)}
    plain = found[found["what"] == PLAIN]
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.6), sharex=True, sharey=True, layout="constrained")
    for panel, workers in zip(panels, (0, 2), strict=True):
        for size, (row, color) in enumerate(zip(ROWS, ("C1", "C0", "C2"), strict=True)):
            over = plain[(plain["row"] == row) & (plain["workers"] == workers)].set_index("peer")["over"]
            panel.scatter(
                over, over.index.map(places), label=f"{ROWS[row]} rows", color=color, marker="os^"[size],
                s=26, zorder=3, alpha=0.9,
            )  # fmt: skip
            for own in over[over.index == OWN]:
                panel.axvline(own, color=color, linewidth=0.8, linestyle="--", alpha=0.6)
        panel.set_xscale("log")
        panel.set_title("no workers" if not workers else f"{workers} workers", fontsize=10)
        panel.set_xlabel("GB/s over memcpy; dashed: arrowcache", fontsize=9)
        panel.grid(alpha=0.3)
        panel.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=8)
    for label, (_, peer) in zip(panels[0].get_yticklabels(), lines, strict=True):
        label.set_weight("bold" if peer is None or peer.name == OWN else "normal")
        label.set_style("normal" if peer is None or peer.is_packaged else "italic")
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=7, loc="lower left")
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / "peers-throughput.png", dpi=110)
    plt.close(figure)


def cpu(found: pd.DataFrame) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(10, 4), sharex=True, sharey=True, layout="constrained")
    names = [peer.name for peer in PEERS if peer.counts_cpu]
    plain = found[found["what"] == PLAIN]
    for panel, row in zip(panels, ROWS, strict=True):
        wide = plain[plain["row"] == row].pivot(index="peer", columns="workers", values="cpu_per_gb")
        wide = wide.reindex(names, columns=[0, 2]).fillna(0.0)
        for offset, workers in ((-0.2, 0), (0.2, 2)):
            places = np.arange(len(names)) + offset
            panel.barh(places, wide[workers], height=0.38, label=f"{workers} workers")
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

    own = {name: run for name, run in runs.items() if run["peer"] == OWN and "failed" not in run}
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
