"""Course: one storm from its calm to its calm; `python -m storm.course JOB`, in a session of its own."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from helpers import DEADLINE_SECONDS, seqs
from processes import preload, session_processes
from storm import tally
from storm.cast import HANG_SECONDS, Cast
from storm.content import SCHEMA, SEGMENT_ROWS, Pass, rows_of
from storm.readers import HAS_TORCH, OF_TORCH, kinds
from storm.report import Report
from storm.roles import POOL, WRITER
from storm.usage import children_of
from storm.watch import Watch, blocks_on_disk, evicted_but_mapped, used_of_file_system
from storm.weather import Weather, lock_holder

import arrowcache as ac

CAPACITY = 12 << 20
HEADROOM = 0.4  # so that samplers go on beside a dozen readers, of whom the slowest decides
ELDERS = ("in order", "workers", "ranks", "snapshots", "torch", "dataloader")
PARTS = {WRITER: 2, POOL: 1, "reader": 3}


def storm(
    cache_path: Path,
    folder: Path,
    seconds: float,
    seed: int,
    *,
    is_own_file_system: bool,
    is_own_shared_memory: bool,
) -> Report:
    """Create a cache, have many processes at work on it, and look for what is left.

    Args:
        seconds: how long, and until enough has happened to show anything.
        is_own_file_system, is_own_shared_memory: nobody else writes there.
    """
    report, chance = Report(seed, capacity=CAPACITY, kinds=kinds()), random.Random(seed)
    before = used_of_file_system(cache_path.parent)
    shared_memory = set(os.listdir("/dev/shm"))
    cache = ac.Cache.create(cache_path, SCHEMA, CAPACITY, "300KiB", SEGMENT_ROWS, HEADROOM)
    with cache.writer() as writer:
        writer.extend(rows_of(np.arange(8 * SEGMENT_ROWS)))
    cast = Cast(cache_path, folder, chance, PARTS)
    weather = Weather(cast, cache_path / "cache.lock", chance)
    watches = {
        "by st_blocks": Watch(lambda: blocks_on_disk(cache_path), 0.01),
        "mapped files": Watch(lambda: evicted_but_mapped(cache_path), 0.2),
    }
    if is_own_file_system:
        watches["by statvfs"] = Watch(lambda: used_of_file_system(cache_path) - before, 0.002)
    else:
        report.skipped.append("unlinked files that somebody maps: no file system of its own")
    if not is_own_shared_memory:
        report.skipped.append("what is left in /dev/shm: others write there, too")
    if not HAS_TORCH:
        report.skipped.append(f"readers {', '.join(OF_TORCH)}: no torch here")
    try:
        with ExitStack() as watching:
            for watch in watches.values():
                watching.enter_context(watch)
            elders = [cast.start(kind, is_elder=True) for kind in kinds() if kind in ELDERS]
            _until(lambda: all(elder.post.warm.exists() for elder in elders), cast)
            (folder / "begin").touch()
            cast.fill()
            started, calm = time.monotonic(), tally.total(folder / "tallies")
            while not cast.failures and (
                time.monotonic() < started + seconds or not (weather.has_been_bad() and _evicted(cache))
            ):
                time.sleep(chance.uniform(0.02, 0.3))  # the pace of disaster
                weather.blow()
                _bury(cast, weather)
                cast.fill()
            weather.clear_up(all_at_once=True)
            cast.end()
            report.seconds = time.monotonic() - started
    finally:
        for actor in cast.actors:
            actor.child.kill()
    report.blows, report.processes = weather.counts, cast.started
    now = tally.total(folder / "tallies")
    report.counts = {name: n - calm[name] * (name != "longest_ms") for name, n in now.items()}
    report.looks = {name: watch.times for name, watch in watches.items()}
    report.blocks = watches["by st_blocks"].most
    report.file_system = watches["by statvfs"].most if is_own_file_system else 0
    report.defects = [*cast.failures, *itertools.chain.from_iterable(w.found for w in watches.values())]
    report.defects += [
        f"{watch.most} bytes were allocated {name}, of {CAPACITY}"
        for name, watch in watches.items()
        if watch.most > CAPACITY
    ]
    report.evicted = _evicted(cache)
    report.defects += _debris(
        cache, set(os.listdir("/dev/shm")) - shared_memory if is_own_shared_memory else set()
    )
    return report


def _evicted(cache: ac.Cache) -> int:
    """How many segments were."""
    return seqs(cache)[0]


def _bury(cast: Cast, weather: Weather) -> None:
    cast.bury()
    for actor in cast.actors:
        if actor.idle_seconds() > HANG_SECONDS and not weather.is_stopped(actor):
            actor.child.send_signal(signal.SIGUSR1)  # writes to stderr where it hangs
            cast.failures.append(f"{actor.post} did nothing for {actor.idle_seconds():.0f} s")


def _until(condition: Callable[[], bool], cast: Cast) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and not cast.failures:
        cast.bury()
        if time.monotonic() > deadline:
            cast.failures.append("the elders did not come to read")
        time.sleep(0.05)


def _debris(cache: ac.Cache, shared_memory: set[str]) -> list[str]:
    """What is left that a person would have to clean."""
    found = [f"/dev/shm/{name} is left" for name in shared_memory]
    deadline = time.monotonic() + DEADLINE_SECONDS
    while processes := _others():
        if time.monotonic() > deadline:
            found += [f"process {process} is left" for process in processes]
            break
        time.sleep(0.05)
    if holder := lock_holder(cache.path / "cache.lock"):
        found.append(f"process {holder} holds cache.lock")
    stats = cache.stats()
    if stats.leased_bytes or stats.waiting_writers or stats.quarantined:
        found.append(f"something is left in {stats}")
    found += [f"verify() found {problem}" for problem in cache.verify(repair=False)]
    everything = Pass()
    with cache.snapshot() as snapshot:
        rows = snapshot.gather(np.arange(len(snapshot)))
        segments = snapshot.segments
        names = np.repeat([segment.name for segment in segments], [segment.rows for segment in segments])
    everything.add(rows)
    try:
        everything.end(is_whole=True)
    except AssertionError as error:
        ids, count = np.unique(rows["id"], return_counts=True)
        twice = ids[count > 1]
        where = sorted(set(names[np.isin(rows["id"], twice)]))
        found.append(f"{error}: {len(twice)} ids, {twice[:3]}, in {where[:6]} of {sorted(set(names))}")
    with cache.store.locked():
        cache.store.folder.sweep()  # as the next process that seeks room does
    for part in ("incoming", "ranks", "quarantine"):
        found += [f"{part}/{name} is left" for name in os.listdir(cache.path / part)]
    return found


def _others() -> list[str]:
    """The processes of this session, but for this one and multiprocessing's two, which are its children."""
    own = {os.getpid(), *children_of("self")}
    return [text for text in session_processes(os.getsid(0)) if int(text.split()[0]) not in own]


def main() -> None:
    if HAS_TORCH:
        preload("storm.torch_is_ready")
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    faulthandler.dump_traceback_later(job["most_seconds"], exit=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = Path(job["folder"])
    report = storm(
        Path(job["cache"]),
        folder,
        job["seconds"],
        job["seed"],
        is_own_file_system=job["is_own_file_system"],
        is_own_shared_memory=job["is_own_shared_memory"],
    )
    report.save(folder / "report.json")


if __name__ == "__main__":
    main()
