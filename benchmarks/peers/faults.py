"""Which faults a peer survives, and what it leaves behind: `python -m benchmarks.peers.faults [PEER ...]`.

Run from the newest environment; each peer runs in its own (`registry.py`), as a program that is harmed from
outside (`victim.py`). All of it happens in a mount namespace of its own, in which /dev/shm is empty and
TMPDIR and HOME are new folders: what is in them afterwards was left behind. One trial each.
Results are written to `benchmarks/peers/results.json`, beside those of other peers, and printed as a table.

worker: `kill -9` of a worker process in mid-epoch, 2 workers. Passes if within 30 s all rows came, once,
    or an error.
consumer: `kill -9` of the consumer in mid-epoch, 2 workers. Passes if after 10 s no process is left, and
    nothing in /dev/shm or TMPDIR.
writer: `kill -9` of the writer, and of processes it has for it, half way. Passes if what is there is refused
    with an error, or whole rows come, each once; and if writing again works, in the same folder or in an
    emptied one.
shm: a /dev/shm of 64 MB, batches of 16 MiB, 2 workers. Passes if all rows came, or an error that names the
    cause and is no bus error.
disk: a disk that is full half way. Passes if the writer ends with an error, and rows of what was complete
    can be read, be it that an error follows. Where a cache dropped its oldest rows in place of an error,
    how many of all that were written came back.
ctrl-c: SIGINT to the process group in mid-epoch, 2 workers. Passes if it ended within 5 s by
    KeyboardInterrupt, and nothing is left.
resume: state saved after 40 batches with 2 workers, resumed with 1 and with none. Passes if the other rows
    come, each once.

Empty files and sockets in TMPDIR are listed, and do not count. A peer without worker processes is given "n/a"
there. Resuming is "not tried" with an adapter that has no `resume`, whatever its peer could do. Where a mount
namespace is not permitted, shm and disk are "not run", and /dev/shm is shared with whatever else runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import results as known
from benchmarks.peers.case import adapter_of
from benchmarks.peers.registry import PEERS, Peer
from benchmarks.peers.victim import (
    ROOT,
    SHM,
    End,
    Victim,
    empty,
    enter_namespace,
    files,
    in_short,
    is_private,
    mount,
)  # fmt: skip
from benchmarks.peers.workload import Workload

MANY = Workload(row_bytes=64 << 10, rows=2048, batch_rows=16)
LARGE = Workload(row_bytes=1 << 20, rows=192, batch_rows=16)
MORE = Workload(row_bytes=64 << 10, rows=6144, batch_rows=16)
SHM_BYTES, DISK_BYTES = 64 << 20, MORE.nbytes * 6 // 10
EPOCH_SECONDS = 120.0
_CAME_BACK = re.compile(r"read: exit 0; (\d+) rows")
_NAMES_CAUSE = re.compile(r"shm|shared memory|object store|no space|errno 28|enospc|memory", re.IGNORECASE)


@dataclass
class Outcome:
    verdict: str  # pass, fail, evicts, n/a, not tried, not run
    detail: str
    processes: list[str] = field(default_factory=list)
    left: dict[str, dict[str, int]] = field(default_factory=dict)  # shm, tmp, home, data: bytes of each file


def reach(victim: Victim, word: str) -> None:
    """Raises: RuntimeError: the victim never says the word, so the fault cannot be run."""
    if not victim.reaches(word):
        where = {"MID": "in mid-epoch", "HALF": "half way"}[word]
        raise RuntimeError(f"never {where}: {victim.end(0).told()}")


def require_namespace() -> None:
    if not is_private():
        raise RuntimeError("no mount namespace permitted")


class Bench:
    """One peer and its folder. Each fault is a method of `FAULTS`' name.

    Raises: RuntimeError: a fault cannot be run.
    """

    def __init__(self, peer: Peer, run: Path) -> None:
        self.peer, self._run, self._many = peer, run, run / "d"
        self.adapter = adapter_of(peer.name)
        self.workers = max(peer.workers)

    @contextmanager
    def victim(self, action: str, folder: Path, workload: Workload, **request: Any) -> Iterator[Victim]:
        victim = Victim(self.peer, self._run, action, folder, workload, **request)
        try:
            yield victim
        finally:
            victim.close()

    def write(self, folder: Path, workload: Workload, *, slowly: bool = False) -> End:
        folder.mkdir(exist_ok=True)
        with self.victim("write", folder, workload, slowly=slowly) as victim:
            return victim.end(EPOCH_SECONDS)

    def read(self, folder: Path, workload: Workload) -> End:
        with self.victim("read", folder, workload, workers=min(self.peer.workers)) as victim:
            return victim.end(EPOCH_SECONDS)

    def written(self) -> Path:
        if not self._many.exists():
            self.write_whole(self._many, MANY)
        return self._many

    def write_whole(self, folder: Path, workload: Workload) -> None:
        if (end := self.write(folder, workload)).code != 0:
            raise RuntimeError(f"could not be written: {end.told()}")

    def is_whole(self, end: End, workload: Workload) -> bool:
        """Every row came, once and intact, but for incomplete batches."""
        if end.code != 0 or end.rows is None or end.rows["torn"]:
            return False
        different, delivered = end.rows["different"], end.rows["delivered"]
        if not self.peer.has_epochs:
            return bool(delivered >= 0.9 * workload.rows)
        return bool(different == delivered >= workload.rows - 3 * workload.batch_rows)

    def is_part(self, end: End) -> bool:
        """No row was torn or came twice."""
        rows = end.rows
        if rows is None:
            return True
        return not rows["torn"] and (rows["different"] == rows["delivered"] or not self.peer.has_epochs)

    def worker(self) -> Outcome:
        folder = self.written()
        with self.victim("read", folder, MANY, workers=self.workers) as victim:
            reach(victim, "MID")
            workers = victim.tree.workers()
            if not workers:
                return Outcome("n/a", "no worker processes")
            workers[0].kill()
            end = victim.end(30)
            passed = self.is_whole(end, MANY) or (end.is_error and self.is_part(end))
            return self._outcome(victim, passed, end.told(), seconds=10)

    def consumer(self) -> Outcome:
        folder = self.written()
        before = files(folder)
        with self.victim("read", folder, MANY, workers=self.workers) as victim:
            reach(victim, "MID")
            beside = len(victim.tree.alive()) - 1
            victim.process.kill()
            outcome = self._outcome(victim, None, f"{beside} processes beside it", seconds=10)
            if new := {name: size for name, size in files(folder).items() if name not in before}:
                outcome.left["data"] = new
            return outcome

    def writer(self) -> Outcome:
        with self._folder() as folder:
            with self.victim("write", folder, MANY, slowly=True) as victim:
                reach(victim, "HALF")
                time.sleep(0.3)
                if victim.process.poll() is not None:
                    raise RuntimeError("ended before it could be killed")
                victim.tree.kill()
                outcome = self._outcome(victim, None, "", seconds=10)
                outcome.left["data"] = files(folder)
            end = self.read(folder, MANY)
            told = [f"then: {end.told()}"]
            passed = self.is_part(end) and (end.code == 0 or end.is_error)
            again = self.write(folder, MANY, slowly=True)
            if again.is_error:
                told.append(f"refuses to write over it ({again.error[:80]}), folder emptied")
                empty(folder)
                again = self.write(folder, MANY, slowly=True)
            whole = self.read(folder, MANY)
            passed = passed and again.code == 0 and self.is_whole(whole, MANY)
            told.append("written again: " + (again if again.code else whole).told())
            outcome.verdict, outcome.detail = "pass" if passed else "fail", "; ".join(told)
            return outcome

    def shm(self) -> Outcome:
        require_namespace()
        with self._folder() as folder:
            self.write_whole(folder, LARGE)
            mount(SHM, SHM_BYTES, remount=True)
            try:
                with self.victim("read", folder, LARGE, workers=self.workers) as victim:
                    end = victim.end(EPOCH_SECONDS)
                    text, is_typed = victim.text(), end.is_error and bool(_NAMES_CAUSE.search(end.error))
                    is_bus_error = end.code == -signal.SIGBUS or "bus error" in text.lower()
                    passed = not is_bus_error and (self.is_whole(end, LARGE) or is_typed)
                    return self._outcome(victim, passed, end.told(), seconds=5)
            finally:
                mount(SHM, 8 << 30, remount=True)

    def disk(self) -> Outcome:
        require_namespace()
        with self._folder() as folder:
            mount(folder, DISK_BYTES)
            try:
                with self.victim("write", folder, MORE, slowly=False) as victim:
                    end = victim.end(EPOCH_SECONDS)
                    outcome = self._outcome(victim, None, "", seconds=5)
                data = outcome.left["data"] = files(folder)
                back = self.read(folder, MORE)
                rows = (back.rows or {}).get("delivered", 0)
                passed = (
                    end.is_error and self.is_part(back) and (back.code == 0 or back.is_error) and rows > 0
                )
                is_rolled = self.peer.is_rolling and end.code == 0
                outcome.verdict = "pass" if passed else "evicts" if is_rolled and rows else "fail"
                outcome.detail = f"{end.told()}; {sum(data.values()) >> 20} MiB there, read: {back.told()}"
                return outcome
            finally:
                subprocess.run(["umount", "--lazy", folder], check=True)

    def ctrl_c(self) -> Outcome:
        folder = self.written()
        with self.victim("read", folder, MANY, workers=self.workers) as victim:
            reach(victim, "MID")
            victim.tree.alive()
            os.killpg(victim.process.pid, signal.SIGINT)
            started = time.monotonic()
            end = victim.end(20)
            seconds = time.monotonic() - started
            by_interrupt = end.code in (-signal.SIGINT, 130) or "KeyboardInterrupt" in end.error
            told = f"{seconds:.1f} s; {end.told()}"
            outcome = self._outcome(victim, None, told, seconds=max(0.0, 5 - seconds))
            if seconds > 5 or not by_interrupt or not self.is_part(end):
                outcome.verdict = "fail"
            return outcome

    def resume(self) -> Outcome:
        if not hasattr(self.adapter, "resume"):
            return Outcome("not tried", "its adapter has no `resume`")
        folder, told, passed = self.written(), [], True
        state = str(self._run / "state")
        first = self._resumed(folder, workers=2, batches=40, state=None, after=state)
        if first.rows is None:
            return Outcome("fail", first.told())
        delivered = set(first.rows["rows"])
        for workers in (1, 0):
            rest = self._resumed(folder, workers=workers, batches=None, state=state, after=state + "2")
            if rest.rows is None:
                passed, text = False, rest.told()
            else:
                rows = rest.rows["rows"]
                again, twice = len(delivered & set(rows)), len(rows) - len(set(rows))
                missing = MANY.rows - len(delivered | set(rows))
                passed = passed and not again and not twice and not missing
                text = f"{len(rows)} rows, {again} delivered before, {twice} twice, {missing} missing"
            told.append(f"{workers} workers: {text}")
        return Outcome("pass" if passed else "fail", f"{len(delivered)} rows, then " + "; ".join(told))

    def _resumed(self, folder: Path, **request: Any) -> End:
        with self.victim("resume", folder, MANY, **request) as victim:
            end = victim.end(EPOCH_SECONDS)
            return End(end.code, end.rows if end.code == 0 else None, end.error)

    def _outcome(self, victim: Victim, passed: bool | None, detail: str, *, seconds: float) -> Outcome:
        """What is left after so long. `passed` is None where that alone decides."""
        processes = victim.vanishes(seconds)
        left = victim.left()
        if passed is None:
            passed = not processes and not left.get("shm") and not sum(left.get("tmp", {}).values())
        return Outcome("pass" if passed else "fail", detail, processes, left)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = self._run / "f"
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        finally:
            empty(folder)


FAULTS: dict[str, Callable[[Bench], Outcome]] = {
    "worker": Bench.worker, "consumer": Bench.consumer, "writer": Bench.writer, "shm": Bench.shm,
    "disk": Bench.disk, "ctrl-c": Bench.ctrl_c, "resume": Bench.resume,
}  # fmt: skip


def told(outcome: dict[str, Any]) -> str:
    """The verdict; of a full disk without an error, how many rows came back."""
    if outcome["verdict"] != "evicts":
        return str(outcome["verdict"])
    found = _CAME_BACK.search(outcome["detail"])
    return f"no error; {int(found[1]) if found else 0:,} of {MORE.rows:,} rows came back"


def left_by(outcome: dict[str, Any]) -> str:
    """The files that a fault left in /dev/shm or TMPDIR, but for empty ones."""
    told = [
        f"{place} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for place in ("shm", "tmp")
        if (names := [name for name, nbytes in outcome["left"].get(place, {}).items() if nbytes])
    ]
    return f"; left: {', '.join(told)}" if told else ""


def version_of(peer: Peer) -> str | None:
    """Of the library that is harmed, in its environment."""
    libraries = [str(path) for path in (ROOT / ".envs" / peer.environment / "lib").glob("*/site-packages")]
    found = importlib.metadata.distributions(name=peer.distribution, path=libraries)
    return next((distribution.version for distribution in found), None)


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"| peer | {' | '.join(FAULTS)} |", "|---" * (len(FAULTS) + 1) + "|"]
    for name, outcomes in results.items():
        cells = []
        for fault in FAULTS:
            outcome = outcomes.get(fault, {"verdict": "", "processes": [], "left": {}})
            sizes = {place: sum(names.values()) for place, names in outcome["left"].items()}
            places = [f"{size / 1e6:.3g} MB {place}" for place, size in sizes.items()]
            if outcome["processes"]:
                places.insert(0, f"{len(outcome['processes'])} processes")
            cells.append(told(outcome) + (f" ({', '.join(places)})" if places else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Which faults a peer survives.")
    parser.add_argument("peers", nargs="*", metavar="PEER", help="names of registry.py; none: all")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--results", type=Path, default=known.PATH, help="the JSON file")
    arguments = parser.parse_args()
    # A shell's background job ignores SIGINT, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up
    if not is_private():
        enter_namespace()
        print("not permitted: a mount namespace. shm and disk are not run", flush=True)
    else:
        mount(SHM, 8 << 30)
    results = known.Results(arguments.results)
    for peer in PEERS:
        if arguments.peers and peer.name not in arguments.peers:
            continue
        with tempfile.TemporaryDirectory(prefix="f", ignore_cleanup_errors=True) as run:
            bench = Bench(peer, Path(run))
            for fault in arguments.faults:
                try:
                    outcome = FAULTS[fault](bench)
                except RuntimeError as error:
                    outcome = Outcome("not run", str(error))
                print(f"{peer.name}: {fault}: {outcome.verdict}: {outcome.detail}", flush=True)
                outcome.left = {place: in_short(names) for place, names in outcome.left.items()}
                about = known.circumstances() | {"version": version_of(peer)}
                results.add_fault(peer.name, fault, asdict(outcome) | about)
    order = [peer.name for peer in PEERS]
    print(table(dict(sorted(results.faults.items(), key=lambda item: order.index(item[0])))))


if __name__ == "__main__":
    main()
