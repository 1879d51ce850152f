"""A control group with a limit of memory, as a context manager: a small machine within this one.

The page cache that a process brings in counts as its group's, too. Making one needs root, or a group that was
handed over. Standard library only: processes of any environment enter.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

_ROOT = Path("/sys/fs/cgroup")
_END_SECONDS = 10.0


class ControlGroup:
    """A new group below this process' own, version 2 or 1, which ends with all who are in it.

    Raises: OSError: none can be made here.
    """

    def __init__(self, limit_bytes: int) -> None:
        parent, files = _parent()
        self.folder = parent / f"arrowcache-{uuid.uuid4().hex}"
        self.folder.mkdir()
        try:
            for name, value in files.items():
                with suppress(FileNotFoundError):  # swap may be none of this kernel's
                    (self.folder / name).write_text(value.format(limit_bytes))
        except BaseException:
            self.folder.rmdir()
            raise

    @property
    def entrance(self) -> str:
        """A process that writes 0 into this file is in the group."""
        return str(self.folder / "cgroup.procs")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        until = time.monotonic() + _END_SECONDS
        while True:
            for pid in map(int, Path(self.entrance).read_text().split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                self.folder.rmdir()
                return
            except OSError:  # who was killed is there for a moment
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def _parent() -> tuple[Path, dict[str, str]]:
    """Where a group can be made, and what is written into its files."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            swappiness = {"memory.swappiness": "0"}
            return _ROOT / "memory" / path.lstrip("/"), {"memory.limit_in_bytes": "{}"} | swappiness
        parent = _ROOT / path.lstrip("/")
        with suppress(OSError):
            if not controllers and "memory" in (parent / "cgroup.subtree_control").read_text().split():
                return parent, {"memory.max": "{}", "memory.swap.max": "0"}
    raise OSError("this process has no control group of memory in which another can be made")
