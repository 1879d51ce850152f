"""The live view in a notebook, without a browser: its one trait moves, and its thread ends."""

from __future__ import annotations

import gc
import html
import re
import signal
import time
from pathlib import Path

import pytest
from begun import own_threads
from helpers import publish, wait_until
from processes import Script

pytest.importorskip("ipywidgets", reason="the extra 'explore' is not installed")

import arrowcache as ac
from arrowcache.explore.widget import Monitor, monitor

GONE = "No such file or directory"


def text_of(shown: Monitor) -> str:
    """What a reader sees."""
    return html.unescape(re.sub("<[^>]+>", " ", shown.value))


def test_it_shows_the_cache_at_once_and_then_what_becomes_of_it(cache):
    with monitor(cache, interval=0.05) as shown:
        assert "10 segments" in text_of(shown)
        publish(cache, 3)
        wait_until(lambda: "13 segments" in text_of(shown), "it to move")
        curve = re.compile(r'published .*? points="[^"]*,0\.0')  # which touches the top
        wait_until(lambda: curve.search(shown.value), "what was published")
        assert len(shown.history) >= 2
        assert cache.stats().leased_bytes == 0


def test_a_saved_notebook_has_it_as_text(cache):
    with monitor(cache, interval=3600.0) as shown:
        says = shown._repr_mimebundle_()
    assert "10 segments, 160 rows" in says["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in says


def test_a_closed_one_looks_no_more(cache):
    shown = monitor(cache, interval=0.05)
    assert own_threads("arrowcache-monitor")
    shown.close()
    shown.close()
    assert not own_threads("arrowcache-monitor")
    before = shown.value
    publish(cache, 1)
    assert shown.value == before


def test_a_stopped_one_shows_what_it_saw_last(cache):
    with monitor(cache, interval=3600.0) as shown:
        publish(cache, 1)
        assert "stopped, " not in text_of(shown)
        assert "10 segments" in text_of(shown)
        shown.stop()
        assert not own_threads("arrowcache-monitor")
        assert "stopped, " in text_of(shown)
        assert "11 segments" in text_of(shown)
        assert shown.comm is not None  # the notebook still has it
        before = shown.value
        publish(cache, 1)
        shown.stop()
        assert shown.value == before
    assert shown.comm is None


def test_a_stopped_one_says_that_its_cache_is_gone(cache, tmp_path):
    with monitor(cache, interval=3600.0) as shown:
        cache.path.rename(tmp_path / "elsewhere")
        shown.stop()
        assert GONE in text_of(shown)
        assert "stopped, " in text_of(shown)


def test_a_cache_that_vanishes_and_comes_back_is_said(cache, tmp_path):
    with monitor(cache, interval=0.05) as shown:
        cache.path.rename(tmp_path / "elsewhere")
        wait_until(lambda: GONE in text_of(shown), "the error")
        assert "10 segments" in text_of(shown)
        (tmp_path / "elsewhere").rename(cache.path)
        wait_until(lambda: GONE not in text_of(shown), "it to go on")
        publish(cache, 1)
        wait_until(lambda: "11 segments" in text_of(shown), "what is new")


def test_what_cannot_be_shown_makes_no_widget(cache, tmp_path):
    gc.collect()
    with pytest.raises(FileNotFoundError):
        monitor(tmp_path / "missing")
    with pytest.raises(ValueError, match="interval"):
        monitor(cache, interval=0)
    assert not own_threads("arrowcache-monitor")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_it_fails_itself_it_says_so(cache, monkeypatch):
    with monitor(cache, interval=0.05) as shown:

        def fail(*_):
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(time, "strftime", fail)
        wait_until(lambda: "the monitor ended: a defect" in text_of(shown), "the error")


def test_what_another_process_is_called_is_no_markup(cache, monkeypatch):
    def read_bytes(path, original=Path.read_bytes):
        return b"<script>train</script>\0" if path.name == "cmdline" else original(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with ac.Loader(cache, 16) as loader:
        list(loader)
        shown = monitor(cache)
        shown.close()
        assert "<script>" not in shown.value
        assert "<script>train</script>" in html.unescape(shown.value)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "ctrl-c"])
def test_an_interpreter_ends_at_once_with_a_monitor_open(cache, how):
    code = """
        import sys, threading
        from arrowcache.explore.widget import monitor
        shown = monitor(sys.argv[1], interval=3600.0)
        print("ready", flush=True)
        if sys.argv[2] == "ctrl-c":
            threading.Event().wait()
    """
    with Script(code, cache.path, how, new_interpreter=True) as script:
        assert script.line() == "ready"
        if how == "ctrl-c":
            script.signal_group(signal.SIGINT)
        rc, errors = script.end(timeout=20)
    assert rc == (0 if how == "end" else -signal.SIGINT)
    assert ("KeyboardInterrupt" in errors) == (how == "ctrl-c")
