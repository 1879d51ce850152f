"""A function in a new process, of this interpreter or that of a peer: `python -m benchmarks.fresh`.

Arguments and the result travel as JSON; whatever else a peer prints is passed over. Nothing but the standard
library is imported here: a peer's environment has no arrowcache.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_RESULT = "RESULT "


def fresh(
    function: str, *arguments: object, python: str | Path = sys.executable, timeout: float | None = None
) -> Any:
    """Call a function, "module:name", and wait for what it returns."""
    done = subprocess.run(
        command_of(function, *arguments, python=python),
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout,
    )  # fmt: skip
    return result_of(done.stdout)


def command_of(function: str, *arguments: object, python: str | Path = sys.executable) -> list[str]:
    """The command of such a process, which runs in ROOT."""
    return [str(python), "-m", "benchmarks.fresh", function, json.dumps(arguments)]


def result_of(output: str) -> Any:
    """What the function returned, of what the process printed."""
    lines = [line for line in output.splitlines() if line.startswith(_RESULT)]
    return json.loads(lines[-1].removeprefix(_RESULT))


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    told = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    print(_RESULT + json.dumps(told), flush=True)
