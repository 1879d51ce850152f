"""`benchmarks.device_proof`: what it says without a GPU, and that each of its checks can fail."""

from __future__ import annotations

import ast
import dataclasses
import os
import pickle
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from helpers import limit

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_device import FakeDevice
from pretended_cuda import pretended_cuda
from quick import one_in

from arrowcache.torch import DevicePrefetcher, Loader
from benchmarks import device
from benchmarks.device_proof import correctness, figures, graphs, loaders, table, trouble
from benchmarks.device_proof.__main__ import main, outcomes
from benchmarks.device_proof.check import (
    CPU,
    FAILED,
    FAKE,
    GPU,
    HELD,
    NOT_RUN,
    TOLD,
    Check,
    Outcome,
    run,
    verdict,
)
from benchmarks.device_proof.processes import Processes
from benchmarks.device_proof.target import Fake, FakeTrial, Gpu, GpuTrial

ROOT = Path(__file__).parents[2]
CHECKS = {check.name: check for check in table.checks()}

# What a machine with a GPU may lack: in each process that it starts.
_BARE_MACHINE = """
import sys

for name in ("hatchling", "loky", "tqdm", "psutil", "pandas", "matplotlib", "tensordict"):
    sys.modules[name] = None


class Lacks:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "cloudpickle" and not any(part.endswith("stand_ins") for part in sys.path):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Lacks)
"""


@pytest.fixture(autouse=True)
def one_thread():
    """As the command has it: others would spin while they wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.nightly("benchmarks/device_proof", "arrowcache/torch")
def test_without_a_gpu_all_that_can_runs_on_a_bare_machine_and_the_verdict_says_that_it_is_no_proof(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_BARE_MACHINE)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_proof", "--fake", "--out", tmp_path],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "No CUDA device is used" in lines[1]
    assert lines[-1].startswith("NOT PROVED ON A GPU, for there is none here")
    seen = {}
    for line in lines:
        if found := [check for check in CHECKS.values() if f"  {check.name}: {check.proves}" in line]:
            seen[found[0].name] = line[:13].split()
    assert seen == {
        name: ["not", "run", GPU]
        if check.without_gpu is None
        else [TOLD if check.is_figure else HELD, check.without_gpu]
        for name, check in CHECKS.items()
    }
    assert (tmp_path / "table.txt").read_text().splitlines() == lines


@pytest.mark.parametrize("calls", ["copy waits", "compute waits", "query"])
def test_a_wait_that_is_left_out_turns_the_verdict_to_failed(calls, capsys):
    assert main(["--fake", "--only", "storm", "--leave-out", calls]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: storm (fake)"


def failed(name: str, target: Fake | None = None) -> str:
    """What a check says that failed."""
    check = CHECKS[name]
    outcome = run(check, target or Fake(), check.without_gpu or GPU)
    assert outcome.state == FAILED, outcome
    return outcome.said


class Refuses(FakeDevice):
    def register(self, address, nbytes):
        return False


class Late(FakeDevice):
    """A processor waits for it though it is done."""

    def query(self, event):
        return self.clock > 0


class Silent(FakeDevice):
    """It does not say that a graph is captured."""

    def is_capturing(self):
        return False


class Idle(FakeTrial):
    def block(self, seconds):
        pass


class Boundless(FakeTrial):
    def limit(self, nbytes):
        return nullcontext()


SLOW = pytest.mark.slow
BROKEN = {
    "a loader's slots are used again too early": ("loader", {"leave_out": ["query"]}, ""),
    "those of a dataset's items": ("items", {"leave_out": ["query"]}, ""),
    "those of documents": ("documents", {"leave_out": ["query"]}, ""),
    "those of chosen rows": ("choice", {"leave_out": ["query"]}, ""),
    "those that are registered": ("registered", {"leave_out": ["query"]}, ""),
    "those of workers": ("workers", {"leave_out": ["query"]}, ""),
    "a processor waits for a device that is done": ("sync", {"fake": Late}, "the processor waited"),
    "a call during a capture": ("capture global", {"fake": Silent}, "not permitted when stream is capturing"),
    "slots are not read": ("registered", {"fake": Refuses}, "the device did not read from these"),
    "those of workers are not read": ("workers", {"fake": Refuses}, "the device did not read from these"),
    "a device is not busy": ("busy", {"kind": Idle}, "waited for the device 0"),
    "a device is not full": ("full", {"kind": Boundless}, "the limit was none"),
}


@pytest.mark.parametrize("how", [*(pytest.param(how, marks=SLOW) for how in [*BROKEN][:7]), *[*BROKEN][7:]])
def test_a_device_that_is_broken_fails(how):
    name, options, said = BROKEN[how]
    assert said in failed(name, Fake(**options))


class Takes(Loader):
    """It takes in all rows, whatever is said of them."""

    def __init__(self, *arguments, weights=None, expect=(), **options):
        super().__init__(*arguments, rows="all", **options)


class Stalls(Loader):
    """A busy device counts as stall."""

    def stats(self):
        seconds = self.device_stats().batches if self.device_stats() else 0
        return dataclasses.replace(super().stats(), stall_seconds=float(seconds))


class Keeps(DevicePrefetcher):
    """One whose consumer's batches are never let go."""

    def __iter__(self):
        self.kept = []
        for batch in super().__iter__():
            self.kept.append(batch)
            yield batch


