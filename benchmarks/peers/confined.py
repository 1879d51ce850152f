"""A program of a peer (`victim.py`) that is watched from outside, and surroundings made for it.

It has a process group, a TMPDIR and a HOME of its own; in a mount namespace of its own, /dev/shm too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import traces
from benchmarks.peers.registry import Peer
from benchmarks.peers.victim import START
from benchmarks.peers.workload import Workload

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
START_SECONDS = 90.0  # before any harm is done
_NAMESPACE = "ARROWCACHE_OWN_NAMESPACE"


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
            traces.empty(path)
        self._shm_before = traces.files(SHM)
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), traces.MARK: mark}
        environment |= {"TMPDIR": str(self.temporary), "HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        python = ROOT / ".envs" / peer.environment / "bin" / "python"
        text = json.dumps({"workload": workload.to_json(), **request})
        with (self._log / "out").open("wb") as out, (self._log / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [python, "-c", START, action, peer.name, str(folder), text],
                stdout=out, stderr=err, cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip
        self.tree = traces.Tree(self.process.pid, mark)

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
        return [process.command.replace(f"{ROOT}/", "")[:120] for process in alive]

    def left(self) -> dict[str, dict[str, int]]:
        shm = {name: size for name, size in traces.files(SHM).items() if name not in self._shm_before}
        found = {"shm": shm, "tmp": traces.files(self.temporary), "home": traces.files(self.home)}
        return {place: names for place, names in found.items() if names}

    def close(self) -> None:
        self.tree.kill()
        self.process.wait()
        if is_private():
            traces.empty(SHM)


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
