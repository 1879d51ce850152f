"""How fast do samplers fill a cache from a store that answers 20 ms after it was asked?

Question 1: MB/s into the cache of objects of 1 MiB, and of 64 KiB, by a reader of one's own (http.client):
one read at a time, as samplers had it before, and by reads in threads. The seconds to the first row, and the
private memory of the workers. 2: what is left of the rate where 1 % of the requests take 1 s, and where 1 %
fail; how many tasks are given up. With `hedge` late reads are begun once more. 3: rows/s and MB/s of windows
of .npy and Zarr. 4: MB/s from a Zarr array to batches, whole chunks at a time, in two epochs, beside
insitubatch and xbatcher.
Method: a store in a process of its own on the same processors, of asyncio, which sends from memory.
`store` is its rate for 64 clients that wait for nothing: it is not the limit. Each case draws into a
new cache for seconds, in turns; the rate is of the bytes that are published after the first seconds. Data is
not compressed. Our cold epoch begins with the pool and ends with the last batch of all rows.
Run: `python -m benchmarks reads`, with `--only windows` for some, and `--peers PYTHON` for a Python of 3.12
or newer that has insitubatch and xbatcher. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zarr

import arrowcache as ac
from arrowcache.sampling.sources import ArrayWindows
from benchmarks.fresh import fresh
from benchmarks.harness import machine, remember
from benchmarks.usage import private_bytes

MIB, KIB = 1 << 20, 1 << 10
DELAY_SECONDS, TAIL_SECONDS = 0.02, 1.0
SECONDS, REPEATS, OBJECTS = 5.0, 3, 1 << 20
MEMORY_BYTES = 256 * MIB
_RANGE = re.compile(rb"[Rr]ange: bytes=(\d+)-(\d*)")


class Store:
    """Answers some time after the request, in one thread.

    GET /<bytes>/<number> has so many bytes; /bucket/<path> is a file of `folder`, as S3 has it: HEAD, ranges.
    """

    def __init__(self, delay: float, tail: float, failing: float, folder: str = "") -> None:
        self._delay, self._tail, self._failing, self._folder = delay, tail, failing, folder
        self._memory = memoryview(np.random.default_rng(0).bytes(MEMORY_BYTES))
        self._files: dict[Path, memoryview] = {}

    async def serve(self) -> None:
        """Print the port, and answer until this process is killed."""
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _client(self, requests: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # its worker has ended, or was killed
            while True:
                request = await requests.readuntil(b"\r\n\r\n")
                await asyncio.sleep(TAIL_SECONDS if random.random() < self._tail else self._delay)
                if random.random() < self._failing:
                    answers.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
                    continue
                head, body = self._answer(request)
                answers.write(b"HTTP/1.1 " + head + b"\r\n\r\n")
                answers.write(body)
                await answers.drain()

    def _answer(self, request: bytes) -> tuple[bytes, memoryview]:
        """The head of an answer, and its body."""
        method, target, _ = request.split(b" ", 2)
        if not target.startswith(b"/bucket/"):
            nbytes, number = map(int, target.split(b"/")[1:3])
            place = number * nbytes % (MEMORY_BYTES - nbytes)
            return b"200 OK\r\nContent-Length: %d" % nbytes, self._memory[place : place + nbytes]
        path = Path(self._folder + target.partition(b"?")[0].decode().removeprefix("/bucket"))
        if not path.is_file():
            return b"404 Not Found\r\nContent-Length: 0", self._memory[:0]
        if path not in self._files:
            self._files[path] = np.memmap(path, np.uint8, "r").data
        file = self._files[path]
        first, end, told = 0, len(file), b"200 OK"
        if asked := _RANGE.search(request):
            first, end = int(asked[1]), min(int(asked[2] or end) + 1, end)
            told = b"206 Partial Content\r\nContent-Range: bytes %d-%d/%d" % (first, end - 1, len(file))
        head = b'%s\r\nContent-Length: %d\r\nETag: "1"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT'
        return head % (told, end - first), file[first:end] if method == b"GET" else file[:0]


@contextmanager
def store(
    delay: float = DELAY_SECONDS, tail: float = 0.0, failing: float = 0.0, folder: str = ""
) -> Iterator[int]:
    """A store in a process of its own. Yields its port."""
    command = [sys.executable, "-m", "benchmarks.reads"]
    command += ["--serve", str(delay), str(tail), str(failing), folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Objects:
    """A sampler of objects, one at a time, or by reads. Each thread has a connection of its own."""

    def __init__(self, port: int, nbytes: int, *, by_reads: bool, hedge: bool) -> None:
        self.port, self.nbytes, self.by_reads, self.hedge = port, nbytes, by_reads, hedge

    def read(self, number: int) -> dict[str, Any]:
        kept = vars(threading.current_thread())  # a threading.local of this module cannot be pickled
        connection = kept.get("connection")
        if connection is None or connection.port != self.port:
            connection = kept["connection"] = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/{self.nbytes}/{number}")
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise OSError(f"HTTP status {answer.status}")
        return {"x": np.frombuffer(data, np.uint8), "id": number}

    def __call__(self, rng: np.random.Generator) -> Iterator[Any]:
        while True:
            number = int(rng.integers(OBJECTS))
            yield partial(self.read, number) if self.by_reads else self.read(number)


def memory_of_workers() -> int:
    """The private bytes of the pool's processes together."""
    children = psutil.Process().children()
    workers = [child for child in children if "arrowcache.sampling" in " ".join(child.cmdline())]
    return sum(private_bytes(worker.pid) for worker in workers)