class Mixes(DevicePrefetcher):
    """One that hands over the next batch's memory."""

    def __iter__(self):
        first, *others = super().__iter__()
        yield from [*others, first]


class Swallows(DevicePrefetcher):
    """One whose errors nobody hears of."""

    def __iter__(self):
        batches = super().__iter__()
        while True:
            try:
                yield next(batches)
            except (StopIteration, RuntimeError):
                return


@pytest.mark.parametrize(
    ("module", "broken", "name", "said"),
    [
        (correctness, Mixes, "autograd", "the gradient is"),
        (correctness, Mixes, "copies", "read ["),
        (correctness, Keeps, "memory", "reserved bytes, allocations"),
        (loaders, Takes, "choice", "which are excluded or weigh nothing"),
        (trouble, Stalls, "busy", "stall 13.000 s"),
        (trouble, Swallows, "full", "the iteration ended after batch -1 of 7"),
        (trouble, Swallows, "broken", "no call of the fake failed"),
    ],
)
def test_a_loader_or_prefetcher_that_is_broken_fails(monkeypatch, module, broken, name, said):
    monkeypatch.setattr(module, broken.__base__.__name__, broken)
    assert said in failed(name)


def test_a_copy_for_each_leaf(monkeypatch):
    limit(monkeypatch, small_leaf_bytes=1)
    assert "820 copies for 20 batches" in failed("copies")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os; os.abort()", "exit code -6"),
        ("1 / 0", "exit code 1"),
        ("while True: pass", "did not end"),
    ],
)
def test_an_interpreter_that_ends_badly(script, said, monkeypatch):
    monkeypatch.setattr(trouble, "ENDS", {"it ends": (script, 0)})
    monkeypatch.setattr(trouble, "BEGIN", "import sys\n")
    monkeypatch.setattr(trouble, "EXIT_SECONDS", 5.0)
    assert said in failed("ends")


def outcome(state, where=GPU, name="a"):
    return Outcome(name, "", where, state, "")


NONE_HERE = "NOT PROVED ON A GPU, for there is none here: 1 on the fake, 0 on the CPU held; not run: "


@pytest.mark.parametrize(
    ("found", "device", "is_complete", "said", "is_good"),
    [
        ([outcome(HELD), outcome(TOLD)], "H", True, "PROVED ON A GPU: H, 1 checks", True),
        (
            [outcome(HELD)],
            "H",
            False,
            "NOT PROVED on H: 1 checks held; not run: what was not asked for",
            True,
        ),
        ([outcome(HELD), outcome(NOT_RUN)], "H", True, "NOT PROVED on H: 1 checks held; not run: a", True),
        ([outcome(HELD), outcome(FAILED)], "H", True, "FAILED: a (GPU)", False),
        ([outcome(HELD, FAKE), outcome(FAILED, CPU)], None, True, "FAILED: a (CPU)", False),
        ([outcome(HELD, FAKE), outcome(NOT_RUN)], None, True, NONE_HERE + "a", True),
        ([outcome(HELD, FAKE)], None, True, NONE_HERE + "none", True),
    ],
)
def test_the_verdict(found, device, is_complete, said, is_good):
    assert verdict(found, device, is_complete=is_complete) == (said, is_good)


