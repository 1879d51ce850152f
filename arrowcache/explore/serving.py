"""Serving: the explorer in a browser, without Jupyter: a page on this machine alone, for who has its address.

The address has a token that is good for one opening; the page goes on by a cookie. A request that names
another host or comes from another page is refused, so that no site in the same browser reaches it.
"""

from __future__ import annotations

import contextlib
import html
import json
import secrets
import struct
import threading
import webbrowser
from collections.abc import Callable
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comm import DummyComm

from arrowcache import explore
from arrowcache.cache import Cache

if TYPE_CHECKING:
    from arrowcache.explore.explorer import Explorer

_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="/explorer.css">
<body style="font-family: system-ui, sans-serif; margin: 1em"><b>{title}</b>
<div id="says"></div><div id="here"></div><script type="module" src="/page.js"></script>
"""
_POLICY = "default-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
_MOST_ASKED_BYTES = 16 << 20


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


class Server(ThreadingHTTPServer):
    """Serves one widget, on a port of 127.0.0.1. `url` is to be opened once; `serve_forever` answers.

    Whoever else uses the widget meanwhile holds `lock`.

    Args:
        title: of the page, as text.
        port: 0: any that is free.
    """

    daemon_threads = True  # Ctrl-C ends the process at once
    block_on_close = False

    def __init__(self, widget: Explorer, title: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Answer)
        self.host = f"127.0.0.1:{self.server_port}"
        self.token, self.cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self.url = f"http://{self.host}/?token={self.token}"
        self._wire, self.lock = _Wire(), threading.Lock()
        widget.comm = self._wire
        css, script = (str(text) for text in (widget._css, widget._esm))
        page = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
        self.files = {
            "/": ("text/html", _PAGE.format(title=html.escape(title)).encode()),
            "/page.js": ("text/javascript", page.encode()),
            "/explorer.js": ("text/javascript", script.encode()),
            "/explorer.css": ("text/css", css.encode()),
        }

    def admits(self, token: str) -> bool:
        """Whether this is the token, for the first time."""
        with self.lock:
            is_it = bool(self.token) and secrets.compare_digest(token.encode(), self.token.encode())
            if is_it:
                self.token = ""
            return is_it

    def answer(self, data: dict[str, Any]) -> bytes:
        """Have the widget take a message; returns what it sent since, as page.js reads it."""
        with self.lock:
            self._wire.handle_msg({"content": {"data": data}, "buffers": []})
            sent, self._wire.sent = self._wire.sent, []
        listed = [{"data": data, "sizes": [*map(len, buffers)]} for data, buffers in sent]
        text = json.dumps(listed).encode()
        return b"".join([struct.pack(">I", len(text)), text, *(part for _, parts in sent for part in parts)])


class _Answer(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"  # one connection for all
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path, _, token = self.path.partition("?token=")
        is_first = path == "/" and bool(token) and self._is_ours() and self.server.admits(token)
        if not is_first and not self._is_known():
            self._write(403, "text/plain", b"This address was used already, or is another's: start anew.")
        elif path in self.server.files:
            self._write(200, *self.server.files[path], is_first)
        else:
            self._write(404, "text/plain", b"There is no such page.")

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        if not self._is_known() or "Origin" not in self.headers or size > _MOST_ASKED_BYTES:
            self.close_connection = True
            self._write(403, "text/plain", b"This page is another's: start anew.")
            return
        self._write(200, "application/octet-stream", self.server.answer(json.loads(self.rfile.read(size))))

    def _is_ours(self) -> bool:
        """Whether it asks for this host, and if a page asks, this server's."""
        origin = self.headers.get("Origin", f"http://{self.server.host}")
        return (self.headers.get("Host"), origin) == (self.server.host, f"http://{self.server.host}")

    def _is_known(self) -> bool:
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name())
        given = cookie.value if cookie else ""
        return self._is_ours() and secrets.compare_digest(given.encode(), self.server.cookie.encode())

    def _cookie_name(self) -> str:
        return f"arrowcache-{self.server.server_port}"  # cookies of a host are those of all its ports

    def _write(self, status: int, kind: str, body: bytes, is_first: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        if is_first:
            cookie = f"{self._cookie_name()}={self.server.cookie}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: the terminal is for the address."""


def serve(cache: Cache, say: Callable[[str], None], opens: bool = True, port: int = 0) -> None:
    """Explore a cache in a browser until Ctrl-C, which ends it at once.

    Args:
        say: is told the address.
        opens: open a browser there.
        port: of 127.0.0.1; 0: any that is free.
    """
    with contextlib.closing(explore.open(cache)) as shown, Server(shown, str(cache.path), port) as server:
        say(server.url)
        if opens:
            webbrowser.open(server.url)
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass  # as it is meant to end
