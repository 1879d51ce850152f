"""What a data scientist does in the explorer, in a browser, each task in fewer than five actions."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

pytest.importorskip("selenium", reason="selenium is not installed")
pytest.importorskip("mosaic_widget", reason="the extra 'explore' is not installed")

import pyarrow.parquet as pq
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
    {"x": ac.Tensor("float32"), "label": ac.Tensor("int64"), "image": ac.Tensor("uint8", (16, 16, 3))}
)
ROWS, COPIES = 400, (3, 111, 222, 333)  # rows whose images are nearly the same
WORST = "loss, highest first"


class Hand(Screen):
    """A user's: it counts what it does."""

    actions = 0

    def click(self, selector):
        self.actions += 1
        super().click(selector)

    def drag(self, selector, start, stop, down=0):
        self.actions += 1
        super().drag(selector, start, stop, down)

    def choose(self, selector, text):
        self.actions += 1
        super().choose(selector, text)

    def ids(self):
        """The rows of the pictures, as they stand."""
        return [tuple(map(int, text.split()[0].split(":"))) for text in self.texts(".table figure")]

    def shows(self, ids):
        wait_until(lambda: self.ids()[: len(ids)] == [*ids], "the rows")

    def colored(self):
        """How many points of the map are blue."""
        return len(self.all('[data-column="map of image"] g[fill="#2f7fc1"] circle'))


@pytest.fixture
def cache(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 16, 16, 3)).astype(np.uint8)
    images[ROWS // 2 :] //= 8  # two clusters of a map
    for at, copy in enumerate(COPIES):
        images[copy] = images[COPIES[0]] ^ np.uint8(at)
    with ac.Cache.create(tmp_path / "shown", SCHEMA, "16MiB", "256KiB", 50) as cache:
        with cache.writer() as writer:
            writer.extend(x=np.arange(ROWS, dtype="f4"), label=np.arange(ROWS) % 4, image=images)
        yield cache


@pytest.fixture
def losses(cache):
    """Of each row, annotated."""
    losses = np.random.default_rng(1).random(ROWS)
    cache.annotate([divmod(row, 50) for row in range(ROWS)], loss=losses)
    return losses


@contextlib.contextmanager
def hand(cache, browser, columns=("x", "label")):
    with contextlib.closing(explore.open(cache)) as widget, Server(widget, "a cache") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            browser.get(server.url)
            found = Hand(browser, columns)
            yield found
            assert found.actions < 5
            assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
            assert found.text(".error") == ""
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def browser(tmp_path_factory):
    with start_browser(tmp_path_factory.mktemp("b"), height=2400) as browser:
        yield browser


def test_the_twenty_worst_by_loss(cache, losses, browser):
    with hand(cache, browser, ("x", "label", "loss")) as user:
        user.choose("select.order", WORST)
        user.choose("select.view", "pictures of image")
        user.shows([divmod(int(row), 50) for row in np.argsort(-losses)[:20]])
        assert f"{losses.max():.4g}" in user.texts(".table figure")[0]


def test_the_worst_of_what_is_brushed_are_tagged(cache, losses, browser):
    with hand(cache, browser, ("x", "label", "loss")) as user:
        user.choose("select.order", WORST)
        user.drag('.charts [data-column="loss"]', 100, 130)
        wait_until(lambda: not user.text(".count").startswith(f"{ROWS} "), "the count to fall")
        user.all(".bar input")[0].send_keys("hard")
        first = user.texts(".table tbody tr:first-child td")
        cache.annotate((int(first[0]), int(first[1])), loss=float(first[-1]) * 0.999)
        wait_until(lambda: user.texts(".table tbody tr:first-child td") != first, "the new loss")
        user.click(".bar .tag")  # what was typed is still there
        wait_until(user.has(".says", "tagged 'hard'"), "the tags")
    tagged = explore.sql(cache, "select loss, len(_tags) as n from cache")
    assert tagged["loss"][tagged["n"] == 1].min() >= tagged["loss"][tagged["n"] == 0].max() > 0.5


def test_near_duplicates_of_one_row(cache, browser):
    with hand(cache, browser) as user:
        user.click(".table tbody tr:nth-child(4)")
        wait_until(user.has(".detail", "Row 0:3"), "the row")
        user.click(".detail .similar")
        user.shows([divmod(row, 50) for row in COPIES])
        assert user.text(".count").startswith("24 of")
        user.click(".back")
        wait_until(user.has(".count", f"{ROWS} of {ROWS}"), "all rows again")


def test_two_tags_side_by_side(cache, browser):
    cache.tag([(0, row) for row in range(12)], "hard")
    cache.tag([(3, row) for row in range(10)], "easy")
    with hand(cache, browser, ("x", "label", "_tags")) as user:
        user.choose("select.beside", "side by side: _tags")
        user.choose("select.view", "pictures of image")
        wait_until(lambda: len(user.all(".table > div")) == 3, "the groups")
        wait_until(lambda: len(user.ids()) == 24, "their pictures")
        assert user.texts(".table > div > b") == ["none: 378 rows", "hard: 12 rows", "easy: 10 rows"]
        assert user.ids()[8:] == [*((0, row) for row in range(8)), *((3, row) for row in range(8))]


def test_the_good_rows_are_exported(cache, losses, browser, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache.exclude((0, 3))
    with hand(cache, browser, ("x", "label", "loss")) as user:
        user.drag('.charts [data-column="loss"]', -90, 0)
        wait_until(lambda: not user.text(".count").startswith(f"{ROWS} "), "the count to fall")
        brushed = explore.sql(cache, user.texts(".code code")[-1])
        user.click(".export")
        wait_until(user.has(".says", "shown-rows-1, without excluded rows"), "the files")
    exported = sorted(pq.read_table(tmp_path / "shown-rows-1")["x"].to_pylist())
    assert exported == sorted({*brushed["x"]} - {3})
    assert 0 < brushed["loss"].max() < 0.6


def test_a_map_marks_what_is_brushed_and_is_brushed_itself(cache, browser):
    with hand(cache, browser) as user:
        user.choose("select.map", "map of image")
        wait_until(lambda: user.colored() == ROWS, "the map")
        user.click('.charts [data-column="label"] g[fill="#2f7fc1"] rect')
        wait_until(lambda: user.colored() == ROWS // 4, "the map to follow")
        before = user.bars("x")
        user.drag('.charts [data-column="map of image"]', -120, 0, down=240)
        wait_until(lambda: not user.text(".count").startswith("100 of"), "the count to fall")
        count = int(user.text(".count").split()[0])
        assert 40 <= count <= 60
        wait_until(lambda: user.bars("x") < 0.8 * before, "the other chart to follow")
