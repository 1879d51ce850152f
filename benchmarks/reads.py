"""How fast do samplers fill a cache from a store that answers 20 ms after it was asked?

Question 1: MB/s into the cache of objects of 1 MiB, and of 64 KiB, by a reader of one's own (http.client):
one read at a time, as samplers had it before, and by reads in threads. The seconds to the first row, and the
private memory of the workers. 2: what is left of the rate where 1 % of the requests take 1 s, and where 1 %
fail; how many tasks are given up. With `hedge` late reads are begun once more.
Method: a store in a process of its own on the same processors, which waits by epoll and sends from memory.
`store` is its rate for 64 clients that wait for nothing: it is not the limit. Each case draws into a
new cache for seconds, in turns; the rate is of the bytes that are published after the first second.
Run: `python -m benchmarks.reads`. Results: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import heapq
import http.client
import os
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import psutil

import arrowcache as ac
from benchmarks.history import remember
from benchmarks.measure import machine
from benchmarks.peers.tree import private_bytes

MIB, KIB = 1 << 20, 1 << 10
DELAY_SECONDS, TAIL_SECONDS = 0.02, 1.0
SECONDS, REPEATS, OBJECTS = 5.0, 3, 1 << 20
MEMORY_BYTES = 256 * MIB


class Store:
    """Answers GET /<bytes>/<number> by that many bytes, some time after the request. One thread."""

    def __init__(self, delay: float, tail: float, failing: float) -> None:
        self._delay, self._tail, self._failing = delay, tail, failing
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._memory = os.memfd_create("objects")
        os.write(self._memory, np.random.default_rng(0).bytes(MEMORY_BYTES))
        self._events = selectors.EpollSelector()
        self._waiting: list[tuple[float, int, socket.socket, bytes]] = []  # heap: when, number, request
        self._sending: dict[socket.socket, list[int]] = {}  # offset and bytes left of each object
        self._number = 0

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> None:
        self._listener.setblocking(False)
        self._events.register(self._listener, selectors.EVENT_READ)
        while True:
            wait = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for key, event in self._events.select(wait):
                client: Any = key.fileobj
                if client is self._listener:
                    self._accept()
                elif event & selectors.EVENT_WRITE:
                    self._send(client)
                else:
                    self._receive(client)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, client, request = heapq.heappop(self._waiting)
                self._answer(client, request)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._events.register(client, selectors.EVENT_READ)

    def _receive(self, client: socket.socket) -> None:
        try:
            request = client.recv(1 << 16)
        except ConnectionResetError:  # its worker was killed
            request = b""
        if not request:
            self._events.unregister(client)
            client.close()
            return
        late = TAIL_SECONDS if random.random() < self._tail else self._delay
        self._number += 1
        heapq.heappush(self._waiting, (time.monotonic() + late, self._number, client, request))

    def _answer(self, client: socket.socket, request: bytes) -> None:
        if client.fileno() < 0:  # it has gone meanwhile
            return
        if random.random() < self._failing:
            client.send(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
            return
        nbytes, number = map(int, request.split(b" ", 2)[1].split(b"/")[1:3])
        client.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % nbytes)
        self._sending[client] = [number * nbytes % (MEMORY_BYTES - nbytes), nbytes]
        self._events.modify(client, selectors.EVENT_WRITE)
        self._send(client)

    def _send(self, client: socket.socket) -> None:
        offset, left = self._sending[client]
        try:
            sent = os.sendfile(client.fileno(), self._memory, offset, left)
        except BlockingIOError:
            return
        if sent == left:
            del self._sending[client]
            self._events.modify(client, selectors.EVENT_READ)
        else:
            self._sending[client] = [offset + sent, left - sent]


@contextmanager
def store(delay: float = DELAY_SECONDS, tail: float = 0.0, failing: float = 0.0) -> Iterator[int]:
    """A store in a process of its own. Yields its port."""
    command = [sys.executable, "-m", "benchmarks.reads", "--serve", str(delay), str(tail), str(failing)]
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


def filled(port: int, nbytes: int, workers: int, reads: int, hedge: bool = False) -> dict[str, float]:
    """MB/s, seconds to the first row, MiB of the workers, tasks tried again and given up. reads=0: none."""
    with tempfile.TemporaryDirectory() as folder:
        schema = {"x": ac.Tensor("uint8", (nbytes,)), "id": ac.Tensor("int64")}
        cache = ac.Cache.create(f"{folder}/cache", schema, "4GB", "32MiB")
        sampler = Objects(port, nbytes, by_reads=reads > 0, hedge=hedge)
        began = time.perf_counter()
        with ac.SamplerPool(cache, sampler, workers=workers, reads=reads or 1, progress=False) as pool:
            pool.wait(rows=1, timeout=60)
            first = time.perf_counter() - began
            time.sleep(1)
            before, since = pool.stats(), time.perf_counter()
            time.sleep(SECONDS)
            memory = memory_of_workers()
            after, until = pool.stats(), time.perf_counter()
        rate = (after.bytes - before.bytes) / (until - since) / 1e6
        return {
            "MB/s": rate, "first row, s": first, "MiB": memory / MIB,
            "retries": after.retries, "given up": after.failures, "hedges": after.hedges,
        }  # fmt: skip


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

        threads = [threading.Thread(target=client, args=[number]) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(read) * MIB / 3 / 1e6


CASES: dict[str, tuple[dict[str, float], int, int, int] | tuple[dict[str, float], int, int, int, bool]] = {
    "1 MiB, one at a time": ({}, MIB, 2, 0),
    "1 MiB, reads=32": ({}, MIB, 2, 32),
    "64 KiB, one at a time": ({}, 64 * KIB, 2, 0),
    "64 KiB, reads=64": ({}, 64 * KIB, 2, 64),
    "1 MiB, reads=32, 1 % take 1 s": ({"tail": 0.01}, MIB, 2, 32),
    "1 MiB, reads=32, 1 % take 1 s, hedge": ({"tail": 0.01}, MIB, 2, 32, True),
    "1 MiB, reads=32, 1 % fail": ({"failing": 0.01}, MIB, 2, 32),
    "1 MiB, one at a time, 1 % fail": ({"failing": 0.01}, MIB, 2, 0),
}


def main() -> None:
    print(machine())
    print(f"store: {rate_of_the_store():.0f} MB/s")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(REPEATS):
        for name, (options, *given) in CASES.items():
            with store(**options) as port:
                found[name].append(filled(port, *given))  # type: ignore[arg-type]  # a tuple of each
    for name, runs in found.items():
        medians = {what: statistics.median(run[what] for run in runs) for what in runs[0]}
        print(f"{name:>32}: {', '.join(f'{value:.4g} {what}' for what, value in medians.items())}")
    one, many = (found[f"1 MiB, {how}"] for how in ("one at a time", "reads=32"))
    remember("reads", {"1 MiB": [b["MB/s"] / a["MB/s"] for a, b in zip(one, many, strict=True)]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=3, type=float)
    serve: Callable[[], None] = main
    if asked := parser.parse_args().serve:
        made = Store(*asked)
        print(made.port, flush=True)
        serve = made.serve
    serve()
