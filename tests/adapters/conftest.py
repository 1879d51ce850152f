"""What all tests of adapters need."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _drop_workers_soon(monkeypatch):
    """An error in a stock DataLoader makes a cycle of its iterator and the traceback. When that is collected,
    its queues are closed before its workers are told to end, and torch waits 5 s for each in vain.
    """
    if "torch" in sys.modules:
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
