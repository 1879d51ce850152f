"""The check of the site that `make docs` builds finds each kind of fault."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "docs" / "builder" / "built.py"

pytestmark = pytest.mark.skipif(not CHECK.exists(), reason="this is not a checkout")


@pytest.fixture(scope="module")
def check():
    return runpy.run_path(str(CHECK))


def built(folder: Path, home: str, style: str = "") -> Path:
    (folder / "guides").mkdir()
    (folder / "index.html").write_text(f'<h1 id="top">Home</h1>{home}')
    (folder / "guides" / "first.html").write_text(
        '<h1 id="begin">First</h1><a href="../index.html#top">Home</a>'
    )
    (folder / "package.html").write_text('<h2 id="package.Cache">Cache</h2><link href="style.css">')
    (folder / "style.css").write_text(style)
    return folder


@pytest.mark.parametrize(
    "home",
    [
        '<a href="guides/first.html#begin">First</a>',
        '<a href="#top">here</a><a href="">here</a><a href="/guides/first.html">First</a>',
        '<a href="https://example.org/">elsewhere</a><a href="mailto:a@example.org">a</a>',
        '<img src="data:image/png;base64,AAAA">',
    ],
)
def test_a_site_that_holds_together_has_no_faults(check, tmp_path, home):
    assert [*check["faults"](built(tmp_path, home), {"package": ["Cache"]})] == []


@pytest.mark.parametrize(
    ("home", "style", "fault"),
    [
        ('<a href="guides/second.html">', "", "leads nowhere: guides/second.html"),
        ('<a href="guides/first.html#end">', "", "leads nowhere: guides/first.html#end"),
        ('<a href="#end">', "", "leads nowhere: #end"),
        ('<img src="picture.png">', "", "leads nowhere: picture.png"),
        ('<script src="https://example.org/a.js">', "", "loads https://example.org/a.js"),
        ('<script src="//example.org/a.js">', "", "loads //example.org/a.js"),
        ('<link rel="stylesheet" href="https://example.org/a.css">', "", "loads https://example.org/a.css"),
        (
            "<style>a { background: url(https://example.org/a.png) }</style>",
            "",
            "loads https://example.org/a.png",
        ),
        ("", "@font-face { src: url('https://example.org/a.woff2') }", "loads https://example.org/a.woff2"),
        ("", '@import "//example.org/a.css";', "loads //example.org/a.css"),
    ],
)
def test_a_link_to_nowhere_and_a_file_from_the_network_are_faults(check, tmp_path, home, style, fault):
    (found,) = check["faults"](built(tmp_path, home, style), {"package": ["Cache"]})
    assert fault in found


def test_a_public_name_without_a_reference_is_a_fault(check, tmp_path):
    names = {"package": ["Cache", "Loader"], "another": ["Pool"]}
    found = [*check["faults"](built(tmp_path, ""), names)]
    assert found == ["package.Loader has no reference", "another.Pool has no reference"]


def test_every_public_name_is_asked_for(check):
    import arrowcache
    import arrowcache.explore

    names = check["public_names"]()
    assert {*names["arrowcache"], *names["arrowcache.errors"]} == {*arrowcache.__all__}
    assert names["arrowcache.explore"] == arrowcache.explore.__all__
    assert names.keys() >= {
        f"arrowcache.{name}" for name in ("jax", "ray", "sampling.sources", "tensorflow", "torch")
    }
