"""The explorer on 10,000,000 rows: when is it there, how fast does it follow a brush, what does it need?

Question: from `explore.open` to charts that are drawn; from a move of a brush to the other charts redrawn;
the kernel's private memory.
Method: two columns of float32 and one of int32 beside the ids. The explorer is served by a process of its
own, whose RssAnon is sampled every 20 ms; imports are not counted as time. Chromium shows it, without a
screen: the paint ends when each chart has bars, by the page's own clock; a move is a mouse's, sent by the
driver, and ends when both other charts have been redrawn. The first move over a chart counts: then DuckDB
counts ahead.
Run: `python -m benchmarks explorer [FOLDER]`, which needs chromium and chromedriver.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import arrowcache as ac
from benchmarks.harness import machine
from benchmarks.usage import peak, status_bytes

if TYPE_CHECKING:
    from typing import Self

ROWS, PART = 10_000_000, 500_000
OPENINGS, MOVES = 5, 40
PAINTED = """
const done = arguments[0];
const look = () => {
  const drawn = [...document.querySelectorAll(".charts svg")].filter((svg) =>
    svg.querySelector('g[fill="#2f7fc1"] rect'));
  if (drawn.length === 3) done(performance.now());
  else requestAnimationFrame(look);
};
look();
"""
WATCH = """
window.moves = [];
const charts = [...document.querySelectorAll(".charts .plot")];
let open = null;
addEventListener("mousemove", (event) => {
  const own = charts.findIndex((chart) => chart.contains(event.target));
  if (event.buttons && own >= 0) open = { from: performance.now(), left: new Set([0, 1, 2]) };
  open?.left.delete(own);
}, true);
charts.forEach((chart, i) => new MutationObserver(() => {
  if (!open?.left.delete(i) || open.left.size) return;
  window.moves.push(performance.now() - open.from);
  open = null;
}).observe(chart, { childList: true, subtree: true }));
"""


def fill(path: Path) -> None:
    schema = ac.Schema({"x": ac.Tensor("float32"), "y": ac.Tensor("float32"), "label": ac.Tensor("int32")})
    rng = np.random.default_rng(0)
    with ac.Cache.create(path, schema, "2GB", "16MiB") as cache, cache.writer() as writer:
        for _ in range(ROWS // PART):
            x = rng.standard_normal(PART, dtype=np.float32)
            y = x / 2 + rng.standard_normal(PART, dtype=np.float32)
            writer.extend(x=x, y=y, label=rng.integers(0, 1000, PART, dtype=np.int32))


def serve(path: str) -> None:
    """Say when it is loaded; at a line open and serve the cache, and say how long that took, and where."""
    from arrowcache import explore
    from arrowcache.explore.serving import Server

    cache, _ = ac.Cache.open(path), explore.open
    print("ready", flush=True)
    input()
    started = time.perf_counter()
    server = Server(explore.open(cache), path)
    print(time.perf_counter() - started, server.url, flush=True)
    server.serve_forever()


class Kernel:
    """The process that serves; a context manager."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.explorer", "--serve", str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def open(self) -> tuple[float, str]:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        seconds, url = self.line().split()
        return float(seconds), url

    def private_bytes(self) -> int:
        return status_bytes("RssAnon", self.process.pid)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def brush(browser: Any) -> list[float]:
    """Milliseconds of each move, on each chart, with the brushes before it in place."""
    from selenium.webdriver.common.action_chains import ActionChains

    browser.execute_script(WATCH)
    for chart in range(3):
        (svg,) = browser.find_elements("css selector", f".charts .plot:nth-child({chart + 1}) svg")
        ActionChains(browser, 0).move_to_element_with_offset(svg, -80, 0).click_and_hold().perform()
        for step in range(MOVES):
            known = len(browser.execute_script("return window.moves"))
            ActionChains(browser, 0).move_by_offset(7 if step < MOVES // 2 else -4, 0).perform()
            deadline = time.monotonic() + 5
            while len(browser.execute_script("return window.moves")) == known and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(0.03)  # a chart that is redrawn twice is not taken for the next move's
        ActionChains(browser, 0).release().perform()
    found: list[float] = browser.execute_script("return window.moves")
    return found


def main(folder: str | None = None) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from laboratory import start_browser

    print(machine())
    with tempfile.TemporaryDirectory(dir=folder) as name, tempfile.TemporaryDirectory() as profile:
        fill(Path(name) / "cache")
        with start_browser(Path(profile)) as browser:
            paints = []
            for _ in range(OPENINGS):
                with Kernel(Path(name) / "cache") as kernel, peak(kernel.private_bytes) as private:
                    assert kernel.line() == "ready"
                    loaded = kernel.private_bytes()
                    opened, url = kernel.open()
                    browser.get(url)
                    painted = browser.execute_async_script(PAINTED) / 1e3
                    paints.append(opened + painted)
                    print(
                        f"open {opened:.2f} s, page {painted:.2f} s; private memory {loaded / 2**20:.0f} MiB "
                        f"with all imports, {private.most / 2**20:.0f} MiB at most"
                    )
                    if len(paints) < OPENINGS:
                        continue
                    moves = np.array(brush(browser))
                    print(f"first paint: median {np.median(paints):.2f} s, at most {max(paints):.2f} s")
                    print(
                        f"{len(moves)} of {3 * MOVES} moves: median {np.median(moves):.0f} ms, "
                        f"95th percentile {np.percentile(moves, 95):.0f} ms, at most {moves.max():.0f} ms"
                    )
                    time.sleep(4)  # a look for new rows
                    print(f"private memory: {private.most / 2**20:.0f} MiB at most")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main(*sys.argv[1:2])
