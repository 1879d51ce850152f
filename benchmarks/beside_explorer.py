"""What does somebody who brushes take from the samplers and the loader of the same machine?

Question: rows published and rows trained on a second while somebody brushes in the explorer, over the same
while nobody does. 0.95 is asked.
Method: a sampler at its full rate fills and rolls a cache of 512 MB, a loader at its full rate reads it, and
the explorer is served by a process of its own, whose niceness is that of `arrowcache explore`, 10, or 0, a
notebook's. A mouse's drag in Chromium is recorded once: what the browser sent to the kernel, and when. In
turns, SECONDS each: nobody; the record sent again at its own pace (one second of 10 moves in three); the
record sent without pause; the same two by mouse in Chromium, which takes its own share of the processors, as
does the driver. Figures are medians of ROUNDS.
Run: `python -m benchmarks.beside_explorer [FOLDER [NICENESS]]`, with nothing else at work; it needs chromium
and chromedriver.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import arrowcache as ac
from benchmarks.measure import machine

SECONDS, ROUNDS, BATCH, MOVES = 6.0, 5, 256, 10
SCHEMA = ac.Schema(
    {
        "x": ac.Tensor("float32"), "y": ac.Tensor("float32"), "label": ac.Tensor("int32"),
        "image": ac.Tensor("uint8", (32, 32, 3)),
    }
)  # fmt: skip


def sample(path: str, rows: Any) -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (BATCH, 32, 32, 3), dtype=np.uint8)
    label = rng.integers(0, 1000, BATCH, dtype=np.int32)
    with ac.Cache.open(path).writer() as writer:
        while True:
            x, y = rng.standard_normal((2, BATCH), dtype=np.float32)
            writer.extend(x=x, y=x / 2 + y, label=label, image=image)
            rows.value += BATCH


def train(path: str, rows: Any) -> None:
    with ac.Loader(path, BATCH) as loader:
        for _ in loader.repeat():
            rows.value += BATCH


def serve(path: str, told: Any, niceness: int) -> None:
    """Serve the explorer; tells where, and then each message of the browser and when it came."""
    from arrowcache import explore
    from arrowcache.explore.serving import Server

    class Recorder(Server):
        def answer(self, data: dict[str, Any]) -> bytes:
            told.put((time.monotonic(), data))
            return super().answer(data)

    os.nice(niceness)
    server = Recorder(explore.open(path), path)
    told.put(server.url)
    server.serve_forever()


class Replay:
    """Sends again what the page sent, by its cookie."""

    def __init__(self, url: str, cookie: dict[str, str]) -> None:
        host = url.removeprefix("http://").partition("/")[0]
        self.connection = http.client.HTTPConnection(host)
        self.headers = {"Origin": f"http://{host}", "Cookie": f"{cookie['name']}={cookie['value']}"}

    def send(self, data: dict[str, Any]) -> None:
        self.connection.request("POST", "/", json.dumps(data), self.headers)
        self.connection.getresponse().read()

    def play(self, record: list[tuple[float, dict[str, Any]]], pace: bool, over: threading.Event) -> None:
        while not over.is_set():
            started = time.monotonic()
            for at, data in record:
                if over.wait(max(0.0, started + at - time.monotonic()) if pace else 0):
                    return
                self.send(data)
            if pace:
                over.wait(max(0.0, started + 3 - time.monotonic()))


def drag(browser: Any, pace: bool, over: threading.Event) -> None:
    """Brush back and forth over the first chart; at a hand's pace one second in three."""
    from selenium.webdriver.common.action_chains import ActionChains

    (plot,) = browser.find_elements("css selector", ".charts .plot:nth-child(1)")
    ActionChains(browser, 0).move_to_element_with_offset(plot, -60, 0).click_and_hold().perform()
    for move in itertools.count(1):
        started = time.monotonic()
        ActionChains(browser, 0).move_by_offset(7 if move // MOVES % 2 == 0 else -7, 0).perform()
        rest = 2.0 if pace and move % MOVES == 0 else 0
        if over.wait(rest + max(0.0, started + 1 / MOVES - time.monotonic()) if pace else 0):
            break
    ActionChains(browser, 0).release().perform()


def rates(counted: list[Any], act: Callable[[threading.Event], None] | None) -> list[float]:
    """Rows a second of each counter, while something is done."""
    over = threading.Event()
    thread = threading.Thread(target=act, args=(over,)) if act else None
    if thread:
        thread.start()
    before, started = [counter.value for counter in counted], time.monotonic()
    time.sleep(SECONDS)
    seconds = time.monotonic() - started
    found = [(counter.value - one) / seconds for counter, one in zip(counted, before, strict=True)]
    over.set()
    if thread:
        thread.join()
    return found


@contextlib.contextmanager
def at_work(function: Callable[..., None], *arguments: object) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def main(folder: str | None = None, niceness: str = "10") -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from laboratory import start_browser

    print(machine())
    context = multiprocessing.get_context("spawn")
    counted = [context.Value("q", 0, lock=False) for _ in range(2)]
    told: Any = context.Queue()
    with contextlib.ExitStack() as stack:
        path = str(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) / "cache")
        with ac.Cache.create(path, SCHEMA, "512MB", "4MiB"):
            stack.enter_context(at_work(sample, path, counted[0]))
            while counted[0].value < 200_000:  # it rolls
                time.sleep(0.1)
        stack.enter_context(at_work(train, path, counted[1]))
        stack.enter_context(at_work(serve, path, told, int(niceness)))
        url, profile = told.get(), stack.enter_context(tempfile.TemporaryDirectory())
        browser = stack.enter_context(start_browser(Path(profile)))

        def show() -> None:
            browser.get(url.partition("?")[0] if browser.get_cookies() else url)
            time.sleep(3)

        show()
        while not told.empty():
            told.get()
        rates(counted, partial(drag, browser, True))
        came = [told.get() for _ in range(told.qsize())]
        record = [(at - came[0][0], data) for at, data in came if at < came[0][0] + 3]
        replay = Replay(url, browser.get_cookies()[0])
        ways: dict[str, Callable[[threading.Event], None] | None] = {
            "nobody": None,
            "kernel": partial(replay.play, record, True),
            "kernel, no pause": partial(replay.play, record, False),
            "browser": partial(drag, browser, True),
            "browser, no pause": partial(drag, browser, False),
        }
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, act in ways.items():
                if name.startswith("browser"):
                    show()
                else:
                    browser.get("about:blank")
                found[name].append(rates(counted, act))
                while not told.empty():
                    told.get()
        print(f"niceness {niceness}, {len(record)} messages in 3 s; rows a second, over those beside nobody:")
        alone = np.median(found["nobody"], axis=0)
        for name, those in found.items():
            sampled, trained = np.median(those, axis=0)
            ratios = np.median(np.divide(those, found["nobody"]), axis=0)
            print(
                f"{name:18} sampler {sampled:9,.0f} ({sampled / alone[0]:.2f}, in turns {ratios[0]:.2f})  "
                f"loader {trained:9,.0f} ({trained / alone[1]:.2f}, in turns {ratios[1]:.2f})"
            )


if __name__ == "__main__":
    main(*sys.argv[1:3])
