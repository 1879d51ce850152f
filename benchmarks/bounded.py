"""A control group of memory, and one measurement in a process within it and a time: for `beyond_memory`.

The process is started as `python -c START <group> <request>`: it enters the group before it imports anything,
says READY when all is open, and begins with a line on its input. The last line of its output is one of JSON.
Requests are made for the interpreters of peers, too: arrowcache is imported where it is measured.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.usage import read_bytes, status_bytes

if TYPE_CHECKING:
    from typing import Self

START = (
    "import sys; open(sys.argv[1], 'w').write('0'); "
    "from benchmarks.bounded import main; main(sys.argv[2])"
)  # fmt: skip
PAGE_BYTES, PIECE_BYTES, AHEAD_BYTES, BLOCK_BYTES = 4096, 128 << 10, 8 << 20, 1 << 20
DEPTH = 64
_SAMPLER_BATCH_BYTES = 4 << 20
_ROOT = Path("/sys/fs/cgroup")
_END_SECONDS = 10.0


class ControlGroup:
    """A new group below this process' own, version 2 or 1, which ends with all processes in it.

    A context manager: a small machine within this one. The page cache that a process brings in counts as its
    group's, too. Making one needs root, or a group that was handed over.

    Raises: OSError: none can be made here.
    """

    def __init__(self, limit_bytes: int) -> None:
        parent, files = _parent()
        self.folder = parent / f"arrowcache-{uuid.uuid4().hex}"
        self.folder.mkdir()
        try:
            for name, value in files.items():
                with suppress(FileNotFoundError):  # swap may be none of this kernel's
                    (self.folder / name).write_text(value.format(limit_bytes))
        except BaseException:
            self.folder.rmdir()
            raise

    @property
    def entrance(self) -> str:
        """A process that writes 0 into this file is in the group."""
        return str(self.folder / "cgroup.procs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + _END_SECONDS
        while True:
            for pid in map(int, Path(self.entrance).read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                self.folder.rmdir()
                return
            except OSError:  # who was killed is there for a moment
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _parent() -> tuple[Path, dict[str, str]]:
    """Where a group can be made, and what is written into its files."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            swappiness = {"memory.swappiness": "0"}
            return _ROOT / "memory" / path.lstrip("/"), {"memory.limit_in_bytes": "{}"} | swappiness
        parent = _ROOT / path.lstrip("/")
        with suppress(OSError):
            if not controllers and "memory" in (parent / "cgroup.subtree_control").read_text().split():
                return parent, {"memory.max": "{}", "memory.swap.max": "0"}
    raise OSError("this process has no control group of memory in which another can be made")


