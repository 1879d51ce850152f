"""The proof: does the way to the device hold on a real one? `make device-proof`.

`PYTHONPATH=tests python -m gpu --out FOLDER`, in a checkout: one command of at most 8 minutes, which needs
a C compiler and Python with torch, numpy, pyarrow, xxhash and pytest, and installs nothing. The tests of
this folder run in processes of their own: a test that hangs, dies or fails ends its process, and the others
go on in a new one. The last line is the verdict; FOLDER gets all lines. One GPU; its torch as it is; the
engine is compiled with the machine's cc. Without a GPU the tests that can run on a device in software or on
the CPU. That proves nothing about a GPU: the verdict says so. `--leave-out "copy waits"` (or "compute
waits", "query") makes the fake deaf to such calls: the verdict must then be that it failed. `python -m
benchmarks device` tells what the way costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.conftest import LEAVE_OUT, NO_GPU, REPORT

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
MODULES = ("test_batches.py", "test_loaders.py", "test_graphs.py", "test_trouble.py")  # the dearest first
LIMIT_SECONDS = 7.5 * 60  # and half a minute to begin and to end
HELD, FAILED, NOT_RUN = "held", "FAILED", "not run"
#: pytest without what this repository's other tests need.
PYTEST = (
    "-m", "pytest", "-q", "-s", "-x", "-c", os.devnull, "--confcutdir", str(HERE), "--import-mode=importlib",
    "-p", "no:cacheprovider",
)  # fmt: skip
_FRAMES, _LAST_LINES = re.compile("/(_pytest|pluggy|pytest)/|<frozen"), -30


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test. where: "gpu" or "fake"."""

    test: str
    where: str
    state: str
    said: str
    seconds: float = 0.0

    def __str__(self) -> str:
        head = f"{self.state:8}{self.where:5}{self.seconds:6.1f} s  {self.test}"
        return "\n".join([head, textwrap.indent(self.said, " " * 22)])


def named(test: str) -> tuple[str, str]:
    """The sentence that a test is named after, and on what it runs."""
    name, _, parameter = test.rpartition("::")[2].partition("[")
    return name.removeprefix("test_").replace("_", " "), "fake" if parameter.startswith("fake") else "gpu"


def verdict(outcomes: Sequence[Outcome], device: str | None, *, is_complete: bool = True) -> tuple[str, bool]:
    """The last words, and whether nothing failed.

    Args:
        device: the GPU's name; None: there was none.
        is_complete: all tests were asked for.
    """
    failed = [f"{each.test} ({each.where})" for each in outcomes if each.state == FAILED]
    left = [each.test for each in outcomes if each.state == NOT_RUN]
    held = [each for each in outcomes if each.state == HELD]
    on_gpu = sum(each.where == "gpu" for each in held)
    without = ", ".join(left) or ("none" if device is None else "other tests")
    if failed:
        return f"FAILED: {', '.join(failed)}", False
    if device is None:
        told = (
            f"NOT PROVED ON A GPU, for there is none here: {len(held)} held on the fake; not run: {without}"
        )
        return told, True
    if left or not is_complete or not on_gpu:
        return f"NOT PROVED on {device}: {on_gpu} tests held; not run: {without}", True
    return f"PROVED ON A GPU: {device}, {on_gpu} tests", True


