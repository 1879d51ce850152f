"""Launch: a storm in a session of its own, so that whatever is left of it is seen, and ended."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from helpers import wait_until
from processes import Script, small_disk
from storm.report import Report

_COURSE = "import sys; from storm.course import main; main()"
DISK = "64m"
ENDING_SECONDS = 450.0  # beyond the storm's own time: the elders' first epochs, and the end


def run(disk: Path, seconds: float, seed: int, *, on_tmpfs: bool) -> Report:
    """Run a storm in a cache in the folder `disk`.

    Args:
        on_tmpfs: mount one there, which can be measured as a whole; skips where nothing can be mounted.
    Returns: its report. What outlived it fails here.
    """
    within = small_disk(disk, DISK) if on_tmpfs else []
    shared_memory = _own_shared_memory()
    with tempfile.TemporaryDirectory(prefix="arrowcache-storm-") as name:
        folder = Path(name)
        job = {
            "cache": str(disk / "cache"), "folder": name, "seconds": seconds, "seed": seed,
            "is_own_file_system": on_tmpfs, "is_own_shared_memory": bool(shared_memory),
            "most_seconds": seconds + ENDING_SECONDS - 30,
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        with Script(
            _COURSE, folder / "job.json", within=[*within, *shared_memory], new_interpreter=True
        ) as script:
            code, errors = script.end(seconds + ENDING_SECONDS)
            wait_until(lambda: not script.processes(), "every process of the storm to end")
        if code:
            raise AssertionError(f"the storm itself ended with exit code {code}:\n{errors[-6000:]}")
        report = Report.load(folder / "report.json")
        if report.defects:
            report.defects.append(f"written to stderr:\n{errors[-6000:]}")
        return report


def _own_shared_memory() -> list[str]:
    """The beginning of a command that alone sees its /dev/shm; empty where nothing can be mounted."""
    try:
        return small_disk("/dev/shm", DISK)
    except pytest.skip.Exception:
        return []
