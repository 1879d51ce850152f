"""Measures every peer in every case, and writes the tables: `make peers`.

Question: rows of 1 KiB, 64 KiB and 1 MiB, shuffled, with 0, 1 and 2 workers: GB/s over memcpy in the same
run, CPU seconds a GB, private and shared memory, the wait for the first batch, what a spinning Python
thread keeps.
Method: a fresh process a case in the peer's own environment, made when it is first needed; row size by row
size, each peer with its data set on the disk alone. Warm: in the page cache, seen once. Cold: dropped from
it. Interrupted, it goes on where it was.
Then the rolling case (rolling.py), where a run that is there is not made again either; and what faults do to
each (faults.py), which always begins anew.
Run: `make peers`; `ARGS="--peers litdata,arrowcache --again"` for some, measured anew; `ARGS="--parts cases"`
without the rest. Some three hours.
Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fresh import ROOT, command_of, fresh, result_of
from benchmarks.peers import report
from benchmarks.peers.case import Case, peer_of
from benchmarks.peers.registry import PEERS, Peer
from benchmarks.peers.results import ROWS, Results, median
from benchmarks.peers.rolling import ROLLING, table_row
from benchmarks.peers.workload import Workload
from benchmarks.usage import drop, peak, private_bytes, shared_bytes

WARM = [
    Workload(1 << 10, rows=1 << 16, batch_rows=1024),
    Workload(64 << 10, rows=1 << 13, batch_rows=64),
    Workload(1 << 20, rows=1 << 9, batch_rows=16),
]
COLD = [Workload(64 << 10, rows=1 << 14, batch_rows=64)]
COLD_RUNS = 5
CASE_SECONDS, ROLLING_SECONDS = 240, 1000  # the most that one may take
PARTS = ("cases", "rolling", "faults")


def cases(peer: Peer, workload: Workload, *, is_cold: bool) -> Iterator[Case]:
    """What is measured of a peer with one data set."""
    if is_cold:
        if not peer.has_epochs:
            return  # it has its rows in memory before it is asked for any
        for workers in sorted({min(peer.workers), max(peer.workers)}):
            yield Case(workload, workers, is_cold=True)
        return
    is_middle = workload.row_bytes == 64 << 10
    for workers in peer.workers:
        yield Case(workload, workers, spins=is_middle)
        if is_middle and workers != 1:
            yield Case(workload, workers, consumer="read")
    if is_middle and peer.has_epochs:
        yield Case(workload, min(peer.workers), shuffled=False)


def interpreter(environment: str) -> Path:
    """Of an environment, which is made if it is not there.

    Raises: subprocess.CalledProcessError: it cannot be.
    """
    subprocess.run(["make", "--quiet", f".envs/{environment}/.stamp"], cwd=ROOT, check=True)
    return ROOT / ".envs" / environment / "bin" / "python"


def private_of_tree(pid: int) -> int:
    """The sum of Pss_Anon of a process and its children; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return sum(private_bytes(process.pid) for process in processes)
    return 0


def run(python: Path, function: str, *arguments: object) -> dict[str, Any]:
    """Have a process of its own call a function of `case`.

    Returns: its figures, and its peaks of memory as seen from outside, shared memory as how much more the
        whole machine has of it than before, so nothing else may run; {"failed": why} if it has none.
    """
    before = shared_bytes()
    command = command_of(f"benchmarks.peers.case:{function}", *arguments, python=python)
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True) as process,
        peak(partial(private_of_tree, process.pid), 0.2) as private,
        peak(lambda: shared_bytes() - before, 0.2) as shared,
    ):
        try:
            output, _ = process.communicate(timeout=CASE_SECONDS)
        except BaseException as error:
            end(process.pid)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return {"failed": f"not done after {CASE_SECONDS} s"}
        if process.returncode:
            said.seek(0)
            return {"failed": (said.read().strip().splitlines() or ["no word"])[-1]}
    figures = result_of(output) or {}
    own = figures.get("own_bytes", 0)
    return figures | {"private_bytes": private.most - own, "shared_bytes": shared.most}


