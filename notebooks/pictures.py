"""Pictures: what README shows, taken of 02-explore-a-cache.ipynb as it runs in JupyterLab. `make pictures`.

They are written to notebooks/pictures/. Look at them before you commit them.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from helpers import wait_until
from laboratory import HOW_TO_GET_THEM, Laboratory, missing
from PIL import Image, ImageOps
from screen import Screen

NOTEBOOK = Path(__file__).with_name("02-explore-a-cache.ipynb")
FOLDER = Path(__file__).with_name("pictures")
SCALE = 2  # sharp on any screen
MARGIN = 16
COLORS = 128  # of a palette: all of them would look little better, and take three times the bytes
EPOCHS = 5  # of the training, before the monitor is taken
MAX_BYTES = 150_000  # of a picture


FREEZE_IF_BUSY = """
const monitor = document.querySelector(".arrowcache-monitor");
const text = monitor?.innerText ?? "";
const isBusy = /Waiting writers: none[^]*leased(?! )/.test(text) && !text.includes(" 0 B/s");
const isWellOnItsWay = Number(text.match(/loader\\s+\\d+\\s+(\\d+)/)?.[1]) > arguments[0];
if (isBusy && isWellOnItsWay) monitor.replaceWith(monitor.cloneNode(true));
return Boolean(isBusy && isWellOnItsWay);
"""
"""If samplers publish and evict beside a loader that has leases: keep the monitor as it is at this moment."""


def save(name: str, png: bytes) -> None:
    """Write a screenshot with a margin, as sharp as MAX_BYTES allows."""
    taken = ImageOps.expand(Image.open(io.BytesIO(png)).convert("RGB"), MARGIN, "white")
    path = FOLDER / f"{name}.png"
    for share in (1.0, 0.75, 0.6, 0.5):
        image = ImageOps.scale(taken, share)
        image = image.quantize(COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        palette = image.getpalette() or []
        white = 3 * image.getpixel((0, 0))  # which has become nearly white
        image.putpalette([*palette[:white], 255, 255, 255, *palette[white + 3 :]])
        image.save(path, optimize=True)
        if path.stat().st_size < MAX_BYTES:
            break
    print(f"{path.name}: {image.width} x {image.height} pixels, {path.stat().st_size:,} bytes")


def endless(folder: Path) -> Path:
    """The notebook without its last cells: its cache stays, for who clicks on a row."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if not cell.id.startswith("end")]
    nbformat.write(notebook, folder / NOTEBOOK.name)
    return folder / NOTEBOOK.name


def brush(browser: Any) -> None:
    """Brush the middle of the redshifts, choose the spirals, and open a row."""
    browser.execute_script("document.querySelector('.arrowcache-explorer').scrollIntoView()")
    screen = Screen(browser, ["redshift"], ".arrowcache-explorer")
    screen.drag('.charts [data-column="redshift"]', -50, 40)
    wait_until(lambda: screen.all(".exclude:enabled"), "the brush's rows")
    some = screen.text(".count")
    screen.click('.charts [data-column="kind"] g[fill="#2f7fc1"] rect:nth-of-type(3)')
    wait_until(lambda: screen.text(".count") != some and screen.all(".exclude:enabled"), "the bar's rows")
    screen.click(".table tbody tr:nth-child(3)")
    wait_until(screen.has(".detail", "Row"), "the row")


def main() -> int:
    if missing():
        print(f"no {' and no '.join(missing())} here: {HOW_TO_GET_THEM}", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="lab-") as folder,
        Laboratory(Path(folder), endless(Path(folder)), scale=SCALE, height=2600) as laboratory,
    ):
        laboratory.open(NOTEBOOK.name)
        laboratory.run_all()
        laboratory.wait_until(
            lambda: laboratory.browser.execute_script(FREEZE_IF_BUSY, EPOCHS), "a busy monitor"
        )
        (monitor,) = laboratory.output("monitor-code", ".arrowcache-monitor .widget-html-content > div")
        save("monitor", laboratory.screenshot(monitor))
        laboratory.wait_until(laboratory.has_run, "all cells")
        (gallery,) = laboratory.output("gallery-code", ".jp-RenderedHTMLCommon > div")
        save("gallery", laboratory.screenshot(gallery))
        (growth,) = laboratory.output("growth-code", "img")
        save("growth", laboratory.screenshot(growth))
        (explorer,) = laboratory.output("explorer-code", ".arrowcache-explorer")
        brush(laboratory.browser)
        save("explorer", laboratory.screenshot(explorer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
