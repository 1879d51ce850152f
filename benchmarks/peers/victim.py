"""A program of a peer that `faults` does harm to: it writes, reads or resumes, and is watched from outside.

In the peer's own environment it tells where it is in lines on its standard output: `HALF` of the rows are
with the writer, the reader is in `MID` epoch, and the rows of an epoch (`ROWS`, JSON). It is started by
`python -c`, so that its classes can be pickled. It has a process group, a TMPDIR and a HOME of its own; in a
mount namespace of its own, /dev/shm too. Afterwards processes of its tree that live on are looked for, and
files that it left. Linux only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.case import adapter_of
from benchmarks.peers.registry import Peer
from benchmarks.peers.workload import Samples, Workload
from benchmarks.usage import children

START = "from benchmarks.peers.victim import main; main()"
ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
START_SECONDS = 90.0  # before any harm is done
#: Set in the environment of a program that is watched, so that its children are known as its own.
MARK = "ARROWCACHE_WATCHED"
_NAMESPACE = "ARROWCACHE_OWN_NAMESPACE"
#: Helpers of Python's multiprocessing and of Ray, which are no workers.
_HELPERS = ("resource_tracker", "forkserver", "semaphore_tracker", "Agent")
_MID_BATCH = 3
_PACE_SECONDS = 0.02  # a batch, or a piece that is written: time to be harmed in
_PIECE_BYTES = 1 << 20


# -- The program ---------------------------------------------------------------------------------------


class Slow(Workload):
    """The same rows in small pieces, which take their time."""

    def chunks(self) -> Iterator[Samples]:
        piece, given = max(1, _PIECE_BYTES // self.row_bytes), 0
        for x, y in super().chunks():
            for start in range(0, len(y), piece):
                given += len(y[start : start + piece])
                if given - piece < self.rows // 2 <= given:
                    _say("HALF")
                yield x[start : start + piece], y[start : start + piece]
                time.sleep(_PACE_SECONDS)


def _say(word: str, **values: Any) -> None:
    print(f"\n{word} {json.dumps(values)}", flush=True)


def _torn(x: NDArray[np.float32], y: NDArray[np.int64]) -> int:
    """How many rows are not what was written: another's, or with a hole."""
    whole = (x[:, 0] == y) & (x[:, -1] == y) & ((x[:, 1:-1] == 0).mean(axis=1) < 0.01)
    return int((~whole).sum())


def write(name: str, folder: Path, workload: Workload, *, slowly: bool) -> None:
    kind = Slow if slowly else Workload
    adapter_of(name)(folder, kind(**workload.to_json())).write()


def read(name: str, folder: Path, workload: Workload, *, workers: int) -> None:
    """Read an epoch; rows that were delivered are told even where an error ends it."""
    seen, torn = [np.empty(0, np.int64)], 0
    with adapter_of(name)(folder, workload, workers) as epochs:
        try:
            for number, batch in enumerate(epochs):
                x, y = np.asarray(batch[0]), np.asarray(batch[1]).reshape(-1)
                torn += _torn(x, y)
                seen.append(y.copy())
                if number == _MID_BATCH:
                    _say("MID")
                time.sleep(_PACE_SECONDS)
        finally:
            rows = np.concatenate(seen)
            _say("ROWS", delivered=len(rows), different=len(np.unique(rows)), torn=torn)


def resume(
    name: str,
    folder: Path,
    workload: Workload,
    *,
    workers: int,
    batches: int | None,
    state: str | None,
    after: str,
) -> None:
    """Read some batches from the beginning, or from the state in a file; the state after them is another."""
    peer: Any = adapter_of(name)(folder, workload, workers)
    with peer.opened:
        rows, then = peer.resume(None if state is None else Path(state).read_bytes(), batches)
    Path(after).write_bytes(then)
    _say("ROWS", rows=[int(row) for row in rows])


def main() -> None:
    action, name, folder, text = sys.argv[1:]
    request = json.loads(text)
    workload = Workload(**request.pop("workload"))
    {"write": write, "read": read, "resume": resume}[action](name, Path(folder), workload, **request)


# -- What it leaves behind ------------------------------------------------------------------------------


class Tree:
    """All processes of a program that `alive` ever saw: those below it, and those that carry its mark."""

    def __init__(self, root: int, mark: str) -> None:
        self._root, self._mark = root, mark
        self._seen: set[Any] = set()

    def alive(self) -> list[Any]:
        """Those that live, the root among them. Once its parent is dead, one without the mark is only found
        if it was seen before."""
        import psutil

        with suppress(psutil.Error):
            root = psutil.Process(self._root)
            self._seen |= {root, *root.children(recursive=True)}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    self._seen.add(process)
        return sorted((process for process in self._seen if _lives(process)), key=lambda each: each.pid)

    def workers(self) -> list[Any]:
        """Those that do the work: below the root, nobody's parent, and no helper.

        Where there are Ray's, only its workers that have something to do.
        """
        alive = {process: command(process) for process in self.alive() if process.pid != self._root}
        pids = {process.pid for process in alive}
        leaves = [
            process
            for process, said in alive.items()
            if not pids & {*children(process.pid)} and not any(name in said for name in _HELPERS)
        ]
        of_ray = [process for process in leaves if alive[process].startswith("ray::")]
        busy = [process for process in of_ray if "IDLE" not in alive[process]]
        return (busy or of_ray or leaves) if any("raylet" in said for said in alive.values()) else leaves

    def kill(self) -> None:
        import psutil

        for process in self.alive():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _lives(process: Any) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def command(process: Any) -> str:
    """The line by which a process was started; "" if it has ended."""
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def in_short(found: dict[str, int], most: int = 8) -> dict[str, int]:
    """The same, where there are many: a line for each entry of the folder itself."""
    if len(found) <= most:
        return found
    sums: dict[str, int] = {}
    for name, nbytes in found.items():
        top, slash, _ = name.partition("/")
        sums[top + slash] = sums.get(top + slash, 0) + nbytes
    return sums


