"""How many samplers, which capacity, which segments? A simulation, checked against a small case that was run.

Question: samplers read a remote store of given bandwidth and latency, and publish into the caches of training
nodes that read at a given rate: how much arrives, how often is a sample served, how old is it then, and how
much leaves unread? benchmarks/SIZING.md gives the rule that follows.
Method: a discrete simulation (simpy), of segments, with the cache's own rules: the oldest leaves first, never
what an epoch leased; beside samplers an epoch leaves the oldest `headroom` unleased. A worker waits
`latency` a segment, then takes its bytes at `stream` bytes a second, and as fast as its share of the store
allows, which serves pieces in turns. `--check` runs the small case for real, on this machine, with a
SamplerPool whose samplers sleep, and a Loader whose consumer does, and prints both; nothing but sleeping
limits either.
Run: `python -m benchmarks scale` and `python -m benchmarks scale --check`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import simpy

import arrowcache as ac
from arrowcache.storage.eviction import skip_for_headroom
from arrowcache.storage.layout import SegmentInfo
from benchmarks.harness import machine

_PIECES = 8  # of a segment, in turns with those of others
GB, MB, MIB = 1e9, 1e6, 1 << 20


@dataclass(frozen=True)
class Case:
    """Bytes, seconds, and bytes a second."""

    workers: int  # of all sampler nodes
    latency: float  # a segment
    stream: float  # of one worker
    store: float
    nodes: int  # that train
    reading: float  # of each of them
    capacity: float
    segment: float
    seconds: float
    headroom: float = 0.1
    shuffle: str = "rows"


@dataclass
class Node:
    """A training node: its cache, and what became of the segments."""

    case: Case
    changed: simpy.Event
    segments: deque[SegmentInfo] = field(default_factory=deque)
    served: dict[int, int] = field(default_factory=dict)
    leased_from: int | None = None
    published: int = 0
    evicted: int = 0
    unread: int = 0
    read: int = 0
    ages: float = 0.0

    def make_room(self) -> bool:
        while (len(self.segments) + 1) * self.case.segment > self.case.capacity:
            oldest = self.segments[0]
            if self.leased_from is not None and oldest.seq >= self.leased_from:
                return False
            self.segments.popleft()
            self.evicted += 1
            self.unread += not self.served.pop(oldest.seq)
        return True

    def publish(self, now: float) -> None:
        size = int(self.case.segment)
        self.segments.append(SegmentInfo(self.published, 1, "", size, size, now))
        self.served[self.published] = 0
        self.published += 1

    def snapshot(self) -> list[SegmentInfo]:
        listed = list(self.segments)
        free = int(self.case.capacity - len(listed) * self.case.segment)
        least = 2 * self.case.segment if self.case.headroom else 0
        wanted = int(max(self.case.headroom * self.case.capacity, least))
        return listed[skip_for_headroom(listed, free, wanted) :]


def simulate(case: Case) -> dict[str, float]:
    """Figures of the second half, when the caches are full."""
    environment = simpy.Environment()
    store = simpy.Resource(environment, 1)
    nodes = [Node(case, environment.event()) for _ in range(case.nodes)]
    turns = itertools.cycle(nodes)

    def tell(node: Node) -> None:
        node.changed.succeed()
        node.changed = environment.event()

    def sampler() -> Iterator[Any]:
        while True:
            node = next(turns)  # each gets its share
            yield environment.timeout(case.latency)
            for _ in range(_PIECES):
                with store.request() as turn:
                    yield turn
                    yield environment.timeout(case.segment / _PIECES / case.store)
                yield environment.timeout(case.segment / _PIECES / case.stream)
            while not node.make_room():
                yield node.changed
            node.publish(environment.now)
            tell(node)

    def trainer(node: Node) -> Iterator[Any]:
        while True:
            snapshot = node.snapshot()
            if not snapshot:
                yield node.changed
                continue
            node.leased_from = snapshot[0].seq
            for segment in snapshot:
                node.served[segment.seq] += 1
            if case.shuffle == "rows":  # all at once, in effect
                yield environment.timeout(len(snapshot) * case.segment / case.reading / 2)
                node.read += len(snapshot)
                node.ages += sum(environment.now - segment.published for segment in snapshot)
                yield environment.timeout(len(snapshot) * case.segment / case.reading / 2)
            else:  # one after another, each let go of when it is read
                for segment in snapshot:
                    node.leased_from = segment.seq
                    yield environment.timeout(case.segment / case.reading)
                    node.read += 1
                    node.ages += environment.now - segment.published
                    tell(node)
            node.leased_from = None
            tell(node)

    for _ in range(case.workers):
        environment.process(sampler())
    for node in nodes:
        environment.process(trainer(node))
    environment.run(case.seconds / 2)
    before = [replace(node) for node in nodes]
    environment.run(case.seconds)

    def grown(name: str) -> float:
        return sum(
            getattr(node, name) - getattr(then, name) for node, then in zip(nodes, before, strict=True)
        )

    seconds = case.seconds / 2
    return {
        "in": grown("published") * case.segment / seconds / case.nodes,
        "out": grown("read") * case.segment / seconds / case.nodes,
        "served": grown("read") / max(1, grown("published")),
        "age": grown("ages") / max(1, grown("read")),
        "unread": grown("unread") / max(1, grown("evicted")),
    }


def rule(case: Case) -> dict[str, float]:
    """What SIZING.md says, without a simulation."""
    worker = case.segment / (case.latency + case.segment / case.stream)
    arriving = min(case.workers * worker, case.store) / case.nodes
    if case.shuffle == "rows":  # beside an epoch there is room for the headroom
        arriving = min(arriving, case.reading * case.headroom / (1 - case.headroom))
    epoch = case.capacity * (1 - case.headroom) / case.reading if case.shuffle == "rows" else 0.0
    return {
        "in": arriving,
        "out": case.reading,
        "served": case.reading / arriving,
        "age": case.capacity / arriving / 2 + epoch / 2,
        "unread": max(0.0, 1 - case.reading / arriving),
    }


def measure(case: Case) -> dict[str, float]:
    """The same with a real cache; samplers and the consumer sleep for what would take so long."""
    row_bytes = 65536
    rows = int(case.segment) // row_bytes
    a_segment = case.latency + case.segment / case.stream

    def sample(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
        began, row = time.monotonic(), rng.random(row_bytes // 8)
        for number in range(1, rows + 1):
            time.sleep(max(0.0, began + a_segment * number / rows - time.monotonic()))
            yield {"x": row}

    sample.ramp = False  # type: ignore[attr-defined]  # segments as in the simulation

    with tempfile.TemporaryDirectory() as folder:
        schema = {"x": ac.Tensor("float64", (row_bytes // 8,))}
        cache = ac.Cache.create(
            Path(folder) / "cache", schema, int(case.capacity), segment_rows=rows, headroom=case.headroom
        )
        with (
            ac.SamplerPool(cache, sample, workers=case.workers, progress=False),
            ac.Loader(cache, 64, shuffle=case.shuffle, with_ids=True) as loader,
        ):
            began = time.monotonic()
            pace, taken, half, ages = began, 0, None, 0.0
            for batch in loader.repeat():
                taken += len(batch["x"])
                if half is not None:
                    ages += float(batch["_age_seconds"].sum())
                pace = max(pace, time.monotonic() - 0.1) + batch["x"].nbytes / case.reading
                time.sleep(max(0.0, pace - time.monotonic()))
                now = time.monotonic()
                if half is None and now - began > case.seconds / 2:
                    half = now, taken, cache.stats()
                if now - began > case.seconds:
                    break
            assert half is not None
            then, read, before = half
            stats = cache.stats()
        inserted = stats.inserted_rows - before.inserted_rows
        return {
            "in": inserted * row_bytes / (now - then),
            "out": (taken - read) * row_bytes / (now - then),
            "served": (taken - read) / inserted,
            "age": ages / (taken - read),
            "unread": (stats.unread_rows - before.unread_rows)
            / max(1, stats.evicted_rows - before.evicted_rows),
        }


SMALL = Case(
    workers=2, latency=0.2, stream=40 * MB, store=1000 * GB, nodes=1, reading=150 * MB,
    capacity=256 * MIB, segment=4 * MIB, seconds=40,
)  # fmt: skip
LARGE = Case(
    workers=64, latency=0.5, stream=80 * MB, store=5 * GB, nodes=1, reading=2 * GB,
    capacity=1000 * GB, segment=64 * MIB, seconds=8000,
)  # fmt: skip
CHECKS = {
    "small": SMALL,
    "small, headroom 0.3": replace(SMALL, headroom=0.3),
    "small, window": replace(SMALL, shuffle="window"),
}
WINDOW = replace(LARGE, shuffle="window", capacity=100 * GB, seconds=600)
CASES = {
    "rows": LARGE,
    "rows, headroom 0.3": replace(LARGE, headroom=0.3),
    "rows, headroom 0.5": replace(LARGE, headroom=0.5),
    "window, 100 GB, 10 workers": replace(WINDOW, workers=10),
    "window, 100 GB, 40 workers": replace(WINDOW, workers=40),
    "window, 100 GB, 64 workers": WINDOW,
    "window, 10 GB, 10 workers, 4 MiB segments": replace(
        WINDOW, workers=10, segment=4 * MIB, capacity=10 * GB
    ),
    "window, 100 GB, 8 nodes, 256 workers": replace(WINDOW, nodes=8, workers=256, seconds=1200),
}


def line(name: str, figures: dict[str, float]) -> str:
    return (
        f"{name:<40} {figures['in'] / GB:8.3f} {figures['out'] / GB:8.3f} {figures['served']:8.2f} "
        f"{figures['age']:8.1f} {100 * figures['unread']:7.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="run the small case for real")
    options = parser.parse_args()
    print(machine())
    print(f"{'a training node':<40} {'in GB/s':>8} {'out GB/s':>8} {'served':>8} {'age s':>8} {'unread':>8}")
    cases = CHECKS if options.check else CASES
    for name, case in cases.items():
        print(line(f"{name}, by the rule", rule(case)))
        print(line(f"{name}, simulated", simulate(case)))
        if options.check:
            print(line(f"{name}, measured", measure(case)))


if __name__ == "__main__":
    main()
