"""What errors of the operating system say is to be done."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from arrowcache.os_errors import explained


@pytest.mark.parametrize(
    ("limit", "shown"), [(1 << 20, "1048576 bytes"), (resource.RLIM_INFINITY, "any number")]
)
def test_a_file_that_may_not_grow_names_the_limit(monkeypatch, limit, shown):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_FSIZE: (limit, limit)}[kind])
    told = str(explained(OSError(errno.EFBIG, os.strerror(errno.EFBIG))))
    assert shown in told
    assert "ulimit -f" in told