def files(folder: Path) -> dict[str, int]:
    """Bytes on the disk of each file below a folder, and 0 for what is neither file nor folder."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                found[str(path.relative_to(folder))] = path.lstat().st_blocks * 512
            except OSError:
                continue
    return found


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# -- Its surroundings -----------------------------------------------------------------------------------


@dataclass
class End:
    """How a victim ended. `code` is None if it had to be killed."""

    code: int | None
    rows: dict[str, Any] | None
    error: str

    @property
    def is_error(self) -> bool:
        """It ended with an exception, and not by a signal."""
        return self.code is not None and self.code > 0

    def told(self) -> str:
        rows = (
            ""
            if self.rows is None
            else "{delivered} rows, {different} different, {torn} torn".format(**self.rows)
        )
        how = (
            "hung" if self.code is None else f"signal {-self.code}" if self.code < 0 else f"exit {self.code}"
        )
        return "; ".join(part for part in (how, rows, self.error if self.code != 0 else "") if part)


class Victim:
    """A program of a peer, in a process group and with folders for temporary files of its own."""

    def __init__(self, peer: Peer, run: Path, action: str, folder: Path, workload: Workload, **request: Any):
        self.temporary, self.home, self._log = run / "t", run / "h", run / "log"
        for path in (self.temporary, self.home, self._log):
            path.mkdir(exist_ok=True)
            empty(path)
        self._shm_before = files(SHM)
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark}
        environment |= {"TMPDIR": str(self.temporary), "HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        python = ROOT / ".envs" / peer.environment / "bin" / "python"
        text = json.dumps({"workload": workload.to_json(), **request})
        with (self._log / "out").open("wb") as out, (self._log / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [python, "-c", START, action, peer.name, str(folder), text],
                stdout=out, stderr=err, cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip
        self.tree = Tree(self.process.pid, mark)

    def reaches(self, word: str, seconds: float = START_SECONDS) -> bool:
        """Wait until it says a word, or ends."""
        until = time.monotonic() + seconds
        while not (ended := self.process.poll() is not None) and time.monotonic() < until:
            if self._said(word) is not None:
                break
            time.sleep(0.02)
        return not ended and self._said(word) is not None

    def end(self, seconds: float) -> End:
        try:
            code: int | None = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        said = self._said("ROWS")
        lines = (self._log / "err").read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
        return End(code, None if said is None else json.loads(said), (errors or lines or [""])[-1][:300])

    def _said(self, word: str) -> str | None:
        """What came with a word, of the last line with it that is complete."""
        lines = (self._log / "out").read_text(errors="replace").rpartition("\n")[0].splitlines()
        found = [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == word]
        return found[-1] if found else None

    def text(self) -> str:
        return "".join((self._log / name).read_text(errors="replace") for name in ("out", "err"))

    def vanishes(self, seconds: float) -> list[str]:
        """The processes that are left after so long."""
        until = time.monotonic() + seconds
        while (alive := self.tree.alive()) and time.monotonic() < until:
            time.sleep(0.1)
        return [command(process).replace(f"{ROOT}/", "")[:120] for process in alive]

    def left(self) -> dict[str, dict[str, int]]:
        shm = {name: size for name, size in files(SHM).items() if name not in self._shm_before}
        found = {"shm": shm, "tmp": files(self.temporary), "home": files(self.home)}
        return {place: names for place, names in found.items() if names}

    def close(self) -> None:
        self.tree.kill()
        self.process.wait()
        if is_private():
            empty(SHM)


def is_private() -> bool:
    return _NAMESPACE in os.environ


def mount(folder: Path, nbytes: int, *, remount: bool = False) -> None:
    options = f"{'remount,' if remount else ''}size={nbytes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


def enter_namespace() -> None:
    """Start again in a mount namespace of its own, if that is permitted."""
    unshare = ["unshare", "--mount", "--propagation", "private"]
    for command in (unshare, [*unshare, "--user", "--map-root-user"]):
        try:
            permitted = subprocess.run(
                [*command, "mount", "-t", "tmpfs", "tmpfs", SHM], capture_output=True, check=False
            )
        except FileNotFoundError:
            return
        if permitted.returncode == 0:
            again = [*command, sys.executable, "-m", "benchmarks.peers.faults", *sys.argv[1:]]
            os.execvpe(command[0], again, {**os.environ, _NAMESPACE: "1"})
