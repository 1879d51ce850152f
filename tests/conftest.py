"""What the whole run shares."""

from __future__ import annotations

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine any example may take long: that is no finding.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


# What a shell starts in the background ignores Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Many tests collect garbage: spare each of them the frameworks that were imported for all."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def call(capsys):
    """Run the `arrowcache` command here: (exit code, stdout, stderr)."""
    from arrowcache.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call
