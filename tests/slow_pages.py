"""Memory whose pages come only when another Python thread brings them, as those of a disk come later.

Whoever touches such a page and keeps the GIL meanwhile waits for ever. By userfaultfd, which not every
process may use: then the test is skipped.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading

import pytest

_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_API, _REGISTER, _COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03  # ioctls of linux/userfaultfd.h
_MISSING, _EVENT_PAGEFAULT, _MESSAGE_BYTES = 1, 0x12, 32
_MAP_FIXED = 0x10
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def require_slow_pages() -> None:
    """Skips where there can be none."""
    fd = _userfaultfd()
    if fd < 0:
        pytest.skip(f"userfaultfd: {os.strerror(ctypes.get_errno())}")
    os.close(fd)


def _userfaultfd() -> int:
    return int(_libc.syscall(_SYS_USERFAULTFD[os.uname().machine], os.O_CLOEXEC))


class SlowPages:
    """Brings pages one by one, in a thread of its own; for as long as the process lives.

    Args:
        are_held: until `let_go`. `touched` tells that somebody waits for one.
    """

    def __init__(self, *, are_held: bool = False) -> None:
        self.touched, self._may_come = threading.Event(), threading.Event()
        if not are_held:
            self.let_go()
        self._fd = _userfaultfd()
        fcntl.ioctl(self._fd, _API, struct.pack("QQQ", 0xAA, 0, 0))
        self._contents: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.brought = 0
        threading.Thread(target=self._bring, daemon=True).start()

    def let_go(self) -> None:
        """Have pages come from now on."""
        self._may_come.set()

    def replace(self, address: int, nbytes: int) -> None:
        """Have what is mapped there come page by page, each when it is first touched."""
        whole = -(-nbytes // _PAGE) * _PAGE
        for start in range(address, address + whole, _PAGE):
            page = ctypes.create_string_buffer(ctypes.string_at(start, _PAGE), _PAGE)
            self._contents[start] = page
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        assert _libc.mmap(address, whole, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        fcntl.ioctl(self._fd, _REGISTER, struct.pack("QQQQ", address, whole, _MISSING, 0))

    def _bring(self) -> None:
        while True:
            message = os.read(self._fd, _MESSAGE_BYTES)
            assert message[0] == _EVENT_PAGEFAULT
            self.touched.set()
            self._may_come.wait()
            start = struct.unpack_from("Q", message, 16)[0] // _PAGE * _PAGE
            source = ctypes.addressof(self._contents[start])
            self.brought += 1
            fcntl.ioctl(self._fd, _COPY, bytearray(struct.pack("QQQQq", start, source, _PAGE, 0, 0)))
