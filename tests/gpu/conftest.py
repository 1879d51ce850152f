"""Fixtures and hooks of the tests of the way to a device: the fake, the GPU, and the file of the proof.

Each test runs on a device in software (tests/fake_device.py), and on a GPU where there is one; it tells `saw`
its counts. `make device-proof`, or `PYTHONPATH=tests python -m gpu`, runs them all and ends in a verdict:
see __main__.py. Without a GPU the variants for one are skipped, and nothing is proved.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

REPORT, LEAVE_OUT, NO_GPU = "PROOF_REPORT", "PROOF_LEAVE_OUT", "PROOF_WITHOUT_GPU"
"""Variables that the proof sets: its file; calls that the fake does not hear; that no GPU is to be used."""
SECONDS = 60.0  # of a test in the proof, unless its mark says otherwise
MARKS = (
    "gpu: needs a CUDA device; skipped where there is none",
    "proof(seconds, is_alone): how long a test of tests/gpu may take; if it has a process of its own",
)
_LAST_LINES = -12


def pytest_configure(config: pytest.Config) -> None:
    for mark in (*MARKS, "slow", "nightly(*folders)"):
        config.addinivalue_line("markers", mark)  # the proof reads no pyproject.toml


def tell(**entry: Any) -> None:
    """Add a line to the proof's file, if there is one."""
    if path := os.environ.get(REPORT):
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()) and "target" not in item.fixturenames:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        mark = item.get_closest_marker("proof")
        wish = mark.kwargs if mark else {}
        tell(test=item.nodeid, state="collected", is_alone=wish.get("is_alone", False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """In the proof a test that takes too long ends its process, and says where it hangs."""
    if REPORT not in os.environ:
        return (yield)
    mark = item.get_closest_marker("proof")
    tell(test=item.nodeid, state="begun")
    faulthandler.dump_traceback_later((mark.kwargs if mark else {}).get("seconds", SECONDS), exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        said = "\n".join(report.longreprtext.splitlines()[_LAST_LINES:])
        tell(test=report.nodeid, state="FAILED", said=said, seconds=report.duration)
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        tell(test=report.nodeid, state="not run", said=reason.removeprefix("Skipped: "), seconds=0.0)
    elif report.when == "call":
        said = "; ".join(str(value) for name, value in report.user_properties if name == "saw")
        tell(test=report.nodeid, state="held", said=said, seconds=report.duration)


@pytest.fixture
def saw(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes a sentence about a test's counts, which the proof prints."""
    return lambda text: request.node.user_properties.append(("saw", text))


_ON_THE_FAKE = [pytest.mark.slow, pytest.mark.nightly("tests/gpu", "arrowcache/torch")]


@pytest.fixture(params=[pytest.param("fake", marks=_ON_THE_FAKE), pytest.param("gpu", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The fake, then the GPU."""
    if request.param == "gpu":
        yield request.getfixturevalue("gpu")
        return
    import torch
    from gpu.trials import Fake

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others spin while they wait, and take the processors that they wait for
    yield Fake(tuple(filter(None, os.environ.get(LEAVE_OUT, "").split(","))))
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The GPU."""
    import torch
    from gpu.trials import Gpu

    if not torch.cuda.is_available() or NO_GPU in os.environ:
        pytest.skip("no CUDA device is used: this is not proved")
    return Gpu()
