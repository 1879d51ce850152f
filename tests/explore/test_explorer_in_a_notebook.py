"""The explorer in JupyterLab and in Notebook 7, by clicks, shown twice: what is excluded trains nobody."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("selenium", reason="selenium is not installed")
pytest.importorskip("mosaic_widget", reason="the extra 'explore' is not installed")

import nbformat
from helpers import wait_until
from laboratory import HOW_TO_GET_THEM, Laboratory, missing
from screen import Screen

if missing():
    pytest.skip(f"no {' and no '.join(missing())} here: {HOW_TO_GET_THEM}", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CELLS = {
    "made": """
import arrowcache as ac
from arrowcache import explore

image = ac.Tensor("uint8", (8, 8))
schema = ac.Schema({"x": ac.Tensor("float32"), "label": ac.Tensor("int64"), "image": image})
cache = ac.Cache.create("cache", schema, "4MiB", "64KiB", 25)
with cache.writer() as writer:
    for number in range(200):
        writer.append(x=number, label=number % 4, image=[[number] * 8] * 8)
explorer = explore.open(cache)
""",
    "first": "explorer",
    "second": "explorer",
    "trained": """
def numbers(**options):
    with ac.Loader(cache, 1, columns=["x"], **options) as loader:
        return sorted(int(batch["x"][0]) for batch in loader)

left_out = {*range(200)} - {*numbers()}
print(sorted(left_out), len(numbers(rows=explorer.ids)), len(explorer.ids), cache.stats().leased_bytes)
""",
    "closed": "explorer.close()",
}


@pytest.mark.parametrize("app", ["jupyterlab", "notebook"])
def test_brush_open_exclude_and_train_in_the_next_cell(app, tmp_path, tmp_path_factory):
    if importlib.util.find_spec(app) is None:
        pytest.skip(f"{app} is not installed")
    notebook = tmp_path / "explorer.ipynb"
    cells = [nbformat.v4.new_code_cell(source, id=name) for name, source in CELLS.items()]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), notebook)
    with Laboratory(tmp_path_factory.mktemp("lab"), notebook, height=5000, app=app) as laboratory:
        browser = laboratory.browser
        laboratory.open(notebook.name)
        views = []
        for name in ("made", "first", "second"):
            laboratory.run(name)
            for view in laboratory.output(name, ".arrowcache-explorer"):
                browser.execute_script("arguments[0].id = arguments[1]", view, name)
                views.append(Screen(browser, within=f"#{name}"))
        first, second = views

        try:
            before = first.bars("label"), second.bars("label")
            first.drag(".charts .plot", -60, 40)
            for view, area in zip(views, before, strict=True):
                wait_until(lambda: view.bars("label") < 0.8 * area, "bars to fall")  # noqa: B023  # at once
                wait_until(lambda: not view.text(".count").startswith("200 "), "a count to fall")  # noqa: B023
            brushed = first.text(".count")
            second.click('.charts [data-column="label"] g[fill="#2f7fc1"] rect')  # a brush more, in the other
            wait_until(lambda: first.text(".count") != brushed, "the count to fall")
            wait_until(lambda: first.text(".count") == second.text(".count"), "the same count")
            few = int(first.text(".count").split()[0])

            first.click(".table tbody tr:nth-child(2)")
            wait_until(first.has(".detail", "Row"), "the row")
            first.click(".detail .exclude")
            wait_until(first.has(".says", "1 row excluded"), "what was done")
            laboratory.run("trained")
            (line,) = [found.text for found in laboratory.output("trained", "pre")]
            left_out, of_brushed, in_brush, leased = line.replace("[", "").replace("]", "").split()
            assert int(left_out) % 4 == 0
            assert (int(of_brushed), int(in_brush), int(leased)) == (few - 1, few, 0)
            laboratory.run("closed")
            severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            assert [entry for entry in severe if "arrowcache" in entry["message"]] == [], severe
        finally:
            browser.save_screenshot(str(tmp_path / "notebook.png"))
