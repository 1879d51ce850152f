"""Trains each task by each strategy, and says what was reached, and for how many rows of the source.

Question: a model trains on a window of 5, 10 or 25 % of the rows, which are replaced while it trains. Does it
reach the held-out score that it reaches on all rows, for the same number of steps?
Method: one model, one optimizer (Adam, a cosine to 0) and steps of a number; five seeds each.
A row that comes from the source counts as read each time. The strategies:

    all         all rows, epoch after epoch: read once, if they fit, else in each epoch
    static      a random subset of the window's size
    arrowcache  a SamplerPool draws random rows into a cache of the window's size, whose pace gives each row
                `reuse` times; a Loader's epochs read it
    oldest      the same, as a model of it in memory: an epoch is a snapshot; at its end the oldest rows are
                replaced
    reservoir   likewise, but random rows are replaced
    smartcache  MONAI's SmartCacheDataset of the window's size, which replaces 1/reuse of it an epoch

Run: `python -m benchmarks learning`, or `--tasks digits --seeds 5`; it goes on where it was interrupted.
Entries are in benchmarks/learning/results.jsonl, each with commit and version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import arrowcache as ac
from arrowcache.torch import Loader
from benchmarks.harness import machine
from benchmarks.learning.tasks import ROWS, TASKS, Task

BATCH = 64
RESULTS = Path(__file__).with_name("results.jsonl")
FRACTIONS, REUSES = (0.05, 0.1, 0.25), (1, 2, 4, 8, 16, 32, 64)
STRATEGIES = ("arrowcache", "oldest", "reservoir", "smartcache")
_T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's, for intervals over so many seeds

Feed = Iterator[tuple[torch.Tensor, torch.Tensor, int]]
"""Inputs, targets, and how many rows of the source were read so far."""


class Drawn:
    """A sampler of random rows of files, a batch at a time."""

    chunk_rows = BATCH

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, rng: np.random.Generator) -> Iterator[ac.Rows]:
        inputs, targets = (np.load(self._folder / f"{name}.npy", "r") for name in ("inputs", "targets"))
        while True:
            rows = rng.integers(0, len(inputs), BATCH)
            yield ac.Rows(inputs=inputs[rows], targets=targets[rows])


def from_arrowcache(task: Task, window: int, reuse: int, seed: int) -> Feed:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("inputs", "targets"):
            np.save(Path(folder, f"{name}.npy"), getattr(task, name))
        schema = ac.Schema.infer({"inputs": task.inputs[0], "targets": task.targets[0]})
        row_bytes = task.inputs[0].nbytes + task.targets[0].nbytes
        segment_rows = window // 20
        segment_bytes = -(-(segment_rows * row_bytes + 4096) // 4096) * 4096
        capacity = 20 * segment_bytes + (1 << 17)  # and room for what is counted, and notes
        with (
            ac.Cache.create(
                Path(folder, "cache"), schema, capacity, segment_rows=segment_rows, headroom=0
            ) as cache,
            ac.SamplerPool(cache, Drawn(Path(folder)), workers=1, seed=seed),
            Loader(cache, BATCH, shuffle="window", seed=seed) as loader,
        ):
            cache.set_pace(ac.Pace(min_rows=window // 2, samples_per_insert=reuse))
            read = 0
            for number, batch in enumerate(loader.repeat()):
                if number % 50 == 0:
                    read = cache.stats().inserted_rows
                yield batch["inputs"], batch["targets"], read


def from_window(task: Task, window: int, reuse: float, seed: int, choose: str) -> Feed:
    """Epochs over a window in memory; behind each, rows are replaced: the oldest, or random ones."""
    rng, inputs, targets = (
        np.random.default_rng(seed),
        torch.from_numpy(task.inputs),
        torch.from_numpy(task.targets),
    )
    rows = rng.choice(ROWS, window, replace=False)
    read, owed = window, 0.0
    while True:
        order = rng.permutation(window)
        for first in range(0, window - BATCH + 1, BATCH):
            chosen = torch.from_numpy(rows[order[first : first + BATCH]])
            yield inputs[chosen], targets[chosen], read
        owed += window // BATCH * BATCH / reuse
        new = rng.integers(0, ROWS, int(owed))
        owed -= len(new)
        read += len(new)
        rows = _replaced(rows, new, rng if choose == "reservoir" else None)


def _replaced(
    rows: NDArray[np.int64], new: NDArray[np.int64], rng: np.random.Generator | None
) -> NDArray[np.int64]:
    if rng is None:
        return np.concatenate([rows, new])[-len(rows) :]
    rows = rows.copy()
    new = new[: len(rows)]
    rows[rng.choice(len(rows), len(new), replace=False)] = new
    return rows


def from_smartcache(task: Task, window: int, reuse: int, seed: int) -> Feed:
    from monai.data import SmartCacheDataset

    inputs, targets = torch.from_numpy(task.inputs), torch.from_numpy(task.targets)
    data = SmartCacheDataset(
        [*range(ROWS)], None, replace_rate=1 / reuse, cache_num=window, seed=seed, progress=False
    )
    rng, read = np.random.default_rng(seed), window
    while True:
        rows = np.array([data[place] for place in range(window)])[rng.permutation(window)]
        for first in range(0, window - BATCH + 1, BATCH):
            chosen = torch.from_numpy(rows[first : first + BATCH])
            yield inputs[chosen], targets[chosen], read
        data.update_cache()
        read += math.ceil(window / reuse)


def feed(task: Task, strategy: str, window: int, reuse: int, seed: int) -> Feed:
    if strategy == "arrowcache":
        return from_arrowcache(task, window, reuse, seed)
    if strategy == "smartcache":
        return from_smartcache(task, window, reuse, seed)
    if strategy in ("all", "static"):
        return from_window(task, ROWS if strategy == "all" else window, math.inf, seed, "oldest")
    return from_window(task, window, reuse, seed, strategy)


def trained(task: Task, strategy: str, fraction: float, reuse: int, seed: int) -> dict[str, Any]:
    """Train once. Returns: the entry of RESULTS."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), task.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps)
    began, curve, read = time.perf_counter(), [], 0
    batches = feed(task, strategy, int(ROWS * fraction), reuse, seed)
    for step, (inputs, targets, read) in enumerate(itertools.islice(batches, task.steps), 1):
        loss = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (task.steps // 10) == 0:
            model.eval()
            with torch.no_grad():
                curve.append((step, read, round(task.score(model(task.held_out[0]), task.held_out[1]), 3)))
            model.train()
    batches.close()  # type: ignore[attr-defined]
    return {
        "task": task.name, "strategy": strategy, "fraction": fraction, "reuse": reuse, "seed": seed,
        "steps": task.steps, "rows_read": read, "score": curve[-1][2], "curve": curve,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def cases(tasks: list[str], seeds: int, reuse: int) -> Iterator[tuple[str, str, float, int, int]]:
    for name, seed in itertools.product(tasks, range(seeds)):
        yield name, "all", 1.0, 0, seed
        for fraction in FRACTIONS:
            yield name, "static", fraction, 0, seed
            yield from ((name, strategy, fraction, reuse, seed) for strategy in STRATEGIES)
        if name == "digits":
            yield from ((name, "arrowcache", 0.1, each, seed) for each in REUSES if each != reuse)


def report(entries: list[dict[str, Any]]) -> str:
    """The table of RESULTS, in Markdown: means, and intervals that hold the mean with 95 %."""
    lines = [
        "| task | strategy | window | reuse | seeds | rows read, of all rows | score |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((e["task"], e["strategy"], e["fraction"], e["reuse"]) for e in entries)
    for key in keys:
        found = [e for e in entries if (e["task"], e["strategy"], e["fraction"], e["reuse"]) == key]
        scores = [entry["score"] for entry in found]
        mean, share = statistics.mean(scores), statistics.mean(e["rows_read"] for e in found) / ROWS
        spread = ""
        if len(scores) > 1:
            error = statistics.stdev(scores) / math.sqrt(len(scores))
            spread = f" ± {_T95.get(len(scores), 2.0) * error:.2f}"
        task, strategy, fraction, reuse = key
        cells = (
            task,
            strategy,
            f"{fraction:.0%}",
            reuse or "-",
            len(found),
            f"{share:.2f}",
            f"{mean:.2f}{spread}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--reuse", type=int, default=8, help="of the table of strategies")
    parser.add_argument("--small", action="store_true", help="to see that it runs: a few steps, one seed")
    parser.add_argument(
        "--report", action="store_true", help="print the table of what there is, and run nothing"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # more wait for one another where the machine has other work
    named = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    commit = named.stdout.strip()
    entries = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if not options.report:
        done = {(e["task"], e["strategy"], e["fraction"], e["reuse"], e["seed"]) for e in entries}
        made: dict[str, Task] = {}
        for case in cases(options.tasks, 1 if options.small else options.seeds, options.reuse):
            if case in done and not options.small:
                continue
            task = made.get(case[0]) or made.setdefault(case[0], TASKS[case[0]]())
            if options.small:
                object.__setattr__(task, "steps", 50)
            entry = trained(task, *case[1:]) | {
                "commit": commit,
                "version": ac.__version__,
                "machine": machine(),
            }
            print({name: entry[name] for name in (*case_names, "rows_read", "score", "seconds")}, flush=True)
            entries.append(entry)
            if not options.small:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
    print(report(entries))


case_names = ("task", "strategy", "fraction", "reuse", "seed")

if __name__ == "__main__":
    main()
