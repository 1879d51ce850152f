"""Report: the tables of what was measured, written between two marks of a Markdown file.

`report.md` has the text and the heads of tables, with a place for the rows of each. Only what is in
results.json is told, by one frame of a row a case, `Results.frame`; a case that failed is a dash with a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from benchmarks.peers import faults, plots
from benchmarks.peers.case import RUNS
from benchmarks.peers.registry import ABSENT, IN_PLACE, OWN, PEERS, STREAMED, Peer, by_kind
from benchmarks.peers.results import COLD, IN_ORDER, PLAIN, READ, ROWS, Results
from benchmarks.peers.rolling import ROLLING, facts, table_row

FOLDER = Path(__file__).parent
MIDDLE = 64 << 10
SIZES = [*product(ROWS, (0, 1, 2))]  # of a row, and counts of workers
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
    fills = {cases: results.entries, rolling_case: results.rolling, fault_matrix: results.faults}
    known = [(part, fill) for part, (fill, made) in zip(parts, fills.items(), strict=True) if made]
    told = "".join(Template(part).substitute(fill(results)) for part, fill in known)
    return f"## peers: side by side with what people use today\n\n{told}" if told else ""


def table(rows: Iterable[Iterable[str]]) -> str:
    """The rows of a table: report.md has its head."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def cases(results: Results) -> dict[str, str]:
    """The tables of the cases."""
    found, entries = (
        results.frame(),
        pd.DataFrame(results.entries, columns=["peer", "version", "machine", "date"]),
    )
    versions = entries.groupby("peer")["version"].agg(lambda known: sorted({*known.dropna()}))
    measured = [peer for peer in by_kind() if peer.name in versions]
    plain = found[found["what"] == PLAIN].set_index(["peer", "row", "workers"])
    unknown = {(peer.name, *size): "unknown" for peer in PEERS if not peer.counts_cpu for size in SIZES}
    used = [
        [peer.name, "" if peer.name == OWN else peer.kind, ", ".join(versions[peer.name]) or "-", peer.how,
         f"[where]({peer.advice})" if "://" in peer.advice else f"`{peer.advice}`"]
        for peer in measured
    ]  # fmt: skip
    failed = sorted(
        f"- {entry['peer']}, {ROWS.get(case['workload']['row_bytes'], '?')}, {case['workers']} workers, "
        f"{case['consumer']}: {entry['failed']}\n\n"
        for entry in results.entries
        if "failed" in entry and (case := entry["case"])
    )
    return {
        "machines": "; ".join(sorted(set(entries["machine"]))),
        "days": " to ".join(dict.fromkeys([entries["date"].min(), entries["date"].max()])),
        "commits": commits(results.entries),
        "used": table(used),
        "absent": "".join(f"Not here: **{name}**: {reason}.\n\n" for name, reason in ABSENT.items()),
        "beside_streamed": beside(found, STREAMED),
        "beside_in_place": beside(found, IN_PLACE),
        "targets": targets(found),
        "as_good": as_good(found),
        "begins": begins(found),
        "speed": grid(measured, speeds(plain)),
        "cpu": grid(measured, plain["cpu_per_gb"].map(number).to_dict() | unknown),
        "spread": grid(measured, plain["gbps runs"].map(spread)),
        "others": others(found),
        "further": further(found, measured),
        "failed": "Cases that failed:\n\n" + "".join(failed) if failed else "",
    }


def best(found: pd.DataFrame, **traits: object) -> pd.DataFrame:
    """By row size and workers: arrowcache, and of the peers with some traits the one that delivers "most",
    and that with the "least" processor time."""
    plain = found[found["what"] == PLAIN].set_index(["row", "workers"])
    peers = plain[(plain[[*traits]] == pd.Series(traits)).all(axis=1) & (plain["peer"] != OWN)]
    counted = peers[peers["counts_cpu"]].dropna(subset="cpu_per_gb")
    most, least = (
        some.groupby(level=[0, 1]).head(1).add_prefix(prefix)
        for prefix, some in (
            ("most ", peers.sort_values("gbps", ascending=False)),
            ("least ", counted.sort_values("cpu_per_gb")),
        )
    )
    both = plain[plain["peer"] == OWN].join([most, least], how="inner")
    return both.loc[[case for case in TIMES_AS_FAST if case in both.index]]


