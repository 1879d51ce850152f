"""Report: the tables and plots of what was measured, written between two marks of a Markdown file.

Only what is in results.json, rolling.json and faults.json is told; a case that failed is a dash with a note.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import faults, plots
from benchmarks.peers.case import RUNS, Case
from benchmarks.peers.registry import ABSENT, IN_PLACE, PEERS, STREAMED, Peer
from benchmarks.peers.results import ROWS, Results, Rolling, median
from benchmarks.peers.rolling import FILL_SECONDS, MB, ROLLING, TITLES, table_row

FOLDER = Path(__file__).parent
PACKAGED = [peer for peer in PEERS if peer.is_packaged and peer.name != "arrowcache"]
WORKERS = (0, 1, 2)

_CASES_NOTE = """\
Names in italics are yardsticks, NumPy indexed by hand, and no loaders. A fresh process a case; a run in it
is as many whole epochs as take half a second, and MosaicML Streaming, Ray and others that are slow with
small rows have fewer runs in their 20 s. Data sets have 64 MiB of 1 KiB rows and 512 MiB of larger ones (1
GiB cold), since slow peers take minutes for more: what an epoch costs to begin weighs on all, and is most
of Ray Data's time. Memcpy is the rate at which the same consumer takes batches from random places in
memory, which was measured beside every run; over it goes the median of all peers' runs, as some peers' own
threads slow it down. Its slot stays in the processor's cache. Reverb's 0 and 1 workers are the same
configuration, measured twice. Every byte read, in order and cold were measured with 64 KiB rows alone.
"""

_ROLLING_NOTE = """
"Over capacity" is beyond the limit that a peer was given, and tests nothing of one that never filled. A wait
is for a batch. Bytes were looked at 20 times a second, as blocks of the files that two walks after another
saw; Reverb's limit is of rows, in memory. "Wrong": the first or the last number of a row is not its label,
all rows looked at. "Torn": another number is not, of one row a batch of 64. "Processors" are all of the
case's, the samplers or the server of the link included. One run each.

litdata and MosaicML Streaming cannot read what is still being written: theirs is a data set that is
complete, behind a link as fast as samplers publish elsewhere, with 20 ms of latency (a server in the driver's
process), and "in" is what came by it. A row comes once an epoch; the others deliver rows again.

"""

_ROLLING_SETTINGS = """
How each was set up, with segments, shards or chunks of 16 MiB and what has a prefetch with 16 batches:

- arrowcache: SamplerPool of 2 and torch.Loader. `headroom` is 1.5 times what [SIZING.md](SIZING.md) says: 0.3
  at 300 MB/s, 0.5 at 600; with "window" 0.1, the default. SIZING.md says nothing of 16 batches; the default
  is 4, and 64 MiB a segment.
