"""What `benchmarks.beyond_memory` rests on: the disk's rates, the group, and that its cases run."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import KIB

from benchmarks import beyond_memory, bounded
from benchmarks.bounded import ControlGroup

ROOT = Path(__file__).parents[2]
MIB = 1024 * KIB
SAMPLERS = ["samplers alone", "rows, beside"]


@pytest.fixture
def begun(monkeypatch):
    """Measurements begin at once."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n" * 9))


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.arrow").write_bytes(bytes(range(256)) * (8 << 10))
    (tmp_path / "cache.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("row_bytes", [100, 4096, 70_000])
def test_the_random_rate_is_of_whole_rows(folder, begun, row_bytes):
    request = {"folder": str(folder), "row_bytes": row_bytes, "seconds": 0.05}
    assert bounded.random_rate(request)["rate"] > 0


def test_rows_are_dropped_where_files_cannot_be_read_past_the_page_cache(folder, begun, monkeypatch):
    opened = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    found = bounded.random_rate({"folder": str(folder), "row_bytes": 4096, "seconds": 0.05})
    assert found["rate"] > 0
    assert not found["is_direct"]


def test_the_rate_in_order_is_of_each_file_once(folder, begun):
    assert bounded.sequential_rate({"folder": str(folder), "seconds": 60})["rate"] > 0
    assert [path.name for path in bounded.files_of(str(folder))] == ["0.arrow", "1.arrow", "2.arrow"]


def test_batches_are_taken_for_a_time_and_at_least_one(begun):
    batches = [{"x": np.zeros(10)}, (np.zeros(10), np.zeros(1))]
    assert bounded.delivered(batches, 0.0)["rate"] > 0
    found = bounded.delivered(batches, 0.01)
    assert found["rate"] > 0
    assert found["worst_gap"] >= 0


def test_the_bytes_of_a_ragged_tensor_are_those_of_its_rows():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ragged = torch.nested.nested_tensor_from_jagged(torch.zeros(7), torch.tensor([0, 3, 7]))
    assert bounded.nbytes_of(ragged) == 28
    assert bounded.nbytes_of(torch.zeros(3, 5)) == 60


def test_each_case_is_set_over_both_rates_and_over_cold():
    found = {
        "rows": {"rate": 2e9, "read_for_one": 1.5, "worst_gap": 0.25, "bottleneck": "store"},
        "rows, half resident": {"rate": 3e9},
        "None": {"failed": "no batch in 9 s"},
        "samplers alone": {"rate": 3e8},
    }
    assert beyond_memory.ratios_of(found, (4e9, 8e9)) == {
        "rows": (0.5, 0.25),
        "rows, half resident": (0.75, 0.375),
        "samplers alone": (0.075, 0.0375),
    }
    _, rows, half, none, samplers = beyond_memory.table(found, (4e9, 8e9))
    assert rows.split() == ["rows", "2.000", "0.50", "0.25", "1.50", "0.25", "store"]
    assert half.split() == ["rows,", "half", "resident", "3.000", "0.75", "0.38", "1.50"]
    assert none.strip() == "None no batch in 9 s"
    assert samplers.split() == ["samplers", "alone", "0.300", "0.07", "0.04"]


def test_sizes_and_names_are_checked(capsys):
    options = beyond_memory.parse(["--rows", "4KiB,ragged", "--shuffles", "rows,None", "--group", "1MiB"])
    assert (options.rows, options.shuffles, options.group_bytes) == (["4KiB", "ragged"], ["rows", None], MIB)
    for arguments in (["--rows", "many"], ["--shuffles", "rows,x"], ["--size", "0"], ["--states", "warm"]):
        with pytest.raises(SystemExit) as ended:
            beyond_memory.parse(arguments)
        assert ended.value.code == 2
    assert "rows,x" not in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(beyond_memory, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [])
    options = beyond_memory.parse(["--size", "1MiB"])
    assert beyond_memory.peers_measured(None, "64KiB", options, tmp_path) == {}
    assert capsys.readouterr().out.count("left out") == len(beyond_memory.BESIDE)


def test_without_a_control_group_it_says_so_in_one_sentence(monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SystemExit, match=r"needs a control group.*Permission denied") as ended:
        beyond_memory.main([])
    assert "\n" not in str(ended.value.code)


def made_group() -> ControlGroup:
    try:
        return ControlGroup(700 * MIB)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")


@pytest.mark.slow
def test_a_group_ends_with_those_who_are_in_it():
    script = "import sys; open(sys.argv[1], 'w').write('0'); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with made_group() as group:
        process = subprocess.Popen([sys.executable, "-c", script, group.entrance], stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        process.stdout.readline()
        assert str(process.pid) in Path(group.entrance).read_text().split()
    assert not group.folder.exists()
    with process:
        assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.nightly("benchmarks")
@pytest.mark.parametrize(
    ("rows", "shuffles", "names"),
    [
        ("64KiB", "rows,None", ["rows", "rows, half", "None", "None, half", *SAMPLERS, "None, beside"]),
        ("ragged", "rows", ["rows", "rows, half", *SAMPLERS]),
    ],
)
def test_every_case_runs(tmp_path, rows, shuffles, names):
    """With a cache that is far smaller than memory: the figures mean nothing."""
    pytest.importorskip("torch", reason="torch is not installed")
    with made_group():
        pass
    command = [sys.executable, "-m", "benchmarks.beyond_memory", "--rows", rows, "--size", "24MiB"]
    done = subprocess.run(
        [*command, "--group", "700MiB", "--seconds", "0.2", "--shuffles", shuffles],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | {"BENCH_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("GB/s")) + 1 :]
    for line, name in zip(table, names, strict=True):
        found = re.match(rf"{name}[ a-z]* (\d+\.\d+) ", line)
        assert found is not None, line
        assert float(found[1]) > 0
    assert os.listdir(tmp_path) == []