def filled(
    sampler: Any, schema: ac.Schema, workers: int, reads: int, seconds: float = SECONDS, settle: float = 1
) -> dict[str, float]:
    """MB/s, rows/s, seconds to the first row, MiB of the workers, tasks tried again and given up.

    Args:
        reads: 0: one at a time.
        settle: seconds after the first row that are not counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache = ac.Cache.create(f"{folder}/cache", schema, "4GB", "32MiB")
        began = time.perf_counter()
        with ac.SamplerPool(cache, sampler, workers=workers, reads=reads or 1, progress=False) as pool:
            pool.wait(rows=1, timeout=60)
            first = time.perf_counter() - began
            time.sleep(settle)
            before, since = pool.stats(), time.perf_counter()
            time.sleep(seconds)
            memory = memory_of_workers()
            after, until = pool.stats(), time.perf_counter()
        return {
            "MB/s": (after.bytes - before.bytes) / (until - since) / 1e6,
            "rows/s": (after.rows - before.rows) / (until - since),
            "first row, s": first, "MiB": memory / MIB, "retries": after.retries, "given up": after.failures,
            "hedges": after.hedges,
        }  # fmt: skip


def objects(port: int, nbytes: int, workers: int, reads: int, hedge: bool = False) -> dict[str, float]:
    schema = ac.Schema({"x": ac.Tensor("uint8", (nbytes,)), "id": ac.Tensor("int64")})
    return filled(Objects(port, nbytes, by_reads=reads > 0, hedge=hedge), schema, workers, reads)


def rate_of_the_store() -> float:
    """MB/s of 64 threads that read objects of 1 MiB, and do nothing with them."""
    with store(delay=0) as port:
        read, ends = [0] * 64, time.perf_counter() + 3

        def client(number: int) -> None:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                buffer = bytearray(MIB)
                while time.perf_counter() < ends:
                    connection.sendall(b"GET /%d/%d HTTP/1.1\r\n\r\n" % (MIB, read[number]))
                    left = MIB + len(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n")
                    while left:
                        left -= connection.recv_into(buffer, min(left, MIB))
                    read[number] += 1

        with ThreadPoolExecutor(len(read)) as threads:
            list(threads.map(client, range(len(read))))
        return sum(read) * MIB / 3 / 1e6


CASES: dict[str, tuple[dict[str, Any], int, int, int] | tuple[dict[str, Any], int, int, int, bool]] = {
    "1 MiB, one at a time": ({}, MIB, 2, 0),
    "1 MiB, reads=32": ({}, MIB, 2, 32),
    "64 KiB, one at a time": ({}, 64 * KIB, 2, 0),
    "64 KiB, reads=64": ({}, 64 * KIB, 2, 64),
    "1 MiB, reads=32, 1 % take 1 s": ({"tail": 0.01}, MIB, 2, 32),
    "1 MiB, reads=32, 1 % take 1 s, hedge": ({"tail": 0.01}, MIB, 2, 32, True),
    "1 MiB, reads=32, 1 % fail": ({"failing": 0.01}, MIB, 2, 32),
    "1 MiB, one at a time, 1 % fail": ({"failing": 0.01}, MIB, 2, 0),
}


def uri(port: int, name: str) -> str:
    return f"s3://k:s@bucket/{name}?endpoint_override=127.0.0.1%3A{port}&scheme=http&region=us-east-1"


def write_arrays(folder: str) -> None:
    """256 MiB as .npy, and as Zarr by three forms of chunks; 4 GiB of zeros as .npy."""
    np.lib.format.open_memmap(f"{folder}/sparse.npy", "w+", np.float32, (1 << 30,))
    flat = np.random.default_rng(0).random(64 * MIB, np.float32)
    np.save(f"{folder}/x.npy", flat)
    options: dict[str, Any] = {"compressors": None}
    zarr.create_array(f"{folder}/small.zarr", data=flat, chunks=(16 * KIB,), **options)
    zarr.create_array(f"{folder}/large.zarr", data=flat, chunks=(256 * KIB,), **options)
    group = zarr.open_group(f"{folder}/rows.zarr", mode="w")
    rows = flat.reshape(-1, 4096)
    names = ("row", "value")  # which xarray wants
    group.create_array("x", data=rows, chunks=(64, 4096), dimension_names=names, **options)
    zarr.consolidate_metadata(f"{folder}/rows.zarr")


WINDOWS: dict[str, tuple[str, tuple[int, ...], int, dict[str, Any]]] = {
    ".npy, windows of 4 KiB": ("x.npy", (1024,), 32, {}),
    "the same of 4 GiB, reads=128": ("sparse.npy", (1024,), 128, {}),
    "Zarr, chunks of 64 KiB, windows of 4": ("small.zarr", (1024,), 32, {}),
    "Zarr, chunks of 1 MiB, windows of 256 KiB": ("large.zarr", (64 * KIB,), 32, {}),
    "the same, 4 windows a chunk": ("large.zarr", (64 * KIB,), 32, {"windows_per_chunk": 4}),
}
"""The file, the window, the reads of each of two workers, and further arguments."""


def windows(folder: str) -> None:
    """Two workers. A pool's first segments are small, and waste reads: 8 s settle them."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WINDOWS}
    for _ in range(REPEATS):
        for name, (file, shape, reads, options) in WINDOWS.items():
            with store(folder=folder) as port:
                source = ArrayWindows([uri(port, file)], shape, **options)
                found[name].append(filled(source, source.schema, 2, reads, settle=8))
    tell(found)


