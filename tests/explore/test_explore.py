"""The package itself: what it exports, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_cache, publish

import arrowcache
from arrowcache import explore


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(arrowcache.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_loads_nothing_of_the_extra():
    script = (
        "import sys, arrowcache.explore as explore\n"
        "print(sorted({'pandas', 'duckdb', 'polars', 'matplotlib', 'tqdm'} & set(sys.modules)))\n"
        "print(set(explore.__all__) <= set(dir(explore)))\n"
    )
    assert run(script) == "[]\nTrue\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'haed'"):
        _ = explore.haed  # type: ignore[attr-defined]  # that is the point


@pytest.mark.slow
def test_a_missing_extra_says_what_to_install():
    script = (
        "import sys\n"
        "sys.modules['pandas'] = None\n"
        "try:\n"
        "    from arrowcache.explore import head\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    said = run(script)
    assert said == (
        "arrowcache.explore.head needs pandas, which is not installed: pip install 'arrowcache[explore]'\n"
    )


@pytest.mark.slow
def test_without_polars_all_but_to_polars_works(tmp_path):
    pytest.importorskip("pandas", reason="the extra 'explore' is not installed")
    with make_cache(tmp_path / "cache") as cache:
        publish(cache, segments=1)
    said = run(
        "import sys\n"
        "sys.modules['polars'] = None\n"
        "from arrowcache import explore\n"
        f"print(len(explore.to_pandas({str(tmp_path / 'cache')!r})))\n"
        "try:\n"
        f"    explore.to_polars({str(tmp_path / 'cache')!r})\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert said == (
        "16\narrowcache.explore.to_polars needs polars, which is not installed: pip install polars\n"
    )


@pytest.mark.parametrize("name", explore.__all__)
def test_every_name_is_there_and_documented(name):
    for extra in ("pandas", "duckdb", "sklearn"):
        pytest.importorskip(extra, reason="the extra 'explore' is not installed")
    assert getattr(explore, name).__doc__
    assert getattr(explore, name) is getattr(explore, name)
