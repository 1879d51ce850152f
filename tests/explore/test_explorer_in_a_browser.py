"""The explorer as its user has it, by clicks: brush, see counts fall, open a row, exclude it."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

pytest.importorskip("selenium", reason="selenium is not installed")
pytest.importorskip("mosaic_widget", reason="the extra 'explore' is not installed")

from helpers import wait_until
from laboratory import HOW_TO_GET_THEM, missing, start_browser
from screen import Screen

if missing():
    pytest.skip(f"no {' and no '.join(missing())} here: {HOW_TO_GET_THEM}", allow_module_level=True)

import arrowcache as ac
from arrowcache import explore
from arrowcache.explore.serving import Server

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


@pytest.fixture
def served(tmp_path):
    with ac.Cache.create(tmp_path / "shown", SCHEMA, "16MiB", "256KiB", 50) as cache:
        fill(cache, 0, 200)
        with contextlib.closing(explore.open(cache)) as widget, Server(widget, "a cache") as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield cache, widget, server
            server.shutdown()
            thread.join()


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
        screen.drag(".charts .plot svg", -60, 40)
        wait_until(lambda: screen.bars("label") < 0.8 * before, "the other chart's bars to fall")
        wait_until(lambda: not screen.text(".count").startswith("200 "), "the count to fall")
        few = len(ids())
        assert screen.text(".count") == f"{few} of 200 rows"
        frame = explore.rows(cache, ids())
        assert explore.sql(cache, widget.sql)["x"].tolist() == frame["x"].tolist()
        assert screen.text(".code").splitlines() == ["Loader(cache, 64, rows=explorer.ids)", widget.sql]

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
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        browser.save_screenshot(str(tmp_path / "explorer.png"))


def test_the_address_is_good_for_one_browser(served, browser):
    *_, server = served
    browser.get(server.url)
    screen = Screen(browser)
    browser.refresh()  # by its cookie
    wait_until(lambda: screen.text(".count") == "200 of 200 rows", "the page again")
    browser.delete_all_cookies()
    browser.get(server.url)
    assert "used already" in screen.text("")
