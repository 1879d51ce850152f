"""The proof of the way to a device: its verdict, also without a GPU; and each of its tests can fail."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers import limit

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from fake_device import FakeDevice
from gpu import test_batches, test_graphs, test_loaders, test_trouble
from gpu.__main__ import FAILED, HELD, NOT_RUN, Outcome, Run, main, named, verdict
from gpu.trials import Fake, FakeTrial, Gpu, GpuTrial
from pretended_cuda import pretended_cuda
from quick import one_in

from arrowcache.torch import DevicePrefetcher, Loader
from benchmarks import device

ROOT = Path(__file__).parents[2]
TESTS = {
    named(name)[0]: test
    for module in (test_batches, test_loaders, test_graphs, test_trouble)
    for name, test in vars(module).items()
    if name.startswith("test_")
}
GPU_ALONE = {
    "the sanitizer of cuda sees no race", "a capture of one thread is left alone",
    "captures of graphed callables are left alone", "graphs of the compiler are left alone",
}  # fmt: skip

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
@pytest.mark.nightly("tests/gpu", "arrowcache/torch")
def test_without_a_gpu_all_that_can_runs_on_a_bare_machine_and_the_verdict_says_that_it_is_no_proof(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_BARE_MACHINE)
    done = subprocess.run(
        [sys.executable, "-m", "gpu", "--without-gpu", "--out", tmp_path], cwd=ROOT, capture_output=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}"}, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "No CUDA device is used" in lines[1]
    held = len(TESTS) - len(GPU_ALONE)
    assert lines[-1].startswith(f"NOT PROVED ON A GPU, for there is none here: {held} held on the fake")
    seen = {line.partition(" s  ")[2]: line[:13].split() for line in lines if " s  " in line[:24]}
    assert seen == {name: ["not", "run", "gpu"] if name in GPU_ALONE else [HELD, "fake"] for name in TESTS}
    assert (tmp_path / "table.txt").read_text().splitlines() == lines


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["copy waits", "compute waits", "query"])
def test_a_wait_that_is_left_out_turns_the_verdict_to_failed(calls, capsys):
    assert main(["--without-gpu", "--only", "every_read_sees", "--leave-out", calls]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: every read sees its batch (fake)"


def failed(name: str, target: Fake | None = None) -> str:
    """The message of a test that fails."""
    try:
        TESTS[name](target or Fake(), print)
    except Exception as error:  # any error is a failure
        return str(error)
    pytest.fail(f"{name} holds")


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
LOADER, SLOTS = "every order of a loader arrives bit for bit", "slots of a loader are read where they are"
OF_WORKERS = "slots of worker processes are read where they are"
BUSY, FULL = "a busy device is no stall and no timeout", "a full device is told and healed"
CHOICE = "rows that are excluded or weigh nothing do not arrive"
BROKEN = {
    "a loader's slots are used again too early": (LOADER, {"leave_out": ["query"]}, ""),
    "those of a dataset's items": (
        "items of a slow dataset arrive made or cached", {"leave_out": ["query"]}, ""
    ),
    "those of documents": ("packed and ragged batches arrive", {"leave_out": ["query"]}, ""),
    "those of chosen rows": (CHOICE, {"leave_out": ["query"]}, ""),
    "those that are registered": (SLOTS, {"leave_out": ["query"]}, ""),
    "those of workers": (OF_WORKERS, {"leave_out": ["query"]}, ""),
    "a processor waits for a device that is done": (
        "nothing synchronizes the device", {"fake": Late}, "the processor waited"
    ),
    "a call during a capture": (
        "a capture is left alone", {"fake": Silent}, "not permitted when stream is capturing"
    ),
    "slots are not read": (SLOTS, {"fake": Refuses}, "the device did not read from these"),
    "those of workers are not read": (OF_WORKERS, {"fake": Refuses}, "the device did not read from these"),
    "a device is not busy": (BUSY, {"kind": Idle}, "waited for the device 0"),
    "a device is not full": (FULL, {"kind": Boundless}, "the limit was none"),
}  # fmt: skip


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
        (test_batches, Mixes, "batches that only autograd keeps are kept", "the gradient is"),
        (test_batches, Mixes, "small leaves share a copy", "read ["),
        (test_batches, Keeps, "reserved memory is flat", "reserved bytes, allocations"),
        (test_loaders, Takes, CHOICE, "which are excluded or weigh nothing"),
        (test_trouble, Stalls, BUSY, "stall 13.000 s"),
        (test_trouble, Swallows, FULL, "the iteration ended after batch -1 of 7"),
        (test_trouble, Swallows, "a device that fails is told and left", "no call of the fake failed"),
    ],
)
def test_a_loader_or_prefetcher_that_is_broken_fails(monkeypatch, module, broken, name, said):
    monkeypatch.setitem(vars(module), broken.__base__.__name__, broken)
    assert said in failed(name)


def test_a_copy_for_each_leaf(monkeypatch):
    limit(monkeypatch, small_leaf_bytes=1)
    assert "820 copies for 20 batches" in failed("small leaves share a copy")


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
    monkeypatch.setattr(test_trouble, "ENDS", {"it ends": (script, 0)})
    monkeypatch.setattr(test_trouble, "BEGIN", "import sys\n")
    monkeypatch.setattr(test_trouble, "EXIT_SECONDS", 5.0)
    assert said in failed("interpreters end with copies under way")


def outcome(state, where="gpu", name="a"):
    return Outcome(name, where, state, "")


NONE_HERE = "NOT PROVED ON A GPU, for there is none here: 1 held on the fake; not run: "


@pytest.mark.parametrize(
    ("found", "device", "is_complete", "said", "is_good"),
    [
        ([outcome(HELD)], "H", True, "PROVED ON A GPU: H, 1 tests", True),
        ([outcome(HELD)], "H", False, "NOT PROVED on H: 1 tests held; not run: other tests", True),
        ([outcome(HELD), outcome(NOT_RUN)], "H", True, "NOT PROVED on H: 1 tests held; not run: a", True),
        ([outcome(HELD), outcome(FAILED)], "H", True, "FAILED: a (gpu)", False),
        ([outcome(HELD, "fake"), outcome(FAILED, "fake")], None, True, "FAILED: a (fake)", False),
        ([outcome(HELD, "fake"), outcome(NOT_RUN)], None, True, NONE_HERE + "a", True),
        ([outcome(HELD, "fake")], None, True, NONE_HERE + "none", True),
        ([], "H", True, "NOT PROVED on H: 0 tests held; not run: other tests", True),
    ],
)
def test_the_verdict(found, device, is_complete, said, is_good):
    assert verdict(found, device, is_complete=is_complete) == (said, is_good)


_TESTS = """
import os, time
import pytest

