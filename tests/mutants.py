"""Mutation testing: `make mutants`. Does a test fail when the code is wrong?

Each mutant is one small change of one file, of cosmic-ray's kinds or a call left out, in a copy of the
package. The unit tests of that file run on it, up to the first that fails. A mutant that fails none survives:
a test is missing, or the change makes no difference. Of one place in the code at most one mutant is drawn.

Left out, as no behavior depends on them: strings, docstrings, annotations, arguments of decorators, what
stands in `raise` or in an f-string, identity for a comparison of values and the other way round, what
compiles to the same or not at all.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.testing import run_tests

ROOT = Path(__file__).parents[1]
READING = "mapped membership order plan portion ranks segment_arrays shuffle snapshot supply window filling"
FILES = [f"reading/{name}.py" for name in READING.split()]
FILES += sorted(f"storage/{path.name}" for path in ROOT.glob("arrowcache/storage/[!_]*.py"))
TESTS = {  # where more than storage/test_x.py has the tests of storage/x.py
    "storage/counters.py": "reading/test_panel.py reading/test_stats.py",
    "storage/ingest.py": "storage/test_origin.py storage/test_writer.py test_cache.py",
    "storage/page.py": "storage/test_progress.py reading/test_panel.py",
    "storage/sizing.py": "test_cache.py storage/test_store.py",
    "reading/membership.py": "reading/test_ranks.py reading/test_loader_ranks.py",
    "reading/order.py": "reading/test_order.py reading/test_plan.py reading/test_resumed_steps.py",
    "reading/plan.py": "reading/test_plan.py reading/test_resumed_steps.py reading/test_resume.py",
    "reading/portion.py": "reading/test_seams.py reading/test_stats.py reading/test_stream.py",
    "reading/ranks.py": "reading/test_ranks.py reading/test_loader_ranks.py",
    "reading/shuffle.py": "reading/test_shuffle.py reading/test_order.py",
    "reading/supply.py": "reading/test_epoch.py reading/test_patience.py reading/test_stats.py",
    "reading/window.py": "reading/test_filling.py",
}
PYTEST = "-m pytest -qx -m 'not slow' --timeout 30 --hypothesis-seed 0 -p no:cacheprovider -p no:xdist"
IDENTITY = re.compile(
    r"_(Is|IsNot)_(?!Is)|(?<!Is)(?<!IsNot)_(Is|IsNot)$"
)  # in place of a value, or the reverse


class LeaveOutCall(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """`call()` as a statement of its own becomes `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "atom_expr" and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.python.tree.Name("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class Mutant(NamedTuple):
    file: str
    line: int
    kind: str
    old: str
    new: str
    code: str


def is_behaviour(leaf: Any, kind: str) -> bool:
    """Tell whether it matters what stands at a place."""
    while leaf.parent is not None:
        if leaf.type in ("fstring", "raise_stmt", "tfpdef"):
            return False
        if leaf.type == "decorator" and kind != "RemoveDecorator":
            return False
        before = leaf.get_previous_sibling()
        if before == "->" or (leaf.parent.type == "annassign" and before == ":"):
            return False
        leaf = leaf.parent
    return True


def drawn(files: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants of files, of each place in them one at most."""
    operators = {name.partition("/")[2]: get_operator(name) for name in operator_names()}
    operators["LeaveOutCall"] = LeaveOutCall
    candidates = []
    codes = {file: (ROOT / "arrowcache" / file).read_text() for file in files}
    for file, code in codes.items():
        tree = get_ast(code)
        for kind, operator in operators.items():
            if operator.arguments() or IDENTITY.search(kind):
                continue
            places = [place[0] for node in ast_nodes(tree) for place in operator().mutation_positions(node)]
            for number, place in enumerate(places):
                if is_behaviour(tree.get_leaf_for_position(place), kind):
                    candidates.append((file, place, kind, number))
    random.Random(seed).shuffle(candidates)
    found: dict[tuple[str, tuple[int, int]], Mutant] = {}
    for file, place, kind, number in candidates:
        if (file, place) in found or len(found) == count:
            continue
        code, changed = codes[file], mutate_code(codes[file], operators[kind](), number)
        try:
            if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(code)):
                continue
            compile(changed, file, "exec")
        except SyntaxError:
            continue
        line = place[0]
        old, new = code.splitlines()[line - 1].strip(), changed.splitlines()[line - 1].strip()
        found[file, place] = Mutant(file, line, kind, old, new, changed)
    print(f"{len(found)} mutants of {len({each[:2] for each in candidates})} places in {len(files)} files")
    return list(found.values())


def tried(copy: Path, file: str, code: str | None, timeout: float) -> str:
    """Run the tests of a file in a copy of the package. `code` is what the file has there meanwhile."""
    path, log = copy / "arrowcache" / file, copy / "log"
    original = path.read_text()
    tests = TESTS.get(file, file.replace("/", "/test_")).replace(" ", " tests/unit/")
    command = f"{sys.executable} {PYTEST} --basetemp {copy}/tmp tests/unit/{tests}"
    # A log, not a pipe: nobody waits for who keeps it open. A mutant may ask for memory without end.
    command = f"cd {copy}; ulimit -v 33554432; exec {command} >log 2>&1"
    try:
        path.write_text(code or original)
        outcome, output = run_tests(f'env PYTHONPATH={copy} sh -c "{command}"', timeout)
    finally:
        path.write_text(original)
    if outcome.name == "SURVIVED":
        return "survived"
    return "timeout" if output == "timeout" or "Timeout" in log.read_text(errors="replace") else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="of files whose path has this, such as reading/order.py")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    mutants = drawn([file for file in FILES if options.only in file], options.count, options.seed)
    counts: dict[str, Counter[str]] = {file: Counter() for file in sorted({each.file for each in mutants})}
    copies, seconds = queue.SimpleQueue[Path](), dict[str, float]()

    def run(file: str, code: str | None) -> str:
        copy, began = copies.get(), time.monotonic()
        try:
            return tried(copy, file, code, max(60.0, 6 * seconds.get(file, 100.0)))
        finally:
            seconds.setdefault(file, time.monotonic() - began)
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        for number in range(options.jobs):
            copy = Path(folder, str(number))
            for name in ("arrowcache", "tests"):
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", copy)
            copies.put(copy)
        for file, came in zip(counts, threads.map(run, counts, [None] * len(counts)), strict=True):
            if came != "survived":
                raise SystemExit(f"the tests of {file} fail without a mutant, too")
        runs = threads.map(run, [each.file for each in mutants], [each.code for each in mutants])
        for mutant, came in zip(mutants, runs, strict=True):
            counts[mutant.file][came] += 1
            if came == "survived":
                print(f"\narrowcache/{mutant.file}:{mutant.line} {mutant.kind}", flush=True)
                print(f"  - {mutant.old}\n  + {mutant.new}", flush=True)
    print(f"\n{'':28}killed timeout survived")
    for file, each in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        gone = each["killed"] + each["timeout"]
        print(f"{file:28}{each['killed']:6}{each['timeout']:8}{each['survived']:9}{gone / each.total():6.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