def random_rate(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second of rows at random places of files, `DEPTH` at a time; no row comes from memory.

    Rows begin at pages, as those of wide columns do. Where the file system has no O_DIRECT, each row is
    dropped from the page cache before it is read.
    """
    size, seconds = request["row_bytes"], request["seconds"]
    length = size + -size % PAGE_BYTES
    files = [path for path in files_of(request["folder"]) if path.stat().st_size >= length]
    done, is_direct, until = [0] * DEPTH, True, 0.0
    descriptors = []
    for path in files:
        try:
            descriptors.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            is_direct = False
            descriptors.append(os.open(path, os.O_RDONLY))
    places = [path.stat().st_size // PAGE_BYTES - length // PAGE_BYTES + 1 for path in files]

    def read(number: int) -> None:
        chance, buffer = random.Random(number), mmap.mmap(-1, length)
        while time.perf_counter() < until:
            file = chance.randrange(len(files))
            start = chance.randrange(places[file]) * PAGE_BYTES
            if not is_direct:
                os.posix_fadvise(descriptors[file], start, length, os.POSIX_FADV_DONTNEED)
            os.preadv(descriptors[file], [buffer], start)
            done[number] += size

    ready()
    begun = time.perf_counter()
    until = begun + seconds
    with ThreadPoolExecutor(DEPTH) as threads:
        list(threads.map(read, range(DEPTH)))
    return {"rate": sum(done) / (time.perf_counter() - begun), "is_direct": is_direct}


def sequential_rate(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second of cold files in order, asked for in pieces of 128 KiB, 8 MiB ahead."""
    ready()
    begun, done = time.perf_counter(), 0
    buffer = bytearray(BLOCK_BYTES)
    for path in files_of(request["folder"]):
        with path.open("rb", buffering=0) as file:
            length, asked = path.stat().st_size, 0
            for start in range(0, length, BLOCK_BYTES):
                while asked < min(length, start + AHEAD_BYTES):
                    os.posix_fadvise(file.fileno(), asked, PIECE_BYTES, os.POSIX_FADV_WILLNEED)
                    asked += PIECE_BYTES
                done += file.readinto(buffer) or 0
                if time.perf_counter() - begun > request["seconds"]:
                    return {"rate": done / (time.perf_counter() - begun)}
    return {"rate": done / (time.perf_counter() - begun)}


def cache_rate(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second that `arrowcache.torch.Loader` delivers, epoch after epoch.

    Of the segments below `stop`, if that is said: others may be written meanwhile. Half resident: of as many
    segments as take twice the page cache that the group has room for, which were read once before.
    """
    import arrowcache as ac
    from arrowcache.torch import Loader

    stop = request.get("stop")
    with ac.Cache.open(request["folder"]) as cache:
        if request.get("is_half"):
            with cache.snapshot() as snapshot:
                segments = sorted(snapshot.segments, key=lambda segment: segment.seq)
            room = request["group_bytes"] - status_bytes("RssAnon")
            stop, total = 0, 0
            while stop < len(segments) and total < 2 * room:
                total += segments[stop].nbytes
                stop += 1
            for segment in segments[:stop]:
                read_whole(cache.path / "segments" / segment.name)
        chosen = None if stop is None else (lambda segment: segment.seq < stop)
        with Loader(
            cache, request["batch_rows"], shuffle=request["shuffle"], where=chosen, paced=False
        ) as loader:
            found = delivered(loader, request["seconds"])
            stats = loader.stats()
            return found | {"bottleneck": stats.bottleneck}


def peer_rate(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second that a peer delivers in random order, with no worker processes."""
    from benchmarks.peers.case import adapter_of
    from benchmarks.peers.workload import Workload

    workload = Workload(**request["workload"])
    with adapter_of(request["peer"])(Path(request["folder"]), workload) as epochs:
        return delivered(epochs, request["seconds"])


def sampler_rate(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second that a writer publishes, which is held to `wanted` of them."""
    import numpy as np

    import arrowcache as ac

    with ac.Cache.open(request["folder"]) as cache:
        kind = cache.schema["x"]
        row_bytes, wanted = request["row_bytes"], request["wanted"]
        count = max(1, _SAMPLER_BATCH_BYTES // row_bytes)
        values = np.random.default_rng(5).random((count, row_bytes // 4), np.float32)
        rows = values if isinstance(kind, ac.Tensor) else list(values)
        ready()
        begun, done = time.perf_counter(), 0
        with cache.writer() as writer:
            while (passed := time.perf_counter() - begun) < request["seconds"]:
                if done > wanted * passed:
                    time.sleep(done / wanted - passed)
                writer.extend(x=rows, y=np.arange(count))
                done += values.nbytes
        return {"rate": done / (time.perf_counter() - begun)}


def delivered(epochs: Iterable[Any], seconds: float) -> dict[str, Any]:
    """Take batches for so long, at least one: dicts, or a peer's pairs."""
    ready()
    before, begun, ended, nbytes, worst = read_bytes(), time.perf_counter(), 0.0, 0, 0.0
    while not nbytes or ended < seconds:
        for batch in epochs:
            nbytes += nbytes_of(batch["x"] if isinstance(batch, dict) else batch[0])
            now = time.perf_counter() - begun
            worst, ended = max(worst, now - ended), now
            if ended >= seconds:
                break
    return {"rate": nbytes / ended, "read_for_one": (read_bytes() - before) / nbytes, "worst_gap": worst}


def nbytes_of(x: Any) -> int:
    """Bytes of an array, of a tensor, or of what a ragged one holds."""
    return int((x.values() if getattr(x, "is_nested", False) else x).nbytes)


def read_whole(path: Path) -> None:
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def files_of(folder: str) -> list[Path]:
    """The files of a data set, in order; small ones are no data."""
    return sorted(
        path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size > 1 << 20
    )


def ready() -> None:
    print("READY", flush=True)
    sys.stdin.readline()


ROLES = {
    "random": random_rate,
    "sequential": sequential_rate,
    "cache": cache_rate,
    "peer": peer_rate,
    "sampler": sampler_rate,
}


def main(text: str) -> None:
    request = json.loads(text)
    found = ROLES[request["role"]](request)
    print(json.dumps(found), flush=True)
    os._exit(0)  # whatever a peer still has at work