def foremost(results: Results) -> str:
    """The text for README.md: one sentence and one picture."""
    found = results.frame().sort_values("gbps", ascending=False)
    here = found[(found["what"] == PLAIN) & (found["row"] == MIDDLE) & (found["workers"] == 0)]
    own, fastest = here[here["peer"] == OWN], here[here["peer"] != OWN].groupby("kind").head(1)
    if own.empty or len(fastest) < 2:
        return ""
    told = (
        f"{number(each['gbps'])} the fastest of {kind} ({each['peer']})"
        for kind, each in fastest.set_index("kind").loc[[STREAMED, IN_PLACE]].iterrows()
    )
    return (
        f"Shuffled rows of 64 KiB in one process, page cache warm, GB/s: "
        f"{number(own['gbps'].item())} arrowcache, {', '.join(told)}; "
        "[RESULTS.md](benchmarks/RESULTS.md#peers-side-by-side-with-what-people-use-today) has every case, "
        "those in which another is better, and the faults that each survives.\n\n"
        "![GB/s over memcpy of each peer, by kind](benchmarks/pictures/peers-throughput.png)\n"
    )


def beside(found: pd.DataFrame, kind: str) -> str:
    """The best peers of a kind in each case, yardsticks by hand included, beside arrowcache."""
    return table(
        [ROWS[row], str(workers), extent(each, "gbps"), f"{each['most peer']}: {extent(each, 'most gbps')}",
         times(each), extent(each, "cpu_per_gb"),
         f"{each['least peer']}: {extent(each, 'least cpu_per_gb')}"]
        for (row, workers), each in best(found, kind=kind).iterrows()
    )  # fmt: skip


def targets(found: pd.DataFrame) -> str:
    """The targets of arrowcache beside the best packaged peer, and its ratios."""
    rows = []
    for case, each in best(found, is_packaged=True).iterrows():
        ahead, share = each["gbps"] / each["most gbps"], each["cpu_per_gb"] / each["least cpu_per_gb"]
        asked = TIMES_AS_FAST[case]
        rows.append([
            ROWS[case[0]], str(case[1]), f"{asked:g}", verdict(ahead, ahead >= asked), each["most peer"],
            f"{MAX_CPU_SHARE:g}", verdict(share, share <= MAX_CPU_SHARE), each["least peer"],
        ])  # fmt: skip
    return table(rows)


def verdict(value: float, is_reached: bool) -> str:
    return f"**{number(value)}**" if is_reached else f"{number(value)}, not reached"


def compared(found: pd.DataFrame, figure: str) -> pd.DataFrame:
    """Each case of another peer that it and arrowcache have a figure of: `own` is arrowcache's."""
    case, some = ["row", "workers", "what"], found if figure == "gbps" else found[found["what"] == PLAIN]
    own = some[some["peer"] == OWN][[*case, figure]].rename(columns={figure: "own"})
    both = some[some["peer"] != OWN].merge(own, on=case).dropna(subset=[figure, "own"])
    return both[both["own"] >= COMPARED[figure][2]].sort_values(["what", "row", "workers"])


def as_good(found: pd.DataFrame, figures: Collection[str] = tuple(COMPARED)) -> str:
    """The cases in which another is as good as arrowcache, within a twentieth, or better: a line a peer."""
    said: dict[str, list[str]] = {}
    for figure in figures:
        unit, scale, _ = COMPARED[figure]
        both = compared(found, figure)
        theirs, own = both[figure], both["own"]
        is_good = theirs >= own / _AS_GOOD if figure == "gbps" else theirs <= own * _AS_GOOD
        is_known = {"cpu_per_gb": both["counts_cpu"], "first_batch": ~both["is_endless"]}.get(figure, True)
        for peer, wins in both[is_good & is_known].groupby("peer"):
            cases = (
                f"{ROWS[each['row']]} x {each['workers']}{each['what']} "
                f"({number(each[figure] * scale)} / {number(each['own'] * scale)})"
                for _, each in wins.iterrows()
            )
            said.setdefault(peer, []).append(f"{unit} {', '.join(cases)}")
    lines = [f"- {name_of(peer)}: {'; '.join(said[peer.name])}" for peer in by_kind() if peer.name in said]
    head = "As good as arrowcache, whose figure comes second, or better (in italics: yardsticks by hand):"
    return "\n".join([head, "", *(lines or ["- none"]), ""])


def begins(found: pd.DataFrame) -> str:
    """Count the others that begin sooner than arrowcache, or take less memory, in at least one case."""
    sooner, private, shared = (
        both.loc[both[figure] < both["own"], "peer"].nunique()
        for figure in ("start", "private_bytes", "shared_bytes")
        for both in [compared(found, figure)]
    )
    is_own = (found["peer"] == OWN) & (found["what"] == PLAIN) & (found["workers"] > 0)
    starts = 1000 * found.loc[is_own, "start"].dropna()
    told = (
        f"\nIn at least one case {sooner} of these {len(PEERS) - 1} others have their very first batch "
        f"sooner than arrowcache, {private} take less private memory, and {shared} less shared memory. "
    )
    if not starts.empty:
        told += f"With worker processes its first batch takes {starts.min():.0f} to {starts.max():.0f} ms. "
    return told + "\n"


