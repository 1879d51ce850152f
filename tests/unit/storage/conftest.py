"""What the tests of storage share."""

from __future__ import annotations

import pytest


@pytest.fixture
def target(tmp_path):
    """A file of somebody else's, outside of the cache."""
    path = tmp_path / "target"
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious"
