"""Worker: what runs in a worker process: one message after another, until its main process ends.

    begin    there is an epoch: lease and map what its manifest (a file) lists
    make     rows of that epoch, into a slot; answered by made, failed, skipped, or needs
    put      the slot that was needed: for the first batch, and for what outgrew its slot
    forget   nobody wants the batch any more for which a slot was needed
    drop     let go of an epoch that has ended; answered by dropped

It says `ready` once it has begun, and `lost` where it cannot begin or go on. How batches are made is in
maker.py. Guarantees: it ignores Ctrl-C, which is for the main process; it dies when that dies, in
whatever way; a process that its transform forks answers nothing. It never answers with sample bytes.

Numeric libraries get one thread each, unless the environment says otherwise, and the engine none beside it:
workers run side by side.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
from collections import deque
from contextlib import closing, suppress

from arrowcache import linux
from arrowcache.native.engine import limit_threads
from arrowcache.reading.workers.bench import Bench, Places
from arrowcache.reading.workers.channel import Channel, Message
from arrowcache.reading.workers.maker import Maker
from arrowcache.reading.workers.memory import bytes_of, map_all
from arrowcache.reading.workers.parcel import pack_error


def main(end: int, memory: int, plan: int, parent: int, number: int) -> None:
    """Work until the other end of the socket is closed.

    Args:
        end, memory, plan: descriptors of our socket, of the shared file, and of what to do.
        parent: the main process.
        number: which of the workers this is.
    """
    if not tie_to(parent):
        return
    with suppress(OSError, RuntimeError, ValueError):  # no stderr
        faulthandler.enable()
    sys.argv = sys.argv[:1]
    limit_threads(0)
    channel = Channel(socket.socket(fileno=end))
    for fd in (end, memory, plan):
        os.set_inheritable(fd, False)
    with closing(channel), suppress(BrokenPipeError, ConnectionResetError):  # the main process has gone
        try:
            _work(channel, memory, plan, number)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001  # the main process raises it
            channel.send({"say": "lost", "error": pack_error(error)})


def tie_to(parent: int) -> bool:
    """Leave Ctrl-C to the main process, and die when it does; False: it died before we asked to be told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    linux.die_with_parent()
    return os.getppid() == parent


def _work(channel: Channel, memory: int, plan: int, number: int) -> None:
    try:
        settings, _, transform = bytes_of(plan).partition(b"\n")
        maker = Maker(Bench(map_all(memory), number), json.loads(settings), transform)
    finally:
        os.close(memory)
        os.close(plan)
    try:
        channel.send({"say": "ready"})
        _Session(channel, maker).serve()
    finally:
        maker.close()


class _Session:
    """Messages, one after another; those that come while a slot is awaited are kept for later."""

    def __init__(self, channel: Channel, maker: Maker) -> None:
        self._channel, self._maker = channel, maker
        self._later: deque[tuple[Message, list[int]]] = deque()

    def serve(self) -> None:
        while (received := self._next()) is not None:
            message, files = received
            if message["do"] == "begin":
                self._maker.announce(message["epoch"], files[0])
            elif message["do"] == "drop":
                self._maker.drop()
                self._channel.send({"say": "dropped"})
            else:
                self._make(message)

    def _next(self) -> tuple[Message, list[int]] | None:
        return self._later.popleft() if self._later else self._channel.receive()

    def _make(self, request: Message) -> None:
        try:
            answer = self._maker.make(request, self._slot_for)
        except BaseException as error:  # noqa: BLE001  # a transform may raise anything
            kept = self._maker.lose(error)
            failed = {"say": "failed", "id": request["id"], "kept": kept, "error": pack_error(error)}
            self._channel.send(failed)
        else:
            self._channel.send(answer)

    def _slot_for(self, need: Message) -> Places | None:
        """Ask for another slot; None: the batch is not wanted any more."""
        self._channel.send(need)
        while (received := self._channel.receive()) is not None:
            if received[0]["do"] == "put":
                places: Places = received[0]["slot"]
                return places
            if received[0]["do"] == "forget":
                return None
            self._later.append(received)
        raise ConnectionResetError("the main process has gone")