def test_it_says(saw):
    saw("60")

@pytest.mark.proof(seconds=3.0)
def test_it_hangs():
    time.sleep(60)

def test_it_dies():
    os._exit(60)

def test_it_raises():
    raise ValueError("x")

@pytest.mark.proof(is_alone=True)
def test_it_is_alone(saw):
    saw(str(os.getpid()))

def test_it_is_left_out():
    pytest.skip("why")

def test_it_is_last(saw):
    saw(str(os.getpid()))
"""


@pytest.mark.slow
def test_a_test_that_hangs_or_dies_costs_its_own_time_and_no_more(tmp_path):
    (tmp_path / "conftest.py").write_text("from gpu.conftest import *\n")
    (tmp_path / "test_some.py").write_text(_TESTS)
    environment = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    run = Run(tmp_path, environment, 120.0, tmp_path)
    tests = run.collect([str(tmp_path / "test_some.py")])
    assert [name for name, is_alone in tests.items() if is_alone] == [
        test for test in tests if "alone" in test
    ]
    found = {each.test: each for each in run.outcomes(tests)}
    states = {name: each.state for name, each in found.items()}
    assert states == {
        "it says": HELD, "it hangs": FAILED, "it dies": FAILED, "it raises": FAILED, "it is alone": HELD,
        "it is left out": NOT_RUN, "it is last": HELD,
    }  # fmt: skip
    assert found["it says"].said == "60"
    assert "in test_it_hangs" in found["it hangs"].said  # where it was
    assert "exit code 60" in found["it dies"].said
    assert "ValueError" in found["it raises"].said
    assert found["it is left out"].said == "why"
    assert found["it is alone"].said != found["it is last"].said
    late = [*Run(tmp_path, environment, -1.0, tmp_path).outcomes(tests)]
    assert {(each.state, each.said) for each in late} == {(NOT_RUN, "the time for all tests was over")}


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize(
    "name",
    one_in(
        4,
        [name for name in TESTS if name.partition(" ")[0] != "interpreters" and "fails" not in name],
        "tests/gpu",
    ),
)
def test_what_is_for_a_gpu_runs_where_cuda_is_pretended(name, monkeypatch):
    monkeypatch.setattr(test_batches, "STORM_SECONDS", 0.0)
    monkeypatch.setattr(test_batches, "LOADER_SECONDS", 0.0)
    monkeypatch.setattr(test_batches, "FLAT_EPOCHS", 4)
    monkeypatch.setattr(test_graphs, "CAPTURE_SECONDS", 0.0)
    monkeypatch.setattr(test_trouble, "BUSY_SECONDS", 0.5)
    kind = Blind if name == BUSY else GpuTrial  # reads are at once here, also where the device is busy
    said = []
    with pretended_cuda() as fake:
        TESTS[name](Gpu(kind), said.append)
        assert (len(said), fake.errors) == (1, [])


@pytest.mark.slow
def test_the_figures_of_a_gpu_run_where_cuda_is_pretended(tmp_path, capsys):
    with pretended_cuda() as fake:
        found = device.measure(1, steps=3, repeats=1, peers=False)
        assert {"copy alone", "compute alone", "prefetcher", "prefetcher, pinned"} <= {*found}
        profile = device.under_compute()
        assert device.share_under(*device.spans_of(profile)) == 1.0
        profile.export_chrome_trace(str(tmp_path / "trace"))
        device.show_rates("cuda", 16 << 20)
        assert fake.errors == []
    assert "a bare copy" in capsys.readouterr().out


def test_all_names_of_torch_are_there():
    """Also those that only a GPU would reach, as far as this build has them."""
    for path in [*(ROOT / "tests" / "gpu").glob("*.py"), ROOT / "benchmarks" / "device.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"torch(\.\w+)+", name) and "._sanitizer" not in name:
                value = torch
                for part in name.split(".")[1:]:
                    assert hasattr(value, part), name
                    value = getattr(value, part)
