"""Where the package of an extra is not installed, what needs it says so, and how to install the extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

LACKING = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Absent())
{statement}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "statement", "extra"),
    [
        ("torch", "import arrowcache.torch", "torch"),
        ("tensorflow", "import arrowcache.tensorflow", "tensorflow"),
        ("jax", "import arrowcache.jax", "jax"),
        ("ray", "import arrowcache.ray", "ray"),
        ("torch", "import arrowcache.demo", "demo"),
        ("pandas", "from arrowcache.explore import head", "explore"),
    ],
)
def test_without_its_package_an_extra_is_asked_for_by_name(package, statement, extra):
    script = LACKING.format(package=package, statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), last
    assert f" needs {package}, which is not installed: pip install 'arrowcache[{extra}]'" in last
