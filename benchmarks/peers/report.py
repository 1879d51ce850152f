"""Report: the tables of what was measured, written between two marks of a Markdown file.

`report.md` has the text, with a place for each table. Only what is in results.json is told; a case that
failed is a dash with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from benchmarks.peers import faults, plots
from benchmarks.peers.case import RUNS, Case
from benchmarks.peers.registry import ABSENT, IN_PLACE, PEERS, STREAMED, Peer
from benchmarks.peers.results import ROWS, Results, median, of_case
from benchmarks.peers.rolling import FILL_SECONDS, MB, ROLLING, TITLES, table_row

FOLDER = Path(__file__).parent
OWN, WORKERS, MIDDLE = "arrowcache", (0, 1, 2), 64 << 10
#: How many times as fast as the best packaged peer arrowcache was asked to be, by row size and workers.
TIMES_AS_FAST = {
    (1 << 10, 0): 3.0, (64 << 10, 0): 3.0, (1 << 20, 0): 1.5, **{(row, 2): 5.0 for row in ROWS},
}  # fmt: skip
MAX_CPU_SHARE = 0.5  # of the least of the packaged peers' processor time
_AS_GOOD = 1.05
#: What is compared one by one: unit and scale in the list, and arrowcache's least figure that is compared.
COMPARED = {
    "gbps": ("GB/s", 1.0, 0), "cpu_per_gb": ("CPU s a GB", 1.0, 0),
    "start": ("ms to the very first batch", 1e3, 0), "first_batch": ("ms to an epoch's first batch", 1e3, 0),
    "private_bytes": ("private MiB", 2.0**-20, 0), "shared_bytes": ("shared MiB", 2.0**-20, 1 << 20),
}  # fmt: skip


def line(name: str, case: Case, figures: dict[str, Any]) -> str:
    """A line about one case, for while others are measured."""
    row = ROWS.get(case.workload.row_bytes, str(case.workload.row_bytes))
    order = "shuffled" if case.shuffled else "in order"
    kind = f"{'cold' if case.is_cold else 'warm'}, {case.consumer}, {order}"
    begin = f"{name:32} {row:>6} rows, {case.workers} workers, {kind}:"
    if "failed" in figures:
        return f"{begin} failed: {figures['failed']}"
    return f"{begin} {median(figures['gbps']):.2f} GB/s, {median(figures['cpu_per_gb']):.2f} CPU s/GB"


def write(results: Results) -> None:
    """Replace the part on peers of RESULTS.md and of README.md, and draw the plots."""
    plots.draw(results)
    replace(FOLDER.parent / "RESULTS.md", everything(results))
    replace(FOLDER.parents[1] / "README.md", foremost(results))


def replace(path: Path, text: str, mark: str = "peers") -> None:
    """Put a text between the marks of a file.

    Raises: ValueError: it has no such marks.
    """
    begin, end = f"<!-- {mark}: written by make peers -->\n", f"<!-- end of {mark} -->\n"
    old = path.read_text()
    if begin not in old or end not in old:
        raise ValueError(f"{path} has no lines {begin!r} and {end!r}: put them where the tables belong")
    before, rest = old.split(begin, 1)
    path.write_text(before + begin + text + end + rest.split(end, 1)[1])


def everything(results: Results) -> str:
    """The text for RESULTS.md: those parts of report.md that have measurements."""
    parts = (FOLDER / "report.md").read_text().split("<!-- next part -->\n")
    told = "".join(
        Template(part).substitute(fill(results))
        for part, fill, known in zip(
            parts,
            (cases, rolling_case, fault_matrix),
            (results.entries, results.rolling, results.faults),
            strict=True,
        )
        if known
    )
    return f"## peers: side by side with what people use today\n\n{told}" if told else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def cases(results: Results) -> dict[str, str]:
    """The tables of the cases."""
    found, entries = results.frame(), results.entries
    measured = [peer for peer in by_kind() if any(entry["peer"] == peer.name for entry in entries)]
    dates = sorted({entry["date"] for entry in entries})
    failed = sorted(
        f"- {peer.name}, {ROWS.get(case['workload']['row_bytes'], '?')}, {case['workers']} workers, "
        f"{case['consumer']}: {entry['failed']}\n\n"
        for peer in measured
        for entry in entries
        if entry["peer"] == peer.name and "failed" in entry and (case := entry["case"])
    )
    used = []
    for peer in measured:
        versions = sorted({e["version"] for e in entries if e["peer"] == peer.name and "version" in e})
        advice = f"[where]({peer.advice})" if "://" in peer.advice else f"`{peer.advice}`"
        used.append([peer.name, kind_of(peer), ", ".join(versions) or "-", peer.how, advice])
    return {
        "machines": "; ".join(sorted({entry["machine"] for entry in entries})),
        "days": " to ".join(dict.fromkeys([dates[0], dates[-1]])),
        "commits": commits(entries),
        "used": table(["peer", "kind", "version", "used as its documentation advises", "advice"], used),
        "absent": "".join(f"Not here: **{name}**: {reason}.\n\n" for name, reason in ABSENT.items()),
        "beside_streamed": beside(found, STREAMED),
        "beside_in_place": beside(found, IN_PLACE),
        "targets": targets(found),
        "as_good": as_good(found),
        "begins": begins(found),
        "speed": grid(measured, found, speed),
        "cpu": grid(
            measured, found, lambda entry: number(entry["cpu_per_gb"]) if entry["counts_cpu"] else "unknown"
        ),
        "spread": grid(measured, found, spread),
        "others": others(found, measured),
        "further": further(found, measured),
        "failed": "Cases that failed:\n\n" + "".join(failed) if failed else "",
    }


def others_of(found: pd.DataFrame, row: int, workers: int, **traits: object) -> pd.DataFrame:
    """The peers beside arrowcache with some traits, in a case that is copied."""
    entries = [entry for name, entry in of_case(found, row, workers).items() if name != OWN]
    chosen = [entry for entry in entries if all(entry[name] == value for name, value in traits.items())]
    return pd.DataFrame(chosen, columns=found.columns)


def best(found: pd.DataFrame, row: int, workers: int, **traits: object) -> tuple[Any, Any, Any] | None:
    """arrowcache, and of some peers the one that delivers most, and that with least processor time."""
    own, peers = of_case(found, row, workers).get(OWN), others_of(found, row, workers, **traits)
    counted = peers[peers["counts_cpu"].astype(bool)].dropna(subset=["cpu_per_gb"])
    if own is None or counted.empty:
        return None
    most, least = peers.sort_values("gbps", ascending=False), counted.sort_values("cpu_per_gb")
    return own, most.iloc[0], least.iloc[0]


def foremost(results: Results) -> str:
    """The text for README.md: one sentence and one picture."""
    found = results.frame()
    own = of_case(found, MIDDLE).get(OWN)
    kinds = [(kind, others_of(found, MIDDLE, 0, kind=kind)) for kind in (STREAMED, IN_PLACE)]
    if own is None or any(peers.empty for _, peers in kinds):
        return ""
    fastest = [(kind, peers.sort_values("gbps", ascending=False).iloc[0]) for kind, peers in kinds]
    others = ", ".join(
        f"{number(each['gbps'])} the fastest of {kind} ({each['peer']})" for kind, each in fastest
    )
    return (
        f"Shuffled rows of 64 KiB in one process, page cache warm, GB/s: "
        f"{number(own['gbps'])} arrowcache, {others}; "
        "[RESULTS.md](benchmarks/RESULTS.md#peers-side-by-side-with-what-people-use-today) has every case, "
        "those in which another is better, and the faults that each survives.\n\n"
        "![GB/s over memcpy of each peer, by kind](benchmarks/pictures/peers-throughput.png)\n"
    )


def beside(found: pd.DataFrame, kind: str) -> str:
    """The best peers of a kind in each case, yardsticks by hand included, beside arrowcache."""
    rows = []
    for row, workers in ((row, workers) for workers in (0, 2) for row in ROWS):
        if (three := best(found, row, workers, kind=kind)) is None:
            continue
        own, most, least = three
        rows.append([
            ROWS[row], str(workers), extent(own, "gbps"), f"{most['peer']}: {extent(most, 'gbps')}",
            times(own, most), extent(own, "cpu_per_gb"), f"{least['peer']}: {extent(least, 'cpu_per_gb')}",
        ])  # fmt: skip
    head = [
        "rows, shuffled", "workers", "arrowcache, GB/s (all runs)", "the fastest", "times as fast",
        "CPU s a GB", "the least",
    ]  # fmt: skip
    return table(head, rows)


def targets(found: pd.DataFrame) -> str:
    """The targets of arrowcache beside the best packaged peer, and its ratios."""
    rows = []
    for (row, workers), asked in TIMES_AS_FAST.items():
        if (three := best(found, row, workers, is_packaged=True)) is None:
            continue
        own, most, least = three
        ahead, share = own["gbps"] / most["gbps"], own["cpu_per_gb"] / least["cpu_per_gb"]
        rows.append([
            ROWS[row], str(workers), f"{asked:g}", verdict(ahead, ahead >= asked), most["peer"],
            f"{MAX_CPU_SHARE:g}", verdict(share, share <= MAX_CPU_SHARE), least["peer"],
        ])  # fmt: skip
    head = [
        "rows", "workers", "times as fast as the best: asked", "reached", "which is",
        "CPU s a GB over the least: asked at most", "reached", "which is",
    ]  # fmt: skip
    return table(head, rows)


def verdict(value: float, is_reached: bool) -> str:
    return f"**{number(value)}**" if is_reached else f"{number(value)}, not reached"


def pairs(found: pd.DataFrame, figure: str) -> dict[str, list[tuple[str, float, float]]]:
    """By peer: each case that it and arrowcache have a figure of, and both figures."""
    cases = [("", row, {"workers": workers}) for row in ROWS for workers in WORKERS]
    if figure == "gbps":
        cases += [(" read", MIDDLE, {"workers": workers, "consumer": "read"}) for workers in (0, 2)]
        cases += [(" in order", MIDDLE, {"shuffled": False})]
        cases += [(" cold", MIDDLE, {"workers": workers, "is_cold": True}) for workers in (0, 2)]
    both: dict[str, list[tuple[str, float, float]]] = {}
    for what, row, case in cases:
        entries = of_case(found, row, **case)
        own = entries.pop(OWN, {figure: float("nan")})[figure]
        for name, entry in entries.items():
            if not pd.isna([own, entry[figure]]).any() and own >= COMPARED[figure][2]:
                title = f"{ROWS[row]} x {case.get('workers', 0)}{what}"
                both.setdefault(name, []).append((title, entry[figure], own))
    return both


def as_good(found: pd.DataFrame, figures: Collection[str] = tuple(COMPARED)) -> str:
    """The cases in which another is as good as arrowcache, within a twentieth, or better: a line a peer."""
    lines, both = [], {figure: pairs(found, figure) for figure in figures}
    for peer in by_kind()[1:]:
        said = []
        for figure in figures:
            if (figure == "cpu_per_gb" and not peer.counts_cpu) or (
                figure == "first_batch" and peer.is_endless
            ):
                continue
            unit, scale, _ = COMPARED[figure]
            wins = ", ".join(
                f"{case} ({number(theirs * scale)} / {number(own * scale)})"
                for case, theirs, own in both[figure].get(peer.name, [])
                if (theirs >= own / _AS_GOOD if figure == "gbps" else theirs <= own * _AS_GOOD)
            )
            said += [f"{unit} {wins}"] if wins else []
        lines += [f"- {name_of(peer)}: {'; '.join(said)}"] if said else []
    head = "As good as arrowcache, whose figure comes second, or better (in italics: yardsticks by hand):"
    return "\n".join([head, "", *(lines or ["- none"]), ""])


def begins(found: pd.DataFrame) -> str:
    """Count the others that begin sooner than arrowcache, or take less memory, in at least one case."""
    sooner, private, shared = (
        sum(any(theirs < own for _, theirs, own in cases) for cases in pairs(found, figure).values())
        for figure in ("start", "private_bytes", "shared_bytes")
    )
    entries = (of_case(found, row, workers).get(OWN) for row in ROWS for workers in WORKERS[1:])
    starts = [1000 * entry["start"] for entry in entries if entry is not None and not pd.isna(entry["start"])]
    told = (
        f"\nIn at least one case {sooner} of these {len(PEERS) - 1} others have their very first batch "
        f"sooner than arrowcache, {private} take less private memory, and {shared} less shared memory. "
    )
    if starts:
        told += f"With worker processes its first batch takes {min(starts):.0f} to {max(starts):.0f} ms. "
    return told + "\n"


def by_kind() -> list[Peer]:
    """All peers: arrowcache, then one kind after the other."""
    return sorted(PEERS, key=lambda peer: ("", STREAMED, IN_PLACE).index(kind_of(peer)))


def kind_of(peer: Peer) -> str:
    return "" if peer.name == OWN else peer.kind


def name_of(peer: Peer) -> str:
    mark = "**" if peer.name == OWN else "" if peer.is_packaged else "*"
    return f"{mark}{peer.name}{mark}"


def grid(peers: Sequence[Peer], found: pd.DataFrame, cell: Callable[[Any], str]) -> str:
    """A row a peer, a column a row size and count of workers."""
    columns = {(row, workers): of_case(found, row, workers) for row in ROWS for workers in WORKERS}
    head = ["peer", *(f"{ROWS[row]}, {workers}" for row, workers in columns)]
    rows = []
    for peer in peers:
        nothing = nothing_of(found) | {"counts_cpu": peer.counts_cpu}
        cells = (cell(entries.get(peer.name, nothing)) for entries in columns.values())
        rows.append([name_of(peer), *cells])
    return table(head, rows)


def nothing_of(found: pd.DataFrame) -> dict[str, Any]:
    """A row without a figure."""
    return dict.fromkeys(found.columns)


def others(found: pd.DataFrame, peers: Sequence[Peer]) -> str:
    rows = []
    both = {workers: of_case(found, MIDDLE, workers) for workers in (0, 2)}
    for peer, workers in ((peer, workers) for peer in peers for workers in both):
        if (entry := both[workers].get(peer.name)) is None:
            continue
        first = None if peer.is_endless else entry["first_batch"]
        rows.append([
            name_of(peer), str(workers), f"{entry['private_bytes'] / 2**20:.0f}",
            f"{entry['shared_bytes'] / 2**20:.0f}", number(entry["start"], 1000), number(first, 1000),
            number(entry["spin_kept"]), number(entry["spin_gbps"]),
        ])  # fmt: skip
    head = [
        "peer", "workers", "private MiB, peak", "shared memory MiB, peak", "first batch of all, ms",
        "first batch of an epoch, ms", "a spinning thread keeps", "at GB/s (0.2 asked)",
    ]  # fmt: skip
    return table(head, rows)


def further(found: pd.DataFrame, peers: Sequence[Peer]) -> str:
    rows = []
    for peer in peers:
        least, most = min(peer.workers), max(peer.workers)
        read, ordered, cold = (
            [of_case(found, MIDDLE, **case).get(peer.name, nothing_of(found)) for case in kind]
            for kind in (
                [{"workers": workers, "consumer": "read"} for workers in (0, 2)],
                [{"workers": least, "shuffled": False}],
                [{"workers": workers, "is_cold": True} for workers in (least, most)],
            )
        )
        rows.append([name_of(peer), *map(speed, read + ordered), *(number(each["gbps"]) for each in cold)])
    head = [
        "peer", "read, 0 workers", "read, 2", "copied in order, fewest workers", "cold, shuffled, fewest",
        "cold, shuffled, most",
    ]  # fmt: skip
    return table(head, rows)


def rolling_case(results: Results) -> dict[str, str]:
    """The table of a cache with room for a quarter of the data."""
    runs = results.rolling
    done = {name: result for name, result in runs.items() if "failed" not in result}
    rows = ([name, *table_row(result).strip("| ").split(" | ")] for name, result in done.items())
    failed = "".join(f"- {name}: {runs[name]['failed']}\n" for name in runs if name not in done)
    missing = "".join(f"- {name}\n" for name in ROLLING if name not in runs)
    return {
        "commits": commits(runs.values()),
        "runs": table(["run", *TITLES], rows),
        "missing": f"\nNot run:\n\n{missing}" if missing else "",
        "failed": f"\nRuns that failed:\n\n{failed}" if failed else "",
        "facts": "".join(f"- {name}: {fact}\n" for name, result in done.items() for fact in facts(result)),
    }


def facts(result: dict[str, Any]) -> list[str]:
    """Facts about a run that its row of the table does not show."""
    found, plan, most, limit = [], result["plan"], result["most_bytes"], result["limit_bytes"]
    if result["fill_seconds"] >= FILL_SECONDS:
        found.append(
            f"never filled, at most {most / 1e9:.2f} of {limit / 1e9:.2f} GB in {FILL_SECONDS:.0f} s"
        )
    if "remote_bytes" in result["facts"]:
        came, went = result["in_mbps"], result["out_mbps"]
        found.append(
            f"{came / went:.2f} bytes came by the link for each that was delivered, "
            f"at {came * MB / plan['in_rate']:.2f} of the link's rate"
        )
    if (above := limit - plan["capacity_bytes"]) > 0:
        used = most - plan["capacity_bytes"]
        found.append(
            f"its limit was {above:,} bytes above the others', and it used {used:,} bytes more than they may"
        )
    return found


def fault_matrix(results: Results) -> dict[str, str]:
    """The table of faults, and the reasons of each failure."""
    outcomes = [
        (name, fault, outcome) for name, of in results.faults.items() for fault, outcome in of.items()
    ]
    reasons = (
        f"- {name}, {fault}: {outcome['detail']}{left_by(outcome)}\n"
        for name, fault, outcome in outcomes
        if outcome["verdict"] in ("fail", "evicts", "not run")
    )
    dates = [outcome["date"] for _, _, outcome in outcomes if "date" in outcome]
    dated = f" on {', '.join(sorted({*dates}))}" if dates else ""
    unknown = len(outcomes) - len(dates)
    legend = (faults.__doc__ or "").split("\n\n", 2)[2].rpartition("\n\n")
    return {
        "when": f"One trial each{dated}."
        + (f" Date, versions and commit of {unknown} were not recorded." if unknown else ""),
        "matrix": faults.table(results.faults),
        "legend": legend[0],
        "notes": legend[2],
        "reasons": "".join(reasons),
    }


def left_by(outcome: dict[str, Any]) -> str:
    """The files that a fault left in /dev/shm or TMPDIR, but for empty ones."""
    told = [
        f"{place} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for place in ("shm", "tmp")
        if (names := [name for name, nbytes in outcome["left"].get(place, {}).items() if nbytes])
    ]
    return f"; left: {', '.join(told)}" if told else ""


def commits(entries: Iterable[dict[str, Any]]) -> str:
    """The commits of some measurements."""
    return ", ".join(sorted({entry.get("commit") or "not recorded" for entry in entries}))


def speed(entry: Any) -> str:
    return "-" if entry["over"] is None else f"{number(entry['gbps'])} ({number(entry['over'])})"


def cpu(entry: Any) -> str:
    return number(entry["cpu_per_gb"]) if entry["counts_cpu"] else "unknown"


def spread(entry: Any) -> str:
    if not (rates := entry["gbps runs"]):
        return "-"
    count = "" if len(rates) == RUNS else f", {len(rates)} runs"
    return f"{number(min(rates))} to {number(max(rates))}{count}"


def extent(entry: Any, figure: str) -> str:
    """The median of an entry's runs, and the least and the most of them."""
    runs = entry[f"{figure} runs"]
    return f"{number(entry[figure])} ({number(min(runs))} to {number(max(runs))})"


def times(own: Any, other: Any) -> str:
    """The ratio of two rates; it is within noise if the ranges of both runs overlap."""
    runs, theirs = own["gbps runs"], other["gbps runs"]
    overlap = min(runs) <= max(theirs) and min(theirs) <= max(runs)
    return number(own["gbps"] / other["gbps"]) + (", within noise" if overlap else "")


def number(value: float | None, scale: float = 1.0) -> str:
    """Two digits that count."""
    if value is None or pd.isna(value):
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
