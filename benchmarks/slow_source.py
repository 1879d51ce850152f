"""When does the README's first example have its first batch, if the source takes 30 ms a sample?

Question: the seconds from the start of the script to the first batch of 64 rows of (64, 64) float32, drawn
by four samplers, each of which sleeps 30 ms a row; and how many of them are the library's: the source alone
gives 64 rows to four who draw in 0.48 s, and `import torch` takes what it takes.
Method: the script in a process of its own, in turns with one that only imports torch, five times; the page
cache is warm, the cache is new each time, on the disk of the temporary folder.
`python -m benchmarks.slow_source --full` also has the samplers fill full segments from the start (64 MiB,
4,095 rows, two minutes), as all did before early tasks filled small ones.
Run: `python -m benchmarks.slow_source`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.history import remember
from benchmarks.measure import machine

ROW_SECONDS, SAMPLERS, BATCH_ROWS = 0.03, 4, 64
REPEATS = 5

EXAMPLE = """
import sys, time
import numpy as np
import arrowcache as ac
from arrowcache.torch import Loader


def sample(rng):
    while True:
        time.sleep(ROW_SECONDS)
        yield {"image": rng.random((64, 64), np.float32), "label": int(rng.integers(10))}


RAMP
schema = ac.Schema({"image": ac.Tensor("float32", (64, 64)), "label": ac.Tensor("int64")})
with (
    ac.Cache.create(sys.argv[1], schema, capacity="20GB") as cache,
    ac.SamplerPool(cache, sample, workers=4, progress=False),
    Loader(cache, batch_size=64) as loader,
):
    for batch in loader:
        assert batch["image"].shape == (64, 64, 64)
        print("first batch", flush=True)
        break
"""


def seconds_to_a_line(code: str, *arguments: str) -> float:
    """From the start of a script to its first line of output."""
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE) as script:
        assert script.stdout is not None
        line = script.stdout.readline()
        seconds = time.perf_counter() - started
    assert line.strip(), "the script failed"
    return seconds


def example(*, ramp: bool = True) -> float:
    code = EXAMPLE.replace("ROW_SECONDS", str(ROW_SECONDS)).replace("RAMP", f"sample.ramp = {ramp}")
    with tempfile.TemporaryDirectory() as folder:
        return seconds_to_a_line(code, str(Path(folder, "cache")))


def imports() -> float:
    return seconds_to_a_line("import torch; print('imported', flush=True)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    print(machine())
    source = BATCH_ROWS * ROW_SECONDS / SAMPLERS
    importing, first = [], []
    for _ in range(REPEATS):
        importing.append(imports())
        first.append(example())
        print(f"import torch {importing[-1]:5.2f} s, first batch {first[-1]:5.2f} s", flush=True)
    print(
        f"median: import torch {statistics.median(importing):.2f} s, first batch "
        f"{statistics.median(first):.2f} s ({min(first):.2f} to {max(first):.2f}); "
        f"the source alone {source:.2f} s"
    )
    if options.full:
        print(f"full segments from the start: {example(ramp=False):.1f} s")
    floors = [seconds + source for seconds in importing]
    remember(
        "slow_source",
        {
            "first batch over import torch and the source": statistics.median(first)
            / statistics.median(floors)
        },
    )


if __name__ == "__main__":
    main()
