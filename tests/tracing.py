"""What a script asks of the kernel about a folder that it sees mounted read-only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from helpers import DEADLINE_SECONDS
from processes import private_mounts

_READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
_TO_WRITE = re.compile(r"O_(RDWR|WR|CREAT|TRUNC|APPEND)")
_WRITES = re.compile(
    r"(p?write(v2?|64)?|pwritev2?|ftruncate|truncate|fallocate|f(data)?sync|sync_file_range|rename(at2?)?"
    r"|unlink(at)?|rmdir|mkdir(at)?|(f|l)?chown(at)?|fchownat|f?chmod(at)?|fchmodat2?|utimensat|(sym)?link(at)?"
    r"|mknod(at)?|f?setxattr|flock)"
)
_OF_DESCRIPTORS = (  # a shared map that is written to is of a file that was opened so
    "flock,fcntl,write,pwrite64,writev,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync,fchmod,fchown"
)


def writes_and_locks(code: str, folder: Path, *arguments: object, mounted: bool = True) -> list[str]:
    """Run a script whose first argument is a folder, under strace, and return what it asks of that folder.

    Args:
        mounted: the folder is mounted read-only. False: nothing but strace shows what is asked.
    Returns: each call, of all its processes, that writes there or locks a file there; as many as there are.
    """
    strace = _strace()
    within = [*private_mounts(), "sh", "-c", _READ_ONLY, "sh", str(folder)] if mounted else []
    words = [sys.executable, "-c", textwrap.dedent(code), str(folder), *map(str, arguments)]
    paths = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as traces:
        ran = subprocess.run(
            [*within, *strace, "-o", f"{traces}/of", *words], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": paths}, timeout=5 * DEADLINE_SECONDS,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        lines = [line for each in sorted(Path(traces).iterdir()) for line in _lines(each, folder)]
    assert lines, "nothing was asked of the folder"
    return [line for line in lines if _writes_or_locks(line)]


def _strace() -> list[str]:
    command = ["strace", "-ff", "--seccomp-bpf", "-y", "-e", f"trace=%file,{_OF_DESCRIPTORS}"]
    try:
        tried = subprocess.run([*command, "-o", "/dev/null", "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("strace is not installed")
    if tried.returncode:
        pytest.skip(f"strace may trace nothing here: {tried.stderr.decode().strip()}")
    return command


def _lines(path: Path, folder: Path) -> list[str]:
    text = path.read_text(errors="replace")
    return [line for line in text.splitlines() if str(folder) in line and not line.startswith("exec")]


def _writes_or_locks(line: str) -> bool:
    call, _, rest = line.partition("(")
    if call in ("open", "openat", "creat"):
        return bool(_TO_WRITE.search(rest))
    if call == "fcntl":
        return "LK" in rest
    return bool(_WRITES.fullmatch(call))
