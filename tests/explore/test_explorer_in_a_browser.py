"""The explorer as its user has it, by clicks: brush, see counts fall, open a row, exclude it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

pytest.importorskip("selenium", reason="selenium is not installed")
pytest.importorskip("mosaic_widget", reason="the extra 'explore' is not installed")

from helpers import wait_until
from laboratory import HOW_TO_GET_THEM, missing, start_browser
from processes import Script
from screen import Screen

if missing():
    pytest.skip(f"no {' and no '.join(missing())} here: {HOW_TO_GET_THEM}", allow_module_level=True)

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore.serving import Server
from benchmarks.explorer import ROWS
from benchmarks.explorer import fill as fill_numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCHEMA = ac.Schema(
    {
        "x": ac.Tensor("float32"),
        "label": ac.Tensor("int64"),
        "image": ac.Tensor("uint8", (16, 16, 3)),
        "volume": ac.Tensor("float32", (6, 8, 9)),
        "text": ac.String(),
    }
)


SAMPLER = """
    import sys, time
    import numpy as np
    import arrowcache as ac
    rng = np.random.default_rng(0)
    with ac.Cache.open(sys.argv[1]).writer() as writer:
        while True:
            image = rng.integers(0, 256, (25, 16, 16, 3)).astype(np.uint8)
            writer.extend(x=rng.random(25, "float32"), label=rng.integers(0, 4, 25), image=image)
            time.sleep(0.02)  # the source is far away
"""
TRAINING = """
    import sys
    import arrowcache as ac
    with ac.Loader(sys.argv[1], 32) as loader:
        for batch in loader.repeat():
            pass