def end(pid: int) -> None:
    """Kill a process and those below it, if it is still there."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def measure(peer: Peer, workload: Workload, results: Results, *, is_cold: bool) -> None:
    """Measure all cases of one peer and data set that are not measured yet."""
    todo = [case for case in cases(peer, workload, is_cold=is_cold) if not results.has(peer.name, case)]
    if not todo:
        return
    try:
        python = interpreter(peer.environment)
    except subprocess.CalledProcessError as error:
        for case in todo:
            results.add(peer.name, case, {"failed": f"no environment: {error}"})
        return
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        written = run(python, "write", peer.name, name, workload.to_json())
        for case in todo:
            figures = written if "failed" in written else {}
            for _ in range(COLD_RUNS if is_cold and not figures else 1):
                if "failed" in figures:
                    break
                try:
                    if is_cold:
                        drop(folder)
                except RuntimeError as error:
                    one: dict[str, Any] = {"failed": str(error)}
                else:
                    one = run(python, "measure", peer.name, name, asdict(case))
                figures = merged(figures, one)
            results.add(peer.name, case, figures)
            print(line(peer.name, case, figures), flush=True)


def line(name: str, case: Case, figures: dict[str, Any]) -> str:
    """A line about one case, for while others are measured."""
    row = ROWS.get(case.workload.row_bytes, str(case.workload.row_bytes))
    order = "shuffled" if case.shuffled else "in order"
    kind = f"{'cold' if case.is_cold else 'warm'}, {case.consumer}, {order}"
    begin = f"{name:32} {row:>6} rows, {case.workers} workers, {kind}:"
    if "failed" in figures:
        return f"{begin} failed: {figures['failed']}"
    return f"{begin} {median(figures['gbps']):.2f} GB/s, {median(figures['cpu_per_gb']):.2f} CPU s/GB"


def roll(results: Results, names: Collection[str]) -> None:
    """Run the rolling case as often as it is not run yet."""
    for name, (peer, options) in ROLLING.items():
        if results.has_run(name) or peer not in names:
            continue
        known, rolling = peer_of(peer), "benchmarks.peers.rolling:main"
        try:
            python, given = interpreter(known.environment), [known.module, *options]
            result = fresh(rolling, given, python=python, timeout=ROLLING_SECONDS)
            print(name, *table_row(result), sep=" | ", flush=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{name}: failed: {error}", flush=True)
            result = {"peer": peer, "failed": str(error).partition(" ")[2][-200:]}
        results.add_run(name, result)


def merged(figures: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The figures of several processes as if they were of one."""
    both = {
        name: figures[name] + more[name]
        for name in figures
        if isinstance(figures[name], list) and name in more
    }
    return figures | more | both


def harm(names: Collection[str]) -> None:
    """Run the faults of those peers whose environment can be had; they are told from all others' results."""
    found = []
    for name in names:
        try:
            interpreter(peer_of(name).environment)
            found.append(name)
        except subprocess.CalledProcessError as error:
            print(f"{name}: no environment: {error}", flush=True)
    if found:
        command = [sys.executable, "-m", "benchmarks.peers.faults", *found]
        subprocess.run(command, cwd=ROOT, check=False)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure arrowcache and its peers side by side.")
    parser.add_argument("--peers", help="modules of adapters, separated by commas; all unless said")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}; all unless said")
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument(
        "--report", action="store_true", help="only write tables and plots of what was measured"
    )
    options = parser.parse_args(arguments)
    known = {word: peer.name for peer in PEERS for word in (peer.name, peer.module)}
    peers = options.peers.split(",") if options.peers else list(known)
    options.parts = [] if options.report else options.parts.split(",") if options.parts else list(PARTS)
    if unknown := [*(set(peers) - set(known)), *(set(options.parts) - set(PARTS))]:
        modules = [peer.module for peer in PEERS]
        parser.error(
            f"unknown: {sorted(unknown)}: use some of the peers {modules}, or the parts {list(PARTS)}"
        )
    options.peers = list(dict.fromkeys(known[word] for word in peers))
    return options


def main() -> None:
    options = parse()
    names = options.peers
    chosen = [peer for peer in PEERS if peer.name in names]
    results = Results()
    if options.again and "cases" in options.parts:
        results.forget(names)
    if options.again and "rolling" in options.parts:
        results.forget(runs=[name for name, (peer, _) in ROLLING.items() if peer in names])
    if "cases" in options.parts:
        for is_cold, workloads in ((False, WARM), (True, COLD)):
            for workload in workloads:
                for peer in chosen:
                    measure(peer, workload, results, is_cold=is_cold)
    if "rolling" in options.parts:
        roll(results, names)
    if "faults" in options.parts:
        harm(names)
    report.write(Results())  # faults are written by a process of their own


if __name__ == "__main__":
    main()
