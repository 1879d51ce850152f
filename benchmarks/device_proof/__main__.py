"""The command: runs the table of checks, prints it, and the verdict last."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def compile_the_engine() -> None:
    """With the machine's own compiler, where the source is newer than what was compiled."""
    sys.path.insert(0, str(ROOT / "arrowcache" / "native"))
    try:
        import build
    finally:
        del sys.path[0]
    build.refresh()


def outcomes(table: Sequence[Any], run: Callable[[Any, float], Any], limit_seconds: float) -> Iterator[Any]:
    """What comes of each check, each in its own time and all within the limit."""
    from benchmarks.device_proof.check import not_run

    until = time.monotonic() + limit_seconds
    for check in table:
        left = until - time.monotonic()
        if left < min(check.seconds, 10.0):
            yield not_run(check, f"the {limit_seconds:.0f} s for all checks were over")
        else:
            yield run(check, min(check.seconds, left))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Does the way to the device hold on a real one?")
    parser.add_argument("--out", type=Path, help="a folder for the table and the profiler's trace")
    parser.add_argument("--only", help="names of checks, separated by commas")
    parser.add_argument("--leave-out", default="", help="of the fake: calls it does not hear, by commas")
    parser.add_argument("--fake", action="store_true", help="the fake also where there is a GPU")
    given = parser.parse_args(arguments)
    compile_the_engine()
    import torch

    from benchmarks.device_proof.check import line, not_run, run, verdict
    from benchmarks.device_proof.processes import Processes
    from benchmarks.device_proof.table import LIMIT_SECONDS, checks
    from benchmarks.device_proof.target import Fake, Gpu

    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    table = checks(None if given.out is None else given.out / "trace.json.gz")
    if given.only is not None:
        names = given.only.split(",")
        if unknown := set(names) - {check.name for check in table}:
            known = ", ".join(check.name for check in table)
            parser.error(f"no check is named {', '.join(unknown)}: there are {known}")
        table = [check for check in table if check.name in names]

    lines = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    has_gpu = torch.cuda.is_available() and not given.fake
    device = None
    say(f"Python {platform.python_version()}, PyTorch {torch.__version__}, {os.cpu_count()} processors")
    if has_gpu:
        device = torch.cuda.get_device_name()
        say(f"{device}, CUDA {torch.version.cuda}")
        processes = Processes(Gpu)
        run_one = processes.run
    else:
        say("No CUDA device is used: what can runs on the fake (tests/fake_device.py) or the CPU: no proof.")
        torch.set_num_threads(1)  # others spin while they wait, and take the processors that they wait for
        fake = Fake(tuple(filter(None, given.leave_out.split(","))))

        def run_one(check: Any, seconds: float) -> Any:  # noqa: ARG001  # nothing here can hang
            if check.without_gpu is None:
                return not_run(check, "it needs a GPU")
            return run(check, fake, check.without_gpu)

    found = []
    try:
        for outcome in outcomes(table, run_one, LIMIT_SECONDS):
            found.append(outcome)
            say(line(outcome))
    finally:
        if has_gpu:
            processes.close()
    last, is_good = verdict(found, device, is_complete=given.only is None)
    say(f"\n{last}")
    if given.out is not None:
        (given.out / "table.txt").write_text("\n".join(lines) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
