"""Linux: the kernel's calls that Python has no name for, or not every Python. Nobody else calls these.

A Python built against an old C library, such as uv's and conda's, lacks `os.memfd_create`,
`os.pidfd_open` and more, on the newest kernel too. Each call here uses Python's name; if there is
none it makes the system call by its number. On a processor whose numbers are not known here, or a kernel
without the call, the error is ENOSYS.

No other module calls the C library; native/ is a library of its own. This module decides nothing: the caller
handles errors and missing calls. Standard library only.

Some calls take less time than releasing the GIL does: their docstrings say that they keep it. All others
release it. Memory is named by its address: the caller must keep it alive.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import struct
import sys
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE  # of memory
MAP_FIXED, MAP_NORESERVE = 0x10, getattr(mmap, "MAP_NORESERVE", 0x4000)
MADV_POPULATE_READ = 22  # Linux 5.14
SHARED, EXCLUSIVE, UNLOCKED = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK
EHWPOISON = 133  # a page of memory, or of the disk, is broken

_MFD_CLOEXEC = 1
_PR_SET_PDEATHSIG = 1
_SIGSTKFLT = 16
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid

_GENERIC = {"memfd_create": 279, "pidfd_open": 434}
_NUMBERS = {
    "x86_64": _GENERIC | {"memfd_create": 319},
    "aarch64": _GENERIC,
    "riscv64": _GENERIC,
}  # by os.uname().machine

_libc = ctypes.CDLL(None, use_errno=True)
_quick = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL
for _library in (_libc, _quick):
    _library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_quick.mmap.restype = ctypes.c_void_p
_quick.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_quick.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_quick.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.syscall.restype = ctypes.c_long
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_M_ARENA_MAX = -8  # of malloc.h
_FAILED = ctypes.c_void_p(-1).value


# files without a name


def memory_file(name: str) -> int:
    """Return a descriptor of an empty file in memory, which no other program inherits.

    Args:
        name: part of its link in /proc: `/memfd:<name> (deleted)`.
    Raises: OSError: ENOSYS, EPERM: an old kernel, or a sandbox; EMFILE, ENFILE, ENOMEM.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    return _syscall("memfd_create", os.fsencode(name), _MFD_CLOEXEC)


def sparse_memory(nbytes: int) -> mmap.mmap:
    """Return zeros, of which only pages that are written take memory. Raises: OSError: as of mmap."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)


def anonymous_file() -> int:
    """Return a descriptor of an empty file without a name, which no other program inherits."""
    try:
        return memory_file("arrowcache")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # otherwise: an old kernel, or a sandbox
        import tempfile

        with tempfile.TemporaryFile(prefix="arrowcache-") as file:
            return os.dup(file.fileno())


def free_range(fd: int, start: int, nbytes: int) -> None:
    """Give the disk back a range of a file, which reads as zeros then.

    Raises: OSError: EOPNOTSUPP: the file system cannot.
    """
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, nbytes):
        raise _error()


def fill_standard_streams() -> None:
    """Open /dev/null as each of the descriptors 0 to 2 that is closed, as in a daemon; children get it.

    Otherwise the next file of this process would have that number, and get what C libraries and child
    processes write to stderr.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened == fd:
                os.set_inheritable(fd, True)
            else:  # another thread was quicker
                os.close(opened)


def copy_beyond(fd: int, number: int) -> int:
    """Copy a descriptor to a higher number than this one; no other program inherits the copy.

    Raises: OSError: EMFILE.
    """
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, number + 1)


# locks of open file descriptions: on whole files, and on ranges of bytes, which do not know each other


def lock_file(fd: int) -> None:
    """Lock a whole file for this description alone, as `flock`; never waits.

    Raises: OSError: EAGAIN: another description has it.
    """
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_file(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def set_lock(fd: int, kind: int, start: int, length: int) -> None:
    """Lock a range, or unlock it; never waits.

    Args:
        kind: SHARED, EXCLUSIVE or UNLOCKED.
        length: number of bytes. 0 means to the end, wherever that will be.
    Raises: OSError: EAGAIN, EACCES: another description's lock conflicts.
    """
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))


