"""Mutation testing: `make mutants`. Does a test fail when the code is wrong?

Each mutant is one small change of one file, of cosmic-ray's kinds or a call left out, in a copy of the
package. The tests of that file run on it, up to the first that fails; those marked slow only where the
quick ones notice nothing. A mutant that fails none survives: a test is missing, or the change makes no
difference. Of one place in the code at most one mutant is drawn.

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
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.testing import run_tests

ROOT = Path(__file__).parents[1]
READING = "assembly columns gather mapped once order plan ranks shuffle slots snapshot stream"
FILES = ["process.py", *(f"reading/{name}.py" for name in f"{READING} available_rows".split())]
for folder in ("storage", "torch", "sampling", "sampling/sources"):
    FILES += sorted(f"{folder}/{path.name}" for path in ROOT.glob(f"arrowcache/{folder}/[!_]*.py"))
FORKS = "../fork/test_inherited.py"
TESTS = {  # where it is not folder/test_x.py alone that tests folder/x.py
    "process.py": "test_process.py ../multiprocess/test_worker_group.py",
    "storage/counters.py": f"storage/test_counters.py reading/test_stats.py {FORKS}",
    "storage/folder.py": "storage/test_folder.py storage/test_store.py",
    "storage/layout.py": "storage/test_layout.py storage/test_usage.py storage/test_recovery.py "
    "storage/test_dataset.py",
    "storage/lease.py": f"storage/test_lease.py storage/test_store.py {FORKS}",
    "storage/locks.py": f"storage/test_locks.py storage/test_store.py {FORKS}",
    "storage/mapping.py": f"storage/test_mapping.py reading/test_unreadable.py {FORKS}",
    "storage/notes_log.py": "storage/test_notes_log.py storage/test_row_notes.py reading/test_row_weights.py",
    "storage/recovery.py": "storage/test_recovery.py test_cache.py",
    "storage/settings.py": "storage/test_settings.py test_cache.py storage/test_store.py",
    "storage/store.py": "storage/test_store.py storage/test_recovery.py storage/test_ingest.py "
    "storage/test_writer.py reading/test_pacing.py",
    "storage/writer.py": f"storage/test_writer.py {FORKS}",
    "storage/used_rows.py": "reading/test_once.py",
    "storage/verification.py": "storage/test_verification.py reading/test_unreadable.py",
    "reading/columns.py": "reading/test_columns.py reading/test_column_functions.py reading/test_view.py "
    "reading/test_gather.py",
    "reading/gather.py": "reading/test_gather.py reading/test_read_mode.py reading/test_disk_reads.py "
    "reading/test_snapshot.py",
    "reading/mapped.py": f"reading/test_mapped.py {FORKS}",
    "reading/order.py": "reading/test_order.py reading/test_plan.py",
    "reading/plan.py": "reading/test_plan.py reading/test_resume.py",
    "reading/assembly.py": "reading/test_seams.py reading/test_stats.py reading/test_stream.py",
    "reading/ranks.py": "reading/test_ranks.py reading/test_loader_ranks.py",
    "reading/shuffle.py": "reading/test_shuffle.py reading/test_order.py",
    "reading/slots.py": "reading/test_slots.py reading/test_worker_slots.py reading/test_gather.py",
    "reading/snapshot.py": f"reading/test_snapshot.py reading/test_view.py {FORKS}",
    "reading/stream.py": "reading/test_stream.py reading/test_idle_snapshots.py reading/test_seams.py "
    "reading/test_ends.py reading/test_repeat.py reading/test_stats.py",
    "reading/available_rows.py": "reading/test_epoch.py reading/test_patience.py reading/test_stats.py",
}
OF_TESTS = {  # of several files each: those of tests/adapters/test_torch_x.py, and of tests/unit/sampling
    "backend transfers": "torch/backend torch/device torch/device_copier torch/pinned_memory torch/structure",
    "cached": "torch/cached_dataset torch/item_source",
    "cached_loader": "torch/cached_epochs torch/item_workers torch/randomness",
    "cached_items": "torch/codecs torch/collation torch/images torch/leaves",
    "dataset": "torch/batch_sampler torch/dataset torch/snapshots",
    "loader loader_device": "torch/distributed torch/tensors",
    "loader loader_device cached_loader": "torch/loader",
    "packed": "torch/packed_loader",
    "cached_stream": "torch/cached_stream torch/item_cache torch/stream_shards",
    "cached_loader dataset": "torch/worker_processes",
    "lazy_batch dataset": "torch/lazy_batch",
    "pool sources/items": "sampling/executors",
    "pool": "sampling/dispatcher sampling/pool sampling/workers",
    "task": "sampling/task",
    "reads task": "sampling/samples",
    "sources/mix_and_map reads skipped": "sampling/mixture",
    "sources/items": "sampling/sources/items",
    "sources/mix_and_map": "sampling/sources/source",
    "sources/parquet": "sampling/sources/parquet",
    "sources/shards": "sampling/sources/shards",
    "sources/store": "sampling/sources/getter sampling/sources/object_store sampling/retries",
    "sources/windows sources/plans": "sampling/sources/arrays sampling/sources/hdf5 "
    "sampling/sources/windows sampling/sources/zarr3",
}
for names, files in OF_TESTS.items():
    for file in files.split():
        place = "../adapters/test_torch_" if file.startswith("torch/") else "sampling/test_"
        tests = (f"{place}{name}.py" for name in names.split())
        TESTS[f"{file}.py"] = " ".join(tests).replace("test_sources/", "sources/test_")
PYTEST = "-m pytest -qx --timeout 60 --hypothesis-seed 0 -p no:cacheprovider -p no:xdist"
# Identity in place of a value, or the reverse.
IDENTITY = re.compile(r"_(Is|IsNot)_(?!Is)|(?<!Is)(?<!IsNot)_(Is|IsNot)$")


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


def is_behavior(leaf: Any, kind: str) -> bool:
    """Tell whether it matters what stands at a place."""
    while leaf.parent is not None:
        if leaf.type in ("fstring", "raise_stmt", "tfpdef") or leaf == "TYPE_CHECKING":
            return False
        if leaf.type == "decorator" and kind != "RemoveDecorator":
            return False
        before = leaf.get_previous_sibling()
        if before == "->" or (leaf.parent.type == "annassign" and before == ":"):
            return False
        if leaf.type == "if_stmt" and leaf.children[1] == "TYPE_CHECKING":
            return False
        leaf = leaf.parent
    return True


def drawn(files: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw places in files, each as likely as any other, and a mutant of each."""
    operators = {name.partition("/")[2]: get_operator(name) for name in operator_names()}
    operators["LeaveOutCall"] = LeaveOutCall
    places: dict[tuple[str, Any], list[tuple[str, int]]] = {}
    codes = {file: (ROOT / "arrowcache" / file).read_text() for file in files}
    for file, code in codes.items():
        tree = get_ast(code)
        nodes = [*ast_nodes(tree)]
        for kind, operator in operators.items():
            if operator.arguments() or IDENTITY.search(kind):
                continue
            found = [place[0] for node in nodes for place in operator().mutation_positions(node)]
            for number, place in enumerate(found):
                if is_behavior(tree.get_leaf_for_position(place), kind):
                    places.setdefault((file, place), []).append((kind, number))
    rng, mutants = random.Random(seed), list[Mutant]()
    for file, place in rng.sample([*places], len(places)):
        kind, number = rng.choice(places[file, place])
        code, changed = codes[file], mutate_code(codes[file], operators[kind](), number)
        try:
            is_same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(code))
            compile(changed, file, "exec")
        except SyntaxError:
            continue
        if not is_same and len(mutants) < count:
            old, new = (text.splitlines()[place[0] - 1].strip() for text in (code, changed))
            mutants.append(Mutant(file, place[0], kind, old, new, changed))
        if len(mutants) == count:
            break
    print(f"{len(mutants)} mutants, of {len(places)} places in {len(files)} files", flush=True)
    return mutants