"""


def severe(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def trained_on(cache):
    """The numbers of the rows of an epoch, which begins now."""
    with ac.Loader(cache, 1, columns=["x"]) as loader:
        return {int(batch["x"][0]) for batch in loader}


def fill(cache, start, stop):
    rng = np.random.default_rng(0)
    with cache.writer() as writer:
        for number in range(start, stop):
            image = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
            volume = rng.random((6, 8, 9)).astype(np.float32)
            text = f"<b>row</b> {number}"
            writer.append(x=number, label=number % 4, image=image, volume=volume, text=text)


@contextlib.contextmanager
def serving(cache):
    with contextlib.closing(explore.open(cache)) as widget, Server(widget, "a cache") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield widget, server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served(tmp_path):
    with ac.Cache.create(tmp_path / "shown", SCHEMA, "16MiB", "256KiB", 50) as cache:
        fill(cache, 0, 200)
        with serving(cache) as (widget, server):
            yield cache, widget, server


@pytest.fixture
def browser(tmp_path_factory):
    with start_browser(tmp_path_factory.mktemp("b"), height=2400) as browser:
        yield browser


def test_brush_open_exclude(served, browser, tmp_path):
    cache, widget, server = served
    browser.get(server.url)
    screen = Screen(browser)

    def ids():
        with server.lock:  # the browser asks for what is new meanwhile
            return widget.ids.tolist()

    try:
        assert screen.text(".count") == "200 of 200 rows"
        assert len(screen.all(".table tbody tr img")) == 16  # an image and a volume each
        assert screen.all(".bar .exclude:disabled")  # nothing is brushed

        before = screen.bars("label")
        screen.drag(".charts .plot", -60, 40)
        wait_until(lambda: screen.bars("label") < 0.8 * before, "the other chart's bars to fall")
        wait_until(lambda: not screen.text(".count").startswith("200 "), "the count to fall")
        few = len(ids())
        assert screen.text(".count") == f"{few} of 200 rows"
        frame = explore.rows(cache, ids())
        assert explore.sql(cache, widget.sql)["x"].tolist() == frame["x"].tolist()
        asked, taken, query = screen.text(".code").splitlines()
        assert query == widget.sql
        there = {"cache": cache, "explore": explore, "Loader": ac.Loader}  # of who trains
        exec(f"{asked}\nwith {taken} as loader: loader.steps", there)
        assert there["ids"].to_numpy().tolist() == ids()

        screen.click('.charts .plot:nth-child(2) g[fill="#2f7fc1"] rect')
        wait_until(lambda: not screen.text(".count").startswith(f"{few} "), "the count to fall")
        fewest = len(ids())
        assert len(set(explore.rows(cache, ids())["label"])) == 1

        bars = screen.bars("x"), screen.bars("label")
        fill(cache, 200, 250)  # and the brushes stay
        wait_until(lambda: screen.text(".count") == f"{fewest} of 250 rows", "what was published")
        wait_until(lambda: bars != (screen.bars("x"), screen.bars("label")), "new charts")
        assert screen.bars("label") < 0.6 * screen.bars("label", "#8c8c8c")

        wait_until(lambda: len(screen.all(".table tbody tr")) == 8, "the rows")
        screen.click(".table tbody tr:nth-child(2)")
        wait_until(screen.has(".detail", "Row"), "the row")
        one = ids()[1]
        assert f"Row {one[0]}:{one[1]}" in screen.text(".detail")
        number = int(explore.rows(cache, [one])["x"][0])
        assert f"<b>row</b> {number}" in screen.text(".detail pre")

        slice_of = "return document.querySelector('[data-column=volume] img').src"
        first = browser.execute_script(slice_of)
        screen.drag(".detail input[type=range]", 0, 60)
        wait_until(lambda: browser.execute_script(slice_of) != first, "another slice")

        wide = "return document.querySelector('[data-column=image] img').width"
        fitted = browser.execute_script(wide)
        screen.click(".detail .larger")
        assert browser.execute_script(wide) == 2 * fitted
        screen.click(".detail .smaller")
        screen.click(".detail .smaller")
        assert browser.execute_script(wide) == fitted

        screen.click(".detail .exclude")
        wait_until(screen.has(".says", "1 row excluded"), "what was done")
        assert trained_on(cache) == {*range(250)} - {number}
        assert cache.stats().leased_bytes == 0
        assert severe(browser) == []
    finally:
        browser.save_screenshot(str(tmp_path / "explorer.png"))


def test_the_commands_file_leads_a_browser_to_the_page(tmp_path, browser):
    with ac.Cache.create(tmp_path / "shown", SCHEMA, "16MiB", "256KiB", 50) as cache:
        fill(cache, 0, 20)
    given, starter = tmp_path / "given", tmp_path / "starter"
    starter.write_text(f'#!/bin/sh\necho "$1" > {given}.part && mv {given}.part {given}\n')
    starter.chmod(0o755)
    command = [sys.executable, "-m", "arrowcache", "explore", str(cache.path)]
    ours = os.environ | {"BROWSER": str(starter)}
    with subprocess.Popen(command, env=ours, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(given.exists, "the command to start a browser")
            browser.get(given.read_text().strip())
            wait_until(lambda: Screen(browser).text(".count") == "20 of 20 rows", "the page")
            assert "token" not in browser.current_url
        finally:
            process.send_signal(signal.SIGINT)


def test_the_address_is_good_for_one_browser(served, browser):
    *_, server = served
    browser.get(server.url)
    screen = Screen(browser)
    browser.refresh()  # by its cookie
    wait_until(lambda: screen.text(".count") == "200 of 200 rows", "the page again")
    browser.delete_all_cookies()
    browser.get(server.url)
    assert "used already" in screen.text("")


def test_of_two_pages_each_shows_and_excludes_what_it_has_brushed(served, browser):
    cache, _, server = served
    browser.get(server.url)
    first, screen = browser.current_window_handle, Screen(browser)
    screen.click('.charts .plot:nth-child(2) g[fill="#2f7fc1"] rect')
    wait_until(screen.has(".count", "50 of 200"), "the count to fall")
    browser.switch_to.new_window("window")
    browser.get(server.url.partition("?")[0])
    other = Screen(browser)
    wait_until(other.has(".count", "200 of 200"), "all rows, as nothing is brushed here")
    browser.switch_to.window(first)
    screen.click(".bar .exclude")
    wait_until(screen.has(".says", "50 rows excluded"), "what was done")
    assert len(set(explore.sql(cache, "select label from cache where _excluded")["label"])) == 1
    browser.refresh()
    wait_until(screen.has(".count", "200 of 200"), "no brush after a reload")
    assert screen.all(".bar .exclude:disabled")
    assert severe(browser) == []


def test_an_empty_caches_charts_are_drawn_for_what_comes(browser, tmp_path):
    schema = ac.Schema({"n": ac.Tensor("int64"), "text": ac.String(), "label": ac.Tensor("int64")})
    with (
        ac.Cache.create(tmp_path / "young", schema, "16MiB", "256KiB") as cache,
        serving(cache) as (_, server),
    ):
        browser.get(server.url)
        screen = Screen(browser, ())
        numbers = np.arange(5000)
        with cache.writer() as writer:
            writer.extend(n=numbers, text=[*map(str, numbers)], label=numbers % 4)
        wait_until(lambda: len(screen.all(".charts .plot")) == 2, "charts of two columns")
        wait_until(screen.has(".count", "5,000 of 5,000"), "the rows")
        assert len(screen.all('[data-column="n"] rect')) < 100
        screen.click('[data-column="label"] g[fill="#2f7fc1"] rect')
        wait_until(screen.has(".count", "1,250 of 5,000"), "the count to fall")
        assert len(screen.all(".charts")) == 1
        assert severe(browser) == []


def test_brushes_while_the_cache_rolls_and_somebody_trains(browser, tmp_path):
    schema = ac.Schema({name: SCHEMA[name] for name in ("x", "label", "image")})
    with ac.Cache.create(tmp_path / "rolling", schema, "2MiB", "64KiB", 25) as cache:

        def done():
            """How many segments were published and evicted, and how many batches trained on."""
            stats, loaders = cache.stats(), explore.observe(cache).loaders
            return stats.next_seq, stats.oldest_seq or 0, sum(loader.batches for loader in loaders)

        with Script(SAMPLER, cache.path), Script(TRAINING, cache.path):
            wait_until(lambda: min(done()) > 1, "a cache that rolls, and training")
            with serving(cache) as (widget, server):
                browser.get(server.url)
                screen = Screen(browser)
                for left, right in ((-60, 40), (-90, 0), (20, 60)):
                    before, looks = done(), widget.board["looks"]
                    screen.drag(".charts .plot", left, right)
                    wait_until(lambda: widget.board["looks"] >= looks + 3, "looks")  # noqa: B023  # at once
                    wait_until(lambda: widget.board["is_brushed"], "the brush")
                    with server.lock:  # between two looks
                        board, ids = widget.board, widget.ids
                        copied = widget.con.execute(f"{widget.sql} order by _seq, _row").fetchdf()
                        leases = explore.observe(cache).leases
                    assert 0 < len(ids) == len(copied) == board["count"] < board["total"]
                    assert copied[["_seq", "_row"]].to_numpy().tolist() == ids.tolist()
                    frame = explore.rows(cache, ids, missing="skip")
                    both = frame.merge(copied, on=["_seq", "_row"])
                    assert (len(both), both["x_x"].tolist()) == (len(frame), both["x_y"].tolist())
                    assert os.getpid() not in {lease.pid for lease in leases}
                    wait_until(
                        lambda: screen.text(".count") == "{count:,} of {total:,} rows".format(**widget.board),
                        "its count",
                    )
                    wait_until(lambda: all(np.greater(done(), before)), "all three to go on")  # noqa: B023
        assert severe(browser) == []


def test_of_ten_million_rows_it_brushes_and_acts_on_one(browser, tmp_path):
    fill_numbers(tmp_path / "large")
    with ac.Cache.open(tmp_path / "large") as cache, serving(cache) as (widget, server):
        browser.get(server.url)
        screen = Screen(browser, ("x", "y", "label"))
        assert screen.text(".count") == f"{ROWS:,} of {ROWS:,} rows"
        before = screen.bars("y")
        screen.drag(".charts .plot", 10, 60)
        wait_until(lambda: screen.bars("y") < 0.8 * before, "the other chart's bars to fall")
        wait_until(lambda: not screen.text(".count").startswith(f"{ROWS:,} of"), "the count to fall")
        with server.lock:
            (counted,) = explore.sql(cache, widget.sql.replace("*", "count(*)")).iloc[0]
        assert screen.text(".count") == f"{counted:,} of {ROWS:,} rows"
        screen.click(".table tbody tr:nth-child(3)")
        wait_until(screen.has(".detail", "Row"), "the row")
        screen.all(".detail input")[0].send_keys("far out")
        screen.click(".detail .tag")
        wait_until(screen.has(".says", "1 row tagged 'far out'"), "the tag")
        screen.click(".detail .exclude")
        wait_until(screen.has(".says", "1 row excluded"), "the exclusion")
        noted = explore.sql(cache, "select _seq, _row from cache where _excluded and _tags = ['far out']")
        assert noted.to_numpy().tolist() == [widget.detail["id"]]
        assert severe(browser) == []
