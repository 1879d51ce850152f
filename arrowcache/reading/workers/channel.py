"""Channel: messages between the main process and a worker, over a pair of sockets without a name.

A message is a dict of plain values, as JSON, and perhaps bytes, such as row ids, under "data"; files travel
beside it as descriptors. Message boundaries are kept, the end of the other process is an end of file. No
sample ever passes here.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from arrowcache.errors import WorkerError
from arrowcache.reading.memory import bytes_of, file_of

_INLINE_BYTES = 32 << 10  # a longer message travels as a file, so that sending never waits for the reader
_INLINE, _IN_FILE = b"I", b"F"
_LENGTH_BYTES = 4  # of what tells how long the JSON is; "data" follows it
_MOST_FILES = 4
_FILE = struct.Struct("i")

Message = dict[str, Any]


class Channel:
    """One end. Owns its socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Our end, which never blocks, and the socket to be inherited by the other process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, files: Sequence[int] = (), data: bytes = b"") -> None:
        """Send a message and descriptors, which stay the caller's too.

        Raises: BrokenPipeError, ConnectionResetError: the other process is gone. BlockingIOError: it has
            not read for long. OSError: it cannot be sent now, such as for want of a descriptor.
        """
        text = json.dumps(message).encode()
        content = len(text).to_bytes(_LENGTH_BYTES, "little") + text + data
        if len(content) <= _INLINE_BYTES:
            try:
                socket.send_fds(self._socket, [_INLINE + content], list(files))
            except OSError as error:
                if error.errno != errno.EMSGSIZE:  # of a socket whose buffer is a small one
                    raise
            else:
                return
        fd = file_of(content)
        try:
            socket.send_fds(self._socket, [_IN_FILE], [fd, *files])
        finally:
            os.close(fd)

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its files, which the caller closes; None: the other process is gone.

        Raises: BlockingIOError: there is none, of an end that never blocks. ValueError: what came is no
            message. WorkerError: this process has no descriptor left for its files; the message is lost.
        """
        try:
            content, extra, flags, _ = self._socket.recvmsg(  # socket.recv_fds of Python 3.11 takes no flags
                _INLINE_BYTES + 1, socket.CMSG_LEN(_MOST_FILES * _FILE.size), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # it died with messages unread
            return None
        if not content:
            return None
        files = [fd for _, _, fds in extra for (fd,) in _FILE.iter_unpack(fds)]
        if flags & socket.MSG_CTRUNC:
            for fd in files:
                os.close(fd)
            raise WorkerError(
                f"process {os.getpid()} has no file descriptor left for what it was sent: raise the limit of "
                "open files (ulimit -n), or keep fewer open"
            )
        if content[:1] == _IN_FILE and files:
            fd = files.pop(0)
            try:
                return _message(bytes_of(fd)), files
            finally:
                os.close(fd)
        return _message(content[1:]), files

    def close(self) -> None:
        self._socket.close()


def _message(content: bytes) -> Message:
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    message: Message = json.loads(content[_LENGTH_BYTES:end])
    if len(content) > end:
        message["data"] = content[end:]
    return message
