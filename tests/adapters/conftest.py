"""What all tests of adapters need."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fake_device import FakeDevice


@pytest.fixture(autouse=True)
def _drop_workers_soon(monkeypatch):
    """An error in a stock DataLoader makes a cycle of its iterator and the traceback. When that is collected,
    its queues are closed before its workers are told to end, and torch waits 5 s for each in vain.
    """
    if "torch" in sys.modules:
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a dataset is cached."""
    return tmp_path / "cache"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a dataset of tests notes what it makes."""
    return tmp_path / "log"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeDevice]]:
    """Fake devices by name. At the end of a test all of them have read is right, and their memory is free."""
    from fake_device import FakeDevice

    import arrowcache.torch.device
    from arrowcache.torch.device_copier import tidy

    made: dict[str, FakeDevice] = {}

    def backend_of(name: str) -> FakeDevice:
        return made.setdefault(name, FakeDevice("random", seed=len(made)))

    monkeypatch.setattr(arrowcache.torch.device, "backend_of", backend_of)
    yield made
    gc.collect()
    tidy()
    for name, device in made.items():
        device.finish()
        assert (device.errors, device.memory_bytes) == ([], 0), name


@pytest.fixture
def fake(fakes: dict[str, FakeDevice]) -> FakeDevice:
    """One of them, which is there before anybody asks for it."""
    import arrowcache.torch.device

    device: FakeDevice = arrowcache.torch.device.backend_of("fake")
    return device


@pytest.fixture
def stateful() -> type:
    """torchdata's DataLoader."""
    reason = "torchdata is not installed: StatefulDataLoader cannot be tried"
    module = pytest.importorskip("torchdata.stateful_dataloader", reason=reason)
    loader: type = module.StatefulDataLoader
    return loader
