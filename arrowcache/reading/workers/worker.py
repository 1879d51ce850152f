"""Worker: the main loop of a worker process: one message after another, until its main process ends.

    work     settings and transform; the first message
    begin    there is an epoch: lease the segments of its list
    make     make batches of rows of that epoch, in slots of its own; answered by made, failed or skipped
    drop     let go of an epoch that has ended; answered by dropped

It says `ready` once it has begun, and `lost` where it cannot begin or go on. batch_maker.py makes the
batches. Guarantees, beside those of process.py: it never answers with sample bytes.

Numeric libraries get one thread each, unless the environment says otherwise, and the engine has no thread
beside this one: workers run side by side. Keep imports few: the first batch of a worker waits for them.
"""

from __future__ import annotations

import select
from contextlib import closing, suppress

from arrowcache.native.threads import threads
from arrowcache.pickling import pack_error
from arrowcache.process import Channel, Message
from arrowcache.reading.memory import SharedMemory
from arrowcache.reading.workers.batch_maker import BatchMaker
from arrowcache.reading.workers.worker_slots import WorkerSlots


def main(channel: Channel, memory: int) -> None:
    """Work until the other end of the channel is closed."""
    threads.most = 0
    with closing(channel), suppress(BrokenPipeError, ConnectionResetError):  # the main process has gone
        try:
            _work(channel, memory)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001  # the main process raises it
            channel.send({"say": "lost", "error": pack_error(error)})


def _work(channel: Channel, memory: int) -> None:
    settings = channel.receive()
    if settings is None:
        return
    slots = WorkerSlots(SharedMemory(memory), settings["in_flight"], keeps=settings["keeps"])
    maker = BatchMaker(slots, settings, settings.get("data", b""))
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
        message = channel.receive()
        if message is None:
            return
        if message["do"] == "begin":
            maker.begin(message["epoch"], message["data"])
        elif message["do"] == "drop":
            maker.drop()
            channel.send({"say": "dropped"})
        else:
            channel.send(_made(maker, message))
            maker.map_ahead()


def _made(maker: BatchMaker, request: Message) -> Message:
    try:
        return maker.make(request)
    except BaseException as error:  # noqa: BLE001  # a transform may raise anything
        return {"say": "failed", "id": request["id"], "error": pack_error(error)}