def conflicting_lock(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """Return start and length of a lock that prevents an exclusive lock of a range, or None."""
    query = _FLOCK.pack(EXCLUSIVE, os.SEEK_SET, start, length, 0)
    kind, _, first, size, _ = _FLOCK.unpack(fcntl.fcntl(fd, _F_OFD_GETLK, query))
    return None if kind == UNLOCKED else (first, size)


# processes


def process_file(pid: int) -> int:
    """Return a descriptor of a process, which is readable once the process has ended.

    Raises: OSError: ENOSYS, EPERM: Linux before 5.3, or a sandbox; ESRCH; EMFILE, ENFILE.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _syscall("pidfd_open", pid, 0)


def save_addresses() -> None:
    """Have glibc serve all threads from one arena, if addresses are limited: each takes 64 MiB of them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and hasattr(_libc, "mallopt"):  # musl has no arenas
        _libc.mallopt(_M_ARENA_MAX, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends.

    The caller must check afterwards that the parent still lives: it may have ended before.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_after_parent() -> None:
    """Let the kernel kill this process 16 s after the thread that started it has ended: instead of at once.

    So it has time to end well, and dies even if it never lets go of the GIL. The kernel sends signal 16,
    which nothing else does; its handler is the C library's `alarm`, whose argument is the signal's number:
    16 s later SIGALRM kills the process.
    """
    _libc.signal(_SIGSTKFLT, ctypes.cast(_libc.alarm, ctypes.c_void_p))
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGSTKFLT)


# memory


def map_memory(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    """mmap, of a file from its beginning; keeps the GIL. Returns: the address.

    Args:
        address: address of the mapping. 0 means anywhere.
    Raises: OSError: as of mmap.
    """
    result = _quick.mmap(address or None, nbytes, protection, flags, fd, 0)
    if result is None or result == _FAILED:
        raise _error()
    return int(result)


def make_writable(address: int, nbytes: int) -> None:
    """mprotect, of mapped pages. Raises: OSError: as of mprotect."""
    if _quick.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
        raise _error()


def most_mappings() -> int:
    """Return the number of mappings that the kernel allows; beyond it the process' threads fail to start."""
    with open("/proc/sys/vm/max_map_count") as file:
        return int(file.read())


def boot_id() -> str:
    """Return what identifies this run of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def left_bytes(kind: int) -> int | None:
    """Return the bytes that a limit leaves this process: of addresses (RLIMIT_AS) or data (RLIMIT_DATA).

    Returns: None where there is no limit; below 0 where it was lowered to less than is in use.
    Raises: OSError: no descriptor is left.
    """
    if (limit := resource.getrlimit(kind)[0]) == resource.RLIM_INFINITY:
        return None
    with open("/proc/self/statm") as file:
        return limit - int(file.read().split()[0 if kind == resource.RLIMIT_AS else 5]) * PAGE_BYTES


def advise(address: int, nbytes: int, advice: int, *, keep_gil: bool = True) -> int:
    """madvise, from an address at a page on. Returns: 0, or the error's number."""
    library = _quick if keep_gil else _libc
    return ctypes.get_errno() if library.madvise(address, nbytes, advice) else 0


def are_in_memory(address: int, nbytes: int) -> bool:
    """True if mapped pages are in memory, from an address at a page on, or if this is unknown."""
    pages = ctypes.create_string_buffer(-(-nbytes // PAGE_BYTES))
    return bool(_quick.mincore(address, nbytes, pages)) or all(page & 1 for page in pages.raw)


def _syscall(name: str, *arguments: int | bytes) -> int:
    number = _NUMBERS.get(os.uname().machine, {}).get(name)
    if number is None or sys.maxsize < 1 << 32:  # a 32-bit process on such a machine has other numbers
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = [ctypes.c_char_p(word) if isinstance(word, bytes) else ctypes.c_long(word) for word in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words))


def _checked(result: int) -> int:
    if result < 0:
        raise _error()
    return int(result)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
