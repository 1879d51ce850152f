"""What tests of sources share: samples of one, and the content of a task, here and in another process."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from arrowcache.arrow.builder import SegmentBuilder
from arrowcache.arrow.segment import Form
from arrowcache.pickling import pickled
from arrowcache.sampling.reads import Sampler, Threads
from arrowcache.sampling.retries import Retries
from arrowcache.sampling.samples import single
from arrowcache.sampling.task import Task, draw, samples_of

_ELSEWHERE = """
import sys
from arrowcache.pickling import unpickled
from drawing import digest
print(digest(unpickled(sys.stdin.buffer.read()), *map(int, sys.argv[1:])))
"""


def take(source: Any, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The first samples that a source draws."""
    rng = np.random.default_rng(seed)
    samples = single(source(rng), rng)
    try:
        return list(itertools.islice(samples, count))  # type: ignore[arg-type]
    finally:
        samples.close()


def planned(source: Any, rows: int, seed: int = 0) -> dict[str, Any]:
    """The columns of the rows of a plan, in its order."""
    reads = [read() for read in source.plan_reads(np.random.default_rng(seed), rows)]
    return {name: np.concatenate([each[name] for each in reads]) for name in source.schema}


def fill(
    sampler: Sampler,
    task: Task,
    builder: SegmentBuilder,
    check: Callable[[], None] = lambda: None,
    threads: Threads | None = None,
) -> None:
    """Fill a builder with a task's samples, whose reads are not tried again."""
    threads = threads or Threads(task.reads, Retries(0))
    draw(samples_of(sampler, task, threads, builder.form), task, builder, check, check)


def digest(source: Any, number: int, seed: int, rows: int = 50) -> str:
    """The content of task `number`, every byte of its segment, as a digest."""
    builder = SegmentBuilder(Form(source.schema, rows, 1 << 20))
    task = Task("", b"", f"default.{seed}", seed, number, token=0, ramp=False)
    fill(source, task, builder)
    return hashlib.sha256(b"".join(builder.encode().pieces)).hexdigest()


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def run_elsewhere(code: str, source: Any, *words: object) -> str:
    """What a new process prints, to whose input the source travels as to a pool's worker."""
    found = [str(Path(ac.__file__).parents[1]), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        input=pickled(source, "{!r}"), capture_output=True, check=False, timeout=240,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(found)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def require_pure(source: Any) -> None:
    """A task's content is a function of (source, seed, number): again, in between others, and elsewhere."""
    first = digest(source, 3, 7)
    assert digest(source, 4, 7) != first
    assert digest(source, 3, 8) != first
    assert digest(source, 3, 7) == first
    assert run_elsewhere(_ELSEWHERE, source, 3, 7) == first