def name_of(peer: Peer) -> str:
    mark = "**" if peer.name == OWN else "" if peer.is_packaged else "*"
    return f"{mark}{peer.name}{mark}"


def grid(peers: Sequence[Peer], cells: Mapping[tuple[str, int, int], str]) -> str:
    """A row a peer, a column a row size and count of workers."""
    return table([name_of(peer), *(cells.get((peer.name, *size), "-") for size in SIZES)] for peer in peers)


def others(found: pd.DataFrame) -> str:
    """Memory, the waits for batches, and a thread that spins beside them, of rows of the middle size."""
    is_asked = (found["what"] == PLAIN) & (found["row"] == MIDDLE) & (found["workers"] != 1)
    return table(
        [name_of(peer), str(each["workers"]), f"{each['private_bytes'] / 2**20:.0f}",
         f"{each['shared_bytes'] / 2**20:.0f}", number(each["start"], 1000),
         number(None if peer.is_endless else each["first_batch"], 1000), number(each["spin_kept"]),
         number(each["spin_gbps"])]
        for peer in by_kind()
        for _, each in found[is_asked & (found["peer"] == peer.name)].sort_values("workers").iterrows()
    )  # fmt: skip


def further(found: pd.DataFrame, peers: Sequence[Peer]) -> str:
    """The other consumer, order and files, of rows of the middle size."""
    some = found[found["row"] == MIDDLE].set_index(["peer", "what", "workers"])
    cells = speeds(some[some.index.isin([READ, IN_ORDER], level="what")])
    cells |= some.loc[some.index.isin([COLD], level="what"), "gbps"].map(number)
    rows = []
    for peer in peers:
        fewest, most = min(peer.workers), max(peer.workers)
        asked = (READ, 0), (READ, 2), (IN_ORDER, fewest), (COLD, fewest), (COLD, most)
        rows.append([name_of(peer), *(cells.get((peer.name, *each), "-") for each in asked)])
    return table(rows)


def rolling_case(results: Results) -> dict[str, str]:
    """The table of a cache with room for a quarter of the data."""
    runs = results.rolling
    done = {name: result for name, result in runs.items() if "failed" not in result}
    failed = "".join(f"- {name}: {runs[name]['failed']}\n" for name in runs if name not in done)
    missing = "".join(f"- {name}\n" for name in ROLLING if name not in runs)
    return {
        "commits": commits(runs.values()),
        "runs": table([name, *table_row(result)] for name, result in done.items()),
        "missing": f"\nNot run:\n\n{missing}" if missing else "",
        "failed": f"\nRuns that failed:\n\n{failed}" if failed else "",
        "facts": "".join(f"- {name}: {fact}\n" for name, result in done.items() for fact in facts(result)),
    }


def fault_matrix(results: Results) -> dict[str, str]:
    """The table of faults, and the reasons of each failure."""
    outcomes = [
        (name, fault, outcome) for name, of in results.faults.items() for fault, outcome in of.items()
    ]
    reasons = (
        f"- {name}, {fault}: {outcome['detail']}{faults.left_by(outcome)}\n"
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


def commits(entries: Iterable[dict[str, Any]]) -> str:
    """The commits of some measurements."""
    return ", ".join(sorted({entry.get("commit") or "not recorded" for entry in entries}))


def speeds(found: pd.DataFrame) -> dict[Any, str]:
    """By the frame's index: GB/s, and in brackets over memcpy."""
    told = zip(found.index, found["gbps"].map(number), found["over"].map(number), strict=True)
    return {index: f"{gbps} ({over})" for index, gbps, over in told}


def spread(rates: Sequence[float]) -> str:
    count = "" if len(rates) == RUNS else f", {len(rates)} runs"
    return f"{number(min(rates))} to {number(max(rates))}{count}"


def extent(each: Any, figure: str) -> str:
    """The median of a figure's runs, and the least and the most of them."""
    runs = each[f"{figure} runs"]
    return f"{number(each[figure])} ({number(min(runs))} to {number(max(runs))})"


def times(each: Any) -> str:
    """The ratio of two rates; it is within noise if the ranges of both runs overlap."""
    runs, theirs = each["gbps runs"], each["most gbps runs"]
    overlap = min(runs) <= max(theirs) and min(theirs) <= max(runs)
    return number(each["gbps"] / each["most gbps"]) + (", within noise" if overlap else "")


def number(value: float | None, scale: float = 1.0) -> str:
    """Two digits that count."""
    if value is None or pd.isna(value):
        return "-"
    value *= scale
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
