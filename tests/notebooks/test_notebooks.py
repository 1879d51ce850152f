"""The notebooks, as a reader runs them, and what is promised of functions that are defined in cells.

Guaranteed of every file in notebooks/: it runs from top to bottom in a kernel of this very interpreter,
in an empty folder; no cell raises or writes to stderr, as warnings do. After the last cell no process
that a cell started lives, and no lease is held; when the kernel has ended, no process and no file is
left. It is stored without outputs and execution counts, and without what an editor notes of a machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE_SECONDS, wait_until
from processes import session_processes

import arrowcache

pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

import nbclient
import nbformat
from ipykernel import kernelspec
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("**/*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
NEEDS: dict[str, tuple[str, ...]] = {
    "01-quickstart": (),
    "02-explore-a-cache": ("ipywidgets", "duckdb", "matplotlib", "pandas", "PIL"),
    "03-train-pytorch": ("torch", "sklearn"),
    "04-train-tensorflow": ("tensorflow",),
    "05-many-machines": ("ray", "torch"),
    "from_my_dataset": ("torch", "sklearn"),
    "from_tfrecord_to_pytorch": ("torch", "sklearn"),
    "from_tfrecord_to_tensorflow": ("tensorflow",),
}
CELL_SECONDS = 120
# What its C++ part says as it is loaded, of level "info", whatever TF_CPP_MIN_LOG_LEVEL asks for.
_REMARK = re.compile(
    r"(?:WARNING: All log messages before absl::InitializeLog.*|I\d{4} \d\d:\d\d:.*"
    r"|.*RuntimeWarning: an epoch leaves out the oldest .*\n  .*)\n"
)

# -- running them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finished:
    """What was there after the last cell, before the kernel ended."""

    complaints: list[str]  # what was written to stderr
    processes: list[str]  # of the kernel's session, without those that only track resources
    leases: list[str]  # locks, as /proc lists them


class Kernels:
    """Runs notebooks, each in a new kernel of this interpreter, with all its files under one folder."""

    def __init__(self, folder: Path) -> None:
        self.work, self.temporary = folder / "work", folder / "tmp"
        for each in (self.work, self.temporary):
            each.mkdir()
        self._jupyter = folder / "jupyter"
        kernelspec.write_kernel_spec(self._jupyter / "kernels" / "python3")
        self._environment = os.environ | {
            "PYTHONPATH": str(Path(arrowcache.__file__).parents[1]),
            "TMPDIR": str(self.temporary),
            "IPYTHONDIR": str(self._jupyter / "ipython"),
            **{f"JUPYTER_{kind}_DIR": str(self._jupyter / kind) for kind in ("CONFIG", "DATA", "RUNTIME")},
        }
        self._environment.pop("PYTEST_CURRENT_TEST", None)  # with it a kernel captures less of its output

    def run(self, notebook: Any, patience_seconds: float = DEADLINE_SECONDS) -> Finished:
        """Execute a notebook's cells, in place; raises what the first one that fails raised.

        Processes that are ending after the last cell have so long to do so.
        """
        specs = KernelSpecManager(
            kernel_dirs=[str(self._jupyter / "kernels")], ensure_native_kernel=False, parent=None
        )
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=specs,
            connection_file=str(self._jupyter / "connection.json"),
        )
        client = nbclient.NotebookClient(notebook, km=manager, timeout=CELL_SECONDS)
        with client.setup_kernel(cleanup_kc=True, env=self._environment, cwd=str(self.work)):
            pid = manager.provisioner.process.pid
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            finished = Finished(complaints(notebook), left_of(pid, patience_seconds), leases_of(pid))
        wait_until(lambda: not session_processes(pid), "the end of the kernel and what it started")
        return finished

    def files(self) -> list[str]:
        """What is left of a notebook's files, but torch's cache, TensorFlow's code and Ray's logs."""
        found = [
            *self.work.iterdir(),
            *(path for path in self.temporary.iterdir() if path.name != "__pycache__"),
            *self.temporary.glob("__pycache__/*"),
        ]
        theirs = ("torchinductor_", "__autograph_generated_file", "ray")
        return [path.name for path in found if not path.name.startswith(theirs)]


def complaints(notebook: Any) -> list[str]:
    """What cells wrote to stderr, with the name of the cell.

    Not TensorFlow's remarks on some processors, nor that an epoch beside samplers leaves out the headroom.
    """
    written = [
        (cell.id, _REMARK.sub("", output.text))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]
    return [f"cell {cell}: {text}" for cell, text in written if text]


def left_of(kernel: int, seconds: float) -> list[str]:
    """Processes of a kernel's session that do not end; trackers of resources live as long as the kernel."""
    deadline = time.monotonic() + seconds
    while True:
        left = [
            process
            for process in session_processes(kernel)
            if int(process.split()[0]) != kernel and "resource_tracker" not in process
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def leases_of(kernel: int) -> list[str]:
    """Shared open-file-description locks of all processes of a kernel's session."""
    held = []
    for process in session_processes(kernel):
        for info in Path("/proc", process.split()[0], "fdinfo").iterdir():
            try:
                lines = info.read_text().splitlines()
            except FileNotFoundError:
                continue
            locks = (line.split() for line in lines if line.startswith("lock:"))
            held += [" ".join(lock) for lock in locks if {"OFDLCK", "READ"} <= {*lock}]
    return held


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    # A short name: DataLoader's workers and Ray use sockets in TMPDIR, whose paths have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nb", ignore_cleanup_errors=True) as folder:
        yield Kernels(Path(folder))


def require(*modules: str) -> None:
    """Skip the test where one of these is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def patiently(run: Callable[[], Finished]) -> Finished:
    """Run again, twice at most, where Ray's servers took longer than its 30 s: so busy a machine may be."""
    for _ in range(2):
        try:
            return run()
        except nbclient.exceptions.CellExecutionError as error:
            if "The current node timed out during startup" not in str(error):
                raise
    return run()


def notebook_of(*cells: str) -> Any:
    """A notebook of these code cells."""
    made = nbformat.v4.new_notebook(metadata=METADATA)
    made.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    return made


def test_what_each_notebook_needs_is_known():
    assert {path.stem for path in NOTEBOOKS} == NEEDS.keys()


@pytest.mark.smoke
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_leaves_nothing_behind(kernels, path):
    require(*NEEDS[path.stem])
    if "matplotlib" in NEEDS[path.stem]:
        import matplotlib.font_manager  # noqa: F401  # on a new machine it lists the fonts, which it says on stderr
    finished = patiently(lambda: kernels.run(nbformat.read(path, as_version=4)))
    assert finished == Finished(complaints=[], processes=[], leases=[])
    assert kernels.files() == []


def test_a_cell_that_raises_is_an_error(kernels):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        kernels.run(notebook_of("1 / 0"))


def test_what_a_notebook_must_not_do_is_seen(kernels):
    finished = kernels.run(
        notebook_of(
            "import warnings; warnings.warn('mind the gap')",
            "import subprocess; asleep = subprocess.Popen(['sleep', '60'])",
            "import arrowcache as ac\n"
            "schema = {'x': ac.Tensor('int64')}\n"
            "cache = ac.Cache.create('cache', schema, capacity='1MiB', segment_bytes=4096)\n"
            "with cache.writer() as writer:\n"
            "    writer.append(x=1)\n"
            "snapshot = cache.snapshot()",
        ),
        patience_seconds=0.5,
    )
    assert ["mind the gap" in complaint for complaint in finished.complaints] == [True]
    assert [process.split()[1] for process in finished.processes] == ["sleep"]
    assert len(finished.leases) == 1
    assert kernels.files() == ["cache"]


def test_the_kernel_is_this_interpreter_and_has_this_library(kernels):
    notebook = notebook_of("import sys, arrowcache; print(sys.executable, arrowcache.__file__)")
    kernels.run(notebook)
    (output,) = notebook.cells[0].outputs
    assert output.text.split() == [sys.executable, arrowcache.__file__]


# -- functions of cells ----------------------------------------------------------------------------

CACHE = """
import os, signal
import numpy as np
import arrowcache as ac
from arrowcache.torch import Loader, dataloader

FACTOR = 3

class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, batch):
        return {"x": scaled(batch["x"], self.factor), "pid": np.full(len(batch["x"]), os.getpid())}

def scaled(x, factor):
    return np.multiply(x, factor)

def times(batch):
    return Times(FACTOR)(batch)

def sample(rng):
    yield {"x": int(rng.integers(100))}

def check(batches):
    rows, pids = [], set()
    for batch in batches:
        rows += batch["x"].tolist()
        pids |= set(batch["pid"].tolist())
    assert sorted(rows) == [3 * k for k in range(100)], sorted(rows)
    assert os.getpid() not in pids
    return pids

cache = ac.Cache.create("cache", {"x": ac.Tensor("int64")}, capacity="1MiB", segment_bytes="32KiB")
with cache.writer() as writer:
    writer.extend(x=np.arange(100))
"""


def test_process_workers_run_functions_of_cells(kernels):
    require("torch")
    finished = kernels.run(
        notebook_of(
            CACHE,
            "for transform in (times, Times(3), lambda batch: times(batch)):\n"
            "    with Loader(cache, 10, workers=2, transform=transform) as loader:\n"
            "        assert len(check(loader) | check(loader) | check(loader)) <= 2",
        )
    )
    assert finished == Finished([], [], [])


def test_dataloader_workers_run_functions_of_cells_however_they_start(kernels):
    require("torch")
    finished = kernels.run(
        notebook_of(
            CACHE,
            *(
                f"loader = dataloader(cache, 10, 2, transform=times, multiprocessing_context={method!r})\n"
                "check(loader), check(loader)\n"
                "del loader"
                for method in ("fork", "forkserver", "spawn")
            ),
            # forkserver's server lives as long as the kernel
            "from multiprocessing import forkserver; forkserver._forkserver._stop()",
        )
    )
    assert finished == Finished([], [], [])


def test_the_stop_button_ends_the_cell_and_nothing_else(kernels):
    """Jupyter sends SIGINT to the kernel's whole process group: workers and samplers are in it."""
    require("torch")
    finished = kernels.run(
        notebook_of(
            CACHE,
            "loader = Loader(cache, 10, workers=2, transform=times, where=lambda segment: segment.seq == 0)\n"
            "pool = ac.SamplerPool(cache, sample, workers=1)\n"
            "workers = check(loader)\n"
            "pool.wait(segments=2, timeout=60)",
            "try:\n"
            "    for batch in loader:\n"
            "        os.killpg(0, signal.SIGINT)\n"
            "except KeyboardInterrupt:\n"
            "    was_stopped = True\n"
            "assert was_stopped",
            "assert len(check(loader) | workers) <= 2\n"
            "pool.wait(segments=pool.stats().segments + 2, timeout=60)\n"
            "assert pool.stats().retries == pool.stats().failures == 0\n"
            "pool.stop(); loader.close(); cache.close()",
        )
    )
    assert finished == Finished([], [], [])


# -- how they are stored ---------------------------------------------------------------------------


def unclean(notebook: Any) -> list[str]:
    """What a stored notebook should not have."""
    found = [] if notebook.metadata == METADATA else [f"metadata is not just {METADATA}"]
    if (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        found.append("the format is not 4.5")
    for cell in notebook.cells:
        if cell.metadata:
            found.append(f"cell {cell.id} has metadata")
        if cell.cell_type == "code" and cell.outputs:
            found.append(f"cell {cell.id} has outputs")
        if cell.cell_type == "code" and cell.execution_count is not None:
            found.append(f"cell {cell.id} has an execution count")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_traces_of_a_machine(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert unclean(notebook) == []
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.mark.slow
def test_what_a_stored_notebook_should_not_have_is_seen(kernels):
    assert unclean(notebook_of("1")) == []
    notebook = notebook_of("print(1)")
    notebook.metadata = METADATA | {"language_info": {"name": "python", "version": "3.11.2"}}
    notebook.cells[0].metadata["collapsed"] = True
    kernels.run(notebook)
    assert len(unclean(notebook)) == 4
