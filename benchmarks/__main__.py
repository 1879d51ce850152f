"""Runs benchmarks by name: `python -m benchmarks gather loader`.

Those that fit the harness are in the table of `cases`, or in a module of their name, as they need more than
the harness does; another one has options of its own, which follow its name: `python -m benchmarks cached
--kills 200`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

OWN = ("beyond_memory", "cached", "device", "explorer", "learning", "peers", "reads", "scale")
"""Modules with a command of their own."""
MODULES = ("explore", "jax_device", "selection", "soak", "sources", "tensorflow", "training")
"""Modules with a benchmark of their name."""


def main(arguments: Sequence[str] | None = None) -> None:
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if given and given[0] in OWN:
        sys.argv = [f"benchmarks.{given[0]}", *given[1:]]
        runpy.run_module(f"benchmarks.{given[0]}", run_name="__main__", alter_sys=True)
        return
    from benchmarks.cases import CASES
    from benchmarks.harness import Options, run

    known = [*CASES, *MODULES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure, print ratios, and say which moved since the last run on this machine.",
        epilog=f"Each of these has options of its own: {', '.join(OWN)}.",
    )
    parser.add_argument("names", nargs="+", metavar="NAME", choices=known, help=", ".join(known))
    parser.add_argument("--small", action="store_true", help="to see that it runs: the figures mean nothing")
    parser.add_argument("--folder", type=Path, help="where caches lie, on the disk in question")
    parser.add_argument("--json", type=Path, help="a file that gets all figures")
    options = parser.parse_args(given)
    found = []
    for name in options.names:
        described = case = CASES.get(name)
        if case is None:
            described = importlib.import_module(f"benchmarks.{name}")
            case = getattr(described, name)
        print(f"{name}: {(described.__doc__ or '').splitlines()[0]}", flush=True)
        found.append(run(name, case, Options(options.small, options.folder)))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
