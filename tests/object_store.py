"""A folder as an S3 endpoint over HTTP on loopback: small, fast, and as unreliable as a test wants.

It speaks what pyarrow's S3FileSystem asks for to read: HEAD, GET with ranges, ListObjectsV2; the first part
of a path is the bucket. It checks no signatures: that is moto's part. Unlike moto it is fast enough to
measure with, delays each answer by `latency_seconds`, sends no faster than `bytes_per_second`, and fails as
told: see `Fault`.

In a test it runs in a thread; `python tests/object_store.py FOLDER LATENCY_SECONDS` serves from a process of
its own, prints its port, and ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

PAGE_KEYS = 100
_REASONS = {200: "OK", 206: "Partial Content", 403: "Forbidden", 404: "Not Found", 503: "Slow Down"}


@dataclass
class Fault:
    """What becomes of the next `times` requests whose key contains `key`.

    `kind`: "slow_down" (503), "denied" (403), "reset" (the connection, without an answer), "truncated" (half
    of the body, then the end).
    """

    kind: str
    times: int
    key: str = ""
    method: str = "GET"


@dataclass
class Request:
    """What was asked for; `nbytes`: of the answer's body. `token`: of temporary credentials."""

    method: str
    path: str
    nbytes: int = 0
    token: str | None = None


@dataclass
class ObjectStore:
    """The server. Made by `serve`.

    `most_at_once`: a request beyond so many is answered with 503, as by a store that throttles.
    `bytes_per_second`: what the bodies of all answers share; None: no bound.
    """

    folder: Path
    latency_seconds: float = 0.0
    most_at_once: int | None = None
    bytes_per_second: float | None = None
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    throttled: int = 0
    _running: int = 0
    _link_free_at: float = 0.0

    def uri(self, path: str, key: str = "key", secret: str = "secret") -> str:
        """Of a bucket and what is in it, for pyarrow and our sources."""
        return f"s3://{key}:{secret}@{path}?endpoint_override=127.0.0.1%3A{self.port}&scheme=http&region=us-east-1"

    def read_bytes(self) -> int:
        """How much has been sent of objects' contents."""
        return sum(request.nbytes for request in self.requests if request.method == "GET")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: request after request, until the client goes."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {
                    k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)
                }
                self._running += 1
                try:
                    if self.latency_seconds:
                        await asyncio.sleep(self.latency_seconds)
                    goes_on = await self._answer(method, target, headers, writer)
                finally:
                    self._running -= 1
                if not goes_on:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, method: str, target: str, headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> bool:
        parts = urllib.parse.urlsplit(target)
        path = urllib.parse.unquote(parts.path).strip("/")
        request = Request(method, path, token=headers.get("x-amz-security-token"))
        self.requests.append(request)
        fault = self._fault(method, path)
        if fault == "reset":
            # an answer of nothing but RST
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        if fault == "denied":
            return await _send(writer, method, 403, _error("AccessDenied", "Access Denied"))
        if fault == "slow_down":
            return await _send(writer, method, 503, _error("SlowDown", "Please reduce your request rate."))
        query = urllib.parse.parse_qs(parts.query)
        if "list-type" in query:
            return await _send(writer, method, 200, self._listing(path, query))
        file = self.folder / path
        if "/" not in path and file.is_dir():  # HeadBucket
            return await _send(writer, method, 200, b"")
        if not file.is_file():
            return await _send(writer, method, 404, _error("NoSuchKey", "The specified key does not exist."))
        size = file.stat().st_size
        start, stop = 0, size
        if "range" in headers:
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            if first:
                start, stop = int(first), min(int(last) + 1 if last else size, size)
            else:
                start = max(0, size - int(last))
        extra = {
            "Last-Modified": email.utils.formatdate(file.stat().st_mtime, usegmt=True),
            "ETag": f'"{size}"', "Accept-Ranges": "bytes",
        }  # fmt: skip
        if "range" in headers:
            extra["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        status = 206 if "range" in headers else 200
        if method == "HEAD":
            return await _send(writer, method, status, b"", extra, size)
        with file.open("rb") as opened:
            opened.seek(start)
            body = opened.read(stop - start)
        await self._pass_the_link(len(body))
        request.nbytes = len(body)
        if fault == "truncated":
            await _send(writer, method, status, body[: len(body) // 2], extra, len(body))
            return False
        return await _send(writer, method, status, body, extra)

    async def _pass_the_link(self, nbytes: int) -> None:
        """Wait until the link has had the time for so many bytes, after those that came before."""
        if self.bytes_per_second is not None:
            now = time.monotonic()
            self._link_free_at = max(self._link_free_at, now) + nbytes / self.bytes_per_second
            await asyncio.sleep(self._link_free_at - now)

    def _fault(self, method: str, path: str) -> str | None:
        if self.most_at_once is not None and self._running > self.most_at_once:
            self.throttled += 1
            return "slow_down"
        for fault in self.faults:
            if fault.times and fault.method == method and fault.key in path:
                fault.times -= 1
                return fault.kind
        return None

    def _listing(self, bucket: str, query: dict[str, list[str]]) -> bytes:
        """ListObjectsV2: pages of keys, or of what is up to the next delimiter."""
        root = self.folder / bucket
        prefix = query.get("prefix", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        after = query.get("continuation-token", [""])[0]
        most = min(PAGE_KEYS, int(query.get("max-keys", ["1000"])[0]))
        found: dict[str, int | None] = {}
        for file in sorted(root.rglob("*")):
            key = str(file.relative_to(root))
            if not file.is_file() or not key.startswith(prefix):
                continue
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if end < 0 else key[: end + 1]
            found.setdefault(name, file.stat().st_size if end < 0 else None)
        names = sorted(name for name in found if name > after)
        page = names[:most]
        items = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if found[name] is None
            else f"<Contents><Key>{escape(name)}</Key><Size>{found[name]}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in page
        )
        more = len(names) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}"
            "</ListBucketResult>"
        ).encode()


def _error(code: str, message: str) -> bytes:
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()


async def _send(
    writer: asyncio.StreamWriter,
    method: str,
    status: int,
    body: bytes,
    extra: dict[str, str] | None = None,
    length: int | None = None,
) -> bool:
    headers = {"Content-Length": str(len(body) if length is None else length), **(extra or {})}
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{k}: {v}" for k, v in headers.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else body))
    await writer.drain()
    return True


@contextlib.contextmanager
def serve(
    folder: Path,
    latency_seconds: float = 0.0,
    most_at_once: int | None = None,
    bytes_per_second: float | None = None,
) -> Iterator[ObjectStore]:
    """Serve a folder from a thread until the block ends."""
    store = ObjectStore(folder, latency_seconds, most_at_once, bytes_per_second)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def main() -> None:
        connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections[task] = writer
            try:
                await store.handle(reader, writer)
            finally:
                del connections[task]

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        store.port = server.sockets[0].getsockname()[1]
        ready.set()
        await ended.wait()
        server.close()
        for writer in connections.values():
            writer.transport.abort()
        await asyncio.gather(*connections)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), name="object-store")
    thread.start()
    ready.wait()
    try:
        yield store
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


if __name__ == "__main__":
    with serve(Path(sys.argv[1]), float(sys.argv[2])) as serving:
        print(serving.port, flush=True)
        sys.stdin.read()
