"""What an error leaves: a notebook keeps the last one, with its traceback, until the next."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from helpers import make_cache, publish, wait_until

from arrowcache import explore

for needed in ("duckdb", "pandas"):
    pytest.importorskip(needed, reason="the extra 'explore' is not installed")


@pytest.mark.parametrize(
    ("put", "call"),
    [
        (lambda patch, here: patch.setattr(np, "copyto", here), explore.describe),
        (lambda patch, here: patch.setattr(xxhash, "xxh3_128", here), explore.duplicates),
        (lambda patch, here: patch.setattr(np, "copyto", here), explore.drift),
        (
            lambda patch, here: patch.setattr(pq, "write_table", here),
            lambda cache: explore.export_parquet(cache, cache.path.parent / "exported"),
        ),
        (
            lambda patch, here: patch.setattr(threading.Thread, "start", here),
            lambda cache: explore.sql(cache, "select id from cache"),
        ),
    ],
)
def test_what_is_interrupted_keeps_no_segment(tmp_path, monkeypatch, put, call):
    def interrupted(*held, **_):  # by this frame, too
        assert held
        raise KeyboardInterrupt

    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=4)
    put(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        call(cache)
    wait_until(lambda: cache.stats().leased_bytes == 0, "Arrow's threads to let go")
    assert kept.value.__traceback__ is not None


def test_an_error_leaves_the_frames_of_the_one_that_is_being_handled(tmp_path):
    def fail():
        mine = "still here"
        raise LookupError(mine)

    def ask_while_it_is_handled():
        try:
            fail()
        except LookupError:
            explore.sql(cache, "select nothing from nowhere")

    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=1)
    with pytest.raises(ValueError, match="the query failed") as kept:
        ask_while_it_is_handled()
    error = kept.value
    while not isinstance(error, LookupError):
        error = error.__context__
    frame = error.__traceback__.tb_next.tb_frame
    assert frame.f_locals["mine"] == "still here"