class Run:
    """Runs of pytest, in processes of their own, which tell of each test in a file of a folder.

    Args:
        root: below which the tests lie.
    """

    def __init__(
        self, folder: Path, environment: dict[str, str], limit_seconds: float, root: Path = ROOT
    ) -> None:
        self._root = root
        self._report, self._log = folder / "report", folder / "log"
        self._environment = os.environ | environment | {
            REPORT: str(self._report), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }  # fmt: skip
        self._until = time.monotonic() + limit_seconds

    def collect(self, arguments: Sequence[str]) -> dict[str, bool]:
        """The tests, and whether each has a process of its own."""
        self._pytest(["--collect-only", *arguments])
        return {each["test"]: each["is_alone"] for each in self._told()}

    def outcomes(self, tests: dict[str, bool]) -> Iterator[Outcome]:
        """Run tests. Gives the outcome of each."""
        left = [*tests]
        while left:
            alone = tests[left[0]]
            some = left[:1] if alone else [test for test in left if not tests[test]]
            if time.monotonic() > self._until:
                yield from (
                    Outcome(*named(test), NOT_RUN, "the time for all tests was over") for test in left
                )
                return
            code = self._pytest(some)
            told = self._told()
            found = {each["test"]: each for each in told if each["state"] in (HELD, FAILED, NOT_RUN)}
            begun = [each["test"] for each in told if each["state"] == "begun" and each["test"] not in found]
            for test, each in found.items():
                yield Outcome(*named(test), each["state"], each["said"], each["seconds"])
            ended = begun[:1] or ([] if found else some[:1])
            for test in ended:
                said = f"it hung, or its process died: exit code {code}\n{self._last_words()}"
                yield Outcome(*named(test), FAILED, said)
            left = [test for test in left if test not in found and test not in ended]

    def _pytest(self, arguments: Sequence[str]) -> int | str:
        self._report.write_text("")
        with self._log.open("w") as log:
            try:
                return subprocess.run(
                    [sys.executable, *PYTEST, "--rootdir", str(self._root), *arguments], cwd=self._root,
                    env=self._environment, stdout=log, stderr=subprocess.STDOUT, check=False,
                    timeout=max(1.0, self._until - time.monotonic()),
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return "none, the time for all tests was over"

    def _last_words(self) -> str:
        """The end of what was printed, as of stacks, without pytest's own frames."""
        lines = self._log.read_text().splitlines()
        return "\n".join([line for line in lines if not _FRAMES.search(line)][_LAST_LINES:])

    def _told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._report.read_text().splitlines()]


def compile_the_engine() -> None:
    """With the machine's own compiler, where the source is newer than what was compiled."""
    sys.path.insert(0, str(ROOT / "arrowcache" / "native"))
    try:
        import build
    finally:
        del sys.path[0]
    build.refresh()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Does the way to the device hold on a real one?")
    parser.add_argument("--out", type=Path, help="a folder for what is printed")
    parser.add_argument("--only", help="tests whose names match, as pytest -k takes it")
    parser.add_argument("--leave-out", default="", help="of the fake: calls it does not hear, by commas")
    parser.add_argument(
        "--without-gpu", action="store_true", help="the fake alone, also where there is a GPU"
    )
    given = parser.parse_args(arguments)
    compile_the_engine()
    import torch

    has_gpu = torch.cuda.is_available() and not given.without_gpu
    device = torch.cuda.get_device_name() if has_gpu else None
    path = [str(HERE.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    try:
        import cloudpickle  # noqa: F401  # arrowcache imports it
    except ImportError:  # a machine with a GPU may lack it
        path.append(str(HERE / "stand_ins"))
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, path)), LEAVE_OUT: given.leave_out}
    environment |= {} if has_gpu else {NO_GPU: "1"}
    lines = []

    def say(text: object) -> None:
        lines.append(str(text))
        print(text, flush=True)

    say(f"Python {platform.python_version()}, PyTorch {torch.__version__}, {os.cpu_count()} processors")
    say(f"{device}, CUDA {torch.version.cuda}" if has_gpu else "No CUDA device is used: this is no proof.")
    found = []
    with tempfile.TemporaryDirectory(prefix="device-proof-") as folder:
        run = Run(Path(folder), environment, LIMIT_SECONDS)
        modules = [str(HERE / name) for name in MODULES]
        tests = run.collect([*modules, *(["-k", given.only] if given.only else [])])
        # Where there is a GPU, the fake proves nothing more; where there is none, the fake stands for it.
        fakes = {name for name, where in map(named, tests) if where == "fake"}
        unwanted = {("fake", True)} if has_gpu else {("gpu", True)}
        tests = {
            test: alone
            for test, alone in tests.items()
            if (named(test)[1], named(test)[0] in fakes) not in unwanted
        }
        if not tests:
            parser.error(f"no test matches {given.only!r}")
        for outcome in run.outcomes(tests):
            found.append(outcome)
            say(outcome)
    last, is_good = verdict(found, device, is_complete=given.only is None)
    say(f"\n{last}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "table.txt").write_text("\n".join(lines) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
