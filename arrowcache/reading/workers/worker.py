"""Worker: what runs in a worker process: one message after another, until its main process ends.

    begin    there is an epoch: lease what its list of segments (a file) names
    make     rows of that epoch, into slots of its own; answered by made, failed or skipped
    drop     let go of an epoch that has ended; answered by dropped

It says `ready` once it has begun, and `lost` where it cannot begin or go on. How batches are made is in
batch_maker.py. Guarantees: it ignores Ctrl-C, which is for the main process; it dies when that dies, in
whatever way. It never answers with sample bytes.

Numeric libraries get one thread each, unless the environment says otherwise, and the engine none beside it:
workers run side by side. What it imports, the first batch of a loader waits for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
from contextlib import closing, suppress

from arrowcache import linux
from arrowcache.native.engine import limit_threads
from arrowcache.reading.memory import SharedMemory, bytes_of
from arrowcache.reading.workers.batch_maker import BatchMaker
from arrowcache.reading.workers.channel import Channel, Message
from arrowcache.reading.workers.worker_slots import WorkerSlots


def main(end: int, memory: int, plan: int, parent: int) -> None:
    """Work until the other end of the socket is closed.

    Args:
        end, memory, plan: descriptors of our socket, of our memory, and of what to do.
        parent: the main process.
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
            _work(channel, memory, plan)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001  # the main process raises it
            channel.send({"say": "lost", "error": _packed(error)})


def tie_to(parent: int) -> bool:
    """Leave Ctrl-C to the main process, and die when it does; False: it died before we asked to be told."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    linux.die_with_parent()
    return os.getppid() == parent


def _work(channel: Channel, memory: int, plan: int) -> None:
    settings, _, transform = bytes_of(plan).partition(b"\n")
    os.close(plan)
    told = json.loads(settings)
    maker = BatchMaker(WorkerSlots(SharedMemory(memory), told["in_flight"]), told, transform)
    try:
        channel.send({"say": "ready"})
        _serve(channel, maker)
    finally:
        maker.close()


def _serve(channel: Channel, maker: BatchMaker) -> None:
    coming = select.poll()
    coming.register(channel, select.POLLIN)
    while True:
        if not coming.poll(0):
            maker.map_ahead()
        received = channel.receive()
        if received is None:
            return
        message, files = received
        if message["do"] == "begin":
            maker.begin(message["epoch"], files[0])
        elif message["do"] == "drop":
            maker.drop()
            channel.send({"say": "dropped"})
        else:
            channel.send(_made(maker, message))
            maker.map_ahead()


def _made(maker: BatchMaker, request: Message) -> Message:
    """The answer to a request."""
    try:
        return maker.make(request)
    except BaseException as error:  # noqa: BLE001  # a transform may raise anything
        return {"say": "failed", "id": request["id"], "error": _packed(error)}


def _packed(error: BaseException) -> str:
    from arrowcache.pickling import pack_error  # cloudpickle, which many a worker never needs

    return pack_error(error)
