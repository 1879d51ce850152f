"""The case the others were not made for: samplers publish without end into a cache with room for a quarter of
the data, while a trainer reads.

Question: at 300 and 600 MB/s, what comes in and goes out, by how much is the capacity overshot, how old are
samples, how long does the trainer stall, and is a row ever wrong?
Method: samplers, each in a process of its own, publish random rows of `stream` at a given rate; a trainer in
another process copies each batch into one slot, checks of every row that its first and last number are its
label, and of one row a batch all numbers, and works until the step took what its rate says. The driver looks
at what is used 20 times a second. Figures begin when the cache has been filled, and as much has been
delivered, or after 120 s, and last `--seconds`; capacity is watched and rows are counted all the time.
Run: `.envs/NAME/bin/python -m benchmarks.peers.rolling [PEER] [--seconds 60] [--rate 600]`, in the
environment that has the peer. It prints a row of a Markdown table; `--json FILE` has all, with a line for
each second.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers import stream
from benchmarks.peers.stream import Plan, Running
from benchmarks.usage import tree_cpu_seconds

MB, LOOK_SECONDS = 1e6, 0.05
FILL_SECONDS = 120.0  # at most; figures then begin although the cache never was nine tenths full
FLAT_OUT_MBPS = 3000.0  # a guess, for the headroom alone
# Batches: at 1.2 GB/s 4 of 4 MiB last 14 ms, and among busy samplers a thread may wait as long for its turn.
PREFETCH = 16
MINUTE, TEN_MINUTES = ["--seconds", "60"], ["--seconds", "600"]
_OTHERS_THAT_ROLL = ("torchrl", "Reverb", "MosaicML Streaming", "litdata")
#: What `make peers` runs: by name, whose it is and how.
ROLLING = {
    "300 MB/s, 60 s": ("arrowcache", ["--rate", "300", *MINUTE]),
    "600 MB/s, 60 s": ("arrowcache", MINUTE),
    '600 MB/s, "window", 60 s': ("arrowcache", ["--shuffle", "window", *MINUTE]),
    "600 MB/s, 10 min": ("arrowcache", TEN_MINUTES),
    **{f"{name}, 60 s": (name, MINUTE) for name in _OTHERS_THAT_ROLL},
    **{f"{name}, 10 min": (name, TEN_MINUTES) for name in _OTHERS_THAT_ROLL},
}
#: The table's columns: what of a run, and in which form. NaN is not known, and a dash.
COLUMNS: dict[str, tuple[str, str]] = {
    "peer": ("peer", ""), "asked in, MB/s": ("asked_mbps", ".0f"), "in": ("in_mbps", ".0f"),
    "out": ("out_mbps", ".0f"), "filled after, s": ("filled", ""),
    "over capacity, bytes": ("over_bytes", ","),
    "age, s: mean": ("age_mean", ".2f"), "worst": ("age_worst", ".2f"),
    "waits: of 1 ms and more": ("stall_share", ".2%"), "all": ("waited_share", ".2%"),
    "the loader's own account": ("own_stall_share", ".2%"),
    "samplers waited, s": ("sampler_waiting_seconds", ".1f"), "evicted unread": ("unread_share", ".1%"),
    "processors": ("processors", ".2f"), "rows, filling included": ("rows", ","), "wrong": ("rows_wrong", ""),
    "torn, one a batch looked at": ("rows_torn", ""),
}  # fmt: skip


class Watch:
    """What is used, each look; what happened, each second."""

    def __init__(self, running: Running, counters: Any, trainer: Any) -> None:
        self._running, self._counters, self._trainer = running, counters, trainer
        self._started = self._second = time.monotonic()
        self._last = (0.0, 0.0)
        self.most_bytes = self.used_bytes = 0
        self.timeline: list[tuple[float, int, int, int]] = []  # second, used, bytes in, bytes out

    def look(self) -> None:
        """Once; some 50 ms long."""
        now = time.monotonic()
        self.used_bytes = self._running.used_bytes()
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        if now - self._second >= 1:
            self._second += 1
            totals = self._running.published_bytes(), self._counters[stream.DELIVERED]
            came, went = (int(new - old) for new, old in zip(totals, self._last, strict=True))
            self.timeline.append((round(now - self._started, 2), self.used_bytes, came, went))
            self._last = totals
        if self._counters[stream.FAILED] or not self._trainer.is_alive():
            raise RuntimeError("the trainer has failed")
        time.sleep(max(0.0, now + LOOK_SECONDS - time.monotonic()))

    def totals(self) -> dict[str, float]:
        """Since the start: what the figures are differences of."""
        waited, dropped = self._running.waited_seconds, self._running.dropped
        gone, unread = dropped() if dropped else (math.nan, math.nan)
        return {
            "seconds": time.monotonic(),
            "dropped": gone,
            "unread": unread,
            "cpu": tree_cpu_seconds(),
            "published": self._running.published_bytes(),
            "sampler_waits": waited() if waited else math.nan,
            **{
                name.lower(): self._counters[getattr(stream, name)]
                for name in ("DELIVERED", "WAITED", "STALLED", "STALLS", "OWN_STALL", "AGE_SUM", "AGE_ROWS")
            },
        }


def measure(peer: str, folder: Path, plan: Plan, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    counters = context.RawArray("d", stream.COUNTERS)
    with stream.adapter_of(peer).running(folder, plan, counters) as running:
        trainer = context.Process(target=stream.train, args=(peer, running.handle, plan, counters))
        trainer.start()
        try:
            watch = Watch(running, counters, trainer)
            begun = time.monotonic()
            while (
                watch.used_bytes < 0.9 * running.limit_bytes
                or counters[stream.DELIVERED] < running.limit_bytes
            ):
                watch.look()
                if time.monotonic() - begun > FILL_SECONDS:
                    break
            counters[stream.AGE_WORST] = counters[stream.STALL_WORST] = 0
            before, filled = watch.totals(), time.monotonic() - begun
            while time.monotonic() - begun < filled + seconds:
                watch.look()
            after = watch.totals()
        finally:
            counters[stream.STOP] = 1
            trainer.join(30)
            if trainer.is_alive():
                trainer.kill()
        facts = running.facts()
    passed = {name: after[name] - before[name] for name in after}
    length = passed["seconds"]
    return {
        "peer": peer,
        "plan": asdict(plan),
        "seconds": length,
        "fill_seconds": filled,
        "in_mbps": passed["published"] / length / MB,
        "out_mbps": passed["delivered"] / length / MB,
        "over_bytes": max(0, watch.most_bytes - running.limit_bytes),
        "most_bytes": watch.most_bytes,
        "limit_bytes": running.limit_bytes,
        "age_mean": passed["age_sum"] / passed["age_rows"] if passed["age_rows"] else math.nan,
        "age_worst": counters[stream.AGE_WORST] or math.nan,
        "stall_share": passed["stalled"] / length,
        "stalls": int(passed["stalls"]),
        "stall_worst_seconds": counters[stream.STALL_WORST],
        "own_stall_share": passed["own_stall"] / length,
        "unread_share": passed["unread"] / passed["dropped"] if passed["dropped"] else math.nan,
        "processors": passed["cpu"] / length,
        "waited_share": passed["waited"] / length,
        "sampler_waiting_seconds": passed["sampler_waits"],
        "rows": int(counters[stream.DELIVERED] // plan.row_bytes),
        "rows_wrong": int(counters[stream.WRONG]),
        "rows_torn": int(counters[stream.TORN]),
        "trainer_exit": trainer.exitcode,
        "facts": facts,
        "timeline": watch.timeline,
    }


def table_row(result: dict[str, Any]) -> list[str]:
    """The cells of a run, by COLUMNS."""
    never = f"never: {result['most_bytes'] / result['limit_bytes']:.0%} at most"
    filled = f"{result['fill_seconds']:.0f}" if result["fill_seconds"] < FILL_SECONDS else never
    values = result | {"asked_mbps": result["plan"]["in_rate"] / MB, "filled": filled}
    cells = ((values[name], form) for name, form in COLUMNS.values())
    return ["-" if value != value else format(value, form) for value, form in cells]


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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("peer", nargs="?", default="arrowcache", help="a word of rolling_adapters")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=600, help="MB/s that samplers publish")
    parser.add_argument("--consume", type=float, default=1200, help="MB/s of the trainer; 0: flat out")
    parser.add_argument("--shuffle", default="rows", choices=("rows", "window"))
    parser.add_argument("--data", type=float, default=8, help="GiB; the cache has a quarter")
    parser.add_argument("--row-kib", type=float, default=64)
    parser.add_argument("--batch", type=int, default=64, help="rows")
    parser.add_argument("--segment-mib", type=float, default=16)
    parser.add_argument("--headroom", type=float, help="default: half more than the least of SIZING.md")
    parser.add_argument("--prefetch", type=int, default=PREFETCH, help="batches, where the peer has any")
    parser.add_argument("--samplers", type=int, default=2, choices=range(1, stream.MAX_SAMPLERS + 1))
    parser.add_argument("--folder", type=Path, help="a new or an empty one; default: a temporary one")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace) -> Plan:
    row_bytes = int(options.row_kib * 1024)
    headroom = options.headroom
    if headroom is None:
        # SIZING.md has the least that an epoch must leave for what comes in meanwhile; half of it on top.
        # More than half of the cache would leave rows unread.
        least = options.rate / (options.rate + (options.consume or FLAT_OUT_MBPS))
        headroom = 0.1 if options.shuffle == "window" else min(0.5, 1.5 * least)
    return Plan(
        row_bytes=row_bytes,
        rows=int(options.data * 2**30) // row_bytes,
        batch_rows=options.batch,
        capacity_bytes=int(options.data * 2**30) // 4,
        in_rate=options.rate * MB,
        out_rate=options.consume * MB,
        shuffle=options.shuffle,
        samplers=options.samplers,
        segment_bytes=int(options.segment_mib * 2**20),
        headroom=headroom,
        prefetch=options.prefetch,
        origin=time.monotonic(),
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Print the row of a run. Returns: all of it."""
    options = parse(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="rolling-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty, and what is in it would be deleted: name another")
    try:
        result = measure(options.peer, folder, plan_of(options), options.seconds)
    finally:
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if options.folder is None:
            folder.rmdir()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    for cells in (COLUMNS, ["---"] * len(COLUMNS), table_row(result)):
        print("| " + " | ".join(cells) + " |")
    return result


if __name__ == "__main__":
    main()