- torchrl: LazyMemmapStorage, ReplayBuffer(shared=True), extended by 2 processes; that refuses prefetch.
  [Advice](https://docs.pytorch.org/rl/stable/reference/data.html).
- Reverb: Fifo remover, Uniform sampler, MinSize(1), a TrajectoryWriter in each of 2 processes,
  TrajectoryDataset with 3 batches in flight. [Advice](https://github.com/google-deepmind/reverb#readme).
- MosaicML Streaming: cache_limit, 2 workers, shuffle_block_size and predownload a quarter of the cache.
  **Altered**: its S3 client is dropped before workers are forked; shared by them, it gave wrong rows here
  (127 of 25,792 in one run). [Advice][shards].
- litdata: max_cache_size, shuffle, StreamingDataLoader with 2 workers. **Altered**: a private option of its
  downloader, so that it takes an endpoint without TLS. [Advice](https://github.com/Lightning-AI/litdata#readme).

[shards]: https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shard_retrieval.html
"""

_BESIDE_NOTE = """
In brackets the least and the most of five runs; where two ranges overlap, the difference is within noise.
"""

#: How many times as fast as the best packaged peer arrowcache was asked to be, by row size and workers.
TIMES_AS_FAST = {
    (1 << 10, 0): 3.0, (64 << 10, 0): 3.0, (1 << 20, 0): 1.5, **{(row, 2): 5.0 for row in ROWS},
}  # fmt: skip
MOST_CPU_SHARE = 0.5  # of the least of the packaged peers' processor time
_AS_GOOD = 1.05
#: What is compared one by one, and its unit in the list; cases are "row size x workers".
FIGURES = {
    "gbps": "GB/s", "cpu_per_gb": "CPU s a GB", "start": "ms to the very first batch",
    "first_batch": "ms to an epoch's first batch", "private_bytes": "private MiB",
    "shared_bytes": "shared MiB",
}  # fmt: skip
SCALES = {"start": 1e3, "first_batch": 1e3, "private_bytes": 2.0**-20, "shared_bytes": 2.0**-20}
_LEAST = {"shared_bytes": 1 << 20}  # of arrowcache's figure that is worth comparing
COPIED_CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("", row, {"workers": workers}) for row in ROWS for workers in WORKERS
]
FURTHER_CASES = {
    "gbps": [
        *COPIED_CASES,
        *((" read", 64 << 10, {"workers": workers, "consumer": "read"}) for workers in (0, 2)),
        (" in order", 64 << 10, {"shuffled": False}),
        *((" cold", 64 << 10, {"workers": workers, "is_cold": True}) for workers in (0, 2)),
    ]
}

Cell = Callable[[Peer, int, int], str]


def line(name: str, case: Case, figures: dict[str, Any]) -> str:
    """What one case came to, while others are measured."""
    row = ROWS.get(case.workload.row_bytes, str(case.workload.row_bytes))
    order = "shuffled" if case.shuffled else "in order"
    kind = f"{'cold' if case.is_cold else 'warm'}, {case.consumer}, {order}"
    begin = f"{name:32} {row:>6} rows, {case.workers} workers, {kind}:"
    if "failed" in figures:
        return f"{begin} failed: {figures['failed']}"
    return f"{begin} {median(figures, 'gbps'):.2f} GB/s, {median(figures, 'cpu_per_gb'):.2f} CPU s/GB"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


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
    """What RESULTS.md tells."""
    measured = cases(results) if results.entries else ""
    told = measured + rolling_case(Rolling()) + fault_matrix()
    return f"## peers: side by side with what people use today\n\n{told}" if told else ""


def cases(results: Results) -> str:
    """What was measured of each data set and peer."""
    measured = [peer for peer in by_kind() if any(entry["peer"] == peer.name for entry in results.entries)]
    notes = sorted(
        f"- {peer.name}, {line_of_failure(entry)}"
        for peer in measured
        for entry in results.entries
        if entry["peer"] == peer.name and "failed" in entry
    )
    machines = "; ".join(sorted({entry["machine"] for entry in results.entries}))
    dates = sorted({entry["date"] for entry in results.entries})
    days = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    made_of = f"**Commit:** {commits(results.entries)}. **Command:** `make peers`."
    parts = [
        f"**Machine:** {machines}. **Date:** {days}. {made_of}\n",
        "### What was run\n",
        table(
            ["peer", "kind", "version", "used as its documentation advises", "advice"],
            (
                [peer.name, kind_of(peer), version_of(results, peer), peer.how, link(peer.advice)]
                for peer in measured
            ),
        ),
        *[f"Not here: **{name}**: {reason}.\n" for name, reason in ABSENT.items()],
        *[
            part
            for kind in (STREAMED, IN_PLACE)
            for part in (f"### Beside {kind}: warm, shuffled, copied\n", beside(results, kind))
        ],
        "### Asked of arrowcache beside the best packaged peer, and reached\n",
        targets(results),
        as_good(results),
        begins(results),
        "### Warm, shuffled, copied into one slot: GB/s, and in brackets over memcpy\n",
        _CASES_NOTE,
        grid(
            measured, lambda peer, row, workers: speed(results, results.find(peer.name, row, workers=workers))
        ),
        "### The same: CPU seconds a GB, all processes together\n",
        grid(measured, lambda peer, row, workers: cpu(peer, results.find(peer.name, row, workers=workers))),
        f"### Spread: the slowest and the fastest of {RUNS} runs, GB/s\n",
        grid(measured, lambda peer, row, workers: spread(results.find(peer.name, row, workers=workers))),
        "### 64 KiB rows, shuffled: memory, the wait for batches, and a spinning Python thread\n",
        others(results, measured),
        "### 64 KiB rows: every byte read, in order, and from a cold disk (GB/s)\n",
        further(results, measured),
        *(["Cases that failed:\n", *[f"{note}\n" for note in notes]] if notes else []),
        "![GB/s over memcpy by the size of a row](pictures/peers-throughput.png)\n",
        "![CPU seconds a GB](pictures/peers-cpu.png)\n",
    ]
    return "\n".join(parts) + "\n"


def foremost(results: Results) -> str:
    """What README.md tells: one sentence, and one picture."""
    row = 64 << 10
    own = results.find("arrowcache", row)
    found = [(kind, fastest(results, kind, row)) for kind in (STREAMED, IN_PLACE)]
    if own is None or any(entry is None for _, entry in found):
        return ""
    others = ", ".join(
        f"{number(_known(entry, 'gbps'))} the fastest of {kind} ({entry['peer']})"
        for kind, entry in found
        if entry is not None
    )
    return (
        f"Shuffled rows of 64 KiB in one process, page cache warm, GB/s: "
        f"{number(_known(own, 'gbps'))} arrowcache, {others}; "
        "[RESULTS.md](benchmarks/RESULTS.md#peers-side-by-side-with-what-people-use-today) has every case, "
        "those in which another is better, and the faults that each survives.\n\n"
        "![GB/s over memcpy of each peer, by kind](benchmarks/pictures/peers-throughput.png)\n"
    )


def fastest(results: Results, kind: str, row: int, workers: int = 0) -> dict[str, Any] | None:
    """The entry of a kind that delivers most, yardsticks by hand included."""
    found = [results.find(peer.name, row, workers=workers) for peer in PEERS if is_of(peer, kind)]
    done = [entry for entry in found if entry is not None and "failed" not in entry]
    return max(done, key=lambda entry: _known(entry, "gbps"), default=None)


def is_of(peer: Peer, kind: str) -> bool:
    """Whether a peer is another one of a kind."""
    return peer.kind == kind and peer.name != "arrowcache"


def beside(results: Results, kind: str) -> str:
    """The best peers of a kind in each case, yardsticks by hand included, beside arrowcache."""
    rows = []
    peers = [peer for peer in PEERS if is_of(peer, kind)]
    for workers in (0, 2):
        for row in ROWS:
            own = results.find("arrowcache", row, workers=workers)
            most, least = best(results, row, workers, peers)
            if own is None or most is None or least is None:
                continue
            rows.append([
                ROWS[row], str(workers), extent(own, "gbps"), f"{most['peer']}: {extent(most, 'gbps')}",
                times(own, most, "gbps"), extent(own, "cpu_per_gb"),
                f"{least['peer']}: {extent(least, 'cpu_per_gb')}",
            ])  # fmt: skip
    head = [
        "rows, shuffled", "workers", "arrowcache, GB/s (all runs)", "the fastest", "times as fast",
        "CPU s a GB", "the least",
    ]  # fmt: skip
    return table(head, rows) + _BESIDE_NOTE


def begins(results: Results) -> str:
    """How many of the others begin sooner than arrowcache, or take less memory, in at least one case."""
    names = [peer for peer in PEERS if peer.name != "arrowcache"]
    sooner, private, shared = (
        sum(is_less(results, peer, figure) for peer in names)
        for figure in ("start", "private_bytes", "shared_bytes")
    )
    own = (results.find("arrowcache", row, workers=workers) for row in ROWS for workers in WORKERS[1:])
    starts = [1000 * start for entry in own if (start := median(entry, "start")) is not None]
    told = (
        f"\nIn at least one case {sooner} of these {len(names)} others have their very first batch sooner "
        f"than arrowcache, {private} take less private memory, and {shared} less shared memory. "
    )
    if starts:
        told += f"With worker processes its first batch takes {min(starts):.0f} to {max(starts):.0f} ms. "
    return told + "\n"


def is_less(results: Results, peer: Peer, figure: str) -> bool:
    """Whether a figure of a peer is less than arrowcache's in any case that is copied."""
    for _, row, case in COPIED_CASES:
        theirs, own = (median(results.find(name, row, **case), figure) for name in (peer.name, "arrowcache"))
        if theirs is not None and own is not None and _LEAST.get(figure, 0) <= own > theirs:
            return True
    return False


def best(
    results: Results, row: int, workers: int, peers: Sequence[Peer] = PACKAGED
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Of some peers: the entry that delivers most, and the one that takes least processor time."""
    found = [(peer, results.find(peer.name, row, workers=workers)) for peer in peers]
    done = [(peer, entry) for peer, entry in found if entry is not None and "failed" not in entry]
    most = max((entry for _, entry in done), key=lambda entry: _known(entry, "gbps"), default=None)
    least = min(
        (entry for peer, entry in done if peer.counts_cpu),
        key=lambda entry: _known(entry, "cpu_per_gb"),
        default=None,
    )
    return most, least


def targets(results: Results) -> str:
    """What was asked of arrowcache beside the best packaged peer, and what it reached."""
    rows = []
    for (row, workers), least in TIMES_AS_FAST.items():
        own = results.find("arrowcache", row, workers=workers)
        most, cheapest = best(results, row, workers)
        if own is None or most is None or cheapest is None:
            continue
        ahead = _known(own, "gbps") / _known(most, "gbps")
        share = _known(own, "cpu_per_gb") / _known(cheapest, "cpu_per_gb")
        rows.append([
            ROWS[row], str(workers),
            f"{least:g}", verdict(ahead, ahead >= least), most["peer"],
            f"{MOST_CPU_SHARE:g}", verdict(share, share <= MOST_CPU_SHARE), cheapest["peer"],
        ])  # fmt: skip
    head = [
        "rows", "workers", "times as fast as the best: asked", "reached", "which is",
        "CPU s a GB over the least: asked at most", "reached", "which is",
    ]  # fmt: skip
    return table(head, rows)


def verdict(value: float, is_reached: bool) -> str:
    return f"**{number(value)}**" if is_reached else f"{number(value)}, not reached"


def as_good(results: Results, figures: Collection[str] = tuple(FIGURES)) -> str:
    """The cases in which another is as good as arrowcache, within a twentieth, or better: a line a peer."""
    lines = []
    for peer in by_kind()[1:]:
        said = [
            f"{FIGURES[figure]} {', '.join(found)}"
            for figure in figures
            if (found := wins(results, peer, figure))
        ]
        if said:
            lines.append(f"- {name_of(peer)}: {'; '.join(said)}")
    head = "As good as arrowcache, whose figure comes second, or better (in italics: yardsticks by hand):"
    return "\n".join([head, "", *(lines or ["- none"]), ""])


def wins(results: Results, peer: Peer, figure: str) -> list[str]:
    """Where a peer is as good as arrowcache in one figure, with both."""
    if (figure == "cpu_per_gb" and not peer.counts_cpu) or (figure == "first_batch" and peer.is_endless):
        return []
    found = []
    for what, row, case in FURTHER_CASES.get(figure, COPIED_CASES):
        theirs, own = (median(results.find(name, row, **case), figure) for name in (peer.name, "arrowcache"))
        if theirs is None or own is None or own < _LEAST.get(figure, 0):
            continue
        if theirs >= own / _AS_GOOD if figure == "gbps" else theirs <= own * _AS_GOOD:
            both = " / ".join(number(value * SCALES.get(figure, 1.0)) for value in (theirs, own))
            found.append(f"{ROWS[row]} x {case.get('workers', 0)}{what} ({both})")
    return found


def by_kind() -> list[Peer]:
    """All peers: arrowcache, then one kind after the other."""
    return sorted(PEERS, key=lambda peer: ("", STREAMED, IN_PLACE).index(kind_of(peer)))


def kind_of(peer: Peer) -> str:
    return "" if peer.name == "arrowcache" else peer.kind


def grid(peers: Sequence[Peer], cell: Cell) -> str:
    """A row a peer, a column a row size and count of workers."""
    head = ["peer", *(f"{ROWS[row]}, {workers}" for row in ROWS for workers in WORKERS)]
    body = (
        [name_of(peer), *(cell(peer, row, workers) for row in ROWS for workers in WORKERS)] for peer in peers
    )
    return "Columns: row size, workers.\n\n" + table(head, body)


def others(results: Results, peers: Sequence[Peer]) -> str:
    rows = []
    for peer in peers:
        for workers in (0, 2):
            entry = results.find(peer.name, 64 << 10, workers=workers)
            if entry is None or "failed" in entry:
                continue
            rows.append([
                name_of(peer), str(workers), mib(entry["private_bytes"]), mib(entry["shared_bytes"]),
                milliseconds(median(entry, "start")),
                "-" if peer.is_endless else milliseconds(median(entry, "first_batch")),
                number(median(entry, "spin_kept")), number(median(entry, "spin_gbps")),
            ])  # fmt: skip
    head = [
        "peer", "workers", "private MiB, peak", "shared memory MiB, peak", "first batch of all, ms",
        "first batch of an epoch, ms", "a spinning thread keeps", "at GB/s (0.2 asked)",
    ]  # fmt: skip
    return table(head, rows) + (
        "\nA thread that is given less than was asked waits, and keeps more so. Above 1 is noise: alone, "
        "it runs beside a loader whose batches are ready. - for the wait: its stream is never begun anew.\n"
    )


def further(results: Results, peers: Sequence[Peer]) -> str:
    rows = []
    for peer in peers:
        least, most = min(peer.workers), max(peer.workers)
        find = partial(results.find, peer.name, 64 << 10)
        rows.append([
            name_of(peer),
            *(speed(results, find(workers=workers, consumer="read")) for workers in (0, 2)),
            speed(results, find(workers=least, shuffled=False)),
            *(number(median(find(workers=workers, is_cold=True), "gbps")) for workers in (least, most)),
        ])  # fmt: skip
    head = [
        "peer",
        "read, 0 workers",
        "read, 2",
        "copied in order, fewest workers",
        "cold, shuffled, fewest",
        "cold, shuffled, most",
    ]
    return table(head, rows)


def rolling_case(runs: Rolling) -> str:
    """What came in and went out of a cache with room for a quarter of the data."""
    if not runs.results:
        return ""
    head = ["run", *TITLES]
    done = {name: result for name, result in runs.results.items() if "failed" not in result}
    rows = ([name, *table_row(result).strip("| ").split(" | ")] for name, result in done.items())
    failed = [f"- {name}: {runs.results[name]['failed']}\n" for name in runs.results if name not in done]
    missing = [f"- {name}\n" for name in ROLLING if name not in runs.results]
    return (
        "### Rolling: samplers publish without end, room for a quarter of the data\n\n"
        f"**Commit:** {commits(runs.results.values())}. **Command:** `make peers ARGS='--parts rolling'`.\n\n"
        + table(head, rows)
        + ("\nNot run:\n\n" + "".join(missing) if missing else "")
        + ("\nRuns that failed:\n\n" + "".join(failed) if failed else "")
        + _ROLLING_NOTE
        + "".join(f"- {name}: {fact}\n" for name, result in done.items() for fact in facts(result))
        + _ROLLING_SETTINGS
        + "\n![bytes used, and what came in and went out, over time](pictures/peers-rolling.png)\n"
    )


def facts(result: dict[str, Any]) -> list[str]:
    """What a row of the rolling case's table doesn't show."""
    found, plan = [], result["plan"]
    if result["fill_seconds"] >= FILL_SECONDS:
        most, limit = result["most_bytes"], result["limit_bytes"]
        found.append(
            f"never filled, at most {most / 1e9:.2f} of {limit / 1e9:.2f} GB in {FILL_SECONDS:.0f} s"
        )
    if "remote_bytes" in result["facts"]:
        came, went = result["in_mbps"], result["out_mbps"]
        found.append(
            f"{came / went:.2f} bytes came by the link for each that was delivered, "
            f"at {came * MB / plan['in_rate']:.2f} of the link's rate"
        )
    if (above := result["limit_bytes"] - plan["capacity_bytes"]) > 0:
        used = result["most_bytes"] - plan["capacity_bytes"]
        found.append(
            f"its limit was {above:,} bytes above the others', and it used {used:,} bytes more than they may"
        )
    return found


def fault_matrix() -> str:
    path = faults.RESULTS
    if not path.exists():
        return ""
    results = json.loads(path.read_text())
    outcomes = [(name, fault, outcome) for name, of in results.items() for fault, outcome in of.items()]
    reasons = [
        f"- {name}, {fault}: {outcome['detail']}{left_by(outcome)}\n"
        for name, fault, outcome in outcomes
        if outcome["verdict"] in ("fail", "evicts", "not run")
    ]
    known = [outcome for _, _, outcome in outcomes if "date" in outcome]
    dated = f" on {', '.join(sorted({outcome['date'] for outcome in known}))}" if known else ""
    unknown = len(outcomes) - len(known)
    when = f"One trial each{dated}." + (
        f" Date, versions and commit of {unknown} were not recorded." if unknown else ""
    )
    legend = (faults.__doc__ or "").split("\n\n", 2)[2].rpartition("\n\n")
    return (
        "\n### Faults: what each survives, and what it leaves behind\n\n"
        f"{when}\n\n"
        + faults.table(results)
        + "\n\n```text\n" + legend[0] + "\n```\n\n" + legend[2] + "\nWhy, in the words of its errors:\n\n"
        + "".join(reasons)
    )  # fmt: skip


def left_by(outcome: dict[str, Any]) -> str:
    """The files that a fault left, where they count: what is in /dev/shm or TMPDIR and not empty."""
    places = [
        (place, [name for name, nbytes in outcome["left"].get(place, {}).items() if nbytes])
        for place in ("shm", "tmp")
    ]
    told = [
        f"{place} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for place, names in places
        if names
    ]
    return f"; left: {', '.join(told)}" if told else ""


def commits(entries: Iterable[dict[str, Any]]) -> str:
    """Of which commits they were measured."""
    found = sorted({entry.get("commit") or "not recorded" for entry in entries})
    return ", ".join(found)


def line_of_failure(entry: dict[str, Any]) -> str:
    case = entry["case"]
    size = ROWS.get(case["workload"]["row_bytes"], "?")
    return f"{size}, {case['workers']} workers, {case['consumer']}: {entry['failed']}"


def name_of(peer: Peer) -> str:
    return (
        f"**{peer.name}**"
        if peer.name == "arrowcache"
        else peer.name
        if peer.is_packaged
        else f"*{peer.name}*"
    )


def version_of(results: Results, peer: Peer) -> str:
    versions = {
        entry["version"] for entry in results.entries if entry["peer"] == peer.name and "version" in entry
    }
    return ", ".join(sorted(versions)) or "-"


def link(advice: str) -> str:
    return f"[where]({advice})" if "://" in advice else f"`{advice}`"


def speed(results: Results, entry: dict[str, Any] | None) -> str:
    rate, over = median(entry, "gbps"), results.ratio(entry)
    return "-" if rate is None or over is None else f"{number(rate)} ({number(over)})"


def cpu(peer: Peer, entry: dict[str, Any] | None) -> str:
    return number(median(entry, "cpu_per_gb")) if peer.counts_cpu else "unknown"


def spread(entry: dict[str, Any] | None) -> str:
    rates = (entry or {}).get("gbps")
    if not rates:
        return "-"
    count = "" if len(rates) == RUNS else f", {len(rates)} runs"
    return f"{number(min(rates))} to {number(max(rates))}{count}"


def extent(entry: dict[str, Any], figure: str) -> str:
    """The median of an entry's runs, and the least and the most of them."""
    runs = entry[figure]
    return f"{number(_known(entry, figure))} ({number(min(runs))} to {number(max(runs))})"


def number(value: float | None) -> str:
    """Two digits that count."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def times(own: dict[str, Any], other: dict[str, Any], figure: str) -> str:
    """How many times as much, and whether that is within noise: the ranges of both one's runs overlap."""
    overlap = min(own[figure]) <= max(other[figure]) and min(other[figure]) <= max(own[figure])
    ratio = number(_known(own, figure) / _known(other, figure))
    return f"{ratio}, within noise" if overlap else ratio


def _known(entry: dict[str, Any], figure: str) -> float:
    """The median of a figure that each entry has which did not fail."""
    value = median(entry, figure)
    assert value is not None
    return value


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else number(1000 * seconds)