def test_all_checks_keep_the_limit_of_time():
    def slow(check, seconds):
        time.sleep(min(seconds, 0.05))
        return outcome(HELD, name=check.name)

    checks = [Check(str(number), "", str, 0.01) for number in range(3)]
    found = list(outcomes([Check("first", "", str, 60.0), *checks], slow, 10.04))
    assert [each.state for each in found] == [HELD, HELD, HELD, HELD]
    found = list(outcomes([Check("first", "", str, 60.0), *checks], slow, 0.02))
    assert [each.state for each in found] == [NOT_RUN, HELD, NOT_RUN, NOT_RUN]
    assert "were over" in found[-1].said


@pytest.mark.slow
def test_a_check_that_hangs_or_dies_costs_its_own_time_and_no_more():
    processes = Processes(partial(int, "60"))  # what the checks run on is a number
    try:
        assert processes.run(Check("says", "", str, 60.0), 60.0).said == "60"
        hung = processes.run(Check("hangs", "", time.sleep, 4.0), 4.0)  # its stack comes at 3.6 s
        assert (hung.state, hung.said.splitlines()[0]) == (FAILED, "not over after 4 s")
        assert "in run" in hung.said  # where it was
        died = processes.run(Check("dies", "", os._exit, 60.0), 60.0)
        assert died.said == "its process died: exit code 60"
        alone = processes.run(Check("is alone", "", str, 60.0, is_alone=True), 60.0)
        assert (alone.state, alone.said) == (HELD, "60")
        assert "TypeError" in processes.run(Check("raises", "", len, 60.0), 60.0).said
        assert processes.run(Check("says", "", str, 60.0), 60.0).said == "60", "of a new process"
    finally:
        processes.close()
    assert "ValueError" in Processes(partial(int, "x")).run(Check("says", "", str, 60.0), 60.0).said


@pytest.mark.parametrize(
    ("spans", "others", "share"),
    [
        ([(0, 10)], [(2, 4), (3, 6), (9, 20)], 0.5),
        ([(0, 1), (2, 3)], [(0, 1)], 0.5),
        ([(0, 1)], [], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_share_of_time_under_others(spans, others, share):
    assert device.share_under(spans, others) == share


class Blind(GpuTrial):
    """A try that reads nothing."""

    def read(self, tensor, expected):
        pass


NOT_PRETENDED = {
    "broken",
    "ends",
    "rates",
    "python",
    "step of 32 MB",
    "step of 256 MB",
}  # or nothing new


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize(
    "name", one_in(4, [name for name in CHECKS if name not in NOT_PRETENDED], "benchmarks/device_proof")
)
def test_what_is_for_a_gpu_runs_where_cuda_is_pretended(name, tmp_path, monkeypatch):
    monkeypatch.setattr(correctness, "STORM_SECONDS", 0.0)
    monkeypatch.setattr(correctness, "LOADER_SECONDS", 0.0)
    monkeypatch.setattr(correctness, "FLAT_EPOCHS", 4)
    monkeypatch.setattr(graphs, "CAPTURE_SECONDS", 0.0)
    monkeypatch.setattr(trouble, "BUSY_SECONDS", 0.5)
    monkeypatch.setattr(figures, "STEPS", {1: 3, 32: 2, 256: 1})
    kind = Blind if name == "busy" else GpuTrial  # reads are at once here, also where the device is busy
    check = next(check for check in table.checks(tmp_path / "trace.json.gz") if check.name == name)
    with pretended_cuda() as fake:
        found = run(check, Gpu(kind), GPU)
        assert (found.state, fake.errors) == (TOLD if check.is_figure else HELD, []), found.said
    assert (tmp_path / "trace.json.gz").exists() == (name == "hidden")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize(
    "name",
    ["storm", "loader", "registered", "workers", "autograd", "sync", "busy", "memory", "copies"],
)
def test_on_a_gpu_it_holds(name):
    found = run(CHECKS[name], Gpu(), GPU)
    assert found.state == HELD, found.said


def test_all_names_of_torch_are_there():
    """Also those that only a GPU would reach, as far as this build has them."""
    for path in (ROOT / "benchmarks" / "device_proof").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"torch(\.\w+)+", name) and "._sanitizer" not in name:
                value = torch
                for part in name.split(".")[1:]:
                    assert hasattr(value, part), name
                    value = getattr(value, part)


def test_all_checks_can_be_sent_to_a_process():
    for check in table.checks(Path("trace.json.gz")):
        assert pickle.loads(pickle.dumps(check)).name == check.name