def tests_of(file: str) -> list[str]:
    """Return the paths of a file's tests."""
    return [f"tests/unit/{each}" for each in TESTS.get(file, file.replace("/", "/test_")).split()]


def tried(copy: Path, file: str, code: str | None, mark: str, timeout: float) -> str:
    """Run a file's tests of a mark in a copy of the package. `code` is what the file has there meanwhile."""
    path, log = copy / "arrowcache" / file, copy / "log"
    original = path.read_text()
    tests = " ".join(tests_of(file))
    command = f"{sys.executable} {PYTEST} -m '{mark}' --basetemp {copy}/tmp {tests}"
    # A log, not a pipe: nobody waits for who keeps it open. A mutant may ask for memory without end.
    command = f"cd {copy}; ulimit -v 33554432; {command} >log 2>&1 || [ $? = 5 ]"  # 5: no test has the mark
    try:
        path.write_text(code or original)
        outcome, output = run_tests(f'env PYTHONPATH={copy} sh -c "{command}"', timeout)
    finally:
        path.write_text(original)
    if outcome.name == "SURVIVED":
        return "survived"
    hung = output == "timeout" or re.search(r"Timeout \(>|\+ Timeout \+", log.read_text(errors="replace"))
    return "timeout" if hung else "killed"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="of files whose path has this, such as reading/order.py")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    for file in FILES:
        if missing := [each for each in tests_of(file) if not (ROOT / each).exists()]:
            raise SystemExit(
                f"{file} is to have its tests in {', '.join(missing)}: name them in tests/mutants.py"
            )
    left = drawn([file for file in FILES if options.only in file], options.count, options.seed)
    counts: dict[str, Counter[str]] = {each.file: Counter() for each in sorted(left)}
    copies, seconds = queue.SimpleQueue[Path](), dict[str, float]()

    def run(file: str, code: str | None, mark: str) -> str:
        copy, began = copies.get(), time.monotonic()
        try:
            return tried(copy, file, code, mark, 60 + 5 * seconds.get(mark + file, 60))
        finally:
            seconds.setdefault(mark + file, time.monotonic() - began)
            copies.put(copy)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        for number in range(options.jobs):
            copy = Path(folder, str(number))
            for name in ("arrowcache", "tests", "benchmarks"):  # of which tests share some
                without = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / name, copy / name, ignore=without)
            shutil.copy(ROOT / "pyproject.toml", copy)
            copies.put(copy)
        for mark, killed in (("not slow", "killed"), ("slow", "slowly")):
            files = sorted({each.file for each in left})
            for file, came in zip(files, threads.map(run, files, repeat(None), repeat(mark)), strict=True):
                if came != "survived":
                    raise SystemExit(f"the tests of {file} that are {mark} fail without a mutant, too")
            runs = threads.map(run, [m.file for m in left], [m.code for m in left], repeat(mark))
            survivors = []
            for mutant, came in zip(left, runs, strict=True):
                print({"survived": "S", "timeout": "T"}.get(came, "."), end="", flush=True)
                if came == "survived":
                    survivors.append(mutant)
                else:
                    counts[mutant.file][killed if came == "killed" else came] += 1
            left = survivors
    for mutant in sorted(left):
        counts[mutant.file]["survived"] += 1
        print(f"\narrowcache/{mutant.file}:{mutant.line} {mutant.kind}\n  - {mutant.old}\n  + {mutant.new}")
    columns = ("killed", "slowly", "timeout", "survived")
    print(f"\n\n{'':28}" + "".join(f"{column:>9}" for column in columns))
    for file, each in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        rate = 1 - each["survived"] / each.total()
        print(f"{file:28}" + "".join(f"{each[column]:9}" for column in columns) + f"{rate:6.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
