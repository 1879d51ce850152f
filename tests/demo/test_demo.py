"""The demo, as a user runs it: its table and its exit code."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import session_processes
from quick import one_in

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("scikit-learn is not installed", allow_module_level=True)
pytest.importorskip("torch", reason="PyTorch is not installed")

ROW = re.compile(r"^ *\d+(?: +-?\d+(?:\.\d+)?){8}$")


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}


DEMO = [sys.executable, "-m", "arrowcache.demo"]


def run(tmp_path: Path, *options: str, command: list[str] = DEMO) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *options],
        capture_output=True, text=True, timeout=240, check=False, env=environment(tmp_path),
    )  # fmt: skip


def left_behind(tmp_path: Path) -> list[str]:
    """What the demo left in its temporary folder; torch's own empty cache folder is torch's."""
    return [p.name for p in tmp_path.iterdir() if not p.name.startswith("torchinductor_")]


@pytest.fixture
def demo() -> Any:
    """It imports scikit-learn, which takes seconds."""
    from arrowcache import demo

    return demo


def table(output: str) -> list[list[float]]:
    from arrowcache import demo

    lines = output.splitlines()
    first = lines.index(demo.HEADER) + 1
    return [[float(cell) for cell in line.split()] for line in lines[first:] if ROW.match(line)]


@pytest.mark.slow
@pytest.mark.smoke
def test_a_small_demo_learns_grows_evicts_and_exits_with_0(tmp_path):
    done = run(tmp_path, "--capacity", "48MiB", "--epochs", "8", "--seconds", "80")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = table(done.stdout)
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    assert 6 <= len(rows) <= 8, "a machine so busy that 8 epochs take over 80 s shows fewer"
    rows_in_snapshot, evicted = [row[3] for row in rows], [row[4] for row in rows]
    assert rows_in_snapshot[-1] >= 2 * rows_in_snapshot[0]
    assert evicted[0] == 0 < evicted[-1]
    assert "FAILED" not in done.stdout
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_a_demo_of_one_epoch_says_what_failed_and_exits_with_1_without_stderr_too(tmp_path):
    silent = ["sh", "-c", 'exec "$0" "$@" 2>&-', *DEMO]
    done = run(tmp_path, "--capacity", "64MiB", "--epochs", "1", "--workers", "1", command=silent)
    assert done.returncode == 1, done.stdout
    assert len(table(done.stdout)) == 1
    assert "FAILED: the network did not learn" in done.stdout
    assert "FAILED: the snapshots did not double" in done.stdout
    assert left_behind(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send"),
    one_in(
        3,
        [
            pytest.param(signal.SIGINT, os.killpg, id="ctrl-c"),  # a terminal sends it to all processes
            pytest.param(signal.SIGTERM, os.kill, id="kill"),
            pytest.param(signal.SIGKILL, os.kill, id="kill-9"),
        ],
    ),
)
def test_an_interrupted_demo_leaves_no_process_and_no_file(tmp_path, number, send):
    demo_process = subprocess.Popen(
        DEMO,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True, env=environment(tmp_path),
    )  # fmt: skip
    try:
        with demo_process:
            assert demo_process.stdout is not None
            assert any(ROW.match(line.rstrip("\n")) for line in demo_process.stdout)
            assert len(session_processes(demo_process.pid)) >= 3, "the samplers are not at work"
            send(demo_process.pid, number)
            demo_process.stdout.close()
            assert demo_process.wait(timeout=30) != 0
        deadline = time.monotonic() + 5
        while (left := session_processes(demo_process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []
        if number != signal.SIGKILL:
            assert left_behind(tmp_path) == []
    finally:
        try:
            os.killpg(demo_process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def good(demo: Any) -> list[Any]:
    lines = (0, 1.0, 3, 300, 0, 10.0, 10.0, 1.0, 20.0), (1, 1.0, 9, 900, 4, 10.0, 10.0, 1.0, 90.0)
    return [demo.EpochLine(*line) for line in lines]


def test_epochs_that_show_what_was_promised_have_no_failures(demo, good):
    assert demo.failures(good, []) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accuracy_percent": 79.0}, "did not learn"),
        ({"rows": 599}, "did not double"),
        ({"evicted": 0}, "no segment was evicted"),
    ],
)
def test_each_broken_promise_is_named(demo, good, change, words):
    (failure,) = demo.failures([good[0], replace(good[1], **change)], [])
    assert words in failure


def test_a_problem_in_the_cache_is_a_failure(demo, good):
    assert demo.failures(good, ["segment 7 is torn"]) == ["cache.verify() found: segment 7 is torn"]
