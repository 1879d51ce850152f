"""The live view in a notebook, without a browser: its one trait moves, and its thread ends."""

from __future__ import annotations

import gc
import json
import signal
import threading
from pathlib import Path

import pytest
from helpers import publish, wait_until
from processes import Script

pytest.importorskip("anywidget", reason="the extra 'explore' is not installed")

from arrowcache.explore import widget as widget_module
from arrowcache.explore.widget import Monitor, monitor


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "arrowcache-monitor"]


def test_it_shows_the_cache_at_once_and_then_what_becomes_of_it(cache):
    with monitor(cache, interval=0.05) as shown:
        assert "10 segments" in shown.board["fill"]["text"]
        assert shown.board["looks"] >= 1
        seen = []
        shown.observe(lambda change: seen.append(change["new"]["looks"]), "board")
        publish(cache, 3)
        wait_until(lambda: "13 segments" in shown.board["fill"]["text"], "the board to move")
        wait_until(lambda: max(shown.board["rates"][0]["values"]) > 0, "what was published")
        assert seen == sorted(seen)
        json.dumps(shown.get_state()["board"])
        assert len(shown.history) >= 2
        assert cache.stats().leased_bytes == 0


def test_a_closed_one_looks_no_more(cache):
    shown = monitor(cache, interval=0.05)
    assert threads()
    shown.close()
    shown.close()
    assert not threads()
    board = shown.board
    publish(cache, 1)
    assert shown.board == board


def test_a_stopped_one_shows_what_it_saw_last(cache):
    with monitor(cache, interval=3600.0) as shown:
        publish(cache, 1)
        assert shown.board["is_live"]
        assert "10 segments" in shown.board["fill"]["text"]
        shown.stop()
        assert not threads()
        assert not shown.board["is_live"]
        assert "11 segments" in shown.board["fill"]["text"]
        assert shown.comm is not None  # the notebook still has it
        board = shown.board
        publish(cache, 1)
        shown.stop()
        assert shown.board == board
    assert shown.comm is None


def test_a_stopped_one_says_that_its_cache_is_gone(cache, tmp_path):
    with monitor(cache, interval=3600.0) as shown:
        cache.path.rename(tmp_path / "elsewhere")
        shown.stop()
        assert str(cache.path) in shown.board["error"]
        assert not shown.board["is_live"]


def test_a_cache_that_vanishes_and_comes_back_is_said(cache, tmp_path):
    with monitor(cache, interval=0.05) as shown:
        cache.path.rename(tmp_path / "elsewhere")
        wait_until(lambda: shown.board["error"], "the error")
        assert str(cache.path) in shown.board["error"]
        assert "10 segments" in shown.board["fill"]["text"]
        (tmp_path / "elsewhere").rename(cache.path)
        wait_until(lambda: shown.board["error"] is None, "it to go on")
        publish(cache, 1)
        wait_until(lambda: "11 segments" in shown.board["fill"]["text"], "what is new")


def test_what_cannot_be_shown_makes_no_widget(cache, tmp_path):
    gc.collect()
    with pytest.raises(FileNotFoundError):
        monitor(tmp_path / "missing")
    with pytest.raises(ValueError, match="interval"):
        monitor(cache, interval=0)
    assert not threads()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_it_fails_itself_it_says_so(cache, monkeypatch):
    with monitor(cache, interval=0.05) as shown:

        def fail(*_):
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(widget_module, "board_of", fail)
        wait_until(lambda: shown.board["error"], "the error")
        assert shown.board["error"] == "the monitor ended: a defect"
        assert not shown.board["is_live"]


def test_all_that_the_browser_draws_is_on_the_board(cache):
    """And as text: the script makes no markup of it."""
    script = Monitor._esm
    with monitor(cache) as shown:
        for name in shown.board:
            assert f"board.{name}" in script or f'["{name}", ' in script, name
    assert "innerHTML" not in script
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")
    assert Path(widget_module.__file__).with_name("widget.js").read_text() == script


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
    with Script(code, cache.path, how) as script:
        assert script.line() == "ready"
        if how == "ctrl-c":
            script.signal_group(signal.SIGINT)
        rc, errors = script.end(timeout=20)
    assert rc == (0 if how == "end" else -signal.SIGINT)
    assert ("KeyboardInterrupt" in errors) == (how == "ctrl-c")
