"""The live view in a terminal, and what it shows: as text, of a real cache."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import signal
import sys
import threading
from typing import Any

import pytest
from helpers import make_cache, publish, wait_until
from processes import Script

pytest.importorskip("rich", reason="the extra 'explore' is not installed")

from rich.console import Console

import arrowcache as ac
from arrowcache.errors import sentence_of
from arrowcache.explore import live_view
from arrowcache.explore.live_view import Board, watch
from arrowcache.storage.counters import ReadCounts, SamplerPage


def look(board: Board) -> str:
    board.look()
    return board.card().as_text()


def test_it_shows_what_samplers_have_drawn_and_not_published(cache):
    board, page = Board(cache), SamplerPage.open(cache.path, "default.0", 0)
    assert "Samplers at work: none" in look(board)
    page.begin(3, 512)
    assert re.search(r" default\.0\.3 +0 of 512  ", look(board))
    page.count(310, 512)
    page.wait()
    assert re.search(r" default\.0\.3 +310 of 512  .* ago +to publish  ", look(board))
    assert "1 sampler (310 rows drawn)" in board.line()
    page.skip()
    assert re.search(r" default\.0\.3 +310 of 512, 1 left out  ", look(board))


def test_it_shows_fill_rates_leases_and_loaders(cache):
    board = Board(cache)
    look(board)
    with ac.Loader(cache, 16) as loader, cache.snapshot(lambda segment: segment.seq >= 8):
        list(loader)
        publish(cache, 2)
        text = look(board)
    assert str(cache.path) in text
    assert "12 segments, 192 rows" in text
    assert all(part in text for part in str(cache.stats().parts()[0]).split(", ")[:3])
    assert " leased " in text
    assert re.search(r"published +█  [1-9][\d.]* .*B/s\n", text)
    assert re.search(r"delivered +█  [1-9][\d.]* .*B/s\n", text)
    assert re.search(r"evicted +▁  0 B/s\n", text)
    assert re.search(rf"\n *{os.getpid()} +2  8 to 9 ", text)
    assert re.search(rf"\n *{os.getpid()} +1 +10 ", text)
    assert "Waiting writers: none" in text
    leases = len(re.findall(r"\n *\d+ +\d+  \d+ to 9 ", text))
    assert f"{leases} leases, 0 waiting, 1 loader, 0 samplers" in board.line()


def test_a_line_tells_of_the_reads_of_samplers_what_the_card_does(cache):
    board, page = Board(cache), SamplerPage.open(cache.path, "default.0", 0)
    page.begin(3, 512)
    look(board)
    assert "reads of" not in board.line()
    reads = ReadCounts(7, 0.25, 1.5, retries=3, drawing_seconds=1e4, reading_seconds=9e3, done=900)
    page.show_reads(reads)
    assert reads.text in look(board)
    assert reads.advice in look(board)
    assert f"1 sampler; reads of {os.getpid()}: {reads.text}; samplers: {reads.advice}" in board.line()


def test_the_first_look_knows_no_rate(cache):
    board = Board(cache)
    text = look(board)
    assert text.count("unknown") == 3
    assert "B/s" not in text + board.line()


@pytest.mark.parametrize("width", [100, 80, 40, 20])
def test_a_view_of_any_width_shows_all_of_a_lease_and_a_loader(cache, width):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    with ac.Loader(cache, 16) as loader, cache.snapshot(lambda segment: segment.seq >= 8):
        list(loader)
        watch(cache, once=True, console=console)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    together = "".join(text.split())
    assert f"{os.getpid()}28to9" in together
    assert f"{os.getpid()}110" in together


def test_a_small_window_shows_all_loaders_and_says_that_leases_are_cut(cache):
    screen = Screen(1)
    console = Console(file=screen, width=80, height=24, force_terminal=True, color_system=None)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            list(stack.enter_context(ac.Loader(cache, 16)))
        for seq in range(8):
            stack.enter_context(cache.snapshot(lambda segment, seq=seq: segment.seq == seq))
        watch(cache, 0.05, console=console)
    lines = screen.getvalue().partition("\x1b[2K")[0].splitlines()  # before it is drawn over
    assert len(lines) == 24
    assert lines[-1].strip() == "..."
    assert len([line for line in lines if re.match(rf" *{os.getpid()} +1 +10 ", line)]) == 4
    assert any(" leased " in line for line in lines)


def test_looking_once_fits_the_window_too(cache):
    file = io.StringIO()
    with cache.snapshot():
        watch(cache, once=True, console=Console(file=file, width=40, force_terminal=True, color_system=None))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 40
    assert f"{os.getpid()}100to9" in "".join(text.split())


def test_one_of_something_is_not_said_as_several(tmp_path):
    cache = make_cache(tmp_path / "cache", capacity="64MiB")
    publish(cache, 1)
    board = Board(cache)
    with cache.snapshot():
        text = look(board)
    assert "1 segment, 16 rows" in text
    assert re.search(rf"\n *{os.getpid()} +1  0 ", text)
    publish(cache, 70)
    assert "71 segments, 1,136 rows" in look(board)


def test_before_the_first_look_there_is_only_a_path(cache):
    title, clock = Board(cache).card().as_text().splitlines()
    assert title == f"Cache {cache.path}"
    assert clock.count(":") == 2


def test_what_others_call_theirs_is_no_markup(tmp_path):
    path = tmp_path / "[red]cache[" / "red]"
    path.parent.mkdir()
    make_cache(path)
    file = io.StringIO()
    watch(path, once=True, console=Console(file=file, width=200, force_terminal=True))
    assert "[red]cache[/red]" in file.getvalue()


def test_a_cache_that_vanishes_is_a_sentence_and_it_goes_on_when_it_is_back(cache, tmp_path):
    board = Board(cache)
    look(board)
    cache.path.rename(tmp_path / "elsewhere")
    for _ in range(2):
        lines = look(board).splitlines()
        error = f"{cache.path}: No such file or directory"
        assert error in lines
        assert "10 segments" in lines[3], "what was seen last is still shown"
        assert error in board.line()
    (tmp_path / "elsewhere").rename(cache.path)
    assert error not in look(board)
    assert len(board.history) == 2


@pytest.mark.parametrize("was_seen_gone", [False, True])
def test_another_cache_in_its_place_is_looked_at_afresh(cache, tmp_path, was_seen_gone):
    """One whose segments have the same names, but not the same bytes."""
    board = Board(cache)
    look(board)
    if was_seen_gone:  # the same folder
        for path in cache.path.iterdir():
            path.rename(tmp_path / path.name)
        look(board)
        assert board.error
    else:
        cache.path.rename(tmp_path / "elsewhere")
    other = make_cache(cache.path, ac.Schema({"id": ac.Tensor("int64")}))
    for _ in range(10):
        with other.writer() as writer:
            writer.extend(id=range(16))
    text = look(board)
    assert all(part in text for part in str(other.stats().parts()[0]).split(", "))


def test_an_error_is_one_line():
    assert sentence_of(ValueError("a\n  b")) == "a b"
    assert sentence_of(FileNotFoundError(2, "no cache here", "/x")) == "/x: no cache here"
    assert sentence_of(OSError(5, "broken")) == "broken"
    assert sentence_of(KeyError()) == "KeyError"


@pytest.mark.parametrize("interval", [0, 0.01, -1, float("inf"), float("nan"), 1e300])
def test_an_interval_that_is_none_is_refused(cache, interval):
    with pytest.raises(ValueError, match=r"interval=.* must be seconds, 0\.05 at least"):
        watch(cache, interval)


def test_looking_once_prints_a_line_or_in_a_terminal_all(cache):
    for is_terminal in (False, True):
        file = io.StringIO()
        watch(cache, once=True, console=Console(file=file, width=100, force_terminal=is_terminal))
        lines = file.getvalue().splitlines()
        assert (len(lines) > 3) == is_terminal
        assert "10 segments, 160 rows" in file.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_gets_a_line_at_once(cache, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    watch(cache, once=True, console=Console(file=file, width=20, force_terminal=True))
    assert file.getvalue().count("\n") == 1
    assert "10 segments, 160 rows" in file.getvalue()


def test_no_cache_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        watch(tmp_path / "missing", once=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [False, True])
def test_ctrl_c_ends_it_well(cache, is_terminal):
    code = """
        import sys
        from rich.console import Console
        from arrowcache.explore.live_view import watch
        watch(sys.argv[1], 0.05, console=Console(width=100, force_terminal=sys.argv[2] == "True"))
    """
    with Script(code, cache.path, is_terminal) as script:
        for _ in range(3):
            while "160 rows" not in script.line():
                pass
        script.signal_group(signal.SIGINT)
        assert script.end() == (0, "")
    wait_until(lambda: cache.stats().leased_bytes == 0, "nothing to be leased")


class Screen(io.StringIO):
    """A terminal in which Ctrl-C is pressed as it shows a look, the first unless some are to be before."""

    is_over = False

    def __init__(self, before: int = 0) -> None:
        super().__init__()
        self._before = before

    def write(self, text: str) -> int:
        if "160 rows" in text and not self.is_over:
            self._before -= 1
            if self._before < 0:
                self.is_over = True
                raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_at_the_first_look_leaves_the_cursor_visible(cache):
    screen = Screen()
    watch(cache, console=Console(file=screen, width=100, force_terminal=True))
    assert screen.is_over
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1


class Pressed:
    """Ctrl-C at the n-th step of a watch, or of a lock of the standard library, from its second look on."""

    def __init__(self, number: int) -> None:
        self._left, self.looks, self._is_over = number, 0, False

    def trace(self, frame: Any, event: str, argument: object) -> Any:
        code = frame.f_code
        if code is live_view.look.__code__:
            self.looks += 1
        if code is not watch.__code__ and code.co_filename != threading.__file__:
            return None
        if self.looks >= 2 and not self._is_over:
            self._left -= 1
            if self._left < 0:
                self._is_over = True
                raise KeyboardInterrupt
        return self.trace


@pytest.mark.parametrize("is_terminal", [False, True])
def test_ctrl_c_at_any_step_of_its_wait_ends_it_well(cache, is_terminal):
    """Also where the standard library has just let go of a lock, which was a RuntimeError."""
    for number in itertools.count():
        pressed = Pressed(number)
        console = Console(file=io.StringIO(), width=100, force_terminal=is_terminal)
        before = sys.gettrace()  # such as a measurement of coverage
        sys.settrace(pressed.trace)
        try:
            watch(cache, 0.05, console=console)
        finally:
            sys.settrace(before)
        if pressed.looks > 2:
            break
    assert number > 1
