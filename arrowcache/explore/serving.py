"""Serving: the explorer in a browser, without Jupyter: a page on this machine alone, for who has its address.

The address has a token that is good for one opening; the page goes on by a cookie. A request that names
another host or comes from another page is refused, so that no site in the same browser reaches it. The
browser that is started here gets the address without its token, since everybody sees how it was started: the
kernel says that the connection is one of this user. So there is no file, and nothing to leave behind.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import webbrowser
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comm import DummyComm

from arrowcache import explore
from arrowcache.cache import Cache

if TYPE_CHECKING:
    from arrowcache.explore.explorer import Explorer

_PAGE = """<!doctype html><meta charset="utf-8"><title>{0}</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="/explorer.css">
<body style="font-family: system-ui, sans-serif; margin: 1em 1.5em"><h3>{0}</h3>
<div id="says"></div><div id="here"></div><script type="module" src="/page.js"></script>
"""
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src data:; media-src data:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
_USED = "This address was used already, or is another's: open the one that the terminal shows, or start anew."
_CONNECTIONS = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"
_MAX_ASKED_BYTES = 16 << 20
_NICENESS = 10  # whoever samples or trains on this machine goes first


def serve(cache: Cache, say: Callable[[str], None], opens: bool = True) -> None:
    """Explore a cache in a browser until Ctrl-C, which ends it at once.

    Args:
        say: is told the address.
        opens: open a browser there.
    """
    page = queue.SimpleQueue[str]()
    if opens:  # in a thread, which a browser in the terminal keeps; begun first, so that no browser is nice
        threading.Thread(target=lambda: webbrowser.open(page.get()), daemon=True).start()
    os.nice(_NICENESS)
    with (
        contextlib.closing(explore.open(cache)) as shown,
        Server(shown, str(cache.path), opens) as server,
    ):
        say(server.url)
        page.put(f"http://{server.host}/")
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass  # as it is meant to end


class Server(ThreadingHTTPServer):
    """Serves one widget, on a port of 127.0.0.1. `url` is to be opened once; `serve_forever` answers.

    Whoever else uses the widget meanwhile holds `lock`.

    Args:
        opens: a browser of this user may come once without the token.
    """

    daemon_threads = True  # a request in progress keeps nobody
    block_on_close = False

    def __init__(self, widget: Explorer, title: str, opens: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.host = f"127.0.0.1:{self.server_port}"
        self.cookie, token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.url = f"http://{self.host}/?token={token}"
        self.lock, self.tokens = threading.Lock(), {token: True, "": opens}  # a token is taken once
        self._wire = widget.comm = _Wire()
        self.files = {
            "/": ("text/html", _PAGE.format(html.escape(title))),
            "/page.js": ("text/javascript", Path(__file__).with_name("page.js").read_text(encoding="utf-8")),
            "/explorer.js": ("text/javascript", str(widget._esm)),
            "/explorer.css": ("text/css", str(widget._css)),
        }

    def answer(self, data: dict[str, Any]) -> bytes:
        """Have the widget take a message; returns what it sent since, as page.js reads it."""
        with self.lock:
            self._wire.handle_msg({"content": {"data": data}, "buffers": []})
            sent, self._wire.sent = self._wire.sent, []
        text = json.dumps([{"data": data, "sizes": [*map(len, parts)]} for data, parts in sent]).encode()
        return b"".join([struct.pack(">I", len(text)), text, *(part for _, parts in sent for part in parts)])

    def server_close(self) -> None:
        """Answer no more. A thread that waits for its browser keeps nothing of the widget."""
        super().server_close()
        self._wire.on_msg(None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of a defect; a browser may leave at any time."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Wire(DummyComm):
    """What the widget takes for a notebook; it keeps what the widget sends until an answer takes it along."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        super().__init__(target_name="jupyter.widget")

    def publish_msg(self, *_: Any, data: Any = None, buffers: Any = None, **__: Any) -> None:
        if data:
            for script in ("_esm", "_css"):  # which the page has
                data.get("state", {}).pop(script, None)
            self.sent.append((data, [bytes(buffer) for buffer in buffers or ()]))


class _Answer(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # one connection for all
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path, _, token = self.path.partition("?token=")
        may_enter = path == "/" and self._is_ours() and (token or self._is_of_this_user())
        if may_enter and self.server.tokens.pop(token, False):
            cookie = f"{self._cookie}={self.server.cookie}; HttpOnly; SameSite=Strict; Path=/"
            self._write(200, *self.server.files["/"], {"Set-Cookie": cookie})
        elif not self._is_known():
            self._write(403, "text/plain", _USED)
        elif path in self.server.files:
            self._write(200, *self.server.files[path])
        else:
            self._write(404, "text/plain", "There is no such page.")

    def do_POST(self) -> None:
        size = 0
        with contextlib.suppress(ValueError):
            size = int(self.headers.get("Content-Length", 0))
        if self._is_known() and "Origin" in self.headers and 0 < size <= _MAX_ASKED_BYTES:
            answer = self.server.answer(json.loads(self.rfile.read(size)))
            self._write(200, "application/octet-stream", answer)
        else:
            self.close_connection = True
            self._write(403, "text/plain", "This page is another's: start anew.")

    def _is_ours(self) -> bool:
        """Whether it asks this host, and if a page asks, one of this server's."""
        own = f"http://{self.server.host}"
        return self.headers.get("Host") == self.server.host and self.headers.get("Origin", own) == own

    def _is_known(self) -> bool:
        own = f"{self._cookie}={self.server.cookie}".encode()
        given = self.headers.get("Cookie", "").encode().split(b";")  # those of others in whatever form
        return self._is_ours() and any(secrets.compare_digest(one.strip(), own) for one in given)

    def _is_of_this_user(self) -> bool:
        peer, own = self.connection.getpeername(), self.connection.getsockname()
        return owner_of_connection(peer, own) == os.geteuid()

    @property
    def _cookie(self) -> str:
        return f"arrowcache-{self.server.server_port}"  # cookies of a host are those of all its ports

    def _write(self, status: int, kind: str, body: str | bytes, more: dict[str, str] | None = None) -> None:
        body = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        named = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**named, **_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: the terminal is for the address."""


def owner_of_connection(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """The user who has one end of a connection between two ends of this machine, by (IPv4 address, port).

    Returns: its uid, as the kernel lists it; None: there is no such connection, or not any more.
    """
    for listed in _CONNECTIONS:
        ends = [_end(*end, is_mapped=listed.endswith("6")) for end in (local, remote)]
        with contextlib.suppress(OSError), open(listed, encoding="ascii") as lines:  # no IPv6 here
            for _, local_end, remote_end, state, _, _, _, uid, *_ in map(str.split, lines):
                if [local_end, remote_end] == ends and state == _ESTABLISHED:
                    return int(uid)
    return None


def _end(address: str, port: int, is_mapped: bool) -> str:
    """One end of a connection as the kernel lists it: 32 bits at a time, in this machine's byte order."""
    packed = bytes(10) + b"\xff\xff" if is_mapped else b""
    packed += socket.inet_aton(address)
    return "".join(f"{part:08X}" for (part,) in struct.iter_unpack("=I", packed)) + f":{port:04X}"
