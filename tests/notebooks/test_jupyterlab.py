"""A notebook as its reader has it: in JupyterLab, in a browser, which tells what is on the screen.

A picture of the page is saved as `02-explore-a-cache.png`, beside JupyterLab's log, also where it failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab", reason="jupyterlab is not installed")
pytest.importorskip("selenium", reason="selenium is not installed")
pytest.importorskip("ipywidgets", reason="the extra 'explore' is not installed")

import nbformat
from laboratory import HOW_TO_GET_THEM, Laboratory, missing

if missing():
    pytest.skip(f"no {' and no '.join(missing())} here: {HOW_TO_GET_THEM}", allow_module_level=True)

pytestmark = pytest.mark.slow
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "02-explore-a-cache.ipynb"
RUN_SECONDS = 400.0  # for what takes 20 where nothing else is at work
PLOTS = ("values-code", "growth-code")

RECORD = """
window.seen = [];
new MutationObserver(() => {
  const monitor = document.querySelector(".arrowcache-monitor");
  const text = monitor?.innerText ?? "";
  const found = (pattern) => text.match(pattern)?.[1] ?? "";
  if (!text.includes(" segments, ") || text === window.seen.at(-1)?.text) return;
  const tables = Array.from(monitor.querySelectorAll("table"), (table) => table.innerText);
  window.seen.push({
    text,
    fill: found(/ segments, .* rows, (.*) of /),
    published: found(/published\\s+(.*B.s)/),
    line: monitor.querySelector("polyline")?.getAttribute("points") ?? "",
    leases: tables.find((table) => table.includes("leased")) ?? "",
    loaders: tables.find((table) => table.includes("bottleneck")) ?? "",
  });
}).observe(document.body, { subtree: true, childList: true });
"""
"""Notes each board that the monitor draws."""

PIXELS = """
return arguments[0].map((image) => {
  if (!image.complete || !image.naturalWidth) return null;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const pen = canvas.getContext("2d");
  pen.drawImage(image, 0, 0);
  const pixels = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const box = image.getBoundingClientRect();
  return { colors: new Set(pixels).size, width: box.width, height: box.height };
});
"""
"""Of each image how many colors it has and how large it is on the screen; null: it is not decoded yet."""


def pictures(laboratory: Laboratory, cell: str) -> list[dict[str, Any]]:
    """What is seen of the images in a cell's output."""
    found: list[Any] = []

    def are_there() -> bool:
        found[:] = laboratory.browser.execute_script(PIXELS, laboratory.output(cell, "img"))
        return bool(found) and None not in found

    laboratory.wait_until(are_there, f"images in the output of {cell}")
    return found


def broken(path: Path) -> Path:
    """A notebook whose second cell fails."""
    metadata = nbformat.read(NOTEBOOK, as_version=4).metadata
    cells = [nbformat.v4.new_code_cell(source) for source in ("1", "1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


@pytest.mark.timeout(900)
def test_in_jupyterlab_the_monitor_moves_and_the_gallery_shows_pictures(tmp_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with Laboratory(folder, NOTEBOOK, broken(tmp_path / "broken.ipynb"), height=10_500) as laboratory:
        laboratory.open("broken.ipynb")
        laboratory.run_all()
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            laboratory.wait_until(laboratory.has_run, "a cell to fail")

        laboratory.open(NOTEBOOK.name)
        laboratory.browser.execute_script(RECORD)
        laboratory.run_all()
        try:
            laboratory.wait_until(laboratory.has_run, "all cells", RUN_SECONDS)
            laboratory.wait_until(
                lambda: "stopped, " in laboratory.texts(".arrowcache-monitor")[0], "its end"
            )
        finally:
            laboratory.browser.save_screenshot(str(folder / f"{NOTEBOOK.stem}.png"))
        boards = laboratory.browser.execute_script("return window.seen")
        galaxies = pictures(laboratory, "gallery-code")
        plots = [found for cell in PLOTS for found in pictures(laboratory, cell)]
        lines = laboratory.output("spectra-code", ".jp-RenderedHTMLCommon img")
        assert [line.size["width"] > 32 for line in lines] == 6 * [True]
        at_work = laboratory.processes()

    assert {"chromedriver", "chromium"} < {process.partition(" ")[2] for process in at_work}
    assert laboratory.processes() == []

    for name in ("fill", "published", "line"):
        assert len({board[name] for board in boards}) >= 3, (name, boards)
    for name, nothing in (("leases", "Leases: none"), ("loaders", "Loaders: none")):
        assert any("train.py" in board[name] for board in boards), (name, boards)
        assert nothing in boards[-1]["text"]

    assert 3 <= len(galaxies) <= 18  # up to six of a kind: at that moment one may have fewer
    assert len(plots) == len(PLOTS)
    for picture in galaxies + plots:
        assert picture["colors"] > 16, picture
        assert min(picture["width"], picture["height"]) > 32, picture
