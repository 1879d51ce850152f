"""What an error leaves: a notebook keeps the last one, with its traceback, until the next."""

from __future__ import annotations

import pytest
from helpers import make_cache, publish, wait_until

from arrowcache import explore

for needed in ("duckdb", "pandas"):
    pytest.importorskip(needed, reason="the extra 'explore' is not installed")


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("arrowcache.explore.summary.distribution_of", explore.describe),
        ("xxhash.xxh3_128", explore.duplicates),
        ("arrowcache.explore.summary.distribution_of", explore.drift),
        (
            "pyarrow.parquet.write_table",
            lambda cache: explore.export_parquet(cache, cache.path.parent / "exported"),
        ),
        ("arrowcache.explore.query.announce", lambda cache: explore.sql(cache, "select id from cache")),
    ],
)
def test_what_is_interrupted_keeps_no_segment(tmp_path, monkeypatch, function, call):
    def interrupted(column, *_, **options):
        assert len(column)  # held by this frame, too
        raise KeyboardInterrupt

    cache = make_cache(tmp_path / "cache")
    publish(cache, segments=4)
    monkeypatch.setattr(function, interrupted)
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
