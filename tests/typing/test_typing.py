"""The public API under mypy --strict, as a user's own code is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")

HERE = Path(__file__).parent


@pytest.mark.slow
def test_typed_use_of_the_public_api_is_sound() -> None:
    """With the cache of `make lint`: files that did not change since are not checked again."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", str(HERE.parents[1] / "pyproject.toml"),
         str(HERE / "public_api.py")],
        cwd=HERE.parents[1], capture_output=True, text=True, timeout=280, check=False, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