def to_batches(folder: str, python: str) -> None:
    """Batches of 64 rows of 16 KiB, in chunks of 1 MiB."""
    found: dict[str, list[dict[str, float]]] = {"arrowcache": []}
    for _ in range(REPEATS):
        with store(folder=folder) as port:
            found["arrowcache"].append(whole_chunks(uri(port, "rows.zarr/x")))
        for peer in ("insitubatch", "xbatcher") if python else ():
            with store(folder=folder) as port:
                where = f"http://127.0.0.1:{port}", "bucket/rows.zarr"
                told = fresh("benchmarks.zarr_peers:measured", peer, *where, python=python)
                found.setdefault(peer, []).append(told)
    tell(found)


def whole_chunks(source_uri: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        source = ArrayWindows([source_uri], (1, 4096), windows_per_chunk=64)
        cache = ac.Cache.create(f"{folder}/cache", source.schema, "1GB", "32MiB")
        with (
            ac.SamplerPool(cache, source, workers=2, segments=17, reads=32, progress=False) as pool,
            ac.Loader(cache, 64) as loader,
        ):
            next(iter(loader))
            first = time.perf_counter() - began
            pool.wait(timeout=60)
            assert cache.stats().rows >= 64 * MIB // 4096
            nbytes = sum(each.nbytes for batch in loader for each in batch.values())
            cold = nbytes / (time.perf_counter() - began) / 1e6
            since = time.perf_counter()
            nbytes = sum(each.nbytes for batch in loader for each in batch.values())
            second = nbytes / (time.perf_counter() - since) / 1e6
        return {"first batch, s": first, "cold, MB/s": cold, "second epoch, MB/s": second}


def own_reader() -> None:
    print(f"store: {rate_of_the_store():.0f} MB/s")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(REPEATS):
        for name, (options, *given) in CASES.items():
            with store(**options) as port:
                found[name].append(objects(port, *given))  # type: ignore[arg-type]  # a tuple of each
    tell(found)
    one, many = (found[f"1 MiB, {how}"] for how in ("one at a time", "reads=32"))
    remember("reads", {"1 MiB": [b["MB/s"] / a["MB/s"] for a, b in zip(one, many, strict=True)]})


def tell(found: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of each case."""
    for name, runs in found.items():
        medians = {what: statistics.median(run[what] for run in runs) for what in runs[0]}
        print(
            f"{name:>42}: {', '.join(f'{value:.4g} {what}' for what, value in medians.items())}", flush=True
        )


def main(only: str | None, python: str) -> None:
    print(machine())
    if only in (None, "objects"):
        own_reader()
    with tempfile.TemporaryDirectory() as folder:
        if only != "objects":
            write_arrays(folder)
        if only in (None, "windows"):
            windows(folder)
        if only in (None, "batches"):
            to_batches(folder, python)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=4)
    parser.add_argument("--only", choices=["objects", "windows", "batches"])
    parser.add_argument("--peers", metavar="PYTHON", default="")
    asked = parser.parse_args()
    if asked.serve:
        delay, tail, failing, folder = asked.serve
        asyncio.run(Store(float(delay), float(tail), float(failing), folder).serve())
    main(asked.only, asked.peers)
